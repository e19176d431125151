package subscriber_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

var me = operate.Order{By: "me", Reason: "test"}

// A drain's rounds follow each other without a pause; an operator gets between two of them all the same.
func TestPauseGetsItsTurnInADrain(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 20_000)
	s := start(t, db, map[string]handler{"push": work}, consumers(func(c *subscriber.ConsumerConfig) { c.BatchSize = 100 }))
	key := cursor.Key{Consumer: "push"}
	for range 3 {
		from := position(t, db, "push")
		require.Eventually(t, func() bool { return position(t, db, "push") > from }, time.Minute, time.Millisecond)
		change, err := operate.Pause(t.Context(), s.pool, nil, key, me)
		require.NoError(t, err)
		require.Equal(t, change.From, position(t, db, "push"), "nothing moves any more")
		require.Less(t, change.From, int64(20_000), "it was in the middle of the drain")
		_, err = operate.Resume(t.Context(), s.pool, nil, key, me)
		require.NoError(t, err)
	}
	waitPosition(t, db, "push", 20_000)
	require.Equal(t, upTo(20_000), effects(t, db, "push"))
}

func TestFailingEventIsSkippedByHand(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 5)
	var mended atomic.Bool
	s := start(t, db, map[string]handler{"push": poison(3, &mended, errors.New("no"))})
	key := cursor.Key{Consumer: "push"}
	delivery := func(seq int64) operate.Delivery {
		list, err := operate.Deliveries(t.Context(), s.pool, nil, seq, key)
		require.NoError(t, err)
		return list[0]
	}
	require.Eventually(t, func() bool { return delivery(3).Attempts > 1 && position(t, db, "push") == 2 }, time.Minute, 5*time.Millisecond)
	require.Equal(t, operate.Failing, delivery(3).State)
	require.Equal(t, operate.NotReached, delivery(4).State)
	_, err := operate.Skip(t.Context(), s.pool, nil, key, 3, operate.Order{By: "me", Reason: "of no use"})
	require.NoError(t, err)
	waitPosition(t, db, "push", 5)
	require.Equal(t, without(upTo(5), 3), effects(t, db, "push"))
	d := delivery(3)
	require.Equal(t, []any{operate.SkippedByHand, "me", "of no use"}, []any{d.State, d.By, d.Reason})
	require.Equal(t, operate.Handled, delivery(4).State)
}

func TestSeekBackWakesItsConsumer(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 5)
	s := start(t, db, map[string]handler{"push": work}, poll(time.Hour))
	waitPosition(t, db, "push", 5)
	_, err := operate.Seek(t.Context(), s.pool, nil, cursor.Key{Consumer: "push"}, cursor.FromSeq(4), me)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(effects(t, db, "push")) == 7 }, time.Minute, 5*time.Millisecond)
}

// What a process has not committed is not on record, what it has is, and what its successor commits bears the
// successor's name.
func TestDeliveryRecordOutlivesItsProcess(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 5000)
	workers, killedAt := killInRounds(t, db, 3, 300)
	key, conn := cursor.Key{Consumer: "push"}, db.Conn(t)
	handledOnce(t, db)
	for _, w := range workers {
		w.Stop(t)
	}
	// Each round on record is one that has committed, and each event is in one.
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, `select count(*) from event_log l
		where 1 <> (select count(*) from event_consumer_rounds r where l.seq between r.first_seq and r.last_seq and r.handled = r.last_seq - r.first_seq + 1)`))
	for _, at := range killedAt {
		before, err := operate.Deliveries(t.Context(), conn, nil, max(1, at), key)
		require.NoError(t, err)
		then, err := operate.Deliveries(t.Context(), conn, nil, at+1, key)
		require.NoError(t, err)
		require.Equal(t, []operate.DeliveryState{operate.Handled, operate.Handled}, []operate.DeliveryState{before[0].State, then[0].State})
		require.True(t, strings.HasPrefix(then[0].Round, then[0].By+"/"), "the round %q is of the instance %q", then[0].Round, then[0].By)
		require.NotEmpty(t, before[0].Round)
	}
	require.Greater(t, len(pgtest.Column[string](t, db, "select distinct committed_by from event_consumer_rounds")), 1)
}

// Killed at each step of a round's end, by the server's side: before the COMMIT there is no record, and after it there
// is, whoever has heard of it.
func TestDeliveryRecordIsThereIfAndOnlyIfTheRoundCommitted(t *testing.T) {
	t.Parallel()
	for step, trigger := range map[string]string{
		"flush":  "create trigger s before insert on watermill_jobs for each row execute function suicide()",
		"record": "create trigger s before insert on event_consumer_rounds for each row execute function suicide()",
		"commit": "create constraint trigger s after insert on event_consumer_rounds deferrable initially deferred for each row execute function suicide()",
	} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			_, err := db.Conn(t).PgConn().Exec(t.Context(), sqlSuicide+trigger).ReadAll()
			require.NoError(t, err)
			logtest.Append(t, db, "orders", 7)
			// Whenever one looks: what the record says, and what the handlers wrote, in one statement.
			same := func() bool {
				return pgtest.Value[bool](t, db, `select
					(select count(*) from effects) = coalesce((select sum(r.handled) from event_consumer_rounds r), 0)
					and (select count(*) from effects) = (select last_seq from event_consumer_cursors)`)
			}
			s := start(t, db, map[string]handler{"push": work})
			require.Eventually(t, func() bool {
				require.True(t, same())
				return position(t, db, "push") == 7
			}, time.Minute, time.Millisecond)
			require.True(t, same())
			d, err := operate.Deliveries(t.Context(), s.pool, nil, 7)
			require.NoError(t, err)
			require.Equal(t, operate.Handled, d[0].State)
			require.NotEmpty(t, d[0].Round)
		})
	}
}

func TestRecordOfRoundsIsARing(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 100)
	s := start(t, db, map[string]handler{"push": work, "audit": work}, func(c *subscriber.RunnerConfig, _ *message.RouterConfig) { c.RoundsKept = 3 },
		consumers(func(c *subscriber.ConsumerConfig) { c.BatchSize = 5 }))
	waitPosition(t, db, "push", 100)
	waitPosition(t, db, "audit", 100)
	require.Equal(t, []int64{3, 3}, pgtest.Column[int64](t, db, "select count(*) from event_consumer_rounds group by consumer"), "bounded, each its own")
	for _, seq := range []int64{1, 50, 100} {
		deliveries, err := operate.Deliveries(t.Context(), s.pool, nil, seq)
		require.NoError(t, err)
		require.Len(t, deliveries, 2)
		for _, d := range deliveries {
			require.Equal(t, operate.Handled, d.State)
			require.Equal(t, seq == 100, d.Round != "", "%s", d)
		}
	}
}

func TestConsumerSaysOnceThatItStandsStillForAnOperator(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	key := cursor.Key{Consumer: "push"}
	_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", []cursor.Registration{{Key: key, Start: fromBeginning}})
	require.NoError(t, err)
	_, err = operate.Pause(t.Context(), db.Conn(t), nil, key, me)
	require.NoError(t, err)
	s := start(t, db, map[string]handler{"push": work})
	s.logger.Wait(t, t.Context(), 1, "event consumer stands still")
	for range 5 {
		logtest.Append(t, db, "orders", 1) // each wakes it
	}
	_, err = operate.Resume(t.Context(), db.Conn(t), nil, key, me)
	require.NoError(t, err)
	s.logger.Wait(t, t.Context(), 1, "event consumer goes on after its pause")
	waitPosition(t, db, "push", 5)
	require.Len(t, s.logger.Lines("event consumer stands still", "info"), 1)
	require.Len(t, s.logger.Lines("event consumer goes on", "info"), 1)
}
