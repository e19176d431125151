// Package webhooks holds real data for tests: what GitHub's webhooks send.
package webhooks

import (
	"bufio"
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

//go:embed github-webhooks.ndjson.gz
var webhooks []byte

// Webhook is one event.
type Webhook struct {
	Topic   string // such as "github.issues"
	Action  string // "" where it has none
	Payload []byte // JSON, byte for byte as in the file
}

// Webhooks returns all 329 of them, in the order of the file.
func Webhooks() ([]Webhook, error) {
	input, err := open()
	if err != nil {
		return nil, err
	}
	var all []Webhook
	for reader := bufio.NewReader(input); ; {
		line, err := reader.ReadBytes('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("webhooks: %w", err)
		}
		if len(line) == 0 {
			return all, nil
		}
		var w struct {
			Topic, Action string
			Payload       json.RawMessage
		}
		if err := json.Unmarshal(line, &w); err != nil {
			return nil, fmt.Errorf("webhooks, line %d: %w", len(all)+1, err)
		}
		all = append(all, Webhook{w.Topic, w.Action, w.Payload})
	}
}

// NDJSON returns the file as it is, a line for each event: {"topic", "action", "payload"}.
func NDJSON() ([]byte, error) {
	input, err := open()
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(input)
	if err != nil {
		return nil, fmt.Errorf("webhooks: %w", err)
	}
	return text, nil
}

func open() (io.Reader, error) {
	input, err := gzip.NewReader(bytes.NewReader(webhooks))
	if err != nil {
		return nil, fmt.Errorf("webhooks: %w", err)
	}
	return input, nil
}
