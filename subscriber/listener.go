package subscriber

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// reconnectFirst is the delay before the first attempt to listen again, give or take a quarter. It does not
	// follow the poll interval: the longer that is, the more a quick reconnect is worth. It is also what bounds the
	// attempts to about four a second when every connection is lost at once.
	reconnectFirst = 300 * time.Millisecond
	// reconnectCap is what the delay doubles up to.
	reconnectCap = 30 * time.Second
	// reconnectQuiet is how many attempts in a row may fail before that is worth a line: a restart is everyday.
	reconnectQuiet = 5
	// connectBound is how long connecting may take, and hangUpBound taking leave.
	connectBound = 10 * time.Second
	hangUpBound  = time.Second
)

// listenTimes are how long the LISTEN connection may do what.
type listenTimes struct {
	// heartbeat is how long it may be silent before it is asked whether it is alive, and answer how long it may
	// take to answer: a half-open connection is noticed within the two.
	heartbeat, answer time.Duration
	// probe is how long a notification that was sent by another connection may take to arrive.
	probe time.Duration
}

var defaultListenTimes = listenTimes{heartbeat: 20 * time.Second, answer: 5 * time.Second, probe: 5 * time.Second}

const listenHint = "set ListenURL to the server itself, or DisableListen"

// What ends the listening for good.
var (
	errPooler  = errors.New("LISTEN goes through a connection pooler: " + listenHint)
	errUnheard = errors.New("what other connections of the pool notify does not arrive, because LISTEN goes through a " +
		"transaction pooler or to another database: " + listenHint)
)

// listen keeps one connection listening.
func (w *waker) listen(ctx context.Context) {
	keepListening(ctx, w.runner.logger, w.listenOnce)
}

// keepListening calls listenOnce again and again until ctx ends: for ever, with a delay that grows while attempts
// fail and begins anew with each connection that listened.
func keepListening(ctx context.Context, logger watermill.LoggerAdapter, listenOnce func(ctx context.Context, listening func()) error) {
	delay := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(reconnectFirst),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(0.25),
		backoff.WithMaxInterval(reconnectCap*4/5), // which the jitter raises to the cap
		backoff.WithMaxElapsedTime(0),             // never give up
	)
	failures := 0 // since it last listened
	for {
		err := listenOnce(ctx, func() {
			delay.Reset()
			switch {
			case failures >= reconnectQuiet:
				logger.Info("event log listener is back", nil)
			case failures > 0:
				logger.Debug("event log listener is back", nil)
			}
			failures = 0
		})
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errPooler), errors.Is(err, errUnheard):
			logger.Info("event log listener gives up, polling goes on", watermill.LogFields{"err": err})
			return
		}
		// Consumers go on by polling, and what they cannot do they log themselves.
		failures++
		switch failures {
		case 1:
			logger.Debug("event log listener lost its connection, polling goes on", watermill.LogFields{"err": err})
		case reconnectQuiet:
			logger.Info("event log listener cannot connect, polling goes on", watermill.LogFields{"err": err})
		}
		if !sleep(ctx, delay.NextBackOff()) {
			return
		}
	}
}

// listenOnce listens until the connection fails or ctx ends. It wakes everybody when it listens, because what was
// missed before cannot be counted, and at each notification.
func (w *waker) listenOnce(ctx context.Context, listening func()) error {
	l, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer l.hangUp()
	if err := l.ask(ctx); err != nil {
		return err
	}
	listening()
	w.runner.wake(everyone)

	probing, unheard := context.WithCancel(ctx)
	heard := make(chan struct{})
	hear := sync.OnceFunc(func() { close(heard) })
	var all sync.WaitGroup
	defer all.Wait()
	defer unheard()
	all.Go(func() { w.probe(probing, heard, unheard) })

	waiting := probing // until it was heard, or should have been
	for {
		err := l.wait(ctx, waiting)
		switch {
		case err == nil:
			waiting = ctx
			hear()
			w.runner.wake(everyone) // its payload says nothing
		case ctx.Err() != nil:
			return ctx.Err()
		case waiting.Err() != nil:
			// The probe should be here by now. A server that is merely slow sends it before its next answer.
			waiting = ctx
			if err := l.ask(ctx); err != nil {
				return err
			}
			if !l.buffered() {
				l.unlisten()
				return errUnheard
			}
			w.runner.wake(everyone)
		default:
			return err
		}
	}
}

// probe sends a notification by another connection, the pool's, and calls unheard if it is not heard in time: the
// listening connection's own would come back through a pooler too. What cannot be sent proves nothing.
func (w *waker) probe(ctx context.Context, heard <-chan struct{}, unheard func()) {
	err := w.onPool(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		_, err := conn.Exec(ctx, "select pg_notify($1, '')", w.runner.config.Log.Channel())
		return err
	})
	if err != nil {
		return
	}
	late := time.NewTimer(w.runner.listenTimes.probe)
	defer late.Stop()
	select {
	case <-heard:
	case <-ctx.Done():
	case <-late.C:
		unheard()
	}
}

// listening is a connection that listens, or will. It is for one goroutine.
type listening struct {
	conn  *pgx.Conn
	times listenTimes
	sql   string
}

// connect makes a connection of its own, outside the pool.
func (w *waker) connect(ctx context.Context) (*listening, error) {
	ctx, cancel := context.WithTimeout(ctx, connectBound)
	defer cancel()
	config, err := w.listenConfig(ctx)
	if err != nil {
		return nil, err
	}
	// pgx waits for a connection by its deadline, and asks the server to cancel what runs on one that it gives up.
	// Nothing runs here: a silent server is not to be dialled for that, and the socket closed at once.
	config.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
	}
	config.OnNotification = nil // pgx keeps them for us
	var connected atomic.Bool
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if connected.Load() {
			return nil, net.ErrClosed
		}
		return dial(ctx, network, address)
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	connected.Store(true)
	l := &listening{conn: conn, times: w.runner.listenTimes, sql: w.listenSQL()}
	var pid uint32
	if err = conn.QueryRow(ctx, "select pg_backend_pid()", pgx.QueryExecModeSimpleProtocol).Scan(&pid); err == nil && pid != conn.PgConn().PID() {
		err = errPooler
	}
	if err != nil {
		l.hangUp()
		return nil, err
	}
	return l, nil
}

func (w *waker) listenConfig(ctx context.Context) (*pgx.ConnConfig, error) {
	if w.runner.config.ListenURL != "" {
		return pgx.ParseConfig(w.runner.config.ListenURL) // was checked at construction
	}
	pool := w.runner.pool.Config()
	config := pool.ConnConfig
	if pool.BeforeConnect != nil { // which may fetch a password
		if err := pool.BeforeConnect(ctx, config); err != nil {
			return nil, fmt.Errorf("BeforeConnect of the pool: %w", err)
		}
	}
	return config, nil
}

// listenSQL can be sent again at any time. It is in front so that pg_stat_activity shows what the session is for. A
// silent session is no reason to end it, and one whose process is frozen must not hold up the server's queue.
func (w *waker) listenSQL() string {
	return fmt.Sprintf("listen %s; set idle_session_timeout = 0; set tcp_user_timeout = %d",
		pgx.Identifier{w.runner.config.Log.Channel()}.Sanitize(), w.runner.config.ServerBound.Milliseconds())
}

// ask listens, or asks a connection that does whether it is alive.
func (l *listening) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.times.answer)
	defer cancel()
	return l.conn.PgConn().Exec(ctx, l.sql).Close()
}

// wait returns nil after a notification. A connection that is silent for long is asked; that is not ended by
// waiting, which would cost the connection.
func (l *listening) wait(ctx, waiting context.Context) error {
	for {
		silence, cancel := context.WithTimeout(waiting, l.times.heartbeat)
		_, err := l.conn.WaitForNotification(silence)
		silent := silence.Err() != nil
		cancel()
		if err == nil || waiting.Err() != nil || !silent {
			return err
		}
		if err := l.ask(ctx); err != nil {
			return err
		}
	}
}

// buffered takes a notification that has arrived already.
func (l *listening) buffered() bool {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := l.conn.WaitForNotification(ctx)
	return err == nil
}

// unlisten leaves nothing behind in a session that a pooler gives to others. It is sent in one piece with what
// it undoes, so that it meets the session that a pooler used last.
func (l *listening) unlisten() {
	ctx, cancel := context.WithTimeout(context.Background(), hangUpBound)
	defer cancel()
	_ = l.conn.PgConn().Exec(ctx, "unlisten *; reset idle_session_timeout; reset tcp_user_timeout").Close()
}

// hangUp closes the connection. When it returns nothing is left of it.
func (l *listening) hangUp() {
	ctx, cancel := context.WithTimeout(context.Background(), hangUpBound)
	defer cancel()
	_ = l.conn.Close(ctx)
	conn := l.conn.PgConn()
	_ = conn.Conn().Close()
	<-conn.CleanupDone()
}
