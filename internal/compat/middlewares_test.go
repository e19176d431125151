package compat_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	wmiddleware "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/sony/gobreaker"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
)

// Where nothing fails, each of them handles each event once, with an attempt inside of it and without.
func TestMiddlewaresOfHandlersThatSucceed(t *testing.T) {
	t.Parallel()
	for name, m := range map[string]func(*service) message.HandlerMiddleware{
		"Retry": func(*service) message.HandlerMiddleware {
			return wmiddleware.Retry{MaxRetries: 3, InitialInterval: time.Millisecond}.Middleware
		},
		"PoisonQueue": func(s *service) message.HandlerMiddleware {
			poison, err := wmiddleware.PoisonQueue(s.jobs, "poison")
			require.NoError(t, err)
			return poison
		},
		"Timeout": func(*service) message.HandlerMiddleware { return wmiddleware.Timeout(time.Minute) },
		"IgnoreErrors": func(*service) message.HandlerMiddleware {
			return wmiddleware.NewIgnoreErrors([]error{errors.New("x")}).Middleware
		},
		"Throttle": func(*service) message.HandlerMiddleware { return wmiddleware.NewThrottle(1000, time.Second).Middleware },
		"CircuitBreaker": func(*service) message.HandlerMiddleware {
			return wmiddleware.NewCircuitBreaker(gobreaker.Settings{}).Middleware
		},
		"CorrelationID": func(*service) message.HandlerMiddleware { return wmiddleware.CorrelationID },
		"Recoverer":     func(*service) message.HandlerMiddleware { return wmiddleware.Recoverer },
		"DelayOnError":  func(*service) message.HandlerMiddleware { return (&wmiddleware.DelayOnError{}).Middleware },
	} {
		for inside, attempt := range map[string]message.HandlerMiddleware{"with Attempt": middleware.Attempt, "alone": passthrough} {
			t.Run(name+" "+inside, func(t *testing.T) {
				t.Parallel()
				s := newService(t, map[string]string{"push": "orders"})
				logtest.Append(t, s.db, "orders", 3)
				s.router.AddMiddleware(m(s), attempt)
				s.router.AddHandler("push", "orders", s.runner.Subscriber("push"), "jobs", s.jobs, func(msg *message.Message) ([]*message.Message, error) {
					wmiddleware.SetCorrelationID("c"+string(msg.Payload), msg)
					return message.Messages{message.NewMessage(msg.UUID, msg.Payload)}, effect(msg.Context())
				})
				run(t, s.router)
				s.passed(t, "push", "orders", 3)
				require.Equal(t, []string{"push 1", "push 2", "push 3"}, s.effects(t))
				require.Equal(t, []string{"1", "2", "3"}, s.jobPayloads(t))
				if name == "CorrelationID" {
					require.Equal(t, []string{"c1", "c2", "c3"}, pgtest.Column[string](t, s.db,
						"select metadata->>'"+wmiddleware.CorrelationIDMetadataKey+"' from watermill_jobs order by 1"))
				}
			})
		}
	}
}

// An open circuit fails rounds until it lets one through again; nothing is lost or handled twice.
func TestOpenCircuitHoldsTheConsumerUp(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"push": "orders"})
	logtest.Append(t, s.db, "orders", 3)
	var tries atomic.Int64
	s.router.AddMiddleware(wmiddleware.NewCircuitBreaker(gobreaker.Settings{Timeout: 50 * time.Millisecond}).Middleware)
	s.router.AddConsumerHandler("push", "orders", s.runner.Subscriber("push"), func(msg *message.Message) error {
		if tries.Add(1) <= 7 { // it opens at the sixth
			return errors.New("away")
		}
		return effect(msg.Context())
	})
	run(t, s.router)
	require.Eventually(t, func() bool { return len(s.effects(t)) == 3 }, time.Minute, 5*time.Millisecond)
	require.Equal(t, []string{"push 1", "push 2", "push 3"}, s.effects(t))
}

// The deduplicator remembers a message whose round was rolled back: the reason why it cannot be used.
func TestDeduplicatorLosesWhatWasRolledBack(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"push": "orders"})
	logtest.Append(t, s.db, "orders", 1)
	var tries atomic.Int64
	s.router.AddMiddleware((&wmiddleware.Deduplicator{}).Middleware)
	s.router.AddConsumerHandler("push", "orders", s.runner.Subscriber("push"), func(*message.Message) error {
		tries.Add(1)
		return errors.New("not yet")
	})
	run(t, s.router)
	require.Eventually(t, func() bool {
		return logtest.Position(t, s.db, cursor.Key{Consumer: "push", Topic: "orders"}) == 1
	}, time.Minute, 5*time.Millisecond)
	require.Equal(t, int64(1), tries.Load())
	require.Empty(t, s.effects(t))
}

func passthrough(h message.HandlerFunc) message.HandlerFunc { return h }
