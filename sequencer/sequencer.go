// Package sequencer numbers staged events: those whose appending transaction took no number, so that it waited for no
// other writer. One sequencer at a time works for a log; any number of processes may run one, and stand by.
//
// An event gets its number after its transaction's commit. Nothing else holds it back: neither an older transaction that
// is still open somewhere nor a snapshot. Of two transactions of which one began after the other was committed, the events
// keep that order; of others, and between staged events and those that are not, there is none. What a sequencer does is one statement of the server's, so one that is killed
// or frozen leaves nothing half done, and another one goes on.
package sequencer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Config is for [New].
type Config struct {
	// Log names the event log. Defaults to the log with the default names.
	Log *cursor.Log

	// PollInterval is how long the sequencer waits before it looks again, unless its last batch was full. It is also what
	// an event waits for at most, where the sequencer keeps up. A look that finds nothing writes nothing. Defaults to 50
	// milliseconds.
	PollInterval time.Duration

	// BatchSize is how many events are numbered in one transaction, during which other appends wait. Defaults to 5,000.
	BatchSize int
}

// Sequencer numbers the staged events of one log.
type Sequencer struct {
	db     Database
	config Config
	logger watermill.LoggerAdapter
}

// Database is a pool, or a connection that nobody else uses.
type Database interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// New checks the configuration. It does not connect. A nil logger logs nothing.
func New(db Database, config Config, logger watermill.LoggerAdapter) (*Sequencer, error) {
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	if config.PollInterval == 0 {
		config.PollInterval = 50 * time.Millisecond
	}
	if config.BatchSize == 0 {
		config.BatchSize = 5000
	}
	var errs []error
	if db == nil {
		errs = append(errs, errors.New("missing database"))
	}
	if config.PollInterval < 0 {
		errs = append(errs, fmt.Errorf("negative PollInterval (%v)", config.PollInterval))
	}
	if config.BatchSize < 0 {
		errs = append(errs, fmt.Errorf("negative BatchSize (%d)", config.BatchSize))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("sequencer config: %w", err)
	}
	return &Sequencer{db: db, config: config, logger: logger}, nil
}

// callBound is how long one batch may take. The server goes on with what it is at when the client gives up.
const callBound = time.Minute

// wholeInterval is how often, when there is nothing else to do, everything is looked at: what somebody has changed in the
// outbox by hand may be where no pass looks for it any more.
const wholeInterval = time.Minute

// maxDelay is the longest wait after an error.
const maxDelay = 30 * time.Second

// Run numbers what is staged until ctx ends; then it returns nil. Errors of the database are logged once, where they
// begin and where they end, and tried again for ever with growing delays. It returns an error where the log is not
// migrated, or its functions may not be called by this role.
func (s *Sequencer) Run(ctx context.Context) error {
	var p pass
	var failed error
	var refusal string  // that was logged last
	whole := time.Now() // when a pass looked at everything
	for delay := s.config.PollInterval; ; {
		more, err := s.number(ctx, &p)
		if err == nil && p.refused != nil {
			if refusal != p.refused.Reason {
				s.logger.Error("event log sequencer leaves events", p.refused, watermill.LogFields{"log": s.config.Log.String()})
			}
			refusal, p.refused = p.refused.Reason, nil
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			if failed != nil {
				s.logger.Info("event log sequencer recovered", watermill.LogFields{"log": s.config.Log.String()})
				failed = nil
			}
			delay = s.config.PollInterval
			if !more && time.Since(whole) > wholeInterval || time.Since(whole) > 10*wholeInterval {
				p.since, whole = nil, time.Now()
			}
		case fatal(err):
			return fmt.Errorf("event log sequencer: %w", err)
		default:
			if failed == nil {
				s.logger.Error("event log sequencer failed", err, watermill.LogFields{"log": s.config.Log.String()})
			}
			failed, p = err, pass{}
			delay = min(max(2*delay, 100*time.Millisecond), maxDelay)
		}
		if more {
			continue
		}
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}

// Once numbers everything that is staged and committed when it is called, and returns how many events that were. It
// returns an error where another sequencer is at work ([ErrBusy]), or the log refuses something ([RefusedError]).
func (s *Sequencer) Once(ctx context.Context) (numbered int64, err error) {
	for p := (pass{}); ; {
		more, err := s.number(ctx, &p)
		if err != nil {
			return p.numbered, fmt.Errorf("event log sequencer: %w", err)
		}
		switch {
		case p.stoodBy:
			return p.numbered, ErrBusy
		case p.refused != nil:
			return p.numbered, fmt.Errorf("event log sequencer: %w", p.refused)
		case !more:
			return p.numbered, nil
		}
	}
}

// RefusedError is that the log does not take staged events, which stay in the outbox: their row violates a constraint of
// an existing table that is the log, or there is no partition for their number.
type RefusedError struct {
	Events int    // of the last batch that had any
	Reason string // the server's message for the last of them
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the log refuses %d staged events, which stay in the outbox: %s", e.Events, e.Reason)
}

// ErrBusy is returned when another sequencer is at work.
var ErrBusy = errors.New("another sequencer is numbering staged events")

// pass is how far the sequencer has looked. It is kept in memory alone: a new one begins with everything.
type pass struct {
	since    *string // the snapshot that the pass before began with, as text; nil is none
	seen     *string // the snapshot that this pass began with and ends with
	xid      string  // the last row of this pass
	id       int64
	begun    bool
	stoodBy  bool
	missed   bool          // something was locked
	full     bool          // the partitions are, as far as is known
	refused  *RefusedError // the last batch of which something was
	numbered int64
}

const sqlSequence = `
select q.seen::text, q.taken, coalesce(q.last_xid::text, '0'), coalesce(q.last_id, 0), q.numbered, q.missed, q.refused, coalesce(q.reason, '')
from public.event_outbox_sequence($1::text::pg_snapshot, $2::text::pg_snapshot, $3::text::xid8, $4::bigint, $5::integer) q`

// number numbers one batch, and tells whether there was more.
func (s *Sequencer) number(ctx context.Context, p *pass) (more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	if !p.begun {
		p.seen, p.xid, p.id = nil, "0", 0
	}
	most := s.config.BatchSize
	if p.full {
		most = 1 // a batch that the log does not take costs as much as one that it does
	}
	var seen, xid string
	var taken, missed, refused int
	var id, numbered int64
	var reason string
	// All in one trip: a process that is frozen in the middle holds no lock. And whatever the database's default is,
	// each statement of the function has to see what was committed before it.
	batch := &pgx.Batch{}
	batch.Queue("begin isolation level read committed")
	batch.Queue(s.config.Log.Render(sqlSequence), p.since, p.seen, p.xid, p.id, most)
	batch.Queue("commit")
	results := s.db.SendBatch(ctx, batch)
	if _, err = results.Exec(); err == nil {
		err = results.QueryRow().Scan(&seen, &taken, &xid, &id, &numbered, &missed, &refused, &reason)
	}
	if closed := results.Close(); closed != nil && (err == nil || errors.Is(err, pgx.ErrNoRows)) {
		err = closed
	}
	p.stoodBy = errors.Is(err, pgx.ErrNoRows)
	switch {
	case p.stoodBy:
		return false, nil
	case err != nil:
		return false, err
	}
	p.numbered += numbered
	p.missed = p.missed || missed > 0
	if refused > 0 {
		p.refused = &RefusedError{Events: refused, Reason: reason}
	}
	p.seen = &seen
	switch full := missed > 0 && refused > 0; {
	case full: // what is behind it would be refused as well; the next pass looks at everything
		p.full, p.since, p.begun, p.missed = true, nil, false, false
		return false, nil
	case numbered > 0:
		p.full = false
	}
	if taken == most {
		p.begun, p.xid, p.id = true, xid, id
		return true, nil
	}
	// Whatever this pass's snapshot showed has been numbered.
	p.since, p.begun = p.seen, false
	if p.missed {
		p.since, p.missed = nil, false // the next pass looks at everything
	}
	// What came meanwhile waits for the next poll: many small batches cost the writers more than a few large ones.
	return false, nil
}

func fatal(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return false
	}
	switch pgErr.Code {
	case "42P01", "42883", "3F000", "42501": // undefined table, function, schema; insufficient privilege
		return true
	}
	return false
}
