package watch

import (
	"errors"
	"fmt"
	"time"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// The defaults of [Config].
const (
	DefaultGrace             = 5 * time.Minute
	DefaultMatchNothing      = 24 * time.Hour
	DefaultPendingAlertAfter = 15 * time.Minute
	DefaultTimeout           = 5 * time.Second
)

// Config says what is expected.
type Config struct {
	// Log names the event log. Defaults to the log with the default names.
	Log *cursor.Log

	// Keys are the cursors that have to be there: the closed set that the workers are configured with. One without
	// a row is a problem; a cursor that is not among them is not judged, but named in the report's coverage.
	// Defaults to every cursor that has a row; that a row is missing can not be seen then.
	Keys []cursor.Key

	// Grace is how old work may be before it is a problem that it is not handled. Defaults to 5 minutes.
	Grace time.Duration

	// MatchNothing is over how much of the log's time a consumer may pass events of which none is its own before that
	// is a warning: its topic may be misspelt. Defaults to 24 hours; negative is never.
	MatchNothing time.Duration

	// PendingAlertAfter is after how long somebody is called for work that waits: the number in the alert rule on
	// eventlog_consumer_pending_age_seconds. At least one second, and below what event_retention.keep says (see
	// [Watch.Check]), as the evidence must outlast the stall that it has to expose. Defaults to 15 minutes.
	PendingAlertAfter time.Duration

	// Timeout bounds a look, with the wait for a connection. Defaults to 5 seconds.
	Timeout time.Duration

	// Now replaces the database's clock, in tests. Defaults to none.
	Now func() time.Time
}

func setDefault[T comparable](value *T, to T) {
	var zero T
	if *value == zero {
		*value = to
	}
}

func (c Config) withDefaults() Config {
	setDefault(&c.Grace, DefaultGrace)
	setDefault(&c.MatchNothing, DefaultMatchNothing)
	setDefault(&c.PendingAlertAfter, DefaultPendingAlertAfter)
	setDefault(&c.Timeout, DefaultTimeout)
	return c
}

func (c Config) validate() error {
	var errs []error
	if c.Grace < 0 {
		errs = append(errs, fmt.Errorf("negative Grace (%v)", c.Grace))
	}
	if c.Timeout < 0 {
		errs = append(errs, fmt.Errorf("negative Timeout (%v)", c.Timeout))
	}
	if c.PendingAlertAfter < time.Second {
		errs = append(errs, fmt.Errorf("PendingAlertAfter (%v) is below one second", c.PendingAlertAfter))
	}
	known := map[cursor.Key]bool{}
	for i, key := range c.Keys {
		if err := key.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("key %d (%q): %w", i, key, err))
		}
		if known[key] {
			errs = append(errs, fmt.Errorf("key %d (%q) twice", i, key))
		}
		known[key] = true
	}
	return errors.Join(errs...)
}
