package subscriber_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

const (
	// envBound is the ServerBound of a worker that can be held.
	envBound = "EVENTLOG_TEST_BOUND"
	// envReading holds it in the middle of its first large read, too.
	envReading = "EVENTLOG_TEST_READING"
	// held is its instance's name, holds the topic whose events hold its handler.
	held, holds = "held", "hold"
	// stormOver is a notification of which it says when it has read it.
	stormOver = "the storm is over"
)

// runHeldWorker handles the events of consumer push. Where it is held it says so in a line, and goes on at the next
// line that it is sent.
func runHeldWorker(ctx context.Context, url string) error {
	bound, err := time.ParseDuration(os.Getenv(envBound))
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	wait := func(format string, args ...any) {
		fmt.Printf(format+"\n", args...)
		lines.Scan()
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
		return &heldConn{Conn: conn, hold: hold}, err
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

// heldConn holds whoever reads when it has read a lot, and tells of a notification.
type heldConn struct {
	net.Conn
	bytes int
	tail  []byte // of what it has read
	hold  func()
}

func (c *heldConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.tail = append(c.tail, b[:n]...)
	if bytes.Contains(c.tail, []byte(stormOver)) {
		fmt.Println(stormOver)
		c.tail = nil
	}
	c.tail = c.tail[max(0, len(c.tail)-len(stormOver)):]
	if c.bytes += n; c.bytes > 1<<20 {
		c.hold()
	}
	return n, err
}

func startHeld(t *testing.T, db *pgtest.DB, bound time.Duration, environment ...string) *logtest.Process {
	t.Helper()
	return logtest.Start(t, db, held, held, append(environment, envBound+"="+bound.String())...)
}
