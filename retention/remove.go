package retention

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

const sqlNewest = `select max(l.recorded_at) from only {table} l`

const sqlDecide = `
insert into public.event_retention_removals (name, first_seq, last_seq, newest_at, behind, removed_by)
values ($1, $2, $3, $4, $5, $6)
on conflict (name) do update
set first_seq = excluded.first_seq, last_seq = excluded.last_seq, newest_at = excluded.newest_at, behind = excluded.behind,
    decided_at = excluded.decided_at, removed_at = null, removed_by = excluded.removed_by`

const (
	sqlDetach   = `alter table public.event_log detach partition {table} concurrently`
	sqlFinalize = `alter table public.event_log detach partition {table} finalize`
)

// remove takes the lowest partition away, if it may go.
func (m *maintenance) remove(ctx context.Context, state *State) (removed bool, err error) {
	p, behind := state.removable()
	if p == nil {
		return false, nil
	}
	// The clock may have been set back: the last event need not be the newest.
	newest, known := m.newest[p.Name]
	if !known {
		if newest, err = m.newestOf(ctx, p); err != nil {
			return false, err
		}
		m.newest[p.Name] = newest
	}
	if !newest.Before(state.expiredBefore) {
		return false, nil
	}
	if behind == nil {
		behind = []string{}
	}
	first := p.First
	if first == 0 {
		first = max(1, p.From)
	}
	_, err = m.conn.Exec(ctx, m.config.Log.Render(sqlDecide), p.Name, first, p.To-1, nullable(newest), behind, m.config.By)
	if err != nil {
		return false, fmt.Errorf("decide on partition %s: %w", p.Name, err)
	}
	if len(behind) > 0 {
		m.logger.Error("event log retention removes events that consumers have not passed", errors.New("a cap was reached"),
			m.fields(map[string]any{"first_seq": first, "last_seq": p.To - 1, "consumers": behind}))
	}
	if err := m.detach(ctx, p, sqlDetach); err != nil {
		return false, err
	}
	delete(m.newest, p.Name)
	return true, m.clear(ctx, leftover{name: p.Name, first: first, last: p.To - 1, table: true})
}

func nullable(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func (m *maintenance) newestOf(ctx context.Context, p *Partition) (time.Time, error) {
	var newest *time.Time
	err := m.conn.QueryRow(ctx, fill(m.config.Log, sqlNewest, map[string]any{"table": p.table()})).Scan(&newest)
	if err != nil {
		return time.Time{}, fmt.Errorf("find the newest event of partition %s: %w", p.Name, err)
	}
	return orZero(newest), nil
}

// detach waits for the rounds and appends that are open; nobody waits for it. What the session's lock timeout has
// interrupted is finished by the next maintenance.
func (m *maintenance) detach(ctx context.Context, p *Partition, sql string) error {
	return m.exec(ctx, "detach partition "+p.Name, fill(m.config.Log, sql, map[string]any{"table": p.table()}), 1)
}

// leftover is a removal that was decided on and is not over.
type leftover struct {
	name        string
	first, last int64
	attached    bool
	table       bool // the table is still there
}

const sqlLeftovers = `
select r.name, r.first_seq, r.last_seq, coalesce(c.relispartition, false), c.oid is not null
from public.event_retention_removals r
left join pg_class c on c.relname = r.name and c.relnamespace = (select p.relnamespace from pg_class p where p.oid = $1::regclass)
where r.removed_at is null
order by r.first_seq`

const sqlForget = `delete from public.event_retention_removals r where r.name = $1 and r.removed_at is null`

// finish carries on with what an earlier maintenance had begun. It tells whether the partitions are others now.
func (m *maintenance) finish(ctx context.Context, state *State) (changed bool, err error) {
	rows, _ := m.conn.Query(ctx, m.config.Log.Render(sqlLeftovers), m.config.Log.Table("log"))
	leftovers, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (l leftover, err error) {
		err = row.Scan(&l.name, &l.first, &l.last, &l.attached, &l.table)
		return l, err
	})
	if err != nil {
		return changed, fmt.Errorf("read removals: %w", err)
	}
	// While one is pending no other partition can be detached, whoever had begun it.
	if at := slices.IndexFunc(state.Partitions, func(p Partition) bool { return p.Detaching }); at >= 0 {
		p := &state.Partitions[at]
		if err := m.detach(ctx, p, sqlFinalize); err != nil {
			return changed, err
		}
		ours := false
		changed = true
		for i := range leftovers {
			if leftovers[i].name == p.Name {
				leftovers[i].attached, ours = false, true
			}
		}
		if !ours {
			m.logger.Info("event log retention finished a detach that somebody else had begun, and left the table",
				m.fields(map[string]any{"partition": p.Name}))
		}
	}
	for _, l := range leftovers {
		if !l.attached {
			if err := m.clear(ctx, l); err != nil {
				return changed, err
			}
			continue
		}
		// It was not begun: what has changed since may keep it.
		if _, err := m.conn.Exec(ctx, m.config.Log.Render(sqlForget), l.name); err != nil {
			return changed, fmt.Errorf("forget the removal of %s: %w", l.name, err)
		}
	}
	return changed, nil
}

// The ids are found through the events, as they have no index by number.
const sqlForgetIDs = `
delete from public.event_ids i using {table} l
where l.seq >= $1 and l.seq < $2 and i.id = l.uuid and i.seq = l.seq`

const sqlDrop = `drop table if exists {table}`

const idsBatch = 10_000

const sqlRemoved = `
update public.event_retention_removals r set removed_at = clock_timestamp(), removed_by = $2 where r.name = $1`

// clear removes a detached partition with the ids of its events.
func (m *maintenance) clear(ctx context.Context, l leftover) error {
	table := map[string]any{"table": pgx.Identifier{m.config.Log.Schema(), l.name}.Sanitize()}
	if l.table {
		var ids bool
		if err := m.conn.QueryRow(ctx, m.config.Log.Render(`select exists (select from public.event_ids)`)).Scan(&ids); err != nil {
			return fmt.Errorf("look for ids: %w", err)
		}
		for from := l.first; ids && from <= l.last; from += idsBatch {
			sql := fill(m.config.Log, sqlForgetIDs, table)
			if _, err := m.conn.Exec(ctx, sql, from, from+idsBatch); err != nil {
				return fmt.Errorf("forget the ids of partition %s: %w", l.name, err)
			}
		}
		bound := m.bounded(m.patience())
		if err := m.exec(ctx, "drop "+l.name, bound+fill(m.config.Log, sqlDrop, table), attempts); err != nil {
			return err
		}
	}
	if _, err := m.conn.Exec(ctx, m.config.Log.Render(sqlRemoved), l.name, m.config.By); err != nil {
		return fmt.Errorf("note the removal of %s: %w", l.name, err)
	}
	m.done.Removed = append(m.done.Removed, l.name)
	m.logger.Info("event log retention removed a partition",
		m.fields(map[string]any{"partition": l.name, "first_seq": l.first, "last_seq": l.last}))
	return nil
}
