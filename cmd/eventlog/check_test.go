package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

// Monitoring reads the exit code alone.
func TestCheckEndsAsMonitoringExpects(t *testing.T) {
	t.Parallel()
	healthy := logtest.New(t)
	healthy.Exec(t, "insert into event_consumer_cursors (consumer) values ('push')")
	warning := logtest.New(t)
	warning.Exec(t, "insert into event_consumer_cursors (consumer) values ('push')")
	warning.Exec(t, `insert into event_consumer_parked (consumer, topic, shard, seq, occurred_at, recorded_at, event_topic, uuid, payload, metadata, error_type, attempts, parked_by)
		values ('push', '', '', 1, now(), now(), 'orders', 'u', '', '{}', 'x', 1, 'me')`)
	for name, c := range map[string]struct {
		db     *pgtest.DB
		args   []string
		code   int
		status watch.Status
	}{
		"ok":                         {healthy, nil, 0, watch.OK},
		"a warning":                  {warning, nil, 1, watch.Warning},
		"critical":                   {newPrepared(t), nil, 2, watch.Critical},
		"an expected one is missing": {healthy, []string{"push", "mail"}, 2, watch.Critical},
		"not migrated":               {pgtest.New(t), nil, 3, watch.Unknown},
		"cannot be reached":          {healthy, []string{"--database", "postgres://127.0.0.1:1/x?connect_timeout=2"}, 3, watch.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, out, _ := call(t, c.db, append([]string{"check", "--json"}, c.args...)...)
			require.Equal(t, c.code, code, out)
			var report watch.Report
			require.NoError(t, json.Unmarshal([]byte(out), &report))
			require.Equal(t, c.status, report.Status)
		})
	}
	for _, args := range [][]string{{"check", "--grace", "-1s"}, {"check", "--no-such-flag"}, {"check", "@"}} {
		code, _, errors := call(t, healthy, args...)
		require.Equal(t, 3, code, "%v: what was called wrongly is not known to be well", args)
		require.NotEmpty(t, errors)
	}
}
