package watch

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// limits is what no look can see.
func (w *Watch) limits() []string {
	limits := []string{
		"What handlers do outside the database, and whether they do the right thing, is not seen.",
		"What is appended by a transaction that has not committed is not seen.",
		fmt.Sprintf("A missing number is seen within the next %d behind a cursor; the command verify looks at all.", ahead),
	}
	if len(w.config.Keys) == 0 {
		limits = append(limits, "No cursors are expected by name: one that has no row is not missed.")
	}
	return limits
}

// blind is the report of a look that failed.
func (w *Watch) blind(err error) Report {
	p := Problem{Kind: InspectionFailed, Severity: Unknown, ErrorType: cursor.ErrorType(err)}
	p.Summary, p.Next = w.explain(err)
	report := Report{
		Status: Unknown, At: time.Now(), Problems: []Problem{p}, Consumers: []Consumer{}, Err: err,
		Coverage: Coverage{Limits: append(w.limits(), "Nothing was seen by this look.")},
	}
	if w.config.Now != nil {
		report.At = w.config.Now()
	}
	for _, key := range w.config.Keys {
		report.Consumers = append(report.Consumers, Consumer{
			Name: key.String(), Consumer: key.Consumer, Topic: key.Topic, Shard: key.Shard, Status: Unknown,
		})
	}
	return report
}

// explain says why a look failed, and what to do, without hosts, users and anything else of the error's text.
func (w *Watch) explain(err error) (summary, next string) {
	var pgErr *pgconn.PgError
	code := ""
	if errors.As(err, &pgErr) {
		code = pgErr.Code
	}
	switch {
	case errors.Is(err, errNoCounter):
		return fmt.Sprintf("The counter %s has no row.", w.config.Log.Table("seq")),
			"Restore the row; its last_seq is the highest seq that the log has ever had."
	case code == "42P01" || code == "3F000" || code == "42703": // undefined table, schema, column
		return fmt.Sprintf("Tables of %s are not in this database, or are of another version.", w.config.Log),
			"Check that this is the right database, and run: eventlog migrate up"
	case code == "42501": // insufficient privilege
		return "The role may not read the log's tables.",
			"Grant what docs/roles.md says for the watch role."
	case code == "57014" || errors.Is(err, context.DeadlineExceeded): // query canceled, by statement_timeout
		return fmt.Sprintf("The look was not over within its time (Timeout is %v).", w.config.Timeout),
			"Look whether the server is overloaded, a lock is held on the log's tables (pg_locks), or the pool has no free connection."
	case errors.Is(err, context.Canceled):
		return "The look was cancelled before it was over.", "Look again."
	case code != "":
		return fmt.Sprintf("The database refused the look (SQLSTATE %s).", code), "Read the database's log, and look again: eventlog check"
	}
	return "The database cannot be reached, or did not answer as expected.",
		"Check that it runs and that its address and password are right, then look again: eventlog check"
}

// judge compares what is there with what ought to be.
func (w *Watch) judge(f *found) Report {
	report := Report{
		At: f.now, Problems: []Problem{}, Consumers: []Consumer{},
		Log:      &Log{Head: f.head, LowestSeq: f.lowest, LastRecordedAt: or(f.newestAt)},
		Coverage: Coverage{Since: or(f.lowestAt), NotWatched: f.others, Limits: w.limits()},
	}
	if f.lowest > 0 {
		report.Log.Events = f.head - f.lowest + 1
	}
	switch {
	case f.keep == nil:
		report.Problems = append(report.Problems, Problem{Kind: RetentionShort, Severity: Warning,
			Summary: "The log does not say how long its events are kept.",
			Next:    fmt.Sprintf("Run: insert into %s default values", w.config.Log.Table("retention"))})
	case f.removes != nil && *f.removes && !w.retained(*f.keep):
		report.Problems = append(report.Problems, Problem{Kind: RetentionShort, Severity: Warning,
			Summary: "Events are kept for no longer than work may wait before somebody is called (event_retention.keep, PendingAlertAfter).",
			Next:    "Keep them for longer (eventlog retention set --keep), or lower PendingAlertAfter and the alert's number."})
	}
	if f.keep != nil && !math.IsInf(*f.keep, 0) { // for ever has no number in JSON
		report.Log.RetentionSeconds = *f.keep
	}
	removes := f.removes != nil && *f.removes
	if f.reserve != nil && *f.reserve < 1 {
		report.Problems = append(report.Problems, Problem{Kind: Maintenance, Severity: Critical, Seq: f.head + 1,
			Summary: fmt.Sprintf("There is no partition for event %d: appends fail.", f.head+1),
			Next:    "Make partitions: eventlog retention run; and see that a process with package retention runs."})
	}
	switch late := f.now.Sub(or(f.maintainedAt)); {
	case !removes:
	case f.maintenanceFails != nil && f.now.Sub(*f.maintenanceFails) > w.config.Grace:
		report.Problems = append(report.Problems, Problem{Kind: Maintenance, Severity: Critical, Since: *f.maintenanceFails,
			Summary: "Maintenance of the log's partitions fails: when there are none left ahead, appends fail.",
			Next:    "Read what it fails with: eventlog retention status"})
	case late > max(w.config.Grace, maintained):
		report.Problems = append(report.Problems, Problem{Kind: Maintenance, Severity: Critical, Since: or(f.maintainedAt),
			Summary: "Nobody maintains the log's partitions: when there are none left ahead, appends fail.",
			Next:    "Look whether a process with package retention runs; do its work once with: eventlog retention run"})
	}
	if f.standby {
		report.Problems = append(report.Problems, Problem{Kind: Standby, Severity: Warning,
			Summary: "The database is in recovery and shows the past of its primary.", Next: "Look at the primary."})
	}
	if staged := or(f.stagedAt); !staged.IsZero() {
		report.Log.StagedSince = staged
		if f.now.Sub(staged) > w.config.Grace {
			report.Problems = append(report.Problems, Problem{Kind: Staged, Severity: Critical, Since: staged,
				Summary: fmt.Sprintf("Events in %s have waited for their numbers for %v, and no consumer gets them before.", w.config.Log.Table("outbox"), round(f.now.Sub(staged))),
				Next:    "Look whether a sequencer runs (package sequencer) and what it logs; a row that is not staged was never seen by the table's trigger."})
		}
	}
	for i := range f.cursors {
		c, problems := w.consumer(f, &f.cursors[i])
		report.Consumers = append(report.Consumers, c)
		report.Problems = append(report.Problems, problems...)
	}
	if len(f.cursors) == 0 {
		report.Problems = append(report.Problems, Problem{Kind: NothingWatched, Severity: Warning,
			Summary: "The log has no consumers, and none are expected by name: nobody's work is looked at.",
			Next:    "Check that this is the right database, and name the consumers that have to be there."})
	}
	slices.SortStableFunc(report.Problems, func(a, b Problem) int { return int(b.Severity) - int(a.Severity) })
	if len(report.Problems) > 0 {
		report.Status = report.Problems[0].Severity
	}
	return report
}

// consumer judges one cursor.
func (w *Watch) consumer(f *found, r *row) (Consumer, []Problem) {
	key := r.key
	c := Consumer{
		Name: key.String(), Consumer: key.Consumer, Topic: key.Topic, Shard: key.Shard,
		MovedAt: r.movedAt, MovedBy: r.movedBy, MatchedSeq: r.matched, MatchedAt: r.matchedAt,
		PausedAt: r.pausedAt, RetiredAt: r.retiredAt, Failure: r.failure, Parked: r.parked, LossesOpen: r.lost,
	}
	var problems []Problem
	add := func(p Problem) {
		p.Key, p.Consumer = key, c.Name
		problems = append(problems, p)
		c.Status = max(c.Status, p.Severity)
	}
	if !r.exists {
		add(w.missing(f, r))
		return c, problems
	}
	c.Position = &r.position
	pendingSince, available := r.waiting(f)
	if !pendingSince.IsZero() {
		c.PendingSeq, c.PendingSince = r.pending, pendingSince
		c.PendingAge = max(0, f.now.Sub(pendingSince)).Seconds()
	}
	stands := r.stands(f)
	if stands == nil || stands.Kind != CursorAhead {
		lag := max(0, f.head-r.position)
		c.Lag = &lag
	}
	if !r.retiredAt.IsZero() {
		if len(w.config.Keys) > 0 {
			add(Problem{Kind: Retired, Severity: Warning, Since: r.retiredAt,
				Summary: fmt.Sprintf("%s is expected, and was retired: nothing is handled and nothing kept for it.", c.Name),
				Next:    "Take it off the list of expected consumers, or bring it back: " + change("resume", key)})
		}
		return c, problems
	}
	if stands != nil {
		add(*stands)
	}
	if p := w.progress(f, r, pendingSince, available); p != nil {
		add(*p)
	}
	if p := w.failing(f, r); p != nil && (stands == nil || stands.ErrorType != p.ErrorType) {
		add(*p)
	}
	if r.lost > 0 {
		add(Problem{Kind: Losses, Severity: Critical, Seq: r.lostFirst, Since: r.lostSince,
			Summary: fmt.Sprintf("%s was moved past %d unhandled events between %d and %d (%s).", c.Name, r.lost, r.lostFirst, r.lostLast, r.lostReason),
			Next:    "Make good what they would have done, then settle them: " + change("losses settle", key)})
	}
	if r.parked > 0 {
		add(Problem{Kind: Parked, Severity: Warning, Seq: r.parkedSeq, Since: r.parkedSince, ErrorType: r.parkedType,
			Summary: fmt.Sprintf("%s has parked %d of its events; the first is %d (%s).", c.Name, r.parked, r.parkedSeq, r.parkedType),
			Next: fmt.Sprintf("Look at them with: %s; mend the cause, then: %s, or: %s",
				command("parked list", key), change("parked replay", key, r.parkedSeq), change("parked discard", key, r.parkedSeq))})
	}
	if p := w.unmatched(r); p != nil {
		add(*p)
	}
	if due := r.pendingRecorded.Add(seconds(f.keep)); f.removes != nil && *f.removes && r.pending > 0 && f.now.After(due) {
		add(Problem{Kind: Pinned, Severity: Warning, Seq: r.pending, Since: due,
			Summary: fmt.Sprintf("Events are kept for longer than the retention because %s has not passed them, %d so far.", c.Name, f.head-r.position),
			Next:    "Let it catch up, or, if nobody needs it any more: " + change("retire", key)})
	}
	return c, problems
}

// oldest is the first moment that JSON can hold and that is not the zero one. A source may date its events before it.
var oldest = time.Date(1, 1, 2, 0, 0, 0, 0, time.UTC)

// waiting is since when the oldest event behind the cursor waits, by its own time, and since when the consumer could
// have taken it and made no progress. Both are zero at the head.
func (r *row) waiting(f *found) (since, available time.Time) {
	switch {
	case r.position >= f.head && r.pending == 0:
		return since, available
	case r.pending == 0: // there is something, and nothing of it can be read any more
		if since = r.occurredAt; since.Before(oldest) {
			since = r.createdAt
		}
		return since, latest(r.movedAt, r.createdAt)
	}
	since = r.pendingOccurred
	if r.pendingRecorded.Before(since) { // the source's clock is ahead
		since = r.pendingRecorded
	}
	if since.Before(oldest) {
		since = oldest
	}
	return since, latest(r.pendingRecorded, r.movedAt, r.createdAt)
}

// maintained is how long the log may be without maintenance, whatever the grace period is.
const maintained = 10 * time.Minute

func seconds(s *float64) time.Duration {
	if s == nil || *s > float64(math.MaxInt64)/1e9 {
		return math.MaxInt64
	}
	return time.Duration(*s * 1e9)
}

func latest(moments ...time.Time) (last time.Time) {
	for _, t := range moments {
		if t.After(last) {
			last = t
		}
	}
	return last
}

func (w *Watch) missing(f *found, r *row) Problem {
	p := Problem{Kind: CursorMissing, Severity: Critical, ErrorType: "cursor_missing",
		Summary: fmt.Sprintf("%s is expected and has no cursor: it was never started on this log.", r.key),
		Next:    "Start its process, which makes the cursor, or take it off the list of expected consumers."}
	for _, other := range f.others {
		if key, err := cursor.ParseKey(other); err == nil && key.Consumer == r.key.Consumer {
			p.Next += " The log has " + other + "."
		}
	}
	if r.recorded {
		p.Summary = fmt.Sprintf("%s has no cursor, although it was created once: its row is gone.", r.key)
		p.Next = fmt.Sprintf("Restore its row in %s, or delete its creation from %s to let it start anew.",
			w.config.Log.Table("consumer_cursors"), w.config.Log.Table("consumer_interventions"))
	}
	return p
}

// stands judges by the round's own rules whether the consumer can go on from where it is.
func (r *row) stands(f *found) *Problem {
	var gap *cursor.GapError
	plan, err := cursor.PlanRound(r.position, r.numbers, f.lowest, f.head)
	failed := ""
	var since time.Time
	if r.failure != nil {
		failed, since = r.failure.ErrorType, r.failure.Since
	}
	switch {
	case errors.Is(err, cursor.ErrCursorAhead) || r.rewritten || failed == "cursor_ahead":
		if failed != "cursor_ahead" {
			since = time.Time{}
		}
		return &Problem{Kind: CursorAhead, Severity: Critical, Seq: r.position, Since: since, ErrorType: "cursor_ahead",
			Summary: fmt.Sprintf("%s is at %d, beyond a log that was restored or has lost its tail (its head is %d); nothing is handled or skipped.",
				r.key, r.position, f.head),
			Next: "Find out which event of this log is the next that it has to handle, and move it there: " + change("seek", r.key, "SEQ")}
	case errors.As(err, &gap) || failed == "consumer_gap":
		seq := int64(0)
		if gap != nil {
			seq = gap.Seq
		} else if r.failure != nil {
			seq = r.failure.Seq
		}
		if failed != "consumer_gap" {
			since = time.Time{}
		}
		return &Problem{Kind: Gap, Severity: Critical, Seq: seq, Since: since, ErrorType: "consumer_gap",
			Summary: fmt.Sprintf("Number %d is missing from the log, and %s (at %d) does not go past it.", seq, r.key, r.position),
			Next: fmt.Sprintf("See how much is missing with: eventlog verify; put the event back, or, where that cannot be, go on behind it: %s",
				change("seek", r.key, seq+1))}
	case err == nil && plan.Kind == cursor.Loss:
		return &Problem{Kind: Losses, Severity: Critical, Seq: r.position + 1,
			Summary: fmt.Sprintf("Events %d to %d were removed from the log before %s had passed them.", r.position+1, plan.Through, r.key),
			Next:    "Make good what they would have done; the consumer records the loss and goes on when it runs."}
	}
	return nil
}

// progress judges work that waits.
func (w *Watch) progress(f *found, r *row, since, available time.Time) *Problem {
	if since.IsZero() {
		return nil
	}
	grace := w.config.Grace
	old := f.now.Sub(since) > grace
	lag := f.head - r.position
	p := Problem{Seq: r.pending, Since: since}
	if p.Seq == 0 {
		p.Seq = r.position + 1
	}
	age := round(f.now.Sub(since))
	switch {
	case !r.pausedAt.IsZero():
		if !old && f.now.Sub(r.pausedAt) <= grace {
			return nil
		}
		p.Kind, p.Severity, p.Since = Paused, Warning, r.pausedAt
		p.Summary = fmt.Sprintf("%s is paused while %d events wait, the oldest for %v.", r.key, lag, age)
		p.Next = "When the reason is gone: " + change("resume", r.key)
	case !old:
		return nil
	case f.now.Sub(available) > grace:
		p.Kind, p.Severity = Standing, Critical
		moved := "it has never moved"
		if !r.movedAt.IsZero() {
			moved = fmt.Sprintf("it last moved %v ago, by %s", round(f.now.Sub(r.movedAt)), r.movedBy)
		}
		p.Summary = fmt.Sprintf("%s stands: %d events wait, the oldest for %v; %s.", r.key, lag, age, moved)
		p.Next = "See whether its process runs, what its handler waits for and what fails: " + command("status", r.key)
		if r.failure != nil && r.failure.Seq > 0 {
			p.Next = fmt.Sprintf("See what fails: eventlog event %d %s", r.failure.Seq, quote(r.key.String()))
		}
	default:
		p.Kind, p.Severity = Behind, Warning
		p.Summary = fmt.Sprintf("%s is behind and moves: %d events wait, the oldest for %v.", r.key, lag, age)
		p.Next = "Look again: if the oldest gets younger it catches up; otherwise its handler is too slow or fails: " + command("status", r.key)
	}
	return &p
}

func (w *Watch) failing(f *found, r *row) *Problem {
	if r.failure == nil {
		return nil
	}
	x := r.failure
	p := Problem{Kind: Failing, Severity: Warning, Seq: x.Seq, Since: x.Since, ErrorType: x.ErrorType}
	if f.now.Sub(x.Since) > w.config.Grace && r.pausedAt.IsZero() {
		p.Severity = Critical
	}
	if x.Seq == 0 {
		p.Summary = fmt.Sprintf("Rounds of %s fail, %d so far (%s).", r.key, x.Attempts, x.ErrorType)
		p.Next = "Read its log line `event consumer round failed`: the jobs cannot be written, the commit fails or the database ends its rounds."
		return &p
	}
	p.Summary = fmt.Sprintf("Event %d fails in %s, %d times so far (%s).", x.Seq, r.key, x.Attempts, x.ErrorType)
	p.Next = fmt.Sprintf("Look at it with: %s; mend the handler, or give the event up: %s",
		fmt.Sprintf("eventlog event %d %s", x.Seq, quote(r.key.String())), change("skip", r.key, x.Seq))
	return &p
}

// unmatched judges a consumer that passes events and matches none of them.
func (w *Watch) unmatched(r *row) *Problem {
	if w.config.MatchNothing < 0 || r.unmatched == 0 || r.key.Topic == "" && r.key.Shard == "" {
		return nil
	}
	from := r.unmatchedAt
	if first := max(r.matched, r.base) + 1; r.unmatched > first { // what came before is not there any more
		from = latest(r.matchedAt, r.baseAt)
	}
	if r.movedAt.Sub(from) < w.config.MatchNothing {
		return nil
	}
	return &Problem{Kind: MatchesNothing, Severity: Warning, Since: from, Seq: r.unmatched,
		Summary: fmt.Sprintf("%s has passed %v of the log without an event of topic %q.", r.key, round(r.movedAt.Sub(from)), r.key.Topic),
		Next:    "Compare its topic with those that are appended: select topic, count(*) from " + w.config.Log.Table("log") + " group by topic"}
}
