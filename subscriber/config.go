package subscriber

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// AllTopics subscribes to every event of the log, whatever its topic.
const AllTopics = cursor.AllTopics

// ConsumerConfig is one consumer: a named reader with a cursor of its own for each topic it subscribes to.
type ConsumerConfig struct {
	// Name of the consumer. Processes that use the same name and topic are replicas: one of them handles,
	// the others stand by. Required, at most 255 bytes.
	Name string

	// Topic that the consumer will subscribe to, or [AllTopics]. With it, the cursor is made when the
	// runner first subscribes to anything, so that a consumer that is subscribed later misses nothing.
	// Defaults to none: the cursor is made when Subscribe names its topic.
	Topic string

	// Start is where the consumer starts when it has no cursor yet. Defaults to the head: it sees what is
	// committed from now on.
	Start cursor.Start

	// BatchSize is how many events a round hands out at most. A failing event costs the work of its round
	// once more. Defaults to 500.
	BatchSize int

	// BatchBytes is how many bytes of payload a round holds in memory, plus one event. Defaults to 8 MiB.
	BatchBytes int64

	// BatchCover is how many numbers a round covers, with those of other topics. Defaults to 100 times
	// BatchSize.
	BatchCover int

	// AckDeadline is how long a message may take from being offered to its ack or nack. After it the message's
	// context is cancelled and the round fails. It must be below the runner's ServerBound. Defaults to 30
	// seconds.
	AckDeadline time.Duration

	// RetryDelay is how long a failed event waits before its next attempt; it doubles with each attempt, up
	// to RetryDelayCap, give or take a quarter. Defaults to 100 milliseconds.
	RetryDelay time.Duration

	// RetryDelayCap bounds RetryDelay. Defaults to one minute.
	RetryDelayCap time.Duration

	// ParkAfter is after how many failed attempts an event is parked: the cursor passes it, and a copy waits in
	// event_consumer_parked for its replay (operate.Replay) or its end (operate.Discard). An error marked by
	// cursor.Permanent parks at once. An event that ends its process is parked after ParkAfter deaths, but at
	// least three. Events behind a parked one, also those of the same key, are handled before its replay. Each
	// round costs one small transaction more, on a second connection of the pool. Defaults to never: the
	// consumer stands still.
	ParkAfter int

	// MayStage lets handlers append staged events, in their unit, to the log that they read: they take no number in
	// it. Every other append to that log is refused.
	MayStage bool

	// ResumeAge makes a consumer that was away for long go on at the head, where the events that wait are of no
	// use any more: a round that finds both the next event (by its RecordedAt) and the cursor's last move older
	// than this skips to the head, logs an error and records what it skipped as lost. A cursor that moves is
	// never moved by it. It must be below the log's retention, where that is switched on: Subscribe compares it with
	// what is stored. Defaults to never.
	ResumeAge time.Duration

	// WithoutMiddleware consents to a router that handles this consumer's messages without the round
	// middleware, as FanIn's does. Without consent that is [ErrNoMiddleware].
	WithoutMiddleware bool
}

// RunnerConfig is for one process and log.
type RunnerConfig struct {
	// Log names the event log. Defaults to the log with the default names.
	Log *cursor.Log

	// Consumers are the consumers of this process.
	Consumers []ConsumerConfig

	// PollInterval is how often the process looks for new events by itself, give or take a tenth. Defaults to
	// one second.
	PollInterval time.Duration

	// MaxRounds is how many rounds may run at once; each holds a connection of the pool. Defaults to two less
	// than the pool has, but at least one: so all consumers may run at once if the pool has two connections
	// more than there are consumers, and otherwise they take turns.
	MaxRounds int

	// StopBudget is how long handlers in flight may go on once the subscriber was told to stop. Keep it below
	// the router's CloseTimeout, by the second that a handler has to answer when the budget is over: a router does not
	// tell its own, so nothing can check that. With a CloseTimeout that is shorter the router's Close returns "router
	// close timeout", and its Run returns, while handlers go on in their open rounds. Where the process then exits they
	// are killed in the middle, and their rounds are rolled back and done again by the next process: nothing is lost,
	// but what they did outside the database happens again. [Runner.Close] waits for them whatever the router's
	// patience: call it before the process exits. Defaults to 10 seconds.
	StopBudget time.Duration

	// ServerBound is how long the server lets a round be idle, run one statement or wait for a client that
	// does not answer, before it ends it: so a frozen process loses its lock. It must be above every
	// AckDeadline. Defaults to 60 seconds.
	ServerBound time.Duration

	// ListenURL is a connection string for LISTEN, for where the pool goes through a transaction pooler.
	// Defaults to the pool's own configuration.
	ListenURL string

	// DisableListen leaves polling alone.
	DisableListen bool

	// RoundsKept is how many of each cursor's last rounds stay on record: by which instance, in which round and when an
	// event was handled can be told for as long as that. A row is written in the round's own last trip, over the oldest
	// one. Negative keeps none. Defaults to 10,000, about 2 MB a cursor.
	RoundsKept int

	// Instance names this process in what is recorded. Defaults to host, process id and a random part.
	Instance string

	// MeterProvider is what rounds are counted by; docs/telemetry.md lists the instruments. Defaults to
	// OpenTelemetry's global one.
	MeterProvider metric.MeterProvider
}

// ErrNoMiddleware is reported when a router handled a message that had not passed middleware.Round.
var ErrNoMiddleware = errors.New("a router handled a message without the round middleware: call " +
	"router.AddMiddleware(middleware.Round(logger)) before every other middleware, or set WithoutMiddleware for this consumer")

func setDefault[T comparable](value *T, to T) {
	var zero T
	if *value == zero {
		*value = to
	}
}

func (c ConsumerConfig) withDefaults() ConsumerConfig {
	setDefault(&c.BatchSize, 500)
	setDefault(&c.BatchBytes, 8<<20)
	setDefault(&c.BatchCover, 100*c.BatchSize)
	setDefault(&c.AckDeadline, 30*time.Second)
	setDefault(&c.RetryDelay, 100*time.Millisecond)
	setDefault(&c.RetryDelayCap, time.Minute)
	return c
}

func (c ConsumerConfig) validate() error {
	return errors.Join(
		c.key(c.Topic).Validate(),
		c.Start.Validate(),
		positive("BatchSize", c.BatchSize),
		positive("BatchBytes", c.BatchBytes),
		positive("BatchCover", c.BatchCover),
		positive("AckDeadline", c.AckDeadline),
		positive("RetryDelay", c.RetryDelay),
		positive("RetryDelayCap", c.RetryDelayCap),
		positive("ParkAfter", c.ParkAfter),
		positive("ResumeAge", c.ResumeAge),
	)
}

func positive[T ~int | ~int64](setting string, value T) error {
	if value < 0 {
		return fmt.Errorf("negative %s (%v)", setting, value)
	}
	return nil
}

// key is the key of the cursor that moves through a topic.
func (c ConsumerConfig) key(topic string) cursor.Key {
	if topic == AllTopics {
		topic = ""
	}
	return cursor.Key{Consumer: c.Name, Topic: topic}
}

func (c RunnerConfig) withDefaults(poolSize int) RunnerConfig {
	setDefault(&c.PollInterval, time.Second)
	setDefault(&c.StopBudget, 10*time.Second)
	setDefault(&c.ServerBound, time.Minute)
	setDefault(&c.RoundsKept, 10_000)
	c.RoundsKept = max(0, c.RoundsKept)
	if c.Instance == "" {
		c.Instance = instanceName()
	}
	if c.MeterProvider == nil {
		c.MeterProvider = otel.GetMeterProvider()
	}
	consumers := make([]ConsumerConfig, len(c.Consumers))
	for i := range c.Consumers {
		consumers[i] = c.Consumers[i].withDefaults()
	}
	c.Consumers = consumers
	if c.MaxRounds == 0 {
		c.MaxRounds = max(1, poolSize-2)
	}
	return c
}

func (c RunnerConfig) validate(poolSize int) error {
	errs := []error{
		positive("PollInterval", c.PollInterval),
		positive("MaxRounds", c.MaxRounds),
		positive("StopBudget", c.StopBudget),
		positive("ServerBound", c.ServerBound),
	}
	if c.MaxRounds > poolSize {
		errs = append(errs, fmt.Errorf("MaxRounds (%d) is more than the pool's MaxConns (%d), and each round holds a connection: "+
			"raise MaxConns to MaxRounds plus 2, or lower MaxRounds", c.MaxRounds, poolSize))
	}
	if len(c.Consumers) == 0 {
		errs = append(errs, errors.New("missing Consumers"))
	}
	if c.ListenURL != "" {
		if _, err := pgx.ParseConfig(c.ListenURL); err != nil {
			errs = append(errs, fmt.Errorf("ListenURL: %w", err))
		}
	}
	known := map[cursor.Key]bool{}
	for i, consumer := range c.Consumers {
		if err := consumer.validate(); err != nil {
			errs = append(errs, fmt.Errorf("consumer %d (%q): %w", i, consumer.Name, err))
		}
		if consumer.AckDeadline >= c.ServerBound {
			errs = append(errs, fmt.Errorf("consumer %d (%q): AckDeadline (%v) is not below ServerBound (%v): the server would end "+
				"a round whose handler may still ack", i, consumer.Name, consumer.AckDeadline, c.ServerBound))
		}
		if consumer.ParkAfter > 0 && c.MaxRounds >= poolSize {
			errs = append(errs, fmt.Errorf("consumer %d (%q): ParkAfter needs a connection beside its round's, and MaxRounds (%d) may take "+
				"all of the pool's MaxConns (%d): raise MaxConns, or lower MaxRounds", i, consumer.Name, c.MaxRounds, poolSize))
		}
		key := cursor.Key{Consumer: consumer.Name, Topic: consumer.Topic}
		if known[key] {
			errs = append(errs, fmt.Errorf("consumer %d (%q): the same name and topic twice", i, consumer.Name))
		}
		known[key] = true
	}
	return errors.Join(errs...)
}

func instanceName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	random := make([]byte, 4)
	_, _ = rand.Read(random) // never fails
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), hex.EncodeToString(random))
}
