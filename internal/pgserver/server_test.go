package pgserver

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// envChild holds the directory in which this binary starts a server instead of running tests.
const envChild = "PGSERVER_TEST_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(envChild); dir != "" {
		child(dir)
	}
	goleak.VerifyTestMain(m)
}

// child starts a server, says so, and waits to be killed.
func child(dir string) {
	server, err := Start(context.Background(), Config{Dir: dir})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(server.supervisor.Process.Pid)
	_, _ = io.Copy(io.Discard, os.Stdin)
	select {}
}

func start(t *testing.T, config Config) *Server {
	t.Helper()
	server, err := Start(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, server.Stop()) })
	return server
}

// freshDir is the path of a directory that is missing and that every user may reach.
func freshDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "pgserver-test-")
	require.NoError(t, err)
	require.NoError(t, os.Remove(dir))
	return dir
}

func connect(t *testing.T, address string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func value[T any](t *testing.T, conn *pgx.Conn, query string) T {
	t.Helper()
	rows, err := conn.Query(t.Context(), query)
	require.NoError(t, err)
	result, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(t, err)
	return result
}

func postmaster(t *testing.T, dir string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid"))
	require.NoError(t, err)
	line, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(line)
	require.NoError(t, err)
	return pid
}

func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || !strings.Contains(string(stat), ") Z ")
}

func TestServerListensOnLoopbackAndSocket(t *testing.T) {
	t.Parallel()
	server := start(t, Config{Settings: map[string]string{"work_mem": "5MB", "search_path": `"it's\odd", public`}})

	conn := connect(t, server.URL("postgres"))
	assert.Equal(t, server.Port(), value[int](t, conn, `select inet_server_port()`))
	assert.Equal(t, "127.0.0.1", server.Host())
	assert.Equal(t, "UTF8", value[string](t, conn, `show server_encoding`))
	assert.Equal(t, "C", value[string](t, conn, `show lc_collate`))
	assert.Equal(t, "off", value[string](t, conn, `show fsync`))
	assert.Equal(t, "5MB", value[string](t, conn, `show work_mem`))
	assert.Equal(t, `"it's\odd", public`, value[string](t, conn, `show search_path`))

	local := connect(t, server.SocketURL("template1"))
	assert.Equal(t, "template1", value[string](t, local, `select current_database()::text`))
	assert.True(t, value[bool](t, local, `select inet_server_addr() is null`))
	assert.FileExists(t, filepath.Join(server.BinDir(), "initdb"))
}

func TestDurableServerFlushes(t *testing.T) {
	t.Parallel()
	conn := connect(t, start(t, Config{Fsync: true}).URL("postgres"))
	for _, setting := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
		assert.Equal(t, "on", value[string](t, conn, `show `+setting))
	}
}

func TestStopLeavesNothing(t *testing.T) {
	t.Parallel()
	server := start(t, Config{})
	connect(t, server.URL("postgres"))
	pid := postmaster(t, server.dir)

	require.NoError(t, server.Stop())
	assert.NoDirExists(t, server.dir)
	assert.False(t, alive(pid))
	assert.True(t, portIsFree(server.Port()))

	require.NoError(t, server.Stop())
	assert.ErrorIs(t, server.Restart(t.Context(), false), errStopped)
}

func TestRestartKeepsDataAndPort(t *testing.T) {
	t.Parallel()
	byCommand := func(args ...string) func(*testing.T, *Server) error {
		return func(t *testing.T, server *Server) error {
			argv := append(server.RestartCommand(), args...)
			return exec.CommandContext(t.Context(), argv[0], argv[1:]...).Run()
		}
	}
	restarts := []struct {
		name    string
		restart func(*testing.T, *Server) error
	}{
		{"fast", func(t *testing.T, server *Server) error { return server.Restart(t.Context(), false) }},
		{"immediate", func(t *testing.T, server *Server) error { return server.Restart(t.Context(), true) }},
		{"by command", byCommand()},
		{"immediate by command", byCommand("immediate")},
	}
	server := start(t, Config{})
	address := server.URL("postgres")
	_, err := connect(t, address).Exec(t.Context(), `create table kept (n int)`)
	require.NoError(t, err)
	for i, test := range restarts {
		conn := connect(t, address)
		_, err := conn.Exec(t.Context(), `insert into kept values (1)`)
		require.NoError(t, err)
		pid := postmaster(t, server.dir)

		require.NoError(t, test.restart(t, server), test.name)
		assert.NotEqual(t, pid, postmaster(t, server.dir), test.name)
		assert.Error(t, conn.Ping(t.Context()), test.name)
		assert.Equal(t, i+1, value[int](t, connect(t, address), `select count(*) from kept`), test.name)
	}
}

func TestCancelledRestartGoesOn(t *testing.T) {
	t.Parallel()
	server := start(t, Config{})
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, server.Restart(cancelled, false), context.Canceled)
	require.NoError(t, server.Restart(t.Context(), false))
	connect(t, server.URL("postgres"))
}

func TestKilledProcessLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := freshDir(t)
	command := exec.CommandContext(t.Context(), os.Args[0])
	command.Env = append(os.Environ(), envChild+"="+dir)
	command.Stderr = os.Stderr
	stdin, err := command.StdinPipe()
	require.NoError(t, err)
	defer stdin.Close()
	stdout, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())
	reader := bufio.NewReader(stdout)
	line, err := reader.ReadString('\n')
	require.NoError(t, err)
	supervisor, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	server := postmaster(t, dir)
	require.True(t, alive(server))

	require.NoError(t, command.Process.Kill())
	// Nobody else may hold the process's output, or its caller waits for them.
	_, err = io.Copy(io.Discard, reader)
	require.NoError(t, err)
	require.Error(t, command.Wait())
	awaitNothing(t, dir, supervisor, server)
}

func TestProcessKilledDuringStartLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := freshDir(t)
	command := exec.CommandContext(t.Context(), os.Args[0])
	command.Env = append(os.Environ(), envChild+"="+dir)
	require.NoError(t, command.Start())
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(dir, "data", "PG_VERSION"))
		return err == nil
	}, 20*time.Second, time.Millisecond)

	require.NoError(t, command.Process.Kill())
	require.Error(t, command.Wait())
	awaitNothing(t, dir)
}

// Also what happens if the server's process is killed while another one restarts it.
func TestStopDuringRestartByAnotherProcessLeavesNothing(t *testing.T) {
	t.Parallel()
	for range 4 {
		server := start(t, Config{})
		pid := postmaster(t, server.dir)
		argv := server.RestartCommand()
		restart := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
		require.NoError(t, restart.Start())
		require.Eventually(t, func() bool { return !alive(pid) }, 20*time.Second, time.Millisecond)

		assert.NoError(t, server.Stop())
		_ = restart.Wait() // it may have been quicker
		assert.NoDirExists(t, server.dir)
		assert.True(t, portIsFree(server.Port()))
	}
}

func awaitNothing(t *testing.T, dir string, pids ...int) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, pid := range pids {
			if alive(pid) {
				return false
			}
		}
		_, err := os.Stat(dir)
		return os.IsNotExist(err)
	}, 20*time.Second, 5*time.Millisecond)
}

func TestFailedStartShowsTheLogAndLeavesNothing(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port

	for text, config := range map[string]Config{
		"no_such_setting":  {Settings: map[string]string{"no_such_setting": "1"}},
		"max_wal_senders":  {Settings: map[string]string{"max_wal_senders": "0 or so"}},
		strconv.Itoa(port): {Port: port},
	} {
		config.Dir = freshDir(t)
		_, err := Start(t.Context(), config)
		assert.ErrorContains(t, err, text)
		assert.NoDirExists(t, config.Dir)
	}
}

func TestCancelledStartLeavesNothing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	dir := freshDir(t)
	_, err := Start(ctx, Config{Dir: dir})
	assert.Error(t, err)
	assert.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
	assert.NoDirExists(t, dir)
}

func TestDirectoryThatHoldsSomethingIsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "precious")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err := Start(t.Context(), Config{Dir: dir})
	assert.ErrorContains(t, err, "not empty")
	assert.FileExists(t, file)
}

func TestDirectoryTooDeepForASocketIsRefused(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), strings.Repeat("deep", 20))
	_, err := Start(t.Context(), Config{Dir: dir})
	assert.ErrorContains(t, err, "too long")
	assert.NoDirExists(t, dir)
}

func TestUnreachableTemporaryDirectoryIsAvoided(t *testing.T) {
	// Only root has a user to lend the server who may be kept out of a directory of ours.
	private := t.TempDir()
	require.NoError(t, os.Chmod(private, 0o700))
	t.Setenv("TMPDIR", private)
	server := start(t, Config{})
	connect(t, server.URL("postgres"))
	if os.Geteuid() == 0 {
		assert.NotContains(t, server.dir, private)
	}
	require.NoError(t, server.Stop())
	left, err := os.ReadDir(private)
	require.NoError(t, err)
	assert.Empty(t, left)
}

func TestConfigNamesAllFaults(t *testing.T) {
	t.Parallel()
	_, err := Start(t.Context(), Config{Port: -1, Settings: map[string]string{"a b": "", "c": "1\n2"}})
	assert.EqualError(t, err, `server config: Port -1 is not a TCP port
server config: "a b" is not the name of a setting
server config: setting c does not fit on a line`)
}

func TestQuoteSurvivesTheShell(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "plain", "it's", `$HOME "x" \n`, "''"} {
		output, err := exec.CommandContext(t.Context(), "/bin/sh", "-c", "printf %s "+quote(text)).Output()
		require.NoError(t, err)
		assert.Equal(t, text, string(output))
	}
}
