package retention_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/retention"
)

func TestDumpedAndRestoredLogGoesOn(t *testing.T) {
	t.Parallel()
	db := filled(t, retention.Settings{})
	once(t, db)
	restored := pgtest.New(t)
	file := filepath.Join(t.TempDir(), "dump")
	// The server's own programs; where it has none, those of the path.
	program := func(name string) string {
		own := filepath.Join(pgtest.Value[string](t, db, "select setting from pg_config where name = 'BINDIR'"), name)
		if _, err := os.Stat(own); err != nil {
			return name
		}
		return own
	}
	for _, command := range [][]string{{program("pg_dump"), "-Fc", "-f", file, db.URL()}, {program("pg_restore"), "-e", "-d", restored.URL(), file}} {
		out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	want := status(t, db)
	require.Equal(t, names(want), names(status(t, restored)))
	fill(t, restored, 10, "0")
	restored.Exec(t, "update event_log set recorded_at = recorded_at - interval '40 days'")
	require.Equal(t, []string{"event_log_p30"}, once(t, restored).Removed)
	logtest.Append(t, restored, "orders", 1)
	require.Equal(t, int64(46), status(t, restored).Head)
}
