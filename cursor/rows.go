package cursor

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// unitRows keeps the connection taken until the rows are closed.
type unitRows struct {
	pgx.Rows
	tx     *unitTx
	within bool // rows of a batch: it stays open after them
	done   bool
	err    error // ours: the unit ended under the rows
}

// call runs f as the only one on the connection. Its rows are closed when f says so; when it panics, they stay
// open, so that the connection is not used again.
func (r *unitRows) call(f func() (closed bool)) {
	s := r.tx.session()
	if err := s.enter(r.tx.unit, true); err != nil {
		r.err, r.done = err, true
		return
	}
	tag, closed := "", false
	var err error
	defer func() { s.leave(!closed || r.within, tag, err) }()
	if closed = f(); closed {
		r.done = true
		tag, err = r.CommandTag().String(), r.Rows.Err()
	}
}

func (r *unitRows) Next() (more bool) {
	if !r.done {
		r.call(func() bool {
			more = r.Rows.Next()
			return !more
		})
	}
	return more
}

func (r *unitRows) Close() {
	if !r.done {
		r.call(func() bool {
			r.Rows.Close()
			return true
		})
	}
}

func (r *unitRows) Scan(dest ...any) (err error) {
	r.read(func() error {
		err = r.Rows.Scan(dest...)
		return err
	})
	if r.err != nil {
		return r.err
	}
	return err
}

func (r *unitRows) Values() (values []any, err error) {
	r.read(func() error {
		values, err = r.Rows.Values()
		return err
	})
	if r.err != nil {
		return nil, r.err
	}
	return values, err
}

// read runs f on a row. pgx closes the rows by itself when it fails.
func (r *unitRows) read(f func() error) {
	if r.done {
		if r.err == nil {
			_ = f() // pgx's own error
		}
		return
	}
	r.call(func() bool { return f() != nil })
}

func (r *unitRows) Err() error {
	if r.err != nil {
		return r.err
	}
	return r.Rows.Err()
}

type unitRow struct {
	rows pgx.Rows
	err  error
}

func (r *unitRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// unitBatch keeps the connection taken until the results are closed.
type unitBatch struct {
	pgx.BatchResults
	tx   *unitTx
	done bool
}

// call runs f on the results as the only one on the connection.
func (b *unitBatch) call(last bool, f func() (tag string, err error)) (err error) {
	s := b.tx.session()
	if err := s.enter(b.tx.unit, true); err != nil {
		return err
	}
	tag, open := "", true
	defer func() { s.leave(open, tag, err) }()
	tag, err = f()
	open, b.done = !last, last
	return err
}

func (b *unitBatch) Exec() (tag pgconn.CommandTag, err error) {
	if b.done {
		return b.BatchResults.Exec() // pgx's own error
	}
	err = b.call(false, func() (string, error) {
		tag, err = b.BatchResults.Exec()
		return tag.String(), err
	})
	return tag, err
}

func (b *unitBatch) Query() (pgx.Rows, error) {
	if b.done {
		return b.BatchResults.Query() // pgx's own error
	}
	var rows pgx.Rows
	err := b.call(false, func() (_ string, err error) {
		rows, err = b.BatchResults.Query()
		return "", err
	})
	switch {
	case rows == nil:
		return failedRows{err}, err
	case err != nil:
		return rows, err
	}
	return &unitRows{Rows: rows, tx: b.tx, within: true}, nil
}

func (b *unitBatch) QueryRow() pgx.Row {
	rows, err := b.Query()
	return &unitRow{rows, err}
}

func (b *unitBatch) Close() error {
	if b.done {
		return b.BatchResults.Close()
	}
	return b.call(true, func() (string, error) { return "", b.BatchResults.Close() })
}

// failedBatch is what SendBatch returns when the unit cannot be used.
type failedBatch struct{ err error }

func (b failedBatch) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, b.err }
func (b failedBatch) Query() (pgx.Rows, error)         { return failedRows(b), b.err }
func (b failedBatch) QueryRow() pgx.Row                { return &unitRow{nil, b.err} }
func (b failedBatch) Close() error                     { return b.err }
func (b failedBatch) Tx() pgx.Tx                       { return nil }

// failedRows is what Query returns when the unit cannot be used.
type failedRows struct{ err error }

func (r failedRows) Close()                                       {}
func (r failedRows) Err() error                                   { return r.err }
func (r failedRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r failedRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (r failedRows) Next() bool                                   { return false }
func (r failedRows) Scan(...any) error                            { return r.err }
func (r failedRows) Values() ([]any, error)                       { return nil, r.err }
func (r failedRows) RawValues() [][]byte                          { return nil }
func (r failedRows) Conn() *pgx.Conn                              { return nil }
func (r failedRows) TypeMap() *pgtype.Map                         { return nil }
