// Package moving_test runs what the guides in this folder show, with the libraries that services come from.
package moving_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/sequencer"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const sqlEffect = `insert into effects (service, consumer, uuid, payload, extra) values ($1, $2, $3, $4, $5)`

// There is no unique key, so that what is handled twice is counted.
const sqlEffects = `create table effects (n bigint generated always as identity, service text, consumer text, uuid text, payload bytea, extra text)`

// block is the SQL of a guide that begins with this line.
func block(t *testing.T, guide, first string) string {
	t.Helper()
	text, err := os.ReadFile(guide)
	require.NoError(t, err)
	for _, found := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		if strings.HasPrefix(found[1], first) {
			return found[1]
		}
	}
	t.Fatalf("%s has no block that begins with %q", guide, first)
	return ""
}

// job is what a handler publishes.
func job(msg *message.Message, consumer string) *message.Message {
	return message.NewMessage("", []byte(fmt.Sprintf(`{"order": %q, "by": %q}`, msg.UUID, consumer)))
}

func uuidOf(payload []byte) string {
	var order struct{ ID string }
	_ = json.Unmarshal(payload, &order)
	return order.ID
}

// orderOf is a message whose payload a json column keeps as it is.
func orderOf(uuid string, n int) *message.Message {
	order := message.NewMessage(uuid, []byte(fmt.Sprintf("{\"id\":  %q, \"n\": 12345678901234567890, \"n\": 1.50 }", uuid)))
	if n%3 == 0 {
		order.Metadata = nil // watermill-sql writes null
	} else {
		order.Metadata.Set("writer", uuid)
	}
	return order
}

// move is a service on its way.
type move struct {
	t    *testing.T
	db   *pgtest.DB
	sql  *sql.DB
	pool *pgxpool.Pool

	mu        sync.Mutex
	committed []string
	modern    [writers]atomic.Bool // which writers are of the new version
	failed    chan error
	stopWork  context.CancelFunc
	working   sync.WaitGroup
	lateID    int
	isolation sql.IsolationLevel
	pgxToo    bool // the first writer of the new version uses pgx
}

const writers = 3

func newMove(t *testing.T) *move {
	m := &move{t: t, db: pgtest.New(t), failed: make(chan error, writers)}
	m.sql = m.db.SQL(t)
	m.pool = m.db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 15 })
	m.db.Exec(t, sqlEffects)
	return m
}

// run runs a block of a guide as psql would.
func (m *move) run(sql string) {
	m.t.Helper()
	conn := m.db.Conn(m.t)
	_, err := conn.PgConn().Exec(m.t.Context(), sql).ReadAll()
	require.NoError(m.t, err, sql)
	require.Equal(m.t, byte('I'), conn.PgConn().TxStatus())
	require.NoError(m.t, conn.Close(m.t.Context()))
}

type publish func(tx *sql.Tx, uuid string, n int) error

// write starts writers: some of their transactions are rolled back.
func (m *move) write(before, after publish) {
	ctx, cancel := context.WithCancel(context.Background())
	m.stopWork = sync.OnceFunc(func() { cancel(); m.working.Wait() })
	m.t.Cleanup(m.stopWork)
	for w := range writers {
		m.working.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				transaction, publish := m.transaction, before
				if m.modern[w].Load() {
					publish = after
					if w == 0 && m.pgxToo {
						transaction = m.pgxTransaction
					}
				}
				if err := transaction(fmt.Sprintf("%d-%06d", w, n), n, rand.IntN(5) == 0, publish); err != nil {
					m.failed <- fmt.Errorf("writer %d: %w", w, err)
					return
				}
				time.Sleep(time.Duration(rand.IntN(4)) * time.Millisecond) // what a service does in between
			}
		})
	}
}

func (m *move) transaction(uuid string, n int, undo bool, publish publish) error {
	tx, err := m.sql.BeginTx(context.Background(), &sql.TxOptions{Isolation: m.isolation})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := publish(tx, uuid, n); err != nil || undo {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	m.add(uuid)
	return nil
}

func (m *move) pgxTransaction(uuid string, n int, undo bool, _ publish) error {
	tx, err := m.pool.Begin(context.Background())
	if err != nil {
		return err
	}
	defer tx.Rollback(context.Background())
	if err := publishOrderInPgx(tx, orderOf(uuid, n)); err != nil || undo {
		return err
	}
	if err := tx.Commit(context.Background()); err != nil {
		return err
	}
	m.add(uuid)
	return nil
}

func (m *move) add(uuid string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.committed = append(m.committed, uuid)
}

// late begins a transaction that has written something before a step, and publishes behind it.
func (m *move) late(publish publish) (finish func()) {
	tx, err := m.sql.BeginTx(context.Background(), &sql.TxOptions{Isolation: m.isolation})
	require.NoError(m.t, err)
	_, err = tx.Exec("select pg_current_xact_id()")
	require.NoError(m.t, err)
	return func() {
		m.lateID++
		uuid := fmt.Sprintf("late-%d", m.lateID)
		require.NoError(m.t, publish(tx, uuid, 1))
		require.NoError(m.t, tx.Commit())
		m.add(uuid)
	}
}

// deploy replaces the writers one by one, each when the one before has committed something.
func (m *move) deploy(modern bool) {
	for w := range writers {
		m.modern[w].Store(modern)
		m.mu.Lock()
		from := len(m.committed)
		m.mu.Unlock()
		m.eventually("writers go on", func() bool {
			m.mu.Lock()
			defer m.mu.Unlock()
			return slices.ContainsFunc(m.committed[from:], func(uuid string) bool { return strings.HasPrefix(uuid, fmt.Sprint(w)) })
		})
	}
}

func (m *move) eventually(what string, shown func() bool) {
	m.t.Helper()
	late := time.After(2 * time.Minute)
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for !shown() {
		select {
		case err := <-m.failed:
			m.t.Fatal(err)
		case <-late:
			m.t.Fatalf("%s: not within two minutes", what)
		case <-again.C:
		}
	}
}

// handled waits until a service has handled so many events more, for each of the consumers.
func (m *move) handled(service string, more int, consumers ...string) {
	m.t.Helper()
	for _, consumer := range consumers {
		count := func() int {
			return pgtest.Value[int](m.t, m.db, `select count(*) from effects where service = $1 and consumer = $2`, service, consumer)
		}
		goal := count() + more
		m.eventually(fmt.Sprintf("%s of the %s service handles %d", consumer, service, goal), func() bool { return count() >= goal })
	}
}

// finish ends the writers, waits until all is handled, and requires that all was handled once and in each writer's order.
func (m *move) finish(consumers ...string) {
	m.t.Helper()
	m.stopWork()
	require.Empty(m.t, m.failed)
	require.Zero(m.t, pgtest.Value[int](m.t, m.db, `select deadlocks from pg_stat_database where datname = current_database()`))
	slices.Sort(m.committed)
	for _, consumer := range consumers {
		m.eventually(consumer+" handles all", func() bool {
			return pgtest.Value[int](m.t, m.db, `select count(distinct uuid) from effects where consumer = $1`, consumer) >= len(m.committed)
		})
		got := pgtest.Column[string](m.t, m.db, `select uuid from effects where consumer = $1 order by n`, consumer)
		last := map[string]string{}
		for _, uuid := range got {
			writer, _, _ := strings.Cut(uuid, "-")
			require.Less(m.t, last[writer], uuid, "%s handled the events of writer %s in another order", consumer, writer)
			last[writer] = uuid
		}
		slices.Sort(got)
		require.Equal(m.t, m.committed, got, consumer)
	}
	require.Zero(m.t, pgtest.Value[int](m.t, m.db, `select count(*) from effects
		where service <> 'jobs' and payload <> convert_to('{"id":  "' || uuid || '", "n": 12345678901234567890, "n": 1.50 }', 'UTF8')`))
}

// serve runs a router until it is stopped.
func (m *move) serve(add func(*message.Router) error) (stop func()) {
	m.t.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, nil)
	require.NoError(m.t, err)
	require.NoError(m.t, add(router))
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	<-router.Running()
	stop = sync.OnceFunc(func() {
		require.NoError(m.t, router.Close())
		require.NoError(m.t, <-ended)
	})
	m.t.Cleanup(stop)
	return stop
}

func consumerOf(l library, group string) string {
	if group == "" {
		return l.topic
	}
	return group
}

// oldReader runs a group as before.
func (m *move) oldReader(l library, group string) (stop func()) {
	m.t.Helper()
	sub, err := l.subscriber(m.sql, group)
	require.NoError(m.t, err)
	consumer := consumerOf(l, group)
	return m.serve(func(router *message.Router) error {
		if l.envelopes {
			_, err := forwarder.NewForwarder(sub, m.broker("old", l.exec), nil, forwarder.Config{Router: router})
			return err
		}
		router.AddConsumerHandler("old", l.topic, sub, func(msg *message.Message) error {
			err := l.exec(msg.Context(), sqlEffect, "old", consumer, msg.UUID, []byte(msg.Payload), msg.Metadata.Get("writer"))
			return errors.Join(err, l.publishJob(msg, job(msg, consumer)))
		})
		return nil
	})
}

// broker is what the forwarder publishes to. It writes in the transaction of the envelope, so that its messages can be counted.
func (m *move) broker(service string, exec func(ctx context.Context, sql string, args ...any) error) message.Publisher {
	return publisherFunc(func(topic string, messages ...*message.Message) error {
		for _, msg := range messages {
			if err := exec(msg.Context(), sqlEffect, service, forwarderTopic, msg.UUID, []byte(msg.Payload), topic); err != nil {
				return err
			}
		}
		return nil
	})
}

func execInUnit(ctx context.Context, sql string, args ...any) error {
	unit, ok := cursor.UnitFromContext(ctx)
	if !ok {
		return cursor.ErrNoUnit
	}
	tx, err := unit.Tx(ctx)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, sql, args...)
	return err
}

func (m *move) newReader(l library, group string, logger *logtest.Logger) (stop func()) {
	m.t.Helper()
	return m.serve(func(router *message.Router) error {
		if l.envelopes {
			_, err := newForwarder(router, m.pool, m.broker("new", execInUnit), logger)
			return err
		}
		return addConsumer(router, m.pool, consumerOf(l, group), handleOrder, logger)
	})
}

func TestServiceMovesFromWatermillSQLAndBackUnderWriters(t *testing.T) {
	t.Parallel()
	for name, l := range map[string]library{"v3": withV3("JSON"), "v3, bytea": withBytea(), "v3, repeatable read": withRepeatableRead(), "v4": withV4(false), "v4 queue": withV4(true), "v3, forwarder": withForwarder()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMove(t)
			m.pgxToo = !l.envelopes && !l.staged
			text := func(first string) string {
				text := strings.ReplaceAll(block(t, l.guide, first), "orders", l.topic)
				return strings.NewReplacer(l.adapt...).Replace(text)
			}
			queries, err := l.initialize()
			require.NoError(t, err)
			for _, q := range queries {
				m.db.Exec(t, q)
			}
			before := func(tx *sql.Tx, uuid string, n int) error { return l.publish(tx, "orders", orderOf(uuid, n)) }
			after := func(tx *sql.Tx, uuid string, n int) error { return publishOrder(tx, orderOf(uuid, n)) }
			if l.envelopes {
				after = func(tx *sql.Tx, uuid string, n int) error { return publishEnveloped(tx, orderOf(uuid, n)) }
			}
			if l.staged {
				m.isolation = sql.LevelRepeatableRead
				after = func(tx *sql.Tx, uuid string, n int) error { return stageOrder(tx, orderOf(uuid, n)) }
			}
			var consumers []string
			for _, group := range l.groups {
				consumers = append(consumers, consumerOf(l, group))
			}
			queue := !strings.Contains(text(l.cutOver), "watermill_offsets_")

			// Who reads the jobs is no part of the move.
			jobs, err := l.jobReader(m.sql)
			require.NoError(t, err)
			m.serve(func(router *message.Router) error {
				router.AddConsumerHandler("jobs", "invoices", jobs, func(msg *message.Message) error {
					return l.exec(msg.Context(), sqlEffect, "jobs", "jobs", string(msg.Payload), []byte{}, "")
				})
				return nil
			})

			m.write(before, after)
			m.oldReader(l, l.groups[0])
			var stops []func()
			for _, group := range l.groups[1:] {
				stops = append(stops, m.oldReader(l, group))
			}
			m.handled("old", 20, consumers...)
			for _, stop := range stops { // these have more to read than the first
				stop()
			}
			m.handled("old", 20, consumers[0])

			_, err = migrations.Up(t.Context(), m.pool, nil)
			require.NoError(t, err)
			if l.staged {
				numbering, err := sequencer.New(m.pool, sequencer.Config{}, nil)
				require.NoError(t, err)
				ctx, cancel := context.WithCancel(context.Background())
				ended := make(chan error, 1)
				go func() { ended <- numbering.Run(ctx) }()
				t.Cleanup(func() { cancel(); <-ended })
			}
			if !queue {
				rows := pgtest.Column[string](t, m.db, `select consumer_group || ' ' || (count > 0) from (`+
					strings.TrimSuffix(strings.TrimSpace(text("-- unread\n")), ";")+`) unread`)
				require.Len(t, rows, len(l.groups))
				for _, group := range l.groups[1:] {
					require.Contains(t, rows, group+" true")
				}
			}
			finish := m.late(before)
			m.run(text(l.cutOver))
			finish()
			m.run(text(l.cutOver)) // once more changes nothing
			logger := logtest.NewLogger()
			for _, group := range l.groups {
				m.newReader(l, group, logger)
			}
			m.handled("new", 20, consumers...)
			old := pgtest.Value[int](t, m.db, `select count(*) from effects where service = 'old'`)
			m.deploy(true)
			m.handled("new", 20, consumers...)
			require.Equal(t, old, pgtest.Value[int](t, m.db, `select count(*) from effects where service = 'old'`), "the old reader is up and finds nothing")

			// One of them stands further back than the others.
			m.db.Exec(t, `update event_consumer_cursors set paused_at = now() where consumer = $1`, consumers[len(consumers)-1])
			if len(consumers) > 1 {
				m.handled("new", 20, consumers[0])
			}
			finish = m.late(before)
			finishNew := m.late(after)
			m.run(text(l.back))
			m.db.Exec(t, `update event_consumer_cursors set paused_at = null`)
			finish()
			finishNew()
			fresh := pgtest.Value[int](t, m.db, `select count(*) from effects where service = 'new'`)
			for _, group := range l.groups[1:] {
				m.oldReader(l, group)
			}
			m.handled("old", 20, consumers...)
			m.deploy(false)
			m.run(text(l.done))
			m.handled("old", 20, consumers...)
			require.Equal(t, fresh, pgtest.Value[int](t, m.db, `select count(*) from effects where service = 'new'`), "the new reader is up and does nothing")

			// And again, for good.
			m.eventually("all is numbered", func() bool { return pgtest.Value[int](t, m.db, `select count(*) from event_outbox`) == 0 })
			m.run(text(l.cutOver))
			m.deploy(true)
			m.handled("new", 20, consumers...)
			m.finish(consumers...)

			if !l.envelopes {
				want := len(consumers) * len(m.committed)
				m.eventually("all jobs are read", func() bool {
					return pgtest.Value[int](t, m.db, `select count(*) from effects where service = 'jobs'`) >= want
				})
				require.Equal(t, want, pgtest.Value[int](t, m.db, `select count(distinct uuid) from effects where service = 'jobs'`))
				require.Equal(t, want, pgtest.Value[int](t, m.db, `select count(*) from watermill_invoices`))
			}
			require.Empty(t, logger.Lines("", "error"))
			verdict, err := operate.Verify(t.Context(), m.db.Conn(t), nil, nil)
			require.NoError(t, err)
			require.True(t, verdict.OK(), "%+v", verdict)
		})
	}
}

// pollOutbox is the sender of an outbox that was written by hand.
func (m *move) pollOutbox() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var polling sync.WaitGroup
	polling.Go(func() {
		for ctx.Err() == nil {
			if err := m.sendOutbox(); err != nil {
				m.failed <- fmt.Errorf("sender: %w", err)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(quick):
			}
		}
	})
	stop = sync.OnceFunc(func() { cancel(); polling.Wait() })
	m.t.Cleanup(stop)
	return stop
}

func (m *move) sendOutbox() error {
	tx, err := m.sql.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	_, err = tx.Exec(`
		with batch as (
			select id, topic, payload from outbox where sent_at is null order by id limit 10 for update
		), sent as (
			update outbox o set sent_at = now() from batch b where o.id = b.id
		)
		insert into effects (service, consumer, uuid, payload, extra)
		select 'old', 'sender', payload->>'id', convert_to(payload::text, 'UTF8'), topic from batch order by id`)
	if err != nil {
		return err
	}
	return tx.Commit()
}

func TestServiceMovesFromAnOutboxAndBackUnderWriters(t *testing.T) {
	t.Parallel()
	const guide, sender = "from-outbox.md", "sender"
	m := newMove(t)
	m.run(block(t, guide, "-- the outbox\n"))
	before := func(tx *sql.Tx, uuid string, n int) error {
		_, err := tx.Exec(`insert into outbox (topic, payload) values ('orders', $1)`, string(orderOf(uuid, n).Payload))
		return err
	}
	after := func(tx *sql.Tx, uuid string, n int) error {
		order := orderOf(uuid, n)
		order.Metadata = nil
		return publishOrder(tx, order)
	}
	m.write(before, after)
	stop := m.pollOutbox()
	m.handled("old", 40, sender)

	_, err := migrations.Up(t.Context(), m.pool, nil)
	require.NoError(t, err)
	finish := m.late(before)
	m.run(block(t, guide, "-- cut over\n"))
	finish()
	m.run(block(t, guide, "-- cut over\n"))
	logger := logtest.NewLogger()
	m.serve(func(router *message.Router) error { return addSender(router, m.pool, send, logger) })
	m.handled("new", 40, sender)
	require.Equal(t, []string{"orders"}, pgtest.Column[string](t, m.db, `select distinct extra from effects`))
	require.Zero(t, pgtest.Value[int](t, m.db, `select count(*) from event_log l where uuid like 'outbox/%' and not exists (
		select from outbox o where 'outbox/' || o.id = l.uuid and o.payload->>'id' = convert_from(l.payload, 'UTF8')::json->>'id')`))
	m.deploy(true)
	m.handled("new", 40, sender)

	m.db.Exec(t, `update event_consumer_cursors set paused_at = now()`)
	finish, finishNew := m.late(before), m.late(after)
	m.run(block(t, guide, "-- back\n"))
	m.db.Exec(t, `update event_consumer_cursors set paused_at = null`)
	finish()
	finishNew()
	m.handled("old", 40, sender)
	m.deploy(false)
	m.run(block(t, guide, "-- back for good\n"))
	m.handled("old", 40, sender)
	stop()
	m.run(block(t, guide, "-- cut over\n"))
	m.handled("new", 40, sender)
	m.finish(sender)
	require.Empty(t, logger.Lines("", "error"))
}

func TestGuidesShowTheCodeThatIsTested(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("service_test.go")
	require.NoError(t, err)
	dedented := func(code string) string {
		lines := strings.Split(code, "\n")
		for i := range lines {
			lines[i] = strings.TrimLeft(lines[i], "\t")
		}
		return strings.Join(lines, "\n")
	}
	guides, err := filepath.Glob("*.md")
	require.NoError(t, err)
	require.Len(t, guides, 3)
	shown := 0
	for _, guide := range guides {
		text, err := os.ReadFile(guide)
		require.NoError(t, err)
		for _, code := range regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
			require.Contains(t, dedented(string(source)), dedented(code[1]), guide)
			shown++
		}
	}
	require.Greater(t, shown, 8)
}
