package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// backlog asks whether it matters how much is behind, how many topics are in the log, and how few events are wanted.
func backlog(ctx context.Context, b *bench) error {
	few := min(10_000, b.n)
	many := min(b.either(500_000, 5_000_000), 100*b.n)
	kinds := []struct {
		name           string
		behind, topics int
	}{
		{grouped(int64(few)) + " behind, 1 topic", few, 1},
		{grouped(int64(many)) + " behind, 1 topic", many, 1},
		{grouped(int64(many)) + " behind, 20 topics", many, 20},
	}
	sparse := "one event in a thousand, " + grouped(int64(many)) + " behind"
	var logs []*database
	var nested func() error
	nested = func() error { // all of the logs are there at once, so that they can take turns
		if len(logs) < len(kinds) {
			return b.inDatabase(ctx, func(db *database) error {
				k := kinds[len(logs)]
				b.say("load %s", k.name)
				if err := db.load(ctx, k.behind, k.topics); err != nil {
					return err
				}
				logs = append(logs, db)
				return nested()
			})
		}
		return inTurns(b.repeat, len(kinds)+1, func(i int) error {
			name, db, n, topic := sparse, logs[len(logs)-1], many, rareTopic
			if i < len(kinds) {
				name, db, n, topic = kinds[i].name, logs[i], few, subscriber.AllTopics
			}
			err := b.partOf(ctx, db, name, topic, n)
			if err != nil && ctx.Err() == nil {
				b.report.fail(name, err)
				return nil
			}
			return err
		})
	}
	if err := nested(); err != nil {
		return err
	}
	report := &b.report
	report.ratio("rate with the large backlog to the small one", kinds[1].name, kinds[0].name, atLeast(0.8))
	report.ratio("rate with 20 topics to 1", kinds[2].name, kinds[1].name, atLeast(0.8))
	report.ratio("buffers per row with the large backlog to the small one", kinds[1].name+buffers, kinds[0].name+buffers, atMost(1.2))
	report.ratio("buffers per row with 20 topics to 1", kinds[2].name+buffers, kinds[1].name+buffers, atMost(1.2))
	report.ratio("events covered, of which one in a thousand is wanted, to all", sparse, kinds[2].name, atLeast(20))
	return nil
}

const buffers = ", buffers read"

// partOf goes through the first n events of a log with a new consumer.
func (b *bench) partOf(ctx context.Context, db *database, name, topic string, n int) error {
	if _, err := db.Exec(ctx, `truncate watermill_`+jobTopic+`; delete from event_consumer_cursors; delete from event_consumer_interventions`); err != nil {
		return err
	}
	if _, err := db.Exec(ctx, "checkpoint"); err != nil {
		return err
	}
	watch := &reads{}
	pool, err := db.open(ctx, 4, func(c *pgxpool.Config) { c.ConnConfig.Tracer = watch })
	if err != nil {
		return err
	}
	defer pool.Close()
	wanted := n
	if topic == rareTopic {
		wanted = n / rare
	}
	start := time.Now()
	if wanted > 0 {
		err = drainOn(ctx, db, pool, 500, topic, wanted)
	}
	elapsed := time.Since(start)
	if err != nil {
		return err
	}
	if topic == rareTopic {
		err = db.checkRareJobs(ctx, wanted)
	} else {
		err = db.checkJobs(ctx, wanted, true)
	}
	if err != nil {
		return err
	}
	b.report.add(name, "events/s", float64(n)/elapsed.Seconds())
	b.say("%s: %s events/s", name, number(float64(n)/elapsed.Seconds()))
	perRow, err := watch.explain(ctx, db)
	if err != nil {
		return fmt.Errorf("explain: %w", err)
	}
	if topic != rareTopic {
		b.report.add(name+buffers, "a row", perRow)
	}
	return nil
}

func (db *database) checkRareJobs(ctx context.Context, n int) error {
	var jobs, right int
	err := db.QueryRow(ctx, `
select count(*), count(*) filter (where uuid = expected)
from (
    select j.uuid, '`+uuidPrefix+`' || lpad((row_number() over (order by j."offset") * $1)::text, 12, '0') as expected
    from watermill_`+jobTopic+` j
) j`, rare).Scan(&jobs, &right)
	if err == nil && (jobs < n || right != jobs) {
		err = fmt.Errorf("%d events were handled, and there are %d jobs, %d of them where they belong", n, jobs, right)
	}
	return err
}

// reads remembers the statement that read the most events.
type reads struct {
	mu   sync.Mutex
	sql  string
	args []any
	rows int64
}

type queryKey struct{}

// TraceQueryStart and the following make it a tracer of statements, alone and in a batch.
func (r *reads) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, queryKey{}, data)
}

func (r *reads) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if start, ok := ctx.Value(queryKey{}).(pgx.TraceQueryStartData); ok {
		r.keep(start.SQL, start.Args, data.CommandTag.RowsAffected())
	}
}

func (r *reads) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (r *reads) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	r.keep(data.SQL, data.Args, data.CommandTag.RowsAffected())
}

func (r *reads) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (r *reads) keep(sql string, args []any, rows int64) {
	if !strings.Contains(sql, "event_log ") || strings.Contains(sql, "insert into") {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if rows > r.rows {
		r.sql, r.args, r.rows = sql, args, rows
	}
}

// explain returns how many buffers the statement takes for each row, from the log's beginning.
func (r *reads) explain(ctx context.Context, db *database) (float64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sql == "" {
		return 0, errors.New("no statement has read events")
	}
	var perRow float64
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "update event_consumer_cursors set last_seq = 0"); err != nil {
			return err
		}
		for range 2 { // the second time nothing is new to it
			var plan []byte
			if err := tx.QueryRow(ctx, "explain (analyze, buffers, format json) "+r.sql, r.args...).Scan(&plan); err != nil {
				return err
			}
			var parsed []struct {
				Plan struct {
					Rows float64 `json:"Actual Rows"`
					Hit  float64 `json:"Shared Hit Blocks"`
					Read float64 `json:"Shared Read Blocks"`
				}
			}
			if err := json.Unmarshal(plan, &parsed); err != nil {
				return err
			}
			top := parsed[0].Plan
			perRow = (top.Hit + top.Read) / max(1, top.Rows)
		}
		return nil
	})
	return perRow, err
}
