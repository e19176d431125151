package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

// newDisplay has bars for a terminal, and plain lines otherwise.
func newDisplay(file *os.File) *display {
	info, err := file.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb"
	d := &display{out: file, terminal: terminal, interval: 400 * time.Millisecond}
	if terminal {
		d.interval = 40 * time.Millisecond
	}
	return d
}

// display tells the user what is going on. It may be used by several goroutines.
type display struct {
	out      io.Writer
	terminal bool
	interval time.Duration // between two looks at the progress

	mu    sync.Mutex
	shown time.Time
	last  string
	bars  []string // below everything else on the screen
}

// say is a line about a step.
func (d *display) say(step, format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	line := fmt.Sprintf("%-9s %s", step, fmt.Sprintf(format, args...))
	if d.terminal {
		line = fmt.Sprintf("\x1b[1m%-9s\x1b[0m %s", step, fmt.Sprintf(format, args...))
	}
	d.print(line, d.bars)
}

// show is how far the work is. It is called as often as one likes.
func (d *display) show(s standing) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var plain, bars []string
	for _, p := range s.positions {
		plain = append(plain, fmt.Sprintf("%s %d/%d", p.consumer, p.seq, s.head))
		bars = append(bars, fmt.Sprintf("%-9s %s %d of %s", p.consumer, bar(p.seq, s.head), p.seq, count(s.head, "event")))
	}
	line := fmt.Sprintf("%-9s %s", "working", strings.Join(plain, ", "))
	if line == d.last || s.left() > 0 && time.Since(d.shown) < d.interval {
		return
	}
	d.last, d.shown = line, time.Now()
	if d.terminal {
		d.print("", bars)
	} else {
		d.print(line, nil)
	}
}

// stop leaves the bars where they are; what is said next comes below them.
func (d *display) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bars = nil
}

// table shows rows of cells, the first of them the header.
func (d *display) table(rows [][]any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := tabwriter.NewWriter(d.out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(d.out)
	for _, row := range rows {
		// The column of the names is padded here, as the tabwriter aligns all columns to one side.
		fmt.Fprintf(w, "%-9v\t", row[0])
		for _, cell := range row[1:] {
			fmt.Fprintf(w, "%v\t", cell)
		}
		fmt.Fprintln(w)
	}
	_ = w.Flush() // to the terminal
	fmt.Fprintln(d.out)
}

// print writes a line, if there is one, above the bars.
func (d *display) print(line string, bars []string) {
	var b strings.Builder
	if n := len(d.bars); n > 0 {
		fmt.Fprintf(&b, "\x1b[%dA\x1b[J", n) // up to the first of them, and clear the rest of the screen
	}
	if line != "" {
		b.WriteString(line + "\n")
	}
	for _, bar := range bars {
		b.WriteString("\x1b[?7l" + bar + "\x1b[?7h\n") // cut at the edge, not wrapped: bars are counted in lines
	}
	d.bars = bars
	_, _ = io.WriteString(d.out, b.String())
}

func bar(done, total int64) string {
	const length = 40
	full := length
	if total > 0 {
		full = int(min(done, total) * length / total)
	}
	return strings.Repeat("█", full) + strings.Repeat("░", length-full)
}
