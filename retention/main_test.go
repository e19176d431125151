package retention_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/retention"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func newRetention(t testing.TB, db *pgtest.DB, change ...func(*retention.Config)) (*retention.Retention, *logtest.Logger) {
	t.Helper()
	config := retention.Config{ConnString: db.URL(), By: "test", Interval: time.Second}
	for _, c := range change {
		c(&config)
	}
	logger := logtest.NewLogger()
	r, err := retention.New(config, logger)
	require.NoError(t, err)
	return r, logger
}

func set(t testing.TB, db *pgtest.DB, s retention.Settings) {
	t.Helper()
	conn := db.Conn(t)
	require.NoError(t, retention.Set(t.Context(), conn, nil, s, "test", ""))
	require.NoError(t, conn.Close(t.Context()))
}

func once(t testing.TB, db *pgtest.DB, change ...func(*retention.Config)) retention.Done {
	t.Helper()
	r, _ := newRetention(t, db, change...)
	done, err := r.Once(t.Context())
	require.NoError(t, err)
	return done
}

func status(t testing.TB, db *pgtest.DB) *retention.State {
	t.Helper()
	conn := db.Conn(t)
	defer conn.Close(context.Background())
	s, err := retention.Status(t.Context(), conn, nil)
	require.NoError(t, err)
	return s
}

func names(s *retention.State) (all []string) {
	for _, p := range s.Partitions {
		all = append(all, p.Name)
	}
	return all
}

// fill appends so many events one day after the other: the last of them was recorded so long ago.
func fill(t testing.TB, db *pgtest.DB, n int, age string) {
	t.Helper()
	logtest.Append(t, db, "orders", n)
	db.Exec(t, `update event_log l set recorded_at = l.recorded_at - $2::interval
		where l.seq > (select last_seq from event_seq) - $1`, n, age)
}

// As retention leaves it behind.
const sqlFilled = `
alter table event_log detach partition event_log_first;
alter table event_log attach partition event_log_first for values from (minvalue) to (20);
create table event_log_p20 partition of event_log for values from (20) to (30);
create table event_log_p30 partition of event_log for values from (30) to (40);
create table event_log_p40 partition of event_log for values from (40) to (50);
insert into event_outbox (topic) select 'orders' from generate_series(1, 35);
set constraints all immediate;
update event_log set recorded_at = recorded_at - interval '40 days' where seq < 30`

// filled is a log whose first events, 1 to 29, are old; 30 to 35 are new. Partitions begin at 20, 30 and 40.
func filled(t testing.TB, s retention.Settings) *pgtest.DB {
	t.Helper()
	db := pgtest.New(t, pgtest.Template{Key: logtest.Template().Key + sqlFilled, Setup: setUpFilled})
	s.PartitionSize = 10
	set(t, db, s)
	return db
}

func setUpFilled(ctx context.Context, conn *pgx.Conn) error {
	if err := logtest.Template().Setup(ctx, conn); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, sqlFilled, pgx.QueryExecModeSimpleProtocol)
	return err
}

func register(t testing.TB, db *pgtest.DB, consumer string, at int64) {
	t.Helper()
	conn := db.Conn(t)
	defer conn.Close(context.Background())
	_, err := cursor.Ensure(t.Context(), conn, nil, "test", []cursor.Registration{{Key: cursor.Key{Consumer: consumer}, Start: cursor.FromBeginning()}})
	require.NoError(t, err)
	db.Exec(t, "update event_consumer_cursors set last_seq = $2 where consumer = $1", consumer, at)
}

// openRound is a transaction that has read the log, as a round has whose handler is at work.
func openRound(t testing.TB, db *pgtest.DB) (tx pgx.Tx) {
	t.Helper()
	tx, err := db.Conn(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "select from event_log l order by l.seq limit 1")
	require.NoError(t, err)
	return tx
}

func lowest(t testing.TB, db *pgtest.DB) int64 {
	t.Helper()
	return pgtest.Value[int64](t, db, "select coalesce(min(seq), 0) from event_log")
}
