package cursor

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// session guards a round's connection against its handlers: a pgx connection is for one caller at a time, and
// using it from two goroutines is a data race.
type session struct {
	conn *pgx.Conn

	mu      sync.Mutex
	settled sync.Cond // calling has become false
	calling bool      // somebody is inside pgx
	open    bool      // rows or batch results are not closed
	closed  bool
	altered bool  // a handler changed the session itself
	cause   error // the first error of the aborted transaction
}

func (s *session) init(conn *pgx.Conn) {
	s.conn = conn
	s.settled.L = &s.mu
}

// enter begins a call into pgx by a unit. within is true for calls on rows that are already open.
func (s *session) enter(u *Unit, within bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed, !u.alive():
		return ErrUnitEnded
	case s.calling, s.open && !within:
		u.Fail(ErrUnitBusy)
		return ErrUnitBusy
	}
	s.calling = true
	return nil
}

// leave ends a call. open tells whether rows stay open.
func (s *session) leave(open bool, tag string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calling, s.open = false, open
	switch tag {
	case "SET", "RESET", "LISTEN", "DISCARD ALL":
		s.altered = true
	}
	switch {
	case s.conn.PgConn().TxStatus() != 'E':
		s.cause = nil
	case s.cause == nil && err != nil:
		s.cause = err
	}
	s.settled.Broadcast()
}

// seal ends a unit: once it has returned, no call by the unit begins.
func (s *session) seal(u *Unit) ([]buffered, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return u.end()
}

// state tells what a handler has made of the transaction. The unit must have ended.
func (s *session) state(u *Unit, acked bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calling || s.open {
		return ErrUnitBusy
	}
	if s.conn.IsClosed() {
		return fmt.Errorf("the connection was lost while event %d was handled", u.event.Seq)
	}
	if !acked {
		return nil
	}
	switch s.conn.PgConn().TxStatus() {
	case 'T':
		return nil
	case 'E':
		cause := s.cause
		if cause == nil {
			cause = errors.New("a statement failed")
		}
		return fmt.Errorf("the handler of event %d acked although its transaction had failed: %w", u.event.Seq, cause)
	}
	s.altered = true
	return fmt.Errorf("the handler of event %d ended the transaction by a statement of its own: %w", u.event.Seq, ErrUnitControl)
}

// settle reports whether the connection can be used by the round itself.
func (s *session) settle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.calling && !s.open && !s.closed && !s.conn.IsClosed()
}

func (s *session) spoiled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calling || s.open || s.altered
}

// abandon closes the connection. A statement that is still running on it is ended by closing the socket
// below it; only when its caller is out of pgx may the connection itself be touched.
func (s *session) abandon(ctx context.Context) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	if s.calling {
		_ = s.conn.PgConn().Conn().Close()
	}
	for s.calling {
		s.settled.Wait()
	}
	s.mu.Unlock()
	_ = s.conn.Close(ctx)
}

// unitTx is a unit's transaction as its handler sees it.
type unitTx struct {
	tx   pgx.Tx
	unit *Unit
	root bool
}

func (t *unitTx) session() *session { return &t.unit.round.session }

// call runs f as the only one on the connection.
func (t *unitTx) call(f func() (tag string, err error)) error {
	s := t.session()
	if err := s.enter(t.unit, false); err != nil {
		return err
	}
	var tag string
	var err error
	defer func() { s.leave(false, tag, err) }()
	tag, err = f()
	return err
}

func (t *unitTx) Begin(ctx context.Context) (pgx.Tx, error) {
	var nested pgx.Tx
	err := t.call(func() (_ string, err error) {
		nested, err = t.tx.Begin(ctx)
		return "", err
	})
	if err != nil {
		return nil, err
	}
	return &unitTx{tx: nested, unit: t.unit}, nil
}

func (t *unitTx) Commit(ctx context.Context) error {
	if t.root {
		return ErrUnitControl
	}
	return t.call(func() (string, error) { return "", t.tx.Commit(ctx) })
}

func (t *unitTx) Rollback(ctx context.Context) error {
	if t.root {
		return ErrUnitControl
	}
	return t.call(func() (string, error) { return "", t.tx.Rollback(ctx) })
}

func (t *unitTx) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	err = t.call(func() (string, error) {
		tag, err = t.tx.Exec(ctx, sql, args...)
		return tag.String(), err
	})
	return tag, err
}

func (t *unitTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (n int64, err error) {
	err = t.call(func() (string, error) {
		n, err = t.tx.CopyFrom(ctx, table, columns, src)
		return "", err
	})
	return n, err
}

func (t *unitTx) Prepare(ctx context.Context, name, sql string) (d *pgconn.StatementDescription, err error) {
	err = t.call(func() (string, error) {
		d, err = t.tx.Prepare(ctx, name, sql)
		return "", err
	})
	return d, err
}

func (t *unitTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	s := t.session()
	if err := s.enter(t.unit, false); err != nil {
		return failedRows{err}, err
	}
	rows, err := t.tx.Query(ctx, sql, args...)
	guarded := &unitRows{Rows: rows, tx: t}
	if err != nil {
		guarded.done = true
		s.leave(false, "", err)
		return guarded, err
	}
	s.leave(true, "", nil)
	return guarded, nil
}

func (t *unitTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := t.Query(ctx, sql, args...)
	return &unitRow{rows, err}
}

func (t *unitTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	s := t.session()
	if err := s.enter(t.unit, false); err != nil {
		return failedBatch{err}
	}
	results := t.tx.SendBatch(ctx, b)
	s.leave(true, "", nil)
	return &unitBatch{BatchResults: results, tx: t}
}

// LargeObjects and Conn hand out what lies below the guard.
func (t *unitTx) LargeObjects() pgx.LargeObjects { return t.tx.LargeObjects() }

func (t *unitTx) Conn() *pgx.Conn { return t.tx.Conn() }
