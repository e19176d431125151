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

type interventionJSON struct {
	keyJSON
	ID     int64     `json:"id"`
	At     time.Time `json:"at"`
	Action string    `json:"action"`
	From   *int64    `json:"from"`
	To     *int64    `json:"to"`
	By     string    `json:"by"`
	Reason string    `json:"reason"`
}

func (p *program) interventionsCommand() *cobra.Command {
	var limit int
	var name consumer
	c := &cobra.Command{
		Use:   "interventions [CONSUMER...]",
		Short: "Show what was done by hand, and when consumers were created",
		Long: `Interventions shows, the latest first, what operators did to the consumers that are named, or to all and to the
log itself: who, when and why; and the creation of each consumer.`,
		Example: `  eventlog interventions
  eventlog interventions old --limit 5 --json`,
		ValidArgsFunction: p.completeConsumers(),
	}
	c.Flags().IntVar(&limit, "limit", 50, "at most that many")
	name.add(c)
	c.RunE = p.do(func(ctx context.Context, db *pgx.Conn, args []string) error {
		keys, err := name.keys(args)
		if err != nil {
			return err
		}
		interventions, err := operate.Interventions(ctx, db, p.log, limit, keys...)
		if err == nil && len(interventions) == 0 {
			err = p.mustExist(ctx, db, keys)
		}
		if err != nil {
			return err
		}
		list := make([]interventionJSON, len(interventions))
		for i, v := range interventions {
			list[i] = interventionJSON{newKeyJSON(v.Cursor), v.ID, v.At.UTC(), v.Action, v.From, v.To, v.By, v.Reason}
		}
		return p.print(list, func(w io.Writer) { writeInterventions(w, list) })
	})
	return c
}

func writeInterventions(w io.Writer, list []interventionJSON) {
	if len(list) == 0 {
		fmt.Fprintln(w, "nothing was done by hand")
		return
	}
	rows := make([][]string, len(list))
	for i, v := range list {
		rows[i] = []string{stamp(&v.At), orDash(v.Name), v.Action, numberOrDash(v.From), numberOrDash(v.To), v.By, v.Reason}
	}
	table(w, []string{"AT", "CONSUMER", "ACTION", "FROM", "TO", "BY", "REASON"}, rows)
}

func numberOrDash(n *int64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatInt(*n, 10)
}
