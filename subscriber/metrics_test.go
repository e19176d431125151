package subscriber_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// counts are what a reader has seen: by instrument and the values of its attributes but the consumer's; of a histogram,
// how many values it has.
type counts map[string]int64

func metered() (option, func(t *testing.T) counts) {
	reader := sdk.NewManualReader()
	provider := sdk.NewMeterProvider(sdk.WithReader(reader))
	return func(c *subscriber.RunnerConfig, _ *message.RouterConfig) { c.MeterProvider = provider }, func(t *testing.T) counts {
		t.Helper()
		var all metricdata.ResourceMetrics
		require.NoError(t, reader.Collect(context.Background(), &all))
		found := counts{}
		for _, scope := range all.ScopeMetrics {
			for _, m := range scope.Metrics {
				switch data := m.Data.(type) {
				case metricdata.Sum[int64]:
					for _, p := range data.DataPoints {
						name := []string{m.Name}
						for _, kv := range p.Attributes.ToSlice() {
							if kv.Key != "eventlog.consumer.name" {
								name = append(name, kv.Value.AsString())
							}
						}
						found[strings.Join(name, " ")] += p.Value
					}
				case metricdata.Histogram[float64]:
					for _, p := range data.DataPoints {
						outcome, _ := p.Attributes.Value("eventlog.round.outcome")
						found[m.Name+" "+outcome.AsString()] += int64(p.Count)
						require.GreaterOrEqual(t, p.Sum, float64(0))
						require.Less(t, p.Sum, float64(600))
					}
				}
			}
		}
		return found
	}
}

// committed is how many rounds the database has on record.
func committed(t *testing.T, db *pgtest.DB) int64 {
	t.Helper()
	return pgtest.Value[int64](t, db, "select sum(rounds)::bigint from event_consumer_cursors")
}

func TestRoundsAreCountedAsTheyWereCommitted(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 995) // a drain, whose rounds are chained
	metered, read := metered()
	s := start(t, db, map[string]handler{"push": work}, metered)
	waitPosition(t, db, "push", 995)
	require.NoError(t, s.runner.Close())
	found := read(t)
	require.GreaterOrEqual(t, found["eventlog.rounds committed"], int64(100))
	require.Equal(t, committed(t, db), found["eventlog.rounds committed"])
	require.Equal(t, committed(t, db), found["eventlog.round.duration committed"])
	require.Equal(t, int64(995), found["eventlog.events.handled"])
	require.Equal(t, jobCount(t, db), found["eventlog.jobs.published"])
	for name := range found {
		require.NotContains(t, name, "failed")
		require.NotContains(t, name, "locked")
	}
}

func TestFailedRoundsAreCountedWithTheirError(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 95)
	metered, read := metered()
	var attempts atomic.Int64
	s := start(t, db, map[string]handler{"push": failTimes(50, 3, &attempts, func() error { return typedError{} })}, metered)
	waitPosition(t, db, "push", 95)
	require.NoError(t, s.runner.Close())
	found := read(t)
	require.Equal(t, int64(3), found["eventlog.rounds my_type failed"])
	require.Equal(t, int64(3), found["eventlog.round.duration failed"])
	require.Equal(t, committed(t, db), found["eventlog.rounds committed"])
	require.Equal(t, int64(95), found["eventlog.events.handled"])
}

func TestParkedReplayedAndLostEventsAreCounted(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 20)
	_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", []cursor.Registration{
		{Key: cursor.Key{Consumer: "push"}, Start: fromBeginning},
	})
	require.NoError(t, err)
	db.Exec(t, "delete from event_log where seq <= 7")
	metered, read := metered()
	var mended atomic.Bool
	s := start(t, db, map[string]handler{"push": poison(10, &mended, errors.New("no"))}, parkAfter(2), metered)
	waitPosition(t, db, "push", 20)
	mended.Store(true)
	_, err = operate.Replay(t.Context(), db.Conn(t), nil, cursor.Key{Consumer: "push"}, 10, operate.Order{By: "test"})
	require.NoError(t, err)
	s.logger.Wait(t, t.Context(), 1, "event consumer replayed a parked event")
	require.NoError(t, s.runner.Close())
	found := read(t)
	require.Equal(t, int64(7), found["eventlog.events.lost"])
	require.Equal(t, int64(1), found["eventlog.events.parked"])
	require.Equal(t, int64(13), found["eventlog.events.handled"])
	require.Equal(t, int64(13), found["eventlog.jobs.published"])
	require.Equal(t, committed(t, db), found["eventlog.rounds committed"])
	require.Equal(t, int64(2), found["eventlog.rounds _OTHER failed"])
}

func TestStandbyCountsLockedRoundsAndAStopCountsNone(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 1)
	entered := make(chan struct{})
	var once sync.Once
	working, readWorking := metered()
	busy := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		once.Do(func() { close(entered) })
		<-msg.Context().Done()
		return nil, msg.Context().Err()
	}}, working, budget(100*time.Millisecond))
	receive(t, entered, "the handler")
	standing, readStanding := metered()
	standby := start(t, db, map[string]handler{"push": func(msg *message.Message) ([]*message.Message, error) {
		<-msg.Context().Done()
		return nil, msg.Context().Err()
	}}, standing, budget(100*time.Millisecond))
	require.Eventually(t, func() bool { return readStanding(t)["eventlog.rounds locked"] > 0 }, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, standby.runner.Close())
	require.NoError(t, busy.runner.Close())
	require.Empty(t, readWorking(t))
	found := readStanding(t)
	require.Equal(t, found["eventlog.rounds locked"], found["eventlog.round.duration locked"])
	delete(found, "eventlog.rounds locked")
	delete(found, "eventlog.round.duration locked")
	require.Empty(t, found)
}

func TestConsumerAtTheHeadCountsIdleRounds(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	metered, read := metered()
	start(t, db, map[string]handler{"push": work}, metered)
	require.Eventually(t, func() bool { return read(t)["eventlog.rounds idle"] > 0 }, 20*time.Second, 5*time.Millisecond)
	require.Zero(t, read(t)["eventlog.rounds committed"])
}
