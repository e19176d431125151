package cursor

import "time"

// Event is one row of the event log.
type Event struct {
	Seq        int64
	OccurredAt time.Time // the source's clock
	RecordedAt time.Time // the database's clock, when it was numbered
	Topic      string
	Key        string // "" where the event has none
	UUID       string
	Payload    []byte
	Metadata   map[string]string // never nil
}
