// Quickstart shows an event log at work: it appends GitHub webhook events, has worker processes handle them,
// kills the first worker in the middle of a round, starts another, and counts in the database what became of
// every event.
//
//	go run ./examples/quickstart
//
// It starts a PostgreSQL server that is gone when it ends, or works in the database that -database names.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// samplesForARun is how often the bundled sample is appended, so that there is something to see.
const samplesForARun = 15

// workerCommand makes this program one of its own workers.
const workerCommand = "worker"

const usage = `Quickstart appends GitHub webhook events to an event log, has worker processes
handle them, kills the first worker in the middle of a round, starts another,
and counts what became of every event.

usage: go run ./examples/quickstart [flags]

  -database URL  work in this PostgreSQL database and keep what was written; a
                 further run carries on
                 (default: a server that is gone at the end)
  -events FILE   append the events of a file, a line each:
                 {"topic": "...", "action": "...", "payload": ...}
                 "-" is standard input
                 (default: a bundled sample of 60 GitHub webhooks)
  -repeat N      append the events N times
                 (default: 15 times for the sample, once for a file)
  -v             show the workers' own log

Exit code: 0 if every event was handled exactly once, 1 if not or if something
failed, 2 if it was called in a wrong way, 130 if it was interrupted.
`

type settings struct {
	database string
	events   string
	repeat   int
	verbose  bool
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == workerCommand {
		os.Exit(workerMain())
	}
	os.Exit(quickstart(os.Args[1:]))
}

// quickstart returns the exit code.
func quickstart(args []string) int {
	s, err := parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Print(usage)
		return 0
	case err != nil:
		fmt.Fprintf(os.Stderr, "quickstart: %v (-h shows the flags)\n", err)
		return 2
	}
	events, err := readEvents(s.events, os.Stdin)
	if err != nil {
		return failed(err)
	}

	// From here on there is something to clean up. A second interrupt ends the program at once; what it has
	// started notices and ends as well.
	ctx, release := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, release)
	out := newDisplay(os.Stdout)
	err = run(ctx, s, events, out)
	interrupted := ctx.Err() != nil
	release()
	switch {
	case interrupted && !errors.Is(err, errLeft):
		fmt.Fprintln(os.Stderr, "quickstart: interrupted; nothing was left running")
		return 130
	case err != nil:
		return failed(err)
	}
	return 0
}

func failed(err error) int {
	fmt.Fprintf(os.Stderr, "quickstart: %v\n", err)
	return 1
}

func parse(args []string) (settings, error) {
	var s settings
	flags := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&s.database, "database", "", "")
	flags.StringVar(&s.events, "events", "", "")
	flags.IntVar(&s.repeat, "repeat", 0, "")
	flags.BoolVar(&s.verbose, "v", false, "")
	if err := flags.Parse(args); err != nil {
		return settings{}, err
	}
	given := map[string]bool{}
	flags.Visit(func(f *flag.Flag) { given[f.Name] = true })
	switch {
	case flags.NArg() > 0:
		return settings{}, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case given["repeat"] && s.repeat < 1:
		return settings{}, fmt.Errorf("-repeat %d: at least 1", s.repeat)
	case given["database"] && s.database == "":
		return settings{}, errors.New("-database is empty")
	case given["events"] && s.events == "":
		return settings{}, errors.New("-events is empty")
	case !given["repeat"] && s.events == "":
		s.repeat = samplesForARun
	case !given["repeat"]:
		s.repeat = 1
	}
	return s, nil
}

// run does everything between the flags and the exit code, and leaves nothing running.
func run(ctx context.Context, s settings, events []event, out *display) (err error) {
	began := time.Now()
	db, err := openDatabase(ctx, s.database, out)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, db.close())
		if err == nil {
			out.say("done", "in %s; nothing was left running", elapsed(began))
		}
	}()

	if err := db.prepare(ctx, out); err != nil {
		return err
	}
	if err := db.append(ctx, events, s.repeat, out); err != nil {
		return err
	}
	rolledBack, err := db.rolledBack(ctx)
	if err != nil {
		return err
	}
	if err := db.work(ctx, s.verbose, out); err != nil {
		return err
	}
	return db.report(ctx, rolledBack, out)
}

func elapsed(since time.Time) time.Duration { return time.Since(since).Round(10 * time.Millisecond) }
