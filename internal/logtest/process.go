package logtest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// What a process is told in its environment: which of the programs it is, and its database.
const (
	envProgram = "EVENTLOG_TEST_PROGRAM"
	envURL     = "EVENTLOG_TEST_URL"
)

// Program is what a process of a test does until ctx ends, which is when it is told to stop.
type Program func(ctx context.Context, url string) error

// Main is pgtest.Main where tests start processes: they are the test binary once more, as one of the programs.
func Main(m *testing.M, programs map[string]Program) {
	name := os.Getenv(envProgram)
	if name == "" {
		pgtest.Main(m)
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := programs[name](ctx, os.Getenv(envURL)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Process is one that a test has started, seen from outside. It is killed at the test's end, if it is still there.
type Process struct {
	Name  string        // of its database connections: their application_name
	Lines chan string   // what it prints
	Ended chan struct{} // closed when it has

	cmd *exec.Cmd
	in  io.WriteCloser
	err error // how it ended
}

// Start starts a program of [Main] on a database, with further settings for its environment.
func Start(t testing.TB, db *pgtest.DB, program, name string, environment ...string) *Process {
	t.Helper()
	p := &Process{Name: name, Lines: make(chan string, 100), Ended: make(chan struct{}), cmd: exec.Command(os.Args[0])}
	url := db.URL() + "&application_name=" + name
	p.cmd.Env = slices.Concat(os.Environ(), environment, []string{envProgram + "=" + program, envURL + "=" + url})
	p.cmd.Stderr = os.Stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	over := make(chan struct{})
	go func() {
		defer close(p.Ended)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			select {
			case p.Lines <- lines.Text():
			case <-over: // nobody reads any more
			}
		}
		p.err = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		close(over)
		p.Kill()
	})
	return p
}

// Says waits for its next line.
func (p *Process) Says(t testing.TB, line string) {
	t.Helper()
	select {
	case got := <-p.Lines:
		require.Equal(t, line, got)
	case <-p.Ended:
		require.Fail(t, "it has ended", "%v, and not said %q", p.err, line)
	case <-time.After(time.Minute):
		require.Fail(t, "it does not say "+line)
	}
}

// Tell sends it a line.
func (p *Process) Tell(t testing.TB, line string) {
	t.Helper()
	_, err := io.WriteString(p.in, line+"\n")
	require.NoError(t, err)
}

// Signal sends it a signal.
func (p *Process) Signal(t testing.TB, s os.Signal) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Signal(s))
}

// Freeze stops it where it is.
func (p *Process) Freeze(t testing.TB) { t.Helper(); p.Signal(t, syscall.SIGSTOP) }

// Thaw lets it go on.
func (p *Process) Thaw(t testing.TB) { t.Helper(); p.Signal(t, syscall.SIGCONT) }

// Stop ends it as a deploy would.
func (p *Process) Stop(t testing.TB) {
	t.Helper()
	p.Signal(t, syscall.SIGTERM)
	<-p.Ended
	require.NoError(t, p.err, "a stopped process ends well")
}

// Kill returns when it is gone.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // it may be gone already
	<-p.Ended
}

// PID is its number.
func (p *Process) PID() int { return p.cmd.Process.Pid }
