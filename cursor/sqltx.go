package cursor

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// SQLTx is the unit's transaction for what takes a *[sql.Tx]: code that sqlc has generated for database/sql, an ORM,
// watermill-sql's own publisher. It is the same transaction as that of [Unit.Tx], on the same connection and under the
// same rules; both may be used in turn. Commit and Rollback return [ErrUnitControl], change nothing, and make this handle
// unusable; the next call of SQLTx returns another one. Savepoints are made by their SQL statements. It is dead after the
// message's ack or nack.
//
// Values are as those of pgx's stdlib package. A statement that is prepared is looked at by the server when it runs first.
// ctx is for the wait for the transaction only.
func (u *Unit) SQLTx(ctx context.Context) (*sql.Tx, error) {
	tx, err := u.Tx(ctx)
	if err != nil {
		return nil, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.ended:
		return nil, ErrUnitEnded
	case u.sql != nil && !u.sql.over.Load():
		return u.sql.tx, nil
	case u.sql != nil:
		u.sql.close()
	}
	u.sql, err = openSQL(tx.(*unitTx))
	if err != nil {
		return nil, fmt.Errorf("the unit of work as *sql.Tx: %w", err)
	}
	return u.sql.tx, nil
}

// sqlTx is a *sql.Tx on a database that has the unit for its only connection.
type sqlTx struct {
	db     *sql.DB
	tx     *sql.Tx
	cancel context.CancelFunc
	over   atomic.Bool // it was committed or rolled back: database/sql does not use it any more
}

func openSQL(tx *unitTx) (*sqlTx, error) {
	s := &sqlTx{}
	s.db = sql.OpenDB(&sqlConn{tx: tx, over: &s.over})
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(context.Background())
	var err error
	if s.tx, err = s.db.BeginTx(ctx, nil); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// close does not wait: a statement that is still running ends with its unit.
func (s *sqlTx) close() {
	s.cancel()
	_ = s.db.Close()
}

// sqlConn is a unit as database/sql's driver, connection and transaction in one.
type sqlConn struct {
	tx   *unitTx
	over *atomic.Bool
}

var (
	_ driver.Connector          = (*sqlConn)(nil)
	_ driver.ExecerContext      = (*sqlConn)(nil)
	_ driver.QueryerContext     = (*sqlConn)(nil)
	_ driver.ConnPrepareContext = (*sqlConn)(nil)
	_ driver.ConnBeginTx        = (*sqlConn)(nil)
	_ driver.NamedValueChecker  = (*sqlConn)(nil)
)

func (c *sqlConn) Connect(context.Context) (driver.Conn, error) { return c, nil }
func (c *sqlConn) Driver() driver.Driver                        { return c }
func (c *sqlConn) Open(string) (driver.Conn, error)             { return nil, errNotOpened }
func (c *sqlConn) Close() error                                 { return nil }

var errNotOpened = errors.New("a unit of work is not opened by a name")

// Begin has nothing to do: the unit has begun.
func (c *sqlConn) Begin() (driver.Tx, error)                                    { return c, nil }
func (c *sqlConn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) { return c, nil }

func (c *sqlConn) Commit() error {
	c.over.Store(true)
	return ErrUnitControl
}

func (c *sqlConn) Rollback() error { return c.Commit() }

// CheckNamedValue leaves the values to pgx.
func (c *sqlConn) CheckNamedValue(value *driver.NamedValue) error {
	if value.Name != "" {
		return fmt.Errorf("argument %q: PostgreSQL's parameters have numbers and no names", value.Name)
	}
	return nil
}

func (c *sqlConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	tag, err := c.tx.Exec(ctx, query, plainValues(nil, args)...)
	if err != nil {
		return nil, err
	}
	return driver.RowsAffected(tag.RowsAffected()), nil
}

func (c *sqlConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := c.tx.Query(ctx, query, plainValues([]any{sqlFormats}, args)...)
	if err != nil {
		return nil, err
	}
	// Many errors come with the first row, and database/sql wants them here.
	r := &sqlRows{rows: rows.(*unitRows)}
	if r.ahead = rows.Next(); !r.ahead {
		if err := rows.Err(); err != nil {
			return nil, err
		}
	}
	r.peeked = true
	for _, field := range rows.FieldDescriptions() {
		r.columns = append(r.columns, field.Name)
	}
	return r, nil
}

func plainValues(values []any, args []driver.NamedValue) []any {
	for _, a := range args {
		values = append(values, a.Value)
	}
	return values
}

func (c *sqlConn) Prepare(query string) (driver.Stmt, error) { return &sqlStmt{c, query}, nil }

func (c *sqlConn) PrepareContext(_ context.Context, query string) (driver.Stmt, error) {
	return c.Prepare(query)
}

// sqlStmt is a statement's text: pgx prepares what it runs where its exec mode says so.
type sqlStmt struct {
	conn  *sqlConn
	query string
}

func (s *sqlStmt) Close() error  { return nil }
func (s *sqlStmt) NumInput() int { return -1 }

func (s *sqlStmt) Exec([]driver.Value) (driver.Result, error) { return nil, errWithoutContext }
func (s *sqlStmt) Query([]driver.Value) (driver.Rows, error)  { return nil, errWithoutContext }

var errWithoutContext = errors.New("not called by database/sql where there are calls with a context")

func (s *sqlStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.conn.ExecContext(ctx, s.query, args)
}

func (s *sqlStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.conn.QueryContext(ctx, s.query, args)
}

func (s *sqlStmt) CheckNamedValue(value *driver.NamedValue) error {
	return s.conn.CheckNamedValue(value)
}

// sqlFormats asks for the types that have a Go type of their own in binary; all others come as text.
var sqlFormats = pgx.QueryResultFormatsByOID{
	pgtype.BoolOID: 1, pgtype.ByteaOID: 1, pgtype.CIDOID: 1, pgtype.DateOID: 1, pgtype.Float4OID: 1, pgtype.Float8OID: 1,
	pgtype.Int2OID: 1, pgtype.Int4OID: 1, pgtype.Int8OID: 1, pgtype.OIDOID: 1, pgtype.TimestampOID: 1,
	pgtype.TimestamptzOID: 1, pgtype.XIDOID: 1,
}

type sqlRows struct {
	rows    *unitRows
	columns []string
	peeked  bool
	ahead   bool // what the peek has found
}

func (r *sqlRows) Columns() []string { return r.columns }

func (r *sqlRows) Close() error {
	r.rows.Close()
	return r.rows.Err()
}

func (r *sqlRows) Next(dest []driver.Value) error {
	more := r.ahead
	if !r.peeked {
		more = r.rows.Next()
	}
	r.peeked = false
	if !more {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return io.EOF
	}
	var err error
	types := r.rows.tx.tx.Conn().TypeMap()
	r.rows.read(func() error {
		for i, field := range r.rows.FieldDescriptions() {
			src := r.rows.RawValues()[i]
			if dest[i], err = sqlValue(types, field.DataTypeOID, field.Format, src); err != nil {
				err = fmt.Errorf("read column %q: %w", field.Name, err)
				break
			}
		}
		return nil // the rows stay open
	})
	if r.rows.err != nil {
		return r.rows.err
	}
	return err
}

// sqlValue makes of a column what pgx's stdlib package does.
func sqlValue(types *pgtype.Map, oid uint32, format int16, src []byte) (driver.Value, error) {
	if src == nil {
		return nil, nil
	}
	switch oid {
	case pgtype.BoolOID:
		return scanned[bool](types, oid, format, src)
	case pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID:
		return scanned[int64](types, oid, format, src)
	case pgtype.Float4OID, pgtype.Float8OID:
		return scanned[float64](types, oid, format, src)
	case pgtype.ByteaOID, pgtype.JSONOID, pgtype.JSONBOID, pgtype.XMLOID:
		return scanned[[]byte](types, oid, format, src)
	case pgtype.CIDOID, pgtype.OIDOID, pgtype.XIDOID:
		return valued[pgtype.Uint32](types, oid, format, src)
	case pgtype.DateOID:
		return valued[pgtype.Date](types, oid, format, src)
	case pgtype.TimestampOID:
		return valued[pgtype.Timestamp](types, oid, format, src)
	case pgtype.TimestamptzOID:
		return valued[pgtype.Timestamptz](types, oid, format, src)
	}
	return scanned[string](types, oid, format, src)
}

func scanned[T any](types *pgtype.Map, oid uint32, format int16, src []byte) (driver.Value, error) {
	var value T
	err := types.Scan(oid, format, src, &value)
	return value, err
}

func valued[T driver.Valuer](types *pgtype.Map, oid uint32, format int16, src []byte) (driver.Value, error) {
	var value T
	if err := types.Scan(oid, format, src, &value); err != nil {
		return nil, err
	}
	return value.Value()
}
