package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// lookInterval is how often the database is asked how far the work is.
	lookInterval = 10 * time.Millisecond
	// standstill is how long the cursors may stand before the run is given up.
	standstill = time.Minute
	// workTime is about how long the work takes, so that it can be watched: the handlers' pause comes from it.
	workTime = 1500 * time.Millisecond
)

// errHandled is returned when there is no work left in which a worker could be killed.
var errHandled = errors.New("everything was handled before a worker could be killed in the middle of a round: append more events")

// work has workers handle all events: the first is killed in the middle of a round, the last stops.
func (db *database) work(ctx context.Context, verbose bool, out *display) error {
	defer out.stop()
	start, err := db.standing(ctx)
	if err != nil {
		return err
	}
	left := max(1, start.left()/int64(len(consumers)))
	s := workerSettings{
		Database: db.url, Verbose: verbose,
		Pause: min(max(workTime/time.Duration(left), time.Millisecond), time.Second),
	}
	// The kill comes after a third of the rounds, when half a batch is written and not committed.
	when := moment{
		handled: start.handled() + left/3/batchSize*batchSize*int64(len(consumers)),
		open:    min(batchSize/2, max(1, left/2)),
	}
	number := 0
	for hit := false; !hit; {
		number++
		if hit, err = db.crash(ctx, number, s, when, out); err != nil {
			return err
		}
	}

	number++
	p, err := startWorker(number, s, out)
	if err != nil {
		return err
	}
	err = db.watch(ctx, p, out, func(s standing) (bool, error) { return s.left() == 0, nil })
	if stopErr := p.stop(); err == nil {
		err = stopErr
	}
	if err != nil {
		return err
	}
	out.stop()
	out.say(p.name(), "handled the rest and was stopped")
	return nil
}

// moment is when a worker is killed.
type moment struct {
	handled int64 // events that the consumers have passed
	open    int64 // effects that are written and not committed
}

// watch shows how far the work is until it is far enough. The worker must not end meanwhile.
func (db *database) watch(ctx context.Context, p *process, out *display, enough func(standing) (bool, error)) error {
	again := time.NewTicker(lookInterval)
	defer again.Stop()
	moved, handled := time.Now(), int64(-1)
	for {
		s, err := db.standing(ctx)
		if err != nil {
			return err
		}
		out.show(s)
		if done, err := enough(s); done || err != nil {
			return err
		}
		if s.handled() != handled {
			moved, handled = time.Now(), s.handled()
		} else if time.Since(moved) > standstill {
			return fmt.Errorf("no cursor has moved for %s", standstill)
		}
		select {
		case <-again.C:
		case <-p.ended:
			return errors.Join(fmt.Errorf("%s ended by itself", p.name()), p.err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// openRound is a transaction of a worker that holds a cursor and has written effects.
type openRound struct{ consumer, xid string }

// Seen from outside: a running transaction that stands in the cursor's row as the one that locked it (xmax),
// and has the table lock of an insert into the effects, which is kept until a transaction ends. pg_stat_activity
// shows the lower 32 bits of a transaction id; the snapshot has the rest.
const sqlOpenRounds = `
select c.consumer, (h.next - (h.next - a.backend_xid::text::bigint) % (1::bigint << 32))::text
from pg_stat_activity a
cross join (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as next) h
join public.event_consumer_cursors c on c.xmax = a.backend_xid
where a.datname = current_database() and a.application_name = $1 and c.topic = '' and c.shard = ''
    and exists (
        select from pg_locks l
        where l.pid = a.pid and l.granted and l.mode = 'RowExclusiveLock'
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
            and l.relation = 'public.quickstart_effects'::regclass)
order by 1`

func (db *database) openRounds(ctx context.Context, p *process) ([]openRound, error) {
	rows, _ := db.pool.Query(ctx, sqlOpenRounds, applicationName(p.pid()))
	open, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (o openRound, err error) {
		err = row.Scan(&o.consumer, &o.xid)
		return o, err
	})
	if err != nil {
		return nil, fmt.Errorf("look for open rounds: %w", err)
	}
	return open, nil
}

// crash starts a worker and kills it in the middle of a round, when the moment has come. It returns false if the round was committed all the same, at the very moment of the kill.
func (db *database) crash(ctx context.Context, number int, s workerSettings, when moment, out *display) (hit bool, err error) {
	start, err := db.standing(ctx)
	if err != nil {
		return false, err
	}
	written, err := db.written(ctx)
	if err != nil {
		return false, err
	}
	p, err := startWorker(number, s, out)
	if err != nil {
		return false, err
	}
	defer func() { _ = p.stop() }() // if it was not killed

	// One effect for each event and consumer: those that no cursor has passed are not committed.
	uncommitted := func(now standing) (int64, error) {
		n, err := db.written(ctx)
		return n - written - (now.handled() - start.handled()), err
	}
	var open []openRound
	err = db.watch(ctx, p, out, func(s standing) (bool, error) {
		if s.left() == 0 {
			return false, errHandled
		}
		if s.handled() < when.handled {
			return false, nil
		}
		if n, err := uncommitted(s); err != nil || n < when.open {
			return false, err
		}
		open, err = db.openRounds(ctx, p)
		return len(open) > 0, err
	})
	if err != nil {
		return false, err
	}
	p.kill()
	out.say("killed", "%s, by SIGKILL in the middle of a round", p.name())

	open, err = db.aborted(ctx, p, open)
	if err != nil {
		return false, err
	}
	if len(open) == 0 {
		out.say("again", "that round was committed just before the kill")
		return false, nil
	}
	transactions := make([]string, len(open))
	for i, o := range open {
		transactions[i] = "transaction " + o.xid
	}
	now, err := db.standing(ctx)
	if err != nil {
		return false, err
	}
	undone, err := uncommitted(now)
	if err != nil {
		return false, err
	}
	where := make([]string, len(now.positions))
	for i, at := range now.positions {
		where[i] = fmt.Sprintf("%s at event %d", at.consumer, at.seq)
	}
	out.say("undone", "%s, not committed: PostgreSQL rolled back %s", count(undone, "effect"), strings.Join(transactions, " and "))
	out.say("", "the cursors stand where they stood: %s", strings.Join(where, ", "))
	return true, nil
}

// aborted waits until the server has ended the sessions of a process that is gone, and returns those of its
// rounds that were rolled back.
func (db *database) aborted(ctx context.Context, p *process, rounds []openRound) ([]openRound, error) {
	ctx, cancel := context.WithTimeout(ctx, standstill)
	defer cancel()
	again := time.NewTicker(lookInterval)
	defer again.Stop()
	for gone := false; !gone; {
		err := db.pool.QueryRow(ctx, `
select not exists (select from pg_stat_activity a where a.datname = current_database() and a.application_name = $1)`,
			applicationName(p.pid())).Scan(&gone)
		if err != nil {
			return nil, fmt.Errorf("wait for the end of %s's sessions: %w", p.name(), err)
		}
		if !gone {
			select {
			case <-again.C:
			case <-ctx.Done():
			}
		}
	}
	var aborted []openRound
	for _, round := range rounds {
		var status string
		if err := db.pool.QueryRow(ctx, "select pg_xact_status($1::text::xid8)", round.xid).Scan(&status); err != nil {
			return nil, fmt.Errorf("look up transaction %s: %w", round.xid, err)
		}
		if status == "aborted" {
			aborted = append(aborted, round)
		}
	}
	return aborted, nil
}
