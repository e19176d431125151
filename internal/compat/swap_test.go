package compat_test

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// documented is the SQL of the page about Watermill.
func documented(t *testing.T) (there, back string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/watermill.md")
	require.NoError(t, err)
	parts := strings.Split(string(page), "```sql\n")
	require.Len(t, parts, 3)
	for i := range parts {
		parts[i], _, _ = strings.Cut(parts[i], "```")
	}
	return parts[1], parts[2]
}

// readOld reads n messages of the topic orders by watermill-sql's own subscriber, and stops it.
func readOld(t *testing.T, s *service, n int) (payloads []string) {
	t.Helper()
	sub, err := wsql.NewSubscriber(s.db.SQL(t), wsql.SubscriberConfig{
		SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{}, PollInterval: 10 * time.Millisecond,
	}, watermill.NopLogger{})
	require.NoError(t, err)
	messages, err := sub.Subscribe(context.Background(), "orders")
	require.NoError(t, err)
	for range n {
		select {
		case msg := <-messages:
			payloads = append(payloads, msg.UUID+" "+string(msg.Payload)+" "+msg.Metadata.Get("k"))
			msg.Ack()
		case <-time.After(time.Minute):
			t.Fatalf("read %d of %d", len(payloads), n)
		}
	}
	require.Eventually(t, func() bool {
		return pgtest.Value[bool](t, s.db, `select offset_acked = (select max("offset") from watermill_orders) from watermill_offsets_orders`)
	}, time.Minute, 5*time.Millisecond, "the offset was not written")
	require.NoError(t, sub.Close())
	return payloads
}

func TestSwappingFromWatermillSQLAndBack(t *testing.T) {
	t.Parallel()
	there, back := documented(t)
	s := newService(t, map[string]string{"billing": "orders"})
	for _, q := range append((wsql.DefaultPostgreSQLSchema{}).SchemaInitializingQueries("orders"),
		(wsql.DefaultPostgreSQLOffsetsAdapter{}).SchemaInitializingQueries("orders")...) {
		s.db.Exec(t, q.Query, q.Args...)
	}
	old, err := wsql.NewPublisher(s.db.SQL(t), wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}}, watermill.NopLogger{})
	require.NoError(t, err)
	number := func(payload string) *message.Message {
		msg := message.NewMessage("id "+payload, []byte(payload))
		msg.Metadata.Set("k", "v")
		return msg
	}
	require.NoError(t, old.Publish("orders", number("1"), number("2")))
	require.Equal(t, []string{"id 1 1 v", "id 2 2 v"}, readOld(t, s, 2))
	bare := message.NewMessage("id 4", []byte("4"))
	bare.Metadata = nil // watermill-sql writes it as null
	require.NoError(t, old.Publish("orders", number("3"), bare))
	require.NoError(t, old.Publish("orders", number("5")))

	s.db.Exec(t, there)
	var mu sync.Mutex
	var got []string
	s.router.AddConsumerHandler("billing", "orders", s.runner.Subscriber("billing"), func(msg *message.Message) error {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, msg.UUID+" "+string(msg.Payload)+" "+msg.Metadata.Get("k"))
		return nil
	})
	ended := make(chan error, 1)
	go func() { ended <- s.router.Run(context.Background()) }()
	s.passed(t, "billing", "orders", 3)
	require.NoError(t, s.router.Close())
	require.NoError(t, <-ended)
	require.Equal(t, []string{"id 3 3 v", "id 4 4 ", "id 5 5 v"}, got)
	require.Equal(t, int64(2), pgtest.Value[int64](t, s.db, "select count(*) from watermill_orders"), "what was read stays")

	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		return s.events.InTx(tx).Publish("orders", number("6"), number("7"))
	}))
	s.db.Exec(t, back)
	require.Equal(t, []string{"id 6 6 v", "id 7 7 v"}, readOld(t, s, 2))
}
