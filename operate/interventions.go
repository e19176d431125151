package operate

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Intervention is a change that was no round, as it was recorded: the creation of a cursor, and what operators did.
type Intervention struct {
	ID     int64
	At     time.Time
	Cursor cursor.Key // the zero Key where it is a change of the log itself
	Action string     // "create", "seek", "skip", "pause", "resume", "retire", "settle", "replay", "discard", "redact"
	From   *int64
	To     *int64
	By     string
	Reason string
}

const sqlInterventions = `
select i.id, i.at, i.consumer, i.topic, i.shard, i.action, i.from_seq, i.to_seq, i.by, i.reason
from public.event_consumer_interventions i
where cardinality($1::text[]) = 0 or exists (
    select from unnest($1::text[], $2::text[], $3::text[]) as k(consumer, topic, shard)
    where i.consumer = k.consumer and i.topic = k.topic and i.shard = k.shard)
order by i.id desc
limit $4`

// Interventions returns what was done to the given cursors, or to all and to the log itself, the latest first, at
// most limit.
func Interventions(ctx context.Context, db cursor.Querier, log *cursor.Log, limit int, keys ...cursor.Key) ([]Intervention, error) {
	consumers, topics, shards := cursor.Columns(keys)
	rows, _ := db.Query(ctx, log.Render(sqlInterventions), consumers, topics, shards, limit)
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (i Intervention, err error) {
		err = row.Scan(&i.ID, &i.At, &i.Cursor.Consumer, &i.Cursor.Topic, &i.Cursor.Shard, &i.Action, &i.From, &i.To, &i.By, &i.Reason)
		return i, err
	})
	if err != nil {
		return nil, fmt.Errorf("list interventions: %w", log.Explain(err))
	}
	return list, nil
}
