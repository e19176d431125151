package operate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// LockedError is returned when a round kept its cursor locked for longer than a change by hand waits.
type LockedError struct {
	Key         cursor.Key
	Waited      time.Duration
	PID         int           // of the server process that holds the lock; 0 when it cannot be told any more
	Application string        // its application_name
	Address     string        // its client's
	Held        time.Duration // how long its transaction has been open
	MovedBy     string        // the instance that moved the cursor last, most likely the same
}

func (e *LockedError) Error() string {
	holder := "it cannot be told any more by whom"
	if e.PID != 0 {
		holder = fmt.Sprintf("by server process %d (application %q, client %s), whose transaction has been open for %s",
			e.PID, e.Application, e.Address, e.Held.Round(time.Second))
	}
	return fmt.Sprintf("a round holds the cursor for longer than %s: %s; it was moved last by instance %q: try again, "+
		"or stop that process", e.Waited, holder, e.MovedBy)
}

// ErrorType is "locked".
func (e *LockedError) ErrorType() string { return "locked" }

// The holder of a row's lock is the transaction that the row names.
const sqlHolder = `
select coalesce(a.pid, 0), coalesce(a.application_name, ''), coalesce(host(a.client_addr), 'local'),
    coalesce(extract(epoch from clock_timestamp() - a.xact_start), 0)::float8, coalesce(c.moved_by, '')
from public.event_consumer_cursors c
left join pg_locks k on k.locktype = 'transactionid' and k.granted and k.transactionid = c.xmax
left join pg_stat_activity a on a.pid = k.pid
where c.consumer = $1 and c.topic = $2 and c.shard = $3`

func explainLocked(ctx context.Context, db cursor.Beginner, log *cursor.Log, key cursor.Key, cause error) error {
	locked := &LockedError{Key: key, Waited: lockWait}
	var held float64
	err := cursor.InReadCommitted(ctx, db, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, log.Render(sqlHolder), key.Consumer, key.Topic, key.Shard).
			Scan(&locked.PID, &locked.Application, &locked.Address, &held, &locked.MovedBy)
	})
	if err != nil {
		return errors.Join(cause, err)
	}
	locked.Held = seconds(held)
	return locked
}
