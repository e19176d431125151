package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

type changeJSON struct {
	keyJSON
	Action string    `json:"action"`
	From   int64     `json:"from"`
	To     int64     `json:"to"`
	Events int64     `json:"events"`
	By     string    `json:"by"`
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
	DryRun bool      `json:"dry_run"`
}

// changes is the flags of a verb that changes something.
type changes struct{ order operate.Order }

func (o *changes) add(c *cobra.Command) {
	c.Flags().StringVar(&o.order.By, "by", "", "who makes the change (default: user@host)")
	c.Flags().StringVar(&o.order.Reason, "reason", "", "why; it is recorded, and needed but for a dry run")
	c.Flags().BoolVar(&o.order.DryRun, "dry-run", false, "show what would be changed, and change nothing")
}

// change makes the function of a verb that makes one change.
func (p *program) change(o *changes, f func(ctx context.Context, db *pgx.Conn, args []string) (operate.Change, error)) func(*cobra.Command, []string) error {
	connected := p.do(func(ctx context.Context, db *pgx.Conn, args []string) error {
		c, err := f(ctx, db, args)
		if err != nil {
			return err
		}
		j := changeJSON{newKeyJSON(c.Cursor), c.Action, c.From, c.To, c.Events, c.By, c.Reason, c.At.UTC(), c.DryRun}
		return p.print(j, func(w io.Writer) { fmt.Fprintln(w, printable(changeText(c))) })
	})
	return func(c *cobra.Command, args []string) error {
		if err := o.complete(); err != nil {
			return err
		}
		return connected(c, args)
	}
}

// errDry rolls a dry run back.
var errDry = errors.New("a dry run")

// complete checks that somebody says why.
func (o *changes) complete() error {
	if strings.TrimSpace(o.order.Reason) == "" && !o.order.DryRun {
		return usage("missing --reason: it is recorded with the change (or see what it would do, with --dry-run)")
	}
	if o.order.By == "" {
		o.order.By = whoami()
	}
	return nil
}

// changeText says what was done.
func changeText(c operate.Change) string {
	text := fmt.Sprintf("%s %s at %d", c.Cursor, c.Action, c.From)
	switch c.Action {
	case "seek":
		text = fmt.Sprintf("%s moved from %d to %d: ", c.Cursor, c.From, c.To)
		switch {
		case c.To > c.From:
			text += fmt.Sprintf("%d of its events are skipped", c.Events)
		case c.To < c.From:
			text += fmt.Sprintf("%d of its events come again", c.Events)
		default:
			text += "it was there"
		}
	case "skip":
		text = fmt.Sprintf("%s skipped event %d, and is moved from %d to it", c.Cursor, c.To, c.From)
	case "pause":
		text = fmt.Sprintf("%s paused at %d", c.Cursor, c.From)
	case "resume":
		text = fmt.Sprintf("%s resumed at %d", c.Cursor, c.From)
	case "retire":
		text = fmt.Sprintf("%s retired at %d", c.Cursor, c.From)
	case "settle":
		text = fmt.Sprintf("%s: losses between %d and %d settled, %d events", c.Cursor, c.From, c.To, c.Events)
	case "replay":
		text = fmt.Sprintf("%s: a replay of event %d is asked for", c.Cursor, c.From)
	case "discard":
		text = fmt.Sprintf("%s: parked event %d discarded", c.Cursor, c.From)
	case "redact":
		text = fmt.Sprintf("event %d redacted: %d copies", c.From, c.Events)
	}
	if c.DryRun {
		return text + " (dry run: nothing was changed)"
	}
	return text
}

func (p *program) seekCommand() *cobra.Command {
	var o changes
	var name consumer
	c := &cobra.Command{
		Use:   "seek CONSUMER head|beginning|SEQ|TIME",
		Short: "Move a consumer to another place in the log",
		Long: `Seek moves a consumer: the next event that it handles is the first that the log still holds (beginning), the
one with the number SEQ, the first that did not occur before TIME, or the next one to be appended (head).
Events that are passed by it are not handled; events that come again are handled again. It ends the
standing failure, and is the way on for a consumer that is ahead of its log, as after a restore.

It waits for the round that is under way, ten seconds at most.`,
		Example: `  eventlog seek push 8 --reason "4 to 7 were handled by hand"
  eventlog seek push head --dry-run
  eventlog seek mail 2026-01-31T15:04:05Z --topic orders --reason "mails were lost" --by anna`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: p.completeConsumers("head", "beginning"),
	}
	o.add(c)
	name.add(c)
	c.RunE = p.change(&o, func(ctx context.Context, db *pgx.Conn, args []string) (operate.Change, error) {
		key, err := name.key(args[0])
		if err != nil {
			return operate.Change{}, err
		}
		start, err := startOf(args[1])
		if err != nil {
			return operate.Change{}, err
		}
		return operate.Seek(ctx, db, p.log, key, start, o.order)
	})
	return c
}

// ofEvent is a change of one consumer and one event.
func (p *program) ofEvent(c *cobra.Command, f func(context.Context, cursor.Beginner, *cursor.Log, cursor.Key, int64, operate.Order) (operate.Change, error)) *cobra.Command {
	var o changes
	var name consumer
	c.Args = cobra.ExactArgs(2)
	c.ValidArgsFunction = p.completeConsumers()
	o.add(c)
	name.add(c)
	c.RunE = p.change(&o, func(ctx context.Context, db *pgx.Conn, args []string) (operate.Change, error) {
		key, err := name.key(args[0])
		if err != nil {
			return operate.Change{}, err
		}
		seq, err := seqOf(args[1])
		if err != nil {
			return operate.Change{}, err
		}
		return f(ctx, db, p.log, key, seq, o.order)
	})
	return c
}

func (p *program) skipCommand() *cobra.Command {
	return p.ofEvent(&cobra.Command{
		Use:   "skip CONSUMER SEQ",
		Short: "Pass the next event of a consumer without handling it",
		Long: `Skip passes one event, which is the next one of the consumer: the one that it fails at. Naming it makes sure
that it is still the one you have looked at; another one is refused.`,
		Example: `  eventlog skip push 4 --reason "its order was deleted"`,
	}, operate.Skip)
}

// ofConsumer is a change of one consumer.
func (p *program) ofConsumer(c *cobra.Command, o *changes, f func(context.Context, cursor.Beginner, *cursor.Log, cursor.Key, operate.Order) (operate.Change, error)) *cobra.Command {
	var name consumer
	c.Args = cobra.ExactArgs(1)
	c.ValidArgsFunction = p.completeConsumers()
	o.add(c)
	name.add(c)
	c.RunE = p.change(o, func(ctx context.Context, db *pgx.Conn, args []string) (operate.Change, error) {
		key, err := name.key(args[0])
		if err != nil {
			return operate.Change{}, err
		}
		return f(ctx, db, p.log, key, o.order)
	})
	return c
}

func (p *program) pauseCommand() *cobra.Command {
	return p.ofConsumer(&cobra.Command{
		Use:   "pause CONSUMER",
		Short: "Let a consumer begin no round until it is resumed",
		Long: `Pause lets a consumer begin no round, in any process, until it is resumed. It waits for the round that is
under way, ten seconds at most. The events that it has to handle are kept.`,
		Example: `  eventlog pause push --reason "the mail server is being moved"`,
	}, &changes{}, operate.Pause)
}

func (p *program) resumeCommand() *cobra.Command {
	return p.ofConsumer(&cobra.Command{
		Use:   "resume CONSUMER",
		Short: "Let a paused or retired consumer go on where it stands",
		Long:  `Resume lets a paused or retired consumer go on where it stands, and wakes it.`,
		Example: `  eventlog resume old --reason "the mail server is back"
  eventlog resume old --dry-run --json`,
	}, &changes{}, operate.Resume)
}

func (p *program) retireCommand() *cobra.Command {
	var o changes
	c := p.ofConsumer(&cobra.Command{
		Use:   "retire CONSUMER",
		Short: "Say that a consumer is not needed any more",
		Long: `Retire says that nobody needs a consumer any more: it begins no round and no event is kept for it, but where
it stood is not forgotten. One that has moved within the last minute is in use, and refused without --force.
Resume takes it back.`,
		Example: `  eventlog retire old --reason "replaced by mail"`,
	}, &o, operate.Retire)
	c.Flags().BoolVar(&o.order.Force, "force", false, "also one that has moved within the last minute")
	return c
}

func (p *program) redactCommand() *cobra.Command {
	var o changes
	c := &cobra.Command{
		Use:   "redact SEQ",
		Short: "Replace the payload of an event by a tombstone",
		Long: `Redact replaces the payload of an event by ` + operate.Tombstone + ` and its metadata by {"redacted": "true"}, in
the log and in what consumers have parked of it. Its number, times, topic, uuid and key stay. It does not
reach what was made of it before: effects, jobs, backups, and the old row until it is vacuumed.`,
		Example: `  eventlog redact 5 --reason "request of the customer"`,
		Args:    cobra.ExactArgs(1),
	}
	o.add(c)
	c.RunE = p.change(&o, func(ctx context.Context, db *pgx.Conn, args []string) (operate.Change, error) {
		seq, err := seqOf(args[0])
		if err != nil {
			return operate.Change{}, err
		}
		return operate.Redact(ctx, db, p.log, seq, o.order)
	})
	return c
}
