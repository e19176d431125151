package torture

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

// Violation is something that must not be.
type Violation struct {
	At   time.Time
	Kind Kind
	Text string
}

// account is what became of the events that a consumer has passed.
type account struct {
	Consumer string
	Passed   int64
	Handled  int64
	Parked   int64
	Healthy  int64 // parked, although only faults made them fail
	Lost     int64
	Foreign  int64 // not its topic
}

// Report is what a run did and found.
type Report struct {
	Seed       uint64
	Began      time.Time
	Faulted    time.Duration // how long faults went on
	Took       time.Duration
	Hits       map[Fault]map[Step]int // the faults that count
	Missed     int                    // faults that hit nothing
	Violations []Violation

	Events                                       int64
	Committed, Undone, Unknown, UnknownCommitted int // appends, by what the writer was told
	Removed                                      int64
	Accounts                                     []account
	Processes, Deaths, FailedStarts, Replays     int
	Checked                                      int64 // numbers that cursors had passed, each counted for every snapshot that it was accounted for in
	LookedUp                                     int   // appends
	Snapshots, FullSnapshots                     int
	RoundErrors                                  map[string]int // by error type

	mu sync.Mutex
}

func newReport(seed uint64) *Report {
	r := &Report{Seed: seed, Began: time.Now(), Hits: map[Fault]map[Step]int{}, RoundErrors: map[string]int{}}
	for _, f := range faults {
		r.Hits[f.fault] = map[Step]int{}
	}
	return r
}

func (r *Report) count(n *int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*n++
}

func (r *Report) checked(full bool, accounts int64, appends int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Checked += accounts
	r.LookedUp += appends
	if full {
		r.FullSnapshots++
	} else {
		r.Snapshots++
	}
}

func (r *Report) fault(fault Fault, step Step, counts bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if counts {
		r.Hits[fault][step]++
	} else {
		r.Missed++
	}
}

// workerError notes the failure of a round. Those that blame the log are violations: nothing is missing in it.
func (r *Report) workerError(number int, line workerLine) {
	r.mu.Lock()
	r.RoundErrors[line.Type]++
	r.mu.Unlock()
	switch line.Type {
	case "consumer_gap", "cursor_ahead", "cursor_missing", "event consumer ended":
		r.violate(KindFalseAlarm, fmt.Sprintf("worker %d: %s", number, line.Error))
	}
}

func (r *Report) violate(kind Kind, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Violations = append(r.Violations, Violation{time.Now(), kind, text})
}

func (r *Report) violated() bool { return r.violatedBy("") }

// violatedBy tells whether there is a violation of a kind, or any.
func (r *Report) violatedBy(kind Kind) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.Violations, func(v Violation) bool { return kind == "" || v.Kind == kind })
}

func (r *Report) faultsEnded() { r.Faulted = time.Since(r.Began) }
func (r *Report) end()         { r.Took = time.Since(r.Began) }

// maxShown is how many violations are shown.
const maxShown = 30

// String is the report as tables.
func (r *Report) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out strings.Builder
	table := func(rows ...[]any) {
		w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
		for _, row := range rows {
			for _, cell := range row {
				fmt.Fprintf(w, "%v\t", cell)
			}
			fmt.Fprintln(w)
		}
		_ = w.Flush() // into memory
		out.WriteByte('\n')
	}

	fmt.Fprintf(&out, "seed %d, %v of faults, %v in all\n\n", r.Seed, r.Faulted.Round(time.Second), r.Took.Round(time.Second))
	head := []any{"faults that hit"}
	for _, s := range steps {
		head = append(head, s)
	}
	rows, sums, total := [][]any{append(head, "all")}, map[Step]int{}, 0
	for _, f := range faults {
		row, sum := []any{f.fault}, 0
		for _, s := range steps {
			n := r.Hits[f.fault][s]
			row, sum = append(row, n), sum+n
			sums[s] += n
		}
		rows, total = append(rows, append(row, sum)), total+sum
	}
	last := []any{"all"}
	for _, s := range steps {
		last = append(last, sums[s])
	}
	table(append(rows, append(last, total))...)
	fmt.Fprintf(&out, "%d faults hit nothing and do not count; events killed %d processes; %d processes were started, %d of them in vain\n\n",
		r.Missed, r.Deaths, r.Processes, r.FailedStarts)

	fmt.Fprintf(&out, "%d events in the log, of which %d were removed: %d appends returned nil, %d were undone, of %d the writer was not told and %d of these are there\n\n",
		r.Events, r.Removed, r.Committed, r.Undone, r.Unknown, r.UnknownCommitted)
	rows = [][]any{{"consumer", "passed", "handled", "parked", "by faults alone", "lost", "not its topic"}}
	for _, a := range r.Accounts {
		rows = append(rows, []any{a.Consumer, a.Passed, a.Handled, a.Parked, a.Healthy, a.Lost, a.Foreign})
	}
	table(rows...)
	fmt.Fprintf(&out, "%d replays were asked for\n", r.Replays)
	types := make([]string, 0, len(r.RoundErrors))
	for t, n := range r.RoundErrors {
		types = append(types, fmt.Sprintf("%s %d", t, n))
	}
	slices.Sort(types)
	fmt.Fprintf(&out, "error lines of consumers: %s\n", strings.Join(types, ", "))
	fmt.Fprintf(&out, "\nchecked in %d snapshots during the faults and in %d when everything was caught up, none of which may have:\n",
		r.Snapshots, r.FullSnapshots)
	for _, kind := range snapshotKinds {
		fmt.Fprintf(&out, "  %s\n", kind)
	}
	fmt.Fprintf(&out, "in which %d passed numbers were accounted for and %d appends looked up\n", r.Checked, r.LookedUp)
	if r.FullSnapshots > 0 {
		fmt.Fprintf(&out, "checked at the end: every stopped worker exited with 0; no session, failure, mark or request for a replay was left\n")
	}
	out.WriteByte('\n')
	fmt.Fprintf(&out, "violations: %d\n", len(r.Violations))
	for _, v := range r.Violations[:min(len(r.Violations), maxShown)] {
		fmt.Fprintf(&out, "  %s %s: %s\n", v.At.Format("15:04:05.000"), v.Kind, v.Text)
	}
	return out.String()
}
