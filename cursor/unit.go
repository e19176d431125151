package cursor

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
)

// Unit is a handler's part of its round: the event in hand, the transaction without its end, and a buffer
// for what is to be written at the round's end. It is dead after its message's ack or nack; every later use
// is an error.
type Unit struct {
	round   *Round
	event   *Event
	attempt int

	mu       sync.Mutex
	ended    bool
	entered  bool
	returned bool          // what entered has left again
	left     chan struct{} // made when somebody waits for that
	failed   error
	buffered []buffered
	first    [1]buffered // most units have one
	point    *Savepoint  // of the attempt that goes on
	sql      *sqlTx      // where a handler asked for it
}

type buffered struct {
	owner Flusher
	value any
}

type unitKey struct{}

// IsUnitKey tells whether a context is asked for its unit; it is for contexts of other types that carry one.
func IsUnitKey(key any) bool { return key == any(unitKey{}) }

// ContextWithUnit returns a context that carries the unit.
func ContextWithUnit(ctx context.Context, u *Unit) context.Context {
	return context.WithValue(ctx, unitKey{}, u)
}

// UnitFromContext returns the unit of the message that a context belongs to.
func UnitFromContext(ctx context.Context) (*Unit, bool) {
	u, ok := ctx.Value(unitKey{}).(*Unit)
	return u, ok
}

// Event is the event in hand. Its payload and metadata are those of the message.
func (u *Unit) Event() Event { return *u.event }

// Cursor is the key of the cursor that the unit moves.
func (u *Unit) Cursor() Key { return u.round.config.Key }

// Log is the event log that the unit reads.
func (u *Unit) Log() *Log { return u.round.config.Log }

// MayStage tells whether the unit's consumer may append staged events to the log that it reads.
func (u *Unit) MayStage() bool { return u.round.config.MayStage }

// Attempt counts the rounds that tried this event, from 1. It is counted per event and not per process, and
// only while the event keeps failing.
func (u *Unit) Attempt() int { return u.attempt }

// Tx is the unit's transaction. What is written in it is committed with the cursor's new position, or not at
// all. It can't be ended: Commit and Rollback on it return [ErrUnitControl]; Begin makes a savepoint. It is
// for one goroutine at a time, and rows must be closed before the next statement; otherwise it returns
// [ErrUnitBusy] and the round fails.
//
// The events of a round share their transaction: now() is the same for all of them, and what lives to the
// transaction's end (a cursor, a table ON COMMIT DROP) is there for the next one.
//
// A raw COMMIT or ROLLBACK sent as a statement is found out when the message is acked, and fails the round,
// but what a raw COMMIT has committed stays. A statement that may change the session itself (SET, PREPARE,
// LISTEN, DECLARE, CREATE …) costs the connection after the round, so that nobody else inherits it, and
// search_path and role are put back before the next event. What set_config and pg_advisory_lock do, and what is
// done through Conn() and LargeObjects(), is not noticed.
//
// Where there is more to do than one batch, Tx may wait until the round before is committed; it returns an error if that failed.
func (u *Unit) Tx(ctx context.Context) (pgx.Tx, error) {
	if p := u.round.pending; p != nil {
		select {
		case <-p.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if err := errors.Join(p.committed, p.begun); err != nil {
			return nil, fmt.Errorf("the unit of work did not begin: %w", err)
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ended {
		return nil, ErrUnitEnded
	}
	u.round.used = true // read by the round once the unit has ended
	return &unitTx{tx: u.round.tx, unit: u, root: true}, nil
}

// Buffer keeps a value until the round ends; then its owner's Flush gets it, if the message was acked. What
// is buffered in a unit that fails is dropped.
func (u *Unit) Buffer(owner Flusher, value any) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ended {
		return ErrUnitEnded
	}
	if u.buffered == nil {
		u.buffered = u.first[:0]
	}
	u.buffered = append(u.buffered, buffered{owner, value})
	return nil
}

// Fail makes the unit's round fail, whatever becomes of the message. The first error stays.
func (u *Unit) Fail(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.failed == nil {
		u.failed = err
	}
}

// Enter is for the round middleware: from here on the message's handler is running, and an ack before Leave
// does not end the unit.
func (u *Unit) Enter() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.ended:
		return ErrUnitEnded
	case u.entered:
		return ErrEnteredTwice
	}
	u.entered = true
	return nil
}

// Leave is for the round middleware: the handler has returned, with this error or nil.
func (u *Unit) Leave(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.failed == nil {
		u.failed = err
	}
	u.returned = true
	if u.left != nil {
		close(u.left)
	}
}

// Entered tells whether the message passed the round middleware. The channel is closed once its handler has
// returned.
func (u *Unit) Entered() (left <-chan struct{}, entered bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case !u.entered:
		return nil, false
	case u.returned:
		return alreadyLeft, true
	case u.left == nil:
		u.left = make(chan struct{})
	}
	return u.left, true
}

var alreadyLeft = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Returned tells whether the message passed the round middleware and its handler has returned: what is
// published now was returned by the handler.
func (u *Unit) Returned() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.returned
}

// Err is [ErrUnitEnded] once the unit has ended.
func (u *Unit) Err() error {
	if !u.alive() {
		return ErrUnitEnded
	}
	return nil
}

// end returns what was buffered, and the failure that was recorded.
func (u *Unit) end() ([]buffered, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.ended = true
	if u.sql != nil {
		u.sql.close()
	}
	return u.buffered, u.failed
}

func (u *Unit) alive() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return !u.ended
}
