package watch_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// envWorker makes the test binary a worker process on the database that it names; envTopic is what it subscribes to,
// and envPark its ParkAfter. Its handler does what the payload says: "block" blocks for ever, "fail" fails.
const (
	envWorker = "EVENTLOG_TEST_WORKER"
	envTopic  = "EVENTLOG_TEST_TOPIC"
	envPark   = "EVENTLOG_TEST_PARK"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(envWorker); url != "" {
		if err := runWorker(url, os.Getenv(envTopic)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	pgtest.Main(m)
}

// runWorker handles the events of consumers push and other until it is told to stop.
func runWorker(url, topic string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
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

// worker is such a process, seen from outside.
type worker struct {
	process *exec.Cmd
	lines   *bufio.Reader
}

func startWorker(t *testing.T, db *pgtest.DB, topic string, environment ...string) *worker {
	t.Helper()
	w := &worker{process: exec.Command(os.Args[0])}
	w.process.Env = append(os.Environ(), append(environment, envWorker+"="+db.URL(), envTopic+"="+topic)...)
	w.process.Stderr = os.Stderr
	out, err := w.process.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, w.process.Start())
	t.Cleanup(func() { _ = w.process.Process.Kill(); _ = w.process.Wait() })
	w.lines = bufio.NewReader(out)
	w.says(t, "running")
	return w
}

// says waits for the worker's next line.
func (w *worker) says(t *testing.T, line string) {
	t.Helper()
	got, err := w.lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, line+"\n", got)
}

func (w *worker) signal(t *testing.T, s os.Signal) {
	t.Helper()
	require.NoError(t, w.process.Process.Signal(s))
}

// stop ends the worker as a deploy would.
func (w *worker) stop(t *testing.T) {
	t.Helper()
	w.signal(t, syscall.SIGTERM)
	require.NoError(t, w.process.Wait())
}

var (
	push  = cursor.Key{Consumer: "push"}
	other = cursor.Key{Consumer: "other"}
)
