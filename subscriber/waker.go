package subscriber

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
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
	w.start(ctx, w.poll)
	if !r.config.DisableListen && r.config.Log.Notifies() {
		w.start(ctx, w.listen)
	}
	return w
}

// start runs loop until ctx ends. Without it consumers would look healthy and sleep, so they end with it if it
// panics.
func (w *waker) start(ctx context.Context, loop func(context.Context)) {
	w.all.Go(func() {
		defer func() {
			if v := recover(); v != nil {
				w.abort(fmt.Errorf("event log waker: panic (%T) in %s", v, panicPlace()))
			}
		}()
		loop(ctx)
	})
}

// abort does not wait for the subscriptions: the last one to end waits for the waker.
func (w *waker) abort(err error) {
	w.runner.fail(err)
	w.runner.mu.Lock()
	defer w.runner.mu.Unlock()
	w.runner.closed = true
	for s := range w.runner.subscriptions {
		s.stop()
	}
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
				return !found || !look.Held[k] && (position != look.Head || look.Replays[k])
			})
		}
		blind = err != nil
	}
}

func (w *waker) look(ctx context.Context) (look cursor.Look, err error) {
	err = w.onPool(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		look, err = cursor.LookAt(ctx, conn, w.runner.config.Log, w.runner.keys())
		return err
	})
	return look, err
}

// onPool runs a step on a connection of the pool. A stop ends the wait for the connection at once, but gives the
// step a moment: what is cut off in a statement costs the pool the connection.
func (w *waker) onPool(ctx context.Context, step func(context.Context, *pgxpool.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, w.runner.config.ServerBound)
	defer cancel()
	return w.runner.pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		running, cut := context.WithCancel(context.WithoutCancel(ctx))
		defer cut()
		defer context.AfterFunc(ctx, func() { time.AfterFunc(hangUpBound, cut) })()
		return step(running, conn)
	})
}

func jittered(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + rand.Float64()/5))
}
