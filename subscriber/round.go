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

// round makes one round on a connection and says what comes next. Its error ends the subscription.
func (s *subscription) round(conn *pgxpool.Conn) (next, error) {
	r := cursor.NewRound(conn.Conn(), cursor.RoundConfig{
		Log: s.runner.config.Log, Key: s.key, By: s.runner.config.Instance, ID: s.runner.roundID(),
		Limits: cursor.Limits{Events: s.config.BatchSize, Bytes: s.config.BatchBytes, Cover: s.config.BatchCover},
		Bound:  s.runner.config.ServerBound,
	})
	// Also when something panics: whatever is still open is rolled back, or its connection closed.
	defer s.end(r.Release)

	ctx, cancel := context.WithTimeout(s.cut, s.runner.config.ServerBound)
	opening, err := r.Open(ctx)
	cancel()
	if err != nil {
		s.end(r.Rollback)
		return s.failed(err, span{seq: seqOf(err)}), nil
	}
	switch opening.Status {
	case cursor.Locked:
		s.end(r.Rollback)
		return next{}, nil
	case cursor.Waiting:
		s.end(r.Rollback)
		return next{wait: opening.Wait}, nil
	case cursor.CaughtUp:
		s.end(r.Rollback)
		s.recovered(nil)
		return next{}, nil
	}

	through, handed := opening.Position, 0
	for i := range opening.Events {
		if s.stopped() {
			break
		}
		event := &opening.Events[i]
		err := s.deliver(r, event)
		if errors.Is(err, errWithdrawn) {
			break
		}
		if err != nil {
			s.end(r.Rollback)
			if errors.Is(err, errCut) {
				return next{}, nil
			}
			if errors.Is(err, ErrNoMiddleware) {
				return next{}, err
			}
			n := s.failed(err, span{seq: event.Seq, through: event.Seq})
			// The good events before it need not wait for it.
			n.again = n.again || event.Seq > opening.Position+1
			return n, nil
		}
		through, handed = event.Seq, handed+1
	}
	if handed == len(opening.Events) {
		through = opening.Through
	}

	switch {
	case through == opening.Position: // the stop came first
		s.end(r.Rollback)
		return next{}, nil
	case opening.Status == cursor.Ready && handed == 0 && !opening.Full && opening.Failure == nil && !s.mayCover():
		s.end(r.Rollback)
		return next{}, nil
	}
	ctx, cancel = context.WithTimeout(s.cut, s.runner.config.ServerBound)
	err = r.Commit(ctx, through)
	cancel()
	if err != nil {
		s.end(r.Rollback)
		if s.cut.Err() != nil {
			return next{}, nil
		}
		return s.failed(err, commitSpan(opening, handed)), nil
	}

	if handed == 0 {
		s.coveredAt = time.Now()
	}
	if opening.Status == cursor.Lost {
		s.runner.logger.Error("event consumer lost events to retention", errors.New("events were removed before they were handled"),
			watermill.LogFields{"consumer": s.key.String(), "first_seq": opening.Position + 1, "last_seq": through})
	}
	s.recovered(r.Recovered())
	// A round that a standing failure had bounded says nothing about the end of the log.
	return next{again: opening.Full || opening.Failure != nil || opening.Status == cursor.Lost}, nil
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
	ctx, cancel := context.WithCancel(cursor.ContextWithUnit(s.values, unit))
	defer cancel()
	msg := message.NewMessage(event.UUID, event.Payload)
	msg.Metadata = event.Metadata // read anew for each attempt
	msg.SetContext(ctx)

	deadline := s.deadline()
	defer s.offered.Stop()
	select {
	case s.out <- msg:
	case <-s.stopping:
		_ = r.End(false)
		return errWithdrawn
	case <-deadline:
		_ = r.End(false)
		return &deadlineError{fmt.Sprintf("nobody received event %d within the ack deadline (%v)", event.Seq, s.config.AckDeadline)}
	}

	acked, answered := s.answer(msg, unit, deadline, s.cut.Done())
	if !answered {
		cut := s.cut.Err() != nil
		cancel()
		grace := time.NewTimer(settleTime)
		defer grace.Stop()
		s.answer(msg, unit, grace.C, nil)
		_ = r.End(false)
		if cut {
			return errCut
		}
		return &deadlineError{fmt.Sprintf("the handler of event %d missed the ack deadline (%v)", event.Seq, s.config.AckDeadline)}
	}
	if _, entered := unit.Entered(); !entered && !s.config.WithoutMiddleware && message.HandlerNameFromCtx(msg.Context()) != "" {
		_ = r.End(false)
		return ErrNoMiddleware
	}
	return r.End(acked)
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
	case <-left:
		return acked, true
	case <-deadline:
		return false, false
	case <-cut:
		return false, false
	}
}
