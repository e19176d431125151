package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// batchSize is how many events a round hands out.
const batchSize = 100

// workerSettings are the first line of a worker's standard input. The worker stops when that input ends, so it
// does not outlive the process that started it.
type workerSettings struct {
	Database string
	Pause    time.Duration // what each event's work takes
	Verbose  bool
}

// applicationName is what a worker's connections are called in pg_stat_activity.
func applicationName(pid int) string { return fmt.Sprintf("quickstart worker %d", pid) }

// workerMain is the main function of a worker process.
func workerMain() int {
	signal.Ignore(os.Interrupt) // at a terminal it reaches all processes; the first one decides
	ctx, release := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer release()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	input := json.NewDecoder(os.Stdin)
	var s workerSettings
	if err := input.Decode(&s); err != nil {
		return failed(fmt.Errorf("a worker is started by quickstart itself: %w", err))
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if err := work(ctx, s); err != nil {
		return failed(err)
	}
	return 0
}

// work handles events until ctx ends. It is what a service has to write: a pool, a runner, a router.
func work(ctx context.Context, s workerSettings) error {
	level := slog.LevelWarn
	if s.Verbose {
		level = slog.LevelInfo
	}
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})))

	config, err := pgxpool.ParseConfig(s.Database)
	if err != nil {
		return err
	}
	config.MaxConns = int32(len(consumers)) + 2
	config.ConnConfig.RuntimeParams["application_name"] = applicationName(os.Getpid())
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()

	var registered []subscriber.ConsumerConfig
	for _, name := range consumers {
		registered = append(registered, subscriber.ConsumerConfig{
			Name: name, Topic: subscriber.AllTopics, Start: cursor.FromBeginning(), BatchSize: batchSize,
		})
	}
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{Consumers: registered}, logger)
	if err != nil {
		return err
	}
	defer func() { _ = runner.Close() }()
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}

	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 15 * time.Second}, logger)
	if err != nil {
		return err
	}
	router.AddMiddleware(middleware.Round(logger)) // before every other middleware
	for _, name := range consumers {
		router.AddHandler(name, subscriber.AllTopics, runner.Subscriber(name), jobTopic(name), jobs, handler(s.Pause))
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case err := <-runner.Failed():
			cancel(err)
		case <-ctx.Done():
		}
	}()
	err = router.Run(ctx)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

const sqlEffect = `
insert into public.quickstart_effects (consumer, seq, payload_sha256) values ($1, $2, $3)`

// handler writes one row in the unit of its event, and returns one job. Both are committed with the cursor's
// new position, or not at all.
func handler(pause time.Duration) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		unit, ok := cursor.UnitFromContext(ctx)
		if !ok {
			return nil, cursor.ErrNoUnit
		}
		tx, err := unit.Tx(ctx)
		if err != nil {
			return nil, err
		}
		consumer, event, sum := unit.Cursor().Consumer, unit.Event(), sha256.Sum256(msg.Payload)
		if _, err := tx.Exec(ctx, sqlEffect, consumer, event.Seq, sum[:]); err != nil {
			return nil, err
		}
		if err := wait(ctx, pause); err != nil { // real work would go here
			return nil, err
		}
		payload, err := json.Marshal(map[string]string{
			"topic": event.Topic, "action": msg.Metadata.Get("action"), "payload_sha256": hex.EncodeToString(sum[:]),
		})
		if err != nil {
			return nil, err
		}
		job := message.NewMessage(watermill.NewUUID(), payload)
		job.Metadata.Set("event_seq", strconv.FormatInt(event.Seq, 10))
		return message.Messages{job}, nil
	}
}

func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
