package watch

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Watch looks at one log and a set of cursors.
type Watch struct {
	db     cursor.Querier
	config Config
}

// New checks the configuration; it does not connect. All faults are reported at once. A pool is best: a single
// connection must not be used by others meanwhile, and one that is lost stays lost. See docs/roles.md for the rights
// that the role needs.
func New(db cursor.Querier, config Config) (*Watch, error) {
	if db == nil {
		return nil, errors.New("watch: missing database")
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, fmt.Errorf("watch config: %w", err)
	}
	return &Watch{db: db, config: config}, nil
}

const sqlKeep = `select extract(epoch from r.keep)::float8 from public.event_retention r`

// ErrRetentionShort is returned by Check when PendingAlertAfter does not lie below the retention.
var ErrRetentionShort = errors.New("PendingAlertAfter (pending_alert_after) must lie below the retention (event_retention.keep): " +
	"the events that a stall is seen by would be gone before somebody is called; lower the one or raise the other")

// Check is for a program's start: it checks the configuration against what is stored with the log. It returns
// [ErrRetentionShort], or why it could not find out.
func (w *Watch) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.config.Timeout)
	defer cancel()
	rows, _ := w.db.Query(ctx, w.config.Log.Render(sqlKeep))
	keep, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[float64])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("watch: %s has no row, which says how long events are kept: insert it", w.config.Log.Table("retention"))
	case err != nil:
		return fmt.Errorf("watch: read retention: %w", err)
	case !w.retained(keep):
		return fmt.Errorf("watch config: %w", ErrRetentionShort)
	}
	return nil
}

func (w *Watch) retained(keep float64) bool { return w.config.PendingAlertAfter.Seconds() < keep }

// Look takes one look. It never fails: what could not be read is a problem of the report, whose status is unknown then.
// It takes Timeout at most, is one statement however many consumers there are, takes no lock that anybody waits for and
// no transaction id, and writes nothing.
func (w *Watch) Look(ctx context.Context) Report {
	ctx, cancel := context.WithTimeout(ctx, w.config.Timeout)
	defer cancel()
	found, err := w.read(ctx)
	if err != nil {
		return w.blind(err)
	}
	return w.judge(found)
}
