package torture

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Kind is a kind of violation.
type Kind string

// What the checker may find.
const (
	KindUnaccounted Kind = "passed, and neither handled nor parked nor lost"
	KindTwice       Kind = "accounted for twice"
	KindDoubled     Kind = "handled twice"
	KindPassedHole  Kind = "a missing number was passed"
	KindForeign     Kind = "handled, and not its topic"
	KindWrongPark   Kind = "parked by a consumer that does not park"
	KindWrongHandle Kind = "handled, although its handler always fails"
	KindBeyond      Kind = "handled, and not passed"
	KindJobs        Kind = "effects and jobs differ"
	KindOrder       Kind = "handled out of order"
	KindMoves       Kind = "the cursor did not move forward from where it stood"
	KindApart       Kind = "committed apart from the cursor's move"
	KindNumbers     Kind = "the log's numbers are not contiguous"
	KindCounter     Kind = "the counter is not the highest number"
	KindTaken       Kind = "lost, and not by a cap"
	KindOutbox      Kind = "committed, and not in the log"
	KindAppend      Kind = "an append that returned nil is not in the log"
	KindUndone      Kind = "an append that was rolled back is in the log"
	KindSameEvent   Kind = "an append is in the log twice"
	KindLeft        Kind = "left behind"
	KindStuck       Kind = "stuck"
	KindExit        Kind = "a worker ended badly"
	KindFalseAlarm  Kind = "a consumer sees a fault of the log that is none"
	KindCheck       Kind = "the run itself failed"
)

// snapshotKinds are what every snapshot is searched for.
var snapshotKinds = []Kind{
	KindUnaccounted, KindTwice, KindDoubled, KindPassedHole, KindForeign, KindWrongPark, KindWrongHandle, KindBeyond, KindJobs, KindOrder,
	KindMoves, KindApart, KindNumbers, KindCounter, KindTaken, KindOutbox, KindAppend, KindUndone, KindSameEvent,
}

// ledger is what the writers said of their appends.
type ledger struct {
	mu        sync.Mutex
	committed []string // not looked for yet
	undone    []string // not looked for yet
	unknown   map[string]bool
	counts    struct{ committed, undone, unknown int }
}

func newLedger() *ledger { return &ledger{unknown: map[string]bool{}} }

func (l *ledger) add(line workerLine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.committed = append(l.committed, line.Committed...)
	l.undone = append(l.undone, line.Undone...)
	for _, id := range line.Unknown {
		l.unknown[id] = true
	}
	l.counts.committed += len(line.Committed)
	l.counts.undone += len(line.Undone)
	l.counts.unknown += len(line.Unknown)
}

// take returns what was added since it was called last.
func (l *ledger) take() (committed, undone []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	committed, undone = l.committed, l.undone
	l.committed, l.undone = nil, nil
	return committed, undone
}

// putBack is for a check that came to nothing.
func (l *ledger) putBack(committed, undone []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.committed, l.undone = append(l.committed, committed...), append(l.undone, undone...)
}

// invariant is what must hold at any moment: the query, in a snapshot, returns a kind and a text for each number
// above $1 for which it does not.
type invariant struct {
	kind Kind // what the kind is where the query's is null
	sql  string
}

// The events that were ever numbered, and where each cursor started.
const sqlAll = `
with events as (
    select l.seq, l.topic, l.uuid, l.metadata->>'kind' as kind from event_log l where l.seq > $1
    union all
    select n.seq, n.topic, n.uuid, n.kind
    from event_retention_removals r join torture_numbered n on n.seq between r.first_seq and r.last_seq
    where n.seq > $1 and (r.removed_at is not null or not exists (select from event_log l where l.seq = n.seq))
), cursors as (
    select c.consumer, c.topic, c.last_seq, i.to_seq as start
    from event_consumer_cursors c join event_consumer_interventions i using (consumer, topic, shard) where i.action = 'create'
)`

const sqlReplayed = `(e.consumer = '` + parking + `' and e.attempt > 3)`

var invariants = []invariant{
	{KindCheck, sqlAll + `, accounts as (
    select c.consumer, n.seq, e.topic, e.kind, e.seq is null as hole, c.topic in ('', e.topic) as own, c.last_seq,
        (select count(*) from torture_effects f where f.seq = n.seq and f.consumer = c.consumer) as handled,
        (select count(*) from event_consumer_parked p where p.consumer = c.consumer and p.seq = n.seq) as parked,
        (select count(*) from event_consumer_losses l where l.consumer = c.consumer and n.seq between l.first_seq and l.last_seq) as lost
    from cursors c
    cross join lateral generate_series(greatest(c.start, $1) + 1, c.last_seq) as n(seq)
    left join events e on e.seq = n.seq
), judged as (
    select case
        when hole then '` + string(KindPassedHole) + `'
        when not own and handled + parked > 0 then '` + string(KindForeign) + `'
        when handled > 1 then '` + string(KindDoubled) + `'
        when own and handled + parked + lost = 0 then '` + string(KindUnaccounted) + `'
        when own and handled + parked + lost > 1 then '` + string(KindTwice) + `'
        when consumer = '` + parking + `' and kind in ('` + poison + `', '` + killer + `') and handled > 0 then '` + string(KindWrongHandle) + `'
        when consumer <> '` + parking + `' and parked > 0 then '` + string(KindWrongPark) + `'
        end as judgement, a.*
    from accounts a
)
select judgement, to_jsonb(j)::text from judged j where judgement is not null order by seq limit 20`},

	{KindBeyond, sqlAll + `
select null, to_jsonb(e)::text from torture_effects e left join cursors c using (consumer)
where e.seq > $1 and (c.consumer is null or e.seq > c.last_seq or e.seq <= c.start) limit 20`},

	{KindJobs, `
select null, jsonb_build_object('effects', to_jsonb(e), 'jobs', to_jsonb(j))::text
from (
    select e.consumer, e.seq, e.xid, count(*) as n from torture_effects e where e.seq > $1 group by 1, 2, 3
) e full join (
    select j.payload->>'consumer' as consumer, (j.payload->>'seq')::bigint as seq, j.transaction_id as xid, count(*) as n
    from watermill_torture_jobs j where (j.payload->>'seq')::bigint > $1 group by 1, 2, 3
) j using (consumer, seq, xid)
where e.n is distinct from j.n limit 20`},

	{KindOrder, `
select null, to_jsonb(o)::text
from (
    select e.*, lag(e.seq) over (partition by e.consumer order by e.xid, e.id) as before
    from torture_effects e where e.seq > $1 and not ` + sqlReplayed + `
) o
where o.seq <= o.before limit 20`},

	{KindMoves, `
select null, to_jsonb(o)::text
from (
    select m.*, lag(m.to_seq) over (partition by m.consumer order by m.id) as before from torture_moves m where m.to_seq > $1
) o
where o.to_seq <= o.from_seq or o.from_seq <> o.before limit 20`},

	{KindMoves, sqlAll + `
select null, to_jsonb(c)::text from cursors c
where c.last_seq <> coalesce((select m.to_seq from torture_moves m where m.consumer = c.consumer order by m.id desc limit 1), c.start)
    and $1 >= 0`},

	{KindApart, `
select null, to_jsonb(e)::text from torture_effects e
where e.seq > $1 and not ` + sqlReplayed + ` and not exists (
    select from torture_moves m where m.consumer = e.consumer and m.xid = e.xid and e.seq > m.from_seq and e.seq <= m.to_seq)
limit 20`},

	{KindTaken, `
select null, to_jsonb(l)::text
from event_consumer_losses l cross join lateral generate_series(greatest(l.first_seq, $1 + 1), l.last_seq) n(seq)
where not exists (
    select from event_retention_removals r cross join unnest(r.behind) b
    where n.seq between r.first_seq and r.last_seq and split_part(b, '@', 1) = l.consumer)
limit 20`},

	{KindOutbox, `select null, to_jsonb(o)::text from event_outbox o where $1 >= 0 and not o.staged limit 20`},
}

// checker reads the database and says what is wrong.
type checker struct {
	pool   *pgxpool.Pool
	ledger *ledger
	report *Report

	head      int64            // the numbers up to here were read
	seen      map[string]int64 // the events up to the head, by their ids
	staged    map[string]bool  // the events that have no number yet
	undone    map[string]bool  // the events that must not come
	positions map[string]int64 // of the last check
}

func newChecker(pool *pgxpool.Pool, l *ledger, r *Report) *checker {
	return &checker{pool: pool, ledger: l, report: r, seen: map[string]int64{}, undone: map[string]bool{}, positions: map[string]int64{}}
}

// window is how far below the slowest cursor of the last check a check that is not full looks.
const window = 500

// run checks one snapshot, all of it if it is full, and returns the sum of the positions.
func (c *checker) run(ctx context.Context, full bool) (sum int64, err error) {
	committed, undone := c.ledger.take() // before the snapshot
	options := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	var accounts int64
	err = pgx.BeginTxFunc(ctx, c.pool, options, func(tx pgx.Tx) error {
		// Before the snapshot: so no partition that it shows is dropped meanwhile.
		if _, err := tx.Exec(ctx, "lock table only event_log in access share mode"); err != nil {
			return err
		}
		if err := c.readLog(ctx, tx); err != nil {
			return err
		}
		above := int64(-1)
		for _, position := range c.positions {
			if above < 0 || position < above {
				above = position
			}
		}
		above = max(0, above-window)
		if full {
			above = 0
		}
		for _, i := range invariants {
			if err := c.hold(ctx, tx, i, above); err != nil {
				return fmt.Errorf("check %q: %w", i.kind, err)
			}
		}
		sum, accounts, err = c.readCursors(ctx, tx, above)
		return err
	})
	if err != nil {
		c.ledger.putBack(committed, undone)
		return 0, err
	}
	c.appends(committed, undone)
	c.report.checked(full, accounts, len(committed)+len(undone))
	return sum, nil
}

// hold reports where an invariant does not hold.
func (c *checker) hold(ctx context.Context, tx pgx.Tx, i invariant, above int64) error {
	rows, _ := tx.Query(ctx, i.sql, above)
	var kind *string
	var text string
	_, err := pgx.ForEachRow(rows, []any{&kind, &text}, func() error {
		if kind == nil {
			c.report.violate(i.kind, text)
		} else {
			c.report.violate(Kind(*kind), text)
		}
		return nil
	})
	return err
}

// repeated is an event that is there a second time.
type repeated struct {
	id         string
	first, seq int64
}

// An event's id is remembered for as long as the event is there.
const sqlForgotten = `
select exists (
    select from event_retention_removals r join torture_numbered n on n.seq = $2
    where $1 between r.first_seq and r.last_seq and r.decided_at < n.at)`

// readLog reads what was numbered since the last check.
func (c *checker) readLog(ctx context.Context, tx pgx.Tx) error {
	rows, _ := tx.Query(ctx, sqlAll+` select e.seq, e.uuid from events e order by e.seq`, c.head)
	var seq int64
	var id string
	var again []repeated
	broken := false
	_, err := pgx.ForEachRow(rows, []any{&seq, &id}, func() error {
		if seq != c.head+1 && !broken {
			broken = true
			c.report.violate(KindNumbers, fmt.Sprintf("%d comes after %d", seq, c.head))
		}
		if other, known := c.seen[id]; known {
			again = append(again, repeated{id, other, seq})
		}
		if c.undone[id] {
			c.report.violate(KindUndone, fmt.Sprintf("%s is %d", id, seq))
		}
		c.head, c.seen[id] = seq, seq
		return nil
	})
	if err != nil {
		return err
	}
	for _, a := range again {
		var forgotten bool
		if err := tx.QueryRow(ctx, sqlForgotten, a.first, a.seq).Scan(&forgotten); err != nil {
			return err
		}
		if !forgotten {
			c.report.violate(KindSameEvent, fmt.Sprintf("%s is %d and %d", a.id, a.first, a.seq))
		}
	}
	rows, _ = tx.Query(ctx, "select o.uuid from event_outbox o where o.staged")
	c.staged = map[string]bool{}
	if _, err := pgx.ForEachRow(rows, []any{&id}, func() error { c.staged[id] = true; return nil }); err != nil {
		return err
	}
	var counter int64
	if err := tx.QueryRow(ctx, "select s.last_seq from event_seq s").Scan(&counter); err != nil {
		return err
	}
	if counter != c.head {
		c.report.violate(KindCounter, fmt.Sprintf("the counter is %d and the highest number is %d", counter, c.head))
	}
	return nil
}

func (c *checker) appends(committed, undone []string) {
	for _, id := range committed {
		switch _, numbered := c.seen[id]; {
		case numbered:
		case c.staged[id]:
			c.ledger.putBack([]string{id}, nil) // for the next check
		default:
			c.report.violate(KindAppend, id)
		}
	}
	for _, id := range undone {
		c.undone[id] = true
		if seq, ok := c.seen[id]; ok {
			c.report.violate(KindUndone, fmt.Sprintf("%s is %d", id, seq))
		}
	}
}

// readCursors compares the positions with those of the last check, and counts the numbers that were accounted for.
func (c *checker) readCursors(ctx context.Context, tx pgx.Tx, above int64) (sum, accounts int64, err error) {
	rows, _ := tx.Query(ctx, "select c.consumer, c.last_seq from event_consumer_cursors c")
	var consumer string
	var position int64
	_, err = pgx.ForEachRow(rows, []any{&consumer, &position}, func() error {
		if before := c.positions[consumer]; position < before {
			c.report.violate(KindMoves, fmt.Sprintf("%s was at %d and is at %d", consumer, before, position))
		}
		c.positions[consumer] = position
		sum += position
		accounts += max(0, position-above)
		return nil
	})
	return sum, accounts, err
}

// nobodyLeft checks what must be gone when everything was handled and the workers have stopped.
func (c *checker) nobodyLeft(ctx context.Context) error {
	const left = `
select 'failure', to_jsonb(f)::text from event_consumer_failures f
union all select 'mark', to_jsonb(m)::text from event_consumer_marks m
union all select 'replay', to_jsonb(p)::text from event_consumer_parked p where p.replay_at is not null
union all select 'session', to_jsonb(a)::text from pg_stat_activity a where a.application_name like 'torture %'
union all select 'prepared transaction', to_jsonb(p)::text from pg_prepared_xacts p`
	deadline := time.Now().Add(2 * silence) // for the far ends of half-open connections
	for {
		rows, _ := c.pool.Query(ctx, left)
		found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ What, Text string }])
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			for _, f := range found {
				c.report.violate(KindLeft, f.What+" "+f.Text)
			}
			return nil
		}
		if err := wait(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// standing is for people: where the cursors are and what holds them up.
func (c *checker) standing(ctx context.Context) (text string) {
	const standing = `
select string_agg(to_jsonb(x)::text, ' ') from (
    select s.last_seq as head, c.consumer, c.last_seq, c.moved_at, to_jsonb(f) as failure, to_jsonb(m) as mark
    from event_seq s cross join event_consumer_cursors c
    left join event_consumer_failures f using (consumer, topic, shard) left join event_consumer_marks m using (consumer, topic, shard)
    union all
    select null, a.application_name, a.pid, a.xact_start, to_jsonb(a.state || ': ' || left(a.query, 60)), to_jsonb(a.wait_event)
    from pg_stat_activity a where a.application_name like 'torture %' and a.xact_start is not null
) x`
	if err := c.pool.QueryRow(ctx, standing).Scan(&text); err != nil {
		return err.Error()
	}
	return text
}

// count fills in the report's numbers of events.
func (c *checker) count(ctx context.Context) error {
	const counts = sqlAll + `
select c.consumer, c.last_seq - c.start, 
    (select count(*) from torture_effects e where e.consumer = c.consumer),
    (select count(*) from event_consumer_parked p where p.consumer = c.consumer),
    (select count(*) from event_consumer_parked p where p.consumer = c.consumer and p.metadata->>'kind' = '` + healthy + `'),
    (select count(*) from events e where (e.seq > c.start and e.seq <= c.last_seq) and e.topic = any(case c.topic when '' then array[e.topic] else array[c.topic] end)
        and exists (select from event_consumer_losses l where l.consumer = c.consumer and e.seq between l.first_seq and l.last_seq)),
    (select count(*) from events e where c.topic not in ('', e.topic))
from cursors c order by 1`
	rows, _ := c.pool.Query(ctx, counts, 0)
	accounts, err := pgx.CollectRows(rows, pgx.RowToStructByPos[account])
	if err != nil {
		return err
	}
	var removed int64
	err = c.pool.QueryRow(ctx, `
select coalesce(sum(r.last_seq - r.first_seq + 1), 0)::bigint from event_retention_removals r where r.removed_at is not null`).Scan(&removed)
	if err != nil {
		return err
	}
	c.ledger.mu.Lock()
	defer c.ledger.mu.Unlock()
	r := c.report
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Removed = removed
	r.Accounts, r.Events = accounts, c.head
	r.Committed, r.Undone, r.Unknown = c.ledger.counts.committed, c.ledger.counts.undone, c.ledger.counts.unknown
	for id := range c.ledger.unknown {
		if _, ok := c.seen[id]; ok {
			r.UnknownCommitted++
		}
	}
	return nil
}
