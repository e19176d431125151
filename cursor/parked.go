package cursor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// ErrNotParked is returned when an event that is to be replayed or discarded is not parked, or not any more.
var ErrNotParked = errors.New("event is not parked")

// Permanent marks an error as one that another attempt cannot mend: a consumer that parks parks its event at
// once; one that does not stands still as ever. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ error }

func (e *permanentError) Unwrap() error { return e.error }

// IsPermanent tells whether an error was marked by [Permanent].
func IsPermanent(err error) bool {
	var permanent *permanentError
	return errors.As(err, &permanent)
}

// The copy is the one that the round holds: retention may have removed the log's meanwhile.
const sqlPark = `
insert into public.event_consumer_parked as p
    (consumer, topic, shard, seq, occurred_at, recorded_at, event_topic, key, uuid, payload, metadata, error_type, attempts, parked_by)
values ($1, $2, $3, $4, $8, $9, $10, nullif($11, ''), $12, $13, $14::jsonb, $5, $6, $7)
on conflict (consumer, topic, shard, seq) do update set
    error_type = excluded.error_type, attempts = p.attempts + excluded.attempts, parked_at = clock_timestamp(),
    parked_by = excluded.parked_by, replay_at = null`

const sqlOpenReplay = `
select p.seq, p.occurred_at, p.recorded_at, p.event_topic, coalesce(p.key, ''), p.uuid, p.payload, p.metadata::text, p.attempts
from public.event_consumer_parked p
where p.consumer = $1 and p.topic = $2 and p.shard = $3 and p.replay_at is not null
order by p.seq
limit 1`

// OpenReplay begins a round that replays one parked event. Its Commit does not move the cursor but deletes the
// parked row. Status is CaughtUp where no replay is asked for.
func (r *Round) OpenReplay(ctx context.Context) (*Opening, error) {
	key := r.config.Key
	o := &r.opening
	hold, err := r.begin(ctx, func(batch *pgx.Batch) {
		batch.Queue(r.config.Log.Render(sqlOpenReplay), key.Consumer, key.Topic, key.Shard)
	}, func(results pgx.BatchResults) error {
		rows, _ := results.Query()
		defer rows.Close()
		var attempts int
		var e Event
		var metadata []byte
		_, err := pgx.ForEachRow(rows, []any{&e.Seq, &e.OccurredAt, &e.RecordedAt, &e.Topic, &e.Key, &e.UUID, &e.Payload, &metadata, &attempts},
			func() error {
				o.Events = []Event{e}
				o.Failure = &Failure{Seq: e.Seq, Attempts: attempts}
				return json.Unmarshal(metadata, &o.Events[0].Metadata)
			})
		return err
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("open replay: %w", err)
	case !hold.locked:
		o.Status = Locked
	case hold.held:
		o.Status = Held
	case len(o.Events) == 0:
		o.Status = CaughtUp
	default:
		o.Status, o.Through, r.replaying = Replaying, o.Position, o.Events[0].Seq
	}
	return o, nil
}

const sqlTakeReplay = `
update public.event_consumer_parked p set replay_at = null, attempts = p.attempts + 1
where p.consumer = $1 and p.topic = $2 and p.shard = $3 and p.seq = $4`

// TakeReplay takes the request back in a transaction of its own before the event is handed out: an event that
// kills its process does so once for each request.
func (r *Round) TakeReplay(ctx context.Context, db Querier) error {
	key := r.config.Key
	if err := exec(ctx, db, r.config.Log.Render(sqlTakeReplay), key.Consumer, key.Topic, key.Shard, r.replaying); err != nil {
		return fmt.Errorf("take replay: %w", err)
	}
	return nil
}

const sqlAnswerReplay = `
update public.event_consumer_parked p set
    error_type = coalesce(nullif($5, ''), p.error_type),
    attempts = case when $5 = '' then p.attempts - 1 else p.attempts end,
    replay_at = case when $5 = '' then clock_timestamp() else p.replay_at end -- somebody may have asked again meanwhile
where p.consumer = $1 and p.topic = $2 and p.shard = $3 and p.seq = $4`

// AnswerReplay notes in a transaction of its own why a replay failed, after the round was rolled back; the event
// stays parked. An empty error type, after a stop, leaves the request for the next process.
func (r *Round) AnswerReplay(ctx context.Context, db Querier, errorType string) error {
	key := r.config.Key
	if err := exec(ctx, db, r.config.Log.Render(sqlAnswerReplay), key.Consumer, key.Topic, key.Shard, r.replaying, errorType); err != nil {
		return fmt.Errorf("answer replay: %w", err)
	}
	return nil
}

// No row deleted, because it was discarded meanwhile: no row moved.
const sqlEndReplay = `
with gone as (
    delete from public.event_consumer_parked p
    where p.consumer = $1 and p.topic = $2 and p.shard = $3 and p.seq = $5::bigint and current_setting('eventlog.unit', true) = $7::text
    returning 1
), moved as (
    update public.event_consumer_cursors c set rounds = c.rounds + 1
    where c.consumer = $1 and c.topic = $2 and c.shard = $3 and exists (select from gone)
    returning c.rounds
)` + sqlRecordRound
