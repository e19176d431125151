package torture

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

// The consumers. Two stand still before an event that fails, one parks it.
const (
	audit   = "audit"   // all topics
	billing = "billing" // topic orders
	parking = "notify"  // all topics

	parkAfter = 3
)

// topics of the events.
var topics = []string{"orders", "payments", "users"}

// jobTopic is where the handlers' jobs go.
const jobTopic = "torture_jobs"

// What an event does to its handlers.
const (
	healthy = "healthy"
	flaky   = "flaky"   // fails twice, for every consumer
	panics  = "panics"  // panics once, for every consumer
	poison  = "poison"  // fails always, for the consumer that parks
	curable = "curable" // fails for the consumer that parks, until its replay
	killer  = "killer"  // kills the process of the consumer that parks
)

// Nothing is unique here, so that what happens twice is counted and not refused. The slow triggers run in the commits
// of rounds and of appends, so that faults meet them, too.
const sqlTables = `
create table torture_effects (
    id       bigint generated always as identity,
    consumer text not null,
    seq      bigint not null,
    attempt  int not null,
    instance text not null,
    xid      xid8 not null default pg_current_xact_id()
);
create index on torture_effects (seq, consumer);

-- What was numbered, as retention drops it.
create table torture_numbered (
    seq   bigint not null,
    topic text not null,
    uuid  text not null,
    kind  text,
    at    timestamptz not null default clock_timestamp()
);
create index on torture_numbered (seq);

create table torture_moves (
    id       bigint generated always as identity,
    consumer text not null,
    from_seq bigint not null,
    to_seq   bigint not null,
    xid      xid8 not null default pg_current_xact_id()
);
create index on torture_moves (consumer, xid);
create index on torture_moves (to_seq);

create function torture_moved() returns trigger language plpgsql as $$
begin
    insert into torture_moves (consumer, from_seq, to_seq) values (new.consumer, old.last_seq, new.last_seq);
    return null;
end $$;
create trigger torture_moved after update on event_consumer_cursors
    for each row when (old.last_seq <> new.last_seq) execute function torture_moved();

create function torture_slow() returns trigger language plpgsql as $$
begin
    perform pg_sleep(random() * 0.008);
    return null;
end $$;
create constraint trigger torture_slow_commit after insert on torture_moves deferrable initially deferred
    for each row execute function torture_slow();
create trigger torture_slow_number after insert on event_log
    for each statement execute function torture_slow();

create function torture_numbered() returns trigger language plpgsql as $$
begin
    insert into public.torture_numbered (seq, topic, uuid, kind) select f.seq, f.topic, f.uuid, f.metadata->>'kind' from fresh f;
    return null;
end $$;
create trigger torture_numbered after insert on event_log referencing new table as fresh
    for each statement execute function torture_numbered();

create index on watermill_torture_jobs (((payload->>'seq')::bigint));`

// prepare migrates and makes the tables of a run.
func prepare(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := migrations.Up(ctx, pool, nil); err != nil {
		return err
	}
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}
	if err := jobs.Initialize(ctx, pool, jobTopic); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, sqlTables); err != nil {
		return fmt.Errorf("create tables: %w", err)
	}
	return nil
}

const sqlAppend = `
insert into event_outbox (topic, payload, metadata) values ($1, '{}', jsonb_build_object('kind', $2::text))`

// appendOneOfEach makes sure that a short run meets every kind of event, too.
func appendOneOfEach(ctx context.Context, pool *pgxpool.Pool) error {
	batch := &pgx.Batch{}
	for _, kind := range []string{healthy, flaky, panics, poison, curable, killer, healthy} {
		batch.Queue(sqlAppend, topics[0], kind)
	}
	return pool.SendBatch(ctx, batch).Close()
}

// appendLast appends a healthy event for every consumer.
func appendLast(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, sqlAppend, topics[0], healthy)
	return err
}
