package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// figures are what the database holds of one consumer's work.
type figures struct {
	Consumer   string
	Events     int64 // in the log
	Jobs       int64 // in the consumer's job table
	Effects    int64 // rows in quickstart_effects
	Duplicates int64 // jobs and effects that are one too many for their event
	Lost       int64 // numbers of the log without its event, a job or an effect
	Lag        int64 // head of the log minus the cursor
	Altered    int64 // effects of a payload that is not the one in the log
}

const sqlFigures = `
with job as (
    select 'audit' as consumer, (j.metadata->>'event_seq')::bigint as seq from watermill_audit_jobs j
    union all
    select 'notify', (j.metadata->>'event_seq')::bigint from watermill_notify_jobs j
), effect as (
    select e.consumer, e.seq, e.payload_sha256 from public.quickstart_effects e
), done as (
    select d.consumer, count(*) filter (where d.job) as jobs, count(*) filter (where not d.job) as effects,
        count(*) - count(distinct (d.seq, d.job)) as duplicates
    from (
        select job.consumer, job.seq, true as job from job
        union all
        select effect.consumer, effect.seq, false from effect
    ) d
    group by d.consumer
)
select w.consumer, (select count(*) from public.event_log), coalesce(done.jobs, 0), coalesce(done.effects, 0),
    coalesce(done.duplicates, 0),
    s.last_seq - (select count(distinct l.seq) from public.event_log l
        join job on job.consumer = w.consumer and job.seq = l.seq
        join effect on effect.consumer = w.consumer and effect.seq = l.seq),
    s.last_seq - coalesce(c.last_seq, 0),
    (select count(*) from effect join public.event_log l on l.seq = effect.seq
        where effect.consumer = w.consumer and effect.payload_sha256 <> sha256(l.payload))
from public.event_seq s
cross join unnest($1::text[]) with ordinality as w(consumer, n)
left join public.event_consumer_cursors c on c.consumer = w.consumer and c.topic = '' and c.shard = ''
left join done on done.consumer = w.consumer
order by w.n`

func (db *database) figures(ctx context.Context) ([]figures, error) {
	rows, _ := db.pool.Query(ctx, sqlFigures, consumers)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[figures])
	if err != nil {
		return nil, fmt.Errorf("count what was done: %w", err)
	}
	return all, nil
}

// rolledBack is how many effects were written and are not there.
func (db *database) rolledBack(ctx context.Context) (int64, error) {
	written, err := db.written(ctx)
	if err != nil {
		return 0, err
	}
	var there int64
	err = db.pool.QueryRow(ctx, "select count(*) from public.quickstart_effects").Scan(&there)
	return written - there, err
}

// report shows what the database holds and what this run's crash has undone, and returns an error if it is not what was promised.
func (db *database) report(ctx context.Context, rolledBackBefore int64, out *display) error {
	all, err := db.figures(ctx)
	if err != nil {
		return err
	}
	rolledBack, err := db.rolledBack(ctx)
	if err != nil {
		return err
	}
	rows := [][]any{{"consumer", "events", "jobs", "effects", "duplicates", "lost", "lag"}}
	for _, f := range all {
		rows = append(rows, []any{f.Consumer, f.Events, f.Jobs, f.Effects, f.Duplicates, f.Lost, f.Lag})
	}
	out.table(rows)
	if faults := faults(all); len(faults) > 0 {
		return errors.New(strings.Join(faults, "; "))
	}
	out.say("result", "each consumer handled every event exactly once, and every payload is the one in the log")
	out.say("", "%s of the killed worker had been rolled back, and written again by the next", count(rolledBack-rolledBackBefore, "effect"))
	return nil
}

// faults says what is wrong with the figures, a sentence each.
func faults(all []figures) []string {
	var faults []string
	for _, f := range all {
		wrong := func(n int64, sentence string) {
			if n != 0 {
				faults = append(faults, fmt.Sprintf("%s: %s", f.Consumer, sentence))
			}
		}
		wrong(f.Duplicates, count(f.Duplicates, "duplicate"))
		wrong(f.Lost, count(f.Lost, "event")+" lost")
		wrong(f.Lag, fmt.Sprintf("its cursor is %s from the head of the log", count(f.Lag, "event")))
		wrong(f.Altered, count(f.Altered, "altered payload"))
		wrong(f.Jobs-f.Events, fmt.Sprintf("%s for %s", count(f.Jobs, "job"), count(f.Events, "event")))
		wrong(f.Effects-f.Events, fmt.Sprintf("%s for %s", count(f.Effects, "effect"), count(f.Events, "event")))
	}
	return faults
}
