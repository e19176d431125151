package telemetry_test

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/telemetry"
)

// newXYZ has x at the head for two hours, y behind by 7 with the oldest event 30 s old, z without its row.
func newXYZ(t *testing.T) (*pgtest.DB, []cursor.Key) {
	db := logtest.New(t)
	keys := []cursor.Key{key("x"), key("y"), key("z")}
	ensure(t, db, keys...)
	appendAgo(t, db, 3, 2*time.Hour)
	db.Exec(t, "update event_consumer_cursors set last_seq = 3, occurred_seq = 3, last_occurred_at = (select occurred_at from event_log where seq = 3)")
	appendAgo(t, db, 7, 30*time.Second)
	db.Exec(t, "update event_consumer_cursors set last_seq = 10, occurred_seq = 10, last_occurred_at = (select occurred_at from event_log where seq = 10) where consumer = 'x'")
	db.Exec(t, "update event_log set occurred_at = occurred_at - interval '2 hours' where seq = 10")
	db.Exec(t, "update event_consumer_cursors set last_occurred_at = (select occurred_at from event_log where seq = 10) where consumer = 'x'")
	db.Exec(t, "delete from event_consumer_cursors where consumer = 'z'")
	return db, keys
}

func requireXYZ(t *testing.T, p points) {
	t.Helper()
	require.Equal(t, map[string]float64{"x@orders": 0, "y@orders": 7}, p[lag])
	require.Len(t, p[age], 2)
	require.Zero(t, p[age]["x@orders"])
	require.InDelta(t, 90, p[age]["y@orders"], 60.1) // 30 s, and however slow the machine is
	require.Equal(t, map[string]float64{"z@orders cursor_missing": 1}, p[problem])
}

func TestGaugesTellBehindFromHeadAndFromUnknown(t *testing.T) {
	t.Parallel()
	db, keys := newXYZ(t)
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: keys})
	p := m.collect(t)
	requireXYZ(t, p)
	require.Equal(t, map[string]float64{"x@orders": 0, "y@orders": 0}, p["eventlog.consumer.parked"])
	require.Equal(t, map[string]float64{"x@orders": 0, "y@orders": 0}, p["eventlog.consumer.lost"])
	require.Equal(t, map[string]float64{"": 0}, p[failures])
}

func TestGaugesAreReadInEveryExecMode(t *testing.T) {
	t.Parallel()
	db, keys := newXYZ(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	} {
		m := newMeters()
		register(t, m, telemetry.GaugesConfig{
			DB: db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }), Keys: keys,
		})
		requireXYZ(t, m.collect(t))
	}
}

func TestEachProblemHasItsReason(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	var keys []cursor.Key
	for _, name := range []string{"gap", "failing", "passed", "parked", "lost", "paused", "retired", "fine"} {
		keys = append(keys, key(name))
	}
	ensure(t, db, keys...)
	appendAgo(t, db, 5, time.Minute)
	db.Exec(t, `insert into event_consumer_failures (consumer, topic, shard, seq, through, since, failed_at, retry_at, attempts, error_type, permanent, failed_by, edge)
		select consumer, topic, shard, 1, case when consumer = 'passed' then 0 else 1 end, now(), now(), now(), 1,
			case when consumer = 'gap' then 'consumer_gap' else '23505' end, false, 'test', true
		from event_consumer_cursors where consumer in ('gap', 'failing', 'passed')`)
	db.Exec(t, `insert into event_consumer_parked (consumer, topic, shard, seq, occurred_at, recorded_at, event_topic, uuid, payload, metadata, error_type, attempts, parked_by)
		select 'parked', 'orders', '', i, now(), now(), 'orders', '', '', '{}', '23505', 3, 'test' from generate_series(1, 2) i`)
	db.Exec(t, `insert into event_consumer_losses (consumer, topic, shard, first_seq, last_seq, reason, recorded_by, settled_at)
		values ('lost', 'orders', '', 1, 3, 'retention', 'test', null), ('lost', 'orders', '', 4, 4, 'retention', 'test', now())`)
	db.Exec(t, "update event_consumer_cursors set paused_at = now() where consumer = 'paused'")
	db.Exec(t, "update event_consumer_cursors set retired_at = now() where consumer = 'retired'")
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: keys})
	p := m.collect(t)
	require.Equal(t, map[string]float64{
		"consumer_gap gap@orders gap": 1, "23505 failing@orders failing": 1, "parked@orders parked": 1,
		"lost@orders lost": 1, "paused@orders paused": 1, "retired@orders retired": 1,
	}, p[problem])
	require.Equal(t, float64(2), p["eventlog.consumer.parked"]["parked@orders"])
	require.Equal(t, float64(3), p["eventlog.consumer.lost"]["lost@orders"])
	require.Len(t, p[lag], len(keys))
	for _, k := range keys {
		require.Equal(t, float64(5), p[lag][k.String()], k)
		require.GreaterOrEqual(t, p[age][k.String()], float64(60), k)
	}
}

func TestCursorAheadOfTheLogHasNoLag(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, key("ahead"), key("old"))
	appendAgo(t, db, 5, time.Minute)
	db.Exec(t, `update event_consumer_cursors set last_seq = 5, occurred_seq = 5, moved_at = now(),
		last_occurred_at = (select occurred_at from event_log where seq = 5) where consumer = 'ahead'`)
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: []cursor.Key{key("ahead"), key("old")}})
	require.Equal(t, map[string]float64{"ahead@orders": 0, "old@orders": 5}, m.collect(t)[lag])

	// The log's tail is lost, as by a restore.
	db.Exec(t, "delete from event_log where seq > 3")
	db.Exec(t, "update event_seq set last_seq = 3")
	requireAhead := func() {
		t.Helper()
		p := m.collect(t)
		require.Equal(t, map[string]float64{"ahead@orders cursor_ahead": 1}, p[problem])
		require.NotContains(t, p[lag], "ahead@orders")
		require.NotContains(t, p[age], "ahead@orders")
		require.Contains(t, p[lag], "old@orders")
	}
	requireAhead()
	appendAgo(t, db, 2, 0) // the head is where the cursor is, and the event at it another one
	requireAhead()
	appendAgo(t, db, 2, 0) // and beyond
	requireAhead()

	// A worker has found it, and the log's event at the cursor cannot be compared.
	db.Exec(t, "update event_consumer_cursors set occurred_seq = null where consumer = 'ahead'")
	require.Equal(t, float64(2), m.collect(t)[lag]["ahead@orders"])
	_, _, err := cursor.RecordFailure(t.Context(), db.Conn(t), nil, key("ahead"), "test", cursor.Attempt{
		Through: math.MaxInt64, ErrorType: "cursor_ahead", Delay: time.Second, DelayCap: time.Second, Jitter: 1,
	})
	require.NoError(t, err)
	requireAhead()

	_, err = operate.Seek(t.Context(), db.Conn(t), nil, key("ahead"), cursor.FromSeq(8), operate.Order{By: "test"})
	require.NoError(t, err)
	p := m.collect(t)
	require.Empty(t, p[problem])
	require.Zero(t, p[lag]["ahead@orders"])
}

func TestAgeGoesOnWhereNoEventIsLeftToRead(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, key("slow"), key("new"))
	appendAgo(t, db, 3, time.Hour)
	appendAgo(t, db, 2, 0)
	db.Exec(t, `update event_consumer_cursors set last_seq = 3, occurred_seq = 3,
		last_occurred_at = (select occurred_at from event_log where seq = 3) where consumer = 'slow'`)
	db.Exec(t, "delete from event_log")
	db.Exec(t, "update event_consumer_cursors set created_at = now() - interval '2 hours' where consumer = 'new'")
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: []cursor.Key{key("slow"), key("new")}})
	p := m.collect(t)
	require.Equal(t, map[string]float64{"slow@orders": 2, "new@orders": 5}, p[lag])
	require.GreaterOrEqual(t, p[age]["slow@orders"], float64(3600))
	require.GreaterOrEqual(t, p[age]["new@orders"], float64(7200))
}

func TestAgeOfAnEventFromTheFutureIsNotNegative(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, key("x"))
	appendAgo(t, db, 1, -time.Hour)
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: []cursor.Key{key("x")}})
	p := m.collect(t)
	require.Equal(t, map[string]float64{"x@orders": 1}, p[lag])
	require.InDelta(t, 30, p[age]["x@orders"], 30) // since it was recorded, and not an hour less than nothing
}

func TestLagAndAgeAreOfOneMoment(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, key("x"))
	// What was passed last is old: a head that is newer than the cursor would show it as the age.
	appendAgo(t, db, 1, 2*time.Hour)
	db.Exec(t, `update event_consumer_cursors set last_seq = 1, occurred_seq = 1, last_occurred_at = (select occurred_at from event_log where seq = 1)`)
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: []cursor.Key{key("x")}})

	ctx, cancel := context.WithCancel(t.Context())
	appending, moving := db.Conn(t), db.Conn(t)
	ended := make(chan error, 2)
	load := func(exec func() error) {
		for ctx.Err() == nil {
			if err := exec(); err != nil {
				ended <- err
				return
			}
		}
		ended <- nil
	}
	go load(func() error {
		_, err := appending.Exec(context.Background(), "insert into event_outbox (topic) values ('orders')")
		return err
	})
	go load(func() error { // to the head, keeping the old time
		_, err := moving.Exec(context.Background(), "update event_consumer_cursors set last_seq = (select last_seq from event_seq), occurred_seq = null")
		return err
	})
	behind := 0
	for range 300 {
		p := m.collect(t)
		require.Contains(t, p[lag], "x@orders")
		require.GreaterOrEqual(t, p[lag]["x@orders"], float64(0))
		require.Less(t, p[age]["x@orders"], float64(600))
		if p[lag]["x@orders"] > 0 {
			behind++
		} else {
			require.Zero(t, p[age]["x@orders"])
		}
	}
	cancel()
	require.NoError(t, <-ended)
	require.NoError(t, <-ended)
	require.Positive(t, behind)
}

func TestGaugesOfALogWithOtherNames(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	other, err := cursor.NewLog(cursor.LogConfig{Name: "Audit"})
	require.NoError(t, err)
	_, err = migrations.Up(t.Context(), db.Conn(t), other)
	require.NoError(t, err)
	ensure(t, db, key("x"))
	_, err = cursor.Ensure(t.Context(), db.Conn(t), other, "test", []cursor.Registration{{Key: key("x")}})
	require.NoError(t, err)
	db.Exec(t, `insert into "Audit_outbox" (topic) values ('orders')`)
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: []cursor.Key{key("x")}})
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Log: other, Keys: []cursor.Key{key("x")}})
	require.Equal(t, map[string]float64{"x@orders": 0, "x@orders public.Audit_log": 1}, m.collect(t)[lag])
}

func TestGaugesConfigReportsAllFaults(t *testing.T) {
	t.Parallel()
	_, err := telemetry.RegisterGauges(telemetry.GaugesConfig{Timeout: -1, MeterProvider: newMeters()})
	require.ErrorContains(t, err, "missing DB")
	require.ErrorContains(t, err, "missing Keys")
	require.ErrorContains(t, err, "negative Timeout")
	_, err = telemetry.RegisterGauges(telemetry.GaugesConfig{Keys: []cursor.Key{{}, key("x"), key("x")}, MeterProvider: newMeters()})
	require.ErrorContains(t, err, "missing consumer name")
	require.ErrorContains(t, err, `key 2 ("x@orders"): the same key twice`)
}

func TestAgeOfStagedEventsIsReportedForTheLog(t *testing.T) {
	t.Parallel()
	db, keys := newXYZ(t)
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: keys})
	const staged = "eventlog.staged.age"
	require.Equal(t, map[string]float64{"": 0}, m.collect(t)[staged])
	db.Exec(t, "insert into event_outbox (topic, staged, appended_at) values ('orders', true, clock_timestamp() - interval '1 hour'), ('orders', true, clock_timestamp())")
	require.InDelta(t, 3630, m.collect(t)[staged][""], 30.1)
}

func TestReserveIsWhatFitsIntoThePartitionsUntilAppendsFail(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, key("x"), key("y"))
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: []cursor.Key{key("x"), key("y")}})
	const reserve = "eventlog.log.partition_reserve"
	appendAgo(t, db, 3, 0)
	require.NotContains(t, m.collect(t), reserve, "the one partition takes every number")
	db.Exec(t, "alter table event_log detach partition event_log_first")
	db.Exec(t, "alter table event_log attach partition event_log_first for values from (minvalue) to (5)")
	db.Exec(t, "create table event_log_last partition of event_log for values from (5) to (9)")
	require.Equal(t, map[string]float64{"": 5}, m.collect(t)[reserve])
	appendAgo(t, db, 4, 0)
	require.Equal(t, map[string]float64{"": 1}, m.collect(t)[reserve])
	appendAgo(t, db, 1, 0)
	require.Equal(t, map[string]float64{"": 0}, m.collect(t)[reserve])
	_, err := db.Conn(t).Exec(t.Context(), "insert into event_outbox (topic) values ('orders')")
	require.ErrorContains(t, err, "no partition")
	db.Exec(t, "create table event_log_end partition of event_log for values from (9) to (maxvalue)")
	require.NotContains(t, m.collect(t), reserve)
}

// An event that a source dates into the future waits all the same.
func TestPendingAgeRunsFromWhenTheEventWasRecordedAtTheLatest(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, key("push"))
	db.Exec(t, "insert into event_outbox (topic, occurred_at) values ('orders', '2100-01-01')")
	db.Exec(t, "update event_log set recorded_at = clock_timestamp() - interval '1 hour'")
	m := newMeters()
	register(t, m, telemetry.GaugesConfig{DB: db.Pool(t), Keys: []cursor.Key{key("push")}})
	require.InDelta(t, 3630, m.collect(t)[age]["push@orders"], 30.1)
}
