package operate

import (
	"context"
	"fmt"
	"time"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Standings is how a log and its cursors stand, seen in one statement.
type Standings struct {
	At      time.Time // the database's clock
	Head    int64
	Cursors []Standing // sorted by their keys
}

// Standing is how one cursor stands.
type Standing struct {
	Cursor     cursor.Key
	Position   int64
	Lag        int64         // events behind the cursor, those of other topics included; 0 where it is ahead
	Ahead      bool          // the cursor is beyond the head
	PendingAge time.Duration // since the oldest event behind the cursor occurred; 0 at the head
	Rounds     int64         // committed so far
	CreatedAt  time.Time
	MovedAt    *time.Time // nil when it has never moved
	MovedBy    string
	MatchedSeq int64 // the last event of its own, 0 where there was none
	MatchedAt  *time.Time
	PausedAt   *time.Time
	RetiredAt  *time.Time
	Failure    *cursor.Failure // the standing failure; its Batch and Wait are not read
	FailedBy   string
	Parked     int64 // events
	Losses     int64 // not settled
	LostEvents int64 // of those
}

// The limit tells the estimate that the counter has one row: see sqlDeliveries.
const sqlSurvey = `
select clock_timestamp(), s.last_seq, c.consumer, c.topic, c.shard, c.last_seq, c.rounds, c.created_at, c.moved_at,
    coalesce(c.moved_by, ''), coalesce(c.matched_seq, 0), c.matched_at, c.paused_at, c.retired_at,
    case when c.last_seq < s.last_seq then greatest(0, extract(epoch from clock_timestamp() - coalesce(
        (select l.occurred_at from public.event_log l where l.seq > c.last_seq order by l.seq limit 1),
        c.last_occurred_at, c.created_at)))::float8 else 0 end,
    coalesce(f.seq, 0), f.through, f.attempts, f.error_type, f.permanent, f.since, f.failed_by,
    (select count(*) from public.event_consumer_parked p
        where p.consumer = c.consumer and p.topic = c.topic and p.shard = c.shard),
    coalesce(x.losses, 0), coalesce(x.events, 0)
from (select s.last_seq from public.event_seq s limit 1) s
left join public.event_consumer_cursors c on cardinality($1::text[]) = 0 or exists (
    select from unnest($1::text[], $2::text[], $3::text[]) as k(consumer, topic, shard)
    where c.consumer = k.consumer and c.topic = k.topic and c.shard = k.shard)
left join public.event_consumer_failures f
    on f.consumer = c.consumer and f.topic = c.topic and f.shard = c.shard and f.through > c.last_seq
left join lateral (
    select count(*) as losses, sum(l.last_seq - l.first_seq + 1)::bigint as events
    from public.event_consumer_losses l
    where l.consumer = c.consumer and l.topic = c.topic and l.shard = c.shard and l.settled_at is null
) x on true
order by c.consumer, c.topic, c.shard`

// Survey looks over the given cursors, or over all, in one statement. It locks nothing and writes nothing. A key that has no
// cursor is not in the result.
func Survey(ctx context.Context, db cursor.Querier, log *cursor.Log, keys ...cursor.Key) (Standings, error) {
	survey := Standings{Head: -1}
	consumers, topics, shards := cursor.Columns(keys)
	rows, _ := db.Query(ctx, log.Render(sqlSurvey), consumers, topics, shards)
	for rows.Next() {
		var s Standing
		var consumer, topic, shard *string
		var position, rounds, through *int64
		var createdAt, since *time.Time
		var pending float64
		var f cursor.Failure
		var attempts *int
		var errorType, failedBy *string
		var permanent *bool
		err := rows.Scan(&survey.At, &survey.Head, &consumer, &topic, &shard, &position, &rounds, &createdAt, &s.MovedAt,
			&s.MovedBy, &s.MatchedSeq, &s.MatchedAt, &s.PausedAt, &s.RetiredAt, &pending, &f.Seq, &through, &attempts, &errorType,
			&permanent, &since, &failedBy, &s.Parked, &s.Losses, &s.LostEvents)
		if err != nil {
			rows.Close()
			return Standings{}, fmt.Errorf("survey cursors: %w", err)
		}
		if consumer == nil {
			continue
		}
		s.Cursor = cursor.Key{Consumer: *consumer, Topic: *topic, Shard: *shard}
		s.Position, s.Rounds, s.CreatedAt, s.PendingAge = *position, *rounds, *createdAt, seconds(pending)
		s.Lag, s.Ahead = max(0, survey.Head-s.Position), s.Position > survey.Head
		if through != nil {
			f.Through, f.Attempts, f.ErrorType, f.Permanent, f.Since = *through, *attempts, *errorType, *permanent, *since
			s.Failure, s.FailedBy = &f, *failedBy
		}
		survey.Cursors = append(survey.Cursors, s)
	}
	if err := rows.Err(); err != nil {
		return Standings{}, fmt.Errorf("survey cursors: %w", log.Explain(err))
	}
	if survey.Head < 0 {
		return Standings{}, fmt.Errorf("survey cursors: the counter %s has no row", log.Table("seq"))
	}
	return survey, nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
