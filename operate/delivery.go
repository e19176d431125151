package operate

import (
	"context"
	"fmt"
	"time"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// DeliveryState is what a consumer did with an event.
type DeliveryState string

const (
	// Handled rests on what the unit wrote: the event's effects, its jobs and the cursor's move are committed.
	Handled DeliveryState = "handled"
	// Failing means that the consumer stands before the event, or that the rounds that hold it do not succeed.
	Failing DeliveryState = "failing"
	// ParkedAway means that it kept failing and was passed: see [Parked].
	ParkedAway DeliveryState = "parked"
	// LostUnhandled means that the consumer was moved past it by the library: see [Losses].
	LostUnhandled DeliveryState = "lost"
	// SkippedByHand means that an operator moved the cursor past it, or discarded it when it was parked.
	SkippedByHand DeliveryState = "skipped"
	// NotItsTopic means that the consumer does not read the event's topic.
	NotItsTopic DeliveryState = "not_its_topic"
	// BeforeStart means that the consumer was created behind it.
	BeforeStart DeliveryState = "before_start"
	// NotReached means that the cursor has not come to it yet, or has to come to it again.
	NotReached DeliveryState = "not_reached"
	// TopicUnknown means that the cursor has passed it, but that the event is not in the log any more, so that it cannot
	// be told whether it was of the consumer's topic.
	TopicUnknown DeliveryState = "topic_unknown"
)

// Delivery is what one consumer did with one event.
type Delivery struct {
	Cursor    cursor.Key
	Seq       int64
	State     DeliveryState
	At        *time.Time // since when it is so: committed, failing since, parked, recorded as lost, moved, created; nil when not kept
	By        string     // the instance that committed it, failed at it last, parked it or lost it; or who skipped it
	Round     string     // handled: the round's id; "" when details are no longer kept
	Attempts  int        // failing, parked
	ErrorType string     // failing, parked
	Reason    string     // skipped: why; lost: "retention" or "resume_age"
	Replay    bool       // parked: a replay was asked for
	Position  int64      // where the cursor stands

	// Before is how it was handled before the cursor was moved back, where that is on record: not reached, failing.
	Before *Handling
}

// Handling is a round's own record of an event.
type Handling struct {
	Instance    string
	Round       string
	CommittedAt time.Time
}

// String says it in words.
func (d Delivery) String() string {
	at := ""
	if d.At != nil {
		at = d.At.UTC().Format(time.RFC3339)
	}
	var text string
	switch d.State {
	case Handled:
		if d.Round == "" {
			return "handled; details no longer kept"
		}
		return fmt.Sprintf("handled by %s in round %s at %s", d.By, d.Round, at)
	case Failing:
		text = fmt.Sprintf("failing since %s: %s, attempts %d, last by %s", at, d.ErrorType, d.Attempts, d.By)
	case ParkedAway:
		text = fmt.Sprintf("parked at %s: %s, attempts %d", at, d.ErrorType, d.Attempts)
		if d.Replay {
			text += "; a replay was asked for"
		}
	case LostUnhandled:
		text = fmt.Sprintf("lost to %s, recorded at %s by %s", d.Reason, at, d.By)
	case SkippedByHand:
		text = fmt.Sprintf("skipped by %s at %s: %q", d.By, at, d.Reason)
	case NotItsTopic:
		text = "not its topic"
	case BeforeStart:
		text = fmt.Sprintf("before its start: it was created at %s", at)
	case NotReached:
		text = fmt.Sprintf("not reached yet: the cursor is at %d", d.Position)
	case TopicUnknown:
		text = "passed, but whether it was of its topic is no longer known: the event is not in the log any more"
	}
	if b := d.Before; b != nil {
		text += fmt.Sprintf("; handled before, by %s in round %s at %s", b.Instance, b.Round, b.CommittedAt.UTC().Format(time.RFC3339))
	}
	return text
}

// The counter has one row, which an estimate must be told: one that is too high starts the compiler, for a second.
const sqlDeliveries = `
select s.last_seq, coalesce(e.topic, copy.event_topic), c.consumer, c.topic, c.shard, c.last_seq,
    j.action, j.by, j.reason, j.at, coalesce(j.from_seq, 0), coalesce(j.to_seq, 0),
    f.since, f.attempts, f.error_type, f.failed_by,
    p.parked_at, p.parked_by, p.attempts, p.error_type, p.replay_at is not null,
    x.recorded_at, x.recorded_by, x.reason,
    r.committed_at, r.committed_by, r.round, r.first_seq, r.last_seq, r.handled
from (select s.last_seq from public.event_seq s limit 1) s
left join public.event_log e on e.seq = $1
left join lateral (
    select p.event_topic from public.event_consumer_parked p where e.seq is null and p.seq = $1 limit 1
) copy on true
left join public.event_consumer_cursors c on cardinality($2::text[]) = 0 or exists (
    select from unnest($2::text[], $3::text[], $4::text[]) as k(consumer, topic, shard)
    where c.consumer = k.consumer and c.topic = k.topic and c.shard = k.shard)
-- the last time that the event was passed or un-passed by hand
left join lateral (
    select i.action, i.by, i.reason, i.at, i.from_seq, i.to_seq
    from public.event_consumer_interventions i
    where i.consumer = c.consumer and i.topic = c.topic and i.shard = c.shard and (
        i.action = 'create' and i.to_seq >= $1
        or i.action in ('seek', 'skip') and least(i.from_seq, i.to_seq) < $1 and greatest(i.from_seq, i.to_seq) >= $1
        or i.action = 'discard' and i.from_seq = $1)
    order by i.id desc
    limit 1
) j on true
left join public.event_consumer_failures f
    on f.consumer = c.consumer and f.topic = c.topic and f.shard = c.shard
    and c.last_seq < $1 and (f.seq = $1 or f.seq is null and f.through >= $1)
left join public.event_consumer_parked p
    on p.consumer = c.consumer and p.topic = c.topic and p.shard = c.shard and p.seq = $1
left join lateral (
    select l.recorded_at, l.recorded_by, l.reason
    from public.event_consumer_losses l
    where l.consumer = c.consumer and l.topic = c.topic and l.shard = c.shard and l.first_seq <= $1 and l.last_seq >= $1
    order by l.recorded_at desc
    limit 1
) x on true
left join lateral (
    select r.committed_at, r.committed_by, r.round, r.first_seq, r.last_seq, r.handled
    from public.event_consumer_rounds r
    where r.consumer = c.consumer and r.topic = c.topic and r.shard = c.shard and r.first_seq <= $1 and r.last_seq >= $1
    order by r.committed_at desc
    limit 1
) r on true
order by c.consumer, c.topic, c.shard`

// Deliveries tells what the given cursors, or all, did with the event seq, in one statement. It locks nothing and
// writes nothing, and what is not committed it does not see: a round that is under way has done nothing yet.
//
// A key without a cursor is [cursor.ErrCursorMissing]; a number that the log has not given yet is an error.
func Deliveries(ctx context.Context, db cursor.Querier, log *cursor.Log, seq int64, keys ...cursor.Key) ([]Delivery, error) {
	fail := func(err error) ([]Delivery, error) {
		return nil, fmt.Errorf("deliveries of event %d: %w", seq, log.Explain(err))
	}
	consumers, topics, shards := cursor.Columns(keys)
	var head int64
	var found []Delivery
	rows, _ := db.Query(ctx, log.Render(sqlDeliveries), seq, consumers, topics, shards)
	defer rows.Close()
	for rows.Next() {
		var e evidence
		var consumer, topic, shard *string
		var position *int64
		e.seq = seq
		err := rows.Scan(&head, &e.topic, &consumer, &topic, &shard, &position,
			&e.jump.action, &e.jump.by, &e.jump.reason, &e.jump.at, &e.jump.from, &e.jump.to,
			&e.failure.at, &e.failure.attempts, &e.failure.errorType, &e.failure.by,
			&e.parked.at, &e.parked.by, &e.parked.attempts, &e.parked.errorType, &e.replay,
			&e.loss.at, &e.loss.by, &e.loss.reason,
			&e.round.at, &e.round.by, &e.round.id, &e.round.first, &e.round.last, &e.round.handled)
		if err != nil {
			return fail(err)
		}
		if consumer != nil {
			e.key, e.position = cursor.Key{Consumer: *consumer, Topic: *topic, Shard: *shard}, *position
			found = append(found, e.delivery())
		}
	}
	if err := rows.Err(); err != nil {
		return fail(err)
	}
	if seq < 1 || seq > head {
		return fail(fmt.Errorf("it is not in the log, which goes from 1 to %d", head))
	}
	for _, key := range keys {
		there := false
		for i := range found {
			there = there || found[i].Cursor == key
		}
		if !there {
			return fail(fmt.Errorf("%w: %q has no row in %s", cursor.ErrCursorMissing, key, log.Table("consumer_cursors")))
		}
	}
	return found, nil
}

// evidence is all that is on record about a cursor and an event. What is not has no time.
type evidence struct {
	key      cursor.Key
	seq      int64
	position int64
	topic    *string // of the event, where it is known
	replay   bool
	jump     struct { // the last time that the event was passed or un-passed by hand
		action, by, reason *string
		at                 *time.Time
		from, to           int64
	}
	failure, parked struct {
		at            *time.Time
		by, errorType *string
		attempts      *int
	}
	loss struct {
		at         *time.Time
		by, reason *string
	}
	round struct {
		at          *time.Time
		by, id      *string
		first, last *int64
		handled     *int
	}
}

// delivery decides what became of the event. Where several things are on record, because the cursor was moved back and
// passed it again, the last of them counts.
func (e *evidence) delivery() Delivery {
	d := Delivery{Cursor: e.key, Seq: e.seq, Position: e.position}
	if e.key.Topic != "" && e.topic != nil && *e.topic != e.key.Topic {
		d.State = NotItsTopic
		return d
	}
	handledAt := e.round.at
	if handledAt != nil && *e.round.handled == 0 {
		handledAt = nil // a round that parked it or recorded its loss
	}
	if e.position < e.seq {
		d.State = NotReached
		if f := e.failure; f.at != nil {
			d.State, d.At, d.By, d.Attempts, d.ErrorType = Failing, f.at, *f.by, *f.attempts, *f.errorType
		}
		if handledAt != nil {
			d.Before = &Handling{Instance: *e.round.by, Round: *e.round.id, CommittedAt: *handledAt}
		}
		return d
	}

	// Nothing on record from after the last time that the cursor was moved back: a round has passed it, and its record
	// was written over.
	d.State = Handled
	if j := e.jump; j.at != nil {
		switch {
		case *j.action == "create":
			d.State, d.At = BeforeStart, j.at
		case j.to >= e.seq:
			d.State, d.At, d.By, d.Reason = SkippedByHand, j.at, *j.by, *j.reason
		}
	}
	last := e.jump.at
	if e.jump.action != nil && *e.jump.action == "discard" && handledAt != nil {
		last = nil // a copy was discarded of what had come again and was handled
	}
	if x := e.loss; after(x.at, last) {
		last = x.at
		d = Delivery{Cursor: d.Cursor, Seq: d.Seq, Position: d.Position, State: LostUnhandled, At: x.at, By: *x.by, Reason: *x.reason}
	}
	if p := e.parked; after(p.at, last) {
		last = p.at
		d = Delivery{Cursor: d.Cursor, Seq: d.Seq, Position: d.Position, State: ParkedAway, At: p.at, By: *p.by, Attempts: *p.attempts,
			ErrorType: *p.errorType, Replay: e.replay}
	}
	if after(handledAt, last) {
		d = Delivery{Cursor: d.Cursor, Seq: d.Seq, Position: d.Position, State: Handled, At: handledAt, By: *e.round.by, Round: *e.round.id}
	}
	if d.State == SkippedByHand && handledAt != nil {
		d.Before = &Handling{Instance: *e.round.by, Round: *e.round.id, CommittedAt: *handledAt}
	}
	if d.State == Handled && e.key.Topic != "" && e.topic == nil {
		// Only a round that handled all that it covered, or nothing, tells whether the event was its own.
		switch r := e.round; {
		case after(r.at, last) && *r.handled == 0:
			d = Delivery{Cursor: d.Cursor, Seq: d.Seq, Position: d.Position, State: NotItsTopic}
		case d.Round == "" || int64(*r.handled) < *r.last-*r.first+1:
			d = Delivery{Cursor: d.Cursor, Seq: d.Seq, Position: d.Position, State: TopicUnknown}
		}
	}
	return d
}

func after(t, u *time.Time) bool { return t != nil && (u == nil || t.After(*u)) }
