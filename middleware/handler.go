package middleware

import (
	"context"
	"fmt"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// handlerMeter measures handlers, with the middlewares inside the round's. Nil measures nothing.
type handlerMeter struct {
	duration metric.Float64Histogram

	mu   sync.RWMutex
	good map[handlerKey][]metric.RecordOption // made once for each consumer
}

type handlerKey struct {
	log    *cursor.Log
	cursor cursor.Key
}

func newHandlerMeter(provider metric.MeterProvider) (*handlerMeter, error) {
	duration, err := provider.Meter(scope).Float64Histogram("eventlog.handler.duration", metric.WithUnit("s"),
		metric.WithDescription("How long handlers took for an event, with the middlewares inside the round's."),
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60))
	if err != nil {
		return nil, fmt.Errorf("round middleware: make instruments: %w", err)
	}
	return &handlerMeter{duration: duration, good: map[handlerKey][]metric.RecordOption{}}, nil
}

// moment is a point in time in one word, since epoch; 0 is none.
type moment time.Duration

var epoch = time.Now()

// start is none where nobody wants to know.
func (m *handlerMeter) start() moment {
	if m == nil || !m.duration.Enabled(context.Background()) {
		return 0
	}
	return moment(time.Since(epoch))
}

// recordUnit is record, kept out of capture's frame.
//
//go:noinline
func (m *handlerMeter) recordUnit(unit *cursor.Unit, started moment, failed error) {
	m.record(handlerKey{unit.Log(), unit.Cursor()}, started, failed)
}

// record tells how a handler that started then has ended.
func (m *handlerMeter) record(key handlerKey, started moment, failed error) {
	took := (time.Since(epoch) - time.Duration(started)).Seconds()
	if failed != nil {
		m.duration.Record(context.Background(), took,
			metric.WithAttributes(append(consumerAttributes(key), attribute.String("error.type", cursor.ErrorType(failed)))...))
		return
	}
	m.mu.RLock()
	options, known := m.good[key]
	m.mu.RUnlock()
	if !known {
		options = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(consumerAttributes(key)...))}
		m.mu.Lock()
		m.good[key] = options
		m.mu.Unlock()
	}
	m.duration.Record(context.Background(), took, options...)
}

func consumerAttributes(key handlerKey) []attribute.KeyValue {
	all := []attribute.KeyValue{attribute.String("eventlog.consumer.name", key.cursor.String())}
	if log := key.log.String(); log != (*cursor.Log)(nil).String() {
		all = append(all, attribute.String("eventlog.log.name", log))
	}
	return all
}
