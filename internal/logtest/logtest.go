// Package logtest gives a test a migrated event log of its own, and what tests of several packages need to
// look at it.
package logtest

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
)

// Template is a database with the default log.
func Template() pgtest.Template {
	hash := sha256.New()
	for _, m := range migrations.SQL(nil) {
		fmt.Fprint(hash, m.SQL)
	}
	return pgtest.Template{
		Key: fmt.Sprintf("event log %x", hash.Sum(nil)),
		Setup: func(ctx context.Context, conn *pgx.Conn) error {
			_, err := migrations.Up(ctx, conn, nil)
			return err
		},
	}
}

// New is a database of the test's own with the default log.
func New(t testing.TB) *pgtest.DB { return pgtest.New(t, Template()) }

// NewOn is New on a server of the test's own.
func NewOn(t testing.TB, server *pgserver.Server) *pgtest.DB {
	return pgtest.NewOn(t, server, Template())
}

// Append appends n events to a topic, in one transaction; their payloads are "1" to "n".
func Append(t testing.TB, db *pgtest.DB, topic string, n int) {
	t.Helper()
	db.Exec(t, `insert into event_outbox (topic, payload) select $1, convert_to(i::text, 'UTF8') from generate_series(1, $2) i order by i`, topic, n)
}

// Position is where a cursor stands; -1 when it has no row.
func Position(t testing.TB, db *pgtest.DB, key cursor.Key) int64 {
	t.Helper()
	return pgtest.Value[int64](t, db, `select coalesce((select last_seq from event_consumer_cursors
		where consumer = $1 and topic = $2 and shard = $3), -1)`, key.Consumer, key.Topic, key.Shard)
}

// Line is a captured log line.
type Line struct {
	Level  string // "error", "info", "debug", "trace"
	Msg    string
	Err    error
	Fields watermill.LogFields
}

func (l Line) String() string {
	return fmt.Sprintf("%s: %s err=%v %v", l.Level, l.Msg, l.Err, l.Fields)
}

// Logger captures what is logged. With is part of it, as the router uses it.
type Logger struct {
	lines  *lines
	fields watermill.LogFields
}

type lines struct {
	mu      sync.Mutex
	all     []Line
	changed chan struct{}
}

// NewLogger returns an empty one.
func NewLogger() *Logger { return &Logger{lines: &lines{changed: make(chan struct{})}} }

func (l *Logger) log(level, msg string, err error, fields watermill.LogFields) {
	l.lines.mu.Lock()
	defer l.lines.mu.Unlock()
	l.lines.all = append(l.lines.all, Line{level, msg, err, l.fields.Add(fields)})
	close(l.lines.changed)
	l.lines.changed = make(chan struct{})
}

// Error and the following make it a watermill.LoggerAdapter.
func (l *Logger) Error(msg string, err error, fields watermill.LogFields) {
	l.log("error", msg, err, fields)
}
func (l *Logger) Info(msg string, fields watermill.LogFields)  { l.log("info", msg, nil, fields) }
func (l *Logger) Debug(msg string, fields watermill.LogFields) { l.log("debug", msg, nil, fields) }
func (l *Logger) Trace(msg string, fields watermill.LogFields) { l.log("trace", msg, nil, fields) }
func (l *Logger) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return &Logger{lines: l.lines, fields: l.fields.Add(fields)}
}

// Lines returns the captured lines whose level is one of the given, or all, and whose text contains msg.
func (l *Logger) Lines(msg string, levels ...string) []Line {
	l.lines.mu.Lock()
	defer l.lines.mu.Unlock()
	return l.find(msg, levels)
}

func (l *Logger) find(msg string, levels []string) []Line {
	var found []Line
	for _, line := range l.lines.all {
		wanted := len(levels) == 0
		for _, level := range levels {
			wanted = wanted || line.Level == level
		}
		if wanted && strings.Contains(line.Msg, msg) {
			found = append(found, line)
		}
	}
	return found
}

// Wait returns when n lines contain msg, or fails the test when ctx ends before.
func (l *Logger) Wait(t testing.TB, ctx context.Context, n int, msg string) []Line {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		l.lines.mu.Lock()
		found, changed := l.find(msg, nil), l.lines.changed
		l.lines.mu.Unlock()
		if len(found) >= n {
			return found
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("%d lines %q, wanted %d", len(found), msg, n)
		}
	}
}
