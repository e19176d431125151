package publisher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// ErrNoUnit is returned by [Jobs.Publish] for a message without a living unit of work. It never falls back to
// a transaction of its own.
var ErrNoUnit = cursor.ErrNoUnit

// SchemaAdapter decides the table of a topic's jobs and how they are inserted. Those of watermill-sql v3 fit.
type SchemaAdapter interface {
	InsertQuery(topic string, msgs message.Messages) (wsql.Query, error)
	SchemaInitializingQueries(topic string) []wsql.Query
}

// JobsConfig is for [NewJobs].
type JobsConfig struct {
	// Schema decides the tables. It must be a value, not a pointer, of [wsql.DefaultPostgreSQLSchema] to be
	// written in the fastest way; any other goes through its InsertQuery. Defaults to
	// watermill-sql's DefaultPostgreSQLSchema: table watermill_<topic>, payload json.
	Schema SchemaAdapter
}

// Jobs is a Watermill publisher for a router: what a handler returns, or publishes itself, is written into
// watermill-sql's tables in the unit of work of the event that it handles. Nothing of it can be seen before
// the cursor has moved on, and all of it then; any watermill-sql v3 or v4 subscriber reads it, in order.
type Jobs struct {
	schema SchemaAdapter
}

var (
	_ message.Publisher = (*Jobs)(nil)
	_ cursor.Flusher    = (*Jobs)(nil)
)

// NewJobs returns a publisher of jobs. It may be shared by all handlers of a router.
func NewJobs(config JobsConfig) (*Jobs, error) {
	if config.Schema == nil {
		config.Schema = wsql.DefaultPostgreSQLSchema{}
	}
	return &Jobs{schema: config.Schema}, nil
}

// job is a message as it is buffered in a unit.
type job struct {
	topic    string
	msg      *message.Message
	metadata string
}

// Publish buffers messages in the unit of work that their contexts carry; they are written at the end of the
// round. What a handler returns gets its context from middleware.Round. A message that the handler publishes
// itself needs the context of the message in hand:
//
//	job.SetContext(msg.Context())
//
// Without a living unit it is [ErrNoUnit]; a message that the table could not hold is a [ValueError]. What was
// returned by the handler fails the round with that error; the router does not see it fail, because it logs
// the messages that it could not publish.
func (j *Jobs) Publish(topic string, messages ...*message.Message) error {
	if err := j.checkTopic(topic); err != nil {
		return j.refused(messages, err)
	}
	jobs, units := make([]job, len(messages)), make([]*cursor.Unit, len(messages))
	for i, msg := range messages {
		var err error
		if jobs[i], err = j.check(topic, msg); err != nil {
			return j.refused(messages, err)
		}
		var ok bool
		if units[i], ok = cursor.UnitFromContext(msg.Context()); !ok {
			return fmt.Errorf("publish job %q to %q: %w: a handler's own call needs job.SetContext(msg.Context()); what it "+
				"returns needs middleware.Round", msg.UUID, topic, ErrNoUnit)
		}
	}
	for i, msg := range messages {
		if err := units[i].Buffer(j, jobs[i]); err != nil {
			return fmt.Errorf("publish job %q to %q: %w: %w", msg.UUID, topic, ErrNoUnit, err)
		}
	}
	return nil
}

// refused returns an error to a handler that published by itself. For what a handler has returned, its round
// fails with the error, and the router goes on to an ack that commits nothing.
func (j *Jobs) refused(messages []*message.Message, err error) error {
	for _, msg := range messages {
		if unit, ok := cursor.UnitFromContext(msg.Context()); ok && unit.Returned() {
			unit.Fail(err)
			return nil
		}
	}
	return err
}

func (j *Jobs) check(topic string, msg *message.Message) (job, error) {
	refuse := func(reason string) error { return &ValueError{Topic: topic, UUID: msg.UUID, Reason: reason} }
	if reason := text("id", msg.UUID); reason != "" {
		return job{}, refuse(reason)
	}
	if n := utf8.RuneCountInString(msg.UUID); n > 36 {
		return job{}, refuse(fmt.Sprintf("its id has %d characters, the column holds 36", n))
	}
	if schema, ok := j.schema.(wsql.DefaultPostgreSQLSchema); ok {
		switch kind := strings.ToLower(schema.PayloadColumnType(topic)); {
		case kind == "bytea":
		case !json.Valid(msg.Payload):
			return job{}, refuse("its payload is not JSON, and the table's column is: set GeneratePayloadType of the schema to BYTEA")
		case !utf8.Valid(msg.Payload):
			return job{}, refuse("its payload is not valid UTF-8")
		case kind == "jsonb" && escapedNUL.Match(msg.Payload):
			return job{}, refuse(`its payload contains \u0000, which jsonb cannot hold`)
		}
	}
	metadata, reason := metadataJSON(msg.Metadata, true)
	if reason != "" {
		return job{}, refuse(reason)
	}
	return job{topic: topic, msg: msg, metadata: metadata}, nil
}

// An escaped NUL: \u0000 behind an even number of backslashes.
var escapedNUL = regexp.MustCompile(`(^|[^\\])(\\\\)*\\u0000`)

// What watermill-sql takes for a topic.
var topicCharacters = regexp.MustCompile(`^[A-Za-z0-9\-$:._]+$`)

func (j *Jobs) checkTopic(topic string) error {
	if !topicCharacters.MatchString(topic) {
		return fmt.Errorf("job topic %q: only letters, digits and -$:._ make a table's name", topic)
	}
	if schema, ok := j.schema.(wsql.DefaultPostgreSQLSchema); ok {
		// A name that PostgreSQL cuts would share the table of another topic.
		table := strings.Trim(schema.MessagesTable(topic), `"`)
		if len(table) > 63 {
			return fmt.Errorf("job topic %q: its table %q has %d bytes, PostgreSQL keeps 63: choose a topic of %d bytes or less",
				topic, table, len(table), 63-(len(table)-len(topic)))
		}
	}
	return nil
}

// Initialize creates the tables of topics where they do not exist. Call it before the router runs, or create
// them by a migration: inside a round no table is made. Any number of processes may call it at once.
func (j *Jobs) Initialize(ctx context.Context, db cursor.Beginner, topics ...string) error {
	for _, topic := range topics {
		if err := j.checkTopic(topic); err != nil {
			return err
		}
	}
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		// "If not exists" collides in the catalogue when two create at once.
		const lock = "watermill-eventlog job tables"
		if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock(hashtextextended($1, 0))", lock); err != nil {
			return err
		}
		for _, topic := range topics {
			for _, q := range j.schema.SchemaInitializingQueries(topic) {
				if _, err := tx.Exec(ctx, q.Query, q.Args...); err != nil {
					return fmt.Errorf("topic %q: %w", topic, err)
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("create job tables: %w", err)
	}
	return nil
}

// Flush writes a round's jobs, one statement a topic. It is called by the round.
func (j *Jobs) Flush(trip *cursor.Trip, items []cursor.Item) error {
	var topics []string
	jobs := map[string][]job{}
	for _, item := range items {
		next := item.Value.(job)
		if _, known := jobs[next.topic]; !known {
			topics = append(topics, next.topic)
		}
		jobs[next.topic] = append(jobs[next.topic], next)
	}
	for _, topic := range topics {
		explain := func(err error) error { return explainInsert(topic, err) }
		if schema, ok := j.schema.(wsql.DefaultPostgreSQLSchema); ok {
			sql, args := insertArrays(schema, topic, jobs[topic])
			trip.Queue(explain, sql, args...)
			continue
		}
		if err := j.queueInserts(trip, explain, topic, jobs[topic]); err != nil {
			return err
		}
	}
	return nil
}

// insertArrays inserts any number of jobs by three parameters.
func insertArrays(schema wsql.DefaultPostgreSQLSchema, topic string, jobs []job) (string, []any) {
	uuids, metadata := make([]string, len(jobs)), make([]string, len(jobs))
	var payloads any
	arrayType := "text"
	if strings.EqualFold(schema.PayloadColumnType(topic), "bytea") {
		arrayType = "bytea"
		raw := make([][]byte, len(jobs))
		for i := range jobs {
			raw[i] = jobs[i].msg.Payload
		}
		payloads = raw
	} else {
		texts := make([]string, len(jobs))
		for i := range jobs {
			texts[i] = string(jobs[i].msg.Payload)
		}
		payloads = texts
	}
	for i := range jobs {
		uuids[i], metadata[i] = jobs[i].msg.UUID, jobs[i].metadata
	}
	return fmt.Sprintf(`
insert into %s (uuid, payload, metadata, transaction_id)
select j.uuid, j.payload::%s, j.metadata::json, pg_current_xact_id()
from unnest($1::text[], $2::%s[], $3::text[]) with ordinality as j(uuid, payload, metadata, n)
order by j.n`, schema.MessagesTable(topic), schema.PayloadColumnType(topic), arrayType), []any{uuids, payloads, metadata}
}

// queueInserts inserts jobs by the adapter's own statement, in pieces that the protocol can hold.
func (j *Jobs) queueInserts(trip *cursor.Trip, explain func(error) error, topic string, jobs []job) error {
	one, err := j.schema.InsertQuery(topic, message.Messages{jobs[0].msg})
	if err != nil {
		return fmt.Errorf("insert jobs of topic %q: %w", topic, err)
	}
	for piece := range slices.Chunk(jobs, maxParameters/max(1, len(one.Args))) {
		messages := make(message.Messages, len(piece))
		for i := range piece {
			messages[i] = piece[i].msg
		}
		q, err := j.schema.InsertQuery(topic, messages)
		if err != nil {
			return fmt.Errorf("insert jobs of topic %q: %w", topic, err)
		}
		for i, arg := range q.Args {
			// Without knowing the column, pgx would send bytes as bytea, which a json column refuses.
			if raw, ok := arg.([]byte); ok && utf8.Valid(raw) {
				q.Args[i] = string(raw)
			}
		}
		trip.Queue(explain, q.Query, q.Args...)
	}
	return nil
}

func explainInsert(topic string, err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "42P01" { // undefined_table
		return fmt.Errorf("job topic %q has no table: create it by Jobs.Initialize or a migration before the router runs: %w", topic, err)
	}
	return fmt.Errorf("insert jobs of topic %q: %w", topic, err)
}

// Close does nothing: a router closes a shared publisher with its first handler.
func (j *Jobs) Close() error { return nil }
