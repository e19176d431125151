package subscriber

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
)

// openDelivery opens a round over 1,000 events, and acks what is delivered.
func openDelivery(t testing.TB) (s *subscription, open func() *cursor.Round) {
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 1000)
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 4 })
	config := ConsumerConfig{Name: "push", Topic: AllTopics, Start: cursor.FromBeginning(), BatchSize: 1000}
	r, err := NewRunner(pool, RunnerConfig{Consumers: []ConsumerConfig{config}}, nil)
	require.NoError(t, err)
	config = r.config.Consumers[0]
	key := config.key(config.Topic)
	require.NoError(t, r.ensure(t.Context(), key, config.Start))
	s = newSubscription(t.Context(), r, nil, config, key)
	go func() {
		for msg := range s.out {
			msg.Ack()
		}
	}()
	t.Cleanup(func() { close(s.out) })
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	var last *cursor.Round
	t.Cleanup(func() { last.Rollback(context.Background()) })
	return s, func() *cursor.Round {
		if last != nil {
			last.Rollback(t.Context())
		}
		last = s.newRound(conn)
		opening, err := last.Open(t.Context())
		require.NoError(t, err)
		require.Len(t, opening.Events, 1000)
		return last
	}
}

// BenchmarkDelivery hands one event to a subscriber that acks it, without a router.
func BenchmarkDelivery(b *testing.B) {
	s, open := openDelivery(b)
	r, i := open(), 0
	b.ReportAllocs()
	for b.Loop() {
		if i == 1000 {
			b.StopTimer()
			r, i = open(), 0
			b.StartTimer()
		}
		if err := s.deliver(r, &r.Opening().Events[i]); err != nil {
			b.Fatal(err)
		}
		i++
	}
}

// What is done for each event may not grow by accident.
func TestDeliveryAllocatesLittle(t *testing.T) {
	s, open := openDelivery(t)
	r, i := open(), 0
	var failed error
	each := testing.AllocsPerRun(900, func() {
		if err := s.deliver(r, &r.Opening().Events[i]); err != nil {
			failed = err
		}
		i++
	})
	require.NoError(t, failed)
	require.LessOrEqual(t, each, 8.0, "the unit, the context, the message with its channels and metadata")
}
