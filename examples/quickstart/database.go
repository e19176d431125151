package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

// consumers of this example, each with a topic for its jobs.
var consumers = []string{"audit", "notify"}

func jobTopic(consumer string) string { return consumer + "_jobs" }

// connectBudget is how long the first connection may take.
const connectBudget = 10 * time.Second

// database is where the run takes place.
type database struct {
	url   string
	pool  *pgxpool.Pool
	guard *pgxpool.Conn // holds the lock that keeps a second quickstart out
	stop  func() error  // of the server, if it is ours
}

// openDatabase connects to the database at an address, or to one on a server that it starts.
func openDatabase(ctx context.Context, url string, out *display) (_ *database, err error) {
	db := &database{url: url, stop: func() error { return nil }}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.close())
		}
	}()
	if url == "" {
		out.say("server", "starting a throw-away PostgreSQL")
		began := time.Now()
		server, err := pgserver.Start(ctx, pgserver.Config{Fsync: true, Download: true})
		if err != nil {
			return nil, err
		}
		db.url, db.stop = server.URL("postgres"), server.Stop
		out.say("server", "started in %s on port %d", elapsed(began), server.Port())
	}
	if err := db.connect(ctx, out); err != nil {
		if url != "" {
			err = fmt.Errorf("-database: %w", oneLine(err))
		}
		return nil, err
	}
	return db, nil
}

func (db *database) connect(ctx context.Context, out *display) error {
	config, err := pgxpool.ParseConfig(db.url)
	if err != nil {
		return err
	}
	config.MaxConns = 4
	config.ConnConfig.RuntimeParams["application_name"] = "quickstart"
	if db.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, connectBudget)
	defer cancel()
	if db.guard, err = db.pool.Acquire(ctx); err != nil {
		return err
	}
	var name, version string
	var alone bool
	err = db.guard.QueryRow(ctx, `
select current_database(), split_part(current_setting('server_version'), ' ', 1),
    pg_try_advisory_lock(hashtextextended('watermill-eventlog quickstart', 0))`).Scan(&name, &version, &alone)
	switch {
	case err != nil:
		return err
	case !alone:
		return fmt.Errorf("another quickstart is running in database %q: wait until it has ended", name)
	}
	out.say("database", "%q on PostgreSQL %s", name, version)
	return nil
}

// oneLine joins the lines of an error that tried several addresses, or one in several ways.
func oneLine(err error) error {
	lines := strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\t' })
	return errors.New(strings.Join(slices.Compact(lines), " "))
}

// errLeft is returned when something may still be running.
var errLeft = errors.New("something may have been left running")

// close takes the connections and, if it is ours, the server.
func (db *database) close() error {
	if db.guard != nil {
		// The lock goes with its connection.
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = db.guard.Hijack().Close(ctx)
	}
	if db.pool != nil {
		db.pool.Close()
	}
	if err := db.stop(); err != nil {
		return fmt.Errorf("%w: %w", errLeft, err)
	}
	return nil
}

// The effects have no unique key, so that a second one of the same event would be counted and not refused. The
// numbers of the column id are given out for good, also to rows that are rolled back.
const sqlEffectsTable = `
create table if not exists public.quickstart_effects (
    id             bigint generated always as identity,
    consumer       text   not null,
    seq            bigint not null,
    payload_sha256 bytea  not null
)`

// prepare migrates and makes the tables of this example.
func (db *database) prepare(ctx context.Context, out *display) error {
	if err := db.refuseForeign(ctx); err != nil {
		return err
	}
	applied, err := migrations.Up(ctx, db.pool, nil)
	if err != nil {
		return err
	}
	if len(applied) == 0 {
		out.say("migrated", "already")
	} else {
		out.say("migrated", "%s applied", count(len(applied), "migration"))
	}
	if _, err := db.pool.Exec(ctx, sqlEffectsTable); err != nil {
		return fmt.Errorf("create table quickstart_effects: %w", err)
	}
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}
	topics := make([]string, len(consumers))
	for i, consumer := range consumers {
		topics[i] = jobTopic(consumer)
	}
	return jobs.Initialize(ctx, db.pool, topics...)
}

// refuseForeign keeps the example out of an event log that other programs use: their consumers would get its
// events.
func (db *database) refuseForeign(ctx context.Context) error {
	var ours, log bool
	var jobs *string
	err := db.pool.QueryRow(ctx, `
select to_regclass('public.quickstart_effects') is not null, to_regclass('public.event_seq') is not null,
    coalesce(to_regclass('watermill_audit_jobs'), to_regclass('watermill_notify_jobs'))::text`).Scan(&ours, &log, &jobs)
	if err != nil || ours {
		return err
	}
	if jobs != nil {
		return fmt.Errorf("-database: table %s is there already and is not this example's: give it a database of its own", *jobs)
	}
	if log {
		var head int64
		if err := db.pool.QueryRow(ctx, "select last_seq from public.event_seq").Scan(&head); err != nil {
			return err
		}
		if head > 0 {
			return fmt.Errorf("-database: its event log holds events up to %d that are not this example's: give it a database of its own", head)
		}
	}
	return nil
}

const sqlStanding = `
select s.last_seq, w.consumer, coalesce(c.last_seq, 0)
from public.event_seq s
cross join unnest($1::text[]) with ordinality as w(consumer, n)
left join public.event_consumer_cursors c on c.consumer = w.consumer and c.topic = '' and c.shard = ''
order by w.n`

// standing is how far the consumers have got.
type standing struct {
	head      int64
	positions []position
}

type position struct {
	consumer string
	seq      int64
}

func (s standing) handled() (total int64) {
	for _, p := range s.positions {
		total += p.seq
	}
	return total
}

func (s standing) left() int64 { return s.head*int64(len(s.positions)) - s.handled() }

func (db *database) standing(ctx context.Context) (s standing, err error) {
	rows, _ := db.pool.Query(ctx, sqlStanding, consumers)
	var p position
	_, err = pgx.ForEachRow(rows, []any{&s.head, &p.consumer, &p.seq}, func() error {
		s.positions = append(s.positions, p)
		return nil
	})
	if err != nil {
		return standing{}, fmt.Errorf("look at the cursors: %w", err)
	}
	return s, nil
}

// written is how many effects were ever written, with those that were rolled back.
func (db *database) written(ctx context.Context) (n int64, err error) {
	err = db.pool.QueryRow(ctx, "select case when is_called then last_value else 0 end from public.quickstart_effects_id_seq").Scan(&n)
	return n, err
}

// count is a number with its noun.
func count[T int | int64](n T, noun string) string {
	if n == 1 {
		return fmt.Sprintf("%d %s", n, noun)
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
