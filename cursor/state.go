package cursor

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// state is what stands beside a cursor, read under its lock by a statement of its own, where there is something.
type state struct {
	failure   *Failure
	mark      *mark
	replay    bool // somebody asked for the replay of a parked event
	rewritten bool // the log's event at the position is not the one that was passed
	stale     bool // older than the resume age
}

const sqlState = `
select f.through, coalesce(f.seq, 0), coalesce(f.batch, 0), f.attempts, f.error_type, f.permanent, f.since,
    extract(epoch from f.retry_at - clock_timestamp())::float8,
    m.through, m.marked_by, m.slow, coalesce(m.seq, 0), m.deaths,
    exists (
        select from public.event_consumer_parked p
        where p.consumer = c.consumer and p.topic = c.topic and p.shard = c.shard and p.replay_at is not null),
    coalesce((
        select l.occurred_at <> c.last_occurred_at
        from public.event_log l where l.seq = c.last_seq and c.last_seq = c.occurred_seq limit 1), false),
    case when $4::float8 > 0 and coalesce(c.moved_at, c.created_at) < clock_timestamp() - make_interval(secs => $4::float8)
        then coalesce((
            select l.recorded_at < clock_timestamp() - make_interval(secs => $4::float8)
            from public.event_log l where l.seq > c.last_seq order by l.seq limit 1), false)
        else false end
from public.event_consumer_cursors c
left join public.event_consumer_failures f on f.consumer = c.consumer and f.topic = c.topic and f.shard = c.shard
left join public.event_consumer_marks m on m.consumer = c.consumer and m.topic = c.topic and m.shard = c.shard
where c.consumer = $1 and c.topic = $2 and c.shard = $3`

// state is the statement that reads what stands beside the cursor.
func (r *Round) state() (string, []any) {
	key := r.config.Key
	return r.config.Log.Render(sqlState), []any{key.Consumer, key.Topic, key.Shard, r.config.ResumeAge.Seconds()}
}

func scanState(row pgx.Row) (state, error) {
	var s state
	var f Failure
	var m mark
	var failureThrough, markThrough *int64
	var failureAttempts, markDeaths *int
	var errorType, markBy *string
	var permanent, slow *bool
	var since *time.Time
	var wait *float64
	err := row.Scan(&failureThrough, &f.Seq, &f.Batch, &failureAttempts, &errorType, &permanent, &since, &wait,
		&markThrough, &markBy, &slow, &m.seq, &markDeaths, &s.replay, &s.rewritten, &s.stale)
	if err != nil {
		return state{}, fmt.Errorf("read state: %w", err)
	}
	if failureThrough != nil {
		f.Through, f.Attempts, f.ErrorType, f.Permanent, f.Since = *failureThrough, *failureAttempts, *errorType, *permanent, *since
		f.Wait = max(0, seconds(*wait))
		s.failure = &f
	}
	if markThrough != nil {
		m.through, m.by, m.slow, m.deaths = *markThrough, *markBy, *slow, *markDeaths
		s.mark = &m
	}
	return s, nil
}
