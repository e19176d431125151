package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	driver "github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	queue "github.com/riverqueue/river"
)

const (
	riverWorkers = 100
	riverName    = "River, 100 workers, in any order"
)

// river is a job queue and no log: it hands out in parallel and keeps no order. Its workers do the same work: one job
// row in the transaction that completes the job in hand.
func river() []rival {
	return []rival{{name: riverName, unordered: true, slow: true, load: loadRiver, run: drainRiver}}
}

type riverEvent struct {
	UUID    string `json:"uuid"`
	Payload string `json:"payload"`
}

func (riverEvent) Kind() string { return "event" }

func loadRiver(ctx context.Context, db *database, n int) error {
	migrator, err := rivermigrate.New(driver.New(db.Pool), &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return err
	}
	client, err := queue.NewClient(driver.New(db.Pool), &queue.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	jobs := make([]queue.InsertManyParams, n)
	for i := range jobs {
		jobs[i].Args = riverEvent{UUID: fmt.Sprintf("%s%012d", uuidPrefix, i+1), Payload: fmt.Sprintf("%0250d", i)}
		jobs[i].InsertOpts = &queue.InsertOpts{Metadata: []byte(`{"correlation_id": "0123456789abcdef", "tenant": "north", "source": "shop"}`)}
	}
	_, err = client.InsertManyFast(ctx, jobs)
	return err
}

type riverWorker struct {
	queue.WorkerDefaults[riverEvent]
	pool    *pgxpool.Pool
	handled *counter
}

func (w *riverWorker) Work(ctx context.Context, event *queue.Job[riverEvent]) error {
	defer w.handled.count()
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `insert into watermill_`+jobTopic+` (uuid, payload, metadata, transaction_id)
			values ($1, $2, '{}', pg_current_xact_id())`, event.Args.UUID, jobPayload); err != nil {
			return err
		}
		_, err := queue.JobCompleteTx[*driver.Driver](ctx, tx, event)
		return err
	})
}

func drainRiver(ctx context.Context, db *database, n int) error {
	pool, err := db.open(ctx, 20, nil)
	if err != nil {
		return err
	}
	defer pool.Close()
	handled := newCounter(n)
	workers := queue.NewWorkers()
	queue.AddWorker(workers, &riverWorker{pool: pool, handled: handled})
	client, err := queue.NewClient(driver.New(pool), &queue.Config{
		Logger: slog.New(slog.DiscardHandler), Workers: workers,
		Queues:        map[string]queue.QueueConfig{queue.QueueDefault: {MaxWorkers: riverWorkers}},
		FetchCooldown: time.Millisecond, FetchPollInterval: 10 * time.Millisecond, // faster than its defaults
	})
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	return errors.Join(handled.wait(ctx), client.Stop(ctx))
}
