package moving_test

import (
	"database/sql"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// The service after the move, as the guides show it.

func publishOrder(tx *sql.Tx, order *message.Message) error {
	events, err := publisher.NewEventLog(nil, publisher.EventLogConfig{})
	if err != nil {
		return err
	}
	return events.InSQLTx(tx).Publish("orders", order)
}

func stageOrder(tx *sql.Tx, order *message.Message) error {
	events, err := publisher.NewEventLog(nil, publisher.EventLogConfig{Staged: true})
	if err != nil {
		return err
	}
	return events.InSQLTx(tx).Publish("orders", order)
}

func publishOrderInPgx(tx pgx.Tx, order *message.Message) error {
	events, err := publisher.NewEventLog(nil, publisher.EventLogConfig{})
	if err != nil {
		return err
	}
	return events.InTx(tx).Publish("orders", order)
}

func publishEnveloped(tx *sql.Tx, order *message.Message) error {
	events, err := publisher.NewEventLog(nil, publisher.EventLogConfig{})
	if err != nil {
		return err
	}
	return forwarder.NewPublisher(events.InSQLTx(tx), forwarder.PublisherConfig{}).Publish("orders", order)
}

func addConsumer(router *message.Router, pool *pgxpool.Pool, group string, handle message.HandlerFunc, logger watermill.LoggerAdapter) error {
	orders, err := subscriber.New(pool, subscriber.ConsumerConfig{Name: group, Topic: "orders"}, logger)
	if err != nil {
		return err
	}
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}
	router.AddMiddleware(middleware.Round(logger))
	router.AddHandler(group, "orders", orders, "invoices", jobs, handle)
	return nil
}

func addSender(router *message.Router, pool *pgxpool.Pool, send message.NoPublishHandlerFunc, logger watermill.LoggerAdapter) error {
	sender, err := subscriber.New(pool, subscriber.ConsumerConfig{Name: "sender", Topic: subscriber.AllTopics}, logger)
	if err != nil {
		return err
	}
	router.AddMiddleware(middleware.Round(logger))
	router.AddConsumerHandler("sender", subscriber.AllTopics, sender, send)
	return nil
}

func newForwarder(router *message.Router, pool *pgxpool.Pool, broker message.Publisher, logger watermill.LoggerAdapter) (*forwarder.Forwarder, error) {
	envelopes, err := subscriber.New(pool, subscriber.ConsumerConfig{Name: "forwarder_topic", Topic: "forwarder_topic"}, logger)
	if err != nil {
		return nil, err
	}
	router.AddMiddleware(middleware.Round(logger))
	return forwarder.NewForwarder(envelopes, broker, logger, forwarder.Config{Router: router})
}

func handleOrder(msg *message.Message) ([]*message.Message, error) {
	unit, ok := cursor.UnitFromContext(msg.Context())
	if !ok {
		return nil, cursor.ErrNoUnit
	}
	tx, err := unit.Tx(msg.Context())
	if err != nil {
		return nil, err
	}
	if _, err := tx.Exec(msg.Context(), sqlEffect, "new", unit.Cursor().Consumer, msg.UUID, msg.Payload, msg.Metadata.Get("writer")); err != nil {
		return nil, err
	}
	return []*message.Message{job(msg, unit.Cursor().Consumer)}, nil
}

func send(msg *message.Message) error {
	unit, ok := cursor.UnitFromContext(msg.Context())
	if !ok {
		return cursor.ErrNoUnit
	}
	topic := unit.Event().Topic
	tx, err := unit.Tx(msg.Context())
	if err != nil {
		return err
	}
	_, err = tx.Exec(msg.Context(), sqlEffect, "new", "sender", uuidOf(msg.Payload), msg.Payload, topic)
	return err
}
