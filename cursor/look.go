package cursor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Look is where the log and a set of cursors stand, seen in one statement.
type Look struct {
	Head      int64
	Positions map[Key]int64 // of the keys that were asked for; one without a row is not in it
	Replays   map[Key]bool  // cursors that were asked to replay a parked event
	Held      map[Key]bool  // cursors that are paused or retired
}

const sqlLook = `
select s.last_seq, c.consumer, c.topic, c.shard, c.last_seq, exists (
    select from public.event_consumer_parked p
    where p.consumer = c.consumer and p.topic = c.topic and p.shard = c.shard and p.replay_at is not null),
    c.paused_at is not null or c.retired_at is not null
from public.event_seq s
left join (
    public.event_consumer_cursors c
    join unnest($1::text[], $2::text[], $3::text[]) as k(consumer, topic, shard)
        on c.consumer = k.consumer and c.topic = k.topic and c.shard = k.shard
) on true`

// LookAt reads the head and the positions of the keys in one statement. It locks nothing, takes no
// transaction id and writes nothing.
func LookAt(ctx context.Context, db Querier, log *Log, keys []Key) (Look, error) {
	consumers, topics, shards := Columns(keys)
	look := Look{Head: -1, Positions: make(map[Key]int64, len(keys)), Replays: map[Key]bool{}, Held: map[Key]bool{}}
	rows, _ := db.Query(ctx, log.Render(sqlLook), consumers, topics, shards)
	var consumer, topic, shard *string
	var position *int64
	var replay, held bool
	_, err := pgx.ForEachRow(rows, []any{&look.Head, &consumer, &topic, &shard, &position, &replay, &held}, func() error {
		if consumer == nil {
			return nil
		}
		key := Key{Consumer: *consumer, Topic: *topic, Shard: *shard}
		look.Positions[key] = *position
		if replay {
			look.Replays[key] = true
		}
		if held {
			look.Held[key] = true
		}
		return nil
	})
	if err != nil {
		return Look{}, fmt.Errorf("look at cursors: %w", log.Explain(err))
	}
	if look.Head < 0 {
		return Look{}, fmt.Errorf("look at cursors: the counter %s has no row", log.Table("seq"))
	}
	return look, nil
}
