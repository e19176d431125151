package cursor

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// batch is what a round hands out and covers.
type batch struct {
	events    []Event
	through   int64      // the last number covered; 0 where the numbers do not follow the position
	throughAt *time.Time // when that event occurred
	full      bool       // it was ended by one of its bounds and not by the end of the log
}

// sqlFrom is the position. It is read again here, under the lock that is already held: this statement's snapshot is
// later than the lock's, so the log is at least as new as the cursor. Without the lock it reads nothing.
const sqlFrom = `
with c as materialized (
    select c.last_seq, c.last_seq + $4 as upto, $5::bigint as events
    from public.event_consumer_cursors c
    where c.consumer = $1 and c.topic = $2 and c.shard = $3
    for update of c skip locked
)`

// sqlFromBounded is the position where something may stand beside the cursor that bounds the batch.
const sqlFromBounded = `
with c as materialized (
    select c.last_seq,
        least(c.last_seq + $4, case
            when coalesce(f.seq, $9) > c.last_seq + 1 then coalesce(f.seq, $9) - 1
            when coalesce(f.seq, $9) = c.last_seq + 1 then coalesce(f.seq, $9)
            else 9223372036854775807 end) as upto,
        least($5,
            case when f.seq is null and f.through > c.last_seq then f.batch end,
            case when $7 and m.through > c.last_seq and (m.slow or m.marked_by <> $8) then 1 end) as events
    from public.event_consumer_cursors c
    left join public.event_consumer_failures f on f.consumer = c.consumer and f.topic = c.topic and f.shard = c.shard
    left join public.event_consumer_marks m on m.consumer = c.consumer and m.topic = c.topic and m.shard = c.shard
    where c.consumer = $1 and c.topic = $2 and c.shard = $3
    for update of c skip locked
)`

// sqlAhead is a position that the caller knows.
const sqlAhead = `
with c as materialized (
    select $1::bigint as last_seq, $1::bigint + $4::bigint as upto, $5::bigint as events
    where $2::text is not null and $3::text is not null
)`

// All that follows a position. The bounds are looked up by subselects and not by a join, which would have to sort again
// what the index has in order; and not by parameters, whose values would have the server plan anew each time.
const (
	sqlAll = `
select b.seq, b.occurred_at, b.recorded_at, b.topic, coalesce(b.key, ''), b.uuid, b.payload, b.metadata::text
from (
    select l.seq, l.occurred_at, l.recorded_at, l.topic, l.key, l.uuid, l.payload, l.metadata,
        sum(octet_length(l.payload)) over (order by l.seq rows unbounded preceding) - octet_length(l.payload) as before
    from public.event_log l
    where l.seq > `
	sqlAllFrom = sqlAll + `(
        select c.last_seq from public.event_consumer_cursors c
        where c.consumer = $3 and c.topic = $4 and c.shard = $5
        for update of c skip locked)` + sqlAllBounds
	sqlAllAhead  = sqlAll + `(select $3::bigint)` + sqlAllBounds
	sqlAllBounds = `
    order by l.seq
    limit (select $1::bigint)
) b
where b.before < $2
order by b.seq`
	sqlAllFromBounded = sqlFromBounded + sqlAll + `(select c.last_seq from c) and l.seq <= (select c.upto from c)
    order by l.seq
    limit (select c.events from c)
) b
where b.before < $6
order by b.seq`
)

// A consumer of one topic proves that no number is missing, too, but gets its own events only. A number is in the log
// once, so as many as there should be are all of them. That holds by the log's unique index; where it was lost, the sum
// still gives away most of what repeats. Where the events were cut by a bound, the proof ends with the last of them.
const sqlOwn = `, own as materialized (
    select b.* from (
        select l.seq, l.occurred_at, l.recorded_at, l.topic, l.key, l.uuid, l.payload, l.metadata,
            sum(octet_length(l.payload)) over (order by l.seq rows unbounded preceding) - octet_length(l.payload) as before
        from public.event_log l
        where l.seq > (select c.last_seq from c) and l.seq <= (select c.upto from c) and l.topic = $2
        order by l.seq
        limit (select c.events from c)
    ) b
    where b.before < $6
), cut as (
    select count(*) >= (select c.events from c) or coalesce(sum(octet_length(own.payload)), 0) >= $6 as full, max(own.seq) as last
    from own
), proof as (
    select max(l.seq) as through, count(*) = max(l.seq) - (select c.last_seq from c)
        and sum(l.seq) * 2 = count(*) * (max(l.seq) + (select c.last_seq from c) + 1::numeric) as in_order
    from public.event_log l
    where l.seq > (select c.last_seq from c) and l.seq <= (select case when cut.full then cut.last else c.upto end from c, cut)
)
select proof.through, proof.in_order, cut.full or proof.through = c.last_seq + $4,
    (select l.occurred_at from public.event_log l where l.seq = proof.through limit 1),
    own.seq, own.occurred_at, own.recorded_at, own.topic, coalesce(own.key, ''), own.uuid, own.payload, own.metadata::text
from c cross join cut cross join proof left join own on true
order by own.seq`

// read is the statement that reads a round's batch under its lock.
func (r *Round) read() (string, []any) {
	log, key, limits := r.config.Log, r.config.Key, r.config.Limits
	if key.Topic == "" {
		return log.Render(sqlAllFrom), []any{limits.numbers(), limits.Bytes, key.Consumer, key.Topic, key.Shard}
	}
	return log.Render(sqlFrom + sqlOwn), []any{key.Consumer, key.Topic, key.Shard, int64(limits.Cover), int64(limits.Events), limits.Bytes}
}

// readBounded is the same where what stands beside the cursor bounds the batch.
func (r *Round) readBounded() (string, []any) {
	log, key, limits := r.config.Log, r.config.Key, r.config.Limits
	sql := sqlAllFromBounded
	if key.Topic != "" {
		sql = sqlFromBounded + sqlOwn
	}
	return log.Render(sql), []any{
		key.Consumer, key.Topic, key.Shard, int64(limits.Cover), int64(limits.Events), limits.Bytes,
		r.config.ParkAfter > 0, r.config.By, r.config.Suspect,
	}
}

// readAhead is the statement that reads a batch after a position.
func (r *Round) readAhead(position int64, limits Limits) (string, []any) {
	log, key := r.config.Log, r.config.Key
	if key.Topic == "" {
		return log.Render(sqlAllAhead), []any{limits.numbers(), limits.Bytes, position}
	}
	return log.Render(sqlAhead + sqlOwn), []any{position, key.Topic, key.Shard, int64(limits.Cover), int64(limits.Events), limits.Bytes}
}

// numbers is how many events are read where each of them is handed out.
func (l Limits) numbers() int64 { return int64(min(l.Events, l.Cover)) }

// take reads a batch's rows into the opening.
func (r *Round) take(rows pgx.Rows) error {
	b, err := r.takeBatch(rows, r.opening.Position, r.config.Limits)
	if err != nil {
		return err
	}
	r.opening.set(b)
	return nil
}

func (o *Opening) set(b batch) {
	o.Events, o.Through, o.throughAt, o.Full = b.events, b.through, b.throughAt, b.full
}

func (r *Round) takeBatch(rows pgx.Rows, position int64, limits Limits) (b batch, err error) {
	defer rows.Close()
	if r.config.Key.Topic == "" {
		b.events = make([]Event, 0, len(r.opening.Events)) // in a drain the next batch is as long as this one
		err = b.takeAll(rows, position, limits)
	} else {
		b, err = takeOwn(rows)
	}
	if err != nil {
		return batch{}, fmt.Errorf("read batch: %w", err)
	}
	return b, nil
}

func (b *batch) takeAll(rows pgx.Rows, position int64, limits Limits) error {
	inOrder, bytes := true, int64(0)
	var e Event                            // one for all rows, as Scan puts it on the heap
	var topic, metadata pgtype.DriverBytes // not copied
	row := []any{&e.Seq, &e.OccurredAt, &e.RecordedAt, &topic, &e.Key, &e.UUID, &e.Payload, &metadata}
	for rows.Next() {
		e = Event{}
		if err := rows.Scan(row...); err != nil {
			return &UnreadableError{Seq: e.Seq, Err: err}
		}
		if n := len(b.events); n > 0 && b.events[n-1].Topic == string(topic) { // mostly, and then it is one string
			e.Topic = b.events[n-1].Topic
		} else {
			e.Topic = string(topic)
		}
		var err error
		if e.Metadata, err = decodeMetadata(metadata); err != nil {
			return &UnreadableError{Seq: e.Seq, Err: err}
		}
		inOrder = inOrder && e.Seq == position+1+int64(len(b.events))
		bytes += int64(len(e.Payload))
		b.events = append(b.events, e)
	}
	if n := len(b.events); n > 0 && inOrder {
		last := &b.events[n-1]
		b.through, b.throughAt = last.Seq, &last.OccurredAt
		b.full = n >= limits.Events || bytes >= limits.Bytes || n >= limits.Cover
	}
	return rows.Err()
}

func takeOwn(rows pgx.Rows) (b batch, err error) {
	// One for all rows. Where nothing is of this topic, the one row has no event.
	var through, seq pgtype.Int8
	var inOrder, full pgtype.Bool
	var throughAt, occurred, recorded pgtype.Timestamptz
	var topic, metadata pgtype.DriverBytes // not copied
	var key, uuid pgtype.Text
	var payload []byte
	row := []any{&through, &inOrder, &full, &throughAt, &seq, &occurred, &recorded, &topic, &key, &uuid, &payload, &metadata}
	for rows.Next() {
		seq = pgtype.Int8{}
		if err := rows.Scan(row...); err != nil {
			if !seq.Valid {
				return b, err
			}
			return b, &UnreadableError{Seq: seq.Int64, Err: err}
		}
		if !seq.Valid {
			continue
		}
		e := Event{
			Seq: seq.Int64, OccurredAt: occurred.Time, RecordedAt: recorded.Time,
			Key: key.String, UUID: uuid.String, Payload: payload,
		}
		if occurred.InfinityModifier != pgtype.Finite || recorded.InfinityModifier != pgtype.Finite {
			return b, &UnreadableError{Seq: e.Seq, Err: errors.New("a time is infinite")}
		}
		if n := len(b.events); n > 0 { // they have one topic
			e.Topic = b.events[0].Topic
		} else {
			e.Topic = string(topic)
		}
		if e.Metadata, err = decodeMetadata(metadata); err != nil {
			return b, &UnreadableError{Seq: e.Seq, Err: err}
		}
		b.events = append(b.events, e)
	}
	b.full = full.Bool
	if through.Valid && inOrder.Bool {
		b.through = through.Int64
		if throughAt.Valid && throughAt.InfinityModifier == pgtype.Finite {
			b.throughAt = &throughAt.Time
		}
	}
	return b, rows.Err()
}

// split cuts a batch behind its first n events. The rest is nil where there are no more.
func (b batch) split(n int) (first batch, rest *batch) {
	if len(b.events) <= n || b.through == 0 {
		return b, nil
	}
	last := &b.events[n-1]
	return batch{events: b.events[:n:n], through: last.Seq, throughAt: &last.OccurredAt, full: true},
		&batch{events: b.events[n:], through: b.through, throughAt: b.throughAt, full: b.full}
}

// decodeMetadata decodes a flat JSON object of strings, as PostgreSQL writes a jsonb. What has escapes is left to
// encoding/json.
func decodeMetadata(raw []byte) (map[string]string, error) {
	if metadata, ok := decodePlain(raw); ok {
		return metadata, nil
	}
	metadata := map[string]string{}
	if err := json.Unmarshal(raw, &metadata); err != nil {
		return nil, err
	}
	return metadata, nil
}

func decodePlain(raw []byte) (map[string]string, bool) {
	if len(raw) < 2 || raw[0] != '{' || raw[len(raw)-1] != '}' {
		return nil, false
	}
	text := string(raw[1 : len(raw)-1]) // one allocation: keys and values are parts of it
	metadata := make(map[string]string, 4)
	for text != "" {
		key, rest, ok := plainString(text)
		if !ok || len(rest) < 2 || rest[:2] != ": " {
			return nil, false
		}
		value, rest, ok := plainString(rest[2:])
		if !ok {
			return nil, false
		}
		metadata[key] = value
		switch {
		case rest == "":
		case len(rest) > 2 && rest[:2] == ", ":
			rest = rest[2:]
		default:
			return nil, false
		}
		text = rest
	}
	return metadata, true
}

// plainString takes a quoted string without escapes off the front of a text.
func plainString(text string) (value, rest string, ok bool) {
	if text == "" || text[0] != '"' {
		return "", "", false
	}
	for i := 1; i < len(text); i++ {
		switch text[i] {
		case '\\':
			return "", "", false
		case '"':
			return text[1:i], text[i+1:], true
		}
	}
	return "", "", false
}
