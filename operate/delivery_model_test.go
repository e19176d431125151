package operate_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

// model is what a consumer has done, by the plainest of bookkeeping.
type model struct {
	t        *testing.T
	db       *pgtest.DB
	key      cursor.Key
	topics   []string // of event i+1
	position int64
	states   []operate.DeliveryState // of passed events
}

func (m *model) own(seq int64) bool { return m.key.Topic == "" || m.topics[seq-1] == m.key.Topic }

// passed notes what became of the events behind the position up to a seq.
func (m *model) passed(through int64, state operate.DeliveryState) {
	for seq := m.position + 1; seq <= through; seq++ {
		m.states[seq-1] = state
	}
	m.position = through
}

func (m *model) want(seq int64) operate.DeliveryState {
	switch {
	case !m.own(seq):
		return operate.NotItsTopic
	case seq > m.position:
		return operate.NotReached
	}
	return m.states[seq-1]
}

// step does one thing, to the consumer and to the model.
func (m *model) step(random *rand.Rand) string {
	t, head := m.t, int64(len(m.topics))
	switch random.IntN(8) {
	case 0, 1:
		topic := []string{"orders", "other"}[random.IntN(2)]
		logtest.Append(t, m.db, topic, 2)
		m.topics = append(m.topics, topic, topic)
		m.states = append(m.states, "", "")
		return "append"
	case 2, 3, 4:
		r, o := open(t, m.db, m.key, limits(1+random.IntN(3), 1<<20, 4), as("w", "w/"+t.Name(), 5))
		if o.Status != cursor.Ready {
			r.Rollback(t.Context())
			return "idle"
		}
		for i := range o.Events {
			r.Hand(&o.Events[i])
			require.NoError(t, r.End(t.Context(), true))
		}
		require.NoError(t, r.Commit(t.Context(), o.Through))
		m.passed(o.Through, operate.Handled)
		return "round"
	case 5:
		next := m.position + 1
		for next <= head && !m.own(next) {
			next++
		}
		if next > head {
			return "nothing to skip"
		}
		_, err := operate.Skip(t.Context(), m.db.Conn(t), nil, m.key, next, order)
		require.NoError(t, err)
		m.passed(next, operate.SkippedByHand)
		return "skip"
	case 6:
		to := random.Int64N(head + 1)
		_, err := operate.Seek(t.Context(), m.db.Conn(t), nil, m.key, cursor.FromSeq(to+1), order)
		require.NoError(t, err)
		if to > m.position {
			m.passed(to, operate.SkippedByHand)
		}
		m.position = to
		return "seek"
	}
	next := m.position + 1
	if next > head || !m.own(next) {
		return "nothing to park"
	}
	fail(t, m.db, m.key, cursor.Attempt{Seq: next, Through: next, ErrorType: "x"})
	pass(t, m.db, m.key, func(c *cursor.RoundConfig) { c.ParkAfter = 1; c.Record = 5 })
	m.passed(next, operate.ParkedAway)
	if random.IntN(2) == 0 {
		return "park"
	}
	_, err := operate.Discard(t.Context(), m.db.Conn(t), nil, m.key, next, order)
	require.NoError(t, err)
	m.states[next-1] = operate.SkippedByHand
	return "discard"
}

// Whatever is done to a consumer, in whatever order, every event is in the one state that the bookkeeping says.
func TestDeliveriesAreWhatWasDone(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]cursor.Key{"all topics": push, "one topic": orders} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			db := logtest.New(t)
			register(t, db, key, beginning)
			m := &model{t: t, db: db, key: key}
			var steps []string
			for range 40 {
				steps = append(steps, m.step(random))
				conn := db.Conn(t)
				for seq := int64(1); seq <= int64(len(m.topics)); seq++ {
					list, err := operate.Deliveries(t.Context(), conn, nil, seq)
					require.NoError(t, err)
					require.Equal(t, m.want(seq), list[0].State, "event %d at %d, seed %d: %v: %s", seq, m.position, seed, steps, list[0])
				}
				require.NoError(t, conn.Close(t.Context()))
			}
			require.Equal(t, m.position, logtest.Position(t, db, key))
			require.LessOrEqual(t, pgtest.Value[int64](t, db, "select count(*) from event_consumer_rounds"), int64(5))
		})
	}
}
