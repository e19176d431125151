package subscriber

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// span is what a failed round covered.
type span struct {
	seq     int64 // the event or number that failed; 0 when it is not known
	through int64 // what has to be passed for the failure to be over; 0 when nothing was read
	batch   int   // without a seq: how many events the next round may hand out
}

// seqOf is the number that an error of a round's beginning belongs to, or 0.
func seqOf(err error) int64 {
	var gap *cursor.GapError
	var unreadable *cursor.UnreadableError
	switch {
	case errors.As(err, &gap):
		return gap.Seq
	case errors.As(err, &unreadable):
		return unreadable.Seq
	}
	return 0
}

// commitSpan is the span of a round whose flush or commit failed: the event that makes it fail is found by
// halving the batch until it is alone.
func commitSpan(o *cursor.Opening, handed int) span {
	switch handed {
	case 0:
		return span{through: o.Through}
	case 1:
		return span{seq: o.Events[0].Seq, through: o.Events[0].Seq}
	}
	return span{through: o.Events[handed-1].Seq, batch: handed / 2}
}

// standing is a failure that this process remembers because it could not be written down.
type standing struct {
	seq       int64
	errorType string
	since     time.Time
	attempts  int
}

// suspect is the event that this process remembers to have failed, or 0.
func (s *subscription) suspect() int64 {
	if s.standing == nil {
		return 0
	}
	return s.standing.seq
}

// fail notes a failed round, logs it where it is news, and says when to try again. It needs a connection of the
// pool, if it can have one.
func (s *subscription) fail(f *failure) next {
	if s.cut.Err() != nil {
		return next{} // the stop ended it; that is no failure
	}
	s.bounded = true
	s.meter.fail(f.err)
	if s.retriedQuietly(f.err) {
		return next{wait: s.config.RetryDelay}
	}
	attempt := cursor.Attempt{
		Seq: f.seq, Through: max(f.through, f.seq), Batch: f.batch, ErrorType: cursor.ErrorType(f.err), Permanent: cursor.IsPermanent(f.err),
		Delay: s.config.RetryDelay, DelayCap: s.config.RetryDelayCap, Jitter: 0.75 + rand.Float64()/2,
	}
	if errors.Is(f.err, cursor.ErrCursorAhead) {
		attempt.Through = math.MaxInt64 // nothing passes it but an operator
	}
	// Without a number there is nothing that a passing cursor could clear: remember it here.
	if attempt.Through > 0 {
		ctx, cancel := context.WithTimeout(s.cut, endTime)
		recorded, outcome, writeErr := cursor.RecordFailure(ctx, s.runner.pool, s.runner.config.Log, s.key, s.runner.config.Instance, attempt)
		cancel()
		switch {
		case writeErr == nil && outcome == cursor.Passed:
			return next{wait: s.config.RetryDelay}
		case writeErr == nil:
			s.standing = nil
			s.logFailure(f.err, recorded, outcome == cursor.Edge)
			if n := s.config.ParkAfter; n > 0 && f.seq > 0 && (recorded.Permanent || recorded.Attempts >= n) {
				return next{again: true} // it will be parked
			}
			// The good events before it need not wait for it; and who waits looks again at every poll.
			return next{again: f.behind, wait: min(recorded.Wait, s.runner.config.PollInterval)}
		}
		s.runner.logger.Debug("event consumer cannot record its failure", watermill.LogFields{"consumer": s.key.String(), "err": writeErr})
	}
	edge := s.standing == nil || s.standing.seq != f.seq || s.standing.errorType != attempt.ErrorType
	if edge {
		s.standing = &standing{seq: f.seq, errorType: attempt.ErrorType, since: time.Now()}
	}
	s.standing.attempts++
	s.logFailure(f.err, cursor.Failure{Seq: f.seq, ErrorType: attempt.ErrorType, Attempts: s.standing.attempts}, edge)
	delay := min(s.config.RetryDelayCap, s.config.RetryDelay<<min(s.standing.attempts-1, 20))
	if f.seq == 0 { // it is not an event that fails, but what all depend on
		delay = min(delay, s.runner.config.PollInterval)
	}
	return next{wait: time.Duration(float64(delay) * attempt.Jitter)}
}

// maxQuiet is how often in a row a round is tried again without a word.
const maxQuiet = 5

// retriedQuietly tells whether an error is one that PostgreSQL's users have to expect, and try again: a
// serialization failure or a deadlock.
func (s *subscription) retriedQuietly(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "40001" && pgErr.Code != "40P01" || s.quiet >= maxQuiet {
		return false
	}
	s.quiet++
	s.runner.logger.Debug("event consumer round is tried again", watermill.LogFields{"consumer": s.key.String(), "err": err})
	return true
}

func (s *subscription) logFailure(err error, f cursor.Failure, edge bool) {
	fields := watermill.LogFields{"consumer": s.key.String(), "error.type": f.ErrorType, "attempts": f.Attempts}
	if f.Seq != 0 {
		fields["seq"] = f.Seq
	}
	if edge {
		s.runner.logger.Error("event consumer round failed", err, fields)
		return
	}
	s.runner.logger.Debug("event consumer round failed again", fields.Add(watermill.LogFields{"err": err}))
}

// passed logs the end of a failure, if the cursor has passed it.
func (s *subscription) passed(through int64, f *cursor.Failure) {
	s.quiet = 0
	if f != nil || s.standing != nil && s.standing.seq <= through {
		s.recovered(f)
	}
}

// recovered logs the end of a failure: of the one whose row a unit has deleted, or of the one that this
// process remembers.
func (s *subscription) recovered(f *cursor.Failure) {
	remembered := s.standing
	s.standing, s.quiet = nil, 0
	switch {
	case f != nil:
		s.logRecovery(f.Since, f.Attempts, f.Seq)
	case remembered != nil:
		s.logRecovery(remembered.since, remembered.attempts, remembered.seq)
	}
}

func (s *subscription) logRecovery(since time.Time, attempts int, seq int64) {
	fields := watermill.LogFields{
		"consumer": s.key.String(), "failing_for": time.Since(since).Round(time.Millisecond).String(), "attempts": attempts,
	}
	if seq != 0 {
		fields["seq"] = seq
	}
	s.runner.logger.Info("event consumer recovered", fields)
}
