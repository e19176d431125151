package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

type eventJSON struct {
	Seq        int64             `json:"seq"`
	OccurredAt time.Time         `json:"occurred_at"`
	RecordedAt time.Time         `json:"recorded_at"`
	Topic      string            `json:"topic"`
	Key        string            `json:"key"`
	UUID       string            `json:"uuid"`
	Size       int64             `json:"size"`
	Metadata   map[string]string `json:"metadata"`
	Payload    *string           `json:"payload,omitempty"` // where it was asked for; bytes that are not UTF-8 are replaced
}

func newEventJSON(e operate.Entry, payload bool) eventJSON {
	j := eventJSON{e.Seq, e.OccurredAt.UTC(), e.RecordedAt.UTC(), e.Topic, e.Key, e.UUID, e.Size, e.Metadata, nil}
	if payload {
		text := string(e.Payload)
		j.Payload = &text
	}
	return j
}

type recordJSON struct {
	Seq        int64          `json:"seq"`
	Event      *eventJSON     `json:"event"` // null when it is not in the log any more
	Deliveries []deliveryJSON `json:"deliveries"`
}

type deliveryJSON struct {
	keyJSON
	State     operate.DeliveryState `json:"state"`
	Text      string                `json:"text"`
	At        *time.Time            `json:"at"`
	By        string                `json:"by"`
	Round     string                `json:"round"`
	Attempts  int                   `json:"attempts"`
	ErrorType string                `json:"error_type"`
	Reason    string                `json:"reason"`
	Replay    bool                  `json:"replay_asked"`
	Position  int64                 `json:"position"`
	Before    *handlingJSON         `json:"handled_before"`
}

type handlingJSON struct {
	By    string    `json:"by"`
	Round string    `json:"round"`
	At    time.Time `json:"at"`
}

func newDeliveryJSON(d operate.Delivery) deliveryJSON {
	j := deliveryJSON{newKeyJSON(d.Cursor), d.State, d.String(), utc(d.At), d.By, d.Round, d.Attempts, d.ErrorType, d.Reason, d.Replay, d.Position, nil}
	if b := d.Before; b != nil {
		j.Before = &handlingJSON{b.Instance, b.Round, b.CommittedAt.UTC()}
	}
	return j
}

// seqOf reads the number of an event.
func seqOf(text string) (int64, error) {
	seq, err := strconv.ParseInt(text, 10, 64)
	if err != nil || seq < 1 {
		return 0, usage("%q is not the number of an event, which is 1 or more", text)
	}
	return seq, nil
}

func (p *program) eventCommand() *cobra.Command {
	var payload bool
	var name consumer
	c := &cobra.Command{
		Use:   "event SEQ [CONSUMER...]",
		Short: "Show what each consumer did with an event",
		Long: `Event shows an event, and for each consumer, or for those that are named, what it did with it: handled
(by which instance, in which round, when), failing, parked, lost, skipped by hand, not its topic, before
its start, or not reached yet. What it calls handled was committed, with all effects and jobs.`,
		Example: `  eventlog event 4
  eventlog event 5 mail@orders --payload
  eventlog event 4 --json`,
		Args: cobra.MinimumNArgs(1),
	}
	c.Flags().BoolVar(&payload, "payload", false, "show the payload too")
	name.add(c)
	c.RunE = p.do(func(ctx context.Context, db *pgx.Conn, args []string) error {
		seq, err := seqOf(args[0])
		if err != nil {
			return err
		}
		keys, err := name.keys(args[1:])
		if err != nil {
			return err
		}
		deliveries, err := operate.Deliveries(ctx, db, p.log, seq, keys...)
		if err != nil {
			return err
		}
		entries, _, err := operate.Events(ctx, db, p.log, seq-1, "", 1, payload)
		if err != nil {
			return err
		}
		record := recordJSON{Seq: seq, Deliveries: []deliveryJSON{}}
		if len(entries) > 0 && entries[0].Seq == seq {
			e := newEventJSON(entries[0], payload)
			record.Event = &e
		}
		for _, d := range deliveries {
			record.Deliveries = append(record.Deliveries, newDeliveryJSON(d))
		}
		return p.print(record, func(w io.Writer) { writeRecord(w, record) })
	})
	return c
}

func writeRecord(w io.Writer, r recordJSON) {
	if e := r.Event; e == nil {
		fmt.Fprintf(w, "event %d is not in the log any more\n\n", r.Seq)
	} else {
		fmt.Fprintf(w, "event %d, topic %s, key %s, %d bytes, uuid %s\noccurred %s, recorded %s\n", e.Seq, printable(e.Topic),
			orDash(printable(e.Key)), e.Size, printable(e.UUID), stamp(&e.OccurredAt), stamp(&e.RecordedAt))
		if e.Payload != nil {
			fmt.Fprintf(w, "%s\n", printable(*e.Payload))
		}
		fmt.Fprintln(w)
	}
	rows := make([][]string, len(r.Deliveries))
	for i, d := range r.Deliveries {
		rows[i] = []string{d.Name, d.Text}
	}
	table(w, []string{"CONSUMER", "WHAT IT DID"}, rows)
}
