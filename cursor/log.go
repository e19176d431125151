package cursor

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// The longest name that PostgreSQL keeps; what is longer it cuts without an error.
const maxIdentifier = 63

// The longest suffix that a log's name is given: an index of the interventions.
const longestSuffix = len("_consumer_interventions_cursor")

// LogConfig names an event log. Several logs may live in one database, told apart by schema or by name.
type LogConfig struct {
	// Schema holds the log's tables and functions. It must exist; names are always qualified with it, so
	// the search_path does not matter. Defaults to "public".
	Schema string

	// Name is what the log's tables begin with: "event" makes event_log, event_outbox,
	// event_consumer_cursors and so on. At most 33 bytes. Defaults to "event".
	Name string

	// Channel is the NOTIFY channel that wakes consumers: case matters, at most 63 bytes. It is written
	// into the log's trigger when the migrations run. Defaults to Name followed by "_log", with the schema
	// and a dot before it where that is not "public".
	Channel string

	// NoNotify leaves NOTIFY out, for servers on which other transactions notify so much that it is the bottleneck: then
	// consumers see events when they poll. It is decided when the migrations run. Defaults to one NOTIFY for each
	// transaction that appends.
	NoNotify bool

	// Table makes an existing table the log. Defaults to a table of the log's own.
	Table *TableConfig
}

// Log is an event log's names, checked and quoted. It is immutable; a nil *Log is the log with the default
// names.
type Log struct {
	schema, name, channel string
	table                 *table // an existing one, or nil
	noNotify              bool

	rendered sync.Map // what Render was given, to what it made of it
}

// NewLog checks the names. All faults are reported at once.
func NewLog(config LogConfig) (*Log, error) {
	l := &Log{schema: config.Schema, name: config.Name, channel: config.Channel}
	if l.schema == "" {
		l.schema = "public"
	}
	if l.name == "" {
		l.name = "event"
	}
	if l.channel == "" {
		l.channel = l.name + "_log"
		if l.schema != "public" {
			l.channel = l.schema + "." + l.channel
		}
	}
	l.noNotify = config.NoNotify
	var tableErr error
	if config.Table != nil {
		l.table, tableErr = newTable(*config.Table)
		if l.table.name == l.Table("log") {
			tableErr = errors.Join(tableErr, fmt.Errorf("Table is %s, which is the name of the view over it: choose another Name", l.table.name))
		}
	}
	err := errors.Join(tableErr,
		checkName("Schema", l.schema, maxIdentifier),
		checkName("Name", l.name, maxIdentifier-longestSuffix),
		checkName("Channel", l.channel, maxIdentifier),
	)
	if err != nil {
		return nil, fmt.Errorf("event log config: %w", err)
	}
	return l, nil
}

func checkName(setting, name string, limit int) error {
	switch {
	case len(name) > limit:
		return fmt.Errorf("%s has %d bytes, the limit is %d (PostgreSQL would cut it): choose a shorter one",
			setting, len(name), limit)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return fmt.Errorf("%s %q is not valid UTF-8 without control characters", setting, name)
	case strings.Contains(name, "$function$"):
		return fmt.Errorf("%s %q contains $function$, which quotes the functions of the migrations", setting, name)
	}
	return nil
}

var defaultLog = &Log{schema: "public", name: "event", channel: "event_log"}

func (l *Log) orDefault() *Log {
	if l == nil {
		return defaultLog
	}
	return l
}

// Notifies tells whether appends wake consumers by NOTIFY.
func (l *Log) Notifies() bool { return !l.orDefault().noNotify }

// Schema is the schema of the log's tables, unquoted.
func (l *Log) Schema() string { return l.orDefault().schema }

// Name is what the log's tables begin with, unquoted.
func (l *Log) Name() string { return l.orDefault().name }

// Channel is the NOTIFY channel of the log, unquoted.
func (l *Log) Channel() string { return l.orDefault().channel }

// String is the schema and name of the log's own table, for messages.
func (l *Log) String() string { return l.Schema() + "." + l.Name() + "_log" }

// Table is the qualified and quoted name of one of the log's tables by its suffix: "log", "outbox",
// "consumer_cursors".
func (l *Log) Table(suffix string) string {
	return pgx.Identifier{l.Schema(), l.Name() + "_" + suffix}.Sanitize()
}

// Explain names the next step where a statement found none of the log's tables ([ErrNotMigrated]), whatever driver has sent
// it. Any other error it returns as it is.
func (l *Log) Explain(err error) error {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) && (coded.SQLState() == "42P01" || coded.SQLState() == "3F000") { // undefined_table, invalid_schema_name
		return fmt.Errorf("%w: %s has no tables in this database: run migrations.Up, or the SQL files of package migrations: %w",
			ErrNotMigrated, l, err)
	}
	return err
}

var (
	qualifiedName = regexp.MustCompile(`\bpublic\.event_([a-z0-9_]+)`)
	bareName      = regexp.MustCompile(`\bevent_([a-z0-9_]+)`)
)

// channelLiteral stands for the channel in SQL that is written with the default names.
const channelLiteral = `'event_log'`

// Render takes SQL that is written with the default names (public.event_log, and the literal 'event_log'
// for the channel) and puts this log's names in their place. It remembers each text that it was given: give
// it constants.
func (l *Log) Render(sql string) string {
	l = l.orDefault()
	if l.schema == defaultLog.schema && l.name == defaultLog.name && l.channel == defaultLog.channel {
		return sql
	}
	if known, ok := l.rendered.Load(sql); ok {
		return known.(string)
	}
	rendered := l.render(sql)
	l.rendered.Store(sql, rendered)
	return rendered
}

func (l *Log) render(sql string) string {
	// Each step's output must not be found by the next: quoted names could contain what it looks for.
	var out strings.Builder
	for i, part := range strings.Split(sql, channelLiteral) {
		if i > 0 {
			out.WriteString("'" + strings.ReplaceAll(l.channel, "'", "''") + "'")
		}
		last := 0
		for _, at := range qualifiedName.FindAllStringSubmatchIndex(part, -1) {
			out.WriteString(l.renderBare(part[last:at[0]]))
			out.WriteString(l.Table(part[at[2]:at[3]]))
			last = at[1]
		}
		out.WriteString(l.renderBare(part[last:]))
	}
	return out.String()
}

// renderBare renders the names of indexes, constraints and triggers, which SQL does not qualify.
func (l *Log) renderBare(sql string) string {
	return bareName.ReplaceAllStringFunc(sql, func(name string) string {
		return pgx.Identifier{l.name + strings.TrimPrefix(name, "event")}.Sanitize()
	})
}
