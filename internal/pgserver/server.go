package pgserver

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const host = "127.0.0.1"

// readyBudget is how long a server that reports itself started may refuse connections.
const readyBudget = 30 * time.Second

// portAttempts is how many free ports are tried, because another process may take one between our
// look and the server's start.
const portAttempts = 5

// errStopped is returned for what is asked of a server after Stop.
var errStopped = errors.New("server is stopped")

//go:embed control.sh
var control string

var settingName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.]*$`)

// Config says which server to start. The zero value is a server for tests on a free port.
type Config struct {
	// Fsync makes what was committed survive a crash of the machine. Without it commits still survive
	// every crash of the server itself, Restart(ctx, true) included, and cost less.
	Fsync bool

	// Settings are further lines of postgresql.conf, such as "wal_level": "logical". They win over
	// the package's own.
	Settings map[string]string

	// Port is the TCP port on 127.0.0.1. Defaults to a free one.
	Port int

	// Dir holds the server's data, socket and log, and is removed in the end; it must be missing or
	// empty. Defaults to a new directory among the temporary ones.
	Dir string

	// Download fetches binaries from the network if none are installed, which may take a minute. It
	// does not work for root.
	Download bool
}

// Validate returns all faults of the config at once.
func (c Config) Validate() error {
	var faults []error
	if c.Port < 0 || c.Port > 65535 {
		faults = append(faults, fmt.Errorf("server config: Port %d is not a TCP port", c.Port))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Settings)) {
		if !settingName.MatchString(name) {
			faults = append(faults, fmt.Errorf("server config: %q is not the name of a setting", name))
		}
		if strings.ContainsAny(c.Settings[name], "\n\r\x00") {
			faults = append(faults, fmt.Errorf("server config: setting %s does not fit on a line", name))
		}
	}
	return errors.Join(faults...)
}

// Server is a running PostgreSQL server. Its methods may be called from several goroutines.
type Server struct {
	binDir string
	dir    string
	port   int

	supervisor *exec.Cmd
	commands   *os.File
	replies    *bufio.Reader

	// turn is held by whoever talks to the supervisor, and for good once it is gone.
	turn    chan struct{}
	stopped chan struct{}
	stop    func() error
}

// Start returns a server that accepts connections, or ErrNoBinaries if there is nothing to start. The
// context bounds the start only; call Stop in the end.
func Start(ctx context.Context, config Config) (*Server, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	binDir, err := findBinaries(ctx, system)
	if errors.Is(err, ErrNoBinaries) && config.Download {
		binDir, err = download(ctx, err)
	}
	if err != nil {
		return nil, err
	}
	owner, err := findOwner(ctx)
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", err)
	}
	dir, err := makeDir(ctx, config.Dir, binDir, owner)
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", err)
	}
	server, err := supervise(dir, binDir, owner)
	if err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", errors.Join(err, os.RemoveAll(dir)))
	}
	if err := server.boot(ctx, config); err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", errors.Join(server.withLog(err), server.Stop()))
	}
	return server, nil
}

// supervise starts the process that outlives this one for as long as it takes to clean up. It has a
// session of its own, so that an interrupt typed at the terminal reaches it as the end of its stdin.
func supervise(dir, binDir string, owner owner) (*Server, error) {
	text := "dir=" + quote(dir) + "\nbin=" + quote(binDir) + "\n" + owner.function() + "\n" + control
	script := filepath.Join(dir, "control")
	if err := os.WriteFile(script, []byte(text), 0o644); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(owner.give(log.Name()), log.Close()); err != nil {
		return nil, err
	}

	stdin, commands, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = stdin.Close() }()
	replies, stdout, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, commands.Close())
	}
	defer func() { _ = stdout.Close() }()

	supervisor := exec.Command("/bin/sh", script, "supervise")
	supervisor.Dir = dir
	supervisor.Stdin = stdin
	supervisor.Stdout = stdout
	supervisor.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := supervisor.Start(); err != nil {
		return nil, errors.Join(err, commands.Close(), replies.Close())
	}

	server := &Server{
		binDir:     binDir,
		dir:        dir,
		supervisor: supervisor,
		commands:   commands,
		replies:    bufio.NewReader(replies),
		turn:       make(chan struct{}, 1),
		stopped:    make(chan struct{}),
	}
	server.stop = sync.OnceValue(func() error {
		close(server.stopped)
		err := commands.Close()
		if fault := supervisor.Wait(); fault != nil {
			err = errors.Join(err, fmt.Errorf("stop PostgreSQL in %s: %w", dir, fault))
		}
		// The supervisor has closed its end, so that a reader still waiting for a reply goes too.
		server.turn <- struct{}{}
		return errors.Join(err, replies.Close())
	})
	return server, nil
}

// boot takes the server from an empty directory to the first connection.
func (s *Server) boot(ctx context.Context, config Config) error {
	if err := s.command(ctx, "init"); err != nil {
		return err
	}
	attempts := portAttempts
	if config.Port != 0 {
		attempts = 1
	}
	for attempt := 1; ; attempt++ {
		s.port = config.Port
		if s.port == 0 {
			port, err := freePort()
			if err != nil {
				return err
			}
			s.port = port
		}
		if err := s.configure(config); err != nil {
			return err
		}
		err := s.command(ctx, "start")
		if err == nil {
			return s.ready(ctx)
		}
		if attempt == attempts || ctx.Err() != nil || portIsFree(s.port) {
			return err
		}
	}
}

// configure appends to postgresql.conf, where the last line about a setting wins.
func (s *Server) configure(config Config) error {
	settings := map[string]string{
		"listen_addresses":          host,
		"port":                      strconv.Itoa(s.port),
		"unix_socket_directories":   s.dir,
		"max_connections":           "200",
		"max_prepared_transactions": "10",
	}
	if !config.Fsync {
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
	}
	maps.Copy(settings, config.Settings)

	var lines bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		value := strings.NewReplacer(`\`, `\\`, `'`, `''`).Replace(settings[name])
		fmt.Fprintf(&lines, "%s = '%s'\n", name, value)
	}
	file, err := os.OpenFile(filepath.Join(s.dir, "data", "postgresql.conf"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = file.Write(lines.Bytes())
	return errors.Join(err, file.Close())
}

// ready returns once a connection works.
func (s *Server) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyBudget)
	defer cancel()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		conn, err := pgx.Connect(ctx, s.URL("postgres"))
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for a connection: %w", errors.Join(ctx.Err(), err))
		case <-again.C:
		}
	}
}

// command has the supervisor do one thing. If the context ends first the thing goes on, and the next
// command waits for it.
func (s *Server) command(ctx context.Context, line string) error {
	select {
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", line, ctx.Err())
	case <-s.stopped:
		return fmt.Errorf("%s: %w", line, errStopped)
	case s.turn <- struct{}{}:
	}
	done := make(chan error, 1)
	go func() {
		defer func() { <-s.turn }()
		done <- s.ask(line)
	}()
	select {
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", line, ctx.Err())
	case err := <-done:
		return err
	}
}

func (s *Server) ask(line string) error {
	if _, err := io.WriteString(s.commands, line+"\n"); err != nil {
		return fmt.Errorf("%s: %w", line, err)
	}
	reply, err := s.replies.ReadString('\n')
	if err != nil {
		return fmt.Errorf("%s: supervisor is gone: %w", line, err)
	}
	if status := strings.TrimSpace(reply); status != "0" {
		return fmt.Errorf("%s: exit status %s", line, status)
	}
	return nil
}

// Restart stops the server and starts it on the same data and port, and returns once a connection
// works. Immediate is a crash: sessions are cut off at once, and the server recovers from its log. If
// the context ends first, the restart goes on without the caller.
func (s *Server) Restart(ctx context.Context, immediate bool) error {
	mode := "fast"
	if immediate {
		mode = "immediate"
	}
	err := s.command(ctx, "restart "+mode)
	if err == nil {
		err = s.ready(ctx)
	}
	if err != nil {
		return fmt.Errorf("restart PostgreSQL: %w", s.withLog(err))
	}
	return nil
}

// RestartCommand is the argv of a command by which another process, run by the same user or by root,
// restarts the server; the command ends when the server is up again. It takes one more argument, fast
// or immediate, and defaults to fast. Do not let it overlap with Restart.
func (s *Server) RestartCommand() []string {
	return []string{"/bin/sh", filepath.Join(s.dir, "control"), "restart"}
}

// Stop ends the server and removes its directory, and returns when both are gone. It cuts off whoever
// is still connected. Further calls return what the first did.
func (s *Server) Stop() error { return s.stop() }

// URL is the address of a database over TCP, for the superuser postgres.
func (s *Server) URL(database string) string {
	address := url.URL{
		Scheme:   "postgres",
		User:     url.User("postgres"),
		Host:     net.JoinHostPort(host, strconv.Itoa(s.port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return address.String()
}

// SocketURL is the address of a database over the server's Unix socket, for the superuser postgres.
func (s *Server) SocketURL(database string) string {
	address := url.URL{
		Scheme: "postgres",
		User:   url.User("postgres"),
		Path:   "/" + database,
		RawQuery: url.Values{
			"host":    {s.dir},
			"port":    {strconv.Itoa(s.port)},
			"sslmode": {"disable"},
		}.Encode(),
	}
	return address.String()
}

// Host is the address the server listens on, always 127.0.0.1.
func (s *Server) Host() string { return host }

// Port is the TCP port the server listens on. It survives restarts.
func (s *Server) Port() int { return s.port }

// BinDir is where the server's binaries are, with psql and pgbench often among them.
func (s *Server) BinDir() string { return s.binDir }

// withLog adds the end of the server's log, which is where PostgreSQL says what was wrong.
func (s *Server) withLog(err error) error {
	log, readErr := os.ReadFile(filepath.Join(s.dir, "log"))
	if readErr != nil {
		return err
	}
	if tail := len(log) - 2000; tail > 0 {
		log = log[tail:]
	}
	return fmt.Errorf("%w; the log ends:\n%s", err, bytes.TrimSpace(log))
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	return listener.Addr().(*net.TCPAddr).Port, listener.Close()
}

func portIsFree(port int) bool {
	listener, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return false
	}
	return listener.Close() == nil
}

func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
