package compat_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func TestMain(m *testing.M) {
	pgtest.Main(m, goleak.IgnoreAnyFunction( // the deduplicator's goroutine has no end
		"github.com/ThreeDotsLabs/watermill/message/router/middleware.(*mapExpiringKeyRepository).cleanOutLoop"))
}

// service is what a component is put into: a log, its consumers, and a router with the round's middleware.
type service struct {
	db     *pgtest.DB
	pool   *pgxpool.Pool
	logger *logtest.Logger
	runner *subscriber.Runner
	router *message.Router
	events *publisher.EventLog
	jobs   *publisher.Jobs
}

// newService has consumers, by their names and topics. Jobs go to the topic jobs.
func newService(t *testing.T, consumers map[string]string, change ...func(*subscriber.ConsumerConfig)) *service {
	t.Helper()
	s := &service{db: logtest.New(t), logger: logtest.NewLogger()}
	s.db.Exec(t, "create table effects (consumer text, seq bigint)")
	s.pool = s.db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 12 })
	config := subscriber.RunnerConfig{PollInterval: 50 * time.Millisecond}
	for name, topic := range consumers {
		c := subscriber.ConsumerConfig{
			Name: name, Topic: topic, Start: cursor.FromBeginning(), BatchSize: 10, RetryDelay: 10 * time.Millisecond, RetryDelayCap: 50 * time.Millisecond,
		}
		for _, f := range change {
			f(&c)
		}
		config.Consumers = append(config.Consumers, c)
	}
	var err error
	s.runner, err = subscriber.NewRunner(s.pool, config, s.logger)
	require.NoError(t, err)
	s.events, err = publisher.NewEventLog(s.pool, publisher.EventLogConfig{})
	require.NoError(t, err)
	s.jobs, err = publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(t, err)
	require.NoError(t, s.jobs.Initialize(t.Context(), s.pool, "jobs"))
	s.router = s.newRouter(t, middleware.Round(s.logger))
	return s
}

func (s *service) newRouter(t *testing.T, middlewares ...message.HandlerMiddleware) *message.Router {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{}, s.logger)
	require.NoError(t, err)
	router.AddMiddleware(middlewares...)
	return router
}

// runnable is a router, or what has one.
type runnable interface{ Run(context.Context) error }

// run runs something until the test ends.
func run(t *testing.T, r runnable) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
}

func (s *service) passed(t *testing.T, consumer, topic string, seq int64) {
	t.Helper()
	require.Eventually(t, func() bool {
		return logtest.Position(t, s.db, cursor.Key{Consumer: consumer, Topic: topic}) >= seq
	}, time.Minute, 5*time.Millisecond, "%s did not pass %d", consumer, seq)
	require.Empty(t, s.logger.Lines("event consumer round failed", "error"))
}

func (s *service) jobPayloads(t *testing.T) []string {
	t.Helper()
	return pgtest.Column[string](t, s.db, `select payload::text from watermill_jobs order by "offset"`)
}

// effect writes a row in the unit that a context carries.
func effect(ctx context.Context) error {
	unit, ok := cursor.UnitFromContext(ctx)
	if !ok {
		return cursor.ErrNoUnit
	}
	tx, err := unit.Tx(ctx)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, "insert into effects values ($1, $2)", unit.Cursor().Consumer, unit.Event().Seq)
	return err
}

// effects is which events each consumer has written an effect for.
func (s *service) effects(t *testing.T) []string {
	t.Helper()
	return pgtest.Column[string](t, s.db, "select consumer || ' ' || seq from effects order by 1")
}

// broker collects messages.
type broker struct {
	mu  sync.Mutex
	all []string
}

func (b *broker) Publish(topic string, messages ...*message.Message) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range messages {
		b.all = append(b.all, strings.Join([]string{topic, m.UUID, string(m.Payload)}, " "))
	}
	return nil
}

func (b *broker) Close() error { return nil }

func (b *broker) got() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.all)
}
