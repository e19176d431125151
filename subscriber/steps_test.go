package subscriber_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// A trigger that ends its own connection, three times.
const sqlSuicide = `create sequence suicides;
	create function suicide() returns trigger language plpgsql as $$
	begin
		if nextval('suicides') <= 3 then perform pg_terminate_backend(pg_backend_pid()), pg_sleep(1); end if;
		return coalesce(new, old);
	end $$;`

func TestConnectionLostAtEachStepLosesAndDoublesNothing(t *testing.T) {
	t.Parallel()
	for step, trigger := range map[string]string{
		"flush":  "create trigger s before insert on watermill_jobs for each row execute function suicide()",
		"cursor": "create trigger s before update on event_consumer_cursors for each row execute function suicide()",
		"commit": "create constraint trigger s after update on event_consumer_cursors deferrable initially deferred for each row execute function suicide()",
		"record of the failure": `create trigger s before insert on event_consumer_failures for each row execute function suicide();
			alter table watermill_jobs add constraint once check (payload::text <> '4') not valid`,
	} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			_, err := db.Conn(t).PgConn().Exec(t.Context(), sqlSuicide+trigger).ReadAll()
			require.NoError(t, err)
			logtest.Append(t, db, "orders", 7)
			s := start(t, db, map[string]handler{"push": work})
			if step == "record of the failure" {
				s.logger.Wait(t, t.Context(), 1, "event consumer round failed")
				require.Eventually(t, func() bool {
					return pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures where seq = 4") == 1
				}, 20*time.Second, 5*time.Millisecond)
				db.Exec(t, "alter table watermill_jobs drop constraint once")
			}
			waitPosition(t, db, "push", 7)
			require.Equal(t, upTo(7), effects(t, db, "push"))
			require.Equal(t, int64(7), jobCount(t, db))
			s.logger.Wait(t, t.Context(), 1, "event consumer recovered")
			require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, 20*time.Second, time.Millisecond)
		})
	}
}

func TestConnectionLostWhileARoundBeginsLosesAndDoublesNothing(t *testing.T) {
	t.Parallel()
	for step, table := range map[string]string{"lock": "event_consumer_cursors", "read": "event_log"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 3)
			start(t, db, map[string]handler{"push": work})
			waitPosition(t, db, "push", 3)
			for range 3 {
				// The round's statement waits for the table, and its connection is ended meanwhile.
				blocker, err := db.Conn(t).Begin(t.Context())
				require.NoError(t, err)
				_, err = blocker.Exec(t.Context(), "insert into event_outbox (topic) values ('orders'); set constraints all immediate; notify event_log; lock table "+table)
				require.NoError(t, err)
				db.Exec(t, "notify event_log")
				require.Eventually(t, func() bool {
					return pgtest.Value[int64](t, db, `select count(pg_terminate_backend(pid)) from pg_stat_activity
						where wait_event_type = 'Lock' and datname = current_database() and query like '%`+table+`%'`) > 0
				}, 20*time.Second, time.Millisecond)
				require.NoError(t, blocker.Commit(t.Context()))
			}
			waitPosition(t, db, "push", 6)
			require.Equal(t, upTo(6), effects(t, db, "push"))
		})
	}
}

// lossyConn loses the answer to a COMMIT: the server has committed, and the client never hears of it.
type lossyConn struct {
	net.Conn
	armed     *atomic.Int64
	committed bool
}

func (c *lossyConn) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("commit\x00")) && bytes.Contains(p, []byte("event_consumer_cursors")) && c.armed.Add(-1) >= 0 {
		c.committed = true
	}
	return c.Conn.Write(p)
}

func (c *lossyConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.committed {
		// Let the server finish: what it sends is thrown away until it has been read to the end of the COMMIT.
		all := append([]byte(nil), p[:n]...)
		for !bytes.Contains(all, []byte("COMMIT\x00")) && err == nil {
			n, err = c.Conn.Read(p)
			all = append(all, p[:n]...)
		}
		_ = c.Conn.Close()
		return 0, errors.New("the answer was lost")
	}
	return n, err
}

func TestCommitWhoseAnswerIsLostIsNotRepeated(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 30)
	armed := &atomic.Int64{}
	armed.Store(2)
	pool := db.Pool(t, func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // so that statements can be seen on the wire
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &lossyConn{Conn: conn, armed: armed}, err
		}
	})
	logger := logtest.NewLogger()
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
		Consumers:    []subscriber.ConsumerConfig{{Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 10, RetryDelay: time.Millisecond}},
		PollInterval: 20 * time.Millisecond,
	}, logger)
	require.NoError(t, err)
	serve(t, runner, map[string]handler{"push": work})
	waitPosition(t, db, "push", 30)
	require.Less(t, armed.Load(), int64(0), "both answers were lost")
	require.Equal(t, upTo(30), effects(t, db, "push"))
	require.Equal(t, int64(30), jobCount(t, db))
	require.Empty(t, logger.Lines("", "error"), "the next round has found out that nothing had failed")
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures"))
}

// readTracer does something when a batch has ended: between a round's read and what it does then.
type readTracer struct {
	once atomic.Bool
	then func()
}

func (r *readTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (r *readTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (r *readTracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {
	if r.once.CompareAndSwap(true, false) {
		r.then()
	}
}
func (r *readTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (r *readTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// openWith opens a round and does something between its read and what it makes of it.
func openWith(t *testing.T, db *pgtest.DB, key cursor.Key, then func()) (*cursor.Opening, error) {
	t.Helper()
	tracer := &readTracer{then: then}
	config, err := pgx.ParseConfig(db.URL())
	require.NoError(t, err)
	config.Tracer = tracer
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	r := cursor.NewRound(conn, cursor.RoundConfig{
		Key: key, By: "test", ID: "1", Bound: time.Minute, Limits: cursor.Limits{Events: 10, Bytes: 1 << 20, Cover: 100},
	})
	t.Cleanup(func() { r.Rollback(context.Background()) })
	tracer.once.Store(true)
	return r.Open(t.Context())
}

func TestEventThatCommitsBetweenTwoReadsIsHandedOut(t *testing.T) {
	t.Parallel()
	for _, key := range []cursor.Key{{Consumer: "push"}, {Consumer: "push", Topic: "orders"}} {
		db := newDB(t)
		_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", []cursor.Registration{{Key: key}})
		require.NoError(t, err)
		o, err := openWith(t, db, key, func() { logtest.Append(t, db, "orders", 2) })
		require.NoError(t, err)
		require.Equal(t, cursor.Ready, o.Status, "it is neither idle, nor lost, nor a gap")
		require.Len(t, o.Events, 2)
	}
}

// The numbers, the lowest of them and the head come from one statement: a partition that is detached meanwhile is
// either in all of them or in none.
func TestPartitionDetachedBetweenTwoReadsIsNoGap(t *testing.T) {
	t.Parallel()
	partitioned := func(t *testing.T) *pgtest.DB {
		db := newDB(t)
		for _, statement := range []string{
			"alter table event_log detach partition event_log_first",
			"create table event_log_1 partition of event_log for values from (minvalue) to (10)",
			"create table event_log_2 partition of event_log for values from (10) to (maxvalue)",
		} {
			db.Exec(t, statement)
		}
		_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", []cursor.Registration{{Key: cursor.Key{Consumer: "push"}, Start: fromBeginning}})
		require.NoError(t, err)
		logtest.Append(t, db, "orders", 15)
		return db
	}
	detach := func(t *testing.T, db *pgtest.DB) func() {
		conn, detached := db.Conn(t), make(chan struct{})
		t.Cleanup(func() { <-detached }) // after the round's end, which is registered later
		return func() {
			// Concurrently, as the open round holds the log's table; it ends once the round does.
			go func() {
				defer close(detached)
				_, _ = conn.Exec(context.Background(), "alter table event_log detach partition event_log_1 concurrently")
			}()
			require.Eventually(t, func() bool {
				return pgtest.Value[bool](t, db, "select exists (select from pg_inherits where inhdetachpending)")
			}, 20*time.Second, time.Millisecond)
		}
	}

	db := partitioned(t)
	o, err := openWith(t, db, cursor.Key{Consumer: "push"}, detach(t, db))
	require.NoError(t, err)
	require.Equal(t, cursor.Ready, o.Status, "what was read before the detach is whole")
	require.Len(t, o.Events, 10)

	db = partitioned(t)
	db.Exec(t, "delete from event_log where seq = 5")
	o, err = openWith(t, db, cursor.Key{Consumer: "push"}, detach(t, db))
	if err != nil {
		require.ErrorIs(t, err, cursor.ErrConsumerGap)
		return
	}
	require.Equal(t, cursor.Lost, o.Status)
	require.Equal(t, int64(9), o.Through, "a loss ends just before the lowest number")
}
