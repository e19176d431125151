package retention_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/retention"
)

func TestSwitchingOnCutsTheLogAboveTheHead(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 25)
	require.Empty(t, once(t, db).Made) // not switched on
	require.Equal(t, []string{"event_log_first"}, names(status(t, db)))

	set(t, db, retention.Settings{PartitionSize: 10})
	done := once(t, db)
	s := status(t, db)
	require.Equal(t, done.CutAt, s.Partitions[0].To)
	require.Greater(t, done.CutAt, int64(35))
	require.GreaterOrEqual(t, s.Ahead, 2)
	require.Equal(t, append([]string{"event_log_first"}, done.Made...), names(s))
	require.Equal(t, 25, pgtest.Value[int](t, db, "select count(*)::int from event_log"))
	require.Empty(t, pgtest.Column[string](t, db, "select conname::text from pg_constraint where conname like '%end'"))
	require.Zero(t, once(t, db).CutAt)

	logtest.Append(t, db, "orders", 50) // beyond the first partition
	require.Equal(t, 75, pgtest.Value[int](t, db, "select count(*)::int from event_log"))
}

func TestOldEventsGoAndTheirIDsWithThem(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	set(t, db, retention.Settings{PartitionSize: 10})
	once(t, db)
	for range 35 {
		db.Exec(t, "insert into event_outbox (topic, once) values ('orders', true)")
	}
	db.Exec(t, "update event_log set recorded_at = recorded_at - interval '31 days' where seq <= 32")
	require.Equal(t, []string{"event_log_first", "event_log_p20"}, once(t, db).Removed)
	require.Equal(t, int64(30), lowest(t, db)) // its partition has newer events
	require.Equal(t, 6, pgtest.Value[int](t, db, "select count(*)::int from event_ids"))
	require.Equal(t, int64(30), pgtest.Value[int64](t, db, "select min(seq) from event_ids"))
	require.Equal(t, "1 19, 20 29", pgtest.Value[string](t, db, `select string_agg(first_seq || ' ' || last_seq, ', ' order by first_seq)
		from event_retention_removals where removed_at is not null`))
	require.Zero(t, pgtest.Value[int](t, db, "select count(*)::int from event_retention_removals where removed_at is null"))
	require.Nil(t, pgtest.Value[*string](t, db, "select to_regclass('event_log_first')::text"))
	require.Empty(t, once(t, db).Removed)
}

func TestWhatAConsumerHasNotPassedIsKeptUntilItIsRetired(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{})
	first := status(t, db).Partitions[0]
	register(t, db, "quick", 35)
	register(t, db, "paused", 5)
	db.Exec(t, "update event_consumer_cursors set paused_at = now() where consumer = 'paused'")
	require.Empty(t, once(t, db).Removed)

	s := status(t, db)
	require.Len(t, s.Pins, 1)
	pin := s.Pins[0]
	require.Equal(t, cursor.Key{Consumer: "paused"}, pin.Key)
	require.Equal(t, int64(5), pin.Position)
	require.True(t, pin.Paused)
	require.Equal(t, int64(29-5), pin.Events)
	require.Positive(t, pin.Bytes)
	require.Equal(t, first.Newest.Add(30*24*time.Hour), pin.Since)

	db.Exec(t, "update event_consumer_cursors set retired_at = now() where consumer = 'paused'")
	require.NotEmpty(t, once(t, db).Removed)
	require.Equal(t, int64(30), lowest(t, db))
	require.Empty(t, status(t, db).Pins)
}

func TestPassedPartitionsGoAlthoughLaterOnesArePinned(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{})
	first := status(t, db).Partitions[0]
	register(t, db, "push", first.To-1)
	require.Equal(t, []string{first.Name}, once(t, db).Removed)
	require.Equal(t, first.To, lowest(t, db))
}

func TestOnlyTheLowEndGoes(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{})
	db.Exec(t, "update event_log set recorded_at = now() where seq = 1") // in the middle of a partition: the clock was set back
	require.Empty(t, once(t, db).Removed)
	require.Equal(t, int64(1), lowest(t, db))
}

func TestSwitchedOffRemovesNothingAndStillMakesPartitions(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{})
	conn := db.Conn(t)
	settings, err := retention.Get(t.Context(), conn, nil)
	require.NoError(t, err)
	settings.Off = true
	require.NoError(t, retention.Set(t.Context(), conn, nil, settings, "test", ""))
	fill(t, db, int(status(t, db).Reserve), "0")
	require.Zero(t, status(t, db).Ahead)
	done := once(t, db)
	require.Empty(t, done.Removed)
	require.GreaterOrEqual(t, len(done.Made), 2)
}

func TestCapLetsGoWhatALateConsumerPins(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]retention.Settings{
		"age":   {PinnedAge: 35 * 24 * time.Hour},
		"bytes": {PinnedBytes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := filled(t, s)
			register(t, db, "late", 5)
			r, logger := newRetention(t, db)
			done, err := r.Once(t.Context())
			require.NoError(t, err)
			require.NotEmpty(t, done.Removed)
			require.Equal(t, int64(30), lowest(t, db))
			require.Equal(t, []string{"late"}, pgtest.Value[[]string](t, db, "select behind from event_retention_removals order by last_seq desc limit 1"))
			require.Len(t, logger.Lines("consumers have not passed", "error"), len(done.Removed))
		})
	}
	t.Run("below the caps", func(t *testing.T) {
		t.Parallel()
		db := filled(t, retention.Settings{PinnedAge: 50 * 24 * time.Hour, PinnedBytes: 1 << 30})
		register(t, db, "late", 5)
		require.Empty(t, once(t, db).Removed)
	})
}

func TestEmptiedLogGoesOnAtItsHead(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{})
	fill(t, db, int(status(t, db).Partitions[len(status(t, db).Partitions)-1].To-1-35), "0")
	db.Exec(t, "update event_log set recorded_at = recorded_at - interval '40 days'")
	head := status(t, db).Head
	once(t, db)
	s := status(t, db)
	require.Zero(t, lowest(t, db))
	require.Equal(t, head, s.Head)
	require.Equal(t, s.Ahead, len(s.Partitions))

	conn := db.Conn(t)
	created, err := cursor.Ensure(t.Context(), conn, nil, "test", []cursor.Registration{{Key: cursor.Key{Consumer: "new"}}})
	require.NoError(t, err)
	require.Equal(t, head, created[0].Position)
	logtest.Append(t, db, "orders", 1)
	require.Equal(t, head+1, lowest(t, db))
}

// offsetChanged is a number of days ago at which New York's clocks had another offset than now.
func offsetChanged(t *testing.T) int {
	zone, err := time.LoadLocation("America/New_York")
	require.NoError(t, err)
	now := time.Now().In(zone)
	_, offset := now.Zone()
	for days := 2; days < 365; days++ {
		then := now.AddDate(0, 0, -days)
		_, before := then.Zone()
		_, after := then.AddDate(0, 0, 1).Zone()
		if before != offset && after != offset {
			return days
		}
	}
	require.Fail(t, "no change of the offset within a year")
	return 0
}

func TestTimeZonesAndTheirChangesDoNotMatter(t *testing.T) {
	t.Parallel()
	days := offsetChanged(t)
	for _, zone := range []string{"America/New_York", "Pacific/Apia", "UTC"} {
		for _, c := range []struct {
			age  string
			goes bool
		}{{"30 minutes", true}, {"-30 minutes", false}} {
			t.Run(zone+" "+c.age, func(t *testing.T) {
				t.Parallel()
				db := filled(t, retention.Settings{})
				db.Exec(t, "update event_retention set keep = make_interval(days => $1)", days)
				db.Exec(t, fmt.Sprintf("alter database %s set timezone = '%s'", pgx.Identifier{db.Name()}.Sanitize(), zone))
				db.Exec(t, `update event_log set recorded_at = now() - make_interval(secs => 86400 * $1) - $2::interval`, days, c.age)
				config, err := pgx.ParseConfig(db.URL())
				require.NoError(t, err)
				config.RuntimeParams["timezone"] = zone
				done := once(t, db, func(r *retention.Config) { r.ConnConfig = config })
				require.Equal(t, c.goes, len(done.Removed) > 0)
				conn, err := pgx.ConnectConfig(t.Context(), config)
				require.NoError(t, err)
				defer conn.Close(context.Background())
				s, err := retention.Status(t.Context(), conn, nil)
				require.NoError(t, err)
				require.WithinDuration(t, time.Now(), s.Now, time.Hour/2)
				require.Empty(t, s.Pins)
			})
		}
	}
}

func TestSettingsAreCheckedAndKept(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	before, err := retention.Get(t.Context(), conn, nil)
	require.NoError(t, err)
	require.Equal(t, retention.Settings{Off: true, Keep: 30 * 24 * time.Hour, PartitionSize: 1_000_000}, before)

	want := retention.Settings{Keep: 36 * time.Hour, PartitionSize: 500, PinnedAge: 48 * time.Hour, PinnedBytes: 7}
	require.NoError(t, retention.Set(t.Context(), conn, nil, want, "test", ""))
	got, err := retention.Get(t.Context(), conn, nil)
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.Equal(t, want, status(t, db).Settings)
	require.NoError(t, retention.Set(t.Context(), conn, nil, retention.Settings{}, "test", ""))
	got, err = retention.Get(t.Context(), conn, nil)
	require.NoError(t, err)
	require.Equal(t, retention.Settings{Keep: 30 * 24 * time.Hour, PartitionSize: 1_000_000}, got)

	err = retention.Set(t.Context(), conn, nil, retention.Settings{Keep: -1, PartitionSize: -1, PinnedBytes: -1}, "test", "")
	require.ErrorContains(t, err, "negative Keep")
	require.ErrorContains(t, err, "PartitionSize -1")
	require.ErrorContains(t, err, "negative PinnedBytes")
	require.ErrorContains(t, retention.Set(t.Context(), conn, nil, retention.Settings{Keep: time.Hour, PinnedAge: time.Minute}, "test", ""), "below Keep")
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	_, err := retention.New(retention.Config{Ahead: -1, LockTimeout: -1, Interval: -1}, nil)
	for _, want := range []string{"missing ConnString", "Ahead (-1)", "LockTimeout", "Interval"} {
		require.ErrorContains(t, err, want)
	}
	_, err = retention.New(retention.Config{ConnString: "postgres://u:secret@h:x/d"}, nil)
	require.ErrorContains(t, err, "ConnString")
	require.NotContains(t, err.Error(), "secret")
}

func TestDatabaseWithoutTheLogNamesTheNextStep(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r, _ := newRetention(t, db)
	require.ErrorIs(t, r.Run(t.Context()), cursor.ErrNotMigrated)
	_, err := retention.Status(t.Context(), db.Conn(t), nil)
	require.ErrorIs(t, err, cursor.ErrNotMigrated)
}

func TestLogsOfOtherNamesArePartitionedToo(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	conn := db.Conn(t)
	log, err := cursor.NewLog(cursor.LogConfig{Schema: `Ev"x $from %s`, Name: strings.Repeat("N", 33)})
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "create schema "+pgx.Identifier{log.Schema()}.Sanitize())
	require.NoError(t, err)
	_, err = migrations.Up(t.Context(), conn, log)
	require.NoError(t, err)
	require.NoError(t, retention.Set(t.Context(), conn, log, retention.Settings{PartitionSize: 1 << 32}, "test", ""))
	db.Exec(t, "update "+log.Table("seq")+" set last_seq = 9200000000000000000") // the longest names
	require.Len(t, once(t, db, func(c *retention.Config) { c.Log = log }).Made, 2)
	require.Empty(t, once(t, db, func(c *retention.Config) { c.Log = log }).Made)
	db.Exec(t, "insert into "+log.Table("outbox")+" (topic) values ('orders')")
	s, err := retention.Status(t.Context(), conn, log)
	require.NoError(t, err)
	require.Len(t, s.Partitions, 3)
	require.Equal(t, int64(1), s.Partitions[0].Rows)
}

func TestOneProcessWorksAndTheOthersStandBy(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{})
	tx := openRound(t, db)
	one, _ := newRetention(t, db)
	result := make(chan error, 1)
	go func() {
		_, err := one.Once(context.Background())
		result <- err
	}()
	other, _ := newRetention(t, db)
	require.Eventually(t, func() bool {
		return pgtest.Value[int](t, db, "select count(*)::int from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())") == 1
	}, 20*time.Second, 5*time.Millisecond)
	_, err := other.Once(t.Context())
	require.ErrorIs(t, err, retention.ErrBusy)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-result)
	require.Equal(t, int64(30), lowest(t, db))
}
