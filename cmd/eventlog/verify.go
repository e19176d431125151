package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

type verdictJSON struct {
	OK        bool        `json:"ok"`
	At        time.Time   `json:"at"`
	Events    int64       `json:"events"`
	First     int64       `json:"first"`
	Last      int64       `json:"last"`
	Head      int64       `json:"head"`
	Consumers int         `json:"consumers"`
	Faults    []faultJSON `json:"faults"`
	Truncated bool        `json:"truncated"`
}

type faultJSON struct {
	keyJSON
	Kind  operate.FaultKind `json:"kind"`
	First int64             `json:"first"`
	Last  int64             `json:"last"`
	Text  string            `json:"text"`
}

func (p *program) verifyCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "verify",
		Short: "Prove that the log is whole",
		Long: `Verify proves the log: that every number from its oldest event to its newest is there once, that the counter is
the highest, that no consumer is outside and each has passed the event that is there now, and that what is
recorded as lost is. It reads numbers only, in small steps, and disturbs nobody. Where it finds a fault it
says which numbers are meant, and ends with 1.`,
		Example: `  eventlog verify
  eventlog verify --json`,
		Args: cobra.NoArgs,
	}
	c.RunE = p.atLeisure(func(ctx context.Context, db *pgx.Conn, _ []string) error {
		progress, done := p.progress("verify")
		v, err := operate.Verify(ctx, db, p.log, progress)
		done()
		if err != nil {
			return err
		}
		j := verdictJSON{v.OK(), v.At.UTC(), v.Events, v.First, v.Last, v.Head, v.Cursors, []faultJSON{}, v.Truncated}
		for _, f := range v.Faults {
			j.Faults = append(j.Faults, faultJSON{newKeyJSON(f.Cursor), f.Kind, f.First, f.Last, f.Text})
		}
		err = p.print(j, func(w io.Writer) { writeVerdict(w, j) })
		if err == nil && !v.OK() {
			err = quietError{errors.New("the log is not whole")}
		}
		return err
	})
	return c
}

func writeVerdict(w io.Writer, v verdictJSON) {
	fmt.Fprintf(w, "%d events, %d to %d; head %d; %d consumers\n", v.Events, v.First, v.Last, v.Head, v.Consumers)
	if v.OK {
		fmt.Fprintln(w, "the log is whole")
		return
	}
	fmt.Fprintln(w)
	rows := make([][]string, len(v.Faults))
	for i, f := range v.Faults {
		rows[i] = []string{string(f.Kind), orDash(f.Name), strconv.FormatInt(f.First, 10), strconv.FormatInt(f.Last, 10), f.Text}
	}
	table(w, []string{"FAULT", "CONSUMER", "FIRST", "LAST", "WHAT IT IS"}, rows)
	if v.Truncated {
		fmt.Fprintln(w, "… and more")
	}
}

// progress shows a bar on a terminal, and nothing elsewhere.
func (p *program) progress(what string) (step func(done, total int64), end func()) {
	if p.err.size == nil || p.json {
		return nil, func() {}
	}
	var bar *progressbar.ProgressBar
	step = func(done, total int64) {
		if bar == nil {
			bar = progressbar.NewOptions64(total, progressbar.OptionSetWriter(p.err.Writer), progressbar.OptionSetDescription(what),
				progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true), progressbar.OptionFullWidth(),
				progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
		}
		_ = bar.Set64(done) // what cannot be drawn is not missed
	}
	return step, func() {
		if bar != nil {
			_ = bar.Finish()
		}
	}
}
