package telemetry_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/faultproxy"
	"github.com/watermill-eventlog/watermill-eventlog/telemetry"
)

// bound is what a scrape may take on a machine under load; the timeout of the gauges is a small part of it.
const bound = 20 * time.Second

// addOther makes an instrument of somebody else.
func addOther(t *testing.T, provider metric.MeterProvider) {
	t.Helper()
	other, err := provider.Meter("somebody else").Int64Counter("other")
	require.NoError(t, err)
	other.Add(t.Context(), 1)
}

// requireUnknown collects in a bounded time, and finds nothing of the consumers, but the failure and what is not ours.
func requireUnknown(t *testing.T, m meters, failed int) {
	t.Helper()
	start := time.Now()
	p := m.collect(t)
	require.Less(t, time.Since(start), bound)
	require.Equal(t, points{failures: {"": float64(failed)}, "other": {"": 1}}, p)
}

func TestFailedReadReportsNothing(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]struct {
		begin, end func(*faultproxy.Proxy)
	}{
		"refused": {begin: func(p *faultproxy.Proxy) { p.Refuse(); p.Reset() }, end: (*faultproxy.Proxy).Pass},
		"dropped": {begin: (*faultproxy.Proxy).Drop, end: (*faultproxy.Proxy).Pass},
		"slow": {
			begin: func(p *faultproxy.Proxy) { p.Delay(5 * time.Second) },
			end:   func(p *faultproxy.Proxy) { p.Delay(0); p.Reset() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, keys := newXYZ(t)
			proxy, address := faultproxy.For(t, db.URL())
			pool, err := pgxpool.New(t.Context(), address)
			require.NoError(t, err)
			t.Cleanup(func() { proxy.Reset(); pool.Close() })
			m := newMeters()
			addOther(t, m)
			register(t, m, telemetry.GaugesConfig{DB: pool, Keys: keys, Timeout: time.Second})
			require.Eventually(t, func() bool { return len(m.collect(t)[lag]) == 2 }, bound, time.Millisecond)
			before := int(m.collect(t)[failures][""])

			fault.begin(proxy)
			requireUnknown(t, m, before+1)
			requireUnknown(t, m, before+2)
			fault.end(proxy)
			require.Eventually(t, func() bool { return len(m.collect(t)[lag]) == 2 }, bound, time.Millisecond)
			requireXYZ(t, func() (p points) {
				require.Eventually(t, func() bool { p = m.collect(t); return len(p[lag]) == 2 }, bound, time.Millisecond)
				return p
			}())
		})
	}
}

func TestExhaustedPoolReportsNothing(t *testing.T) {
	t.Parallel()
	db, keys := newXYZ(t)
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	m := newMeters()
	addOther(t, m)
	register(t, m, telemetry.GaugesConfig{DB: pool, Keys: keys, Timeout: 200 * time.Millisecond})
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	requireUnknown(t, m, 1)
	conn.Release()
	require.Eventually(t, func() bool { return len(m.collect(t)[lag]) == 2 }, bound, time.Millisecond)
	require.Zero(t, pool.Stat().AcquiredConns())
}

func TestReadWithoutTheRightToReportsNothing(t *testing.T) {
	t.Parallel()
	db, keys := newXYZ(t)
	role := db.Name() + "_gauges" // roles are the whole server's
	db.Exec(t, "create role "+role)
	db.Exec(t, `grant select on event_log, event_outbox, event_seq, event_consumer_cursors, event_consumer_failures, event_consumer_parked,
		event_consumer_losses to `+role)
	t.Cleanup(func() { db.Exec(t, "drop owned by "+role+"; drop role "+role) })
	pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = role })
	m := newMeters()
	addOther(t, m)
	register(t, m, telemetry.GaugesConfig{DB: pool, Keys: keys})
	requireXYZ(t, m.collect(t)) // these rights are enough
	db.Exec(t, "revoke select on event_log from "+role)
	requireUnknown(t, m, 1)
	require.True(t, handled.find("SQLSTATE 42501"))
	db.Exec(t, "grant select on event_log to "+role)
	requireXYZ(t, m.collect(t))
}

func TestEmptyCounterReportsNothing(t *testing.T) {
	t.Parallel()
	db, keys := newXYZ(t)
	m := newMeters()
	addOther(t, m)
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: keys})
	db.Exec(t, "delete from event_seq")
	requireUnknown(t, m, 1)
	require.True(t, handled.find("has no row"))
}

// exporter keeps what a periodic reader exports.
type exporter struct {
	sdk.Exporter // of what is not called
	exported     chan metricdata.ResourceMetrics
}

func (e exporter) Temporality(k sdk.InstrumentKind) metricdata.Temporality {
	return sdk.DefaultTemporalitySelector(k)
}
func (e exporter) Aggregation(k sdk.InstrumentKind) sdk.Aggregation {
	return sdk.DefaultAggregationSelector(k)
}
func (e exporter) Export(_ context.Context, all *metricdata.ResourceMetrics) error {
	var kept metricdata.ResourceMetrics
	for _, scope := range all.ScopeMetrics {
		scope.Metrics = append([]metricdata.Metrics(nil), scope.Metrics...)
		kept.ScopeMetrics = append(kept.ScopeMetrics, scope)
	}
	e.exported <- kept
	return nil
}
func (e exporter) ForceFlush(context.Context) error { return nil }
func (e exporter) Shutdown(context.Context) error   { return nil }

func TestProviderExportsTheRestAndShutsDownWhileTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	db, keys := newXYZ(t)
	proxy, address := faultproxy.For(t, db.URL())
	pool, err := pgxpool.New(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(func() { proxy.Reset(); pool.Close() })
	require.NoError(t, pool.Ping(t.Context()))
	exporter := exporter{exported: make(chan metricdata.ResourceMetrics, 10)}
	provider := sdk.NewMeterProvider(sdk.WithReader(sdk.NewPeriodicReader(exporter, sdk.WithInterval(time.Hour))))
	addOther(t, provider)
	unregister, err := telemetry.RegisterGauges(telemetry.GaugesConfig{
		DB: pool, Keys: keys, MeterProvider: provider, Timeout: time.Second,
	})
	require.NoError(t, err)

	proxy.Drop()
	require.NoError(t, provider.ForceFlush(t.Context()))
	require.Equal(t, points{failures: {"": 1}, "other": {"": 1}}, toPoints(t, <-exporter.exported))

	start := time.Now()
	require.NoError(t, provider.Shutdown(t.Context()))
	require.Less(t, time.Since(start), bound)
	require.Equal(t, points{failures: {"": 2}, "other": {"": 1}}, toPoints(t, <-exporter.exported))
	require.NoError(t, unregister())
}

// stuck is a database that answers when the caller's patience is over.
type stuck struct{ asked chan struct{} }

func (s stuck) Query(ctx context.Context, _ string, _ ...any) (pgx.Rows, error) {
	s.asked <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestScrapeIsBoundedByDefault(t *testing.T) {
	t.Parallel()
	m := newMeters()
	unregister, err := telemetry.RegisterGauges(telemetry.GaugesConfig{
		DB: stuck{make(chan struct{}, 1)}, Keys: []cursor.Key{key("x")}, MeterProvider: m,
	})
	require.NoError(t, err)
	require.Equal(t, points{failures: {"": 1}}, m.collect(t))
	require.NoError(t, unregister())
}

func TestScrapeEndsWithItsOwnContext(t *testing.T) {
	t.Parallel()
	db := stuck{make(chan struct{}, 1)}
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db, Keys: []cursor.Key{key("x")}, Timeout: time.Hour})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		var all metricdata.ResourceMetrics
		ended <- m.reader.Collect(ctx, &all)
	}()
	<-db.asked
	cancel()
	require.NoError(t, <-ended)
}
