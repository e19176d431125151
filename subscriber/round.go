package subscriber

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// errCut ends a round whose handler was still running when the stop budget was over.
var errCut = errors.New("stop budget is over")

// errWithdrawn takes a message back that nobody had received when the stop came.
var errWithdrawn = errors.New("stopped before the message was received")

func (s *subscription) newRound(conn *pgxpool.Conn) *cursor.Round {
	return cursor.NewRound(conn.Conn(), cursor.RoundConfig{
		Log: s.runner.config.Log, Key: s.key, By: s.runner.config.Instance, ID: s.runner.roundID(),
		Limits: cursor.Limits{Events: s.config.BatchSize, Bytes: s.config.BatchBytes, Cover: s.config.BatchCover},
		Bound:  s.runner.config.ServerBound, Record: s.runner.config.RoundsKept, MayStage: s.config.MayStage, ParkAfter: s.config.ParkAfter, ResumeAge: s.config.ResumeAge,
		Bounded: s.bounded, Suspect: s.suspect(), MaxWait: s.config.RetryDelayCap * 5 / 4,
	})
}

// within runs a step of a round within the server's bound and the stop budget.
func within[T any](s *subscription, step func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(s.cut, s.runner.config.ServerBound)
	defer cancel()
	return step(ctx)
}

// outcome is what became of a round.
type outcome struct {
	next            // what comes then
	replay bool     // the replay of a parked event is asked for
	failed *failure // to be recorded when the round's connection is given back
}

// failure is a failed round.
type failure struct {
	err error
	span
	behind bool // there are good events before the failing one
}

func failedAt(err error, at span) outcome { return outcome{failed: &failure{err: err, span: at}} }

// round makes one round on a connection. Its error ends the subscription.
func (s *subscription) round(conn *pgxpool.Conn) (outcome, error) {
	r := s.newRound(conn)
	// Also when something panics: whatever is still open is rolled back, or its connection closed.
	defer func() { s.release(r, conn) }()
	s.meter.begin()

	opening, err := within(s, r.Open)
	if err != nil {
		s.end(r.Rollback)
		return failedAt(err, span{seq: seqOf(err)}), nil
	}
	if opening.Status != cursor.Locked && opening.Status != cursor.Held { // it has looked
		s.bounded = opening.Failure != nil
		s.tellHeld(false)
	}
	switch opening.Status {
	case cursor.Locked:
		s.end(r.Rollback)
		s.meter.locked()
		return outcome{}, nil
	case cursor.Held:
		s.end(r.Rollback)
		s.meter.idle()
		s.tellHeld(true)
		return outcome{}, nil
	case cursor.Waiting:
		s.end(r.Rollback)
		s.meter.idle()
		// It looks again at every poll: an operator may have mended it.
		return outcome{next: next{wait: min(opening.Wait, s.runner.config.PollInterval)}, replay: opening.Replay}, nil
	case cursor.CaughtUp:
		s.end(r.Rollback)
		s.meter.idle()
		s.recovered(s.clearPassed(r))
		return outcome{replay: opening.Replay}, nil
	case cursor.Lost, cursor.Parking:
		return s.commit(r, opening, opening.Through, 0), nil
	}
	if len(opening.Events) == 0 && !opening.Full && opening.Standing() == nil && s.standing == nil && !s.mayCover() {
		s.end(r.Rollback)
		s.meter.idle()
		return outcome{replay: opening.Replay}, nil
	}
	if s.config.ParkAfter > 0 && len(opening.Events) > 0 {
		if err := s.onPool(r.Mark); err != nil {
			s.end(r.Rollback)
			return failedAt(err, span{}), nil
		}
	}

	var before span // what the commit that is under way covers
	var counted tally
	for chained := false; ; chained = true {
		through, handed, err := s.handOut(r)
		committed, begun := r.Await()
		if chained && committed == nil {
			s.meter.commit(counted)
		}
		if committed != nil || begun != nil {
			s.end(r.Rollback)
			switch {
			case committed != nil:
				return failedAt(committed, before), nil
			case errors.Is(begun, cursor.ErrLockLost):
				s.meter.locked()
				return outcome{}, nil
			}
			return failedAt(begun, span{seq: seqOf(begun)}), nil
		}
		opening := r.Opening()
		switch {
		case errors.Is(err, errCut):
			s.giveUp(r)
			return outcome{}, nil
		case errors.Is(err, ErrNoMiddleware):
			s.giveUp(r)
			s.meter.fail(err)
			return outcome{}, err
		case err != nil:
			s.end(r.Rollback)
			at := opening.Events[handed].Seq
			return outcome{failed: &failure{err: err, span: span{seq: at, through: at}, behind: at > opening.Position+1}}, nil
		case through == opening.Position: // the stop came first, or what lies ahead has to be looked at anew
			s.giveUp(r)
			if !s.stopped() {
				s.meter.idle()
			}
			return outcome{next: next{again: !s.stopped()}}, nil
		case !s.mayChain(r, through):
			return s.commit(r, opening, through, handed), nil
		}
		if handed == 0 {
			s.coveredAt = time.Now()
		}
		before, counted = commitSpan(opening, handed), s.meter.tally(r, handed)
		s.meter.begin()
		r = r.Chain(s.cut, s.runner.roundID(), through)
	}
}

// tellHeld logs when an operator's pause or retirement begins and ends to be what a process stands still for.
func (s *subscription) tellHeld(held bool) {
	if held == s.held {
		return
	}
	s.held = held
	fields := watermill.LogFields{"consumer": s.key.String()}
	if held {
		s.runner.logger.Info("event consumer stands still: an operator has paused or retired it", fields)
	} else {
		s.runner.logger.Info("event consumer goes on after its pause", fields)
	}
}

// handOut delivers a round's events, until one fails or the stop comes. Through is what may be committed, handed how
// many events were handled.
func (s *subscription) handOut(r *cursor.Round) (through int64, handed int, err error) {
	opening := r.Opening()
	through = opening.Position
	for handed < len(opening.Events) && !s.stopped() && !r.Exhausted() && !r.Doomed() {
		event := &opening.Events[handed]
		if err := s.deliver(r, event); err != nil {
			if errors.Is(err, errWithdrawn) {
				return through, handed, nil
			}
			return through, handed, err
		}
		through, handed = event.Seq, handed+1
	}
	if handed == len(opening.Events) {
		through = max(through, opening.Through)
	}
	return through, handed, nil
}

// mayChain tells whether the next round may begin with the trip that ends this one: where there is more to do, and
// nobody waits for this round's place.
func (s *subscription) mayChain(r *cursor.Round, through int64) bool {
	return s.standing == nil && !s.stopped() && s.runner.waiting.Load() == 0 && r.CanChain(through)
}

// release makes the round's connection fit for others, or takes it out of the pool.
func (s *subscription) release(r *cursor.Round, conn *pgxpool.Conn) {
	s.end(r.Release)
	if r.Leaked() {
		_ = conn.Hijack()
		s.runner.logger.Error("event consumer left its connection to a handler that does not return",
			errors.New("the handler is still inside its transaction, whose socket was closed"), watermill.LogFields{"consumer": s.key.String()})
		return
	}
	conn.Release()
}

// clearPassed ends a failure that the cursor had passed before it was written down.
func (s *subscription) clearPassed(r *cursor.Round) (passed *cursor.Failure) {
	s.end(func(ctx context.Context) {
		var err error
		if passed, err = r.ClearPassed(ctx); err != nil {
			s.runner.logger.Debug("event consumer left a failure that is over", watermill.LogFields{"consumer": s.key.String(), "err": err})
		}
	})
	return passed
}

// giveUp ends a round that a stop has cut off: nobody died in it.
func (s *subscription) giveUp(r *cursor.Round) {
	s.end(r.Rollback)
	s.end(func(ctx context.Context) {
		if err := r.Unmark(ctx, s.runner.pool); err != nil {
			s.runner.logger.Debug("event consumer left its mark", watermill.LogFields{"consumer": s.key.String(), "err": err})
		}
	})
}

// onPool runs a short step on another connection than the round's.
func (s *subscription) onPool(step func(context.Context, cursor.Querier) error) error {
	ctx, cancel := context.WithTimeout(s.cut, endTime)
	defer cancel()
	return step(ctx, s.runner.pool)
}

// commit ends a round well, up to through, and logs and counts what is news.
func (s *subscription) commit(r *cursor.Round, opening *cursor.Opening, through int64, handed int) outcome {
	_, err := within(s, func(ctx context.Context) (struct{}, error) { return struct{}{}, r.Commit(ctx, through) })
	if err != nil {
		s.end(r.Rollback)
		return failedAt(err, commitSpan(opening, handed))
	}
	counted := s.meter.tally(r, handed)
	fields := watermill.LogFields{"consumer": s.key.String()}
	switch opening.Status {
	case cursor.Lost:
		counted.lost = through - opening.Position
		fields = fields.Add(watermill.LogFields{"first_seq": opening.Position + 1, "last_seq": through})
		if opening.Reason == "resume_age" {
			s.runner.logger.Error("event consumer skipped to the head", errors.New("the events that waited were older than ResumeAge"), fields)
		} else {
			s.runner.logger.Error("event consumer lost events to retention", errors.New("events were removed before they were handled"), fields)
		}
	case cursor.Parking:
		counted.parked = 1
		seq, errorType, attempts := r.Parked()
		fields = fields.Add(watermill.LogFields{"seq": seq, "error.type": errorType, "attempts": attempts})
		why := fmt.Errorf("it failed %d times", attempts)
		if opening.Failure != nil && opening.Failure.Permanent {
			why = errors.New("its error is permanent")
		}
		s.runner.logger.Error("event consumer parked an event", why, fields)
	default:
		if handed == 0 {
			s.coveredAt = time.Now()
		}
	}
	s.meter.commit(counted)
	bounded := opening.Full || through < opening.Through || opening.Failure != nil || opening.Status != cursor.Ready || s.standing != nil
	s.passed(through, r.Recovered())
	// A round that was bounded by something else than the log says nothing about its end.
	return outcome{next: next{again: bounded}, replay: opening.Replay}
}

// replay tries one parked event again, if there is a request. Its error ends the subscription.
func (s *subscription) replay(conn *pgxpool.Conn) (outcome, error) {
	r := s.newRound(conn)
	defer s.release(r, conn)
	s.meter.begin()
	opening, err := within(s, r.OpenReplay)
	if err == nil && opening.Status == cursor.Replaying {
		err = s.onPool(r.TakeReplay)
	}
	if err != nil {
		s.end(r.Rollback)
		return failedAt(err, span{}), nil
	}
	if opening.Status != cursor.Replaying {
		s.end(r.Rollback)
		return outcome{next: next{again: opening.Status == cursor.CaughtUp}}, nil
	}

	event := &opening.Events[0]
	if err = s.deliver(r, event); err == nil {
		_, err = within(s, func(ctx context.Context) (struct{}, error) { return struct{}{}, r.Commit(ctx, opening.Position) })
	}
	fields := watermill.LogFields{"consumer": s.key.String(), "seq": event.Seq}
	if err == nil {
		s.meter.commit(s.meter.tally(r, 1))
		s.runner.logger.Info("event consumer replayed a parked event", fields)
		return outcome{next: next{again: true}}, nil
	}
	s.end(r.Rollback)
	errorType := cursor.ErrorType(err)
	if errors.Is(err, errWithdrawn) || s.cut.Err() != nil {
		errorType = "" // a stop is no failure
	} else {
		s.meter.fail(err)
		s.runner.logger.Error("event consumer failed to replay a parked event", err, fields.Add(watermill.LogFields{"error.type": errorType}))
	}
	s.end(func(ctx context.Context) {
		// Where it cannot be noted, the request is gone and the event still parked.
		if err := r.AnswerReplay(ctx, s.runner.pool, errorType); err != nil {
			s.runner.logger.Debug("event consumer left a replay unanswered", fields.Add(watermill.LogFields{"err": err}))
		}
	})
	if errors.Is(err, ErrNoMiddleware) {
		return outcome{}, err
	}
	return outcome{next: next{again: true}}, nil
}

// mayCover tells whether a round that met only events of other topics may move the cursor: a commit for each
// of other people's events would be dear.
func (s *subscription) mayCover() bool {
	return time.Since(s.coveredAt) >= s.runner.config.PollInterval
}

// end runs the last step of a round within a bound of its own.
func (s *subscription) end(step func(context.Context)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.cut), endTime)
	defer cancel()
	step(ctx)
}

// deadlineError is a handler that took too long.
type deadlineError struct{ what string }

func (e *deadlineError) Error() string     { return e.what }
func (e *deadlineError) ErrorType() string { return "timeout" }

// deliver hands one event out and waits for its ack. When it returns, the event's unit has ended.
func (s *subscription) deliver(r *cursor.Round, event *cursor.Event) error {
	unit := r.Hand(event)
	ctx := &messageContext{values: s.values, unit: unit}
	defer ctx.cancel()
	msg := message.NewMessage(event.UUID, event.Payload)
	msg.Metadata = event.Metadata // read anew for each attempt
	msg.SetContext(ctx)

	deadline := s.deadline()
	defer s.offered.Stop()
	select {
	case s.out <- msg:
	case <-s.stopping:
		_ = r.End(s.cut, false)
		return errWithdrawn
	case <-deadline:
		_ = r.End(s.cut, false)
		return &deadlineError{fmt.Sprintf("nobody received event %d within the ack deadline (%v)", event.Seq, s.config.AckDeadline)}
	}

	acked, answered := s.answer(msg, unit, deadline, s.cut.Done())
	if !answered {
		cut := s.cut.Err() != nil
		ctx.cancel()
		grace := time.NewTimer(settleTime)
		defer grace.Stop()
		s.answer(msg, unit, grace.C, nil)
		_ = r.End(s.cut, false)
		if cut {
			return errCut
		}
		return &deadlineError{fmt.Sprintf("the handler of event %d missed the ack deadline (%v)", event.Seq, s.config.AckDeadline)}
	}
	if _, entered := unit.Entered(); !entered && !s.config.WithoutMiddleware && message.HandlerNameFromCtx(msg.Context()) != "" {
		_ = r.End(s.cut, false)
		return ErrNoMiddleware
	}
	return r.End(s.cut, acked)
}

// deadline is the ack deadline of the next message, on a timer that all messages share.
func (s *subscription) deadline() <-chan time.Time {
	if s.offered == nil {
		s.offered = time.NewTimer(s.config.AckDeadline)
	} else {
		s.offered.Reset(s.config.AckDeadline)
	}
	return s.offered.C
}

// answer waits for the ack or nack and, where the message passed the round middleware, for its handler to
// return: an ack that came early does not end the unit under a handler that is still using it.
func (s *subscription) answer(msg *message.Message, unit *cursor.Unit, deadline <-chan time.Time, cut <-chan struct{}) (acked, answered bool) {
	select {
	case <-msg.Acked():
		acked = true
	case <-msg.Nacked():
	case <-deadline:
		return false, false
	case <-cut:
		return false, false
	}
	left, entered := unit.Entered()
	if !entered {
		return acked, true
	}
	select {
	case <-left: // mostly it has
		return acked, true
	default:
	}
	select {
	case <-left:
		return acked, true
	case <-deadline:
		return false, false
	case <-cut:
		return false, false
	}
}
