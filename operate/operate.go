// Package operate is the operator's half of an event log: what stands, what is changed by hand, and the proof of the log.
//
// A change ([Seek], [Skip], [Pause], [Resume], [Retire], [SettleLosses], [Replay], [Discard], [Redact]) is done as a whole
// or not at all, is recorded with who made it and why ([Interventions]), and may be tried in a dry run first ([Order]).
// One that moves or holds a cursor waits for the round that is under way. What would be unsafe, or would change nothing,
// is refused ([ErrRefused]). A look ([Survey], [Deliveries], [Events], [Parked], [Losses], [Verify]) locks nothing and
// writes nothing.
//
// It handles no events: those that are to come again, or to be replayed, wait for their consumer's own process. It does
// not undo what handlers have done, and does not tell whether anybody is at work: that is package watch.
package operate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// lockWait is how long a change by hand waits for a round that is under way.
const lockWait = 10 * time.Second

// restAge is how long a cursor must have stood still to be retired without force.
const restAge = time.Minute

// ErrRefused is returned when a change by hand would be unsafe, or would change nothing. The error says what to do
// instead.
var ErrRefused = errors.New("refused")

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrRefused}, args...)...)
}

// Order is what a change by hand comes with. By and Reason are recorded with it.
//
// A change is a transaction of its own, or a savepoint of the one that it is given; that one keeps the timeouts that the
// change has set.
type Order struct {
	By     string // who makes the change; required
	Reason string // why
	DryRun bool   // do everything, return the change, and roll it back
	Force  bool   // Retire: also a cursor that has moved within the last minute
}

func (o Order) validate() error {
	if o.By == "" {
		return errors.New("missing By: say who makes the change")
	}
	return nil
}

// Change is what was done by hand, or, after a dry run, what would have been done.
type Change struct {
	Cursor cursor.Key // the zero Key where it is a change of the log itself
	Action string
	From   int64 // seek, skip: the position before; otherwise the first event that is meant
	To     int64 // seek, skip: the position after; otherwise the last event that is meant
	Events int64 // how many of the cursor's own events are skipped by it, come again, or are meant
	By     string
	Reason string
	At     time.Time // the database's clock
	DryRun bool
}

const sqlBounds = `
select set_config('idle_in_transaction_session_timeout', '30s', true), set_config('lock_timeout', $1, true),
    set_config('statement_timeout', $1, true)`

const sqlLock = `
select true from public.event_consumer_cursors c
where c.consumer = $1 and c.topic = $2 and c.shard = $3
for update of c`

// A statement of its own, after the lock: what it reads must not be older than what the round before has committed.
const sqlStanding = `
select c.last_seq, s.last_seq, c.paused_at, c.retired_at,
    coalesce(c.moved_at, 'epoch') > clock_timestamp() - make_interval(secs => $4),
    set_config('statement_timeout', '5min', true)
from public.event_consumer_cursors c cross join public.event_seq s
where c.consumer = $1 and c.topic = $2 and c.shard = $3`

// standing is a cursor under an operator's lock.
type standing struct {
	key                 cursor.Key
	position, head      int64
	pausedAt, retiredAt *time.Time
	moving              bool
}

// changeCursor makes one change of a cursor under its lock.
func changeCursor(ctx context.Context, db cursor.Beginner, log *cursor.Log, action string, key cursor.Key, order Order,
	do func(tx pgx.Tx, c *standing) (Change, error)) (Change, error) {
	var change Change
	err := errors.Join(key.Validate(), order.validate())
	if err == nil {
		err = rehearse(ctx, db, order.DryRun, func(tx pgx.Tx) error {
			c, err := lockByHand(ctx, tx, log, key)
			if err != nil {
				return err
			}
			change, err = do(tx, c)
			return err
		})
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && (pgErr.Code == "55P03" || pgErr.Code == "57014") && ctx.Err() == nil { // lock_not_available, query_canceled
			err = explainLocked(ctx, db, log, key, err)
		}
	}
	if err != nil {
		return Change{}, fmt.Errorf("%s cursor %q: %w", action, key, log.Explain(err))
	}
	change.Cursor, change.Action, change.By, change.Reason, change.DryRun = key, action, order.By, order.Reason, order.DryRun
	return change, nil
}

func lockByHand(ctx context.Context, tx pgx.Tx, log *cursor.Log, key cursor.Key) (*standing, error) {
	// The lock's own bound begins anew with each round of a drain that comes first; the statement's does not.
	if _, err := tx.Exec(ctx, sqlBounds, fmt.Sprintf("%dms", lockWait.Milliseconds())); err != nil {
		return nil, err
	}
	var locked bool
	switch err := tx.QueryRow(ctx, log.Render(sqlLock), key.Consumer, key.Topic, key.Shard).Scan(&locked); {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, cursor.ErrCursorMissing
	case err != nil:
		return nil, err
	}
	c := &standing{key: key}
	err := tx.QueryRow(ctx, log.Render(sqlStanding), key.Consumer, key.Topic, key.Shard, restAge.Seconds()).
		Scan(&c.position, &c.head, &c.pausedAt, &c.retiredAt, &c.moving, nil)
	return c, err
}

// rehearse runs f in a transaction, and rolls it back if it is only to be seen what it would do.
func rehearse(ctx context.Context, db cursor.Beginner, dry bool, f func(pgx.Tx) error) error {
	errDry := errors.New("dry run")
	err := cursor.InReadCommitted(ctx, db, func(tx pgx.Tx) error {
		if err := f(tx); err != nil || !dry {
			return err
		}
		return errDry
	})
	if errors.Is(err, errDry) {
		return nil
	}
	return err
}
