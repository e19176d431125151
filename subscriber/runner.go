package subscriber

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

var errClosed = errors.New("event log subscriber is closed")

// Runner serves the consumers of one process and log. It runs while it has subscriptions: with none it has no
// goroutine and no connection.
type Runner struct {
	pool    *pgxpool.Pool
	config  RunnerConfig
	logger  watermill.LoggerAdapter
	failed  chan error
	slots   chan struct{} // one for each round that may run
	waiting atomic.Int64  // subscriptions that wait for a slot
	rounds  atomic.Int64  // numbers the rounds of this instance
	meters  *instruments

	listenTimes listenTimes

	ensuring   sync.Mutex
	registered map[cursor.Key]bool // keys whose cursor was ensured

	mu            sync.Mutex
	closed        bool
	subscriptions map[*subscription]struct{}
	waker         *waker // runs while there are subscriptions
}

// NewRunner checks the configuration and returns a runner that does nothing until it is subscribed to. It does
// not connect: a database that cannot be reached or is not migrated is an error of Subscribe. A nil logger
// logs nothing.
func NewRunner(pool *pgxpool.Pool, config RunnerConfig, logger watermill.LoggerAdapter) (*Runner, error) {
	if pool == nil {
		return nil, errors.New("event log runner: missing pool")
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	size := int(pool.Config().MaxConns)
	config = config.withDefaults(size)
	if err := config.validate(size); err != nil {
		return nil, fmt.Errorf("event log runner config: %w", err)
	}
	if n := len(config.Consumers); config.MaxRounds < n {
		logger.Info("event log runner: consumers take turns, because the pool is small", watermill.LogFields{
			"consumers": n, "max_rounds": config.MaxRounds, "pool_max_conns": size, "wanted_max_conns": n + 2,
		})
	}
	meters, err := newInstruments(config.MeterProvider)
	if err != nil {
		return nil, fmt.Errorf("event log runner: make instruments: %w", err)
	}
	return &Runner{
		pool:          pool,
		meters:        meters,
		config:        config,
		logger:        logger,
		failed:        make(chan error, 16),
		slots:         make(chan struct{}, config.MaxRounds),
		listenTimes:   defaultListenTimes,
		registered:    map[cursor.Key]bool{},
		subscriptions: map[*subscription]struct{}{},
	}, nil
}

// Failed tells of consumers that ended although nobody stopped them: the router handled without the
// middleware, or there was a panic outside a handler. Their message channels are closed. A process should
// exit non-zero then, as it looks healthy and does nothing. The channel is never closed.
func (r *Runner) Failed() <-chan error { return r.failed }

func (r *Runner) fail(err error) {
	r.logger.Error("event consumer ended", err, nil)
	select {
	case r.failed <- err:
	default: // the first ones are waiting to be read
	}
}

// Subscriber returns the Watermill subscriber of a consumer. If the configuration has no consumer of that
// name, Subscribe says so.
func (r *Runner) Subscriber(name string) *Subscriber {
	return &Subscriber{runner: r, name: name}
}

// Close stops every consumer: the handlers in flight finish their message, what was acked is committed, and
// the message channels are closed. It returns when all that is done, at the latest a moment after StopBudget.
// It can be called any number of times.
func (r *Runner) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.stop(func(*subscription) bool { return true })
	return nil
}

// stop ends the subscriptions that match and waits for them.
func (r *Runner) stop(match func(*subscription) bool) {
	r.mu.Lock()
	var ending []*subscription
	for s := range r.subscriptions {
		if match(s) {
			ending = append(ending, s)
		}
	}
	r.mu.Unlock()
	for _, s := range ending {
		s.stop()
	}
	for _, s := range ending {
		<-s.done
	}
}

// consumer finds the configuration of a name for a topic: the one for that topic, or one without a topic, or
// any of the name.
func (r *Runner) consumer(name, topic string) (ConsumerConfig, error) {
	var found *ConsumerConfig
	var names []string
	for i := range r.config.Consumers {
		c := &r.config.Consumers[i]
		names = append(names, c.Name)
		switch {
		case c.Name != name:
		case c.Topic == topic:
			return *c, nil
		case found == nil || c.Topic == "":
			found = c
		}
	}
	if found == nil {
		return ConsumerConfig{}, fmt.Errorf("no consumer %q in the runner's configuration, which has %q: add it to RunnerConfig.Consumers",
			name, names)
	}
	return *found, nil
}

// ensure makes the cursors of the configured consumers, and of the key, where they do not exist yet.
func (r *Runner) ensure(ctx context.Context, key cursor.Key, start cursor.Start) error {
	r.ensuring.Lock()
	defer r.ensuring.Unlock()
	if r.registered[key] {
		return nil
	}
	wanted := map[cursor.Key]cursor.Start{}
	for _, c := range r.config.Consumers {
		if k := c.key(c.Topic); c.Topic != "" && !r.registered[k] {
			wanted[k] = c.Start
		}
	}
	wanted[key] = start
	if err := r.checkResumeAges(ctx); err != nil {
		return err
	}
	registrations := make([]cursor.Registration, 0, len(wanted))
	for k, s := range wanted {
		registrations = append(registrations, cursor.Registration{Key: k, Start: s})
	}
	created, err := cursor.Ensure(ctx, r.pool, r.config.Log, r.config.Instance, registrations)
	for _, c := range created {
		r.logger.Info("event consumer created", watermill.LogFields{
			"consumer": c.Key.String(), "start_seq": c.Position, "start": wanted[c.Key].String(),
		})
	}
	if err != nil {
		return err
	}
	for k := range wanted {
		r.registered[k] = true
	}
	return nil
}

// checkResumeAges compares the consumers' settings with what is stored with the log.
func (r *Runner) checkResumeAges(ctx context.Context) error {
	if !slices.ContainsFunc(r.config.Consumers, func(c ConsumerConfig) bool { return c.ResumeAge > 0 }) {
		return nil
	}
	keep, err := cursor.Retention(ctx, r.pool, r.config.Log)
	if err != nil || keep == 0 {
		return err
	}
	var errs []error
	for i, c := range r.config.Consumers {
		if c.ResumeAge >= keep {
			errs = append(errs, fmt.Errorf("consumer %d (%q): ResumeAge (%v) is not below the log's retention (keep in %s is %v), so its "+
				"events may be removed before they are that old: lower ResumeAge, or keep events for longer (eventlog retention set --keep)",
				i, c.Name, c.ResumeAge, r.config.Log.Table("retention"), keep))
		}
	}
	return errors.Join(errs...)
}

func (r *Runner) subscribe(ctx context.Context, owner *Subscriber, topic string) (<-chan *message.Message, error) {
	config, err := r.consumer(owner.name, topic)
	if err != nil {
		return nil, err
	}
	if topic == "" {
		return nil, errors.New("missing topic: every topic is subscriber.AllTopics")
	}
	key := config.key(topic)
	if err := key.Validate(); err != nil {
		return nil, err
	}
	if err := r.ensure(ctx, key, config.Start); err != nil {
		return nil, err
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || owner.closed {
		return nil, errClosed
	}
	s := newSubscription(ctx, r, owner, config, key)
	r.subscriptions[s] = struct{}{}
	if r.waker == nil {
		r.waker = startWaker(r)
	}
	go s.watchStop(ctx)
	go s.run()
	return s.out, nil
}

// remove takes an ended subscription off the list; the last one takes the waker with it.
func (r *Runner) remove(s *subscription) {
	r.mu.Lock()
	delete(r.subscriptions, s)
	var ending *waker
	if len(r.subscriptions) == 0 {
		ending, r.waker = r.waker, nil
	}
	r.mu.Unlock()
	if ending != nil {
		ending.stop()
	}
}

// keys of the running subscriptions.
func (r *Runner) keys() []cursor.Key {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := map[cursor.Key]bool{}
	var keys []cursor.Key
	for s := range r.subscriptions {
		if !seen[s.key] {
			seen[s.key] = true
			keys = append(keys, s.key)
		}
	}
	return keys
}

// wake wakes the subscriptions that match.
func (r *Runner) wake(match func(cursor.Key) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for s := range r.subscriptions {
		if match(s.key) {
			select {
			case s.woken <- struct{}{}:
			default: // it will look anyway
			}
		}
	}
}

func (r *Runner) roundID() string {
	return fmt.Sprintf("%s/%d", r.config.Instance, r.rounds.Add(1))
}

func everyone(cursor.Key) bool { return true }

// New is the short form for one consumer: a subscriber that owns its runner and ends with it. Several
// consumers of one process should share a [Runner], as they then share one LISTEN connection and one poll.
func New(pool *pgxpool.Pool, config ConsumerConfig, logger watermill.LoggerAdapter) (*Subscriber, error) {
	r, err := NewRunner(pool, RunnerConfig{Consumers: []ConsumerConfig{config}}, logger)
	if err != nil {
		return nil, err
	}
	return r.Subscriber(config.Name), nil
}

// Subscriber is the Watermill subscriber of one consumer.
type Subscriber struct {
	runner *Runner
	name   string
	closed bool // under the runner's mutex
}

var (
	_ message.Subscriber           = (*Subscriber)(nil)
	_ message.SubscribeInitializer = (*Subscriber)(nil)
)

// Subscribe returns the channel of the consumer's events of a topic, or of all with [AllTopics]. Each
// message must be acked or nacked; the next one comes after the ack. When ctx is cancelled the subscription
// ends as by Close.
//
// It connects: a database that cannot be reached, is not migrated, or has lost this consumer's cursor is an
// error here.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	messages, err := s.runner.subscribe(ctx, s, topic)
	if err != nil {
		return nil, fmt.Errorf("event consumer %q: subscribe to topic %q: %w", s.name, topic, err)
	}
	return messages, nil
}

// SubscribeInitialize makes the consumer's cursor for a topic, if it has none: what is appended from now on
// will be handled.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	// The interface has no context.
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	config, err := s.runner.consumer(s.name, topic)
	if err == nil {
		err = s.runner.ensure(ctx, config.key(topic), config.Start)
	}
	if err != nil {
		return fmt.Errorf("event consumer %q: initialize topic %q: %w", s.name, topic, err)
	}
	return nil
}

// Close ends this subscriber's subscriptions as [Runner.Close] ends all.
func (s *Subscriber) Close() error {
	s.runner.mu.Lock()
	s.closed = true
	s.runner.mu.Unlock()
	s.runner.stop(func(sub *subscription) bool { return sub.owner == s })
	return nil
}

// Failed is the runner's [Runner.Failed].
func (s *Subscriber) Failed() <-chan error { return s.runner.Failed() }
