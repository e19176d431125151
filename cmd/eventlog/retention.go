package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/watermill-eventlog/watermill-eventlog/retention"
)

type settingsJSON struct {
	On            bool    `json:"on"`
	Keep          float64 `json:"keep_seconds"`
	PartitionSize int64   `json:"partition_size"`
	PinnedAge     float64 `json:"pinned_age_seconds"`
	PinnedBytes   int64   `json:"pinned_bytes"`
}

type retentionJSON struct {
	settingsJSON
	Head         int64           `json:"head"`
	Ahead        int             `json:"partitions_ahead"`
	Reserve      *int64          `json:"reserve"` // null until the log is cut
	MaintainedAt *time.Time      `json:"maintained_at"`
	MaintainedBy string          `json:"maintained_by"`
	Error        string          `json:"error"`
	FailingSince *time.Time      `json:"failing_since"`
	Pins         []pinJSON       `json:"pins"`
	Partitions   []partitionJSON `json:"partitions"`
}

type pinJSON struct {
	keyJSON
	Position int64     `json:"position"`
	Since    time.Time `json:"since"`
	Events   int64     `json:"events"`
	Bytes    int64     `json:"bytes"`
}

type partitionJSON struct {
	Partition string     `json:"partition"`
	First     int64      `json:"first"`
	Last      int64      `json:"last"`
	Bytes     int64      `json:"bytes"`
	Oldest    *time.Time `json:"oldest"`
	Newest    *time.Time `json:"newest"`
	Detaching bool       `json:"detaching"`
}

type maintenanceJSON struct {
	CutAt   int64    `json:"cut_at"`
	Made    []string `json:"made"`
	Removed []string `json:"removed"`
}

func newSettingsJSON(s retention.Settings) settingsJSON {
	return settingsJSON{!s.Off, s.Keep.Seconds(), s.PartitionSize, s.PinnedAge.Seconds(), s.PinnedBytes}
}

func known(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return utc(&t)
}

func (p *program) retentionCommand() *cobra.Command {
	return group("retention", "How long events are kept, and the log's partitions",
		p.retentionStatusCommand(), p.retentionSetCommand(), p.retentionRunCommand())
}

func (p *program) retentionStatusCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what is kept, and for whom",
		Long: `Status shows how long events are kept, the log's partitions, how many numbers there are partitions for,
what the last maintenance failed with, and the consumers for which events are kept longer.`,
		Example: `  eventlog retention status
  eventlog retention status --json`,
		Args: cobra.NoArgs,
	}
	c.RunE = p.do(func(ctx context.Context, db *pgx.Conn, _ []string) error {
		s, err := retention.Status(ctx, db, p.log)
		if err != nil {
			return err
		}
		j := retentionJSON{
			settingsJSON: newSettingsJSON(s.Settings), Head: s.Head, Ahead: s.Ahead, MaintainedAt: known(s.MaintainedAt),
			MaintainedBy: s.MaintainedBy, Error: s.Error, FailingSince: known(s.FailingSince), Pins: []pinJSON{}, Partitions: []partitionJSON{},
		}
		if s.Reserve != math.MaxInt64 {
			j.Reserve = &s.Reserve
		}
		for _, pin := range s.Pins {
			j.Pins = append(j.Pins, pinJSON{newKeyJSON(pin.Key), pin.Position, pin.Since.UTC(), pin.Events, pin.Bytes})
		}
		for _, part := range s.Partitions {
			j.Partitions = append(j.Partitions, partitionJSON{part.Name, part.First, part.Last, part.Bytes, known(part.Oldest), known(part.Newest), part.Detaching})
		}
		return p.print(j, func(w io.Writer) { writeRetention(w, j) })
	})
	return c
}

func (s settingsJSON) text() string {
	if !s.On {
		return "off: nothing is removed"
	}
	text := fmt.Sprintf("on: events are kept for %s, in partitions of %d numbers", age(time.Duration(s.Keep*1e9)), s.PartitionSize)
	if s.PinnedAge > 0 {
		text += fmt.Sprintf("; for late consumers for %s", age(time.Duration(s.PinnedAge*1e9)))
	}
	if s.PinnedBytes > 0 {
		text += fmt.Sprintf("; for late consumers %d bytes at most", s.PinnedBytes)
	}
	return text
}

func writeRetention(w io.Writer, j retentionJSON) {
	fmt.Fprintln(w, j.text())
	reserve := "the last partition has no end"
	if j.Reserve != nil {
		reserve = fmt.Sprintf("there are partitions for %d more, %d of them empty", *j.Reserve, j.Ahead)
	}
	fmt.Fprintf(w, "head %d; %s\n", j.Head, reserve)
	fmt.Fprintf(w, "maintained %s by %s\n", stamp(j.MaintainedAt), orDash(j.MaintainedBy))
	if j.Error != "" {
		fmt.Fprintf(w, "failing since %s: %s\n", stamp(j.FailingSince), printable(j.Error))
	}
	if len(j.Pins) > 0 {
		fmt.Fprintln(w)
		rows := make([][]string, len(j.Pins))
		for i, pin := range j.Pins {
			rows[i] = []string{pin.Name, strconv.FormatInt(pin.Position, 10), stamp(&pin.Since), strconv.FormatInt(pin.Events, 10), strconv.FormatInt(pin.Bytes, 10)}
		}
		table(w, []string{"KEPT FOR", "POSITION", "SINCE", "EVENTS", "BYTES"}, rows)
	}
	fmt.Fprintln(w)
	rows := make([][]string, len(j.Partitions))
	for i, part := range j.Partitions {
		name := part.Partition
		if part.Detaching {
			name += " (being removed)"
		}
		rows[i] = []string{name, strconv.FormatInt(part.First, 10), strconv.FormatInt(part.Last, 10), strconv.FormatInt(part.Bytes, 10), stamp(part.Oldest), stamp(part.Newest)}
	}
	table(w, []string{"PARTITION", "FIRST", "LAST", "BYTES", "OLDEST", "NEWEST"}, rows)
}

func (p *program) retentionSetCommand() *cobra.Command {
	var o changes
	var s retention.Settings
	c := &cobra.Command{
		Use:   "set",
		Short: "Set how long events are kept",
		Long: `Set switches retention on and changes what is given; the rest stays as it is. It is stored with the log, and
every process that maintains it goes by it. With --off nothing is removed any more.`,
		Example: `  eventlog retention set --keep 2160h --reason "the audit wants a quarter"
  eventlog retention set --pinned-age 4320h --dry-run
  eventlog retention set --off --reason "until the archive is there"`,
		Args: cobra.NoArgs,
	}
	c.Flags().DurationVar(&s.Keep, "keep", 30*24*time.Hour, "how long events are kept after they were recorded")
	c.Flags().Int64Var(&s.PartitionSize, "partition-size", 1_000_000, "numbers of a new partition")
	c.Flags().DurationVar(&s.PinnedAge, "pinned-age", 0, "how old what is kept for a late consumer may become; 0 is for ever")
	c.Flags().Int64Var(&s.PinnedBytes, "pinned-bytes", 0, "how much may be kept for late consumers; 0 is no bound")
	c.Flags().BoolVar(&s.Off, "off", false, "remove nothing")
	o.add(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := o.complete(); err != nil {
			return err
		}
		return p.do(func(ctx context.Context, db *pgx.Conn, _ []string) error {
			now, err := retention.Get(ctx, db, p.log)
			if err != nil {
				return err
			}
			now.Off = s.Off
			for flag, set := range map[string]func(){
				"keep":           func() { now.Keep = s.Keep },
				"partition-size": func() { now.PartitionSize = s.PartitionSize },
				"pinned-age":     func() { now.PinnedAge = s.PinnedAge },
				"pinned-bytes":   func() { now.PinnedBytes = s.PinnedBytes },
			} {
				if c.Flags().Changed(flag) {
					set()
				}
			}
			err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
				if err := retention.Set(ctx, tx, p.log, now, o.order.By, o.order.Reason); err != nil || !o.order.DryRun {
					return err
				}
				return errDry
			})
			if err != nil && !errors.Is(err, errDry) {
				return err
			}
			j := newSettingsJSON(now)
			return p.print(j, func(w io.Writer) {
				if o.order.DryRun {
					fmt.Fprint(w, "would be ")
				}
				fmt.Fprintln(w, j.text())
			})
		})(c, args)
	}
	return c
}

func (p *program) retentionRunCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "run",
		Short: "Maintain the log's partitions once",
		Long: `Run does what a process with package retention does every minute, once: it sees that there are partitions
ahead, finishes what an earlier maintenance has left undone, and removes what need not be kept any more.
It connects to the server itself, not through a transaction pooler, as a role that owns the log's tables.`,
		Example: `  eventlog retention run
  eventlog retention run --json`,
		Args: cobra.NoArgs,
	}
	c.RunE = p.do(func(ctx context.Context, db *pgx.Conn, _ []string) error {
		r, err := retention.New(retention.Config{ConnConfig: db.Config(), Log: p.log, By: whoami()}, nil)
		if err != nil {
			return err
		}
		done, err := r.Once(ctx)
		if err != nil {
			return err
		}
		j := maintenanceJSON{done.CutAt, append([]string{}, done.Made...), append([]string{}, done.Removed...)}
		return p.print(j, func(w io.Writer) {
			if j.CutAt > 0 {
				fmt.Fprintf(w, "the log's first partition ends at %d now\n", j.CutAt)
			}
			fmt.Fprintf(w, "made %s\nremoved %s\n", orDash(strings.Join(j.Made, ", ")), orDash(strings.Join(j.Removed, ", ")))
		})
	})
	return c
}
