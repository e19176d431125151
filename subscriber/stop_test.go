package subscriber_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func TestStopFinishesTheMessageInHandAndCommitsWhatWasAcked(t *testing.T) {
	t.Parallel()
	stops := map[string]func(s *service) error{
		"the router's Close":     func(s *service) error { return s.router.Close() },
		"the context of its Run": func(s *service) error { s.cancel(); return nil },
		"the runner's Close":     func(s *service) error { return s.runner.Close() },
		"all sides at once": func(s *service) error {
			var all sync.WaitGroup
			for range 2 {
				all.Go(func() { _ = s.runner.Close() })
				all.Go(func() { _ = s.router.Close() })
			}
			s.cancel()
			all.Wait()
			return nil
		},
	}
	for name, stop := range stops {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 5)
			entered, proceed := make(chan struct{}, 5), make(chan struct{})
			s := newService(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
				if seqOf(msg) == 2 {
					entered <- struct{}{}
					<-proceed
				}
				if err := msg.Context().Err(); err != nil {
					return nil, err
				}
				return work(msg)
			}})
			s.start()
			receive(t, entered, "the handler")

			stopped := make(chan error, 1)
			go func() {
				stopped <- stop(s)
			}()
			select {
			case <-stopped:
				// Cancelling returns at once; the others wait for the handler.
				require.Equal(t, "the context of its Run", name)
				stopped <- nil
			case <-time.After(100 * time.Millisecond):
			}
			close(proceed)
			require.NoError(t, receive(t, stopped, "the end of the stop"))
			require.NoError(t, receive(t, s.run, "the router's end"))
			// The message in hand is committed, and what came before the stop was heard of.
			at := position(t, db, "push")
			require.GreaterOrEqual(t, at, int64(2))
			require.Equal(t, upTo(at), effects(t, db, "push"))
			require.Equal(t, at, jobCount(t, db))
			for _, line := range s.logger.Lines("event consumer", "error") {
				require.Fail(t, "a stop is no failure", line)
			}
			require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures"))

			next := start(t, db, map[string]handler{"push": work})
			waitPosition(t, db, "push", 5)
			require.NoError(t, next.router.Close())
			require.Equal(t, upTo(5), effects(t, db, "push"))
			require.Equal(t, int64(5), jobCount(t, db))
		})
	}
}

func TestHandlerIsCutOffWhenTheStopBudgetIsOver(t *testing.T) {
	t.Parallel()
	handlers := map[string]func(msg *message.Message, end chan struct{}) error{
		"waiting":               func(msg *message.Message, _ chan struct{}) error { <-msg.Context().Done(); return msg.Context().Err() },
		"in a statement":        func(msg *message.Message, _ chan struct{}) error { return execute(msg, "select pg_sleep(60)") },
		"deaf to its context":   func(_ *message.Message, end chan struct{}) error { <-end; return nil },
		"deaf in a transaction": func(msg *message.Message, end chan struct{}) error { <-end; return effect(msg) },
	}
	for name, h := range handlers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 3)
			entered, end, late := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
				if err := effect(msg); err != nil {
					return nil, err
				}
				if seqOf(msg) == 2 {
					close(entered)
					err := h(msg, end)
					late <- err
					if err != nil {
						return nil, err
					}
				}
				return job(msg), nil
			}}, budget(200*time.Millisecond))
			receive(t, entered, "the handler")
			started := time.Now()
			require.NoError(t, s.runner.Close())
			require.Less(t, time.Since(started), 3*time.Second)
			require.Equal(t, int64(0), position(t, db, "push"))
			close(end)
			err := receive(t, late, "the handler's end")
			if name == "deaf in a transaction" {
				require.ErrorIs(t, err, cursor.ErrUnitEnded)
			}
			require.NoError(t, receive(t, s.run, "the router's end"))
			require.Empty(t, effects(t, db, "push"))
			require.Equal(t, int64(0), jobCount(t, db))
			require.Empty(t, s.logger.Lines("event consumer", "error"))
			require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures"))

			start(t, db, map[string]handler{"push": work})
			waitPosition(t, db, "push", 3)
			require.Equal(t, upTo(3), effects(t, db, "push"))
		})
	}
}

func TestRunnersCloseWaitsForHandlersThatTheRouterHasGivenUp(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	entered, proceed := make(chan struct{}), make(chan struct{})
	s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		if seqOf(msg) == 2 {
			close(entered)
			<-proceed
		}
		if err := msg.Context().Err(); err != nil {
			return nil, err
		}
		return work(msg)
	}}, budget(time.Minute), func(_ *subscriber.RunnerConfig, c *routerConfig) { c.CloseTimeout = time.Millisecond })
	receive(t, entered, "the handler")
	require.ErrorContains(t, s.router.Close(), "router close timeout")
	require.NoError(t, receive(t, s.run, "the router's end"))
	require.Equal(t, int64(0), position(t, db, "push"), "its round is open")
	closed := make(chan error, 1)
	go func() { closed <- s.runner.Close() }()
	close(proceed)
	require.NoError(t, receive(t, closed, "the runner's end"))
	require.Equal(t, int64(2), position(t, db, "push"))
	require.Equal(t, upTo(2), effects(t, db, "push"))
	require.Equal(t, int64(2), jobCount(t, db))
}

func TestCloseReturnsAtOnceWhereNothingIsUnderWay(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	config := subscriber.ConsumerConfig{Name: "push", Start: cursor.FromBeginning(), RetryDelay: time.Minute}
	quick := func(sub *subscriber.Subscriber) {
		t.Helper()
		started := time.Now()
		require.NoError(t, sub.Close())
		require.NoError(t, sub.Close())
		require.Less(t, time.Since(started), time.Second)
	}
	fresh := func() *subscriber.Subscriber {
		sub, err := subscriber.New(db.Pool(t), config, nil)
		require.NoError(t, err)
		return sub
	}

	quick(fresh()) // never subscribed
	_, err := func() (<-chan *message.Message, error) {
		sub := fresh()
		quick(sub)
		return sub.Subscribe(t.Context(), "orders")
	}()
	require.ErrorContains(t, err, "closed")

	sub := fresh() // nobody reads the channel
	messages, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	quick(sub)
	_, open := <-messages
	require.False(t, open)

	sub = fresh() // while a failed event waits for its next attempt
	messages, err = sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	receive(t, messages, "a message").Nack()
	require.Eventually(t, func() bool {
		return pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures") == 1
	}, 20*time.Second, 5*time.Millisecond)
	quick(sub)

	sub = fresh() // while it has nothing to do
	_, err = sub.Subscribe(t.Context(), "nothing")
	require.NoError(t, err)
	quick(sub)

	// A context that ends does the same without a Close.
	ctx, cancel := context.WithCancel(t.Context())
	sub = fresh()
	messages, err = sub.Subscribe(ctx, "nothing")
	require.NoError(t, err)
	cancel()
	_, open = <-messages
	require.False(t, open)
}

func TestSubscriptionsCanComeAndGo(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	runner, err := subscriber.NewRunner(db.Pool(t), subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{{Name: "a", Start: cursor.FromBeginning()}, {Name: "b", Start: cursor.FromBeginning()}},
	}, nil)
	require.NoError(t, err)
	logtest.Append(t, db, "orders", 1)
	for range 3 {
		for _, name := range []string{"a", "b"} {
			ctx, cancel := context.WithCancel(t.Context())
			messages, err := runner.Subscriber(name).Subscribe(ctx, "orders")
			require.NoError(t, err)
			receive(t, messages, "a message").Nack()
			cancel()
			for range messages {
				t.Log("one more message before the end")
			}
		}
	}
	require.NoError(t, runner.Close())
	require.Empty(t, runner.Failed(), "nothing ended unexpectedly")
}

func TestPanicOutsideAHandlerIsReported(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 1)
	var armed atomic.Bool
	logger := panickingLogger{logtest.NewLogger(), &armed}
	armed.Store(true)
	runner, err := subscriber.NewRunner(db.Pool(t), subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{{Name: "push", Start: cursor.FromBeginning()}},
	}, logger)
	require.NoError(t, err)
	messages, err := runner.Subscriber("push").Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	receive(t, messages, "a message").Nack() // logging the failure panics
	err = receive(t, runner.Failed(), "the report")
	require.ErrorContains(t, err, "panic outside a handler")
	require.NotContains(t, err.Error(), "s3cr3t")
	_, open := <-messages
	require.False(t, open)
	require.NoError(t, runner.Close())
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from pg_stat_activity where state like 'idle in transaction%' and datname = current_database()"))
}
