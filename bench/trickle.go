package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

const (
	oursOne   = "ours, append, handled, next"
	loopOne   = "hand-written round, append, handled, next"
	oursBatch = "ours, batch 1, behind a backlog"
	loopBatch = "hand-written round, batch 1, behind a backlog"
)

// trickle handles one event a round, and looks how soon.
func trickle(ctx context.Context, b *bench) error {
	n := max(20, b.n/20)
	type way struct {
		name string
		run  func(context.Context, *database, int) error
		load bool
	}
	ways := []way{
		{oursOne, trickleOurs, false}, {loopOne, trickleLoop, false},
		{oursBatch, drainOurs(1, subscriber.AllTopics), true}, {loopBatch, drainLoop(1, true), true},
	}
	err := inTurns(b.repeat, len(ways), func(i int) error {
		return b.inDatabase(ctx, func(db *database) error {
			behind := 0
			if ways[i].load {
				behind = n
			}
			if err := loadLog(ctx, db, behind); err != nil {
				return err
			}
			start, cpu := time.Now(), clientCPU()
			err := ways[i].run(ctx, db, n)
			elapsed, cpu := time.Since(start), clientCPU()-cpu
			if err == nil {
				err = db.checkJobs(ctx, n, true)
			}
			if err != nil {
				b.report.fail(ways[i].name, err)
				return ctx.Err()
			}
			b.report.add(ways[i].name, "events/s", float64(n)/elapsed.Seconds())
			b.report.add(ways[i].name+", client CPU", "µs/event", float64(cpu.Microseconds())/float64(n))
			b.say("%s: %s events/s", ways[i].name, number(float64(n)/elapsed.Seconds()))
			return nil
		})
	})
	if err != nil {
		return err
	}
	b.report.ratio("ours to the hand-written round, one event at a time", oursOne, loopOne, atLeast(1.7))
	b.report.ratio("ours to the hand-written round, batch 1 behind a backlog", oursBatch, loopBatch, atLeast(1.7))
	for range b.repeat {
		if err := b.inDatabase(ctx, func(db *database) error { return latency(ctx, b, db, max(20, min(n, 1000))) }); err != nil {
			return err
		}
	}
	for _, q := range []struct {
		name string
		most float64
	}{{"median", 2}, {"99th percentile", 4}} {
		b.report.ratio("from COMMIT to the handler's first line, to a bare LISTEN, "+q.name, toHandler+q.name, toListen+q.name, atMost(q.most))
	}
	return nil
}

// byOne appends n events, each when the one before was handled.
func (db *database) byOne(ctx context.Context, n int, handled <-chan struct{}) error {
	for i := 1; i <= n; i++ {
		if err := appendOne(ctx, db, i); err != nil {
			return err
		}
		select {
		case <-handled:
		case <-time.After(20 * time.Second):
			return fmt.Errorf("event %d was not handled in 20 seconds", i)
		}
	}
	return nil
}

func startTrickle(ctx context.Context, pool *pgxpool.Pool, handled func()) (*ours, error) {
	return startOurs(ctx, pool, subscriber.RunnerConfig{
		PollInterval: time.Hour, Consumers: []subscriber.ConsumerConfig{consumer("push", subscriber.AllTopics, 500)},
	}, func(_ int, msg *message.Message) ([]*message.Message, error) {
		handled()
		return job(msg), nil
	})
}

func trickleOurs(ctx context.Context, db *database, n int) error {
	pool, err := db.open(ctx, 4, nil)
	if err != nil {
		return err
	}
	defer pool.Close()
	handled := make(chan struct{}, 1)
	o, err := startTrickle(ctx, pool, func() { handled <- struct{}{} })
	if err != nil {
		return err
	}
	if err := listening(ctx, db); err != nil {
		return errors.Join(err, o.stop())
	}
	return errors.Join(db.byOne(ctx, n, handled), db.until(ctx, sqlPassed, n), o.stop())
}

// listening waits for somebody to listen: an append before would wait for the poll.
func listening(ctx context.Context, db *database) error {
	return db.until(ctx, `select exists (select from pg_stat_activity where datname = current_database() and state = 'idle' and query ilike 'listen%')`)
}

func trickleLoop(ctx context.Context, db *database, n int) error {
	pool, err := db.open(ctx, 2, nil)
	if err != nil {
		return err
	}
	defer pool.Close()
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	listener, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = listener.Hijack().Close(context.WithoutCancel(ctx)) }()
	if _, err := listener.Exec(ctx, "listen event_log"); err != nil {
		return err
	}
	handled := make(chan struct{}, 1)
	l := &loop{batch: 500, out: make(chan *message.Message), count: func() int64 { handled <- struct{}{}; return 0 }}
	appended := make(chan error, 1)
	go func() { appended <- db.byOne(ctx, n, handled) }()
	err = l.withRouter(ctx, func() error {
		for passed := 0; passed < n; {
			wait, cancel := context.WithTimeout(ctx, 30*time.Second)
			_, err := listener.Conn().WaitForNotification(wait)
			cancel()
			if err != nil {
				return err
			}
			got, err := l.round(ctx, conn)
			if err != nil {
				return err
			}
			passed += got
		}
		return nil
	})
	return errors.Join(err, <-appended)
}

const (
	toHandler = "from COMMIT to the handler's first line, "
	toListen  = "from COMMIT to a bare LISTEN, "
)

// latency measures, for the same appends, how soon the handler runs and how soon a bare LISTEN hears.
func latency(ctx context.Context, b *bench, db *database, n int) error {
	pool, err := db.open(ctx, 4, nil)
	if err != nil {
		return err
	}
	defer pool.Close()
	handled := make(chan time.Time, 1)
	o, err := startTrickle(ctx, pool, func() { handled <- time.Now() })
	if err != nil {
		return err
	}
	heard := make(chan time.Time, n)
	bare, err := pgx.Connect(ctx, db.url)
	if err != nil {
		return errors.Join(err, o.stop())
	}
	defer func() { _ = bare.Close(context.WithoutCancel(ctx)) }()
	if err := listening(ctx, db); err != nil {
		return errors.Join(err, o.stop())
	}
	if _, err := bare.Exec(ctx, "listen event_log"); err != nil {
		return errors.Join(err, o.stop())
	}
	appender, err := db.Acquire(ctx)
	if err != nil {
		return errors.Join(err, o.stop())
	}
	defer appender.Release()
	bound, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			note, err := bare.WaitForNotification(bound)
			if err != nil {
				return
			}
			if note.PID == appender.Conn().PgConn().PID() { // and not a trial of somebody else who listens
				heard <- time.Now()
			}
		}
	})
	defer all.Wait()
	defer cancel()

	var toHandlers, toListens, between []float64
	for i := 1; i <= n; i++ {
		err := func() error {
			tx, err := appender.Begin(ctx)
			if err != nil {
				return err
			}
			if err := appendOne(ctx, tx, i); err != nil {
				return errors.Join(err, tx.Rollback(ctx))
			}
			sent := time.Now() // the answer to COMMIT may come later than the notification
			if err := tx.Commit(ctx); err != nil {
				return err
			}
			at := [2]time.Time{}
			for i, when := range []<-chan time.Time{handled, heard} {
				select {
				case at[i] = <-when:
				case <-time.After(20 * time.Second):
					return errors.New("somebody was not woken in 20 seconds")
				}
			}
			toHandlers = append(toHandlers, at[0].Sub(sent).Seconds()*1e6)
			toListens = append(toListens, at[1].Sub(sent).Seconds()*1e6)
			between = append(between, at[0].Sub(at[1]).Seconds()*1e6)
			// Always caught up: the round is over before the next append.
			return db.until(ctx, sqlPassed, i)
		}()
		if err != nil {
			return errors.Join(err, o.stop())
		}
	}
	if err := o.stop(); err != nil {
		return err
	}
	for _, q := range []struct {
		name  string
		value float64
	}{{"median", 0.5}, {"99th percentile", 0.99}} {
		b.report.add(toHandler+q.name, "µs", quantile(toHandlers, q.value))
		b.report.add(toListen+q.name, "µs", quantile(toListens, q.value))
		b.report.add("the handler's first line after the bare LISTEN, "+q.name, "µs", quantile(between, q.value))
	}
	b.say("latency: handler %s µs, bare LISTEN %s µs (medians)", number(quantile(toHandlers, 0.5)), number(quantile(toListens, 0.5)))
	return db.checkJobs(ctx, n, true)
}
