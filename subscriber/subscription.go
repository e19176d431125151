package subscriber

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

const (
	// settleTime is how long a handler may take to answer once its message's context was cancelled.
	settleTime = time.Second
	// endTime bounds a rollback and the closing of a connection.
	endTime = 5 * time.Second
)

// subscription is one consumer's loop over one topic: round after round until it is stopped.
type subscription struct {
	runner *Runner
	owner  *Subscriber
	config ConsumerConfig
	key    cursor.Key
	out    chan *message.Message
	woken  chan struct{} // one slot: wakes coalesce

	values   context.Context // what Subscribe's context carries, without its end
	started  context.Context // ends with the stop
	stop     context.CancelFunc
	stopping <-chan struct{} // no new round, no new message
	cut      context.Context // ends with the stop budget
	cutOff   context.CancelFunc
	done     chan struct{}

	coveredAt time.Time   // when a round last covered only events of other topics
	standing  *standing   // a failure that could not be written to the database
	bounded   bool        // the last round failed, or found a failure
	held      bool        // by an operator, when it last looked
	quiet     int         // rounds in a row that were tried again without a word
	offered   *time.Timer // the ack deadline of the message in hand
	meter     *roundMeter
}

func newSubscription(ctx context.Context, r *Runner, owner *Subscriber, config ConsumerConfig, key cursor.Key) *subscription {
	s := &subscription{
		runner: r, owner: owner, config: config, key: key,
		out:    make(chan *message.Message),
		woken:  make(chan struct{}, 1),
		values: context.WithoutCancel(ctx),
		done:   make(chan struct{}),
	}
	s.started, s.stop = context.WithCancel(s.values)
	s.stopping = s.started.Done()
	s.cut, s.cutOff = context.WithCancel(s.values)
	s.meter = newRoundMeter(r.meters, r.config.Log, key)
	return s
}

func (s *subscription) stopped() bool {
	select {
	case <-s.stopping:
		return true
	default:
		return false
	}
}

// watchStop starts the stop when Subscribe's context ends, and cuts the handlers off when the budget is over.
func (s *subscription) watchStop(ctx context.Context) {
	select {
	case <-ctx.Done():
		s.stop()
	case <-s.stopping:
	case <-s.done:
		return
	}
	budget := time.NewTimer(s.runner.config.StopBudget)
	defer budget.Stop()
	select {
	case <-budget.C:
		s.cutOff()
	case <-s.done:
	}
}

// next is what a subscription does after a round.
type next struct {
	again bool          // at once
	wait  time.Duration // not before that, but then without a wake
}

func (s *subscription) run() {
	ended := errors.New("its loop ended") // unless it is told why not
	defer func() {
		if v := recover(); v != nil {
			ended = fmt.Errorf("panic outside a handler (%T) in %s", v, panicPlace())
		}
		close(s.out)
		s.cutOff()
		if ended != nil {
			s.runner.fail(fmt.Errorf("event consumer %q: %w", s.key, ended))
		}
		s.runner.remove(s)
		close(s.done)
	}()
	for !s.stopped() {
		n, err := s.turn()
		if err != nil {
			ended = err
			return
		}
		switch {
		case n.again:
		case n.wait > 0:
			timer := time.NewTimer(n.wait)
			select {
			case <-s.stopping:
			case <-timer.C:
			}
			timer.Stop()
		default:
			select {
			case <-s.stopping:
			case <-s.woken:
			}
		}
	}
	ended = nil
}

// panicPlace is the function that panicked, as seen from a deferred function.
func panicPlace() string {
	pcs := make([]uintptr, 32)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs)])
	for {
		frame, more := frames.Next()
		if frame.Function != "runtime.gopanic" && frame.Function != "runtime.panicmem" && frame.Function != "runtime.sigpanic" {
			return fmt.Sprintf("%s (%s:%d)", frame.Function, frame.File, frame.Line)
		}
		if !more {
			return "unknown"
		}
	}
}

// turn makes one round, when a slot is free. Its error ends the subscription.
func (s *subscription) turn() (next, error) {
	s.runner.waiting.Add(1)
	select {
	case s.runner.slots <- struct{}{}:
		s.runner.waiting.Add(-1)
		defer func() { <-s.runner.slots }()
	case <-s.stopping:
		s.runner.waiting.Add(-1)
		return next{}, nil
	}

	s.meter.begin()
	conn, err := s.connection()
	if err != nil {
		return s.unconnected(err), nil
	}
	o, err := s.round(conn)
	if err == nil && o.failed == nil && o.replay && !s.stopped() {
		if conn, err = s.connection(); err != nil {
			return s.unconnected(err), nil
		}
		o, err = s.replay(conn)
	}
	if err != nil || o.failed == nil {
		return o.next, err
	}
	// The round's connection is given back by now: the failure's record takes one of the pool.
	return s.fail(o.failed), nil
}

// unconnected is what comes after a round that had no connection.
func (s *subscription) unconnected(err error) next {
	if s.stopped() {
		return next{}
	}
	return s.fail(&failure{err: err})
}

// connection takes one from the pool.
func (s *subscription) connection() (*pgxpool.Conn, error) {
	// It hears the stop: nothing has begun yet that would have to be finished.
	ctx, cancel := context.WithTimeout(s.started, s.runner.config.ServerBound/2)
	defer cancel()
	conn, err := s.runner.pool.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("take a connection from the pool: %w", err)
	}
	return conn, nil
}
