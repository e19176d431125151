package main

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestAnOrderBecomesABookingAndAJob(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.Pool(t)
	require.NoError(t, prepare(t.Context(), pool))

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		defer close(ended)
		ended <- run(ctx, pool, logtest.NewLogger())
	}()
	t.Cleanup(func() {
		stop()
		<-ended
	})

	// A new consumer starts at the head of the log: it sees what is appended once its cursor is there.
	eventually(t, ended, func() bool {
		return logtest.Position(t, db, cursor.Key{Consumer: "billing", Topic: "orders"}) == 0
	})
	log, err := publisher.NewEventLog(pool, publisher.EventLogConfig{})
	require.NoError(t, err)
	require.NoError(t, log.Publish("orders", message.NewMessage("o-1", []byte(`{"id": "4711"}`))))

	// The last thing that becomes visible is seen by all or nothing: cursor, booking and job at once.
	eventually(t, ended, func() bool {
		return logtest.Position(t, db, cursor.Key{Consumer: "billing", Topic: "orders"}) == 1
	})
	require.Equal(t, []string{"4711"}, pgtest.Column[string](t, db, "select order_id from bookings"))
	require.Equal(t, []string{"4711"}, pgtest.Column[string](t, db, "select payload->>'id' from watermill_invoices"))

	stop()
	require.NoError(t, <-ended)
}

func TestTheServiceNamesAMissingAddress(t *testing.T) {
	t.Parallel()
	require.ErrorContains(t, serve(t.Context(), ""), "DATABASE_URL")
}

// eventually waits until the database shows what it should, or fails if run has ended before.
func eventually(t *testing.T, ended <-chan error, shown func() bool) {
	t.Helper()
	late := time.After(time.Minute)
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for !shown() {
		select {
		case err := <-ended:
			t.Fatalf("run has ended: %v", err)
		case <-late:
			t.Fatal("the database does not show it")
		case <-again.C:
		}
	}
}

func TestReadmeShowsThisProgram(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("consumer.go")
	require.NoError(t, err)
	_, program, found := strings.Cut(string(source), ")\n\n")
	require.True(t, found)
	require.Contains(t, string(readme), "```go\n"+program+"```")
}
