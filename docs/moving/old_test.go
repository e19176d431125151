package moving_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"time"

	v3 "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	v4 "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
)

// library is what a service used before, and may go back to.
type library struct {
	guide, cutOver, back, done string
	topic                      string   // its table is watermill_<topic>
	groups                     []string // of readers
	initialize                 func() ([]string, error)
	publish                    func(tx *sql.Tx, topic string, msg *message.Message) error
	subscriber                 func(db *sql.DB, group string) (message.Subscriber, error)
	exec                       func(ctx context.Context, sql string, args ...any) error // in the message's transaction
	publishJob                 func(msg *message.Message, job *message.Message) error   // likewise
	jobReader                  func(db *sql.DB) (message.Subscriber, error)             // who reads the jobs
	envelopes                  bool
	staged                     bool     // writers are under REPEATABLE READ
	adapt                      []string // what the guide says to replace: old, new
}

var errNoTx = errors.New("the message has no transaction")

const quick = 10 * time.Millisecond

func withV3(payload string) library {
	schema := v3.DefaultPostgreSQLSchema{SubscribeBatchSize: 10, GeneratePayloadType: func(topic string) string {
		if topic == "invoices" {
			return "JSON"
		}
		return payload
	}}
	publish := func(tx *sql.Tx, topic string, msg *message.Message) error {
		p, err := v3.NewPublisher(tx, v3.PublisherConfig{SchemaAdapter: schema}, nil)
		if err != nil {
			return err
		}
		return p.Publish(topic, msg)
	}
	return library{
		guide: "from-watermill-sql.md", cutOver: "-- cut over\n", back: "-- back\n", done: "-- back for good\n",
		topic: "orders", groups: []string{"billing", "audit", ""}, publish: publish,
		jobReader: func(db *sql.DB) (message.Subscriber, error) {
			return v3.NewSubscriber(db, v3.SubscriberConfig{
				SchemaAdapter: schema, OffsetsAdapter: v3.DefaultPostgreSQLOffsetsAdapter{}, PollInterval: quick, RetryInterval: quick,
			}, nil)
		},
		initialize: func() (queries []string, err error) {
			for _, topic := range []string{"orders", "invoices", "forwarder_topic"} {
				for _, q := range append(schema.SchemaInitializingQueries(topic), v3.DefaultPostgreSQLOffsetsAdapter{}.SchemaInitializingQueries(topic)...) {
					queries = append(queries, q.Query)
				}
			}
			return queries, nil
		},
		subscriber: func(db *sql.DB, group string) (message.Subscriber, error) {
			return v3.NewSubscriber(db, v3.SubscriberConfig{
				ConsumerGroup: group, SchemaAdapter: schema, OffsetsAdapter: v3.DefaultPostgreSQLOffsetsAdapter{},
				PollInterval: quick, RetryInterval: quick,
			}, nil)
		},
		exec: func(ctx context.Context, sql string, args ...any) error {
			tx, ok := v3.TxFromContext(ctx)
			if !ok {
				return errNoTx
			}
			_, err := tx.ExecContext(ctx, sql, args...)
			return err
		},
		publishJob: func(msg, job *message.Message) error {
			tx, ok := v3.TxFromContext(msg.Context())
			if !ok {
				return errNoTx
			}
			return publish(tx, "invoices", job)
		},
	}
}

func withV4(queue bool) library {
	var schema v4.SchemaAdapter = v4.DefaultPostgreSQLSchema{SubscribeBatchSize: 10}
	var offsets v4.OffsetsAdapter = v4.DefaultPostgreSQLOffsetsAdapter{}
	jobs := v4.PublisherConfig{SchemaAdapter: v4.DefaultPostgreSQLSchema{}}
	l := library{
		guide: "from-watermill-sql.md", cutOver: "-- cut over\n", back: "-- back\n", done: "-- back for good\n",
		topic: "orders", groups: []string{"billing", "audit", ""},
		jobReader: func(db *sql.DB) (message.Subscriber, error) {
			return v4.NewSubscriber(v4.BeginnerFromStdSQL(db), v4.SubscriberConfig{
				SchemaAdapter: jobs.SchemaAdapter, OffsetsAdapter: v4.DefaultPostgreSQLOffsetsAdapter{}, PollInterval: quick, RetryInterval: quick,
			}, nil)
		},
	}
	if queue {
		l.cutOver, l.back, l.groups = "-- cut over the queue\n", "-- back to the queue\n", []string{""}
		schema = v4.PostgreSQLQueueSchema{SubscribeBatchSize: 10}
		offsets = v4.PostgreSQLQueueOffsetsAdapter{DeleteOnAck: true}
	}
	l.publish = func(tx *sql.Tx, topic string, msg *message.Message) error {
		p, err := v4.NewPublisher(v4.TxFromStdSQL(tx), v4.PublisherConfig{SchemaAdapter: schema}, nil)
		if err != nil {
			return err
		}
		return p.Publish(topic, msg)
	}
	l.initialize = func() ([]string, error) {
		forOrders, err := schema.SchemaInitializingQueries(v4.SchemaInitializingQueriesParams{Topic: "orders"})
		forOffsets, errOffsets := offsets.SchemaInitializingQueries(v4.OffsetsSchemaInitializingQueriesParams{Topic: "orders"})
		forJobs, errJobs := jobs.SchemaAdapter.SchemaInitializingQueries(v4.SchemaInitializingQueriesParams{Topic: "invoices"})
		forReader, errReader := v4.DefaultPostgreSQLOffsetsAdapter{}.SchemaInitializingQueries(v4.OffsetsSchemaInitializingQueriesParams{Topic: "invoices"})
		var queries []string
		for _, q := range slices.Concat(forOrders, forOffsets, forJobs, forReader) {
			queries = append(queries, q.Query)
		}
		return queries, errors.Join(err, errOffsets, errJobs, errReader)
	}
	l.subscriber = func(db *sql.DB, group string) (message.Subscriber, error) {
		return v4.NewSubscriber(v4.BeginnerFromStdSQL(db), v4.SubscriberConfig{
			ConsumerGroup: group, SchemaAdapter: schema, OffsetsAdapter: offsets, PollInterval: quick, RetryInterval: quick,
		}, nil)
	}
	l.exec = func(ctx context.Context, sql string, args ...any) error {
		tx, ok := v4.TxFromContext(ctx)
		if !ok {
			return errNoTx
		}
		_, err := tx.ExecContext(ctx, sql, args...)
		return err
	}
	l.publishJob = func(msg, job *message.Message) error {
		tx, ok := v4.TxFromContext(msg.Context())
		if !ok {
			return errNoTx
		}
		p, err := v4.NewPublisher(tx, jobs, nil)
		if err != nil {
			return err
		}
		return p.Publish("invoices", job)
	}
	return l
}

// withBytea has payloads that are not JSON for PostgreSQL.
func withBytea() library {
	l := withV3("BYTEA")
	l.adapt = []string{
		"convert_to(coalesce(new.payload::text, ''), 'UTF8')", "coalesce(new.payload, '')",
		"convert_to(coalesce(m.payload::text, ''), 'UTF8')", "coalesce(m.payload, '')",
		"nullif(convert_from(new.payload, 'UTF8'), '')::json", "new.payload",
		"nullif(convert_from(u.payload, 'UTF8'), '')::json", "u.payload",
	}
	return l
}

// withRepeatableRead has writers that append while they do not see each other.
func withRepeatableRead() library {
	l := withV3("JSON")
	l.staged = true
	l.adapt = []string{"(topic, uuid, payload, metadata)\n", "(topic, uuid, payload, metadata, staged)\n", "'{}')::jsonb);", "'{}')::jsonb, true);"}
	return l
}

// withForwarder is a library whose messages go through Watermill's forwarder.
func withForwarder() library {
	l := withV3("JSON")
	l.topic, l.groups, l.envelopes = forwarderTopic, []string{""}, true
	publish := l.publish
	l.publish = func(tx *sql.Tx, topic string, msg *message.Message) error {
		return forwarder.NewPublisher(publisherFunc(func(topic string, messages ...*message.Message) error {
			for _, m := range messages {
				if err := publish(tx, topic, m); err != nil {
					return err
				}
			}
			return nil
		}), forwarder.PublisherConfig{}).Publish(topic, msg)
	}
	return l
}

const forwarderTopic = "forwarder_topic"

type publisherFunc func(topic string, messages ...*message.Message) error

func (f publisherFunc) Publish(topic string, messages ...*message.Message) error {
	return f(topic, messages...)
}
func (publisherFunc) Close() error { return nil }
