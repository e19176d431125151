package operate

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Seek moves a cursor by hand: its consumer goes on at to, as a new one would start there. It waits for a round that
// is under way, at most ten seconds ([LockedError]), ends the cursor's standing failure, wakes the consumer, and
// records who did it and why. Events that are skipped by it are not handled; events that come again are handled again.
//
// What is parked stays parked, also where it comes again.
//
// What is outside the log is refused with [ErrRefused]. A time reads the log once; where no event is that young, it is
// the head. It is the way on for a cursor that is ahead of its log.
func Seek(ctx context.Context, db cursor.Beginner, log *cursor.Log, key cursor.Key, to cursor.Start, order Order) (Change, error) {
	return changeCursor(ctx, db, log, "seek", key, order, func(tx pgx.Tx, c *standing) (Change, error) {
		place, err := cursor.Locate(ctx, tx, log, to)
		switch {
		case err != nil:
			return Change{}, err
		case place.Position > place.Head:
			return Change{}, refuse("seq %d is outside the log, whose head is %d: the next event will be %d", place.Position+1, place.Head, place.Head+1)
		case place.Position < place.Lowest-1:
			return Change{}, refuse("event %d is not in the log any more, whose oldest is %d: seek to the beginning", place.Position+1, place.Lowest)
		}
		return moveByHand(ctx, tx, log, "seek", c, place.Position, order)
	})
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
func Skip(ctx context.Context, db cursor.Beginner, log *cursor.Log, key cursor.Key, seq int64, order Order) (Change, error) {
	return changeCursor(ctx, db, log, "skip", key, order, func(tx pgx.Tx, c *standing) (Change, error) {
		if c.position > c.head {
			return Change{}, refuse("%w", &cursor.AheadError{Position: c.position, Head: c.head})
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
func moveByHand(ctx context.Context, tx pgx.Tx, log *cursor.Log, action string, c *standing, position int64, order Order) (Change, error) {
	change := Change{From: c.position, To: position}
	err := tx.QueryRow(ctx, log.Render(sqlMoveByHand), c.key.Consumer, c.key.Topic, c.key.Shard, c.position, position,
		order.By, order.Reason, action).Scan(&change.At, &change.Events)
	return change, err
}
