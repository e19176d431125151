package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// consumers compares twenty consumers of one process with one.
func consumers(ctx context.Context, b *bench) error {
	ways := []struct {
		name             string
		consumers, conns int
		rounds           int // at once; 0 is the default
		events           int // of each
	}{
		{"1 consumer", 1, 4, 0, b.n},
		{"20 consumers", 20, 22, 0, max(1, b.n/4)},
		{"20 consumers, 4 rounds at once", 20, 22, 4, max(1, b.n/4)},
	}
	var even []float64
	err := inTurns(b.repeat, len(ways), func(i int) error {
		w := ways[i]
		return b.inDatabase(ctx, func(db *database) error {
			if err := db.load(ctx, w.events, 1); err != nil {
				return err
			}
			pool, err := db.open(ctx, w.conns, nil)
			if err != nil {
				return err
			}
			defer pool.Close()
			config := subscriber.RunnerConfig{MaxRounds: w.rounds}
			counters, took := make([]*counter, w.consumers), make([]float64, w.consumers)
			for c := range w.consumers {
				config.Consumers = append(config.Consumers, consumer(fmt.Sprintf("push-%d", c), subscriber.AllTopics, 500))
				counters[c] = newCounter(w.events)
			}
			var inUse sync.Mutex
			most := 0.0
			start, cpu := time.Now(), clientCPU()
			o, err := startOurs(ctx, pool, config, func(c int, msg *message.Message) ([]*message.Message, error) {
				n := counters[c].calls.Load() + 1
				if n%100 == 0 {
					inUse.Lock()
					most = max(most, float64(pool.Stat().AcquiredConns()))
					inUse.Unlock()
				}
				if n == int64(w.events) {
					took[c] = time.Since(start).Seconds()
				}
				counters[c].count()
				return job(msg), nil
			})
			if err != nil {
				return err
			}
			for _, c := range counters {
				if err := c.wait(ctx); err != nil {
					return errors.Join(err, o.stop())
				}
			}
			err = db.until(ctx, sqlPassed, w.events)
			elapsed, used := time.Since(start), clientCPU()-cpu
			if err := errors.Join(err, o.stop()); err != nil {
				return err
			}
			if err := db.checkJobsOfAll(ctx, w.events, w.consumers); err != nil {
				b.report.fail(w.name, err)
				return ctx.Err()
			}
			total := float64(w.events * w.consumers)
			b.report.add(w.name, "events/s in all", total/elapsed.Seconds())
			b.report.add(w.name+", client CPU", "µs/event", float64(used.Microseconds())/total)
			b.report.add(w.name+", connections of the pool in use", "at most", most)
			if w.consumers > 1 && w.rounds == 0 {
				even = append(even, slices.Min(took)/slices.Max(took))
			}
			b.say("%s: %s events/s", w.name, number(total/elapsed.Seconds()))
			return nil
		})
	})
	if err != nil {
		return err
	}
	b.report.ratio("total rate of 20 to 1", ways[1].name, ways[0].name, atLeast(1))
	b.report.ratio("total rate of 20, 4 rounds at once, to 1", ways[2].name, ways[0].name, atLeast(1))
	b.report.ratio("client CPU an event of 20 to 1", ways[1].name+", client CPU", ways[0].name+", client CPU", atMost(1.2))
	b.report.compare("rate of the slowest of 20 to the fastest", even, atLeast(0.5))
	return nil
}

// checkJobsOfAll returns what is wrong with the jobs of several consumers.
func (db *database) checkJobsOfAll(ctx context.Context, n, consumers int) error {
	var events, right int
	err := db.QueryRow(ctx, `select count(*), count(*) filter (where jobs = $1)
from (select count(*) as jobs from watermill_`+jobTopic+` group by uuid) j`, consumers).Scan(&events, &right)
	if err == nil && (events != n || right != n) {
		err = fmt.Errorf("%d events have jobs, %d of them one of each consumer; wanted %d", events, right, n)
	}
	return err
}
