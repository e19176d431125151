package watch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// envTopic is what a worker process subscribes to, and envPark its ParkAfter. Its handler does what the payload says:
// "block" blocks for ever, "fail" fails.
const (
	envTopic = "EVENTLOG_TEST_TOPIC"
	envPark  = "EVENTLOG_TEST_PARK"
)

func TestMain(m *testing.M) { logtest.Main(m, map[string]logtest.Program{"worker": runWorker}) }

// runWorker handles the events of consumers push and other until it is told to stop.
func runWorker(ctx context.Context, url string) error {
	topic := os.Getenv(envTopic)
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	consumer := subscriber.ConsumerConfig{
		Name: "push", Topic: topic, BatchSize: 10, RetryDelay: 10 * time.Millisecond, RetryDelayCap: 100 * time.Millisecond,
	}
	if os.Getenv(envPark) != "" {
		consumer.ParkAfter = 2
	}
	other := consumer
	other.Name, other.Topic, other.ParkAfter = "other", subscriber.AllTopics, 0
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{consumer, other}, PollInterval: 100 * time.Millisecond, StopBudget: time.Second,
	}, nil)
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	router.AddMiddleware(middleware.Round(nil))
	router.AddConsumerHandler("push", topic, runner.Subscriber("push"), func(m *message.Message) error {
		switch string(m.Payload) {
		case "block":
			fmt.Println("blocked")
			<-m.Context().Done()
			return m.Context().Err()
		case "fail":
			return errors.New("no")
		}
		return nil
	})
	router.AddConsumerHandler("other", subscriber.AllTopics, runner.Subscriber("other"), func(*message.Message) error { return nil })
	go func() {
		<-router.Running()
		fmt.Println("running")
	}()
	return router.Run(ctx)
}

// startWorker returns when it is running.
func startWorker(t *testing.T, db *pgtest.DB, topic string, environment ...string) *logtest.Process {
	t.Helper()
	w := logtest.Start(t, db, "worker", "worker", append(environment, envTopic+"="+topic)...)
	w.Says(t, "running")
	return w
}

var (
	push  = cursor.Key{Consumer: "push"}
	other = cursor.Key{Consumer: "other"}
)
