package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

// exitError ends the program in a way of its own, which was told of already.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit %d", int(e)) }

func (p *program) checkCommand() *cobra.Command {
	var grace, matchNothing time.Duration
	var name consumer
	c := &cobra.Command{
		Use:   "check [CONSUMER...]",
		Short: "Tell whether the work is being done",
		Long: `Check compares what the log holds with what its consumers have handled, from outside the processes that
do the work: work that waits and is not being done, events that fail, are parked or were lost, missing
numbers and cursors, staged events that get no number, and consumers that match nothing. Of each it says
what to do next. What cannot be found out is unknown, and unknown is never ok.

The consumers that are named are expected: one that has no row is a problem. Without names those that have
a row are looked at.

It ends as monitoring programs expect: with 0 for ok, 1 for a warning, 2 for critical and 3 for unknown,
which a wrong call (2 elsewhere) is too.`,
		Example: `  eventlog check
  eventlog check push mail@orders --grace 2m
  eventlog check --json`,
		ValidArgsFunction: p.completeConsumers(),
	}
	c.Flags().DurationVar(&grace, "grace", 5*time.Minute, "how long work may wait")
	c.Flags().DurationVar(&matchNothing, "match-nothing", 24*time.Hour, "how much of the log a consumer may pass without an event of its own")
	name.add(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		keys, err := name.keys(args)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(c.Context(), p.timeout)
		defer cancel()
		db := &lazy{connect: p.connect}
		defer db.close(ctx)
		w, err := watch.New(db, watch.Config{Log: p.log, Keys: keys, Grace: grace, MatchNothing: matchNothing, Timeout: p.timeout})
		if err != nil {
			return usageError{err}
		}
		p.began = true
		report := w.Look(ctx)
		if report.Err != nil {
			fmt.Fprintf(p.err, "eventlog: %v\n", report.Err)
		}
		if err := p.print(report, func(out io.Writer) { fmt.Fprint(out, report) }); err != nil {
			return err
		}
		if code := report.ExitCode(); code != 0 {
			return exitError(code)
		}
		return nil
	}
	return c
}

// lazy is a database that is connected to by its first query, so that one that cannot be reached is what a look finds.
type lazy struct {
	connect func(context.Context) (*pgx.Conn, error)
	conn    *pgx.Conn
}

func (l *lazy) Query(ctx context.Context, sql string, args ...any) (_ pgx.Rows, err error) {
	if l.conn == nil {
		if l.conn, err = l.connect(ctx); err != nil {
			return nil, err
		}
	}
	return l.conn.Query(ctx, sql, args...)
}

func (l *lazy) close(ctx context.Context) {
	if l.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = l.conn.Close(ctx) // there is nothing left to lose
}
