package operate

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// verifyRange is how many numbers one statement of Verify counts.
const verifyRange = 100_000

// maxFaults is how many faults a verdict holds.
const maxFaults = 1000

// FaultKind classes what Verify finds.
type FaultKind string

// What Verify finds.
const (
	FaultHole          FaultKind = "hole"           // numbers are missing from the log
	FaultDuplicate     FaultKind = "duplicate"      // numbers are there more than once
	FaultNotUnique     FaultKind = "not_unique"     // nothing keeps a number from being there twice
	FaultCounterBehind FaultKind = "counter_behind" // the counter is below the highest number: the next append fails or doubles one
	FaultCounterAhead  FaultKind = "counter_ahead"  // the counter is above the highest number: the log's tail is missing
	FaultCursorAhead   FaultKind = "cursor_ahead"   // a cursor is beyond the head
	FaultCursorBehind  FaultKind = "cursor_behind"  // events were removed before a cursor came to them, which is not recorded yet
	FaultRewritten     FaultKind = "rewritten"      // the event at a cursor is not the one that it has passed
	FaultLoss          FaultKind = "loss"           // a recorded loss is of events that are there, or is of none
)

// Fault is one thing that is wrong.
type Fault struct {
	Kind   FaultKind
	Cursor cursor.Key // the zero Key where it is the log itself
	First  int64      // the numbers that are meant
	Last   int64
	Text   string
}

// Verdict is what Verify has found. The log holds Events, with the numbers First to Last, both 0 where it is empty.
type Verdict struct {
	Events    int64
	First     int64
	Last      int64
	Head      int64 // of the counter
	Cursors   int
	Faults    []Fault // at most a thousand
	Truncated bool    // there are more
	At        time.Time
}

// OK tells that nothing is wrong.
func (v Verdict) OK() bool { return len(v.Faults) == 0 }

func (v *Verdict) fault(f Fault) {
	if n := len(v.Faults); n > 0 && f.Kind == FaultHole && v.Faults[n-1].Kind == FaultHole && v.Faults[n-1].Last == f.First-1 {
		v.Faults[n-1].Last = f.Last // over the end of a range
		v.Faults[n-1].Text = holeText(v.Faults[n-1].First, f.Last)
		return
	}
	if len(v.Faults) == maxFaults {
		v.Truncated = true
		return
	}
	v.Faults = append(v.Faults, f)
}

func holeText(first, last int64) string {
	if first == last {
		return fmt.Sprintf("number %d is missing from the log", first)
	}
	return fmt.Sprintf("the numbers %d to %d are missing from the log", first, last)
}

const sqlVerifyBounds = `
select clock_timestamp(), s.last_seq, coalesce((select min(l.seq) from public.event_log l), 0),
    coalesce((select max(l.seq) from public.event_log l), 0),
    exists (
        select from pg_index x
        join pg_attribute a on a.attrelid = x.indrelid and a.attname = 'seq'
        where x.indrelid = $1::regclass and x.indisunique and x.indisvalid and x.indpred is null and x.indexprs is null
            and x.indnkeyatts = 1 and x.indkey[0] = a.attnum),
    (select r.relkind = 'v' from pg_class r where r.oid = $1::regclass)
from public.event_seq s`

// What a cursor has passed and what the log holds are compared in one statement, whatever is appended meanwhile.
const sqlVerifyCursors = `
select c.consumer, c.topic, c.shard, c.last_seq, s.last_seq, b.lowest, c.retired_at is not null,
    coalesce(c.occurred_seq, 0),
    coalesce((select l.occurred_at <> c.last_occurred_at from public.event_log l where l.seq = c.occurred_seq limit 1), false)
from public.event_consumer_cursors c cross join (select s.last_seq from public.event_seq s limit 1) s
cross join (select coalesce(min(l.seq), 0) as lowest from public.event_log l) b
order by c.consumer, c.topic, c.shard`

const sqlVerifyLosses = `
select x.consumer, x.topic, x.shard, x.first_seq, x.last_seq,
    case
        when x.first_seq < 1 or x.last_seq > s.last_seq then 'outside'
        when c.consumer is null then 'orphan'
        else 'present'
    end
from public.event_consumer_losses x cross join (select s.last_seq from public.event_seq s limit 1) s
left join public.event_consumer_cursors c on c.consumer = x.consumer and c.topic = x.topic and c.shard = x.shard
where x.first_seq < 1 or x.last_seq > s.last_seq or c.consumer is null
    or x.reason = 'retention' and exists (select from public.event_log l where l.seq between x.first_seq and x.last_seq)
order by x.consumer, x.topic, x.shard, x.first_seq`

const sqlVerifyRange = `
select count(*), coalesce(min(l.seq), 0), coalesce(max(l.seq), 0) from public.event_log l where l.seq >= $1 and l.seq <= $2`

// The holes of a range, with the lowest number of the log as it is now.
const sqlVerifyHoles = `
select h.first, h.last, coalesce((select min(l.seq) from public.event_log l), 0)
from (
    select lag(n.seq, 1, $1::bigint - 1) over (order by n.seq) + 1 as first, n.seq - 1 as last
    from (
        select l.seq from public.event_log l where l.seq >= $1::bigint and l.seq <= $2::bigint
        union all select $2::bigint + 1
    ) n
) h
where h.first <= h.last
order by h.first
limit $3`

const sqlVerifyRepeats = `
select l.seq, count(*) from public.event_log l where l.seq >= $1 and l.seq <= $2
group by l.seq having count(*) > 1 order by l.seq limit $3`

// Verify proves the log: that every number from its oldest event to its newest is there once, that the counter is the
// highest, that no cursor is outside and each has passed the event that is there now, and that what is recorded as lost
// is. What it finds is in the verdict; an error means that it could not look.
//
// It reads numbers and no payloads, in ranges of 100,000, each in a statement of its own, so that it holds nothing back
// however large the log is, and may run while events are appended, handled and removed by retention. progress, which may
// be nil, is called with how many numbers are done, out of how many.
func Verify(ctx context.Context, db cursor.Querier, log *cursor.Log, progress func(done, total int64)) (Verdict, error) {
	if progress == nil {
		progress = func(int64, int64) {}
	}
	v := Verdict{}
	fail := func(err error) (Verdict, error) {
		return Verdict{}, fmt.Errorf("verify %s: %w", log, log.Explain(err))
	}
	var unique, existing bool // over an existing table the log is a view: its numbers are looked at one by one
	rows, _ := db.Query(ctx, log.Render(sqlVerifyBounds), log.Table("log"))
	found := false
	if _, err := pgx.ForEachRow(rows, []any{&v.At, &v.Head, &v.First, &v.Last, &unique, &existing}, func() error { found = true; return nil }); err != nil {
		return fail(err)
	}
	if !found {
		return fail(fmt.Errorf("the counter %s has no row", log.Table("seq")))
	}
	if !unique && !existing {
		v.fault(Fault{Kind: FaultNotUnique, Text: fmt.Sprintf("%s has no valid unique index on seq", log)})
	}
	switch {
	case v.Last > v.Head:
		v.fault(Fault{Kind: FaultCounterBehind, First: v.Head + 1, Last: v.Last,
			Text: fmt.Sprintf("the counter is at %d, the highest event has %d", v.Head, v.Last)})
	case v.Last > 0 && v.Last < v.Head:
		v.fault(Fault{Kind: FaultCounterAhead, First: v.Last + 1, Last: v.Head,
			Text: fmt.Sprintf("the counter is at %d, the highest event has %d: the tail of the log is missing", v.Head, v.Last)})
	}
	for _, check := range []func(context.Context, cursor.Querier, *cursor.Log, *Verdict) error{verifyCursors, verifyLosses} {
		if err := check(ctx, db, log, &v); err != nil {
			return fail(err)
		}
	}
	total := v.Last - v.First + 1
	if v.Last == 0 {
		total = 0
	}
	for first := v.First; first <= v.Last && total > 0; first += verifyRange {
		progress(first-v.First, total)
		if err := verifyNumbers(ctx, db, log, &v, first, min(first+verifyRange-1, v.Last), unique); err != nil {
			return fail(err)
		}
	}
	progress(total, total)
	return v, nil
}

func verifyNumbers(ctx context.Context, db cursor.Querier, log *cursor.Log, v *Verdict, first, last int64, unique bool) error {
	var events, lowest, highest int64
	rows, _ := db.Query(ctx, log.Render(sqlVerifyRange), first, last)
	if _, err := pgx.ForEachRow(rows, []any{&events, &lowest, &highest}, func() error { return nil }); err != nil {
		return err
	}
	v.Events += events
	if unique && events == last-first+1 && lowest == first && highest == last {
		return nil
	}
	rows, _ = db.Query(ctx, log.Render(sqlVerifyHoles), first, last, maxFaults+1)
	var from, to, oldest int64
	_, err := pgx.ForEachRow(rows, []any{&from, &to, &oldest}, func() error {
		if oldest == 0 || to < oldest {
			return nil // removed since
		}
		from = max(from, 1)
		v.fault(Fault{Kind: FaultHole, First: from, Last: to, Text: holeText(from, to)})
		return nil
	})
	if err != nil || unique {
		return err
	}
	var seq, times int64
	rows, _ = db.Query(ctx, log.Render(sqlVerifyRepeats), first, last, maxFaults+1)
	_, err = pgx.ForEachRow(rows, []any{&seq, &times}, func() error {
		v.fault(Fault{Kind: FaultDuplicate, First: seq, Last: seq, Text: fmt.Sprintf("number %d is there %d times", seq, times)})
		return nil
	})
	return err
}

func verifyCursors(ctx context.Context, db cursor.Querier, log *cursor.Log, v *Verdict) error {
	rows, _ := db.Query(ctx, log.Render(sqlVerifyCursors))
	var key cursor.Key
	var position, head, lowest, occurred int64
	var retired, rewritten bool
	_, err := pgx.ForEachRow(rows, []any{&key.Consumer, &key.Topic, &key.Shard, &position, &head, &lowest, &retired, &occurred, &rewritten}, func() error {
		v.Cursors++
		if position < 0 || position > head {
			v.fault(Fault{Kind: FaultCursorAhead, Cursor: key, First: head + 1, Last: position, Text: fmt.Sprintf(
				"the cursor is at %d, the head is %d: it stands still until it is moved by a seek", position, head)})
		}
		if rewritten {
			v.fault(Fault{Kind: FaultRewritten, Cursor: key, First: occurred, Last: occurred, Text: fmt.Sprintf(
				"event %d did not occur when the one did that this cursor has passed: the log's tail was lost and written anew", occurred)})
		}
		if next := position + 1; !retired && position < head && (lowest > next || lowest == 0) {
			last := lowest - 1
			if lowest == 0 {
				last = head
			}
			v.fault(Fault{Kind: FaultCursorBehind, Cursor: key, First: next, Last: last, Text: fmt.Sprintf(
				"events %d to %d were removed before the cursor came to them: its next round records them as lost", next, last)})
		}
		return nil
	})
	return err
}

func verifyLosses(ctx context.Context, db cursor.Querier, log *cursor.Log, v *Verdict) error {
	rows, _ := db.Query(ctx, log.Render(sqlVerifyLosses))
	var key cursor.Key
	var first, last int64
	var what string
	_, err := pgx.ForEachRow(rows, []any{&key.Consumer, &key.Topic, &key.Shard, &first, &last, &what}, func() error {
		text := map[string]string{
			"outside": "is of numbers that the log never gave",
			"orphan":  "is of a cursor that does not exist",
			"present": "is of events that are in the log",
		}[what]
		v.fault(Fault{Kind: FaultLoss, Cursor: key, First: first, Last: last, Text: fmt.Sprintf("the recorded loss of %d to %d %s", first, last, text)})
		return nil
	})
	return err
}
