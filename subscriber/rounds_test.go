package subscriber_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func TestEachEventHasItsEffectAndJobOnce(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 25)
	s := start(t, db, map[string]handler{"push": work, "audit": work})
	logtest.Append(t, db, "orders", 15)
	for _, consumer := range []string{"push", "audit"} {
		waitPosition(t, db, consumer, 40)
		require.Equal(t, upTo(40), effects(t, db, consumer))
	}
	require.Equal(t, int64(80), jobCount(t, db))
	require.Empty(t, s.logger.Lines("", "error"))
}

// Each kind of failure undoes its whole round, is one line in the log, and costs nothing once it is over.
func TestFailureUndoesTheWholeRoundAndIsLoggedOnce(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t"
	failures := map[string]struct {
		fail      func(msg *message.Message) error
		errorType string
	}{
		"error":        {func(*message.Message) error { return errors.New("no") }, "_OTHER"},
		"typed error":  {func(*message.Message) error { return typedError{} }, "my_type"},
		"panic error":  {func(*message.Message) error { panic(errors.New(secret)) }, "internal"},
		"panic string": {func(*message.Message) error { panic(secret) }, "internal"},
		"panic struct": {func(*message.Message) error { panic(struct{ token string }{secret}) }, "internal"},
		"nil panic":    {func(*message.Message) error { panic(nil) }, "internal"},
		"nil dereference": {func(*message.Message) error {
			var m *message.Message
			m.UUID = secret
			return nil
		}, "internal"},
		"Goexit":                {func(*message.Message) error { runtime.Goexit(); return nil }, "internal"},
		"panic after an ack":    {func(msg *message.Message) error { msg.Ack(); panic(secret) }, "internal"},
		"error after an ack":    {func(msg *message.Message) error { msg.Ack(); return errors.New("no") }, "_OTHER"},
		"nack":                  {func(msg *message.Message) error { msg.Nack(); return nil }, "_OTHER"},
		"missed deadline":       {func(msg *message.Message) error { <-msg.Context().Done(); return nil }, "timeout"},
		"failed statement":      {func(msg *message.Message) error { return execute(msg, "select 1/0") }, "22012"},
		"swallowed SQL error":   {func(msg *message.Message) error { _ = execute(msg, "select 1/0"); return nil }, "22012"},
		"terminated connection": {func(msg *message.Message) error { return execute(msg, "select pg_terminate_backend(pg_backend_pid())") }, "57P01"},
	}
	for name, f := range failures {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 6)
			var attempts atomic.Int64
			var seen atomic.Int64 // the highest attempt number the unit told
			s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
				if seqOf(msg) == 4 {
					unit, _ := cursor.UnitFromContext(msg.Context())
					seen.Store(int64(unit.Attempt()))
				}
				produced, err := work(msg)
				if err != nil || seqOf(msg) != 4 || attempts.Add(1) > 3 {
					return produced, err
				}
				return produced, f.fail(msg)
			}}, consumers(func(c *subscriber.ConsumerConfig) {
				if name == "missed deadline" {
					c.AckDeadline = 200 * time.Millisecond
				}
			}))
			waitPosition(t, db, "push", 6)
			require.Equal(t, upTo(6), effects(t, db, "push"))
			require.Equal(t, int64(6), jobCount(t, db))
			require.Equal(t, int64(4), attempts.Load())
			require.Equal(t, int64(4), seen.Load())
			require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures"))

			recovered := s.logger.Wait(t, t.Context(), 1, "event consumer recovered")
			require.Len(t, recovered, 1)
			require.Equal(t, int64(4), recovered[0].Fields["seq"])
			lines := s.logger.Lines("", "error")
			require.Len(t, lines, 1, "%v", lines)
			require.Equal(t, "event consumer round failed", lines[0].Msg)
			require.Equal(t, "push", lines[0].Fields["consumer"])
			require.Equal(t, int64(4), lines[0].Fields["seq"])
			require.Equal(t, f.errorType, lines[0].Fields["error.type"])
			for _, line := range s.logger.Lines("") {
				require.NotContains(t, line.String(), secret)
			}
		})
	}
}

type typedError struct{}

func (typedError) Error() string     { return "typed" }
func (typedError) ErrorType() string { return "my_type" }

func execute(msg *message.Message, statement string) error {
	unit, _ := cursor.UnitFromContext(msg.Context())
	tx, err := unit.Tx(msg.Context())
	if err != nil {
		return err
	}
	_, err = tx.Exec(msg.Context(), statement)
	return err
}

func TestEventsBeforeAFailingOneAreCommittedAndThoseBehindItWait(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 10)
	var mended atomic.Bool
	var delivered []int64
	failed := make(chan struct{}, 1000)
	s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		delivered = append(delivered, seqOf(msg))
		if err := effect(msg); err != nil {
			return nil, err
		}
		if seqOf(msg) == 4 && !mended.Load() {
			failed <- struct{}{}
			return nil, errors.New("not yet")
		}
		return job(msg), nil
	}, "healthy": work})
	for range 20 {
		receive(t, failed, "another attempt")
	}
	require.Equal(t, int64(3), position(t, db, "push"))
	waitPosition(t, db, "healthy", 10)
	require.Equal(t, int64(4), pgtest.Value[int64](t, db, "select seq from event_consumer_failures"))
	require.GreaterOrEqual(t, pgtest.Value[int32](t, db, "select attempts from event_consumer_failures"), int32(15))
	mended.Store(true)
	waitPosition(t, db, "push", 10)
	require.Equal(t, upTo(10), effects(t, db, "push"))
	require.NoError(t, s.router.Close())
	// 1 to 4, undone; 1 to 3, committed; 4 alone until it passes.
	require.Equal(t, []int64{1, 2, 3, 4, 1, 2, 3, 4, 4}, delivered[:9])
	require.Equal(t, []int64{4, 5, 6, 7, 8, 9, 10}, delivered[len(delivered)-7:])
	for _, seq := range delivered[7 : len(delivered)-6] {
		require.Equal(t, int64(4), seq)
	}
}

func TestWakesDoNotHurryAFailingEvent(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 1)
	var attempts atomic.Int64
	patient := consumers(func(c *subscriber.ConsumerConfig) { c.RetryDelay, c.RetryDelayCap = time.Minute, time.Minute })
	start(t, db, map[string]handler{"push": func(*message.Message) ([]*message.Message, error) {
		attempts.Add(1)
		return nil, errors.New("never")
	}}, patient)
	require.Eventually(t, func() bool {
		return pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures") == 1
	}, 20*time.Second, 5*time.Millisecond)
	for range 100 {
		db.Exec(t, "notify event_log")
	}
	logtest.Append(t, db, "orders", 1)

	// Another process finds the same spacing in the row: its first round is told to wait as well.
	other := start(t, db, map[string]handler{"push": work, "witness": work}, patient)
	waitPosition(t, db, "witness", 2)
	require.NoError(t, other.router.Close())
	require.Equal(t, int64(0), position(t, db, "push"))
	require.Equal(t, int64(1), attempts.Load())
}

func TestEachAttemptHasAFreshMessage(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, `insert into event_outbox (topic, payload, metadata) values ('orders', '\x31', '{"k": "v"}')`)
	var attempts int
	messages := map[*message.Message]bool{}
	s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		attempts++
		messages[msg] = true
		if string(msg.Payload) != "1" || len(msg.Metadata) != 1 || msg.Metadata["k"] != "v" {
			return nil, fmt.Errorf("attempt %d: changed message %q %v", attempts, msg.Payload, msg.Metadata)
		}
		msg.Payload[0] = 'x'
		msg.Metadata["k"], msg.Metadata["l"] = "changed", "added"
		if attempts < 4 {
			return nil, errors.New("again")
		}
		return nil, nil
	}})
	waitPosition(t, db, "push", 1)
	require.NoError(t, s.router.Close())
	require.Equal(t, 4, attempts)
	require.Len(t, messages, 4)
}

func TestConsumerOfATopicReachesTheHead(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "other", 30)
	logtest.Append(t, db, "mine", 1)
	logtest.Append(t, db, "other", 30)
	s := newService(t, db, map[string]handler{"push": work}, consumers(func(c *subscriber.ConsumerConfig) { c.Topic = "" }))
	s.router.AddHandler("mine", "mine", s.runner.Subscriber("push"), "jobs", s.jobs, work)
	s.start()
	key := cursor.Key{Consumer: "push", Topic: "mine"}
	require.Eventually(t, func() bool { return logtest.Position(t, db, key) == 61 }, 20*time.Second, 5*time.Millisecond)
	require.Equal(t, []int64{31}, pgtest.Column[int64](t, db, "select matched_seq from event_consumer_cursors where topic = 'mine'"))
	waitPosition(t, db, "push", 61) // the other handler's cursor, of all topics
}

func TestRouterWithoutTheMiddlewareIsReported(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	logger := logtest.NewLogger()
	runner, err := subscriber.NewRunner(db.Pool(t), subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{{Name: "push", Start: cursor.FromBeginning()}}}, logger)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	require.NoError(t, err)
	router.AddConsumerHandler("push", "orders", runner.Subscriber("push"), func(*message.Message) error { return nil })
	ended := make(chan error, 1)
	go func() { ended <- router.Run(t.Context()) }()

	err = receive(t, runner.Failed(), "the report")
	require.ErrorIs(t, err, subscriber.ErrNoMiddleware)
	require.ErrorContains(t, err, "AddMiddleware")
	require.NoError(t, receive(t, ended, "the router's end"), "its only subscription has ended")
	require.Equal(t, int64(0), logtest.Position(t, db, cursor.Key{Consumer: "push", Topic: "orders"}))
	require.Len(t, logger.Lines("event consumer ended", "error"), 1)
}

func TestRouterWithoutTheMiddlewareMayBeConsentedTo(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	runner, err := subscriber.NewRunner(db.Pool(t), subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{
		{Name: "push", Start: cursor.FromBeginning(), WithoutMiddleware: true},
	}}, nil)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddConsumerHandler("push", "orders", runner.Subscriber("push"), func(*message.Message) error { return nil })
	go router.Run(t.Context())
	require.Eventually(t, func() bool {
		return logtest.Position(t, db, cursor.Key{Consumer: "push", Topic: "orders"}) == 3
	}, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, router.Close())
}

func TestMiddlewareEnteredTwiceFailsTheRound(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 1)
	s := newService(t, db, map[string]handler{"push": work})
	s.router.AddMiddleware(middleware.Round(s.logger))
	s.start()
	lines := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")
	require.ErrorIs(t, lines[0].Err, cursor.ErrEnteredTwice)
	require.Equal(t, int64(0), position(t, db, "push"))
}

func TestDirectSubscribeNeedsNoMiddleware(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 2)
	sub, err := subscriber.New(db.Pool(t), subscriber.ConsumerConfig{Name: "push", Start: cursor.FromBeginning()}, nil)
	require.NoError(t, err)
	messages, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	for range 2 {
		msg := receive(t, messages, "a message")
		require.NoError(t, effect(msg))
		ctx := msg.Context()
		msg.Ack()
		receive(t, ctx.Done(), "the end of the message's context")
	}
	require.Eventually(t, func() bool {
		return logtest.Position(t, db, cursor.Key{Consumer: "push", Topic: "orders"}) == 2
	}, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, sub.Close())
	_, open := <-messages
	require.False(t, open)
	require.Equal(t, []int64{1, 2}, effects(t, db, "push"))
}

func TestCommitThatFailsThreeTimesLeavesOneJobPerEvent(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "create sequence commits")
	db.Exec(t, `create function fail_three_times() returns trigger language plpgsql as $$
		begin
			if nextval('commits') <= 3 then raise exception 'not yet' using errcode = 'P0042'; end if;
			return null;
		end $$`)
	db.Exec(t, `create constraint trigger fail_three_times after update on event_consumer_cursors
		deferrable initially deferred for each row execute function fail_three_times()`)
	logtest.Append(t, db, "orders", 8)
	s := start(t, db, map[string]handler{"push": work})
	waitPosition(t, db, "push", 8)
	require.Equal(t, upTo(8), effects(t, db, "push"))
	require.Equal(t, int64(8), jobCount(t, db))
	recovered := s.logger.Wait(t, t.Context(), 1, "event consumer recovered")
	require.Equal(t, 3, recovered[0].Fields["attempts"])
	lines := s.logger.Lines("", "error")
	require.Equal(t, "P0042", lines[0].Fields["error.type"])
}

func TestEventWhoseJobCannotBeWrittenIsFoundByHalving(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, "alter table watermill_jobs add constraint poison check (payload::text <> '6')")
	logtest.Append(t, db, "orders", 10)
	s := start(t, db, map[string]handler{"push": work})
	waitPosition(t, db, "push", 5)
	require.Eventually(t, func() bool {
		named := pgtest.Column[int64](t, db, "select coalesce(seq, 0) from event_consumer_failures where error_type = '23514'")
		return len(named) == 1 && named[0] == 6
	}, 20*time.Second, 5*time.Millisecond)
	require.Equal(t, upTo(5), effects(t, db, "push"))
	db.Exec(t, "alter table watermill_jobs drop constraint poison")
	waitPosition(t, db, "push", 10)
	require.Equal(t, upTo(10), effects(t, db, "push"))
	require.Equal(t, int64(10), jobCount(t, db))
	for _, line := range s.logger.Lines("", "error") {
		require.True(t, strings.HasPrefix(line.Msg, "event consumer round failed"), line)
	}
}
