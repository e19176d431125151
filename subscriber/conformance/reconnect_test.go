//go:build !race

package conformance_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

// The suite's reconnect test restarts a server of its own. It is left out under the race detector, because it
// races by itself.
func TestWatermillReconnect(t *testing.T) {
	server := pgtest.Server(t)
	p := pubSub{db: logtest.NewOn(t, server)}
	features := features
	features.RestartServiceCommand = server.RestartCommand()
	tests.TestReconnect(t, tests.TestContext{TestID: tests.NewTestID(), Features: features}, p.single)
}
