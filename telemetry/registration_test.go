package telemetry_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/telemetry"
)

func TestComponentsOfOneProviderEachShowTheirConsumers(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, key("a"), key("b"))
	var sent statements
	pool, m := db.Pool(t, counted(&sent)), newMeters()
	unregister := register(t, m, telemetry.GaugesConfig{DB: pool, Keys: []cursor.Key{key("a")}})
	register(t, m, telemetry.GaugesConfig{DB: pool, Keys: []cursor.Key{key("b")}})
	require.Equal(t, map[string]float64{"a@orders": 0, "b@orders": 0}, m.collect(t)[lag])

	require.NoError(t, unregister())
	require.Equal(t, map[string]float64{"b@orders": 0}, m.collect(t)[lag])
	require.NoError(t, unregister())

	for range 100 {
		unregister := register(t, m, telemetry.GaugesConfig{DB: pool, Keys: []cursor.Key{key("a")}})
		require.NoError(t, unregister())
	}
	sent.take()
	p := m.collect(t)
	require.Len(t, sent.take(), 1)
	require.Equal(t, map[string]float64{"b@orders": 0}, p[lag])
	require.Equal(t, map[string]float64{"": 0}, p[failures])
}

func TestConsumerIsRegisteredOnceOnAProvider(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, key("a"), key("b"))
	var sent statements
	pool, m := db.Pool(t, counted(&sent)), newMeters()
	unregister := register(t, m, telemetry.GaugesConfig{DB: pool, Keys: []cursor.Key{key("a")}})

	_, err := telemetry.RegisterGauges(telemetry.GaugesConfig{DB: pool, Keys: []cursor.Key{key("b"), key("a")}, MeterProvider: m})
	require.ErrorIs(t, err, telemetry.ErrRegistered)
	require.ErrorContains(t, err, `"a@orders" of public.event_log`)
	require.Equal(t, map[string]float64{"a@orders": 0}, m.collect(t)[lag])
	require.Len(t, sent.take(), 1)

	// Another provider is another matter, and what was refused has taken nothing.
	register(t, newMeters(), telemetry.GaugesConfig{DB: pool, Keys: []cursor.Key{key("a")}})
	register(t, m, telemetry.GaugesConfig{DB: pool, Keys: []cursor.Key{key("b")}})
	require.NoError(t, unregister())
	register(t, m, telemetry.GaugesConfig{DB: pool, Keys: []cursor.Key{key("a")}})
	require.Equal(t, map[string]float64{"a@orders": 0, "b@orders": 0}, m.collect(t)[lag])
}

// It changes the global provider, so it is not parallel.
func TestGlobalProviderIsTheSameBeforeAndAfterItIsSet(t *testing.T) {
	db := logtest.New(t)
	ensure(t, db, key("a"))
	config := telemetry.GaugesConfig{DB: db.Pool(t), Keys: []cursor.Key{key("a")}}
	unregister, err := telemetry.RegisterGauges(config)
	require.NoError(t, err)
	m := newMeters()
	otel.SetMeterProvider(m)
	t.Cleanup(func() { otel.SetMeterProvider(noop.NewMeterProvider()) })
	_, err = telemetry.RegisterGauges(config)
	require.ErrorIs(t, err, telemetry.ErrRegistered)
	require.Equal(t, map[string]float64{"a@orders": 0}, m.collect(t)[lag])
	require.NoError(t, unregister())
	require.NotContains(t, m.collect(t), lag)
}
