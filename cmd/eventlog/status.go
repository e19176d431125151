package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

type statusJSON struct {
	Log       string         `json:"log"`
	At        time.Time      `json:"at"`
	Head      int64          `json:"head"`
	Consumers []consumerJSON `json:"consumers"`
}

type consumerJSON struct {
	keyJSON
	Position        int64        `json:"position"`
	Lag             int64        `json:"lag"`
	Ahead           bool         `json:"ahead"`
	PendingAge      float64      `json:"pending_age_seconds"`
	Rounds          int64        `json:"rounds"`
	CreatedAt       time.Time    `json:"created_at"`
	MovedAt         *time.Time   `json:"moved_at"`
	MovedBy         string       `json:"moved_by"`
	MatchedSeq      int64        `json:"matched_seq"`
	MatchedAt       *time.Time   `json:"matched_at"`
	PausedAt        *time.Time   `json:"paused_at"`
	RetiredAt       *time.Time   `json:"retired_at"`
	Failure         *failureJSON `json:"failure"`
	Parked          int64        `json:"parked"`
	UnsettledLosses int64        `json:"unsettled_losses"`
	LostEvents      int64        `json:"lost_events"`
}

type failureJSON struct {
	Seq       int64     `json:"seq"`
	Since     time.Time `json:"since"`
	Attempts  int       `json:"attempts"`
	ErrorType string    `json:"error_type"`
	Permanent bool      `json:"permanent"`
	FailedBy  string    `json:"failed_by"`
}

func newStatusJSON(log *cursor.Log, survey operate.Standings) statusJSON {
	s := statusJSON{Log: log.String(), At: survey.At.UTC(), Head: survey.Head, Consumers: []consumerJSON{}}
	for i := range survey.Cursors {
		c := &survey.Cursors[i]
		j := consumerJSON{
			keyJSON: newKeyJSON(c.Cursor), Position: c.Position, Lag: c.Lag, Ahead: c.Ahead, PendingAge: c.PendingAge.Seconds(),
			Rounds: c.Rounds, CreatedAt: c.CreatedAt.UTC(), MovedAt: utc(c.MovedAt), MovedBy: c.MovedBy, MatchedSeq: c.MatchedSeq,
			MatchedAt: utc(c.MatchedAt), PausedAt: utc(c.PausedAt), RetiredAt: utc(c.RetiredAt), Parked: c.Parked,
			UnsettledLosses: c.Losses, LostEvents: c.LostEvents,
		}
		if f := c.Failure; f != nil {
			j.Failure = &failureJSON{f.Seq, f.Since.UTC(), f.Attempts, f.ErrorType, f.Permanent, c.FailedBy}
		}
		s.Consumers = append(s.Consumers, j)
	}
	return s
}

// column is one of the table's.
type column struct {
	head string
	cell func(s *operate.Standings, c *operate.Standing) string
}

// statusColumns are those of status, in order.
func statusColumns() []column {
	return []column{
		{"CONSUMER", func(_ *operate.Standings, c *operate.Standing) string { return c.Cursor.String() }},
		{"POSITION", func(_ *operate.Standings, c *operate.Standing) string { return strconv.FormatInt(c.Position, 10) }},
		{"LAG", func(_ *operate.Standings, c *operate.Standing) string {
			if c.Ahead {
				return "ahead"
			}
			return strconv.FormatInt(c.Lag, 10)
		}},
		{"PENDING", func(_ *operate.Standings, c *operate.Standing) string {
			if c.Ahead || c.Lag == 0 {
				return "-"
			}
			return age(c.PendingAge)
		}},
		{"MOVED", func(s *operate.Standings, c *operate.Standing) string {
			if c.MovedAt == nil {
				return "never"
			}
			return age(s.At.Sub(*c.MovedAt)) + " ago"
		}},
		{"BY", func(_ *operate.Standings, c *operate.Standing) string { return orDash(c.MovedBy) }},
		{"FAILING", func(s *operate.Standings, c *operate.Standing) string {
			f := c.Failure
			if f == nil {
				return "-"
			}
			at := "its round"
			if f.Seq > 0 {
				at = fmt.Sprintf("seq %d", f.Seq)
			}
			return fmt.Sprintf("%s for %s: %s, attempts %d", at, age(s.At.Sub(f.Since)), f.ErrorType, f.Attempts)
		}},
		{"PARKED", func(_ *operate.Standings, c *operate.Standing) string { return countOrDash(c.Parked) }},
		{"LOST", func(_ *operate.Standings, c *operate.Standing) string { return countOrDash(c.LostEvents) }},
		{"HELD", func(_ *operate.Standings, c *operate.Standing) string {
			switch {
			case c.RetiredAt != nil:
				return "retired"
			case c.PausedAt != nil:
				return "paused"
			}
			return "-"
		}},
	}
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

func countOrDash(n int64) string {
	if n == 0 {
		return "-"
	}
	return strconv.FormatInt(n, 10)
}

func writeStatus(w io.Writer, log *cursor.Log, survey operate.Standings) {
	fmt.Fprintf(w, "log %s, head %d, at %s\n\n", log, survey.Head, survey.At.UTC().Format(time.RFC3339))
	if len(survey.Cursors) == 0 {
		fmt.Fprintln(w, "no consumers yet: the row of one is made when its process starts")
		return
	}
	columns := statusColumns()
	heads := make([]string, len(columns))
	for i := range columns {
		heads[i] = columns[i].head
	}
	rows := make([][]string, len(survey.Cursors))
	for i := range survey.Cursors {
		for _, c := range columns {
			rows[i] = append(rows[i], c.cell(&survey, &survey.Cursors[i]))
		}
	}
	table(w, heads, rows)
}

func (p *program) statusCommand() *cobra.Command {
	var watch bool
	var interval time.Duration
	var name consumer
	c := &cobra.Command{
		Use:   "status [CONSUMER...]",
		Short: "Show where each consumer stands",
		Long: `Status shows where the log and its consumers stand, seen in one statement: how far each is behind the
head (of all topics), how long ago the oldest event behind it occurred, when and by which instance it
was moved last, its standing failure, and how many events it has parked and lost, not yet settled.

With --watch it is shown again and again, in place where that is a terminal.`,
		Example: `  eventlog status
  eventlog status push mail@orders --json
  eventlog status --watch --interval 500ms`,
		ValidArgsFunction: p.completeConsumers(),
	}
	c.Flags().BoolVarP(&watch, "watch", "w", false, "show it again and again, until it is interrupted")
	c.Flags().DurationVar(&interval, "interval", 2*time.Second, "how often, with --watch")
	name.add(c)
	look := func(ctx context.Context, db *pgx.Conn, args []string) (operate.Standings, error) {
		keys, err := name.keys(args)
		if err != nil {
			return operate.Standings{}, err
		}
		survey, err := operate.Survey(ctx, db, p.log, keys...)
		if err == nil && len(survey.Cursors) < len(keys) {
			err = cursor.ErrCursorMissing
		}
		return survey, err
	}
	once := p.do(func(ctx context.Context, db *pgx.Conn, args []string) error {
		survey, err := look(ctx, db, args)
		if err != nil {
			return err
		}
		return p.print(newStatusJSON(p.log, survey), func(w io.Writer) { writeStatus(w, p.log, survey) })
	})
	c.RunE = func(c *cobra.Command, args []string) error {
		if !watch {
			return once(c, args)
		}
		if interval <= 0 {
			return usage("--interval must be positive")
		}
		return p.watch(c.Context(), interval, func(ctx context.Context, w io.Writer) error {
			var survey operate.Standings
			err := p.connected(ctx, func(db *pgx.Conn) (err error) { survey, err = look(ctx, db, args); return err })
			switch {
			case err != nil:
				return err
			case p.json:
				return line(w, newStatusJSON(p.log, survey))
			}
			writeStatus(w, p.log, survey)
			return nil
		})
	}
	return c
}

// watch shows again and again what show writes, until ctx ends. A look that fails is shown too, and is tried again: a
// database that restarts does not end it; the first one does.
func (p *program) watch(ctx context.Context, interval time.Duration, show func(context.Context, io.Writer) error) error {
	inPlace := p.out.size != nil && !p.json
	if inPlace {
		fmt.Fprint(p.out, "\x1b[2J")
	}
	for first := true; ; first = false {
		var text bytes.Buffer
		bounded, cancel := context.WithTimeout(ctx, p.timeout)
		err := show(bounded, &text)
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && first:
			return err
		case err != nil && !inPlace:
			fmt.Fprintf(p.err, "eventlog: %v\n", err)
		case err != nil:
			text.Reset()
			fmt.Fprintf(&text, "%s: %v\n", time.Now().UTC().Format(time.RFC3339), err)
		}
		switch {
		case inPlace:
			fmt.Fprint(p.out, p.frame(text.String()))
		case first || p.json:
			fmt.Fprint(p.out, text.String())
		default:
			fmt.Fprint(p.out, "\n"+text.String())
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(interval):
		}
	}
}

// frame draws a text over the one before, as much of it as fits.
func (p *program) frame(text string) string {
	columns, rows := p.out.size()
	var out strings.Builder
	out.WriteString("\x1b[H")
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if cut := len(lines) - (rows - 1); cut > 0 && rows > 1 {
		lines = append(lines[:rows-2:rows-2], fmt.Sprintf("… %d more", cut+1))
	}
	for _, l := range lines {
		if r := []rune(l); len(r) > columns {
			l = string(r[:max(0, columns-1)]) + "…"
		}
		out.WriteString(l + "\x1b[K\n")
	}
	out.WriteString("\x1b[J")
	return out.String()
}
