package cursor_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// trips counts what is sent to the server.
type trips struct{ n int }

func (c *trips) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n++
	return ctx
}
func (c *trips) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func begin(t *testing.T, unit *cursor.Unit) *cursor.Savepoint {
	t.Helper()
	point, err := unit.Savepoint()
	require.NoError(t, err)
	return point
}

func TestUndoneAttemptLeavesNothingAndACleanTransaction(t *testing.T) {
	t.Parallel()
	db, r, _, unit, tx := hand(t)
	ctx := t.Context()
	insert := func(n int) error {
		_, err := tx.Exec(ctx, "insert into effects values ($1)", n)
		return err
	}
	kept, dropped := &recorder{}, &recorder{}
	require.NoError(t, unit.Buffer(kept, "before"))
	require.NoError(t, insert(1))

	point := begin(t, unit)
	require.NoError(t, insert(2))
	require.NoError(t, unit.Buffer(dropped, "in the attempt"))
	require.NoError(t, unit.Buffer(kept, "in the attempt"))
	require.Error(t, insert(1)) // violates: from here on everything is refused
	require.Error(t, insert(3))
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	require.NoError(t, point.Undo(canceled), "it does not depend on the handler's context")
	require.NoError(t, insert(4))

	point = begin(t, unit)
	require.NoError(t, insert(5))
	require.NoError(t, unit.Buffer(kept, "in the next attempt"))
	point.Keep()
	require.NoError(t, point.Undo(ctx), "it has ended")

	require.NoError(t, r.End(ctx, true))
	require.NoError(t, r.Commit(ctx, 1))
	require.Equal(t, []int32{1, 4, 5}, pgtest.Column[int32](t, db, "select n from effects order by n"))
	require.Equal(t, []any{"before", "in the next attempt"}, kept.values)
	require.Empty(t, dropped.values)
}

// recorder is a Flusher that notes what it gets.
type recorder struct{ values []any }

func (f *recorder) Flush(_ *cursor.Trip, items []cursor.Item) error {
	for _, item := range items {
		f.values = append(f.values, item.Value)
	}
	return nil
}

func TestAttemptInsideAnotherOneIsRefused(t *testing.T) {
	t.Parallel()
	_, _, _, unit, _ := hand(t)
	point := begin(t, unit)
	_, err := unit.Savepoint()
	require.ErrorIs(t, err, cursor.ErrAttemptTwice)
	require.Equal(t, "internal", cursor.ErrorType(err))
	point.Keep()
	begin(t, unit)
}

func TestAttemptCostsATripOnlyWhereTheTransactionIsUsed(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := logtest.New(t)
	db.Exec(t, "create table effects (n int unique)")
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 1)
	sent := &trips{}
	config, err := pgx.ParseConfig(db.URL())
	require.NoError(t, err)
	config.Tracer = sent
	conn, err := pgx.ConnectConfig(ctx, config)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	r := cursor.NewRound(conn, cursor.RoundConfig{
		Key: push, By: "test", ID: t.Name(), Bound: time.Minute, Limits: cursor.Limits{Events: 10, Bytes: 1 << 20, Cover: 1000},
	})
	o, err := r.Open(ctx)
	require.NoError(t, err)
	unit := r.Hand(&o.Events[0])
	tx, err := unit.Tx(ctx)
	require.NoError(t, err)
	insert := func(n int) {
		t.Helper()
		_, err := tx.Exec(ctx, "insert into effects values ($1)", n)
		require.NoError(t, err)
	}
	count := func(want int, why string, f func()) {
		t.Helper()
		sent.n = 0
		f()
		require.Equal(t, want, sent.n, why)
	}
	count(0, "an attempt that does nothing", func() { begin(t, unit).Keep() })
	count(3, "savepoint and two statements", func() {
		point := begin(t, unit)
		insert(1)
		insert(2)
		point.Keep()
	})
	count(3, "savepoint, statement, rollback", func() {
		point := begin(t, unit)
		insert(3)
		require.NoError(t, point.Undo(ctx))
	})
	count(1, "the savepoint that was rolled back to still stands", func() {
		point := begin(t, unit)
		insert(4)
		point.Keep()
	})
	require.NoError(t, r.End(ctx, true))
	require.NoError(t, r.Commit(ctx, 1))
}

func TestConnectionThatIsHandedOutIsPartOfTheAttempt(t *testing.T) {
	t.Parallel()
	db, r, _, unit, tx := hand(t)
	point := begin(t, unit)
	_, err := tx.Conn().Exec(t.Context(), "insert into effects values (1)")
	require.NoError(t, err)
	require.NoError(t, point.Undo(t.Context()))
	require.NoError(t, r.End(t.Context(), true))
	require.NoError(t, r.Commit(t.Context(), 1))
	require.Empty(t, pgtest.Column[int32](t, db, "select n from effects"))
}

func TestAttemptThatLeavesRowsOpenFailsItsRound(t *testing.T) {
	t.Parallel()
	db, r, _, unit, tx := hand(t)
	point := begin(t, unit)
	_, err := tx.Query(t.Context(), "select generate_series(1, 100)")
	require.NoError(t, err)
	require.ErrorIs(t, point.Undo(t.Context()), cursor.ErrUnitBusy)
	require.ErrorIs(t, r.End(t.Context(), true), cursor.ErrUnitBusy)
	failedRound(t, db, r)
}
