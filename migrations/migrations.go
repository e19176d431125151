// Package migrations creates and upgrades the tables of an event log.
//
// The program migrates ([Up], from a deploy step or at its start), the library never does by itself. The
// same SQL lies beside this package as plain files for a migration tool of your own; [SQL] renders it for
// other names. No migration drops what an earlier version of the library needs, so two versions may run
// side by side during a deploy.
package migrations

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

//go:embed sql/*.sql
var files embed.FS

// Migration is one step of the schema.
type Migration struct {
	Version   int
	Name      string
	SQL       string    // rendered for the log
	AppliedAt time.Time // zero when it is not applied
}

// SQL returns every migration, rendered for a log's names, in order. A nil log is the default one.
func SQL(log *cursor.Log) []Migration {
	names, err := fs.Glob(files, "sql/*.sql")
	if err != nil {
		panic(err) // the pattern is a constant
	}
	migrations := make([]Migration, 0, len(names))
	for _, name := range names { // sorted
		text, err := files.ReadFile(name)
		if err != nil {
			panic(err) // it is embedded
		}
		number, title, _ := strings.Cut(strings.TrimSuffix(path.Base(name), ".sql"), "_")
		version, err := strconv.Atoi(number)
		if err != nil {
			panic(err) // a file's name is ours
		}
		migrations = append(migrations, Migration{Version: version, Name: title, SQL: render(log, string(text))})
	}
	return migrations
}

// render puts an existing table in the place of the log's own, and leaves out what the log does without.
func render(log *cursor.Log, text string) string {
	if !log.Notifies() {
		text = strings.ReplaceAll(text, "    perform pg_notify('event_log', '');\n", "")
	}
	if _, existing := log.Existing(); !existing {
		return log.Render(text)
	}
	table, trigger := log.ExistingTable()
	var out strings.Builder
	for _, own := range []struct{ what, instead string }{{"table", table}, {"trigger", trigger}} {
		before, rest, found := strings.Cut(text, "-- the log's own "+own.what+": begin\n")
		if !found {
			break
		}
		_, text, _ = strings.Cut(rest, "-- the log's own "+own.what+": end\n")
		out.WriteString(log.Render(before) + own.instead)
	}
	return out.String() + log.Render(text)
}

const sqlTable = `
create table if not exists public.event_migrations (
    version    integer     primary key,
    name       text        not null,
    applied_at timestamptz not null default clock_timestamp()
)`

const sqlApplied = `select m.version, m.applied_at from public.event_migrations m`

// Up applies what is missing, all in one transaction: after an error nothing was applied. It returns the
// migrations that it applied. Any number of processes may call it at once; one does the work and the others
// wait for it. db is a pool, a connection or a transaction.
//
// The role needs the right to create tables in the log's schema, which must exist.
func Up(ctx context.Context, db cursor.Beginner, log *cursor.Log) ([]Migration, error) {
	var applied []Migration
	err := cursor.InReadCommitted(ctx, db, func(tx pgx.Tx) error {
		// One lock for all logs: also "if not exists" collides in the catalogue when two create at once.
		const lock = "watermill-eventlog migrations"
		if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock(hashtextextended($1, 0))", lock); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, log.Render(sqlTable)); err != nil {
			return err
		}
		migrations, err := status(ctx, tx, log)
		if err != nil {
			return err
		}
		for _, m := range migrations {
			if !m.AppliedAt.IsZero() {
				continue
			}
			// Several statements in one text are for the simple protocol, whatever the connection's mode.
			if _, err := tx.Conn().PgConn().Exec(ctx, m.SQL).ReadAll(); err != nil {
				return fmt.Errorf("migration %04d_%s: %w", m.Version, m.Name, err)
			}
			row := tx.QueryRow(ctx, log.Render(`
insert into public.event_migrations (version, name) values ($1, $2) returning applied_at`), m.Version, m.Name)
			if err := row.Scan(&m.AppliedAt); err != nil {
				return err
			}
			applied = append(applied, m)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("migrate %s: %w", log, err)
	}
	return applied, nil
}

// Status returns every migration and when it was applied to a database. Where the migrations' table is
// missing, none was.
func Status(ctx context.Context, db cursor.Querier, log *cursor.Log) ([]Migration, error) {
	rows, _ := db.Query(ctx, "select to_regclass($1) is not null", log.Table("migrations"))
	exists, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
	migrations := SQL(log)
	if err == nil && exists {
		migrations, err = status(ctx, db, log)
	}
	if err != nil {
		return nil, fmt.Errorf("migration status of %s: %w", log, err)
	}
	return migrations, nil
}

func status(ctx context.Context, db cursor.Querier, log *cursor.Log) ([]Migration, error) {
	migrations := SQL(log)
	rows, _ := db.Query(ctx, log.Render(sqlApplied))
	var version int
	var at time.Time
	_, err := pgx.ForEachRow(rows, []any{&version, &at}, func() error {
		for i := range migrations {
			if migrations[i].Version == version {
				migrations[i].AppliedAt = at
			}
		}
		return nil
	})
	return migrations, err
}
