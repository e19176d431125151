package river

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	queue "github.com/riverqueue/river"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// JobsConfig is for [NewJobs].
type JobsConfig struct {
	// Job makes a job of a message. It is called when the message is published; its error is the publisher's. Defaults
	// to a [Message] with River's own options.
	Job func(topic string, msg *message.Message) (queue.JobArgs, *queue.InsertOpts, error)
}

// Message is the arguments of a job that is a Watermill message.
type Message struct {
	Topic    string            `json:"topic"`
	UUID     string            `json:"uuid"`
	Payload  []byte            `json:"payload"` // base64 in JSON
	Metadata map[string]string `json:"metadata"`
}

// Kind is "watermill_message".
func (Message) Kind() string { return "watermill_message" }

// Message is the message that was published, with a context.
func (m Message) Message(ctx context.Context) *message.Message {
	msg := message.NewMessage(m.UUID, m.Payload)
	maps.Copy(msg.Metadata, m.Metadata)
	msg.SetContext(ctx)
	return msg
}

// Jobs is a Watermill publisher for a router: what a handler returns, or publishes with the context of the message in
// hand, is inserted as River jobs at the end of its round, in one call. No worker sees them before the commit.
type Jobs struct {
	client *queue.Client[pgx.Tx]
	config JobsConfig
}

var (
	_ message.Publisher = (*Jobs)(nil)
	_ cursor.Preparer   = (*Jobs)(nil)
)

// NewJobs returns a publisher of River jobs. The client may be one that works none; its pool is not used. River's
// tables are made by River's own migrations.
func NewJobs(client *queue.Client[pgx.Tx], config JobsConfig) (*Jobs, error) {
	if client == nil {
		return nil, errors.New("river jobs config: missing client")
	}
	if config.Job == nil {
		config.Job = func(topic string, msg *message.Message) (queue.JobArgs, *queue.InsertOpts, error) {
			return Message{Topic: topic, UUID: msg.UUID, Payload: bytes.Clone(msg.Payload), Metadata: maps.Clone(msg.Metadata)}, nil, nil
		}
	}
	return &Jobs{client, config}, nil
}

// Publish keeps a job for each message in the unit of work that its context carries. Without a living unit it is
// [cursor.ErrNoUnit]. What River refuses, such as a kind that its client has no worker for, fails the round.
func (j *Jobs) Publish(topic string, messages ...*message.Message) error {
	units, jobs := make([]*cursor.Unit, len(messages)), make([]queue.InsertManyParams, len(messages))
	for i, msg := range messages {
		var ok bool
		if units[i], ok = cursor.UnitFromContext(msg.Context()); !ok {
			return fmt.Errorf("publish message %q to %q as a River job: %w: a handler's own call needs "+
				"job.SetContext(msg.Context()); what it returns needs middleware.Round", msg.UUID, topic, cursor.ErrNoUnit)
		}
		var err error
		if jobs[i].Args, jobs[i].InsertOpts, err = j.config.Job(topic, msg); err != nil {
			return fmt.Errorf("make a River job of message %q to %q: %w", msg.UUID, topic, err)
		}
	}
	for i, msg := range messages {
		if err := units[i].Buffer(j, jobs[i]); err != nil {
			return fmt.Errorf("publish message %q to %q as a River job: %w: %w", msg.UUID, topic, cursor.ErrNoUnit, err)
		}
	}
	return nil
}

// Prepare inserts a round's jobs. It is called by the round.
func (j *Jobs) Prepare(ctx context.Context, tx pgx.Tx, items []cursor.Item) error {
	jobs := make([]queue.InsertManyParams, len(items))
	for i := range items {
		jobs[i] = items[i].Value.(queue.InsertManyParams)
	}
	if _, err := j.client.InsertManyTx(ctx, tx, jobs); err != nil {
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && pgErr.Code == "42P01" { // undefined_table
			return fmt.Errorf("insert River jobs: River's tables are not there, run its migrations before the router: %w", err)
		}
		return fmt.Errorf("insert River jobs: %w", err)
	}
	return nil
}

// Flush has nothing left to do.
func (j *Jobs) Flush(*cursor.Trip, []cursor.Item) error { return nil }

// Close does nothing: a router closes a shared publisher with its first handler.
func (j *Jobs) Close() error { return nil }
