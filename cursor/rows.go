package cursor

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// unitRows keeps the connection taken until the rows are closed.
type unitRows struct {
	pgx.Rows
	tx   *unitTx
	done bool
	err  error // ours: the unit ended under the rows
}

func (r *unitRows) Next() bool {
	if r.done {
		return false
	}
	s := r.tx.session()
	if err := s.enter(r.tx.unit, true); err != nil {
		r.err, r.done = err, true
		return false
	}
	more := r.Rows.Next()
	r.leave(!more)
	return more
}

func (r *unitRows) Close() {
	if r.done {
		return
	}
	s := r.tx.session()
	if err := s.enter(r.tx.unit, true); err != nil {
		r.err, r.done = err, true
		return
	}
	r.Rows.Close()
	r.leave(true)
}

func (r *unitRows) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	if err := r.Rows.Scan(dest...); err != nil {
		r.Close() // pgx has closed them by itself
		return err
	}
	return nil
}

func (r *unitRows) Values() ([]any, error) {
	if r.err != nil {
		return nil, r.err
	}
	values, err := r.Rows.Values()
	if err != nil {
		r.Close()
	}
	return values, err
}

func (r *unitRows) Err() error {
	if r.err != nil {
		return r.err
	}
	return r.Rows.Err()
}

func (r *unitRows) leave(closed bool) {
	s := r.tx.session()
	if !closed {
		s.leave(true, "", nil)
		return
	}
	r.done = true
	s.leave(false, r.CommandTag().String(), r.Rows.Err())
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

// within runs a call on the results; an error of one result does not close them.
func (b *unitBatch) within(f func() (tag string, err error)) error {
	s := b.tx.session()
	if err := s.enter(b.tx.unit, true); err != nil {
		return err
	}
	tag, err := f()
	s.leave(true, tag, err)
	return err
}

func (b *unitBatch) Exec() (tag pgconn.CommandTag, err error) {
	err = b.within(func() (string, error) {
		tag, err = b.BatchResults.Exec()
		return tag.String(), err
	})
	return tag, err
}

func (b *unitBatch) Query() (pgx.Rows, error) {
	var rows pgx.Rows
	err := b.within(func() (_ string, err error) {
		rows, err = b.BatchResults.Query()
		return "", err
	})
	if rows == nil {
		return failedRows{err}, err
	}
	return rows, err
}

func (b *unitBatch) QueryRow() pgx.Row {
	rows, err := b.Query()
	return &unitRow{rows, err}
}

func (b *unitBatch) Close() error {
	if b.done {
		return b.BatchResults.Close()
	}
	s := b.tx.session()
	if err := s.enter(b.tx.unit, true); err != nil {
		return err
	}
	b.done = true
	err := b.BatchResults.Close()
	s.leave(false, "", err)
	return err
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
