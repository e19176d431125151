package retention_test

import (
	"context"
	"strings"
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
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/retention"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// consume runs consumers from the beginning of the log until the test ends.
func consume(t *testing.T, db *pgtest.DB, handlers map[string]message.NoPublishHandlerFunc) *logtest.Logger {
	t.Helper()
	logger := logtest.NewLogger()
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 8 })
	config := subscriber.RunnerConfig{PollInterval: 50 * time.Millisecond}
	for name := range handlers {
		config.Consumers = append(config.Consumers, subscriber.ConsumerConfig{
			Name: name, Topic: subscriber.AllTopics, Start: cursor.FromBeginning(), BatchSize: 1000,
		})
	}
	runner, err := subscriber.NewRunner(pool, config, logger)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, logger)
	require.NoError(t, err)
	router.AddMiddleware(middleware.Round(logger))
	for name, h := range handlers {
		router.AddConsumerHandler(name, subscriber.AllTopics, runner.Subscriber(name), h)
	}
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	<-router.Running()
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-ended)
		require.NoError(t, runner.Close())
	})
	return logger
}

// writers append events of their own until stop, and tell the longest that one of them took.
type writers struct {
	all     sync.WaitGroup
	stopped chan struct{}
	longest atomic.Int64
	n       atomic.Int64
	failed  chan error
}

func write(t *testing.T, db *pgtest.DB, n int) *writers {
	t.Helper()
	w := &writers{stopped: make(chan struct{}), failed: make(chan error, n)}
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = int32(n) })
	for range n {
		w.all.Go(func() {
			ticker := time.NewTicker(20 * time.Millisecond)
			defer ticker.Stop()
			for {
				begun := time.Now()
				if _, err := pool.Exec(context.Background(), "insert into event_outbox (topic) values ('orders')"); err != nil {
					w.failed <- err
					return
				}
				took := int64(time.Since(begun))
				for was := w.longest.Load(); took > was && !w.longest.CompareAndSwap(was, took); was = w.longest.Load() {
				}
				w.n.Add(1)
				select {
				case <-w.stopped:
					return
				case <-ticker.C:
				}
			}
		})
	}
	return w
}

func (w *writers) stop(t *testing.T) time.Duration {
	t.Helper()
	close(w.stopped)
	w.all.Wait()
	select {
	case err := <-w.failed:
		require.NoError(t, err)
	default:
	}
	return time.Duration(w.longest.Load())
}

// run maintains the log until the test ends.
func run(t *testing.T, db *pgtest.DB, change ...func(*retention.Config)) *logtest.Logger {
	t.Helper()
	r, logger := newRetention(t, db, change...)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return logger
}

func TestAppendsAndRoundsGoOnWhileTheLogIsCutAndRemoved(t *testing.T) {
	t.Parallel()
	const bound = 2 * time.Second
	db := logtest.New(t)
	fill(t, db, 2000, "40 days")
	var quick, slow atomic.Int64
	logger := consume(t, db, map[string]message.NoPublishHandlerFunc{
		"quick": func(*message.Message) error { quick.Add(1); return nil },
		"slow": func(msg *message.Message) error { // holds a unit open for most of the time
			unit, _ := cursor.UnitFromContext(msg.Context())
			if _, err := unit.Tx(msg.Context()); err != nil {
				return err
			}
			if slow.Add(1)%200 == 0 {
				<-time.After(200 * time.Millisecond)
			}
			return nil
		},
	})
	w := write(t, db, 20)
	require.Eventually(t, func() bool { return w.n.Load() > 500 }, time.Minute, 5*time.Millisecond)
	usual := time.Duration(w.longest.Load())
	set(t, db, retention.Settings{PartitionSize: 500})
	var lines []*logtest.Logger
	for range 2 {
		lines = append(lines, run(t, db, func(c *retention.Config) { c.Interval, c.LockTimeout = 100*time.Millisecond, bound }))
	}
	conn := db.Conn(t)
	var removed int
	require.Eventually(t, func() bool {
		// Time is made to pass.
		_, err := conn.Exec(context.Background(), `update event_log l set recorded_at = l.recorded_at - interval '40 days'
			where l.seq <= (select last_seq - 2000 from event_seq) and l.recorded_at > now() - interval '1 day'`)
		if err == nil {
			err = conn.QueryRow(context.Background(), "select count(*) from event_retention_removals where removed_at is not null").Scan(&removed)
		}
		return err != nil || removed >= 3 || len(w.failed) > 0
	}, 2*time.Minute, 100*time.Millisecond)
	longest := w.stop(t)
	require.GreaterOrEqual(t, removed, 3)
	t.Logf("%d appends, the longest took %v; %v before", w.n.Load(), longest, usual)
	require.Less(t, longest, bound+usual)

	total := 2000 + w.n.Load()
	require.Equal(t, total, status(t, db).Head)
	require.Eventually(t, func() bool { return quick.Load() == total && slow.Load() >= total }, time.Minute, 20*time.Millisecond)
	require.Empty(t, logger.Lines("lost", "error"))
	require.Zero(t, pgtest.Value[int](t, db, "select count(*)::int from event_consumer_losses"))
	for _, l := range lines { // a cut that the head or a round has outrun is tried again
		for _, line := range l.Lines("", "error") {
			require.ErrorContains(t, line.Err, "SQLSTATE 55P03")
		}
		require.Eventually(t, func() bool { return len(l.Lines("event log retention recovered")) == len(l.Lines("", "error")) },
			time.Minute, 20*time.Millisecond)
	}
	require.Equal(t, total-lowest(t, db)+1, pgtest.Value[int64](t, db, "select count(*) from event_log"))
}

func TestRoundThatStaysOpenHoldsAppendsUpNoLongerThanTheBound(t *testing.T) {
	t.Parallel()
	const bound = 400 * time.Millisecond
	db := logtest.New(t)
	fill(t, db, 10, "0")
	round := openRound(t, db)
	w := write(t, db, 4)
	set(t, db, retention.Settings{PartitionSize: 1000})
	quick := func(c *retention.Config) { c.LockTimeout = bound }
	r, _ := newRetention(t, db, quick)
	_, err := r.Once(t.Context())
	require.ErrorContains(t, err, "pausing the consumers")
	longest := w.stop(t)
	t.Logf("%d appends, the longest took %v", w.n.Load(), longest)
	require.Greater(t, longest, bound/4) // it did wait
	require.Less(t, longest, 3*bound)
	s := status(t, db)
	require.Contains(t, s.Error, "pausing the consumers")
	require.False(t, s.FailingSince.IsZero())
	require.Equal(t, "test", s.MaintainedBy)

	require.NoError(t, round.Rollback(t.Context()))
	require.NotZero(t, once(t, db, quick).CutAt)
	s = status(t, db)
	require.Empty(t, s.Error)
	require.True(t, s.FailingSince.IsZero())
}

func TestDetachThatWasInterruptedIsFinished(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{})
	round := openRound(t, db)
	r, _ := newRetention(t, db)
	_, err := r.Once(t.Context())
	require.ErrorContains(t, err, "detach partition event_log_first")
	s := status(t, db)
	require.True(t, s.Partitions[0].Detaching)

	// It is still blocked; partitions are made and events appended all the same.
	fill(t, db, int(s.Reserve), "0")
	done, err := r.Once(t.Context())
	require.Error(t, err)
	require.NotEmpty(t, done.Made)
	logtest.Append(t, db, "orders", 1)
	require.Equal(t, []string{"event_log_first", "event_log_p20"}, names(status(t, db))[:2])

	require.NoError(t, round.Rollback(t.Context()))
	require.Equal(t, []string{"event_log_first", "event_log_p20"}, once(t, db).Removed)
	require.Equal(t, int64(30), lowest(t, db))
}

func TestDetachOfSomebodyElseIsFinishedAndItsTableLeft(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{})
	round := openRound(t, db)
	conn := db.Conn(t)
	_, err := conn.Exec(t.Context(), "set lock_timeout = 100")
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "alter table event_log detach partition event_log_first concurrently")
	require.Error(t, err)
	require.NoError(t, round.Rollback(t.Context()))
	require.Equal(t, []string{"event_log_p20"}, once(t, db).Removed)
	require.Equal(t, 19, pgtest.Value[int](t, db, "select count(*)::int from event_log_first"))
}

// What a round read before is not what it reads after; it may not take the difference for anything but a gap or a loss.
func TestRoundNeverPassesEventsThatWereRemovedUnderIt(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{PinnedAge: 35 * 24 * time.Hour})
	var handled sync.Map
	reached, release := make(chan struct{}), make(chan struct{})
	var first sync.Once
	logger := consume(t, db, map[string]message.NoPublishHandlerFunc{"push": func(msg *message.Message) error {
		unit, _ := cursor.UnitFromContext(msg.Context())
		first.Do(func() { close(reached); <-release })
		handled.Store(unit.Event().Seq, true)
		return nil
	}})
	<-reached // a round holds 1 to 35
	r, _ := newRetention(t, db)
	_, err := r.Once(t.Context())
	require.ErrorContains(t, err, "detach partition event_log_first")
	close(release)
	require.Eventually(t, func() bool { return logtest.Position(t, db, cursor.Key{Consumer: "push"}) == 35 }, time.Minute, 20*time.Millisecond)
	for seq := int64(1); seq <= 35; seq++ {
		_, ok := handled.Load(seq)
		require.True(t, ok, seq)
	}
	require.Empty(t, logger.Lines("", "error"))
	once(t, db)
	require.Equal(t, int64(30), lowest(t, db))
	require.Zero(t, pgtest.Value[int](t, db, "select count(*)::int from event_consumer_losses"))
}

func TestConsumerWhoseEventsACapLetGoRecordsALossAndGoesOn(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{PinnedAge: 35 * 24 * time.Hour})
	register(t, db, "push", 5)
	require.NotEmpty(t, once(t, db).Removed)
	var handled atomic.Int64
	logger := consume(t, db, map[string]message.NoPublishHandlerFunc{"push": func(*message.Message) error { handled.Add(1); return nil }})
	require.Eventually(t, func() bool { return logtest.Position(t, db, cursor.Key{Consumer: "push"}) == 35 }, time.Minute, 20*time.Millisecond)
	require.Equal(t, int64(6), handled.Load())
	require.Equal(t, "6 29 retention", pgtest.Value[string](t, db, "select first_seq || ' ' || last_seq || ' ' || reason from event_consumer_losses"))
	require.Len(t, logger.Lines("event consumer lost events to retention", "error"), 1)
	logtest.Append(t, db, "orders", 1)
	require.Eventually(t, func() bool { return handled.Load() == 7 }, time.Minute, 20*time.Millisecond)
}

// killer ends the backend before the nth statement of a connection, which is after the one before.
type killer struct {
	admin *pgxpool.Pool
	n     int
	seen  int
	hit   string
}

func (k *killer) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if k.seen++; k.seen == k.n {
		k.hit = data.SQL
		if _, err := k.admin.Exec(ctx, "select pg_terminate_backend($1, 20000)", conn.PgConn().PID()); err != nil {
			panic(err)
		}
	}
	return ctx
}

func (k *killer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestMaintenanceThatIsKilledAtAnyStepIsFinishedByTheNext(t *testing.T) {
	t.Parallel()
	t.Run("cut", func(t *testing.T) {
		t.Parallel()
		db := logtest.New(t)
		admin := db.Pool(t)
		fill(t, db, 5, "0")
		set(t, db, retention.Settings{PartitionSize: 10})
		n := 1
		for killed(t, db, admin, n) {
			var made []string
			for _, p := range status(t, db).Partitions[1:] {
				made = append(made, p.Name)
			}
			require.NotEmpty(t, made)
			// Back to the beginning.
			_, err := admin.Exec(t.Context(), "truncate event_log; update event_seq set last_seq = 5; drop table "+strings.Join(made, ", ")+
				"; alter table event_log detach partition event_log_first"+
				"; alter table event_log attach partition event_log_first for values from (minvalue) to (maxvalue)", pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
			n++
		}
		require.Greater(t, n, 8)
	})
	t.Run("remove", func(t *testing.T) {
		t.Parallel()
		db := filled(t, retention.Settings{})
		admin := db.Pool(t)
		db.Exec(t, "update event_log set recorded_at = recorded_at - interval '40 days' where seq >= 30")
		once(t, db)
		n := 1
		for more := true; more; n++ {
			// One partition may go, and one has to be made.
			fill(t, db, 10, "40 days")
			db.Exec(t, "insert into event_ids (id, outbox_id, seq) select l.uuid, 0, l.seq from event_log l on conflict do nothing")
			more = killed(t, db, admin, n)
			head := status(t, db).Head
			require.Equal(t, head/10*10, lowest(t, db), n)
			require.Equal(t, head/10*10, pgtest.Value[int64](t, db, "select min(seq) from event_ids"), n)
			require.Equal(t, head/10*10-1, pgtest.Value[int64](t, db, "select max(last_seq) from event_retention_removals"), n)
		}
		require.Greater(t, n, 15)
	})
}

// killed has a maintenance killed before its nth statement and looks at what the next one makes of it. It is false where
// there are fewer statements.
func killed(t *testing.T, db *pgtest.DB, admin *pgxpool.Pool, n int) bool {
	k := &killer{admin: admin, n: n}
	config, err := pgx.ParseConfig(db.URL())
	require.NoError(t, err)
	config.Tracer = k
	r, _ := newRetention(t, db, func(c *retention.Config) { c.ConnConfig = config })
	r.SetScanLimit(-1)
	_, err = r.Once(t.Context())
	if k.hit == "" {
		require.NoError(t, err)
		return false
	}
	once(t, db)
	s := status(t, db)
	require.GreaterOrEqual(t, s.Ahead, 2, k.hit)
	require.Empty(t, s.Error, k.hit)
	require.Zero(t, pgtest.Value[int](t, db, `select count(*)::int from pg_class where relname like 'event\_log\_%'
		and relkind = 'r' and not relispartition`), k.hit)
	require.Zero(t, pgtest.Value[int](t, db, "select count(*)::int from event_retention_removals where removed_at is null"), k.hit)
	require.Zero(t, pgtest.Value[int](t, db, "select count(*)::int from pg_constraint where conname = 'event_log_end'"), k.hit)
	return true
}

func TestPartitionThatIsBeingCutMayGrowMeanwhile(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	fill(t, db, 5, "40 days")
	set(t, db, retention.Settings{PartitionSize: 10})
	db.Exec(t, "alter table event_log_first add constraint event_log_end check (seq < 10) not valid") // as if killed there
	fill(t, db, 4, "40 days")
	require.Equal(t, int64(9), status(t, db).Head)
	set(t, db, retention.Settings{PartitionSize: 10, Off: true}) // and even then it is finished
	require.Equal(t, int64(20), once(t, db).CutAt)
	logtest.Append(t, db, "orders", 20)
}
