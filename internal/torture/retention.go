package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/retention"
)

const (
	// partitionSize is small, so that something is removed each time.
	partitionSize = 20
	// maintainInterval is how often partitions are made ahead.
	maintainInterval = 500 * time.Millisecond
	// removeTime is how long partitions are removed. It does not end by itself where events come as fast as they go.
	removeTime = time.Second
)

// kept is the retention between two faults: partitions are made, and none is removed.
var kept = retention.Settings{Off: true, Keep: time.Millisecond, PartitionSize: partitionSize}

// newRetention cuts the log into partitions.
func newRetention(ctx context.Context, server *pgserver.Server, db cursor.Querier) (*retention.Retention, error) {
	r, err := retention.New(retention.Config{ConnString: server.URL("postgres"), Ahead: 20, Interval: maintainInterval}, nil)
	if err != nil {
		return nil, err
	}
	on := kept
	on.Off = false
	if err := retention.Set(ctx, db, nil, on, "torture", "to cut the log"); err != nil {
		return nil, err
	}
	if _, err := r.Once(ctx); err != nil {
		return nil, err
	}
	return r, retention.Set(ctx, db, nil, kept, "torture", "until the first fault")
}

// maintain makes partitions ahead, and finishes what was begun, until ctx ends.
func (r *run) maintain(ctx context.Context) {
	for wait(ctx, maintainInterval) == nil {
		r.up.RLock()
		r.maintaining.Lock()
		_, err := r.retention.Once(ctx)
		r.maintaining.Unlock()
		r.up.RUnlock()
		if err != nil && ctx.Err() == nil && !lockMissed(err) {
			r.report.violate(KindCheck, fmt.Sprintf("make partitions: %v", err))
		}
	}
}

// removeOldest has the partitions removed that every consumer has passed, or also some that not every one has. What is
// held is released once a removal waits for it.
func (r *run) removeOldest(ctx context.Context, random *rand.Rand, release func()) (removed bool, err error) {
	r.maintaining.Lock()
	defer r.maintaining.Unlock()
	settings := kept
	settings.Off = false
	switch random.IntN(12) {
	case 0, 1:
		settings.PinnedAge = settings.Keep // all that are full
	case 2, 3, 4:
		settings.PinnedAge = settings.Keep + time.Duration(random.IntN(500))*time.Millisecond
	}
	set := func(settings retention.Settings) error {
		return retention.Set(context.WithoutCancel(ctx), r.pool, nil, settings, "torture", "a fault")
	}
	if err := set(settings); err != nil {
		return false, err
	}
	var done retention.Done
	ended := make(chan error, 1)
	go func() {
		var err error
		done, err = r.retention.Once(ctx)
		ended <- err
	}()
	const pending = "select exists (select from pg_inherits i where i.inhparent = 'event_log'::regclass and i.inhdetachpending)"
	for began := time.Now(); !removed && time.Since(began) < removeTime && len(ended) == 0; {
		if err := r.pool.QueryRow(ctx, pending).Scan(&removed); err != nil {
			break
		}
		_ = wait(ctx, 2*time.Millisecond)
	}
	release() // a partition is gone for those who begin now, and its removal waits for this one
	select {
	case err = <-ended:
	case <-time.After(removeTime):
		err = errors.Join(set(kept), <-ended)
	}
	if lockMissed(err) {
		err = nil // it is put off
	}
	return removed || len(done.Removed) > 0, errors.Join(err, set(kept))
}

// lockMissed is that retention gave way to who was there first.
func lockMissed(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "55P03"
}
