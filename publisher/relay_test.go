package publisher_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// broker takes messages, unless it is told to fail.
type broker struct {
	mu    sync.Mutex
	calls []string // topic and ids of each call
	took  []*message.Message
	fail  func() error
}

func (b *broker) Publish(topic string, messages ...*message.Message) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fail != nil {
		if err := b.fail(); err != nil {
			return err
		}
	}
	ids := make([]string, len(messages))
	for i, m := range messages {
		ids[i] = m.UUID
	}
	b.calls = append(b.calls, topic+": "+strings.Join(ids, " "))
	b.took = append(b.took, messages...)
	return nil
}

func (b *broker) Close() error { return errors.New("a relay does not close the broker's publisher") }

func (b *broker) heard() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string(nil), b.calls...)
}

func newRelay(t *testing.T, pub message.Publisher, config publisher.RelayConfig) *publisher.Relay {
	t.Helper()
	relay, err := publisher.AtCommit(pub, config)
	require.NoError(t, err)
	return relay
}

// runRelay is run with a relay for the handler's publisher.
func (s *service) runRelay(t *testing.T, relay *publisher.Relay, handle message.HandlerFunc) {
	t.Helper()
	consumer, err := subscriber.New(s.pool, subscriber.ConsumerConfig{
		Name: "push", Topic: "orders", Start: cursor.FromBeginning(), RetryDelay: 5 * time.Millisecond, RetryDelayCap: 20 * time.Millisecond,
	}, s.consumer)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, s.router)
	require.NoError(t, err)
	router.AddMiddleware(middleware.Round(s.router))
	router.AddHandler("push", "orders", consumer, "out", relay, handle)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	s.stop = sync.OnceFunc(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-ended)
	})
	t.Cleanup(s.stop)
}

func two(msg *message.Message) ([]*message.Message, error) {
	return message.Messages{message.NewMessage("a", msg.Payload), message.NewMessage("b", msg.Payload)}, nil
}

func TestRelayedMessagesGoOutInOneCallWithIdsOfTheirOwn(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 2)
	b := &broker{}
	relay := newRelay(t, b, publisher.RelayConfig{})
	s.runRelay(t, relay, func(msg *message.Message) ([]*message.Message, error) {
		own := message.NewMessage("own", msg.Payload)
		own.SetContext(msg.Context())
		own.Metadata.Set("k", "v")
		err := relay.Publish("other", own)
		own.Payload[0], own.Metadata = 'X', nil // it was taken as it was
		msg.Payload[0] = 'Y'
		if err != nil {
			return nil, err
		}
		return two(msg)
	})
	s.passed(t, 2)
	s.stop()
	begin := "public.event_log/push@orders/"
	require.Equal(t, []string{
		"other: " + begin + "1/1 " + begin + "2/1",
		"out: " + begin + "1/2 " + begin + "1/3 " + begin + "2/2 " + begin + "2/3",
	}, b.heard())
	require.Equal(t, "1", string(b.took[0].Payload))
	require.Equal(t, message.Metadata{"k": "v"}, b.took[0].Metadata)
	require.Equal(t, "orders", message.SubscribeTopicFromCtx(b.took[0].Context()), "what the context carried")
}

func TestRelayedMessagesAreRepeatedWithTheSameIds(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 1)
	s.failThrice(t, "commit")
	b := &broker{}
	s.runRelay(t, newRelay(t, b, publisher.RelayConfig{Source: "shop/eu"}), two)
	s.passed(t, 1)
	s.stop()
	const call = "out: shop%2Feu/push@orders/1/1 shop%2Feu/push@orders/1/2"
	require.Equal(t, []string{call, call, call, call}, b.heard())
}

// What fails before the end of a round is never heard of outside.
func TestNothingGoesOutOfARoundThatFailsBefore(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 1)
	s.failThrice(t, "move")
	b := &broker{}
	s.runRelay(t, newRelay(t, b, publisher.RelayConfig{}), two)
	s.passed(t, 1)
	s.stop()
	require.Len(t, b.heard(), 1)
}

func TestBrokersErrorRollsTheRoundBack(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 1)
	away := errors.New("the broker is away")
	failures := 3
	b := &broker{fail: func() error {
		if failures--; failures >= 0 {
			return away
		}
		return nil
	}}
	s.runRelay(t, newRelay(t, b, publisher.RelayConfig{}), two)
	s.passed(t, 1)
	s.stop()
	lines := s.consumer.Lines("event consumer round failed", "error")
	require.Len(t, lines, 1)
	require.ErrorIs(t, lines[0].Err, away)
	require.ErrorContains(t, lines[0].Err, `relay 2 messages to "out"`)
	require.Len(t, b.heard(), 1)
}

func TestPanicOfTheBrokersClientFailsTheRound(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 1)
	panics := 2
	b := &broker{fail: func() error {
		if panics--; panics >= 0 {
			panic("secret")
		}
		return nil
	}}
	s.runRelay(t, newRelay(t, b, publisher.RelayConfig{}), two)
	s.passed(t, 1)
	s.stop()
	lines := s.consumer.Lines("event consumer round failed", "error")
	require.Len(t, lines, 1)
	require.Equal(t, "internal", lines[0].Fields["error.type"])
	require.NotContains(t, lines[0].String(), "secret")
	require.Len(t, b.heard(), 1)
}

func TestIdGoesWhereTheBrokerLooksForIt(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 1)
	b := &broker{}
	s.runRelay(t, newRelay(t, b, publisher.RelayConfig{
		SetID: func(msg *message.Message, id string) { msg.Metadata.Set("dedup", id) },
	}), two)
	s.passed(t, 1)
	s.stop()
	require.Equal(t, []string{"out: a b"}, b.heard())
	require.Equal(t, "public.event_log/push@orders/1/2", b.took[1].Metadata.Get("dedup"))
}

func TestRelayWithoutAUnitIsRefused(t *testing.T) {
	t.Parallel()
	b := &broker{}
	relay := newRelay(t, b, publisher.RelayConfig{})
	require.ErrorIs(t, relay.Publish("out", message.NewMessage("1", nil)), cursor.ErrNoUnit)
	require.NoError(t, relay.Close())
	require.Empty(t, b.heard())
}

func TestRelayConfigNamesItsFaults(t *testing.T) {
	t.Parallel()
	_, err := publisher.AtCommit(nil, publisher.RelayConfig{})
	require.ErrorContains(t, err, "missing publisher")
	_, err = publisher.AtCommit(newJobs(t, nil), publisher.RelayConfig{})
	require.ErrorContains(t, err, "use it as it is")
}
