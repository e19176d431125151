package subscriber_test

import (
	"errors"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgserver"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/sequencer"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func pgProgram(t *testing.T, name string, args ...string) {
	t.Helper()
	program, err := pgserver.Program(t.Context(), name)
	require.NoError(t, err)
	out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func TestDumpedAndRestoredDatabaseGoesOnWhereItStood(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 20)
	work := func(msg *message.Message) ([]*message.Message, error) {
		if seqOf(msg) == 3 {
			return nil, errors.New("no")
		}
		return []*message.Message{message.NewMessage("", msg.Payload)}, effect(msg)
	}
	parks := consumers(func(c *subscriber.ConsumerConfig) { c.ParkAfter = 1 })
	s := start(t, db, map[string]handler{"push": work}, parks)
	waitPosition(t, db, "push", 20)
	require.NoError(t, s.router.Close())
	// What had not been handled and not been numbered when it was dumped.
	logtest.Append(t, db, "orders", 5)
	db.Exec(t, "insert into event_outbox (topic, payload, staged, uuid, once) values ('orders', '1', true, 'once', true)")
	events, err := publisher.NewEventLog(db.Conn(t), publisher.EventLogConfig{Once: true})
	require.NoError(t, err)
	require.NoError(t, events.Publish("orders", message.NewMessage("known", nil)))

	dump := filepath.Join(t.TempDir(), "dump")
	pgProgram(t, "pg_dump", "-Fc", "-f", dump, db.URL())
	restored := pgtest.New(t)
	pgProgram(t, "pg_restore", "--exit-on-error", "--no-owner", "-d", restored.URL(), dump)

	numbering, err := sequencer.New(restored.Conn(t), sequencer.Config{}, nil)
	require.NoError(t, err)
	n, err := numbering.Once(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(1), n, "what was staged")
	events, err = publisher.NewEventLog(restored.Conn(t), publisher.EventLogConfig{Once: true})
	require.NoError(t, err)
	for _, id := range []string{"known", "once", "new"} { // the first two were appended before
		require.NoError(t, events.Publish("orders", message.NewMessage(id, nil)))
	}
	start(t, restored, map[string]handler{"push": work}, parks)
	waitPosition(t, restored, "push", 28)
	require.Equal(t, append([]int64{1, 2}, upTo(28)[3:]...), effects(t, restored, "push"))
	require.Equal(t, int64(27), jobCount(t, restored))
	_, err = operate.Replay(t.Context(), restored.Conn(t), nil, cursor.Key{Consumer: "push"}, 3, operate.Order{By: "me"})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return pgtest.Value[int32](t, restored, "select coalesce(max(attempts) filter (where replay_at is null), 0) from event_consumer_parked") == 2
	}, 20*time.Second, 5*time.Millisecond, "the parked event was tried again")
	verdict, err := operate.Verify(t.Context(), restored.Conn(t), nil, nil)
	require.NoError(t, err)
	require.True(t, verdict.OK(), "%+v", verdict)
}
