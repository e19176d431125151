// Package conformance_test runs Watermill's own suite against this Pub/Sub. It is a package of its own because
// some of the suite's tests leave subscriptions and goroutines behind, and the others look for such.
package conformance_test

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// pubSub makes what Watermill's suite asks for: a publisher and a subscriber on one database, many at once.
type pubSub struct {
	db    *pgtest.DB
	start cursor.Start
}

func (p pubSub) group(t *testing.T, consumer string) (message.Publisher, message.Subscriber) {
	pool := func(size string) *pgxpool.Pool {
		pool, err := pgxpool.New(context.Background(), p.db.URL()+"&pool_max_conns="+size)
		require.NoError(t, err)
		return pool
	}
	reading, writing := pool("4"), pool("2")
	runner, err := subscriber.NewRunner(reading, subscriber.RunnerConfig{
		Consumers:  []subscriber.ConsumerConfig{{Name: consumer, Start: p.start, RetryDelay: 10 * time.Millisecond, RetryDelayCap: 10 * time.Millisecond}},
		StopBudget: 100 * time.Millisecond, // some tests close with a message in hand
	}, nil)
	require.NoError(t, err)
	pub, err := publisher.NewEventLog(writing, publisher.EventLogConfig{})
	require.NoError(t, err)
	return closingPublisher{pub, writing}, closingSubscriber{runner.Subscriber(consumer), reading}
}

func (p pubSub) single(t *testing.T) (message.Publisher, message.Subscriber) {
	return p.group(t, "test")
}

// The suite makes many publishers and subscribers: each takes its pool with it.
type closingSubscriber struct {
	*subscriber.Subscriber
	pool *pgxpool.Pool
}

func (c closingSubscriber) Close() error {
	err := c.Subscriber.Close()
	c.pool.Close()
	return err
}

type closingPublisher struct {
	*publisher.EventLog
	pool *pgxpool.Pool
}

func (c closingPublisher) Close() error {
	err := c.EventLog.Close()
	c.pool.Close()
	return err
}

var features = tests.Features{
	ConsumerGroups:      true,
	GuaranteedOrder:     true,
	Persistent:          true,
	ExactlyOnceDelivery: false, // with true, the suite leaves out two tests
}

func TestWatermillConformance(t *testing.T) {
	p := pubSub{db: logtest.New(t)}
	tests.TestPubSub(t, features, p.single, p.group)
}

func TestWatermillConformanceExactlyOnce(t *testing.T) {
	p := pubSub{db: logtest.New(t)}
	features := features
	features.ExactlyOnceDelivery = true
	features.ForceShort = true // fewer messages, the same tests
	tests.TestPubSub(t, features, p.single, p.group)
}

func TestWatermillConformanceFromTheBeginning(t *testing.T) {
	p := pubSub{db: logtest.New(t), start: cursor.FromBeginning()}
	features := features
	features.NewSubscriberReceivesOldMessages = true
	features.ForceShort = true
	// Here the suite takes every new subscriber for a consumer of its own.
	single := func(t *testing.T) (message.Publisher, message.Subscriber) {
		return p.group(t, watermill.NewUUID())
	}
	tests.TestPubSub(t, features, single, p.group)
}
