package middleware_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/watermill-eventlog/watermill-eventlog/middleware"
)

func TestHandlerIsMeasuredWithTheMiddlewaresInsideTheRounds(t *testing.T) {
	t.Parallel()
	reader := sdk.NewManualReader()
	round, err := middleware.NewRound(middleware.RoundConfig{MeterProvider: sdk.NewMeterProvider(sdk.WithReader(reader))})
	require.NoError(t, err)
	var attempts atomic.Int64
	run(t, func(router *message.Router, sub message.Subscriber) {
		router.AddMiddleware(round, func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				switch attempts.Add(1) {
				case 1:
					return nil, errors.New("the handler is not reached")
				case 2:
					panic("nor here")
				}
				return h(msg)
			}
		})
		router.AddConsumerHandler("push", "orders", sub, func(*message.Message) error { return nil })
	})
	var all metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(context.Background(), &all))
	require.Len(t, all.ScopeMetrics, 1)
	require.Len(t, all.ScopeMetrics[0].Metrics, 1)
	m := all.ScopeMetrics[0].Metrics[0]
	require.Equal(t, []string{"eventlog.handler.duration", "s"}, []string{m.Name, m.Unit})
	counts := map[string]uint64{}
	for _, p := range m.Data.(metricdata.Histogram[float64]).DataPoints {
		consumer, _ := p.Attributes.Value("eventlog.consumer.name")
		errorType, _ := p.Attributes.Value("error.type")
		counts[consumer.AsString()+" "+errorType.AsString()] = p.Count
	}
	require.Equal(t, map[string]uint64{"push@orders ": 3, "push@orders _OTHER": 1, "push@orders internal": 1}, counts)
}
