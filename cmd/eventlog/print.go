package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"golang.org/x/term"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// stream is where the program writes to, and, where that is a terminal, how large it is.
type stream struct {
	io.Writer
	size func() (columns, rows int) // nil where it is no terminal
}

func newStream(f *os.File) stream {
	s := stream{Writer: f}
	if fd := int(f.Fd()); term.IsTerminal(fd) {
		s.size = func() (int, int) {
			columns, rows, err := term.GetSize(fd)
			if err != nil {
				return 80, 24
			}
			return columns, rows
		}
	}
	return s
}

// print writes a value as JSON, or as the table that f writes.
func (p *program) print(value any, f func(w io.Writer)) error {
	if !p.json {
		f(p.out)
		return nil
	}
	encoder := json.NewEncoder(p.out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}

// line writes a value as one line of JSON.
func line(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}

// table writes rows below their heads.
func table(w io.Writer, heads []string, rows [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.Join(heads, "\t"))
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = printable(cell)
		}
		fmt.Fprintln(t, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
	}
	_ = t.Flush() // as with Fprint, who reads it has gone
}

// printable keeps what others wrote from steering the terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\t' || r == '\n' || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
}

// keyJSON names a cursor in JSON: the shown name, and its parts.
type keyJSON struct {
	Name     string `json:"name"`
	Consumer string `json:"consumer"`
	Topic    string `json:"topic"`
	Shard    string `json:"shard"`
}

func newKeyJSON(k cursor.Key) keyJSON {
	if k == (cursor.Key{}) {
		return keyJSON{}
	}
	return keyJSON{Name: k.String(), Consumer: k.Consumer, Topic: k.Topic, Shard: k.Shard}
}

func stamp(t *time.Time) string {
	if t == nil {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

// age is how long ago something was, to two units at most.
func age(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(time.Second).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%02dh", int(d.Hours())/24, int(d.Hours())%24)
}

// utc is a time as JSON has it.
func utc(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	u := t.UTC()
	return &u
}
