package publisher_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

func withPayload(column string) wsql.DefaultPostgreSQLSchema {
	return wsql.DefaultPostgreSQLSchema{GeneratePayloadType: func(string) string { return column }}
}

func newJobs(t *testing.T, schema publisher.SchemaAdapter) *publisher.Jobs {
	t.Helper()
	jobs, err := publisher.NewJobs(publisher.JobsConfig{Schema: schema})
	require.NoError(t, err)
	return jobs
}

func TestJobThatItsTableDoesNotHoldIsRefused(t *testing.T) {
	t.Parallel()
	of := func(uuid, payload, metadata string) *message.Message {
		m := message.NewMessage(uuid, []byte(payload))
		m.Metadata.Set("m", metadata)
		return m
	}
	for name, c := range map[string]struct {
		msg     *message.Message
		columns []string
		reason  string // none: it is taken
	}{
		"id of 36 characters":      {msg: of(strings.Repeat("ü", 36), "{}", ""), columns: []string{"JSON", "JSONB", "BYTEA"}},
		"id of 37 characters":      {msg: of(strings.Repeat("i", 37), "{}", ""), columns: []string{"json", "jsonb", "bytea"}, reason: "37 characters"},
		"no id":                    {msg: of("", "{}", ""), columns: []string{"json", "jsonb", "bytea"}},
		"NUL in the id":            {msg: of("\x00", "{}", ""), columns: []string{"json", "jsonb", "bytea"}, reason: "id contains NUL"},
		"invalid id":               {msg: of("\xff", "{}", ""), columns: []string{"json", "jsonb", "bytea"}, reason: "id is not valid UTF-8"},
		"invalid metadata":         {msg: of("id", "{}", "\xff"), columns: []string{"json", "jsonb", "bytea"}, reason: "metadata"},
		"NUL in metadata":          {msg: of("id", "{}", "\x00"), columns: []string{"json", "jsonb", "bytea"}},
		"no payload":               {msg: of("id", "", ""), columns: []string{"json", "jsonb", "bytea"}},
		"text":                     {msg: of("id", "text", ""), columns: []string{"json", "jsonb", "JSONB NOT NULL"}, reason: "not JSON"},
		"text in bytea":            {msg: of("id", "text", ""), columns: []string{"bytea", "BYTEA NOT NULL", "text"}},
		"binary in bytea":          {msg: of("id", "\x00\xff", ""), columns: []string{"bytea"}},
		"NUL in JSON":              {msg: of("id", `"\u0000"`, ""), columns: []string{"json", "bytea"}},
		"NUL in jsonb":             {msg: of("id", `"\u0000"`, ""), columns: []string{"jsonb"}, reason: `\u0000`},
		"JSON with spaces outside": {msg: of("id", " {} ", ""), columns: []string{"json", "jsonb", "bytea"}},
	} {
		for _, column := range c.columns {
			err := newJobs(t, withPayload(column)).Publish("orders", c.msg)
			if c.reason == "" {
				require.ErrorIs(t, err, publisher.ErrNoUnit, "%s %s", name, column)
				continue
			}
			var refused *publisher.ValueError
			require.ErrorAs(t, err, &refused, "%s %s", name, column)
			require.Contains(t, refused.Reason, c.reason, "%s %s", name, column)
			require.Equal(t, "invalid_message", cursor.ErrorType(err))
		}
	}
}

func TestJobTopicsThatMakeNoTableOfTheirOwnAreRefused(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	jobs := newJobs(t, nil)
	stem := strings.Repeat("x", 53)
	good := []string{stem, stem[:52], "orders.v1", "orders_v1", "Orders", "orders", "my-topic", "a$b:c", "0"}
	require.NoError(t, jobs.Initialize(t.Context(), db.Pool(t), good...))
	for _, topic := range good {
		require.True(t, pgtest.Value[bool](t, db, `select exists (select from pg_class where relname = $1 and relkind = 'r')`, "watermill_"+topic))
		require.ErrorIs(t, jobs.Publish(topic, msg("{}")), publisher.ErrNoUnit)
	}
	require.Equal(t, len(good), pgtest.Value[int](t, db, `select count(*) from pg_class where relname like 'watermill\_%' and relkind = 'r'`))

	for topic, reason := range map[string]string{
		stem + "a": "has 64 bytes, PostgreSQL keeps 63: choose a topic of 53 bytes or less",
		stem + "b": "53 bytes or less",
		"":         "only letters",
		`a"b`:      "only letters",
		"a'b":      "only letters",
		"Aufträge": "only letters",
		"a b":      "only letters",
		"a\x00":    "only letters",
		"a\n":      "only letters",
	} {
		for _, err := range []error{jobs.Publish(topic, msg("{}")), jobs.Initialize(t.Context(), db.Pool(t), "fine", topic)} {
			var refused *publisher.ValueError
			require.ErrorAs(t, err, &refused, topic)
			require.Contains(t, err.Error(), reason, topic)
			require.Equal(t, topic, refused.Topic)
		}
	}
	require.False(t, pgtest.Value[bool](t, db, `select exists (select from pg_class where relname = 'watermill_fine')`))
}

func TestLengthOfATableNamedByTheUserIsChecked(t *testing.T) {
	t.Parallel()
	for table, ok := range map[string]bool{
		`"jobs"."` + strings.Repeat("t", 63) + `"`: true,
		`"jobs"."` + strings.Repeat("t", 64) + `"`: false,
		`jobs.` + strings.Repeat("t", 63):          true,
		`jobs.` + strings.Repeat("t", 64):          false,
	} {
		jobs := newJobs(t, wsql.DefaultPostgreSQLSchema{GenerateMessagesTableName: func(string) string { return table }})
		var refused *publisher.ValueError
		require.Equal(t, !ok, errors.As(jobs.Publish("orders", msg("{}")), &refused), table)
	}
}

func TestJobTablesAreMadeByManyAtOnce(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t)
	jobs := newJobs(t, nil)
	errs := make([]error, 8)
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() {
			errs[i] = errors.Join(
				jobs.Initialize(t.Context(), pool, "orders", "bills", fmt.Sprintf("own%d", i)),
				jobs.Initialize(t.Context(), pool, "bills", "orders"))
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, 10, pgtest.Value[int](t, db, `select count(*) from pg_class where relname like 'watermill\_%' and relkind = 'r'`))
}

func TestJobWithoutAUnitIsRefused(t *testing.T) {
	t.Parallel()
	jobs := newJobs(t, nil)
	err := jobs.Publish("orders", msg("{}"))
	require.ErrorIs(t, err, publisher.ErrNoUnit)
	require.ErrorContains(t, err, "SetContext")
	require.NoError(t, jobs.Publish("orders"))
	require.NoError(t, jobs.Close())
}

func TestSchemaMayBeAPointer(t *testing.T) {
	t.Parallel()
	schema := withPayload("jsonb")
	var refused *publisher.ValueError
	require.ErrorAs(t, newJobs(t, &schema).Publish("orders", msg(`"\u0000"`)), &refused)
	_, err := publisher.NewJobs(publisher.JobsConfig{Schema: (*wsql.DefaultPostgreSQLSchema)(nil)})
	require.ErrorContains(t, err, "nil")
}
