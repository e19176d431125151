package cursor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
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

	// Bounded tells that the last round has failed, or has found a failure: what stands beside the cursor bounds what is
	// read. Without it such a round reads its batch a second time.
	Bounded bool

	// Suspect is an event that failed before, where that could not be recorded: the round ends before it, or holds
	// it alone. 0 is none.
	Suspect int64

	// MaxWait is the longest that the cursor's failure may ask for: more than that is a clock that was set. 0 is
	// no bound.
	MaxWait time.Duration

	// ParkAfter is after how many failed attempts an event is parked. 0 is never: the consumer stands still.
	ParkAfter int

	// MayStage lets the unit append staged events to the log that it reads, which take no number in it.
	MayStage bool

	// Record is how many of the cursor's last rounds are kept on record. 0 is none.
	Record int

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
	// Held means that an operator has paused or retired the cursor.
	Held
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
	beside    bool       // of a chained round: something stands beside the cursor that the next round has to look at
}

// Round is one turn of a cursor, from its lock to its commit or rollback. It is for one goroutine; the
// units that it hands out may be used from another one.
type Round struct {
	conn             *pgx.Conn
	config           RoundConfig
	session          session
	text             bool   // values are read as text
	searchPath, role string // of the session: a handler may have changed them for the rest of the unit

	tx      pgx.Tx   // never ended: the round ends its transaction by statements of its own
	pending *pending // of a chained round: the trip that commits its predecessor and begins it
	ahead   *batch   // of a chained round: what its successor will hand out
	opening Opening
	handed  *Unit
	matched int64 // the last event that was handled
	handled int   // how many events were
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
	r := &Round{conn: conn, config: config, text: readsText(conn)}
	r.session.init(conn)
	knowArrays(conn)
	return r
}

// The row is locked, and whatever the round needs to know about its beginning is read with it. The flag tells whether
// something stands beside the cursor that has to be read by itself. What of that was written after this statement's
// snapshot is found by the next round, or by this one where it reads with bounds.
const sqlLock, sqlLockForText = sqlLockSettings + sqlLockFrom, sqlLockSettings + sqlTextSettings + sqlLockFrom

const sqlLockSettings = `
select c.last_seq, c.paused_at is not null or c.retired_at is not null,
    exists (
        select from public.event_consumer_failures f
        where f.consumer = c.consumer and f.topic = c.topic and f.shard = c.shard)
    or exists (
        select from public.event_consumer_parked p
        where p.consumer = c.consumer and p.topic = c.topic and p.shard = c.shard and p.replay_at is not null)
    or coalesce((
        select l.occurred_at <> c.last_occurred_at
        from public.event_log l where l.seq = c.last_seq and c.last_seq = c.occurred_seq limit 1), false),
    current_setting('search_path'), current_setting('role'),
    set_config('eventlog.unit', $4, true), set_config('eventlog.log', $6, true),
    set_config('idle_in_transaction_session_timeout', $5, true),
    set_config('statement_timeout', $5, true),
    set_config('tcp_user_timeout', $5, true), set_config('tcp_keepalives_idle', $7, true),
    set_config('tcp_keepalives_interval', $7, true), set_config('tcp_keepalives_count', '3', true)`

// Where values are read as text, as in some exec modes of pgx, their form is set too.
const sqlTextSettings = `, set_config('DateStyle', 'ISO', true), set_config('bytea_output', 'hex', true)`

const sqlLockFrom = `
from public.event_consumer_cursors c
where c.consumer = $1 and c.topic = $2 and c.shard = $3
for update of c skip locked`

const sqlExists = `
select exists (
    select from public.event_consumer_cursors c where c.consumer = $1 and c.topic = $2 and c.shard = $3)`

const sqlVerify = `
select s.last_seq, coalesce((select min(l.seq) from public.event_log l), 0),
    array(select l.seq from public.event_log l where l.seq > $1 order by l.seq limit $2)
from public.event_seq s`

// Open begins the unit, locks the cursor and reads a batch, in one trip where nothing is amiss. After an
// error or a Status other than Ready, Parking and Lost the round must be rolled back.
func (r *Round) Open(ctx context.Context) (*Opening, error) {
	log, o := r.config.Log, &r.opening
	stateSQL, stateArgs := r.state()
	ask := r.config.ParkAfter > 0 || r.config.ResumeAge > 0
	read := r.read
	bounded := ask || r.config.Bounded || r.config.Suspect > 0
	if bounded {
		read = r.readBounded
	}
	var found state
	hold, err := r.begin(ctx, func(batch *pgx.Batch) {
		if ask {
			batch.Queue(stateSQL, stateArgs...)
		}
		readSQL, readArgs := read()
		batch.Queue(readSQL, readArgs...)
	}, func(results pgx.BatchResults) (err error) {
		if ask {
			if found, err = scanState(results.QueryRow()); err != nil {
				return err
			}
		}
		rows, _ := results.Query()
		return r.take(rows)
	})
	if hold.beside && !bounded && errors.As(err, new(*UnreadableError)) {
		err = nil // a failure may keep the round away from that event: it is read again
	}
	if err == nil && hold.beside && !hold.held && !ask {
		found, err = scanState(r.conn.QueryRow(ctx, stateSQL, stateArgs...))
		if err == nil && !bounded {
			err = r.readAgain(ctx)
		}
	}
	switch {
	case err != nil:
		return nil, log.Explain(err)
	case !hold.locked:
		o.Status = Locked
		return o, r.mustExist(ctx)
	case hold.held:
		o.Status = Held
		return o, nil
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
	// The batch and the state were read by two statements: a failure's record or a mark that came between the two must
	// not make the batch longer than what is decided on. (One that came behind both is found by the next round.)
	if o.Status == Ready {
		switch {
		case park:
			o.Status = Parking
			o.cut(1)
		case r.mark.slow:
			o.cut(1)
		case f != nil && f.Seq > 0:
			o.cutBefore(f.Seq)
		case f != nil && f.Batch > 0:
			o.cut(f.Batch)
		}
	}
	r.mark.through = max(r.mark.through, o.Through)
	o.Full = o.Full || r.mark.slow
	return o, nil
}

// cutBefore leaves of the batch what comes before a seq, or that event alone.
func (o *Opening) cutBefore(seq int64) {
	for i := range o.Events {
		if o.Events[i].Seq >= seq {
			o.cut(max(i, 1))
			return
		}
	}
}

// cut leaves the first n events of the batch, if it has more.
func (o *Opening) cut(n int) {
	if len(o.Events) > n {
		first, _ := batch{events: o.Events, through: o.Through, throughAt: o.throughAt, full: o.Full}.split(n)
		o.set(first)
	}
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
func (r *Round) begin(ctx context.Context, queue func(*pgx.Batch), read func(pgx.BatchResults) error) (found hold, err error) {
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	r.queueLock(batch)
	queue(batch)

	results := r.conn.SendBatch(ctx, batch)
	defer func() { err = errors.Join(err, results.Close()) }()
	if r.tx = results.(interface{ Tx() pgx.Tx }).Tx(); r.tx == nil {
		return hold{}, errors.New("begin unit: no transaction")
	}
	found, err = r.readLock(results)
	if r.opening.Position = found.position; err != nil || !found.locked || found.held {
		return found, err
	}
	return found, read(results)
}

// queueLock queues, behind a BEGIN, the lock on the cursor and the settings of the unit.
func (r *Round) queueLock(batch *pgx.Batch) {
	log, key := r.config.Log, r.config.Key
	bound := fmt.Sprintf("%dms", r.config.Bound.Milliseconds())
	// A client that has vanished in the middle of a trip is noticed by nothing else than keepalives.
	keepalive := fmt.Sprint(max(1, int(r.config.Bound.Seconds()/4)))
	sql := sqlLock
	if r.text {
		sql = sqlLockForText
	}
	reads := log.Schema() + "." + log.Name()
	if r.config.MayStage {
		reads += " staged"
	}
	batch.Queue(log.Render(sql), key.Consumer, key.Topic, key.Shard, r.config.ID, bound, reads, keepalive)
}

// readsText tells whether a connection reads values as text.
func readsText(conn *pgx.Conn) bool {
	switch conn.Config().DefaultQueryExecMode {
	case pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec:
		return false
	}
	return true
}

// hold is what the lock on a cursor has found.
type hold struct {
	locked   bool // by this round
	position int64
	held     bool // paused or retired
	beside   bool // something stands beside the cursor: a failure, the wish for a replay, or a log that was written anew
}

// readLock reads the results of a BEGIN and of what queueLock has queued.
func (r *Round) readLock(results pgx.BatchResults) (found hold, err error) {
	if _, err := results.Exec(); err != nil {
		return hold{}, fmt.Errorf("begin unit: %w", err)
	}
	fields := make([]any, 13, 15) // the settings' own values are not looked at
	fields[0], fields[1], fields[2], fields[3], fields[4] = &found.position, &found.held, &found.beside, &r.searchPath, &r.role
	if r.text {
		fields = fields[:15]
	}
	switch err := results.QueryRow().Scan(fields...); {
	case errors.Is(err, pgx.ErrNoRows):
		return hold{}, nil
	case err != nil:
		return hold{}, fmt.Errorf("lock cursor: %w", err)
	}
	found.locked = true
	return found, nil
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
		if err := r.readAgain(ctx); err != nil {
			return err
		}
	}
	return &GapError{Seq: o.Position + 1, Reason: "what is read after the cursor differs from one statement to the next"}
}

// readAgain reads the batch by a statement of its own.
func (r *Round) readAgain(ctx context.Context) error {
	sql, args := r.readBounded()
	rows, _ := r.conn.Query(ctx, sql, args...)
	return r.take(rows)
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
	r.session.untouched = false // an attempt that is undone must not take this back
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
	if !r.begun() || r.Doomed() {
		// There is no transaction yet, or none at all, so nobody has touched it.
	} else if err := r.session.state(u, acked); err != nil {
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
	if r.used {
		if err := r.restore(ctx); err != nil {
			return err
		}
	}
	for i, b := range buffered {
		if r.items == nil {
			r.items = map[Flusher][]Item{}
		}
		if _, known := r.items[b.owner]; !known {
			r.owners = append(r.owners, b.owner)
			r.items[b.owner] = make([]Item, 0, len(r.opening.Events)) // most have one for each event
		}
		r.items[b.owner] = append(r.items[b.owner], Item{Seq: u.event.Seq, Ordinal: i + 1, Value: b.value})
	}
	r.matched, r.handled = u.event.Seq, r.handled+1
	return nil
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

// Buffered is how many values, such as jobs, were buffered in the units of the events that were handled.
func (r *Round) Buffered() (n int) {
	for _, items := range r.items {
		n += len(items)
	}
	return n
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
	r.wait()
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
	r.wait()
	if r.session.spoiled() || r.conn.PgConn().TxStatus() != 'I' {
		r.session.abandon(ctx)
	}
}
