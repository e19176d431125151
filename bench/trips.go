package main

import (
	"context"
	"errors"
	"net"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

const lateness = 2 * time.Millisecond // each way

// trips counts round trips on the wire, and looks what distance costs.
func trips(ctx context.Context, b *bench) error {
	for range b.repeat {
		if err := b.inDatabase(ctx, func(db *database) error { return tripsOfDrain(ctx, b, db, 50) }); err != nil {
			return err
		}
		if err := b.inDatabase(ctx, func(db *database) error { return tripsOfTrickle(ctx, b, db, 50) }); err != nil {
			return err
		}
	}
	addr, stop, err := farAway(net.JoinHostPort(b.server.Host(), strconv.Itoa(b.server.Port())), lateness)
	if err != nil {
		return err
	}
	defer stop()
	places := []struct{ name, addr string }{{"batches of 500, local", ""}, {"batches of 500, 2 ms away each way", addr}}
	err = inTurns(b.repeat, len(places), func(i int) error {
		return b.inDatabase(ctx, func(db *database) error {
			if err := db.load(ctx, b.n, 1); err != nil {
				return err
			}
			far := *db
			if places[i].addr != "" {
				parsed, err := url.Parse(db.url)
				if err != nil {
					return err
				}
				parsed.Host = places[i].addr
				far.url = parsed.String()
			}
			pool, err := far.open(ctx, 4, nil)
			if err != nil {
				return err
			}
			defer pool.Close()
			if places[i].addr != "" {
				if err := measureDistance(ctx, b, pool); err != nil {
					return err
				}
			}
			start := time.Now()
			err = drainOn(ctx, db, pool, 500, subscriber.AllTopics, b.n)
			elapsed := time.Since(start)
			if err == nil {
				err = db.checkJobs(ctx, b.n, true)
			}
			if err != nil {
				b.report.fail(places[i].name, err)
				return ctx.Err()
			}
			b.report.add(places[i].name, "events/s", float64(b.n)/elapsed.Seconds())
			b.say("%s: %s events/s", places[i].name, number(float64(b.n)/elapsed.Seconds()))
			return nil
		})
	})
	b.report.ratio("rate 2 ms away to the local one", places[1].name, places[0].name, atLeast(0.5))
	for _, f := range []struct {
		name string
		most float64
	}{{drainTrips, 2}, {otherTrips, 3}} {
		if figure := b.report.find(f.name); figure != nil {
			b.report.compare(f.name, figure.Values, atMost(f.most))
		}
	}
	return err
}

func measureDistance(ctx context.Context, b *bench, pool *pgxpool.Pool) error {
	var all []float64
	for range 20 {
		start := time.Now()
		if err := pool.Ping(ctx); err != nil {
			return err
		}
		all = append(all, time.Since(start).Seconds()*1000)
	}
	b.report.add("a round trip 2 ms away each way", "ms", quantile(all, 0.5))
	return nil
}

const (
	drainTrips = "round trips of a round in a drain"
	otherTrips = "round trips of a round otherwise"
)

// tripsOfDrain counts between the first events of the second round and of the last.
func tripsOfDrain(ctx context.Context, b *bench, db *database, rounds int) error {
	const batch = 100
	if err := db.load(ctx, rounds*batch, 1); err != nil {
		return err
	}
	w := &wire{}
	pool, err := db.open(ctx, 4, w.count)
	if err != nil {
		return err
	}
	defer pool.Close()
	handled := newCounter(rounds * batch)
	var first, last int64
	o, err := startOurs(ctx, pool, subscriber.RunnerConfig{
		PollInterval: time.Hour, Consumers: []subscriber.ConsumerConfig{consumer("push", subscriber.AllTopics, batch)},
	}, func(_ int, msg *message.Message) ([]*message.Message, error) {
		switch int(handled.calls.Load()) {
		case batch:
			first = w.trips.Load()
		case (rounds - 1) * batch:
			last = w.trips.Load()
		}
		handled.count()
		return job(msg), nil
	})
	if err != nil {
		return err
	}
	if err := errors.Join(handled.wait(ctx), db.until(ctx, sqlPassed, rounds*batch), o.stop()); err != nil {
		return err
	}
	b.report.add(drainTrips, "trips", float64(last-first)/float64(rounds-2))
	return db.checkJobs(ctx, rounds*batch, true)
}

// tripsOfTrickle counts from one event to the next, where each is committed before the next is appended.
func tripsOfTrickle(ctx context.Context, b *bench, db *database, events int) error {
	w := &wire{}
	pool, err := db.open(ctx, 4, w.count)
	if err != nil {
		return err
	}
	defer pool.Close()
	handled := make(chan struct{}, events)
	o, err := startOurs(ctx, pool, subscriber.RunnerConfig{
		PollInterval: time.Hour, Consumers: []subscriber.ConsumerConfig{consumer("push", subscriber.AllTopics, 500)},
	}, func(_ int, msg *message.Message) ([]*message.Message, error) {
		handled <- struct{}{}
		return job(msg), nil
	})
	if err != nil {
		return err
	}
	var counts []float64
	for i := 1; i <= events; i++ {
		before := w.trips.Load()
		if err := errors.Join(appendOne(ctx, db, i), db.until(ctx, sqlPassed, i)); err != nil {
			return errors.Join(err, o.stop())
		}
		<-handled
		if err := pause(ctx, 5*time.Millisecond); err != nil { // it may look once more
			return errors.Join(err, o.stop())
		}
		if i > 5 { // what is prepared once was
			counts = append(counts, float64(w.trips.Load()-before))
		}
	}
	if err := o.stop(); err != nil {
		return err
	}
	b.report.add(otherTrips, "trips", quantile(counts, 0.5))
	b.report.note("a round otherwise (one event at a time): %v trips at least, %v at most", slices.Min(counts), slices.Max(counts))
	return db.checkJobs(ctx, events, true)
}
