package watch_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

// It is docs/drill.md, step by step.
func TestDrill(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t)
	c := &clock{}
	w := newWatch(t, pool, watch.Config{Keys: []cursor.Key{push, other}, Now: c.now})

	// 1. Everything is green.
	running := startWorker(t, db, subscriber.AllTopics, envPark+"=1")
	logtest.Append(t, db, "orders", 20)
	handled(t, db, push, other)
	require.Equal(t, 0, w.Look(t.Context()).ExitCode())

	// 2. Stop the consumer. Nothing happens while there is no work; then work waits, and after the grace period it is red.
	running.Stop(t)
	logtest.Append(t, db, "orders", 20)
	require.Equal(t, 0, w.Look(t.Context()).ExitCode())
	c.set(6 * time.Minute)
	r := w.Look(t.Context())
	require.Equal(t, 2, r.ExitCode())
	require.Equal(t, []watch.Kind{watch.Standing}, kinds(r, push))
	require.Contains(t, r.Problems[0].Next, "eventlog status push")
	c.set(14 * time.Hour)
	require.Equal(t, 2, w.Look(t.Context()).ExitCode(), "it stays red")

	// 3. A poison event comes; start the consumer again: it catches up, and parks the event after two attempts.
	poison := appendPayload(t, db, "fail")
	logtest.Append(t, db, "orders", 5)
	startWorker(t, db, subscriber.AllTopics, envPark+"=1")
	handled(t, db, push, other)
	r = turns(t, w, push, watch.Parked)
	require.Equal(t, 1, r.ExitCode())
	require.Equal(t, poison, r.Problems[0].Seq)

	// 4. Find it.
	parked, err := operate.Parked(t.Context(), pool, nil, push, 0, 10)
	require.NoError(t, err)
	require.Len(t, parked, 1)
	require.Equal(t, poison, parked[0].Event.Seq)
	require.Equal(t, "fail", string(parked[0].Event.Payload))
	require.Equal(t, "_OTHER", parked[0].ErrorType)

	// 5. Replay it without having mended anything: it stays parked, with one attempt more.
	replay(t, db, push, poison)
	require.Eventually(t, func() bool {
		again, err := operate.Parked(t.Context(), pool, nil, push, 0, 10)
		require.NoError(t, err)
		return len(again) == 1 && !again[0].Replaying && again[0].Attempts > parked[0].Attempts
	}, time.Minute, 20*time.Millisecond)
	turns(t, w, push, watch.Parked)

	// 6. Mend the cause, replay, and see it go green.
	db.Exec(t, "update event_consumer_parked set payload = 'mended'") // in real life it is the handler that is mended
	replay(t, db, push, poison)
	turns(t, w, push)
	require.Equal(t, 0, w.Look(t.Context()).ExitCode())
	require.Equal(t, []string{"replay", "replay"}, pgtest.Column[string](t, db,
		"select action from event_consumer_interventions where action <> 'create' and consumer = 'push'"), "who did it is on record")

	// 7. Pause it, and see that the pause is not forgotten.
	db.Exec(t, "update event_consumer_cursors set paused_at = clock_timestamp() where consumer = 'push'")
	logtest.Append(t, db, "orders", 1)
	require.Equal(t, []watch.Kind{watch.Paused}, kinds(w.Look(t.Context()), push)) // the clock is 14 hours on
	db.Exec(t, "update event_consumer_cursors set paused_at = null where consumer = 'push'")
	turns(t, w, push)
}
