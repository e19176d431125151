package middleware

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

const scope = "github.com/watermill-eventlog/watermill-eventlog/middleware"

// RoundConfig is for [NewRound].
type RoundConfig struct {
	// Logger gets a line at debug level for each failed attempt, as the consumer's own log has one error line where a
	// failure begins and one info line where it ends. Defaults to none.
	Logger watermill.LoggerAdapter

	// MeterProvider is what handlers are measured by: eventlog.handler.duration, with the middlewares inside this one.
	// Defaults to OpenTelemetry's global one; while that exports nothing, nothing is measured.
	MeterProvider metric.MeterProvider
}

// Round is [Capture], [Recover] and [Carry] in their order, and measures the handlers.
//
//	router.AddMiddleware(middleware.Round(logger)) // before every other middleware
//
// It is [NewRound] with the defaults. A nil logger logs nothing.
func Round(logger watermill.LoggerAdapter) message.HandlerMiddleware {
	meter, err := newHandlerMeter(otel.GetMeterProvider())
	if err != nil {
		otel.Handle(err) // a round does not depend on being measured
	}
	return round(logger, meter)
}

// NewRound is [Round] by a configuration. It fails only where the meter provider does.
func NewRound(config RoundConfig) (message.HandlerMiddleware, error) {
	if config.MeterProvider == nil {
		config.MeterProvider = otel.GetMeterProvider()
	}
	meter, err := newHandlerMeter(config.MeterProvider)
	if err != nil {
		return nil, err
	}
	return round(config.Logger, meter), nil
}

func round(logger watermill.LoggerAdapter, meter *handlerMeter) message.HandlerMiddleware {
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			unit, ok := cursor.UnitFromContext(msg.Context())
			if !ok {
				return h(msg)
			}
			return capture(logger, meter, unit, msg, h, true)
		}
	}
}

// Capture records the handler's error on the unit of work, so that the round fails with its true cause, and
// gives the router an error that it does not log. It also tells the round when the handler is running: an
// ack that comes before the handler's return waits for it.
func Capture(logger watermill.LoggerAdapter) message.HandlerMiddleware {
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			unit, ok := cursor.UnitFromContext(msg.Context())
			if !ok {
				return h(msg)
			}
			return capture(logger, nil, unit, msg, h, false)
		}
	}
}

// capture is Capture and, when all is asked for, Recover and Carry: in one function, because the router handles each
// message in a new goroutine, whose stack is small.
func capture(
	logger watermill.LoggerAdapter, meter *handlerMeter, unit *cursor.Unit, msg *message.Message, h message.HandlerFunc, all bool,
) (produced []*message.Message, err error) {
	if err := unit.Enter(); err != nil {
		unit.Fail(err)
		return nil, quiet(err)
	}
	started := meter.start()
	failed, returned := errExited, false
	defer func() {
		if !returned && all {
			if v := recover(); v != nil {
				failed, returned = &PanicError{Kind: fmt.Sprintf("%T", v), Place: panicPlace()}, true
				logFailed(logger, unit, failed)
				produced, err = nil, quiet(failed)
			}
		}
		if started != 0 {
			meter.recordUnit(unit, started, failed)
		}
		unit.Leave(failed)
		if !returned {
			msg.Nack() // the router never hears of this message again
		}
	}()
	produced, failed = h(msg)
	returned = true
	if failed == nil {
		failed = unanswerable(msg, unit, produced)
	}
	if failed != nil {
		logFailed(logger, unit, failed)
		return nil, quiet(failed)
	}
	if all {
		carry(unit, produced)
	}
	return produced, nil
}

func logFailed(logger watermill.LoggerAdapter, unit *cursor.Unit, err error) {
	logger.Debug("event handler failed", watermill.LogFields{"consumer": unit.Cursor().String(), "seq": unit.Event().Seq, "err": err})
}

// unanswerable tells why nothing can come of a handler's success: it nacked its message by itself, acked it before
// what it returned could be published, or its unit ended meanwhile, as after a missed deadline.
func unanswerable(msg *message.Message, unit *cursor.Unit, produced []*message.Message) error {
	if slices.Contains(produced, nil) {
		return errNilMessage
	}
	select {
	case <-msg.Nacked():
		return cursor.ErrNacked
	case <-msg.Acked():
		if len(produced) > 0 {
			return cursor.ErrAckedEarly
		}
	default:
	}
	return unit.Err()
}

var errNilMessage = errors.New("the handler returned a nil message")

// errExited is a handler that ended its goroutine (runtime.Goexit, as a test's FailNow does) or panicked with
// nobody to recover it.
var errExited error = &ExitError{}

// ExitError is a handler that neither returned nor panicked.
type ExitError struct{}

func (*ExitError) Error() string {
	return "the handler ended its goroutine (runtime.Goexit) or panicked"
}

// ErrorType is "internal".
func (*ExitError) ErrorType() string { return "internal" }

// quietError is an error that the router takes for the end of a stop, which it does not log.
type quietError struct{ cause error }

func quiet(cause error) error { return &quietError{cause} }

func (e *quietError) Error() string        { return e.cause.Error() }
func (e *quietError) Unwrap() error        { return e.cause }
func (e *quietError) Is(target error) bool { return target == context.Canceled }

// Recover makes a handler's panic a [PanicError].
func Recover(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (produced []*message.Message, err error) {
		defer func() {
			if v := recover(); v != nil {
				produced, err = nil, &PanicError{Kind: fmt.Sprintf("%T", v), Place: panicPlace()}
			}
		}()
		return h(msg)
	}
}

// PanicError is a handler's panic. The value is not kept, as it may hold secrets; its type and the place are.
type PanicError struct {
	Kind  string // the type of the panic's value
	Place string // function, file and line
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic (%s) in %s", e.Kind, e.Place) }

// ErrorType is "internal".
func (*PanicError) ErrorType() string { return "internal" }

// panicPlace is the innermost frame outside the runtime, as seen from a deferred function.
func panicPlace() string {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs)])
	for {
		frame, more := frames.Next()
		if !strings.HasPrefix(frame.Function, "runtime.") {
			return fmt.Sprintf("%s (%s:%d)", frame.Function, frame.File, frame.Line)
		}
		if !more {
			return "unknown"
		}
	}
}

// Carry gives the unit of work to the messages that a handler returns, so that a publisher finds it: a
// message made in the usual way has no context, and a copy loses it. The unit is taken before the handler
// runs, as middlewares inside may leave a cancelled context behind.
func Carry(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		unit, ok := cursor.UnitFromContext(msg.Context())
		produced, err := h(msg)
		if !ok {
			return produced, err
		}
		carry(unit, produced)
		return produced, err
	}
}

func carry(unit *cursor.Unit, produced []*message.Message) {
	for _, m := range produced {
		if m != nil {
			m.SetContext(cursor.ContextWithUnit(m.Context(), unit))
		}
	}
}
