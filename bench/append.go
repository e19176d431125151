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
)

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
		name string
		do   func(*publisher.EventLog) appender
		ours bool
	}{
		{"ours", func(events *publisher.EventLog) appender {
			return func(_ context.Context, _ *pgxpool.Pool, id int64) error { return events.Publish(eventTopic, event(id)) }
		}, true},
		{"ours, in the caller's transaction", func(events *publisher.EventLog) appender {
			return func(ctx context.Context, pool *pgxpool.Pool, id int64) error {
				return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return events.InTx(tx).Publish(eventTopic, event(id)) })
			}
		}, true},
		{"plain insert with a serial id", func(*publisher.EventLog) appender {
			return func(ctx context.Context, pool *pgxpool.Pool, id int64) error {
				_, err := pool.Exec(ctx, sqlPlain, appended(id)...)
				return err
			}
		}, false},
		{"plain insert in the caller's transaction", func(*publisher.EventLog) appender {
			return func(ctx context.Context, pool *pgxpool.Pool, id int64) error {
				return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, sqlPlain, appended(id)...)
					return err
				})
			}
		}, false},
		{"plain insert and NOTIFY", func(*publisher.EventLog) appender {
			return func(ctx context.Context, pool *pgxpool.Pool, id int64) error {
				batch := &pgx.Batch{} // one transaction, one trip
				batch.Queue(sqlPlain, appended(id)...)
				batch.Queue("select pg_notify('plain', '')")
				return pool.SendBatch(ctx, batch).Close()
			}
		}, false},
	}
	length := time.Duration(b.either(400, 2000)) * time.Millisecond
	if b.n < 10_000 {
		length = 50 * time.Millisecond
	}
	name := func(way string, writers int) string { return fmt.Sprintf("%s, %d writers", way, writers) }
	counts := []int{1, 4, 16, 64}
	for range b.repeat {
		err := b.inDatabase(ctx, func(db *database) error {
			if _, err := db.Exec(ctx, `create table plain (id bigserial primary key, at timestamptz not null default clock_timestamp(),
				topic text not null, uuid text not null, payload bytea not null, metadata jsonb not null)`); err != nil {
				return err
			}
			for _, writers := range counts {
				pool, err := db.open(ctx, writers, nil)
				if err != nil {
					return err
				}
				defer pool.Close()
				events, err := publisher.NewEventLog(pool, publisher.EventLogConfig{})
				if err != nil {
					return err
				}
				for _, w := range ways {
					if _, err := db.Exec(ctx, "truncate plain, event_log, event_outbox; update event_seq set last_seq = 0"); err != nil {
						return err
					}
					n, rate, err := write(ctx, pool, writers, length, w.do(events))
					if err != nil {
						return err
					}
					way := name(w.name, writers)
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
	for _, writers := range counts {
		b.report.ratio("ours to a plain insert, "+strconv.Itoa(writers)+" writers", name(ways[0].name, writers), name(ways[2].name, writers), target{})
		b.report.ratio("ours to a plain insert, in the caller's transaction, "+strconv.Itoa(writers)+" writers",
			name(ways[1].name, writers), name(ways[3].name, writers), target{})
		b.report.ratio("ours to a plain insert and NOTIFY, "+strconv.Itoa(writers)+" writers", name(ways[0].name, writers), name(ways[4].name, writers), target{})
	}
	return nil
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
