package subscriber_test

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// failTimes fails at an event so many times, counted over all that share the counter.
func failTimes(seq, times int64, attempts *atomic.Int64, fail func() error) handler {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := work(msg)
		if err == nil && seqOf(msg) == seq && attempts.Add(1) <= times {
			return nil, fail()
		}
		return produced, err
	}
}

func impatient(c *subscriber.ConsumerConfig) {
	c.RetryDelay, c.RetryDelayCap = time.Millisecond, 2*time.Millisecond
}

func TestTwoHundredFailuresAreOneLineAndOneRecovery(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	var attempts atomic.Int64
	s := start(t, db, map[string]handler{
		"push": failTimes(2, 200, &attempts, func() error { return errors.New("no") }), "healthy": work, "well": work,
	}, consumers(impatient))
	for _, consumer := range []string{"push", "healthy", "well"} {
		waitPosition(t, db, consumer, 3)
	}
	recovered := s.logger.Wait(t, t.Context(), 1, "event consumer recovered")
	require.Equal(t, 200, recovered[0].Fields["attempts"])
	require.NoError(t, s.router.Close())
	require.Len(t, s.logger.Lines("", "error"), 1)
	require.Len(t, s.logger.Lines("event consumer recovered"), 1)
	for _, line := range s.logger.Lines("event consumer", "error", "info") {
		if line.Msg != "event consumer created" {
			require.Equal(t, "push", line.Fields["consumer"], "the healthy ones say nothing")
		}
	}
}

func TestReplicasLogEachEdgeOnce(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	var attempts atomic.Int64
	var replicas []*service
	for range 3 {
		replicas = append(replicas, start(t, db, map[string]handler{
			"push": failTimes(2, 60, &attempts, func() error { return errors.New("no") }),
		}, consumers(impatient), poll(5*time.Millisecond)))
	}
	waitPosition(t, db, "push", 3)
	for _, s := range replicas {
		require.NoError(t, s.router.Close())
	}
	failed, recovered := 0, 0
	for _, s := range replicas {
		failed += len(s.logger.Lines("", "error"))
		recovered += len(s.logger.Lines("event consumer recovered"))
	}
	require.Equal(t, 1, failed)
	require.Equal(t, 1, recovered)
	require.Equal(t, upTo(3), effects(t, db, "push"))
}

func TestAnotherTypeOfErrorIsAnotherEdge(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	var attempts atomic.Int64
	s := start(t, db, map[string]handler{"push": failTimes(2, 20, &attempts, func() error {
		if attempts.Load() <= 10 {
			return errors.New("no")
		}
		return typedError{}
	})}, consumers(impatient))
	waitPosition(t, db, "push", 3)
	s.logger.Wait(t, t.Context(), 1, "event consumer recovered")
	var types []any
	for _, line := range s.logger.Lines("", "error") {
		types = append(types, line.Fields["error.type"])
	}
	require.Equal(t, []any{"_OTHER", "my_type"}, types)
	require.Len(t, s.logger.Lines("event consumer recovered"), 1)
}

func TestFailingJobsAreOneLineForEachSeq(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	// The first of a batch fails at the flush; it is named when the batch has been halved down to it.
	db.Exec(t, "alter table watermill_jobs rename to elsewhere")
	logtest.Append(t, db, "orders", 8)
	s := start(t, db, map[string]handler{"push": work}, consumers(impatient))
	require.Eventually(t, func() bool {
		return pgtest.Value[int32](t, db, "select coalesce(max(attempts), 0) from event_consumer_failures where seq = 1") > 50
	}, 20*time.Second, 5*time.Millisecond)
	db.Exec(t, "alter table elsewhere rename to watermill_jobs")
	waitPosition(t, db, "push", 8)
	s.logger.Wait(t, t.Context(), 1, "event consumer recovered")
	lines := s.logger.Lines("", "error")
	require.Len(t, lines, 2)
	require.Equal(t, "42P01", lines[0].Fields["error.type"])
	require.NotContains(t, lines[0].Fields, "seq")
	require.Equal(t, int64(1), lines[1].Fields["seq"])
	require.ErrorContains(t, lines[0].Err, "Jobs.Initialize")
	require.Equal(t, int64(8), jobCount(t, db))
}

func TestSerializationFailuresAreRetriedWithoutAWord(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	var attempts atomic.Int64
	s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		if seqOf(msg) == 2 && attempts.Add(1) <= 3 {
			return nil, execute(msg, "do $$ begin raise exception 'as if' using errcode = '40001'; end $$")
		}
		return work(msg)
	}}, parkAfter(1))
	waitPosition(t, db, "push", 3)
	require.Empty(t, s.logger.Lines("", "error"))
	require.Empty(t, parked(t, db))
	require.Equal(t, upTo(3), effects(t, db, "push"))
}

func TestConsumerCannotAppendToItsOwnLog(t *testing.T) {
	t.Parallel()
	pub, err := publisher.NewEventLog(nil, publisher.EventLogConfig{})
	require.NoError(t, err)
	for name, appendTo := range map[string]func(msg *message.Message) error{
		"by plain SQL to the outbox": func(msg *message.Message) error {
			return execute(msg, "insert into event_outbox (topic) values ('orders')")
		},
		"by plain SQL to the log": func(msg *message.Message) error {
			return execute(msg, "insert into event_log select 99, occurred_at, recorded_at, topic, key, key_hash, uuid, payload, metadata from event_log where seq = 1")
		},
		"by the publisher": func(msg *message.Message) error {
			unit, _ := cursor.UnitFromContext(msg.Context())
			tx, err := unit.Tx(msg.Context())
			if err != nil {
				return err
			}
			event := message.NewMessage("1", nil)
			event.SetContext(msg.Context())
			return pub.InTx(tx).Publish("orders", event)
		},
		"by the publisher without the message's context": func(msg *message.Message) error {
			unit, _ := cursor.UnitFromContext(msg.Context())
			tx, err := unit.Tx(msg.Context())
			if err != nil {
				return err
			}
			return pub.InTx(tx).Publish("orders", message.NewMessage("1", nil))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 2)
			s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
				if err := appendTo(msg); err != nil {
					return nil, err
				}
				return work(msg)
			}})
			lines := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")
			require.Equal(t, "internal", lines[0].Fields["error.type"])
			require.ErrorContains(t, lines[0].Err, "may not append to the log that it reads")
			require.NoError(t, s.router.Close())
			require.Equal(t, int64(0), position(t, db, "push"))
			require.Equal(t, int64(2), pgtest.Value[int64](t, db, "select last_seq from event_seq"))
		})
	}
}

func TestAppendingToAnotherLogIsAllowed(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "create schema other")
	other, err := cursor.NewLog(cursor.LogConfig{Schema: "other"})
	require.NoError(t, err)
	migrate(t, db, other)
	pub, err := publisher.NewEventLog(nil, publisher.EventLogConfig{Log: other})
	require.NoError(t, err)
	logtest.Append(t, db, "orders", 3)
	start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		unit, _ := cursor.UnitFromContext(msg.Context())
		tx, err := unit.Tx(msg.Context())
		if err != nil {
			return nil, err
		}
		return nil, pub.InTx(tx).Publish("copies", msg.CopyWithContext())
	}})
	waitPosition(t, db, "push", 3)
	require.Equal(t, []string{"1", "2", "3"}, pgtest.Column[string](t, db, "select convert_from(payload, 'UTF8') from other.event_log order by seq"))
}

func TestCursorAheadStandsUntilItIsMoved(t *testing.T) {
	t.Parallel()
	for _, watched := range []bool{true, false} {
		t.Run(fmt.Sprint("watched meanwhile: ", watched), func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 50)
			s := start(t, db, map[string]handler{"push": work})
			waitPosition(t, db, "push", 50)
			if !watched {
				require.NoError(t, s.router.Close())
			}
			// The tail is lost, and the log grows over it again.
			db.Exec(t, "delete from event_log where seq > 30")
			db.Exec(t, "update event_seq set last_seq = 30")
			if watched {
				lines := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")
				require.Equal(t, "cursor_ahead", lines[0].Fields["error.type"])
			}
			logtest.Append(t, db, "orders", 10)
			logtest.Append(t, db, "orders", 12)
			if !watched {
				s = start(t, db, map[string]handler{"push": work})
				lines := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")
				require.Equal(t, "cursor_ahead", lines[0].Fields["error.type"])
				require.ErrorContains(t, lines[0].Err, "operate.Seek")
			}
			// It stands at each of its attempts.
			require.Eventually(t, func() bool {
				return pgtest.Value[int32](t, db, "select attempts from event_consumer_failures where error_type = 'cursor_ahead'") > 5
			}, 20*time.Second, 5*time.Millisecond)
			require.Equal(t, int64(50), position(t, db, "push"))
			require.Len(t, effects(t, db, "push"), 50)
			require.Len(t, s.logger.Lines("", "error"), 1)

			key := cursor.Key{Consumer: "push"}
			_, err := operate.Seek(t.Context(), s.pool, nil, key, cursor.FromSeq(54), operate.Order{By: "me"})
			require.ErrorContains(t, err, "whose head is 52")
			_, err = operate.Seek(t.Context(), s.pool, nil, key, cursor.FromSeq(31), operate.Order{By: "me", Reason: "restored"})
			require.NoError(t, err)
			waitPosition(t, db, "push", 52)
			require.Len(t, effects(t, db, "push"), 50+22)
			require.Equal(t, "50 30 me restored", pgtest.Value[string](t, db,
				"select from_seq || ' ' || to_seq || ' ' || by || ' ' || reason from event_consumer_interventions where action = 'seek'"))
		})
	}
}

func TestRestoredCursorReplays(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 10)
	s := start(t, db, map[string]handler{"push": work})
	waitPosition(t, db, "push", 10)
	db.Exec(t, "update event_consumer_cursors set last_seq = 4")
	waitPosition(t, db, "push", 10)
	require.Len(t, effects(t, db, "push"), 16)
	require.Empty(t, s.logger.Lines("", "error"))
}

func TestConsumerThatWasAwayForLongSkipsToTheHead(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 5)
	s := start(t, db, map[string]handler{"push": work})
	waitPosition(t, db, "push", 5)
	require.NoError(t, s.router.Close())
	logtest.Append(t, db, "orders", 5)
	resume := consumers(func(c *subscriber.ConsumerConfig) { c.ResumeAge = time.Hour })

	// The events are old, but the cursor has moved: it goes on.
	db.Exec(t, "update event_log set recorded_at = recorded_at - interval '2 hours' where seq > 5")
	s = start(t, db, map[string]handler{"push": work}, resume)
	waitPosition(t, db, "push", 10)
	require.NoError(t, s.router.Close())
	require.Equal(t, upTo(10), effects(t, db, "push"))

	// Neither is the cursor alone enough.
	db.Exec(t, "update event_consumer_cursors set moved_at = moved_at - interval '2 hours'")
	logtest.Append(t, db, "orders", 5)
	s = start(t, db, map[string]handler{"push": work}, resume)
	waitPosition(t, db, "push", 15)
	require.NoError(t, s.router.Close())
	require.Equal(t, upTo(15), effects(t, db, "push"))

	db.Exec(t, "update event_consumer_cursors set moved_at = moved_at - interval '2 hours'")
	logtest.Append(t, db, "orders", 5)
	db.Exec(t, "update event_log set recorded_at = recorded_at - interval '2 hours' where seq > 15")
	logtest.Append(t, db, "orders", 5)
	s = start(t, db, map[string]handler{"push": work}, resume)
	waitPosition(t, db, "push", 25)
	require.Equal(t, upTo(15), effects(t, db, "push"))
	lines := s.logger.Wait(t, t.Context(), 1, "event consumer skipped to the head")
	require.Equal(t, []any{int64(16), int64(25)}, []any{lines[0].Fields["first_seq"], lines[0].Fields["last_seq"]})
	require.Equal(t, "16 25 resume_age", pgtest.Value[string](t, db, "select first_seq || ' ' || last_seq || ' ' || reason from event_consumer_losses"))
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 26)
	require.Equal(t, append(upTo(15), 26), effects(t, db, "push"))
}

func TestLossIsLoggedOnceAlsoWhenTheNextEventFails(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 400)
	s := start(t, db, map[string]handler{"push": work}, consumers(func(c *subscriber.ConsumerConfig) { c.BatchSize = 100 }))
	waitPosition(t, db, "push", 400)
	require.NoError(t, s.router.Close())
	db.Exec(t, "truncate effects")
	_, err := operate.Seek(t.Context(), s.pool, nil, cursor.Key{Consumer: "push"}, cursor.FromSeq(101), operate.Order{By: "test"})
	require.NoError(t, err)
	db.Exec(t, "delete from event_log where seq <= 300")

	var attempts atomic.Int64
	s = start(t, db, map[string]handler{"push": failTimes(301, 5, &attempts, func() error { return errors.New("no") })})
	waitPosition(t, db, "push", 400)
	lines := s.logger.Lines("event consumer lost events to retention", "error")
	require.Len(t, lines, 1)
	require.Equal(t, []any{"push", int64(101), int64(300)},
		[]any{lines[0].Fields["consumer"], lines[0].Fields["first_seq"], lines[0].Fields["last_seq"]})
	require.Equal(t, int64(1), pgtest.Value[int64](t, db, "select count(*) from event_consumer_losses where first_seq = 101 and last_seq = 300 and reason = 'retention' and settled_at is null"))
	require.Len(t, effects(t, db, "push"), 100)
}

func TestRefusedDatabaseIsOneLineForEachConsumer(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	db := logtest.NewOn(t, server)
	prepareDB(t, db)
	logtest.Append(t, db, "orders", 5)
	handlers := map[string]handler{"a": work, "b": work, "c": work}
	s := start(t, db, handlers)
	for name := range handlers {
		waitPosition(t, db, name, 5)
	}
	// Nobody can connect any more, and those who are connected are sent away.
	admin := pgtestAdmin(t, server.URL("postgres"))
	for _, statement := range []string{
		"alter database " + db.Name() + " allow_connections false",
		"select pg_terminate_backend(pid) from pg_stat_activity where datname = '" + db.Name() + "' and application_name <> 'pgtest'",
	} {
		_, err := admin.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	s.logger.Wait(t, t.Context(), 3, "event consumer round failed")
	s.logger.Wait(t, t.Context(), 15, "event consumer round failed again") // at debug level
	_, err := admin.Exec(t.Context(), "alter database "+db.Name()+" allow_connections true")
	require.NoError(t, err)
	s.logger.Wait(t, t.Context(), 3, "event consumer recovered")
	logtest.Append(t, db, "orders", 5)
	for name := range handlers {
		waitPosition(t, db, name, 10)
		require.Equal(t, upTo(10), effects(t, db, name))
	}
	count := map[any]int{}
	for _, line := range s.logger.Lines("", "error") {
		count[line.Fields["consumer"]]++
	}
	for _, line := range s.logger.Lines("event consumer recovered") {
		count[line.Fields["consumer"]] += 100
	}
	for name, n := range count {
		// The connection that was ended under a round, and those that were refused after it, may be of two types.
		require.Contains(t, []int{101, 102}, n, "%v: %v", name, s.logger.Lines("", "error"))
	}
	require.Len(t, count, 3)
}

func pgtestAdmin(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func migrate(t *testing.T, db *pgtest.DB, log *cursor.Log) {
	t.Helper()
	_, err := migrations.Up(t.Context(), db.Conn(t), log)
	require.NoError(t, err)
}
