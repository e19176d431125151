package subscriber_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// panickingLogger is a user's hook that is broken.
type panickingLogger struct {
	*logtest.Logger
	armed *atomic.Bool
}

func (l panickingLogger) Error(msg string, err error, fields watermill.LogFields) {
	if msg == "event consumer round failed" && l.armed.Load() {
		panic(errors.New("s3cr3t"))
	}
	l.Logger.Error(msg, err, fields)
}

const listeners = `select count(*) from pg_stat_activity where query like 'listen %' and datname = current_database()`

func TestNotificationWakesLongBeforeThePoll(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	start(t, db, map[string]handler{"push": work, "audit": work, "third": work}, poll(time.Hour))
	require.Eventually(t, func() bool { return pgtest.Value[int64](t, db, listeners) == 1 }, 20*time.Second, 5*time.Millisecond)
	for n := int64(1); n <= 3; n++ {
		logtest.Append(t, db, "orders", 1)
		for _, consumer := range []string{"push", "audit", "third"} {
			waitPosition(t, db, consumer, n)
		}
	}
	require.Equal(t, int64(1), pgtest.Value[int64](t, db, listeners), "one connection for all consumers")
}

func TestPollingAloneDelivers(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	start(t, db, map[string]handler{"push": work}, func(c *subscriber.RunnerConfig, _ *routerConfig) { c.DisableListen = true })
	for n := int64(1); n <= 3; n++ {
		logtest.Append(t, db, "orders", 1)
		waitPosition(t, db, "push", n)
	}
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, listeners))
}

func TestListenerComesBackAfterItsConnectionWasTerminated(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db, map[string]handler{"push": work}, poll(time.Second))
	listening := func() bool { return pgtest.Value[int64](t, db, listeners) == 1 }
	require.Eventually(t, listening, 20*time.Second, 5*time.Millisecond)
	db.Exec(t, "select pg_terminate_backend(pid) from pg_stat_activity where query like 'listen %' and datname = current_database()")
	s.logger.Wait(t, t.Context(), 1, "event log listener is back")
	require.Eventually(t, listening, 20*time.Second, 5*time.Millisecond)
	require.Len(t, s.logger.Lines("event log listener lost"), 1)
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 1)
}

func TestNothingListensWithoutASubscription(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db, map[string]handler{"push": work})
	require.Eventually(t, func() bool { return pgtest.Value[int64](t, db, listeners) == 1 }, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, s.router.Close())
	require.NoError(t, receive(t, s.run, "the router's end"))
	require.Eventually(t, func() bool { return pgtest.Value[int64](t, db, listeners) == 0 }, 20*time.Second, 5*time.Millisecond)
	require.Equal(t, int32(0), s.pool.Stat().AcquiredConns())
}

func TestConsumersShareASmallPool(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 30)
	handlers := map[string]handler{}
	for _, name := range []string{"a", "b", "c", "d"} {
		handlers[name] = work
	}
	logger := logtest.NewLogger()
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	config := subscriber.RunnerConfig{}
	for name := range handlers {
		config.Consumers = append(config.Consumers, subscriber.ConsumerConfig{Name: name, Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 7})
	}
	runner, err := subscriber.NewRunner(pool, config, logger)
	require.NoError(t, err)
	lines := logger.Lines("the pool is small")
	require.Len(t, lines, 1)
	require.Equal(t, 6, lines[0].Fields["wanted_max_conns"])
	serve(t, runner, handlers)
	for name := range handlers {
		waitPosition(t, db, name, 30)
		require.Equal(t, upTo(30), effects(t, db, name))
	}
}
