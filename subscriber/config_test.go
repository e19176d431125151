package subscriber_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

// unconnected is a pool that has never connected to anything.
func unconnected(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(context.Background(), url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func TestBadConfigurationIsRefusedAtConstruction(t *testing.T) {
	t.Parallel()
	pool := unconnected(t, "postgres://nobody@127.0.0.1:1/nothing?pool_max_conns=4")
	push := subscriber.ConsumerConfig{Name: "push"}
	for name, tt := range map[string]struct {
		config subscriber.RunnerConfig
		want   []string
	}{
		"no consumers": {subscriber.RunnerConfig{}, []string{"missing Consumers"}},
		"all faults at once": {
			subscriber.RunnerConfig{PollInterval: -1, StopBudget: -1, Consumers: []subscriber.ConsumerConfig{{BatchSize: -1}}},
			[]string{"negative PollInterval", "negative StopBudget", "missing consumer name", "negative BatchSize"},
		},
		"a pool that is too small": {
			subscriber.RunnerConfig{MaxRounds: 5, Consumers: []subscriber.ConsumerConfig{push}},
			[]string{"MaxRounds (5)", "MaxConns (4)", "raise MaxConns"},
		},
		"an ack deadline above the server's bound": {
			subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{{Name: "push", AckDeadline: time.Minute}}},
			[]string{"AckDeadline (1m0s)", "ServerBound (1m0s)"},
		},
		"the same consumer twice": {
			subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{push, push}}, []string{"twice", `"push"`},
		},
		"a name that is too long": {
			subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{{Name: strings.Repeat("x", 256)}}}, []string{"256 bytes", "255"},
		},
		"a name with NUL": {
			subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{{Name: "a\x00b"}}}, []string{"NUL"},
		},
		"a start before the first event": {
			subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{{Name: "push", Start: cursor.FromSeq(0)}}}, []string{"seq 0"},
		},
		"a ListenURL that is none": {
			subscriber.RunnerConfig{ListenURL: "postgres://:x:y", Consumers: []subscriber.ConsumerConfig{push}}, []string{"ListenURL"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := subscriber.NewRunner(pool, tt.config, nil)
			for _, want := range tt.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
	_, err := subscriber.NewRunner(nil, subscriber.RunnerConfig{}, nil)
	require.ErrorContains(t, err, "missing pool")
}

func TestSubscribeNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	subscribe := func(pool *pgxpool.Pool, name string) error {
		runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{{Name: "push"}}}, nil)
		require.NoError(t, err)
		_, err = runner.Subscriber(name).Subscribe(t.Context(), "orders")
		return err
	}
	err := subscribe(pgtest.New(t).Pool(t), "push")
	require.ErrorIs(t, err, cursor.ErrNotMigrated)
	require.ErrorContains(t, err, "migrations.Up")

	err = subscribe(unconnected(t, "postgres://nobody@127.0.0.1:1/nothing"), "push")
	require.ErrorContains(t, err, "127.0.0.1")
	require.ErrorContains(t, err, `event consumer "push"`)

	db := logtest.New(t)
	err = subscribe(db.Pool(t), "pull")
	require.ErrorContains(t, err, `no consumer "pull"`)
	require.ErrorContains(t, err, "push")

	require.NoError(t, subscribe(db.Pool(t), "push"))
	db.Exec(t, "delete from event_consumer_cursors")
	err = subscribe(db.Pool(t), "push")
	require.ErrorIs(t, err, cursor.ErrCursorMissing)
}

func TestConfiguredConsumerMissesNothingBeforeItSubscribes(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 5)
	config := subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{{Name: "first", Topic: "orders"}, {Name: "second", Topic: "orders"}}}
	logger := logtest.NewLogger()
	runner, err := subscriber.NewRunner(db.Pool(t), config, logger)
	require.NoError(t, err)
	require.NoError(t, runner.Subscriber("first").SubscribeInitialize("orders"))
	logtest.Append(t, db, "orders", 1)
	messages, err := runner.Subscriber("second").Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	msg := receive(t, messages, "a message")
	require.Equal(t, int64(6), seqOf(msg))
	msg.Ack()
	require.NoError(t, runner.Close())
	created := logger.Lines("event consumer created", "info")
	require.Len(t, created, 2)
	require.Equal(t, int64(5), created[0].Fields["start_seq"])
}

func TestConsumerWhoseResumeAgeIsNotBelowTheRetentionDoesNotStart(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	pool := db.Pool(t)
	subscribe := func(age time.Duration) error {
		runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{Consumers: []subscriber.ConsumerConfig{
			{Name: "push", Topic: "orders"}, {Name: "mail", Topic: "orders", ResumeAge: age},
		}}, nil)
		require.NoError(t, err)
		defer runner.Close()
		initialized := runner.Subscriber("mail").SubscribeInitialize("orders")
		_, err = runner.Subscriber("push").Subscribe(t.Context(), "orders")
		require.Equal(t, err == nil, initialized == nil)
		return err
	}
	db.Exec(t, "update event_retention set switched_on = true, keep = '2 days'")
	for _, age := range []time.Duration{48 * time.Hour, 49 * time.Hour} {
		err := subscribe(age)
		for _, want := range []string{`"mail"`, "ResumeAge (" + age.String(), `keep in "public"."event_retention" is 48h0m0s`, "lower ResumeAge", "eventlog retention set --keep"} {
			require.ErrorContains(t, err, want)
		}
		require.NotContains(t, err.Error(), `"push")`)
	}
	require.Zero(t, pgtest.Value[int64](t, db, "select count(*) from event_consumer_cursors"), "a start that fails has changed nothing")
	require.NoError(t, subscribe(47*time.Hour))
	db.Exec(t, "update event_retention set keep = '1000 years'") // longer than a time.Duration
	require.NoError(t, subscribe(48*time.Hour))

	// There is nothing to compare with.
	db.Exec(t, "update event_retention set switched_on = false, keep = '2 days'")
	require.NoError(t, subscribe(48*time.Hour))
	db.Exec(t, "delete from event_retention")
	require.NoError(t, subscribe(48*time.Hour))
	require.Equal(t, int64(2), pgtest.Value[int64](t, db, "select count(*) from event_consumer_cursors"))

	db.Exec(t, "drop table event_retention")
	require.NoError(t, subscribe(0), "who needs it not does not read it")
	require.ErrorIs(t, subscribe(time.Hour), cursor.ErrNotMigrated)
}
