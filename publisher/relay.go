package publisher

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"strconv"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// RelayConfig is for [AtCommit].
type RelayConfig struct {
	// Source tells logs apart that have the same name in several databases, and are relayed to one broker: it begins
	// every id. Defaults to the log's name, such as public.event_log.
	Source string

	// SetID puts a message's id where the broker looks for it. It is called for a copy of the message. Defaults to
	// replacing the message's UUID, which watermill-nats sends as Nats-Msg-Id with JetStream's TrackMsgId.
	SetID func(msg *message.Message, id string)
}

// Relay is a Watermill publisher that hands what a round has published to another one, a broker's, immediately before
// the round's COMMIT. [AtCommit] makes it.
type Relay struct {
	pub    message.Publisher
	config RelayConfig
}

var (
	_ message.Publisher = (*Relay)(nil)
	_ cursor.Relayer    = (*Relay)(nil)
)

// AtCommit wraps any publisher. Messages that handlers return, or publish with the context of the message in hand, are
// kept until the end of their round. When everything else in it has succeeded, they go out in one call for each topic,
// in the order in which they were published; an error rolls the round back. Nothing of a round that fails otherwise, and
// of an attempt that was undone, goes out.
//
// It is at least once: what the broker has taken comes again when the COMMIT behind it fails, or the process dies
// between the two. So each message gets an id that is the same whenever its event is handled again: made of log,
// consumer, seq and the message's ordinal within its event, as in
//
//	public.event_log/billing@orders/4711/1
//
// A broker that deduplicates by it holds each message once, within the window that it looks back: for JetStream the
// stream's Duplicates, two minutes by default. It must be longer than a consumer may stand still with a failing commit.
// The ordinal counts all that a handler publishes through its unit, jobs too; a handler has to publish the same in the
// same order each time. A shard is not part of it, so that resharding changes no id.
//
// The round's transaction is open while the broker is asked: give its client a timeout below the consumer's ServerBound.
// A round with messages is never chained to the next one.
func AtCommit(pub message.Publisher, config RelayConfig) (*Relay, error) {
	var errs []error
	if pub == nil {
		errs = append(errs, errors.New("missing publisher"))
	}
	if _, ok := pub.(*Jobs); ok {
		errs = append(errs, errors.New("publisher.Jobs writes in the unit by itself: use it as it is"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("relay config: %w", err)
	}
	if config.SetID == nil {
		config.SetID = func(msg *message.Message, id string) { msg.UUID = id }
	}
	return &Relay{pub: pub, config: config}, nil
}

// relayed is a message as it was when it was published.
type relayed struct {
	topic string
	msg   *message.Message
	begin string // of its id: source and consumer
}

// Publish keeps messages in the unit of work that their contexts carry. What a handler returns gets its context from
// middleware.Round; a message that the handler publishes itself needs job.SetContext(msg.Context()). Without a living
// unit it is [ErrNoUnit], and nothing goes out.
func (r *Relay) Publish(topic string, messages ...*message.Message) error {
	units := make([]*cursor.Unit, len(messages))
	for i, msg := range messages {
		var ok bool
		if units[i], ok = cursor.UnitFromContext(msg.Context()); !ok {
			return fmt.Errorf("relay message %q to %q: %w: a handler's own call needs job.SetContext(msg.Context()); what it "+
				"returns needs middleware.Round", msg.UUID, topic, ErrNoUnit)
		}
	}
	for i, msg := range messages {
		kept := message.NewMessage(msg.UUID, bytes.Clone(msg.Payload))
		kept.Metadata = maps.Clone(msg.Metadata)
		kept.SetContext(msg.Context())
		if err := units[i].Buffer(r, &relayed{topic: topic, msg: kept, begin: r.begin(units[i])}); err != nil {
			return fmt.Errorf("relay message %q to %q: %w: %w", msg.UUID, topic, ErrNoUnit, err)
		}
	}
	return nil
}

func (r *Relay) begin(unit *cursor.Unit) string {
	source := r.config.Source
	if source == "" {
		source = unit.Log().String()
	}
	key := unit.Cursor()
	key.Shard = ""
	return idPart(source) + "/" + idPart(key.String()) + "/"
}

// idPart escapes what a broker's headers do not hold, and the slash between parts.
func idPart(s string) string { return strings.ReplaceAll(url.PathEscape(s), "%40", "@") }

// Flush has nothing to write.
func (r *Relay) Flush(*cursor.Trip, []cursor.Item) error { return nil }

// BeforeCommit hands the round's messages to the publisher. It is called by the round.
func (r *Relay) BeforeCommit(ctx context.Context, items []cursor.Item) error {
	var topics []string
	messages := map[string][]*message.Message{}
	for _, item := range items {
		kept := item.Value.(*relayed)
		if _, known := messages[kept.topic]; !known {
			topics = append(topics, kept.topic)
		}
		msg := kept.msg
		msg.SetContext(relayContext{Context: ctx, values: msg.Context()})
		r.config.SetID(msg, kept.begin+strconv.FormatInt(item.Seq, 10)+"/"+strconv.Itoa(item.Ordinal))
		messages[kept.topic] = append(messages[kept.topic], msg)
	}
	for _, topic := range topics {
		if err := publishGuarded(r.pub, topic, messages[topic]); err != nil {
			return fmt.Errorf("relay %d messages to %q: %w", len(messages[topic]), topic, err)
		}
	}
	return nil
}

// publishGuarded makes a panic of somebody else's publisher an error, as a handler's is: the round fails, and is tried again.
func publishGuarded(pub message.Publisher, topic string, messages []*message.Message) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &publisherPanic{kind: fmt.Sprintf("%T", v)}
		}
	}()
	return pub.Publish(topic, messages...)
}

// publisherPanic does not keep the value, as it may hold secrets.
type publisherPanic struct{ kind string }

func (e *publisherPanic) Error() string { return "the publisher panicked (" + e.kind + ")" }

// ErrorType is "internal".
func (*publisherPanic) ErrorType() string { return "internal" }

// relayContext ends with the round, and carries what the message's own context did.
type relayContext struct {
	context.Context
	values context.Context
}

func (c relayContext) Value(key any) any {
	if v := c.values.Value(key); v != nil {
		return v
	}
	return c.Context.Value(key)
}

// Close does nothing: a router closes a shared publisher with its first handler. Close the wrapped publisher when the
// router has ended.
func (r *Relay) Close() error { return nil }
