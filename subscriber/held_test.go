package subscriber_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
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
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

const (
	// envBound makes a worker process one that can be held, and is its ServerBound.
	envBound = "EVENTLOG_TEST_BOUND"
	// envReading holds it in the middle of its first large read, too.
	envReading = "EVENTLOG_TEST_READING"
	// held is its instance's name, holds the topic whose events hold its handler.
	held, holds = "held", "hold"
)

// runHeldWorker handles the events of consumer push. Where it is held it says so in a line, and goes on at the next
// line that it is sent.
func runHeldWorker(url string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	bound, err := time.ParseDuration(os.Getenv(envBound))
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	var read atomic.Int64 // when
	wait := func(format string, args ...any) {
		fmt.Printf(format+"\n", args...)
		lines.Scan()
		// Until what was sent to it meanwhile is read; a poll reads as well.
		for time.Since(time.UnixMilli(read.Load())) < min(300*time.Millisecond, bound/30) {
			time.Sleep(5 * time.Millisecond)
		}
	}
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return err
	}
	hold := func() {}
	if os.Getenv(envReading) != "" {
		hold = sync.OnceFunc(func() { wait("reading") })
	}
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return &heldConn{Conn: conn, hold: hold, last: &read}, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{{
			Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 20, BatchBytes: 1 << 30, AckDeadline: bound * 2 / 3,
			RetryDelay: 10 * time.Millisecond, RetryDelayCap: 50 * time.Millisecond,
		}},
		PollInterval: bound / 10, ServerBound: bound, Instance: held,
	}, watermill.NewStdLogger(false, false))
	if err != nil {
		return err
	}
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	router.AddMiddleware(middleware.Round(nil))
	router.AddHandler("push", subscriber.AllTopics, runner.Subscriber("push"), "jobs", jobs, func(msg *message.Message) ([]*message.Message, error) {
		unit, _ := cursor.UnitFromContext(msg.Context())
		if unit.Event().Topic != holds {
			return numbered(msg)
		}
		tx, err := unit.Tx(msg.Context())
		if err != nil {
			return nil, err
		}
		var round string
		if err := tx.QueryRow(msg.Context(), "select current_setting('eventlog.unit')").Scan(&round); err != nil {
			return nil, err
		}
		produced, err := numbered(msg)
		if err != nil {
			return nil, err
		}
		wait("%s", strings.TrimPrefix(round, held+"/"))
		return produced, execute(msg, "select 1")
	})
	return router.Run(ctx)
}

// numbered writes an effect and returns a job that is the event's number.
func numbered(msg *message.Message) ([]*message.Message, error) {
	if err := effect(msg); err != nil {
		return nil, err
	}
	return []*message.Message{message.NewMessage(msg.UUID, fmt.Append(nil, seqOf(msg)))}, nil
}

// heldConn notes when it was read last, and holds whoever reads when it has read a lot.
type heldConn struct {
	net.Conn
	bytes int
	hold  func()
	last  *atomic.Int64
}

func (c *heldConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.last.Store(time.Now().UnixMilli())
	if c.bytes += n; c.bytes > 1<<20 {
		c.hold()
	}
	return n, err
}

// heldWorker is such a process, seen from outside.
type heldWorker struct {
	process *exec.Cmd
	in      io.Writer
	lines   chan string
}

func startHeld(t *testing.T, db *pgtest.DB, bound time.Duration, env ...string) *heldWorker {
	t.Helper()
	w := &heldWorker{process: exec.Command(os.Args[0]), lines: make(chan string, 100)}
	w.process.Env = append(append(os.Environ(), envWorker+"="+db.URL()+"&application_name="+held, envBound+"="+bound.String()), env...)
	w.process.Stderr = os.Stderr
	var err error
	w.in, err = w.process.StdinPipe()
	require.NoError(t, err)
	out, err := w.process.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, w.process.Start())
	var reading sync.WaitGroup
	reading.Go(func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			w.lines <- lines.Text()
		}
	})
	t.Cleanup(func() {
		_ = w.process.Process.Kill()
		reading.Wait()
		_ = w.process.Wait()
	})
	return w
}

// proceed lets it go on from where it is held.
func (w *heldWorker) proceed(t *testing.T) {
	t.Helper()
	_, err := io.WriteString(w.in, "go on\n")
	require.NoError(t, err)
}

func (w *heldWorker) freeze(t *testing.T) {
	t.Helper()
	require.NoError(t, w.process.Process.Signal(syscall.SIGSTOP))
}

func (w *heldWorker) thaw(t *testing.T) {
	t.Helper()
	require.NoError(t, w.process.Process.Signal(syscall.SIGCONT))
}
