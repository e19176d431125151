package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
)

// EnvDatabase names the environment variable with the URL of the database to work through.
const EnvDatabase = "EVENTLOG_TEST_DATABASE"

// budget bounds each thing a test waits for here, so that a lock nobody releases fails one test with
// its name instead of the whole run.
const budget = time.Minute

// shared is the server of this process; it starts with the first test that asks for it.
var shared host

// Main is the body of a TestMain. It runs the tests, stops the server they shared, fails the run if
// they passed but left goroutines behind, and exits. A package without it loses only the check: its
// server ends with the process.
func Main(m *testing.M, options ...goleak.Option) {
	code := m.Run()
	if err := shared.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest:", err)
		code = max(code, 1)
	}
	if code == 0 {
		if err := goleak.Find(options...); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest: goroutines outlived the tests:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// host is a place for databases.
type host struct {
	mu      sync.Mutex
	started bool
	server  *pgserver.Server // nil on a named server
	named   string           // the URL of EnvDatabase
	err     error
}

// maintenance returns the URL of the database to create others from, and whether the server is a named
// one.
func (h *host) maintenance() (address string, named bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.started {
		h.started = true
		if h.named = os.Getenv(EnvDatabase); h.named == "" {
			ctx, cancel := context.WithTimeout(context.Background(), budget)
			defer cancel()
			h.server, h.err = pgserver.Start(ctx, pgserver.Config{})
		}
	}
	switch {
	case h.err != nil:
		return "", false, h.err
	case h.server != nil:
		return h.server.URL("postgres"), false, nil
	default:
		return h.named, true, nil
	}
}

func (h *host) stop() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.server == nil {
		return nil
	}
	err := h.server.Stop()
	h.server, h.err = nil, errors.New("the tests' server is stopped")
	return err
}

// Server starts a server of the test's own, for restarts and faults, and stops it in cleanup. The
// config is optional.
func Server(t testing.TB, config ...pgserver.Config) *pgserver.Server {
	t.Helper()
	if len(config) > 1 {
		t.Fatal("pgtest.Server takes one config")
	}
	config = append(config, pgserver.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), budget)
	defer cancel()
	server, err := pgserver.Start(ctx, config[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return server
}
