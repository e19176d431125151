package operate_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	push      = cursor.Key{Consumer: "push"}
	beginning = cursor.FromBeginning()

	register, prepare, limits, open = logtest.Register, logtest.NewRound, logtest.Limits, logtest.OpenRound
)

// pass commits one round of a cursor, in which every event is handled.
func pass(t *testing.T, db *pgtest.DB, key cursor.Key, change ...func(*cursor.RoundConfig)) *cursor.Opening {
	t.Helper()
	r, o := open(t, db, key, change...)
	require.Contains(t, []cursor.Status{cursor.Ready, cursor.Lost, cursor.Parking}, o.Status)
	if o.Status == cursor.Ready {
		for i := range o.Events {
			r.Hand(&o.Events[i])
			require.NoError(t, r.End(t.Context(), true))
		}
	}
	require.NoError(t, r.Commit(t.Context(), o.Through))
	return o
}

func as(instance, round string, record int) func(*cursor.RoundConfig) {
	return func(c *cursor.RoundConfig) { c.By, c.ID, c.Record = instance, round, record }
}
