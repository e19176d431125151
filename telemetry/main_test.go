package telemetry_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/telemetry"
)

func TestMain(m *testing.M) {
	otel.SetErrorHandler(&handled)
	pgtest.Main(m)
}

// handled keeps what OpenTelemetry's error handler was given, of all tests.
var handled errorHandler

type errorHandler struct {
	mu  sync.Mutex
	all []error
}

func (h *errorHandler) Handle(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, err)
}

func (h *errorHandler) find(text string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.ContainsFunc(h.all, func(err error) bool { return strings.Contains(err.Error(), text) })
}

// meters is a provider with a reader.
type meters struct {
	*sdk.MeterProvider
	reader *sdk.ManualReader
}

func newMeters() meters {
	reader := sdk.NewManualReader()
	return meters{sdk.NewMeterProvider(sdk.WithReader(reader)), reader}
}

// points are a scrape's points, by instrument and then by the values of their attributes.
type points map[string]map[string]float64

func (m meters) collect(t testing.TB) points {
	t.Helper()
	return toPoints(t, m.collectAll(t))
}

func (m meters) collectAll(t testing.TB) metricdata.ResourceMetrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, m.reader.Collect(context.Background(), &all))
	return all
}

func toPoints(t testing.TB, all metricdata.ResourceMetrics) points {
	t.Helper()
	found := points{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			byAttributes := map[string]float64{}
			add := func(set attribute.Set, value float64) {
				var values []string
				for _, kv := range set.ToSlice() {
					values = append(values, kv.Value.String())
				}
				name := strings.Join(values, " ")
				require.NotContains(t, byAttributes, name)
				byAttributes[name] = value
			}
			switch data := m.Data.(type) {
			case metricdata.Gauge[int64]:
				for _, p := range data.DataPoints {
					add(p.Attributes, float64(p.Value))
				}
			case metricdata.Gauge[float64]:
				for _, p := range data.DataPoints {
					add(p.Attributes, p.Value)
				}
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					add(p.Attributes, float64(p.Value))
				}
			case metricdata.Histogram[float64]:
				for _, p := range data.DataPoints {
					add(p.Attributes, float64(p.Count))
				}
			default:
				require.Fail(t, fmt.Sprintf("%s is a %T", m.Name, data))
			}
			require.NotContains(t, found, m.Name)
			found[m.Name] = byAttributes
		}
	}
	return found
}

const (
	lag      = "eventlog.consumer.lag"
	age      = "eventlog.consumer.pending_age"
	problem  = "eventlog.consumer.problem"
	failures = "eventlog.gauges.failures"
)

// statements counts what is sent to the server.
type statements struct {
	mu  sync.Mutex
	all []string
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, data.SQL)
	return ctx
}

func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) take() (taken []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	taken, s.all = s.all, nil
	return taken
}

func counted(s *statements) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.Tracer = s }
}

func register(t testing.TB, m meters, config telemetry.GaugesConfig) func() error {
	t.Helper()
	config.MeterProvider = m
	if config.Timeout == 0 {
		config.Timeout = time.Minute // the machine may be under load
	}
	unregister, err := telemetry.RegisterGauges(config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unregister() })
	return unregister
}

func key(name string) cursor.Key { return cursor.Key{Consumer: name, Topic: "orders"} }

// ensure makes cursors at the head.
func ensure(t testing.TB, db *pgtest.DB, keys ...cursor.Key) {
	t.Helper()
	var registrations []cursor.Registration
	for _, k := range keys {
		registrations = append(registrations, cursor.Registration{Key: k})
	}
	_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", registrations)
	require.NoError(t, err)
}

// appendAgo appends n events that occurred a while ago.
func appendAgo(t testing.TB, db *pgtest.DB, n int, ago time.Duration) {
	t.Helper()
	db.Exec(t, `insert into event_outbox (topic, occurred_at) select 'orders', clock_timestamp() - make_interval(secs => $2)
		from generate_series(1, $1)`, n, ago.Seconds())
}
