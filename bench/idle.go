package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

const idlePoll = 50 * time.Millisecond

// idle looks what consumers cost that have nothing to do.
func idle(ctx context.Context, b *bench) error {
	length := time.Duration(b.either(2, 5)) * time.Second
	if b.n < 10_000 {
		length = time.Second / 2
	}
	polls := map[int][]float64{}
	for range b.repeat {
		for _, consumers := range []int{1, 100} {
			err := b.inDatabase(ctx, func(db *database) error {
				if err := db.load(ctx, 100, 1); err != nil {
					return err
				}
				count := &statements{}
				pool, err := db.open(ctx, 10, func(c *pgxpool.Config) { c.ConnConfig.Tracer = count })
				if err != nil {
					return err
				}
				defer pool.Close()
				config := subscriber.RunnerConfig{PollInterval: idlePoll}
				for c := range consumers {
					config.Consumers = append(config.Consumers, consumer(fmt.Sprintf("push-%d", c), subscriber.AllTopics, 500))
				}
				handled := newCounter(100 * consumers)
				o, err := startOurs(ctx, pool, config, func(_ int, msg *message.Message) ([]*message.Message, error) {
					handled.count()
					return job(msg), nil
				})
				if err != nil {
					return err
				}
				err = errors.Join(handled.wait(ctx), db.until(ctx, sqlPassed, 100), pause(ctx, 4*idlePoll))
				if err == nil {
					err = b.watchIdle(ctx, db, count, consumers, length, polls)
				}
				if err := errors.Join(err, o.stop()); err != nil {
					return err
				}
				return db.checkJobsOfAll(ctx, 100, consumers)
			})
			if err != nil {
				return err
			}
		}
	}
	for _, consumers := range []int{1, 100} {
		b.report.compare(fmt.Sprintf("statements a poll, %d idle", consumers), polls[consumers], atMost(1.15)) // polls come up to a tenth early
	}
	return nil
}

func (b *bench) watchIdle(ctx context.Context, db *database, count *statements, consumers int, length time.Duration, polls map[int][]float64) error {
	const sqlState = "select pg_current_wal_insert_lsn() - '0/0', pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
	if _, err := db.Exec(ctx, "checkpoint"); err != nil {
		return err
	}
	var wal, walAfter, xid, xidAfter int64
	if err := db.QueryRow(ctx, sqlState).Scan(&wal, &xid); err != nil {
		return err
	}
	before, cpu, start := count.all.Load(), clientCPU(), time.Now()
	if err := pause(ctx, length); err != nil {
		return err
	}
	ran, elapsed, used := count.all.Load()-before, time.Since(start), clientCPU()-cpu
	if err := db.QueryRow(ctx, sqlState).Scan(&walAfter, &xidAfter); err != nil {
		return err
	}
	name := fmt.Sprintf("%d consumers idle", consumers)
	b.report.add(name, "statements/s", float64(ran)/elapsed.Seconds())
	b.report.add(name+", client CPU", "ms/s", float64(used.Microseconds())/1000/elapsed.Seconds())
	b.report.add(name+", WAL", "bytes", float64(walAfter-wal))
	b.report.add(name+", transaction ids", "taken", float64(xidAfter-xid))
	polls[consumers] = append(polls[consumers], float64(ran)/(elapsed.Seconds()/idlePoll.Seconds()))
	b.say("%s: %d statements in %v, %d bytes of WAL, %d transaction ids", name, ran, elapsed.Round(time.Millisecond), walAfter-wal, xidAfter-xid)
	return nil
}

// statements counts what is sent to the server.
type statements struct{ all atomic.Int64 }

// TraceQueryStart and the following make it a tracer of statements, alone and in a batch.
func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.all.Add(1)
	return ctx
}
func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (s *statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (s *statements) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {
	s.all.Add(1)
}
func (s *statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
