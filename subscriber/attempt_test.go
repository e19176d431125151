package subscriber_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	wmiddleware "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// violating does its work, and then, for event 2, violates a unique constraint while that is asked for.
func violating(violates func() bool) handler {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := work(msg)
		if err != nil {
			return nil, err
		}
		early := message.NewMessage(msg.UUID, msg.Payload)
		early.SetContext(msg.Context())
		jobs, err := publisher.NewJobs(publisher.JobsConfig{})
		if err != nil {
			return nil, err
		}
		if err := jobs.Publish("jobs", early); err != nil {
			return nil, err
		}
		if seqOf(msg) == 2 && violates() {
			return produced, execute(msg, "insert into taken values (1)")
		}
		return produced, nil
	}
}

func always() bool { return true }

func attemptDB(t *testing.T) *pgtest.DB {
	t.Helper()
	db := newDB(t)
	db.Exec(t, "create table taken (n int primary key)")
	db.Exec(t, "insert into taken values (1)")
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(t, err)
	require.NoError(t, jobs.Initialize(t.Context(), db.Conn(t), "poison"))
	logtest.Append(t, db, "orders", 3)
	return db
}

func poisonQueue(t *testing.T, pub message.Publisher) message.HandlerMiddleware {
	t.Helper()
	poison, err := wmiddleware.PoisonQueue(pub, "poison")
	require.NoError(t, err)
	return poison
}

func jobsPublisher(t *testing.T) *publisher.Jobs {
	t.Helper()
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(t, err)
	return jobs
}

func retry(n int) message.HandlerMiddleware {
	return wmiddleware.Retry{MaxRetries: n, InitialInterval: time.Millisecond}.Middleware
}

// wrapped wraps a handler in middlewares, the first of them outermost.
func wrapped(h handler, middlewares ...message.HandlerMiddleware) handler {
	for i := len(middlewares) - 1; i >= 0; i-- {
		h = middlewares[i](h)
	}
	return h
}

// poisoned checks that event 2 was moved aside, alone and whole: nothing of its own is there.
func poisonedAlone(t *testing.T, db *pgtest.DB) {
	t.Helper()
	waitPosition(t, db, "push", 3)
	require.Equal(t, []int64{1, 3}, effects(t, db, "push"))
	require.Equal(t, []string{"1", "1", "3", "3"}, pgtest.Column[string](t, db, `select payload::text from watermill_jobs order by 1`))
	require.Equal(t, []string{"2"}, pgtest.Column[string](t, db, `select payload::text from watermill_poison`))
}

func TestFailedAttemptIsUndoneBeforeTheNextOne(t *testing.T) {
	t.Parallel()
	db := attemptDB(t)
	var first atomic.Bool
	s := start(t, db, map[string]handler{
		"push": wrapped(violating(func() bool { return first.CompareAndSwap(false, true) }), retry(3), middleware.Attempt),
	})
	waitPosition(t, db, "push", 3)
	require.Equal(t, upTo(3), effects(t, db, "push"))
	require.Equal(t, int64(6), jobCount(t, db), "one of each kind for each event")
	require.Empty(t, s.logger.Lines("event consumer round failed"))
}

func TestPoisonedEventIsCommittedWithTheCursor(t *testing.T) {
	t.Parallel()
	db := attemptDB(t)
	s := start(t, db, map[string]handler{
		"push": wrapped(violating(always), poisonQueue(t, jobsPublisher(t)), retry(3), middleware.Attempt),
	})
	poisonedAlone(t, db)
	require.Empty(t, s.logger.Lines("event consumer round failed"))
	require.Equal(t, int64(1), pgtest.Value[int64](t, db, `select count(distinct transaction_id) from
		(select transaction_id from watermill_poison union all select transaction_id from watermill_jobs) j`), "all of it in one transaction")
	require.Contains(t, pgtest.Value[string](t, db, `select metadata->>'reason_poisoned' from watermill_poison`), "23505")
}

func TestPoisonQueueWithoutAttemptFailsTheRoundByItsCause(t *testing.T) {
	t.Parallel()
	db := attemptDB(t)
	s := start(t, db, map[string]handler{"push": wrapped(violating(always), poisonQueue(t, jobsPublisher(t)), retry(3))})
	line := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")[0]
	require.Equal(t, "23505", line.Fields["error.type"])
	require.Equal(t, int64(2), line.Fields["seq"])
	waitPosition(t, db, "push", 1)
	require.NoError(t, s.router.Close())
	require.Equal(t, int64(1), position(t, db, "push"))
	require.Zero(t, pgtest.Value[int64](t, db, "select count(*) from watermill_poison"))
}

// A poison queue with a pool of its own cannot be part of the unit: one row for each time that the event passes it.
func TestPoisonQueueOnAForeignPool(t *testing.T) {
	t.Parallel()
	foreign := func(t *testing.T, db *pgtest.DB) message.HandlerMiddleware {
		pub, err := wsql.NewPublisher(db.SQL(t), wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}}, watermill.NopLogger{})
		require.NoError(t, err)
		return poisonQueue(t, pub)
	}
	db := attemptDB(t)
	start(t, db, map[string]handler{"push": wrapped(violating(always), foreign(t, db), retry(3), middleware.Attempt)})
	poisonedAlone(t, db)

	without := attemptDB(t)
	s := start(t, without, map[string]handler{"push": wrapped(violating(always), foreign(t, without), retry(3))})
	require.Eventually(t, func() bool {
		return pgtest.Value[int64](t, without, "select count(*) from watermill_poison") >= 2
	}, 20*time.Second, 5*time.Millisecond, "one for each attempt")
	require.NoError(t, s.router.Close())
	require.Equal(t, int64(1), position(t, without, "push"))
}

func TestPoisonedEventWithAnErrorThatNoTableHolds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ text, names string }{
		"NUL":           {text: "a\x00b"}, // json holds it
		"invalid UTF-8": {text: "a\xffb", names: "reason_poisoned"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := attemptDB(t)
			s := start(t, db, map[string]handler{"push": wrapped(func(msg *message.Message) ([]*message.Message, error) {
				if seqOf(msg) == 2 {
					return nil, errors.Join(errors.New(c.text), execute(msg, "insert into taken values (1)"))
				}
				return nil, effect(msg)
			}, poisonQueue(t, jobsPublisher(t)), middleware.Attempt)})
			if c.names == "" {
				waitPosition(t, db, "push", 3)
				require.Equal(t, int64(1), pgtest.Value[int64](t, db, "select count(*) from watermill_poison"))
				require.Equal(t, []int64{1, 3}, effects(t, db, "push"))
				return
			}
			line := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")[0]
			require.ErrorContains(t, line.Err, c.names)
			require.ErrorContains(t, line.Err, "23505", "nor is the cause lost")
			require.Equal(t, "invalid_message", line.Fields["error.type"])
			waitPosition(t, db, "push", 1)
			require.NoError(t, s.router.Close())
			require.Equal(t, int64(1), position(t, db, "push"))
			require.Zero(t, pgtest.Value[int64](t, db, "select count(*) from watermill_poison"))
		})
	}
}

func TestPoisonedEventWhoseContextHasEnded(t *testing.T) {
	t.Parallel()
	slow := func(msg *message.Message) ([]*message.Message, error) {
		if err := effect(msg); err != nil || seqOf(msg) != 2 {
			return nil, err
		}
		return nil, execute(msg, "select pg_sleep(60)")
	}
	timeout := wmiddleware.Timeout(100 * time.Millisecond)

	t.Run("on a connection that outlives a canceled statement", func(t *testing.T) {
		t.Parallel()
		db := attemptDB(t)
		keep := func(c *pgxpool.Config) {
			c.MaxConns = 8
			c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
				return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: 20 * time.Second}
			}
		}
		runner, err := subscriber.NewRunner(db.Pool(t, keep), subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{
			{Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning},
		}}, logtest.NewLogger())
		require.NoError(t, err)
		serve(t, runner, map[string]handler{"push": wrapped(slow, poisonQueue(t, jobsPublisher(t)), timeout, middleware.Attempt)})
		waitPosition(t, db, "push", 3)
		require.Equal(t, []int64{1, 3}, effects(t, db, "push"))
		require.Equal(t, int64(1), pgtest.Value[int64](t, db, "select count(*) from watermill_poison"))
	})
	t.Run("on one that does not", func(t *testing.T) {
		t.Parallel()
		db := attemptDB(t)
		s := start(t, db, map[string]handler{"push": wrapped(slow, poisonQueue(t, jobsPublisher(t)), timeout, middleware.Attempt)})
		line := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")[0]
		require.Equal(t, "timeout", line.Fields["error.type"])
		require.Equal(t, int64(2), line.Fields["seq"])
		waitPosition(t, db, "push", 1)
		require.NoError(t, s.router.Close())
		require.Equal(t, int64(1), position(t, db, "push"))
		require.Zero(t, pgtest.Value[int64](t, db, "select count(*) from watermill_poison"))
	})
}

func TestPoisonedEventWhoseMetadataTheHandlerHasDropped(t *testing.T) {
	t.Parallel()
	db := attemptDB(t)
	start(t, db, map[string]handler{"push": wrapped(func(msg *message.Message) ([]*message.Message, error) {
		msg.Metadata = nil
		return violating(always)(msg)
	}, poisonQueue(t, jobsPublisher(t)), middleware.Attempt)})
	poisonedAlone(t, db)
}

func TestIgnoredErrorLeavesNothingOfItsAttempt(t *testing.T) {
	t.Parallel()
	db := attemptDB(t)
	unwanted := errors.New("unwanted")
	start(t, db, map[string]handler{"push": wrapped(func(msg *message.Message) ([]*message.Message, error) {
		produced, err := work(msg)
		if err == nil && seqOf(msg) == 2 {
			_ = execute(msg, "insert into taken values (1)")
			err = unwanted
		}
		return produced, err
	}, wmiddleware.NewIgnoreErrors([]error{unwanted}).Middleware, middleware.Attempt)})
	waitPosition(t, db, "push", 3)
	require.Equal(t, []int64{1, 3}, effects(t, db, "push"))
	require.Equal(t, int64(2), jobCount(t, db))
}

func TestPanicIsUndoneBeforeItIsSwallowed(t *testing.T) {
	t.Parallel()
	db := attemptDB(t)
	start(t, db, map[string]handler{"push": wrapped(func(msg *message.Message) ([]*message.Message, error) {
		produced, err := violating(func() bool { return false })(msg)
		if seqOf(msg) == 2 {
			panic("at event 2")
		}
		return produced, err
	}, poisonQueue(t, jobsPublisher(t)), wmiddleware.Recoverer, middleware.Attempt)})
	poisonedAlone(t, db)
}

func TestAttemptInsideAnotherOneFailsTheRound(t *testing.T) {
	t.Parallel()
	db := attemptDB(t)
	s := start(t, db, map[string]handler{"push": wrapped(work, poisonQueue(t, jobsPublisher(t)), middleware.Attempt, middleware.Attempt)})
	line := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")[0]
	require.ErrorIs(t, line.Err, cursor.ErrAttemptTwice)
	require.Equal(t, int64(0), position(t, db, "push"))
}

func TestMessageWithoutUnitPassesTheAttempt(t *testing.T) {
	t.Parallel()
	produced, err := middleware.Attempt(func(msg *message.Message) ([]*message.Message, error) {
		return message.Messages{msg}, nil
	})(message.NewMessage("1", nil))
	require.NoError(t, err)
	require.Len(t, produced, 1)
}

func TestRoundEndsAfterSoManySavepoints(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 200)
	start(t, db, map[string]handler{
		"push": wrapped(work, middleware.Attempt),
		"read": wrapped(func(*message.Message) ([]*message.Message, error) { return nil, nil }, middleware.Attempt),
	}, consumers(func(c *subscriber.ConsumerConfig) { c.BatchSize = 150 }), poll(time.Hour))
	waitPosition(t, db, "push", 200)
	waitPosition(t, db, "read", 200)
	require.Equal(t, upTo(200), effects(t, db, "push"))
	rounds := func(consumer string) []string {
		return pgtest.Column[string](t, db, `select first_seq || '-' || last_seq from event_consumer_rounds where consumer = $1 order by first_seq`, consumer)
	}
	require.Equal(t, []string{"1-60", "61-120", "121-180", "181-200"}, rounds("push"))
	require.Equal(t, []string{"1-150", "151-200"}, rounds("read"), "who leaves the transaction alone takes none")
	require.Zero(t, pgtest.Value[int64](t, db, "select count(*) from effects where xmin in (select xmin from event_consumer_cursors)"),
		"the cursor moves outside of the attempts")
}

// A statement that still runs in a *sql.Tx when the deadline is over ends with its round, as one by pgx does.
func TestHandlerThatIsStuckInASQLTxCostsOnlyItsRound(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	var stuck atomic.Bool
	returned := make(chan error, 1)
	start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		unit, _ := cursor.UnitFromContext(msg.Context())
		tx, err := unit.SQLTx(msg.Context())
		if err != nil {
			return nil, err
		}
		if seqOf(msg) == 2 && stuck.CompareAndSwap(false, true) {
			_, err := tx.ExecContext(context.Background(), "select pg_sleep(600)")
			returned <- err
			return nil, err
		}
		_, err = tx.ExecContext(msg.Context(), "insert into effects values ($1, $2)", unit.Cursor().Consumer, unit.Event().Seq)
		return nil, err
	}}, consumers(func(c *subscriber.ConsumerConfig) { c.AckDeadline = 500 * time.Millisecond }))
	waitPosition(t, db, "push", 3)
	require.Error(t, receive(t, returned, "the handler's return"))
	require.Equal(t, upTo(3), effects(t, db, "push"))
}

// What one event's middleware has set is put back before the next event, also behind an attempt that was undone.
func TestUndoneAttemptDoesNotBringBackWhatAnotherEventHasSet(t *testing.T) {
	t.Parallel()
	db := attemptDB(t)
	db.Exec(t, "create schema evil")
	db.Exec(t, "create table evil.effects (like public.effects)")
	unwanted := errors.New("unwanted")
	sets := func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			if seqOf(msg) == 1 {
				if err := execute(msg, "set local search_path = evil, public"); err != nil {
					return nil, err
				}
			}
			return h(msg)
		}
	}
	var second atomic.Bool
	start(t, db, map[string]handler{"push": wrapped(func(msg *message.Message) ([]*message.Message, error) {
		if err := effect(msg); err != nil {
			return nil, err
		}
		if seqOf(msg) == 1 || seqOf(msg) == 2 && second.CompareAndSwap(false, true) {
			return nil, unwanted
		}
		return nil, nil
	}, wmiddleware.NewIgnoreErrors([]error{unwanted}).Middleware, sets, retry(1), middleware.Attempt)})
	waitPosition(t, db, "push", 3)
	require.Equal(t, []int64{2, 3}, effects(t, db, "push"))
	require.Zero(t, pgtest.Value[int64](t, db, "select count(*) from evil.effects"))
}
