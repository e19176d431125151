package subscriber_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	wmiddleware "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func unitTx(msg *message.Message) pgx.Tx {
	unit, _ := cursor.UnitFromContext(msg.Context())
	tx, err := unit.Tx(msg.Context())
	if err != nil {
		panic(err)
	}
	return tx
}

func TestAckBeforeMessagesAreReturnedFailsTheRound(t *testing.T) {
	t.Parallel()
	for name, h := range map[string]handler{
		"by the handler": func(msg *message.Message) ([]*message.Message, error) { msg.Ack(); return work(msg) },
		"by InstantAck":  wmiddleware.InstantAck(work),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 20)
			s := start(t, db, map[string]handler{"push": h})
			lines := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")
			require.ErrorIs(t, lines[0].Err, cursor.ErrAckedEarly)
			require.NoError(t, s.router.Close())
			require.Equal(t, int64(0), position(t, db, "push"))
			require.Empty(t, effects(t, db, "push"))
		})
	}
	// Without messages nothing can be lost: the unit waits for the handler's return.
	db := newDB(t)
	logtest.Append(t, db, "orders", 20)
	start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		msg.Ack()
		return nil, effect(msg)
	}})
	waitPosition(t, db, "push", 20)
	require.Equal(t, upTo(20), effects(t, db, "push"))
}

func TestNilMessageIsNamed(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 1)
	s := start(t, db, map[string]handler{"push": func(*message.Message) ([]*message.Message, error) {
		return []*message.Message{nil}, nil
	}})
	lines := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")
	require.ErrorContains(t, lines[0].Err, "nil message")
}

type panicking struct{}

func (panicking) Value() (driver.Value, error) { panic("s3cr3t") }

// Whatever ends a call into the transaction without its return, the round ends and the next attempt can begin.
func TestHandlerThatEndsInsideItsTransactionCostsOnlyItsRound(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(ctx context.Context, tx pgx.Tx){
		"panic in Exec":  func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, "select $1::text", panicking{}) },
		"panic in Query": func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Query(ctx, "select $1::text", panicking{}) },
		"panic in QueryRow": func(ctx context.Context, tx pgx.Tx) {
			_ = tx.QueryRow(ctx, "select $1::text", panicking{}).Scan(new(string))
		},
		"panic in SendBatch": func(ctx context.Context, tx pgx.Tx) {
			b := &pgx.Batch{}
			b.Queue("select $1::text", panicking{})
			_ = tx.SendBatch(ctx, b).Close()
		},
		"panic in a batch's callback": func(ctx context.Context, tx pgx.Tx) {
			b := &pgx.Batch{}
			b.Queue("select 1").QueryRow(func(pgx.Row) error { panic("s3cr3t") })
			_ = tx.SendBatch(ctx, b).Close()
		},
		"Goexit in a batch's callback": func(ctx context.Context, tx pgx.Tx) {
			b := &pgx.Batch{}
			b.Queue("select 1").Query(func(pgx.Rows) error { runtime.Goexit(); return nil })
			_ = tx.SendBatch(ctx, b).Close()
		},
		"Goexit between rows": func(ctx context.Context, tx pgx.Tx) {
			rows, _ := tx.Query(ctx, "select generate_series(1, 100)")
			rows.Next()
			runtime.Goexit()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 4)
			var ended atomic.Int64
			s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
				if seqOf(msg) == 2 && ended.Add(1) <= 2 {
					end(msg.Context(), unitTx(msg))
				}
				return work(msg)
			}})
			waitPosition(t, db, "push", 4)
			require.Equal(t, upTo(4), effects(t, db, "push"))
			require.NoError(t, s.router.Close())
			// A connection that was closed leaves the pool a moment later.
			require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, 20*time.Second, time.Millisecond)
			for _, line := range s.logger.Lines("") {
				require.NotContains(t, line.String(), "s3cr3t")
			}
		})
	}
}

// blockedSource is a CopyFromSource that waits for something else.
type blockedSource struct{ end chan struct{} }

func (s blockedSource) Next() bool             { <-s.end; return false }
func (s blockedSource) Values() ([]any, error) { return nil, nil }
func (s blockedSource) Err() error             { return nil }

func TestCallThatNeverReturnsHoldsNobodyElse(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 2)
	end := make(chan struct{})
	var attempts atomic.Int64
	s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		if attempts.Add(1) == 1 {
			_, err := unitTx(msg).CopyFrom(msg.Context(), pgx.Identifier{"effects"}, []string{"consumer", "seq"}, blockedSource{end})
			return nil, err
		}
		return work(msg)
	}}, budget(200*time.Millisecond), consumers(func(c *subscriber.ConsumerConfig) { c.AckDeadline = 200 * time.Millisecond }))
	waitPosition(t, db, "push", 2)
	require.Equal(t, upTo(2), effects(t, db, "push"))
	require.Len(t, s.logger.Lines("left its connection", "error"), 1)
	require.NoError(t, s.runner.Close())
	require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, 20*time.Second, time.Millisecond)
	close(end) // the router waits for the handler
}

func TestFailureThatCannotBeRecordedIsRemembered(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, `create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$`)
	db.Exec(t, "create trigger refuse before insert or update on event_consumer_failures for each row execute function refuse()")
	logtest.Append(t, db, "orders", 6)
	var attempts, first atomic.Int64
	var mended atomic.Bool
	s := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		switch seqOf(msg) {
		case 1:
			first.Add(1)
		case 4:
			if attempts.Add(1); !mended.Load() {
				return nil, errors.New("no")
			}
		}
		return work(msg)
	}}, consumers(func(c *subscriber.ConsumerConfig) {
		c.RetryDelay, c.RetryDelayCap = 50*time.Millisecond, 100*time.Millisecond
	}))
	waitPosition(t, db, "push", 3) // the good ones are not held back
	require.Eventually(t, func() bool { return attempts.Load() >= 4 }, 20*time.Second, 5*time.Millisecond)
	require.Equal(t, int64(2), first.Load(), "undone once, committed once")
	mended.Store(true)
	waitPosition(t, db, "push", 6)
	require.Equal(t, upTo(6), effects(t, db, "push"))
	s.logger.Wait(t, t.Context(), 1, "event consumer recovered")
	require.Len(t, s.logger.Lines("event consumer", "error"), 1)
}

func TestFailureIsRecordedWithAPoolOfOne(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 5)
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{
		{Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning},
	}}, nil)
	require.NoError(t, err)
	serve(t, runner, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		if seqOf(msg) == 3 {
			return nil, errors.New("no")
		}
		return work(msg)
	}})
	waitPosition(t, db, "push", 2)
	require.Eventually(t, func() bool {
		return pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures where seq = 3 and attempts > 2") == 1
	}, 20*time.Second, 5*time.Millisecond)
}

type oddError struct{ errorType func() string }

func (e *oddError) Error() string     { return "odd" }
func (e *oddError) ErrorType() string { return e.errorType() }

func TestOddErrorTypesAreRecorded(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		err  error
		want string
	}{
		"NUL and bytes": {&oddError{func() string { return "a\x00b\xffc d" }}, "a_b_c_d"},
		"long":          {&oddError{func() string { return strings.Repeat("x", 1000) }}, strings.Repeat("x", 64)},
		"empty":         {&oddError{func() string { return "" }}, "_OTHER"},
		"panicking":     {(*oddError)(nil), "internal"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 1)
			start(t, db, map[string]handler{"push": func(*message.Message) ([]*message.Message, error) { return nil, tt.err }})
			require.Eventually(t, func() bool {
				got := pgtest.Column[string](t, db, "select error_type from event_consumer_failures")
				return len(got) == 1 && got[0] == tt.want
			}, 20*time.Second, 5*time.Millisecond)
		})
	}
}

func TestSettingsOfOneEventDoNotSteerTheNext(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, statement := range []string{
		"create schema tenant", "create table tenant.watermill_jobs (like public.watermill_jobs including all)",
		"create table tenant.effects (consumer text, seq bigint)",
	} {
		db.Exec(t, statement)
	}
	logtest.Append(t, db, "orders", 4)
	start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		if seqOf(msg)%2 == 1 {
			if err := execute(msg, "set local search_path = tenant"); err != nil {
				return nil, err
			}
		}
		return work(msg)
	}})
	waitPosition(t, db, "push", 4)
	require.Equal(t, []int64{2, 4}, effects(t, db, "push"))
	require.Equal(t, []int64{1, 3}, pgtest.Column[int64](t, db, "select seq from tenant.effects order by 1"))
	require.Equal(t, int64(4), jobCount(t, db))
}

func TestEventThatCannotBeReadIsNamed(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 5)
	db.Exec(t, "alter table event_log drop constraint event_log_occurred_at_check")
	db.Exec(t, "update event_log set occurred_at = 'infinity' where seq = 4")
	start(t, db, map[string]handler{"push": work})
	waitPosition(t, db, "push", 3)
	require.Eventually(t, func() bool {
		return pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures where seq = 4") == 1
	}, 20*time.Second, 5*time.Millisecond)
	db.Exec(t, "update event_log set occurred_at = now() where seq = 4")
	waitPosition(t, db, "push", 5)
	require.Equal(t, upTo(5), effects(t, db, "push"))
}

func TestClockThatWasSetBackDoesNotHoldARetry(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 2)
	var attempts atomic.Int64
	s := start(t, db, map[string]handler{"push": failTimes(1, 3, &attempts, func() error { return errors.New("no") })},
		consumers(func(c *subscriber.ConsumerConfig) { c.RetryDelay, c.RetryDelayCap = time.Minute, time.Minute }))
	s.logger.Wait(t, t.Context(), 1, "event consumer round failed")
	// An operator who hurries it, and a clock that went back by an hour: both are seen at the next poll.
	db.Exec(t, "update event_consumer_failures set retry_at = now()")
	require.Eventually(t, func() bool {
		return pgtest.Value[int32](t, db, "select attempts from event_consumer_failures") == 2
	}, 20*time.Second, 5*time.Millisecond)
	db.Exec(t, "update event_consumer_failures set retry_at = now() + interval '1 hour'")
	require.Eventually(t, func() bool { return attempts.Load() >= 3 }, 20*time.Second, 5*time.Millisecond)
}

func TestServerSettingsDoNotChangeWhatIsRead(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		for _, setting := range []string{
			"DateStyle = 'German'", "DateStyle = 'SQL, DMY'", "bytea_output = 'escape'", "TimeZone = 'Asia/Kathmandu'",
			"default_transaction_isolation = 'serializable'", "search_path = pg_catalog, public", "IntervalStyle = 'sql_standard'",
		} {
			t.Run(mode.String()+" "+setting, func(t *testing.T) {
				t.Parallel()
				db := newDB(t)
				db.Exec(t, "alter database "+db.Name()+" set "+setting)
				logtest.Append(t, db, "orders", 5)
				pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 4; c.ConnConfig.DefaultQueryExecMode = mode })
				runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
					PollInterval: 20 * time.Millisecond,
					Consumers:    []subscriber.ConsumerConfig{{Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning}},
				}, nil)
				require.NoError(t, err)
				serve(t, runner, map[string]handler{"push": work})
				waitPosition(t, db, "push", 5)
				require.Equal(t, upTo(5), effects(t, db, "push"))
				require.Equal(t, int64(5), jobCount(t, db))
			})
		}
	}
}
