package cursor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Limits bound what one round reads. All must be positive.
type Limits struct {
	Events int   // events handed out
	Bytes  int64 // bytes of their payloads; one event is handed out however large it is
	Cover  int   // numbers covered, with those of other topics
}

// RoundConfig says whose turn a round is.
type RoundConfig struct {
	Log    *Log
	Key    Key
	By     string // the instance, recorded with each move
	ID     string // of this round, unique among the rounds of its log
	Limits Limits

	// Bound is how long the server lets the unit be idle, run one statement, or wait for a client that does
	// not answer, before it ends the unit by itself. So a frozen process loses its lock.
	Bound time.Duration

	// Suspect is an event that failed before, where that could not be recorded: the round ends before it, or holds
	// it alone. 0 is none.
	Suspect int64

	// MaxWait is the longest that the cursor's failure may ask for: more than that is a clock that was set. 0 is
	// no bound.
	MaxWait time.Duration

	// ParkAfter is after how many failed attempts an event is parked. 0 is never: the consumer stands still.
	ParkAfter int

	// ResumeAge is how old both the next event and the cursor's last move must be for the consumer to go on at the
	// head instead. 0 is never.
	ResumeAge time.Duration
}

// Status is what a round found when it was opened.
type Status int

const (
	// Locked means that somebody else holds the cursor. An everyday outcome.
	Locked Status = iota
	// Waiting means that the cursor's failure asks for more time before the next attempt.
	Waiting
	// CaughtUp means that there is nothing after the cursor.
	CaughtUp
	// Ready means that events were read, or numbers that need none handed out.
	Ready
	// Lost means that the events up to Through are gone, or too old to be wanted.
	Lost
	// Parking means that the one event has failed often enough: Commit parks it.
	Parking
	// Replaying means that the one event was parked and is to be tried again.
	Replaying
)

// Opening is what a round found under its lock.
type Opening struct {
	Status   Status
	Position int64    // the last event passed
	Events   []Event  // the consumer's own, in order
	Through  int64    // Ready, Lost: the last number that the round covers
	Full     bool     // the batch was ended by one of its bounds and not by the end of the log
	Failure  *Failure // the cursor's standing failure
	Wait     time.Duration
	Reason   string // Lost: "retention" or "resume_age"
	Replay   bool   // the replay of a parked event is asked for

	throughAt *time.Time // when the event Through occurred
}

// Round is one turn of a cursor, from its lock to its commit or rollback. It is for one goroutine; the
// units that it hands out may be used from another one.
type Round struct {
	conn             *pgx.Conn
	config           RoundConfig
	session          session
	searchPath, role string // of the session: a handler may have changed them for the rest of the unit

	tx      pgx.Tx // never ended: the round ends its transaction by statements of its own
	opening Opening
	handed  *Unit
	matched int64 // the last event that was handled
	items   map[Flusher][]Item
	owners  []Flusher // in the order of their first item
	cleared bool
	used    bool // a handler took the transaction

	mark      mark // what Mark writes
	marked    bool
	parkedFor string // Parking: the error type
	replaying int64  // Replaying: the event
}

// NewRound prepares a turn on a connection that nobody else uses meanwhile.
func NewRound(conn *pgx.Conn, config RoundConfig) *Round {
	r := &Round{conn: conn, config: config}
	r.session.init(conn)
	return r
}

const sqlSettings = `
select set_config('eventlog.unit', $1, true), set_config('eventlog.log', $3, true),
    set_config('idle_in_transaction_session_timeout', $2, true),
    set_config('statement_timeout', $2, true),
    set_config('tcp_user_timeout', $2, true),
    set_config('DateStyle', 'ISO', true), set_config('bytea_output', 'hex', true),
    current_setting('search_path'), current_setting('role')`

const sqlLock = `
select c.last_seq from public.event_consumer_cursors c
where c.consumer = $1 and c.topic = $2 and c.shard = $3
for update skip locked`

const sqlExists = `
select exists (
    select from public.event_consumer_cursors c where c.consumer = $1 and c.topic = $2 and c.shard = $3)`

// The position is read again here, under the lock that is already held: this statement's snapshot is later
// than the lock's, so the log is at least as new as the cursor. Without the lock it reads nothing.
const sqlReadFrom = `
with c as materialized (
    select c.last_seq,
        least(c.last_seq + $4, case
            when coalesce(f.seq, $9) > c.last_seq + 1 then coalesce(f.seq, $9) - 1
            when coalesce(f.seq, $9) = c.last_seq + 1 then coalesce(f.seq, $9)
            else 9223372036854775807 end) as upto,
        least($5,
            case when f.seq is null and f.through > c.last_seq then f.batch end,
            case when $7 and m.through > c.last_seq and (m.slow or m.marked_by <> $8) then 1 end) as events
    from public.event_consumer_cursors c
    left join public.event_consumer_failures f on f.consumer = c.consumer and f.topic = c.topic and f.shard = c.shard
    left join public.event_consumer_marks m on m.consumer = c.consumer and m.topic = c.topic and m.shard = c.shard
    where c.consumer = $1 and c.topic = $2 and c.shard = $3
    for update of c skip locked
)`

const sqlReadAll = sqlReadFrom + `
select b.seq, b.occurred_at, b.recorded_at, b.topic, coalesce(b.key, ''), b.uuid, b.payload, b.metadata::text
from c cross join lateral (
    select l.*, sum(octet_length(l.payload)) over (order by l.seq rows unbounded preceding) - octet_length(l.payload) as before
    from public.event_log l
    where l.seq > c.last_seq and l.seq <= c.upto
    order by l.seq
    limit c.events
) b
where b.before < $6
order by b.seq`

// A consumer of one topic proves that no number is missing, too, but gets its own events only. Where they
// were cut by a bound, the proof ends with the last of them.
const sqlReadTopic = sqlReadFrom + `, own as materialized (
    select b.* from c cross join lateral (
        select l.*, sum(octet_length(l.payload)) over (order by l.seq rows unbounded preceding) - octet_length(l.payload) as before
        from public.event_log l
        where l.seq > c.last_seq and l.seq <= c.upto and l.topic = $2
        order by l.seq
        limit c.events
    ) b
    where b.before < $6
), cut as (
    select count(*) >= (select c.events from c) or coalesce(sum(octet_length(own.payload)), 0) >= $6 as full, max(own.seq) as last
    from own
), proof as (
    select max(n.seq) as through, bool_and(n.in_order) as in_order
    from (
        select l.seq, l.seq - row_number() over (order by l.seq) = c.last_seq as in_order
        from c, cut, public.event_log l
        where l.seq > c.last_seq and l.seq <= case when cut.full then cut.last else c.upto end
    ) n
)
select proof.through, proof.in_order, cut.full or proof.through = c.last_seq + $4,
    (select l.occurred_at from public.event_log l where l.seq = proof.through limit 1),
    own.seq, own.occurred_at, own.recorded_at, own.topic, coalesce(own.key, ''), own.uuid, own.payload, own.metadata::text
from c cross join cut cross join proof left join own on true
order by own.seq`

const sqlVerify = `
select s.last_seq, coalesce((select min(l.seq) from public.event_log l), 0),
    array(select l.seq from public.event_log l where l.seq > $1 order by l.seq limit $2)
from public.event_seq s`

// Open begins the unit, locks the cursor and reads a batch, in one trip where nothing is amiss. After an
// error or a Status other than Ready, Parking and Lost the round must be rolled back.
func (r *Round) Open(ctx context.Context) (*Opening, error) {
	log, key, o := r.config.Log, r.config.Key, &r.opening
	var found state
	locked, err := r.begin(ctx, func(batch *pgx.Batch) {
		batch.Queue(log.Render(sqlState), key.Consumer, key.Topic, key.Shard, r.config.ResumeAge.Seconds())
		readSQL, readArgs := r.read()
		batch.Queue(readSQL, readArgs...)
	}, func(results pgx.BatchResults) (err error) {
		if found, err = scanState(results.QueryRow()); err != nil {
			return fmt.Errorf("read state: %w", err)
		}
		rows, _ := results.Query()
		if err := r.take(rows); err != nil {
			return fmt.Errorf("read batch: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, explainMissingTables(log, err)
	}
	if !locked {
		o.Status = Locked
		return o, r.mustExist(ctx)
	}
	o.Failure, o.Replay = found.failure, found.replay
	f := o.Standing()
	switch {
	case found.rewritten, f != nil && f.ErrorType == (*AheadError)(nil).ErrorType():
		// It stays until an operator moves the cursor, also when the head has caught up.
		return nil, &AheadError{Position: o.Position}
	case found.stale:
		return o, r.skipToHead(ctx)
	}
	if r.config.ParkAfter > 0 {
		r.mark = r.newMark(found.mark)
	}
	park := r.mustPark(f, found.mark)
	if f != nil && f.Wait > 0 && (r.config.MaxWait == 0 || f.Wait <= r.config.MaxWait) && (f.Seq == 0 || f.Seq == o.Position+1) && !park {
		o.Status, o.Wait = Waiting, f.Wait
		return o, nil
	}
	if err := r.prove(ctx); err != nil {
		return nil, err
	}
	if park && o.Status == Ready {
		o.Status = Parking
	}
	r.mark.through = max(r.mark.through, o.Through)
	o.Full = o.Full || r.mark.slow
	return o, nil
}

// Standing is the cursor's failure, if the cursor has not passed it yet.
func (o *Opening) Standing() *Failure {
	if o.Failure == nil || o.Failure.Through <= o.Position {
		return nil
	}
	return o.Failure
}

// mustPark tells whether the event at the head of the batch has failed often enough.
func (r *Round) mustPark(f *Failure, m *mark) bool {
	events, n := r.opening.Events, r.config.ParkAfter
	if n <= 0 || len(events) == 0 {
		return false
	}
	if f != nil && f.Seq == events[0].Seq && (f.Permanent || f.Attempts >= n) {
		r.parkedFor = f.ErrorType
		return true
	}
	if r.mark.slow && m.deathsAt(events[0].Seq, r.config.By) >= max(n, minDeaths) {
		r.parkedFor = "internal"
		return true
	}
	return false
}

// Parked is the event that a round with Status Parking parks, why, and after how many attempts.
func (r *Round) Parked() (seq int64, errorType string, attempts int) {
	seq = r.opening.Events[0].Seq
	if f := r.opening.Standing(); f != nil && f.Seq == seq {
		return seq, r.parkedFor, f.Attempts
	}
	return seq, r.parkedFor, r.mark.deaths - 1
}

// skipToHead plans to leave out what is older than the resume age.
func (r *Round) skipToHead(ctx context.Context) error {
	o := &r.opening
	if err := r.conn.QueryRow(ctx, r.config.Log.Render("select s.last_seq from public.event_seq s")).Scan(&o.Through); err != nil {
		return fmt.Errorf("read head: %w", err)
	}
	o.Status, o.Reason, o.Events, o.throughAt = Lost, "resume_age", nil, nil
	return nil
}

// begin begins the unit, locks the cursor, and runs what else belongs in the same trip. Without the lock nothing
// else is read.
func (r *Round) begin(ctx context.Context, queue func(*pgx.Batch), read func(pgx.BatchResults) error) (locked bool, err error) {
	log, key := r.config.Log, r.config.Key
	bound := fmt.Sprintf("%dms", r.config.Bound.Milliseconds())
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	batch.Queue(sqlSettings, r.config.ID, bound, log.Schema()+"."+log.Name())
	batch.Queue(log.Render(sqlLock), key.Consumer, key.Topic, key.Shard)
	queue(batch)

	results := r.conn.SendBatch(ctx, batch)
	defer func() { err = errors.Join(err, results.Close()) }()
	if r.tx = results.(interface{ Tx() pgx.Tx }).Tx(); r.tx == nil {
		return false, errors.New("begin unit: no transaction")
	}
	if _, err := results.Exec(); err != nil {
		return false, fmt.Errorf("begin unit: %w", err)
	}
	settings := []any{nil, nil, nil, nil, nil, nil, nil, &r.searchPath, &r.role}
	if err := results.QueryRow().Scan(settings...); err != nil {
		return false, fmt.Errorf("set up unit: %w", err)
	}
	switch err := results.QueryRow().Scan(&r.opening.Position); {
	case errors.Is(err, pgx.ErrNoRows):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("lock cursor: %w", err)
	}
	return true, read(results)
}

// prove decides what may be done with what was read. The short path believes numbers that follow each other
// from the position; anything else is read again, whole and in one statement, and planned on that.
func (r *Round) prove(ctx context.Context) error {
	o := &r.opening
	for range 3 {
		if o.Through > o.Position {
			o.Status = Ready
			return nil
		}
		var head, lowest int64
		var numbers []int64
		err := r.conn.QueryRow(ctx, r.config.Log.Render(sqlVerify), o.Position, max(r.config.Limits.Cover, r.config.Limits.Events)).
			Scan(&head, &lowest, &numbers)
		if err != nil {
			return fmt.Errorf("verify batch: %w", err)
		}
		plan, err := PlanRound(o.Position, numbers, lowest, head)
		if err != nil {
			return err
		}
		switch plan.Kind {
		case Idle:
			o.Status = CaughtUp
			return nil
		case Loss:
			o.Status, o.Through, o.Reason = Lost, plan.Through, "retention"
			return nil
		}
		// Events were committed between the two statements: read them.
		readSQL, readArgs := r.read()
		rows, _ := r.conn.Query(ctx, readSQL, readArgs...)
		if err := r.take(rows); err != nil {
			return fmt.Errorf("read batch: %w", err)
		}
	}
	return &GapError{Seq: o.Position + 1, Reason: "what is read after the cursor differs from one statement to the next"}
}

func (r *Round) mustExist(ctx context.Context) error {
	var exists bool
	key := r.config.Key
	err := r.conn.QueryRow(ctx, r.config.Log.Render(sqlExists), key.Consumer, key.Topic, key.Shard).Scan(&exists)
	switch {
	case err != nil:
		return fmt.Errorf("look for cursor: %w", err)
	case !exists:
		return fmt.Errorf("%w: %q has no row in %s", ErrCursorMissing, key, r.config.Log.Table("consumer_cursors"))
	}
	return nil
}

func (r *Round) read() (string, []any) {
	sql := sqlReadAll
	if r.config.Key.Topic != "" {
		sql = sqlReadTopic
	}
	limits := r.config.Limits
	return r.config.Log.Render(sql), []any{
		r.config.Key.Consumer, r.config.Key.Topic, r.config.Key.Shard, int64(limits.Cover), int64(limits.Events), limits.Bytes,
		r.config.ParkAfter > 0, r.config.By, r.config.Suspect,
	}
}

// take reads a batch's rows into the opening. Through is left at 0 where the numbers do not follow each
// other from the position.
func (r *Round) take(rows pgx.Rows) error {
	defer rows.Close()
	o := &r.opening
	o.Events, o.Through, o.Full, o.throughAt = o.Events[:0], 0, false, nil
	if r.config.Key.Topic == "" {
		return r.takeAll(rows)
	}
	return r.takeTopic(rows)
}

func (r *Round) takeAll(rows pgx.Rows) error {
	o := &r.opening
	inOrder, bytes := true, int64(0)
	for rows.Next() {
		var e Event
		var metadata []byte
		if err := rows.Scan(&e.Seq, &e.OccurredAt, &e.RecordedAt, &e.Topic, &e.Key, &e.UUID, &e.Payload, &metadata); err != nil {
			return &UnreadableError{Seq: e.Seq, Err: err}
		}
		if err := json.Unmarshal(metadata, &e.Metadata); err != nil {
			return &UnreadableError{Seq: e.Seq, Err: err}
		}
		inOrder = inOrder && e.Seq == o.Position+1+int64(len(o.Events))
		bytes += int64(len(e.Payload))
		o.Events = append(o.Events, e)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if n := len(o.Events); n > 0 && inOrder {
		last := &o.Events[n-1]
		o.Through, o.throughAt = last.Seq, &last.OccurredAt
		o.Full = n >= r.config.Limits.Events || bytes >= r.config.Limits.Bytes || n >= r.config.Limits.Cover
	}
	return nil
}

func (r *Round) takeTopic(rows pgx.Rows) error {
	o := &r.opening
	var through *int64
	var inOrder *bool
	for rows.Next() {
		var full *bool
		var seq *int64
		var occurred, recorded *time.Time
		var topic, key, uuid *string
		var payload, metadata []byte
		if err := rows.Scan(&through, &inOrder, &full, &o.throughAt, &seq, &occurred, &recorded, &topic, &key, &uuid, &payload, &metadata); err != nil {
			if seq == nil {
				return err
			}
			return &UnreadableError{Seq: *seq, Err: err}
		}
		o.Full = full != nil && *full
		if seq == nil {
			continue // nothing of this topic
		}
		e := Event{Seq: *seq, OccurredAt: *occurred, RecordedAt: *recorded, Topic: *topic, Key: *key, UUID: *uuid, Payload: payload}
		if err := json.Unmarshal(metadata, &e.Metadata); err != nil {
			return &UnreadableError{Seq: e.Seq, Err: err}
		}
		o.Events = append(o.Events, e)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if through != nil && *inOrder {
		o.Through = *through
	}
	return nil
}

// What a handler has set for the rest of the transaction must not steer what the library does in it, nor the next
// event's handler.
const sqlRestore = `select set_config('search_path', $1, true), set_config('role', $2, true)`

// restore puts back what handlers are known to have changed.
func (r *Round) restore(ctx context.Context) error {
	if !r.session.takeChanged() {
		return nil
	}
	if _, err := r.conn.Exec(ctx, sqlRestore, r.searchPath, r.role); err != nil {
		return fmt.Errorf("restore search_path and role: %w", err)
	}
	return nil
}

// Hand makes the unit for one of the opening's events. The one before must have been ended.
func (r *Round) Hand(event *Event) *Unit {
	attempt := 1
	if f := r.opening.Failure; f != nil && f.Seq == event.Seq {
		attempt = f.Attempts + 1
	}
	r.handed = &Unit{round: r, event: event, attempt: attempt}
	return r.handed
}

// End ends the unit that was handed out last: from here on its handle is dead. It returns why the round must
// fail, if it must: the message was nacked, the handler's failure was recorded on the unit, or the
// transaction is not as it should be.
func (r *Round) End(ctx context.Context, acked bool) error {
	u := r.handed
	buffered, recorded := r.session.seal(u)
	if err := r.session.state(u, acked); err != nil {
		if recorded != nil {
			return recorded
		}
		return err
	}
	switch {
	case recorded != nil:
		return recorded
	case !acked:
		return ErrNacked
	}
	if err := r.restore(ctx); err != nil {
		return err
	}
	for _, b := range buffered {
		if r.items == nil {
			r.items = map[Flusher][]Item{}
		}
		if _, known := r.items[b.owner]; !known {
			r.owners = append(r.owners, b.owner)
		}
		r.items[b.owner] = append(r.items[b.owner], Item{Seq: u.event.Seq, Value: b.value})
	}
	r.matched = u.event.Seq
	return nil
}

const sqlMove = `
with moved as (
    update public.event_consumer_cursors c set
        last_seq = $5::bigint,
        last_occurred_at = coalesce($6::timestamptz, c.last_occurred_at),
        occurred_seq = case when $6::timestamptz is null then c.occurred_seq else $5::bigint end,
        matched_seq = coalesce(nullif($7::bigint, 0), c.matched_seq),
        matched_at = case when $7::bigint > 0 then clock_timestamp() else c.matched_at end,
        moved_at = clock_timestamp(),
        moved_by = $8::text
    where c.consumer = $1 and c.topic = $2 and c.shard = $3 and c.last_seq = $4::bigint
        and current_setting('eventlog.unit', true) = $9::text
    returning 1
)
select 1 / count(*) from moved` // no row moved: division by zero, so that the COMMIT behind it in the trip commits nothing

const sqlRecordLoss = `
insert into public.event_consumer_losses as l (consumer, topic, shard, first_seq, last_seq, recorded_by, reason)
values ($1, $2, $3, $4, $5, $6, $7)
on conflict (consumer, topic, shard, first_seq) do update set
    last_seq = greatest(l.last_seq, excluded.last_seq), reason = excluded.reason, recorded_at = clock_timestamp(), recorded_by = excluded.recorded_by,
    settled_at = null, settled_by = null`

// Commit writes what was buffered, parks the event of a Parking round, records a loss, moves the cursor to through and commits, in one trip. Through is the
// opening's Through, or, to commit a prefix, the seq of the last event whose unit ended well.
//
// After an error the round must be rolled back. If the connection was lost while the COMMIT was under way,
// its outcome is not known; the next round finds out, as it reads the position under the lock.
func (r *Round) Commit(ctx context.Context, through int64) error {
	for _, owner := range r.owners {
		if p, ok := owner.(Preparer); ok {
			if err := p.Prepare(ctx, r.tx, r.items[owner]); err != nil {
				return err
			}
		}
	}
	trip := &Trip{}
	if r.used {
		trip.Queue(nil, sqlRestore, r.searchPath, r.role)
	}
	for _, owner := range r.owners {
		if err := owner.Flush(trip, r.items[owner]); err != nil {
			return err
		}
	}
	r.queueMove(trip, through)

	for _, owner := range r.owners {
		relay, ok := owner.(Relayer)
		if !ok {
			continue
		}
		if err := trip.send(ctx, r.conn); err != nil {
			return err
		}
		trip = &Trip{}
		if err := relay.BeforeCommit(ctx, r.items[owner]); err != nil {
			return err
		}
	}
	trip.Queue(func(err error) error { return fmt.Errorf("commit: %w", err) }, "commit")
	tag, err := trip.sendForTag(ctx, r.conn)
	if err == nil && tag == "ROLLBACK" {
		err = fmt.Errorf("commit: %w", pgx.ErrTxCommitRollback)
	}
	return err
}

func (r *Round) queueMove(trip *Trip, through int64) {
	log, key, o := r.config.Log, r.config.Key, &r.opening
	switch o.Status {
	case Replaying:
		trip.Queue(explainEndReplay, log.Render(sqlEndReplay), key.Consumer, key.Topic, key.Shard, r.replaying, r.config.ID)
		return
	case Lost:
		trip.Queue(nil, log.Render(sqlRecordLoss), key.Consumer, key.Topic, key.Shard, o.Position+1, through, r.config.By, o.Reason)
	case Parking:
		seq, errorType, attempts := r.Parked()
		trip.Queue(nil, log.Render(sqlPark), key.Consumer, key.Topic, key.Shard, seq, errorType, attempts, r.config.By)
	}
	occurred := o.throughAt
	if through != o.Through {
		for i := range o.Events {
			if o.Events[i].Seq == through {
				occurred = &o.Events[i].OccurredAt
			}
		}
	}
	trip.Queue(explainMove, log.Render(sqlMove), key.Consumer, key.Topic, key.Shard, o.Position, through, occurred, r.matched,
		r.config.By, r.config.ID)
	if o.Failure != nil && o.Failure.Through <= through {
		r.cleared = true
		trip.Queue(nil, log.Render(sqlClearFailure), key.Consumer, key.Topic, key.Shard, through)
	}
	if r.config.ParkAfter > 0 {
		if r.mark.slow {
			trip.Queue(nil, log.Render(sqlSettleMark), key.Consumer, key.Topic, key.Shard)
		}
		trip.Queue(nil, log.Render(sqlDropMark), key.Consumer, key.Topic, key.Shard, through)
	}
}

func explainEndReplay(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "22012" { // division_by_zero
		return ErrNotParked
	}
	return fmt.Errorf("end replay: %w", err)
}

func explainMove(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "22012" { // division_by_zero
		return ErrCursorMoved
	}
	return fmt.Errorf("move cursor: %w", err)
}

// ClearPassed ends a failure that the cursor had passed before it was written down, and returns it. The round must
// have been rolled back, and its connection be whole.
func (r *Round) ClearPassed(ctx context.Context) (*Failure, error) {
	f, key := r.opening.Failure, r.config.Key
	if f == nil || f.Through > r.opening.Position || !r.session.settle() {
		return nil, nil
	}
	tag, err := r.conn.Exec(ctx, r.config.Log.Render(sqlClearFailure), key.Consumer, key.Topic, key.Shard, r.opening.Position)
	if err != nil || tag.RowsAffected() == 0 {
		return nil, err
	}
	return f, nil
}

// Recovered is the failure that a committed round has passed, or nil.
func (r *Round) Recovered() *Failure {
	if r.cleared {
		return r.opening.Failure
	}
	return nil
}

// Rollback ends a round that was not committed. A unit that is still out is dead from here on; a statement
// that is still running on it ends with the connection.
func (r *Round) Rollback(ctx context.Context) {
	if r.handed != nil {
		_, _ = r.session.seal(r.handed)
	}
	if !r.session.settle() {
		r.session.abandon(ctx)
		return
	}
	if r.conn.PgConn().TxStatus() == 'I' {
		return
	}
	if _, err := r.conn.Exec(ctx, "rollback"); err != nil {
		r.session.abandon(ctx)
	}
}

// Leaked tells whether somebody stays inside the connection although its round was given up. It must not be
// given back then, nor closed: its socket is.
func (r *Round) Leaked() bool {
	r.session.mu.Lock()
	defer r.session.mu.Unlock()
	return r.session.leaked
}

// Release closes the connection if it must not be used by others: because a handler left something on it, or
// because a transaction is still open. Otherwise the connection is as it was before the round.
func (r *Round) Release(ctx context.Context) {
	if r.session.spoiled() || r.conn.PgConn().TxStatus() != 'I' {
		r.session.abandon(ctx)
	}
}
