package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

// How the program ends.
const (
	exitOK = iota
	exitFailed
	exitUsage
)

// program is one call of the program.
type program struct {
	out, err stream
	env      func(string) string

	database, schema, name, channel string
	json                            bool
	timeout                         time.Duration

	log   *cursor.Log
	began bool // the command line was understood
}

// usageError is a command line that cannot be understood.
type usageError struct{ error }

func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// quietError ends the program as a failure that was told of already.
type quietError struct{ error }

// run runs the command line and returns how the program ends.
func (p *program) run(ctx context.Context, args []string) int {
	root := p.root()
	root.SetArgs(args)
	command, err := root.ExecuteContextC(ctx)
	var wrong usageError
	var quiet quietError
	var exit exitError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &exit):
		return int(exit)
	case !p.began || errors.As(err, &wrong):
		fmt.Fprintf(p.err, "eventlog: %v\nsee: %s --help\n", err, command.CommandPath())
		if command.Name() == "check" {
			return int(watch.Unknown)
		}
		return exitUsage
	case !errors.As(err, &quiet):
		fmt.Fprintf(p.err, "eventlog: %v\n", err)
	}
	return exitFailed
}

const rootLong = `Eventlog shows what the consumers of an event log do, and does what an operator has to.

A consumer is named as status shows it: its name, then @ and the topic and # and the shard where it
has such, as in push, push@orders, push@orders#2. A part that holds one of these signs is quoted:
'"a@b"@orders'. With --topic or --shard the argument is the bare name, whatever it holds.

Whatever changes something needs a --reason, is recorded with who did it (see interventions), and
takes --dry-run: then all of it is done, shown and rolled back.

The database is --database, a URL, or the environment variable DATABASE_URL, or what the variables
of PostgreSQL's own programs say (PGHOST, PGPORT, PGDATABASE, PGUSER, PGPASSWORD, PGSERVICE …).

It ends with 0 when all is well, with 1 when something failed, was refused or was found to be wrong,
and with 2 when it was called wrongly.`

// root is the command line. A new verb is a file of its own and a line here.
func (p *program) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "eventlog",
		Short:         "Look at an event log and operate its consumers",
		Long:          rootLong,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(*cobra.Command, []string) (err error) {
			if p.timeout <= 0 {
				return usage("--timeout must be positive")
			}
			p.log, err = cursor.NewLog(cursor.LogConfig{Schema: p.schema, Name: p.name, Channel: p.channel})
			if err != nil {
				return usageError{err}
			}
			return nil
		},
	}
	flags := root.PersistentFlags()
	flags.StringVar(&p.database, "database", "", "URL of the PostgreSQL database (default: $DATABASE_URL, or $PGHOST and so on)")
	flags.StringVar(&p.schema, "schema", "public", "schema of the log's tables")
	flags.StringVar(&p.name, "log", "event", "name of the log: what its tables begin with")
	flags.StringVar(&p.channel, "channel", "", "NOTIFY channel of the log, where it is not the default one")
	flags.BoolVar(&p.json, "json", false, "write JSON")
	flags.DurationVar(&p.timeout, "timeout", time.Minute, "give up after that long; tail, verify and --watch take their time")
	root.SetOut(p.out)
	root.SetErr(p.err)
	root.AddCommand(
		p.statusCommand(),
		p.checkCommand(),
		p.eventCommand(),
		p.tailCommand(),
		p.seekCommand(),
		p.skipCommand(),
		p.pauseCommand(),
		p.resumeCommand(),
		p.retireCommand(),
		p.parkedCommand(),
		p.lossesCommand(),
		p.interventionsCommand(),
		p.verifyCommand(),
		p.redactCommand(),
		p.retentionCommand(),
		p.migrateCommand(),
	)
	return root
}

// group is a command that only has others below it.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usage("unknown command %q for %q", args[0], c.CommandPath())
		}
		return usage("what is to be done with %s is missing", c.Name())
	}}
	c.AddCommand(commands...)
	return c
}

// do makes a verb's function: connected, and bounded in time.
func (p *program) do(f func(ctx context.Context, db *pgx.Conn, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		ctx, cancel := context.WithTimeout(c.Context(), p.timeout)
		defer cancel()
		return p.connected(ctx, func(db *pgx.Conn) error { return f(ctx, db, args) })
	}
}

// atLeisure is do without the bound.
func (p *program) atLeisure(f func(ctx context.Context, db *pgx.Conn, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		return p.connected(c.Context(), func(db *pgx.Conn) error { return f(c.Context(), db, args) })
	}
}

// connected runs f with a connection, and says of an error what to do next.
func (p *program) connected(ctx context.Context, f func(*pgx.Conn) error) error {
	p.began = true
	db, err := p.connect(ctx)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = db.Close(ctx) // there is nothing left to lose
	}()
	return p.explain(ctx, db, f(db))
}

const connectTimeout = 10 * time.Second

func (p *program) connect(ctx context.Context) (*pgx.Conn, error) {
	address, from := p.database, "--database"
	if address == "" {
		address, from = p.env("DATABASE_URL"), "DATABASE_URL"
	}
	if address == "" {
		from = "PGHOST, PGPORT and so on, as --database and DATABASE_URL are not set"
	}
	config, err := pgx.ParseConfig(address)
	if err != nil {
		return nil, usage("%w: it is taken from %s", err, from)
	}
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = "eventlog"
	}
	if config.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement {
		config.DefaultQueryExecMode = pgx.QueryExecModeExec // a transaction pooler keeps no statements
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	db, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("cannot connect: %w: is the server up, and the address right? it is taken from %s", err, from)
	}
	return db, nil
}

// explain adds to an error what to do next.
func (p *program) explain(ctx context.Context, db *pgx.Conn, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, cursor.ErrNotMigrated):
		return fmt.Errorf("%s is not in this database: run eventlog migrate up, or name another with --schema, --log or --database", p.log)
	case errors.Is(err, cursor.ErrCursorMissing):
		survey, surveyErr := operate.Survey(ctx, db, p.log)
		if surveyErr != nil {
			return err
		}
		names := make([]string, len(survey.Cursors))
		for i := range survey.Cursors {
			names[i] = survey.Cursors[i].Cursor.String()
		}
		if len(names) == 0 {
			return errors.New("no such consumer: the log has none yet; the row of one is made when its process starts")
		}
		return fmt.Errorf("no such consumer: the log has %s", strings.Join(names, ", "))
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("%w: it took longer than %s: see --timeout", err, p.timeout)
	}
	return err
}

// consumer is the flags by which a verb's first argument is read.
type consumer struct{ topic, shard string }

func (k *consumer) add(c *cobra.Command) {
	c.Flags().StringVar(&k.topic, "topic", "", "topic of the consumer; its argument is then its bare name")
	c.Flags().StringVar(&k.shard, "shard", "", "shard of the consumer; its argument is then its bare name")
}

func (k *consumer) key(name string) (cursor.Key, error) {
	key, err := cursor.Key{Consumer: name, Topic: k.topic, Shard: k.shard}, error(nil)
	if k.topic == "" && k.shard == "" {
		key, err = cursor.ParseKey(name)
	} else {
		err = key.Validate()
	}
	if err != nil {
		return cursor.Key{}, usageError{err}
	}
	return key, nil
}

// keys reads the names of several consumers; none means all.
func (k *consumer) keys(names []string) ([]cursor.Key, error) {
	keys := make([]cursor.Key, 0, len(names))
	for _, name := range names {
		key, err := k.key(name)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

// mustExist tells when one of the cursors does not.
func (p *program) mustExist(ctx context.Context, db *pgx.Conn, keys []cursor.Key) error {
	if len(keys) == 0 {
		return nil
	}
	survey, err := operate.Survey(ctx, db, p.log, keys...)
	if err == nil && len(survey.Cursors) < len(keys) {
		err = cursor.ErrCursorMissing
	}
	return err
}

// completeConsumers offers the log's consumers for the first argument, and what else for the second.
func (p *program) completeConsumers(second ...string) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		switch len(args) {
		case 0:
		case 1:
			return second, cobra.ShellCompDirectiveNoFileComp
		default:
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		if err := c.Root().PersistentPreRunE(c, nil); err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Context()), 2*time.Second)
		defer cancel()
		var names []string
		err := p.connected(ctx, func(db *pgx.Conn) error {
			survey, err := operate.Survey(ctx, db, p.log)
			for i := range survey.Cursors {
				names = append(names, survey.Cursors[i].Cursor.String())
			}
			return err
		})
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// whoami is who is recorded as the one who made a change, where --by does not say.
func whoami() string {
	name := "unknown"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return name + "@" + host
}
