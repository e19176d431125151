package subscriber_test

import (
	"context"
	"fmt"
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
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// existing are logs over tables as services have them.
func existing(t *testing.T, payloadType string, bare bool) (sql string, log *cursor.Log) {
	t.Helper()
	config := cursor.LogConfig{Schema: `Ours"`, Name: "Shop", Table: &cursor.TableConfig{
		Schema: `Sales "x"`, Name: `Events$1`, Seq: "Number", OccurredAt: "created", Topic: "type", Payload: "Body", PayloadType: payloadType,
		RecordedAt: "seen", Key: "customer", UUID: "guid", UUIDType: "uuid", Metadata: "headers", MetadataType: "json",
	}}
	optional := `, seen timestamptz not null default now(), customer varchar(40), guid uuid not null default gen_random_uuid(), headers json`
	if bare {
		optional = ""
		config.Table.RecordedAt, config.Table.Key, config.Table.UUID, config.Table.Metadata = cursor.NoColumn, cursor.NoColumn, cursor.NoColumn, cursor.NoColumn
	}
	log, err := cursor.NewLog(config)
	require.NoError(t, err)
	value := `convert_to('{"n": ' || i || '}', 'UTF8')`
	if payloadType != "bytea" {
		value = `('{"n": ' || i || '}')::` + payloadType
	}
	return `create schema "Ours"""; create schema "Sales ""x"""; create table "Sales ""x"""."Events$1" (
		"Number" bigint primary key, type varchar(50) not null, "Body" ` + payloadType + ` not null, created timestamptz not null` + optional + `);
		insert into "Sales ""x"""."Events$1" ("Number", type, "Body", created) select i, 'orders', ` + value + `, now() from generate_series(1, 5) i`, log
}

func TestExistingTableIsTheLog(t *testing.T) {
	t.Parallel()
	for _, payloadType := range []string{"bytea", "json", "jsonb", "text"} {
		for _, bare := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, bare %t", payloadType, bare), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				sql, log := existing(t, payloadType, bare)
				for _, statement := range strings.Split(sql, ";") {
					db.Exec(t, statement)
				}
				pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 6 })
				_, err := migrations.Up(t.Context(), pool, log)
				require.NoError(t, err)
				// A second log, with the default names, lives beside it.
				_, err = migrations.Up(t.Context(), pool, nil)
				require.NoError(t, err)

				events, err := publisher.NewEventLog(pool, publisher.EventLogConfig{Log: log, Once: true, Key: func(string, *message.Message) string {
					if bare {
						return ""
					}
					return "anna"
				}})
				require.NoError(t, err)
				const uuid = "0b9a8c6e-0d3f-4d37-9c5b-3f8f3c3f7f10"
				appended := message.NewMessage(uuid, []byte(`{"n":6,  "n":6}`))
				if !bare {
					appended.Metadata.Set("name", "order placed")
				}
				require.NoError(t, events.Publish("orders", appended))
				require.NoError(t, events.Publish("orders", appended)) // once
				db.Exec(t, `insert into "Ours"""."Shop_outbox" (topic, payload) values ('other', '{}'), ('orders', '{"n": 8}')`)

				got := make(chan *message.Message, 100)
				start := func() *subscriber.Runner {
					runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{Log: log, PollInterval: 20 * time.Millisecond, Consumers: []subscriber.ConsumerConfig{
						{Name: "push", Topic: "orders", Start: cursor.FromBeginning(), BatchSize: 3},
					}}, nil)
					require.NoError(t, err)
					router, err := message.NewRouter(message.RouterConfig{}, nil)
					require.NoError(t, err)
					router.AddMiddleware(middleware.Round(nil))
					router.AddConsumerHandler("push", "orders", runner.Subscriber("push"), func(msg *message.Message) error {
						got <- msg
						return nil
					})
					go router.Run(t.Context())
					t.Cleanup(func() { router.Close() })
					<-router.Running()
					return runner
				}
				start()
				var payloads []string
				var last *message.Message
				for range 7 {
					msg := <-got
					payloads = append(payloads, string(msg.Payload))
					if len(payloads) == 6 {
						last = msg
					}
				}
				sixth := `{"n":6,  "n":6}`
				if payloadType == "jsonb" {
					sixth = `{"n": 6}` // a jsonb keeps the value, not the bytes
				}
				require.Equal(t, []string{`{"n": 1}`, `{"n": 2}`, `{"n": 3}`, `{"n": 4}`, `{"n": 5}`, sixth, `{"n": 8}`}, payloads)
				if bare {
					require.Equal(t, "6", last.UUID)
					require.NotNil(t, last.Metadata)
				} else {
					require.Equal(t, uuid, last.UUID)
					require.Equal(t, message.Metadata{"name": "order placed"}, last.Metadata)
				}
				require.Equal(t, int64(8), pgtest.Value[int64](t, db, `select max("Number") from "Sales ""x"""."Events$1"`))

				// What the table cannot hold is refused before anything is sent.
				var refused *publisher.ValueError
				if payloadType != "bytea" {
					require.ErrorAs(t, events.Publish("orders", message.NewMessage("0b9a8c6e-0d3f-4d37-9c5b-3f8f3c3f7f11", []byte("\x00"))), &refused)
				}
				if payloadType == "json" || payloadType == "jsonb" {
					require.ErrorAs(t, events.Publish("orders", message.NewMessage("0b9a8c6e-0d3f-4d37-9c5b-3f8f3c3f7f12", nil)), &refused)
				}
				if bare {
					with := message.NewMessage(uuid, []byte("{}"))
					with.Metadata.Set("a", "b")
					require.ErrorAs(t, events.Publish("orders", with), &refused)
				} else {
					require.ErrorAs(t, events.Publish("orders", message.NewMessage("no uuid", []byte("{}"))), &refused)
				}

				verdict, err := operate.Verify(t.Context(), db.Conn(t), log, nil)
				require.NoError(t, err)
				require.True(t, verdict.OK(), "%+v", verdict)
				_, err = operate.Redact(t.Context(), db.Conn(t), log, 6, operate.Order{By: "me", Reason: "asked for"})
				require.NoError(t, err)
				require.NotContains(t, pgtest.Value[string](t, db, `select coalesce(convert_from(payload, 'UTF8'), '') from "Ours"""."Shop_log" where seq = 6`), "6")
			})
		}
	}
}

func TestConsumerMayNotAppendToTheExistingTableThatItReads(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	sql, log := existing(t, "json", true)
	for _, statement := range strings.Split(sql, ";") {
		db.Exec(t, statement)
	}
	pool := db.Pool(t)
	_, err := migrations.Up(t.Context(), pool, log)
	require.NoError(t, err)
	for _, insert := range []string{
		`insert into "Ours"""."Shop_outbox" (topic, payload) values ('other', '{}')`,
		`insert into "Sales ""x"""."Events$1" ("Number", type, "Body", created) values (6, 'orders', '{}', now())`,
	} {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "select set_config('eventlog.log', $1, true)", log.Schema()+"."+log.Name())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), insert)
		require.ErrorContains(t, err, "EL001")
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

func TestTableThatIsNoLogIsRefusedWithTheReason(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ create, reason string }{
		"serial":       {`create table events (id bigserial primary key, occurred_at timestamptz not null, topic text not null, payload bytea not null)`, "come from a sequence"},
		"identity":     {`create table events (id bigint generated always as identity primary key, occurred_at timestamptz not null, topic text not null, payload bytea not null)`, "come from a sequence"},
		"integer":      {`create table events (id int primary key, occurred_at timestamptz not null, topic text not null, payload bytea not null)`, "must be of type bigint"},
		"not unique":   {`create table events (id bigint not null, occurred_at timestamptz not null, topic text not null, payload bytea not null)`, "must be of type bigint, not null and unique"},
		"no zone":      {`create table events (id bigint primary key, occurred_at timestamp not null, topic text not null, payload bytea not null)`, "is not a timestamptz"},
		"no table":     {`select 1`, "does not exist"},
		"no column":    {`create table events (seq bigint primary key, occurred_at timestamptz not null, topic text not null, payload bytea not null)`, "has no column id"},
		"null payload": {`create table events (id bigint primary key, occurred_at timestamptz not null, topic text not null, payload bytea)`, "column payload of the log events may be null"},
		"null topic":   {`create table events (id bigint primary key, occurred_at timestamptz not null, topic text, payload bytea not null)`, "column topic of the log events may be null"},
		"inherited":    {`create table events (id bigint primary key, occurred_at timestamptz not null, topic text not null, payload bytea not null); create table more () inherits (events)`, "inherit from it"},
		"with a hole":  {`create table events as select i::bigint as id, now() as occurred_at, 'a' as topic, ''::bytea as payload from unnest(array[1, 3]) i; alter table events add primary key (id); alter table events alter occurred_at set not null, alter topic set not null, alter payload set not null`, "not gapless: 2 rows from 1 to 3"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			for _, statement := range strings.Split(c.create, ";") {
				db.Exec(t, statement)
			}
			_, err := migrations.Up(t.Context(), db.Conn(t), shop(t))
			require.ErrorContains(t, err, c.reason)
			require.False(t, pgtest.Value[bool](t, db, "select to_regclass('shop_seq') is not null"), "nothing was applied")
		})
	}
}

func shop(t *testing.T) *cursor.Log {
	t.Helper()
	log, err := cursor.NewLog(cursor.LogConfig{Name: "shop", Table: &cursor.TableConfig{
		Name: "events", Seq: "id", RecordedAt: cursor.NoColumn, Key: cursor.NoColumn, UUID: cursor.NoColumn, Metadata: cursor.NoColumn,
	}})
	require.NoError(t, err)
	return log
}

// The guide's statements make a gapless log of a table with a serial column, whose numbers have holes.
func TestGuideRenumbersATableWithASerialColumn(t *testing.T) {
	t.Parallel()
	guide, err := os.ReadFile("../docs/existing-table.md")
	require.NoError(t, err)
	sql := regexp.MustCompile("(?s)```sql\n(.*?)```").FindStringSubmatch(string(guide))
	require.NotNil(t, sql)
	for _, id := range []string{"bigserial", "serial", "bigint generated always as identity"} {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			db.Exec(t, `create table events (id `+id+` primary key, occurred_at timestamptz not null default now(), topic text not null, payload bytea not null default '')`)
			for i := range 30 { // some are rolled back
				conn := db.Conn(t)
				tx, err := conn.Begin(t.Context())
				require.NoError(t, err)
				_, err = tx.Exec(t.Context(), "insert into events (topic, payload) values ('orders', convert_to($1, 'UTF8'))", fmt.Sprint(i))
				require.NoError(t, err)
				if i%3 == 0 {
					require.NoError(t, tx.Rollback(t.Context()))
				} else {
					require.NoError(t, tx.Commit(t.Context()))
				}
				conn.Close(t.Context())
			}
			before := pgtest.Column[string](t, db, "select convert_from(payload, 'UTF8') from events order by id")
			conn := db.Conn(t)
			_, err = conn.PgConn().Exec(t.Context(), sql[1]).ReadAll()
			require.NoError(t, err)
			_, err = migrations.Up(t.Context(), conn, shop(t))
			require.NoError(t, err)
			require.Equal(t, before, pgtest.Column[string](t, db, "select convert_from(payload, 'UTF8') from shop_log order by seq"))
			require.Equal(t, int64(20), pgtest.Value[int64](t, db, "select max(id) from events"))
			require.Equal(t, int64(30), pgtest.Value[int64](t, db, "select max(old_id) from events"))

			// Whoever writes the one without the other is found at the next start.
			_, err = cursor.Ensure(t.Context(), conn, shop(t), "test", []cursor.Registration{{Key: cursor.Key{Consumer: "push"}}})
			require.NoError(t, err)
			db.Exec(t, "insert into events (id, topic, old_id) values (21, 'orders', 31)")
			_, err = cursor.Ensure(t.Context(), conn, shop(t), "test", []cursor.Registration{{Key: cursor.Key{Consumer: "push"}}})
			require.ErrorIs(t, err, cursor.ErrLogTable)
			require.ErrorContains(t, err, "21")
		})
	}
}

func TestGuideGivesTheTableBackUnderWriters(t *testing.T) {
	t.Parallel()
	guide, err := os.ReadFile("../docs/existing-table.md")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(guide), -1)
	require.Len(t, blocks, 3)
	db := pgtest.New(t)
	db.Exec(t, `create table events (id bigserial primary key, occurred_at timestamptz not null default now(), topic text not null, payload bytea not null default '')`)
	db.Exec(t, `create table effects (id bigint, payload bytea)`)
	const byTable = `insert into events (topic, payload) values ('orders', convert_to($1, 'UTF8'))`
	for i := range 20 {
		db.Exec(t, byTable, fmt.Sprint("before ", i))
	}
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 8 })
	run := func(sql string) {
		conn := db.Conn(t)
		_, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
		require.NoError(t, err)
		require.NoError(t, conn.Close(t.Context()))
	}
	run(blocks[0][1])
	_, err = migrations.Up(t.Context(), pool, shop(t))
	require.NoError(t, err)

	// A writer of the new version appends all the time, every third event staged.
	stop, ended, appended := make(chan struct{}), make(chan error, 1), make(chan string, 1_000_000)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				close(ended)
				return
			default:
			}
			payload := fmt.Sprint("writer ", i)
			if _, err := pool.Exec(context.Background(), `insert into shop_outbox (topic, payload, staged) values ('orders', convert_to($1, 'UTF8'), $2)`, payload, i%3 == 0); err != nil {
				ended <- err
				return
			}
			appended <- payload
		}
	}()
	handled := make(chan struct{}, 1_000_000)
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{Log: shop(t), Consumers: []subscriber.ConsumerConfig{
		{Name: "push", Topic: "orders", Start: cursor.FromBeginning(), BatchSize: 5},
	}}, nil)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(t, err)
	router.AddMiddleware(middleware.Round(nil))
	router.AddConsumerHandler("push", "orders", runner.Subscriber("push"), func(msg *message.Message) error {
		unit, _ := cursor.UnitFromContext(msg.Context())
		tx, err := unit.Tx(msg.Context())
		if err != nil {
			return err
		}
		handled <- struct{}{}
		_, err = tx.Exec(msg.Context(), `insert into effects values ($1, $2)`, unit.Event().Seq, []byte(msg.Payload))
		return err
	})
	go router.Run(t.Context())
	t.Cleanup(func() { router.Close() })
	for range 40 {
		<-handled
	}

	run(blocks[1][1])
	for i := range 20 { // of the old version; the other goes on
		db.Exec(t, byTable, fmt.Sprint("after ", i))
	}
	from := len(appended)
	require.Eventually(t, func() bool { return len(appended) > from+20 || len(ended) > 0 }, time.Minute, 5*time.Millisecond)
	close(stop)
	require.NoError(t, <-ended)
	require.NoError(t, router.Close())
	run(blocks[2][1])

	require.Empty(t, pgtest.Column[string](t, db, `select relname::text from pg_class where relname like 'shop%' union all select proname from pg_proc where proname like 'shop%'`))
	last := pgtest.Value[int](t, db, `select max(id) from effects`)
	require.Equal(t, last, pgtest.Value[int](t, db, `select count(*) from effects e join events v using (id, payload)`))
	require.Equal(t, last, pgtest.Value[int](t, db, `select count(*) from effects`))
	var want []string
	for i := range 20 {
		want = append(want, fmt.Sprint("before ", i), fmt.Sprint("after ", i))
	}
	for range len(appended) {
		want = append(want, <-appended)
	}
	require.ElementsMatch(t, want, pgtest.Column[string](t, db, `select convert_from(payload, 'UTF8') from events`))
	require.Greater(t, pgtest.Value[int](t, db, `select count(*) from events where id > $1`, last), 20, "whoever reads the table goes on here")
}

func TestTableThatKeepsEventsOutFailsTheAppend(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `create table events (id bigint primary key, occurred_at timestamptz not null, topic text not null, payload bytea not null)`)
	_, err := migrations.Up(t.Context(), db.Conn(t), shop(t))
	require.NoError(t, err)
	db.Exec(t, `create function filter() returns trigger language plpgsql as $$ begin return null; end $$`)
	db.Exec(t, `create trigger filter before insert on events for each row when (new.topic = 'unwanted') execute function filter()`)
	events, err := publisher.NewEventLog(db.Pool(t), publisher.EventLogConfig{Log: shop(t)})
	require.NoError(t, err)
	require.ErrorContains(t, events.Publish("unwanted", message.NewMessage("", nil)), "took 0 of 1 events")
	require.NoError(t, events.Publish("wanted", message.NewMessage("", nil)))
	require.Equal(t, []int64{1}, pgtest.Column[int64](t, db, "select id from events"))
}
