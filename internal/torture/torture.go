package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/retention"
)

const (
	// patience is how long the cursors may take to reach the head, and how long they may stand still.
	patience = 90 * time.Second
	// checkInterval is how often the database is checked while faults go on.
	checkInterval = 500 * time.Millisecond
)

// Config is for [Run].
type Config struct {
	// Faults is how many counted faults end the run. Defaults to 120.
	Faults int

	// Duration ends the faults although there were fewer. Defaults to none.
	Duration time.Duration

	// Seed of everything that is chosen at random. Defaults to a random one.
	Seed uint64

	// Workers is the number of worker processes. Defaults to 3.
	Workers int

	// Pause is how long each injector waits between two faults, on average, so that work goes on between them.
	// Defaults to 300 milliseconds.
	Pause time.Duration

	// Logf gets a line for each fault and each death. Defaults to none.
	Logf func(format string, args ...any)

	// plant is a bug that the checker has to find.
	plant plant
	// until is the kind of violation that ends the run. Defaults to any.
	until Kind
}

func (c Config) withDefaults() Config {
	if c.Faults == 0 {
		c.Faults = 120
	}
	if c.Seed == 0 {
		c.Seed = rand.Uint64()
	}
	if c.Workers == 0 {
		c.Workers = 3
	}
	if c.Pause == 0 {
		c.Pause = 300 * time.Millisecond
	}
	if c.Logf == nil {
		c.Logf = func(string, ...any) {}
	}
	return c
}

// run is one run.
type run struct {
	config Config
	server *pgserver.Server
	pool   *pgxpool.Pool // to the server itself, not through the proxy
	proxy  *proxy
	slots  []*slot
	ledger *ledger
	report *Report
	check  *checker

	retention   *retention.Retention
	maintaining sync.Mutex

	up  sync.RWMutex       // held for writing while the server is down
	end context.CancelFunc // of the faults
}

// Run makes a run and leaves nothing behind. What the checker found is in the report; an error is a fault of the
// run itself, or the end of ctx.
func Run(ctx context.Context, config Config) (report *Report, err error) {
	config = config.withDefaults()
	server, err := pgserver.Start(ctx, pgserver.Config{Settings: map[string]string{"max_connections": "300"}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()

	poolConfig, err := pgxpool.ParseConfig(server.URL("postgres"))
	if err != nil {
		return nil, err
	}
	poolConfig.MaxConns = 16
	poolConfig.ConnConfig.RuntimeParams["application_name"] = "torture"
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	if err := prepare(ctx, pool); err != nil {
		return nil, err
	}
	retention, err := newRetention(ctx, server, pool)
	if err != nil {
		return nil, err
	}
	p, err := newProxy(fmt.Sprintf("%s:%d", server.Host(), server.Port()))
	if err != nil {
		return nil, err
	}
	defer p.close()

	r := &run{
		config: config, server: server, pool: pool, proxy: p, retention: retention,
		ledger: newLedger(), report: newReport(config.Seed),
	}
	r.check = newChecker(pool, r.ledger, r.report)
	err = r.torture(ctx)
	r.report.end()
	return r.report, err
}

// torture does everything between the server's start and its stop.
func (r *run) torture(ctx context.Context) error {
	if err := appendOneOfEach(ctx, r.pool); err != nil {
		return err
	}
	var supervised sync.WaitGroup
	for i := range r.config.Workers {
		s := &slot{run: r, number: i + 1}
		r.slots = append(r.slots, s)
		supervised.Go(s.supervise)
	}
	defer func() {
		for _, s := range r.slots {
			s.kill() // if it was not stopped
		}
		supervised.Wait()
	}()
	faulting, end := context.WithCancel(ctx)
	defer end()
	r.end = end
	if r.config.Duration > 0 {
		timer := time.AfterFunc(r.config.Duration, end)
		defer timer.Stop()
	}
	var checking, injecting sync.WaitGroup
	checking.Go(func() { r.checkOften(faulting) })
	checking.Go(func() { r.replayParked(faulting) })
	checking.Go(func() { r.maintain(faulting) })
	if r.config.plant == plantHole {
		checking.Go(func() { r.cutHole(faulting) })
	}
	deal := newDeal(r.config)
	for i := range injectors {
		injecting.Go(func() { r.inject(faulting, deal, rand.New(rand.NewPCG(r.config.Seed, uint64(i)))) })
	}
	injecting.Wait()
	end()
	checking.Wait()
	r.report.faultsEnded()
	err := ctx.Err()
	if err == nil && !r.report.violated() {
		err = r.settle(ctx)
	}
	return errors.Join(err, r.check.count(context.WithoutCancel(ctx)))
}

// checkOften checks until ctx ends. A violation ends the faults.
func (r *run) checkOften(ctx context.Context) {
	moved, positions := time.Now(), int64(-1)
	for wait(ctx, checkInterval) == nil {
		r.up.RLock()
		sum, err := r.check.run(ctx, false)
		r.up.RUnlock()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			r.report.violate(KindCheck, err.Error())
		case sum != positions:
			moved, positions = time.Now(), sum
		case time.Since(moved) > patience:
			r.report.violate(KindStuck, fmt.Sprintf("no cursor has moved for %v: %s", patience, r.check.standing(ctx)))
		}
		if r.report.violatedBy(r.config.until) {
			r.end()
			return
		}
	}
}

// replayParked asks now and then for the replay of an event that was parked.
func (r *run) replayParked(ctx context.Context) {
	const curable = `
select p.seq from event_consumer_parked p
where p.replay_at is null and p.attempts >= $1 and p.metadata->>'kind' <> 'killer'
order by random() limit 1`
	for wait(ctx, time.Second) == nil {
		r.up.RLock()
		var seq int64
		err := r.pool.QueryRow(ctx, curable, parkAfter).Scan(&seq)
		if err == nil {
			_, err = operate.Replay(ctx, r.pool, nil, cursor.Key{Consumer: parking}, seq, operate.Order{By: "torture"})
		}
		if err == nil {
			r.report.count(&r.report.Replays)
		}
		r.up.RUnlock()
	}
}

// settle lets the workers catch up, stops them, and checks everything.
func (r *run) settle(ctx context.Context) error {
	for _, s := range r.slots {
		s.quiet()
	}
	if !r.caughtUp(ctx) {
		return ctx.Err()
	}
	// One more round for every cursor: it passes what was left by those that were cut off.
	if err := appendLast(ctx, r.pool); err != nil {
		return err
	}
	if !r.caughtUp(ctx) {
		return ctx.Err()
	}
	for _, s := range r.slots {
		s.stop()
	}
	if err := r.check.nobodyLeft(ctx); err != nil {
		return err
	}
	_, err := r.check.run(ctx, true)
	return err
}

// caughtUp waits until every cursor is at the head and nothing is left to be replayed.
func (r *run) caughtUp(ctx context.Context) bool {
	const behind = `
select count(*) from (
    select from event_consumer_cursors c, event_seq s where c.last_seq <> s.last_seq
    union all select from event_consumer_parked p where p.replay_at is not null
    union all select from event_outbox
    union all select from pg_stat_activity a where a.application_name like '%writer%' and a.xact_start is not null
) b`
	deadline := time.Now().Add(patience)
	for {
		var n int
		err := r.pool.QueryRow(ctx, behind).Scan(&n)
		switch {
		case err == nil && n == 0:
			return true
		case ctx.Err() != nil:
			return false
		case time.Now().After(deadline):
			r.report.violate(KindStuck, fmt.Sprintf("the log was not handled %v after the last fault: %s (%v)", patience, r.check.standing(ctx), err))
			return false
		}
		_ = wait(ctx, 50*time.Millisecond)
	}
}

// wait returns an error when ctx ended first.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
