package torture

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// envWorker makes a process a worker.
const envWorker = "EVENTLOG_TORTURE_WORKER"

// The bounds are small, so that what is frozen or silent is over soon.
const (
	serverBound  = 2500 * time.Millisecond
	ackDeadline  = 1500 * time.Millisecond
	stopBudget   = time.Second
	pollInterval = 100 * time.Millisecond
)

// workerSettings are the first line of a worker's standard input. It may be followed by a line "quiet". The worker
// ends with that input, so it does not outlive the process that started it.
type workerSettings struct {
	Number  int
	Address string // of the proxy
	Seed    uint64
	Plant   plant
	Quiet   bool // no writers
}

// workerLine is what a worker says on its standard output. An append that is neither committed nor undone may be
// either.
type workerLine struct {
	Ready     bool     `json:",omitempty"`
	Committed []string `json:",omitempty"` // ids of events
	Undone    []string `json:",omitempty"`
	Unknown   []string `json:",omitempty"`
	Dying     int64    `json:",omitempty"` // the event that kills the process
	Error     string   `json:",omitempty"` // of a round
	Type      string   `json:",omitempty"`
}

// Worker does what the process was started for and exits, if it was started as a worker. Call it first in main or
// TestMain: a run starts the program that it is part of once more for each worker.
func Worker() {
	if os.Getenv(envWorker) == "" {
		return
	}
	signal.Ignore(os.Interrupt) // at a terminal it reaches all processes; the first one decides
	ctx, release := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer release()
	if err := runWorker(ctx); err != nil {
		say(workerLine{Error: err.Error(), Type: "exit"})
		os.Exit(1)
	}
	os.Exit(0)
}

var saying sync.Mutex

func say(line workerLine) {
	line.Error = line.Error[:min(len(line.Error), 1000)] // a short line goes through a pipe as a whole, or not at all
	text, err := json.Marshal(line)
	if err != nil {
		panic(err) // its fields are plain
	}
	saying.Lock()
	defer saying.Unlock()
	_, _ = os.Stdout.Write(append(text, '\n')) // nobody is there to hear of it
}

type worker struct {
	settings workerSettings
	random   *lockedRand
}

func runWorker(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	input := bufio.NewReader(os.Stdin)
	first, err := input.ReadBytes('\n')
	if err != nil {
		return err
	}
	var w worker
	if err := json.Unmarshal(first, &w.settings); err != nil {
		return err
	}
	w.random = &lockedRand{random: rand.New(rand.NewPCG(w.settings.Seed, 2))}
	writing, quiet := context.WithCancel(ctx)
	defer quiet()
	go func() {
		for {
			if _, err := input.ReadString('\n'); err != nil {
				cancel()
				return
			}
			quiet()
		}
	}()

	var writers sync.WaitGroup
	if !w.settings.Quiet {
		writers.Go(func() { w.write(writing) })
	}
	writers.Go(func() { w.sequence(ctx) })
	err = w.consume(ctx)
	quiet()
	cancel()
	writers.Wait()
	return err
}

func (w *worker) url(role string) string {
	return fmt.Sprintf("postgres://postgres@%s/postgres?sslmode=disable&connect_timeout=2&application_name=%s",
		w.settings.Address, strings.ReplaceAll(applicationName(role, w.settings.Number), " ", "%20"))
}

// consume handles events until ctx ends.
func (w *worker) consume(ctx context.Context) error {
	config, err := pgxpool.ParseConfig(w.url("consumer"))
	if err != nil {
		return err
	}
	config.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()

	consumer := func(name, topic string, batch int) subscriber.ConsumerConfig {
		return subscriber.ConsumerConfig{
			Name: name, Topic: topic, Start: cursor.FromBeginning(), BatchSize: batch, AckDeadline: ackDeadline,
			RetryDelay: 20 * time.Millisecond, RetryDelayCap: 200 * time.Millisecond,
		}
	}
	consumers := []subscriber.ConsumerConfig{
		consumer(audit, subscriber.AllTopics, 12), consumer(billing, topics[0], 8), consumer(parking, subscriber.AllTopics, 12),
	}
	consumers[2].ParkAfter = parkAfter
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
		Consumers: consumers, PollInterval: pollInterval, ServerBound: serverBound, StopBudget: stopBudget,
		Instance: applicationName("consumer", w.settings.Number),
	}, roundErrors{})
	if err != nil {
		return err
	}
	defer func() { _ = runner.Close() }() // it returns nil
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	router.AddMiddleware(middleware.Round(nil))
	if w.settings.Plant == plantCommitOnNack {
		router.AddMiddleware(swallow)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var hasty sync.WaitGroup
	defer hasty.Wait()
	defer cancel(nil)
	for _, c := range consumers {
		if w.settings.Plant == plantCursorFirst && c.Name == audit {
			hasty.Go(func() { w.consumeHastily(ctx, pool, runner.Subscriber(audit)) })
			continue
		}
		router.AddHandler(c.Name, c.Topic, runner.Subscriber(c.Name), jobTopic, jobs, w.handle)
	}
	go func() {
		select {
		case err := <-runner.Failed():
			cancel(err)
		case <-router.Running():
			say(workerLine{Ready: true})
			select {
			case err := <-runner.Failed():
				cancel(err)
			case <-ctx.Done():
			}
		case <-ctx.Done():
		}
	}()
	err = router.Run(ctx)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

const sqlEffect = `insert into torture_effects (consumer, seq, attempt, instance) values ($1, $2, $3, $4)`

// handle writes an effect through the unit, and returns a job. It writes first and fails then, so that what is
// committed against the rules is seen.
func (w *worker) handle(msg *message.Message) ([]*message.Message, error) {
	ctx := msg.Context()
	unit, ok := cursor.UnitFromContext(ctx)
	if !ok {
		return nil, cursor.ErrNoUnit
	}
	tx, err := unit.Tx(ctx)
	if err != nil {
		return nil, err
	}
	consumer, seq, attempt := unit.Cursor().Consumer, unit.Event().Seq, unit.Attempt()
	effect := func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, sqlEffect, consumer, seq, attempt, applicationName("consumer", w.settings.Number))
		return err
	}
	switch w.random.IntN(10) {
	case 0: // in a savepoint
		err = pgx.BeginFunc(ctx, tx, effect)
	case 1: // and once more in one that is undone
		err = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return errors.Join(effect(tx), errUndone) })
		if errors.Is(err, errUndone) {
			err = effect(tx)
		}
	default:
		err = effect(tx)
	}
	if err != nil {
		return nil, err
	}
	if err := wait(ctx, time.Duration(w.random.IntN(5))*time.Millisecond); err != nil {
		return nil, err
	}
	kind := msg.Metadata.Get("kind")
	if err := w.harm(kind, consumer, seq, attempt); err != nil {
		return nil, err
	}
	return []*message.Message{jobOf(consumer, seq)}, nil
}

func jobOf(consumer string, seq int64) *message.Message {
	return message.NewMessage(watermill.NewUUID(), fmt.Appendf(nil, `{"consumer": %q, "seq": %d}`, consumer, seq))
}

// errHarm is what events fail with that are made to fail.
var errHarm = errors.New("made to fail")

// harm is what an event does to its handler.
func (w *worker) harm(kind, consumer string, seq int64, attempt int) error {
	switch kind {
	case flaky:
		if attempt < 3 {
			return errHarm
		}
	case panics:
		if attempt < 2 {
			panic(errHarm)
		}
	}
	if consumer != parking {
		return nil
	}
	switch kind {
	case poison:
		return errHarm
	case curable:
		if attempt <= parkAfter { // a replay is a later one
			return errHarm
		}
	case killer:
		say(workerLine{Dying: seq})
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	return nil
}

// roundErrors is a logger that passes on the failures of rounds.
type roundErrors struct{ watermill.NopLogger }

func (roundErrors) Error(msg string, err error, fields watermill.LogFields) {
	kind, _ := fields["error.type"].(string)
	if kind == "" {
		kind = msg
	}
	say(workerLine{Error: fmt.Sprintf("%s: %v %v", msg, err, fields), Type: kind})
}

func (l roundErrors) With(watermill.LogFields) watermill.LoggerAdapter { return l }

// lockedRand is for several goroutines.
type lockedRand struct {
	mu     sync.Mutex
	random *rand.Rand
}

func (r *lockedRand) IntN(n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.random.IntN(n)
}
