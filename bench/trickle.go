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
	oursOne             = "ours, from an append to the end of its round"
	loopOne             = "hand-written round, from an append to the end of its round"
	loopTwoTrips        = "hand-written round in two trips, from an append to the end of its round"
	oursBatch           = "ours, batch 1, behind a backlog"
	oursBatchUnrecorded = "ours, batch 1, behind a backlog, no record of rounds"
	loopBatch           = "hand-written round, batch 1, behind a backlog"
)

// trickle handles one event a round, and looks how soon.
func trickle(ctx context.Context, b *bench) error {
	n := max(20, b.n/20)
	type way struct {
		name string
		run  func(context.Context, *database, int) error // behind a backlog
		one  func(context.Context, *database, int) (time.Duration, error)
	}
	ways := []way{
		{name: oursOne, one: trickleOurs},
		{name: loopOne, one: trickleLoop(false)},
		{name: loopTwoTrips, one: trickleLoop(true)},
		{name: oursBatch, run: drainOurs(1, subscriber.AllTopics)},
		{name: oursBatchUnrecorded, run: drainOurs(1, subscriber.AllTopics, unrecorded)},
		{name: loopBatch, run: drainLoop(1, true)},
	}
	err := inTurns(b.repeat, len(ways), func(i int) error {
		return b.inDatabase(ctx, func(db *database) error {
			way, behind := ways[i], 0
			if way.run != nil {
				behind = n
			}
			if err := loadLog(ctx, db, behind); err != nil {
				return err
			}
			var err error
			start := time.Now()
			elapsed := time.Duration(0)
			if way.run != nil {
				err = way.run(ctx, db, n)
				elapsed = time.Since(start)
			} else {
				elapsed, err = way.one(ctx, db, n)
			}
			if err == nil {
				err = db.checkJobs(ctx, n, true)
			}
			if err != nil {
				b.report.fail(way.name, err)
				return ctx.Err()
			}
			rate := float64(n) / elapsed.Seconds()
			b.report.add(way.name, "rounds/s", rate)
			b.say("%s: %s rounds/s", way.name, number(rate))
			return nil
		})
	})
	if err != nil {
		return err
	}
	b.report.ratio("ours to the hand-written round, always caught up", oursOne, loopOne, atLeast(1.7))
	b.report.ratio("the hand-written round in two trips to the one with a trip for each statement, always caught up", loopTwoTrips, loopOne, target{})
	b.report.ratio("ours to the hand-written round, batch 1 behind a backlog", oursBatch, loopBatch, atLeast(1.7))
	b.report.ratio("ours, batch 1, to ours without a record of rounds", oursBatch, oursBatchUnrecorded, target{})
	for range b.repeat {
		if err := b.inDatabase(ctx, func(db *database) error { return latency(ctx, b, db, max(20, min(n, 1000))) }); err != nil {
			return err
		}
		if err := b.inDatabase(ctx, func(db *database) error { return stagedLatency(ctx, b, db, max(20, min(n, 100))) }); err != nil {
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

// sqlTellPassed tells of every round's COMMIT.
const sqlTellPassed = `
create function tell_passed() returns trigger language plpgsql as $$ begin notify passed; return null; end $$;
create trigger tell_passed after update on event_consumer_cursors for each row execute function tell_passed();
create trigger tell_passed after update on loop_position for each row execute function tell_passed()`

// byOne appends n events, each when the round of the one before is over, and returns how long all the rounds took: from
// the append's COMMIT on, the notification included.
func (db *database) byOne(ctx context.Context, n int) (rounds time.Duration, err error) {
	conn, err := pgx.Connect(ctx, db.url)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, sqlTellPassed+"; listen passed"); err != nil {
		return 0, err
	}
	for i := 1; i <= n; i++ {
		if err := appendOne(ctx, db, i); err != nil {
			return 0, err
		}
		start := time.Now()
		wait, cancel := context.WithTimeout(ctx, 20*time.Second)
		_, err := conn.WaitForNotification(wait)
		cancel()
		if err != nil {
			return 0, fmt.Errorf("the end of round %d: %w", i, err)
		}
		rounds += time.Since(start)
	}
	return rounds, nil
}

func startTrickle(ctx context.Context, pool *pgxpool.Pool, handled func()) (*ours, error) {
	return startOurs(ctx, pool, subscriber.RunnerConfig{
		PollInterval: time.Hour, Consumers: []subscriber.ConsumerConfig{consumer("push", subscriber.AllTopics, 500)},
	}, func(_ int, msg *message.Message) ([]*message.Message, error) {
		handled()
		return job(msg), nil
	})
}

func trickleOurs(ctx context.Context, db *database, n int) (time.Duration, error) {
	pool, err := db.open(ctx, 4, nil)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	o, err := startTrickle(ctx, pool, func() {})
	if err != nil {
		return 0, err
	}
	if err := listening(ctx, db); err != nil {
		return 0, errors.Join(err, o.stop())
	}
	rounds, err := db.byOne(ctx, n)
	return rounds, errors.Join(err, o.stop())
}

// listening waits for somebody to listen: an append before would wait for the poll.
func listening(ctx context.Context, db *database) error {
	return db.until(ctx, `select exists (select from pg_stat_activity where datname = current_database() and state = 'idle' and query ilike 'listen%')`)
}

func trickleLoop(twoTrips bool) func(context.Context, *database, int) (time.Duration, error) {
	return func(ctx context.Context, db *database, n int) (time.Duration, error) {
		pool, err := db.open(ctx, 2, nil)
		if err != nil {
			return 0, err
		}
		defer pool.Close()
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return 0, err
		}
		defer conn.Release()
		listener, err := pool.Acquire(ctx)
		if err != nil {
			return 0, err
		}
		defer func() { _ = listener.Hijack().Close(context.WithoutCancel(ctx)) }()
		if _, err := listener.Exec(ctx, "listen event_log"); err != nil {
			return 0, err
		}
		l := &loop{batch: 500, twoTrips: twoTrips, out: make(chan *message.Message), count: newCounter(0).count}
		var rounds time.Duration
		appended := make(chan error, 1)
		go func() {
			var err error
			rounds, err = db.byOne(ctx, n)
			appended <- err
		}()
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
		err = errors.Join(err, <-appended)
		return rounds, err
	}
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

// stagedLatency measures how soon the handler of a staged event runs, with a sequencer as it comes.
func stagedLatency(ctx context.Context, b *bench, db *database, n int) error {
	pool, err := db.open(ctx, 6, nil)
	if err != nil {
		return err
	}
	defer pool.Close()
	handled := make(chan time.Time, 1)
	o, err := startTrickle(ctx, pool, func() { handled <- time.Now() })
	if err != nil {
		return err
	}
	var took []float64
	_, err = db.sequenced(ctx, func() error {
		if err := listening(ctx, db); err != nil {
			return err
		}
		for i := range n {
			// Not in step with the sequencer's polls.
			if err := pause(ctx, time.Duration(i%50)*time.Millisecond); err != nil {
				return err
			}
			if _, err := db.Exec(ctx, "insert into event_outbox (topic, uuid, payload, metadata, staged) values ($1, $2, $3, $4, true)", appended(int64(i+1))...); err != nil {
				return err
			}
			sent := time.Now()
			select {
			case at := <-handled:
				took = append(took, at.Sub(sent).Seconds()*1e6)
			case <-time.After(20 * time.Second):
				return errors.New("a staged event was not handled in 20 seconds")
			}
			if err := db.until(ctx, sqlPassed, i+1); err != nil {
				return err
			}
		}
		return nil
	})
	if err := errors.Join(err, o.stop()); err != nil {
		return err
	}
	b.report.add("from the COMMIT of a staged event to the handler's first line, median", "µs", quantile(took, 0.5))
	b.report.add("from the COMMIT of a staged event to the handler's first line, 99th percentile", "µs", quantile(took, 0.99))
	return db.checkJobs(ctx, n, true)
}
