package cursor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const sqlMove = `
with moved as (
    update public.event_consumer_cursors c set
        last_seq = $5::bigint,
        last_occurred_at = coalesce($10::timestamptz, c.last_occurred_at),
        occurred_seq = case when $10::timestamptz is null then c.occurred_seq else $5::bigint end,
        matched_seq = coalesce(nullif($11::bigint, 0), c.matched_seq),
        matched_at = case when $11::bigint > 0 then clock_timestamp() else c.matched_at end,
        moved_at = clock_timestamp(),
        moved_by = $6::text,
        rounds = c.rounds + 1
    where c.consumer = $1 and c.topic = $2 and c.shard = $3 and c.last_seq = $4::bigint
        and current_setting('eventlog.unit', true) = $7::text
    returning c.rounds
)` + sqlRecordRound

// sqlRecordRound ends the statement that moves a cursor. No row moved: division by zero, so that the COMMIT behind it in
// the trip commits nothing.
const sqlRecordRound = `, recorded as (
    insert into public.event_consumer_rounds as r
        (consumer, topic, shard, slot, round, first_seq, last_seq, handled, committed_at, committed_by)
    select $1, $2, $3, m.rounds % $8::int, $7::text, $4::bigint + 1, $5::bigint, $9::int, clock_timestamp(), $6::text
    from moved m where $8::int > 0
    on conflict (consumer, topic, shard, slot) do update set
        round = excluded.round, first_seq = excluded.first_seq, last_seq = excluded.last_seq, handled = excluded.handled,
        committed_at = excluded.committed_at, committed_by = excluded.committed_by
)
select 1 / count(*) from moved`

const sqlRecordLoss = `
insert into public.event_consumer_losses as l (consumer, topic, shard, first_seq, last_seq, recorded_by, reason)
values ($1, $2, $3, $4, $5, $6, $7)
on conflict (consumer, topic, shard, first_seq) do update set
    last_seq = greatest(l.last_seq, excluded.last_seq), reason = excluded.reason, recorded_at = clock_timestamp(), recorded_by = excluded.recorded_by,
    settled_at = null, settled_by = null`

// Commit writes what was buffered, parks the event of a Parking round, records a loss, moves the cursor to through,
// and commits, in one trip. Through is the opening's Through, or, to commit a prefix, the seq of the last event
// whose unit ended well.
//
// After an error the round must be rolled back. If the connection was lost while the COMMIT was under way,
// its outcome is not known; the next round finds out, as it reads the position under the lock.
func (r *Round) Commit(ctx context.Context, through int64) error {
	if position := r.opening.Position; through < position || through == position && r.opening.Status != Replaying {
		return fmt.Errorf("a round at seq %d cannot end at %d", position, through)
	}
	for _, owner := range r.owners {
		if p, ok := owner.(Preparer); ok {
			if err := p.Prepare(ctx, r.tx, r.items[owner]); err != nil {
				return err
			}
		}
	}
	trip, err := r.lastTrip(through)
	if err != nil {
		return err
	}
	for _, owner := range r.owners {
		relay, ok := owner.(Relayer)
		if !ok {
			continue
		}
		if err := trip.send(ctx, r.conn); err != nil {
			return err
		}
		trip = &Trip{}
		if err := relay.BeforeCommit(ctx, r.items[owner]); err != nil {
			return err
		}
	}
	trip.Queue(explainCommit, "commit")
	tag, err := trip.sendForTag(ctx, r.conn)
	if err == nil {
		err = checkCommit(tag)
	}
	return err
}

// lastTrip is what a round sends at its end, but for the COMMIT.
func (r *Round) lastTrip(through int64) (*Trip, error) {
	trip := &Trip{}
	if r.session.savepoint {
		trip.Queue(nil, sqlRelease) // the cursor moves in the transaction that has locked it
	}
	if r.used {
		trip.Queue(nil, sqlRestore, r.searchPath, r.role)
	}
	for _, owner := range r.owners {
		if err := owner.Flush(trip, r.items[owner]); err != nil {
			return nil, err
		}
	}
	return trip, r.queueMove(trip, through)
}

func explainCommit(err error) error { return fmt.Errorf("commit: %w", err) }

// checkCommit tells by its command tag whether a COMMIT has committed: one of an aborted transaction has not.
func checkCommit(tag string) error {
	if tag == "ROLLBACK" {
		return fmt.Errorf("commit: %w", pgx.ErrTxCommitRollback)
	}
	return nil
}

func (r *Round) queueMove(trip *Trip, through int64) error {
	log, key, o := r.config.Log, r.config.Key, &r.opening
	switch o.Status {
	case Replaying:
		trip.Queue(explainEndReplay, log.Render(sqlEndReplay), key.Consumer, key.Topic, key.Shard, r.replaying-1, r.replaying,
			r.config.By, r.config.ID, r.config.Record, r.handled)
		return nil
	case Lost:
		trip.Queue(nil, log.Render(sqlRecordLoss), key.Consumer, key.Topic, key.Shard, o.Position+1, through, r.config.By, o.Reason)
	case Parking:
		seq, errorType, attempts := r.Parked()
		e := &o.Events[0]
		metadata, err := json.Marshal(e.Metadata)
		if err != nil {
			return fmt.Errorf("park event %d: %w", seq, err)
		}
		trip.Queue(nil, log.Render(sqlPark), key.Consumer, key.Topic, key.Shard, seq, errorType, attempts, r.config.By,
			e.OccurredAt, e.RecordedAt, e.Topic, e.Key, e.UUID, notNil(e.Payload), string(metadata))
	}
	occurred := o.throughAt
	if through != o.Through {
		for i := range o.Events {
			if o.Events[i].Seq == through {
				occurred = &o.Events[i].OccurredAt
			}
		}
	}
	trip.Queue(explainMove, log.Render(sqlMove), key.Consumer, key.Topic, key.Shard, o.Position, through,
		r.config.By, r.config.ID, r.config.Record, r.handled, occurred, r.matched)
	if o.Failure != nil && o.Failure.Through <= through {
		r.cleared = true
		trip.Queue(nil, log.Render(sqlClearFailure), key.Consumer, key.Topic, key.Shard, through)
	}
	if r.config.ParkAfter > 0 {
		if r.mark.slow {
			trip.Queue(nil, log.Render(sqlSettleMark), key.Consumer, key.Topic, key.Shard)
		}
		trip.Queue(nil, log.Render(sqlDropMark), key.Consumer, key.Topic, key.Shard, through)
	}
	return nil
}

func notNil(payload []byte) []byte {
	if payload == nil {
		return []byte{}
	}
	return payload
}

func explainEndReplay(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "22012" { // division_by_zero
		return ErrNotParked
	}
	return fmt.Errorf("end replay: %w", err)
}

func explainMove(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "22012" { // division_by_zero
		return ErrCursorMoved
	}
	return fmt.Errorf("move cursor: %w", err)
}
