package publisher

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"sync"
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
	// Schema decides the tables. With [wsql.DefaultPostgreSQLSchema] and a payload of type json, jsonb or bytea a
	// round's jobs go in its last trip, and values that the columns do not hold are refused beforehand. Any
	// other adapter inserts by its InsertQuery, in trips of its own. Defaults to watermill-sql's
	// DefaultPostgreSQLSchema: table watermill_<topic>, payload json.
	//
	// In a json or jsonb column an empty payload is NULL. jsonb does not keep spacing and the order of keys.
	Schema SchemaAdapter
}

// Jobs is a Watermill publisher for a router: what a handler returns, or publishes itself, is written into
// watermill-sql's tables in the unit of work of the event that it handles. Nothing of it can be seen before
// the cursor has moved on, and all of it then; any watermill-sql v3 or v4 subscriber reads it, in order. Such a
// subscriber waits for every older transaction of the server that is still open.
//
// A topic has at most 53 bytes, as its table's name has 63. The default table of a reader's offsets,
// watermill_offsets_<topic>, is cut from 46 bytes on: where two topics are equal in their first 45, give
// their readers GenerateMessagesOffsetsTableName.
type Jobs struct {
	schema SchemaAdapter
	tables sync.Map // of topics that were checked: topic to table
	arrays *arrays
	others *others
}

var _ message.Publisher = (*Jobs)(nil)

// table is how the jobs of a topic are inserted.
type table struct {
	owner  cursor.Flusher // who inserts them: arrays, or others
	column string         // the payload's type, json, jsonb or bytea; "" where only the adapter knows
	sql    string         // inserts any number of jobs by three arrays
	one    string         // inserts one job, which takes the server half as long
}

// arrays inserts jobs into tables that it knows, in the round's last trip.
type arrays struct{ jobs *Jobs }

// others inserts jobs by the statements of an adapter, in trips of their own.
type others struct{ jobs *Jobs }

var (
	_ cursor.Flusher  = (*arrays)(nil)
	_ cursor.Preparer = (*others)(nil)
)

// NewJobs returns a publisher of jobs. It may be shared by all handlers of a router.
func NewJobs(config JobsConfig) (*Jobs, error) {
	switch schema := config.Schema.(type) {
	case nil:
		config.Schema = wsql.DefaultPostgreSQLSchema{}
	case *wsql.DefaultPostgreSQLSchema:
		if schema == nil {
			return nil, errors.New("jobs publisher config: Schema is a nil pointer")
		}
		config.Schema = *schema
	}
	j := &Jobs{schema: config.Schema}
	j.arrays, j.others = &arrays{j}, &others{j}
	return j, nil
}

// job is a message as it is buffered in a unit: as it was when it was published, whatever the handler does with
// it later.
type job struct {
	topic    string
	table    *table
	uuid     string
	payload  string
	metadata string           // as JSON
	msg      *message.Message // for an adapter
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
	table, err := j.table(topic)
	if err != nil {
		return refused(messages, err)
	}
	jobs, units := make([]job, len(messages)), make([]*cursor.Unit, len(messages))
	for i, msg := range messages {
		if jobs[i], err = j.check(topic, table, msg); err != nil {
			return refused(messages, err)
		}
		var ok bool
		if units[i], ok = cursor.UnitFromContext(msg.Context()); !ok {
			return fmt.Errorf("publish job %q to %q: %w: a handler's own call needs job.SetContext(msg.Context()); what it "+
				"returns needs middleware.Round", msg.UUID, topic, ErrNoUnit)
		}
	}
	for i, msg := range messages {
		if err := units[i].Buffer(table.owner, &jobs[i]); err != nil {
			return fmt.Errorf("publish job %q to %q: %w: %w", msg.UUID, topic, ErrNoUnit, err)
		}
	}
	return nil
}

// refused returns an error to a handler that published by itself. For what a handler has returned, its round
// fails with the error, and the router goes on to an ack that commits nothing.
func refused(messages []*message.Message, err error) error {
	for _, msg := range messages {
		// In a unit that has ended nobody would hear of it.
		if unit, ok := cursor.UnitFromContext(msg.Context()); ok && unit.Returned() && unit.Err() == nil {
			unit.Fail(err)
			return nil
		}
	}
	return err
}

func (j *Jobs) check(topic string, table *table, msg *message.Message) (job, error) {
	reason := textReason("its id", msg.UUID)
	if _, ok := j.schema.(wsql.DefaultPostgreSQLSchema); ok && reason == "" && len(msg.UUID) > 36 {
		if n := utf8.RuneCountInString(msg.UUID); n > 36 {
			reason = fmt.Sprintf("its id has %d characters, the column holds 36", n)
		}
	}
	if table.column != "" && reason == "" {
		reason = payloadReason(msg.Payload, table.column)
	}
	var metadata string
	if reason == "" {
		metadata, reason = metadataJSON(msg.Metadata, "json")
	}
	if reason != "" {
		return job{}, &ValueError{Topic: topic, UUID: msg.UUID, Reason: reason}
	}
	kept := job{topic: topic, table: table, uuid: msg.UUID, payload: string(msg.Payload), metadata: metadata}
	if table.column == "" {
		kept.msg = message.NewMessage(msg.UUID, []byte(kept.payload))
		if len(msg.Metadata) > 0 { // a nil map would be read back as nil
			kept.msg.Metadata = maps.Clone(msg.Metadata)
		}
		kept.msg.SetContext(msg.Context())
	}
	return kept, nil
}

// table checks a topic, the first time that it is met, and returns how its jobs are inserted.
func (j *Jobs) table(topic string) (*table, error) {
	if known, ok := j.tables.Load(topic); ok {
		return known.(*table), nil
	}
	if err := j.checkTopic(topic); err != nil {
		return nil, err
	}
	t := &table{owner: j.others}
	if schema, ok := j.schema.(wsql.DefaultPostgreSQLSchema); ok {
		column, _, _ := strings.Cut(strings.ToLower(schema.PayloadColumnType(topic)), " ") // such as "bytea not null"
		switch column {
		case "json", "jsonb", "bytea":
			name := schema.MessagesTable(topic)
			*t = table{owner: j.arrays, column: column, sql: insertArrays(name, column), one: insertOne(name, column)}
		}
	}
	j.tables.Store(topic, t)
	return t, nil
}

// What watermill-sql takes for a topic.
var topicCharacters = regexp.MustCompile(`^[A-Za-z0-9\-$:._]+$`)

func (j *Jobs) checkTopic(topic string) error {
	if !topicCharacters.MatchString(topic) {
		return &ValueError{Topic: topic, Reason: "only letters, digits and -$:._ make a table's name"}
	}
	if schema, ok := j.schema.(wsql.DefaultPostgreSQLSchema); ok {
		// A name that PostgreSQL cuts would share the table of another topic.
		if table := lastIdentifier(schema.MessagesTable(topic)); len(table) > 63 {
			return &ValueError{Topic: topic, Reason: fmt.Sprintf("its table %q has %d bytes, PostgreSQL keeps 63: choose a topic of %d bytes or less",
				table, len(table), 63-(len(table)-len(topic)))}
		}
	}
	return nil
}

// lastIdentifier is the name of a table without its schema and quotes.
func lastIdentifier(table string) string {
	if quoted := strings.TrimSuffix(table, `"`); quoted != table {
		return quoted[strings.LastIndex(quoted, `"`)+1:]
	}
	return table[strings.LastIndex(table, ".")+1:]
}

// Initialize creates the tables of topics where they do not exist. Call it before the router runs, or create
// them by a migration: inside a round no table is made. Any number of processes may call it at once.
func (j *Jobs) Initialize(ctx context.Context, db cursor.Beginner, topics ...string) error {
	for _, topic := range topics {
		if err := j.checkTopic(topic); err != nil {
			return fmt.Errorf("create job tables: %w", err)
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

// byTopic returns a round's jobs in the order of their topics' first.
func byTopic(items []cursor.Item) (topics []string, jobs map[string][]*job) {
	jobs = map[string][]*job{}
	for _, item := range items {
		next := item.Value.(*job)
		if _, known := jobs[next.topic]; !known {
			topics = append(topics, next.topic)
		}
		jobs[next.topic] = append(jobs[next.topic], next)
	}
	return topics, jobs
}

func payloadSize(j *job) int { return len(j.payload) }

// Prepare inserts a round's jobs. It is called by the round.
func (o *others) Prepare(ctx context.Context, tx pgx.Tx, items []cursor.Item) error {
	topics, jobs := byTopic(items)
	for _, topic := range topics {
		if err := o.jobs.insertByAdapter(ctx, tx, topic, jobs[topic]); err != nil {
			return explainInsert(topic, err)
		}
	}
	return nil
}

// Flush has nothing left to do.
func (o *others) Flush(*cursor.Trip, []cursor.Item) error { return nil }

func (j *Jobs) insertByAdapter(ctx context.Context, tx pgx.Tx, topic string, jobs []*job) error {
	one, err := j.schema.InsertQuery(topic, message.Messages{jobs[0].msg})
	if err != nil {
		return err
	}
	for _, piece := range pieces(jobs, maxParameters/max(1, len(one.Args)), payloadSize) {
		messages := make(message.Messages, len(piece))
		for i := range piece {
			messages[i] = piece[i].msg
		}
		q, err := j.schema.InsertQuery(topic, messages)
		if err != nil {
			return err
		}
		// The server has to tell the columns' types first, whatever the connection's mode: adapters give bytes
		// for json and bytea alike. And a statement for every number of jobs is not for a statement cache.
		if _, err := tx.Exec(ctx, q.Query, append([]any{pgx.QueryExecModeDescribeExec}, q.Args...)...); err != nil {
			return err
		}
	}
	return nil
}

// maxParameters is what a statement may have in PostgreSQL's protocol.
const maxParameters = 65535

// Flush queues a round's jobs. It is called by the round.
func (a *arrays) Flush(trip *cursor.Trip, items []cursor.Item) error {
	topics, jobs := byTopic(items)
	for _, topic := range topics {
		for _, piece := range pieces(jobs[topic], len(jobs[topic]), payloadSize) {
			sql, args := piece[0].table.sql, arrayArguments(piece)
			if len(piece) == 1 {
				sql, args = piece[0].table.one, piece[0].arguments()
			}
			trip.Queue(func(err error) error { return explainInsert(topic, err) }, sql, args...)
		}
	}
	return nil
}

// insertArrays inserts any number of jobs by three parameters, in the arrays' order: unnested in a target list they are
// rows one after another, which nothing has to keep or sort. The largest array comes last, as pgx's buffers grow with each.
func insertArrays(table, column string) string {
	payload, arrayType := "nullif(j.payload, '')::"+column, "text"
	if column == "bytea" {
		payload, arrayType = "j.payload", "bytea"
	}
	return fmt.Sprintf(`
insert into %s (uuid, payload, metadata, transaction_id)
select j.uuid, %s, j.metadata::json, pg_current_xact_id()
from (select unnest($1::text[]) as uuid, unnest($2::text[]) as metadata, unnest($3::%s[]) as payload) j`, table, payload, arrayType)
}

func insertOne(table, column string) string {
	payload := "nullif($2::text, '')::" + column
	if column == "bytea" {
		payload = "$2::bytea"
	}
	return fmt.Sprintf(`
insert into %s (uuid, payload, metadata, transaction_id)
values ($1, %s, $3::json, pg_current_xact_id())`, table, payload)
}

func (j *job) arguments() []any {
	if j.table.column == "bytea" {
		return []any{j.uuid, []byte(j.payload), j.metadata}
	}
	return []any{j.uuid, j.payload, j.metadata}
}

func arrayArguments(jobs []*job) []any {
	uuids, metadata := make(cursor.Array[string], len(jobs)), make(cursor.Array[string], len(jobs))
	for i, j := range jobs {
		uuids[i], metadata[i] = j.uuid, j.metadata
	}
	if jobs[0].table.column == "bytea" {
		payloads := make(cursor.Array[[]byte], len(jobs))
		for i, j := range jobs {
			payloads[i] = []byte(j.payload)
		}
		return []any{uuids, metadata, payloads}
	}
	payloads := make(cursor.Array[string], len(jobs))
	for i, j := range jobs {
		payloads[i] = j.payload
	}
	return []any{uuids, metadata, payloads}
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
