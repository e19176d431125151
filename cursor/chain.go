package cursor

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// pending is a trip that commits a round and begins the next one. It runs beside the handlers of the next one.
type pending struct {
	done      chan struct{}
	committed error  // why the predecessor did not commit
	begun     error  // why the round itself did not begin
	now       *batch // what the round hands out, where it was not read ahead
	ahead     *batch // what its successor will hand out
	beside    bool   // something stands beside the cursor
}

// ErrLockLost is returned when somebody else took, moved or paused the cursor between two chained rounds. An everyday outcome.
var ErrLockLost = errors.New("the cursor's lock was lost between two rounds")

// CanChain tells whether the round may be ended by [Round.Chain]: all of a full batch was handled, and nothing
// stands in the way.
func (r *Round) CanChain(through int64) bool {
	o := &r.opening
	if o.Status != Ready || !o.Full || through != o.Through || o.Failure != nil || o.Replay || o.beside || r.config.ParkAfter > 0 || r.config.ResumeAge > 0 {
		return false
	}
	if r.pending != nil && r.ahead == nil {
		return false // what lies ahead does not follow, or nothing does
	}
	for _, owner := range r.owners {
		if _, ok := owner.(Preparer); ok {
			return false
		}
		if _, ok := owner.(Relayer); ok {
			return false
		}
	}
	return !r.session.spoiled()
}

// Chain ends the round as [Round.Commit] does, and begins the next one in the same trip, which runs on while the
// next round's events are handed out: they were read ahead. The next round is returned at once. Nothing of it
// commits unless this one has, its lock was taken again, and the cursor is where the events were read for: [Round.Await]
// tells, and must have returned nil before the next round is ended in its turn. A handler that asks for the
// transaction waits for the trip.
//
// The round must be one that CanChain. It must not be used any more.
func (r *Round) Chain(ctx context.Context, id string, through int64) *Round {
	next := &Round{conn: r.conn, config: r.config, text: r.text, tx: r.tx, pending: &pending{done: make(chan struct{})}}
	next.config.ID = id
	next.session.init(r.conn)
	next.opening = Opening{Status: Ready, Position: through}

	// Two batches are held at once.
	position, limits := through, r.config.Limits
	limits.Bytes = max(1, limits.Bytes/2)
	first := r.ahead == nil
	if first {
		limits.Events *= 2
	} else {
		next.opening.set(*r.ahead)
		position = r.ahead.through
	}
	ctx, cancel := context.WithTimeout(ctx, r.config.Bound)
	results, trip := r.sendChain(ctx, next, through, position, limits)
	read := func() {
		defer cancel()
		defer close(next.pending.done)
		if results == nil {
			return
		}
		b, err := next.readChain(results, trip, position, limits)
		switch {
		case err != nil:
		case first:
			now, ahead := b.split(r.config.Limits.Events)
			next.pending.now, next.pending.ahead = &now, ahead
		case b.through > 0:
			next.pending.ahead = &b
		}
	}
	if first {
		read() // there is nothing to hand out meanwhile
		next.settle()
	} else {
		go read()
	}
	return next
}

// settle takes over what the trip has found. What stands beside the cursor is looked at after this round.
func (r *Round) settle() {
	p := r.pending
	if p.now != nil && p.now.through > 0 {
		r.opening.set(*p.now)
	}
	p.now, r.ahead = nil, p.ahead
	r.opening.beside = p.beside
}

// sendChain sends the end of one round and the beginning of the next. It returns when all is sent, so that the server is
// at it before the first handler runs. No results are returned where nothing was sent; why is in next.pending.
func (r *Round) sendChain(ctx context.Context, next *Round, through, position int64, limits Limits) (pgx.BatchResults, *Trip) {
	trip, err := r.lastTrip(through)
	if err != nil {
		next.pending.committed, next.pending.begun = err, err
		return nil, nil
	}
	trip.Queue(explainCommit, "commit")
	trip.batch.Queue("begin isolation level read committed")
	next.queueLock(&trip.batch)
	sql, args := next.readAhead(position, limits)
	trip.batch.Queue(sql, args...)
	return r.conn.SendBatch(ctx, &trip.batch), trip
}

// readChain reads what sendChain was answered, and returns the batch that was read. What went wrong is in r.pending.
func (r *Round) readChain(results pgx.BatchResults, trip *Trip, position int64, limits Limits) (b batch, err error) {
	p := r.pending
	defer func() {
		if closeErr := results.Close(); err == nil && closeErr != nil {
			p.begun, err = closeErr, closeErr
		}
	}()
	// The COMMIT's own answer decides the old round, whatever becomes of what comes behind it.
	tag, err := trip.read(results)
	if err == nil {
		err = checkCommit(tag)
	}
	if p.committed, p.begun = err, err; err != nil {
		return b, err
	}
	b, p.begun = r.readBegin(results, position, limits)
	return b, p.begun
}

// readBegin reads the results of a chained round's beginning.
func (r *Round) readBegin(results pgx.BatchResults, position int64, limits Limits) (batch, error) {
	found, err := r.readLock(results)
	switch {
	case err != nil:
		return batch{}, err
	case !found.locked:
		return batch{}, ErrLockLost
	case found.held:
		return batch{}, fmt.Errorf("%w: somebody paused the consumer", ErrLockLost)
	case found.position != r.opening.Position:
		return batch{}, fmt.Errorf("%w: somebody moved the cursor", ErrLockLost)
	}
	r.pending.beside = found.beside
	rows, _ := results.Query()
	return r.takeBatch(rows, position, limits)
}

// begun tells whether the round's transaction has begun, and may be looked at.
func (r *Round) begun() bool {
	if r.pending == nil {
		return true
	}
	select {
	case <-r.pending.done:
		return true
	default:
		return false
	}
}

// Doomed tells whether a chained round is known not to have begun: nothing of it can be committed, and what else is handed out
// will come again. [Round.Await] tells why.
func (r *Round) Doomed() bool {
	return r.pending != nil && r.begun() && (r.pending.committed != nil || r.pending.begun != nil)
}

func (r *Round) wait() {
	if r.pending != nil {
		<-r.pending.done
	}
}

// Await returns when a chained round has begun, and why its predecessor did not commit, or why the round itself did
// not begin. Of a round that is not chained both are nil.
func (r *Round) Await() (committed, begun error) {
	r.wait()
	if r.pending == nil {
		return nil, nil
	}
	r.settle()
	return r.pending.committed, r.pending.begun
}

// Opening is what the round found. That of a round that was chained to its first successor is whole only after
// Await.
func (r *Round) Opening() *Opening { return &r.opening }
