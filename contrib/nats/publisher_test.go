package nats_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"
	natsio "github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/contrib/nats"
	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// stream is JetStream in a server of the test's own, with a stream on the subject "out".
type stream struct {
	conn *natsio.Conn
	js   natsio.JetStreamContext
}

func newStream(t *testing.T, window time.Duration) *stream {
	t.Helper()
	broker, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true,
	})
	require.NoError(t, err)
	broker.Start()
	t.Cleanup(func() {
		broker.Shutdown()
		broker.WaitForShutdown()
	})
	require.True(t, broker.ReadyForConnections(time.Minute))
	conn, err := natsio.Connect(broker.ClientURL())
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	js, err := conn.JetStream()
	require.NoError(t, err)
	_, err = js.AddStream(&natsio.StreamConfig{Name: "OUT", Subjects: []string{"out"}, Duplicates: window})
	require.NoError(t, err)
	return &stream{conn, js}
}

func (s *stream) publisher(t *testing.T) message.Publisher {
	t.Helper()
	pub, err := nats.NewPublisher(s.conn, watermill.NopLogger{})
	require.NoError(t, err)
	return pub
}

// holds is the payloads in the stream, in its order.
func (s *stream) holds(t *testing.T) []string {
	t.Helper()
	info, err := s.js.StreamInfo("OUT")
	require.NoError(t, err)
	payloads := make([]string, 0, info.State.Msgs)
	for i := info.State.FirstSeq; i <= info.State.LastSeq; i++ {
		m, err := s.js.GetMsg("OUT", i)
		require.NoError(t, err)
		payloads = append(payloads, string(m.Data))
	}
	return payloads
}

// after does something once the broker has acked a call.
type after struct {
	message.Publisher
	do func() error
}

func (p after) Publish(topic string, messages ...*message.Message) error {
	if err := p.Publisher.Publish(topic, messages...); err != nil {
		return err
	}
	return p.do()
}

// relay runs consumers of all events, which relay two messages for each, until the test ends.
func relay(t *testing.T, db *pgtest.DB, pub message.Publisher, consumers ...string) {
	t.Helper()
	config := subscriber.RunnerConfig{PollInterval: 50 * time.Millisecond}
	for _, name := range consumers {
		config.Consumers = append(config.Consumers, subscriber.ConsumerConfig{
			Name: name, Topic: subscriber.AllTopics, Start: cursor.FromBeginning(), BatchSize: 10,
			RetryDelay: 10 * time.Millisecond, RetryDelayCap: 50 * time.Millisecond,
		})
	}
	runner, err := subscriber.NewRunner(db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 8 }), config, watermill.NopLogger{})
	require.NoError(t, err)
	out, err := publisher.AtCommit(pub, publisher.RelayConfig{})
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddMiddleware(middleware.Round(nil))
	for _, name := range consumers {
		router.AddHandler(name, subscriber.AllTopics, runner.Subscriber(name), "out", out, func(msg *message.Message) ([]*message.Message, error) {
			return message.Messages{
				message.NewMessage(watermill.NewUUID(), []byte(name+" "+string(msg.Payload)+" first")),
				message.NewMessage(watermill.NewUUID(), []byte(name+" "+string(msg.Payload)+" second")),
			}, nil
		})
	}
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-ended)
	})
}

func passed(t *testing.T, db *pgtest.DB, consumer string, seq int64) {
	t.Helper()
	require.Eventually(t, func() bool { return logtest.Position(t, db, cursor.Key{Consumer: consumer}) >= seq }, time.Minute, 5*time.Millisecond)
}

func TestStreamHoldsEachMessageOnceWhereTheCommitFails(t *testing.T) {
	t.Parallel()
	s := newStream(t, 2*time.Minute)
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 2)
	db.Exec(t, `
		create sequence tries;
		create function fail_thrice() returns trigger language plpgsql as $$ begin
			if nextval('tries') <= 3 then raise exception 'not yet' using errcode = 'P0042'; end if;
			return null;
		end $$;
		create constraint trigger fail_thrice after update on event_consumer_cursors deferrable initially deferred
			for each row execute function fail_thrice()`)
	var calls atomic.Int64
	relay(t, db, after{s.publisher(t), func() error { calls.Add(1); return nil }}, "push")
	passed(t, db, "push", 2)
	require.GreaterOrEqual(t, calls.Load(), int64(4), "three commits failed")
	require.Equal(t, []string{"push 1 first", "push 1 second", "push 2 first", "push 2 second"}, s.holds(t))
}

func TestStreamHoldsEachMessageOnceWhereTheConsumerIsKilledBeforeTheCommit(t *testing.T) {
	t.Parallel()
	s := newStream(t, 2*time.Minute)
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 2)
	killer := db.Pool(t)
	var calls atomic.Int64
	relay(t, db, after{s.publisher(t), func() error {
		if calls.Add(1) > 2 {
			return nil
		}
		var killed int
		err := killer.QueryRow(context.Background(), `select count(pg_terminate_backend(pid)) from pg_stat_activity
			where datname = current_database() and state = 'idle in transaction'`).Scan(&killed)
		if err == nil && killed == 0 {
			err = errors.New("there is no open round")
		}
		return err
	}}, "push")
	passed(t, db, "push", 2)
	require.GreaterOrEqual(t, calls.Load(), int64(3))
	require.Equal(t, []string{"push 1 first", "push 1 second", "push 2 first", "push 2 second"}, s.holds(t))
}

func TestConsumersThatRelayTheSameEventDoNotCollide(t *testing.T) {
	t.Parallel()
	s := newStream(t, 2*time.Minute)
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 1)
	relay(t, db, s.publisher(t), "push", "mail")
	passed(t, db, "push", 1)
	passed(t, db, "mail", 1)
	require.ElementsMatch(t, []string{"push 1 first", "push 1 second", "mail 1 first", "mail 1 second"}, s.holds(t))
}

// Deduplication is the broker's, and ends with its window.
func TestBeyondTheWindowAMessageIsThereTwice(t *testing.T) {
	t.Parallel()
	s := newStream(t, 100*time.Millisecond) // the shortest that there is
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 1)
	relay(t, db, after{s.publisher(t), func() error {
		if info, err := s.js.StreamInfo("OUT"); err != nil || info.State.Msgs < 4 {
			return errors.Join(errors.New("the process dies here, until the window is over"), err)
		}
		return nil
	}}, "push")
	passed(t, db, "push", 1)
	held := s.holds(t)
	require.Equal(t, []string{"push 1 first", "push 1 second"}, held[:2])
	require.GreaterOrEqual(t, len(held), 4)
}
