package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/sequencer"
)

const sqlPlainTable = `create table plain (id bigserial primary key, at timestamptz not null default clock_timestamp(),
	topic text not null, uuid text not null, payload bytea not null, metadata jsonb not null)`

const sqlPlain = "insert into plain (topic, uuid, payload, metadata) values ($1, $2, $3, $4)"

// appendOne appends the event that will get this number. Its transaction is its own, or the caller's.
func appendOne(ctx context.Context, db interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}, seq int,
) error {
	if _, err := db.Exec(ctx, "insert into event_outbox (topic, uuid, payload, metadata) values ($1, $2, $3, $4)", appended(int64(seq))...); err != nil {
		return fmt.Errorf("append: %w", err)
	}
	return nil
}

var (
	appendedPayload  = fmt.Appendf(nil, `{"id": "%0240d"}`, 0)
	appendedMetadata = map[string]string{"correlation_id": "0123456789abcdef", "tenant": "north", "source": "shop"}
)

// appended is topic, uuid, payload and metadata of an event.
func appended(id int64) []any {
	return []any{eventTopic, fmt.Sprintf("%s%012d", uuidPrefix, id), appendedPayload, appendedMetadata}
}

// appending compares transactions of one event with inserts that number nothing and wake nobody.
func appending(ctx context.Context, b *bench) error {
	event := func(id int64) *message.Message {
		msg := message.NewMessage(fmt.Sprintf("%s%012d", uuidPrefix, id), appendedPayload)
		msg.Metadata = appendedMetadata
		return msg
	}
	type appender func(ctx context.Context, pool *pgxpool.Pool, id int64) error
	ways := []struct {
		name   string
		do     func(*publisher.EventLog) appender
		ours   bool
		staged bool
	}{
		{"ours", func(events *publisher.EventLog) appender {
			return func(_ context.Context, _ *pgxpool.Pool, id int64) error { return events.Publish(eventTopic, event(id)) }
		}, true, false},
		{"ours, staged", func(events *publisher.EventLog) appender {
			return func(_ context.Context, _ *pgxpool.Pool, id int64) error { return events.Publish(eventTopic, event(id)) }
		}, true, true},
		{"ours, in the caller's transaction", func(events *publisher.EventLog) appender {
			return func(ctx context.Context, pool *pgxpool.Pool, id int64) error {
				return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return events.InTx(tx).Publish(eventTopic, event(id)) })
			}
		}, true, false},
		{"plain insert with a serial id", func(*publisher.EventLog) appender {
			return func(ctx context.Context, pool *pgxpool.Pool, id int64) error {
				_, err := pool.Exec(ctx, sqlPlain, appended(id)...)
				return err
			}
		}, false, false},
		{"plain insert in the caller's transaction", func(*publisher.EventLog) appender {
			return func(ctx context.Context, pool *pgxpool.Pool, id int64) error {
				return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, sqlPlain, appended(id)...)
					return err
				})
			}
		}, false, false},
		{"plain insert and NOTIFY", func(*publisher.EventLog) appender {
			return func(ctx context.Context, pool *pgxpool.Pool, id int64) error {
				batch := &pgx.Batch{} // one transaction, one trip
				batch.Queue(sqlPlain, appended(id)...)
				batch.Queue("select pg_notify('plain', '')")
				return pool.SendBatch(ctx, batch).Close()
			}
		}, false, false},
	}
	length := time.Duration(b.either(400, 2000)) * time.Millisecond
	if b.n < 10_000 {
		length = 50 * time.Millisecond
	}
	name := func(way string, writers int) string { return fmt.Sprintf("%s, %d writers", way, writers) }
	counts := []int{1, 4, 16, 64}
	for range b.repeat {
		err := b.inDatabase(ctx, func(db *database) error {
			if _, err := db.Exec(ctx, sqlPlainTable); err != nil {
				return err
			}
			for _, writers := range counts {
				pool, err := db.open(ctx, writers, nil)
				if err != nil {
					return err
				}
				defer pool.Close()
				for _, w := range ways {
					events, err := publisher.NewEventLog(pool, publisher.EventLogConfig{Staged: w.staged})
					if err != nil {
						return err
					}
					if _, err := db.Exec(ctx, "truncate plain, event_log, event_outbox; update event_seq set last_seq = 0"); err != nil {
						return err
					}
					way := name(w.name, writers)
					var n int64
					var rate float64
					measure := func() (err error) {
						n, rate, err = write(ctx, pool, writers, length, w.do(events))
						return err
					}
					if w.staged {
						left := 0.0
						left, err = db.sequenced(ctx, measure)
						if rate > 0 {
							b.report.add(way+", left to number at the end", "s of appends", left/rate)
						}
					} else {
						err = measure()
					}
					if err != nil {
						return err
					}
					if err := db.checkAppended(ctx, n, w.ours); err != nil {
						b.report.fail(way, err)
						continue
					}
					b.report.add(way, "appends/s", rate)
				}
				pool.Close()
				b.say("%d writers: %s", writers, number(b.report.find(name(ways[0].name, writers)).Median))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if err := stagedForLong(ctx, b, event); err != nil {
		return err
	}
	for _, writers := range counts {
		b.report.ratio("ours to a plain insert, "+strconv.Itoa(writers)+" writers", name(ways[0].name, writers), name(ways[3].name, writers), target{})
		b.report.ratio("ours, staged, to a plain insert, "+strconv.Itoa(writers)+" writers", name(ways[1].name, writers), name(ways[3].name, writers),
			target{})
		b.report.ratio("ours to a plain insert, in the caller's transaction, "+strconv.Itoa(writers)+" writers",
			name(ways[2].name, writers), name(ways[4].name, writers), target{})
		b.report.ratio("ours to a plain insert and NOTIFY, "+strconv.Itoa(writers)+" writers", name(ways[0].name, writers), name(ways[5].name, writers), target{})
	}
	return nil
}

// stagedForLong stages with 64 writers, alone and while somebody holds a snapshot, and looks whether the sequencer keeps up:
// what it takes for an event at the end, and what it has left to number.
func stagedForLong(ctx context.Context, b *bench, event func(int64) *message.Message) error {
	const writers = 64
	length := time.Duration(b.either(6, 60)) * time.Second
	if b.n < 10_000 {
		length = 500 * time.Millisecond
	}
	plain, staged := "plain insert for "+length.String(), "staged for "+length.String()
	held := staged + ", a snapshot held elsewhere"
	err := inTurns(b.either(b.repeat, 1), 3, func(i int) error {
		return b.inDatabase(ctx, func(db *database) error {
			pool, err := db.open(ctx, writers, nil)
			if err != nil {
				return err
			}
			defer pool.Close()
			if i == 0 {
				return plainForLong(ctx, b, db, pool, plain, length)
			}
			way := staged
			if i == 2 {
				way = held
				holder, err := pgx.Connect(ctx, db.url)
				if err != nil {
					return err
				}
				defer func() { _ = holder.Close(context.WithoutCancel(ctx)) }()
				if _, err := holder.Exec(ctx, "begin isolation level repeatable read; create temporary table held (); select 1"); err != nil {
					return err
				}
			}
			events, err := publisher.NewEventLog(pool, publisher.EventLogConfig{Staged: true})
			if err != nil {
				return err
			}
			numbering, err := db.open(ctx, 1, nil)
			if err != nil {
				return err
			}
			defer numbering.Close()
			timed := &timedSender{Pool: numbering}
			s, err := sequencer.New(timed, sequencer.Config{}, nil)
			if err != nil {
				return err
			}
			running, stop := context.WithCancel(ctx)
			defer stop()
			ended := make(chan error, 2)
			go func() { ended <- s.Run(running) }()
			marks := make([]mark, 3) // after a quarter, after three, at the end
			go func() {
				for i, after := range []time.Duration{length / 4, length / 2, length / 4} {
					if err := errors.Join(pause(ctx, after), timed.mark(ctx, db, &marks[i])); err != nil {
						ended <- err
						return
					}
				}
				ended <- nil
			}()
			n, rate, err := write(ctx, pool, writers, length, func(_ context.Context, _ *pgxpool.Pool, id int64) error {
				return events.Publish(eventTopic, event(id))
			})
			var left float64
			err = errors.Join(err, db.QueryRow(ctx, "select count(*)::float8 from event_outbox").Scan(&left))
			err = errors.Join(err, <-ended) // the marks
			if err == nil {
				err = db.until(ctx, "select not exists (select from event_outbox)")
			}
			stop()
			if err = errors.Join(err, <-ended); err != nil {
				return err
			}
			if err := db.checkAppended(ctx, n, true); err != nil {
				b.report.fail(way, err)
				return nil
			}
			first, last := marks[0].perEvent(mark{}), marks[2].perEvent(marks[1])
			b.report.add(way, "appends/s", rate)
			b.report.add(way+", left to number at the end", "s of appends", left/rate)
			b.report.add(way+", to number one at first", "µs", first)
			b.report.add(way+", to number one at the end", "µs", last)
			b.say("%s: %s appends/s, %.2f s left, %.0f then %.0f µs to number one", way, number(rate), left/rate, first, last)
			return nil
		})
	})
	if err != nil {
		return err
	}
	for _, way := range []string{staged, held} {
		b.report.ratio(way+": to number one, at the end to at first", way+", to number one at the end", way+", to number one at first", atMost(2))
		b.report.ratio(way+", to a plain insert, 64 writers", way, plain, atLeast(0.7))
	}
	return nil
}

func plainForLong(ctx context.Context, b *bench, db *database, pool *pgxpool.Pool, name string, length time.Duration) error {
	if _, err := db.Exec(ctx, sqlPlainTable); err != nil {
		return err
	}
	n, rate, err := write(ctx, pool, int(pool.Config().MaxConns), length, func(ctx context.Context, pool *pgxpool.Pool, id int64) error {
		_, err := pool.Exec(ctx, sqlPlain, appended(id)...)
		return err
	})
	if err != nil {
		return err
	}
	if err := db.checkAppended(ctx, n, false); err != nil {
		b.report.fail(name, err)
		return nil
	}
	b.report.add(name, "appends/s", rate)
	b.say("%s: %s appends/s", name, number(rate))
	return nil
}

// mark is how much a sequencer has done, and in how much time.
type mark struct {
	events int64
	busy   time.Duration
}

// perEvent is since an earlier one, in µs.
func (m mark) perEvent(before mark) float64 {
	return (m.busy - before.busy).Seconds() * 1e6 / float64(max(1, m.events-before.events))
}

// timedSender is a pool that tells how long its trips took.
type timedSender struct {
	*pgxpool.Pool
	busy atomic.Int64
}

func (t *timedSender) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return &timedResults{t.Pool.SendBatch(ctx, b), t, time.Now()}
}

func (t *timedSender) mark(ctx context.Context, db *database, m *mark) error {
	m.busy = time.Duration(t.busy.Load())
	return db.QueryRow(ctx, "select last_seq from event_seq").Scan(&m.events)
}

type timedResults struct {
	pgx.BatchResults
	sender *timedSender
	began  time.Time
}

func (t *timedResults) Close() error {
	defer func() { t.sender.busy.Add(int64(time.Since(t.began))) }()
	return t.BatchResults.Close()
}

// sequenced runs do beside a sequencer, and returns how much that had left to number then. At the end nothing is left.
func (db *database) sequenced(ctx context.Context, do func() error) (left float64, err error) {
	pool, err := db.open(ctx, 1, nil)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	numbering, err := sequencer.New(pool, sequencer.Config{}, nil)
	if err != nil {
		return 0, err
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- numbering.Run(running) }()
	err = do()
	err = errors.Join(err, db.QueryRow(ctx, "select count(*)::float8 from event_outbox").Scan(&left))
	stop()
	err = errors.Join(err, <-ended)
	if err == nil {
		err = db.until(ctx, "select not exists (select from pg_stat_activity where query ilike '%event_outbox_sequence%' and state = 'active' and pid <> pg_backend_pid())")
	}
	if err == nil {
		_, err = numbering.Once(ctx)
	}
	return left, err
}

// write lets writers append for a while, and returns how many events they did, and the rate.
func write(ctx context.Context, pool *pgxpool.Pool, writers int, length time.Duration, do func(context.Context, *pgxpool.Pool, int64) error) (n int64, rate float64, err error) {
	var ids atomic.Int64
	var all sync.WaitGroup
	errs := make([]error, writers)
	round := func(again func() bool) {
		for i := range writers {
			all.Go(func() {
				for again() && errs[i] == nil {
					errs[i] = do(ctx, pool, ids.Add(1))
				}
			})
		}
		all.Wait()
	}
	// What a session learns with its first statement is learnt before.
	firstUntil := int64(20 * writers)
	round(func() bool { return ids.Load() < firstUntil })
	before, start := ids.Load(), time.Now()
	round(func() bool { return time.Since(start) < length })
	return ids.Load(), float64(ids.Load()-before) / time.Since(start).Seconds(), errors.Join(errs...)
}

func (db *database) checkAppended(ctx context.Context, n int64, ours bool) error {
	sql := "select count(*), count(distinct uuid), count(*) from plain"
	if ours {
		sql = "select count(*), count(distinct uuid), coalesce(max(seq), 0) from event_log"
	}
	var rows, events, last int64
	err := db.QueryRow(ctx, sql).Scan(&rows, &events, &last)
	if err == nil && (rows != n || events != n || last != n) {
		err = fmt.Errorf("%d events were appended, and there are %d rows of %d events up to %d", n, rows, events, last)
	}
	return err
}
