package subscriber_test

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// service is a program as a user would write it: a router whose consumers write effects and return jobs.
type service struct {
	t      *testing.T
	db     *pgtest.DB
	pool   *pgxpool.Pool
	logger *logtest.Logger
	runner *subscriber.Runner
	router *message.Router
	jobs   *publisher.Jobs
	run    chan error // Run's result
	cancel context.CancelFunc
}

// handler is a consumer's handler; what it returns goes to topic jobs.
type handler = message.HandlerFunc

type option func(*subscriber.RunnerConfig, *message.RouterConfig)

func poll(d time.Duration) option {
	return func(c *subscriber.RunnerConfig, _ *message.RouterConfig) { c.PollInterval = d }
}

func budget(d time.Duration) option {
	return func(c *subscriber.RunnerConfig, _ *message.RouterConfig) { c.StopBudget = d }
}

func consumers(change func(*subscriber.ConsumerConfig)) option {
	return func(c *subscriber.RunnerConfig, _ *message.RouterConfig) {
		for i := range c.Consumers {
			change(&c.Consumers[i])
		}
	}
}

// newDB has a table for effects, without a unique key so that duplicates can be counted, and one for jobs.
func newDB(t *testing.T) *pgtest.DB {
	t.Helper()
	db := logtest.New(t)
	prepareDB(t, db)
	return db
}

func prepareDB(t *testing.T, db *pgtest.DB) {
	t.Helper()
	db.Exec(t, "create table effects (consumer text, seq bigint)")
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(t, err)
	require.NoError(t, jobs.Initialize(t.Context(), db.Conn(t), "jobs"))
}

// newService builds one that is not running yet; its consumers start at the beginning of every topic.
func newService(t *testing.T, db *pgtest.DB, handlers map[string]handler, options ...option) *service {
	t.Helper()
	s := &service{t: t, db: db, logger: logtest.NewLogger(), run: make(chan error, 1)}
	s.pool = db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 8 })
	config := subscriber.RunnerConfig{PollInterval: 50 * time.Millisecond}
	routerConfig := message.RouterConfig{CloseTimeout: 30 * time.Second}
	for name := range handlers {
		config.Consumers = append(config.Consumers, subscriber.ConsumerConfig{
			Name: name, Topic: subscriber.AllTopics, Start: cursor.FromBeginning(), BatchSize: 10,
			RetryDelay: 10 * time.Millisecond, RetryDelayCap: 50 * time.Millisecond,
		})
	}
	for _, o := range options {
		o(&config, &routerConfig)
	}
	var err error
	s.runner, err = subscriber.NewRunner(s.pool, config, s.logger)
	require.NoError(t, err)
	s.jobs, err = publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(t, err)
	s.router, err = message.NewRouter(routerConfig, s.logger)
	require.NoError(t, err)
	s.router.AddMiddleware(middleware.Round(s.logger))
	for name, h := range handlers {
		s.router.AddHandler(name, subscriber.AllTopics, s.runner.Subscriber(name), "jobs", s.jobs, h)
	}
	return s
}

func (s *service) start() *service {
	s.t.Helper()
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(context.Background())
	go func() { s.run <- s.router.Run(ctx) }()
	select {
	case <-s.router.Running():
	case err := <-s.run:
		require.NoError(s.t, err)
	}
	s.t.Cleanup(func() {
		s.cancel()
		_ = s.router.Close()
		_ = s.runner.Close()
	})
	return s
}

func start(t *testing.T, db *pgtest.DB, handlers map[string]handler, options ...option) *service {
	t.Helper()
	return newService(t, db, handlers, options...).start()
}

// effect writes an effect through the unit of a message.
func effect(msg *message.Message) error {
	unit, ok := cursor.UnitFromContext(msg.Context())
	if !ok {
		return cursor.ErrNoUnit
	}
	tx, err := unit.Tx(msg.Context())
	if err != nil {
		return err
	}
	_, err = tx.Exec(msg.Context(), "insert into effects values ($1, $2)", unit.Cursor().Consumer, unit.Event().Seq)
	return err
}

func seqOf(msg *message.Message) int64 {
	unit, _ := cursor.UnitFromContext(msg.Context())
	return unit.Event().Seq
}

// job is what a handler returns for an event: its payload is the event's number.
func job(msg *message.Message) []*message.Message {
	return []*message.Message{message.NewMessage(msg.UUID, []byte(msg.Payload))}
}

// work writes an effect and returns a job.
func work(msg *message.Message) ([]*message.Message, error) {
	if err := effect(msg); err != nil {
		return nil, err
	}
	return job(msg), nil
}

func effects(t testing.TB, db *pgtest.DB, consumer string) []int64 {
	t.Helper()
	return pgtest.Column[int64](t, db, "select seq from effects where consumer = $1 order by seq", consumer)
}

func jobCount(t testing.TB, db *pgtest.DB) int64 {
	t.Helper()
	return pgtest.Value[int64](t, db, `select count(*) from watermill_jobs`)
}

func position(t testing.TB, db *pgtest.DB, consumer string) int64 {
	t.Helper()
	return logtest.Position(t, db, cursor.Key{Consumer: consumer})
}

// waitPosition returns when a consumer has passed seq.
func waitPosition(t testing.TB, db *pgtest.DB, consumer string, seq int64) {
	t.Helper()
	require.Eventually(t, func() bool { return position(t, db, consumer) >= seq }, 20*time.Second, 5*time.Millisecond,
		"%s did not reach %d", consumer, seq)
}

func upTo(n int64) []int64 {
	numbers := make([]int64, n)
	for i := range numbers {
		numbers[i] = int64(i) + 1
	}
	return numbers
}

// receive waits for a signal of the program under test.
func receive[T any](t testing.TB, ch <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(20 * time.Second):
		t.Fatalf("%s did not come", what)
		panic("unreachable")
	}
}

type routerConfig = message.RouterConfig

var fromBeginning = cursor.FromBeginning()

// serve handles a runner's consumers by a router, until the test's end.
func serve(t *testing.T, runner *subscriber.Runner, handlers map[string]handler) {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddMiddleware(middleware.Round(nil))
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(t, err)
	for name, h := range handlers {
		router.AddHandler(name, subscriber.AllTopics, runner.Subscriber(name), "jobs", jobs, h)
	}
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	<-router.Running()
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-ended)
	})
}
