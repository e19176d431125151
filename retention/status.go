package retention

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// State is what retention has before it, seen in one statement.
type State struct {
	Settings   Settings
	Now        time.Time // the database's clock
	Head       int64     // the last number given to an event
	Partitions []Partition
	Ahead      int   // empty partitions above the head
	Reserve    int64 // numbers above the head that there are partitions for; math.MaxInt64 until the log is cut

	// Pins are the consumers for which events are kept longer than Keep, the one that is furthest behind first.
	Pins []Pin

	MaintainedAt time.Time // when a maintenance ended last; zero when none did
	MaintainedBy string
	Error        string    // what it failed with
	FailingSince time.Time // since when it has failed each time

	wanted        int64 // numbers that there should be partitions for
	expiredBefore time.Time
	pinnedBefore  time.Time // zero without that cap
	cursors       []position
}

// Partition is a part of the log. A partition's events are those from First to Last.
type Partition struct {
	Schema, Name string
	From, To     int64     // the numbers that it is for, To excluded; math.MinInt64 and math.MaxInt64 are open ends
	First, Last  int64     // the events that are in it; 0 when there are none
	Rows         int64     // an estimate: numbers have no gaps
	Bytes        int64     // on disk, with indexes
	Oldest       time.Time // when the first event was recorded; zero without one
	Newest       time.Time // when the last one was
	Detaching    bool      // a removal has begun and is not over: its events can no longer be read

	cut *cut
}

// Pin is a consumer that keeps events from being removed.
type Pin struct {
	Key      cursor.Key
	Position int64
	Since    time.Time // when the first of these events would have been removed
	Events   int64
	Bytes    int64     // of the partitions that hold them
	MovedAt  time.Time // when the cursor moved last; zero when it never has
	Paused   bool
}

type position struct {
	Consumer, Topic, Shard string
	Seq                    int64
	MovedAt                *time.Time
	Paused                 bool
}

// cut is the constraint that makes the last partition ready to be given an end.
type cut struct {
	bound int64
	valid bool
}

// A partition's first and last event are looked up by the primary key. The numbers wanted are twice what was recorded
// lately, at most; doubling finds them without an index on the time.
const sqlLook = `
with r as materialized (
    select q.*, (now.utc - q.keep) at time zone 'UTC' as expired_before,
        (now.utc - q.pinned_age) at time zone 'UTC' as pinned_before, s.last_seq as head
    from public.event_retention q, public.event_seq s, (select clock_timestamp() at time zone 'UTC' as utc) now
), p as materialized (
    select c.oid, n.nspname, c.relname, i.inhdetachpending as detaching, pg_total_relation_size(c.oid) as bytes,
        case b.ends[1] when 'MINVALUE' then null else trim(b.ends[1], '''')::bigint end as lower,
        case b.ends[2] when 'MAXVALUE' then null else trim(b.ends[2], '''')::bigint end as upper
    from pg_inherits i
    join pg_class c on c.oid = i.inhrelid
    join pg_namespace n on n.oid = c.relnamespace
    cross join lateral (select regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \((.+)\) TO \((.+)\)') as ends) b
    where i.inhparent = $1::regclass
)
select not r.switched_on, extract(epoch from r.keep)::float8, r.partition_size,
    coalesce(extract(epoch from r.pinned_age), 0)::float8, coalesce(r.pinned_bytes, 0),
    clock_timestamp(), r.head, r.expired_before, r.pinned_before,
    r.maintained_at, coalesce(r.maintained_by, ''), coalesce(r.error, ''), r.failing_since,
    (
        select min(w.n) from (select r.partition_size << k as n from generate_series(0, 20) k) w
        where not exists (
            select from public.event_log l
            where l.seq = r.head - w.n and l.recorded_at > clock_timestamp() - make_interval(secs => $2))
    ),
    coalesce((
        select jsonb_agg(jsonb_build_object('Schema', p.nspname, 'Name', p.relname, 'Detaching', p.detaching,
            'Bytes', coalesce(p.bytes, 0), 'Lower', p.lower, 'Upper', p.upper, 'First', a.seq, 'Oldest', a.recorded_at,
            'Last', z.seq, 'Newest', z.recorded_at, 'Constraint', k.def, 'Valid', k.convalidated)
            order by p.lower nulls first)
        from p
        left join lateral (
            select l.seq, l.recorded_at from public.event_log l
            where l.seq >= coalesce(p.lower, 1) and l.seq < coalesce(p.upper, 9223372036854775807)
            order by l.seq limit 1) a on true
        left join lateral (
            select l.seq, l.recorded_at from public.event_log l
            where l.seq >= coalesce(p.lower, 1) and l.seq < coalesce(p.upper, 9223372036854775807)
            order by l.seq desc limit 1) z on true
        left join lateral (
            select pg_get_constraintdef(o.oid) as def, o.convalidated from pg_constraint o
            where o.conrelid = p.oid and o.conname = $3) k on p.upper is null
    ), '[]')::text,
    coalesce((
        select jsonb_agg(jsonb_build_object('Consumer', c.consumer, 'Topic', c.topic, 'Shard', c.shard, 'Seq', c.last_seq,
            'MovedAt', c.moved_at, 'Paused', c.paused_at is not null)
            order by c.last_seq, c.consumer, c.topic, c.shard)
        from public.event_consumer_cursors c where c.retired_at is null
    ), '[]')::text
from r`

// Status reads what there is, whether retention is on or not. It writes nothing and waits only for a moment in which the
// log's partitions are being changed. A nil log is the default one.
func Status(ctx context.Context, db cursor.Querier, log *cursor.Log) (*State, error) {
	s, err := look(ctx, db, log, defaultWindow)
	if err != nil {
		return nil, fmt.Errorf("retention status: %w", explain(log, err))
	}
	return s, nil
}

// look reads the state; what was recorded within the window tells how many numbers should be ready.
func look(ctx context.Context, db cursor.Querier, log *cursor.Log, window time.Duration) (*State, error) {
	rows, _ := db.Query(ctx, log.Render(sqlLook), log.Table("log"), window.Seconds(), constraintName(log))
	s, err := pgx.CollectExactlyOneRow(rows, scanState)
	if err != nil {
		return nil, err
	}
	s.Ahead, s.Reserve = s.ahead()
	s.Pins = s.pins()
	return s, nil
}

func scanState(row pgx.CollectableRow) (*State, error) {
	var s State
	var keep, pinned float64
	var pinnedBefore, maintained, failing *time.Time
	var partitions, cursors string
	err := row.Scan(&s.Settings.Off, &keep, &s.Settings.PartitionSize, &pinned, &s.Settings.PinnedBytes,
		&s.Now, &s.Head, &s.expiredBefore, &pinnedBefore, &maintained, &s.MaintainedBy, &s.Error, &failing, &s.wanted,
		&partitions, &cursors)
	if err != nil {
		return nil, err
	}
	s.Settings.Keep, s.Settings.PinnedAge = seconds(keep), seconds(pinned)
	s.pinnedBefore, s.MaintainedAt, s.FailingSince = orZero(pinnedBefore), orZero(maintained), orZero(failing)
	if err := json.Unmarshal([]byte(cursors), &s.cursors); err != nil {
		return nil, fmt.Errorf("cursors: %w", err)
	}
	var found []struct {
		Schema, Name   string
		Detaching      bool
		Bytes          int64
		Lower, Upper   *int64
		First, Last    *int64
		Oldest, Newest *time.Time
		Constraint     *string
		Valid          *bool
	}
	if err := json.Unmarshal([]byte(partitions), &found); err != nil {
		return nil, fmt.Errorf("partitions: %w", err)
	}
	for _, f := range found {
		p := Partition{
			Schema: f.Schema, Name: f.Name, From: math.MinInt64, To: math.MaxInt64, First: orZero(f.First), Last: orZero(f.Last),
			Bytes: f.Bytes, Oldest: orZero(f.Oldest), Newest: orZero(f.Newest), Detaching: f.Detaching,
		}
		if f.Lower != nil {
			p.From = *f.Lower
		}
		if f.Upper != nil {
			p.To = *f.Upper
		}
		if p.First > 0 {
			p.Rows = p.Last - p.First + 1
		}
		if f.Constraint != nil {
			if p.cut, err = parseCut(*f.Constraint, orZero(f.Valid)); err != nil {
				return nil, err
			}
		}
		s.Partitions = append(s.Partitions, p)
	}
	return &s, nil
}

func orZero[T any](value *T) (zero T) {
	if value == nil {
		return zero
	}
	return *value
}

func (p *Partition) table() string { return pgx.Identifier{p.Schema, p.Name}.Sanitize() }

// last is the partition at the upper end.
func (s *State) last() *Partition {
	if len(s.Partitions) == 0 {
		return nil
	}
	return &s.Partitions[len(s.Partitions)-1]
}

func (s *State) ahead() (partitions int, reserve int64) {
	for _, p := range s.Partitions {
		if p.From > s.Head && !p.Detaching {
			partitions++
		}
	}
	switch last := s.last(); {
	case last == nil:
		return 0, 0
	case last.To == math.MaxInt64:
		return partitions, math.MaxInt64
	default:
		return partitions, max(0, last.To-1-s.Head)
	}
}

// expired are the partitions whose events may go as far as their age is concerned. They are the lowest ones, so that
// what is left has no hole.
func (s *State) expired() []Partition {
	for i, p := range s.Partitions {
		if p.Detaching || p.To > s.Head+1 || !p.Newest.Before(s.expiredBefore) {
			return s.Partitions[:i]
		}
	}
	return s.Partitions
}

// removable is the partition that goes next, if any, and the consumers that have not passed it.
func (s *State) removable() (p *Partition, behind []string) {
	expired := s.expired()
	if s.Settings.Off || len(expired) == 0 {
		return nil, nil
	}
	p = &expired[0]
	var pinned int64
	for _, e := range expired {
		pinned += e.Bytes
	}
	for _, c := range s.cursors {
		if c.Seq < p.To-1 {
			behind = append(behind, c.key().String())
		}
	}
	switch {
	case len(behind) == 0:
	case s.Settings.PinnedAge > 0 && p.Newest.Before(s.pinnedBefore):
	case s.Settings.PinnedBytes > 0 && pinned > s.Settings.PinnedBytes:
	default:
		return nil, nil
	}
	return p, behind
}

func (c position) key() cursor.Key {
	return cursor.Key{Consumer: c.Consumer, Topic: c.Topic, Shard: c.Shard}
}

func (s *State) pins() (pins []Pin) {
	expired := s.expired()
	for _, c := range s.cursors {
		at := slices.IndexFunc(expired, func(p Partition) bool { return c.Seq < p.To-1 })
		if at < 0 {
			continue
		}
		pin := Pin{Key: c.key(), Position: c.Seq, Since: expired[at].Newest.Add(s.Settings.Keep), MovedAt: orZero(c.MovedAt), Paused: c.Paused}
		for _, p := range expired[at:] {
			pin.Bytes += p.Bytes
			if p.First > 0 {
				pin.Events += p.Last - max(c.Seq+1, p.First) + 1
			}
		}
		pins = append(pins, pin)
	}
	return pins
}
