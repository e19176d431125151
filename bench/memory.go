package main

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

const mebibyte = 1 << 20

// memory looks what a consumer keeps: in the long run, and of large events.
func memory(ctx context.Context, b *bench) error {
	n := min(b.either(100_000, 1_000_000), 20*b.n)
	var early, late []uint64
	err := b.inDatabase(ctx, func(db *database) error {
		b.say("load %d", n)
		if err := db.load(ctx, n, 1); err != nil {
			return err
		}
		return heapOf(ctx, db, consumer("push", subscriber.AllTopics, 500), n, func(i int64, live func() uint64) {
			switch {
			case i%int64(max(1, n/20)) != 0:
			case i <= int64(n/4):
				early = append(early, live())
			case i > int64(n/4*3):
				late = append(late, live())
			}
		})
	})
	if err != nil {
		return err
	}
	b.report.add("live heap in the first quarter of a long drain", "MiB", mean(early))
	b.report.add("live heap in the last quarter of a long drain", "MiB", mean(late))
	b.report.compare("live heap, last quarter to first, of "+grouped(int64(n))+" events", []float64{mean(late) / mean(early)}, atMost(1.1))

	const events, size, bound = 12, 20, 8 // MiB
	var most atomic.Uint64
	err = b.inDatabase(ctx, func(db *database) error {
		if _, err := db.Exec(ctx, `insert into event_log (seq, occurred_at, recorded_at, topic, uuid, payload, metadata)
			select i, clock_timestamp(), clock_timestamp(), '`+eventTopic+`', uuid, convert_to(repeat('x', $3), 'UTF8'), metadata::jsonb
			from (`+sqlEvents+`) e`, 1, events, size*mebibyte); err != nil {
			return err
		}
		if _, err := db.Exec(ctx, "update event_seq set last_seq = $1", events); err != nil {
			return err
		}
		config := consumer("push", subscriber.AllTopics, 500)
		config.BatchBytes = bound * mebibyte
		return heapOf(ctx, db, config, events, func(_ int64, live func() uint64) {
			most.Store(max(most.Load(), live()))
		})
	})
	if err != nil {
		return err
	}
	b.report.add("live heap with events of 20 MiB and a bound of 8 MiB", "MiB at most", mean([]uint64{most.Load()}))
	b.report.compare("live heap with large events, to the bound and one event", []float64{mean([]uint64{most.Load()}) / (bound + size)}, atMost(2.1))
	return nil
}

func mean(bytes []uint64) float64 {
	sum := 0.0
	for _, v := range bytes {
		sum += float64(v) / mebibyte
	}
	return sum / float64(max(1, len(bytes)))
}

// heapOf goes through n events; look is called in the handler and may ask what is alive on the heap.
func heapOf(ctx context.Context, db *database, config subscriber.ConsumerConfig, n int, look func(i int64, live func() uint64)) error {
	pool, err := db.open(ctx, 4, nil)
	if err != nil {
		return err
	}
	defer pool.Close()
	handled := newCounter(n)
	o, err := startOurs(ctx, pool, subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{config}},
		func(_ int, msg *message.Message) ([]*message.Message, error) {
			look(handled.calls.Load()+1, func() uint64 {
				var stats runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&stats)
				return stats.HeapAlloc
			})
			handled.count()
			return job(msg), nil
		})
	if err != nil {
		return err
	}
	return errors.Join(handled.wait(ctx), db.until(ctx, sqlPassed, n), o.stop(), db.checkJobs(ctx, n, true))
}
