package subscriber

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// instruments are a runner's. They are recorded once a round.
type instruments struct {
	rounds                      metric.Int64Counter
	handled, lost, parked, jobs metric.Int64Counter
	duration                    metric.Float64Histogram
}

func newInstruments(provider metric.MeterProvider) (*instruments, error) {
	meter := provider.Meter("github.com/watermill-eventlog/watermill-eventlog/subscriber")
	var i instruments
	var errs [6]error
	i.rounds, errs[0] = meter.Int64Counter("eventlog.rounds", metric.WithUnit("{round}"),
		metric.WithDescription("Rounds of consumers, by what became of them."))
	i.handled, errs[1] = meter.Int64Counter("eventlog.events.handled", metric.WithUnit("{event}"),
		metric.WithDescription("Events whose handling was committed."))
	i.lost, errs[2] = meter.Int64Counter("eventlog.events.lost", metric.WithUnit("{event}"),
		metric.WithDescription("Events that a consumer was moved past unhandled, those of other topics included."))
	i.parked, errs[3] = meter.Int64Counter("eventlog.events.parked", metric.WithUnit("{event}"),
		metric.WithDescription("Events that were parked."))
	i.jobs, errs[4] = meter.Int64Counter("eventlog.jobs.published", metric.WithUnit("{job}"),
		metric.WithDescription("Jobs that handlers published through their units, and whose round was committed."))
	i.duration, errs[5] = meter.Float64Histogram("eventlog.round.duration", metric.WithUnit("s"),
		metric.WithDescription("How long rounds took."),
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60))
	return &i, errors.Join(errs[:]...)
}

// roundMeter counts the rounds of one subscription, with attributes that are made once. It is for its loop alone.
type roundMeter struct {
	*instruments
	base                                    []attribute.KeyValue
	consumer, committedAs, idleAs, lockedAs metric.MeasurementOption
	began                                   time.Time
}

func newRoundMeter(i *instruments, log *cursor.Log, key cursor.Key) *roundMeter {
	m := &roundMeter{instruments: i, base: []attribute.KeyValue{attribute.String("eventlog.consumer.name", key.String())}}
	if name := log.String(); name != (*cursor.Log)(nil).String() {
		m.base = append(m.base, attribute.String("eventlog.log.name", name))
	}
	m.consumer = metric.WithAttributeSet(attribute.NewSet(m.base...))
	m.committedAs, m.idleAs, m.lockedAs = m.outcome("committed"), m.outcome("idle"), m.outcome("locked")
	return m
}

func (m *roundMeter) outcome(outcome string, more ...attribute.KeyValue) metric.MeasurementOption {
	all := append(m.base[:len(m.base):len(m.base)], attribute.String("eventlog.round.outcome", outcome))
	return metric.WithAttributeSet(attribute.NewSet(append(all, more...)...))
}

// begin is the beginning of a round.
func (m *roundMeter) begin() { m.began = time.Now() }

// tally is what a round will count for once it is committed.
type tally struct {
	took                        time.Duration
	handled, jobs, lost, parked int64
}

// tally is that of the round that began last.
func (m *roundMeter) tally(r *cursor.Round, handled int) tally {
	return tally{took: time.Since(m.began), handled: int64(handled), jobs: int64(r.Buffered())}
}

// commit counts a round that was committed.
func (m *roundMeter) commit(t tally) {
	m.end(m.committedAs, t.took)
	m.add(m.handled, t.handled)
	m.add(m.jobs, t.jobs)
	m.add(m.lost, t.lost)
	m.add(m.parked, t.parked)
}

func (m *roundMeter) add(counter metric.Int64Counter, n int64) {
	if n > 0 {
		counter.Add(context.Background(), n, m.consumer)
	}
}

// idle counts a round that had nothing to do, or was not allowed to.
func (m *roundMeter) idle() { m.end(m.idleAs, time.Since(m.began)) }

// locked counts a round whose cursor was somebody else's.
func (m *roundMeter) locked() { m.end(m.lockedAs, time.Since(m.began)) }

// fail counts a round that failed.
func (m *roundMeter) fail(err error) {
	m.end(m.outcome("failed", attribute.String("error.type", cursor.ErrorType(err))), time.Since(m.began))
}

func (m *roundMeter) end(outcome metric.MeasurementOption, took time.Duration) {
	m.rounds.Add(context.Background(), 1, outcome)
	m.duration.Record(context.Background(), took.Seconds(), outcome)
}
