package middleware_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// spans is a tracer provider that keeps what it makes.
type spans struct {
	*tracetest.SpanRecorder
	provider *sdk.TracerProvider
	config   middleware.TracingConfig
}

func newSpans() spans {
	recorder := tracetest.NewSpanRecorder()
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(recorder))
	return spans{recorder, provider, middleware.TracingConfig{TracerProvider: provider, Propagator: propagation.TraceContext{}}}
}

func (s spans) named(name string) (found []sdk.ReadOnlySpan) {
	for _, span := range s.Ended() {
		if span.Name() == name {
			found = append(found, span)
		}
	}
	return found
}

func (s spans) one(t *testing.T, name string) sdk.ReadOnlySpan {
	t.Helper()
	found := s.named(name)
	require.Len(t, found, 1, name)
	return found[0]
}

// start is a context in a span of the user's.
func (s spans) start(name string) (context.Context, trace.SpanContext) {
	ctx, span := s.provider.Tracer("the user's").Start(context.Background(), name)
	span.End()
	return ctx, span.SpanContext()
}

func (s spans) publisher(t *testing.T, pub message.Publisher) message.Publisher {
	t.Helper()
	traced, err := middleware.TracePublisher(s.config)(pub)
	require.NoError(t, err)
	return traced
}

func traceparent(sc trace.SpanContext) string {
	return fmt.Sprintf("00-%s-%s-%s", sc.TraceID(), sc.SpanID(), sc.TraceFlags())
}

func attributes(span sdk.ReadOnlySpan) map[string]any {
	all := map[string]any{}
	for _, kv := range span.Attributes() {
		all[string(kv.Key)] = kv.Value.AsInterface()
	}
	return all
}

// consume handles a log by a traced router, until the cursor has passed seq.
func (s spans) consume(t *testing.T, db *pgtest.DB, seq int64, h func(jobs message.Publisher) message.HandlerFunc) {
	t.Helper()
	runner, err := subscriber.NewRunner(db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 4 }), subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{{Name: "push", Start: cursor.FromBeginning(), RetryDelay: time.Millisecond}},
	}, nil)
	require.NoError(t, err)
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(t, err)
	require.NoError(t, jobs.Initialize(t.Context(), db.Conn(t), "jobs"))
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(t, err)
	router.AddMiddleware(middleware.Round(nil), middleware.Tracing(s.config))
	router.AddHandler("push", "orders", runner.Subscriber("push"), "jobs", jobs, h(jobs))
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	<-router.Running()
	require.Eventually(t, func() bool {
		return logtest.Position(t, db, cursor.Key{Consumer: "push", Topic: "orders"}) == seq
	}, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, router.Close())
	require.NoError(t, <-ended)
}

func TestTraceGoesFromTheAppendByTheHandlerToItsJobs(t *testing.T) {
	t.Parallel()
	db, s := logtest.New(t), newSpans()
	events, err := publisher.NewEventLog(db.Pool(t), publisher.EventLogConfig{})
	require.NoError(t, err)
	ctx, user := s.start("the user's request")
	appended := message.NewMessageWithContext(ctx, "e1", []byte(`{"id": 7}`))
	appended.Metadata["mine"] = "kept"
	before := maps.Clone(appended.Metadata)
	require.NoError(t, s.publisher(t, events).Publish("orders", appended))
	require.Equal(t, before, appended.Metadata, "the caller's message")

	s.consume(t, db, 1, func(jobs message.Publisher) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			require.Equal(t, "kept", msg.Metadata["mine"])
			_, inner := s.provider.Tracer("the user's").Start(msg.Context(), "inside")
			inner.End()
			own := message.NewMessageWithContext(msg.Context(), "own", []byte("{}"))
			if err := s.publisher(t, jobs).Publish("jobs", own); err != nil {
				return nil, err
			}
			return []*message.Message{message.NewMessage("returned", []byte("{}")), msg}, nil
		}
	})
	send, process := s.one(t, "send orders"), s.one(t, "process orders")
	require.Equal(t, trace.SpanKindProducer, send.SpanKind())
	require.Equal(t, user.SpanID(), send.Parent().SpanID())
	require.Equal(t, map[string]any{
		"messaging.system": "watermill", "messaging.operation.name": "send", "messaging.operation.type": "send",
		"messaging.destination.name": "orders", "messaging.message.id": "e1",
	}, attributes(send))
	require.Equal(t, trace.SpanKindConsumer, process.SpanKind())
	require.Equal(t, send.SpanContext().SpanID(), process.Parent().SpanID())
	require.Equal(t, map[string]any{
		"messaging.system": "eventlog", "messaging.operation.name": "process", "messaging.operation.type": "process",
		"messaging.destination.name": "orders", "messaging.message.id": "e1", "messaging.message.body.size": int64(9),
		"messaging.consumer.group.name": "push@orders", "eventlog.event.seq": int64(1), "eventlog.event.attempt": int64(1),
	}, attributes(process))
	require.Equal(t, codes.Unset, process.Status().Code)
	require.Equal(t, process.SpanContext().SpanID(), s.one(t, "inside").Parent().SpanID())
	ownSend := s.one(t, "send jobs")
	require.Equal(t, process.SpanContext().SpanID(), ownSend.Parent().SpanID())
	for _, span := range s.Ended() {
		require.Equal(t, user.TraceID(), span.SpanContext().TraceID())
	}
	require.Equal(t, []string{traceparent(ownSend.SpanContext()), traceparent(process.SpanContext()), traceparent(process.SpanContext())},
		pgtest.Column[string](t, db, `select metadata->>'traceparent' from watermill_jobs order by "offset"`))
}

func TestSpanTellsHowAnAttemptFailedAndKeepsThePanicsValue(t *testing.T) {
	t.Parallel()
	db, s := logtest.New(t), newSpans()
	logtest.Append(t, db, "orders", 1)
	var attempts atomic.Int64
	s.consume(t, db, 1, func(message.Publisher) message.HandlerFunc {
		return func(*message.Message) ([]*message.Message, error) {
			switch attempts.Add(1) {
			case 1:
				return nil, errors.New("not yet")
			case 2:
				panic("s3cr3t")
			}
			return nil, nil
		}
	})
	found := s.named("process orders")
	require.Len(t, found, 3)
	var kinds []any
	for i, span := range found {
		require.Equal(t, int64(i+1), attributes(span)["eventlog.event.attempt"])
		require.False(t, span.Parent().IsValid())
		require.Empty(t, span.Events())
		kinds = append(kinds, attributes(span)["error.type"])
	}
	require.Equal(t, []any{"_OTHER", "internal", nil}, kinds)
	require.Equal(t, sdk.Status{Code: codes.Error, Description: "not yet"}, found[0].Status())
	require.Equal(t, codes.Error, found[1].Status().Code)
	require.NotContains(t, fmt.Sprint(tracetest.SpanStubsFromReadOnlySpans(found)), "s3cr3t")
}

// kept is a publisher that keeps what it is given.
type kept struct {
	messages []*message.Message
	err      error
}

func (p *kept) Publish(_ string, messages ...*message.Message) error {
	p.messages = append(p.messages, messages...)
	return p.err
}
func (p *kept) Close() error { return nil }

func TestBatchIsOneSpanWithLinks(t *testing.T) {
	t.Parallel()
	s, pub := newSpans(), &kept{err: errors.New("the broker is away")}
	first, _ := s.start("first")
	second, secondSpan := s.start("second")
	batch := []*message.Message{
		message.NewMessageWithContext(first, "1", nil), message.NewMessageWithContext(second, "2", nil),
		message.NewMessageWithContext(first, "3", nil), message.NewMessageWithContext(second, "4", nil), {UUID: "5"},
	}
	require.ErrorIs(t, s.publisher(t, pub).Publish("orders", batch...), pub.err)
	send := s.one(t, "send orders")
	require.Equal(t, int64(5), attributes(send)["messaging.batch.message_count"])
	require.Equal(t, trace.SpanContextFromContext(first).SpanID(), send.Parent().SpanID())
	require.Len(t, send.Links(), 1)
	require.Equal(t, secondSpan, send.Links()[0].SpanContext)
	require.Equal(t, sdk.Status{Code: codes.Error, Description: "the broker is away"}, send.Status())
	require.Equal(t, "_OTHER", attributes(send)["error.type"])
	require.Len(t, pub.messages, 5)
	for i, m := range pub.messages {
		require.Equal(t, traceparent(send.SpanContext()), m.Metadata["traceparent"])
		require.Equal(t, batch[i].Context(), m.Context())
		require.Equal(t, batch[i].UUID, m.UUID)
		require.Empty(t, batch[i].Metadata)
	}
	require.NoError(t, s.publisher(t, &kept{}).Publish("orders"))
}

func TestWhatIsReturnedKeepsATraceOfItsOwn(t *testing.T) {
	t.Parallel()
	s := newSpans()
	elsewhere, elsewhereSpan := s.start("elsewhere")
	in := message.NewMessage("in", nil)
	shared := in.Metadata
	h := middleware.Tracing(s.config)(func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessageWithContext(elsewhere, "1", nil), nil, {UUID: "2"}, msg}, nil
	})
	produced, err := h(in)
	require.NoError(t, err)
	process := s.one(t, "process ")
	require.Equal(t, "watermill", attributes(process)["messaging.system"])
	require.Contains(t, process.Attributes(), attribute.String("messaging.message.id", "in"))
	require.Equal(t, traceparent(elsewhereSpan), produced[0].Metadata["traceparent"])
	require.Nil(t, produced[1])
	require.Equal(t, traceparent(process.SpanContext()), produced[2].Metadata["traceparent"])
	require.Equal(t, traceparent(process.SpanContext()), produced[3].Metadata["traceparent"])
	require.Empty(t, shared, "what held the metadata before")
}

func TestTraceIsPassedOnWithoutATracerProvider(t *testing.T) {
	t.Parallel()
	_, remote := newSpans().start("elsewhere")
	h := middleware.Tracing(middleware.TracingConfig{Propagator: propagation.TraceContext{}})(echo)
	in := message.NewMessage("in", nil)
	in.Metadata["traceparent"] = traceparent(remote)
	produced, err := h(in)
	require.NoError(t, err)
	require.Equal(t, in.Metadata["traceparent"], produced[0].Metadata["traceparent"])
}
