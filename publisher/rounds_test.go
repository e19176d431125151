package publisher_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
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

// service is a program with one consumer, "push", which reads the topic "orders" from the beginning.
type service struct {
	db            *pgtest.DB
	pool          *pgxpool.Pool
	jobs          *publisher.Jobs
	consumer      *logtest.Logger
	router        *logtest.Logger
	moves         *pgx.Conn // hears of every move of the cursor
	handlerErrors []error   // that a handler had no other way to tell; read it after stop
	stop          func()
}

// newService makes a program that does not run yet, on a database where the topics "a" and "b" have job tables.
func newService(t *testing.T, schema publisher.SchemaAdapter, options ...func(*pgxpool.Config)) *service {
	t.Helper()
	s := &service{db: logtest.New(t), consumer: logtest.NewLogger(), router: logtest.NewLogger()}
	s.pool = s.db.Pool(t, options...)
	s.jobs = newJobs(t, schema)
	require.NoError(t, s.jobs.Initialize(t.Context(), s.pool, "a", "b"))
	s.db.Exec(t, `
		create table moves (seq bigint, xid xid8);
		create function moved() returns trigger language plpgsql as $$ begin
			insert into moves values (new.last_seq, pg_current_xact_id());
			perform pg_notify('moved', new.last_seq::text);
			return null;
		end $$;
		create trigger moved after update of last_seq on event_consumer_cursors for each row execute function moved()`)
	s.moves = s.db.Conn(t)
	exec(t, s.moves, `listen moved`)
	return s
}

// run handles the events until the test ends. What the handler returns is published to topic "a".
func (s *service) run(t *testing.T, handle message.HandlerFunc) {
	t.Helper()
	consumer, err := subscriber.New(s.pool, subscriber.ConsumerConfig{
		Name: "push", Start: cursor.FromBeginning(), RetryDelay: 5 * time.Millisecond, RetryDelayCap: 20 * time.Millisecond,
	}, s.consumer)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, s.router)
	require.NoError(t, err)
	router.AddMiddleware(middleware.Round(s.router))
	router.AddHandler("push", "orders", consumer, "a", s.jobs, handle)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	s.stop = sync.OnceFunc(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-ended)
	})
	t.Cleanup(s.stop)
}

// passed returns when the cursor has passed an event.
func (s *service) passed(t *testing.T, seq int) {
	t.Helper()
	for {
		n, err := s.moves.WaitForNotification(bounded(t))
		require.NoError(t, err, "the cursor did not pass %d", seq)
		at, err := strconv.Atoi(n.Payload)
		require.NoError(t, err)
		if at >= seq {
			return
		}
	}
}

func (s *service) position(t *testing.T) int64 {
	return logtest.Position(t, s.db, cursor.Key{Consumer: "push", Topic: "orders"})
}

// failThrice makes the first three moves of the cursor fail, or the commits that contain them.
func (s *service) failThrice(t *testing.T, at string) {
	t.Helper()
	s.db.Exec(t, `
		create sequence tries;
		create function fail_thrice() returns trigger language plpgsql as $$ begin
			if nextval('tries') <= 3 then raise exception 'not yet' using errcode = 'P0042'; end if;
			return new;
		end $$`)
	switch at {
	case "move":
		s.db.Exec(t, `create trigger fail_thrice before update on event_consumer_cursors for each row execute function fail_thrice()`)
	case "commit":
		s.db.Exec(t, `create constraint trigger fail_thrice after update on event_consumer_cursors deferrable initially deferred
			for each row execute function fail_thrice()`)
	}
}

// A job's payload is that of its event, which is its number.
const sqlJobs = `
select payload::text::bigint as seq, transaction_id from watermill_a
union all select payload::text::bigint, transaction_id from watermill_b`

func TestJobsAreCommittedWithTheCursorHoweverAHandlerPublishesThem(t *testing.T) {
	t.Parallel()
	const events = 3
	plain := func(in *message.Message) *message.Message {
		return message.NewMessage("job of "+string(in.Payload), in.Payload)
	}
	within := func(in *message.Message) *message.Message {
		m := plain(in)
		m.SetContext(in.Context())
		return m
	}
	for variant, handle := range map[string]func(*publisher.Jobs, *message.Message) ([]*message.Message, error){
		"returns messages": func(_ *publisher.Jobs, in *message.Message) ([]*message.Message, error) {
			return []*message.Message{plain(in), plain(in)}, nil
		},
		"returns messages with the context of its input": func(_ *publisher.Jobs, in *message.Message) ([]*message.Message, error) {
			return []*message.Message{within(in), within(in)}, nil
		},
		"returns copies of its input": func(_ *publisher.Jobs, in *message.Message) ([]*message.Message, error) {
			return []*message.Message{in.Copy(), in.Copy()}, nil
		},
		"returns its input": func(_ *publisher.Jobs, in *message.Message) ([]*message.Message, error) {
			return []*message.Message{in, in}, nil
		},
		"publishes by itself": func(jobs *publisher.Jobs, in *message.Message) ([]*message.Message, error) {
			return nil, jobs.Publish("a", within(in), within(in))
		},
		"publishes to two topics": func(jobs *publisher.Jobs, in *message.Message) ([]*message.Message, error) {
			return nil, errors.Join(jobs.Publish("a", within(in)), jobs.Publish("b", within(in)))
		},
		"returns one and publishes one": func(jobs *publisher.Jobs, in *message.Message) ([]*message.Message, error) {
			return []*message.Message{plain(in)}, jobs.Publish("b", within(in))
		},
	} {
		for _, failing := range []string{"move", "commit"} {
			t.Run(variant+"/"+failing+" fails", func(t *testing.T) {
				t.Parallel()
				s := newService(t, nil)
				logtest.Append(t, s.db, "orders", events)
				s.failThrice(t, failing)
				s.run(t, func(in *message.Message) ([]*message.Message, error) {
					out, err := handle(s.jobs, in)
					// Another session sees no job of an event that the cursor has not passed.
					var early int
					looked := s.pool.QueryRow(in.Context(), `select count(*) from (`+sqlJobs+`) j, event_consumer_cursors c where j.seq > c.last_seq`).Scan(&early)
					if looked != nil || early > 0 {
						s.handlerErrors = append(s.handlerErrors, fmt.Errorf("%d jobs are seen early: %w", early, looked))
					}
					return out, err
				})
				s.passed(t, events)
				s.stop()

				require.Empty(t, s.handlerErrors)
				require.Empty(t, s.router.Lines("", "error"))
				require.Len(t, s.consumer.Lines("event consumer recovered", "info"), 1)
				require.Equal(t, "P0042", s.consumer.Lines("event consumer round failed", "error")[0].Fields["error.type"])
				require.Equal(t, []int64{1, 1, 2, 2, 3, 3}, pgtest.Column[int64](t, s.db, `select seq from (`+sqlJobs+`) j order by seq`))
				// Each was written by the transaction that took the cursor past its event.
				require.Zero(t, pgtest.Value[int](t, s.db, `select count(*) from (`+sqlJobs+`) j
					where j.transaction_id <> (select m.xid from moves m where m.seq >= j.seq order by m.seq limit 1)`))
				require.True(t, pgtest.Value[bool](t, s.db, `select c.xmin::text::bigint = (select max(j.transaction_id)::text::bigint from (`+sqlJobs+`) j) % 4294967296
					from event_consumer_cursors c`))
			})
		}
	}
}

func TestJobsOfAHandlerThatFailsAreDropped(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 2)
	tries := map[string]int{}
	s.run(t, func(in *message.Message) ([]*message.Message, error) {
		tries[in.UUID]++
		job := message.NewMessage("", in.Payload)
		job.SetContext(in.Context())
		if err := s.jobs.Publish("b", job); err != nil {
			return nil, err
		}
		if tries[in.UUID] < 3 {
			return []*message.Message{job.Copy()}, errors.New("not yet")
		}
		return []*message.Message{job.Copy()}, nil
	})
	s.passed(t, 2)
	s.stop()
	require.Equal(t, []int64{1, 1, 2, 2}, pgtest.Column[int64](t, s.db, `select seq from (`+sqlJobs+`) j order by seq`))
	require.Empty(t, s.router.Lines("", "error"))
}

func TestJobCannotBePublishedAfterItsRound(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 2)
	var kept []*message.Message
	var within []error
	s.run(t, func(in *message.Message) ([]*message.Message, error) {
		for _, earlier := range kept {
			within = append(within, s.jobs.Publish("a", earlier))
		}
		kept = append(kept, in)
		return nil, nil
	})
	s.passed(t, 2)
	s.stop()
	require.Len(t, within, 1)
	for _, err := range append(within, s.jobs.Publish("a", kept[1]), s.jobs.Publish("a", kept[0])) {
		require.ErrorIs(t, err, publisher.ErrNoUnit)
		require.ErrorIs(t, err, cursor.ErrUnitEnded)
	}
	require.Empty(t, pgtest.Column[int](t, s.db, `select 1 from watermill_a`))
}

func TestJobIsWhatItWasWhenItWasPublished(t *testing.T) {
	t.Parallel()
	for kind, schema := range map[string]publisher.SchemaAdapter{"default": nil, "adapter": tenantSchema{}} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			s := newService(t, schema)
			logtest.Append(t, s.db, "orders", 1)
			s.run(t, func(in *message.Message) ([]*message.Message, error) {
				job := message.NewMessage("first", []byte("[1]"))
				job.Metadata.Set("tenant", "one")
				job.SetContext(in.Context())
				if err := s.jobs.Publish("a", job); err != nil {
					return nil, err
				}
				job.UUID, job.Payload[1] = "second", '2'
				job.Metadata.Set("tenant", "two")
				err := s.jobs.Publish("a", job)
				job.Payload[1] = 'x'
				job.Metadata.Set("tenant", "\xff")
				return nil, err
			})
			s.passed(t, 1)
			require.Equal(t, []string{`first [1] {"tenant":"one"}`, `second [2] {"tenant":"two"}`},
				pgtest.Column[string](t, s.db, `select uuid || ' ' || payload || ' ' || metadata from watermill_a order by "offset"`))
		})
	}
}

func TestMissingJobTableIsNamedOnceAndAwaited(t *testing.T) {
	t.Parallel()
	for kind, schema := range map[string]publisher.SchemaAdapter{"default": nil, "adapter": tenantSchema{}} {
		for _, mode := range execModes {
			t.Run(kind+"/"+mode.String(), func(t *testing.T) {
				t.Parallel()
				s := newService(t, schema, inMode(mode))
				s.db.Exec(t, `drop table watermill_a`)
				logtest.Append(t, s.db, "orders", 1)
				attempts := make(chan struct{}, 1000)
				s.run(t, func(in *message.Message) ([]*message.Message, error) {
					attempts <- struct{}{}
					return []*message.Message{in.Copy()}, nil
				})
				for range 4 {
					<-attempts
				}
				require.NoError(t, s.jobs.Initialize(t.Context(), s.pool, "a"))
				s.passed(t, 1)
				s.stop()

				failures := s.consumer.Lines("", "error")
				require.Len(t, failures, 1)
				require.Equal(t, "event consumer round failed", failures[0].Msg)
				require.Equal(t, "42P01", failures[0].Fields["error.type"])
				require.ErrorContains(t, failures[0].Err, `job topic "a" has no table: create it by Jobs.Initialize`)
				require.Len(t, s.consumer.Lines("event consumer recovered", "info"), 1)
				require.Empty(t, s.router.Lines("", "error"))
				require.Equal(t, 1, pgtest.Value[int](t, s.db, `select count(*) from watermill_a`))
			})
		}
	}
}

func TestRefusedJobThatAHandlerReturnsFailsTheRoundQuietly(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 2)
	s.run(t, func(in *message.Message) ([]*message.Message, error) {
		if string(in.Payload) == "2" {
			return []*message.Message{msg("{}"), msg("not JSON")}, nil
		}
		return []*message.Message{in.Copy()}, nil
	})
	failure := s.consumer.Wait(t, bounded(t), 1, "event consumer round failed")[0]
	require.Equal(t, "error", failure.Level)
	require.Equal(t, "invalid_message", failure.Fields["error.type"])
	require.EqualValues(t, 2, failure.Fields["seq"])
	require.ErrorContains(t, failure.Err, `message "not JSON" for topic "a" is refused`)
	s.passed(t, 1)
	s.consumer.Wait(t, bounded(t), 3, "event consumer round failed") // again
	s.stop()
	require.Empty(t, s.router.Lines("", "error"))
	require.Len(t, s.consumer.Lines("", "error"), 1)
	require.EqualValues(t, 1, s.position(t))
	require.Equal(t, []int64{1}, pgtest.Column[int64](t, s.db, `select seq from (`+sqlJobs+`) j`))
}

func TestRefusedJobThatAHandlerPublishesIsItsOwnConcern(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	logtest.Append(t, s.db, "orders", 1)
	var refusals []error
	s.run(t, func(in *message.Message) ([]*message.Message, error) {
		for _, topic := range []string{"a", strings.Repeat("x", 54)} {
			job := msg("not JSON")
			job.SetContext(in.Context())
			refusals = append(refusals, s.jobs.Publish(topic, job))
		}
		return []*message.Message{in.Copy()}, nil
	})
	s.passed(t, 1)
	s.stop()
	require.Len(t, refusals, 2)
	for _, err := range refusals {
		var refused *publisher.ValueError
		require.ErrorAs(t, err, &refused)
	}
	require.Equal(t, []int64{1}, pgtest.Column[int64](t, s.db, `select seq from (`+sqlJobs+`) j`))
}

// stock reads the first n messages of a topic with watermill-sql's own subscriber.
func stock(t *testing.T, db *pgtest.DB, schema wsql.SchemaAdapter, topic string, n int) (read []*message.Message) {
	t.Helper()
	sub, err := wsql.NewSubscriber(db.SQL(t), wsql.SubscriberConfig{
		SchemaAdapter: schema, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{}, InitializeSchema: true,
		PollInterval: 10 * time.Millisecond,
	}, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, sub.Close()) }()
	ctx := bounded(t)
	messages, err := sub.Subscribe(ctx, topic)
	require.NoError(t, err)
	for range n {
		select {
		case m := <-messages:
			read = append(read, m)
			m.Ack()
		case <-ctx.Done():
			require.Fail(t, "a job is missing", "%d of %d were read", len(read), n)
		}
	}
	return read
}

func TestStockSubscriberReadsJobsAsTheyWere(t *testing.T) {
	t.Parallel()
	var odd []*message.Message
	add := func(uuid string, payload []byte, metadata message.Metadata) {
		m := message.NewMessage(uuid, payload)
		m.Metadata = metadata
		odd = append(odd, m)
	}
	add("", nil, nil)
	add(strings.Repeat("ü", 36), []byte("null"), message.Metadata{})
	add(`it's "q" \ $1`, []byte(`{"a":  1, "\u00fc":2 }`), message.Metadata{"": "", `"'\`: `$1`, "big": strings.Repeat("m", 1<<20), "nul": "\x00"})
	for i, p := range oddPayloads() {
		add(strconv.Itoa(i), p, message.Metadata{"k": "v"})
	}

	for _, column := range []string{"JSON", "jsonb", "BYTEA"} {
		for _, mode := range execModes {
			t.Run(column+"/"+mode.String(), func(t *testing.T) {
				t.Parallel()
				schema := withPayload(column)
				s := newService(t, schema, inMode(mode))
				logtest.Append(t, s.db, "orders", 3)
				taken := slices.DeleteFunc(slices.Clone(odd), func(m *message.Message) bool {
					return !errors.Is(s.jobs.Publish("a", m), publisher.ErrNoUnit)
				})
				require.Greater(t, len(taken), 10)
				s.run(t, func(in *message.Message) ([]*message.Message, error) {
					copies := make([]*message.Message, len(taken))
					for i, m := range taken {
						copies[i] = message.NewMessage(m.UUID, m.Payload)
						copies[i].Metadata = m.Metadata
					}
					return copies, nil
				})
				s.passed(t, 3)
				s.stop()

				read := stock(t, s.db, schema, "a", 3*len(taken))
				for i, got := range read {
					want := taken[i%len(taken)]
					require.Equal(t, want.UUID, got.UUID)
					require.NotNil(t, got.Metadata)
					require.Len(t, got.Metadata, len(want.Metadata))
					for k, v := range want.Metadata {
						require.Equal(t, v, got.Metadata[k])
					}
					if column == "jsonb" && len(want.Payload) > 0 {
						require.Equal(t, decoded(t, want.Payload), decoded(t, got.Payload))
						continue
					}
					require.Equal(t, string(want.Payload), string(got.Payload))
				}
			})
		}
	}
}

func TestJobsOfEveryTopicThatIsTakenGoToATableOfTheirOwn(t *testing.T) {
	t.Parallel()
	s := newService(t, withPayload("bytea"))
	topics := []string{strings.Repeat("x", 53), strings.Repeat("x", 52), "orders.v1", "orders_v1", "Orders", "orders", "my-topic", "a$b:c", "select"}
	require.NoError(t, s.jobs.Initialize(t.Context(), s.pool, topics...))
	logtest.Append(t, s.db, "orders", 1)
	s.run(t, func(in *message.Message) ([]*message.Message, error) {
		for _, topic := range topics {
			job := msg(topic)
			job.UUID = ""
			job.SetContext(in.Context())
			if err := s.jobs.Publish(topic, job); err != nil {
				return nil, err
			}
		}
		return nil, nil
	})
	s.passed(t, 1)
	s.stop()
	for _, topic := range topics {
		if len(topic) < 50 { // the others' readers need a name for their offsets
			require.Equal(t, topic, string(stock(t, s.db, withPayload("bytea"), topic, 1)[0].Payload))
		}
		require.Equal(t, []string{topic}, pgtest.Column[string](t, s.db,
			`select convert_from(payload, 'UTF8') from `+pgx.Identifier{"watermill_" + topic}.Sanitize()))
	}
}

func decoded(t *testing.T, text []byte) (v any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	require.NoError(t, d.Decode(&v))
	return v
}

// tenantSchema has a column of its own, filled from metadata.
type tenantSchema struct{ wsql.DefaultPostgreSQLSchema }

func (s tenantSchema) SchemaInitializingQueries(topic string) []wsql.Query {
	return append(s.DefaultPostgreSQLSchema.SchemaInitializingQueries(topic), wsql.Query{
		Query: `alter table ` + s.MessagesTable(topic) + ` add column if not exists tenant text not null;
			create index if not exists ` + topic + `_tenant on ` + s.MessagesTable(topic) + ` (tenant)`,
	})
}

func (s tenantSchema) InsertQuery(topic string, msgs message.Messages) (wsql.Query, error) {
	var rows []string
	var args []any
	for _, m := range msgs {
		metadata, err := json.Marshal(m.Metadata)
		if err != nil {
			return wsql.Query{}, err
		}
		n := len(args)
		rows = append(rows, fmt.Sprintf("($%d, $%d, $%d, $%d, pg_current_xact_id())", n+1, n+2, n+3, n+4))
		args = append(args, m.UUID, []byte(m.Payload), metadata, m.Metadata.Get("tenant"))
	}
	return wsql.Query{
		Query: `insert into ` + s.MessagesTable(topic) + ` (uuid, payload, metadata, tenant, transaction_id) values ` + strings.Join(rows, ", "),
		Args:  args,
	}, nil
}

func TestAdapterOfTheUserInsertsInEveryExecMode(t *testing.T) {
	t.Parallel()
	payloads := map[string][]string{
		"json":  {`{"a":  "\\x41"}`, `"\u0000"`, `[]`},
		"bytea": {`{"a":  "\\x41"}`, `\x41`, `\\`, "\x00\xff", "{}", ""},
	}
	for column, payloads := range payloads {
		for _, mode := range execModes {
			t.Run(column+"/"+mode.String(), func(t *testing.T) {
				t.Parallel()
				schema := tenantSchema{withPayload(column)}
				s := newService(t, schema, inMode(mode))
				logtest.Append(t, s.db, "orders", 2)
				s.run(t, func(*message.Message) ([]*message.Message, error) {
					var out []*message.Message
					for _, p := range payloads {
						m := message.NewMessage("id", []byte(p))
						m.Metadata.Set("tenant", "it's")
						out = append(out, m)
					}
					bare := message.NewMessage("bare", []byte("{}"))
					bare.Metadata = nil
					return append(out, bare), nil
				})
				s.passed(t, 2)
				s.stop()

				read := stock(t, s.db, schema.DefaultPostgreSQLSchema, "a", 2*(len(payloads)+1))
				for i, m := range read {
					require.NotNil(t, m.Metadata)
					if i %= len(payloads) + 1; i < len(payloads) {
						require.Equal(t, payloads[i], string(m.Payload))
						require.Equal(t, "it's", m.Metadata.Get("tenant"))
					}
				}
				require.Equal(t, []string{"", "it's"}, pgtest.Column[string](t, s.db, `select distinct tenant from watermill_a order by 1`))
			})
		}
	}
}

func TestMoreJobsThanAStatementHasParameters(t *testing.T) {
	t.Parallel()
	const n = 20_000
	for kind, schema := range map[string]publisher.SchemaAdapter{
		"default": nil,
		"adapter": tenantSchema{},
		"text":    withPayload("text"), // not a type that we know
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			s := newService(t, schema)
			logtest.Append(t, s.db, "orders", 1)
			s.run(t, func(*message.Message) ([]*message.Message, error) {
				out := make([]*message.Message, n)
				for i := range out {
					out[i] = msg(strconv.Itoa(i))
				}
				return out, nil
			})
			s.passed(t, 1)
			s.stop()
			require.Equal(t, n, pgtest.Value[int](t, s.db, `select count(distinct uuid) from watermill_a`))
			require.True(t, pgtest.Value[bool](t, s.db, `select bool_and(uuid = payload::text and payload::text::int = o - 1)
				from (select *, row_number() over (order by "offset") as o from watermill_a) j`))
			require.Equal(t, 1, pgtest.Value[int](t, s.db, `select count(distinct transaction_id) from watermill_a`))
		})
	}
}

func TestAdapterThatFailsFailsTheRound(t *testing.T) {
	t.Parallel()
	s := newService(t, brokenSchema{})
	logtest.Append(t, s.db, "orders", 1)
	s.run(t, func(in *message.Message) ([]*message.Message, error) { return []*message.Message{in.Copy()}, nil })
	failure := s.consumer.Wait(t, bounded(t), 1, "event consumer round failed")[0]
	require.ErrorContains(t, failure.Err, `insert jobs of topic "a": no query today`)
	s.stop()
	require.Zero(t, s.position(t))
}

type brokenSchema struct{ wsql.DefaultPostgreSQLSchema }

func (brokenSchema) InsertQuery(string, message.Messages) (wsql.Query, error) {
	return wsql.Query{}, errors.New("no query today")
}
