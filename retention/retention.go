// Package retention makes the log's partitions ahead and removes old ones, so that a log does not grow for ever.
//
// A partition is removed when all its events were recorded longer ago than the log keeps them and every registered
// consumer has passed it; a consumer counts, also one that is paused, until it is retired. What is kept for a late
// consumer can be capped; it then records what it missed as lost, and goes on. Only whole partitions go, from the low
// end, so what is left has no hole.
//
// Neither appends nor rounds wait for it longer than LockTimeout, and most of what it does makes nobody wait at all.
// It does not promise that something is removed by a certain time: a transaction that is open for long delays it.
package retention

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// Config is for [New]. What all processes must agree on is in [Settings].
type Config struct {
	// ConnString is where to connect, as a URL or in key=value form: to the server itself, not through a transaction
	// pooler, as a role that owns the log's tables. Each maintenance opens one connection and closes it.
	ConnString string

	// ConnConfig is used instead of ConnString where it is given; it must come from pgx.ParseConfig.
	ConnConfig *pgx.ConnConfig

	// Log names the event log. Defaults to the log with the default names.
	Log *cursor.Log

	// Ahead is how many empty partitions there are at least. Defaults to 2.
	Ahead int

	// LockTimeout is how long appends and rounds may be made to wait. What does not get its lock within it is tried
	// again. Defaults to 1 second.
	LockTimeout time.Duration

	// Interval is the time between two maintenances, give or take a tenth. The partitions ahead should last for ten of
	// them, at the rate of the last ten. Defaults to 1 minute.
	Interval time.Duration

	// By names this process in the log's tables. Defaults to the host's name and the process's id.
	By string
}

const (
	defaultInterval = time.Minute
	defaultWindow   = intervalsAhead * defaultInterval
	intervalsAhead  = 10
	// minWindow is what a maintenance may take: partitions must last for it, however short the interval is.
	minWindow = 10 * time.Second
	// minPatience is the lock timeout where nobody waits behind us. It is longer than the server's deadlock_timeout,
	// after which an autovacuum gives way.
	minPatience = 3 * time.Second
	// connectBudget is how long connecting, and closing, may take.
	connectBudget = 15 * time.Second
)

// Retention maintains the partitions of one log.
type Retention struct {
	config Config
	logger watermill.LoggerAdapter
	newest map[string]time.Time // of full partitions, by name: they do not change any more

	scanLimit int64
}

var errExisting = errors.New("the log is an existing table, which stays its owner's: retention is for the library's own table")

// New checks the configuration. It does not connect. A nil logger logs nothing.
func New(config Config, logger watermill.LoggerAdapter) (*Retention, error) {
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	if config.Ahead == 0 {
		config.Ahead = 2
	}
	if config.LockTimeout == 0 {
		config.LockTimeout = time.Second
	}
	if config.Interval == 0 {
		config.Interval = defaultInterval
	}
	if config.By == "" {
		host, _ := os.Hostname()
		config.By = fmt.Sprintf("%s/%d", host, os.Getpid())
	}
	var errs []error
	if _, existing := config.Log.Existing(); existing {
		errs = append(errs, errExisting)
	}
	switch {
	case config.ConnConfig != nil:
		config.ConnConfig = config.ConnConfig.Copy()
	case config.ConnString == "":
		errs = append(errs, errors.New("missing ConnString"))
	default:
		var err error
		if config.ConnConfig, err = pgx.ParseConfig(config.ConnString); err != nil {
			errs = append(errs, fmt.Errorf("ConnString: %w", err)) // the error has no password in it
		}
	}
	if config.Ahead < 0 || config.Ahead > 100 {
		errs = append(errs, fmt.Errorf("number of partitions Ahead (%d) is not between 1 and 100", config.Ahead))
	}
	if config.LockTimeout < 10*time.Millisecond {
		errs = append(errs, fmt.Errorf("LockTimeout %v is below 10ms", config.LockTimeout))
	}
	if config.Interval < 0 {
		errs = append(errs, fmt.Errorf("negative Interval (%v)", config.Interval))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("retention config: %w", err)
	}
	return &Retention{config: config, logger: logger, newest: map[string]time.Time{}, scanLimit: scanLimit}, nil
}

// ErrBusy is returned when another process is maintaining the log's partitions.
var ErrBusy = errors.New("another process is maintaining the partitions of the event log")

// Run maintains the partitions until ctx ends; then it returns nil. Any number of processes may run it: one works at a
// time. Errors of the database are logged once, where they begin and where they end, and tried again for ever. It
// returns an error where the log is not migrated, this role may not change its tables, or a pooler is in between.
//
// As long as [Set] was not called, it neither makes nor removes anything.
func (r *Retention) Run(ctx context.Context) error {
	var failed error
	for {
		_, err := r.Once(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrBusy):
		case err == nil:
			if failed != nil {
				r.logger.Info("event log retention recovered", r.fields(nil))
				failed = nil
			}
		case fatal(err):
			return err
		default:
			if failed == nil {
				r.logger.Error("event log retention failed", err, r.fields(nil))
			}
			failed = err
		}
		if pause(ctx, r.config.Interval*9/10+time.Duration(rand.Int64N(int64(r.config.Interval)/5+1))) != nil {
			return nil
		}
	}
}

// Done is what a maintenance did.
type Done struct {
	CutAt   int64    // the end that the partition without one was given; 0 when it had one
	Made    []string // new partitions
	Removed []string // partitions that are gone
}

// Once does one maintenance: it sees that there are partitions ahead, finishes what an earlier one has left undone, and
// removes what may go. It returns what was done also beside an error, and [ErrBusy] when another process is at it.
func (r *Retention) Once(ctx context.Context) (done Done, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("event log retention: %w", explain(r.config.Log, err))
		}
	}()
	conn, err := r.connect(ctx)
	if err != nil {
		return done, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), connectBudget)
		defer cancel()
		_, _ = conn.Exec(ctx, sqlUnlock) // the server may notice the close late
		_ = conn.Close(ctx)
	}()
	m := &maintenance{Retention: r, conn: conn, done: &done}
	err = m.run(ctx)
	if errors.Is(err, ErrBusy) {
		return done, err
	}
	return done, errors.Join(err, m.report(ctx, err))
}

var errPooler = errors.New("the connection goes through a pooler: give the address of the server itself")

// The connection's own defaults must not matter: neither the role's bounds nor the database's time zone or isolation.
// The lock timeout is the session's, as a concurrent detach cannot run in a transaction.
const sqlSession = `
set lock_timeout = {patience};
set timezone = 'UTC';
set statement_timeout = 0;
set jit = off;
set session characteristics as transaction isolation level read committed`

// Held to the end of the connection. The key is the settings table's oid below a constant of our own.
const sqlLock = `select pg_backend_pid(), pg_try_advisory_lock((1702259826::bigint << 32) + $1::regclass::oid::bigint)`

const sqlUnlock = `select pg_advisory_unlock_all()`

func (r *Retention) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectBudget)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, r.config.ConnConfig)
	if err != nil {
		return nil, err
	}
	var pid uint32
	var locked bool
	_, err = conn.Exec(ctx, fill(nil, sqlSession, map[string]any{"patience": r.patience().Milliseconds()}), pgx.QueryExecModeSimpleProtocol)
	if err == nil {
		err = conn.QueryRow(ctx, sqlLock, r.config.Log.Table("retention")).Scan(&pid, &locked)
	}
	switch {
	case err != nil:
	case pid != conn.PgConn().PID():
		err = errPooler
	case !locked:
		err = ErrBusy
	default:
		return conn, nil
	}
	_ = conn.Close(ctx)
	return nil, err
}

// patience is the bound for waits that nobody else has to join.
func (r *Retention) patience() time.Duration { return max(minPatience, r.config.LockTimeout) }

// maintenance is one, with its connection.
type maintenance struct {
	*Retention
	conn *pgx.Conn
	done *Done
}

func (m *maintenance) run(ctx context.Context) error {
	state, err := m.prepare(ctx)
	if err != nil || state == nil {
		return err
	}
	for {
		changed, err := m.finish(ctx, state)
		if err == nil && !changed {
			changed, err = m.remove(ctx, state)
		}
		if err != nil || !changed {
			return err
		}
		// Removing may take long; appends go on meanwhile.
		if state, err = m.prepare(ctx); err != nil || state == nil {
			return err
		}
	}
}

// prepare sees that there are enough partitions. It returns no state where the log was never cut and need not be.
func (m *maintenance) prepare(ctx context.Context) (*State, error) {
	for {
		state, err := look(ctx, m.conn, m.config.Log, max(intervalsAhead*m.config.Interval, minWindow))
		if err != nil {
			return nil, err
		}
		last := state.last()
		var changed bool
		switch {
		case last == nil:
			return nil, fmt.Errorf("%s has no partition that is told by a range of numbers: attach one", m.config.Log)
		case state.Reserve < math.MaxInt64:
			changed, err = m.makeAhead(ctx, state)
		case state.Settings.Off && last.cut == nil:
			return nil, nil
		default:
			changed, err = true, m.cut(ctx, state)
		}
		if err != nil || !changed {
			return state, err
		}
	}
}

const sqlReport = `
update public.event_retention r
set maintained_at = clock_timestamp(), maintained_by = $1, error = $2,
    failing_since = case when $2::text is not null then coalesce(r.failing_since, clock_timestamp()) end`

// report writes down how it went, for those who watch.
func (m *maintenance) report(ctx context.Context, failed error) error {
	var text *string
	if failed != nil {
		s := failed.Error()
		text = &s
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), connectBudget)
	defer cancel()
	if m.conn.IsClosed() {
		return nil // there is an error already, which says so
	}
	_, err := m.conn.Exec(ctx, m.config.Log.Render(sqlReport), m.config.By, text)
	return err
}

// attempts is how often something is tried within one maintenance.
const attempts = 5

// exec executes a text of one or more statements, again when a lock could not be had. Several are one transaction.
func (m *maintenance) exec(ctx context.Context, what, sql string, times int) error {
	for n := 1; ; n++ {
		_, err := m.conn.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		switch {
		case err == nil:
			return nil
		case !lockMissed(err) || n >= times:
			return fmt.Errorf("%s: %w", what, err)
		}
		// Who had to wait goes first.
		if err := pause(ctx, m.config.LockTimeout+time.Duration(rand.Int64N(int64(m.config.LockTimeout)))); err != nil {
			return err
		}
	}
}

// lockMissed is true where a lock was not had in time, or a statement was cut off with it.
func lockMissed(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return false
	}
	switch pgErr.Code {
	case "55P03", "57014", "40P01": // lock not available, query cancelled, deadlock
		return true
	}
	return false
}

func fatal(err error) bool {
	var pgErr *pgconn.PgError
	if errors.Is(err, errPooler) || errors.Is(err, cursor.ErrNotMigrated) {
		return true
	}
	return errors.As(err, &pgErr) && pgErr.Code == "42501" // insufficient privilege
}

func (r *Retention) fields(more watermill.LogFields) watermill.LogFields {
	return watermill.LogFields{"log": r.config.Log.String()}.Add(more)
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
