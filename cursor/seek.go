package cursor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const sqlSeekTime = `select min(l.seq) from public.event_log l where l.occurred_at >= $1`

// Seek moves a cursor by hand: its consumer goes on at to, as a new one would start there. It waits for a round that
// is under way, at most ten seconds ([LockedError]), ends the cursor's standing failure, wakes the consumer, and
// records who did it and why. Events that are skipped by it are not handled; events that come again are handled again.
//
// What is parked stays parked, also where it comes again.
//
// What is outside the log is refused with [ErrRefused]. A time reads the log once; where no event is that young, it is
// the head. It is the way on for a cursor that is ahead of its log.
func Seek(ctx context.Context, db Beginner, log *Log, key Key, to Start, order Order) (Change, error) {
	return operate(ctx, db, log, "seek", key, order, func(tx pgx.Tx, c *standing) (Change, error) {
		if err := to.Validate(); err != nil {
			return Change{}, err
		}
		position := c.head
		switch to.kind {
		case "beginning":
			position = c.lowest - 1
		case "seq":
			position = to.seq - 1
		case "time":
			first, err := firstAt(ctx, tx, log, to.at)
			if err != nil {
				return Change{}, err
			}
			if first != nil {
				position = *first - 1
			}
		}
		switch {
		case position > c.head:
			return Change{}, refuse("seq %d is outside the log, whose head is %d: the next event will be %d", position+1, c.head, c.head+1)
		case position < c.lowest-1:
			return Change{}, refuse("event %d is not in the log any more, whose oldest is %d: seek to the beginning", position+1, c.lowest)
		}
		return moveByHand(ctx, tx, log, "seek", c, position, order)
	})
}

func firstAt(ctx context.Context, tx pgx.Tx, log *Log, at time.Time) (first *int64, err error) {
	err = tx.QueryRow(ctx, log.Render(sqlSeekTime), at).Scan(&first)
	return first, err
}

const sqlPositionOf = `
select case $1::text
    when 'seq' then $2::bigint - 1
    when 'beginning' then coalesce((select min(l.seq) - 1 from public.event_log l), s.last_seq)
    when 'time' then coalesce((select min(l.seq) - 1 from public.event_log l where l.occurred_at >= $3::timestamptz), s.last_seq)
    else s.last_seq end
from public.event_seq s
limit 1`

// PositionOf is the position from which a reader starts there. It is not checked whether the log has such an event. A
// time reads the log once.
func PositionOf(ctx context.Context, db Querier, log *Log, start Start) (int64, error) {
	if err := start.Validate(); err != nil {
		return 0, err
	}
	rows, _ := db.Query(ctx, log.Render(sqlPositionOf), start.kind, start.seq, start.at)
	position, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64])
	if err != nil {
		return 0, fmt.Errorf("position of %s: %w", start, explainMissingTables(log, err))
	}
	return position, nil
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
