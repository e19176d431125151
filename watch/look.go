package watch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// ahead is how many numbers behind a cursor are looked at for a hole.
const ahead = 100

// One snapshot: a head and a cursor of different moments would make lags and stalls that never were.
const sqlLook = `
with expected as (
    select k.consumer, k.topic, k.shard, k.n
    from unnest($1::text[], $2::text[], $3::text[]) with ordinality as k(consumer, topic, shard, n)
), watched as (
    select e.consumer, e.topic, e.shard, e.n from expected e
    union all
    select c.consumer, c.topic, c.shard, 0 from (
        select a.consumer, a.topic, a.shard from public.event_consumer_cursors a
        union
        select i.consumer, i.topic, i.shard from public.event_consumer_interventions i where i.action = 'create'
    ) c
    where cardinality($1::text[]) = 0
), log as (
    select s.last_seq as head, clock_timestamp() as now, lowest.seq as lowest, lowest.recorded_at as lowest_at,
        (select l.recorded_at from public.event_log l order by l.seq desc limit 1) as newest_at,
        r.keep, r.switched_on, r.maintained_at, r.failing_since,
        (
            select max((e.ends)[1]::numeric) from (
                select regexp_match(pg_get_expr(p.relpartbound, p.oid), 'TO \(''([0-9]+)''\)') as ends
                from pg_inherits i join pg_class p on p.oid = i.inhrelid where i.inhparent = to_regclass($5)
            ) e
            where not exists (
                select from pg_inherits i join pg_class p on p.oid = i.inhrelid
                where i.inhparent = to_regclass($5) and pg_get_expr(p.relpartbound, p.oid) like '%TO (MAXVALUE)%')
        )::bigint - 1 - s.last_seq as reserve,
        pg_is_in_recovery() as standby,
        (select min(o.appended_at) from (select q.appended_at from public.event_outbox q order by q.xid, q.id limit 100) o) as staged_at,
        (select coalesce(jsonb_agg(jsonb_build_array(c.consumer, c.topic, c.shard) order by c.consumer, c.topic, c.shard), '[]')::text
            from public.event_consumer_cursors c
            where cardinality($1::text[]) > 0 and c.retired_at is null and not exists (
                select from expected e where e.consumer = c.consumer and e.topic = c.topic and e.shard = c.shard)) as others
    from public.event_seq s
    left join lateral (select l.seq, l.recorded_at from public.event_log l order by l.seq limit 1) lowest on true
    left join lateral (
        select extract(epoch from t.keep)::float8 as keep, t.switched_on, greatest(t.maintained_at, t.set_at) as maintained_at, t.failing_since from public.event_retention t limit 1
    ) r on true
    limit 1 -- there is one; that the planner knows it keeps the estimates small, and so the compiler (jit) away
)
select g.head, g.now, coalesce(g.lowest, 0), g.lowest_at, g.newest_at, g.keep, g.switched_on, g.maintained_at, g.failing_since, g.reserve, g.standby, g.staged_at, g.others,
    k.consumer, k.topic, k.shard,
    exists (
        select from public.event_consumer_interventions i
        where i.consumer = k.consumer and i.topic = k.topic and i.shard = k.shard and i.action = 'create'),
    c.last_seq, c.last_occurred_at, c.created_at, c.moved_at, coalesce(c.moved_by, ''), coalesce(c.matched_seq, 0), c.matched_at,
    c.paused_at, c.retired_at,
    coalesce((
        select l.occurred_at <> c.last_occurred_at
        from public.event_log l where l.seq = c.last_seq and c.last_seq = c.occurred_seq limit 1), false),
    coalesce(pending.seq, 0), pending.occurred_at, pending.recorded_at,
    array(select l.seq from public.event_log l where l.seq > c.last_seq order by l.seq limit $4),
    coalesce(base.seq, 0), base.at, coalesce(unmatched.seq, 0), unmatched.recorded_at,
    coalesce(f.seq, 0), f.since, f.failed_at, f.retry_at, f.attempts, f.error_type, f.failed_by,
    parked.n, coalesce(parked.seq, 0), parked.since, coalesce(parked.error_type, ''),
    losses.n, coalesce(losses.first_seq, 0), coalesce(losses.last_seq, 0), losses.since, coalesce(losses.reason, '')
from log g
left join watched k on true
left join public.event_consumer_cursors c on c.consumer = k.consumer and c.topic = k.topic and c.shard = k.shard
left join public.event_consumer_failures f
    on f.consumer = k.consumer and f.topic = k.topic and f.shard = k.shard and f.through > c.last_seq
left join lateral (
    select l.seq, l.occurred_at, l.recorded_at from public.event_log l where l.seq > c.last_seq order by l.seq limit 1
) pending on true
-- From where on the consumer had the chance to match: its last match, or where it was put since.
left join lateral (
    select i.to_seq as seq, i.at from public.event_consumer_interventions i
    where i.consumer = k.consumer and i.topic = k.topic and i.shard = k.shard
        and i.action in ('create', 'seek', 'skip', 'adopt') and i.to_seq is not null
    order by i.id desc limit 1
) base on true
left join lateral (
    select l.seq, l.recorded_at from public.event_log l
    where l.seq > greatest(c.matched_seq, base.seq, 0) and l.seq <= c.last_seq
    order by l.seq limit 1
) unmatched on true
left join lateral (
    select count(*) as n, min(p.seq) as seq, min(p.parked_at) as since, (array_agg(p.error_type order by p.seq))[1] as error_type
    from public.event_consumer_parked p where p.consumer = k.consumer and p.topic = k.topic and p.shard = k.shard
) parked on true
left join lateral (
    select coalesce(sum(o.last_seq - o.first_seq + 1), 0)::bigint as n, min(o.first_seq) as first_seq, max(o.last_seq) as last_seq,
        min(o.recorded_at) as since, (array_agg(o.reason order by o.first_seq))[1] as reason
    from public.event_consumer_losses o
    where o.consumer = k.consumer and o.topic = k.topic and o.shard = k.shard and o.settled_at is null
) losses on true
order by k.n, k.consumer, k.topic, k.shard`

// found is what one look has read.
type found struct {
	head, lowest       int64
	now                time.Time
	lowestAt, newestAt *time.Time
	keep               *float64
	removes            *bool // retention is switched on
	maintainedAt       *time.Time
	maintenanceFails   *time.Time // since when
	reserve            *int64     // numbers above the head that there are partitions for; null is without end
	standby            bool
	stagedAt           *time.Time // of the oldest staged event
	others             []string
	cursors            []row
}

// row is what was read of one cursor. Where exists is false nothing but the key and created is set.
type row struct {
	key      cursor.Key
	exists   bool
	recorded bool // its creation is on record

	position                         int64
	occurredAt, createdAt            time.Time
	movedAt, matchedAt               time.Time
	movedBy                          string
	matched                          int64
	pausedAt, retiredAt              time.Time
	rewritten                        bool
	pending                          int64
	pendingOccurred, pendingRecorded time.Time
	numbers                          []int64
	base, unmatched                  int64
	baseAt, unmatchedAt              time.Time
	failure                          *Failure
	parked, parkedSeq                int64
	parkedSince                      time.Time
	parkedType                       string
	lost, lostFirst, lostLast        int64
	lostSince                        time.Time
	lostReason                       string
}

// errNoCounter is a log whose counter has no row.
var errNoCounter = errors.New("the counter has no row")

func (w *Watch) read(ctx context.Context) (*found, error) {
	consumers, topics, shards := cursor.Columns(w.config.Keys)
	rows, err := w.db.Query(ctx, w.config.Log.Render(sqlLook), consumers, topics, shards, ahead, w.config.Log.Table("log"))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var f *found
	for rows.Next() {
		if f == nil {
			f = &found{}
		}
		if err := f.scan(rows); err != nil {
			return nil, err
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if f == nil {
		return nil, errNoCounter
	}
	if w.config.Now != nil {
		f.now = w.config.Now()
	}
	return f, nil
}

func (f *found) scan(rows pgx.Rows) error {
	var r row
	var others string
	var consumer, topic, shard, failureType, failedBy *string
	var position, parked, lost *int64
	var attempts *int
	var occurredAt, createdAt, movedAt, matchedAt, pausedAt, retiredAt, pendingOccurred, pendingRecorded, baseAt, unmatchedAt,
		since, failedAt, retryAt, parkedSince, lostSince *time.Time
	var failure Failure
	err := rows.Scan(&f.head, &f.now, &f.lowest, &f.lowestAt, &f.newestAt, &f.keep, &f.removes, &f.maintainedAt, &f.maintenanceFails, &f.reserve, &f.standby, &f.stagedAt, &others,
		&consumer, &topic, &shard, &r.recorded,
		&position, &occurredAt, &createdAt, &movedAt, &r.movedBy, &r.matched, &matchedAt, &pausedAt, &retiredAt, &r.rewritten,
		&r.pending, &pendingOccurred, &pendingRecorded, &r.numbers, &r.base, &baseAt, &r.unmatched, &unmatchedAt,
		&failure.Seq, &since, &failedAt, &retryAt, &attempts, &failureType, &failedBy,
		&parked, &r.parkedSeq, &parkedSince, &r.parkedType,
		&lost, &r.lostFirst, &r.lostLast, &lostSince, &r.lostReason)
	if err != nil {
		return err
	}
	if f.others == nil {
		var keys [][3]string
		if err := json.Unmarshal([]byte(others), &keys); err != nil {
			return fmt.Errorf("read cursors that are not expected: %w", err)
		}
		f.others = make([]string, len(keys))
		for i, k := range keys {
			f.others[i] = cursor.Key{Consumer: k[0], Topic: k[1], Shard: k[2]}.String()
		}
	}
	if consumer == nil {
		return nil
	}
	r.key = cursor.Key{Consumer: *consumer, Topic: *topic, Shard: *shard}
	if r.exists = position != nil; r.exists {
		r.position = *position
		r.occurredAt, r.createdAt, r.movedAt, r.matchedAt = or(occurredAt), or(createdAt), or(movedAt), or(matchedAt)
		r.pausedAt, r.retiredAt = or(pausedAt), or(retiredAt)
		r.pendingOccurred, r.pendingRecorded = or(pendingOccurred), or(pendingRecorded)
		r.baseAt, r.unmatchedAt = or(baseAt), or(unmatchedAt)
	}
	if attempts != nil {
		failure.Since, failure.FailedAt, failure.RetryAt = or(since), or(failedAt), or(retryAt)
		failure.Attempts, failure.ErrorType, failure.FailedBy = *attempts, *failureType, *failedBy
		r.failure = &failure
	}
	r.parked, r.parkedSince, r.lost, r.lostSince = *parked, or(parkedSince), *lost, or(lostSince)
	f.cursors = append(f.cursors, r)
	return nil
}

// or is the moment, or the zero one.
func or(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}
