package main

import (
	"context"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// run handles every order until ctx ends.
func run(ctx context.Context, pool *pgxpool.Pool, logger watermill.LoggerAdapter) error {
	orders, err := subscriber.New(pool, subscriber.ConsumerConfig{Name: "billing", Topic: "orders"}, logger)
	if err != nil {
		return err
	}
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return err
	}
	router.AddMiddleware(middleware.Round(logger)) // before every other middleware
	router.AddHandler("billing", "orders", orders, "invoices", jobs, bill)
	err = router.Run(ctx)
	select {
	case err = <-orders.Failed(): // it ended although nobody stopped it
	default:
	}
	return err
}

// bill books an order and returns a job. The row, the job and the consumer's new position are committed together,
// or not at all.
func bill(order *message.Message) ([]*message.Message, error) {
	ctx := order.Context()
	unit, ok := cursor.UnitFromContext(ctx)
	if !ok {
		return nil, cursor.ErrNoUnit
	}
	tx, err := unit.Tx(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := tx.Exec(ctx, "insert into bookings (order_id) values ($1::jsonb->>'id')", string(order.Payload)); err != nil {
		return nil, err
	}
	return message.Messages{message.NewMessage(watermill.NewUUID(), order.Payload)}, nil
}
