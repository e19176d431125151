package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

type parkedJSON struct {
	keyJSON
	Event     eventJSON `json:"event"`
	ErrorType string    `json:"error_type"`
	Attempts  int       `json:"attempts"`
	ParkedAt  time.Time `json:"parked_at"`
	ParkedBy  string    `json:"parked_by"`
	Replay    bool      `json:"replay_asked"`
}

func (p *program) parkedCommand() *cobra.Command {
	return group("parked", "Events that consumers have passed because they kept failing",
		p.parkedListCommand(),
		p.ofEvent(&cobra.Command{
			Use:   "replay CONSUMER SEQ",
			Short: "Ask for another attempt at a parked event",
			Long: `Replay asks for another attempt at a parked event. The consumer's own process makes it between two rounds;
one that fails leaves the event parked.`,
			Example: `  eventlog parked replay mail@orders 5 --reason "the template is mended"`,
		}, operate.Replay),
		p.ofEvent(&cobra.Command{
			Use:     "discard CONSUMER SEQ",
			Short:   "Give a parked event up",
			Long:    `Discard gives a parked event up: its copy is deleted, and who did it and why is kept.`,
			Example: `  eventlog parked discard mail@orders 5 --reason "of no use"`,
		}, operate.Discard),
	)
}

func (p *program) parkedListCommand() *cobra.Command {
	var payload bool
	var after int64
	var limit int
	var name consumer
	c := &cobra.Command{
		Use:   "list [CONSUMER...]",
		Short: "List parked events",
		Long:  `List shows the parked events of the consumers that are named, or of all.`,
		Example: `  eventlog parked list
  eventlog parked list mail@orders --payload --json`,
		ValidArgsFunction: p.completeConsumers(),
	}
	c.Flags().BoolVar(&payload, "payload", false, "show payloads")
	c.Flags().Int64Var(&after, "after", 0, "only those behind this number")
	c.Flags().IntVar(&limit, "limit", 1000, "at most that many of each consumer")
	name.add(c)
	c.RunE = p.do(func(ctx context.Context, db *pgx.Conn, args []string) error {
		keys, err := name.keys(args)
		if err != nil {
			return err
		}
		survey, err := operate.Survey(ctx, db, p.log, keys...)
		switch {
		case err != nil:
			return err
		case len(survey.Cursors) < len(keys):
			return cursor.ErrCursorMissing
		}
		list := []parkedJSON{}
		for i := range survey.Cursors {
			if survey.Cursors[i].Parked == 0 {
				continue
			}
			parked, err := operate.Parked(ctx, db, p.log, survey.Cursors[i].Cursor, after, limit)
			if err != nil {
				return err
			}
			for _, e := range parked {
				list = append(list, parkedJSON{newKeyJSON(e.Cursor), newEventJSON(operate.Entry{Event: e.Event, Size: int64(len(e.Event.Payload))}, payload),
					e.ErrorType, e.Attempts, e.ParkedAt.UTC(), e.ParkedBy, e.Replaying})
			}
		}
		return p.print(list, func(w io.Writer) { writeParked(w, list) })
	})
	return c
}

func writeParked(w io.Writer, list []parkedJSON) {
	if len(list) == 0 {
		fmt.Fprintln(w, "no event is parked")
		return
	}
	heads := []string{"CONSUMER", "SEQ", "TOPIC", "KEY", "ERROR", "ATTEMPTS", "PARKED", "BY", "REPLAY"}
	if list[0].Event.Payload != nil {
		heads = append(heads, "PAYLOAD")
	}
	rows := make([][]string, len(list))
	for i, e := range list {
		replay := "-"
		if e.Replay {
			replay = "asked for"
		}
		rows[i] = []string{e.Name, strconv.FormatInt(e.Event.Seq, 10), e.Event.Topic, orDash(e.Event.Key), e.ErrorType, strconv.Itoa(e.Attempts),
			stamp(&e.ParkedAt), e.ParkedBy, replay}
		if e.Event.Payload != nil {
			rows[i] = append(rows[i], *e.Event.Payload)
		}
	}
	table(w, heads, rows)
}
