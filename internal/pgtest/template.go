package pgtest

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
)

// Template is a database that is set up once and copied for each test.
type Template struct {
	// Key stands for all Setup does, such as a hash of the migrations. Setups that differ need keys
	// that differ, because a named server keeps its templates from run to run.
	Key string

	// Setup fills the new database. It must not leave connections to it behind.
	Setup func(ctx context.Context, conn *pgx.Conn) error
}

// templates are those made by this process, by address of the maintenance database and name.
var templates struct {
	sync.Mutex
	made map[string]*template
}

type template struct {
	once sync.Once
	err  error
}

// hash is the same in every process that uses the key.
func (t Template) hash() [sha256.Size]byte { return sha256.Sum256([]byte(t.Key)) }

func (t Template) name() string {
	hash := t.hash()
	return "eventlog_template_" + hex.EncodeToString(hash[:10])
}

// make returns the name of the finished template database. Tests that ask at the same time wait for
// the first.
func (t Template) make(maintenance string) (string, error) {
	name := t.name()
	key := maintenance + "\x00" + name
	templates.Lock()
	if templates.made == nil {
		templates.made = make(map[string]*template)
	}
	entry := templates.made[key]
	if entry == nil {
		entry = new(template)
		templates.made[key] = entry
	}
	templates.Unlock()

	entry.once.Do(func() {
		// Not the context of the test that came first: the others need the template too.
		ctx, cancel := context.WithTimeout(context.Background(), budget)
		defer cancel()
		if err := t.create(ctx, maintenance, name); err != nil {
			entry.err = fmt.Errorf("template database %q: %w", t.Key, err)
		}
	})
	return name, entry.err
}

// create makes the database unless another process has. Being marked as a template is what tells a
// finished one from one whose maker died.
func (t Template) create(ctx context.Context, maintenance, name string) error {
	conn, err := connect(ctx, maintenance)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()

	// The lock goes with the connection.
	hash := t.hash()
	if _, err := conn.Exec(ctx, `select pg_advisory_lock($1)`, int64(binary.BigEndian.Uint64(hash[:]))); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	var finished bool
	err = conn.QueryRow(ctx, `select datistemplate from pg_catalog.pg_database where datname = $1`, name).Scan(&finished)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("look: %w", err)
	}
	if finished {
		return nil
	}
	identifier := pgx.Identifier{name}.Sanitize()
	if _, err := conn.Exec(ctx, `drop database if exists `+identifier+` with (force)`); err != nil {
		return fmt.Errorf("drop unfinished: %w", err)
	}
	if _, err := conn.Exec(ctx, `create database `+identifier); err != nil {
		return fmt.Errorf("create: %w", err)
	}
	if err := t.fill(ctx, maintenance, name); err != nil {
		_, dropErr := conn.Exec(ctx, `drop database `+identifier+` with (force)`)
		return errors.Join(fmt.Errorf("setup: %w", err), dropErr)
	}
	// A database somebody is connected to cannot be copied, so nobody may connect.
	if _, err := conn.Exec(ctx, `alter database `+identifier+` with is_template true allow_connections false`); err != nil {
		return fmt.Errorf("finish: %w", err)
	}
	return nil
}

func (t Template) fill(ctx context.Context, maintenance, name string) error {
	if t.Setup == nil {
		return nil
	}
	address, err := withDatabase(maintenance, name)
	if err != nil {
		return err
	}
	conn, err := connect(ctx, address)
	if err != nil {
		return err
	}
	err = t.Setup(ctx, conn)
	return errors.Join(err, conn.Close(ctx))
}
