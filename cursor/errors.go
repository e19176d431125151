package cursor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

var (
	// ErrConsumerGap is returned when a number is missing from the log (see [GapError]). The consumer stands
	// still until the number appears; it never guesses.
	ErrConsumerGap = errors.New("consumer gap")

	// ErrCursorAhead is returned when a cursor is beyond the head of the log, as after a restore. Nothing is
	// delivered or skipped until an operator moves the cursor.
	ErrCursorAhead = errors.New("cursor ahead of the log")

	// ErrCursorMissing is returned when a cursor that is on record as created has no row.
	ErrCursorMissing = errors.New("cursor row missing")

	// ErrCursorMoved is returned when the cursor is not where the round had locked it, or the transaction
	// was ended below the round: by a raw COMMIT or ROLLBACK of the handler, or by somebody who writes the
	// cursors table without its lock.
	ErrCursorMoved = errors.New("cursor is not where the round had locked it")

	// ErrNotMigrated is returned when the log's tables are not there.
	ErrNotMigrated = errors.New("event log is not migrated")

	// ErrUnitEnded is returned when a unit is used after its message was acked or nacked.
	ErrUnitEnded = errors.New("unit of work has ended: its message was acked, nacked or given up")

	// ErrUnitBusy is returned when a unit's transaction is used by two at once, or while rows are open.
	ErrUnitBusy = errors.New("unit of work is in use: close rows before the next statement, and use it from one goroutine at a time")

	// ErrUnitControl is returned when a handler tries to end its unit's transaction.
	ErrUnitControl = errors.New("a unit of work is ended by its round: use a savepoint (Begin) for work that may be undone")

	// ErrNoUnit is returned when there is no unit of work in a context that has to have one.
	ErrNoUnit = errors.New("no unit of work in the message's context")

	// ErrNacked is returned when a handler nacked its message without saying why.
	ErrNacked = errors.New("message was nacked")

	// ErrAckedEarly is returned when a message was acked before its handler returned messages: they would be
	// published after the end of their unit.
	ErrAckedEarly = errors.New("the message was acked before its handler returned messages to publish: let the router ack " +
		"(the InstantAck middleware cannot be used with a unit of work)")

	// ErrEnteredTwice is returned when a message passes the round middleware a second time.
	ErrEnteredTwice = errors.New("the round middleware was entered twice for one message: add it once, to the router, before every other middleware")
)

// ErrAttemptTwice is returned when an attempt begins inside another one of the same unit.
var ErrAttemptTwice = errors.New("an attempt was begun inside another one of the same message: add the attempt middleware once, " +
	"inside of what repeats the handler or swallows its error")

// codeRefusedAppend is what the outbox's check and the log's trigger raise when a consumer appends to the log that it reads.
const codeRefusedAppend = "EL001"

// ErrConsumerAppends is returned when a handler appends to the log that its consumer reads.
var ErrConsumerAppends = errors.New("a consumer may not append to the log that it reads: publish a job from the handler, " +
	"and append to the log in the handler of the job")

// GapError says which number of the log is in the way. It is an [ErrConsumerGap].
type GapError struct {
	Seq    int64
	Reason string
}

func (e *GapError) Error() string {
	return fmt.Sprintf("consumer gap at seq %d: %s", e.Seq, e.Reason)
}

// Is makes a GapError an ErrConsumerGap.
func (e *GapError) Is(target error) bool { return target == ErrConsumerGap }

// ErrorType is "consumer_gap".
func (e *GapError) ErrorType() string { return "consumer_gap" }

// UnreadableError is an event of the log that cannot be read.
type UnreadableError struct {
	Seq int64 // 0 when not even that could be read
	Err error
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("event %d cannot be read: %v", e.Seq, e.Err)
}
func (e *UnreadableError) Unwrap() error { return e.Err }

// AheadError says how a cursor is beyond the log. It is an [ErrCursorAhead].
type AheadError struct {
	Position int64
	Head     int64 // 0 when the head has caught up since
}

func (e *AheadError) Error() string {
	found := fmt.Sprintf("the log's head is %d", e.Head)
	if e.Head == 0 {
		found = "the log's tail was lost and written anew"
	}
	return fmt.Sprintf("cursor at seq %d is ahead of the log: %s; was the database restored? move the cursor to where this "+
		"consumer should go on (operate.Seek, or eventlog seek)", e.Position, found)
}

// Is makes an AheadError an ErrCursorAhead.
func (e *AheadError) Is(target error) bool { return target == ErrCursorAhead }

// ErrorType is "cursor_ahead".
func (e *AheadError) ErrorType() string { return "cursor_ahead" }

// ErrorType classes an error for logs, metrics and records: what the error says of itself
// (ErrorType() string), the SQLSTATE, "cursor_missing", "timeout", "canceled", or "_OTHER". It is at most 64 bytes
// of printable ASCII; an error whose ErrorType panics is "internal".
func ErrorType(err error) (class string) {
	defer func() {
		if recover() != nil {
			class = "internal"
		}
		class = strings.Map(func(r rune) rune {
			if r <= ' ' || r > '~' {
				return '_'
			}
			return r
		}, class)
		if class = class[:min(len(class), 64)]; class == "" {
			class = "_OTHER"
		}
	}()
	var typed interface{ ErrorType() string }
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &typed):
		return typed.ErrorType()
	case errors.As(err, &pgErr) && pgErr.Code == codeRefusedAppend:
		return "internal"
	case errors.As(err, &pgErr):
		return pgErr.Code
	case errors.Is(err, ErrCursorMissing):
		return "cursor_missing"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, context.Canceled):
		return "canceled"
	case errors.Is(err, ErrUnitBusy), errors.Is(err, ErrUnitControl), errors.Is(err, ErrCursorMoved), errors.Is(err, ErrEnteredTwice),
		errors.Is(err, ErrConsumerAppends), errors.Is(err, ErrAckedEarly), errors.Is(err, ErrAttemptTwice):
		return "internal"
	}
	return "_OTHER"
}
