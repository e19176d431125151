package subscriber

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/stretchr/testify/require"
)

// attempts is a server that listeners connect to in a bubble's time: connection n lives as long as lives(n) says,
// and refused is 0.
type attempts struct {
	lives func(n int, since time.Duration) time.Duration
	start time.Time
	begun []time.Duration // when each attempt began
	ended []time.Duration // when it was refused or its connection lost
}

func (a *attempts) listenOnce(ctx context.Context, listening func()) error {
	n := len(a.begun)
	if n > 100_000 {
		panic("a hot loop")
	}
	a.begun = append(a.begun, time.Since(a.start))
	defer func() { a.ended = append(a.ended, time.Since(a.start)) }()
	if life := a.lives(n, time.Since(a.start)); life > 0 {
		listening()
		if !sleep(ctx, life) {
			return ctx.Err()
		}
		return errors.New("connection lost")
	}
	return errors.New("connection refused")
}

// delays are what lay between an attempt's end and the next one.
func (a *attempts) delays() []time.Duration {
	var delays []time.Duration
	for i := 1; i < len(a.begun); i++ {
		delays = append(delays, a.begun[i]-a.ended[i-1])
	}
	return delays
}

// listenFor keeps listening for a time that costs nothing.
func listenFor(t *testing.T, d time.Duration, lives func(n int, since time.Duration) time.Duration) (*attempts, *lines) {
	a, logger := &attempts{lives: lives}, &lines{}
	synctest.Test(t, func(t *testing.T) {
		a.start = time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		keepListening(ctx, logger, a.listenOnce)
		require.Equal(t, d, time.Since(a.start), "it ended by itself")
	})
	return a, logger
}

const (
	firstAtLeast = reconnectFirst * 3 / 4
	firstAtMost  = reconnectFirst * 5 / 4
)

func TestListenerReconnectsAtOnceAfterALongHealthyTime(t *testing.T) {
	t.Parallel()
	a, logger := listenFor(t, time.Hour, func(n int, _ time.Duration) time.Duration {
		if n == 0 {
			return 16 * time.Minute
		}
		return 2 * time.Hour
	})
	require.Len(t, a.begun, 2)
	require.LessOrEqual(t, a.delays()[0], firstAtMost)
	require.Equal(t, []string{"debug: event log listener lost its connection, polling goes on", "debug: event log listener is back"}, logger.all)
}

func TestListenerNeverGivesUpOnAServerThatRefuses(t *testing.T) {
	t.Parallel()
	const outage = 24 * time.Hour
	a, logger := listenFor(t, outage+time.Hour, func(_ int, since time.Duration) time.Duration {
		if since < outage {
			return 0
		}
		return 2 * time.Hour
	})
	delays := a.delays()
	require.Greater(t, len(delays), int(outage/reconnectCap))
	for i, d := range delays {
		require.GreaterOrEqual(t, d, firstAtLeast, "delay %d", i)
		require.LessOrEqual(t, d, reconnectCap, "delay %d", i)
	}
	require.LessOrEqual(t, a.begun[len(a.begun)-1], outage+reconnectCap, "it is back within the cap")
	require.Equal(t, []string{
		"debug: event log listener lost its connection, polling goes on",
		"info: event log listener cannot connect, polling goes on",
		"info: event log listener is back",
	}, logger.all, "edges only")
}

func TestListenersDelayBeginsAnewWithEachConnection(t *testing.T) {
	t.Parallel()
	a, _ := listenFor(t, time.Minute, func(n int, _ time.Duration) time.Duration {
		if n < 10 {
			return 5 * time.Second
		}
		return time.Hour
	})
	require.Len(t, a.begun, 11)
	for i, d := range a.delays() {
		require.LessOrEqual(t, d, firstAtMost, "flap %d", i)
	}

	// Also after a long outage.
	a, _ = listenFor(t, 2*time.Hour, func(_ int, since time.Duration) time.Duration {
		if since < time.Hour {
			return 0
		}
		return time.Minute
	})
	delays := a.delays()
	require.LessOrEqual(t, delays[len(delays)-1], firstAtMost)
}

func TestListenerConnectsAFewTimesASecondAtMost(t *testing.T) {
	t.Parallel()
	for name, life := range map[string]time.Duration{"refused": 0, "lost at once": time.Nanosecond} {
		a, _ := listenFor(t, time.Hour, func(int, time.Duration) time.Duration { return life })
		for i := range len(a.begun) - 5 {
			require.Greater(t, a.begun[i+5]-a.begun[i], time.Second, "%s: six attempts in a second", name)
		}
	}
}

func TestListenerThatMeetsAPoolerSaysSoOnce(t *testing.T) {
	t.Parallel()
	for _, end := range []error{errPooler, fmt.Errorf("wrapped: %w", errUnheard)} {
		logger, calls := &lines{}, 0
		keepListening(t.Context(), logger, func(context.Context, func()) error { calls++; return end })
		require.Equal(t, 1, calls)
		require.Equal(t, []string{"info: event log listener gives up, polling goes on"}, logger.all)
	}
}

// lines is a logger that remembers.
type lines struct {
	watermill.NopLogger
	all []string
}

func (l *lines) Info(msg string, _ watermill.LogFields)  { l.all = append(l.all, "info: "+msg) }
func (l *lines) Debug(msg string, _ watermill.LogFields) { l.all = append(l.all, "debug: "+msg) }
