//go:build external

package operate_test

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

// Five million events, in memory that does not depend on them.
func TestFiveMillionEventsAreVerified(t *testing.T) {
	db := logtest.New(t)
	fill(t, db, 5_000_000)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	steps := 0
	v, err := operate.Verify(t.Context(), db.Conn(t), nil, func(int64, int64) { steps++ })
	require.NoError(t, err)
	runtime.ReadMemStats(&after)
	require.True(t, v.OK())
	require.Equal(t, int64(5_000_000), v.Events)
	require.Equal(t, 51, steps)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(32<<20), "bytes allocated, all in all")

	db.Exec(t, "delete from event_log where seq = 4999999")
	v, err = operate.Verify(t.Context(), db.Conn(t), nil, nil)
	require.NoError(t, err)
	require.Equal(t, []string{"hole  4999999-4999999"}, faults(v))
}
