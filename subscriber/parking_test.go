package subscriber_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
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

func parkAfter(n int) option {
	return consumers(func(c *subscriber.ConsumerConfig) { c.ParkAfter = n })
}

// poison fails on one event until it is mended.
func poison(seq int64, mended *atomic.Bool, fail error) handler {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := work(msg)
		if err == nil && seqOf(msg) == seq && !mended.Load() {
			err = fail
		}
		return produced, err
	}
}

func parked(t testing.TB, db *pgtest.DB) []string {
	t.Helper()
	return pgtest.Column[string](t, db, "select seq || ' ' || error_type || ' ' || attempts from event_consumer_parked order by seq")
}

func without(numbers []int64, left int64) []int64 {
	var rest []int64
	for _, n := range numbers {
		if n != left {
			rest = append(rest, n)
		}
	}
	return rest
}

func TestEventIsParkedAfterItsAttempts(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		fail error
		want string
	}{
		"an error":          {errors.New("no"), "4 _OTHER 3"},
		"a permanent error": {fmt.Errorf("bad data: %w", cursor.Permanent(typedError{})), "4 my_type 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 8)
			var mended atomic.Bool
			s := start(t, db, map[string]handler{"push": poison(4, &mended, tt.fail), "healthy": work}, parkAfter(3))
			waitPosition(t, db, "push", 8)
			waitPosition(t, db, "healthy", 8)
			require.Equal(t, []string{tt.want}, parked(t, db))
			require.Equal(t, without(upTo(8), 4), effects(t, db, "push"))
			require.Equal(t, upTo(8), effects(t, db, "healthy"))
			require.Equal(t, int64(7+8), jobCount(t, db))
			require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures"))
			require.Eventually(t, func() bool {
				return pgtest.Value[int64](t, db, "select count(*) from event_consumer_marks") == 0
			}, 20*time.Second, 5*time.Millisecond)
			require.Len(t, s.logger.Lines("event consumer round failed", "error"), 1)
			lines := s.logger.Lines("event consumer parked an event", "error")
			require.Len(t, lines, 1)
			require.Equal(t, int64(4), lines[0].Fields["seq"])
			require.Len(t, s.logger.Lines("event consumer recovered", "info"), 1)

			// Its copy is whole, and outlives the log's.
			key := cursor.Key{Consumer: "push"}
			list, err := operate.Parked(t.Context(), s.pool, nil, key, 0, 10)
			require.NoError(t, err)
			require.Len(t, list, 1)
			require.Equal(t, "4", string(list[0].Event.Payload))
			require.Equal(t, "orders", list[0].Event.Topic)
			require.NotNil(t, list[0].Event.Metadata)
			require.Equal(t, key, list[0].Cursor)
			require.False(t, list[0].Replaying)
			db.Exec(t, "delete from event_log where seq = 4")

			// A replay that fails leaves it parked, one that succeeds is its end.
			require.NoError(t, s.replay(key, 4, "to see"))
			s.logger.Wait(t, t.Context(), 1, "event consumer failed to replay")
			require.Eventually(t, func() bool {
				list, err = operate.Parked(t.Context(), s.pool, nil, key, 0, 10)
				return err == nil && len(list) == 1 && !list[0].Replaying
			}, 20*time.Second, 5*time.Millisecond)
			require.Equal(t, without(upTo(8), 4), effects(t, db, "push"))
			mended.Store(true)
			require.NoError(t, s.replay(key, 4, "mended"))
			s.logger.Wait(t, t.Context(), 1, "event consumer replayed")
			require.Equal(t, upTo(8), effects(t, db, "push"))
			require.Equal(t, int64(16), jobCount(t, db))
			require.Empty(t, parked(t, db))
			require.Equal(t, int64(8), position(t, db, "push"))
			require.ErrorIs(t, s.replay(key, 4, "again"), cursor.ErrNotParked)
			require.Equal(t, []string{"replay 4 me to see", "replay 4 me mended"}, pgtest.Column[string](t, db,
				"select action || ' ' || to_seq || ' ' || by || ' ' || reason from event_consumer_interventions where action <> 'create' order by id"))
		})
	}
}

// replay asks for a replay.
func (s *service) replay(key cursor.Key, seq int64, reason string) error {
	_, err := operate.Replay(s.t.Context(), s.pool, nil, key, seq, operate.Order{By: "me", Reason: reason})
	return err
}

func TestParkedEventIsDiscarded(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	var mended atomic.Bool
	s := start(t, db, map[string]handler{"push": poison(2, &mended, errors.New("no"))}, parkAfter(1))
	waitPosition(t, db, "push", 3)
	key := cursor.Key{Consumer: "push"}
	_, err := operate.Discard(t.Context(), s.pool, nil, key, 2, operate.Order{By: "me", Reason: "of no use"})
	require.NoError(t, err)
	_, err = operate.Discard(t.Context(), s.pool, nil, key, 2, operate.Order{By: "me", Reason: "again"})
	require.ErrorIs(t, err, cursor.ErrNotParked)
	require.Empty(t, parked(t, db))
	require.Equal(t, int64(1), pgtest.Value[int64](t, db, "select count(*) from event_consumer_interventions where action = 'discard' and reason = 'of no use'"))
}

func TestStandingStillIsTheDefault(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	var attempts atomic.Int64
	start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		attempts.Add(1)
		return nil, cursor.Permanent(errors.New("no"))
	}})
	require.Eventually(t, func() bool { return attempts.Load() > 10 }, 20*time.Second, 5*time.Millisecond)
	require.Equal(t, int64(0), position(t, db, "push"))
	require.Empty(t, parked(t, db))
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_marks"), "who does not park leaves no marks")
}

func TestJobThatCannotBeWrittenParksItsEvent(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "alter table watermill_jobs add constraint poison check (payload::text <> '6')")
	logtest.Append(t, db, "orders", 10)
	start(t, db, map[string]handler{"push": work}, parkAfter(2))
	waitPosition(t, db, "push", 10)
	require.Equal(t, []string{"6 23514 2"}, parked(t, db))
	require.Equal(t, without(upTo(10), 6), effects(t, db, "push"))
}

func TestHoleIsNeverParked(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 5)
	db.Exec(t, "delete from event_log where seq = 3")
	start(t, db, map[string]handler{"push": work}, parkAfter(1))
	waitPosition(t, db, "push", 2)
	require.Eventually(t, func() bool {
		return pgtest.Value[int32](t, db, "select coalesce(max(attempts), 0) from event_consumer_failures where seq = 3") > 5
	}, 20*time.Second, 5*time.Millisecond)
	require.Equal(t, int64(2), position(t, db, "push"))
	require.Empty(t, parked(t, db))
}

func TestEventThatKillsItsProcessIsParked(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 30)
	deaths := 0
	for {
		w := startWorker(t, db, deaths+1, envPark+"=3", envDeadly+"=13")
		passed := make(chan struct{})
		go func() {
			defer close(passed)
			for position(t, db, "push") < 30 {
				select {
				case <-t.Context().Done():
					return
				case <-time.After(5 * time.Millisecond):
				}
			}
		}()
		select {
		case <-w.Ended:
			deaths++
			require.Less(t, deaths, 10)
			continue
		case <-passed:
		}
		w.Kill()
		break
	}
	// One death in the batch, and three with the event alone in its unit.
	require.Equal(t, 4, deaths)
	require.Equal(t, []string{"13 internal 3"}, parked(t, db))
	require.Equal(t, without(upTo(30), 13), effects(t, db, "push"))
	require.Equal(t, int64(29), jobCount(t, db))
}

func TestKillsFromOutsideParkNothing(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3000)
	killInRounds(t, db, 10, 150, envPark+"=1")
	handledOnce(t, db)
	require.Empty(t, parked(t, db))
}

func TestGracefulStopLeavesNoMark(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 5)
	var once sync.Once
	entered := make(chan struct{})
	s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		once.Do(func() { close(entered) })
		<-msg.Context().Done()
		return nil, msg.Context().Err()
	}}, parkAfter(3), budget(100*time.Millisecond))
	receive(t, entered, "the handler")
	require.Equal(t, int64(1), pgtest.Value[int64](t, db, "select count(*) from event_consumer_marks where not slow"))
	require.NoError(t, s.runner.Close())
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_marks"))
	require.Empty(t, s.logger.Lines("event consumer", "error"))
}

func TestReplayNeedsItsRoundToo(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 2)
	var mended atomic.Bool
	s := start(t, db, map[string]handler{"push": poison(1, &mended, errors.New("no"))}, parkAfter(1))
	waitPosition(t, db, "push", 2)
	mended.Store(true)
	// The job cannot be written: effect, job and the row's end are one.
	db.Exec(t, "alter table watermill_jobs add constraint no check (false) not valid")
	key := cursor.Key{Consumer: "push"}
	require.NoError(t, s.replay(key, 1, ""))
	lines := s.logger.Wait(t, t.Context(), 1, "event consumer failed to replay")
	require.Equal(t, "23514", lines[0].Fields["error.type"])
	require.Equal(t, []int64{2}, effects(t, db, "push"))
	db.Exec(t, "alter table watermill_jobs drop constraint no")
	require.Eventually(t, func() bool { return strings.HasPrefix(parked(t, db)[0], "1 23514") }, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, s.replay(key, 1, ""))
	s.logger.Wait(t, t.Context(), 1, "event consumer replayed")
	require.Equal(t, upTo(2), effects(t, db, "push"))
}
