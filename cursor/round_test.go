package cursor_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

var (
	push      = cursor.Key{Consumer: "push"}
	beginning = cursor.FromBeginning()

	register, prepare, limits, open = logtest.Register, logtest.NewRound, logtest.Limits, logtest.OpenRound
)

func seqs(events []cursor.Event) []int64 {
	var numbers []int64
	for _, e := range events {
		numbers = append(numbers, e.Seq)
	}
	return numbers
}

func TestRoundMovesItsCursorWithWhatItsHandlersWrote(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	db.Exec(t, "create table effects (seq bigint)")
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 3)

	r, o := open(t, db, push)
	require.Equal(t, cursor.Ready, o.Status)
	require.Equal(t, []int64{1, 2, 3}, seqs(o.Events))
	require.False(t, o.Full)
	for i := range o.Events {
		unit := r.Hand(&o.Events[i])
		tx, err := unit.Tx(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "insert into effects values ($1)", unit.Event().Seq)
		require.NoError(t, err)
		require.NoError(t, r.End(t.Context(), true))
	}
	require.Empty(t, pgtest.Column[int64](t, db, "select seq from effects"))
	require.NoError(t, r.Commit(t.Context(), o.Through))

	require.Equal(t, []int64{1, 2, 3}, pgtest.Column[int64](t, db, "select seq from effects order by 1"))
	require.Equal(t, int64(3), logtest.Position(t, db, push))
	require.Equal(t, int64(1), pgtest.Value[int64](t, db, `select count(*) from event_consumer_cursors c join event_log l on l.seq = 3
		where c.matched_seq = 3 and c.last_occurred_at = l.occurred_at and c.moved_by = 'test' and c.moved_at is not null and c.matched_at is not null`))

	_, o = open(t, db, push)
	require.Equal(t, cursor.CaughtUp, o.Status)
}

func TestRoundCommitsAPrefix(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 3)

	r, o := open(t, db, push)
	r.Hand(&o.Events[0])
	require.NoError(t, r.End(t.Context(), true))
	require.NoError(t, r.Commit(t.Context(), 1))
	require.Equal(t, int64(1), logtest.Position(t, db, push))
}

func TestLockedCursorIsLeftAlone(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 1)

	first, o := open(t, db, push)
	require.Equal(t, cursor.Ready, o.Status)
	_, second := open(t, db, push)
	require.Equal(t, cursor.Locked, second.Status)
	require.Empty(t, second.Events)

	first.Rollback(t.Context())
	_, third := open(t, db, push)
	require.Equal(t, cursor.Ready, third.Status)
}

func TestMissingCursorRowIsAnError(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	db.Exec(t, "delete from event_consumer_cursors")

	r, _ := prepare(t, db, push)
	_, err := r.Open(t.Context())
	require.ErrorIs(t, err, cursor.ErrCursorMissing)
	require.Equal(t, "cursor_missing", cursor.ErrorType(err))
}

func TestBatchIsBoundedByCountAndBytes(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	db.Exec(t, `insert into event_outbox (topic, payload) select 'a', decode(repeat('00', 100), 'hex') from generate_series(1, 20)`)
	for _, key := range []cursor.Key{{Consumer: "all"}, {Consumer: "one", Topic: "a"}} {
		register(t, db, key, beginning)
		for _, tt := range []struct {
			events int
			bytes  int64
			want   int
			full   bool
		}{
			{events: 5, bytes: 1 << 20, want: 5, full: true},
			{events: 20, bytes: 1 << 20, want: 20, full: true},
			{events: 21, bytes: 1 << 20, want: 20, full: false},
			{events: 50, bytes: 300, want: 3, full: true},
			{events: 50, bytes: 301, want: 4, full: true},
			{events: 50, bytes: 1, want: 1, full: true}, // one event, however large
		} {
			r, o := open(t, db, key, limits(tt.events, tt.bytes, 1000))
			require.Len(t, o.Events, tt.want, "%v %+v", key, tt)
			require.Equal(t, tt.full, o.Full, "%v %+v", key, tt)
			require.Equal(t, int64(tt.want), o.Through, "%v %+v", key, tt)
			r.Rollback(t.Context())
		}
	}
}

func TestConsumerOfOneTopicProvesAllNumbersAndGetsItsOwn(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	key := cursor.Key{Consumer: "push", Topic: "mine"}
	register(t, db, key, beginning)
	db.Exec(t, `insert into event_outbox (topic) select case when i % 10 = 0 then 'mine' else 'other' end from generate_series(1, 95) i order by i`)

	r, o := open(t, db, key)
	require.Equal(t, []int64{10, 20, 30, 40, 50, 60, 70, 80, 90}, seqs(o.Events))
	require.Equal(t, int64(95), o.Through)
	require.False(t, o.Full)
	r.Rollback(t.Context())

	r, o = open(t, db, key, limits(2, 1<<20, 1000))
	require.Equal(t, []int64{10, 20}, seqs(o.Events))
	require.Equal(t, int64(20), o.Through, "what was cut off is not covered")
	require.True(t, o.Full)
	r.Rollback(t.Context())

	r, o = open(t, db, key, limits(10, 1<<20, 15))
	require.Equal(t, []int64{10}, seqs(o.Events))
	require.Equal(t, int64(15), o.Through)
	require.True(t, o.Full)
	r.Hand(&o.Events[0])
	require.NoError(t, r.End(t.Context(), true))
	require.NoError(t, r.Commit(t.Context(), o.Through))
	require.Equal(t, int64(10), pgtest.Value[int64](t, db, "select matched_seq from event_consumer_cursors"))
	require.True(t, pgtest.Value[bool](t, db, "select last_occurred_at = (select occurred_at from event_log where seq = 15) from event_consumer_cursors"))

	// A hole among events of other topics stops it as well, for every batch size.
	db.Exec(t, "delete from event_log where seq = 37")
	for _, size := range []int{1, 2, 5, 100} {
		r, _ := prepare(t, db, key, limits(size, 1<<20, 1000))
		_, err := r.Open(t.Context())
		r.Rollback(t.Context())
		if size < 3 {
			require.NoError(t, err, "the batch ends at 20 or 30, before the hole")
			continue
		}
		var gap *cursor.GapError
		require.ErrorAs(t, err, &gap)
		require.Equal(t, int64(37), gap.Seq)
	}
}

func TestEventIsDeliveredAsItWasAppended(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			db.Exec(t, `insert into event_outbox (occurred_at, topic, key, uuid, payload, metadata)
				values ('2024-02-29 12:00:00.123456+00', 'orders', 'k1', 'u1', '\x00ff10', '{"a": "b", "é": "\" \\ ☃"}'), (default, 'orders', null, 'u2', '', default)`)
			config, err := pgx.ParseConfig(db.URL())
			require.NoError(t, err)
			config.DefaultQueryExecMode = execModes[mode]
			for _, key := range []cursor.Key{{Consumer: "all"}, {Consumer: "one", Topic: "orders"}} {
				register(t, db, key, beginning)
				conn, err := pgx.ConnectConfig(t.Context(), config)
				require.NoError(t, err)
				defer conn.Close(context.Background())
				r := cursor.NewRound(conn, cursor.RoundConfig{Key: key, By: "test", ID: "1", Bound: time.Minute, Limits: cursor.Limits{Events: 10, Bytes: 100, Cover: 100}})
				o, err := r.Open(t.Context())
				require.NoError(t, err)
				require.Len(t, o.Events, 2)
				first, second := o.Events[0], o.Events[1]
				require.True(t, first.OccurredAt.Equal(time.Date(2024, 2, 29, 12, 0, 0, 123456000, time.UTC)))
				require.WithinDuration(t, time.Now(), first.RecordedAt, time.Minute)
				require.Equal(t, []string{"orders", "k1", "u1"}, []string{first.Topic, first.Key, first.UUID})
				require.Equal(t, []byte{0, 255, 16}, first.Payload)
				require.Equal(t, map[string]string{"a": "b", "é": "\" \\ ☃"}, first.Metadata)
				require.Empty(t, second.Key)
				require.Empty(t, second.Payload)
				require.NotNil(t, second.Metadata)
				for i := range o.Events {
					r.Hand(&o.Events[i])
					require.NoError(t, r.End(t.Context(), true))
				}
				require.NoError(t, r.Commit(t.Context(), o.Through))
				r.Release(t.Context())
				require.False(t, conn.IsClosed())
				require.Equal(t, int64(2), logtest.Position(t, db, key))
			}
		})
	}
}

var execModes = map[string]pgx.QueryExecMode{
	"cache_statement": pgx.QueryExecModeCacheStatement,
	"cache_describe":  pgx.QueryExecModeCacheDescribe,
	"describe_exec":   pgx.QueryExecModeDescribeExec,
	"exec":            pgx.QueryExecModeExec,
	"simple_protocol": pgx.QueryExecModeSimpleProtocol,
}

func TestHoleStopsTheRoundUntilItIsFilled(t *testing.T) {
	t.Parallel()
	for _, size := range []int{4, 8, 10} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			register(t, db, push, beginning)
			logtest.Append(t, db, "orders", 12)
			db.Exec(t, "create table hole as select * from event_log where seq = 9")
			db.Exec(t, "delete from event_log where seq = 9")

			attempt := func() error {
				r, _ := prepare(t, db, push, limits(size, 1<<20, 1000))
				o, err := r.Open(t.Context())
				defer r.Rollback(t.Context())
				if err != nil {
					var gap *cursor.GapError
					require.ErrorAs(t, err, &gap)
					require.Equal(t, int64(9), gap.Seq)
					r.Rollback(t.Context())
					_, _, writeErr := cursor.RecordFailure(t.Context(), db.Conn(t), nil, push, "test", cursor.Attempt{Seq: 9, Through: 9, ErrorType: "consumer_gap", Jitter: 1})
					require.NoError(t, writeErr)
					return err
				}
				for i := range o.Events {
					r.Hand(&o.Events[i])
					require.NoError(t, r.End(t.Context(), true))
				}
				return r.Commit(t.Context(), o.Through)
			}
			for range 6 {
				_ = attempt()
			}
			require.Equal(t, int64(8), logtest.Position(t, db, push))
			require.ErrorIs(t, attempt(), cursor.ErrConsumerGap)

			db.Exec(t, "insert into event_log select * from hole")
			require.NoError(t, attempt())
			require.Equal(t, int64(9), logtest.Position(t, db, push), "the number that was missing comes alone")
			require.NoError(t, attempt())
			require.NoError(t, pgtestEmpty(t, db, "event_consumer_failures"))
		})
	}
}

func pgtestEmpty(t *testing.T, db *pgtest.DB, table string) error {
	if n := pgtest.Value[int64](t, db, "select count(*) from "+table); n != 0 {
		return fmt.Errorf("%s has %d rows", table, n)
	}
	return nil
}

func TestRepeatedNumberIsAGap(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	register(t, db, cursor.Key{Consumer: "push", Topic: "orders"}, beginning)
	logtest.Append(t, db, "orders", 4)
	db.Exec(t, "alter table event_log drop constraint event_log_pkey")
	db.Exec(t, "update event_log set seq = 2 where seq = 3")
	for _, key := range []cursor.Key{push, {Consumer: "push", Topic: "orders"}} {
		r, _ := prepare(t, db, key)
		_, err := r.Open(t.Context())
		require.ErrorIs(t, err, cursor.ErrConsumerGap)
	}
}

func TestRemovedEventsAreALossOfTheirOwn(t *testing.T) {
	t.Parallel()
	for _, key := range []cursor.Key{push, {Consumer: "push", Topic: "orders"}, {Consumer: "push", Topic: "none"}} {
		t.Run(key.String(), func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			register(t, db, key, beginning)
			logtest.Append(t, db, "orders", 8)
			db.Exec(t, "delete from event_log where seq < 6")

			r, o := open(t, db, key)
			require.Equal(t, cursor.Lost, o.Status)
			require.Equal(t, int64(5), o.Through)
			require.NoError(t, r.Commit(t.Context(), o.Through))
			require.Equal(t, int64(5), logtest.Position(t, db, key))
			require.Equal(t, []string{"1-5"}, pgtest.Column[string](t, db, "select first_seq || '-' || last_seq from event_consumer_losses"))

			_, o = open(t, db, key)
			require.Equal(t, cursor.Ready, o.Status)
			require.Equal(t, int64(8), o.Through)
		})
	}
}

func TestEmptiedLogIsALossUpToItsHead(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 8)
	db.Exec(t, "delete from event_log")
	_, o := open(t, db, push)
	require.Equal(t, cursor.Lost, o.Status)
	require.Equal(t, int64(8), o.Through)
}

func TestCursorAheadOfTheLogIsAnError(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 3)
	db.Exec(t, "update event_consumer_cursors set last_seq = 5")
	r, _ := prepare(t, db, push)
	_, err := r.Open(t.Context())
	require.ErrorIs(t, err, cursor.ErrCursorAhead)
}

func TestRoundWhoseCursorWasMovedUnderItCommitsNothing(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	db.Exec(t, "create table effects (seq bigint)")
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 1)
	r, o := open(t, db, push)
	unit := r.Hand(&o.Events[0])
	tx, err := unit.Tx(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "insert into effects values (1)")
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "update event_consumer_cursors set last_seq = 0, consumer = 'other'")
	require.NoError(t, err)
	require.NoError(t, r.End(t.Context(), true))
	require.ErrorIs(t, r.Commit(t.Context(), 1), cursor.ErrCursorMoved)
	r.Rollback(t.Context())
	require.Empty(t, pgtest.Column[int64](t, db, "select seq from effects"))
	require.Equal(t, int64(0), logtest.Position(t, db, push))
}

func TestEnsureMakesEachCursorOnce(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 10)
	db.Exec(t, "delete from event_log where seq < 4")
	registrations := []cursor.Registration{
		{Key: cursor.Key{Consumer: "head"}},
		{Key: cursor.Key{Consumer: "beginning", Topic: "orders"}, Start: cursor.FromBeginning()},
		{Key: cursor.Key{Consumer: "seq"}, Start: cursor.FromSeq(7)},
		{Key: cursor.Key{Consumer: `Name with "quotes", dots. / and é`, Shard: "1/4"}},
	}
	var all sync.WaitGroup
	var mu sync.Mutex
	total := 0
	for range 8 {
		conn := db.Conn(t)
		all.Go(func() {
			created, err := cursor.Ensure(context.Background(), conn, nil, "test", registrations)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			total += len(created)
		})
	}
	all.Wait()
	require.Equal(t, 4, total)
	require.Equal(t, int64(10), logtest.Position(t, db, registrations[0].Key))
	require.Equal(t, int64(3), logtest.Position(t, db, registrations[1].Key))
	require.Equal(t, int64(6), logtest.Position(t, db, registrations[2].Key))
	require.Equal(t, int64(10), logtest.Position(t, db, registrations[3].Key))
	require.Equal(t, int64(4), pgtest.Value[int64](t, db, "select count(*) from event_consumer_interventions where action = 'create' and by = 'test'"))

	// A cursor that goes missing is never made anew.
	db.Exec(t, "delete from event_consumer_cursors where consumer = 'head'")
	_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", registrations)
	require.ErrorIs(t, err, cursor.ErrCursorMissing)
	require.ErrorContains(t, err, "head")
	require.Equal(t, int64(-1), logtest.Position(t, db, registrations[0].Key))
}

func TestNewCursorStartsAtTheHeadOfAnEmptiedLog(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 10)
	db.Exec(t, "delete from event_log")
	register(t, db, push, cursor.FromHead())
	register(t, db, cursor.Key{Consumer: "old"}, cursor.FromBeginning())
	require.Equal(t, int64(10), logtest.Position(t, db, push))
	require.Equal(t, int64(10), logtest.Position(t, db, cursor.Key{Consumer: "old"}))
	_, o := open(t, db, push)
	require.Equal(t, cursor.CaughtUp, o.Status)
}

func TestNewCursorMayStartAtATime(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	db.Exec(t, `insert into event_outbox (topic, occurred_at) select 'a', '2024-01-01 00:00:00+00'::timestamptz + i * interval '1 day' from generate_series(1, 5) i order by i`)
	at := func(day int) cursor.Start { return cursor.FromTime(time.Date(2024, 1, 1+day, 0, 0, 0, 0, time.UTC)) }
	for day, want := range map[int]int64{0: 0, 1: 0, 2: 1, 5: 4, 6: 5} {
		key := cursor.Key{Consumer: fmt.Sprint("from day ", day)}
		register(t, db, key, at(day))
		require.Equal(t, want, logtest.Position(t, db, key), key)
	}
}

func TestLookSeesHeadAndPositionsWithoutATransactionID(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, cursor.FromHead())
	logtest.Append(t, db, "orders", 3)
	conn := db.Conn(t)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	look, err := cursor.LookAt(t.Context(), tx, nil, []cursor.Key{push, {Consumer: "nobody"}})
	require.NoError(t, err)
	require.Equal(t, cursor.Look{Head: 3, Positions: map[cursor.Key]int64{push: 0}, Replays: map[cursor.Key]bool{}, Held: map[cursor.Key]bool{}}, look)
	var xid *string
	require.NoError(t, tx.QueryRow(t.Context(), "select pg_current_xact_id_if_assigned()::text").Scan(&xid))
	require.Nil(t, xid)
}

func TestDatabaseWithoutTheLogNamesTheNextStep(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", []cursor.Registration{{Key: push}})
	require.ErrorIs(t, err, cursor.ErrNotMigrated)
	require.ErrorContains(t, err, "migrations.Up")
	_, err = cursor.LookAt(t.Context(), db.Conn(t), nil, []cursor.Key{push})
	require.ErrorIs(t, err, cursor.ErrNotMigrated)
	r, _ := prepare(t, db, push)
	_, err = r.Open(t.Context())
	require.ErrorIs(t, err, cursor.ErrNotMigrated)
}

func TestCursorsAreEnsuredAtOnceWhateverTheDefaultIsolation(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	db.Exec(t, "alter database "+db.Name()+" set default_transaction_isolation = 'serializable'")
	var all sync.WaitGroup
	for range 8 {
		conn := db.Conn(t)
		all.Go(func() {
			for i := range 10 {
				if _, err := cursor.Ensure(context.Background(), conn, nil, "test", []cursor.Registration{{Key: cursor.Key{Consumer: fmt.Sprint(i)}}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

func TestNamesThatCouldNotBeMigratedAreRefused(t *testing.T) {
	t.Parallel()
	for _, config := range []cursor.LogConfig{
		{Name: strings.Repeat("x", 34)}, {Schema: strings.Repeat("x", 64)}, {Channel: strings.Repeat("x", 64)},
		{Name: "a\nb"}, {Schema: "a\x00"}, {Name: "a$function$b"}, {Channel: "x$function$"}, {Name: "\xff"},
	} {
		_, err := cursor.NewLog(config)
		require.ErrorContains(t, err, "event log config", config)
	}
}

func TestParkedEventIsKeptAlsoWhenRetentionWasQuicker(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	db.Exec(t, `insert into event_outbox (topic, key, uuid, payload, metadata) values ('orders', 'k', 'u', '\x0001', '{"a": "\"b"}')`)
	_, _, err := cursor.RecordFailure(t.Context(), db.Conn(t), nil, push, "test", cursor.Attempt{Seq: 1, Through: 1, ErrorType: "x", Jitter: 1})
	require.NoError(t, err)
	r, o := open(t, db, push, func(c *cursor.RoundConfig) { c.ParkAfter = 1 })
	require.Equal(t, cursor.Parking, o.Status)
	want := o.Events[0]
	db.Exec(t, "delete from event_log")
	require.NoError(t, r.Commit(t.Context(), o.Through))
	list, err := operate.Parked(t.Context(), db.Conn(t), nil, push, 0, 10)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, want, list[0].Event)
}

func TestMetadataIsDecodedAsWritten(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	for _, metadata := range []string{`{}`, `{"a": ""}`, `{"": "a", "b": "c, \"d\": e", "f": "\\"}`, `{"é☃": "\u0001\n", "x": "{}"}`, `{"a:": ": ", ", ": "\"\""}`} {
		db.Exec(t, "insert into event_outbox (topic, metadata) values ('a', $1::jsonb)", metadata)
		r, o := open(t, db, push)
		want := map[string]string{}
		require.NoError(t, json.Unmarshal([]byte(metadata), &want))
		require.Equal(t, want, o.Events[len(o.Events)-1].Metadata)
		r.Rollback(t.Context())
	}
}

// What stands beside the cursor is read by one statement of the trip, and the batch by the next; another process may
// write its failure's record between the two.
func TestParkedEventIsParkedAloneWhateverIsRecordedMeanwhile(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]cursor.Key{"all topics": push, "one topic": {Consumer: "push", Topic: "orders"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			register(t, db, key, beginning)
			logtest.Append(t, db, "orders", 12)
			_, _, err := cursor.RecordFailure(t.Context(), db.Conn(t), nil, key, "test", cursor.Attempt{Seq: 1, Through: 1, ErrorType: "x", Jitter: 1})
			require.NoError(t, err)
			// The state's statement is followed by the batch's: make the failures' table look different to the second.
			db.Exec(t, `alter table event_consumer_failures rename to real_failures`)
			db.Exec(t, `create view event_consumer_failures as select consumer, topic, shard,
				case when current_query() ilike '%retry_at%' then seq else 100 end as seq, through, batch, since, failed_at, retry_at, attempts,
				error_type, permanent, failed_by, edge from real_failures`)
			r, o := open(t, db, key, func(c *cursor.RoundConfig) { c.ParkAfter = 1; c.Limits.Events = 12 })
			require.Equal(t, cursor.Parking, o.Status)
			require.Len(t, o.Events, 1)
			require.Equal(t, int64(1), o.Through)
			r.Rollback(t.Context())
		})
	}
}

func TestInfiniteTimeStopsOnlyWhoReadsTheEvent(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 2)
	logtest.Append(t, db, "payments", 1)
	db.Exec(t, "alter table event_log drop constraint event_log_occurred_at_check")
	db.Exec(t, "update event_log set occurred_at = 'infinity' where seq = 3")

	for _, topic := range []string{"", "payments"} {
		key := cursor.Key{Consumer: "reader", Topic: topic}
		logtest.Register(t, db, key, cursor.FromBeginning())
		round, _ := logtest.NewRound(t, db, key)
		_, err := round.Open(t.Context())
		var unreadable *cursor.UnreadableError
		require.ErrorAs(t, err, &unreadable, "topic %q", topic)
		require.Equal(t, int64(3), unreadable.Seq)
		round.Rollback(t.Context())
	}

	key := cursor.Key{Consumer: "other", Topic: "orders"}
	logtest.Register(t, db, key, cursor.FromBeginning())
	round, opening := logtest.OpenRound(t, db, key)
	require.Equal(t, cursor.Ready, opening.Status)
	require.Len(t, opening.Events, 2)
	require.Equal(t, int64(3), opening.Through)
	require.NoError(t, round.Commit(t.Context(), 3))
	require.Equal(t, int64(3), logtest.Position(t, db, key))
}

func TestReadingABatchAllocatesLittle(t *testing.T) {
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 1000)
	for _, topic := range []string{"", "orders"} {
		key := cursor.Key{Consumer: "push", Topic: topic}
		logtest.Register(t, db, key, cursor.FromBeginning())
		round, _ := logtest.NewRound(t, db, key, logtest.Limits(1000, 1<<30, 1000))
		allocations := testing.AllocsPerRun(5, func() {
			opening, err := round.Open(t.Context())
			if err != nil || len(opening.Events) != 1000 {
				panic(fmt.Sprint(opening, err))
			}
			round.Rollback(t.Context())
		})
		require.LessOrEqual(t, allocations/1000, 3.2, "topic %q: an event's id, payload and metadata, and what the batch itself takes", topic)
	}
}

func TestFailureKeepsARoundThatDidNotKnowItFromWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	for _, topic := range []string{"", "orders"} {
		for failing, want := range map[int64][]int64{4: {1, 2, 3}, 2: {1}} {
			db := logtest.New(t)
			key := cursor.Key{Consumer: "push", Topic: topic}
			register(t, db, key, beginning)
			logtest.Append(t, db, "orders", 5)
			db.Exec(t, `update event_log set metadata = '{"a": 1}' where seq = 4`)
			_, _, err := cursor.RecordFailure(t.Context(), db.Conn(t), nil, key, "another",
				cursor.Attempt{Seq: failing, Through: failing, ErrorType: "x", Delay: time.Hour, DelayCap: time.Hour, Jitter: 1})
			require.NoError(t, err)
			for _, known := range []bool{false, true} {
				round, _ := logtest.NewRound(t, db, key, func(c *cursor.RoundConfig) { c.Bounded = known })
				opening, err := round.Open(t.Context())
				require.NoError(t, err, "topic %q, failing %d, known %v", topic, failing, known)
				require.Equal(t, want, seqs(opening.Events), "topic %q, failing %d, known %v", topic, failing, known)
				round.Rollback(t.Context())
			}
		}
	}
}

func TestArraysAreEncodedWhateverAPoolDoesToItsConnectionsTypes(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	key := cursor.Key{Consumer: "push"}
	register(t, db, key, beginning)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		config := db.Conn(t).Config()
		config.DefaultQueryExecMode = mode
		conn, err := pgx.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		ordinary := slices.Clone(conn.TypeMap().TryWrapEncodePlanFuncs)
		for range 3 {
			cursor.NewRound(conn, cursor.RoundConfig{Key: key})
			require.Len(t, conn.TypeMap().TryWrapEncodePlanFuncs, len(ordinary)+1)
			cursor.NewRound(conn, cursor.RoundConfig{Key: key})
			require.Len(t, conn.TypeMap().TryWrapEncodePlanFuncs, len(ordinary)+1)
			var got []string
			require.NoError(t, conn.QueryRow(t.Context(), "select $1::text[]", cursor.Array[string]{"a", "", `"{}\`}).Scan(&got), "mode %v", mode)
			require.Equal(t, []string{"a", "", `"{}\`}, got, "mode %v", mode)
			var bytes [][]byte
			require.NoError(t, conn.QueryRow(t.Context(), "select $1::bytea[]", cursor.Array[[]byte]{{0, 255}, {}}).Scan(&bytes), "mode %v", mode)
			require.Equal(t, [][]byte{{0, 255}, {}}, bytes, "mode %v", mode)
			conn.TypeMap().TryWrapEncodePlanFuncs = slices.Clone(ordinary)
		}
		require.NoError(t, conn.Close(t.Context()))
	}
}
