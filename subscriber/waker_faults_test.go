package subscriber_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/faultproxy"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// never is a poll interval that leaves a test to its wakes.
const never = time.Hour

const listenerPID = `select coalesce((select pid from pg_stat_activity where query like 'listen %' and datname = current_database()), 0)`

// waitListening returns when one backend listens, other than the one given, and its pid.
func waitListening(t *testing.T, db *pgtest.DB, other int32) int32 {
	t.Helper()
	var pid int32
	require.Eventually(t, func() bool {
		if pgtest.Value[int64](t, db, listeners) != 1 {
			return false
		}
		pid = pgtest.Value[int32](t, db, listenerPID)
		return pid != 0 && pid != other
	}, 20*time.Second, 5*time.Millisecond)
	return pid
}

func terminate(t *testing.T, db *pgtest.DB, pid int32) {
	t.Helper()
	require.True(t, pgtest.Value[bool](t, db, "select pg_terminate_backend($1, 10000)", pid))
}

// settle returns how many rounds there were when no wake is left.
func settle(t *testing.T, runner *subscriber.Runner) int64 {
	t.Helper()
	before := int64(-1)
	require.Eventually(t, func() bool {
		begun, resting := runner.Rounds()
		settled := resting && begun == before
		before = begun
		return settled
	}, 20*time.Second, 50*time.Millisecond)
	return before
}

// waitLine returns the first line that contains msg.
func waitLine(t *testing.T, logger *logtest.Logger, msg string) logtest.Line {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	return logger.Wait(t, ctx, 1, msg)[0]
}

func listenURL(url string) option {
	return func(c *subscriber.RunnerConfig, _ *routerConfig) { c.ListenURL = url }
}

// startListening starts a service with a listener less patient than usual.
func startListening(t *testing.T, db *pgtest.DB, handlers map[string]handler, heartbeat, answer, probe time.Duration, options ...option) *service {
	t.Helper()
	s := newService(t, db, handlers, options...)
	s.runner.SetListenTimes(heartbeat, answer, probe)
	return s.start()
}

func TestEventsAppendedWhileNobodyListensAreFoundAtTheReconnect(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	proxy, url := faultproxy.For(t, db.URL())
	logger := logtest.NewLogger()
	runner, err := subscriber.NewRunner(
		db.Pool(t, func(c *pgxpool.Config) {
			c.MaxConns = 8
			c.ConnConfig.Tracer = &tracer{refuse: func(sql string) bool { return strings.Contains(sql, "pg_notify") }} // a probe would wake, too
		}),
		subscriber.RunnerConfig{
			Consumers:    []subscriber.ConsumerConfig{{Name: "push", Topic: subscriber.AllTopics}, {Name: "audit", Topic: subscriber.AllTopics}},
			PollInterval: never, ListenURL: url,
		}, logger)
	require.NoError(t, err)
	serve(t, runner, map[string]handler{"push": work, "audit": work})
	pid := waitListening(t, db, 0)
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 1)
	waitPosition(t, db, "audit", 1)

	proxy.Refuse()
	terminate(t, db, pid)
	waitLine(t, logger, "event log listener lost")
	settle(t, runner)
	logtest.Append(t, db, "orders", 1)
	require.Equal(t, int64(1), position(t, db, "push"), "nobody heard of it")
	proxy.Pass()
	started := time.Now()
	waitPosition(t, db, "push", 2)
	waitPosition(t, db, "audit", 2)
	t.Logf("delivered %v after the server could be reached again", time.Since(started).Round(time.Millisecond))
	waitListening(t, db, pid)
	require.Equal(t, 1, proxy.Open())
	require.Empty(t, logger.Lines("", "error"))
}

func TestReconnectIsQuickHoweverLongThePollIntervalIs(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	start(t, db, map[string]handler{"push": work}, poll(30*time.Second))
	pid := waitListening(t, db, 0)
	terminate(t, db, pid)
	started := time.Now()
	<-time.After(200 * time.Millisecond)
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 1)
	took := time.Since(started)
	t.Logf("delivered %v after the connection was terminated", took.Round(time.Millisecond))
	require.Less(t, took, 2200*time.Millisecond)
	waitListening(t, db, pid)
}

// The listener's packets vanish and neither side is told.
func TestHalfOpenListenerIsNoticedByItsHeartbeat(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	proxy, url := faultproxy.For(t, db.URL())
	const heartbeat, answer = 300 * time.Millisecond, time.Second
	s := startListening(t, db, map[string]handler{"push": work}, heartbeat, answer, time.Hour, poll(never), listenURL(url))
	pid := waitListening(t, db, 0)
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 1)
	proxy.Drop()
	proxy.Pass() // for new ones
	settle(t, s.runner)
	started := time.Now()
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 2)
	took := time.Since(started)
	t.Logf("delivered %v after the packets were gone", took.Round(time.Millisecond))
	require.Greater(t, took, answer/2, "by its notification")
	require.Less(t, took, heartbeat+answer+3*time.Second)
	require.Len(t, s.logger.Lines("event log listener lost"), 1)
	require.Equal(t, 1, proxy.Open(), "the lost one is closed on our side")
	require.Equal(t, 2, proxy.Accepted(), "and nothing else was tried through it")
	terminate(t, db, pid) // the server does not know yet
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 3)
}

func TestHalfOpenListenerCostsNoMoreThanAPoll(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	proxy, url := faultproxy.For(t, db.URL())
	s := startListening(t, db, map[string]handler{"push": work}, time.Hour, time.Hour, time.Hour, poll(500*time.Millisecond), listenURL(url))
	waitListening(t, db, 0)
	proxy.Drop()
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 1)
	require.Empty(t, s.logger.Lines("event log listener"))
	started := time.Now()
	require.NoError(t, s.runner.Close())
	require.Less(t, time.Since(started), 3*time.Second)
	require.Eventually(t, func() bool { return proxy.Open() == 0 }, 20*time.Second, time.Millisecond)
}

// Sessions that are idle too long are ended by the server: the pool's are replaced, the listener's is not one.
func TestIdleSessionTimeoutDoesNotEndTheListener(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, fmt.Sprintf(`alter database %q set idle_session_timeout = '1500ms'`, db.Name()))
	s := start(t, db, map[string]handler{"push": work}, poll(never))
	pid := waitListening(t, db, 0)
	for n := int64(1); n <= 2; n++ {
		idle := db.Conn(t).PgConn().PID()
		require.Eventually(t, func() bool {
			return pgtest.Value[int64](t, db, "select count(*) from pg_stat_activity where pid = $1", idle) == 0
		}, 20*time.Second, 20*time.Millisecond)
		logtest.Append(t, db, "orders", 1)
		waitPosition(t, db, "push", n)
	}
	require.Equal(t, pid, pgtest.Value[int32](t, db, listenerPID))
	require.Empty(t, s.logger.Lines("event", "error"))
	require.Empty(t, s.logger.Lines("event log listener"))
}

func TestServerRestartNeedsNoRestartOfTheProcess(t *testing.T) {
	t.Parallel()
	for name, immediate := range map[string]bool{"fast": false, "immediate": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := pgtest.Server(t)
			db := logtest.NewOn(t, server)
			prepareDB(t, db)
			s := start(t, db, map[string]handler{"push": work}, poll(never))
			pid := waitListening(t, db, 0)
			logtest.Append(t, db, "orders", 1)
			waitPosition(t, db, "push", 1)
			settle(t, s.runner)
			require.NoError(t, server.Restart(t.Context(), immediate))
			started := time.Now()
			waitListening(t, db, pid)
			t.Logf("listens again %v after the server was back", time.Since(started).Round(time.Millisecond))
			for n := int64(2); n <= 4; n++ {
				logtest.Append(t, db, "orders", 1)
				waitPosition(t, db, "push", n)
			}
			require.Equal(t, upTo(4), effects(t, db, "push"))
			lines := s.logger.Lines("event", "error")
			require.LessOrEqual(t, len(lines), 2, "%v", lines) // of pooled connections that the restart has cut
			require.Empty(t, s.runner.Failed())
		})
	}
}

func TestEachLogHasOneListenerAndEndsItWithItsLastConsumer(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	other, err := cursor.NewLog(cursor.LogConfig{Name: "Audit", Channel: `A "Log"`})
	require.NoError(t, err)
	_, err = migrations.Up(t.Context(), db.Conn(t), other)
	require.NoError(t, err)
	count := func(n int64) {
		t.Helper()
		require.Eventually(t, func() bool { return pgtest.Value[int64](t, db, listeners) == n }, 20*time.Second, 5*time.Millisecond)
	}

	handlers := map[string]handler{}
	for n := range 10 {
		handlers[fmt.Sprintf("consumer-%d", n)] = work
	}
	first := newService(t, db, handlers, poll(never))
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, listeners), "no subscription, no listener")
	first.start()
	count(1)
	second := start(t, db, map[string]handler{"push": work}, poll(never),
		func(c *subscriber.RunnerConfig, _ *routerConfig) { c.Log = other })
	count(2)
	logtest.Append(t, db, "orders", 1)
	for name := range handlers {
		waitPosition(t, db, name, 1)
	}
	db.Exec(t, `insert into "Audit_outbox" (topic, payload) values ('orders', '1')`)
	require.Eventually(t, func() bool {
		return pgtest.Value[int64](t, db, `select last_seq from "Audit_consumer_cursors"`) == 1
	}, 20*time.Second, 5*time.Millisecond, "its own channel wakes it")

	require.NoError(t, first.runner.Close())
	count(1)
	require.NoError(t, second.runner.Close())
	count(0)
}

// A connection string that leads elsewhere is noticed, as nothing that the pool notifies is heard there.
func TestListenerThatHearsNothingGivesUpAndPollingGoesOn(t *testing.T) {
	t.Parallel()
	db, elsewhere := newDB(t), newDB(t)
	s := startListening(t, db, map[string]handler{"push": work}, time.Hour, 20*time.Second, 200*time.Millisecond, listenURL(elsewhere.URL()))
	line := waitLine(t, s.logger, "event log listener gives up")
	require.Equal(t, "info", line.Level)
	require.ErrorContains(t, line.Fields["err"].(error), "ListenURL")
	require.ErrorContains(t, line.Fields["err"].(error), "DisableListen")
	require.Eventually(t, func() bool { return pgtest.Value[int64](t, elsewhere, listeners) == 0 }, 20*time.Second, 5*time.Millisecond)
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 1)
	require.Len(t, s.logger.Lines("event log listener"), 1)
	require.Empty(t, s.logger.Lines("", "error"))
}

// What is only slow, or cannot be asked, is not taken for a pooler.
func TestSlowOrLostProbeIsNoPooler(t *testing.T) {
	t.Parallel()
	t.Run("notifications come late", func(t *testing.T) {
		t.Parallel()
		db := newDB(t)
		proxy, url := faultproxy.For(t, db.URL())
		proxy.Delay(100 * time.Millisecond)
		s := startListening(t, db, map[string]handler{"push": work}, time.Hour, 20*time.Second, time.Millisecond, poll(never), listenURL(url))
		pid := waitListening(t, db, 0)
		for n := int64(1); n <= 3; n++ {
			logtest.Append(t, db, "orders", 1)
			waitPosition(t, db, "push", n)
		}
		require.Equal(t, pid, pgtest.Value[int32](t, db, listenerPID))
		require.Empty(t, s.logger.Lines("event log listener"))
	})
	t.Run("the connection is lost meanwhile", func(t *testing.T) {
		t.Parallel()
		db := newDB(t)
		proxy, url := faultproxy.For(t, db.URL())
		probing := sync.OnceFunc(func() {
			proxy.Drop()
			proxy.Pass() // for the next one
		})
		logger := logtest.NewLogger()
		runner, err := subscriber.NewRunner(
			db.Pool(t, func(c *pgxpool.Config) {
				c.ConnConfig.Tracer = &tracer{query: func(sql string) {
					if strings.Contains(sql, "pg_notify") {
						probing()
					}
				}}
			}),
			subscriber.RunnerConfig{
				Consumers:    []subscriber.ConsumerConfig{{Name: "push", Topic: subscriber.AllTopics}},
				PollInterval: never, ListenURL: url,
			}, logger)
		require.NoError(t, err)
		runner.SetListenTimes(time.Hour, 500*time.Millisecond, time.Millisecond)
		serve(t, runner, map[string]handler{"push": work})
		waitLine(t, logger, "event log listener is back")
		require.Equal(t, 2, proxy.Accepted())
		logtest.Append(t, db, "orders", 1)
		waitPosition(t, db, "push", 1)
		require.Empty(t, logger.Lines("gives up"))
	})
}

// A broken hook must not leave consumers behind that nobody wakes.
func TestPanicOfTheWakerEndsItsConsumersAndIsReported(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logger := &listenerPanics{Logger: logtest.NewLogger()}
	runner, err := subscriber.NewRunner(db.Pool(t), subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{{Name: "push"}, {Name: "audit"}}, PollInterval: never,
	}, logger)
	require.NoError(t, err)
	push, err := runner.Subscriber("push").Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	audit, err := runner.Subscriber("audit").Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	pid := waitListening(t, db, 0)
	logger.armed.Store(true)
	terminate(t, db, pid)
	err = receive(t, runner.Failed(), "the report")
	require.ErrorContains(t, err, "waker: panic")
	require.NotContains(t, err.Error(), "s3cr3t")
	receive(t, push, "the end of the channel")
	receive(t, audit, "the end of the channel")
	_, err = runner.Subscriber("push").Subscribe(t.Context(), "orders")
	require.ErrorContains(t, err, "closed")
	require.NoError(t, runner.Close())
}

type listenerPanics struct {
	*logtest.Logger
	armed atomic.Bool
}

func (l *listenerPanics) Debug(msg string, fields watermill.LogFields) {
	if l.armed.Load() {
		panic("s3cr3t")
	}
	l.Logger.Debug(msg, fields)
}

// The pool's BeforeConnect may be what knows the password.
func TestListenerConnectsAsThePoolDoes(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	var named atomic.Int64
	pool := db.Pool(t, func(c *pgxpool.Config) {
		database := c.ConnConfig.Database
		c.ConnConfig.Database = "nowhere"
		c.BeforeConnect = func(_ context.Context, config *pgx.ConnConfig) error {
			named.Add(1)
			config.Database = database
			return nil
		}
	})
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{{Name: "push", Topic: subscriber.AllTopics}}, PollInterval: never,
	}, nil)
	require.NoError(t, err)
	serve(t, runner, map[string]handler{"push": work})
	waitListening(t, db, 0)
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 1)
}
