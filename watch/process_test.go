package watch_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

// appendPayload appends one event and returns its number.
func appendPayload(t *testing.T, db *pgtest.DB, payload string) int64 {
	t.Helper()
	db.Exec(t, "insert into event_outbox (topic, payload) values ('orders', convert_to($1, 'UTF8'))", payload)
	return pgtest.Value[int64](t, db, "select last_seq from event_seq")
}

// handled waits until the consumers have passed all that there is.
func handled(t *testing.T, db *pgtest.DB, keys ...cursor.Key) {
	t.Helper()
	head := pgtest.Value[int64](t, db, "select last_seq from event_seq")
	for _, key := range keys {
		require.Eventually(t, func() bool { return logtest.Position(t, db, key) == head }, time.Minute, 20*time.Millisecond, "%s", key)
	}
}

// turns waits until the report shows the consumer with these problems only.
func turns(t *testing.T, w *watch.Watch, key cursor.Key, wanted ...watch.Kind) watch.Report {
	t.Helper()
	var r watch.Report
	require.Eventually(t, func() bool {
		r = w.Look(t.Context())
		found := kinds(r, key)
		if r.Log == nil || len(found) != len(wanted) {
			return false
		}
		for i := range wanted {
			if found[i] != wanted[i] {
				return false
			}
		}
		return true
	}, time.Minute, 50*time.Millisecond)
	return r
}

// Its process is the test's, which is another one than the worker's.
func TestStoppedWorkerIsSeenFromOutsideUntilTheWorkIsDone(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push, other)
	require.Equal(t, []watch.Kind{watch.CursorMissing, watch.CursorMissing}, kinds(w.Look(t.Context()), cursor.Key{}), "it was never started")
	running := startWorker(t, db, subscriber.AllTopics)
	logtest.Append(t, db, "orders", 100)
	handled(t, db, push, other)
	healthy(t, w.Look(t.Context()))
	running.Stop(t)
	c.set(14 * time.Hour)
	healthy(t, w.Look(t.Context())) // it is gone, and there is nothing to do

	logtest.Append(t, db, "orders", 50)
	for _, stalled := range []time.Duration{10 * time.Minute, time.Hour, 14 * time.Hour, 48 * time.Hour} {
		c.set(stalled)
		r := w.Look(t.Context())
		require.Equal(t, []watch.Kind{watch.Standing, watch.Standing}, kinds(r, cursor.Key{}))
		require.Equal(t, int64(50), *r.Consumers[0].Lag)
	}

	// A restart alone does not make it green: the first consumer goes on, the other's event blocks.
	blocking := appendPayload(t, db, "block")
	running = startWorker(t, db, subscriber.AllTopics)
	running.Says(t, "blocked")
	handled(t, db, other)
	c.set(14 * time.Hour)
	r := w.Look(t.Context())
	require.Equal(t, []watch.Kind{watch.Standing}, kinds(r, push))
	require.Empty(t, kinds(r, other), "only the one that stands")
	running.Kill()
	require.Equal(t, []watch.Kind{watch.Standing}, kinds(w.Look(t.Context()), push))
	db.Exec(t, "update event_log set payload = 'mended' where seq = $1", blocking)
	startWorker(t, db, subscriber.AllTopics)
	handled(t, db, push)
	healthy(t, w.Look(t.Context()))
}

func TestFrozenWorkerIsSeenFromOutside(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push, other)
	running := startWorker(t, db, subscriber.AllTopics)
	logtest.Append(t, db, "orders", 10)
	handled(t, db, push, other)
	running.Freeze(t)
	logtest.Append(t, db, "orders", 10)
	healthy(t, w.Look(t.Context()))
	c.set(6 * time.Minute)
	r := w.Look(t.Context())
	require.Equal(t, []watch.Kind{watch.Standing, watch.Standing}, kinds(r, cursor.Key{}))
	require.Equal(t, watch.Critical, r.Status)
	running.Thaw(t)
	handled(t, db, push, other)
	healthy(t, w.Look(t.Context()))
}

func TestFailingConsumerIsSeenFromOutsideWithItsEvent(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push, other)
	startWorker(t, db, subscriber.AllTopics)
	logtest.Append(t, db, "orders", 10)
	poison := appendPayload(t, db, "fail")
	logtest.Append(t, db, "orders", 10)
	handled(t, db, other)
	turns(t, w, push, watch.Failing)
	c.set(time.Hour)
	r := turns(t, w, push, watch.Standing, watch.Failing)
	require.Equal(t, poison, r.Problems[1].Seq)
	require.Equal(t, "_OTHER", r.Problems[1].ErrorType)
	require.Equal(t, poison-1, *r.Consumers[0].Position)
	require.GreaterOrEqual(t, r.Consumers[0].Failure.Attempts, 1)
	require.Empty(t, kinds(r, other))
	db.Exec(t, "update event_log set payload = 'mended' where seq = $1", poison)
	handled(t, db, push)
	turns(t, w, push)
}

func TestSubscriptionThatMatchesNothingIsSeenFromOutside(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	misspelt := cursor.Key{Consumer: "push", Topic: "oders"}
	w, _ := at(t, db, misspelt, other)
	startWorker(t, db, "oders")
	logtest.Append(t, db, "orders", 5)
	handled(t, db, misspelt, other)
	healthy(t, w.Look(t.Context()))
	// The log has moved for two days, as far as its events know.
	db.Exec(t, "update event_log set recorded_at = recorded_at - interval '2 days'")
	logtest.Append(t, db, "orders", 5)
	handled(t, db, misspelt, other)
	p := only(t, w.Look(t.Context()), watch.MatchesNothing, watch.Warning)
	require.Equal(t, misspelt, p.Key)
	require.Contains(t, p.Summary, `"oders"`)
	logtest.Append(t, db, "oders", 1)
	handled(t, db, misspelt, other)
	turns(t, w, misspelt)
}

func TestBacklogThatARealWorkerDrainsIsBehindAndNotStanding(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push, other)
	startWorker(t, db, subscriber.AllTopics).Stop(t)
	db.Exec(t, `insert into event_outbox (topic, occurred_at, payload)
		select 'orders', clock_timestamp() - interval '2 days', case i when 1500 then 'block'::bytea else '' end from generate_series(1, 3000) i`)
	c.set(time.Hour)
	require.Equal(t, []watch.Kind{watch.Standing, watch.Standing}, kinds(w.Look(t.Context()), cursor.Key{}))
	c.set(0)
	running := startWorker(t, db, subscriber.AllTopics)
	running.Says(t, "blocked")
	// It moved a moment ago; half of the backlog, two days old, is left.
	require.Eventually(t, func() bool { return logtest.Position(t, db, push) >= 1490 }, time.Minute, 20*time.Millisecond)
	r := w.Look(t.Context())
	require.Equal(t, []watch.Kind{watch.Behind}, kinds(r, push), "%s", r)
	require.Equal(t, watch.Warning, r.Consumers[0].Status)
	require.Greater(t, r.Consumers[0].PendingAge, (47 * time.Hour).Seconds())
	c.set(time.Hour)
	require.Contains(t, kinds(w.Look(t.Context()), push), watch.Standing, "it does not move any more")
}

func TestLogWithoutConsumersIsAWarning(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, _ := at(t, db)
	only(t, w.Look(t.Context()), watch.NothingWatched, watch.Warning) // it may be the wrong one
}
