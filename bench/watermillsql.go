package main

import (
	"context"
	"errors"
	"fmt"

	v3 "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	v4 "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
)

// watermillSQL is every form of it that a user would run, and the names of those that publish by statements of
// their own, and of those that publish in the message's transaction.
func watermillSQL() (own, inTx []string, rivals []rival) {
	for _, version := range []struct {
		name  string
		queue bool
		start func(pool *pgxpool.Pool, batch int, queue bool) peer
	}{
		{"watermill-sql v3", false, startV3}, {"watermill-sql v4", false, startV4}, {"watermill-sql v4 queue", true, startV4},
	} {
		for _, batch := range []int{100, 1000} {
			for _, tx := range []bool{false, true} {
				name := fmt.Sprintf("%s, batch %d, own statements", version.name, batch)
				if tx {
					name = fmt.Sprintf("%s, batch %d, in the message's transaction", version.name, batch)
				}
				if version.queue && batch == 100 && !tx {
					continue // the slowest of them
				}
				if tx {
					inTx = append(inTx, name)
				} else {
					own = append(own, name)
				}
				load, done := loadMessages, sqlMessagesPassed
				if version.queue {
					load, done = loadQueue, sqlQueuePassed
				}
				rivals = append(rivals, rival{name: name, slow: true, load: load, run: func(ctx context.Context, db *database, n int) error {
					pool, err := db.open(ctx, 4, nil)
					if err != nil {
						return err
					}
					defer pool.Close()
					p := version.start(pool, batch, version.queue)
					if p.err != nil {
						return p.err
					}
					return p.drain(ctx, db, n, tx, done)
				}})
			}
		}
	}
	return own, inTx, rivals
}

const (
	sqlMessagesPassed = `select offset_acked >= $1 from watermill_offsets_` + eventTopic
	sqlQueuePassed    = `select not exists (select from watermill_` + eventTopic + ` where "offset" <= $1)`
)

func loadMessages(ctx context.Context, db *database, n int) error {
	schema, offsets := v3.DefaultPostgreSQLSchema{}, v3.DefaultPostgreSQLOffsetsAdapter{}
	for _, q := range append(schema.SchemaInitializingQueries(eventTopic), offsets.SchemaInitializingQueries(eventTopic)...) {
		if _, err := db.Exec(ctx, q.Query, q.Args...); err != nil {
			return err
		}
	}
	_, err := db.Exec(ctx, `insert into watermill_`+eventTopic+` (uuid, payload, metadata, transaction_id)
select uuid, payload::json, metadata::json, pg_current_xact_id() from (`+sqlEvents+`) e order by i`, 1, n)
	return err
}

func loadQueue(ctx context.Context, db *database, n int) error {
	queries, err := v4.PostgreSQLQueueSchema{}.SchemaInitializingQueries(v4.SchemaInitializingQueriesParams{Topic: eventTopic})
	if err != nil {
		return err
	}
	for _, q := range queries {
		if _, err := db.Exec(ctx, q.Query, q.Args...); err != nil {
			return err
		}
	}
	_, err = db.Exec(ctx, `insert into watermill_`+eventTopic+` (uuid, payload, metadata)
select uuid, payload::json, metadata::json from (`+sqlEvents+`) e order by i`, 1, n)
	return err
}

// peer is a version of watermill-sql at work.
type peer struct {
	sub    message.Subscriber
	pub    message.Publisher                                // by statements of its own
	inTx   func(context.Context) (message.Publisher, error) // in the message's transaction
	finish func() error
	err    error
}

func startV3(pool *pgxpool.Pool, batch int, _ bool) peer {
	db := stdlib.OpenDBFromPool(pool)
	publish := v3.PublisherConfig{SchemaAdapter: v3.DefaultPostgreSQLSchema{}}
	sub, subErr := v3.NewSubscriber(db, v3.SubscriberConfig{
		SchemaAdapter:  v3.DefaultPostgreSQLSchema{SubscribeBatchSize: batch},
		OffsetsAdapter: v3.DefaultPostgreSQLOffsetsAdapter{},
	}, nil)
	pub, pubErr := v3.NewPublisher(db, publish, nil)
	return peer{sub: sub, pub: pub, finish: db.Close, err: errors.Join(subErr, pubErr), inTx: func(ctx context.Context) (message.Publisher, error) {
		tx, ok := v3.TxFromContext(ctx)
		if !ok {
			return nil, errors.New("no transaction")
		}
		return v3.NewPublisher(tx, publish, nil)
	}}
}

func startV4(pool *pgxpool.Pool, batch int, queue bool) peer {
	db := v4.BeginnerFromPgx(pool)
	config := v4.SubscriberConfig{
		SchemaAdapter:  v4.DefaultPostgreSQLSchema{SubscribeBatchSize: batch},
		OffsetsAdapter: v4.DefaultPostgreSQLOffsetsAdapter{},
	}
	if queue {
		config.SchemaAdapter = v4.PostgreSQLQueueSchema{SubscribeBatchSize: batch}
		config.OffsetsAdapter = v4.PostgreSQLQueueOffsetsAdapter{DeleteOnAck: true}
	}
	publish := v4.PublisherConfig{SchemaAdapter: v4.DefaultPostgreSQLSchema{}}
	sub, subErr := v4.NewSubscriber(db, config, nil)
	pub, pubErr := v4.NewPublisher(db, publish, nil)
	return peer{sub: sub, pub: pub, finish: func() error { return nil }, err: errors.Join(subErr, pubErr), inTx: func(ctx context.Context) (message.Publisher, error) {
		tx, ok := v4.TxFromContext(ctx)
		if !ok {
			return nil, errors.New("no transaction")
		}
		return v4.NewPublisher(tx, publish, nil)
	}}
}

func (p peer) drain(ctx context.Context, db *database, n int, inTx bool, done string) error {
	router, err := newRouter()
	if err != nil {
		return err
	}
	handled := newCounter(n)
	// Behind what is measured it waits to be stopped: what a handler does with the transaction meanwhile, the
	// subscriber would do at the same time.
	behind := func(msg *message.Message) error {
		if handled.count() <= int64(n) {
			return nil
		}
		<-msg.Context().Done()
		return msg.Context().Err()
	}
	if inTx {
		router.AddConsumerHandler("push", eventTopic, p.sub, func(msg *message.Message) error {
			if err := behind(msg); err != nil {
				return err
			}
			pub, err := p.inTx(msg.Context())
			if err != nil {
				return err
			}
			return pub.Publish(jobTopic, job(msg)...)
		})
	} else {
		router.AddHandler("push", eventTopic, p.sub, jobTopic, p.pub, func(msg *message.Message) ([]*message.Message, error) {
			return job(msg), behind(msg)
		})
	}
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx) }()
	<-router.Running()
	err = handled.wait(ctx)
	if err == nil {
		err = db.until(ctx, done, n)
	}
	return errors.Join(err, router.Close(), <-ended, p.finish())
}
