package operate

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

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

func holdBack(ctx context.Context, db cursor.Beginner, log *cursor.Log, action string, key cursor.Key, order Order, refused func(*standing) error) (Change, error) {
	return changeCursor(ctx, db, log, action, key, order, func(tx pgx.Tx, c *standing) (Change, error) {
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
func Pause(ctx context.Context, db cursor.Beginner, log *cursor.Log, key cursor.Key, order Order) (Change, error) {
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
func Resume(ctx context.Context, db cursor.Beginner, log *cursor.Log, key cursor.Key, order Order) (Change, error) {
	return holdBack(ctx, db, log, "resume", key, order, func(c *standing) error {
		if c.pausedAt == nil && c.retiredAt == nil {
			return refuse("the cursor is neither paused nor retired")
		}
		return nil
	})
}

// Retire says that nobody needs a cursor any more: it is kept, but no round begins and no event is kept for it. One
// that has moved within the last minute has a consumer, and is refused unless forced. [Resume] takes it back.
func Retire(ctx context.Context, db cursor.Beginner, log *cursor.Log, key cursor.Key, order Order) (Change, error) {
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
