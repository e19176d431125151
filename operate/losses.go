package operate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Loss is a range of events that a consumer was moved past by the library itself, unhandled.
type Loss struct {
	Cursor     cursor.Key
	First      int64
	Last       int64
	Reason     string // "retention" or "resume_age"
	RecordedAt time.Time
	RecordedBy string     // the instance
	SettledAt  *time.Time // nil until an operator has settled it
	SettledBy  string
}

const sqlLosses = `
select l.consumer, l.topic, l.shard, l.first_seq, l.last_seq, l.reason, l.recorded_at, l.recorded_by, l.settled_at,
    coalesce(l.settled_by, '')
from public.event_consumer_losses l
where (l.settled_at is null or $1) and (cardinality($2::text[]) = 0 or exists (
    select from unnest($2::text[], $3::text[], $4::text[]) as k(consumer, topic, shard)
    where l.consumer = k.consumer and l.topic = k.topic and l.shard = k.shard))
order by l.consumer, l.topic, l.shard, l.first_seq
limit $5`

// Losses returns the losses of the given cursors, or of all, that no operator has settled, or also those that one
// has; at most limit of them.
func Losses(ctx context.Context, db cursor.Querier, log *cursor.Log, settled bool, limit int, keys ...cursor.Key) ([]Loss, error) {
	consumers, topics, shards := cursor.Columns(keys)
	rows, _ := db.Query(ctx, log.Render(sqlLosses), settled, consumers, topics, shards, limit)
	losses, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (l Loss, err error) {
		err = row.Scan(&l.Cursor.Consumer, &l.Cursor.Topic, &l.Cursor.Shard, &l.First, &l.Last, &l.Reason, &l.RecordedAt,
			&l.RecordedBy, &l.SettledAt, &l.SettledBy)
		return l, err
	})
	if err != nil {
		return nil, fmt.Errorf("list losses: %w", log.Explain(err))
	}
	return losses, nil
}

const sqlSettleLosses = `
with settled as (
    update public.event_consumer_losses l set settled_at = clock_timestamp(), settled_by = $5
    where l.consumer = $1 and l.topic = $2 and l.shard = $3 and l.settled_at is null and ($4::bigint = 0 or l.first_seq = $4::bigint)
    returning l.first_seq, l.last_seq
), noted as (
    insert into public.event_consumer_interventions (consumer, topic, shard, action, from_seq, to_seq, by, reason)
    select $1, $2, $3, 'settle', min(s.first_seq), max(s.last_seq), $5, $6 from settled s having count(*) > 0
    returning at, from_seq, to_seq
)
select n.at, n.from_seq, n.to_seq, (select sum(s.last_seq - s.first_seq + 1)::bigint from settled s) from noted n`

// SettleLosses says that what a consumer has lost was seen to: the loss whose first event is first, or, with 0, all of
// the cursor's. The rows stay. [ErrRefused] is returned where there is none.
func SettleLosses(ctx context.Context, db cursor.Beginner, log *cursor.Log, key cursor.Key, first int64, order Order) (Change, error) {
	change := Change{Cursor: key, Action: "settle", By: order.By, Reason: order.Reason, DryRun: order.DryRun}
	err := errors.Join(key.Validate(), order.validate())
	if err == nil {
		err = rehearse(ctx, db, order.DryRun, func(tx pgx.Tx) error {
			err := tx.QueryRow(ctx, log.Render(sqlSettleLosses), key.Consumer, key.Topic, key.Shard, first, order.By, order.Reason).
				Scan(&change.At, &change.From, &change.To, &change.Events)
			switch {
			case errors.Is(err, pgx.ErrNoRows) && first != 0:
				return refuse("there is no unsettled loss whose first event is %d", first)
			case errors.Is(err, pgx.ErrNoRows):
				return refuse("there is no unsettled loss")
			}
			return err
		})
	}
	if err != nil {
		return Change{}, fmt.Errorf("settle losses of cursor %q: %w", key, log.Explain(err))
	}
	return change, nil
}
