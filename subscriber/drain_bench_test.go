package subscriber_test

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// BenchmarkDrain goes through a backlog of b.N events of about 250 bytes with three metadata keys, one job of about
// 120 bytes an event, through a stock router.
func BenchmarkDrain(b *testing.B) {
	db := logtest.New(b)
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(b, err)
	require.NoError(b, jobs.Initialize(b.Context(), db.Conn(b), "jobs"))
	db.Exec(b, `insert into event_outbox (topic, payload, metadata)
		select 'orders', convert_to(rpad('{"id": ' || i || ', "x": "', 249, 'x') || '"}', 'UTF8'), '{"a": "1234567890", "b": "1234567890", "c": "1234567890"}'
		from generate_series(1, $1) i order by i`, b.N)
	db.Exec(b, "analyze event_log")

	pool := db.Pool(b, func(c *pgxpool.Config) { c.MaxConns = 4 })
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{
		{Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 1000},
	}}, nil)
	require.NoError(b, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(b, err)
	router.AddMiddleware(middleware.Round(nil))
	payload := []byte(`{"job": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}`)
	left, done := b.N, make(chan struct{})
	router.AddHandler("push", subscriber.AllTopics, runner.Subscriber("push"), "jobs", jobs, func(msg *message.Message) ([]*message.Message, error) {
		if left--; left == 0 {
			close(done)
		}
		return []*message.Message{message.NewMessage(msg.UUID, payload)}, nil
	})
	b.ReportAllocs()
	b.ResetTimer()
	go router.Run(context.Background())
	<-done
	for position(b, db, "push") < int64(b.N) {
		time.Sleep(time.Millisecond)
	}
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	require.NoError(b, router.Close())
}
