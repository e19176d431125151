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
	batch int
	out   chan *message.Message // nil is without a router
	jobs  []*message.Message
	count func() int64
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

// round returns how many events it went through.
func (l *loop) round(ctx context.Context, conn *pgxpool.Conn) (int, error) {
	n := 0
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, `
select l.seq, l.topic, l.uuid, l.payload, l.metadata
from (select p.seq from loop_position p where p.name = 'push' for update) p
cross join lateral (select * from event_log l where l.seq > p.seq order by l.seq limit $1) l
order by l.seq`, l.batch)
		var position int64
		messages, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*message.Message, error) {
			var topic string
			msg := message.NewMessage("", nil)
			err := row.Scan(&position, &topic, &msg.UUID, (*[]byte)(&msg.Payload), (*map[string]string)(&msg.Metadata))
			return msg, err
		})
		if n = len(messages); err != nil || n == 0 {
			return err
		}
		l.jobs = l.jobs[:0]
		for _, msg := range messages {
			if err := l.deliver(ctx, msg); err != nil {
				return err
			}
		}
		uuids, payloads := make([]string, len(l.jobs)), make([]string, len(l.jobs))
		for i, j := range l.jobs {
			uuids[i], payloads[i] = j.UUID, string(j.Payload)
		}
		if _, err := tx.Exec(ctx, `
insert into watermill_`+jobTopic+` (uuid, payload, metadata, transaction_id)
select j.uuid, j.payload::json, '{}', pg_current_xact_id()
from unnest($1::text[], $2::text[]) with ordinality as j(uuid, payload, n) order by j.n`, uuids, payloads); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "update loop_position set seq = $1 where name = 'push'", position)
		return err
	})
	return n, err
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
