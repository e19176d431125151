package middleware_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// run handles three events by a router and returns when all are passed.
func run(t *testing.T, setUp func(router *message.Router, sub message.Subscriber)) *logtest.Logger {
	t.Helper()
	db := logtest.New(t)
	logger := logtest.NewLogger()
	runner, err := subscriber.NewRunner(db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 4 }), subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{{
			Name: "push", Start: cursor.FromBeginning(), RetryDelay: time.Millisecond, RetryDelayCap: time.Millisecond,
		}},
	}, logger)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	require.NoError(t, err)
	setUp(router, runner.Subscriber("push"))
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	<-router.Running()
	logtest.Append(t, db, "orders", 3)
	require.Eventually(t, func() bool {
		return logtest.Position(t, db, cursor.Key{Consumer: "push", Topic: "orders"}) == 3
	}, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, router.Close())
	require.NoError(t, <-ended)
	return logger
}

// failing is a publisher of somebody else that fails at first.
type failing struct {
	left      atomic.Int64
	published atomic.Int64
}

func (p *failing) Publish(_ string, messages ...*message.Message) error {
	if p.left.Add(-1) >= 0 {
		return errors.New("the broker is away")
	}
	p.published.Add(int64(len(messages)))
	return nil
}

func (p *failing) Close() error { return nil }

func echo(msg *message.Message) ([]*message.Message, error) {
	return []*message.Message{msg.Copy()}, nil
}

func TestForeignPublisherThatFailsIsOneLine(t *testing.T) {
	t.Parallel()
	pub := &failing{}
	pub.left.Store(50)
	logger := run(t, func(router *message.Router, sub message.Subscriber) {
		router.AddMiddleware(middleware.Round(nil))
		router.AddPublisherDecorators(middleware.QuietPublisher)
		router.AddHandler("push", "orders", sub, "jobs", pub, echo)
	})
	require.Equal(t, int64(3), pub.published.Load())
	lines := logger.Lines("", "error")
	require.Len(t, lines, 1)
	require.ErrorContains(t, lines[0].Err, "the broker is away")
	require.Len(t, logger.Lines("event consumer recovered"), 1)
}

func TestPublisherThatTheHandlerCallsItselfReturnsItsError(t *testing.T) {
	t.Parallel()
	pub := &failing{}
	pub.left.Store(1)
	quiet, err := middleware.QuietPublisher(pub)
	require.NoError(t, err)
	var seen atomic.Int64
	run(t, func(router *message.Router, sub message.Subscriber) {
		router.AddMiddleware(middleware.Round(nil))
		router.AddConsumerHandler("push", "orders", sub, func(msg *message.Message) error {
			out := msg.CopyWithContext()
			if err := quiet.Publish("elsewhere", out); err != nil {
				seen.Add(1) // and lives with it
			}
			return nil
		})
	})
	require.Equal(t, int64(1), seen.Load())
	require.Equal(t, int64(2), pub.published.Load())
}

func TestMessagesOfOtherSubscribersPassUntouched(t *testing.T) {
	t.Parallel()
	handled := errors.New("handled")
	h := middleware.Round(nil)(func(*message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("out", nil)}, handled
	})
	produced, err := h(message.NewMessage("in", nil))
	require.Equal(t, handled, err)
	require.Len(t, produced, 1)
	require.Equal(t, context.Background(), produced[0].Context())

	// In one router with ours, too.
	channel := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, nil)
	require.NoError(t, channel.Publish("other", message.NewMessage("1", nil)))
	other := make(chan string, 1)
	run(t, func(router *message.Router, sub message.Subscriber) {
		router.AddMiddleware(middleware.Round(nil))
		router.AddConsumerHandler("push", "orders", sub, func(*message.Message) error { return nil })
		router.AddConsumerHandler("other", "other", channel, func(msg *message.Message) error {
			other <- msg.UUID
			return nil
		})
	})
	require.Equal(t, "1", <-other)
}

func TestPartsCanBeHadAlone(t *testing.T) {
	t.Parallel()
	_, err := middleware.Recover(func(*message.Message) ([]*message.Message, error) { panic("s3cr3t") })(message.NewMessage("1", nil))
	var panicked *middleware.PanicError
	require.ErrorAs(t, err, &panicked)
	require.Equal(t, "string", panicked.Kind)
	require.Contains(t, panicked.Place, "round_test.go")
	require.NotContains(t, err.Error(), "s3cr3t")
	require.Equal(t, "internal", cursor.ErrorType(err))

	// Capture alone, with the handler's own recoverer inside.
	logger := run(t, func(router *message.Router, sub message.Subscriber) {
		var attempts atomic.Int64
		router.AddMiddleware(middleware.Capture(logtest.NewLogger()), middleware.Recover, middleware.Carry)
		router.AddConsumerHandler("push", "orders", sub, func(*message.Message) error {
			if attempts.Add(1) < 3 {
				panic("s3cr3t")
			}
			return nil
		})
	})
	require.Len(t, logger.Lines("", "error"), 1)
}

func TestCarryGivesTheUnitToWhatIsReturnedWhateverMiddlewaresInsideDo(t *testing.T) {
	t.Parallel()
	var carried atomic.Int64
	run(t, func(router *message.Router, sub message.Subscriber) {
		router.AddMiddleware(middleware.Round(nil))
		router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel() // as the stock Timeout middleware leaves a cancelled context behind
				msg.SetContext(ctx)
				return h(msg)
			}
		})
		router.AddPublisherDecorators(func(pub message.Publisher) (message.Publisher, error) {
			return counting{pub, &carried}, nil
		})
		router.AddHandler("push", "orders", sub, "jobs", &failing{}, echo)
	})
	require.Equal(t, int64(3), carried.Load())
}

type counting struct {
	message.Publisher
	carried *atomic.Int64
}

func (c counting) Publish(topic string, messages ...*message.Message) error {
	for _, m := range messages {
		if unit, ok := cursor.UnitFromContext(m.Context()); ok && unit.Err() == nil && m.Context().Err() == nil {
			c.carried.Add(1)
		}
	}
	return c.Publisher.Publish(topic, messages...)
}
