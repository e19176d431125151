package cursor

import (
	"context"
	"fmt"
	"time"
)

// Savepoint is a point in a unit to which its handler can be taken back: see [Unit.Savepoint].
type Savepoint struct {
	unit     *Unit
	buffered int
	taken    bool
}

const (
	sqlSavepoint     = "savepoint eventlog_attempt"
	sqlNextSavepoint = "release savepoint eventlog_attempt; savepoint eventlog_attempt"
	sqlUndo          = "rollback to savepoint eventlog_attempt"
	sqlRelease       = "release savepoint eventlog_attempt"
)

// maxSavepoints is how many attempts with a savepoint a round may have: from the 65th subtransaction of a transaction
// on, everybody's visibility checks get slower.
const maxSavepoints = 60

// undoTime bounds the undoing of an attempt, whose own context may have ended.
const undoTime = 5 * time.Second

// Savepoint begins an attempt: what is written through the unit's transaction and buffered in the unit from here on
// can be undone by Undo. One attempt follows the other; inside of one it is [ErrAttemptTwice].
//
// It costs nothing until the transaction is used; then the savepoint is a trip to the server of its own, before the
// first statement. A round ends after 60 attempts that had one.
func (u *Unit) Savepoint() (*Savepoint, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.ended:
		return nil, ErrUnitEnded
	case u.point != nil:
		return nil, ErrAttemptTwice
	}
	u.point = &Savepoint{unit: u, buffered: len(u.buffered)}
	return u.point, nil
}

// Keep ends the attempt; what it has written and buffered stays part of the unit.
func (p *Savepoint) Keep() { p.end(false) }

// Undo ends the attempt; what it has written and buffered is gone, and a failed transaction is usable again. It does
// not depend on ctx's end. After an error the round fails, as part of the attempt would be committed.
func (p *Savepoint) Undo(ctx context.Context) error {
	if !p.end(true) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	u, s := p.unit, &p.unit.round.session
	err := s.enter(u, false)
	if err == nil {
		_, err = s.conn.Exec(ctx, sqlUndo)
		s.untouched = err == nil
		s.leave(false, "", err)
	}
	if err != nil {
		return fmt.Errorf("undo the attempt: %w", err)
	}
	return nil
}

// end tells whether there is something to undo in the database.
func (p *Savepoint) end(undo bool) (taken bool) {
	u := p.unit
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.point != p {
		return false
	}
	u.point = nil
	if undo {
		clear(u.buffered[p.buffered:])
		u.buffered = u.buffered[:p.buffered]
	}
	return p.taken
}

// wantsSavepoint tells whether there is an attempt that has none yet.
func (u *Unit) wantsSavepoint() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.point != nil && !u.point.taken
}

// takeSavepoint takes the savepoint of the unit's attempt, if it has none yet. Its caller is the only one on the
// connection, and will write.
func (u *Unit) takeSavepoint(ctx context.Context) error {
	s := &u.round.session
	u.mu.Lock()
	p := u.point
	wanted := p != nil && !p.taken
	u.mu.Unlock()
	if wanted && !s.untouched {
		sql := sqlSavepoint
		if s.savepoint {
			sql = sqlNextSavepoint
		}
		if _, err := s.conn.Exec(ctx, sql); err != nil {
			return fmt.Errorf("begin an attempt: %w", err)
		}
		s.savepoint = true
	}
	s.untouched = false
	if wanted {
		s.savepoints++
		u.mu.Lock()
		p.taken = true
		u.mu.Unlock()
	}
	return nil
}

// Exhausted tells whether the round has had as many attempts as one may have: it is to be ended with the events that
// were handled. The unit that was handed out last must have ended.
func (r *Round) Exhausted() bool { return r.begun() && r.session.savepoints >= maxSavepoints }
