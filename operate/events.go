package operate

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Entry is an event as it lies in the log, looked at from outside of a round.
type Entry struct {
	cursor.Event       // without a payload where that was not asked for
	Size         int64 // of the payload, in bytes
}

const sqlEvents = `
select s.last_seq, l.seq, l.occurred_at, l.recorded_at, l.topic, coalesce(l.key, ''), l.uuid, octet_length(l.payload),
    case when $4 then l.payload else '' end, l.metadata::text
from (select s.last_seq from public.event_seq s limit 1) s
left join lateral (
    select l.* from public.event_log l where l.seq > $1 and ($2 = '' or l.topic = $2) order by l.seq limit $3
) l on true
order by l.seq`

// Events returns the events of a topic, or with "" of all, that are behind a seq, at most limit of them, and up to
// which number the log was read for them. Payloads cross the wire only where they are asked for.
func Events(ctx context.Context, db cursor.Querier, log *cursor.Log, after int64, topic string, limit int, payloads bool) (entries []Entry, through int64, err error) {
	fail := func(err error) ([]Entry, int64, error) {
		return nil, 0, fmt.Errorf("list events: %w", log.Explain(err))
	}
	rows, _ := db.Query(ctx, log.Render(sqlEvents), after, topic, limit, payloads)
	defer rows.Close()
	for rows.Next() {
		var e Entry
		var seq, size *int64
		var occurred, recorded *time.Time
		var eventTopic, uuid *string
		var payload, metadata []byte
		if err := rows.Scan(&through, &seq, &occurred, &recorded, &eventTopic, &e.Key, &uuid, &size, &payload, &metadata); err != nil {
			return fail(err)
		}
		if seq == nil {
			continue
		}
		e.Seq, e.OccurredAt, e.RecordedAt, e.Topic, e.UUID, e.Size, e.Payload = *seq, *occurred, *recorded, *eventTopic, *uuid, *size, payload
		if err := json.Unmarshal(metadata, &e.Metadata); err != nil {
			return fail(&cursor.UnreadableError{Seq: e.Seq, Err: err})
		}
		entries = append(entries, e)
	}
	if err := rows.Err(); err != nil {
		return fail(err)
	}
	if len(entries) == limit {
		through = entries[limit-1].Seq
	}
	return entries, max(through, after), nil
}
