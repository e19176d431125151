package subscriber_test

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/sequencer"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// asRole makes a role as docs/roles.md says, with a name of the test's own, and returns its pool.
func asRole(t *testing.T, db *pgtest.DB, name string) *pgxpool.Pool {
	t.Helper()
	document, err := os.ReadFile("../docs/roles.md")
	require.NoError(t, err)
	section := regexp.MustCompile("(?s)## " + name + "\n.*?```sql\n(.*?)```").FindStringSubmatch(string(document))
	require.NotNil(t, section)
	role := db.Name() + "_" + name // roles are the whole server's
	for _, statement := range strings.Split(strings.ReplaceAll(section[1], "eventlog_"+name, role), ";") {
		db.Exec(t, statement)
	}
	t.Cleanup(func() { db.Exec(t, "drop owned by "+role); db.Exec(t, "drop role "+role) })
	return db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 6; c.ConnConfig.RuntimeParams["role"] = role })
}

func TestRoleThatAppendsCanDoNothingElse(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	pool := asRole(t, db, "append")
	for _, config := range []publisher.EventLogConfig{{}, {Staged: true}, {Once: true}} {
		events, err := publisher.NewEventLog(pool, config)
		require.NoError(t, err)
		require.NoError(t, events.Publish("orders", message.NewMessage("a", []byte("1")), message.NewMessage("b", []byte("1"))))
	}
	require.Equal(t, int64(4), pgtest.Value[int64](t, db, "select count(*) from event_log"))
	for _, refused := range []string{
		"select from event_outbox", "select from event_log", "delete from event_outbox", "update event_seq set last_seq = 0",
		"insert into event_log (seq) values (99)", "select event_outbox_move('{}', 0, false)", "select event_outbox_sequence(null, null, '0', 0, 1)",
		"insert into event_consumer_cursors (consumer) values ('x')", "truncate event_outbox",
	} {
		_, err := pool.Exec(t.Context(), refused)
		require.ErrorContains(t, err, "42501", refused)
	}
}

func TestRoleThatConsumesDoesAllThatAConsumerDoes(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	pool := asRole(t, db, "consume")
	role := db.Name() + "_consume"
	db.Exec(t, "grant insert on watermill_jobs, effects to "+role)
	db.Exec(t, "grant usage on sequence watermill_jobs_offset_seq to "+role)
	db.Exec(t, "insert into event_outbox (topic, payload, staged) select 'orders', convert_to(i::text, 'UTF8'), true from generate_series(1, 10) i")
	numbering, err := sequencer.New(pool, sequencer.Config{}, nil)
	require.NoError(t, err)
	n, err := numbering.Once(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(10), n)

	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{PollInterval: 20 * time.Millisecond, Consumers: []subscriber.ConsumerConfig{{
		Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 3, ParkAfter: 2, RetryDelay: time.Millisecond, ResumeAge: time.Hour,
	}}}, nil)
	require.NoError(t, err)
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(t, err)
	router.AddMiddleware(middleware.Round(nil))
	mended := make(chan struct{})
	router.AddHandler("push", subscriber.AllTopics, runner.Subscriber("push"), "jobs", jobs, func(msg *message.Message) ([]*message.Message, error) {
		select {
		case <-mended:
		default:
			if seqOf(msg) == 4 {
				return nil, errors.New("no")
			}
		}
		return []*message.Message{message.NewMessage("", msg.Payload)}, effect(msg)
	})
	go router.Run(context.Background())
	t.Cleanup(func() { router.Close() })
	waitPosition(t, db, "push", 10)
	close(mended)
	_, err = operate.Replay(t.Context(), pool, nil, cursor.Key{Consumer: "push"}, 4, operate.Order{By: "me"})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return jobCount(t, db) == 10 }, 30*time.Second, 5*time.Millisecond)

	// A loss is recorded, too.
	require.NoError(t, router.Close())
	db.Exec(t, "insert into event_outbox (topic, payload) select 'orders', '1' from generate_series(1, 5) i")
	db.Exec(t, "delete from event_log where seq < 14")
	_, err = pool.Exec(t.Context(), "delete from event_log")
	require.ErrorContains(t, err, "42501")
	start, err := subscriber.New(pool, subscriber.ConsumerConfig{Name: "push", Topic: subscriber.AllTopics}, nil)
	require.NoError(t, err)
	t.Cleanup(func() { start.Close() })
	messages, err := start.Subscribe(t.Context(), subscriber.AllTopics)
	require.NoError(t, err)
	(<-messages).Ack()
	require.Equal(t, []int64{11, 13}, pgtest.Column[int64](t, db, "select unnest(array[first_seq, last_seq]) from event_consumer_losses"))
}

func TestRoleThatOperatesDoesWhatAnOperatorDoes(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	pool := asRole(t, db, "operate")
	key, order := cursor.Key{Consumer: "push"}, operate.Order{By: "me", Reason: "to see"}
	_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", []cursor.Registration{{Key: key, Start: fromBeginning}})
	require.NoError(t, err)
	db.Exec(t, "insert into event_outbox (topic, payload) select 'orders', '1' from generate_series(1, 9)")
	db.Exec(t, `insert into event_consumer_parked (consumer, topic, shard, seq, occurred_at, recorded_at, event_topic, uuid, payload, metadata, error_type, attempts, parked_by)
		select 'push', '', '', l.seq, l.occurred_at, l.recorded_at, l.topic, l.uuid, l.payload, l.metadata, 'x', 1, 'me' from event_log l where l.seq <= 2`)
	db.Exec(t, "insert into event_consumer_losses (consumer, topic, shard, first_seq, last_seq, reason, recorded_by) values ('push', '', '', 1, 1, 'retention', 'me')")
	for name, do := range map[string]func() error{
		"seek": func() error {
			_, err := operate.Seek(t.Context(), pool, nil, key, cursor.FromSeq(5), order)
			return err
		},
		"redact":  func() error { _, err := operate.Redact(t.Context(), pool, nil, 1, order); return err },
		"discard": func() error { _, err := operate.Discard(t.Context(), pool, nil, key, 1, order); return err },
		"replay":  func() error { _, err := operate.Replay(t.Context(), pool, nil, key, 2, order); return err },
		"settle":  func() error { _, err := operate.SettleLosses(t.Context(), pool, nil, key, 0, order); return err },
		"pause":   func() error { _, err := operate.Pause(t.Context(), pool, nil, key, order); return err },
		"verify":  func() error { _, err := operate.Verify(t.Context(), pool, nil, nil); return err },
		"survey":  func() error { _, err := operate.Survey(t.Context(), pool, nil); return err },
		"asking":  func() error { _, err := operate.Deliveries(t.Context(), pool, nil, 3); return err },
	} {
		require.NoError(t, do(), name)
	}
	for _, refused := range []string{"delete from event_log", "insert into event_outbox (topic) values ('x')", "update event_seq set last_seq = 0",
		"update event_log set seq = 100", "delete from event_consumer_cursors", "delete from event_consumer_interventions"} {
		_, err := pool.Exec(t.Context(), refused)
		require.ErrorContains(t, err, "42501", refused)
	}
}
