package telemetry_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/middleware"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
	"github.com/watermill-eventlog/watermill-eventlog/telemetry"
)

// listed is the table of docs/telemetry.md that begins with a column: its rows by their first cell.
func listed(t *testing.T, column string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../docs/telemetry.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(text), "\n| "+column+" |")
	require.True(t, found, column)
	table, _, _ = strings.Cut(table, "\n\n")
	rows := map[string][]string{}
	for _, line := range strings.Split(table, "\n")[2:] {
		cells := strings.Split(strings.Trim(line, "|"), "|")
		name := strings.Trim(cells[0], " `")
		require.NotContains(t, rows, name)
		rows[name] = cells[1:]
	}
	require.NotEmpty(t, rows)
	return rows
}

var quoted = regexp.MustCompile("`([^`]+)`")

// names are what a cell quotes, in order.
func names(cell string) []string {
	found := []string{}
	for _, match := range quoted.FindAllStringSubmatch(cell, -1) {
		found = append(found, match[1])
	}
	slices.Sort(found)
	return found
}

// seen gathers attributes.
type seen map[string]map[string]bool

func (s seen) add(name string, attributes []attribute.KeyValue) {
	if s[name] == nil {
		s[name] = map[string]bool{}
	}
	for _, kv := range attributes {
		s[name][string(kv.Key)] = true
	}
}

func (s seen) of(name string) []string {
	if len(s[name]) == 0 {
		return []string{}
	}
	return slices.Sorted(maps.Keys(s[name]))
}

func TestListOfInstrumentsIsWhatAScrapeShows(t *testing.T) {
	t.Parallel()
	db, m, recorder := logtest.New(t), newMeters(), tracetest.NewSpanRecorder()
	log, err := cursor.NewLog(cursor.LogConfig{Name: "audit"})
	require.NoError(t, err)
	_, err = migrations.Up(t.Context(), db.Conn(t), log)
	require.NoError(t, err)
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 8 })
	tracing := middleware.TracingConfig{
		TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)), Propagator: propagation.TraceContext{},
	}

	// One consumer that loses an event, parks another, and handles the rest with a job.
	runner, err := subscriber.NewRunner(pool, subscriber.RunnerConfig{
		Log: log, MeterProvider: m, PollInterval: 20 * time.Millisecond,
		Consumers: []subscriber.ConsumerConfig{{
			Name: "push", Topic: "orders", Start: cursor.FromSeq(1), ParkAfter: 2, RetryDelay: time.Millisecond,
		}},
	}, nil)
	require.NoError(t, err)
	require.NoError(t, runner.Subscriber("push").SubscribeInitialize("orders"))
	events, err := publisher.NewEventLog(pool, publisher.EventLogConfig{Log: log})
	require.NoError(t, err)
	traced, err := middleware.TracePublisher(tracing)(events)
	require.NoError(t, err)
	require.NoError(t, traced.Publish("orders", message.NewMessage("1", nil), message.NewMessage("2", nil)))
	require.NoError(t, traced.Publish("orders", message.NewMessage("3", nil)))
	require.Error(t, traced.Publish("orders", message.NewMessage("\x00", nil)))
	db.Exec(t, "delete from audit_log where seq = 1")

	jobs, err := publisher.NewJobs(publisher.JobsConfig{})
	require.NoError(t, err)
	require.NoError(t, jobs.Initialize(t.Context(), db.Conn(t), "jobs"))
	round, err := middleware.NewRound(middleware.RoundConfig{MeterProvider: m})
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(t, err)
	router.AddMiddleware(round, middleware.Tracing(tracing))
	router.AddHandler("push", "orders", runner.Subscriber("push"), "jobs", jobs, func(msg *message.Message) ([]*message.Message, error) {
		if msg.UUID == "2" {
			return nil, errors.New("no")
		}
		return []*message.Message{message.NewMessage(msg.UUID, []byte("{}"))}, nil
	})
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	require.Eventually(t, func() bool { return m.collect(t)["eventlog.jobs.published"] != nil }, time.Minute, time.Millisecond)
	require.NoError(t, router.Close())
	require.NoError(t, <-ended)

	// And another one that fails, as far as the database knows.
	ensure := []cursor.Registration{{Key: key("failing"), Start: cursor.FromSeq(1)}}
	_, err = cursor.Ensure(t.Context(), db.Conn(t), log, "test", ensure)
	require.NoError(t, err)
	_, _, err = cursor.RecordFailure(t.Context(), db.Conn(t), log, key("failing"), "test", cursor.Attempt{
		Seq: 1, Through: 1, ErrorType: "timeout", Delay: time.Second, DelayCap: time.Second, Jitter: 1,
	})
	require.NoError(t, err)
	// And its partitions have an end.
	db.Exec(t, "alter table audit_log detach partition audit_log_first")
	db.Exec(t, "alter table audit_log attach partition audit_log_first for values from (minvalue) to (1000)")
	register(t, m, telemetry.GaugesConfig{DB: pool, Log: log, Keys: []cursor.Key{key("push"), key("failing")}})

	attributes, shown := seen{}, map[string][]string{}
	for _, scope := range m.collectAll(t).ScopeMetrics {
		for _, i := range scope.Metrics {
			kind := ""
			switch data := i.Data.(type) {
			case metricdata.Gauge[int64]:
				kind = "gauge"
				for _, p := range data.DataPoints {
					attributes.add(i.Name, p.Attributes.ToSlice())
				}
			case metricdata.Gauge[float64]:
				kind = "gauge"
				for _, p := range data.DataPoints {
					attributes.add(i.Name, p.Attributes.ToSlice())
				}
			case metricdata.Sum[int64]:
				require.True(t, data.IsMonotonic)
				kind = "counter"
				for _, p := range data.DataPoints {
					attributes.add(i.Name, p.Attributes.ToSlice())
				}
			case metricdata.Histogram[float64]:
				kind = "histogram"
				for _, p := range data.DataPoints {
					attributes.add(i.Name, p.Attributes.ToSlice())
				}
			}
			require.NotEmpty(t, i.Description, i.Name)
			shown[i.Name] = append([]string{kind, i.Unit}, attributes.of(i.Name)...)
		}
	}
	wanted := map[string][]string{}
	for name, cells := range listed(t, "name") {
		wanted[name] = append([]string{strings.TrimSpace(cells[0]), names(cells[1])[0]}, names(cells[2])...)
	}
	require.Equal(t, wanted, shown)

	attributes, shown = seen{}, map[string][]string{}
	for _, span := range recorder.Ended() {
		name := strings.Replace(span.Name(), "orders", "{topic}", 1)
		attributes.add(name, span.Attributes())
		shown[name] = append([]string{span.SpanKind().String()}, attributes.of(name)...)
	}
	wanted = map[string][]string{}
	for name, cells := range listed(t, "span") {
		wanted[name] = append([]string{strings.TrimSpace(cells[0])}, names(cells[1])...)
	}
	require.Equal(t, wanted, shown)

	require.Equal(t, []string{"cursor_ahead", "cursor_missing", "failing", "gap", "lost", "parked", "paused", "retired"},
		slices.Sorted(maps.Keys(listed(t, "`eventlog.problem`"))))
}
