package subscriber_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// notify sends a notification every interval until the returned function is called.
func notify(t *testing.T, db *pgtest.DB, interval time.Duration) (stop func()) {
	t.Helper()
	conn := db.Conn(t)
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				_, _ = conn.Exec(context.Background(), "notify event_log")
			}
		}
	})
	stop = sync.OnceFunc(func() { cancel(); all.Wait() })
	t.Cleanup(stop)
	return stop
}

// accounted fails if a cursor is not exactly where the effects are: what moved it was something else than a round.
func accounted(t *testing.T, db *pgtest.DB, consumer string) (position int64) {
	t.Helper()
	both := pgtest.Value[[]int64](t, db, `select array[last_seq, (select count(*) from effects e where e.consumer = c.consumer),
		(select coalesce(max(seq), 0) from effects e where e.consumer = c.consumer)]
		from event_consumer_cursors c where consumer = $1`, consumer)
	require.Equal(t, both[0], both[1], "effects up to the position")
	require.Equal(t, both[0], both[2], "the last effect")
	return both[0]
}

func TestWakesMoveNothing(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	const events = 1000
	var delivered []int64
	s := newService(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		delivered = append(delivered, seqOf(msg))
		return work(msg)
	}}, poll(time.Millisecond))
	notify(t, db, time.Millisecond)
	logtest.Append(t, db, "orders", events/2)
	s.start()
	last := int64(0)
	for appended := events / 2; last < events; {
		if appended < events {
			logtest.Append(t, db, "orders", 10) // while it drains
			appended += 10
		}
		at := accounted(t, db, "push")
		require.GreaterOrEqual(t, at, last, "it went back")
		last = at
	}
	require.NoError(t, s.router.Close())
	require.Equal(t, upTo(events), delivered, "each once, in order")
	require.Equal(t, int64(events), jobCount(t, db))
	require.Empty(t, s.logger.Lines("", "error"))
}

func TestPayloadOfANotificationIsNotRead(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db, map[string]handler{"push": work}, poll(never))
	waitListening(t, db, 0)
	logtest.Append(t, db, "orders", 3)
	waitPosition(t, db, "push", 3)
	before := settle(t, s.runner)
	for _, payload := range []string{"999999", "-1", "0", "{}", "not a number"} {
		db.Exec(t, "select pg_notify('event_log', $1)", payload)
	}
	require.Eventually(t, func() bool { begun, _ := s.runner.Rounds(); return begun > before }, 20*time.Second, time.Millisecond, "it wakes")
	settle(t, s.runner)
	require.Equal(t, int64(3), accounted(t, db, "push"))
	logtest.Append(t, db, "orders", 1)
	waitPosition(t, db, "push", 4)
	require.Equal(t, int64(4), accounted(t, db, "push"))
}

// Nobody waits after a full batch, and nobody looks twice at the end.
func TestBacklogOfFullBatchesEndsWithOneLook(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 50)
	s := start(t, db, map[string]handler{"push": work}, poll(never), func(c *subscriber.RunnerConfig, _ *routerConfig) { c.DisableListen = true })
	waitPosition(t, db, "push", 50) // within seconds, of an interval of an hour
	require.Equal(t, int64(5+1), settle(t, s.runner), "five batches of ten, and the one that finds nothing")
	require.Equal(t, int64(50), accounted(t, db, "push"))
}

// hold keeps a service from beginning a round, as if it were paused.
func hold(t *testing.T, s *service) (resume func()) {
	t.Helper()
	var held []*pgxpool.Conn
	for range s.pool.Config().MaxConns {
		conn, err := s.pool.Acquire(t.Context())
		require.NoError(t, err)
		held = append(held, conn)
	}
	resume = sync.OnceFunc(func() {
		for _, conn := range held {
			conn.Release()
		}
	})
	t.Cleanup(resume)
	return resume
}

// Whoever goes on reads the position anew, also after a pause in which the other one moved it.
func TestProcessesThatAlternateReadThePositionUnderTheLock(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	const turns, batch = 10, 10
	type visit struct {
		by, seq int64
		proceed chan struct{}
	}
	visits := make(chan visit)
	var mu sync.Mutex
	var delivered []int64
	services := make([]*service, 2)
	for by := range services {
		services[by] = start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
			seq := seqOf(msg)
			mu.Lock()
			delivered = append(delivered, seq)
			mu.Unlock()
			if seq%batch == 5 { // in the middle of a round
				v := visit{int64(by), seq, make(chan struct{})}
				visits <- v
				<-v.proceed
			}
			return work(msg)
		}}, poll(10*time.Millisecond))
	}
	for turn := range int64(turns) {
		paused := services[(turn+1)%2]
		resume := hold(t, paused)
		logtest.Append(t, db, "orders", batch)
		v := receive(t, visits, "a round")
		require.Equal(t, visit{turn % 2, turn*batch + 5, v.proceed}, v)
		resume()
		// It finds the cursor locked, however often it looks.
		before, _ := paused.runner.Rounds()
		require.Eventually(t, func() bool { begun, _ := paused.runner.Rounds(); return begun >= before+2 }, 20*time.Second, time.Millisecond)
		require.Equal(t, turn*batch, accounted(t, db, "push"))
		close(v.proceed)
		waitPosition(t, db, "push", (turn+1)*batch)
		accounted(t, db, "push")
	}
	require.Equal(t, upTo(turns*batch), delivered)
	require.Equal(t, int64(turns*batch), jobCount(t, db))
	for _, s := range services {
		require.Empty(t, s.logger.Lines("", "error"))
	}
}
