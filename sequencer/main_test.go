package sequencer_test

import (
	"testing"

	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
