package cursor

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

const sqlSeekLock = `
select c.last_seq, s.last_seq from public.event_consumer_cursors c cross join public.event_seq s
where c.consumer = $1 and c.topic = $2 and c.shard = $3
for update of c`

const sqlSeek = `
with gone as (
    delete from public.event_consumer_failures f where f.consumer = $1 and f.topic = $2 and f.shard = $3
), unmarked as (
    delete from public.event_consumer_marks m where m.consumer = $1 and m.topic = $2 and m.shard = $3
), noted as (
    insert into public.event_consumer_interventions (consumer, topic, shard, action, from_seq, to_seq, by, reason)
    values ($1, $2, $3, 'seek', $4, $5, $6, $7)
)
update public.event_consumer_cursors c set
    last_seq = $5, occurred_seq = $5,
    last_occurred_at = (select l.occurred_at from public.event_log l where l.seq = $5 limit 1),
    moved_at = clock_timestamp(), moved_by = $6
where c.consumer = $1 and c.topic = $2 and c.shard = $3`

// Seek moves a cursor by hand: the next event that its consumer handles is the one behind position. It waits for
// a round that is under way, at most ten seconds, ends the cursor's standing failure, and records who did it and
// why. Events that are skipped by it are not handled; events that come again are handled again.
//
// It is the way on for a cursor that is ahead of its log.
func Seek(ctx context.Context, db Beginner, log *Log, key Key, position int64, by, reason string) error {
	if err := key.Validate(); err != nil {
		return fmt.Errorf("seek cursor %q: %w", key, err)
	}
	err := InReadCommitted(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "select set_config('lock_timeout', '10s', true)"); err != nil {
			return err
		}
		var from, head int64
		switch err := tx.QueryRow(ctx, log.Render(sqlSeekLock), key.Consumer, key.Topic, key.Shard).Scan(&from, &head); {
		case errors.Is(err, pgx.ErrNoRows):
			return ErrCursorMissing
		case err != nil:
			return err
		}
		if position < 0 || position > head {
			return fmt.Errorf("position %d is outside the log, which goes from 0 (its beginning) to %d (its head)", position, head)
		}
		_, err := tx.Exec(ctx, log.Render(sqlSeek), key.Consumer, key.Topic, key.Shard, from, position, by, reason)
		return err
	})
	if err != nil {
		return fmt.Errorf("seek cursor %q: %w", key, explainMissingTables(log, err))
	}
	return nil
}

// InReadCommitted runs f in a transaction in which each statement sees what was committed before it, whatever the
// database's default is. A transaction that is given keeps its own isolation level.
func InReadCommitted(ctx context.Context, db Beginner, f func(pgx.Tx) error) error {
	if db, ok := db.(interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}); ok {
		return pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, f)
	}
	return pgx.BeginFunc(ctx, db, f)
}
