package subscriber_test

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
	"github.com/watermill-eventlog/watermill-eventlog/sequencer"
	"github.com/watermill-eventlog/watermill-eventlog/subscriber"
)

func appending(t *testing.T, staged bool) handler {
	events, err := publisher.NewEventLog(nil, publisher.EventLogConfig{Staged: staged})
	require.NoError(t, err)
	return func(msg *message.Message) ([]*message.Message, error) {
		if string(msg.Payload) == "follow-up" {
			return nil, effect(msg)
		}
		unit, _ := cursor.UnitFromContext(msg.Context())
		tx, err := unit.Tx(msg.Context())
		if err != nil {
			return nil, err
		}
		next := message.NewMessageWithContext(msg.Context(), "", []byte("follow-up"))
		return nil, events.InTx(tx).Publish("orders", next)
	}
}

func mayStage(c *subscriber.ConsumerConfig) { c.MayStage = true }

func TestConsumerThatMayStageAppendsInItsUnit(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	logtest.Append(t, db, "orders", 3)
	start(t, db, map[string]handler{"push": appending(t, true)}, consumers(mayStage))
	waitPosition(t, db, "push", 3)
	numbering, err := sequencer.New(db.Conn(t), sequencer.Config{}, nil)
	require.NoError(t, err)
	n, err := numbering.Once(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(3), n)
	waitPosition(t, db, "push", 6)
	require.Equal(t, []int64{4, 5, 6}, effects(t, db, "push"))
}

func TestConsumerAppendsNothingElseToTheLogThatItReads(t *testing.T) {
	t.Parallel()
	raw := func(staged string) handler {
		return func(msg *message.Message) ([]*message.Message, error) {
			unit, _ := cursor.UnitFromContext(msg.Context())
			tx, err := unit.Tx(msg.Context())
			if err != nil {
				return nil, err
			}
			_, err = tx.Exec(msg.Context(), "insert into event_outbox (topic, staged) values ('orders', "+staged+")")
			return nil, err
		}
	}
	for name, c := range map[string]struct {
		handler handler
		options []option
	}{
		"a publisher that does not stage":    {appending(t, false), []option{consumers(mayStage)}},
		"SQL that does not stage":            {raw("false"), []option{consumers(mayStage)}},
		"a staged publisher without consent": {appending(t, true), nil},
		"staged SQL without consent":         {raw("true"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			logtest.Append(t, db, "orders", 1)
			s := start(t, db, map[string]handler{"push": c.handler}, c.options...)
			line := s.logger.Wait(t, t.Context(), 1, "event consumer round failed")[0]
			require.Equal(t, "internal", line.Fields["error.type"])
			require.ErrorContains(t, line.Err, "may not append to the log that it reads")
			require.Eventually(t, func() bool {
				return pgtest.Value[int32](t, db, "select attempts from event_consumer_failures") > 1
			}, 20*time.Second, 5*time.Millisecond)
			require.Zero(t, position(t, db, "push"))
			require.Zero(t, pgtest.Value[int](t, db, "select count(*)::int from event_outbox"))
		})
	}
}
