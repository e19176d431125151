package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/migrations"
)

type migrationJSON struct {
	Version   int        `json:"version"`
	Name      string     `json:"name"`
	AppliedAt *time.Time `json:"applied_at"`
}

type sqlJSON struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	SQL     string `json:"sql"`
}

func newMigrationsJSON(list []migrations.Migration) []migrationJSON {
	all := make([]migrationJSON, len(list))
	for i, m := range list {
		all[i] = migrationJSON{Version: m.Version, Name: m.Name}
		if !m.AppliedAt.IsZero() {
			all[i].AppliedAt = utc(&m.AppliedAt)
		}
	}
	return all
}

func writeMigrations(w io.Writer, list []migrationJSON) {
	rows := make([][]string, len(list))
	for i, m := range list {
		rows[i] = []string{fmt.Sprintf("%04d", m.Version), m.Name, stamp(m.AppliedAt)}
	}
	table(w, []string{"VERSION", "NAME", "APPLIED"}, rows)
}

func (p *program) migrateCommand() *cobra.Command {
	up := &cobra.Command{
		Use:   "up",
		Short: "Create or upgrade the log's tables",
		Long: `Up applies the migrations that are missing, all in one transaction. It may run at once from several places. The
role needs the right to create tables in the schema, which must exist.`,
		Example: `  eventlog migrate up
  eventlog migrate up --json`,
		Args: cobra.NoArgs,
	}
	up.RunE = p.do(func(ctx context.Context, db *pgx.Conn, _ []string) error {
		applied, err := migrations.Up(ctx, db, p.log)
		if err != nil {
			return err
		}
		list := newMigrationsJSON(applied)
		return p.print(list, func(w io.Writer) {
			if len(list) == 0 {
				fmt.Fprintf(w, "%s is up to date\n", p.log)
				return
			}
			writeMigrations(w, list)
		})
	})
	status := &cobra.Command{
		Use:     "status",
		Short:   "Show which migrations were applied",
		Long:    `Status shows every migration and when it was applied.`,
		Example: `  eventlog migrate status`,
		Args:    cobra.NoArgs,
	}
	status.RunE = p.do(func(ctx context.Context, db *pgx.Conn, _ []string) error {
		all, err := migrations.Status(ctx, db, p.log)
		if err != nil {
			return err
		}
		list := newMigrationsJSON(all)
		return p.print(list, func(w io.Writer) { writeMigrations(w, list) })
	})
	return group("migrate", "Create and upgrade the log's tables", up, status, p.migratePrintCommand())
}

func (p *program) migratePrintCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "print",
		Short: "Print the migrations as SQL, for a tool of your own",
		Long:  `Print writes the migrations as SQL, for the names that --schema, --log and --channel give. It needs no database.`,
		Example: `  eventlog migrate print
  eventlog migrate print --schema shop --log orders`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			p.began = true
			list := []sqlJSON{}
			for _, m := range migrations.SQL(p.log) {
				list = append(list, sqlJSON{m.Version, m.Name, m.SQL})
			}
			return p.print(list, func(w io.Writer) {
				for _, m := range list {
					fmt.Fprintf(w, "-- %04d_%s\n\n%s\n", m.Version, m.Name, m.SQL)
				}
			})
		},
	}
}
