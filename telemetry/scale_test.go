package telemetry_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/telemetry"
)

const (
	manyConsumers  = 200
	manyPartitions = 200
	manyEvents     = 1_000_000
)

// newLarge has a log of a million events in 200 partitions, and 200 consumers spread over it: the first at its
// beginning, the last at its head.
func newLarge(t testing.TB) (*pgtest.DB, []cursor.Key) {
	t.Helper()
	db := logtest.New(t)
	db.Exec(t, "drop table event_log_first")
	db.Exec(t, fmt.Sprintf(`do $$ begin
		for i in 0..%d loop
			execute format('create table event_log_%%s partition of event_log for values from (%%s) to (%%s)', i,
				case i when 0 then 'minvalue' else (i * %d + 1)::text end, case i when %d then 'maxvalue' else ((i + 1) * %d + 1)::text end);
		end loop;
	end $$`, manyPartitions-1, manyEvents/manyPartitions, manyPartitions-1, manyEvents/manyPartitions))
	db.Exec(t, `insert into event_log (seq, occurred_at, recorded_at, topic, uuid, payload, metadata)
		select i, now() - interval '1 second' * ($1 - i), now(), 'orders', i::text, '', '{}' from generate_series(1, $1::int) i`, manyEvents)
	db.Exec(t, "update event_seq set last_seq = $1", manyEvents)
	var keys []cursor.Key
	for i := range manyConsumers {
		keys = append(keys, key(fmt.Sprintf("c%03d", i)))
	}
	ensure(t, db, keys...)
	db.Exec(t, `update event_consumer_cursors c set last_seq = n.seq, occurred_seq = n.seq,
			last_occurred_at = (select l.occurred_at from event_log l where l.seq = n.seq)
		from (select consumer, (row_number() over (order by consumer) - 1) * $1::bigint / $2 as seq from event_consumer_cursors) n
		where c.consumer = n.consumer`, manyEvents, manyConsumers-1)
	db.Exec(t, "analyze")
	return db, keys
}

func TestScrapeIsOneStatementThatReadsNoPartitionWhole(t *testing.T) {
	t.Parallel()
	db, keys := newLarge(t)
	var sent statements
	pool, m := db.Pool(t, counted(&sent)), newMeters()
	for _, n := range []int{1, 10, manyConsumers} {
		unregister := register(t, m, telemetry.GaugesConfig{DB: pool, Keys: keys[len(keys)-n:]})
		for range 8 { // also with the plan that the server makes for any number of them
			sent.take()
			start := time.Now()
			p := m.collect(t)
			t.Logf("%d consumers: %v", n, time.Since(start))
			require.Len(t, sent.take(), 1)
			require.Len(t, p[lag], n)
			require.Zero(t, p[lag]["c199@orders"])
			require.Zero(t, p[age]["c199@orders"])
			if n == manyConsumers {
				require.Equal(t, float64(manyEvents), p[lag]["c000@orders"])
				require.InDelta(t, manyEvents, p[age]["c000@orders"], 600)
			}
			require.Empty(t, p[problem])
		}
		require.NoError(t, unregister())
	}

	// The statement as it was sent, explained.
	m.collect(t)
	sent.take()
	unregister := register(t, m, telemetry.GaugesConfig{DB: pool, Keys: keys})
	m.collect(t)
	statement := sent.take()[0]
	require.NoError(t, unregister())
	var consumers, topics, shards []string
	for _, k := range keys {
		consumers, topics, shards = append(consumers, k.Consumer), append(topics, k.Topic), append(shards, k.Shard)
	}
	for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
		conn := db.Conn(t)
		_, err := conn.Exec(t.Context(), "set plan_cache_mode = "+mode)
		require.NoError(t, err)
		var explained []byte
		require.NoError(t, conn.QueryRow(t.Context(), "explain (analyze, format json) "+statement, consumers, topics, shards, "public.event_log").Scan(&explained))
		var plans []struct {
			Plan      plan
			Execution float64 `json:"Execution Time"`
			Planning  float64 `json:"Planning Time"`
		}
		require.NoError(t, json.Unmarshal(explained, &plans))
		t.Logf("%s: planning %v ms, execution %v ms, cost %v", mode, plans[0].Planning, plans[0].Execution, plans[0].Plan.Cost)
		require.Less(t, plans[0].Plan.Cost, float64(100_000)) // from there on it would be compiled, which takes longer
		probes := 0.0
		plans[0].Plan.walk(func(p plan) {
			if !strings.HasPrefix(p.Relation, "event_log_") || p.Loops == 0 {
				return
			}
			require.Contains(t, p.Node, "Index", p.Relation)
			probes += p.Loops
		})
		// Two for each consumer, and one more where an event is the first of its partition.
		require.LessOrEqual(t, probes, float64(3*manyConsumers))
		require.Positive(t, probes)
	}
}

type plan struct {
	Node     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Loops    float64 `json:"Actual Loops"`
	Cost     float64 `json:"Total Cost"`
	Plans    []plan  `json:"Plans"`
}

func (p plan) walk(visit func(plan)) {
	visit(p)
	for _, child := range p.Plans {
		child.walk(visit)
	}
}

func BenchmarkScrape(b *testing.B) {
	db, keys := newLarge(b)
	m := newMeters()
	register(b, m, telemetry.GaugesConfig{DB: db.Pool(b), Keys: keys})
	m.collect(b)
	for b.Loop() {
		m.collect(b)
	}
}
