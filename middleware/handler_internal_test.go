package middleware

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric/noop"
	sdk "go.opentelemetry.io/otel/sdk/metric"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

func TestMeasuringAHandlerAllocatesNothing(t *testing.T) {
	key := handlerKey{cursor: cursor.Key{Consumer: "push", Topic: "orders"}}
	measured, err := newHandlerMeter(sdk.NewMeterProvider(sdk.WithReader(sdk.NewManualReader())))
	require.NoError(t, err)
	require.Zero(t, testing.AllocsPerRun(100, func() { measured.record(key, measured.start(), nil) }))
	unmeasured, err := newHandlerMeter(noop.NewMeterProvider())
	require.NoError(t, err)
	require.Zero(t, unmeasured.start())
	require.Zero(t, (*handlerMeter)(nil).start())
}
