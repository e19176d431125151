package subscriber

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

const (
	// heartbeat is how long a LISTEN connection may be silent before it is asked whether it is alive, and
	// heartbeatTimeout how long its answer may take: a half-open one is noticed within the two.
	heartbeat        = 20 * time.Second
	heartbeatTimeout = 5 * time.Second
	// reconnectCap bounds the delay between two attempts to listen.
	reconnectCap = 30 * time.Second
)

// waker wakes a runner's subscriptions: by polling, which is the promise, and by LISTEN, which is quick.
type waker struct {
	runner *Runner
	cancel context.CancelFunc
	all    sync.WaitGroup
}

func startWaker(r *Runner) *waker {
	ctx, cancel := context.WithCancel(context.Background())
	w := &waker{runner: r, cancel: cancel}
	w.all.Go(func() { w.poll(ctx) })
	if !r.config.DisableListen {
		w.all.Go(func() { w.listen(ctx) })
	}
	return w
}

func (w *waker) stop() {
	w.cancel()
	w.all.Wait()
}

// sleep returns false when the waker is stopped.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// poll looks once for all consumers and wakes those that are behind. When it cannot look, everybody is woken,
// and finds out for himself.
func (w *waker) poll(ctx context.Context) {
	blind := false
	for sleep(ctx, jittered(w.runner.config.PollInterval)) {
		look, err := w.look(ctx)
		if err != nil || blind {
			w.runner.wake(everyone)
		} else {
			w.runner.wake(func(k cursor.Key) bool {
				position, found := look.Positions[k]
				return !found || position != look.Head || look.Replays[k]
			})
		}
		blind = err != nil
	}
}

func (w *waker) look(ctx context.Context) (cursor.Look, error) {
	ctx, cancel := context.WithTimeout(ctx, w.runner.config.ServerBound)
	defer cancel()
	return cursor.LookAt(ctx, w.runner.pool, w.runner.config.Log, w.runner.keys())
}

func jittered(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + rand.Float64()/5))
}

// errPooler ends the listening: notifications do not come through a transaction pooler.
var errPooler = errors.New("LISTEN goes through a transaction pooler: set ListenURL to the server itself, or DisableListen")

// listen keeps one connection listening, for ever. Everybody is woken after each connect, because what was
// missed meanwhile cannot be counted.
func (w *waker) listen(ctx context.Context) {
	delay := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(min(w.runner.config.PollInterval, reconnectCap)),
		backoff.WithMaxInterval(reconnectCap),
		backoff.WithMaxElapsedTime(0), // never give up
	)
	lost := false
	for {
		err := w.listenOnce(ctx, func() {
			delay.Reset()
			if lost {
				w.runner.logger.Debug("event log listener is back", nil)
			}
			lost = false
			w.runner.wake(everyone)
		})
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, errPooler) {
			w.runner.logger.Info("event log listener gives up, polling goes on", watermill.LogFields{"err": err})
			return
		}
		if !lost {
			lost = true
			// Consumers go on by polling, and what they cannot do they log themselves.
			w.runner.logger.Debug("event log listener lost its connection, polling goes on", watermill.LogFields{"err": err})
		}
		if !sleep(ctx, delay.NextBackOff()) {
			return
		}
	}
}

// listenOnce listens until the connection fails or ctx ends.
func (w *waker) listenOnce(ctx context.Context, connected func()) error {
	config := w.runner.pool.Config().ConnConfig.Copy()
	if w.runner.config.ListenURL != "" {
		var err error
		if config, err = pgx.ParseConfig(w.runner.config.ListenURL); err != nil {
			return err // was checked at construction
		}
	}
	connectCtx, cancel := context.WithTimeout(ctx, w.runner.config.ServerBound)
	defer cancel()
	conn, err := pgx.ConnectConfig(connectCtx, config)
	if err != nil {
		return err
	}
	defer func() {
		// Not a child of ctx, which may have ended.
		ctx, cancel := context.WithTimeout(context.Background(), endTime)
		defer cancel()
		_ = conn.Close(ctx)
	}()

	var pid uint32
	if err := conn.QueryRow(connectCtx, "select pg_backend_pid()").Scan(&pid); err != nil {
		return err
	}
	if pid != conn.PgConn().PID() {
		return errPooler
	}
	if _, err := conn.Exec(connectCtx, "listen "+pgx.Identifier{w.runner.config.Log.Channel()}.Sanitize()); err != nil {
		return err
	}
	connected()
	for {
		waitCtx, cancel := context.WithTimeout(ctx, heartbeat)
		_, err := conn.WaitForNotification(waitCtx)
		silent := waitCtx.Err() != nil
		cancel()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			w.runner.wake(everyone) // its payload says nothing
		case silent:
			pingCtx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
			err := conn.Ping(pingCtx)
			cancel()
			if err != nil {
				return err
			}
		default:
			return err
		}
	}
}
