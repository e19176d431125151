package migrations_test

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// objects are the relations and functions of a schema.
const objects = `
select relname::text from pg_class where relnamespace = to_regnamespace($1)
union all select proname::text from pg_proc where pronamespace = to_regnamespace($1) order by 1`

func oddLog(t *testing.T) *cursor.Log {
	log, err := cursor.NewLog(cursor.LogConfig{Schema: `Ev"x`, Name: "Audit"})
	require.NoError(t, err)
	return log
}

func applied(t *testing.T, all []migrations.Migration) (n int) {
	for _, m := range all {
		if !m.AppliedAt.IsZero() {
			n++
		}
	}
	return n
}

func TestManyProcessesMigrateAtOnceAndOneDoesTheWork(t *testing.T) {
	t.Parallel()
	for _, isolation := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(isolation, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			counts, errs := make([]int, 8), make([]error, 8)
			var all sync.WaitGroup
			for i := range counts {
				conn := db.Conn(t)
				_, err := conn.Exec(t.Context(), fmt.Sprintf("set default_transaction_isolation = '%s'", isolation))
				require.NoError(t, err)
				all.Go(func() {
					done, err := migrations.Up(t.Context(), conn, nil)
					counts[i], errs[i] = len(done), err
				})
			}
			all.Wait()
			require.NoError(t, errors.Join(errs...))
			total := 0
			for _, n := range counts {
				total += n
			}
			require.Equal(t, len(migrations.SQL(nil)), total)
			require.Equal(t, 1, pgtest.Value[int](t, db, `select count(*) from event_seq`))
		})
	}
}

func TestLogsThatMigrateAtOnceDoNotCollide(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.Pool(t)
	errs := make([]error, 8)
	var all sync.WaitGroup
	for i := range errs {
		log, err := cursor.NewLog(cursor.LogConfig{Name: fmt.Sprintf("log%d", i%4)})
		require.NoError(t, err)
		all.Go(func() { _, errs[i] = migrations.Up(t.Context(), pool, log) })
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, 4, pgtest.Value[int](t, db, `select count(*) from pg_class where relname like 'log__outbox'`))
}

func TestStatusTellsWhatIsMissingAndWhenTheRestWasApplied(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	conn := db.Conn(t)

	before, err := migrations.Status(t.Context(), conn, nil)
	require.NoError(t, err)
	require.Equal(t, migrations.SQL(nil), before)

	done, err := migrations.Up(t.Context(), conn, nil)
	require.NoError(t, err)
	require.Len(t, done, len(before))
	after, err := migrations.Status(t.Context(), conn, nil)
	require.NoError(t, err)
	require.Equal(t, done, after)
	require.Equal(t, len(before), applied(t, after))

	// Another log in the same database was not migrated by that.
	other, err := migrations.Status(t.Context(), conn, oddLog(t))
	require.NoError(t, err)
	require.Zero(t, applied(t, other))
}

func TestStatusLeavesTheCallersTransactionUsable(t *testing.T) {
	t.Parallel()
	tx, err := pgtest.New(t).Conn(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = migrations.Status(t.Context(), tx, nil)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "select 1")
	require.NoError(t, err)
}

func TestMigratingTwiceDoesNothingTheSecondTime(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.Pool(t)
	_, err := migrations.Up(t.Context(), pool, nil)
	require.NoError(t, err)
	before := pgtest.Column[string](t, db, objects, "public")
	at := pgtest.Value[string](t, db, `select max(applied_at)::text from event_migrations`)

	done, err := migrations.Up(t.Context(), pool, nil)
	require.NoError(t, err)
	require.Empty(t, done)
	require.Equal(t, before, pgtest.Column[string](t, db, objects, "public"))
	require.Equal(t, at, pgtest.Value[string](t, db, `select max(applied_at)::text from event_migrations`))
}

func TestMigrationsOfARolledBackTransactionLeaveNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	tx, err := db.Conn(t).Begin(t.Context())
	require.NoError(t, err)
	done, err := migrations.Up(t.Context(), tx, nil)
	require.NoError(t, err)
	require.NotEmpty(t, done)
	status, err := migrations.Status(t.Context(), tx, nil)
	require.NoError(t, err)
	require.Equal(t, done, status)
	require.NoError(t, tx.Rollback(t.Context()))

	require.Empty(t, pgtest.Column[string](t, db, objects, "public"))
}

func TestFailedMigrationLeavesNothingAndNamesItself(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `create table event_consumer_losses ()`)
	_, err := migrations.Up(t.Context(), db.Pool(t), nil)
	require.ErrorContains(t, err, "public.event_log: migration 0001_event_log: ")
	require.Equal(t, []string{"event_consumer_losses"}, pgtest.Column[string](t, db, objects, "public"))
}

func TestMissingSchemaIsNamed(t *testing.T) {
	t.Parallel()
	_, err := migrations.Up(t.Context(), pgtest.New(t).Conn(t), oddLog(t))
	require.ErrorContains(t, err, `Ev"x.Audit_log`)
	require.ErrorContains(t, err, `schema "Ev"x" does not exist`)
}

var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

func TestEveryExecModeMigrates(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			db.Exec(t, `create schema "Ev""x"`)
			for _, log := range []*cursor.Log{nil, oddLog(t)} {
				done, err := migrations.Up(t.Context(), pool, log)
				require.NoError(t, err)
				status, err := migrations.Status(t.Context(), pool, log)
				require.NoError(t, err)
				require.Equal(t, done, status)
			}
		})
	}
}

func TestPlainFilesAreTheMigrationsOfTheDefaultLog(t *testing.T) {
	t.Parallel()
	named, err := cursor.NewLog(cursor.LogConfig{Schema: "public", Name: "event", Channel: "event_log"})
	require.NoError(t, err)
	for _, log := range []*cursor.Log{nil, named} {
		for _, m := range migrations.SQL(log) {
			file, err := os.ReadFile(fmt.Sprintf("sql/%04d_%s.sql", m.Version, m.Name))
			require.NoError(t, err)
			require.Equal(t, string(file), m.SQL)
		}
	}
	entries, err := os.ReadDir("sql")
	require.NoError(t, err)
	require.Len(t, migrations.SQL(nil), len(entries))
}

func TestNoDefaultNameIsLeftInRenderedSQL(t *testing.T) {
	t.Parallel()
	left := regexp.MustCompile(`\bpublic\b|\bevent_`)
	for _, m := range migrations.SQL(oddLog(t)) {
		for line := range strings.Lines(m.SQL) {
			if !strings.HasPrefix(line, "revoke ") && !strings.HasPrefix(line, "grant ") { // from or to public, which is no schema
				require.NotRegexp(t, left, line)
			}
		}
	}
}

// publish appends one event in a transaction of its own.
func publish(t *testing.T, db publisher.BatchSender, log *cursor.Log, topic string) {
	t.Helper()
	events, err := publisher.NewEventLog(db, publisher.EventLogConfig{Log: log})
	require.NoError(t, err)
	require.NoError(t, events.Publish(topic, message.NewMessage("", nil)))
}

func TestLogsLiveSideBySide(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.Pool(t)
	db.Exec(t, `create schema "Ev""x"`)
	log := oddLog(t)
	for _, l := range []*cursor.Log{nil, log} {
		_, err := migrations.Up(t.Context(), pool, l)
		require.NoError(t, err)
	}
	listener := db.Conn(t)
	_, err := listener.Exec(t.Context(), `listen event_log; listen `+pgx.Identifier{log.Channel()}.Sanitize())
	require.NoError(t, err)
	var channels []string
	heard := func() {
		n, err := listener.WaitForNotification(t.Context())
		require.NoError(t, err)
		channels = append(channels, n.Channel)
	}

	publish(t, pool, log, "audited")
	heard()
	publish(t, pool, nil, "sold")
	heard()
	publish(t, pool, log, "audited again")
	heard()

	require.Equal(t, []string{`Ev"x.Audit_log`, "event_log", `Ev"x.Audit_log`}, channels)
	require.Equal(t, []string{"1 audited", "2 audited again"},
		pgtest.Column[string](t, db, `select seq || ' ' || topic from "Ev""x"."Audit_log" order by seq`))
	require.Equal(t, []string{"1 sold"}, pgtest.Column[string](t, db, `select seq || ' ' || topic from event_log order by seq`))
	require.Equal(t, []int{2, 1}, pgtest.Column[int](t, db,
		`select last_seq from "Ev""x"."Audit_seq" union all select last_seq from public.event_seq`))
	require.Zero(t, pgtest.Value[int](t, db, `select (select count(*) from "Ev""x"."Audit_outbox") + (select count(*) from event_outbox)`))
}

func TestLogWithTheOddestNamesWorksInEveryExecMode(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	log, err := cursor.NewLog(cursor.LogConfig{
		Schema: `public.event_log 'event_log' $1 $$ \ ?`, Name: `It's "$$" $2 -- /* event_`, Channel: `Wake's "up" \ $1 $$`,
	})
	require.NoError(t, err)
	db.Exec(t, `create schema `+pgx.Identifier{log.Schema()}.Sanitize())
	_, err = migrations.Up(t.Context(), db.Conn(t), log)
	require.NoError(t, err)
	listener := db.Conn(t)
	_, err = listener.Exec(t.Context(), `listen `+pgx.Identifier{log.Channel()}.Sanitize())
	require.NoError(t, err)
	for i, mode := range execModes {
		publish(t, db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }), log, "any")
		n, err := listener.WaitForNotification(t.Context())
		require.NoError(t, err)
		require.Equal(t, log.Channel(), n.Channel)
		look, err := cursor.LookAt(t.Context(), db.Conn(t), log, nil)
		require.NoError(t, err)
		require.EqualValues(t, i+1, look.Head)
	}
}

func TestLogThatDoesNotNotifyIsSilent(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	log, err := cursor.NewLog(cursor.LogConfig{NoNotify: true})
	require.NoError(t, err)
	_, err = migrations.Up(t.Context(), db.Conn(t), log)
	require.NoError(t, err)
	listener := db.Conn(t)
	_, err = listener.Exec(t.Context(), `listen event_log`)
	require.NoError(t, err)
	publish(t, db.Pool(t), log, "orders")
	db.Exec(t, "select pg_notify('event_log', 'the only one')")
	n, err := listener.WaitForNotification(t.Context())
	require.NoError(t, err)
	require.Equal(t, "the only one", n.Payload)
	require.Equal(t, 1, pgtest.Value[int](t, db, "select count(*)::int from event_log"))
}
