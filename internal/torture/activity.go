package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Step is where in a round, or in an append, a fault hits.
type Step string

// The steps of a round in their order, and those of an append.
const (
	StepLock    Step = "lock"
	StepRead    Step = "read"
	StepHandler Step = "handler"
	StepFlush   Step = "flush"
	StepCursor  Step = "cursor"
	StepCommit  Step = "commit"
	StepAppend  Step = "append"
	StepNumber  Step = "numbering" // the append's commit
)

var steps = []Step{StepLock, StepRead, StepHandler, StepFlush, StepCursor, StepCommit, StepAppend, StepNumber}

// statements tell the step of a worker's backend by how its last statement begins.
var statements = []struct {
	begin string
	step  Step
}{
	{"begin", StepLock},
	{"select set_config('eventlog.unit'", StepLock},
	{"select c.last_seq from public.event_consumer_cursors", StepLock},
	{"select f.through", StepRead},
	{"with c as materialized", StepRead},
	{"select s.last_seq, coalesce((select min(l.seq)", StepRead},
	{"select p.seq", StepRead}, // of a replay
	{"insert into torture_effects", StepHandler},
	{"savepoint", StepHandler},
	{"release savepoint", StepHandler},
	{"rollback to savepoint", StepHandler},
	{"insert into \"watermill_", StepFlush},
	{"with moved as", StepCursor},
	{"insert into public.event_consumer_losses", StepCursor},
	{"insert into public.event_consumer_parked", StepCursor},
	{"with gone as ( delete from public.event_consumer_parked", StepCursor}, // of a replay
	{"commit", StepCommit},
}

// backend is a session of a worker process that is in a round or in an append.
type backend struct {
	pid, port int
	process   int // the number of the worker process
	step      Step
}

// Without a transaction id a round has no lock, and an append has appended nothing. The lock itself is the one step
// that comes before.
const sqlActivity = `
select a.pid, a.client_port, a.application_name, left(a.query, 200), a.backend_xid is not null
from pg_stat_activity a
where a.application_name like 'torture %' and a.xact_start is not null and ($1 = 0 or a.pid = $1)`

// look returns the backends that are in a round or an append; with a pid, that one if it is.
func (r *run) look(ctx context.Context, pid int) ([]backend, error) {
	rows, _ := r.pool.Query(ctx, sqlActivity, pid)
	var found []backend
	var b backend
	var application, query string
	var writes bool
	_, err := pgx.ForEachRow(rows, []any{&b.pid, &b.port, &application, &query, &writes}, func() error {
		var role string
		if _, err := fmt.Sscanf(application, "torture %s %d", &role, &b.process); err != nil {
			return fmt.Errorf("application_name %q: %w", application, err)
		}
		if b.step = stepOf(role, query); b.step != "" && (writes || b.step == StepLock) {
			found = append(found, b)
		}
		return nil
	})
	return found, err
}

func applicationName(role string, process int) string {
	return fmt.Sprintf("torture %s %d", role, process)
}

// stepOf is "" for what is neither a round nor an append.
func stepOf(role, query string) Step {
	query = strings.ToLower(strings.Join(strings.Fields(query), " "))
	if role == "writer" {
		switch {
		case strings.HasPrefix(query, "commit"):
			return StepNumber
		case strings.HasPrefix(query, "insert"), strings.Contains(query, "savepoint"):
			return StepAppend
		}
		return ""
	}
	for _, s := range statements {
		if strings.HasPrefix(query, s.begin) {
			return s.step
		}
	}
	return ""
}

const (
	// seizeAim is how long a victim is looked for at the wanted step; after that any step will do.
	seizeAim = time.Second
	// seizeTime is how long a victim is looked for at all.
	seizeTime = 3 * time.Second
)

// seize holds the connection of a backend that is in a round or an append, at the wanted step if there is one soon.
// Its step is what the server showed while the connection was held; the caller has to release it.
func (r *run) seize(ctx context.Context, random *rand.Rand, want Step, fits func(backend) bool) (backend, *link, bool) {
	began := time.Now()
	for time.Since(began) < seizeTime && wait(ctx, time.Millisecond) == nil {
		backends, err := r.look(ctx, 0)
		if err != nil {
			continue
		}
		any := time.Since(began) > seizeAim
		random.Shuffle(len(backends), func(i, j int) { backends[i], backends[j] = backends[j], backends[i] })
		for _, b := range backends {
			if b.step != want && !any || !fits(b) {
				continue
			}
			l := r.proxy.link(b.port)
			if l == nil || !l.hold() {
				continue
			}
			now, err := r.look(ctx, b.pid)
			if err == nil && len(now) == 1 && (any || now[0].step == want) && now[0].port == b.port {
				return now[0], l, true
			}
			l.release()
			break // what else was seen is old
		}
	}
	return backend{}, nil, false
}
