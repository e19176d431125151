package torture

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/sequencer"
)

const (
	writersOfAWorker = 2
	// enough is how many events may wait for the slowest consumer before the writers slow down.
	enough = 150
	// appendTime bounds a transaction of a writer.
	appendTime = 4 * time.Second
)

// errUndone ends a transaction that is to be rolled back.
var errUndone = errors.New("undone on purpose")

// writer appends in all the ways there are, and says what became of it.
type writer struct {
	pool   *pgxpool.Pool
	db     *sql.DB
	events []*publisher.EventLog // that give a number at once, and that stage
	once   []*publisher.EventLog // the same, for appends that may be repeated
	random *rand.Rand
}

// write runs a worker's writers until ctx ends.
func (w *worker) write(ctx context.Context) {
	config, err := pgxpool.ParseConfig(w.url("writer"))
	if err != nil {
		panic(err) // the URL is ours
	}
	config.MaxConns = writersOfAWorker
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), config)
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	db := stdlib.OpenDB(*config.ConnConfig)
	defer func() { _ = db.Close() }() // its connections may be broken
	var events, once []*publisher.EventLog
	for _, staged := range []bool{false, true} {
		for _, repeatable := range []bool{false, true} {
			p, err := publisher.NewEventLog(pool, publisher.EventLogConfig{Staged: staged, Once: repeatable})
			if err != nil {
				panic(err)
			}
			if repeatable {
				once = append(once, p)
			} else {
				events = append(events, p)
			}
		}
	}
	var all sync.WaitGroup
	defer all.Wait()
	for i := range writersOfAWorker {
		writer := &writer{pool: pool, db: db, events: events, once: once, random: rand.New(rand.NewPCG(w.settings.Seed, uint64(10+i)))}
		all.Go(func() { writer.run(ctx) })
	}
}

// sequence numbers what is staged until ctx ends; the other workers' sequencers stand by.
func (w *worker) sequence(ctx context.Context) {
	config, err := pgxpool.ParseConfig(w.url("sequencer"))
	if err != nil {
		panic(err) // the URL is ours
	}
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), config)
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	s, err := sequencer.New(pool, sequencer.Config{BatchSize: 20}, nil)
	if err != nil {
		panic(err)
	}
	for ctx.Err() == nil { // it ends where a server that has just been restarted says that something is not there
		_ = s.Run(ctx)
		_ = wait(ctx, 100*time.Millisecond)
	}
}

func (w *writer) run(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		if n%10 == 0 && w.backlog(ctx) > enough {
			n--
			_ = wait(ctx, 50*time.Millisecond)
			continue
		}
		w.transaction(ctx)
		_ = wait(ctx, time.Duration(w.random.IntN(30))*time.Millisecond)
	}
}

func (w *writer) backlog(ctx context.Context) (n int64) {
	ctx, cancel := context.WithTimeout(ctx, appendTime)
	defer cancel()
	_ = w.pool.QueryRow(ctx, "select max(s.last_seq) - min(c.last_seq) from event_seq s, event_consumer_cursors c").Scan(&n)
	return n
}

// pause is work between an append and the commit.
func (w *writer) pause(ctx context.Context) error {
	return wait(ctx, time.Duration(w.random.IntN(6))*time.Millisecond)
}

// undoes tells whether a transaction is to be rolled back.
func (w *writer) undoes() bool { return w.random.IntN(8) == 0 }

// messages are one to four of all kinds.
func (w *writer) messages(ctx context.Context) message.Messages {
	messages := make(message.Messages, 1+w.random.IntN(4))
	for i := range messages {
		m := message.NewMessage(watermill.NewUUID(), []byte("{}"))
		kind := healthy
		switch n := w.random.IntN(3000); {
		case n < 2:
			kind = killer
		case n < 20:
			kind = poison
		case n < 40:
			kind = curable
		case n < 60:
			kind = flaky
		case n < 80:
			kind = panics
		}
		m.Metadata.Set("kind", kind)
		m.SetContext(ctx)
		messages[i] = m
	}
	return messages
}

func ids(messages ...message.Messages) (ids []string) {
	for _, m := range messages {
		ids = append(ids, m.IDs()...)
	}
	return ids
}

// transaction is one, in one of the ways; it may be undone, in part or as a whole.
func (w *writer) transaction(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), appendTime)
	defer cancel()
	kept, dropped := w.messages(ctx), message.Messages{}
	if w.random.IntN(5) == 0 {
		dropped = w.messages(ctx)
	}
	topic := topics[w.random.IntN(len(topics))]
	way := w.random.IntN(len(w.events))
	events := w.events[way]
	var sent bool // the commit
	var err error
	switch w.random.IntN(4) {
	case 0:
		sent, dropped = true, nil
		// One whose outcome is not known is repeated, and is there once.
		for err = w.once[way].Publish(topic, kept...); err != nil && ctx.Err() == nil; err = w.once[way].Publish(topic, kept...) {
			_ = wait(ctx, 50*time.Millisecond)
		}
	case 1:
		sent, err = w.inPgxTx(ctx, kept, dropped, func(tx pgx.Tx, messages message.Messages) error {
			return events.InTx(tx).Publish(topic, messages...)
		})
	case 2:
		sent, err = w.inPgxTx(ctx, kept, dropped, func(tx pgx.Tx, messages message.Messages) error {
			for _, m := range messages {
				_, err := tx.Exec(ctx, `
insert into event_outbox (topic, uuid, payload, metadata, staged) values ($1, $2, $3, jsonb_build_object('kind', $4::text), $5)`,
					topic, m.UUID, []byte(m.Payload), m.Metadata.Get("kind"), way == 1)
				if err != nil {
					return err
				}
			}
			return nil
		})
	case 3:
		sent, err = w.inSQLTx(ctx, events, topic, kept, dropped)
	}
	switch {
	case !sent: // what was never committed is undone for sure
		say(workerLine{Undone: ids(kept, dropped)})
	case err == nil:
		say(workerLine{Committed: ids(kept), Undone: ids(dropped)})
	default:
		say(workerLine{Unknown: ids(kept), Undone: ids(dropped)})
	}
}

func (w *writer) inPgxTx(
	ctx context.Context, kept, dropped message.Messages, publish func(pgx.Tx, message.Messages) error,
) (sent bool, err error) {
	tx, err := w.pool.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after a commit it does nothing
	if err := errors.Join(publish(tx, kept[:1]), w.pause(ctx)); err != nil {
		return false, err
	}
	if len(dropped) > 0 {
		nested, err := tx.Begin(ctx)
		if err != nil {
			return false, err
		}
		if err := errors.Join(publish(nested, dropped), nested.Rollback(ctx)); err != nil {
			return false, err
		}
	}
	if err := errors.Join(publish(tx, kept[1:]), w.pause(ctx)); err != nil || w.undoes() {
		return false, err
	}
	return true, tx.Commit(ctx)
}

func (w *writer) inSQLTx(ctx context.Context, log *publisher.EventLog, topic string, kept, dropped message.Messages) (sent bool, err error) {
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	events := log.InSQLTx(tx)
	if err := errors.Join(events.Publish(topic, kept...), w.pause(ctx)); err != nil {
		return false, err
	}
	if len(dropped) > 0 {
		_, before := tx.ExecContext(ctx, "savepoint dropped")
		published := events.Publish(topic, dropped...)
		_, after := tx.ExecContext(ctx, "rollback to savepoint dropped")
		if err := errors.Join(before, published, after, w.pause(ctx)); err != nil {
			return false, err
		}
	}
	if w.undoes() {
		return false, nil
	}
	return true, tx.Commit()
}
