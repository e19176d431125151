package publisher

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// largestPayload is what a payload may have at most, whatever MaxPayload says: in the text formats of the
// protocol it doubles, and PostgreSQL builds no value of 1 GiB.
const largestPayload = 256 << 20

// maxOnce is what a row of an index holds for sure.
const maxOnce = 2000

// EventLogConfig is for [NewEventLog].
type EventLogConfig struct {
	// Log names the event log. Defaults to the log with the default names.
	Log *cursor.Log

	// MaxPayload is the largest payload that is taken, in bytes: at most 256 MiB. Defaults to 32 MiB.
	MaxPayload int

	// Key gives an event its key: what it is ordered and sharded by. Defaults to none.
	Key func(topic string, msg *message.Message) string

	// Staged appends wait for no other writer: an event gets its number a moment after its transaction's commit, from
	// the sequencer (package sequencer), of which one must be running somewhere. It works at every isolation level, it
	// can be prepared (PREPARE TRANSACTION), and a rate of plain inserts is what many writers get. Staged events
	// keep their order where their transactions followed each other; against events that are not staged there is none.
	Staged bool

	// Once makes the append of a message whose UUID was appended before, by a publisher with Once, a no-op: no number
	// and no NOTIFY. So an append whose outcome is not known, because the connection was lost, can be repeated. The
	// UUIDs are the log's, whatever the topic, and are remembered as long as their event is retained. Two that append the
	// same UUID wait for each other.
	Once bool

	// OccurredAt gives the time of an event on its source's clock; the zero time leaves it to the database. It
	// is kept to the microsecond. Defaults to the database's clock at the moment of the insert.
	OccurredAt func(topic string, msg *message.Message) time.Time
}

// EventLog is a Watermill publisher that appends events to the event log: in transactions of its own, or with
// [EventLog.InTx] and [EventLog.InSQLTx] in the caller's.
//
// An event gets its number when its transaction commits. Events of one transaction keep their order and follow
// each other without a gap; what is rolled back, also to a savepoint, leaves no hole. No call before the commit
// is needed, and work behind an append does not hold up other writers. Consumers are woken by one NOTIFY a
// transaction.
//
// Under REPEATABLE READ or SERIALIZABLE the commit fails with SQLSTATE 40001 when another append was committed
// since the transaction's snapshot. A transaction with an append cannot be prepared (PREPARE TRANSACTION fails
// with SQLSTATE 0A000, because of the NOTIFY, and rolls back). SET CONSTRAINTS ALL IMMEDIATE numbers at once,
// which makes the other writers wait until the transaction ends. Transactions that append to two logs should do
// so in the same order, as with any two rows that are locked: otherwise they may end in a deadlock (40P01).
type EventLog struct {
	config EventLogConfig
	insert inserter
	texts  *sync.Map // of shape to the statement's text
}

var _ message.Publisher = (*EventLog)(nil)

// inserter sends the insert of a call to Publish, in one transaction.
type inserter func(ctx context.Context, statements []statement) error

type statement struct {
	sql  string
	args []any
}

// BatchSender is a pool or a connection.
type BatchSender interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// errNoDatabase is returned by Publish of a publisher that was made for the caller's transactions only.
var errNoDatabase = errors.New("the publisher has no database: use InTx or InSQLTx, or give NewEventLog a pool")

// NewEventLog returns a publisher whose every call to Publish is a transaction of its own, sent in one round
// trip: all of its messages are appended or none. When the connection is lost during it, the error does not
// tell whether it was committed. A staged append that is one statement goes through db's Exec, if it has one. A nil db is for a publisher that is used only through [EventLog.InTx] and
// [EventLog.InSQLTx].
func NewEventLog(db BatchSender, config EventLogConfig) (*EventLog, error) {
	if _, ok := db.(pgx.Tx); ok {
		return nil, errors.New("event log publisher: a transaction would be committed by the first Publish: give NewEventLog " +
			"a pool or nil, and the transaction to InTx")
	}
	switch {
	case config.MaxPayload < 0:
		return nil, fmt.Errorf("event log publisher config: negative MaxPayload (%d)", config.MaxPayload)
	case config.MaxPayload > largestPayload:
		return nil, fmt.Errorf("event log publisher config: MaxPayload (%d) is above %d, the most that can be read back in every way",
			config.MaxPayload, largestPayload)
	case config.MaxPayload == 0:
		config.MaxPayload = 32 << 20
	}
	return &EventLog{config: config, texts: &sync.Map{}, insert: func(ctx context.Context, statements []statement) error {
		if db == nil {
			return errNoDatabase
		}
		return insertAndCommit(ctx, db, statements, config.Staged && len(statements) == 1)
	}}, nil
}

// insertAndCommit inserts in one trip. A single statement that numbers nothing needs no transaction around it, whatever the
// session's isolation level is.
func insertAndCommit(ctx context.Context, db BatchSender, statements []statement, bare bool) error {
	conn := connection(db)
	if conn != nil && !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' {
		return errors.New("the publisher's connection is in a transaction, which would be committed: use InTx")
	}
	if alone, ok := db.(execer); ok && bare {
		_, err := alone.Exec(ctx, statements[0].sql, statements[0].args...) // costs less than a batch of one
		return err
	}
	batch := &pgx.Batch{}
	if !bare {
		batch.Queue("begin isolation level read committed")
	}
	for _, s := range statements {
		batch.Queue(s.sql, s.args...)
	}
	if !bare {
		batch.Queue("commit")
	}
	tag, err := send(ctx, db, batch)
	if err == nil && tag == "ROLLBACK" {
		err = pgx.ErrTxCommitRollback
	}
	// A pool discards a connection whose transaction is left open.
	if err != nil && conn != nil && !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_, _ = conn.Exec(ctx, "rollback") // the connection is closed if it fails
	}
	return err
}

type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// connection is the one connection that a database is, or nil.
func connection(db BatchSender) *pgx.Conn {
	switch db := db.(type) {
	case *pgx.Conn:
		return db
	case interface{ Conn() *pgx.Conn }: // taken from a pool
		return db.Conn()
	}
	return nil
}

// send returns the last statement's command tag.
func send(ctx context.Context, db BatchSender, batch *pgx.Batch) (last string, err error) {
	results := db.SendBatch(ctx, batch)
	for range batch.Len() {
		tag, err := results.Exec()
		if err != nil {
			_ = results.Close() // repeats the error
			return "", err
		}
		last = tag.String()
	}
	return last, results.Close()
}

// InTx returns a publisher that appends in a pgx transaction, which the caller ends. What it appends has no
// effect before that transaction's commit.
func (p *EventLog) InTx(tx pgx.Tx) *EventLog {
	return &EventLog{config: p.config, texts: p.texts, insert: func(ctx context.Context, statements []statement) error {
		batch := &pgx.Batch{}
		for _, s := range statements {
			batch.Queue(s.sql, s.args...)
		}
		_, err := send(ctx, tx, batch)
		return err
	}}
}

// InSQLTx returns a publisher that appends in a database/sql transaction, which the caller ends, whatever
// PostgreSQL driver it uses.
func (p *EventLog) InSQLTx(tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}) *EventLog {
	return &EventLog{config: p.config, texts: p.texts, insert: func(ctx context.Context, statements []statement) error {
		if _, ok := tx.(*sql.DB); ok {
			return errors.New("InSQLTx was given a *sql.DB: give it the transaction (*sql.Tx)")
		}
		for _, s := range statements {
			if _, err := tx.ExecContext(ctx, s.sql, s.args...); err != nil {
				return err
			}
		}
		return nil
	}}
}

const sqlAppend = "insert into public.event_outbox "

// rowsPerStatement bounds how many different statements there are, as a connection keeps those that it has
// prepared. Each row is a group of single values, so that every driver can send them.
const rowsPerStatement = 100

// Publish appends messages as events, in order. A message that could not be read back as it is (an empty topic,
// a payload above MaxPayload, metadata or an id that PostgreSQL cannot hold) is a [ValueError], and nothing is
// sent. A message that carries the context of an event of the same log is refused with
// [cursor.ErrConsumerAppends]: a handler's append without it is no part of its round, and comes again with it. A
// consumer that may stage (ConsumerConfig.MayStage) can do so with a staged publisher, in its unit (InTx).
//
// The first message's context bounds the call: one that was never set has no end.
func (p *EventLog) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	events := make([]event, len(messages))
	for i, msg := range messages {
		unit, ok := cursor.UnitFromContext(msg.Context())
		if ok && unit.Log().String() == p.config.Log.String() && (!p.config.Staged || !unit.MayStage()) {
			return refused(messages, fmt.Errorf("append to topic %q: %w", topic, cursor.ErrConsumerAppends))
		}
		var reason string
		if events[i], reason = p.event(topic, msg); reason != "" {
			return &ValueError{Topic: topic, UUID: msg.UUID, Reason: reason}
		}
	}
	var statements []statement
	for _, piece := range pieces(events, rowsPerStatement, func(e event) int { return len(e.payload) + len(e.metadata) }) {
		statements = append(statements, p.statement(piece))
	}
	if err := p.insert(messages[0].Context(), statements); err != nil {
		return fmt.Errorf("append to topic %q: %w", topic, p.config.Log.Explain(err))
	}
	return nil
}

// event is a row of the outbox.
type event struct {
	occurredAt *time.Time
	topic      string
	key        *string
	uuid       string
	payload    []byte
	metadata   string
}

// event returns the row of a message, or the reason why it is refused.
func (p *EventLog) event(topic string, msg *message.Message) (event, string) {
	e := event{topic: topic, uuid: msg.UUID, payload: msg.Payload}
	if e.payload == nil {
		e.payload = []byte{}
	}
	switch n := len(e.payload); {
	case topic == "":
		return e, "its topic is empty"
	case topic == cursor.AllTopics:
		return e, "its topic is what consumers of all topics subscribe to"
	case p.config.Once && msg.UUID == "":
		return e, "its UUID is empty, and Once tells events apart by it"
	case p.config.Once && len(msg.UUID) > maxOnce:
		return e, fmt.Sprintf("its UUID has %d bytes, and Once keeps at most %d", len(msg.UUID), maxOnce)
	case n > p.config.MaxPayload:
		return e, fmt.Sprintf("its payload has %d bytes, the limit is %d: raise MaxPayload", n, p.config.MaxPayload)
	}
	var key string
	if p.config.Key != nil {
		if key = p.config.Key(topic, msg); key != "" {
			e.key = &key
		}
	}
	for _, reason := range []string{textReason("its topic", topic), textReason("its id", msg.UUID), textReason("its key", key)} {
		if reason != "" {
			return e, reason
		}
	}
	if p.config.OccurredAt != nil {
		if t := p.config.OccurredAt(topic, msg); !t.IsZero() {
			if t.Year() < 1 || t.Year() > 9999 {
				return e, fmt.Sprintf("its OccurredAt is in the year %d", t.Year())
			}
			e.occurredAt = &t
		}
	}
	var reason string
	if e.metadata, reason = metadataJSON(msg.Metadata, "jsonb"); reason != "" {
		return e, reason
	}
	return e, p.tableReason(e, len(msg.Metadata))
}

// tableReason is why an existing table that is the log cannot hold an event.
func (p *EventLog) tableReason(e event, metadata int) string {
	table, existing := p.config.Log.Existing()
	if !existing {
		return ""
	}
	switch {
	case table.Key == cursor.NoColumn && e.key != nil:
		return "it has a key, and the log's table has no column for it"
	case table.Metadata == cursor.NoColumn && metadata > 0:
		return "it has metadata, and the log's table has no column for it"
	case table.UUIDType == "uuid" && table.UUID != cursor.NoColumn && uuid.Validate(e.uuid) != nil:
		return "its id is not a UUID, and the column of the log's table is"
	case table.PayloadType == "bytea":
		return ""
	case table.PayloadType == "text":
		return textReason("its payload", string(e.payload))
	case len(e.payload) == 0:
		return "its payload is empty, and the column of the log's table is " + table.PayloadType
	case !validJSON(e.payload):
		return "its payload is not JSON, and the column of the log's table is " + table.PayloadType
	}
	return payloadReason(e.payload, table.PayloadType)
}

// shape is what the text of an insert depends on.
type shape struct {
	rows   int
	occurs bool // one of the events brings its time
	keyed  bool // or a key
}

func (p *EventLog) statement(events []event) statement {
	s := shape{rows: len(events)}
	for i := range events {
		s.occurs = s.occurs || events[i].occurredAt != nil
		s.keyed = s.keyed || events[i].key != nil
	}
	args := make([]any, 0, len(events)*6)
	for i := range events {
		e := &events[i]
		args = append(args, e.topic, e.uuid, e.payload, e.metadata)
		if s.keyed {
			args = append(args, e.key)
		}
		if s.occurs {
			args = append(args, e.occurredAt)
		}
	}
	text, known := p.texts.Load(s)
	if !known {
		text = p.text(s)
		p.texts.Store(s, text)
	}
	return statement{text.(string), args}
}

// text is an insert with one parameter a value, so that every driver can send it. What an event does not bring is left to
// the columns' defaults.
func (p *EventLog) text(s shape) string {
	columns, types := []string{"topic", "uuid", "payload", "metadata"}, []string{"$%d::text", "$%d::text", "$%d::bytea", "$%d::jsonb"}
	if s.keyed {
		columns, types = append(columns, "key"), append(types, "$%d::text")
	}
	if s.occurs {
		columns, types = append(columns, "occurred_at"), append(types, "coalesce($%d::timestamptz, clock_timestamp())")
	}
	parameters := len(columns)
	if p.config.Staged {
		columns, types = append(columns, "staged"), append(types, "true")
	}
	if p.config.Once {
		columns, types = append(columns, "once"), append(types, "true")
	}
	var text strings.Builder
	text.WriteString(p.config.Log.Render(sqlAppend) + "(" + strings.Join(columns, ", ") + ") values ")
	n := 0
	for row := range s.rows {
		if row > 0 {
			text.WriteString(", ")
		}
		for i, value := range types {
			text.WriteString([]string{"(", ", "}[min(i, 1)])
			if i < parameters {
				n++
				value = fmt.Sprintf(value, n)
			}
			text.WriteString(value)
		}
		text.WriteString(")")
	}
	return text.String()
}

// Close does nothing: the database is the caller's, and a router closes a shared publisher with its first
// handler.
func (p *EventLog) Close() error { return nil }
