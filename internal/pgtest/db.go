package pgtest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
)

// applicationName tells the helpers' own connections from those a test looks at in pg_stat_activity.
const applicationName = "pgtest"

// DB is a database of one test. Its methods fail the test they are given, so call them from the test's
// own goroutine.
type DB struct {
	name string
	url  string

	mu sync.Mutex
	// own serves Exec, Value and Column; nil until one of them is used.
	own *pgxpool.Pool
}

// New creates a database for the test, empty or as a copy of the template, and drops it in cleanup.
func New(t testing.TB, template ...Template) *DB {
	t.Helper()
	maintenance, named, err := shared.maintenance()
	if err != nil {
		t.Fatal(err)
	}
	db := create(t, maintenance, template)
	t.Cleanup(func() {
		if named && t.Failed() {
			address, err := url.Parse(db.url)
			if err != nil {
				t.Error(err)
				return
			}
			t.Logf("database is kept: %s", address.Redacted())
			return
		}
		if err := drop(maintenance, db.name); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { db.close(t) })
	return db
}

// NewOn creates a database on a server of the test's own, with which it goes.
func NewOn(t testing.TB, server *pgserver.Server, template ...Template) *DB {
	t.Helper()
	db := create(t, server.URL("postgres"), template)
	t.Cleanup(func() { db.close(t) })
	return db
}

func create(t testing.TB, maintenance string, template []Template) *DB {
	t.Helper()
	name := databaseName(t.Name())
	statement := `create database ` + pgx.Identifier{name}.Sanitize()
	switch len(template) {
	case 0:
	case 1:
		source, err := template[0].make(maintenance)
		if err != nil {
			t.Fatal(err)
		}
		statement += ` template ` + pgx.Identifier{source}.Sanitize()
	default:
		t.Fatal("a database is a copy of one template")
	}
	address, err := withDatabase(maintenance, name)
	if err != nil {
		t.Fatal(err)
	}
	if err := execute(t.Context(), maintenance, statement); err != nil {
		t.Fatalf("create database %s: %v", name, err)
	}
	return &DB{name: name, url: address}
}

func drop(maintenance, name string) error {
	statement := `drop database if exists ` + pgx.Identifier{name}.Sanitize() + ` with (force)`
	if err := execute(context.Background(), maintenance, statement); err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	return nil
}

// execute runs one statement on a connection of its own.
func execute(ctx context.Context, address, statement string) error {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	conn, err := connect(ctx, address)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, statement)
	return errors.Join(err, conn.Close(ctx))
}

func connect(ctx context.Context, address string) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig(address)
	if err != nil {
		return nil, err
	}
	config.RuntimeParams["application_name"] = applicationName
	return pgx.ConnectConfig(ctx, config)
}

// databaseName is the test's name cut to what an identifier holds, with a random end.
func databaseName(test string) string {
	const length = 40
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.ToLower(test))
	random := make([]byte, 6)
	rand.Read(random) // never fails
	return name[:min(len(name), length)] + "_" + hex.EncodeToString(random)
}

// withDatabase is the address of another database on the same server.
func withDatabase(address, name string) (string, error) {
	parsed, err := url.Parse(address)
	// Not the error itself, which holds the address and its password.
	if err != nil || parsed.Scheme != "postgres" && parsed.Scheme != "postgresql" {
		return "", fmt.Errorf("%s is not a postgres:// URL", EnvDatabase)
	}
	parsed.Path = "/" + name
	query := parsed.Query()
	query.Del("dbname")
	query.Del("database")
	parsed.RawQuery = query.Encode()
	return parsed.String(), nil
}

// Name is the name of the database.
func (db *DB) Name() string { return db.name }

// URL is the address of the database.
func (db *DB) URL() string { return db.url }

// Pool opens a pool, which is closed in cleanup. Connections still in use by then fail the test.
func (db *DB) Pool(t testing.TB, options ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	pool, err := db.newPool(options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closePool(t, pool) })
	return pool
}

func (db *DB) newPool(options ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(db.url)
	if err != nil {
		return nil, err
	}
	for _, option := range options {
		option(config)
	}
	// The context only bounds the connections made at once, in the background; it must outlive this
	// call.
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	return pool, nil
}

// Conn opens a connection, which is closed in cleanup.
func (db *DB) Conn(t testing.TB) *pgx.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), budget)
	defer cancel()
	conn, err := pgx.Connect(ctx, db.url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), budget)
		defer cancel()
		// Whatever the test did to it, closing a connection has nothing to tell about the test.
		_ = conn.Close(ctx)
	})
	return conn
}

// SQL opens the database for database/sql, with pgx as its driver, and closes it in cleanup.
func (db *DB) SQL(t testing.TB) *sql.DB {
	t.Helper()
	config, err := pgx.ParseConfig(db.url)
	if err != nil {
		t.Fatal(err)
	}
	handle := stdlib.OpenDB(*config)
	t.Cleanup(func() {
		if err := handle.Close(); err != nil {
			t.Errorf("close database/sql: %v", err)
		}
	})
	return handle
}

// Exec runs a statement, or several without args.
func (db *DB) Exec(t testing.TB, statement string, args ...any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), budget)
	defer cancel()
	if _, err := db.helpers(t).Exec(ctx, statement, args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

// Value returns the one column of the one row a query gives.
func Value[T any](t testing.TB, db *DB, query string, args ...any) T {
	t.Helper()
	return collect(t, db, query, args, func(rows pgx.Rows) (T, error) {
		return pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	})
}

// Column returns the one column of all rows a query gives.
func Column[T any](t testing.TB, db *DB, query string, args ...any) []T {
	t.Helper()
	return collect(t, db, query, args, func(rows pgx.Rows) ([]T, error) {
		return pgx.CollectRows(rows, pgx.RowTo[T])
	})
}

func collect[T any](t testing.TB, db *DB, query string, args []any, read func(pgx.Rows) (T, error)) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), budget)
	defer cancel()
	rows, err := db.helpers(t).Query(ctx, query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	result, err := read(rows)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return result
}

// helpers is the pool of Exec, Value and Column. It does not trust a connection it has used before,
// because the test may have restarted the server meanwhile, or changed the schema.
func (db *DB) helpers(t testing.TB) *pgxpool.Pool {
	t.Helper()
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.own == nil {
		pool, err := db.newPool(func(config *pgxpool.Config) {
			config.MaxConns = 16
			config.ConnConfig.RuntimeParams["application_name"] = applicationName
			config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeDescribeExec
			config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true }
		})
		if err != nil {
			t.Fatal(err)
		}
		db.own = pool
	}
	return db.own
}

func (db *DB) close(t testing.TB) {
	t.Helper()
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.own != nil {
		closePool(t, db.own)
		db.own = nil
	}
}
