package cursor

import (
	"context"
	"fmt"
)

// minDeaths is how many processes have to die with an event in hand before it is parked for that, however few
// attempts the consumer asks for: one or two may have been killed from outside.
const minDeaths = 3

// mark tells of a round that was begun. One that nobody closed tells of a process that died in it.
type mark struct {
	by      string
	through int64 // where that round would have ended
	slow    bool  // one event at a time until through is passed, because a process had died before
	seq     int64 // slow: the event in hand, or 0
	deaths  int   // slow: how often a process has died with it in hand, if this one does
}

// left tells whether a mark asks for a slow round: its round's process died, or such a pass is under way.
func (m *mark) left(by string, position int64) bool {
	return m != nil && m.through > position && (m.slow || m.by != by)
}

// deathsAt is how many processes have died with an event in hand. An instance that finds its own mark is alive.
func (m *mark) deathsAt(seq int64, by string) int {
	switch {
	case m == nil || m.seq != seq:
		return 0
	case m.by == by:
		return m.deaths - 1
	}
	return m.deaths
}

const sqlMark = `
insert into public.event_consumer_marks as m (consumer, topic, shard, marked_by, marked_at, through, slow, seq, deaths)
values ($1, $2, $3, $4, clock_timestamp(), $5, $6, nullif($7::bigint, 0), $8)
on conflict (consumer, topic, shard) do update set
    marked_by = excluded.marked_by, marked_at = excluded.marked_at, through = excluded.through, slow = excluded.slow,
    seq = excluded.seq, deaths = excluded.deaths`

// Mark notes in a transaction of its own, on another connection, that the round's events are about to be handed
// out. It is for consumers that park: so an event that kills its process is found.
func (r *Round) Mark(ctx context.Context, db Querier) error {
	m := r.mark
	key := r.config.Key
	if err := exec(ctx, db, r.config.Log.Render(sqlMark), key.Consumer, key.Topic, key.Shard, m.by, m.through, m.slow, m.seq, m.deaths); err != nil {
		return fmt.Errorf("mark round: %w", err)
	}
	r.marked = true
	return nil
}

// newMark is the mark of the round that was opened.
func (r *Round) newMark(found *mark) mark {
	o, by := &r.opening, r.config.By
	if !found.left(by, o.Position) {
		return mark{by: by, through: o.Through}
	}
	m := mark{by: by, through: found.through, slow: true}
	if len(o.Events) > 0 {
		m.seq = o.Events[0].Seq
		m.deaths = found.deathsAt(m.seq, by) + 1
	}
	return m
}

const sqlDropMark = `
delete from public.event_consumer_marks m
where m.consumer = $1 and m.topic = $2 and m.shard = $3 and (not m.slow or m.through <= $4)`

// A slow pass goes on after this round.
const sqlSettleMark = `
update public.event_consumer_marks m set seq = null, deaths = 0
where m.consumer = $1 and m.topic = $2 and m.shard = $3 and m.slow`

// Unmark closes the mark of a round that ended without a commit and without a failure, as by a stop.
func (r *Round) Unmark(ctx context.Context, db Querier) error {
	if !r.marked {
		return nil
	}
	r.marked = false
	key := r.config.Key
	sql, args := sqlDropMark, []any{key.Consumer, key.Topic, key.Shard, r.opening.Position}
	if r.mark.slow {
		sql, args = sqlSettleMark, args[:3]
	}
	if err := exec(ctx, db, r.config.Log.Render(sql), args...); err != nil {
		return fmt.Errorf("close mark: %w", err)
	}
	return nil
}

// exec runs a statement that returns nothing.
func exec(ctx context.Context, db Querier, sql string, args ...any) error {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	rows.Close()
	return rows.Err()
}
