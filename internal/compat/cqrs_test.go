package compat_test

import (
	"context"
	"testing"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

type Ordered struct{ ID string }

type Cancelled struct{ ID string }

type Invoice struct{ ID string }

var marshaler = cqrs.JSONMarshaler{GenerateName: cqrs.StructName}

// eventBus appends events to one topic, by a publisher such as one in a transaction.
func eventBus(t *testing.T, pub message.Publisher, topic func(event string) string) *cqrs.EventBus {
	t.Helper()
	bus, err := cqrs.NewEventBusWithConfig(pub, cqrs.EventBusConfig{
		GeneratePublishTopic: func(p cqrs.GenerateEventPublishTopicParams) (string, error) { return topic(p.EventName), nil },
		Marshaler:            marshaler,
	})
	require.NoError(t, err)
	return bus
}

// commandBus sends commands as jobs.
func (s *service) commandBus(t *testing.T) *cqrs.CommandBus {
	t.Helper()
	bus, err := cqrs.NewCommandBusWithConfig(s.jobs, cqrs.CommandBusConfig{
		GeneratePublishTopic: func(cqrs.CommandBusGeneratePublishTopicParams) (string, error) { return "jobs", nil },
		Marshaler:            marshaler,
	})
	require.NoError(t, err)
	return bus
}

func (s *service) order(t *testing.T, topic func(string) string) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		bus := eventBus(t, s.events.InTx(tx), topic)
		for _, event := range []any{Ordered{"7"}, Cancelled{"7"}, Ordered{"8"}} {
			if err := bus.Publish(t.Context(), event); err != nil {
				return err
			}
		}
		return nil
	}))
}

// Each handler of an event processor is a consumer of its own, with a topic for each event.
func TestCQRSEventProcessor(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"bill": "Ordered", "refund": "Cancelled"})
	commands := s.commandBus(t)
	processor, err := cqrs.NewEventProcessorWithConfig(s.router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(p cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return p.EventName, nil },
		SubscriberConstructor: func(p cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return s.runner.Subscriber(p.HandlerName), nil
		},
		Marshaler: marshaler,
	})
	require.NoError(t, err)
	require.NoError(t, processor.AddHandlers(
		cqrs.NewEventHandler("bill", func(ctx context.Context, e *Ordered) error {
			if err := commands.Send(ctx, Invoice(*e)); err != nil {
				return err
			}
			return effect(ctx)
		}),
		cqrs.NewEventHandler("refund", func(ctx context.Context, _ *Cancelled) error { return effect(ctx) }),
	))
	s.order(t, func(event string) string { return event })
	run(t, s.router)
	s.passed(t, "bill", "Ordered", 3)
	s.passed(t, "refund", "Cancelled", 2)
	require.Equal(t, []string{"bill 1", "bill 3", "refund 2"}, s.effects(t))
	require.Equal(t, []string{`{"ID":"7"}`, `{"ID":"8"}`}, s.jobPayloads(t))
}

// A group is one consumer that sees all of its events in their order.
func TestCQRSEventGroupProcessor(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"billing": "orders"})
	var seen []string
	processor, err := cqrs.NewEventGroupProcessorWithConfig(s.router, cqrs.EventGroupProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventGroupProcessorGenerateSubscribeTopicParams) (string, error) { return "orders", nil },
		SubscriberConstructor: func(p cqrs.EventGroupProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return s.runner.Subscriber(p.EventGroupName), nil
		},
		Marshaler: marshaler,
	})
	require.NoError(t, err)
	require.NoError(t, processor.AddHandlersGroup("billing",
		cqrs.NewGroupEventHandler(func(ctx context.Context, e *Ordered) error {
			seen = append(seen, "ordered "+e.ID)
			return effect(ctx)
		}),
		cqrs.NewGroupEventHandler(func(ctx context.Context, e *Cancelled) error {
			seen = append(seen, "cancelled "+e.ID)
			return effect(ctx)
		}),
	))
	s.order(t, func(string) string { return "orders" })
	run(t, s.router)
	s.passed(t, "billing", "orders", 3)
	require.Equal(t, []string{"ordered 7", "cancelled 7", "ordered 8"}, seen)
	require.Equal(t, []string{"billing 1", "billing 2", "billing 3"}, s.effects(t))
}

// A handler cannot append to the log that it reads, through a bus neither.
func TestCQRSHandlerThatPublishesAnEventIsTold(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"bill": "Ordered"})
	bus := eventBus(t, s.events, func(event string) string { return event })
	processor, err := cqrs.NewEventProcessorWithConfig(s.router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(p cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return p.EventName, nil },
		SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return s.runner.Subscriber("bill"), nil
		},
		Marshaler: marshaler,
	})
	require.NoError(t, err)
	require.NoError(t, processor.AddHandlers(cqrs.NewEventHandler("bill", func(ctx context.Context, e *Ordered) error {
		return bus.Publish(ctx, Cancelled(*e))
	})))
	s.order(t, func(event string) string { return event })
	run(t, s.router)
	line := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")[0]
	require.ErrorIs(t, line.Err, cursor.ErrConsumerAppends)
}
