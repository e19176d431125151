package retention

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Settings are shared by all processes: they are stored with the log. In Set, zero is the default.
type Settings struct {
	// Off leaves everything that is there. Partitions that were begun are still made ahead, by [Retention.Run], as
	// appends need them.
	Off bool

	// Keep is how long events are kept after they were recorded, at least. Defaults to 30 days.
	Keep time.Duration

	// PartitionSize is how many numbers a new partition has. Events are removed a partition at a time: small ones
	// give space back sooner, and every round plans over all of them, so stay below some hundred. It must be
	// more than one transaction appends: an append fails where the partitions made ahead are full. Where so many events
	// arrive that they would not last, larger ones are made. Defaults to 1,000,000.
	PartitionSize int64

	// PinnedAge lets events that a consumer has not passed go once they were recorded longer ago than this; it then
	// records them as lost. At least Keep. Zero is no cap.
	PinnedAge time.Duration

	// PinnedBytes bounds what is kept beyond Keep for consumers that have not passed it, with its indexes. Zero is no
	// cap.
	PinnedBytes int64
}

const (
	defaultKeep          = 30 * 24 * time.Hour
	defaultPartitionSize = 1_000_000
	maxPartitionSize     = 1 << 32
)

func (s Settings) withDefaults() (Settings, error) {
	if s.Keep == 0 {
		s.Keep = defaultKeep
	}
	if s.PartitionSize == 0 {
		s.PartitionSize = defaultPartitionSize
	}
	var errs []error
	if s.Keep < 0 {
		errs = append(errs, fmt.Errorf("negative Keep (%v): to keep everything, set Off", s.Keep))
	}
	if s.PartitionSize < 0 || s.PartitionSize > maxPartitionSize {
		errs = append(errs, fmt.Errorf("PartitionSize %d is not between 1 and %d", s.PartitionSize, int64(maxPartitionSize)))
	}
	if s.PinnedAge < 0 || s.PinnedAge > 0 && s.PinnedAge < s.Keep {
		errs = append(errs, fmt.Errorf("PinnedAge %v is below Keep (%v): make it at least that, or 0 for no cap", s.PinnedAge, s.Keep))
	}
	if s.PinnedBytes < 0 {
		errs = append(errs, fmt.Errorf("negative PinnedBytes (%d): 0 is no cap", s.PinnedBytes))
	}
	if err := errors.Join(errs...); err != nil {
		return s, fmt.Errorf("retention settings: %w", err)
	}
	return s, nil
}

const sqlSet = `
with noted as (
    insert into public.event_consumer_interventions (consumer, topic, shard, action, by, reason)
    values ('', '', '', 'retention', $6, $7)
)
update public.event_retention r
set set_at = clock_timestamp(), switched_on = $1, keep = make_interval(secs => $2), partition_size = $3,
    pinned_age = make_interval(secs => nullif($4::float8, 0)), pinned_bytes = nullif($5::bigint, 0)
returning r.one`

// Set stores the settings; what is running goes by them with its next maintenance. A nil log is the default one. Who
// does it and why is recorded among the log's interventions. It needs the right to update the log's table for it.
func Set(ctx context.Context, db cursor.Querier, log *cursor.Log, settings Settings, by, reason string) error {
	if _, existing := log.Existing(); existing {
		return errExisting
	}
	s, err := settings.withDefaults()
	if err != nil {
		return err
	}
	rows, _ := db.Query(ctx, log.Render(sqlSet), !s.Off, s.Keep.Seconds(), s.PartitionSize, s.PinnedAge.Seconds(), s.PinnedBytes, by, reason)
	if _, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool]); err != nil {
		return fmt.Errorf("set retention: %w", explain(log, err))
	}
	return nil
}

const sqlGet = `
select not r.switched_on, extract(epoch from r.keep)::float8, r.partition_size,
    coalesce(extract(epoch from r.pinned_age), 0)::float8, coalesce(r.pinned_bytes, 0)
from public.event_retention r`

// Get reads the settings. As long as nobody has set any, they are the defaults, and off.
func Get(ctx context.Context, db cursor.Querier, log *cursor.Log) (Settings, error) {
	rows, _ := db.Query(ctx, log.Render(sqlGet))
	s, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (s Settings, err error) {
		var keep, pinned float64
		err = row.Scan(&s.Off, &keep, &s.PartitionSize, &pinned, &s.PinnedBytes)
		s.Keep, s.PinnedAge = seconds(keep), seconds(pinned)
		return s, err
	})
	if err != nil {
		return Settings{}, fmt.Errorf("get retention: %w", explain(log, err))
	}
	return s, nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// explain names the next step when a statement found nothing of the log, or no settings.
func explain(log *cursor.Log, err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("%s has no row: insert one with default values", log.Table("retention"))
	}
	return log.Explain(err)
}
