package cursor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Start is where a new consumer starts. The zero value is the head. It decides only when the cursor's row is
// created; a cursor that is there goes on where it stands.
type Start struct {
	kind string
	seq  int64
	at   time.Time
}

// FromHead starts a new consumer behind the last event that is committed when its cursor is created.
func FromHead() Start { return Start{} }

// FromBeginning starts a new consumer at the oldest event that the log still holds.
func FromBeginning() Start { return Start{kind: "beginning"} }

// FromSeq starts a new consumer at the event seq, which it handles first.
func FromSeq(seq int64) Start { return Start{kind: "seq", seq: seq} }

// FromTime starts a new consumer at the first event whose OccurredAt is not before t. It reads the log once.
func FromTime(t time.Time) Start { return Start{kind: "time", at: t} }

// Validate returns what is wrong with the start.
func (s Start) Validate() error {
	switch {
	case s.kind == "seq" && s.seq < 1:
		return fmt.Errorf("start at seq %d: the first event has seq 1", s.seq)
	case s.kind == "time" && s.at.IsZero():
		return errors.New("start at the zero time: use FromBeginning")
	}
	return nil
}

func (s Start) String() string {
	switch s.kind {
	case "seq":
		return fmt.Sprintf("seq %d", s.seq)
	case "time":
		return s.at.Format(time.RFC3339Nano)
	case "":
		return "head"
	}
	return s.kind
}

// Place is where a start is in a log, and the log's bounds, seen in one statement.
type Place struct {
	Position int64 // of a cursor that starts there: the number before its first event
	Lowest   int64 // the oldest event that the log still holds; behind the head where it holds none
	Head     int64
}

// The limit tells the estimate that the counter has one row.
const sqlLocate = `
select case $1::text
    when 'seq' then $2::bigint - 1
    when 'beginning' then s.lowest - 1
    when 'time' then coalesce((select min(l.seq) - 1 from public.event_log l where l.occurred_at >= $3::timestamptz), s.last_seq)
    else s.last_seq end, s.lowest, s.last_seq
from (
    select s.last_seq, coalesce((select min(l.seq) from public.event_log l), s.last_seq + 1) as lowest
    from public.event_seq s
    limit 1
) s`

// Locate tells where in the log a reader starts. Whether the log has such an event is for the caller to judge. A time
// reads the log once.
func Locate(ctx context.Context, db Querier, log *Log, start Start) (Place, error) {
	if err := start.Validate(); err != nil {
		return Place{}, err
	}
	rows, _ := db.Query(ctx, log.Render(sqlLocate), start.kind, start.seq, start.at)
	place, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Place])
	if err != nil {
		return Place{}, fmt.Errorf("locate %s: %w", start, log.Explain(err))
	}
	return place, nil
}

// Registration is a cursor that ought to exist, and where it starts if it does not yet.
type Registration struct {
	Key   Key
	Start Start
}

// Created is a cursor whose row Ensure has made.
type Created struct {
	Key      Key
	Position int64 // the last event it counts as passed
}

// Beginner is a pool, a connection or a transaction.
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Querier is a pool, a connection or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// InReadCommitted runs f in a transaction in which each statement sees what was committed before it, whatever the
// database's default is. A transaction that is given keeps its own isolation level.
func InReadCommitted(ctx context.Context, db Beginner, f func(pgx.Tx) error) error {
	if db, ok := db.(interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}); ok {
		return pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, f)
	}
	return pgx.BeginFunc(ctx, db, f)
}

const sqlEnsure = `
with wanted as (
    select consumer, topic, shard, start, seq, at
    from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::timestamptz[])
        as w(consumer, topic, shard, start, seq, at)
), created as (
    insert into public.event_consumer_cursors (consumer, topic, shard, last_seq)
    select w.consumer, w.topic, w.shard, case w.start
        when 'seq' then w.seq - 1
        when 'beginning' then coalesce((select min(l.seq) - 1 from public.event_log l), s.last_seq)
        when 'time' then coalesce((select min(l.seq) - 1 from public.event_log l where l.occurred_at >= w.at), s.last_seq)
        else s.last_seq end
    from wanted w cross join public.event_seq s
    where not exists (
        select from public.event_consumer_interventions i
        where i.consumer = w.consumer and i.topic = w.topic and i.shard = w.shard and i.action = 'create')
    order by 1, 2, 3
    on conflict do nothing
    returning consumer, topic, shard, last_seq
), noted as (
    insert into public.event_consumer_interventions (consumer, topic, shard, action, to_seq, by)
    select consumer, topic, shard, 'create', last_seq, $7 from created
)
select consumer, topic, shard, last_seq from created`

const sqlEnsureBounds = `
select set_config('idle_in_transaction_session_timeout', '30s', true), set_config('statement_timeout', '30s', true),
    set_config('tcp_user_timeout', '30s', true)`

const sqlMissing = `
select w.consumer, w.topic, w.shard
from unnest($1::text[], $2::text[], $3::text[]) as w(consumer, topic, shard)
where not exists (
    select from public.event_consumer_cursors c
    where c.consumer = w.consumer and c.topic = w.topic and c.shard = w.shard)`

// Ensure makes, in one transaction, the row of every registered cursor that has none and never had one. A
// second process that does the same at the same time ends up with the same rows. A cursor that is on record
// as created but has no row is [ErrCursorMissing]; the others are made all the same.
func Ensure(ctx context.Context, db Beginner, log *Log, by string, registrations []Registration) ([]Created, error) {
	var consumers, topics, shards, starts []string
	var seqs []int64
	var times []time.Time
	for _, r := range registrations {
		if err := errors.Join(r.Key.Validate(), r.Start.Validate()); err != nil {
			return nil, fmt.Errorf("register cursor %q: %w", r.Key, err)
		}
		consumers, topics, shards = append(consumers, r.Key.Consumer), append(topics, r.Key.Topic), append(shards, r.Key.Shard)
		starts, seqs, times = append(starts, r.Start.kind), append(seqs, r.Start.seq), append(times, r.Start.at)
	}

	var created []Created
	var missing []Key
	err := InReadCommitted(ctx, db, func(tx pgx.Tx) error {
		// Others wait for the rows that this transaction inserts: it must not last when its process is frozen.
		if err := exec(ctx, tx, sqlEnsureBounds); err != nil {
			return err
		}
		if err := log.checkTable(ctx, tx); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, log.Render(sqlEnsure), consumers, topics, shards, starts, seqs, times, by)
		var err error
		created, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (c Created, err error) {
			err = row.Scan(&c.Key.Consumer, &c.Key.Topic, &c.Key.Shard, &c.Position)
			return c, err
		})
		if err != nil {
			return err
		}
		rows, _ = tx.Query(ctx, log.Render(sqlMissing), consumers, topics, shards)
		missing, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (k Key, err error) {
			err = row.Scan(&k.Consumer, &k.Topic, &k.Shard)
			return k, err
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("register cursors: %w", log.Explain(err))
	}
	if len(missing) > 0 {
		return created, fmt.Errorf("%w: %v: it was created once and its row in %s is gone; restore the row, or delete its "+
			"creation from %s to let it start anew", ErrCursorMissing, missing, log.Table("consumer_cursors"),
			log.Table("consumer_interventions"))
	}
	return created, nil
}
