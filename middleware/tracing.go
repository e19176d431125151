package middleware

import (
	"context"
	"maps"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// TracingConfig is for [Tracing] and [TracePublisher].
type TracingConfig struct {
	// TracerProvider defaults to OpenTelemetry's global one.
	TracerProvider trace.TracerProvider

	// Propagator writes the trace context into a message's metadata, and reads it from there. Defaults to the global one,
	// which does neither until a program sets it: otel.SetTextMapPropagator(propagation.TraceContext{}) is the W3C's.
	Propagator propagation.TextMapPropagator
}

// tracing is a configuration in use.
type tracing struct {
	tracer     trace.Tracer
	propagator propagation.TextMapPropagator
}

func newTracing(config TracingConfig) tracing {
	if config.TracerProvider == nil {
		config.TracerProvider = otel.GetTracerProvider()
	}
	if config.Propagator == nil {
		config.Propagator = otel.GetTextMapPropagator()
	}
	return tracing{config.TracerProvider.Tracer(scope), config.Propagator}
}

// Tracing makes a span of each attempt to handle a message: a child of the trace that the message's metadata tells
// of, as [TracePublisher] writes it. The handler finds it in its message's context; what the handler returns carries
// its trace on in the metadata, where the message has no trace of its own in its context.
//
//	router.AddMiddleware(middleware.Round(logger), middleware.Tracing(middleware.TracingConfig{}))
//
// It goes inside [Round], as any other middleware. The span says how the handler ended; whether the round was
// committed is known only later. A panic's value is not recorded. Messages that did not come from an event log are
// traced as well, as those of jobs.
func Tracing(config TracingConfig) message.HandlerMiddleware {
	t := newTracing(config)
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) { return t.handle(msg, h) }
	}
}

func (t tracing) handle(msg *message.Message, h message.HandlerFunc) (produced []*message.Message, err error) {
	ctx := t.propagator.Extract(msg.Context(), propagation.MapCarrier(msg.Metadata))
	topic, attributes := received(msg)
	ctx, span := t.tracer.Start(ctx, "process "+topic, trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(attributes...))
	returned := false
	// Not span.End itself: called by a panic, it would record the panic's value.
	defer func() {
		switch {
		case !returned:
			fail(span, errExited) // or a panic, which is not ours to look at
		case err != nil:
			fail(span, err)
		}
		span.End()
	}()
	msg.SetContext(ctx)
	produced, err = h(msg)
	returned = true
	if err == nil && span.SpanContext().IsValid() {
		t.carry(span, produced)
	}
	return produced, err
}

// carry hands a trace on to what a handler has returned.
func (t tracing) carry(span trace.Span, produced []*message.Message) {
	for _, m := range produced {
		if m == nil {
			continue
		}
		ctx := m.Context()
		if !trace.SpanContextFromContext(ctx).IsValid() {
			ctx = trace.ContextWithSpanContext(ctx, span.SpanContext())
			m.SetContext(ctx)
		}
		t.inject(ctx, m)
	}
}

// inject writes the trace context into a message's metadata; what else holds the same metadata is left as it was.
func (t tracing) inject(ctx context.Context, m *message.Message) {
	metadata := maps.Clone(m.Metadata)
	if metadata == nil {
		metadata = message.Metadata{}
	}
	t.propagator.Inject(ctx, propagation.MapCarrier(metadata))
	m.Metadata = metadata
}

// received are a handled message's topic and attributes.
func received(msg *message.Message) (topic string, attributes []attribute.KeyValue) {
	attributes = append(make([]attribute.KeyValue, 0, 10),
		attribute.String("messaging.operation.name", "process"),
		attribute.String("messaging.operation.type", "process"),
		attribute.String("messaging.message.id", msg.UUID),
		attribute.Int("messaging.message.body.size", len(msg.Payload)))
	unit, ok := cursor.UnitFromContext(msg.Context())
	if !ok {
		topic = message.SubscribeTopicFromCtx(msg.Context())
		return topic, append(attributes, attribute.String("messaging.system", "watermill"), attribute.String("messaging.destination.name", topic))
	}
	event := unit.Event()
	return event.Topic, append(attributes,
		attribute.String("messaging.system", "eventlog"),
		attribute.String("messaging.destination.name", event.Topic),
		attribute.String("messaging.consumer.group.name", unit.Cursor().String()),
		attribute.Int64("eventlog.event.seq", event.Seq),
		attribute.Int("eventlog.event.attempt", unit.Attempt()))
}

func fail(span trace.Span, err error) {
	span.SetAttributes(attribute.String("error.type", cursor.ErrorType(err)))
	span.SetStatus(codes.Error, err.Error())
}

// TracePublisher decorates a publisher: each call is a span, and its trace context is written into the metadata of
// what is published. The span's parent is the first message's context; where the others belong to other traces or
// spans, the span is linked to them.
//
//	traced, err := middleware.TracePublisher(middleware.TracingConfig{})(events.InTx(tx))
//	router.AddPublisherDecorators(middleware.TracePublisher(middleware.TracingConfig{}))
//
// Messages that are published without it get no trace. The caller's messages are not changed.
func TracePublisher(config TracingConfig) message.PublisherDecorator {
	t := newTracing(config)
	return func(pub message.Publisher) (message.Publisher, error) { return tracedPublisher{pub, t}, nil }
}

type tracedPublisher struct {
	message.Publisher
	tracing tracing
}

func (p tracedPublisher) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return p.Publisher.Publish(topic)
	}
	parent := messages[0].Context()
	ctx, span := p.tracing.tracer.Start(parent, "send "+topic, trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithLinks(links(parent, messages[1:])...), trace.WithAttributes(sent(topic, messages)...))
	defer func() { span.End() }() // as in handle
	traced := make([]*message.Message, len(messages))
	for i, m := range messages {
		traced[i] = m.CopyWithContext()
		p.tracing.inject(ctx, traced[i])
	}
	err := p.Publisher.Publish(topic, traced...)
	if err != nil {
		fail(span, err)
	}
	return err
}

func sent(topic string, messages []*message.Message) []attribute.KeyValue {
	attributes := []attribute.KeyValue{
		attribute.String("messaging.system", "watermill"),
		attribute.String("messaging.operation.name", "send"),
		attribute.String("messaging.operation.type", "send"),
		attribute.String("messaging.destination.name", topic),
	}
	if len(messages) == 1 {
		return append(attributes, attribute.String("messaging.message.id", messages[0].UUID))
	}
	return append(attributes, attribute.Int("messaging.batch.message_count", len(messages)))
}

// links are the spans that messages belong to, other than the parent.
func links(parent context.Context, messages []*message.Message) (all []trace.Link) {
	seen := map[trace.SpanID]bool{trace.SpanContextFromContext(parent).SpanID(): true}
	for _, m := range messages {
		if sc := trace.SpanContextFromContext(m.Context()); sc.IsValid() && !seen[sc.SpanID()] {
			seen[sc.SpanID()] = true
			all = append(all, trace.Link{SpanContext: sc})
		}
	}
	return all
}
