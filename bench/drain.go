package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// rival does the main job: every event of a backlog one job, through a stock router.
type rival struct {
	name      string
	unordered bool
	slow      bool // is measured over the beginning of the same backlog
	load      func(ctx context.Context, db *database, n int) error
	run       func(ctx context.Context, db *database, n int) error // measured, with connecting left out
}

const (
	reference = "hand-written loop, batch 1000"
	limit     = "the same without a router"
	oursBest  = "ours, batch 1000"
	oursUsual = "ours, batch 500 (default)"

	oursUnrecorded = "ours, batch 500, no record of rounds"
)

func loadLog(ctx context.Context, db *database, n int) error {
	if err := db.load(ctx, n, 1); err != nil {
		return err
	}
	return db.placeLoop(ctx)
}

// drain goes through a backlog.
func drain(ctx context.Context, b *bench) error {
	rivals := []rival{
		{name: limit, load: loadLog, run: drainLoop(1000, false)},
		{name: reference, load: loadLog, run: drainLoop(1000, true)},
		{name: oursBest, load: loadLog, run: drainOurs(1000, "*")},
		{name: oursUsual, load: loadLog, run: drainOurs(500, "*")},
		{name: oursUnrecorded, load: loadLog, run: drainOurs(500, "*", unrecorded)},
		{name: "ours, batch 500, of one topic", load: loadLog, run: drainOurs(500, eventTopic)},
		{name: "ours, batch 100", load: loadLog, run: drainOurs(100, "*")},
	}
	own, inTx, peers := watermillSQL()
	rivals = append(append(rivals, peers...), river()...)
	kept := rivals[:0]
	for _, r := range rivals {
		if b.matching.MatchString(r.name) {
			kept = append(kept, r)
		}
	}
	rivals = kept

	first := min(b.n, (b.n/25+999)/1000*1000) // whole batches
	b.report.note("watermill-sql and River have the same backlog, and are measured over its first %s events", grouped(int64(first)))
	err := inTurns(b.repeat, len(rivals), func(i int) error {
		r, n := rivals[i], b.n
		if r.slow {
			n = first
		}
		return b.inDatabase(ctx, func(db *database) error {
			if err := r.load(ctx, db, b.n); err != nil {
				return fmt.Errorf("%s: load: %w", r.name, err)
			}
			if err := db.settle(ctx); err != nil {
				return err
			}
			bound, cancel := context.WithTimeout(ctx, 10*time.Minute)
			defer cancel()
			server, known := serverCPU(b.postmaster)
			start, cpu := time.Now(), clientCPU()
			err := r.run(bound, db, n)
			elapsed, cpu := time.Since(start), clientCPU()-cpu
			served, _ := serverCPU(b.postmaster)
			if err == nil {
				err = db.checkJobs(ctx, n, !r.unordered)
			}
			if err != nil {
				b.report.fail(r.name, err)
				b.say("%s: WRONG: %v", r.name, err)
				return ctx.Err()
			}
			rate := float64(n) / elapsed.Seconds()
			b.report.add(r.name, "events/s", rate)
			b.report.add(r.name+", client CPU", "µs/event", float64(cpu.Microseconds())/float64(n))
			if known {
				b.report.add(r.name+", server CPU", "µs/event", float64((served-server).Microseconds())/float64(n))
			}
			b.say("%s: %s events/s", r.name, number(rate))
			return nil
		})
	})
	if err != nil {
		return err
	}
	report := &b.report
	report.ratio("ours (1000) to the hand-written loop", oursBest, reference, atLeast(1.3))
	report.ratio("ours (default) to the hand-written loop", oursUsual, reference, atLeast(1.3))
	report.ratio("ours (1000) to the loop without a router", oursBest, limit, target{})
	usual := func(name string) bool { return !strings.Contains(name, "batch 100,") }
	report.ratioToBest("ours (default) to watermill-sql at its default batch, own statements", oursUsual, slices.DeleteFunc(slices.Clone(own), usual), atLeast(20))
	report.ratioToBest("ours (default) to watermill-sql's best, own statements", oursUsual, own, atLeast(20))
	report.ratioToBest("ours (default) to watermill-sql at its default batch, in the message's transaction", oursUsual, slices.DeleteFunc(slices.Clone(inTx), usual), atLeast(6))
	report.ratioToBest("ours (default) to watermill-sql's best, in the message's transaction", oursUsual, inTx, atLeast(6))
	report.ratio("ours (default) to ours without a record of rounds", oursUsual, oursUnrecorded, target{})
	report.ratio("ours (default) to River", oursUsual, riverName, target{})
	return nil
}
