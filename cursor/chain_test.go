package cursor_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// handle hands out all events of a round; each handler buffers a job.
func handle(t *testing.T, r *cursor.Round) (through int64) {
	t.Helper()
	o := r.Opening()
	for i := range o.Events {
		unit := r.Hand(&o.Events[i])
		require.NoError(t, unit.Buffer(jobs, o.Events[i].Seq))
		require.NoError(t, r.End(t.Context(), true))
	}
	return o.Through
}

// jobs writes what was buffered into a table.
var jobs = &jobTable{}

type jobTable struct{ _ int }

func (*jobTable) Flush(trip *cursor.Trip, items []cursor.Item) error {
	for _, item := range items {
		trip.Queue(nil, "insert into jobs values ($1)", item.Value)
	}
	return nil
}

func chained(t *testing.T, events int, key cursor.Key) (*pgtest.DB, *cursor.Round) {
	t.Helper()
	db := logtest.New(t)
	db.Exec(t, "create table jobs (seq bigint)")
	register(t, db, key, beginning)
	logtest.Append(t, db, "orders", events)
	r, _ := open(t, db, key, limits(10, 1<<20, 100))
	return db, r
}

func done(t *testing.T, db *pgtest.DB) []int64 {
	t.Helper()
	return pgtest.Column[int64](t, db, "select seq from jobs order by seq")
}

func seqRange(to int64) (numbers []int64) {
	for n := int64(1); n <= to; n++ {
		numbers = append(numbers, n)
	}
	return numbers
}

func TestChainedRoundsGoThroughTheLog(t *testing.T) {
	t.Parallel()
	for _, key := range []cursor.Key{push, {Consumer: "push", Topic: "orders"}} {
		db, r := chained(t, 57, key)
		rounds := 1
		for {
			through := handle(t, r)
			committed, begun := r.Await()
			require.NoError(t, committed)
			require.NoError(t, begun)
			if !r.CanChain(through) {
				require.NoError(t, r.Commit(t.Context(), through))
				break
			}
			r = r.Chain(t.Context(), "next", through)
			rounds++
		}
		require.Equal(t, 6, rounds)
		require.Equal(t, seqRange(57), done(t, db))
		require.Equal(t, int64(57), logtest.Position(t, db, key))
		require.Equal(t, int64(57), pgtest.Value[int64](t, db, "select occurred_seq from event_consumer_cursors where topic = $1", key.Topic))
	}
}

// third is a chained round whose events were read ahead: the trip that commits the second is under way.
func third(t *testing.T, r *cursor.Round) *cursor.Round {
	t.Helper()
	r = r.Chain(t.Context(), "second", handle(t, r))
	committed, begun := r.Await()
	require.NoError(t, committed)
	require.NoError(t, begun)
	through := handle(t, r)
	require.True(t, r.CanChain(through))
	return r.Chain(t.Context(), "third", through)
}

func TestNothingOfAChainedRoundCommitsUnlessItsPredecessorDid(t *testing.T) {
	t.Parallel()
	db, r := chained(t, 60, push)
	db.Exec(t, `create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$`)
	db.Exec(t, `create constraint trigger refuse after update on event_consumer_cursors deferrable initially deferred
		for each row when (new.last_seq = 20) execute function refuse()`)
	r = third(t, r)
	handle(t, r) // its handlers may run meanwhile
	committed, begun := r.Await()
	require.ErrorContains(t, committed, "commit")
	require.Error(t, begun)
	require.True(t, r.Doomed())
	handle(t, r) // and after it no handler is to blame
	r.Rollback(t.Context())
	r.Release(t.Context())
	require.Equal(t, seqRange(10), done(t, db))
	require.Equal(t, int64(10), logtest.Position(t, db, push))
	_, o := open(t, db, push)
	require.Equal(t, cursor.Ready, o.Status, "the lock is free")
}

func TestChainedRoundNeedsItsOwnLock(t *testing.T) {
	t.Parallel()
	db, r := chained(t, 60, push)
	// There is no row to be locked when the predecessor has committed.
	db.Exec(t, `create function remove() returns trigger language plpgsql as $$
		begin update event_consumer_cursors set consumer = 'away' where last_seq = 20; return null; end $$`)
	db.Exec(t, `create constraint trigger remove after update on event_consumer_cursors deferrable initially deferred
		for each row when (new.last_seq = 20 and new.consumer = 'push') execute function remove()`)
	r = third(t, r)
	handle(t, r)
	committed, begun := r.Await()
	require.NoError(t, committed)
	require.ErrorIs(t, begun, cursor.ErrLockLost)
	r.Rollback(t.Context())
	require.Equal(t, seqRange(20), done(t, db))
	require.Equal(t, int64(20), logtest.Position(t, db, cursor.Key{Consumer: "away"}))
}

func TestWhatWasReadAheadIsUsedOnlyAtItsPosition(t *testing.T) {
	t.Parallel()
	db, r := chained(t, 60, push)
	db.Exec(t, `create function move() returns trigger language plpgsql as $$
		begin update event_consumer_cursors set last_seq = 15 where last_seq = 20; return null; end $$`)
	db.Exec(t, `create constraint trigger move after update on event_consumer_cursors deferrable initially deferred
		for each row when (new.last_seq = 20) execute function move()`)
	r = third(t, r)
	handle(t, r)
	committed, begun := r.Await()
	require.NoError(t, committed)
	require.ErrorIs(t, begun, cursor.ErrLockLost)
	r.Rollback(t.Context())
	require.Equal(t, seqRange(20), done(t, db))
	require.Equal(t, int64(15), logtest.Position(t, db, push))
}

func TestHandlerOfAChainedRoundWaitsForItsTransaction(t *testing.T) {
	t.Parallel()
	db, r := chained(t, 60, push)
	// The predecessor's commit takes its time.
	db.Exec(t, `create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.3); return null; end $$`)
	db.Exec(t, `create constraint trigger slow after update on event_consumer_cursors deferrable initially deferred
		for each row when (new.last_seq = 20) execute function slow()`)
	r = third(t, r)
	unit := r.Hand(&r.Opening().Events[0])
	hurried, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := unit.Tx(hurried)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	tx, err := unit.Tx(t.Context())
	require.NoError(t, err)
	var position int64
	require.NoError(t, tx.QueryRow(t.Context(), "select last_seq from event_consumer_cursors").Scan(&position))
	require.Equal(t, int64(20), position, "it sees its predecessor committed")
	_, err = tx.Exec(t.Context(), "insert into jobs values (1000)")
	require.NoError(t, err)
	require.NoError(t, r.End(t.Context(), true))
	committed, begun := r.Await()
	require.NoError(t, committed)
	require.NoError(t, begun)
	require.NoError(t, r.Commit(t.Context(), 21))
	require.Equal(t, append(seqRange(20), 1000), done(t, db))
	require.Equal(t, int64(21), logtest.Position(t, db, push))
}

func TestHoleAheadStopsAChain(t *testing.T) {
	t.Parallel()
	db, r := chained(t, 60, push)
	db.Exec(t, "delete from event_log where seq = 25")
	// What lies ahead of the first batch does not follow: the next round has nothing to hand out, and ends.
	r = r.Chain(t.Context(), "second", handle(t, r))
	committed, begun := r.Await()
	require.NoError(t, committed)
	require.NoError(t, begun)
	require.Empty(t, r.Opening().Events)
	require.Error(t, r.Commit(t.Context(), r.Opening().Through), "it cannot move back")
	r.Rollback(t.Context())
	require.Equal(t, int64(10), logtest.Position(t, db, push))
	require.Equal(t, seqRange(10), done(t, db))

	// A round of its own finds what there is before the hole.
	r, o := open(t, db, push, limits(10, 1<<20, 100))
	require.Equal(t, int64(20), o.Through)
	require.NoError(t, r.Commit(t.Context(), handle(t, r)))
	r, _ = prepare(t, db, push, limits(10, 1<<20, 100))
	_, err := r.Open(t.Context())
	require.ErrorIs(t, err, cursor.ErrConsumerGap)
}
