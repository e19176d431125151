package telemetry

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// What a problem may be: the closed list of attribute eventlog.problem.
const (
	cursorMissing = "cursor_missing" // there is no row of it
	cursorAhead   = "cursor_ahead"   // it is beyond the log, or the log was written anew below it
	gap           = "gap"            // a number is missing from the log
	failing       = "failing"        // an event or its round fails
	parked        = "parked"         // parked events wait for somebody
	lost          = "lost"           // losses wait to be settled
	paused        = "paused"         // by an operator
	retired       = "retired"        // by an operator, although it is expected
)

// consumers are cursors as parameters of the statement.
type consumers struct{ consumer, topic, shard []string }

func newConsumers(keys []cursor.Key) (c consumers) {
	c.consumer, c.topic, c.shard = cursor.Columns(keys)
	return c
}

// standing is where a consumer stands.
type standing struct {
	head, position int64
	age            float64 // of the oldest event after the position, in seconds; not clamped
	exists         bool
	rewritten      bool // the log's event at the position is not the one that was passed
	errorType      string
	parked, lost   int64
	paused         bool
	retired        bool
	staged         float64 // the age of the log's oldest staged event, in seconds; 0 is none
	reserve        *int64  // numbers above the head that the log's partitions take; nil is without end
}

// One row for each key, in their order. The event after a cursor and the one at it are looked for only where there
// may be one; each is one probe of one partition.
const sqlStandings = `
select k.n, s.last_seq, coalesce(c.last_seq, 0), c.consumer is not null, c.paused_at is not null, c.retired_at is not null,
    coalesce(extract(epoch from clock_timestamp() - coalesce(least(pending.occurred_at, pending.recorded_at), c.last_occurred_at, c.moved_at, c.created_at)), 0)::float8,
    coalesce(passed.occurred_at <> c.last_occurred_at, false),
    coalesce(f.error_type, ''), parked.events, lost.events,
    coalesce(extract(epoch from clock_timestamp() - (
        select min(o.appended_at) from (select q.appended_at from public.event_outbox q order by q.xid, q.id limit 100) o)), 0)::float8,
    (
        select case when not bool_or(b.bound like '%TO (MAXVALUE)') then max((regexp_match(b.bound, 'TO \(''([0-9]+)''\)'))[1]::bigint) end
        from (
            select pg_get_expr(p.relpartbound, p.oid) as bound
            from pg_inherits i join pg_class p on p.oid = i.inhrelid where i.inhparent = to_regclass($4)
        ) b
    ) - 1 - s.last_seq
from unnest($1::text[], $2::text[], $3::text[]) with ordinality as k(consumer, topic, shard, n)
cross join (select q.last_seq from public.event_seq q limit 1) s -- the planner is to know that it is one row
left join public.event_consumer_cursors c on c.consumer = k.consumer and c.topic = k.topic and c.shard = k.shard
left join public.event_consumer_failures f
    on f.consumer = k.consumer and f.topic = k.topic and f.shard = k.shard and f.through > c.last_seq
left join lateral (
    select l.occurred_at, l.recorded_at from public.event_log l
    where l.seq > c.last_seq and c.last_seq < s.last_seq
    order by l.seq limit 1
) pending on true
left join lateral (
    select l.occurred_at from public.event_log l
    where l.seq = c.last_seq and c.last_seq = c.occurred_seq
    limit 1
) passed on true
cross join lateral (
    select count(*) as events from public.event_consumer_parked p
    where p.consumer = k.consumer and p.topic = k.topic and p.shard = k.shard
) parked
cross join lateral (
    select coalesce(sum(o.last_seq - o.first_seq + 1), 0)::bigint as events from public.event_consumer_losses o
    where o.consumer = k.consumer and o.topic = k.topic and o.shard = k.shard and o.settled_at is null
) lost
order by k.n`

// read returns where the consumers stand, in their order.
func (c consumers) read(ctx context.Context, db cursor.Querier, log *cursor.Log) ([]standing, error) {
	standings := make([]standing, 0, len(c.consumer))
	rows, err := db.Query(ctx, log.Render(sqlStandings), c.consumer, c.topic, c.shard, log.Table("log"))
	if err != nil {
		return nil, err
	}
	var n int64
	var s standing
	_, err = pgx.ForEachRow(rows, []any{&n, &s.head, &s.position, &s.exists, &s.paused, &s.retired, &s.age, &s.rewritten,
		&s.errorType, &s.parked, &s.lost, &s.staged, &s.reserve}, func() error {
		standings = append(standings, s)
		return nil
	})
	switch {
	case err != nil:
		return nil, err
	case len(standings) == 0:
		return nil, fmt.Errorf("the counter %s has no row", log.Table("seq"))
	case len(standings) != len(c.consumer):
		return nil, errors.New("the counter has more than one row")
	}
	return standings, nil
}

func (s standing) ahead() bool {
	return s.exists && (s.position > s.head || s.rewritten || s.errorType == (*cursor.AheadError)(nil).ErrorType())
}

// known tells whether the consumer's place in the log means anything.
func (s standing) known() bool { return s.exists && !s.ahead() }

func (s standing) lag() int64 { return s.head - s.position }

// pendingAge is in seconds, on the database's clock. An event may come from a clock that is ahead of it.
func (s standing) pendingAge() float64 {
	if s.lag() == 0 {
		return 0
	}
	return max(0, s.age)
}

type problem struct{ reason, errorType string }

func (s standing) problems() (all []problem) {
	switch {
	case !s.exists:
		all = append(all, problem{reason: cursorMissing})
	case s.ahead():
		all = append(all, problem{reason: cursorAhead})
	case s.errorType == (*cursor.GapError)(nil).ErrorType():
		all = append(all, problem{reason: gap, errorType: s.errorType})
	case s.errorType != "":
		all = append(all, problem{reason: failing, errorType: s.errorType})
	}
	for _, p := range []struct {
		is     bool
		reason string
	}{{s.parked > 0, parked}, {s.lost > 0, lost}, {s.paused, paused}, {s.retired, retired}} {
		if p.is {
			all = append(all, problem{reason: p.reason})
		}
	}
	return all
}
