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

type lossJSON struct {
	keyJSON
	First      int64      `json:"first"`
	Last       int64      `json:"last"`
	Reason     string     `json:"reason"`
	RecordedAt time.Time  `json:"recorded_at"`
	RecordedBy string     `json:"recorded_by"`
	SettledAt  *time.Time `json:"settled_at"`
	SettledBy  string     `json:"settled_by"`
}

func (p *program) lossesCommand() *cobra.Command {
	return group("losses", "Events that consumers were moved past, because they had been removed or were too old",
		p.lossesListCommand(), p.lossesSettleCommand())
}

func (p *program) lossesListCommand() *cobra.Command {
	var all bool
	var limit int
	var name consumer
	c := &cobra.Command{
		Use:   "list [CONSUMER...]",
		Short: "List losses that nobody has settled",
		Long:  `List shows the losses of the consumers that are named, or of all: those that nobody has settled, or, with --all, all.`,
		Example: `  eventlog losses list
  eventlog losses list mail@orders --all --json`,
		ValidArgsFunction: p.completeConsumers(),
	}
	c.Flags().BoolVar(&all, "all", false, "also those that were settled")
	c.Flags().IntVar(&limit, "limit", 1000, "at most that many")
	name.add(c)
	c.RunE = p.do(func(ctx context.Context, db *pgx.Conn, args []string) error {
		keys, err := name.keys(args)
		if err != nil {
			return err
		}
		losses, err := operate.Losses(ctx, db, p.log, all, limit, keys...)
		if err == nil && len(losses) == 0 {
			err = p.mustExist(ctx, db, keys)
		}
		if err != nil {
			return err
		}
		list := make([]lossJSON, len(losses))
		for i, l := range losses {
			list[i] = lossJSON{newKeyJSON(l.Cursor), l.First, l.Last, l.Reason, l.RecordedAt.UTC(), l.RecordedBy, utc(l.SettledAt), l.SettledBy}
		}
		return p.print(list, func(w io.Writer) { writeLosses(w, list) })
	})
	return c
}

func writeLosses(w io.Writer, list []lossJSON) {
	if len(list) == 0 {
		fmt.Fprintln(w, "no losses")
		return
	}
	rows := make([][]string, len(list))
	for i, l := range list {
		rows[i] = []string{l.Name, strconv.FormatInt(l.First, 10), strconv.FormatInt(l.Last, 10), l.Reason, stamp(&l.RecordedAt), l.RecordedBy,
			stamp(l.SettledAt), orDash(l.SettledBy)}
	}
	table(w, []string{"CONSUMER", "FIRST", "LAST", "REASON", "RECORDED", "BY", "SETTLED", "BY"}, rows)
}

func (p *program) lossesSettleCommand() *cobra.Command {
	var o changes
	var name consumer
	var first int64
	c := &cobra.Command{
		Use:   "settle CONSUMER",
		Short: "Say that a consumer's losses were seen to",
		Long:  `Settle says that the losses of a consumer were seen to: all of them, or, with --first, one. They stay on record.`,
		Example: `  eventlog losses settle mail@orders --reason "the mails were sent by hand"
  eventlog losses settle mail@orders --first 1 --dry-run`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: p.completeConsumers(),
	}
	c.Flags().Int64Var(&first, "first", 0, "only the loss whose first event has this number")
	o.add(c)
	name.add(c)
	c.RunE = p.change(&o, func(ctx context.Context, db *pgx.Conn, args []string) (operate.Change, error) {
		key, err := name.key(args[0])
		if err != nil {
			return operate.Change{}, err
		}
		return operate.SettleLosses(ctx, db, p.log, key, first, o.order)
	})
	return c
}
