package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { Main(m) }

// envChild tells TestChild what to do in a process of its own.
const envChild = "PGTEST_CHILD"

var numbers = Template{
	Key: "pgtest numbers",
	Setup: func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `create table numbers (n int); insert into numbers values (1), (2)`)
		return err
	},
}

// TestChild is what the tests about whole processes run in one; by itself it just passes.
func TestChild(t *testing.T) {
	db := New(t, numbers)
	require.Equal(t, []int{1, 2}, Column[int](t, db, `select n from numbers order by n`))
	switch os.Getenv(envChild) {
	case "fail":
		t.Error("as told")
	case "leak":
		go func() { select {} }()
	}
}

// oneOff is a template no other test run knows.
func oneOff(t *testing.T, setup func(context.Context, *pgx.Conn) error) Template {
	t.Helper()
	template := Template{Key: t.Name() + rand.Text(), Setup: setup}
	maintenance, _, err := shared.maintenance()
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = execute(context.Background(), maintenance, `alter database `+template.name()+` is_template false`)
		assert.NoError(t, drop(maintenance, template.name()))
	})
	return template
}

// child runs TestChild in a process of its own on the named server.
func child(t *testing.T, address, what string) (output string, err error) {
	t.Helper()
	command := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestChild$", "-test.v")
	command.Env = append(os.Environ(), EnvDatabase+"="+address, envChild+"="+what)
	text, err := command.CombinedOutput()
	return string(text), err
}

func TestDatabasesOfOneTemplateAreSeparate(t *testing.T) {
	t.Parallel()
	one, other := New(t, numbers), New(t, numbers)
	one.Exec(t, `insert into numbers values ($1)`, 3)

	assert.Equal(t, []int{1, 2, 3}, Column[int](t, one, `select n from numbers order by n`))
	assert.Equal(t, []int{1, 2}, Column[int](t, other, `select n from numbers order by n`))
	assert.Equal(t, one.Name(), Value[string](t, one, `select current_database()::text`))
	assert.NotEqual(t, one.Name(), other.Name())
}

func TestDatabaseWithoutTemplateIsEmpty(t *testing.T) {
	t.Parallel()
	db := New(t)
	assert.Empty(t, Column[string](t, db, `select relname::text from pg_class where relnamespace = 'public'::regnamespace`))
}

func TestDatabaseIsDroppedAfterItsTest(t *testing.T) {
	t.Parallel()
	outer := New(t)
	var name string
	t.Run("inner", func(t *testing.T) {
		db := New(t, numbers)
		name = db.Name()
		db.Pool(t)
		db.Conn(t)
		require.NoError(t, db.SQL(t).PingContext(t.Context()))
		db.Exec(t, `delete from numbers`)
	})
	assert.False(t, Value[bool](t, outer, `select exists (select from pg_database where datname = $1)`, name))
}

func TestTemplateIsSetUpOnceForAllWhoAsk(t *testing.T) {
	t.Parallel()
	var setups atomic.Int32
	template := oneOff(t, func(ctx context.Context, conn *pgx.Conn) error {
		setups.Add(1)
		_, err := conn.Exec(ctx, `create table made ()`)
		return err
	})
	maintenance, _, err := shared.maintenance()
	require.NoError(t, err)
	var asking sync.WaitGroup
	for range 8 {
		asking.Go(func() {
			_, err := template.make(maintenance)
			assert.NoError(t, err)
		})
	}
	asking.Wait()
	New(t, template).Exec(t, `select from made`)
	assert.EqualValues(t, 1, setups.Load())
}

func TestFailedSetupLeavesNoTemplate(t *testing.T) {
	t.Parallel()
	fault := errors.New("no such migration")
	template := oneOff(t, func(context.Context, *pgx.Conn) error { return fault })
	maintenance, _, err := shared.maintenance()
	require.NoError(t, err)

	_, err = template.make(maintenance)
	require.ErrorIs(t, err, fault)
	_, err = template.make(maintenance)
	require.ErrorIs(t, err, fault)
	assert.False(t, Value[bool](t, New(t), `select exists (select from pg_database where datname = $1)`, template.name()))
}

func TestUnfinishedTemplateIsMadeAgain(t *testing.T) {
	t.Parallel()
	template := oneOff(t, numbers.Setup)
	maintenance, _, err := shared.maintenance()
	require.NoError(t, err)
	// As a process leaves it that dies during setup.
	require.NoError(t, execute(t.Context(), maintenance, `create database `+template.name()))

	assert.Equal(t, 2, Value[int](t, New(t, template), `select count(*) from numbers`))
}

func TestHelpersSurviveRestart(t *testing.T) {
	t.Parallel()
	server := Server(t)
	db := NewOn(t, server, numbers)
	for _, immediate := range []bool{false, true} {
		db.Exec(t, `insert into numbers values (3)`)
		before := Value[int](t, db, `select count(*) from numbers`)
		require.NoError(t, server.Restart(t.Context(), immediate))
		assert.Equal(t, before, Value[int](t, db, `select count(*) from numbers`))
	}
}

func TestPoolTakesOptions(t *testing.T) {
	t.Parallel()
	pool := New(t).Pool(t, func(config *pgxpool.Config) { config.MaxConns = 3 })
	assert.EqualValues(t, 3, pool.Config().MaxConns)
	assert.NoError(t, pool.Ping(t.Context()))
}

func TestNamedServerKeepsOnlyTheDatabaseOfAFailedTest(t *testing.T) {
	t.Parallel()
	server := Server(t)
	db := NewOn(t, server)
	databases := func() []string {
		return Column[string](t, db, `select datname::text from pg_database where datname like 'testchild%'`)
	}

	output, err := child(t, server.URL("postgres"), "")
	require.NoError(t, err, output)
	assert.Empty(t, databases())

	output, err = child(t, server.URL("postgres"), "fail")
	require.Error(t, err)
	kept := databases()
	require.Len(t, kept, 1)
	assert.Contains(t, output, server.URL(kept[0]))
}

func TestProcessesShareTheTemplatesOfANamedServer(t *testing.T) {
	t.Parallel()
	server := Server(t)
	db := NewOn(t, server)
	var running sync.WaitGroup
	for range 3 {
		running.Go(func() {
			output, err := child(t, server.URL("postgres"), "")
			assert.NoError(t, err, output)
		})
	}
	running.Wait()
	assert.Equal(t, []string{numbers.name()},
		Column[string](t, db, `select datname::text from pg_database where datname like 'eventlog_template_%'`))
}

func TestLeakedGoroutineFailsTheRun(t *testing.T) {
	t.Parallel()
	output, err := child(t, Server(t).URL("postgres"), "leak")
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	assert.Equal(t, 1, exit.ExitCode())
	assert.Contains(t, output, "--- PASS: TestChild")
	assert.Contains(t, output, "goroutines outlived the tests")
}

func TestMissingServerFailsTheTest(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"postgres://postgres@127.0.0.1:1/postgres", "host=127.0.0.1 password=secret"} {
		output, err := child(t, address, "")
		require.Error(t, err)
		assert.Contains(t, output, "--- FAIL: TestChild")
		assert.NotContains(t, output, "secret")
	}
}

func TestDatabaseNamesFitAndDiffer(t *testing.T) {
	t.Parallel()
	for _, test := range []string{"TestPlain", "TestÄ/with spaces/#01", strings.Repeat("Long", 40), ""} {
		name := databaseName(test)
		assert.LessOrEqual(t, len(name), 63)
		assert.Regexp(t, `^[a-z0-9_]+$`, name)
		assert.NotEqual(t, name, databaseName(test))
	}
}

func TestOtherDatabaseOfAnAddress(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"postgres://me:secret@db:5432/postgres?sslmode=disable": "postgres://me:secret@db:5432/other?sslmode=disable",
		"postgresql://db": "postgresql://db/other",
		"postgres:///postgres?host=%2Frun&dbname=postgres": "postgres:///other?host=%2Frun",
	} {
		got, err := withDatabase(address, "other")
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}
	_, err := withDatabase("host=db dbname=postgres", "other")
	assert.ErrorContains(t, err, EnvDatabase)
}

func TestHelperConnectionsAreNamed(t *testing.T) {
	t.Parallel()
	db := New(t)
	names := Column[string](t, db, `select application_name from pg_stat_activity where datname = current_database()`)
	assert.Equal(t, []string{applicationName}, slices.Compact(names))
}
