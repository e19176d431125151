package publisher_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/sequencer"
)

const (
	writers      = 50
	transactions = 12 // of each writer
)

// writer appends in all the ways there are and remembers what it has committed. Payloads are
// "writer/transaction/step".
type writer struct {
	id        int
	pool      *pgxpool.Pool
	pgx, pq   *sql.DB
	events    *publisher.EventLog
	staged    bool
	random    *rand.Rand
	committed []string
}

func (w *writer) payload(transaction, step int) string {
	return fmt.Sprintf("%d/%d/%d", w.id, transaction, step)
}

// pause is work between append and commit.
func (w *writer) pause() { time.Sleep(time.Duration(w.random.IntN(10)) * time.Millisecond) }

var errUndone = errors.New("undone on purpose")

func (w *writer) run(ctx context.Context) error {
	for n := range transactions {
		var payloads []string
		for step := range 1 + w.random.IntN(3) {
			payloads = append(payloads, w.payload(n, step))
		}
		undo := w.random.IntN(10) == 0
		var err error
		switch w.random.IntN(7) {
		case 0:
			err = w.inPgxTx(ctx, payloads, undo)
		case 1:
			err = w.inSQLTx(ctx, w.pgx, payloads, undo)
		case 2:
			err = w.inSQLTx(ctx, w.pq, payloads, undo)
		case 3:
			err = w.bySQL(ctx, payloads, undo)
		case 4:
			err = w.byCopy(ctx, payloads, undo)
		case 5:
			err = w.byTrigger(ctx, payloads, undo)
		case 6:
			undo = false
			for _, p := range payloads {
				m := msg(p)
				m.SetContext(ctx)
				err = errors.Join(err, w.events.Publish("orders", m))
			}
		}
		if undo != errors.Is(err, errUndone) || err != nil && !undo {
			return fmt.Errorf("writer %d: %w", w.id, err)
		}
		if !undo {
			w.committed = append(w.committed, payloads...)
		}
	}
	return nil
}

// begin runs f in a transaction that is undone in the end if it should be.
func (w *writer) begin(ctx context.Context, undo bool, f func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if err := f(tx); err != nil {
			return err
		}
		w.pause()
		if undo {
			return errUndone
		}
		return nil
	})
}

func (w *writer) inPgxTx(ctx context.Context, payloads []string, undo bool) error {
	return w.begin(ctx, undo, func(tx pgx.Tx) error {
		for _, p := range payloads {
			if err := w.events.InTx(tx).Publish("orders", msg(p)); err != nil {
				return err
			}
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if err := w.events.InTx(nested).Publish("orders", msg("undone by a savepoint")); err != nil {
				return err
			}
			if err := nested.Rollback(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

func (w *writer) inSQLTx(ctx context.Context, db *sql.DB, payloads []string, undo bool) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	for _, p := range payloads {
		if err := w.events.InSQLTx(tx).Publish("orders", msg(p)); err != nil {
			return errors.Join(err, tx.Rollback())
		}
	}
	w.pause()
	if undo {
		return errors.Join(errUndone, tx.Rollback())
	}
	return tx.Commit()
}

func (w *writer) bySQL(ctx context.Context, payloads []string, undo bool) error {
	return w.begin(ctx, undo, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into event_outbox (topic, payload, staged) select 'orders', convert_to(p, 'UTF8'), $2
			from unnest($1::text[]) with ordinality as o(p, n) order by n`, payloads, w.staged)
		return err
	})
}

func (w *writer) byCopy(ctx context.Context, payloads []string, undo bool) error {
	return w.begin(ctx, undo, func(tx pgx.Tx) error {
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"event_outbox"}, []string{"topic", "payload", "staged"},
			pgx.CopyFromSlice(len(payloads), func(i int) ([]any, error) { return []any{"orders", []byte(payloads[i]), w.staged}, nil }))
		return err
	})
}

func (w *writer) byTrigger(ctx context.Context, payloads []string, undo bool) error {
	return w.begin(ctx, undo, func(tx pgx.Tx) error {
		for _, p := range payloads {
			if _, err := tx.Exec(ctx, `insert into business (payload) values ($1)`, p); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestManyWritersOfAllKindsLeaveALogWithoutHoles(t *testing.T) {
	t.Parallel()
	for _, staged := range []bool{false, true} {
		t.Run(fmt.Sprintf("staged %t", staged), func(t *testing.T) {
			t.Parallel()
			testManyWriters(t, staged)
		})
	}
}

func testManyWriters(t *testing.T, staged bool) {
	db := logtest.New(t)
	db.Exec(t, `create table business (payload text)`)
	db.Exec(t, fmt.Sprintf(`create function tell() returns trigger language plpgsql as $$ begin
			insert into event_outbox (topic, payload, staged) values ('orders', convert_to(new.payload, 'UTF8'), %t);
			return null;
		end $$`, staged))
	db.Exec(t, `create trigger tell after insert on business for each row execute function tell()`)
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 20 })
	viaPgx, viaPQ := db.SQL(t), openPQ(t, db)
	viaPgx.SetMaxOpenConns(10)
	viaPQ.SetMaxOpenConns(10)
	events := newEventLog(t, pool, publisher.EventLogConfig{Staged: staged})
	// Somebody else's transaction, which has written and stays open all the time.
	exec(t, db.Conn(t), "begin; create table elsewhere ()")

	all := make([]*writer, writers)
	errs := make([]error, writers)
	ctx := bounded(t)
	stop := func() {}
	if staged {
		stop = sequenced(t, db)
	}
	var running sync.WaitGroup
	for i := range all {
		w := &writer{id: i, pool: pool, pgx: viaPgx, pq: viaPQ, events: events, staged: staged, random: rand.New(rand.NewPCG(1, uint64(i)))}
		all[i] = w
		running.Go(func() { errs[i] = w.run(ctx) })
	}
	running.Wait()
	require.NoError(t, errors.Join(errs...))
	stop()

	got := log(t, db)
	require.Greater(t, len(got), writers*transactions)
	var want []string
	for _, w := range all {
		want = append(want, w.committed...)
	}
	require.ElementsMatch(t, want, got)
	// Each writer's events are in the order in which it appended and committed them.
	for _, w := range all {
		mine := slices.DeleteFunc(slices.Clone(got), func(p string) bool { return !strings.HasPrefix(p, strconv.Itoa(w.id)+"/") })
		require.Equal(t, w.committed, mine)
	}
}

// sequenced runs two sequencers, of which one stands by, until stop is called; then everything is numbered.
func sequenced(t *testing.T, db *pgtest.DB) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for range 2 {
		s, err := sequencer.New(db.Conn(t), sequencer.Config{PollInterval: time.Millisecond, BatchSize: 50}, nil)
		require.NoError(t, err)
		running.Go(func() { _ = s.Run(ctx) })
	}
	t.Cleanup(running.Wait)
	t.Cleanup(cancel)
	return func() {
		t.Helper()
		require.Eventually(t, func() bool { return pgtest.Value[int64](t, db, "select count(*) from event_outbox") == 0 }, time.Minute, 5*time.Millisecond)
	}
}
