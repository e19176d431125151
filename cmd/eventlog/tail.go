package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

const (
	tailBatch = 1000
	tailBytes = 100                    // with payloads a batch is smaller
	tailPoll  = 500 * time.Millisecond // no LISTEN, which a transaction pooler would keep
)

// startOf reads where to start in the log.
func startOf(text string) (cursor.Start, error) {
	switch text {
	case "head":
		return cursor.FromHead(), nil
	case "beginning":
		return cursor.FromBeginning(), nil
	}
	if seq, err := strconv.ParseInt(text, 10, 64); err == nil {
		start := cursor.FromSeq(seq)
		if err := start.Validate(); err != nil {
			return cursor.Start{}, usageError{err}
		}
		return start, nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02 15:04:05", "2006-01-02"} {
		if at, err := time.Parse(layout, text); err == nil {
			return cursor.FromTime(at), nil
		}
	}
	return cursor.Start{}, usage("%q is neither head nor beginning, nor a number, nor a time as 2026-01-31, \"2026-01-31 15:04:05\" (UTC) "+
		"or 2026-01-31T15:04:05+01:00", text)
}

func (p *program) tailCommand() *cobra.Command {
	var from, topic string
	var payload, follow bool
	var limit int64
	c := &cobra.Command{
		Use:   "tail",
		Short: "Follow the events as they are appended",
		Long: `Tail shows events in their order, one a line: number, when it occurred, topic, key, size, and the payload
where that is asked for. It goes on with what is appended until it is interrupted. With --json a line is
a JSON object.`,
		Example: `  eventlog tail --from 3 --follow=false
  eventlog tail --from beginning --topic orders --payload --limit 2
  eventlog tail --from 2026-01-31T15:04:05Z --limit 1 --json`,
		Args: cobra.NoArgs,
	}
	c.Flags().StringVar(&from, "from", "head", "where to start: head, beginning, a number, or a time")
	c.Flags().StringVar(&topic, "topic", "", "only the events of this topic")
	c.Flags().BoolVar(&payload, "payload", false, "show payloads")
	c.Flags().BoolVar(&follow, "follow", true, "go on at the head")
	c.Flags().Int64Var(&limit, "limit", 0, "end after that many events; 0 is no limit")
	c.RunE = p.atLeisure(func(ctx context.Context, db *pgx.Conn, _ []string) error {
		start, err := startOf(from)
		if err != nil {
			return err
		}
		place, err := cursor.Locate(ctx, db, p.log, start)
		if err != nil {
			return err
		}
		position := place.Position
		for shown := int64(0); ; {
			batch := int64(tailBatch)
			if payload {
				batch = tailBytes
			}
			if limit > 0 {
				batch = min(batch, limit-shown)
			}
			entries, through, err := operate.Events(ctx, db, p.log, position, topic, int(batch), payload)
			if err != nil {
				return quietly(ctx, err)
			}
			for i := range entries {
				if err := p.tailLine(entries[i], payload); err != nil {
					return err
				}
			}
			position, shown = through, shown+int64(len(entries))
			switch {
			case limit > 0 && shown >= limit:
				return nil
			case int64(len(entries)) == batch:
				continue
			case !follow:
				return nil
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(tailPoll):
			}
		}
	})
	return c
}

// quietly makes an interruption a good end.
func quietly(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func (p *program) tailLine(e operate.Entry, payload bool) error {
	if p.json {
		return line(p.out, newEventJSON(e, payload))
	}
	text := fmt.Sprintf("%d  %s  %s  %s  %dB", e.Seq, e.OccurredAt.UTC().Format("2006-01-02T15:04:05.000Z"), printable(e.Topic),
		orDash(printable(e.Key)), e.Size)
	if payload {
		text += "  " + printable(string(e.Payload))
	}
	_, err := fmt.Fprintln(p.out, text)
	return err
}
