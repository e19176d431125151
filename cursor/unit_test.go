package cursor_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// hand opens a round on one event and hands it out.
func hand(t *testing.T) (*pgtest.DB, *cursor.Round, *pgx.Conn, *cursor.Unit, pgx.Tx) {
	t.Helper()
	db := logtest.New(t)
	db.Exec(t, "create table effects (n int unique)")
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 1)
	r, conn := prepare(t, db, push)
	o, err := r.Open(t.Context())
	require.NoError(t, err)
	unit := r.Hand(&o.Events[0])
	tx, err := unit.Tx(t.Context())
	require.NoError(t, err)
	return db, r, conn, unit, tx
}

// failedRound rolls back and checks that nothing is left of the round.
func failedRound(t *testing.T, db *pgtest.DB, r *cursor.Round) {
	t.Helper()
	r.Rollback(t.Context())
	r.Release(t.Context())
	require.Equal(t, int64(0), logtest.Position(t, db, push))
	require.Empty(t, pgtest.Column[int32](t, db, "select n from effects"))
	for ctx, stop := context.WithTimeout(t.Context(), 30*time.Second); ; { // the lock is free, once the server has seen a closed socket
		next, o := open(t, db, push)
		if o.Status == cursor.Ready {
			stop()
			return
		}
		next.Rollback(t.Context())
		require.Equal(t, cursor.Locked, o.Status)
		require.NoError(t, ctx.Err())
	}
}

func TestHandlerCannotEndItsUnit(t *testing.T) {
	t.Parallel()
	db, r, conn, _, tx := hand(t)
	_, err := tx.Exec(t.Context(), "insert into effects values (1)")
	require.NoError(t, err)
	require.ErrorIs(t, tx.Commit(t.Context()), cursor.ErrUnitControl)
	require.ErrorIs(t, tx.Rollback(t.Context()), cursor.ErrUnitControl)
	require.Empty(t, pgtest.Column[int32](t, db, "select n from effects"))
	require.NoError(t, r.End(t.Context(), true))
	require.NoError(t, r.Commit(t.Context(), 1))
	r.Release(t.Context())
	require.False(t, conn.IsClosed())
	require.Equal(t, []int32{1}, pgtest.Column[int32](t, db, "select n from effects"))
}

func TestSavepointsWorkInAUnit(t *testing.T) {
	t.Parallel()
	db, r, _, _, tx := hand(t)
	ctx := t.Context()
	require.NoError(t, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "insert into effects values (1)")
		return err
	}))
	failed := errors.New("undone")
	require.ErrorIs(t, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "insert into effects values (2)")
		require.NoError(t, err)
		return failed
	}), failed)
	require.Error(t, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "insert into effects values (1)") // violates
		return err
	}))
	_, err := tx.Exec(ctx, "insert into effects values (3)")
	require.NoError(t, err)
	require.NoError(t, r.End(t.Context(), true))
	require.NoError(t, r.Commit(ctx, 1))
	require.Equal(t, []int32{1, 3}, pgtest.Column[int32](t, db, "select n from effects order by 1"))
}

func TestSwallowedSQLErrorFailsTheRoundWithItsCause(t *testing.T) {
	t.Parallel()
	db, r, _, _, tx := hand(t)
	for range 2 {
		_, _ = tx.Exec(t.Context(), "insert into effects values (1)")
	}
	_, _ = tx.Exec(t.Context(), "select 1") // 25P02
	err := r.End(t.Context(), true)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "23505", pgErr.Code)
	require.Equal(t, "23505", cursor.ErrorType(err))
	failedRound(t, db, r)
}

func TestRawCommitIsFoundOut(t *testing.T) {
	t.Parallel()
	for _, statement := range []string{"rollback", "commit"} {
		db, r, conn, _, tx := hand(t)
		_, err := tx.Exec(t.Context(), statement)
		require.NoError(t, err)
		require.ErrorIs(t, r.End(t.Context(), true), cursor.ErrUnitControl)
		failedRound(t, db, r)
		require.True(t, conn.IsClosed())
	}
}

func TestRawCommitAndBeginIsFoundOut(t *testing.T) {
	t.Parallel()
	db, r, _, _, tx := hand(t)
	for _, statement := range []string{"rollback", "begin", "insert into effects values (1)"} {
		_, err := tx.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	require.NoError(t, r.End(t.Context(), true))
	require.ErrorIs(t, r.Commit(t.Context(), 1), cursor.ErrCursorMoved)
	failedRound(t, db, r)
}

func TestUnitIsForOneGoroutineAtATime(t *testing.T) {
	t.Parallel()
	db, r, _, _, tx := hand(t)
	var all sync.WaitGroup
	busy := make(chan error, 40)
	for range 4 {
		all.Go(func() {
			for range 10 {
				if _, err := tx.Exec(context.Background(), "select pg_sleep(0.001)"); err != nil {
					busy <- err
				}
			}
		})
	}
	all.Wait()
	require.ErrorIs(t, <-busy, cursor.ErrUnitBusy)
	require.ErrorIs(t, r.End(t.Context(), true), cursor.ErrUnitBusy)
	failedRound(t, db, r)
}

func TestOpenRowsFailTheRoundAndCostTheConnection(t *testing.T) {
	t.Parallel()
	db, r, conn, _, tx := hand(t)
	rows, err := tx.Query(t.Context(), "select generate_series(1, 1000)")
	require.NoError(t, err)
	require.True(t, rows.Next())
	_, err = tx.Exec(t.Context(), "select 1")
	require.ErrorIs(t, err, cursor.ErrUnitBusy)
	require.ErrorIs(t, r.End(t.Context(), true), cursor.ErrUnitBusy)
	failedRound(t, db, r)
	require.True(t, conn.IsClosed())
	require.False(t, rows.Next())
	require.ErrorIs(t, rows.Err(), cursor.ErrUnitEnded)
	rows.Close()
}

func TestRowsAndBatchesReadToTheirEndFreeTheUnit(t *testing.T) {
	t.Parallel()
	_, r, _, _, tx := hand(t)
	ctx := t.Context()
	rows, err := tx.Query(ctx, "select generate_series(1, 3)")
	require.NoError(t, err)
	numbers, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	require.Equal(t, []int{1, 2, 3}, numbers)

	var one int
	require.NoError(t, tx.QueryRow(ctx, "select 1").Scan(&one))
	require.ErrorIs(t, tx.QueryRow(ctx, "select 1 where false").Scan(&one), pgx.ErrNoRows)
	var wrong time.Time
	require.Error(t, tx.QueryRow(ctx, "select 'x'").Scan(&wrong))

	batch := &pgx.Batch{}
	batch.Queue("insert into effects values (1)")
	batch.Queue("select n from effects").QueryRow(func(row pgx.Row) error { return row.Scan(&one) })
	require.NoError(t, tx.SendBatch(ctx, batch).Close())
	_, err = tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"n"}, pgx.CopyFromRows([][]any{{int32(2)}, {int32(3)}}))
	require.NoError(t, err)
	require.NoError(t, r.End(t.Context(), true))
	require.NoError(t, r.Commit(ctx, 1))
}

func TestUnitIsDeadAfterItsEnd(t *testing.T) {
	t.Parallel()
	_, r, _, unit, tx := hand(t)
	require.NoError(t, r.End(t.Context(), true))
	_, err := unit.Tx(t.Context())
	require.ErrorIs(t, err, cursor.ErrUnitEnded)
	_, err = tx.Exec(t.Context(), "select 1")
	require.ErrorIs(t, err, cursor.ErrUnitEnded)
	_, err = tx.Begin(t.Context())
	require.ErrorIs(t, err, cursor.ErrUnitEnded)
	require.ErrorIs(t, tx.QueryRow(t.Context(), "select 1").Scan(new(int)), cursor.ErrUnitEnded)
	require.ErrorIs(t, tx.SendBatch(t.Context(), &pgx.Batch{}).Close(), cursor.ErrUnitEnded)
	require.ErrorIs(t, unit.Buffer(flusher{}, 1), cursor.ErrUnitEnded)
	require.NoError(t, r.Commit(t.Context(), 1))
}

type flusher struct{}

func (flusher) Flush(*cursor.Trip, []cursor.Item) error { return nil }

func TestStatementInFlightEndsWithItsRound(t *testing.T) {
	t.Parallel()
	db, r, conn, _, tx := hand(t)
	running := make(chan error)
	go func() {
		_, err := tx.Exec(context.Background(), "insert into effects select 1 from pg_sleep(60)")
		running <- err
	}()
	require.Eventually(t, func() bool {
		return pgtest.Value[int64](t, db, "select count(*) from pg_stat_activity where query like '%pg_sleep(60)' and state = 'active' and datname = current_database()") == 1
	}, 10*time.Second, 5*time.Millisecond)
	require.ErrorIs(t, r.End(t.Context(), false), cursor.ErrUnitBusy)
	r.Rollback(t.Context())
	require.Error(t, <-running)
	require.True(t, conn.IsClosed())
}

func TestSessionSettingOfAHandlerCostsTheConnection(t *testing.T) {
	t.Parallel()
	for statement, closed := range map[string]bool{
		"set search_path = pg_catalog":       true,
		"set role pg_read_all_data":          true,
		"reset all":                          true,
		"set local search_path = pg_catalog": true, // the tag does not tell them apart
		"select 1":                           false,
	} {
		_, r, conn, _, tx := hand(t)
		_, err := tx.Exec(t.Context(), statement)
		require.NoError(t, err)
		require.NoError(t, r.End(t.Context(), true))
		if err := r.Commit(t.Context(), 1); err != nil {
			// Without its rights or its settings the round can't go on.
			require.Contains(t, []string{"set role pg_read_all_data", "reset all"}, statement)
			r.Rollback(t.Context())
		}
		r.Release(t.Context())
		require.Equal(t, closed, conn.IsClosed(), statement)
	}
}

func TestRoundStatesItsIsolationAndLeavesNoSetting(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 1)
	r, conn := prepare(t, db, push)
	_, err := conn.Exec(t.Context(), "set default_transaction_isolation = 'serializable'; set statement_timeout = '12s'")
	require.NoError(t, err)
	o, err := r.Open(t.Context())
	require.NoError(t, err)
	unit := r.Hand(&o.Events[0])
	tx, err := unit.Tx(t.Context())
	require.NoError(t, err)
	var isolation, timeout string
	require.NoError(t, tx.QueryRow(t.Context(), "select current_setting('transaction_isolation'), current_setting('statement_timeout')").Scan(&isolation, &timeout))
	require.Equal(t, "read committed", isolation)
	require.Equal(t, "1min", timeout)
	require.NoError(t, r.End(t.Context(), true))
	require.NoError(t, r.Commit(t.Context(), 1))
	require.NoError(t, conn.QueryRow(t.Context(), "select current_setting('statement_timeout')").Scan(&timeout))
	require.Equal(t, "12s", timeout)
}

func TestFailureRecordedOnTheUnitOutlastsItsAck(t *testing.T) {
	t.Parallel()
	db, r, _, unit, _ := hand(t)
	first := errors.New("first")
	unit.Fail(first)
	unit.Fail(errors.New("second"))
	require.ErrorIs(t, r.End(t.Context(), true), first)
	failedRound(t, db, r)
}

// owner records what its moments in the round see.
type owner struct {
	steps []string
	fail  string
}

func (o *owner) step(name string) error {
	o.steps = append(o.steps, name)
	if o.fail == name {
		return errors.New(name + " failed")
	}
	return nil
}

func (o *owner) Prepare(ctx context.Context, tx pgx.Tx, items []cursor.Item) error {
	if _, err := tx.Exec(ctx, "insert into effects values (1)"); err != nil {
		return err
	}
	return o.step("prepare")
}

func (o *owner) Flush(trip *cursor.Trip, items []cursor.Item) error {
	trip.Queue(nil, "insert into effects values (2)")
	return o.step("flush")
}

func (o *owner) BeforeCommit(context.Context, []cursor.Item) error { return o.step("before commit") }

func TestOwnersOfBufferedValuesHaveThreeMoments(t *testing.T) {
	t.Parallel()
	for _, fail := range []string{"", "prepare", "flush", "before commit"} {
		db, r, _, unit, _ := hand(t)
		o := &owner{fail: fail}
		require.NoError(t, unit.Buffer(o, "value"))
		require.NoError(t, r.End(t.Context(), true))
		err := r.Commit(t.Context(), 1)
		if fail != "" {
			require.ErrorContains(t, err, fail)
			failedRound(t, db, r)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, []string{"prepare", "flush", "before commit"}, o.steps)
		require.Equal(t, []int32{1, 2}, pgtest.Column[int32](t, db, "select n from effects order by 1"))
	}
}
