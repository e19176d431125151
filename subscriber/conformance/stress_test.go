//go:build stress

package conformance_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
)

// TestWatermillStress is the suite's stress form: go test -race -tags stress -run Stress ./subscriber/conformance
func TestWatermillStress(t *testing.T) {
	p := pubSub{db: logtest.New(t)}
	tests.TestPubSubStressTest(t, features, p.single, p.group)
}
