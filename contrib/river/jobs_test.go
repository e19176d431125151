package river_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	wmiddleware "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	queue "github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/contrib/river"
	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var silent = slog.New(slog.DiscardHandler)

// number is the arguments of a job that has no message.
type number struct {
	N string `json:"n"`
}

func (number) Kind() string { return "number" }

// worked collects what River's workers got.
type worked struct {
	mu  sync.Mutex
	all []string
}

func (w *worked) add(s string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, s)
	return nil
}

func (w *worked) list() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.all...)
}

func migrate(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: silent})
	require.NoError(t, err)
	_, err = migrator.Migrate(t.Context(), rivermigrate.DirectionUp, nil)
	require.NoError(t, err)
}

// start runs a River client whose workers collect, until the test ends.
func start(t *testing.T, pool *pgxpool.Pool) (*queue.Client[pgx.Tx], *worked) {
	t.Helper()
	got := &worked{}
	workers := queue.NewWorkers()
	queue.AddWorker(workers, queue.WorkFunc(func(ctx context.Context, job *queue.Job[river.Message]) error {
		msg := job.Args.Message(ctx)
		return got.add(job.Args.Topic + " " + msg.UUID + " " + string(msg.Payload) + " " + msg.Metadata.Get("k"))
	}))
	queue.AddWorker(workers, queue.WorkFunc(func(_ context.Context, job *queue.Job[number]) error { return got.add("number " + job.Args.N) }))
	client, err := queue.NewClient(riverpgxv5.New(pool), &queue.Config{
		Logger: silent, Workers: workers, Queues: map[string]queue.QueueConfig{queue.QueueDefault: {MaxWorkers: 4}},
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond,
	})
	require.NoError(t, err)
	require.NoError(t, client.Start(context.Background()))
	t.Cleanup(func() { require.NoError(t, client.Stop(context.Background())) })
	return client, got
}

// consume handles all events by one consumer, "push", until the test ends. What the handler returns becomes River jobs.
func consume(t *testing.T, pool *pgxpool.Pool, jobs message.Publisher, handle message.HandlerFunc, inside ...message.HandlerMiddleware) *logtest.Logger {
	t.Helper()
	logger := logtest.NewLogger()
	consumer, err := subscriber.New(pool, subscriber.ConsumerConfig{
		Name: "push", Topic: subscriber.AllTopics, Start: cursor.FromBeginning(), RetryDelay: 5 * time.Millisecond, RetryDelayCap: 20 * time.Millisecond,
	}, logger)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	require.NoError(t, err)
	router.AddMiddleware(middleware.Round(nil))
	router.AddMiddleware(inside...)
	router.AddHandler("push", subscriber.AllTopics, consumer, "invoices", jobs, handle)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-ended)
	})
	return logger
}

func passed(t *testing.T, db *pgtest.DB, seq int64) {
	t.Helper()
	require.Eventually(t, func() bool { return logtest.Position(t, db, cursor.Key{Consumer: "push"}) >= seq }, time.Minute, 5*time.Millisecond)
}

func newJobs(t *testing.T, client *queue.Client[pgx.Tx]) *river.Jobs {
	t.Helper()
	jobs, err := river.NewJobs(client, river.JobsConfig{})
	require.NoError(t, err)
	return jobs
}

func roomy(c *pgxpool.Config) { c.MaxConns = 16 }

func TestRiverWorksWhatHandlersReturnOnce(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t, roomy)
	migrate(t, pool)
	logtest.Append(t, db, "orders", 3)
	db.Exec(t, `
		create sequence tries;
		create function fail_thrice() returns trigger language plpgsql as $$ begin
			if nextval('tries') <= 3 then raise exception 'not yet' using errcode = 'P0042'; end if;
			return null;
		end $$;
		create constraint trigger fail_thrice after update on event_consumer_cursors deferrable initially deferred
			for each row execute function fail_thrice()`)
	client, got := start(t, pool)
	consume(t, pool, newJobs(t, client), func(msg *message.Message) ([]*message.Message, error) {
		job := message.NewMessage("job "+string(msg.Payload), msg.Payload)
		job.Metadata.Set("k", "v")
		return message.Messages{job}, nil
	})
	passed(t, db, 3)
	want := []string{"invoices job 1 1 v", "invoices job 2 2 v", "invoices job 3 3 v"}
	require.Eventually(t, func() bool { return len(got.list()) >= 3 }, time.Minute, 5*time.Millisecond)
	require.Equal(t, int64(3), pgtest.Value[int64](t, db, "select count(*) from river_job"))
	require.ElementsMatch(t, want, got.list())
}

// River's own client takes the unit's transaction, and an attempt that fails takes its jobs back.
func TestHandlerInsertsRiverJobsByItself(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t, roomy)
	migrate(t, pool)
	logtest.Append(t, db, "orders", 2)
	client, got := start(t, pool)
	jobs := newJobs(t, client)
	failed := false
	insert := func(msg *message.Message) error {
		ctx := msg.Context()
		unit, _ := cursor.UnitFromContext(ctx)
		tx, err := unit.Tx(ctx)
		if err != nil {
			return err
		}
		if _, err := client.InsertTx(ctx, tx, number{string(msg.Payload)}, nil); err != nil {
			return err
		}
		many := []queue.InsertManyParams{{Args: number{"fast " + string(msg.Payload)}}}
		if _, err := client.InsertManyFastTx(ctx, tx, many); err != nil {
			return err
		}
		if !failed {
			failed = true
			return errors.New("once")
		}
		return nil
	}
	logger := consume(t, pool, jobs, func(msg *message.Message) ([]*message.Message, error) {
		return message.Messages{message.NewMessage("m", msg.Payload)}, insert(msg)
	}, wmiddleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware, middleware.Attempt)
	passed(t, db, 2)
	require.Empty(t, logger.Lines("event consumer round failed"))
	require.Eventually(t, func() bool { return len(got.list()) >= 6 }, time.Minute, 5*time.Millisecond)
	require.Equal(t, int64(6), pgtest.Value[int64](t, db, "select count(*) from river_job"))
	require.ElementsMatch(t, []string{"number 1", "number fast 1", "number 2", "number fast 2", "invoices m 1 ", "invoices m 2 "}, got.list())
}

func TestJobsOfAnotherKindAreMadeByTheCaller(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t, roomy)
	migrate(t, pool)
	logtest.Append(t, db, "orders", 1)
	client, got := start(t, pool)
	jobs, err := river.NewJobs(client, river.JobsConfig{Job: func(topic string, msg *message.Message) (queue.JobArgs, *queue.InsertOpts, error) {
		return number{topic + string(msg.Payload)}, &queue.InsertOpts{Priority: 2}, nil
	}})
	require.NoError(t, err)
	consume(t, pool, jobs, func(msg *message.Message) ([]*message.Message, error) {
		return message.Messages{message.NewMessage("m", msg.Payload)}, nil
	})
	passed(t, db, 1)
	require.Eventually(t, func() bool { return len(got.list()) == 1 }, time.Minute, 5*time.Millisecond)
	require.Equal(t, []string{"number invoices1"}, got.list())
	require.Equal(t, int16(2), pgtest.Value[int16](t, db, "select priority from river_job"))
}

func TestMissingRiverTablesAreNamed(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t)
	logtest.Append(t, db, "orders", 1)
	client, err := queue.NewClient(riverpgxv5.New(pool), &queue.Config{Logger: silent})
	require.NoError(t, err)
	logger := consume(t, pool, newJobs(t, client), func(msg *message.Message) ([]*message.Message, error) {
		return message.Messages{message.NewMessage("m", msg.Payload)}, nil
	})
	line := logger.Wait(t, t.Context(), 1, "event consumer round failed")[0]
	require.ErrorContains(t, line.Err, "run its migrations")
	require.Equal(t, int64(0), logtest.Position(t, db, cursor.Key{Consumer: "push"}))
}

func TestPublishingWithoutAUnitIsRefused(t *testing.T) {
	t.Parallel()
	client, err := queue.NewClient(riverpgxv5.New(nil), &queue.Config{Logger: silent})
	require.NoError(t, err)
	jobs := newJobs(t, client)
	require.ErrorIs(t, jobs.Publish("a", message.NewMessage("1", nil)), cursor.ErrNoUnit)
	require.NoError(t, jobs.Close())
	_, err = river.NewJobs(nil, river.JobsConfig{})
	require.ErrorContains(t, err, "missing client")
}
