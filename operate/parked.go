package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// ParkedEvent is an event that a consumer has passed without handling it, because it kept failing.
type ParkedEvent struct {
	Cursor    cursor.Key
	Event     cursor.Event // a copy; it outlives the log's
	ErrorType string
	Attempts  int // replays included
	ParkedAt  time.Time
	ParkedBy  string
	Replaying bool // a replay was asked for
}

const sqlParked = `
select p.consumer, p.topic, p.shard, p.error_type, p.attempts, p.parked_at, p.parked_by, p.replay_at is not null,
    p.seq, p.occurred_at, p.recorded_at, p.event_topic, coalesce(p.key, ''), p.uuid, p.payload, p.metadata::text
from public.event_consumer_parked p
where p.consumer = $1 and p.topic = $2 and p.shard = $3 and p.seq > $4
order by p.seq
limit $5`

// Parked returns a cursor's parked events behind a seq, in order, at most limit of them.
func Parked(ctx context.Context, db cursor.Querier, log *cursor.Log, key cursor.Key, after int64, limit int) ([]ParkedEvent, error) {
	if err := key.Validate(); err != nil {
		return nil, fmt.Errorf("list parked events of cursor %q: %w", key, err)
	}
	rows, _ := db.Query(ctx, log.Render(sqlParked), key.Consumer, key.Topic, key.Shard, after, limit)
	parked, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p ParkedEvent, err error) {
		var metadata []byte
		err = row.Scan(&p.Cursor.Consumer, &p.Cursor.Topic, &p.Cursor.Shard, &p.ErrorType, &p.Attempts, &p.ParkedAt, &p.ParkedBy,
			&p.Replaying, &p.Event.Seq, &p.Event.OccurredAt, &p.Event.RecordedAt, &p.Event.Topic, &p.Event.Key, &p.Event.UUID,
			&p.Event.Payload, &metadata)
		if err != nil {
			return p, err
		}
		return p, json.Unmarshal(metadata, &p.Event.Metadata)
	})
	if err != nil {
		return nil, fmt.Errorf("list parked events of cursor %q: %w", key, log.Explain(err))
	}
	return parked, nil
}

const sqlReplay = `
with asked as (
    update public.event_consumer_parked p set replay_at = clock_timestamp(), replay_by = $5
    where p.consumer = $1 and p.topic = $2 and p.shard = $3 and p.seq = $4
    returning p.seq
), noted as (
    insert into public.event_consumer_interventions (consumer, topic, shard, action, from_seq, to_seq, by, reason)
    select $1, $2, $3, 'replay', seq, seq, $5, $6 from asked
    returning at
), woken as (
    select pg_notify('event_log', '') from asked
)
select at from noted, woken`

// Replay asks for another attempt at a parked event. The consumer's own process takes the request between two
// rounds: the handler's writes, its jobs and the row's end are one transaction. A replay that fails leaves the
// event parked, without the request. Later events, also those of the same key, were handled meanwhile.
func Replay(ctx context.Context, db cursor.Beginner, log *cursor.Log, key cursor.Key, seq int64, order Order) (Change, error) {
	return onParked(ctx, db, log, sqlReplay, "replay", key, seq, order)
}

const sqlDiscard = `
with gone as (
    delete from public.event_consumer_parked p
    where p.consumer = $1 and p.topic = $2 and p.shard = $3 and p.seq = $4
    returning p.seq
), noted as (
    insert into public.event_consumer_interventions (consumer, topic, shard, action, from_seq, to_seq, by, reason)
    select $1, $2, $3, 'discard', seq, seq, $5, $6 from gone
    returning at
)
select at from noted`

// Discard gives a parked event up: its copy is deleted, and who did it and why is recorded.
func Discard(ctx context.Context, db cursor.Beginner, log *cursor.Log, key cursor.Key, seq int64, order Order) (Change, error) {
	return onParked(ctx, db, log, sqlDiscard, "discard", key, seq, order)
}

func onParked(ctx context.Context, db cursor.Beginner, log *cursor.Log, sql, action string, key cursor.Key, seq int64, order Order) (Change, error) {
	change := Change{Cursor: key, Action: action, From: seq, To: seq, Events: 1, By: order.By, Reason: order.Reason, DryRun: order.DryRun}
	err := errors.Join(key.Validate(), order.validate())
	if err == nil {
		err = rehearse(ctx, db, order.DryRun, func(tx pgx.Tx) error {
			err := tx.QueryRow(ctx, log.Render(sql), key.Consumer, key.Topic, key.Shard, seq, order.By, order.Reason).Scan(&change.At)
			if errors.Is(err, pgx.ErrNoRows) {
				return cursor.ErrNotParked
			}
			return err
		})
	}
	if err != nil {
		return Change{}, fmt.Errorf("%s event %d of cursor %q: %w", action, seq, key, log.Explain(err))
	}
	return change, nil
}
