package telemetry

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

const scope = "github.com/watermill-eventlog/watermill-eventlog/telemetry"

// GaugesConfig is for [RegisterGauges].
type GaugesConfig struct {
	// DB is a pool with the right to SELECT from the log, its counter and its event_consumer_… tables. Each scrape takes
	// one connection of it for one statement; a pool of its own, of one connection, cannot be exhausted by others. Required.
	DB cursor.Querier

	// Log names the event log. Defaults to the log with the default names.
	Log *cursor.Log

	// Keys are the cursors that ought to exist: the closed set of what the gauges report. Required.
	Keys []cursor.Key

	// MeterProvider defaults to the global one.
	MeterProvider metric.MeterProvider

	// Timeout bounds the read of one scrape, from waiting for a connection to the last row. Defaults to 2 seconds.
	Timeout time.Duration
}

func (c GaugesConfig) withDefaults() GaugesConfig {
	if c.Timeout == 0 {
		c.Timeout = 2 * time.Second
	}
	if c.MeterProvider == nil {
		c.MeterProvider = otel.GetMeterProvider()
	}
	return c
}

func (c GaugesConfig) validate() error {
	var errs []error
	if c.DB == nil {
		errs = append(errs, errors.New("missing DB"))
	}
	if len(c.Keys) == 0 {
		errs = append(errs, errors.New("missing Keys"))
	}
	if c.Timeout < 0 {
		errs = append(errs, fmt.Errorf("negative Timeout (%v): a scrape must not hang", c.Timeout))
	}
	seen := map[cursor.Key]bool{}
	for i, key := range c.Keys {
		if err := key.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("key %d (%q): %w", i, key, err))
		}
		if seen[key] {
			errs = append(errs, fmt.Errorf("key %d (%q): the same key twice", i, key))
		}
		seen[key] = true
	}
	return errors.Join(errs...)
}

// ErrRegistered is returned when a consumer of a log is to be registered a second time on one meter provider: its
// series would have two sources.
var ErrRegistered = errors.New("the gauges of this consumer are registered already on this meter provider: unregister them first")

// RegisterGauges makes a meter provider's scrapes read and report where the consumers stand, until unregister is
// called, which may be done more than once. It does not connect.
//
// A scrape is one statement, however many consumers there are, and so one moment of the log: a lag and an age that do
// not belong together are never seen. Now is the database's clock. A read that fails or takes longer than Timeout
// reports nothing of the consumers, adds to eventlog.gauges.failures, and gives its error to OpenTelemetry's error
// handler ([otel.Handle]). It is not returned to the SDK, whose periodic reader would then export nothing at all of
// the provider. A scrape whose own context was over before is not a failure of the read, but reports nothing either.
//
// Components may register consumers of their own on the same provider. A consumer that is registered already is
// [ErrRegistered], and nothing is registered then; the same holds for consumers of logs of the same name in different
// databases, which need a provider each, as their series would be the same.
func RegisterGauges(config GaugesConfig) (unregister func() error, err error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, fmt.Errorf("gauges config: %w", err)
	}
	g, err := newGauges(config)
	if err != nil {
		return nil, fmt.Errorf("register gauges: %w", err)
	}
	release, err := reserve(config)
	if err != nil {
		return nil, fmt.Errorf("register gauges: %w", err)
	}
	registration, err := g.meter.RegisterCallback(g.observe, g.lag, g.age, g.parked, g.lost, g.problem, g.staged, g.reserve)
	if err != nil {
		release()
		return nil, fmt.Errorf("register gauges: %w", err)
	}
	g.failures.Add(context.Background(), 0) // there from the first scrape on, for alerts on its increase
	return sync.OnceValue(func() error {
		defer release()
		return registration.Unregister()
	}), nil
}

// registered are the consumers that have gauges.
var registered = struct {
	mu  sync.Mutex
	all map[registeredKey]bool
}{all: map[registeredKey]bool{}}

type registeredKey struct {
	provider any
	log      string
	cursor   cursor.Key
}

// reserve takes the consumers' places, all or none.
func reserve(config GaugesConfig) (release func(), err error) {
	var provider any = config.MeterProvider
	switch {
	case !reflect.ValueOf(provider).Comparable():
		provider = new(byte) // two of these cannot be told to be the same
	case provider == otel.GetMeterProvider():
		provider = nil // also before and after the global provider is set
	}
	keys := make([]registeredKey, len(config.Keys))
	for i, key := range config.Keys {
		keys[i] = registeredKey{provider, config.Log.String(), key}
	}
	registered.mu.Lock()
	defer registered.mu.Unlock()
	var errs []error
	for _, key := range keys {
		if registered.all[key] {
			errs = append(errs, fmt.Errorf("consumer %q of %s: %w", key.cursor, key.log, ErrRegistered))
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	for _, key := range keys {
		registered.all[key] = true
	}
	return func() {
		registered.mu.Lock()
		defer registered.mu.Unlock()
		for _, key := range keys {
			delete(registered.all, key)
		}
	}, nil
}

// gauges are the instruments of one registration.
type gauges struct {
	config  GaugesConfig
	readers consumers
	labels  []labels
	log     []metric.ObserveOption // the attributes of the log alone

	meter    metric.Meter
	lag      metric.Int64ObservableGauge
	age      metric.Float64ObservableGauge
	parked   metric.Int64ObservableGauge
	lost     metric.Int64ObservableGauge
	problem  metric.Int64ObservableGauge
	staged   metric.Float64ObservableGauge
	reserve  metric.Int64ObservableGauge
	failures metric.Int64Counter
}

// labels are a consumer's attributes.
type labels struct {
	base     []attribute.KeyValue
	consumer []metric.ObserveOption
}

func newGauges(config GaugesConfig) (*gauges, error) {
	g := &gauges{config: config, readers: newConsumers(config.Keys), meter: config.MeterProvider.Meter(scope)}
	for _, key := range config.Keys {
		base := []attribute.KeyValue{attribute.String("eventlog.consumer.name", key.String())}
		if log := config.Log.String(); log != (*cursor.Log)(nil).String() {
			base = append(base, attribute.String("eventlog.log.name", log))
		}
		g.labels = append(g.labels, labels{base, []metric.ObserveOption{metric.WithAttributeSet(attribute.NewSet(base...))}})
	}
	if log := config.Log.String(); log != (*cursor.Log)(nil).String() {
		g.log = append(g.log, metric.WithAttributes(attribute.String("eventlog.log.name", log)))
	}
	var errs [8]error
	g.lag, errs[0] = g.meter.Int64ObservableGauge("eventlog.consumer.lag", metric.WithUnit("{event}"),
		metric.WithDescription("Events of the log that the consumer has not passed yet, those of other topics included."))
	g.age, errs[1] = g.meter.Float64ObservableGauge("eventlog.consumer.pending_age", metric.WithUnit("s"),
		metric.WithDescription("How long ago the oldest event that the consumer has not passed occurred; 0 at the head."))
	g.parked, errs[2] = g.meter.Int64ObservableGauge("eventlog.consumer.parked", metric.WithUnit("{event}"),
		metric.WithDescription("Events that the consumer has parked, and nobody has replayed or discarded yet."))
	g.lost, errs[3] = g.meter.Int64ObservableGauge("eventlog.consumer.lost", metric.WithUnit("{event}"),
		metric.WithDescription("Events that the consumer was moved past unhandled, and nobody has settled yet."))
	g.problem, errs[4] = g.meter.Int64ObservableGauge("eventlog.consumer.problem", metric.WithUnit("{problem}"),
		metric.WithDescription("1 for each problem that a consumer has now."))
	g.staged, errs[6] = g.meter.Float64ObservableGauge("eventlog.staged.age", metric.WithUnit("s"),
		metric.WithDescription("How long ago the oldest staged event was appended that has no number yet; 0 where there is none."))
	g.reserve, errs[7] = g.meter.Int64ObservableGauge("eventlog.log.partition_reserve", metric.WithUnit("{event}"),
		metric.WithDescription("Events that can be appended until the log's partitions are full, and appends fail."))
	g.failures, errs[5] = g.meter.Int64Counter("eventlog.gauges.failures", metric.WithUnit("{read}"),
		metric.WithDescription("Reads of the consumers' gauges that failed: their scrapes report no consumer."))
	return g, errors.Join(errs[:]...)
}

// observe is a scrape. It always returns nil: see [RegisterGauges].
func (g *gauges) observe(ctx context.Context, o metric.Observer) error {
	if ctx.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, g.config.Timeout)
	defer cancel()
	standings, err := g.readers.read(ctx, g.config.DB, g.config.Log)
	if err != nil {
		g.failures.Add(context.WithoutCancel(ctx), 1)
		otel.Handle(fmt.Errorf("read gauges of event log %s: %w", g.config.Log, err))
		return nil
	}
	for i, s := range standings {
		l := g.labels[i]
		if i == 0 {
			o.ObserveFloat64(g.staged, max(0, s.staged), g.log...)
			if s.reserve != nil {
				o.ObserveInt64(g.reserve, max(0, *s.reserve), g.log...)
			}
		}
		if s.known() {
			o.ObserveInt64(g.lag, s.lag(), l.consumer...)
			o.ObserveFloat64(g.age, s.pendingAge(), l.consumer...)
		}
		if s.exists {
			o.ObserveInt64(g.parked, s.parked, l.consumer...)
			o.ObserveInt64(g.lost, s.lost, l.consumer...)
		}
		for _, p := range s.problems() {
			attributes := append(l.base[:len(l.base):len(l.base)], attribute.String("eventlog.problem", p.reason))
			if p.errorType != "" {
				attributes = append(attributes, attribute.String("error.type", p.errorType))
			}
			o.ObserveInt64(g.problem, 1, metric.WithAttributes(attributes...))
		}
	}
	return nil
}
