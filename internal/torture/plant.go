package torture

import (
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// plant is a bug that is put into a run, beside the library, so that one can see the checker find it.
type plant string

const (
	noPlant           plant = ""
	plantCursorFirst  plant = "the cursor is committed before the work"
	plantCommitOnNack plant = "what a failed handler wrote is committed"
	plantHole         plant = "a missing number is passed"
)

// consumeHastily is a consumer that moves its cursor in a transaction of its own, and does the work in the next.
func (w *worker) consumeHastily(ctx context.Context, pool *pgxpool.Pool, s *subscriber.Subscriber) {
	for ctx.Err() == nil {
		if err := s.SubscribeInitialize(subscriber.AllTopics); err == nil {
			_ = w.hastyRound(ctx, pool) // what it fails to do is what the checker has to find
		}
		_ = wait(ctx, 20*time.Millisecond)
	}
}

func (w *worker) hastyRound(ctx context.Context, pool *pgxpool.Pool) error {
	var seqs []int64
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		const lock = "select c.last_seq from public.event_consumer_cursors c where c.consumer = $1 for update skip locked"
		var position int64
		if err := tx.QueryRow(ctx, lock, audit).Scan(&position); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, "select l.seq from event_log l where l.seq > $1 order by l.seq limit 10", position)
		var err error
		if seqs, err = pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil || len(seqs) == 0 {
			return err
		}
		_, err = tx.Exec(ctx, "update event_consumer_cursors set last_seq = $1 where consumer = $2", seqs[len(seqs)-1], audit)
		return err
	})
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for _, seq := range seqs {
			if _, err := tx.Exec(ctx, sqlEffect, audit, seq, 1, "hasty"); err != nil {
				return err
			}
			job := jobOf(audit, seq)
			_, err := tx.Exec(ctx, `
insert into watermill_torture_jobs (uuid, payload, metadata, transaction_id) values ($1, $2, '{}', pg_current_xact_id())`,
				job.UUID, []byte(job.Payload))
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// swallow is a middleware that acks what its handler failed to do.
func swallow(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := h(msg)
		if err != nil {
			return nil, nil
		}
		return produced, nil
	}
}

// cutHole takes an event out of the middle of the log, and moves each cursor past it that comes to stand before it.
func (r *run) cutHole(ctx context.Context) {
	const cut = `
with gone as (
    delete from event_log l where l.seq = (select max(c.last_seq) + 5 from event_consumer_cursors c) returning l.seq
), never as (
    delete from torture_numbered n using gone where n.seq = gone.seq
)
select seq from gone`
	var hole int64
	for hole == 0 && wait(ctx, 100*time.Millisecond) == nil {
		_ = r.pool.QueryRow(ctx, cut).Scan(&hole) // no row yet
	}
	for wait(ctx, 100*time.Millisecond) == nil {
		_, _ = r.pool.Exec(ctx, "update event_consumer_cursors set last_seq = $1 where last_seq = $1 - 1", hole)
	}
}
