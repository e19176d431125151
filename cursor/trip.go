package cursor

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Item is something that was buffered in a unit.
type Item struct {
	Seq     int64 // the event whose handler buffered it
	Ordinal int   // which of all that was buffered for the event, by whomever, from 1; attempts that were undone leave no hole
	Value   any
}

// Flusher is who buffers in units: what it put there comes back to it once per round, when every handler has
// acked. It must be comparable; a pointer is.
type Flusher interface {
	// Flush queues statements for the round's last trip. They run in the unit, before the cursor moves.
	Flush(trip *Trip, items []Item) error
}

// Preparer is a Flusher that needs the transaction itself, before the last trip. It must not end it.
type Preparer interface {
	Flusher
	Prepare(ctx context.Context, tx pgx.Tx, items []Item) error
}

// Relayer is a Flusher that does something outside the database immediately before COMMIT: all statements of
// the round have succeeded by then, and its error still rolls the round back.
type Relayer interface {
	Flusher
	BeforeCommit(ctx context.Context, items []Item) error
}

// Trip is what a round sends at its end, in one round trip.
type Trip struct {
	batch   pgx.Batch
	explain []func(error) error
}

// Queue adds a statement. explain makes an error of the database into one that names the next step; nil
// leaves it as it is.
func (t *Trip) Queue(explain func(error) error, sql string, args ...any) {
	t.batch.Queue(sql, args...)
	t.explain = append(t.explain, explain)
}

func (t *Trip) send(ctx context.Context, conn *pgx.Conn) error {
	_, err := t.sendForTag(ctx, conn)
	return err
}

// sendForTag returns the last statement's command tag.
func (t *Trip) sendForTag(ctx context.Context, conn *pgx.Conn) (string, error) {
	if len(t.explain) == 0 {
		return "", nil
	}
	results := conn.SendBatch(ctx, &t.batch)
	last, err := t.read(results)
	if err != nil {
		_ = results.Close() // repeats the error
		return "", err
	}
	if err := results.Close(); err != nil {
		return "", fmt.Errorf("end of trip: %w", err)
	}
	return last, nil
}

// read reads the results of the statements that were queued, and returns the last one's command tag.
func (t *Trip) read(results pgx.BatchResults) (last string, err error) {
	for i := range t.explain {
		tag, err := results.Exec()
		if err != nil {
			return "", t.explained(i, err)
		}
		last = tag.String()
	}
	return last, nil
}

// explained finds the statement an error belongs to. pgx prepares all statements before it runs the first, and
// then says which one it could not prepare.
func (t *Trip) explained(at int, err error) error {
	var preparing pgx.ErrPreprocessingBatch
	if errors.As(err, &preparing) {
		for i, q := range t.batch.QueuedQueries {
			if q.SQL == preparing.SQL() {
				at = i
				break
			}
		}
	}
	if at >= len(t.explain) {
		return err // of what comes behind the trip
	}
	if explain := t.explain[at]; explain != nil {
		return explain(err)
	}
	return err
}
