package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// ours is a process with our consumers on a stock router.
type ours struct {
	router *message.Router
	runner *subscriber.Runner
	ended  chan error
}

// startOurs runs the consumers with one handler, which is told whose message it has in hand.
func startOurs(ctx context.Context, pool *pgxpool.Pool, config subscriber.RunnerConfig,
	handle func(consumer int, msg *message.Message) ([]*message.Message, error),
) (*ours, error) {
	runner, err := subscriber.NewRunner(pool, config, nil)
	if err != nil {
		return nil, err
	}
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return nil, err
	}
	router, err := newRouter()
	if err != nil {
		return nil, err
	}
	router.AddMiddleware(middleware.Round(nil))
	for i, c := range config.Consumers {
		router.AddHandler(c.Name, c.Topic, runner.Subscriber(c.Name), jobTopic, jobs,
			func(msg *message.Message) ([]*message.Message, error) { return handle(i, msg) })
	}
	o := &ours{router: router, runner: runner, ended: make(chan error, 1)}
	go func() { o.ended <- router.Run(ctx) }()
	select {
	case <-router.Running():
		return o, nil
	case err := <-o.ended:
		return nil, errors.Join(err, errors.New("the router ended"))
	}
}

func newRouter() (*message.Router, error) {
	return message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, watermill.NopLogger{})
}

func (o *ours) stop() error {
	err := errors.Join(o.router.Close(), <-o.ended)
	select {
	case failed := <-o.runner.Failed():
		err = errors.Join(err, failed)
	default:
	}
	return err
}

// consumer is one that starts at the log's beginning.
func consumer(name, topic string, batch int) subscriber.ConsumerConfig {
	return subscriber.ConsumerConfig{Name: name, Topic: topic, Start: cursor.FromBeginning(), BatchSize: batch}
}

// job is what every rival's handler returns for an event.
func job(msg *message.Message) []*message.Message {
	return []*message.Message{message.NewMessage(msg.UUID, jobPayload)}
}

// counter closes done at the n-th call.
type counter struct {
	n     int64
	calls atomic.Int64
	done  chan struct{}
}

func newCounter(n int) *counter { return &counter{n: int64(n), done: make(chan struct{})} }

func (c *counter) count() int64 {
	calls := c.calls.Add(1)
	if calls == c.n {
		close(c.done)
	}
	return calls
}

func (c *counter) wait(ctx context.Context) error {
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d of %d events were handled: %w", c.calls.Load(), c.n, ctx.Err())
	}
}

const sqlPassed = `select coalesce((select min(last_seq) >= $1 from event_consumer_cursors), false)`

// unrecorded keeps no record of rounds.
func unrecorded(c *subscriber.RunnerConfig) { c.RoundsKept = -1 }

// drainOurs goes through the first n events with one consumer.
func drainOurs(batch int, topic string, changes ...func(*subscriber.RunnerConfig)) func(context.Context, *database, int) error {
	return func(ctx context.Context, db *database, n int) error {
		pool, err := db.open(ctx, 4, nil)
		if err != nil {
			return err
		}
		defer pool.Close()
		return drainOn(ctx, db, pool, batch, topic, n, changes...)
	}
}

func drainOn(ctx context.Context, db *database, pool *pgxpool.Pool, batch int, topic string, n int, changes ...func(*subscriber.RunnerConfig)) error {
	handled := newCounter(n)
	config := subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{consumer("push", topic, batch)}}
	for _, change := range changes {
		change(&config)
	}
	o, err := startOurs(ctx, pool, config,
		func(_ int, msg *message.Message) ([]*message.Message, error) {
			handled.count()
			return job(msg), nil
		})
	if err != nil {
		return err
	}
	if err := handled.wait(ctx); err != nil {
		return errors.Join(err, o.stop())
	}
	return errors.Join(db.until(ctx, sqlPassed, n), o.stop())
}
