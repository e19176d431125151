package operate_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

func delivery(t *testing.T, db *pgtest.DB, seq int64, key cursor.Key) operate.Delivery {
	t.Helper()
	list, err := operate.Deliveries(t.Context(), db.Conn(t), nil, seq, key)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, seq, list[0].Seq)
	require.NotEmpty(t, list[0].String())
	return list[0]
}

func states(t *testing.T, db *pgtest.DB, key cursor.Key, through int64) (all []operate.DeliveryState) {
	t.Helper()
	for seq := int64(1); seq <= through; seq++ {
		all = append(all, delivery(t, db, seq, key).State)
	}
	return all
}

func fail(t *testing.T, db *pgtest.DB, key cursor.Key, a cursor.Attempt) {
	t.Helper()
	a.Jitter = 1
	_, _, err := cursor.RecordFailure(t.Context(), db.Conn(t), nil, key, "worker", a)
	require.NoError(t, err)
}

// One cursor with one event of each kind.
func TestEveryEventHasOneState(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	logtest.Append(t, db, "orders", 1)
	register(t, db, orders, cursor.FromHead())
	_, err := operate.Deliveries(t.Context(), conn, nil, 2, orders)
	require.ErrorContains(t, err, "which goes from 1 to 1")
	logtest.Append(t, db, "orders", 2) // 2 is lost
	logtest.Append(t, db, "other", 1)
	logtest.Append(t, db, "orders", 4) // 5 is parked, 6 skipped, 7 parked and discarded, 8 fails
	logtest.Append(t, db, "orders", 1)
	parking := func(c *cursor.RoundConfig) { c.ParkAfter = 1 }
	one := limits(1, 1<<20, 1000)

	db.Exec(t, "delete from event_log where seq <= 2")
	pass(t, db, orders, one)
	pass(t, db, orders, one, as("winner", "winner/1", 10))
	fail(t, db, orders, cursor.Attempt{Seq: 5, Through: 5, ErrorType: "boom"})
	pass(t, db, orders, one, parking) // up to the event that fails
	pass(t, db, orders, one, parking)
	_, err = operate.Skip(t.Context(), conn, nil, orders, 6, order)
	require.NoError(t, err)
	fail(t, db, orders, cursor.Attempt{Seq: 7, Through: 7, ErrorType: "boom"})
	pass(t, db, orders, one, parking)
	_, err = operate.Discard(t.Context(), conn, nil, orders, 7, operate.Order{By: "me", Reason: "of no use"})
	require.NoError(t, err)
	fail(t, db, orders, cursor.Attempt{Seq: 8, Through: 8, ErrorType: "still"})

	require.Equal(t, []operate.DeliveryState{
		operate.BeforeStart, operate.LostUnhandled, operate.Handled, operate.NotItsTopic, operate.ParkedAway, operate.SkippedByHand,
		operate.SkippedByHand, operate.Failing, operate.NotReached,
	}, states(t, db, orders, 9))
	handled := delivery(t, db, 3, orders)
	require.Equal(t, []string{"winner", "winner/1"}, []string{handled.By, handled.Round})
	require.WithinDuration(t, pgtest.Value[time.Time](t, db, "select committed_at from event_consumer_rounds"), *handled.At, 0)
	lost := delivery(t, db, 2, orders)
	require.Equal(t, []string{"retention", "test"}, []string{lost.Reason, lost.By})
	parked := delivery(t, db, 5, orders)
	require.Equal(t, []any{"boom", 1, false}, []any{parked.ErrorType, parked.Attempts, parked.Replay})
	require.Equal(t, []string{"me", "why"}, []string{delivery(t, db, 6, orders).By, delivery(t, db, 6, orders).Reason})
	require.Equal(t, "of no use", delivery(t, db, 7, orders).Reason)
	failing := delivery(t, db, 8, orders)
	require.Equal(t, []any{"still", 1, "worker"}, []any{failing.ErrorType, failing.Attempts, failing.By})
	require.Equal(t, int64(7), delivery(t, db, 9, orders).Position)

	_, err = operate.Replay(t.Context(), conn, nil, orders, 5, order)
	require.NoError(t, err)
	require.True(t, delivery(t, db, 5, orders).Replay)
	r, _ := prepare(t, db, orders, as("replayer", "replayer/1", 10))
	o, err := r.OpenReplay(t.Context())
	require.NoError(t, err)
	r.Hand(&o.Events[0])
	require.NoError(t, r.End(t.Context(), true))
	require.NoError(t, r.Commit(t.Context(), o.Through))
	require.Equal(t, []any{operate.Handled, "replayer"}, []any{delivery(t, db, 5, orders).State, delivery(t, db, 5, orders).By})

	_, err = operate.Deliveries(t.Context(), conn, nil, 3, push)
	require.ErrorIs(t, err, cursor.ErrCursorMissing)
}

func TestFailureOfAWholeRoundIsOneOfEachOfItsEvents(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 4)
	fail(t, db, push, cursor.Attempt{Through: 3, Batch: 1, ErrorType: "23514"})
	require.Equal(t, []operate.DeliveryState{operate.Failing, operate.Failing, operate.Failing, operate.NotReached}, states(t, db, push, 4))
}

func TestEventThatComesAgainIsNotReachedUntilItIsPassed(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	conn := db.Conn(t)
	logtest.Append(t, db, "orders", 4)
	fail(t, db, push, cursor.Attempt{Seq: 1, Through: 1, ErrorType: "boom"})
	pass(t, db, push, func(c *cursor.RoundConfig) { c.ParkAfter = 1 })
	pass(t, db, push, as("first", "first/1", 10))
	require.Equal(t, []operate.DeliveryState{operate.ParkedAway, operate.Handled, operate.Handled, operate.Handled}, states(t, db, push, 4))

	_, err := operate.Seek(t.Context(), conn, nil, push, cursor.FromBeginning(), order)
	require.NoError(t, err)
	require.Equal(t, []operate.DeliveryState{operate.NotReached, operate.NotReached, operate.NotReached, operate.NotReached}, states(t, db, push, 4))
	require.Nil(t, delivery(t, db, 1, push).Before)
	before := delivery(t, db, 2, push).Before
	require.NotNil(t, before)
	require.Equal(t, "first/1", before.Round)
	pass(t, db, push, limits(2, 1<<20, 100), as("second", "second/1", 10))
	require.Equal(t, []operate.DeliveryState{operate.Handled, operate.Handled, operate.NotReached, operate.NotReached}, states(t, db, push, 4))
	require.Equal(t, []string{"second", "second"}, []string{delivery(t, db, 1, push).By, delivery(t, db, 2, push).By})

	// Over them by hand, and back again, without a record.
	_, err = operate.Seek(t.Context(), conn, nil, push, cursor.FromHead(), order)
	require.NoError(t, err)
	require.Equal(t, operate.SkippedByHand, delivery(t, db, 4, push).State)
	_, err = operate.Seek(t.Context(), conn, nil, push, cursor.FromSeq(4), order)
	require.NoError(t, err)
	require.Equal(t, operate.SkippedByHand, delivery(t, db, 3, push).State)
	require.Equal(t, operate.NotReached, delivery(t, db, 4, push).State)
	pass(t, db, push, as("third", "third/1", 0))
	d := delivery(t, db, 4, push)
	require.Equal(t, []any{operate.Handled, ""}, []any{d.State, d.Round})
	require.Equal(t, "handled; details no longer kept", d.String())
}

func TestRemovedEventOfAnUnknownTopicIsNotGuessedAt(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	register(t, db, orders, beginning)
	logtest.Append(t, db, "orders", 2)
	logtest.Append(t, db, "other", 2)
	logtest.Append(t, db, "orders", 1)
	for _, key := range []cursor.Key{push, orders} {
		pass(t, db, key, limits(10, 1<<20, 2), as("w", "w/1", 10))
		pass(t, db, key, limits(10, 1<<20, 1), as("w", "w/2", 10))
		pass(t, db, key, limits(10, 1<<20, 10), as("w", "w/3", 10))
	}
	db.Exec(t, "delete from event_log")
	require.Equal(t, []operate.DeliveryState{operate.Handled, operate.Handled, operate.Handled, operate.Handled, operate.Handled}, states(t, db, push, 5))
	// Its rounds: two of two were its own, none of one, one of two.
	require.Equal(t, []operate.DeliveryState{operate.Handled, operate.Handled, operate.NotItsTopic, operate.TopicUnknown, operate.TopicUnknown},
		states(t, db, orders, 5))
}

// A round that is under way has done nothing yet; the one that commits is recorded, not the one that tried first.
func TestRecordBearsTheNameOfWhoCommitted(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	register(t, db, cursor.Key{Consumer: "audit"}, beginning)
	logtest.Append(t, db, "orders", 2)
	r, o := open(t, db, push, as("loser", "loser/1", 10))
	r.Hand(&o.Events[0])
	require.NoError(t, r.End(t.Context(), true))
	require.Equal(t, operate.NotReached, delivery(t, db, 1, push).State)

	// A look at the locked cursor leaves nothing.
	_, second := open(t, db, push, as("late", "late/1", 10))
	require.Equal(t, cursor.Locked, second.Status)
	r.Rollback(t.Context())
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_rounds"))
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures"))

	pass(t, db, push, as("winner", "winner/1", 10))
	require.Equal(t, []string{"winner", "winner/1"}, []string{delivery(t, db, 1, push).By, delivery(t, db, 1, push).Round})
	require.Equal(t, operate.NotReached, delivery(t, db, 1, cursor.Key{Consumer: "audit"}).State, "another consumer's record is its own")

	// Neither does one that finds nothing to do.
	_, idle := open(t, db, push, as("late", "late/2", 10))
	require.Equal(t, cursor.CaughtUp, idle.Status)
	require.Equal(t, int64(1), pgtest.Value[int64](t, db, "select count(*) from event_consumer_rounds"))
}
