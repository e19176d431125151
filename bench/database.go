package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

// bench is one run of the program.
type bench struct {
	options
	matching *regexp.Regexp
	server   *pgserver.Server
	admin    *pgx.Conn
	report   Report
	progress io.Writer
	made     int // databases

	postmaster int // the server's first process
}

func newBench(ctx context.Context, o options, matching *regexp.Regexp, progress io.Writer) (*bench, error) {
	b := &bench{options: o, matching: matching, progress: progress}
	if b.n == 0 {
		b.n = 50_000
	}
	if b.repeat == 0 {
		b.repeat = b.either(3, 5)
	}
	server, err := pgserver.Start(ctx, pgserver.Config{Fsync: o.fsync, Settings: map[string]string{"max_wal_size": "4GB"}})
	if err != nil {
		return nil, err
	}
	b.server = server
	if err := b.setUp(ctx); err != nil {
		return nil, errors.Join(err, b.close())
	}
	return b, nil
}

// either is for what the short form and the full one do differently.
func (b *bench) either(short, full int) int {
	if b.full {
		return full
	}
	return short
}

// sqlTemplate has what the rivals need that we do not: the position of the loop written by hand.
const sqlTemplate = `create table loop_position (name text primary key, seq bigint not null)`

func (b *bench) setUp(ctx context.Context) (err error) {
	if b.admin, err = pgx.Connect(ctx, b.server.URL("postgres")); err != nil {
		return err
	}
	var version string
	if err := b.admin.QueryRow(ctx, "select split_part(current_setting('server_version'), ' ', 1)").Scan(&version); err != nil {
		return err
	}
	b.report.Machine = machine(version)
	if backend, ok := processStat(fmt.Sprintf("/proc/%d/stat", b.admin.PgConn().PID())); ok {
		b.postmaster = backend.parent
	}
	fsync := "on"
	if !b.fsync {
		fsync = "off"
	}
	b.report.Form = fmt.Sprintf("One run, fsync %s, %s events behind, each figure taken %d times, rivals in turns; medians.",
		fsync, grouped(int64(b.n)), b.repeat)

	if _, err := b.admin.Exec(ctx, "create database template_bench"); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, b.server.URL("template_bench"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	if _, err := migrations.Up(ctx, conn, nil); err != nil {
		return err
	}
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}
	if err := jobs.Initialize(ctx, conn, jobTopic); err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sqlTemplate)
	return err
}

func (b *bench) close() error {
	var err error
	if b.admin != nil {
		err = b.admin.Close(context.Background())
	}
	return errors.Join(err, b.server.Stop())
}

// inTurns takes a figure of every member, round after round, each time in another order: what the machine does
// meanwhile meets all of them.
func inTurns(rounds, members int, take func(member int) error) error {
	for round := range rounds {
		for i := range members {
			member := (i + round) % members
			if round%2 == 1 {
				member = members - 1 - member
			}
			if err := take(member); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.progress, "%s: "+format+"\n", append([]any{b.report.scenario}, args...)...)
}

// database is a database for one measurement.
type database struct {
	*pgxpool.Pool // for what is not measured
	name, url     string
}

// inDatabase gives do a fresh database with the tables of all.
func (b *bench) inDatabase(ctx context.Context, do func(*database) error) (err error) {
	b.made++
	db := &database{name: fmt.Sprintf("bench_%d", b.made)}
	db.url = b.server.URL(db.name)
	if _, err := b.admin.Exec(ctx, "create database "+db.name+" template template_bench"); err != nil {
		return err
	}
	defer func() {
		_, dropErr := b.admin.Exec(context.WithoutCancel(ctx), "drop database "+db.name+" with (force)")
		err = errors.Join(err, dropErr)
	}()
	if db.Pool, err = db.open(ctx, 2, nil); err != nil {
		return err
	}
	defer db.Close()
	return do(db)
}

// open opens a pool whose connections are there before they are needed.
func (db *database) open(ctx context.Context, conns int, change func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(db.url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(conns)
	if change != nil {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	all := make([]*pgxpool.Conn, 0, conns)
	for range conns {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			pool.Close()
			return nil, err
		}
		all = append(all, conn)
	}
	for _, conn := range all {
		conn.Release()
	}
	return pool, nil
}

const (
	eventTopic = "orders"
	rareTopic  = "refunds" // of every rare-th event, where there are several topics
	rare       = 1000
	jobTopic   = "jobs"
	uuidPrefix = "00000000-0000-4000-8000-" // the rest of an event's uuid is its number
)

// jobPayload is what every handler returns: 120 bytes.
var jobPayload = fmt.Appendf(nil, `{"job": "%0108d"}`, 0)

// sqlEvents makes the events $1 to $2: 250 bytes and three metadata keys.
const sqlEvents = `
select i, '` + uuidPrefix + `' || lpad(i::text, 12, '0') as uuid,
    rpad('{"id": ' || i || ', "customer": "', 248, 'abcdefgh') || '"}' as payload,
    '{"correlation_id": "0123456789abcdef", "tenant": "north", "source": "shop"}' as metadata
from generate_series($1::bigint, $2::bigint) i`

// load puts events 1 to n into the log, in turns over some topics, as if they had been appended.
func (db *database) load(ctx context.Context, n, topics int) error {
	for first := 1; first <= n; first += 500_000 {
		if _, err := db.Exec(ctx, `
insert into event_log (seq, occurred_at, recorded_at, topic, uuid, payload, metadata)
select i, clock_timestamp(), clock_timestamp(),
    case when $3 > 1 and i % $4 = 0 then '`+rareTopic+`' else '`+eventTopic+`' || coalesce(nullif(i % $3, 0)::text, '') end,
    uuid, convert_to(payload, 'UTF8'), metadata::jsonb
from (`+sqlEvents+`) e order by i`, first, min(n, first+499_999), topics, rare); err != nil {
			return err
		}
	}
	_, err := db.Exec(ctx, "update event_seq set last_seq = $1", n)
	return errors.Join(err, db.settle(ctx))
}

// settle leaves nothing behind that the server would do during the measurement.
func (db *database) settle(ctx context.Context) error {
	if _, err := db.Exec(ctx, "vacuum (analyze)"); err != nil {
		return err
	}
	_, err := db.Exec(ctx, "checkpoint")
	runtime.GC()
	return err
}

// checkJobs returns what is wrong with the jobs: they must be of the first events, of n at least, and one of each.
func (db *database) checkJobs(ctx context.Context, n int, ordered bool) error {
	var jobs, events, inOrder int
	err := db.QueryRow(ctx, `
select count(*), count(distinct uuid), count(*) filter (where uuid = expected)
from (
    select j.uuid, '`+uuidPrefix+`' || lpad((row_number() over (order by j."offset"))::text, 12, '0') as expected
    from watermill_`+jobTopic+` j
) j`).Scan(&jobs, &events, &inOrder)
	switch {
	case err != nil:
		return err
	case jobs < n || events != jobs:
		return fmt.Errorf("%d events were handled, and there are %d jobs of %d events", n, jobs, events)
	case ordered && inOrder != jobs:
		return fmt.Errorf("%d of %d jobs are not where they belong", jobs-inOrder, jobs)
	}
	return nil
}

// until waits for a query to say true.
func (db *database) until(ctx context.Context, sql string, args ...any) error {
	for {
		var done bool
		if err := db.QueryRow(ctx, sql, args...).Scan(&done); err != nil || done {
			return err
		}
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
