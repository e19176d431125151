package cursor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Failure is the standing failure of a cursor.
type Failure struct {
	Seq       int64 // the event in hand or the missing number; 0 when it is not known
	Through   int64 // what has to be passed for the failure to be over
	Batch     int   // without a seq: how many events the next round may hand out
	Attempts  int   // rounds that failed at this seq, one after another
	ErrorType string
	Permanent bool          // another attempt is of no use
	Since     time.Time     // the first of them
	Wait      time.Duration // until the next attempt may be made
}

// Attempt is a failed round, as it is recorded.
type Attempt struct {
	Seq       int64 // 0 when it is not known
	Through   int64 // the last event of the round
	Batch     int   // without a seq: how many events the next round may hand out
	ErrorType string
	Permanent bool // another attempt is of no use

	// The next attempt comes after Delay, doubled with each attempt up to DelayCap, times Jitter.
	Delay, DelayCap time.Duration
	Jitter          float64
}

// A failure that the cursor has passed meanwhile is none: another process handled the event, or a commit whose
// outcome was not known had succeeded. Whether or not, the round has ended, and its mark is closed.
const sqlRecordFailure = `
with closed as (
    delete from public.event_consumer_marks m
    where m.consumer = $1 and m.topic = $2 and m.shard = $3 and m.marked_by = $8 and not m.slow
), alive as (
    update public.event_consumer_marks m set seq = null, deaths = 0
    where m.consumer = $1 and m.topic = $2 and m.shard = $3 and m.marked_by = $8 and m.slow
)
insert into public.event_consumer_failures as f
    (consumer, topic, shard, seq, through, batch, since, failed_at, attempts, error_type, permanent, failed_by, edge, retry_at)
select c.consumer, c.topic, c.shard, nullif($4::bigint, 0), $5::bigint, nullif($6::int, 0), now(), now(), 1, $7::text, $12::bool,
    $8::text, true, now() + make_interval(secs => least($9::float8, $10::float8) * $11::float8)
from public.event_consumer_cursors c
where c.consumer = $1::text and c.topic = $2::text and c.shard = $3::text and c.last_seq < $5::bigint
on conflict (consumer, topic, shard) do update set
    seq = excluded.seq,
    through = excluded.through,
    batch = excluded.batch,
    since = case when f.seq is not distinct from excluded.seq then f.since else excluded.since end,
    attempts = case when f.seq is not distinct from excluded.seq then f.attempts + 1 else 1 end,
    edge = f.seq is distinct from excluded.seq or f.error_type <> excluded.error_type,
    failed_at = excluded.failed_at,
    error_type = excluded.error_type,
    permanent = excluded.permanent,
    failed_by = excluded.failed_by,
    retry_at = now() + make_interval(secs => $11::float8 * least($10::float8, $9::float8 * power(2,
        case when f.seq is not distinct from excluded.seq then least(f.attempts, 30) else 0 end)))
returning edge, attempts, since, extract(epoch from retry_at - now())::float8`

// Outcome is what became of a failure that was to be recorded.
type Outcome int

const (
	// Recorded once more, as a repeat.
	Recorded Outcome = iota
	// Edge is news: the cursor's first failure, or one at another seq or of another type.
	Edge
	// Passed is no failure any more: the cursor is beyond it, or is gone.
	Passed
)

// RecordFailure notes a failed round in a transaction of its own, after the round was rolled back, and closes
// the round's mark.
func RecordFailure(ctx context.Context, db Querier, log *Log, key Key, by string, a Attempt) (Failure, Outcome, error) {
	f := Failure{Seq: a.Seq, Through: a.Through, Batch: a.Batch, ErrorType: a.ErrorType, Permanent: a.Permanent}
	rows, _ := db.Query(ctx, log.Render(sqlRecordFailure), key.Consumer, key.Topic, key.Shard, a.Seq, a.Through, a.Batch,
		a.ErrorType, by, a.Delay.Seconds(), a.DelayCap.Seconds(), a.Jitter, a.Permanent)
	outcome, wait := Passed, 0.0
	var edge bool
	_, err := pgx.ForEachRow(rows, []any{&edge, &f.Attempts, &f.Since, &wait}, func() error {
		outcome = Recorded
		if edge {
			outcome = Edge
		}
		return nil
	})
	if err != nil {
		return Failure{}, Passed, fmt.Errorf("record failure of cursor %q: %w", key, err)
	}
	f.Wait = seconds(wait)
	return f, outcome, nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

const sqlClearFailure = `
delete from public.event_consumer_failures f
where f.consumer = $1 and f.topic = $2 and f.shard = $3 and f.through <= $4`
