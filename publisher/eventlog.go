package publisher

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// EventLogConfig is for [NewEventLog].
type EventLogConfig struct {
	// Log names the event log. Defaults to the log with the default names.
	Log *cursor.Log

	// MaxPayload is the largest payload that is taken, in bytes. Defaults to 32 MiB.
	MaxPayload int

	// Key gives an event its key: what it is ordered and sharded by. Defaults to none.
	Key func(topic string, msg *message.Message) string

	// OccurredAt gives the time of an event on its source's clock; the zero time leaves it to the database.
	// Defaults to the database's clock at the moment of the insert.
	OccurredAt func(topic string, msg *message.Message) time.Time
}

// EventLog is a Watermill publisher that appends events to the event log: in transactions of its own, or with
// [EventLog.InTx] and [EventLog.InSQLTx] in the caller's.
//
// An event gets its number when its transaction commits. Events of one transaction keep their order and follow
// each other without a gap; what is rolled back, also to a savepoint, leaves no hole. No call before the commit
// is needed. Under REPEATABLE READ or SERIALIZABLE the commit fails with SQLSTATE 40001 when another append
// was committed since the transaction's snapshot.
type EventLog struct {
	config EventLogConfig
	insert inserter
}

var _ message.Publisher = (*EventLog)(nil)

// inserter sends the insert of a call to Publish, in one transaction.
type inserter func(ctx context.Context, statements []statement) error

type statement struct {
	sql  string
	args []any
}

// BatchBeginner is a pool or a connection.
type BatchBeginner interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// NewEventLog returns a publisher whose every call to Publish is a transaction of its own, sent in one round
// trip: all of its messages are appended or none. When the connection is lost during it, the error does not
// tell whether it was committed.
func NewEventLog(db BatchBeginner, config EventLogConfig) (*EventLog, error) {
	if db == nil {
		return nil, errors.New("event log publisher: missing database")
	}
	if config.MaxPayload < 0 {
		return nil, fmt.Errorf("event log publisher config: negative MaxPayload (%d)", config.MaxPayload)
	}
	if config.MaxPayload == 0 {
		config.MaxPayload = 32 << 20
	}
	return &EventLog{config: config, insert: func(ctx context.Context, statements []statement) error {
		batch := &pgx.Batch{}
		batch.Queue("begin isolation level read committed")
		for _, s := range statements {
			batch.Queue(s.sql, s.args...)
		}
		batch.Queue("commit")
		results := db.SendBatch(ctx, batch)
		for range len(statements) + 1 {
			if _, err := results.Exec(); err != nil {
				_ = results.Close() // repeats the error; a pool discards the connection with its open transaction
				return err
			}
		}
		tag, err := results.Exec()
		if err == nil && tag.String() == "ROLLBACK" {
			err = pgx.ErrTxCommitRollback
		}
		return errors.Join(err, results.Close())
	}}, nil
}

// InTx returns a publisher that appends in a pgx transaction, which the caller ends. What it appends has no
// effect before that transaction's commit.
func (p *EventLog) InTx(tx interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}) *EventLog {
	return &EventLog{config: p.config, insert: func(ctx context.Context, statements []statement) error {
		for _, s := range statements {
			if _, err := tx.Exec(ctx, s.sql, s.args...); err != nil {
				return err
			}
		}
		return nil
	}}
}

// InSQLTx returns a publisher that appends in a database/sql transaction, which the caller ends, whatever
// PostgreSQL driver it uses.
func (p *EventLog) InSQLTx(tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}) *EventLog {
	return &EventLog{config: p.config, insert: func(ctx context.Context, statements []statement) error {
		for _, s := range statements {
			if _, err := tx.ExecContext(ctx, s.sql, s.args...); err != nil {
				return err
			}
		}
		return nil
	}}
}

const sqlAppend = `
insert into public.event_outbox (occurred_at, topic, key, uuid, payload, metadata) values `

// Each row is a group of single values, so that every driver can send them.
const (
	appendColumns = 6
	maxParameters = 65535 // of one statement in PostgreSQL's protocol
)

// Publish appends messages as events, in order. A message that could not be read back as it is (an empty topic,
// a payload above MaxPayload, metadata or an id that PostgreSQL cannot hold) is a [ValueError], and nothing is
// sent.
//
// The first message's context bounds the call: one that was never set has no end.
func (p *EventLog) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	var statements []statement
	for piece := range slices.Chunk(messages, maxParameters/appendColumns) {
		s, err := p.statement(topic, piece)
		if err != nil {
			return err
		}
		statements = append(statements, s)
	}
	if err := p.insert(messages[0].Context(), statements); err != nil {
		return p.explain(topic, err)
	}
	return nil
}

func (p *EventLog) statement(topic string, messages []*message.Message) (statement, error) {
	args := make([]any, 0, len(messages)*appendColumns)
	var values strings.Builder
	for i, msg := range messages {
		refuse := func(reason string) error {
			return &ValueError{Topic: topic, UUID: msg.UUID, Reason: reason}
		}
		var occurred *time.Time
		if p.config.OccurredAt != nil {
			if t := p.config.OccurredAt(topic, msg); !t.IsZero() {
				occurred = &t
			}
		}
		var key *string
		if p.config.Key != nil {
			if k := p.config.Key(topic, msg); k != "" {
				key = &k
				if reason := text("key", k); reason != "" {
					return statement{}, refuse(reason)
				}
			}
		}
		if len(msg.Payload) > p.config.MaxPayload {
			return statement{}, refuse(fmt.Sprintf("its payload has %d bytes, the limit is %d: raise MaxPayload", len(msg.Payload), p.config.MaxPayload))
		}
		if topic == "" {
			return statement{}, refuse("its topic is empty")
		}
		for _, reason := range []string{text("topic", topic), text("id", msg.UUID)} {
			if reason != "" {
				return statement{}, refuse(reason)
			}
		}
		metadata, reason := metadataJSON(msg.Metadata, false)
		if reason != "" {
			return statement{}, refuse(reason)
		}
		payload := []byte(msg.Payload)
		if payload == nil {
			payload = []byte{}
		}
		if i > 0 {
			values.WriteString(", ")
		}
		n := len(args)
		fmt.Fprintf(&values, "(coalesce($%d::timestamptz, clock_timestamp()), $%d::text, $%d::text, $%d::text, $%d::bytea, $%d::jsonb)",
			n+1, n+2, n+3, n+4, n+5, n+6)
		args = append(args, occurred, topic, key, msg.UUID, payload, metadata)
	}
	return statement{p.config.Log.Render(sqlAppend) + values.String(), args}, nil
}

func (p *EventLog) explain(topic string, err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && (pgErr.Code == "42P01" || pgErr.Code == "3F000") {
		err = fmt.Errorf("%w: %s has no tables in this database: run migrations.Up, or the SQL files of package migrations: %w",
			cursor.ErrNotMigrated, p.config.Log, err)
	}
	return fmt.Errorf("append to topic %q: %w", topic, err)
}

// Close does nothing: the database is the caller's, and a router closes a shared publisher with its first
// handler.
func (p *EventLog) Close() error { return nil }
