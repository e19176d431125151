package middleware

import (
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Attempt makes each call of a handler an attempt of its own: when it fails or panics, what it wrote through its unit
// of work is undone, and what it published is dropped, whether it was returned or buffered. It is for middlewares that
// call a handler more than once or swallow its error, as Watermill's Retry, PoisonQueue and IgnoreErrors do, and stands
// inside of them:
//
//	router.AddMiddleware(middleware.Round(logger), poisonQueue, retry.Middleware, middleware.Attempt)
//
// What those do after a failed attempt, such as publishing the poisoned message by [cursor.Unit], finds a transaction
// in which the attempt never was. What the handler did outside of the unit stays done.
//
// An attempt that uses the unit's transaction takes a savepoint, one trip to the server before its first statement; a
// round ends after 60 of them, so a larger BatchSize is of no use. An attempt that does not is free.
//
// Where an attempt cannot be undone, as when a statement's context ended and pgx has closed the connection, the round
// fails. A pool whose connections have pgx's CancelRequestContextWatcherHandler keeps them.
func Attempt(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		// Taken now: what is inside may leave an other context behind.
		ctx := msg.Context()
		unit, ok := cursor.UnitFromContext(ctx)
		if !ok {
			return h(msg)
		}
		point, err := unit.Savepoint()
		if err != nil {
			unit.Fail(err)
			return nil, err
		}
		failed := errExited
		defer func() {
			if failed == nil {
				point.Keep()
				return
			}
			if msg.Metadata == nil {
				msg.Metadata = message.Metadata{} // PoisonQueue sets some
			}
			if err := point.Undo(ctx); err != nil {
				unit.Fail(errors.Join(failed, err))
			}
		}()
		produced, err := h(msg)
		if failed = err; failed != nil {
			return nil, failed
		}
		return produced, nil
	}
}
