package watch

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Status is how bad it is. Its values are in ascending order; unknown is the worst, as anything may be the case.
type Status int

const (
	// OK is that the work is being done.
	OK Status = iota
	// Warning is that somebody should look at it in working hours.
	Warning
	// Critical is that work is not being done, or was lost.
	Critical
	// Unknown is that it could not be found out.
	Unknown
)

func (s Status) String() string { return [...]string{"ok", "warning", "critical", "unknown"}[s] }

// MarshalText makes it "ok", "warning", "critical" or "unknown" in JSON.
func (s Status) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText has written.
func (s *Status) UnmarshalText(text []byte) error {
	for known := OK; known <= Unknown; known++ {
		if known.String() == string(text) {
			*s = known
			return nil
		}
	}
	return fmt.Errorf("status %q is none of ok, warning, critical, unknown", text)
}

// Report is what one look has found. Its JSON form is stable: fields are added, never renamed or removed; moments are
// RFC 3339, ages are seconds, and what is not known is left out.
type Report struct {
	Status    Status     `json:"status"`    // the worst of the problems, ok without any
	At        time.Time  `json:"at"`        // when, on the database's clock; on this process's where the look failed
	Problems  []Problem  `json:"problems"`  // the worst first, never null
	Consumers []Consumer `json:"consumers"` // the expected ones in the order they were given, never null
	Log       *Log       `json:"log,omitempty"`
	Coverage  Coverage   `json:"coverage"`

	// Err is why the look failed. It may name hosts and users; the problem's summary does not.
	Err error `json:"-"`
}

// Log is where the log stands.
type Log struct {
	Head             int64     `json:"head"`                        // the highest committed number
	LowestSeq        int64     `json:"lowest_seq,omitempty"`        // of what is still there; 0 in an empty log
	Events           int64     `json:"events"`                      // from the lowest number to the head, without counting them
	LastRecordedAt   time.Time `json:"last_recorded_at,omitzero"`   // of the newest event that is still there
	RetentionSeconds float64   `json:"retention_seconds,omitempty"` // what event_retention.keep says
	StagedSince      time.Time `json:"staged_since,omitzero"`       // since when the oldest staged event has waited for its number
}

// Coverage is what the look rests on, and what it cannot see.
type Coverage struct {
	// Since is when the oldest event that is still there was recorded, on the database's clock: what happened to older
	// ones cannot be told from the log any more. Left out where the log is empty.
	Since time.Time `json:"since,omitzero"`
	// NotWatched are cursors with a row that are not expected, but for retired ones: nobody looks at them.
	NotWatched []string `json:"not_watched,omitempty"`
	// Limits say in words what cannot be seen.
	Limits []string `json:"limits"`
}

// Consumer is where one cursor stands.
type Consumer struct {
	Name     string `json:"name"` // the shown name
	Consumer string `json:"consumer"`
	Topic    string `json:"topic,omitempty"`
	Shard    string `json:"shard,omitempty"`

	Status   Status `json:"status"`             // the worst of its problems
	Position *int64 `json:"position,omitempty"` // the last event passed; left out without a row
	// Lag is the head minus the position. It is left out where it would mean nothing: without a row, and of a cursor
	// that is ahead.
	Lag *int64 `json:"lag,omitempty"`

	// PendingSeq is the oldest event that waits, PendingSince when it occurred (when it was recorded, if the source's
	// clock was later), and PendingAge how long ago that is. Left out at the head.
	PendingSeq   int64     `json:"pending_seq,omitempty"`
	PendingSince time.Time `json:"pending_since,omitzero"`
	PendingAge   float64   `json:"pending_age_seconds,omitempty"`

	MovedAt    time.Time `json:"moved_at,omitzero"`
	MovedBy    string    `json:"moved_by,omitempty"`    // the instance
	MatchedSeq int64     `json:"matched_seq,omitempty"` // the last event that was its own
	MatchedAt  time.Time `json:"matched_at,omitzero"`
	PausedAt   time.Time `json:"paused_at,omitzero"`
	RetiredAt  time.Time `json:"retired_at,omitzero"` // it is not judged any more
	Failure    *Failure  `json:"failure,omitempty"`
	Parked     int64     `json:"parked"`      // events
	LossesOpen int64     `json:"losses_open"` // events in losses that nobody has settled
}

// Key is the cursor's key.
func (c Consumer) Key() cursor.Key {
	return cursor.Key{Consumer: c.Consumer, Topic: c.Topic, Shard: c.Shard}
}

// Failure is the standing failure of a cursor.
type Failure struct {
	Seq       int64     `json:"seq,omitempty"` // the event in hand or the missing number; left out when it is not known
	Since     time.Time `json:"since"`
	FailedAt  time.Time `json:"failed_at"`
	RetryAt   time.Time `json:"retry_at"` // no attempt before
	Attempts  int       `json:"attempts"`
	ErrorType string    `json:"error_type"`
	FailedBy  string    `json:"failed_by"` // the instance
}

// ExitCode is the report's status as monitoring programs read it: 0 ok, 1 warning, 2 critical, 3 unknown.
func (r Report) ExitCode() int { return int(r.Status) }

// String is the report for people: a line for the whole, then the problems with what to do, then the consumers. It is
// not for programs.
func (r Report) String() string {
	var out strings.Builder
	fmt.Fprintf(&out, "%s at %s", r.Status, r.At.UTC().Format(time.RFC3339))
	if r.Log != nil {
		fmt.Fprintf(&out, ", head %d", r.Log.Head)
	}
	out.WriteString("\n")
	for _, p := range r.Problems {
		fmt.Fprintf(&out, "\n%s: %s\n", p.Severity, p.Kind)
		fmt.Fprintf(&out, "    %s\n    -> %s\n", p.Summary, p.Next)
	}
	if len(r.Consumers) > 0 {
		out.WriteString("\n")
		table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(table, "CONSUMER\tSTATUS\tPOSITION\tLAG\tPENDING\tMOVED")
		for _, c := range r.Consumers {
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", c.Name, c.word(), number(c.Position), number(c.Lag), c.age(), moment(c.MovedAt))
		}
		_ = table.Flush()
	}
	if !r.Coverage.Since.IsZero() {
		fmt.Fprintf(&out, "\nThe log holds evidence since %s.\n", moment(r.Coverage.Since))
	}
	if len(r.Coverage.NotWatched) > 0 {
		fmt.Fprintf(&out, "Not watched: %s\n", strings.Join(r.Coverage.NotWatched, ", "))
	}
	return out.String()
}

// word is a consumer's status in its table.
func (c Consumer) word() string {
	switch {
	case !c.RetiredAt.IsZero():
		return "retired"
	case !c.PausedAt.IsZero() && c.Status == OK:
		return "paused"
	}
	return c.Status.String()
}

func (c Consumer) age() string {
	if c.PendingSince.IsZero() {
		return "-"
	}
	return round(time.Duration(c.PendingAge * float64(time.Second))).String()
}

func number(n *int64) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprint(*n)
}

func moment(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

// round leaves of a duration what a person reads.
func round(d time.Duration) time.Duration {
	if d < time.Minute {
		return d.Round(100 * time.Millisecond)
	}
	return d.Round(time.Second)
}
