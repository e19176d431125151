package logtest

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// Register makes the cursor of a consumer.
func Register(t testing.TB, db *pgtest.DB, key cursor.Key, start cursor.Start) {
	t.Helper()
	_, err := cursor.Ensure(t.Context(), db.Conn(t), nil, "test", []cursor.Registration{{Key: key, Start: start}})
	if err != nil {
		t.Fatal(err)
	}
}

// NewRound is a round on a connection of its own, which is given back at the test's end.
func NewRound(t testing.TB, db *pgtest.DB, key cursor.Key, change ...func(*cursor.RoundConfig)) (*cursor.Round, *pgx.Conn) {
	t.Helper()
	config := cursor.RoundConfig{
		Key: key, By: "test", ID: t.Name(), Bound: time.Minute,
		Limits: cursor.Limits{Events: 10, Bytes: 1 << 20, Cover: 1000},
	}
	for _, c := range change {
		c(&config)
	}
	conn := db.Conn(t)
	r := cursor.NewRound(conn, config)
	t.Cleanup(func() {
		r.Rollback(context.Background())
		r.Release(context.Background())
	})
	return r, conn
}

// Limits bound a round.
func Limits(events int, bytes int64, cover int) func(*cursor.RoundConfig) {
	return func(c *cursor.RoundConfig) { c.Limits = cursor.Limits{Events: events, Bytes: bytes, Cover: cover} }
}

// OpenRound is a new round that was opened.
func OpenRound(t testing.TB, db *pgtest.DB, key cursor.Key, change ...func(*cursor.RoundConfig)) (*cursor.Round, *cursor.Opening) {
	t.Helper()
	r, _ := NewRound(t, db, key, change...)
	o, err := r.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r, o
}
