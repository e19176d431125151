package watch_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

// unknown fails unless the look failed, and says so without anything that must not be known.
func unknown(t *testing.T, r watch.Report, errorType string) watch.Problem {
	t.Helper()
	p := only(t, r, watch.InspectionFailed, watch.Unknown)
	require.Equal(t, errorType, p.ErrorType, "%v", r.Err)
	require.Error(t, r.Err)
	require.Equal(t, 3, r.ExitCode())
	for _, c := range r.Consumers {
		require.Equal(t, watch.Unknown, c.Status)
		require.Nil(t, c.Position)
		require.Nil(t, c.Lag)
	}
	require.Nil(t, r.Log)
	require.WithinDuration(t, time.Now(), r.At, time.Minute)
	return p
}

func TestUnreachableDatabaseIsUnknownAndNeverGreen(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed := listener.Addr().String()
	require.NoError(t, listener.Close())
	pool, err := pgxpool.New(t.Context(), "postgres://somebody:secret@"+closed+"/x")
	require.NoError(t, err)
	defer pool.Close()
	w := newWatch(t, pool, watch.Config{Keys: []cursor.Key{push, other}})
	r := w.Look(t.Context())
	p := unknown(t, r, "_OTHER")
	require.Len(t, r.Consumers, 2)
	body, err := json.Marshal(r)
	require.NoError(t, err)
	require.NotContains(t, string(body)+p.Summary+r.String(), "somebody")
	require.NotContains(t, string(body)+r.String(), "secret")
	require.Error(t, w.Check(t.Context()))
}

func TestDatabaseThatDoesNotAnswerIsUnknownWithinTheTimeout(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // its backlog accepts, and nobody answers
	require.NoError(t, err)
	defer silent.Close()
	pool, err := pgxpool.New(t.Context(), "postgres://x@"+silent.Addr().String()+"/x?sslmode=disable")
	require.NoError(t, err)
	defer pool.Close()
	started := time.Now()
	unknown(t, newWatch(t, pool, watch.Config{Timeout: 300 * time.Millisecond}).Look(t.Context()), "timeout")
	require.Less(t, time.Since(started), 20*time.Second)
}

func TestExhaustedPoolIsUnknown(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	w := newWatch(t, pool, watch.Config{Timeout: 200 * time.Millisecond})
	unknown(t, w.Look(t.Context()), "timeout")
	conn.Release()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	unknown(t, w.Look(ctx), "canceled")
}

func TestLockedTableAndStatementTimeoutAreUnknown(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	tx, err := db.Conn(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "lock table event_log in access exclusive mode")
	require.NoError(t, err)
	unknown(t, newWatch(t, db.Pool(t), watch.Config{Timeout: 500 * time.Millisecond}).Look(t.Context()), "timeout")

	bounded := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["statement_timeout"] = "200ms" })
	w := newWatch(t, bounded, watch.Config{})
	unknown(t, w.Look(t.Context()), "57014")
	require.NoError(t, tx.Rollback(t.Context()))
	require.Eventually(t, func() bool { return w.Look(t.Context()).Err == nil }, time.Minute, 20*time.Millisecond)
}

func TestMissingTableIsUnknown(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"event_seq", "event_log", "event_consumer_cursors", "event_consumer_failures", "event_consumer_parked",
		"event_consumer_losses", "event_consumer_interventions", "event_retention"} {
		t.Run(table, func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			w := newWatch(t, db.Pool(t), watch.Config{Keys: []cursor.Key{push}})
			ensure(t, db, push)
			healthy(t, w.Look(t.Context()))
			db.Exec(t, "drop table "+table+" cascade")
			require.Contains(t, unknown(t, w.Look(t.Context()), "42P01").Next, "eventlog migrate")
		})
	}
	t.Run("all", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t)
		unknown(t, newWatch(t, db.Pool(t), watch.Config{}).Look(t.Context()), "42P01")
	})
}

func TestCounterWithoutItsRowIsUnknown(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, push)
	db.Exec(t, "delete from event_seq")
	unknown(t, newWatch(t, db.Pool(t), watch.Config{Keys: []cursor.Key{push}}).Look(t.Context()), "_OTHER")
}

// watchRole runs the statements of docs/roles.md for a role of the test's own, and returns its name.
func watchRole(t *testing.T, db *pgtest.DB) string {
	t.Helper()
	document, err := os.ReadFile("../docs/roles.md")
	require.NoError(t, err)
	_, watching, ok := strings.Cut(string(document), "## watch\n")
	require.True(t, ok)
	_, rest, ok := strings.Cut(watching, "```sql\n")
	require.True(t, ok)
	sql, _, ok := strings.Cut(rest, "```")
	require.True(t, ok)
	role := fmt.Sprintf("watch_%s", db.Name())
	conn := db.Conn(t)
	_, err = conn.Exec(t.Context(), strings.ReplaceAll(sql, "eventlog_watch", role))
	require.NoError(t, err)
	t.Cleanup(func() { // before the connection is closed and the database goes
		_, err := conn.Exec(context.Background(), fmt.Sprintf("reset role; drop owned by %s; drop role %[1]s", role))
		require.NoError(t, err)
	})
	return role
}

func TestWatchRoleReadsWhatItNeedsAndNothingElse(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ensure(t, db, push)
	logtest.Append(t, db, "orders", 3)
	role := watchRole(t, db)
	pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = role })
	w := newWatch(t, pool, watch.Config{Keys: []cursor.Key{push}})
	r := w.Look(t.Context())
	require.NoError(t, r.Err)
	healthy(t, r)
	require.NoError(t, w.Check(t.Context()))
	require.Equal(t, int64(3), *r.Consumers[0].Lag)
	for _, refused := range []string{
		"select payload from event_log", "select metadata from event_log", "select key from event_log", "select payload from event_consumer_parked",
		"select * from event_outbox", "insert into event_outbox (topic) values ('x')",
		"update event_consumer_cursors set last_seq = 3", "delete from event_consumer_losses", "select from event_seq for update",
	} {
		_, err := pool.Exec(t.Context(), refused)
		require.ErrorContains(t, err, "42501", refused)
	}

	// Each right is needed.
	for _, table := range []string{"event_seq", "event_retention", "event_log", "event_consumer_cursors", "event_consumer_failures",
		"event_consumer_losses", "event_consumer_parked", "event_consumer_interventions"} {
		db.Exec(t, fmt.Sprintf("revoke select on %s from %s", table, role))
		require.Contains(t, unknown(t, w.Look(t.Context()), "42501").Next, "docs/roles.md", table)
		db.Exec(t, fmt.Sprintf("grant select on %s to %s", table, role))
	}
	healthy(t, w.Look(t.Context()))
}

func get(t *testing.T, handler http.Handler, method string) *httptest.ResponseRecorder {
	t.Helper()
	response := httptest.NewRecorder()
	handler.ServeHTTP(response, httptest.NewRequestWithContext(t.Context(), method, "/", nil))
	require.Equal(t, "no-store", response.Header().Get("Cache-Control"))
	return response
}

func TestHandlerServesTheReportAndItsStatusAsACode(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	w, c := at(t, db, push)
	handler := watch.Handler(w)
	body := func(response *httptest.ResponseRecorder) map[string]any {
		require.Equal(t, "application/json", response.Header().Get("Content-Type"))
		var report map[string]any
		require.NoError(t, json.Unmarshal(response.Body.Bytes(), &report))
		return report
	}
	response := get(t, handler, http.MethodGet)
	require.Equal(t, http.StatusServiceUnavailable, response.Code)
	require.Equal(t, "critical", body(response)["status"])

	ensure(t, db, push)
	response = get(t, handler, http.MethodGet)
	require.Equal(t, http.StatusOK, response.Code)
	require.Equal(t, "ok", body(response)["status"])
	require.Equal(t, []any{}, body(response)["problems"])

	logtest.Append(t, db, "orders", 1)
	db.Exec(t, "update event_consumer_cursors set paused_at = now()")
	c.set(time.Hour)
	response = get(t, handler, http.MethodGet)
	require.Equal(t, http.StatusOK, response.Code, "a warning does not take traffic away")
	require.Equal(t, "warning", body(response)["status"])

	head := get(t, handler, http.MethodHead)
	require.Equal(t, http.StatusOK, head.Code)
	require.Empty(t, head.Body.String())
	for _, method := range []string{http.MethodPost, http.MethodDelete, http.MethodOptions} {
		refused := get(t, handler, method)
		require.Equal(t, http.StatusMethodNotAllowed, refused.Code)
		require.Equal(t, "GET, HEAD", refused.Header().Get("Allow"))
	}

	db.Exec(t, "drop table event_consumer_losses")
	response = get(t, handler, http.MethodGet)
	require.Equal(t, http.StatusServiceUnavailable, response.Code)
	require.Equal(t, "unknown", body(response)["status"])
	require.NotContains(t, response.Body.String(), "0001-01-01", "what is not known is left out")
	address, err := url.Parse(db.URL())
	require.NoError(t, err)
	require.NotContains(t, response.Body.String(), address.Path[1:], "no database is named")
}

func TestStandbyIsAWarningAsItShowsThePast(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{"wal_level": "replica", "max_wal_senders": "1"}})
	db := logtest.NewOn(t, server)
	ensure(t, db, push)
	w, c := at(t, db, push)
	healthy(t, w.Look(t.Context()))
	logtest.Append(t, db, "orders", 1)
	directory := pgtest.Value[string](t, db, "show data_directory")
	require.NoError(t, os.WriteFile(filepath.Join(directory, "standby.signal"), nil, 0o666))
	require.NoError(t, server.Restart(t.Context(), false))
	var r watch.Report
	require.Eventually(t, func() bool { r = w.Look(t.Context()); return r.Status != watch.Unknown }, time.Minute, 50*time.Millisecond)
	only(t, r, watch.Standby, watch.Warning)
	require.Equal(t, int64(1), *r.Consumers[0].Lag, "what it shows is judged all the same")
	c.set(time.Hour)
	require.Equal(t, []watch.Kind{watch.Standing, watch.Standby}, kinds(w.Look(t.Context()), cursor.Key{}))
}
