package cursor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
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
	Cursor Key // the zero Key where it is a change of the log itself
	Action string
	From   int64 // seek, skip: the position before; otherwise the first event that is meant
	To     int64 // seek, skip: the position after; otherwise the last event that is meant
	Events int64 // how many of the cursor's own events are skipped by it, come again, or are meant
	By     string
	Reason string
	At     time.Time // the database's clock
	DryRun bool
}

// LockedError is returned when a round kept its cursor locked for longer than a change by hand waits.
type LockedError struct {
	Key         Key
	Waited      time.Duration
	PID         int           // of the server process that holds the lock; 0 when it cannot be told any more
	Application string        // its application_name
	Address     string        // its client's
	Held        time.Duration // how long its transaction has been open
	MovedBy     string        // the instance that moved the cursor last, most likely the same
}

func (e *LockedError) Error() string {
	holder := "it cannot be told any more by whom"
	if e.PID != 0 {
		holder = fmt.Sprintf("by server process %d (application %q, client %s), whose transaction has been open for %s",
			e.PID, e.Application, e.Address, e.Held.Round(time.Second))
	}
	return fmt.Sprintf("a round holds the cursor for longer than %s: %s; it was moved last by instance %q: try again, "+
		"or stop that process", e.Waited, holder, e.MovedBy)
}

// ErrorType is "locked".
func (e *LockedError) ErrorType() string { return "locked" }

const sqlOperateBounds = `
select set_config('idle_in_transaction_session_timeout', '30s', true), set_config('lock_timeout', $1, true),
    set_config('statement_timeout', $1, true)`

const sqlOperateLock = `
select true from public.event_consumer_cursors c
where c.consumer = $1 and c.topic = $2 and c.shard = $3
for update of c`

// A statement of its own, after the lock: what it reads must not be older than what the round before has committed.
const sqlOperateRead = `
select c.last_seq, s.last_seq, (select coalesce(min(l.seq), s.last_seq + 1) from public.event_log l), c.paused_at, c.retired_at,
    coalesce(c.moved_at, 'epoch') > clock_timestamp() - make_interval(secs => $4),
    set_config('statement_timeout', '5min', true)
from public.event_consumer_cursors c cross join public.event_seq s
where c.consumer = $1 and c.topic = $2 and c.shard = $3`

// The holder of a row's lock is the transaction that the row names.
const sqlHolder = `
select coalesce(a.pid, 0), coalesce(a.application_name, ''), coalesce(host(a.client_addr), 'local'),
    coalesce(extract(epoch from clock_timestamp() - a.xact_start), 0)::float8, coalesce(c.moved_by, '')
from public.event_consumer_cursors c
left join pg_locks k on k.locktype = 'transactionid' and k.granted and k.transactionid = c.xmax
left join pg_stat_activity a on a.pid = k.pid
where c.consumer = $1 and c.topic = $2 and c.shard = $3`

// standing is a cursor under an operator's lock.
type standing struct {
	key                    Key
	position, head, lowest int64 // lowest is behind the head where the log holds nothing
	pausedAt, retiredAt    *time.Time
	moving                 bool
}

// operate makes one change of a cursor under its lock.
func operate(ctx context.Context, db Beginner, log *Log, action string, key Key, order Order,
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
		return Change{}, fmt.Errorf("%s cursor %q: %w", action, key, explainMissingTables(log, err))
	}
	change.Cursor, change.Action, change.By, change.Reason, change.DryRun = key, action, order.By, order.Reason, order.DryRun
	return change, nil
}

func lockByHand(ctx context.Context, tx pgx.Tx, log *Log, key Key) (*standing, error) {
	// The lock's own bound begins anew with each round of a drain that comes first; the statement's does not.
	if err := exec(ctx, tx, sqlOperateBounds, fmt.Sprintf("%dms", lockWait.Milliseconds())); err != nil {
		return nil, err
	}
	var locked bool
	switch err := tx.QueryRow(ctx, log.Render(sqlOperateLock), key.Consumer, key.Topic, key.Shard).Scan(&locked); {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, ErrCursorMissing
	case err != nil:
		return nil, err
	}
	c := &standing{key: key}
	err := tx.QueryRow(ctx, log.Render(sqlOperateRead), key.Consumer, key.Topic, key.Shard, restAge.Seconds()).
		Scan(&c.position, &c.head, &c.lowest, &c.pausedAt, &c.retiredAt, &c.moving, nil)
	return c, err
}

func explainLocked(ctx context.Context, db Beginner, log *Log, key Key, cause error) error {
	locked := &LockedError{Key: key, Waited: lockWait}
	var held float64
	err := InReadCommitted(ctx, db, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, log.Render(sqlHolder), key.Consumer, key.Topic, key.Shard).
			Scan(&locked.PID, &locked.Application, &locked.Address, &held, &locked.MovedBy)
	})
	if err != nil {
		return errors.Join(cause, err)
	}
	locked.Held = seconds(held)
	return locked
}

// rehearse runs f in a transaction, and rolls it back if it is only to be seen what it would do.
func rehearse(ctx context.Context, db Beginner, dry bool, f func(pgx.Tx) error) error {
	errDry := errors.New("dry run")
	err := InReadCommitted(ctx, db, func(tx pgx.Tx) error {
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

const sqlSkipped = `
select l.seq, (select count(*) from public.event_log n where n.seq > $1 and n.seq <= l.seq)
from public.event_log l
where l.seq > $1 and ($2 = '' or l.topic = $2)
order by l.seq
limit 1`

// Skip passes one event without handling it: the next one of the cursor's own, which is the failing one where its
// consumer stands still. seq says which is meant; another one is refused with [ErrRefused]. It ends the standing
// failure.
func Skip(ctx context.Context, db Beginner, log *Log, key Key, seq int64, order Order) (Change, error) {
	return operate(ctx, db, log, "skip", key, order, func(tx pgx.Tx, c *standing) (Change, error) {
		if c.position > c.head {
			return Change{}, refuse("%w", &AheadError{Position: c.position, Head: c.head})
		}
		var next, numbers int64
		switch err := tx.QueryRow(ctx, log.Render(sqlSkipped), c.position, key.Topic).Scan(&next, &numbers); {
		case errors.Is(err, pgx.ErrNoRows):
			return Change{}, refuse("there is no event behind the cursor, which is at %d of %d", c.position, c.head)
		case err != nil:
			return Change{}, err
		case next != seq:
			return Change{}, refuse("event %d is not the next one of this cursor, which is at %d: that is event %d", seq, c.position, next)
		case numbers != next-c.position:
			return Change{}, refuse("numbers are missing between the cursor, which is at %d, and event %d: "+
				"only a seek passes what is not in the log", c.position, next)
		}
		return moveByHand(ctx, tx, log, "skip", c, seq, order)
	})
}

const sqlMoveByHand = `
with gone as (
    delete from public.event_consumer_failures f where f.consumer = $1 and f.topic = $2 and f.shard = $3
), unmarked as (
    delete from public.event_consumer_marks m where m.consumer = $1 and m.topic = $2 and m.shard = $3
), noted as (
    insert into public.event_consumer_interventions (consumer, topic, shard, action, from_seq, to_seq, by, reason)
    values ($1, $2, $3, $8, $4, $5, $6, $7)
    returning at
), woken as (
    select pg_notify('event_log', '')
), moved as (
    update public.event_consumer_cursors c set
        last_seq = $5, occurred_seq = $5,
        last_occurred_at = (select l.occurred_at from public.event_log l where l.seq = $5 limit 1),
        moved_at = clock_timestamp(), moved_by = $6
    where c.consumer = $1 and c.topic = $2 and c.shard = $3
)
select n.at, (
    select count(*) from public.event_log l
    where l.seq > least($4::bigint, $5::bigint) and l.seq <= greatest($4::bigint, $5::bigint) and ($2::text = '' or l.topic = $2::text))
from noted n cross join woken`

// moveByHand moves a locked cursor to a position, ends its standing failure, and wakes its consumer.
func moveByHand(ctx context.Context, tx pgx.Tx, log *Log, action string, c *standing, position int64, order Order) (Change, error) {
	change := Change{From: c.position, To: position}
	err := tx.QueryRow(ctx, log.Render(sqlMoveByHand), c.key.Consumer, c.key.Topic, c.key.Shard, c.position, position,
		order.By, order.Reason, action).Scan(&change.At, &change.Events)
	return change, err
}

// sqlHold pauses, resumes or retires.
const sqlHold = `
with noted as (
    insert into public.event_consumer_interventions (consumer, topic, shard, action, from_seq, to_seq, by, reason)
    values ($1, $2, $3, $4, $5, $5, $6, $7)
    returning at
), woken as (
    select pg_notify('event_log', '')
), held as (
    update public.event_consumer_cursors c set
        paused_at = case $4::text when 'pause' then clock_timestamp() when 'resume' then null else c.paused_at end,
        retired_at = case $4::text when 'retire' then clock_timestamp() when 'resume' then null else c.retired_at end
    where c.consumer = $1 and c.topic = $2 and c.shard = $3
)
select n.at from noted n cross join woken`

func holdBack(ctx context.Context, db Beginner, log *Log, action string, key Key, order Order, refused func(*standing) error) (Change, error) {
	return operate(ctx, db, log, action, key, order, func(tx pgx.Tx, c *standing) (Change, error) {
		if err := refused(c); err != nil {
			return Change{}, err
		}
		change := Change{From: c.position, To: c.position}
		err := tx.QueryRow(ctx, log.Render(sqlHold), key.Consumer, key.Topic, key.Shard, action, c.position, order.By, order.Reason).
			Scan(&change.At)
		return change, err
	})
}

// Pause keeps a cursor's rounds from beginning, in every process, until [Resume]. It waits for the round that is under
// way. What the consumer has to handle goes on growing, and is kept.
func Pause(ctx context.Context, db Beginner, log *Log, key Key, order Order) (Change, error) {
	return holdBack(ctx, db, log, "pause", key, order, func(c *standing) error {
		switch {
		case c.retiredAt != nil:
			return refuse("the cursor is retired since %s", c.retiredAt.Format(time.RFC3339))
		case c.pausedAt != nil:
			return refuse("the cursor is paused since %s", c.pausedAt.Format(time.RFC3339))
		}
		return nil
	})
}

// Resume lets the rounds of a paused or retired cursor begin again, where it stands. What was removed from the log
// meanwhile is recorded as lost by its next round.
func Resume(ctx context.Context, db Beginner, log *Log, key Key, order Order) (Change, error) {
	return holdBack(ctx, db, log, "resume", key, order, func(c *standing) error {
		if c.pausedAt == nil && c.retiredAt == nil {
			return refuse("the cursor is neither paused nor retired")
		}
		return nil
	})
}

// Retire says that nobody needs a cursor any more: it is kept, but no round begins and no event is kept for it. One
// that has moved within the last minute has a consumer, and is refused unless forced. [Resume] takes it back.
func Retire(ctx context.Context, db Beginner, log *Log, key Key, order Order) (Change, error) {
	return holdBack(ctx, db, log, "retire", key, order, func(c *standing) error {
		switch {
		case c.retiredAt != nil:
			return refuse("the cursor is retired since %s", c.retiredAt.Format(time.RFC3339))
		case c.moving && !order.Force:
			return refuse("the cursor has moved within the last minute, so somebody uses it: stop its consumer first, or force it")
		}
		return nil
	})
}
