package subscriber_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// Looking is one statement a poll, however many consumers look, and leaves no trace in the server: no transaction
// id, no WAL.
func TestIdlePollingCostsOneStatementAndWritesNothing(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{ // one that writes nothing by itself
		"autovacuum": "off", "wal_level": "minimal", "max_wal_senders": "0", "checkpoint_timeout": "1d", "bgwriter_lru_maxpages": "0",
	}})
	for _, count := range []int{1, 50} {
		t.Run(fmt.Sprint(count, " consumers"), func(t *testing.T) {
			db := logtest.NewOn(t, server)
			prepareDB(t, db)
			var looks, others atomic.Int64
			pool := db.Pool(t, func(c *pgxpool.Config) {
				c.MaxConns = 8
				c.ConnConfig.Tracer = &tracer{query: func(sql string) {
					if strings.Contains(sql, "unnest($1::text[]") {
						looks.Add(1)
					} else {
						others.Add(1)
					}
				}}
			})
			config := subscriber.RunnerConfig{PollInterval: time.Millisecond}
			handlers := map[string]handler{}
			for n := range count {
				name := fmt.Sprint("consumer-", n)
				handlers[name] = work
				config.Consumers = append(config.Consumers, subscriber.ConsumerConfig{Name: name, Topic: subscriber.AllTopics, Start: fromBeginning})
			}
			runner, err := subscriber.NewRunner(pool, config, nil)
			require.NoError(t, err)
			serve(t, runner, handlers)
			logtest.Append(t, db, "orders", 3)
			for name := range handlers {
				waitPosition(t, db, name, 3)
			}
			waitListening(t, db, 0)
			settle(t, runner)

			const polls, windows = 100, 5
			traces := func() (lsn, xid int64) {
				lsn = pgtest.Value[int64](t, db, "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
				return lsn, pgtest.Value[int64](t, db, "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
			}
			wal, xids, statements := int64(1<<62), int64(1<<62), int64(1<<62)
			for range windows {
				lsn, xid := traces()
				begun, elsewhere := looks.Load(), others.Load()
				require.Eventually(t, func() bool { return looks.Load() >= begun+polls }, 20*time.Second, time.Millisecond)
				statements = min(statements, others.Load()-elsewhere)
				after, last := traces()
				wal, xids = min(wal, after-lsn), min(xids, last-xid)
			}
			require.Equal(t, int64(0), wal, "bytes of WAL in %d polls", polls)
			require.Equal(t, int64(0), xids, "transaction ids in %d polls", polls)
			require.Equal(t, int64(0), statements, "statements beside the looks in %d polls", polls)
			require.Equal(t, int64(3), pgtest.Value[int64](t, db, "select last_seq from event_seq"))
		})
	}
}
