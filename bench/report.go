package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
)

// Figure is one thing measured, once a round.
type Figure struct {
	Scenario string    `json:"scenario"`
	Name     string    `json:"name"`
	Unit     string    `json:"unit"`
	Values   []float64 `json:"values"`
	Spread
}

// Ratio compares two figures, round by round, and with a target if it has one.
type Ratio struct {
	Scenario string    `json:"scenario"`
	Name     string    `json:"name"`
	Values   []float64 `json:"values"`
	Spread
	Target float64 `json:"target,omitempty"`
	AtMost bool    `json:"at_most,omitempty"` // the target is an upper bound
	Met    *bool   `json:"met,omitempty"`
}

// Spread is a median and what it lies between.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// Report is all that a run has found.
type Report struct {
	Machine string    `json:"machine"`
	Form    string    `json:"form"`
	Figures []*Figure `json:"figures"`
	Ratios  []*Ratio  `json:"ratios"`
	Notes   []string  `json:"notes"`
	Wrong   []string  `json:"wrong"` // results that were not right

	scenario string
}

// add takes the value of a round.
func (r *Report) add(name, unit string, value float64) {
	f := r.find(name)
	if f == nil {
		f = &Figure{Scenario: r.scenario, Name: name, Unit: unit}
		r.Figures = append(r.Figures, f)
	}
	f.Values = append(f.Values, value)
	f.Spread = spread(f.Values)
}

func (r *Report) find(name string) *Figure {
	for _, f := range r.Figures {
		if f.Scenario == r.scenario && f.Name == name {
			return f
		}
	}
	return nil
}

// fail records a wrong result.
func (r *Report) fail(name string, err error) {
	r.Wrong = append(r.Wrong, fmt.Sprintf("%s, %s: %v", r.scenario, name, err))
}

func (r *Report) note(format string, args ...any) {
	if text := r.scenario + ": " + fmt.Sprintf(format, args...); !slices.Contains(r.Notes, text) {
		r.Notes = append(r.Notes, text)
	}
}

// target is a bound of a ratio; the zero value is none.
type target struct {
	value  float64
	atMost bool
}

func atLeast(v float64) target { return target{value: v} }
func atMost(v float64) target  { return target{value: v, atMost: true} }

// ratio compares two figures of the scenario, where both were measured.
func (r *Report) ratio(name, over, under string, t target) {
	a, b := r.find(over), r.find(under)
	if a == nil || b == nil {
		return
	}
	var values []float64
	for i := range min(len(a.Values), len(b.Values)) {
		if b.Values[i] != 0 {
			values = append(values, a.Values[i]/b.Values[i])
		}
	}
	r.compare(name, values, t)
}

// ratioToBest compares with the best of several figures.
func (r *Report) ratioToBest(name, over string, under []string, t target) {
	best := ""
	for _, u := range under {
		if f := r.find(u); f != nil && (best == "" || f.Median > r.find(best).Median) {
			best = u
		}
	}
	if best != "" {
		r.ratio(fmt.Sprintf("%s (%s)", name, best), over, best, t)
	}
}

// compare records values that are ratios by themselves, or have a target.
func (r *Report) compare(name string, values []float64, t target) {
	if len(values) == 0 {
		return
	}
	ratio := &Ratio{Scenario: r.scenario, Name: name, Values: values, Spread: spread(values), Target: t.value, AtMost: t.atMost}
	if t != (target{}) {
		met := ratio.Median >= t.value
		if t.atMost {
			met = ratio.Median <= t.value
		}
		ratio.Met = &met
	}
	r.Ratios = append(r.Ratios, ratio)
}

func spread(values []float64) Spread {
	return Spread{Median: quantile(values, 0.5), Min: slices.Min(values), Max: slices.Max(values)}
}

// quantile of at least one value.
func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	below := int(at)
	if below+1 == len(sorted) {
		return sorted[below]
	}
	return sorted[below] + (at-float64(below))*(sorted[below+1]-sorted[below])
}

// finish drops the times of wrong results.
func (r *Report) finish() {
	for _, w := range r.Wrong {
		r.Figures = slices.DeleteFunc(r.Figures, func(f *Figure) bool {
			return strings.HasPrefix(w, f.Scenario+", "+f.Name+": ")
		})
	}
}

func (t *Ratio) verdict() string {
	if t.Met == nil {
		return ""
	}
	bound, verdict := "at least", "met"
	if t.AtMost {
		bound = "at most"
	}
	if !*t.Met {
		verdict = "missed"
	}
	return fmt.Sprintf("%s %s: %s", bound, number(t.Target), verdict)
}

func number(v float64) string {
	switch a := math.Abs(v); {
	case a >= 1000:
		return grouped(int64(math.Round(v)))
	case a >= 100 || v == math.Trunc(v):
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}

func grouped(n int64) string {
	text := fmt.Sprint(n)
	for at := len(text) - 3; at > 0 && text[at-1] != '-'; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}

func (s Spread) String() string {
	if s.Min == s.Max {
		return ""
	}
	return number(s.Min) + " – " + number(s.Max)
}

func (r *Report) print(out io.Writer) error {
	fmt.Fprintf(out, "\n%s\n%s\n", r.Machine, r.Form)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	scenario := ""
	for _, f := range r.Figures {
		if f.Scenario != scenario {
			scenario = f.Scenario
			fmt.Fprintf(table, "\n%s\n", strings.ToUpper(scenario))
		}
		fmt.Fprintf(table, "  %s\t%s\t%s\t%s\n", f.Name, number(f.Median), f.Unit, f.Spread)
	}
	fmt.Fprint(table, "\nRATIOS\n")
	for _, t := range r.Ratios {
		fmt.Fprintf(table, "  %s: %s\t%s\t%s\t%s\n", t.Scenario, t.Name, number(t.Median), t.Spread, t.verdict())
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, n := range r.Notes {
		fmt.Fprintln(out, "note:", n)
	}
	for _, w := range r.Wrong {
		fmt.Fprintln(out, "WRONG:", w)
	}
	return nil
}

// table is the report as Markdown.
func (r *Report) table() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s %s\n\n| scenario | ratio | median | spread | target |\n|---|---|--:|--:|---|\n", r.Machine, r.Form)
	for _, t := range r.Ratios {
		fmt.Fprintf(&text, "| %s | %s | %s | %s | %s |\n", t.Scenario, t.Name, number(t.Median), t.Spread, t.verdict())
	}
	fmt.Fprint(&text, "\n| scenario | measured | median | spread | unit |\n|---|---|--:|--:|---|\n")
	for _, f := range r.Figures {
		fmt.Fprintf(&text, "| %s | %s | %s | %s | %s |\n", f.Scenario, f.Name, number(f.Median), f.Spread, f.Unit)
	}
	fmt.Fprintln(&text)
	for _, n := range r.Notes {
		fmt.Fprintf(&text, "- %s\n", n)
	}
	for _, w := range r.Wrong {
		fmt.Fprintf(&text, "- WRONG RESULT: %s\n", w)
	}
	return text.String()
}

func (r *Report) write(o options) error {
	if o.json != "" {
		text, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(o.json, append(text, '\n'), 0o644); err != nil {
			return err
		}
	}
	if o.markdown != "" {
		if err := os.WriteFile(o.markdown, []byte(r.table()), 0o644); err != nil {
			return err
		}
	}
	if o.readme == "" {
		return nil
	}
	text, err := os.ReadFile(o.readme)
	if err != nil {
		return err
	}
	filled := markers.ReplaceAllLiteral(text, []byte("<!-- bench -->\n"+r.table()+"<!-- /bench -->"))
	return os.WriteFile(o.readme, filled, 0o644)
}

var markers = regexp.MustCompile(`(?s)<!-- bench -->.*<!-- /bench -->`)

func checkMarkers(file string) error {
	text, err := os.ReadFile(file)
	if err == nil && !markers.Match(text) {
		err = fmt.Errorf("%s has no <!-- bench --> and <!-- /bench --> to put the table between", file)
	}
	return err
}

// machine is the line without which a figure says nothing.
func machine(postgres string) string {
	cpu := runtime.GOARCH
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if model := regexp.MustCompile(`(?m)^model name\s*:\s*(.+)$`).FindSubmatch(info); model != nil {
			cpu = string(model[1])
		}
	}
	parts := []string{
		fmt.Sprintf("%s, %d cores, %s", cpu, runtime.NumCPU(), runtime.GOOS),
		strings.Replace(runtime.Version(), "go", "Go ", 1),
		"PostgreSQL " + postgres,
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			for _, wanted := range []string{"ThreeDotsLabs/watermill", "ThreeDotsLabs/watermill-sql/v3", "ThreeDotsLabs/watermill-sql/v4",
				"jackc/pgx/v5", "riverqueue/river"} {
				if name, ok := strings.CutPrefix(dep.Path, "github.com/"); ok && name == wanted {
					_, short, _ := strings.Cut(name, "/")
					parts = append(parts, regexp.MustCompile(`/v\d+$`).ReplaceAllString(short, "")+" "+dep.Version)
				}
			}
		}
	}
	return strings.Join(parts, "; ") + "."
}
