package operate_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

// fill writes events straight into the log: appending takes longer.
func fill(t testing.TB, db *pgtest.DB, events int) {
	t.Helper()
	for first := 1; first <= events; first += 500_000 {
		db.Exec(t, `insert into event_log (seq, occurred_at, recorded_at, topic, uuid, payload, metadata)
			select i, now(), now(), 'orders', i::text, '', '{}' from generate_series($1::bigint, $2::bigint) i`,
			first, min(first+500_000-1, events))
	}
	db.Exec(t, "update event_seq set last_seq = $1", events)
	db.Exec(t, "vacuum analyze event_log")
}

func faults(v operate.Verdict) []string {
	found := []string{}
	for _, f := range v.Faults {
		found = append(found, fmt.Sprintf("%s %s %d-%d", f.Kind, f.Cursor, f.First, f.Last))
	}
	return found
}

// verify proves a log of many ranges, and what progress it tells of.
func verify(t *testing.T, db *pgtest.DB) operate.Verdict {
	t.Helper()
	last := int64(-1)
	v, err := operate.Verify(t.Context(), db.Conn(t), nil, func(done, total int64) {
		require.Greater(t, done, last)
		require.LessOrEqual(t, done, total)
		last = done
	})
	require.NoError(t, err)
	return v
}

func TestPlantedFaultsAreFound(t *testing.T) {
	t.Parallel()
	const events = 300_000
	db := logtest.New(t)
	register(t, db, push, beginning)
	register(t, db, orders, beginning)
	fill(t, db, events)
	pass(t, db, push)
	v := verify(t, db)
	require.True(t, v.OK(), faults(v))
	require.Equal(t, []int64{events, 1, events, events, 2}, []int64{v.Events, v.First, v.Last, v.Head, int64(v.Cursors)})

	// Each is put in and taken out again.
	for _, tt := range []struct {
		plant, undo string
		want        []string
	}{
		{"update event_log set seq = -seq + 1000000 where seq in (77, 250000)", "update event_log set seq = 1000000 - seq where seq > 300000",
			[]string{"counter_behind  300001-999923", "hole  77-77", "hole  250000-250000", "hole  300001-749999", "hole  750001-999922"}},
		{"delete from event_log where seq between 99990 and 100010", `insert into event_log (seq, occurred_at, recorded_at, topic, uuid, payload, metadata)
			select i, now(), now(), 'orders', i::text, '', '{}' from generate_series(99990, 100010) i`, []string{"hole  99990-100010"}},
		{"update event_seq set last_seq = 300005", "update event_seq set last_seq = 300000", []string{"counter_ahead  300001-300005"}},
		{"update event_seq set last_seq = 299990", "update event_seq set last_seq = 300000", []string{"counter_behind  299991-300000"}},
		{"update event_consumer_cursors set last_seq = 300001 where topic = 'orders'", "update event_consumer_cursors set last_seq = 0 where topic = 'orders'",
			[]string{"cursor_ahead push@orders 300001-300001"}},
		{"update event_log set occurred_at = occurred_at + interval '1 hour' where seq = 10", "update event_log set occurred_at = occurred_at - interval '1 hour' where seq = 10",
			[]string{"rewritten push 10-10"}},
		{`insert into event_consumer_losses (consumer, topic, shard, first_seq, last_seq, reason, recorded_by) values
			('push', '', '', 5, 6, 'retention', 'w'), ('push', '', '', 299999, 300001, 'resume_age', 'w'), ('gone', '', '', 5, 6, 'resume_age', 'w'),
			('push', '', '', 8, 8, 'resume_age', 'w')`,
			"delete from event_consumer_losses", []string{"loss gone 5-6", "loss push 5-6", "loss push 299999-300001"}},
		{"alter table event_log drop constraint event_log_pkey; update event_log set seq = 9 where seq = 8",
			"update event_log set seq = 8 where ctid = (select min(ctid) from event_log where seq = 9); alter table event_log add primary key (seq)",
			[]string{"not_unique  0-0", "hole  8-8", "duplicate  9-9"}},
		{"delete from event_log where seq <= 4", "insert into event_log (seq, occurred_at, recorded_at, topic, uuid, payload, metadata) select i, now(), now(), 'orders', i::text, '', '{}' from generate_series(1, 4) i",
			[]string{"cursor_behind push@orders 1-4"}},
	} {
		_, err := db.Conn(t).PgConn().Exec(t.Context(), tt.plant).ReadAll()
		require.NoError(t, err)
		require.Equal(t, tt.want, faults(verify(t, db)), tt.plant)
		_, err = db.Conn(t).PgConn().Exec(t.Context(), tt.undo).ReadAll()
		require.NoError(t, err)
	}
	require.True(t, verify(t, db).OK())

	// What retention has removed is no hole, and a retired cursor does not miss it.
	db.Exec(t, "update event_consumer_cursors set retired_at = now() where topic = 'orders'")
	db.Exec(t, "delete from event_log where seq <= 150000")
	db.Exec(t, "update event_consumer_cursors set last_seq = 150000, occurred_seq = 150000 where topic = ''")
	v = verify(t, db)
	require.Empty(t, faults(v))
	require.Equal(t, []int64{150_000, 150_001}, []int64{v.Events, v.First})
	db.Exec(t, "delete from event_log")
	db.Exec(t, "update event_consumer_cursors set last_seq = 300000 where topic = ''")
	v = verify(t, db)
	require.Empty(t, faults(v))
	require.Equal(t, []int64{0, 0, 300_000}, []int64{v.Events, v.First, v.Head})
}

func TestVerdictHoldsAThousandFaultsAndSaysSo(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	fill(t, db, 5000)
	db.Exec(t, "delete from event_log where seq % 2 = 0")
	v := verify(t, db)
	require.Len(t, v.Faults, 1000)
	require.True(t, v.Truncated)
	require.Equal(t, int64(2500), v.Events)
}

// What is appended, and what retention removes, between two of its statements is no fault.
func TestLogIsVerifiedWhileItChanges(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	fill(t, db, 210_000)
	stop, changing := make(chan struct{}), make(chan error, 1)
	conn := db.Conn(t)
	go func() {
		for i := 1; ; i++ {
			select {
			case <-stop:
				changing <- nil
				return
			default:
			}
			_, err := conn.PgConn().Exec(context.Background(), fmt.Sprintf(`insert into event_outbox (topic) select 'orders' from generate_series(1, 100);
				delete from event_log where seq <= %d`, i*100)).ReadAll()
			if err != nil {
				changing <- err
				return
			}
		}
	}()
	for range 20 {
		v := verify(t, db)
		require.Empty(t, faults(v))
	}
	close(stop)
	require.NoError(t, <-changing)
	require.Greater(t, verify(t, db).First, int64(1))
}
