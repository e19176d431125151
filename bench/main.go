// Command bench puts the event log beside what a user would pick instead, and beside the limit, in one run on one
// throw-away server with ordinary durability. Absolute figures tell of the machine; the ratios are what counts.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"runtime/pprof"
	"strings"
	"syscall"
)

// scenario is one question that is put to every rival.
type scenario struct {
	name string
	run  func(context.Context, *bench) error
}

var scenarios = []scenario{
	{"drain", drain},
	{"backlog", backlog},
	{"trickle", trickle},
	{"trips", trips},
	{"consumers", consumers},
	{"idle", idle},
	{"memory", memory},
	{"append", appending},
}

// options are what the flags say.
type options struct {
	full     bool
	run      string
	match    string
	n        int
	repeat   int
	fsync    bool
	json     string
	markdown string
	readme   string
	profile  string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out, progress io.Writer) error {
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(progress)
	flags.BoolVar(&o.full, "full", false, "more events, more rounds, larger backlogs: half an hour instead of minutes")
	flags.StringVar(&o.run, "run", "", "the `scenarios` to run, by commas: "+names()+" (default all)")
	flags.StringVar(&o.match, "match", "", "run only the rivals of a drain whose name matches this `regexp`")
	flags.IntVar(&o.n, "n", 0, "how many `events` a drain goes through (default 50000)")
	flags.IntVar(&o.repeat, "repeat", 0, "how many `rounds` each figure is taken (default 3, or 5 with -full)")
	flags.BoolVar(&o.fsync, "fsync", true, "let the server wait for its disk, as it ordinarily does")
	flags.StringVar(&o.json, "json", "", "write the report as JSON to this `file`")
	flags.StringVar(&o.markdown, "markdown", "", "write the report as Markdown to this `file`")
	flags.StringVar(&o.readme, "readme", "", "put the Markdown table between the markers of this `file`")
	flags.StringVar(&o.profile, "cpuprofile", "", "write a CPU profile of the client to this `file`")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	chosen, err := choose(o.run)
	if err != nil {
		return err
	}
	match, err := regexp.Compile(o.match)
	if err != nil {
		return fmt.Errorf("-match: %w", err)
	}
	if o.readme != "" { // before an hour of work
		if err := checkMarkers(o.readme); err != nil {
			return err
		}
	}
	if o.profile != "" {
		file, err := os.Create(o.profile)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		if err := pprof.StartCPUProfile(file); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}

	b, err := newBench(ctx, o, match, progress)
	if err != nil {
		return err
	}
	for _, s := range chosen {
		b.report.scenario = s.name
		if err := s.run(ctx, b); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", s.name, err), b.close())
		}
	}
	if err := b.close(); err != nil {
		return err
	}
	b.report.finish()
	if err := b.report.print(out); err != nil {
		return err
	}
	if err := b.report.write(o); err != nil {
		return err
	}
	if len(b.report.Wrong) > 0 {
		return fmt.Errorf("wrong results, which are no times: %s", strings.Join(b.report.Wrong, "; "))
	}
	return nil
}

func names() string {
	all := make([]string, len(scenarios))
	for i, s := range scenarios {
		all[i] = s.name
	}
	return strings.Join(all, ", ")
}

func choose(list string) ([]scenario, error) {
	if list == "" {
		return scenarios, nil
	}
	var chosen []scenario
	for name := range strings.SplitSeq(list, ",") {
		found := false
		for _, s := range scenarios {
			if s.name == strings.TrimSpace(name) {
				chosen, found = append(chosen, s), true
			}
		}
		if !found {
			return nil, fmt.Errorf("no scenario %q: there are %s", name, names())
		}
	}
	return chosen, nil
}
