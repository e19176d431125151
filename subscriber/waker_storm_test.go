package subscriber_test

import (
	"context"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// resident is the memory of a process, in KiB.
func resident(t *testing.T, pid int) int64 {
	t.Helper()
	out, err := exec.Command("ps", "-o", "rss=", "-p", strconv.Itoa(pid)).Output()
	require.NoError(t, err)
	size, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
	require.NoError(t, err)
	return size
}

// A busy handler does not keep its process from taking notifications off the server's queue, where they would in the
// end make every NOTIFY fail, and they add up to one wake.
func TestNotificationsDuringABusyHandlerPileUpNowhere(t *testing.T) {
	t.Parallel()
	db := frozenDB(t) // a queue of its own
	w := startHeld(t, db, time.Minute)
	logtest.Append(t, db, holds, 1)
	first, err := strconv.ParseInt(receive(t, w.Lines, "the handler"), 10, 64)
	require.NoError(t, err)
	waitListening(t, db, 0)
	usage := func() float64 { return pgtest.Value[float64](t, db, "select pg_notification_queue_usage()") }
	storm(t, db, usage)
	w.Says(t, stormOver)
	before := resident(t, w.PID())
	storm(t, db, usage)
	w.Says(t, stormOver)
	grown := resident(t, w.PID()) - before
	t.Logf("memory grown by %d KiB of %d", grown, before)
	require.Less(t, grown, int64(24<<10), "the notifications have 50 MiB")

	w.Tell(t, "go on")
	waitPosition(t, db, "push", 1)
	logtest.Append(t, db, holds, 1)
	second, err := strconv.ParseInt(receive(t, w.Lines, "the handler"), 10, 64)
	require.NoError(t, err)
	w.Tell(t, "go on")
	waitPosition(t, db, "push", 2)
	require.LessOrEqual(t, second-first, int64(3), "a round for all of them, one for a poll, and that of the new event")
}

// A process that is frozen does not read them: then its listener is ended, and the queue goes on without it.
func TestFrozenProcessDoesNotHoldUpNotifications(t *testing.T) {
	t.Parallel()
	db := frozenDB(t)
	w := startHeld(t, db, frozenBound)
	pid := waitListening(t, db, 0)
	w.Freeze(t)
	storm(t, db, func() float64 { return pgtest.Value[float64](t, db, "select pg_notification_queue_usage()") })
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, listeners), "what is sent is far more than sockets hold")
	w.Thaw(t)
	waitListening(t, db, pid)
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 1)
}

// storm sends 100,000 notifications, most of them many to a transaction because that is quicker, and returns when the
// server's queue is empty.
func storm(t *testing.T, db *pgtest.DB, usage func() float64) {
	t.Helper()
	const senders = 4
	sent := make(chan error, senders)
	started := time.Now()
	for range senders {
		conn := db.Conn(t)
		go func() {
			_, err := conn.Exec(context.Background(), `do $$ begin
				for n in 1 .. 225 loop
					perform pg_notify('event_log', repeat('x', 500) || i) from generate_series(1, 100) i;
					commit;
				end loop;
				for n in 1 .. 2500 loop
					perform pg_notify('event_log', '');
					commit;
				end loop;
			end $$`)
			sent <- err
		}()
	}
	highest, inTransaction := 0.0, int64(0)
	require.Eventually(t, func() bool {
		now := usage()
		highest = max(highest, now)
		inTransaction += pgtest.Value[int64](t, db,
			"select count(*) from pg_stat_activity where query like 'listen %' and state like 'idle in transaction%'")
		return len(sent) == senders && now == 0
	}, 30*time.Second, time.Millisecond)
	for range senders {
		require.NoError(t, <-sent)
	}
	db.Exec(t, "select pg_notify('event_log', $1)", stormOver)
	require.Equal(t, int64(0), inTransaction)
	t.Logf("100,000 notifications read in %v, queue usage at most %.4f", time.Since(started).Round(time.Millisecond), highest)
}
