package publisher_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// edge is a message at the edge of what can be held, and what cannot hold it: "log", or a type of a job table's payload.
type edge struct {
	name     string
	uuid     string
	payload  []byte
	metadata message.Metadata
	refuse   []string
}

func (e edge) refusedBy(what string) bool { return slices.Contains(e.refuse, what) }

func edges() []edge {
	uuid := func(n int) string { return strings.Repeat("u", n) }
	jobs := []string{"json", "jsonb", "bytea"}
	all := []edge{
		{name: "payload nil"},
		{name: "payload empty", payload: []byte{}},
		{name: "payload null", payload: []byte("null")},
		{name: "payload duplicate keys", payload: []byte(`{"a":1,"a":2}`)},
		{name: "payload odd spacing", payload: []byte(" {\"b\" :1,\n\t\"a\":  [ ] }\r\n")},
		{name: "payload integers above 2^53", payload: []byte(`[9007199254740993,-18446744073709551617,1.10]`)},
		{name: "payload escaped NUL", payload: []byte(`{"a":"\u0000"}`), refuse: []string{"jsonb"}},
		{name: "payload escaped escape of NUL", payload: []byte(`{"a":"\\u0000"}`)},
		{name: "payload lone surrogate", payload: []byte(`"\ud800"`), refuse: []string{"jsonb"}},
		{name: "payload pair of surrogates", payload: []byte(`"\ud83d\ude00 😀"`)},
		{name: "payload bytes of a surrogate", payload: []byte("\"\xed\xa0\x80\""), refuse: []string{"json", "jsonb"}},
		{name: "payload plain text", payload: []byte("plain text"), refuse: []string{"json", "jsonb"}},
		{name: "payload like a bytea escape", payload: []byte(`\x41\\000`), refuse: []string{"json", "jsonb"}},
		{name: "payload binary", payload: []byte{0xff, 0, 0x80, 0xfe, '\\', '\''}, refuse: []string{"json", "jsonb"}},
		{name: "payload raw NUL in JSON", payload: []byte("\"a\x00b\""), refuse: []string{"json", "jsonb"}},
		{name: "payload invalid UTF-8 in JSON", payload: []byte("\"\xff\""), refuse: []string{"json", "jsonb"}},
		{name: "metadata nil", payload: []byte("1"), metadata: nil},
		{name: "metadata empty", payload: []byte("1"), metadata: message.Metadata{}},
		{name: "metadata odd", payload: []byte("1"), metadata: message.Metadata{"": "", "\\u0000": `\u0000`, "<&>": "\u2028\u0001\u007f'\"", "😀": "\ufffd\ufffe"}},
		{name: "metadata 1 MB", payload: []byte("1"), metadata: message.Metadata{"big": strings.Repeat("mü", 1<<19)}},
		{name: "metadata NUL", payload: []byte("1"), metadata: message.Metadata{"a": "b\x00c"}, refuse: []string{"log"}},
		{name: "metadata NUL in a key", payload: []byte("1"), metadata: message.Metadata{"a\x00": "b"}, refuse: []string{"log"}},
		{name: "metadata invalid UTF-8", payload: []byte("1"), metadata: message.Metadata{"a": "\xff"}, refuse: append([]string{"log"}, jobs...)},
		{name: "uuid NUL", uuid: "a\x00", payload: []byte("1"), refuse: append([]string{"log"}, jobs...)},
		{name: "uuid invalid UTF-8", uuid: "\xff", payload: []byte("1"), refuse: append([]string{"log"}, jobs...)},
		{name: "uuid of 36", uuid: uuid(36), payload: []byte("1")},
		{name: "uuid of 36 that are 72 bytes", uuid: strings.Repeat("ü", 36), payload: []byte("1")},
		{name: "uuid of 37", uuid: uuid(37), payload: []byte("1"), refuse: jobs},
	}
	return all // those without a UUID have an empty one
}

func (e edge) message() *message.Message {
	msg := message.NewMessage(e.uuid, e.payload)
	msg.Metadata = e.metadata
	return msg
}

// require that a message came back as the edge is; the columns of a jsonb keep the meaning alone.
func (e edge) require(t *testing.T, got *message.Message, where string) {
	t.Helper()
	require.Equal(t, e.uuid, got.UUID, "%s %s", e.name, where)
	require.NotNil(t, got.Metadata, "%s %s", e.name, where)
	require.Len(t, got.Metadata, len(e.metadata), "%s %s", e.name, where)
	for k, v := range e.metadata {
		require.True(t, v == got.Metadata[k], "%s %s: metadata %q", e.name, where, k)
	}
	if where == "jsonb" && len(e.payload) > 0 {
		require.Equal(t, decoded(t, e.payload), decoded(t, got.Payload), "%s %s", e.name, where)
		return
	}
	require.True(t, bytes.Equal(e.payload, got.Payload), "%s %s: %q is not %q", e.name, where, got.Payload, e.payload)
}

// appending is a way to append one message in a transaction.
type appending func(t *testing.T, events *publisher.EventLog, msg *message.Message) error

func waysToAppend(t *testing.T, db *pgtest.DB, staged bool) map[string]appending {
	t.Helper()
	pool, std, pq := db.Pool(t), db.SQL(t), openPQ(t, db)
	return map[string]appending{
		"own transaction": func(_ *testing.T, events *publisher.EventLog, msg *message.Message) error {
			return events.Publish("orders", msg)
		},
		"InTx": func(t *testing.T, events *publisher.EventLog, msg *message.Message) error {
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return events.InTx(tx).Publish("orders", msg) })
		},
		"InSQLTx, pgx": func(t *testing.T, events *publisher.EventLog, msg *message.Message) error {
			tx, err := std.Begin()
			require.NoError(t, err)
			defer tx.Rollback()
			if err := events.InSQLTx(tx).Publish("orders", msg); err != nil {
				return err
			}
			return tx.Commit()
		},
		"InSQLTx, lib/pq": func(t *testing.T, events *publisher.EventLog, msg *message.Message) error {
			tx, err := pq.Begin()
			require.NoError(t, err)
			defer tx.Rollback()
			if err := events.InSQLTx(tx).Publish("orders", msg); err != nil {
				return err
			}
			return tx.Commit()
		},
		"SQL": func(t *testing.T, _ *publisher.EventLog, msg *message.Message) error {
			metadata := []byte("{}")
			if msg.Metadata != nil {
				var err error
				metadata, err = json.Marshal(msg.Metadata)
				require.NoError(t, err)
			}
			_, err := pool.Exec(t.Context(), `insert into event_outbox (topic, uuid, payload, metadata, staged) values ('orders', $1, $2, $3, $4)`,
				msg.UUID, append([]byte{}, msg.Payload...), string(metadata), staged)
			return err
		},
	}
}

const sqlNumberStaged = `select numbered from event_outbox_sequence(null, null, '0', 0, 10000)`

func TestEdgeValuesGoFromTheAppendToTheReaderOfTheJobs(t *testing.T) {
	t.Parallel()
	for _, staged := range []bool{false, true} {
		for _, way := range []string{"own transaction", "InTx", "InSQLTx, pgx", "InSQLTx, lib/pq", "SQL"} {
			t.Run(fmt.Sprintf("%s, staged %t", way, staged), func(t *testing.T) {
				t.Parallel()
				db := logtest.New(t)
				pool := db.Pool(t)
				events := newEventLog(t, pool, publisher.EventLogConfig{Staged: staged})
				appendOne := waysToAppend(t, db, staged)[way]
				var taken []edge
				for _, e := range edges() {
					if !e.refusedBy("log") {
						require.NoError(t, appendOne(t, events, e.message()), e.name)
						taken = append(taken, e)
						continue
					}
					for _, by := range []*publisher.EventLog{
						newEventLog(t, sender{untouched{}}, publisher.EventLogConfig{Staged: staged}), events.InTx(untouched{}), events.InSQLTx(untouched{}),
					} {
						var refused *publisher.ValueError
						require.ErrorAs(t, by.Publish("orders", e.message()), &refused, e.name)
					}
				}
				if staged {
					require.Equal(t, len(taken), pgtest.Value[int](t, db, sqlNumberStaged))
				}

				// The handler publishes each event to a table of every type.
				jobs := map[string]*publisher.Jobs{}
				for _, column := range []string{"json", "jsonb", "bytea"} {
					jobs[column] = newJobs(t, withPayload(column))
					require.NoError(t, jobs[column].Initialize(t.Context(), pool, column))
				}
				consumer, err := subscriber.New(pool, subscriber.ConsumerConfig{Name: "push", Start: cursor.FromBeginning()}, nil)
				require.NoError(t, err)
				router, err := message.NewRouter(message.RouterConfig{}, nil)
				require.NoError(t, err)
				router.AddMiddleware(middleware.Round(nil))
				delivered, refusals := make(chan *message.Message, len(taken)), make(chan error, 3*len(taken))
				router.AddConsumerHandler("push", "orders", consumer, func(msg *message.Message) error {
					for column, jobs := range jobs {
						job := message.NewMessage(msg.UUID, msg.Payload)
						job.Metadata = msg.Metadata
						job.SetContext(msg.Context())
						if err := jobs.Publish(column, job); err != nil {
							refusals <- fmt.Errorf("%s: %w", column, err)
						}
					}
					delivered <- msg
					return nil
				})
				ended := make(chan error, 1)
				go func() { ended <- router.Run(context.Background()) }()
				want, ctx := map[string]int{}, bounded(t)
				for _, e := range taken {
					select {
					case msg := <-delivered:
						e.require(t, msg, "delivered")
					case <-ctx.Done():
						require.Fail(t, "not delivered", e.name)
					}
					for column := range jobs {
						if e.refusedBy(column) {
							want[column]++
						}
					}
				}
				require.Eventually(t, func() bool {
					return logtest.Position(t, db, cursor.Key{Consumer: "push", Topic: "orders"}) == int64(len(taken))
				}, time.Minute, 5*time.Millisecond)
				require.NoError(t, router.Close())
				require.NoError(t, <-ended)

				close(refusals)
				got := map[string]int{}
				for err := range refusals {
					var refused *publisher.ValueError
					require.ErrorAs(t, err, &refused)
					column, _, _ := strings.Cut(err.Error(), ":")
					got[column]++
				}
				require.Equal(t, want, got, "the jobs that were refused")
				for column := range jobs {
					held := slices.DeleteFunc(slices.Clone(taken), func(e edge) bool { return e.refusedBy(column) })
					for i, msg := range stock(t, db, withPayload(column), column, len(held)) {
						held[i].require(t, msg, column)
					}
				}
			})
		}
	}
}

// counting is a database that counts what it is sent.
type counting struct {
	*pgxpool.Pool
	sent atomic.Int64
}

func (c *counting) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	c.sent.Add(1)
	return c.Pool.SendBatch(ctx, b)
}

// FuzzWhatIsTakenIsDeliveredEqual looks for a message that is taken and does not come back as it was, or that is refused by
// PostgreSQL and not before.
func FuzzWhatIsTakenIsDeliveredEqual(f *testing.F) {
	for _, e := range edges() {
		for k, v := range e.metadata {
			if len(v) < 1000 {
				f.Add(false, "orders", "", e.uuid, e.payload, k, v)
			}
		}
		f.Add(true, "orders", e.uuid, e.uuid, e.payload, "", "")
	}
	f.Add(false, "", "", "", []byte{}, "", "")
	f.Add(false, "*", "", "", []byte{}, "", "")
	f.Add(true, "a\x00", "\xff", "", []byte{}, "", "")

	db := logtest.New(f)
	pool := &counting{Pool: db.Pool(f)}
	consumer, err := subscriber.New(pool.Pool, subscriber.ConsumerConfig{Name: "push", Topic: subscriber.AllTopics}, nil)
	require.NoError(f, err)
	f.Cleanup(func() { consumer.Close() })
	messages, err := consumer.Subscribe(context.Background(), subscriber.AllTopics)
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, staged bool, topic, key, uuid string, payload []byte, name, value string) {
		msg := message.NewMessage(uuid, payload)
		if name != "" || value != "" {
			msg.Metadata.Set(name, value)
		}
		events, err := publisher.NewEventLog(pool, publisher.EventLogConfig{
			Staged: staged, Key: func(string, *message.Message) string { return key },
		})
		require.NoError(t, err)
		before := pool.sent.Load()
		if err := events.Publish(topic, msg); err != nil {
			var refused *publisher.ValueError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, before, pool.sent.Load(), "what is refused is not sent")
			return
		}
		if staged {
			require.Equal(t, 1, pgtest.Value[int](t, db, sqlNumberStaged))
		}
		select {
		case got := <-messages:
			defer got.Ack()
			unit, ok := cursor.UnitFromContext(got.Context())
			require.True(t, ok)
			event := unit.Event()
			require.Equal(t, topic, event.Topic)
			require.Equal(t, uuid, got.UUID)
			require.True(t, bytes.Equal(payload, got.Payload))
			require.NotNil(t, got.Metadata)
			require.Equal(t, msg.Metadata, got.Metadata)
			require.Equal(t, key, pgtest.Value[string](t, db, `select coalesce(key, '') from event_log where seq = $1`, event.Seq))
		case <-time.After(time.Minute):
			t.Fatal("not delivered")
		}
	})
}
