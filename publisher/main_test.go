package publisher_test

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

func inMode(mode pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }
}

// bounded ends long before the run does, so that a wait for what never comes names its test.
func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func newEventLog(t *testing.T, db publisher.BatchSender, config publisher.EventLogConfig) *publisher.EventLog {
	t.Helper()
	events, err := publisher.NewEventLog(db, config)
	require.NoError(t, err)
	return events
}

// message with a payload, which is also its id.
func msg(payload string) *message.Message { return message.NewMessage(payload, []byte(payload)) }

// log is what the log holds: the payloads in the order of their numbers, which must be 1 to n, as must be the
// counter; and the outbox must be empty.
func log(t *testing.T, db *pgtest.DB) []string {
	t.Helper()
	payloads := pgtest.Column[string](t, db, `select convert_from(payload, 'UTF8') from event_log order by seq`)
	require.Equal(t, []int{len(payloads), len(payloads), 0}, pgtest.Column[int](t, db, `
		select coalesce(max(seq), 0) from event_log union all select last_seq from event_seq
		union all select count(*)::int from event_outbox`))
	return payloads
}

func exec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql)
	require.NoError(t, err, sql)
}
