// Consumer is a whole service: it handles the orders of an event log, and writes a booking and a job for each.
//
//	DATABASE_URL=postgres://… go run ./examples/consumer
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

func main() {
	ctx, release := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer release()
	if err := serve(ctx, os.Getenv("DATABASE_URL")); err != nil {
		fmt.Fprintln(os.Stderr, "consumer:", err)
		os.Exit(1)
	}
}

func serve(ctx context.Context, address string) error {
	if address == "" {
		return errors.New("set DATABASE_URL to a PostgreSQL database")
	}
	pool, err := pgxpool.New(ctx, address)
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	defer pool.Close()
	if err := prepare(ctx, pool); err != nil {
		return err
	}
	return run(ctx, pool, watermill.NewStdLogger(false, false))
}

// prepare is what a deploy step does.
func prepare(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := migrations.Up(ctx, pool, nil); err != nil {
		return err
	}
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}
	if err := jobs.Initialize(ctx, pool, "invoices"); err != nil {
		return err
	}
	_, err = pool.Exec(ctx, "create table if not exists bookings (order_id text not null)")
	return err
}
