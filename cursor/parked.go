package cursor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

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

// Parked is an event that a consumer has passed without handling it, because it kept failing.
type Parked struct {
	Cursor    Key
	Event     Event // a copy; it outlives the log's
	ErrorType string
	Attempts  int // replays included
	ParkedAt  time.Time
	ParkedBy  string
	Replaying bool // a replay was asked for
}

const sqlParkedColumns = `p.seq, p.occurred_at, p.recorded_at, p.event_topic, coalesce(p.key, ''), p.uuid, p.payload, p.metadata::text`

const sqlListParked = `
select p.consumer, p.topic, p.shard, p.error_type, p.attempts, p.parked_at, p.parked_by, p.replay_at is not null,
    ` + sqlParkedColumns + `
from public.event_consumer_parked p
where p.consumer = $1 and p.topic = $2 and p.shard = $3 and p.seq > $4
order by p.seq
limit $5`

// ListParked returns a cursor's parked events behind a seq, in order, at most limit of them.
func ListParked(ctx context.Context, db Querier, log *Log, key Key, after int64, limit int) ([]Parked, error) {
	if err := key.Validate(); err != nil {
		return nil, fmt.Errorf("list parked events of cursor %q: %w", key, err)
	}
	rows, _ := db.Query(ctx, log.Render(sqlListParked), key.Consumer, key.Topic, key.Shard, after, limit)
	parked, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p Parked, err error) {
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
		return nil, fmt.Errorf("list parked events of cursor %q: %w", key, explainMissingTables(log, err))
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
func Replay(ctx context.Context, db Beginner, log *Log, key Key, seq int64, order Order) (Change, error) {
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
func Discard(ctx context.Context, db Beginner, log *Log, key Key, seq int64, order Order) (Change, error) {
	return onParked(ctx, db, log, sqlDiscard, "discard", key, seq, order)
}

func onParked(ctx context.Context, db Beginner, log *Log, sql, action string, key Key, seq int64, order Order) (Change, error) {
	change := Change{Cursor: key, Action: action, From: seq, To: seq, Events: 1, By: order.By, Reason: order.Reason, DryRun: order.DryRun}
	err := errors.Join(key.Validate(), order.validate())
	if err == nil {
		err = rehearse(ctx, db, order.DryRun, func(tx pgx.Tx) error {
			err := tx.QueryRow(ctx, log.Render(sql), key.Consumer, key.Topic, key.Shard, seq, order.By, order.Reason).Scan(&change.At)
			if errors.Is(err, pgx.ErrNoRows) {
				return ErrNotParked
			}
			return err
		})
	}
	if err != nil {
		return Change{}, fmt.Errorf("%s event %d of cursor %q: %w", action, seq, key, explainMissingTables(log, err))
	}
	return change, nil
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
select ` + sqlParkedColumns + `, p.attempts
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
