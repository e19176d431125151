package operate

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Tombstone is the payload of an event that was redacted: a JSON object, so that it fits wherever JSON is expected.
const Tombstone = `{"redacted": true}`

// TombstoneMetadata is the metadata key, with the value "true", by which a handler tells such an event.
const TombstoneMetadata = "redacted"

const sqlRedact = `
with redacted as (
    update public.event_log l set payload = convert_to($2, 'UTF8'), metadata = jsonb_build_object($3::text, 'true')
    where l.seq = $1
    returning 1
), copies as (
    update public.event_consumer_parked p set payload = convert_to($2, 'UTF8'), metadata = jsonb_build_object($3::text, 'true')
    where p.seq = $1
    returning 1
), noted as (
    insert into public.event_consumer_interventions (consumer, topic, shard, action, from_seq, to_seq, by, reason)
    select '', '', '', 'redact', $1, $1, $4, $5
    where exists (select from redacted) or exists (select from copies)
    returning at
)
select n.at, (select count(*) from redacted) + (select count(*) from copies) from noted n`

// Redact replaces an event's payload by [Tombstone] and its metadata by the one entry [TombstoneMetadata], in the log
// and in what consumers have parked of it. Its number stays, and with it the log's proof; so do its times, topic, uuid
// and key (the key decides the event's order and shard: no personal data belongs in it). The change's Events counts
// the copies that were replaced.
//
// It does not reach what was made of the event before: the effects and jobs of its handlers, a round that has read it
// already, backups, the server's log of changes, and the old version of the row until it is vacuumed. An event of which
// nothing is there any more is [ErrRefused].
func Redact(ctx context.Context, db cursor.Beginner, log *cursor.Log, seq int64, order Order) (Change, error) {
	change := Change{Action: "redact", From: seq, To: seq, By: order.By, Reason: order.Reason, DryRun: order.DryRun}
	err := order.validate()
	if err == nil {
		err = rehearse(ctx, db, order.DryRun, func(tx pgx.Tx) error {
			err := tx.QueryRow(ctx, log.Render(sqlRedact), seq, Tombstone, TombstoneMetadata, order.By, order.Reason).
				Scan(&change.At, &change.Events)
			if errors.Is(err, pgx.ErrNoRows) {
				return refuse("it is neither in the log nor parked")
			}
			return err
		})
	}
	if err != nil {
		return Change{}, fmt.Errorf("redact event %d: %w", seq, log.Explain(err))
	}
	return change, nil
}
