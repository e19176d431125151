//go:build stress

package conformance_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// TestWatermillStress is the suite's stress form: go test -race -tags stress -run Stress ./subscriber/conformance
func TestWatermillStress(t *testing.T) {
	// Each of the suite's publishers and subscribers has a pool and a LISTEN connection of its own.
	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{"max_connections": "2000"}})
	p := pubSub{db: logtest.NewOn(t, server)}
	tests.TestPubSubStressTest(t, features, p.single, p.group)
}
