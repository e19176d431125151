package retention

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// A table that is attached makes nobody wait, where "create ... partition of" does.
const sqlMake = `
create table {table} (like public.event_log including all);
alter table public.event_log attach partition {table} for values from ({from}) to ({to});`

// span is the range of one partition.
type span struct{ from, to int64 }

func (s span) name(log *cursor.Log) string { return fmt.Sprintf("%s_log_p%d", log.Name(), s.from) }

func (s span) sql(log *cursor.Log) string {
	table := pgx.Identifier{log.Schema(), s.name(log)}.Sanitize()
	return fill(log, sqlMake, map[string]any{"table": table, "from": s.from, "to": s.to})
}

var placeholder = regexp.MustCompile(`\{[a-z]+\}`)

// fill renders SQL that is written with the default names, and puts names and numbers where no parameter may stand. The
// names are quoted already, and may hold what looks like a placeholder.
func fill(log *cursor.Log, sql string, values map[string]any) string {
	var out strings.Builder
	last := 0
	for _, at := range placeholder.FindAllStringIndex(sql, -1) {
		out.WriteString(log.Render(sql[last:at[0]]))
		fmt.Fprint(&out, values[sql[at[0]+1:at[1]-1]])
		last = at[1]
	}
	out.WriteString(log.Render(sql[last:]))
	return out.String()
}

// spans are the partitions that are missing above a number.
func (s *State) spans(from int64, ahead, want int) (spans []span, err error) {
	// As long as the wanted numbers fit into that many.
	size := roundUp(max(s.Settings.PartitionSize, (s.wanted+int64(want)-1)/int64(want)), s.Settings.PartitionSize)
	for ; ahead < want || from-1-s.Head < s.wanted; ahead++ {
		if from > math.MaxInt64-size {
			return nil, errors.New("the numbers are used up")
		}
		spans = append(spans, span{from: from, to: from + size})
		from += size
	}
	return spans, nil
}

// roundUp is the next multiple of size.
func roundUp(n, size int64) int64 { return (n + size - 1) / size * size }

// bounded is a transaction in which others wait for us no longer than the lock timeout.
func (r *Retention) bounded(timeout time.Duration) string {
	return fmt.Sprintf("set local lock_timeout = %d; set local statement_timeout = 0; ", timeout.Milliseconds())
}

func (m *maintenance) makeAhead(ctx context.Context, state *State) (changed bool, err error) {
	spans, err := state.spans(state.last().To, state.Ahead, m.config.Ahead)
	if err != nil {
		return false, err
	}
	for _, s := range spans {
		name := s.name(m.config.Log)
		err := m.exec(ctx, "make partition "+name, m.bounded(m.config.LockTimeout)+s.sql(m.config.Log), attempts)
		if err != nil {
			return changed, err
		}
		changed, m.done.Made = true, append(m.done.Made, name)
	}
	return changed, nil
}

func constraintName(log *cursor.Log) string { return log.Name() + "_log_end" }

var constraintBound = regexp.MustCompile(`seq < '?([0-9]+)`)

func parseCut(definition string, valid bool) (*cut, error) {
	found := constraintBound.FindStringSubmatch(definition)
	if found == nil {
		return nil, fmt.Errorf("the constraint %q is not what retention had made: drop it", definition)
	}
	bound, err := strconv.ParseInt(found[1], 10, 64)
	if err != nil {
		return nil, err
	}
	return &cut{bound: bound, valid: valid}, nil
}

// An autovacuum of the partition gives way to this lock, which makes nobody else wait.
const sqlYield = `lock table {table} in share update exclusive mode; `

// The constraint is checked for new events from here on, so it has to be far above the head.
const sqlAnnounce = `
alter table {table} drop constraint if exists {constraint}, add constraint {constraint} check (seq < {end}) not valid`

const sqlValidate = `alter table {table} validate constraint {constraint}`

// Under the exclusive lock no number is given that is not committed. A constraint that is valid spares the attach its
// scan. One statement: its bound is for all of it, and a client that is frozen holds nothing.
const sqlCut = `
do $function$
begin
    lock table only public.event_log in access exclusive mode;
    if (select s.last_seq >= {end} - 1 from public.event_seq s) then
        raise exception 'the head has come up to the end of the partition' using errcode = '55P03';
    end if;
    alter table public.event_log detach partition {table};
    alter table public.event_log attach partition {table} for values from ({from}) to ({end});
    alter table {table} drop constraint if exists {constraint};
    {partitions}
end
$function$`

const (
	// scanLimit is what may be scanned while appends wait, in bytes.
	scanLimit = 32 << 20
	// announceWindow is how long the numbers below an announced end should last: a dump may hold up the cut for hours.
	announceWindow = 24 * time.Hour
)

// cut gives the partition that goes up to the end of all numbers an end above the head, and makes the ones behind it.
// That is an exclusive moment: it waits for the rounds and appends that are open, and the next ones wait for it. A large
// partition has another one before, in which its end is announced; it can then be checked while appends go on.
func (m *maintenance) cut(ctx context.Context, state *State) error {
	p, log := state.last(), m.config.Log
	values := map[string]any{"table": p.table(), "constraint": pgx.Identifier{constraintName(log)}.Sanitize(), "from": "minvalue"}
	yield := m.bounded(m.patience()) + fill(log, sqlYield, values)
	// Half of the bound to get the lock: with what is done under it, the whole is kept.
	exclusive := fmt.Sprintf("set local lock_timeout = %d; set local statement_timeout = %d; ",
		m.config.LockTimeout.Milliseconds()/2, m.config.LockTimeout.Milliseconds())

	end := roundUp(state.Head+state.wanted+1, state.Settings.PartitionSize)
	switch {
	case p.cut == nil && p.Bytes <= m.scanLimit:
	case p.cut == nil || p.cut.bound-1-state.Head < state.wanted/2:
		day, err := look(ctx, m.conn, log, announceWindow)
		if err != nil {
			return err
		}
		values["end"] = roundUp(day.Head+max(day.wanted, state.wanted)+1, state.Settings.PartitionSize)
		return hint(m.exec(ctx, "announce the end of partition "+p.Name, yield+exclusive+fill(log, sqlAnnounce, values), attempts))
	case !p.cut.valid:
		err := m.exec(ctx, "check the end of partition "+p.Name, m.bounded(m.patience())+fill(log, sqlValidate, values), attempts)
		if err != nil {
			return err
		}
		return pause(ctx, m.config.LockTimeout) // who had to wait for the announcement goes first
	default:
		end = p.cut.bound
	}
	spans, err := state.spans(end, 0, m.config.Ahead)
	if err != nil {
		return err
	}
	var partitions strings.Builder
	var made []string
	for _, s := range spans {
		partitions.WriteString(s.sql(log))
		made = append(made, s.name(log))
	}
	values["end"], values["partitions"] = end, partitions.String()
	if p.From > math.MinInt64 {
		values["from"] = p.From
	}
	if err := m.exec(ctx, "cut partition "+p.Name, yield+exclusive+fill(log, sqlCut, values), attempts); err != nil {
		return hint(err)
	}
	m.done.CutAt, m.done.Made = end, append(m.done.Made, made...)
	m.logger.Info("event log retention cut the log into partitions", m.fields(map[string]any{"partition": p.Name, "end": end}))
	return nil
}

// hint says what an operator can do where rounds leave no moment.
func hint(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && lockMissed(err) {
		return fmt.Errorf("%w: it needs a moment in which no round is open for longer than LockTimeout; it is tried again, "+
			"and pausing the consumers for a moment helps", err)
	}
	return err
}
