package watch_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

// clock is the database's, set forward.
type clock struct{ forward atomic.Int64 }

func (c *clock) now() time.Time            { return time.Now().Add(time.Duration(c.forward.Load())) }
func (c *clock) set(forward time.Duration) { c.forward.Store(int64(forward)) }

func newWatch(t *testing.T, db cursor.Querier, config watch.Config) *watch.Watch {
	t.Helper()
	setTimeout := config.Timeout == 0
	if setTimeout {
		config.Timeout = 30 * time.Second
	}
	w, err := watch.New(db, config)
	require.NoError(t, err)
	return w
}

// at has a watch on the keys whose clock can be set.
func at(t *testing.T, db *pgtest.DB, keys ...cursor.Key) (*watch.Watch, *clock) {
	t.Helper()
	c := &clock{}
	return newWatch(t, db.Pool(t), watch.Config{Keys: keys, Now: c.now}), c
}

func ensure(t *testing.T, db *pgtest.DB, keys ...cursor.Key) {
	t.Helper()
	var registrations []cursor.Registration
	for _, k := range keys {
		registrations = append(registrations, cursor.Registration{Key: k})
	}
	_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", registrations)
	require.NoError(t, err)
}

// move puts the cursor somewhere as a round does.
func move(t *testing.T, db *pgtest.DB, key cursor.Key, seq int64) {
	t.Helper()
	db.Exec(t, `update event_consumer_cursors c set last_seq = $4, moved_at = clock_timestamp(), moved_by = 'test',
		occurred_seq = $4, last_occurred_at = (select occurred_at from event_log where seq = $4)
		where consumer = $1 and topic = $2 and shard = $3`, key.Consumer, key.Topic, key.Shard, seq)
}

var me = operate.Order{By: "me", Reason: "test"}

// seek moves the cursor as an operator does.
func seek(t *testing.T, db *pgtest.DB, key cursor.Key, seq int64) {
	t.Helper()
	_, err := operate.Seek(t.Context(), db.Conn(t), nil, key, cursor.FromSeq(seq+1), me)
	require.NoError(t, err)
}

func discard(t *testing.T, db *pgtest.DB, key cursor.Key, seq int64) {
	t.Helper()
	_, err := operate.Discard(t.Context(), db.Conn(t), nil, key, seq, me)
	require.NoError(t, err)
}

func replay(t *testing.T, db *pgtest.DB, key cursor.Key, seq int64) {
	t.Helper()
	_, err := operate.Replay(t.Context(), db.Conn(t), nil, key, seq, me)
	require.NoError(t, err)
}

func fail(t *testing.T, db *pgtest.DB, key cursor.Key, seq int64, errorType string) {
	t.Helper()
	_, _, err := cursor.RecordFailure(t.Context(), db.Conn(t), nil, key, "test",
		cursor.Attempt{Seq: seq, Through: max(seq, logtest.Position(t, db, key)+1), ErrorType: errorType, Jitter: 1})
	require.NoError(t, err)
}

// kinds are the kinds of a consumer's problems, or, for the zero key, of all.
func kinds(r watch.Report, key cursor.Key) []watch.Kind {
	found := []watch.Kind{}
	for _, p := range r.Problems {
		if key == (cursor.Key{}) || p.Key == key {
			found = append(found, p.Kind)
		}
	}
	return found
}

func only(t *testing.T, r watch.Report, kind watch.Kind, severity watch.Status) watch.Problem {
	t.Helper()
	require.Equal(t, []watch.Kind{kind}, kinds(r, cursor.Key{}), "%s", r)
	require.Equal(t, severity, r.Problems[0].Severity)
	require.Equal(t, severity, r.Status)
	require.NotEmpty(t, r.Problems[0].Summary)
	require.NotEmpty(t, r.Problems[0].Next)
	return r.Problems[0]
}

func healthy(t *testing.T, r watch.Report) {
	t.Helper()
	require.Empty(t, r.Problems, "%s", r)
	require.Equal(t, watch.OK, r.Status)
	require.Zero(t, r.ExitCode())
}

func TestConsumerThatIsCaughtUpIsFineHoweverQuietTheLogIs(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 7)
	move(t, db, push, 7)
	for _, quiet := range []time.Duration{0, 2 * time.Hour, 30 * 24 * time.Hour} {
		c.set(quiet)
		r := w.Look(t.Context())
		healthy(t, r)
		require.Len(t, r.Consumers, 1)
		require.Equal(t, int64(7), *r.Consumers[0].Position)
		require.Zero(t, *r.Consumers[0].Lag)
		require.Zero(t, r.Consumers[0].PendingAge)
		require.Zero(t, r.Consumers[0].PendingSince)
	}
}

func TestReportShowsWhereConsumersAndLogStand(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	orders := cursor.Key{Consumer: "billing", Topic: "orders"}
	ensure(t, db, orders, push)
	logtest.Append(t, db, "orders", 10)
	move(t, db, orders, 3)
	db.Exec(t, "delete from event_log where seq < 3")
	w, c := at(t, db, orders)
	c.set(time.Minute)
	r := w.Look(t.Context())
	healthy(t, r)
	require.Equal(t, int64(10), r.Log.Head)
	require.Equal(t, int64(3), r.Log.LowestSeq)
	require.Equal(t, int64(8), r.Log.Events)
	require.Equal(t, (30 * 24 * time.Hour).Seconds(), r.Log.RetentionSeconds)
	require.Equal(t, []string{"push"}, r.Coverage.NotWatched)
	require.NotEmpty(t, r.Coverage.Limits)
	require.True(t, pgtest.Value[time.Time](t, db, "select recorded_at from event_log where seq = 3").Equal(r.Coverage.Since))
	billing := r.Consumers[0]
	require.Equal(t, "billing@orders", billing.Name)
	require.Equal(t, orders, billing.Key())
	require.Equal(t, int64(7), *billing.Lag)
	require.Equal(t, int64(4), billing.PendingSeq)
	require.InDelta(t, 60, billing.PendingAge, 55)
	require.Equal(t, "test", billing.MovedBy)
	require.Contains(t, r.String(), "billing@orders")

	body, err := json.Marshal(r)
	require.NoError(t, err)
	var back watch.Report
	require.NoError(t, json.Unmarshal(body, &back))
	again, err := json.Marshal(back)
	require.NoError(t, err)
	require.JSONEq(t, string(body), string(again))
}

func TestStallStaysRedForAsLongAsItLasts(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 2)
	move(t, db, push, 1)
	c.set(4 * time.Minute)
	healthy(t, w.Look(t.Context()))
	for stalled := 6 * time.Minute; stalled <= 14*time.Hour; stalled += 7 * time.Minute {
		c.set(stalled)
		p := only(t, w.Look(t.Context()), watch.Standing, watch.Critical)
		require.Equal(t, int64(2), p.Seq)
		require.Equal(t, push, p.Key)
	}
	for _, stalled := range []time.Duration{25 * time.Hour, 40 * 24 * time.Hour} { // beyond any look-back, and the retention
		c.set(stalled)
		only(t, w.Look(t.Context()), watch.Standing, watch.Critical)
	}
	move(t, db, push, 2)
	healthy(t, w.Look(t.Context()))
}

func TestBacklogThatMovesIsToldFromOneThatStands(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, _ := at(t, db, push, other)
	ensure(t, db, push, other)
	db.Exec(t, `insert into event_outbox (topic, occurred_at) select 'orders', clock_timestamp() - interval '3 hours' from generate_series(1, 1000)`)
	db.Exec(t, `update event_log set recorded_at = occurred_at`)
	move(t, db, push, 400)
	move(t, db, other, 400)
	db.Exec(t, `update event_consumer_cursors set moved_at = clock_timestamp() - interval '2 hours',
		created_at = clock_timestamp() - interval '2 hours' where consumer = 'other'`)
	r := w.Look(t.Context())
	require.Equal(t, []watch.Kind{watch.Behind}, kinds(r, push))
	require.Equal(t, []watch.Kind{watch.Standing}, kinds(r, other))
	require.Equal(t, watch.Warning, r.Consumers[0].Status)
	require.Equal(t, watch.Critical, r.Consumers[1].Status)
	require.Equal(t, watch.Critical, r.Status, "it is the worst and no average")
	require.Equal(t, watch.Standing, r.Problems[0].Kind, "the worst comes first")
	require.Equal(t, 2, r.ExitCode())
}

func TestEventsAppendedWithAnOldTimeAreNoStallBeforeAnybodyCouldHandleThem(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 1)
	move(t, db, push, 1)
	db.Exec(t, `update event_consumer_cursors set moved_at = clock_timestamp() - interval '2 hours', created_at = clock_timestamp() - interval '2 hours'`)
	db.Exec(t, `insert into event_outbox (topic, occurred_at) values ('orders', clock_timestamp() - interval '3 years')`)
	only(t, w.Look(t.Context()), watch.Behind, watch.Warning)
	c.set(6 * time.Minute)
	only(t, w.Look(t.Context()), watch.Standing, watch.Critical)
}

func TestEventFromASourceWhoseClockIsAheadDoesNotHideAStall(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	db.Exec(t, `insert into event_outbox (topic, occurred_at) values ('orders', clock_timestamp() + interval '3 years')`)
	r := w.Look(t.Context())
	healthy(t, r)
	require.GreaterOrEqual(t, r.Consumers[0].PendingAge, 0.0)
	c.set(6 * time.Minute)
	only(t, w.Look(t.Context()), watch.Standing, watch.Critical)
}

func TestExpectedCursorWithoutARowIsAProblem(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, _ := at(t, db, push)
	p := only(t, w.Look(t.Context()), watch.CursorMissing, watch.Critical)
	require.Contains(t, p.Summary, "never started")
	ensure(t, db, push)
	healthy(t, w.Look(t.Context()))
	db.Exec(t, "delete from event_consumer_cursors")
	r := w.Look(t.Context())
	p = only(t, r, watch.CursorMissing, watch.Critical)
	require.Contains(t, p.Summary, "its row is gone")
	require.Nil(t, r.Consumers[0].Lag, "not 0")
	require.Nil(t, r.Consumers[0].Position)
}

func TestWithoutExpectedCursorsEveryRowIsLookedAtAndTheReportSaysSo(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db)
	r := w.Look(t.Context())
	only(t, r, watch.NothingWatched, watch.Warning)
	require.Empty(t, r.Consumers)
	require.Contains(t, strings.Join(r.Coverage.Limits, "\n"), "No cursors are expected by name")
	ensure(t, db, push, other)
	logtest.Append(t, db, "orders", 1)
	move(t, db, push, 1)
	c.set(time.Hour)
	r = w.Look(t.Context())
	require.Equal(t, other, only(t, r, watch.Standing, watch.Critical).Key)
	require.Len(t, r.Consumers, 2)
	require.Empty(t, r.Coverage.NotWatched)
}

func TestCursorAheadOfTheLogIsAProblemAndHasNoLag(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 500)
	move(t, db, push, 500)
	// A failover that lost the tail.
	db.Exec(t, "delete from event_log where seq > 300; update event_seq set last_seq = 300")
	r := w.Look(t.Context())
	require.Equal(t, int64(500), only(t, r, watch.CursorAhead, watch.Critical).Seq)
	require.Nil(t, r.Consumers[0].Lag)

	// The head catches up while nobody runs: the numbers look well, the log is another one.
	logtest.Append(t, db, "orders", 205)
	r = w.Look(t.Context())
	only(t, r, watch.CursorAhead, watch.Critical)
	require.Nil(t, r.Consumers[0].Lag)
	c.set(24 * time.Hour)
	require.Contains(t, kinds(w.Look(t.Context()), push), watch.CursorAhead)

	seek(t, db, push, 505)
	healthy(t, w.Look(t.Context()))
}

func TestFailureSaysCursorAheadUntilAnOperatorMovesIt(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, _ := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 2)
	move(t, db, push, 1)
	fail(t, db, push, 0, "cursor_ahead")
	p := only(t, w.Look(t.Context()), watch.CursorAhead, watch.Critical)
	require.NotZero(t, p.Since)
	seek(t, db, push, 2)
	healthy(t, w.Look(t.Context()))
}

func TestHoleBehindTheCursorIsAProblemBeforeAnybodyRunsIntoIt(t *testing.T) {
	t.Parallel()
	for name, remove := range map[string]string{"next": "seq = 4", "later": "seq = 60", "tail": "seq >= 9"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			w, _ := at(t, db, push)
			ensure(t, db, push)
			logtest.Append(t, db, "orders", 100)
			move(t, db, push, 3)
			if name == "tail" {
				move(t, db, push, 8)
			}
			healthy(t, w.Look(t.Context()))
			db.Exec(t, "delete from event_log where "+remove)
			missing := pgtest.Value[int64](t, db, "select min(i) from generate_series(1, 100) i where not exists (select from event_log where seq = i)")
			require.Equal(t, missing, only(t, w.Look(t.Context()), watch.Gap, watch.Critical).Seq)
			fail(t, db, push, missing, "consumer_gap")
			p := only(t, w.Look(t.Context()), watch.Gap, watch.Critical)
			require.Equal(t, missing, p.Seq)
			require.NotZero(t, p.Since)
		})
	}
}

func TestEventsThatAreGoneBeforeTheyWerePassedAreALoss(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 20)
	move(t, db, push, 3)
	db.Exec(t, "delete from event_log where seq <= 10")
	p := only(t, w.Look(t.Context()), watch.Losses, watch.Critical)
	require.Equal(t, int64(4), p.Seq)
	require.Contains(t, p.Summary, "4 to 10")

	db.Exec(t, "delete from event_log")
	c.set(time.Hour)
	r := w.Look(t.Context())
	require.ElementsMatch(t, []watch.Kind{watch.Losses, watch.Standing}, kinds(r, push))
	require.Equal(t, int64(17), *r.Consumers[0].Lag, "although no row can be read")
	require.InDelta(t, time.Hour.Seconds(), r.Consumers[0].PendingAge, 300, "it runs from the last event that was passed")
	require.Zero(t, r.Coverage.Since)
}

func TestLossIsAProblemUntilItIsSettled(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	db.Exec(t, `insert into event_consumer_losses (consumer, topic, shard, first_seq, last_seq, reason, recorded_by)
		values ('push', '', '', 1, 5, 'retention', 'x'), ('push', '', '', 7, 7, 'retention', 'x'), ('other', '', '', 1, 1, 'retention', 'x')`)
	c.set(365 * 24 * time.Hour)
	r := w.Look(t.Context())
	p := only(t, r, watch.Losses, watch.Critical)
	require.Equal(t, int64(1), p.Seq)
	require.Equal(t, int64(6), r.Consumers[0].LossesOpen)
	db.Exec(t, `update event_consumer_losses set settled_at = now(), settled_by = 'me'`)
	healthy(t, w.Look(t.Context()))
}

func TestParkedEventsAreAWarningUntilTheyAreDealtWith(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 9)
	move(t, db, push, 9)
	db.Exec(t, `insert into event_consumer_parked (consumer, topic, shard, seq, occurred_at, recorded_at, event_topic, uuid, payload, metadata, error_type, attempts, parked_by)
		select 'push', '', '', seq, occurred_at, recorded_at, topic, uuid, payload, metadata, '23505', 3, 'x' from event_log where seq in (4, 8)`)
	c.set(100 * 24 * time.Hour)
	r := w.Look(t.Context())
	p := only(t, r, watch.Parked, watch.Warning)
	require.Equal(t, int64(4), p.Seq)
	require.Equal(t, "23505", p.ErrorType)
	require.Equal(t, int64(2), r.Consumers[0].Parked)
	require.Contains(t, p.Next, `eventlog parked replay push 4 --reason`)
	require.Equal(t, 1, r.ExitCode())
	for _, seq := range []int64{4, 8} {
		discard(t, db, push, seq)
	}
	healthy(t, w.Look(t.Context()))
}

func TestFailureIsCriticalBeyondTheGracePeriodAndOverWhenItIsPassed(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 3)
	move(t, db, push, 1)
	fail(t, db, push, 2, "23505")
	fail(t, db, push, 2, "23505")
	r := w.Look(t.Context())
	p := only(t, r, watch.Failing, watch.Warning)
	require.Equal(t, int64(2), p.Seq)
	require.Equal(t, "23505", p.ErrorType)
	require.Equal(t, 2, r.Consumers[0].Failure.Attempts)
	c.set(time.Hour)
	r = w.Look(t.Context())
	require.ElementsMatch(t, []watch.Kind{watch.Standing, watch.Failing}, kinds(r, push))
	for _, p := range r.Problems {
		require.Equal(t, watch.Critical, p.Severity)
	}
	db.Exec(t, "update event_consumer_cursors set paused_at = clock_timestamp()")
	r = w.Look(t.Context())
	require.ElementsMatch(t, []watch.Kind{watch.Paused, watch.Failing}, kinds(r, push))
	require.Equal(t, watch.Warning, r.Status, "somebody knows about it")
	db.Exec(t, "update event_consumer_cursors set paused_at = null")
	move(t, db, push, 3)
	healthy(t, w.Look(t.Context()))
}

func TestPausedConsumerIsAWarningWhenWorkWaitsAndARetiredOneIsNot(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 1)
	move(t, db, push, 1)
	db.Exec(t, "update event_consumer_cursors set paused_at = clock_timestamp()")
	c.set(24 * time.Hour)
	healthy(t, w.Look(t.Context())) // nothing waits
	logtest.Append(t, db, "orders", 1)
	c.set(time.Minute)
	healthy(t, w.Look(t.Context()))
	c.set(6 * time.Minute)
	only(t, w.Look(t.Context()), watch.Paused, watch.Warning)
	db.Exec(t, "update event_consumer_cursors set paused_at = clock_timestamp() - interval '10 minutes'")
	c.set(0)
	only(t, w.Look(t.Context()), watch.Paused, watch.Warning) // however young the work is
	db.Exec(t, "update event_consumer_cursors set paused_at = clock_timestamp() + interval '6 minutes'")
	c.set(6 * time.Minute)
	only(t, w.Look(t.Context()), watch.Paused, watch.Warning) // a pause does not hide a stall that was there before
	db.Exec(t, "update event_consumer_cursors set paused_at = null, retired_at = clock_timestamp()")
	c.set(24 * time.Hour)
	only(t, w.Look(t.Context()), watch.Retired, watch.Warning) // and nothing of what waits for it
	everybody, _ := at(t, db)
	healthy(t, everybody.Look(t.Context())) // nobody has said that it is expected
}

func TestCursorThatWasMadeAndIsGoneIsMissedByNoNameToo(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, _ := at(t, db)
	ensure(t, db, push, other)
	healthy(t, w.Look(t.Context()))
	db.Exec(t, "delete from event_consumer_cursors where consumer = $1", push.Consumer)
	require.Equal(t, push, only(t, w.Look(t.Context()), watch.CursorMissing, watch.Critical).Key)
}

func TestLogWithoutAPartitionForItsNextEventIsAProblem(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, _ := at(t, db, push)
	ensure(t, db, push)
	db.Exec(t, "alter table event_log detach partition event_log_first")
	db.Exec(t, "alter table event_log attach partition event_log_first for values from (minvalue) to (4)")
	for n := range int64(3) {
		healthy(t, w.Look(t.Context()))
		logtest.Append(t, db, "orders", 1)
		move(t, db, push, n+1)
	}
	require.Equal(t, int64(4), only(t, w.Look(t.Context()), watch.Maintenance, watch.Critical).Seq)
}

func TestConsumerThatMatchesNothingWhileTheLogMovesIsAWarning(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	misspelt := cursor.Key{Consumer: "push", Topic: "oders"}
	w, _ := at(t, db, misspelt)
	ensure(t, db, misspelt)
	db.Exec(t, "insert into event_outbox (topic) select 'orders' from generate_series(1, 30)")
	db.Exec(t, "update event_log set recorded_at = clock_timestamp() - interval '1 hour' * (31 - seq)")
	move(t, db, misspelt, 5)
	db.Exec(t, "update event_consumer_cursors set moved_at = clock_timestamp() - interval '26 hours'")
	r := w.Look(t.Context())
	require.NotContains(t, kinds(r, misspelt), watch.MatchesNothing, "five hours are not enough")
	move(t, db, misspelt, 30)
	p := only(t, w.Look(t.Context()), watch.MatchesNothing, watch.Warning)
	require.Contains(t, p.Summary, `"oders"`)

	t.Run("unless it is off", func(t *testing.T) {
		healthy(t, newWatch(t, db.Pool(t), watch.Config{Keys: []cursor.Key{misspelt}, MatchNothing: -1}).Look(t.Context()))
	})
	t.Run("also when the log has forgotten its first chance", func(t *testing.T) {
		db.Exec(t, "update event_consumer_cursors set created_at = clock_timestamp() - interval '50 hours'")
		db.Exec(t, "update event_consumer_interventions set at = clock_timestamp() - interval '50 hours'")
		db.Exec(t, "delete from event_log where seq < 20")
		only(t, w.Look(t.Context()), watch.MatchesNothing, watch.Warning)
	})
	t.Run("until it matches", func(t *testing.T) {
		db.Exec(t, "update event_consumer_cursors set matched_seq = 29, matched_at = clock_timestamp()")
		healthy(t, w.Look(t.Context()))
	})
}

func TestConsumerThatWasPutElsewhereByHandHadNoChanceToMatchBefore(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	key := cursor.Key{Consumer: "push", Topic: "rare"}
	w, _ := at(t, db, key)
	ensure(t, db, key)
	db.Exec(t, "insert into event_outbox (topic) select 'orders' from generate_series(1, 30)")
	db.Exec(t, "update event_log set recorded_at = clock_timestamp() - interval '1 hour' * (31 - seq)")
	seek(t, db, key, 29)
	move(t, db, key, 30)
	healthy(t, w.Look(t.Context()))
}

func TestConsumerWithItsLastEventLongAgoInASilentLogIsFine(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	rare := cursor.Key{Consumer: "push", Topic: "rare"}
	w, _ := at(t, db, rare)
	ensure(t, db, rare)
	db.Exec(t, "insert into event_outbox (topic) values ('rare'), ('orders')")
	db.Exec(t, "update event_log set recorded_at = clock_timestamp() - interval '3 days' where seq = 1")
	move(t, db, rare, 2)
	db.Exec(t, "update event_consumer_cursors set matched_seq = 1, matched_at = clock_timestamp() - interval '3 days'")
	healthy(t, w.Look(t.Context()))
}

func TestPendingAlertMustLieBelowTheRetention(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, push)
	db.Exec(t, "update event_retention set switched_on = true, maintained_at = clock_timestamp()")
	w := newWatch(t, db.Pool(t), watch.Config{PendingAlertAfter: time.Hour})
	require.NoError(t, w.Check(t.Context()))
	for keep, below := range map[string]bool{"59 minutes": false, "1 hour": false, "1 hour 1 second": true, "1 month": true} {
		db.Exec(t, "update event_retention set keep = $1::text::interval", keep)
		err := w.Check(t.Context())
		r := w.Look(t.Context())
		if below {
			require.NoError(t, err, keep)
			healthy(t, r)
			continue
		}
		require.ErrorIs(t, err, watch.ErrRetentionShort, keep)
		require.Contains(t, err.Error(), "PendingAlertAfter")
		require.Contains(t, err.Error(), "event_retention.keep")
		require.NotRegexp(t, "[0-9]", err.Error(), "it names no value")
		only(t, r, watch.RetentionShort, watch.Warning)
	}
	db.Exec(t, "delete from event_retention")
	require.ErrorContains(t, w.Check(t.Context()), "event_retention")
	only(t, w.Look(t.Context()), watch.RetentionShort, watch.Warning)
}

func TestConfigurationFaultsAreReportedTogether(t *testing.T) {
	t.Parallel()
	_, err := watch.New(nil, watch.Config{})
	require.ErrorContains(t, err, "missing database")
	pool := &pgxpool.Pool{}
	_, err = watch.New(pool, watch.Config{
		Grace: -1, Timeout: -1, PendingAlertAfter: 999 * time.Millisecond, Keys: []cursor.Key{{}, push, push},
	})
	for _, fault := range []string{"negative Grace", "negative Timeout", "PendingAlertAfter (999ms)", "missing consumer name", `"push") twice`} {
		require.ErrorContains(t, err, fault)
	}
	_, err = watch.New(pool, watch.Config{PendingAlertAfter: time.Second})
	require.NoError(t, err)
}

func TestLookIsOneStatementHoweverManyConsumersThereAre(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	counted := map[int]int64{}
	for _, n := range []int{1, 200} {
		var keys []cursor.Key
		for i := range n {
			keys = append(keys, cursor.Key{Consumer: fmt.Sprintf("consumer %d", i)})
		}
		ensure(t, db, keys...)
		tracer := &counter{}
		pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer })
		w := newWatch(t, pool, watch.Config{Keys: keys})
		healthy(t, w.Look(t.Context()))
		require.Len(t, w.Look(t.Context()).Consumers, n)
		counted[n] = tracer.n.Load()
	}
	require.Equal(t, map[int]int64{1: 2, 200: 2}, counted, "two looks each")
}

type counter struct{ n atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}
func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestLookLeavesNothingAndWaitsForNoRound(t *testing.T) {
	t.Parallel()
	db := logtest.NewOn(t, pgtest.Server(t)) // nobody else writes WAL
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 100)
	w, _ := at(t, db, push)
	// A round that holds the cursor, and an append that holds the counter.
	for _, lock := range []string{"select from event_consumer_cursors for update", "update event_seq set last_seq = last_seq"} {
		tx, err := db.Conn(t).Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), lock)
		require.NoError(t, err)
	}
	healthy(t, w.Look(t.Context())) // the first one plans, and fills caches
	db.Exec(t, "vacuum")
	db.Exec(t, "checkpoint")
	healthy(t, w.Look(t.Context()))
	// The server writes a little of its own now and then.
	require.Eventually(t, func() bool {
		const sql = "select pg_snapshot_xmax(pg_current_snapshot())::text || ' ' || pg_current_wal_insert_lsn()"
		before := pgtest.Value[string](t, db, sql)
		for range 20 {
			healthy(t, w.Look(t.Context()))
		}
		return before == pgtest.Value[string](t, db, sql)
	}, time.Minute, time.Millisecond)
}

func TestLookWorksInEveryExecModeAndOnALogOfAnotherName(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `create schema "My Schema"`)
	log, err := cursor.NewLog(cursor.LogConfig{Schema: "My Schema", Name: "Audit"})
	require.NoError(t, err)
	_, err = migrations.Up(t.Context(), db.Conn(t), log)
	require.NoError(t, err)
	odd := cursor.Key{Consumer: `it's "a" @#`, Topic: "Ünlaut, {}"}
	_, err = cursor.Ensure(t.Context(), db.Conn(t), log, "test", []cursor.Registration{{Key: odd}})
	require.NoError(t, err)
	db.Exec(t, `insert into "My Schema"."Audit_outbox" (topic) values ('x')`)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
		for _, keys := range [][]cursor.Key{{odd}, {push}, nil} {
			r := newWatch(t, pool, watch.Config{Log: log, Keys: keys}).Look(t.Context())
			if slices.Equal(keys, []cursor.Key{push}) {
				only(t, r, watch.CursorMissing, watch.Critical)
				require.Equal(t, []string{odd.String()}, r.Coverage.NotWatched)
				continue
			}
			require.Empty(t, r.Problems, "mode %v: %s %v", mode, r, r.Err)
			require.Equal(t, int64(1), *r.Consumers[0].Lag)
			require.Equal(t, odd, r.Consumers[0].Key())
		}
	}
}

// The compiler would take a second for a statement that takes milliseconds.
func TestLookIsPlannedWithoutTheCompiler(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	var keys []string
	for i := range 1000 {
		keys = append(keys, fmt.Sprint("consumer ", i))
	}
	for _, consumers := range [][]string{{}, keys[:1], keys} {
		empty := make([]string, len(consumers))
		plan := strings.Join(pgtest.Column[string](t, db, "explain "+watch.SQLLook, consumers, empty, empty, 100, "event_log"), "\n")
		require.NotContains(t, plan, "JIT", "for %d cursors", len(consumers))
	}
}

func TestEventsOfImpossibleTimesDoNotBlindTheLook(t *testing.T) {
	t.Parallel()
	for _, occurred := range []string{"4713-01-01 00:00:00 BC", "0001-01-01 00:00:00Z", "294276-12-31 23:59:59"} {
		t.Run(occurred, func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			ensure(t, db, push, other)
			db.Exec(t, "insert into event_outbox (topic, occurred_at) values ('orders', $1::text::timestamptz), ('orders', default)", occurred)
			move(t, db, push, 1)
			for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
				pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
				c := &clock{}
				c.set(time.Hour)
				r := newWatch(t, pool, watch.Config{Keys: []cursor.Key{push, other}, Now: c.now}).Look(t.Context())
				require.NoError(t, r.Err)
				require.Equal(t, []watch.Kind{watch.Standing, watch.Standing}, kinds(r, cursor.Key{}))
				_, err := json.Marshal(r)
				require.NoError(t, err)
			}
		})
	}
}

func TestHeadAndCursorAreOfOneMomentUnderLoad(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, push)
	w, _ := at(t, db, push)
	done := make(chan error, 1)
	conn := db.Conn(t)
	go func() {
		for range 300 {
			// The cursor follows the head at once: read at two moments it would be ahead of it.
			for _, sql := range []string{
				"insert into event_outbox (topic) values ('orders')",
				`update event_consumer_cursors set last_seq = (select last_seq from event_seq), moved_at = clock_timestamp()`,
			} {
				if _, err := conn.Exec(context.Background(), sql); err != nil {
					done <- err
					return
				}
			}
		}
		done <- nil
	}()
	for looks := 0; ; looks++ {
		select {
		case err := <-done:
			require.NoError(t, err)
			require.Positive(t, looks)
			return
		default:
		}
		r := w.Look(t.Context())
		healthy(t, r)
		require.LessOrEqual(t, *r.Consumers[0].Lag, int64(1))
	}
}

func TestFormOfTheReportIsStable(t *testing.T) {
	t.Parallel()
	moment := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	n := int64(7)
	report := watch.Report{
		Status: watch.Critical, At: moment,
		Problems: []watch.Problem{{Kind: watch.Failing, Severity: watch.Critical, Consumer: "a@b", Seq: 8, Since: moment, ErrorType: "23505", Summary: "s", Next: "n"}},
		Consumers: []watch.Consumer{{
			Name: "a@b", Consumer: "a", Topic: "b", Shard: "c", Status: watch.Critical, Position: &n, Lag: &n, PendingSeq: 8, PendingSince: moment,
			PendingAge: 1.5, MovedAt: moment, MovedBy: "i", MatchedSeq: 7, MatchedAt: moment, PausedAt: moment, RetiredAt: moment,
			Failure: &watch.Failure{Seq: 8, Since: moment, FailedAt: moment, RetryAt: moment, Attempts: 3, ErrorType: "23505", FailedBy: "i"},
			Parked:  1, LossesOpen: 2,
		}},
		Log:      &watch.Log{Head: 14, LowestSeq: 1, Events: 14, LastRecordedAt: moment, RetentionSeconds: 60},
		Coverage: watch.Coverage{Since: moment, NotWatched: []string{"x"}, Limits: []string{"l"}},
	}
	body, err := json.Marshal(report)
	require.NoError(t, err)
	const at = `"2026-01-02T03:04:05Z"`
	require.JSONEq(t, `{"status": "critical", "at": `+at+`,
		"problems": [{"kind": "failing", "severity": "critical", "consumer": "a@b", "seq": 8, "since": `+at+`, "error_type": "23505", "summary": "s", "next": "n"}],
		"consumers": [{"name": "a@b", "consumer": "a", "topic": "b", "shard": "c", "status": "critical", "position": 7, "lag": 7, "pending_seq": 8,
			"pending_since": `+at+`, "pending_age_seconds": 1.5, "moved_at": `+at+`, "moved_by": "i", "matched_seq": 7, "matched_at": `+at+`,
			"paused_at": `+at+`, "retired_at": `+at+`,
			"failure": {"seq": 8, "since": `+at+`, "failed_at": `+at+`, "retry_at": `+at+`, "attempts": 3, "error_type": "23505", "failed_by": "i"},
			"parked": 1, "losses_open": 2}],
		"log": {"head": 14, "lowest_seq": 1, "events": 14, "last_recorded_at": `+at+`, "retention_seconds": 60},
		"coverage": {"since": `+at+`, "not_watched": ["x"], "limits": ["l"]}}`, string(body))

	body, err = json.Marshal(watch.Report{Problems: []watch.Problem{}, Consumers: []watch.Consumer{{Name: "a"}}, Coverage: watch.Coverage{Limits: []string{}}})
	require.NoError(t, err)
	require.NotContains(t, string(body), "null")
	require.NotContains(t, string(body), "lag", "what is not known is left out")
}

func TestStagedEventThatNobodyNumbersIsAProblem(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, _ := at(t, db, push)
	ensure(t, db, push)
	db.Exec(t, "insert into event_outbox (topic, staged) values ('orders', true)")
	r := w.Look(t.Context())
	healthy(t, r)
	require.False(t, r.Log.StagedSince.IsZero())
	db.Exec(t, "update event_outbox set appended_at = appended_at - interval '14 hours'")
	only(t, w.Look(t.Context()), watch.Staged, watch.Critical)
	db.Exec(t, "update event_outbox set staged = false") // which neither the trigger nor a sequencer takes
	only(t, w.Look(t.Context()), watch.Staged, watch.Critical)
	db.Exec(t, "delete from event_outbox")
	healthy(t, w.Look(t.Context()))
}

func TestRetentionThatIsNotDoneOrHeldUpIsAProblem(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, _ := at(t, db, push)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 2)
	move(t, db, push, 2)
	maintained := func(ago, failing string) {
		db.Exec(t, "update event_retention set switched_on = true, maintained_at = clock_timestamp() - $1::text::interval, failing_since = clock_timestamp() - $2::text::interval", ago, failing)
	}
	db.Exec(t, "update event_retention set maintained_at = clock_timestamp() - interval '1 year'") // and is off
	healthy(t, w.Look(t.Context()))
	db.Exec(t, "update event_retention set switched_on = true")
	only(t, w.Look(t.Context()), watch.Maintenance, watch.Critical)
	db.Exec(t, "update event_retention set maintained_at = clock_timestamp()")
	healthy(t, w.Look(t.Context()))
	maintained("1 second", "10 minutes")
	only(t, w.Look(t.Context()), watch.Maintenance, watch.Critical)
	db.Exec(t, "update event_retention set failing_since = clock_timestamp()") // for a moment
	healthy(t, w.Look(t.Context()))

	db.Exec(t, "update event_retention set failing_since = null, keep = '20 minutes'")
	logtest.Append(t, db, "orders", 3)
	db.Exec(t, "update event_log set recorded_at = clock_timestamp() - interval '1 hour', occurred_at = clock_timestamp() where seq > 2")
	r := w.Look(t.Context())
	require.Contains(t, kinds(r, push), watch.Pinned, "%s", r)
	db.Exec(t, "update event_retention set switched_on = false")
	require.NotContains(t, kinds(w.Look(t.Context()), push), watch.Pinned)
}
