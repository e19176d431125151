package main

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

//go:embed sample/webhooks.ndjson
var sample []byte

// largestPayload is the publisher's own limit, so that a payload above it is named by its line.
const largestPayload = 32 << 20

// event is one line of the input.
type event struct {
	Topic   string          `json:"topic"`
	Action  string          `json:"action"`
	Payload json.RawMessage `json:"payload"`
}

// readEvents reads all events before anything is done with them: the bundled sample, a file, or standard input
// as "-".
func readEvents(name string, stdin io.Reader) ([]event, error) {
	switch name {
	case "":
		return parseEvents("the bundled sample", bytes.NewReader(sample))
	case "-":
		return parseEvents("standard input", stdin)
	}
	file, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("-events: %w", err)
	}
	defer func() { _ = file.Close() }()
	return parseEvents(name, file)
}

// parseEvents checks every line; blank ones are left out.
func parseEvents(name string, input io.Reader) ([]event, error) {
	var events []event
	reader := bufio.NewReader(input)
	for number := 1; ; number++ {
		line, err := reader.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return nil, fmt.Errorf("-events: read %s: %w", name, err)
		}
		if line := bytes.TrimSpace(line); len(line) > 0 {
			e, fault := parseEvent(line)
			if fault != nil {
				return nil, fmt.Errorf("-events: %s, line %d: %w; nothing was appended", name, number, fault)
			}
			events = append(events, e)
		}
		if err == io.EOF {
			break
		}
	}
	if len(events) == 0 {
		return nil, fmt.Errorf("-events: %s holds no events", name)
	}
	return events, nil
}

func parseEvent(line []byte) (event, error) {
	var e event
	if err := json.Unmarshal(line, &e); err != nil {
		return event{}, fmt.Errorf("not an event in JSON: %w", err)
	}
	switch {
	case e.Topic == "":
		return event{}, errors.New("missing topic")
	case len(e.Payload) == 0, string(e.Payload) == "null":
		return event{}, errors.New("missing payload")
	case len(e.Payload) > largestPayload:
		return event{}, fmt.Errorf("payload of %d bytes, the limit is %d", len(e.Payload), largestPayload)
	case strings.ContainsRune(e.Topic, 0), strings.ContainsRune(e.Action, 0):
		return event{}, errors.New("topic or action contains NUL, which PostgreSQL cannot hold")
	}
	return e, nil
}

// append appends the events as often as asked, all in one transaction: after an error there are none of them.
func (db *database) append(ctx context.Context, events []event, times int, out *display) error {
	began := time.Now()
	log, err := publisher.NewEventLog(db.pool, publisher.EventLogConfig{})
	if err != nil {
		return err
	}
	topics := map[string]bool{}
	err = pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error {
		pub := log.InTx(tx)
		for range times {
			for rest := events; len(rest) > 0; {
				topic := rest[0].Topic
				var messages []*message.Message
				for len(rest) > 0 && rest[0].Topic == topic && len(messages) < batchSize {
					messages, rest = append(messages, rest[0].message(ctx)), rest[1:]
				}
				if err := pub.Publish(topic, messages...); err != nil {
					return err
				}
				topics[topic] = true
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	out.say("appended", "%s of %s in %s, in one transaction", count(len(events)*times, "event"), count(len(topics), "topic"), elapsed(began))
	return nil
}

func (e event) message(ctx context.Context) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), message.Payload(e.Payload))
	if e.Action != "" {
		msg.Metadata.Set("action", e.Action)
	}
	msg.SetContext(ctx)
	return msg
}
