package subscriber_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// jam is four consumers on four connections, each of which holds one and asks for another.
func jam(t *testing.T, db *pgtest.DB, deadline time.Duration) (*subscriber.Runner, *logtest.Logger, map[string]handler) {
	t.Helper()
	logger := logtest.NewLogger()
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 4 })
	config := subscriber.RunnerConfig{PollInterval: 50 * time.Millisecond, MaxRounds: 4, StopBudget: 500 * time.Millisecond}
	handlers := map[string]handler{}
	for n := range 4 {
		name := fmt.Sprint("consumer-", n)
		config.Consumers = append(config.Consumers, subscriber.ConsumerConfig{
			Name: name, Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 10, AckDeadline: deadline,
			RetryDelay: 10 * time.Millisecond, RetryDelayCap: 500 * time.Millisecond,
		})
		handlers[name] = func(msg *message.Message) ([]*message.Message, error) {
			var one int
			if err := pool.QueryRow(msg.Context(), "select 1").Scan(&one); err != nil {
				return nil, err
			}
			return work(msg)
		}
	}
	runner, err := subscriber.NewRunner(pool, config, logger)
	require.NoError(t, err)
	return runner, logger, handlers
}

// The deadline of the message is what ends the wait for a connection that nobody will give back.
func TestHandlersThatWaitForEachOthersConnectionsGetOn(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	const events = 50
	logtest.Append(t, db, "orders", events)
	runner, logger, handlers := jam(t, db, 300*time.Millisecond)
	serve(t, runner, handlers)
	for name := range handlers {
		require.Eventually(t, func() bool { return position(t, db, name) == events }, time.Minute, 20*time.Millisecond)
		require.Equal(t, upTo(events), effects(t, db, name))
	}
	require.Equal(t, int64(4*events), jobCount(t, db))
	require.Empty(t, runner.Failed())
	t.Log(len(logger.Lines("event consumer round failed", "error")), "edges")
}

func TestCloseEndsAJam(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 100)
	var inside atomic.Int64
	runner, logger, handlers := jam(t, db, 30*time.Second)
	full := make(chan struct{})
	for name, h := range handlers {
		handlers[name] = func(msg *message.Message) ([]*message.Message, error) {
			if inside.Add(1) == 4 {
				close(full) // each has its connection now
			}
			select {
			case <-full:
			case <-msg.Context().Done():
				return nil, msg.Context().Err()
			}
			return h(msg)
		}
	}
	serve(t, runner, handlers)
	receive(t, full, "the jam")
	closed := make(chan error, 1)
	started := time.Now()
	go func() { closed <- runner.Close() }()
	require.NoError(t, receive(t, closed, "the end"))
	took := time.Since(started)
	t.Logf("closed in %v", took.Round(time.Millisecond))
	require.Less(t, took, 5*time.Second)
	require.Empty(t, logger.Lines("", "error"), "a stop is no failure")
}

func TestOneConnectionIsEnoughForAConsumerThatUsesItsUnit(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	const events = 100
	logtest.Append(t, db, "orders", events)
	logger := logtest.NewLogger()
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{{
			Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 10, RetryDelay: 10 * time.Millisecond,
		}},
		PollInterval: never,
	}, logger)
	require.NoError(t, err)
	var attempts atomic.Int64
	started := time.Now()
	serve(t, runner, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		if seqOf(msg) == 50 && attempts.Add(1) == 1 {
			return nil, errors.New("once")
		}
		return work(msg)
	}})
	waitListening(t, db, 0)
	waitPosition(t, db, "push", events)
	require.Less(t, time.Since(started), 4*time.Second, "a failure finds the connection free")
	require.Equal(t, upTo(events), effects(t, db, "push"))
	require.Equal(t, int64(events), jobCount(t, db))
	waitLine(t, logger, "event consumer recovered")
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures"))
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", events+1)
}

func TestWarningOfASmallPoolShowsTheFormula(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(context.Background(), "postgres://localhost/nowhere?pool_max_conns=4")
	require.NoError(t, err)
	defer pool.Close()
	logger := logtest.NewLogger()
	config := subscriber.RunnerConfig{}
	for n := range 3 {
		config.Consumers = append(config.Consumers, subscriber.ConsumerConfig{Name: fmt.Sprint("consumer-", n)})
	}
	_, err = subscriber.NewRunner(pool, config, logger)
	require.NoError(t, err)
	lines := logger.Lines("the pool is small", "info")
	require.Len(t, lines, 1)
	for field, value := range map[string]any{"consumers": 3, "max_rounds": 2, "pool_max_conns": 4, "wanted_max_conns": 5} {
		require.Equal(t, value, lines[0].Fields[field], field)
	}
	config.MaxRounds = 5
	_, err = subscriber.NewRunner(pool, config, logger)
	require.ErrorContains(t, err, "raise MaxConns to MaxRounds plus 2")
}
