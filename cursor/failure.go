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
	Since     time.Time     // the first of them
	Wait      time.Duration // until the next attempt may be made
}

// Attempt is a failed round, as it is recorded.
type Attempt struct {
	Seq       int64 // 0 when it is not known
	Through   int64 // the last event of the round
	Batch     int   // without a seq: how many events the next round may hand out
	ErrorType string

	// The next attempt comes after Delay, doubled with each attempt up to DelayCap, times Jitter.
	Delay, DelayCap time.Duration
	Jitter          float64
}

const sqlRecordFailure = `
insert into public.event_consumer_failures as f
    (consumer, topic, shard, seq, through, batch, since, failed_at, attempts, error_type, failed_by, edge, retry_at)
select $1::text, $2::text, $3::text, nullif($4::bigint, 0), $5::bigint, nullif($6::int, 0), now(), now(), 1, $7::text, $8::text,
    true, now() + make_interval(secs => least($9::float8, $10::float8) * $11::float8)
on conflict (consumer, topic, shard) do update set
    seq = excluded.seq,
    through = excluded.through,
    batch = excluded.batch,
    since = case when f.seq is not distinct from excluded.seq then f.since else excluded.since end,
    attempts = case when f.seq is not distinct from excluded.seq then f.attempts + 1 else 1 end,
    edge = f.seq is distinct from excluded.seq or f.error_type <> excluded.error_type,
    failed_at = excluded.failed_at,
    error_type = excluded.error_type,
    failed_by = excluded.failed_by,
    retry_at = now() + make_interval(secs => $11::float8 * least($10::float8, $9::float8 * power(2,
        case when f.seq is not distinct from excluded.seq then least(f.attempts, 30) else 0 end)))
returning edge, attempts, since, extract(epoch from retry_at - now())::float8`

// RecordFailure notes a failed round in a transaction of its own, after the round was rolled back. Edge
// tells whether this is news: the cursor's first failure, or one at another seq or of another type.
func RecordFailure(ctx context.Context, db Querier, log *Log, key Key, by string, a Attempt) (f Failure, edge bool, err error) {
	f = Failure{Seq: a.Seq, Through: a.Through, Batch: a.Batch, ErrorType: a.ErrorType}
	rows, _ := db.Query(ctx, log.Render(sqlRecordFailure), key.Consumer, key.Topic, key.Shard, a.Seq, a.Through, a.Batch,
		a.ErrorType, by, a.Delay.Seconds(), a.DelayCap.Seconds(), a.Jitter)
	var wait float64
	_, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
		return struct{}{}, row.Scan(&edge, &f.Attempts, &f.Since, &wait)
	})
	if err != nil {
		return Failure{}, false, fmt.Errorf("record failure of cursor %q: %w", key, err)
	}
	f.Wait = seconds(wait)
	return f, edge, nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

const sqlFailure = `
select coalesce(f.seq, 0), f.through, coalesce(f.batch, 0), f.attempts, f.error_type, f.since,
    extract(epoch from f.retry_at - clock_timestamp())::float8
from public.event_consumer_failures f
where f.consumer = $1 and f.topic = $2 and f.shard = $3`

func scanFailure(row pgx.Row) (*Failure, error) {
	var f Failure
	var wait float64
	if err := row.Scan(&f.Seq, &f.Through, &f.Batch, &f.Attempts, &f.ErrorType, &f.Since, &wait); err != nil {
		return nil, err
	}
	f.Wait = max(0, seconds(wait))
	return &f, nil
}

const sqlClearFailure = `
delete from public.event_consumer_failures f
where f.consumer = $1 and f.topic = $2 and f.shard = $3 and f.through <= $4`
