package watch

import (
	"time"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Kind is what sort of problem it is. The list is closed: see [Kinds].
type Kind string

const (
	// Standing is work older than the grace period that waits for a consumer which, for longer than that, could have
	// gone on and did not: it is stopped, frozen, blocked, failing, or was never started. A round that has been going on
	// for longer than that is one, too: nothing of it is done before its commit. Critical.
	Standing Kind = "standing"
	// Behind is work older than the grace period of a consumer that moves: its cursor was moved, or the work was
	// recorded, within the grace period. A warning, however old the work is; the alert on pending age is for that.
	Behind Kind = "behind"
	// CursorMissing is an expected cursor without a row. Critical.
	CursorMissing Kind = "cursor_missing"
	// CursorAhead is a cursor beyond the head of the log, or in a log that was written anew, as after a restore. The
	// consumer stands until an operator moves it. Critical.
	CursorAhead Kind = "cursor_ahead"
	// Gap is a number that is missing from the log behind the cursor: the consumer stands before it, or will within
	// the next hundred events. Critical.
	Gap Kind = "gap"
	// Failing is an event, or a round without one, that fails again and again. A warning within the grace period and
	// while the consumer is paused, critical beyond it.
	Failing Kind = "failing"
	// Losses are events that a consumer was moved past unhandled, until somebody settles them, and events that are
	// gone before it has passed them. Critical.
	Losses Kind = "lost"
	// Parked are events that were set aside because they kept failing. A warning: the others are handled.
	Parked Kind = "parked"
	// Paused is a consumer that an operator has paused while work older than the grace period waits for it, or that
	// was paused for longer than that with any work waiting. A warning; it replaces Standing and Behind.
	Paused Kind = "paused"
	// Retired is a consumer that was retired although it is expected by name. A warning.
	Retired Kind = "retired"
	// NothingWatched is a log without consumers, of which none are expected by name either. A warning.
	NothingWatched Kind = "nothing_watched"
	// MatchesNothing is a consumer that has passed MatchNothing's worth of the log without an event of its own. A warning.
	MatchesNothing Kind = "matches_nothing"
	// RetentionShort is a log that keeps events for no longer than PendingAlertAfter, or does not say how long. A warning.
	RetentionShort Kind = "retention_short"
	// Maintenance is a log whose retention is switched on and whose partitions nobody maintains, for ten minutes or the grace
	// period, if that is longer, or whose maintenance fails for longer than the grace period. It is also a log that has no partition for its next event. Critical: when there
	// are none left ahead, appends fail.
	Maintenance Kind = "maintenance"
	// Pinned is a consumer for which events are kept for longer than the retention. A warning.
	Pinned Kind = "pinned"
	// Staged is a staged event that has waited for its number for longer than the grace period: no sequencer runs, or it
	// fails. Critical.
	Staged Kind = "staged"
	// Standby is a database in recovery, which shows the past: what waits on the primary may not be seen. A warning.
	Standby Kind = "standby"
	// InspectionFailed is a look that could not be taken: nothing is known. Its severity is unknown.
	InspectionFailed Kind = "inspection_failed"
)

// Kinds are all there are.
func Kinds() []Kind {
	return []Kind{Standing, Behind, CursorMissing, CursorAhead, Gap, Failing, Losses, Parked, Paused, Retired, NothingWatched, MatchesNothing,
		RetentionShort, Maintenance, Pinned, Staged, Standby, InspectionFailed}
}

// Problem is one thing that somebody should look at. It stays as long as its cause does.
type Problem struct {
	Kind      Kind       `json:"kind"`
	Severity  Status     `json:"severity"`
	Consumer  string     `json:"consumer,omitempty"` // the cursor's shown name; empty for the log's own problems
	Key       cursor.Key `json:"-"`
	Seq       int64      `json:"seq,omitempty"`        // the event or number that it is about
	Since     time.Time  `json:"since,omitzero"`       // the database's clock, or occurred_at for work that waits
	ErrorType string     `json:"error_type,omitempty"` // Failing, Gap, CursorAhead, CursorMissing, Parked, InspectionFailed
	Summary   string     `json:"summary"`              // what is wrong, in one sentence, without anything of an event's content
	Next      string     `json:"next"`                 // what to do, in one sentence, with the command where there is one
}
