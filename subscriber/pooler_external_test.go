//go:build external

package subscriber_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// bouncer starts PgBouncer in transaction mode before a server, and returns its host and port. Nothing is prepared
// through it, as in its older versions.
func bouncer(t *testing.T, server *pgserver.Server, sessions int) string {
	t.Helper()
	command, err := exec.LookPath("pgbouncer")
	if err != nil {
		command = "/usr/sbin/pgbouncer" // which is not on everybody's path
	}
	version, err := exec.Command(command, "--version").Output()
	require.NoError(t, err, "this test needs PgBouncer: apt-get install pgbouncer")

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := listener.Addr().(*net.TCPAddr)
	require.NoError(t, listener.Close())
	lines := fmt.Sprintf(`[databases]
* = host=%s port=%d user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = %d
max_client_conn = 200
`, server.Host(), server.Port(), address.Port, sessions)
	if minor := regexp.MustCompile(`1\.(\d+)`).FindSubmatch(version); minor != nil {
		if n, _ := strconv.Atoi(string(minor[1])); n >= 21 {
			lines += "max_prepared_statements = 0\n"
		}
	}
	file := filepath.Join(t.TempDir(), "pgbouncer.ini")
	require.NoError(t, os.WriteFile(file, []byte(lines), 0o644))

	process := exec.Command(command, "--quiet", file)
	process.Stderr = os.Stderr
	process.Dir = "/"
	if os.Geteuid() == 0 { // which it refuses
		account, err := user.Lookup("nobody")
		require.NoError(t, err)
		uid, err := strconv.ParseUint(account.Uid, 10, 32)
		require.NoError(t, err)
		gid, err := strconv.ParseUint(account.Gid, 10, 32)
		require.NoError(t, err)
		for dir := filepath.Dir(file); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
			require.NoError(t, os.Chmod(dir, 0o755))
		}
		process.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	}
	require.NoError(t, process.Start())
	t.Cleanup(func() {
		_ = process.Process.Kill()
		_ = process.Wait()
	})
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", address.String())
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	}, 20*time.Second, 5*time.Millisecond)
	return address.String()
}

func through(db *pgtest.DB, address string, settings string) string {
	return fmt.Sprintf("postgres://postgres@%s/%s?sslmode=disable%s", address, db.Name(), settings)
}

func pooled(t *testing.T, url string, options ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	for _, option := range options {
		option(config)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// sessions asks each of the pooler's sessions, of which there are n, by transactions that are open at once.
func sessions(t *testing.T, url string, n int, query string) []string {
	t.Helper()
	var answers []string
	pids := map[int32]bool{}
	var ends []func()
	for range n {
		conn, err := pgx.Connect(t.Context(), url+"&default_query_exec_mode=exec")
		require.NoError(t, err)
		ends = append(ends, func() {
			_, err := conn.Exec(context.Background(), "rollback") // or its session would be closed
			require.NoError(t, err)
			require.NoError(t, conn.Close(context.Background()))
		})
		_, err = conn.Exec(t.Context(), "begin")
		require.NoError(t, err)
		var answer string
		var pid int32
		require.NoError(t, conn.QueryRow(t.Context(), "select ("+query+")::text, pg_backend_pid()").Scan(&answer, &pid))
		answers, pids[pid] = append(answers, answer), true
	}
	for _, end := range ends {
		end()
	}
	require.Len(t, pids, n)
	return answers
}

const leftovers = `select concat_ws(' ', current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout'),
	current_setting('tcp_user_timeout'), current_setting('idle_session_timeout'), current_setting('eventlog.unit', true),
	current_setting('eventlog.log', true), array(select pg_listening_channels()))`

// Everything but LISTEN works through a transaction pooler, in each mode of pgx that works there at all.
func TestRoundsGoThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	const backends, events = 3, 100
	server := pgtest.Server(t)
	address := bouncer(t, server, backends)
	for _, mode := range []string{"exec", "simple_protocol", "cache_describe"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			db := pgtest.NewOn(t, server)
			url := through(db, address, "&default_query_exec_mode="+mode)
			conn, err := pgx.Connect(t.Context(), url)
			require.NoError(t, err)
			_, err = migrations.Up(t.Context(), conn, nil)
			require.NoError(t, err)
			require.NoError(t, conn.Close(t.Context()))
			prepareDB(t, db)

			pool := pooled(t, url, func(c *pgxpool.Config) { c.MaxConns = 8 })
			logger := logtest.NewLogger()
			runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
				Consumers: []subscriber.ConsumerConfig{
					{Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 10},
					{Name: "audit", Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 7},
				},
				PollInterval: 100 * time.Millisecond,
			}, logger)
			require.NoError(t, err)
			payload := []byte(`{"a" : 1, "a": "\u00e4 ä", "b": 18446744073709551616}`)
			wrong := make(chan string, 2*events)
			check := func(msg *message.Message) ([]*message.Message, error) {
				if string(msg.Payload) != string(payload) || msg.Metadata["k"] != `"v"` {
					wrong <- fmt.Sprintf("%q %v", msg.Payload, msg.Metadata)
				}
				produced, err := work(msg)
				produced[0].Metadata.Set("k", `"v"`)
				return produced, err
			}
			serve(t, runner, map[string]handler{"push": check, "audit": check})
			log, err := publisher.NewEventLog(pool, publisher.EventLogConfig{})
			require.NoError(t, err)
			for range events {
				msg := message.NewMessage(watermill.NewUUID(), payload)
				msg.Metadata.Set("k", `"v"`)
				require.NoError(t, log.Publish("orders", msg))
			}
			waitPosition(t, db, "push", events)
			waitPosition(t, db, "audit", events)
			require.Empty(t, wrong)
			require.Equal(t, upTo(events), effects(t, db, "push"))
			require.Equal(t, upTo(events), effects(t, db, "audit"))
			require.Equal(t, []string{string(payload)}, pgtest.Column[string](t, db, "select distinct payload::text from watermill_jobs"))
			require.Equal(t, []string{`{"k":"\"v\""}`}, pgtest.Column[string](t, db, "select distinct metadata::text from watermill_jobs"))
			require.Equal(t, int64(2*events), jobCount(t, db))

			line := waitLine(t, logger, "event log listener gives up")
			require.ErrorContains(t, line.Fields["err"].(error), "pooler: set ListenURL")
			require.Len(t, logger.Lines("event log listener"), 1)
			require.Empty(t, logger.Lines("", "error"))
			require.Equal(t, int64(0), pgtest.Value[int64](t, db, listeners))
			require.NoError(t, runner.Close())
			for _, left := range sessions(t, through(db, address, ""), backends, leftovers) {
				require.Regexp(t, `^0 0 0 0 +{}$`, left, "what a round sets ends with it")
			}
		})
	}
}

func TestListenURLBesideATransactionPoolerWakes(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	db := logtest.NewOn(t, server)
	prepareDB(t, db)
	logger := logtest.NewLogger()
	pool := pooled(t, through(db, bouncer(t, server, 3), "&default_query_exec_mode=exec"))
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
		Consumers:    []subscriber.ConsumerConfig{{Name: "push", Topic: subscriber.AllTopics}},
		PollInterval: never, ListenURL: db.URL(),
	}, logger)
	require.NoError(t, err)
	runner.SetListenTimes(time.Hour, 5*time.Second, 200*time.Millisecond)
	serve(t, runner, map[string]handler{"push": work})
	pid := waitListening(t, db, 0)
	for n := int64(1); n <= 5; n++ {
		logtest.Append(t, db, "orders", 1)
		waitPosition(t, db, "push", n)
	}
	require.Equal(t, pid, pgtest.Value[int32](t, db, listenerPID))
	require.Empty(t, logger.Lines("event log listener"))
}

// A pooler may give out its server's pid as its own. Then only the probe tells, and cleans up.
func TestTransactionPoolerThatHidesItsPidIsNoticedByTheProbe(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	db := logtest.NewOn(t, server)
	prepareDB(t, db)
	address := bouncer(t, server, 1)
	pid, err := strconv.Atoi(sessions(t, through(db, address, ""), 1, "pg_backend_pid()")[0])
	require.NoError(t, err)
	logger := logtest.NewLogger()
	runner, err := subscriber.NewRunner(db.Pool(t), subscriber.RunnerConfig{
		Consumers:    []subscriber.ConsumerConfig{{Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning}},
		PollInterval: 100 * time.Millisecond, ListenURL: through(db, pretender(t, address, uint32(pid)), ""),
	}, logger)
	require.NoError(t, err)
	runner.SetListenTimes(time.Hour, 5*time.Second, 500*time.Millisecond)
	serve(t, runner, map[string]handler{"push": work})
	require.Eventually(t, func() bool { return pgtest.Value[int64](t, db, listeners) == 1 }, 20*time.Second, time.Millisecond,
		"it is taken in at first")
	line := waitLine(t, logger, "event log listener gives up")
	require.ErrorContains(t, line.Fields["err"].(error), "does not arrive")
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 1)
	require.Len(t, logger.Lines("event log listener"), 1)
	require.Empty(t, logger.Lines("", "error"))
	require.Regexp(t, `^0 0 0 0 *{}$`, sessions(t, through(db, address, ""), 1, leftovers)[0])
	require.Equal(t, fmt.Sprint(pid), sessions(t, through(db, address, ""), 1, "pg_backend_pid()")[0], "of the session that listened")
}

// pretender passes connections on, but for the backend pid that they are given.
func pretender(t *testing.T, target string, pid uint32) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go pretend(listener, target, pid)
	return listener.Addr().String()
}

func pretend(listener net.Listener, target string, pid uint32) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", target)
		if err != nil {
			_ = client.Close()
			continue
		}
		go func() {
			_, _ = io.Copy(server, client)
			_ = server.Close()
		}()
		go func() {
			defer client.Close()
			key := []byte{'K', 0, 0, 0, 12} // and the pid
			for buffer := make([]byte, 64<<10); ; {
				n, err := server.Read(buffer)
				if at := bytes.Index(buffer[:n], key); at >= 0 && at+9 <= n {
					binary.BigEndian.PutUint32(buffer[at+5:], pid)
				}
				if _, writeErr := client.Write(buffer[:n]); err != nil || writeErr != nil {
					return
				}
			}
		}()
	}
}
