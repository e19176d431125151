// Command torture tries to break the event log for as long as it is told to, on a throw-away server. It exits with 1
// when something broke.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"

	"github.com/watermill-eventlog/watermill-eventlog/internal/torture"
)

func main() {
	torture.Worker()
	var config torture.Config
	flag.IntVar(&config.Faults, "faults", 1000, "how many faults that count end the run")
	flag.DurationVar(&config.Duration, "duration", 0, "how long faults go on at most (0: no bound)")
	flag.Uint64Var(&config.Seed, "seed", 0, "the seed of another run (0: a random one)")
	flag.IntVar(&config.Workers, "workers", 3, "how many worker processes")
	flag.DurationVar(&config.Pause, "pause", 0, "how long each of the three injectors waits between two faults, on average (0: the default)")
	verbose := flag.Bool("v", false, "show each fault")
	flag.Parse()
	if config.Seed == 0 {
		config.Seed = rand.Uint64()
	}
	fmt.Printf("seed %d\n", config.Seed)
	if *verbose {
		config.Logf = func(format string, args ...any) { fmt.Printf(format+"\n", args...) }
	}

	ctx, release := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, release) // a second interrupt ends the program at once
	report, err := torture.Run(ctx, config)
	if report != nil {
		fmt.Print(report)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
	}
	if err != nil || len(report.Violations) > 0 {
		os.Exit(1)
	}
}
