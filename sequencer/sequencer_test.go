package sequencer_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/sequencer"
)

func newSequencer(t *testing.T, db sequencer.Database, config sequencer.Config) *sequencer.Sequencer {
	t.Helper()
	s, err := sequencer.New(db, config, nil)
	require.NoError(t, err)
	return s
}

// once numbers all there is.
func once(t *testing.T, s *sequencer.Sequencer) int64 {
	t.Helper()
	n, err := s.Once(t.Context())
	require.NoError(t, err)
	return n
}

func stage(t *testing.T, db *pgtest.DB, n int) {
	t.Helper()
	db.Exec(t, `insert into event_outbox (topic, payload, staged)
		select 'orders', convert_to(i::text, 'UTF8'), true from generate_series(1, $1) i order by i`, n)
}

// payloads of the log in order; the numbers must be 1 to n, as must be the counter.
func payloads(t *testing.T, db *pgtest.DB) (all []string) {
	t.Helper()
	conn := db.Conn(t)
	defer conn.Close(context.Background())
	var highest, counter int
	require.NoError(t, conn.QueryRow(t.Context(), `
		select coalesce(array_agg(convert_from(l.payload, 'UTF8') order by l.seq), '{}'), coalesce(max(l.seq), 0), (select last_seq from event_seq)
		from event_log l`).Scan(&all, &highest, &counter))
	require.Equal(t, []int{len(all), len(all)}, []int{highest, counter})
	return all
}

func numbers(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprint(i + 1)
	}
	return all
}

// run runs a sequencer until the test ends.
func run(t *testing.T, db sequencer.Database, config sequencer.Config) {
	t.Helper()
	s := newSequencer(t, db, config)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
}

func staged(t *testing.T, db *pgtest.DB) int {
	t.Helper()
	return pgtest.Value[int](t, db, "select count(*)::int from event_outbox")
}

func TestBatchesOfAnySizeNumberInOrder(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 7, 10, 5000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			stage(t, db, 20)
			s := newSequencer(t, db.Conn(t), sequencer.Config{BatchSize: size})
			require.Equal(t, int64(20), once(t, s))
			require.Equal(t, numbers(20), payloads(t, db))
			require.Zero(t, staged(t, db))
			require.Zero(t, once(t, s))
		})
	}
}

func TestStagedAndNumberedAppendsMix(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t)
	run(t, pool, sequencer.Config{PollInterval: time.Millisecond, BatchSize: 3})
	run(t, pool, sequencer.Config{PollInterval: time.Millisecond, BatchSize: 100}) // one of them stands by
	var all sync.WaitGroup
	const writers, each = 8, 25
	for w := range writers {
		events, err := publisher.NewEventLog(pool, publisher.EventLogConfig{Staged: w%2 == 0})
		require.NoError(t, err)
		all.Go(func() {
			for i := range each {
				err := pgx.BeginFunc(context.Background(), pool, func(tx pgx.Tx) error {
					id := fmt.Sprintf("%d/%02d", w, i)
					return events.InTx(tx).Publish("orders", message.NewMessage(id, []byte(id)))
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	require.Eventually(t, func() bool { return staged(t, db) == 0 }, 30*time.Second, 5*time.Millisecond)
	got := payloads(t, db)
	require.Len(t, got, writers*each)
	for w := range writers { // a writer's own events keep their order
		var mine []string
		for _, p := range got {
			if p[:1] == fmt.Sprint(w) {
				mine = append(mine, p)
			}
		}
		require.IsIncreasing(t, mine)
	}
}

// A transaction that began long before and commits long after is what a position would pass over.
func TestLateCommitIsNumbered(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	late, early := db.Conn(t), db.Conn(t)
	run(t, db.Pool(t), sequencer.Config{PollInterval: time.Millisecond, BatchSize: 2})
	_, err := late.Exec(t.Context(), `begin; insert into event_outbox (topic, payload, staged) values ('orders', 'late', true)`)
	require.NoError(t, err)
	for range 10 {
		_, err := early.Exec(t.Context(), `insert into event_outbox (topic, payload, staged) values ('orders', 'early', true)`)
		require.NoError(t, err)
	}
	// An open transaction holds nothing back.
	require.Eventually(t, func() bool { return len(payloads(t, db)) == 10 }, 30*time.Second, 5*time.Millisecond)
	_, err = late.Exec(t.Context(), `commit`)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(payloads(t, db)) == 11 }, 30*time.Second, 5*time.Millisecond)
	require.Equal(t, "late", payloads(t, db)[10])
}

// The first batch of a pass is over when a transaction that is older than what it took commits, and another one follows it.
func TestTransactionsThatFollowEachOtherKeepTheirOrderOverBatches(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	late := db.Conn(t)
	insert := func(payload string) string {
		return "insert into event_outbox (topic, payload, staged) values ('orders', '" + payload + "', true)"
	}
	_, err := late.Exec(t.Context(), "begin; "+insert("late 1"))
	require.NoError(t, err)
	for _, early := range []string{"early 1", "early 2", "early 3"} {
		db.Exec(t, insert(early))
	}
	s := newSequencer(t, &between{pool: db.Pool(t), after: func(batch int) {
		if batch == 1 {
			_, err := late.Exec(t.Context(), "commit; "+insert("late 2"))
			require.NoError(t, err)
		}
	}}, sequencer.Config{BatchSize: 2})
	for len(payloads(t, db)) < 5 {
		once(t, s)
	}
	require.Equal(t, []string{"early 1", "early 2", "early 3", "late 1", "late 2"}, payloads(t, db))
}

// between calls after each batch.
type between struct {
	pool  *pgxpool.Pool
	after func(batch int)
	calls int
}

func (b *between) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	return closing{b.pool.SendBatch(ctx, batch), func() { b.calls++; b.after(b.calls) }}
}

type closing struct {
	pgx.BatchResults
	then func()
}

func (c closing) Close() error {
	err := c.BatchResults.Close()
	c.then()
	return err
}

func TestStagedAppendsWorkAtEveryIsolationLevelAndObeySavepoints(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t)
	s := newSequencer(t, pool, sequencer.Config{})
	events, err := publisher.NewEventLog(nil, publisher.EventLogConfig{Staged: true})
	require.NoError(t, err)
	var want []string
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		var before int
		require.NoError(t, tx.QueryRow(t.Context(), "select count(*) from event_log").Scan(&before)) // the snapshot
		logtest.Append(t, db, "orders", 1)                                                           // somebody else takes a number
		want = append(want, "1", string(level))
		require.NoError(t, events.InTx(tx).Publish("orders", message.NewMessage("", []byte(level))))
		require.ErrorIs(t, pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) error { // a savepoint
			return fmt.Errorf("%w", errUndone{events.InTx(tx).Publish("orders", message.NewMessage("", []byte("undone")))})
		}), errUndone{})
		require.NoError(t, tx.Commit(t.Context()))
		once(t, s)
	}
	require.Equal(t, want, payloads(t, db))
}

func TestPreparedTransactionWithStagedAppendsIsNumberedAfterItsCommit(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t)
	s := newSequencer(t, pool, sequencer.Config{})
	conn := db.Conn(t)
	for _, sql := range []string{
		"begin", "insert into event_outbox (topic, payload, staged) values ('orders', 'prepared', true)", "prepare transaction '" + db.Name() + " staged'",
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	logtest.Append(t, db, "orders", 1)
	once(t, s)
	require.Equal(t, []string{"1"}, payloads(t, db))
	_, err := conn.Exec(t.Context(), "commit prepared '"+db.Name()+" staged'")
	require.NoError(t, err)
	once(t, s)
	require.Equal(t, []string{"1", "prepared"}, payloads(t, db))
}

type errUndone struct{ error }

func (errUndone) Error() string        { return "undone on purpose" }
func (errUndone) Is(target error) bool { _, ok := target.(errUndone); return ok }

func TestSecondSequencerStandsBy(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	stage(t, db, 3)
	holder := db.Conn(t)
	_, err := holder.Exec(t.Context(), "begin; select from event_sequencer for update")
	require.NoError(t, err)
	s := newSequencer(t, db.Conn(t), sequencer.Config{})
	_, err = s.Once(t.Context())
	require.ErrorIs(t, err, sequencer.ErrBusy)
	_, err = holder.Exec(t.Context(), "rollback")
	require.NoError(t, err)
	require.Equal(t, int64(3), once(t, s))
}

// One that was killed in a batch leaves nothing half done.
func TestKilledBatchIsDoneAgain(t *testing.T) {
	t.Parallel()
	for step, table := range map[string]string{"at the counter": "event_seq", "at the log": "event_log"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			stage(t, db, 5)
			blocker := db.Conn(t)
			_, err := blocker.Exec(t.Context(), "begin; lock table "+table+" in share mode")
			require.NoError(t, err)
			victim := db.Conn(t)
			failed := make(chan error, 1)
			s := newSequencer(t, victim, sequencer.Config{})
			go func() {
				_, err := s.Once(context.Background())
				failed <- err
			}()
			require.Eventually(t, func() bool {
				return pgtest.Value[bool](t, db, "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock')", victim.PgConn().PID())
			}, 30*time.Second, time.Millisecond)
			db.Exec(t, "select pg_terminate_backend($1)", int32(victim.PgConn().PID()))
			require.Error(t, <-failed)
			_, err = blocker.Exec(t.Context(), "rollback")
			require.NoError(t, err)
			require.Empty(t, payloads(t, db))
			require.Equal(t, 5, staged(t, db))
			require.Equal(t, int64(5), once(t, newSequencer(t, db.Conn(t), sequencer.Config{})))
			require.Equal(t, numbers(5), payloads(t, db))
		})
	}
}

// What was numbered leaves dead rows, which a snapshot held elsewhere keeps. They are not read again.
func TestHeldSnapshotDoesNotSlowABatchDown(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	holder, writer := db.Conn(t), db.Conn(t)
	_, err := holder.Exec(t.Context(), "begin isolation level repeatable read; select 1 from event_seq; create temporary table t (a int)")
	require.NoError(t, err)
	conn := db.Conn(t)
	s := sequence{conn: conn}
	read := func() int64 { // how many blocks of the outbox one batch of 500 has looked at
		_, err := writer.Exec(t.Context(), "insert into event_outbox (topic, staged) select 'orders', true from generate_series(1, 500)")
		require.NoError(t, err)
		return s.batch(t)
	}
	read()
	first := read()
	for range 40 {
		read()
	}
	require.Len(t, payloads(t, db), 21_000)
	require.LessOrEqual(t, read(), first+first/4) // half as much again where the dead rows of 40 batches are read
	require.Positive(t, first)
}

// sequence calls the function as the sequencer does, and counts what it reads.
type sequence struct {
	conn  *pgx.Conn
	since *string
}

func (s *sequence) batch(t *testing.T) (read int64) {
	t.Helper()
	tx, err := s.conn.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	var before, after int64
	const counted = `select sum(pg_stat_get_xact_blocks_fetched(oid))::bigint from pg_class where relname in ('event_outbox', 'event_outbox_pkey')`
	require.NoError(t, tx.QueryRow(t.Context(), counted).Scan(&before))
	var seen string
	var taken int
	require.NoError(t, tx.QueryRow(t.Context(), "select seen::text, taken from event_outbox_sequence($1::text::pg_snapshot, null, '0', 0, 5000)", s.since).Scan(&seen, &taken))
	require.Equal(t, 500, taken)
	require.NoError(t, tx.QueryRow(t.Context(), counted).Scan(&after))
	require.NoError(t, tx.Commit(t.Context()))
	s.since = &seen
	return after - before
}

func TestIdleSequencerWritesNothing(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	stage(t, db, 1)
	s := newSequencer(t, db.Conn(t), sequencer.Config{})
	require.Equal(t, int64(1), once(t, s))
	tx, err := db.Conn(t).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	require.Zero(t, once(t, newSequencer(t, nested{tx}, sequencer.Config{})))
	var assigned *string
	require.NoError(t, tx.QueryRow(t.Context(), "select pg_current_xact_id_if_assigned()::text").Scan(&assigned))
	require.Nil(t, assigned)
}

// nested runs a sequencer's trip inside a transaction, to look at it afterwards.
type nested struct{ tx pgx.Tx }

func (n nested) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	inner := &pgx.Batch{}
	for _, q := range b.QueuedQueries {
		if q.SQL == "commit" || q.SQL == "begin isolation level read committed" {
			inner.Queue("select 1")
			continue
		}
		inner.Queue(q.SQL, q.Arguments...)
	}
	return n.tx.SendBatch(ctx, inner)
}

func TestSameIDIsAppendedOnce(t *testing.T) {
	t.Parallel()
	for _, staged := range []bool{false, true} {
		t.Run(fmt.Sprintf("staged %t", staged), func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 10 })
			events, err := publisher.NewEventLog(pool, publisher.EventLogConfig{Once: true, Staged: staged})
			require.NoError(t, err)
			var all sync.WaitGroup
			for range 10 { // retries of the same appends at the same time, in one order and the other
				all.Go(func() {
					for i := range 20 {
						a, b := fmt.Sprint("a", i), fmt.Sprint("b", i)
						if i%2 == 0 {
							a, b = b, a
						}
						if err := events.Publish("orders", message.NewMessage(a, []byte(a)), message.NewMessage(b, []byte(b))); err != nil {
							t.Error(err)
						}
					}
				})
			}
			if staged {
				run(t, pool, sequencer.Config{PollInterval: time.Millisecond, BatchSize: 7})
			}
			all.Wait()
			require.Eventually(t, func() bool { return pgtest.Value[int](t, db, "select count(*)::int from event_outbox") == 0 }, 30*time.Second, 5*time.Millisecond)
			require.Len(t, payloads(t, db), 40)
			require.Equal(t, 40, pgtest.Value[int](t, db, "select count(distinct uuid)::int from event_log"))
			require.Equal(t, 40, pgtest.Value[int](t, db, "select count(*)::int from event_ids i join event_log l on l.seq = i.seq and l.uuid = i.id"))

			// Without Once the UUID is nothing but a value.
			plain, err := publisher.NewEventLog(pool, publisher.EventLogConfig{})
			require.NoError(t, err)
			require.NoError(t, plain.Publish("orders", message.NewMessage("a1", nil)))
			require.Len(t, payloads(t, db), 41)
		})
	}
}

// A repeated append takes no number and wakes nobody.
func TestRepeatedAppendIsNoNews(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn, listener := db.Conn(t), db.Conn(t)
	_, err := listener.Exec(t.Context(), "listen event_log")
	require.NoError(t, err)
	events, err := publisher.NewEventLog(conn, publisher.EventLogConfig{Once: true})
	require.NoError(t, err)
	for range 3 {
		require.NoError(t, events.Publish("orders", message.NewMessage("same", []byte("1"))))
	}
	require.Equal(t, numbers(1), payloads(t, db))
	_, err = conn.Exec(t.Context(), "select pg_notify('event_log', 'the last one')")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var heard []string
	for len(heard) == 0 || heard[len(heard)-1] == "" {
		n, err := listener.WaitForNotification(ctx)
		require.NoError(t, err)
		heard = append(heard, n.Payload)
	}
	require.Equal(t, []string{"", "the last one"}, heard)
}

func TestSequencerSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	_, err := sequencer.New(nil, sequencer.Config{PollInterval: -1, BatchSize: -1}, nil)
	require.ErrorContains(t, err, "missing database")
	require.ErrorContains(t, err, "negative PollInterval (-1ns)")
	require.ErrorContains(t, err, "negative BatchSize (-1)")

	db := pgtest.New(t)
	s := newSequencer(t, db.Conn(t), sequencer.Config{})
	require.ErrorContains(t, s.Run(t.Context()), "42883")
}

func TestSequencerOutlivesALostConnection(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	logger := logtest.NewLogger()
	pool := db.Pool(t)
	s, err := sequencer.New(pool, sequencer.Config{PollInterval: 5 * time.Millisecond}, logger)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	db.Exec(t, "alter table event_outbox rename column staged to gone") // whatever fails
	logger.Wait(t, t.Context(), 1, "event log sequencer failed")
	db.Exec(t, "alter table event_outbox rename column gone to staged")
	logger.Wait(t, t.Context(), 1, "event log sequencer recovered")
	stage(t, db, 2)
	require.Eventually(t, func() bool { return len(payloads(t, db)) == 2 }, 30*time.Second, 5*time.Millisecond)
	cancel()
	require.NoError(t, <-ended)
	require.Len(t, logger.Lines("", "error"), 1)
}

// What somebody changes while it is being numbered is numbered all the same, and what is locked holds up nobody.
func TestStagedEventThatIsChangedMeanwhileIsNumbered(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	stage(t, db, 3)
	holder := db.Conn(t)
	_, err := holder.Exec(t.Context(), "begin; update event_outbox set topic = 'mended' where id = 2")
	require.NoError(t, err)
	run(t, db.Pool(t), sequencer.Config{PollInterval: time.Millisecond})
	require.Eventually(t, func() bool { return len(payloads(t, db)) == 2 }, 30*time.Second, 5*time.Millisecond)
	logtest.Append(t, db, "orders", 1) // which waits for nothing
	require.Len(t, payloads(t, db), 3)
	_, err = holder.Exec(t.Context(), "commit")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(payloads(t, db)) == 4 }, 30*time.Second, 5*time.Millisecond)
	require.Equal(t, "mended", pgtest.Value[string](t, db, "select topic from event_log where seq = 4"))
}

// The table's owner may refuse an event, which was committed before anybody tried to number it.
func TestStagedEventThatTheLogRefusesHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	log, err := cursor.NewLog(cursor.LogConfig{Name: "shop", Table: &cursor.TableConfig{
		Name: "events", Seq: "id", RecordedAt: cursor.NoColumn, Key: cursor.NoColumn, UUID: cursor.NoColumn, Metadata: cursor.NoColumn,
	}})
	require.NoError(t, err)
	db.Exec(t, `create table events (id bigint primary key, occurred_at timestamptz not null, topic text not null check (topic <> 'bad'), payload bytea not null)`)
	_, err = migrations.Up(t.Context(), db.Conn(t), log)
	require.NoError(t, err)
	logger := logtest.NewLogger()
	s, err := sequencer.New(db.Pool(t), sequencer.Config{Log: log, PollInterval: time.Millisecond}, logger)
	require.NoError(t, err)
	db.Exec(t, "insert into shop_outbox (topic, staged) select case when i = 3 then 'bad' else 'orders' end, true from generate_series(1, 6) i")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	logger.Wait(t, t.Context(), 1, "event log sequencer leaves events")
	db.Exec(t, "insert into shop_outbox (topic, staged) values ('orders', true)")
	require.Eventually(t, func() bool { return pgtest.Value[int](t, db, "select count(*)::int from events") == 6 }, 30*time.Second, 5*time.Millisecond)
	cancel()
	require.NoError(t, <-ended)
	require.Equal(t, []int64{1, 2, 3, 4, 5, 6}, pgtest.Column[int64](t, db, "select id from events order by id"), "no number is missing")
	require.Equal(t, []string{"bad"}, pgtest.Column[string](t, db, "select topic from shop_outbox"))
	require.Len(t, logger.Lines("", "error"), 1)
	_, err = s.Once(t.Context())
	var refused *sequencer.RefusedError
	require.ErrorAs(t, err, &refused)
}

// counting counts what it is sent.
type counting struct {
	sequencer.Database
	sent atomic.Int64
}

func (c *counting) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	c.sent.Add(1)
	return c.Database.SendBatch(ctx, b)
}

// Meanwhile a look tries one of them, and not all again.
func TestStagedEventsWaitForPartitions(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	db.Exec(t, "alter table event_log detach partition event_log_first")
	db.Exec(t, "alter table event_log attach partition event_log_first for values from (minvalue) to (6)")
	db.Exec(t, `create sequence tried;
		create function try() returns trigger language plpgsql as $$ begin perform nextval('public.tried'); return old; end $$;
		create trigger try before delete on event_outbox for each row execute function try()`)
	stage(t, db, 12)
	looks := &counting{Database: db.Pool(t)}
	run(t, looks, sequencer.Config{PollInterval: time.Millisecond, BatchSize: 8})
	require.Eventually(t, func() bool { return len(payloads(t, db)) == 5 }, 30*time.Second, 5*time.Millisecond)
	lookOn := func(n int64) int64 {
		until := looks.sent.Load() + n
		require.Eventually(t, func() bool { return looks.sent.Load() >= until }, 30*time.Second, time.Millisecond)
		return pgtest.Value[int64](t, db, "select last_value from tried")
	}
	before := lookOn(2)
	from := looks.sent.Load()
	after := lookOn(50)
	require.LessOrEqual(t, after-before, 2*(looks.sent.Load()-from+1), "in a batch of one, and then alone")
	db.Exec(t, "create table event_log_next partition of event_log for values from (6) to (maxvalue)")
	require.Eventually(t, func() bool { return len(payloads(t, db)) == 12 }, 30*time.Second, 5*time.Millisecond)
	require.Equal(t, numbers(12), payloads(t, db))
}

// As after a failover to a server whose transactions have lower numbers.
func TestSnapshotOfAnotherServerIsNotBelieved(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	stage(t, db, 2)
	require.Equal(t, 2, pgtest.Value[int](t, db, "select taken from event_outbox_sequence('9000000:9000000:', null, '0', 0, 100)"))
	require.Equal(t, numbers(2), payloads(t, db))
}
