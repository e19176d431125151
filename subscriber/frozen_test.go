package subscriber_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// frozenBound is the ServerBound of a process that is frozen, takeover what a standby may take beyond it.
const frozenBound, takeover = 1500 * time.Millisecond, 3 * time.Second

// inState returns when the frozen process's backend is where a test wants it.
func inState(t *testing.T, db *pgtest.DB, condition string) {
	t.Helper()
	require.Eventually(t, func() bool { return backendIs(t, db, condition) }, 20*time.Second, 5*time.Millisecond)
}

func backendIs(t *testing.T, db *pgtest.DB, condition string) bool {
	t.Helper()
	return pgtest.Value[bool](t, db, `select exists (select from pg_stat_activity
		where application_name = $1 and query not like 'listen %' and (`+condition+`))`, held)
}

const idleInRound = "state = 'idle in transaction' and backend_xid is not null"

// takesOver lets another process handle what the frozen one holds, up to seq, and logs how long that took.
func takesOver(t *testing.T, db *pgtest.DB, seq int64) {
	t.Helper()
	at := position(t, db, "push")
	frozen := time.Now()
	standby := start(t, db, map[string]handler{"push": numbered})
	require.Eventually(t, func() bool { return position(t, db, "push") > at }, 20*time.Second, 5*time.Millisecond)
	took := time.Since(frozen)
	t.Logf("a standby went on after %v, where the server's bound is %v", took.Round(time.Millisecond), frozenBound)
	require.Less(t, took, frozenBound+takeover)
	waitPosition(t, db, "push", seq)
	require.NoError(t, standby.router.Close())
	require.Empty(t, standby.logger.Lines("", "error"))
}

// eachOnce fails unless each event up to seq has one effect and one job, and nothing is reported as failing.
func eachOnce(t *testing.T, db *pgtest.DB, seq int64) {
	t.Helper()
	require.Equal(t, upTo(seq), effects(t, db, "push"))
	require.Equal(t, upTo(seq), pgtest.Column[int64](t, db, "select (payload::text)::bigint from watermill_jobs order by 1"))
	require.Empty(t, pgtest.Column[int64](t, db, "select seq from event_consumer_failures"))
}

// worksAgain shows that the process that was frozen does no harm and handles what comes.
func worksAgain(t *testing.T, db *pgtest.DB, seq int64) {
	t.Helper()
	logtest.Append(t, db, "orders", 5)
	waitPosition(t, db, "push", seq+5)
	require.Equal(t, held, pgtest.Value[string](t, db, "select moved_by from event_consumer_cursors"))
	eachOnce(t, db, seq+5)
}

func frozenDB(t *testing.T) *pgtest.DB {
	t.Helper()
	db := logtest.NewOn(t, pgtest.Server(t)) // over TCP, whatever the other tests' server is reached by
	prepareDB(t, db)
	return db
}

func TestProcessFrozenInItsHandlerLosesItsTurnAndDoesNoHarm(t *testing.T) {
	t.Parallel()
	db := frozenDB(t)
	logtest.Append(t, db, "orders", 3)
	logtest.Append(t, db, holds, 1)
	logtest.Append(t, db, "orders", 3)
	w := startHeld(t, db, frozenBound)
	receive(t, w.Lines, "the handler of event 4")
	w.Freeze(t)
	inState(t, db, idleInRound)
	takesOver(t, db, 7)
	eachOnce(t, db, 7)
	w.Thaw(t)
	w.Tell(t, "go on")
	worksAgain(t, db, 7)
}

func TestProcessFrozenBetweenTwoStatementsLosesItsTurnAndDoesNoHarm(t *testing.T) {
	t.Parallel()
	db := frozenDB(t)
	w := startHeld(t, db, frozenBound)
	require.Eventually(t, func() bool { return position(t, db, "push") >= 0 }, 20*time.Second, 5*time.Millisecond) // from here on in rounds
	var head int64
	for range 2 {
		for started := time.Now(); ; w.Thaw(t) {
			require.Less(t, time.Since(started), 20*time.Second, "it was never between two statements")
			at := position(t, db, "push")
			if head = pgtest.Value[int64](t, db, "select last_seq from event_seq"); at == head {
				logtest.Append(t, db, "orders", 500)
			}
			w.Freeze(t)
			if backendIs(t, db, idleInRound) {
				break
			}
		}
		head = pgtest.Value[int64](t, db, "select last_seq from event_seq")
		takesOver(t, db, head)
		eachOnce(t, db, head)
		w.Thaw(t)
	}
	worksAgain(t, db, head)
}

// The server cannot send, so that no bound on statements or idleness ends the round; the one on TCP does.
func TestProcessFrozenWhileItReadsALargeBatchLosesItsTurnAndDoesNoHarm(t *testing.T) {
	t.Parallel()
	db := frozenDB(t)
	db.Exec(t, `insert into event_outbox (topic, payload) select 'orders', convert_to(repeat('x', 4 << 20), 'UTF8') from generate_series(1, 16)`)
	w := startHeld(t, db, frozenBound, envReading+"=1")
	require.Equal(t, "reading", receive(t, w.Lines, "the read"))
	w.Freeze(t)
	inState(t, db, "wait_event = 'ClientWrite'")
	takesOver(t, db, 16)
	eachOnce(t, db, 16)
	w.Thaw(t)
	w.Tell(t, "go on")
	worksAgain(t, db, 16)
}
