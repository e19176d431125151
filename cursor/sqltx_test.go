package cursor_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

func sqlTx(t *testing.T, unit *cursor.Unit) *sql.Tx {
	t.Helper()
	tx, err := unit.SQLTx(t.Context())
	require.NoError(t, err)
	return tx
}

// queries is what sqlc generates for database/sql.
type queries struct {
	db interface {
		ExecContext(context.Context, string, ...any) (sql.Result, error)
		PrepareContext(context.Context, string) (*sql.Stmt, error)
		QueryContext(context.Context, string, ...any) (*sql.Rows, error)
		QueryRowContext(context.Context, string, ...any) *sql.Row
	}
}

func (q queries) create(ctx context.Context, n int32) (got int32, err error) {
	err = q.db.QueryRowContext(ctx, "insert into effects (n) values ($1) returning n", n).Scan(&got)
	return got, err
}

func (q queries) list(ctx context.Context) (all []int32, err error) {
	rows, err := q.db.QueryContext(ctx, "select n from effects order by n")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var n int32
		if err := rows.Scan(&n); err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	if err := rows.Close(); err != nil {
		return nil, err
	}
	return all, rows.Err()
}

func TestUnitAsSQLTxIsTheSameTransaction(t *testing.T) {
	t.Parallel()
	db, r, conn, unit, tx := hand(t)
	ctx := t.Context()
	q := queries{sqlTx(t, unit)}
	got, err := q.create(ctx, 1)
	require.NoError(t, err)
	require.Equal(t, int32(1), got)
	_, err = tx.Exec(ctx, "insert into effects values (2)") // by pgx, in turn
	require.NoError(t, err)

	insert, err := q.db.PrepareContext(ctx, "insert into effects values ($1)")
	require.NoError(t, err)
	for n := 3; n <= 4; n++ {
		result, err := insert.ExecContext(ctx, n)
		require.NoError(t, err)
		affected, err := result.RowsAffected()
		require.NoError(t, err)
		require.Equal(t, int64(1), affected)
	}
	require.NoError(t, insert.Close())

	// A nested transaction, as ORMs make it.
	_, err = q.db.ExecContext(ctx, "savepoint nested")
	require.NoError(t, err)
	_, err = q.create(ctx, 1)
	require.ErrorContains(t, err, "23505")
	_, err = q.create(ctx, 5)
	require.ErrorContains(t, err, "25P02")
	_, err = q.db.ExecContext(ctx, "rollback to savepoint nested")
	require.NoError(t, err)

	all, err := q.list(ctx)
	require.NoError(t, err)
	require.Equal(t, []int32{1, 2, 3, 4}, all)
	var none int
	require.ErrorIs(t, q.db.QueryRowContext(ctx, "select n from effects where n = 99").Scan(&none), sql.ErrNoRows)
	require.Empty(t, pgtest.Column[int32](t, db, "select n from effects"), "nothing is seen before the commit")

	require.Same(t, sqlTx(t, unit), sqlTx(t, unit), "a unit has one handle")
	require.NoError(t, r.End(ctx, true))
	require.NoError(t, r.Commit(ctx, 1))
	r.Release(ctx)
	require.False(t, conn.IsClosed())
	require.Equal(t, []int32{1, 2, 3, 4}, pgtest.Column[int32](t, db, "select n from effects order by n"))
}

func TestUnitAsSQLTxCannotBeEnded(t *testing.T) {
	t.Parallel()
	db, r, _, unit, _ := hand(t)
	ctx := t.Context()
	for n, end := range []func(*sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback} {
		tx := sqlTx(t, unit)
		_, err := queries{tx}.create(ctx, int32(n))
		require.NoError(t, err)
		require.ErrorIs(t, end(tx), cursor.ErrUnitControl)
		_, err = queries{tx}.create(ctx, 10)
		require.ErrorIs(t, err, sql.ErrTxDone)
		require.Empty(t, pgtest.Column[int32](t, db, "select n from effects"))
		require.NotSame(t, tx, sqlTx(t, unit), "the next one is another")
	}
	require.NoError(t, r.End(ctx, true))
	require.NoError(t, r.Commit(ctx, 1))
	require.Equal(t, []int32{0, 1}, pgtest.Column[int32](t, db, "select n from effects order by n"))
}

func TestUnitAsSQLTxIsDeadAfterItsMessage(t *testing.T) {
	t.Parallel()
	db, r, _, unit, _ := hand(t)
	ctx := t.Context()
	q := queries{sqlTx(t, unit)}
	_, err := q.create(ctx, 1)
	require.NoError(t, err)
	insert, err := q.db.PrepareContext(ctx, "insert into effects values ($1)")
	require.NoError(t, err)
	require.NoError(t, r.End(ctx, true))
	_, err = q.create(ctx, 2)
	require.Error(t, err)
	_, err = insert.ExecContext(ctx, 3)
	require.Error(t, err)
	_, err = unit.SQLTx(ctx)
	require.ErrorIs(t, err, cursor.ErrUnitEnded)
	require.NoError(t, r.Commit(ctx, 1))
	require.Equal(t, []int32{1}, pgtest.Column[int32](t, db, "select n from effects"))
}

func TestRowsThatAreLeftOpenInASQLTxFailTheRound(t *testing.T) {
	t.Parallel()
	db, r, _, unit, tx := hand(t)
	rows, err := sqlTx(t, unit).QueryContext(t.Context(), "select generate_series(1, 100)")
	require.NoError(t, err)
	defer rows.Close()
	require.True(t, rows.Next())
	require.NoError(t, rows.Err())
	_, err = tx.Exec(t.Context(), "insert into effects values (1)")
	require.ErrorIs(t, err, cursor.ErrUnitBusy, "both handles share one guard")
	require.ErrorIs(t, r.End(t.Context(), true), cursor.ErrUnitBusy)
	failedRound(t, db, r)
}

func TestAttemptUndoesWhatASQLTxWrote(t *testing.T) {
	t.Parallel()
	db, r, _, unit, _ := hand(t)
	ctx := t.Context()
	for n := range int32(2) {
		point := begin(t, unit)
		tx := sqlTx(t, unit)
		_, err := queries{tx}.create(ctx, n)
		require.NoError(t, err)
		_ = tx.Rollback() // as handlers defer it
		if n == 0 {
			require.NoError(t, point.Undo(ctx))
			continue
		}
		point.Keep()
	}
	require.NoError(t, r.End(ctx, true))
	require.NoError(t, r.Commit(ctx, 1))
	require.Equal(t, []int32{1}, pgtest.Column[int32](t, db, "select n from effects"))
}

func TestWatermillsOwnPublisherJoinsTheUnit(t *testing.T) {
	t.Parallel()
	db, r, _, unit, _ := hand(t)
	ctx := t.Context()
	for _, q := range (wsql.DefaultPostgreSQLSchema{}).SchemaInitializingQueries("jobs") {
		db.Exec(t, q.Query, q.Args...)
	}
	pub, err := wsql.NewPublisher(sqlTx(t, unit), wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}}, watermill.NopLogger{})
	require.NoError(t, err)
	require.NoError(t, pub.Publish("jobs", message.NewMessage("1", []byte(`{"n": 1}`)), message.NewMessage("2", []byte(`{"n": 2}`))))
	require.Zero(t, pgtest.Value[int](t, db, "select count(*) from watermill_jobs"))
	require.NoError(t, r.End(ctx, true))
	require.NoError(t, r.Commit(ctx, 1))
	require.Equal(t, []string{"1", "2"}, pgtest.Column[string](t, db, `select uuid from watermill_jobs order by "offset"`))
}

// Values are as those of pgx's own driver for database/sql, in every mode of it.
func TestValuesOfASQLTxAreThoseOfTheStandardDriver(t *testing.T) {
	t.Parallel()
	const query = `select true, 1::int2, 2::int4, 3::int8, 1.5::float4, 2.5::float8, '\x00ff'::bytea, 'text'::text, null::int,
		'2024-02-03'::date, '2024-02-03 04:05:06.7'::timestamp, '2024-02-03 04:05:06.7Z'::timestamptz, 'infinity'::timestamptz,
		'{"a": 1}'::json, '{"a": 1}'::jsonb, 12.50::numeric, 'd2b1e8c2-5f3c-4ad5-8b6b-3f6f0f1f2f3f'::uuid, array[1, 2], 7::oid, '1 day'::interval,
		$1::text, $2::bytea, $3::timestamptz`
	args := []any{"a", []byte{0, 1}, time.Date(2024, 1, 2, 3, 4, 5, 0, time.UTC)}
	type querier interface {
		QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	}
	read := func(t *testing.T, q querier) (values []any) {
		rows, err := q.QueryContext(t.Context(), query, args...)
		require.NoError(t, err)
		defer rows.Close()
		columns, err := rows.Columns()
		require.NoError(t, err)
		require.True(t, rows.Next())
		values = make([]any, len(columns))
		into := make([]any, len(columns))
		for i := range values {
			into[i] = &values[i]
		}
		require.NoError(t, rows.Scan(into...))
		require.False(t, rows.Next())
		require.NoError(t, rows.Err())
		return values
	}
	db := logtest.New(t)
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 1)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		config, err := pgx.ParseConfig(db.URL())
		require.NoError(t, err)
		config.DefaultQueryExecMode = mode
		standard := stdlib.OpenDB(*config)
		want := read(t, standard)
		require.NoError(t, standard.Close())

		conn, err := pgx.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		r := cursor.NewRound(conn, cursor.RoundConfig{
			Key: push, By: "test", ID: fmt.Sprint(t.Name(), mode), Bound: time.Minute, Limits: cursor.Limits{Events: 10, Bytes: 1 << 20, Cover: 1000},
		})
		o, err := r.Open(t.Context())
		require.NoError(t, err)
		got := read(t, sqlTx(t, r.Hand(&o.Events[0])))
		require.Equal(t, want, got, mode.String())
		r.Rollback(t.Context())
		require.NoError(t, conn.Close(t.Context()))
	}
}

func TestNamedArgumentsOfASQLTxAreRefused(t *testing.T) {
	t.Parallel()
	_, _, _, unit, _ := hand(t)
	_, err := sqlTx(t, unit).ExecContext(t.Context(), "insert into effects values ($1)", sql.Named("n", 1))
	require.ErrorContains(t, err, `argument "n"`)
}
