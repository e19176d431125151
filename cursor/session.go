package cursor

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// session guards a round's connection against its handlers: a pgx connection is for one caller at a time, and
// using it from two goroutines is a data race.
type session struct {
	conn *pgx.Conn

	mu      sync.Mutex
	calling bool          // somebody is inside pgx
	quiet   chan struct{} // closed when calling becomes false
	open    bool          // rows or batch results are not closed
	closed  bool
	leaked  bool  // somebody stays inside pgx
	altered bool  // a handler may have changed what outlasts the transaction
	changed bool  // since the last restore
	cause   error // the first error of the aborted transaction

	// Of the attempts. They are touched by whoever is inside pgx, and by the round when nobody is.
	savepoint  bool // one stands
	untouched  bool // nothing was written since it was taken
	savepoints int  // how many attempts had one
}

func (s *session) init(conn *pgx.Conn) {
	s.conn = conn
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
	s.calling, s.quiet = true, make(chan struct{})
	return nil
}

// leave ends a call. open tells whether rows stay open.
func (s *session) leave(open bool, tag string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calling, s.open = false, open
	close(s.quiet)
	if first, _, _ := strings.Cut(tag, " "); sessionTags[first] {
		s.altered, s.changed = true, true
	}
	switch {
	case s.conn.PgConn().TxStatus() != 'E':
		s.cause = nil
	case s.cause == nil && err != nil:
		s.cause = err
	}
}

// sessionTags begin the command tags of statements whose effect may outlast the transaction.
var sessionTags = map[string]bool{
	"SET": true, "RESET": true, "DISCARD": true, "LISTEN": true, "UNLISTEN": true, "LOAD": true,
	"PREPARE": true, "DEALLOCATE": true, "DECLARE": true, "CREATE": true, // a temporary table
}

// sessionStatement finds such statements in a text, where their tags are not to be had.
var sessionStatement = regexp.MustCompile(`(?i)(^|;)\s*(set|reset|discard|listen|unlisten|load|prepare|deallocate|declare|create)\s`)

// sent notes a text whose command tags will not all be seen.
func (s *session) sent(sql string) {
	if sessionStatement.MatchString(sql) {
		s.mu.Lock()
		s.altered, s.changed = true, true
		s.mu.Unlock()
	}
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

// takeChanged tells whether there is something to restore, and takes it as done.
func (s *session) takeChanged() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := s.changed
	s.changed = false
	return changed
}

func (s *session) spoiled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calling || s.open || s.altered
}

// abandon closes the connection. A statement that is still running on it is ended by closing the socket below it;
// only when its caller is out of pgx may the connection itself be touched. A caller that stays in pgx (a CopyFrom
// whose source blocks, say) is waited for until ctx ends; then the connection is left to it, see [Round.Leaked].
func (s *session) abandon(ctx context.Context) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	calling, quiet := s.calling, s.quiet
	s.mu.Unlock()
	if calling {
		_ = s.conn.PgConn().Conn().Close()
		select {
		case <-quiet:
		case <-ctx.Done():
			s.mu.Lock()
			s.leaked = true
			s.mu.Unlock()
			return
		}
	}
	_ = s.conn.Close(ctx)
}

// unitTx is a unit's transaction as its handler sees it.
type unitTx struct {
	tx   pgx.Tx
	unit *Unit
	root bool
}

func (t *unitTx) session() *session { return &t.unit.round.session }

// enter begins a call that may write: in an attempt, its savepoint comes first.
func (t *unitTx) enter(ctx context.Context) error {
	s := t.session()
	if err := s.enter(t.unit, false); err != nil {
		return err
	}
	err := t.unit.takeSavepoint(ctx)
	if err != nil {
		s.leave(false, "", err)
	}
	return err
}

// call runs f as the only one on the connection.
func (t *unitTx) call(ctx context.Context, f func() (tag string, err error)) error {
	if err := t.enter(ctx); err != nil {
		return err
	}
	s := t.session()
	var tag string
	var err error
	defer func() { s.leave(false, tag, err) }()
	tag, err = f()
	return err
}

func (t *unitTx) Begin(ctx context.Context) (pgx.Tx, error) {
	var nested pgx.Tx
	err := t.call(ctx, func() (_ string, err error) {
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
	return t.call(ctx, func() (string, error) { return "", t.tx.Commit(ctx) })
}

func (t *unitTx) Rollback(ctx context.Context) error {
	if t.root {
		return ErrUnitControl
	}
	return t.call(ctx, func() (string, error) { return "", t.tx.Rollback(ctx) })
}

func (t *unitTx) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	if strings.Contains(sql, ";") {
		t.session().sent(sql) // only the last tag is seen
	}
	err = t.call(ctx, func() (string, error) {
		tag, err = t.tx.Exec(ctx, sql, args...)
		return tag.String(), err
	})
	return tag, err
}

func (t *unitTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (n int64, err error) {
	err = t.call(ctx, func() (string, error) {
		n, err = t.tx.CopyFrom(ctx, table, columns, src)
		return "", err
	})
	return n, err
}

func (t *unitTx) Prepare(ctx context.Context, name, sql string) (d *pgconn.StatementDescription, err error) {
	err = t.call(ctx, func() (string, error) {
		d, err = t.tx.Prepare(ctx, name, sql)
		return "", err
	})
	return d, err
}

func (t *unitTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.enter(ctx); err != nil {
		return failedRows{err}, err
	}
	s := t.session()
	open := true // also when something panics: then the connection is not used again
	var err error
	defer func() { s.leave(open, "", err) }()
	var rows pgx.Rows
	rows, err = t.tx.Query(ctx, sql, args...)
	open = err == nil
	return &unitRows{Rows: rows, tx: t, done: !open}, err
}

func (t *unitTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := t.Query(ctx, sql, args...)
	return &unitRow{rows, err}
}

func (t *unitTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if err := t.enter(ctx); err != nil {
		return failedBatch{err}
	}
	s := t.session()
	for _, q := range b.QueuedQueries {
		s.sent(q.SQL)
	}
	defer s.leave(true, "", nil)
	return &unitBatch{BatchResults: t.tx.SendBatch(ctx, b), tx: t}
}

// LargeObjects and Conn hand out what lies below the guard.
func (t *unitTx) LargeObjects() pgx.LargeObjects {
	t.touch()
	return t.tx.LargeObjects()
}

func (t *unitTx) Conn() *pgx.Conn {
	t.touch()
	return t.tx.Conn()
}

// touch takes an attempt's savepoint before something that is not seen. An error shows at the next statement.
func (t *unitTx) touch() {
	if t.unit.wantsSavepoint() {
		_ = t.call(context.Background(), func() (string, error) { return "", nil })
	}
}
