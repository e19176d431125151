package subscriber_test

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// envPark is a worker's ParkAfter, and envDeadly the event at which it dies.
const (
	envPark   = "EVENTLOG_TEST_PARK"
	envDeadly = "EVENTLOG_TEST_DEADLY"
)

func TestMain(m *testing.M) {
	logtest.Main(m, map[string]logtest.Program{"worker": runWorker, held: runHeldWorker})
}

// runWorker handles the events of consumer push until it is told to stop.
func runWorker(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	park, _ := strconv.Atoi(os.Getenv(envPark))
	deadly, _ := strconv.ParseInt(os.Getenv(envDeadly), 10, 64)
	handle := func(msg *message.Message) ([]*message.Message, error) {
		if seqOf(msg) == deadly {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // until it arrives
		}
		return work(msg)
	}
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
		Consumers: []subscriber.ConsumerConfig{{
			Name: "push", Topic: subscriber.AllTopics, Start: fromBeginning, BatchSize: 100, ParkAfter: park,
		}},
		PollInterval: 100 * time.Millisecond,
	}, watermill.NewStdLogger(false, false))
	if err != nil {
		return err
	}
	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	router.AddMiddleware(middleware.Round(nil))
	router.AddHandler("push", subscriber.AllTopics, runner.Subscriber("push"), "jobs", jobs, handle)
	go func() {
		<-router.Running()
		fmt.Println("running")
	}()
	return router.Run(ctx)
}

// startWorker returns when it is running.
func startWorker(t *testing.T, db *pgtest.DB, number int, environment ...string) *logtest.Process {
	t.Helper()
	w := logtest.Start(t, db, "worker", fmt.Sprintf("worker-%d", number), environment...)
	w.Says(t, "running")
	return w
}

// killInRound kills a worker while its backend holds the cursor: it is stopped first, so that what is seen
// is what is killed.
func killInRound(t *testing.T, db *pgtest.DB, w *logtest.Process) bool {
	t.Helper()
	w.Freeze(t)
	inRound := pgtest.Value[bool](t, db, `select exists (select from pg_stat_activity
		where application_name = $1 and backend_xid is not null and state = 'idle in transaction')`, w.Name)
	if !inRound {
		w.Thaw(t)
		return false
	}
	w.Kill()
	return true
}

// killInRounds has two workers on the consumer, kills one after another in an open round until there were that many
// kills, with some events passed between two of them, and returns the two that are left and where the kills were.
// Where the work ends before the kills do, there is more of it.
func killInRounds(t *testing.T, db *pgtest.DB, kills int, apart int64, environment ...string) (workers []*logtest.Process, killedAt []int64) {
	t.Helper()
	for i := range 2 {
		workers = append(workers, startWorker(t, db, i+1, environment...))
	}
	next := int64(0)
	for started := 2; len(killedAt) < kills; {
		for i, w := range workers {
			at := position(t, db, "push")
			if at == pgtest.Value[int64](t, db, "select last_seq from event_seq") {
				logtest.Append(t, db, "orders", int(apart))
			}
			if at < next || len(killedAt) == kills || !killInRound(t, db, w) {
				continue
			}
			killedAt, next = append(killedAt, at), at+apart
			started++
			workers[i] = startWorker(t, db, started, environment...)
		}
	}
	return workers, killedAt
}

func TestKilledProcessesLoseAndDoubleNothing(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 20_000)
	workers, killedAt := killInRounds(t, db, 10, 500)
	t.Logf("killed in a round at %v", killedAt)
	handledOnce(t, db)
	for _, w := range workers {
		w.Stop(t)
	}
}

// handledOnce waits for the consumer to come to the head, and counts.
func handledOnce(t *testing.T, db *pgtest.DB) {
	t.Helper()
	head := pgtest.Value[int64](t, db, "select last_seq from event_seq")
	require.Eventually(t, func() bool { return position(t, db, "push") == head }, 2*time.Minute, 20*time.Millisecond)
	require.Equal(t, head, pgtest.Value[int64](t, db, "select count(*) from effects"))
	require.Equal(t, head, pgtest.Value[int64](t, db, "select count(distinct seq) from effects"))
	require.Equal(t, head, jobCount(t, db))
	require.Equal(t, head, pgtest.Value[int64](t, db, "select count(distinct uuid) from watermill_jobs"))
}
