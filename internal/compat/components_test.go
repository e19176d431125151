package compat_test

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/components/fanin"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/components/metrics"
	"github.com/ThreeDotsLabs/watermill/components/requeuer"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func TestForwarder(t *testing.T) {
	t.Parallel()
	const topic = "outbox"
	for name, config := range map[string]func(*service) forwarder.Config{
		"on a router of ours": func(s *service) forwarder.Config {
			return forwarder.Config{ForwarderTopic: topic, Router: s.router}
		},
		"on its own router": func(s *service) forwarder.Config {
			return forwarder.Config{ForwarderTopic: topic, Middlewares: []message.HandlerMiddleware{middleware.Round(s.logger)}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for out, make := range map[string]func(*service, *broker) message.Publisher{
				"a broker": func(_ *service, b *broker) message.Publisher { return b },
				"a broker at commit": func(_ *service, b *broker) message.Publisher {
					relay, err := publisher.AtCommit(b, publisher.RelayConfig{})
					require.NoError(t, err)
					return relay
				},
				"jobs": func(s *service, _ *broker) message.Publisher { return s.jobs },
			} {
				t.Run(out, func(t *testing.T) {
					t.Parallel()
					s, b := newService(t, map[string]string{"forward": topic}), &broker{}
					f, err := forwarder.NewForwarder(s.runner.Subscriber("forward"), make(s, b), s.logger, config(s))
					require.NoError(t, err)
					err = pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
						box := forwarder.NewPublisher(s.events.InTx(tx), forwarder.PublisherConfig{ForwarderTopic: topic})
						return box.Publish("jobs", message.NewMessage("id", []byte("7")))
					})
					require.NoError(t, err)
					run(t, f)
					s.passed(t, "forward", topic, 1)
					switch out {
					case "jobs":
						require.Equal(t, []string{"7"}, s.jobPayloads(t))
					case "a broker":
						require.Equal(t, []string{"jobs id 7"}, b.got())
					default:
						require.Equal(t, []string{"jobs public.event_log/forward@outbox/1/1 7"}, b.got())
					}
				})
			}
		})
	}
}

func TestRequeuer(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"requeue": "poison"})
	logtest.Append(t, s.db, "poison", 2)
	r, err := requeuer.NewRequeuer(requeuer.Config{
		Subscriber: s.runner.Subscriber("requeue"), SubscribeTopic: "poison", Publisher: s.jobs, Router: s.router, Delay: time.Millisecond,
		GeneratePublishTopic: func(requeuer.GeneratePublishTopicParams) (string, error) { return "jobs", nil },
	}, s.logger)
	require.NoError(t, err)
	run(t, r)
	s.passed(t, "requeue", "poison", 2)
	require.Equal(t, []string{"1", "2"}, s.jobPayloads(t))
	require.Equal(t, "1", pgtest.Value[string](t, s.db, "select min(metadata->>'"+requeuer.RetriesKey+"') from watermill_jobs"))
}

func TestDelayedJobs(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"push": "orders"})
	logtest.Append(t, s.db, "orders", 1)
	delayed, err := delay.NewPublisher(s.jobs, delay.PublisherConfig{
		DefaultDelayGenerator: func(delay.DefaultDelayGeneratorParams) (delay.Delay, error) { return delay.For(time.Minute), nil },
	})
	require.NoError(t, err)
	s.router.AddHandler("push", "orders", s.runner.Subscriber("push"), "jobs", delayed, message.PassthroughHandler)
	run(t, s.router)
	s.passed(t, "push", "orders", 1)
	require.Equal(t, "1m0s", pgtest.Value[string](t, s.db, "select metadata->>'"+delay.DelayedForKey+"' from watermill_jobs"))
}

// FanIn's router takes no middleware: its consumers consent to that.
func TestFanIn(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"a": "a"}, func(c *subscriber.ConsumerConfig) { c.WithoutMiddleware = true })
	logtest.Append(t, s.db, "a", 3)
	f, err := fanin.NewFanIn(s.runner.Subscriber("a"), s.jobs, fanin.Config{SourceTopics: []string{"a"}, TargetTopic: "jobs"}, s.logger)
	require.NoError(t, err)
	run(t, f)
	s.passed(t, "a", "a", 3)
	require.Equal(t, []string{"1", "2", "3"}, s.jobPayloads(t))
}

func TestFanInWithoutConsentIsReported(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"a": "a"})
	logtest.Append(t, s.db, "a", 1)
	f, err := fanin.NewFanIn(s.runner.Subscriber("a"), s.jobs, fanin.Config{SourceTopics: []string{"a"}, TargetTopic: "jobs"}, s.logger)
	require.NoError(t, err)
	run(t, f)
	select {
	case err := <-s.runner.Failed():
		require.ErrorIs(t, err, subscriber.ErrNoMiddleware)
	case <-time.After(time.Minute):
		t.Fatal("nothing was reported")
	}
	require.Empty(t, s.jobPayloads(t))
}

func TestPrometheusMetrics(t *testing.T) {
	t.Parallel()
	s := newService(t, map[string]string{"push": "orders"})
	logtest.Append(t, s.db, "orders", 3)
	registry := prometheus.NewRegistry()
	metrics.NewPrometheusMetricsBuilder(registry, "", "").AddPrometheusRouterMetrics(s.router)
	s.router.AddHandler("push", "orders", s.runner.Subscriber("push"), "jobs", s.jobs, func(msg *message.Message) ([]*message.Message, error) {
		return message.Messages{message.NewMessage(msg.UUID, msg.Payload)}, effect(msg.Context())
	})
	run(t, s.router)
	s.passed(t, "push", "orders", 3)
	require.Equal(t, []string{"push 1", "push 2", "push 3"}, s.effects(t))
	require.Equal(t, []string{"1", "2", "3"}, s.jobPayloads(t))
	counted := func() map[string]uint64 {
		families, err := registry.Gather()
		require.NoError(t, err)
		counts := map[string]uint64{}
		for _, f := range families {
			for _, m := range f.Metric {
				counts[f.GetName()] += m.GetHistogram().GetSampleCount() + uint64(m.GetCounter().GetValue())
			}
		}
		return counts
	}
	want := map[string]uint64{"handler_execution_time_seconds": 3, "publish_time_seconds": 3, "subscriber_messages_received_total": 3}
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, want, counted()) }, time.Minute, 5*time.Millisecond)
}
