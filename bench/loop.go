package main

import (
	"context"
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// loop is what a careful user would write by hand with pgx: begin, lock the position and read, handle, insert the
// jobs by unnest, move the position, commit; one after another.
type loop struct {
	batch    int
	twoTrips bool
	out      chan *message.Message // nil is without a router
	jobs     []*message.Message
	count    func() int64
}

// Subscribe and the following make it the subscriber and the publisher of a router.
func (l *loop) Subscribe(context.Context, string) (<-chan *message.Message, error) { return l.out, nil }
func (l *loop) Close() error                                                       { return nil }

// Publish has one caller at a time, and the loop waits for its ack.
func (l *loop) Publish(_ string, messages ...*message.Message) error {
	l.jobs = append(l.jobs, messages...)
	return nil
}

func (l *loop) handle(msg *message.Message) ([]*message.Message, error) {
	l.count()
	return job(msg), nil
}

// deliver hands an event to the router, or to the handler where there is none.
func (l *loop) deliver(ctx context.Context, msg *message.Message) error {
	msg.SetContext(ctx)
	if l.out == nil {
		produced, err := l.handle(msg)
		return errors.Join(err, l.Publish("", produced...))
	}
	l.out <- msg
	select {
	case <-msg.Acked():
		return nil
	case <-msg.Nacked():
		return errors.New("nacked")
	}
}

const (
	sqlLoopRead = `
select l.seq, l.topic, l.uuid, l.payload, l.metadata
from (select p.seq from loop_position p where p.name = 'push' for update) p
cross join lateral (select * from event_log l where l.seq > p.seq order by l.seq limit $1) l
order by l.seq`
	sqlLoopInsert = `
insert into watermill_` + jobTopic + ` (uuid, payload, metadata, transaction_id)
select j.uuid, j.payload::json, '{}', pg_current_xact_id()
from unnest($1::text[], $2::text[]) with ordinality as j(uuid, payload, n) order by j.n`
	sqlLoopMove = "update loop_position set seq = $1 where name = 'push'"
)

// round returns how many events it went through.
func (l *loop) round(ctx context.Context, conn *pgxpool.Conn) (n int, err error) {
	if l.twoTrips {
		return l.roundInTwoTrips(ctx, conn)
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, sqlLoopRead, l.batch)
		messages, position, err := collect(rows)
		if n = len(messages); err != nil || n == 0 {
			return err
		}
		if err := l.handOut(ctx, messages); err != nil {
			return err
		}
		uuids, payloads := l.columns()
		if _, err := tx.Exec(ctx, sqlLoopInsert, uuids, payloads); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, sqlLoopMove, position)
		return err
	})
	return n, err
}

// roundInTwoTrips is the same by as few trips as ours has: one to read, one to write. It tells what of the difference the
// trips are worth.
func (l *loop) roundInTwoTrips(ctx context.Context, conn *pgxpool.Conn) (int, error) {
	first, last := &pgx.Batch{}, &pgx.Batch{}
	first.Queue("begin")
	first.Queue(sqlLoopRead, l.batch)
	results := conn.SendBatch(ctx, first)
	_, err := results.Exec()
	if err != nil {
		return 0, errors.Join(err, results.Close())
	}
	rows, _ := results.Query()
	messages, position, err := collect(rows)
	if err := errors.Join(err, results.Close()); err != nil {
		return 0, err
	}
	if len(messages) == 0 {
		_, err := conn.Exec(ctx, "rollback")
		return 0, err
	}
	if err := l.handOut(ctx, messages); err != nil {
		return 0, err
	}
	uuids, payloads := l.columns()
	last.Queue(sqlLoopInsert, uuids, payloads)
	last.Queue(sqlLoopMove, position)
	last.Queue("commit")
	return len(messages), conn.SendBatch(ctx, last).Close()
}

func collect(rows pgx.Rows) (messages []*message.Message, position int64, err error) {
	messages, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (*message.Message, error) {
		var topic string
		msg := message.NewMessage("", nil)
		err := row.Scan(&position, &topic, &msg.UUID, (*[]byte)(&msg.Payload), (*map[string]string)(&msg.Metadata))
		return msg, err
	})
	return messages, position, err
}

func (l *loop) handOut(ctx context.Context, messages []*message.Message) error {
	l.jobs = l.jobs[:0]
	for _, msg := range messages {
		if err := l.deliver(ctx, msg); err != nil {
			return err
		}
	}
	return nil
}

func (l *loop) columns() (uuids, payloads []string) {
	uuids, payloads = make([]string, len(l.jobs)), make([]string, len(l.jobs))
	for i, j := range l.jobs {
		uuids[i], payloads[i] = j.UUID, string(j.Payload)
	}
	return uuids, payloads
}

// withRouter runs do while a router hands the loop's messages to its handler, if it has one.
func (l *loop) withRouter(ctx context.Context, do func() error) error {
	if l.out == nil {
		return do()
	}
	router, err := newRouter()
	if err != nil {
		return err
	}
	router.AddHandler("push", eventTopic, l, jobTopic, l, l.handle)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx) }()
	<-router.Running()
	err = do()
	close(l.out)
	return errors.Join(err, router.Close(), <-ended)
}

func (db *database) placeLoop(ctx context.Context) error {
	_, err := db.Exec(ctx, "insert into loop_position (name, seq) values ('push', 0)")
	return err
}

func drainLoop(batch int, router bool) func(context.Context, *database, int) error {
	return func(ctx context.Context, db *database, _ int) error {
		pool, err := db.open(ctx, 1, nil)
		if err != nil {
			return err
		}
		defer pool.Close()
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
		l := &loop{batch: batch, count: newCounter(0).count}
		if router {
			l.out = make(chan *message.Message)
		}
		return l.withRouter(ctx, func() error {
			for {
				if n, err := l.round(ctx, conn); err != nil || n == 0 {
					return err
				}
			}
		})
	}
}
