package publisher_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/lib/pq"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

func openPQ(t *testing.T, db *pgtest.DB) *sql.DB {
	t.Helper()
	connector, err := pq.NewConnector(db.URL())
	require.NoError(t, err)
	handle := sql.OpenDB(connector)
	t.Cleanup(func() { _ = handle.Close() })
	return handle
}

func TestEventsAreAppendedInTheCallersPgxTransaction(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	events := newEventLog(t, nil, publisher.EventLogConfig{})
	for _, end := range []func(pgx.Tx) error{
		func(tx pgx.Tx) error { return tx.Commit(t.Context()) },
		func(tx pgx.Tx) error { return tx.Rollback(t.Context()) },
		func(tx pgx.Tx) error { return tx.Commit(t.Context()) },
	} {
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		before := len(log(t, db))
		require.NoError(t, events.InTx(tx).Publish("orders", msg("one"), msg("two")))
		require.Len(t, log(t, db), before)
		require.NoError(t, end(tx))
	}
	require.Equal(t, []string{"one", "two", "one", "two"}, log(t, db))
}

func TestEventsAreAppendedInTheCallersSQLTransaction(t *testing.T) {
	t.Parallel()
	for driver, open := range map[string]func(*testing.T, *pgtest.DB) *sql.DB{
		"pgx": func(t *testing.T, db *pgtest.DB) *sql.DB { return db.SQL(t) },
		"pq":  openPQ,
	} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			handle := open(t, db)
			at := time.Date(2026, 1, 2, 3, 4, 5, 678901000, time.FixedZone("", 3600))
			events := newEventLog(t, nil, publisher.EventLogConfig{
				Key:        func(_ string, m *message.Message) string { return "key of " + m.UUID },
				OccurredAt: func(string, *message.Message) time.Time { return at },
			})
			for _, commit := range []bool{true, false, true} {
				tx, err := handle.BeginTx(t.Context(), nil)
				require.NoError(t, err)
				binary := message.NewMessage("binary", []byte{0, 0xff, '\\', 0x27})
				binary.Metadata = message.Metadata{"quote": `"'\`, "": "empty"}
				require.NoError(t, events.InSQLTx(tx).Publish("orders", msg("one"), binary, message.NewMessage("", nil)))
				if commit {
					require.NoError(t, tx.Commit())
				} else {
					require.NoError(t, tx.Rollback())
				}
			}
			type event struct {
				Seq                    int64
				At                     time.Time
				Topic, Key, UUID, Meta string
				Payload                []byte
			}
			rows, _ := db.Conn(t).Query(t.Context(), `select seq, occurred_at, topic, key, uuid, metadata::text, payload from event_log order by seq`)
			got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[event])
			require.NoError(t, err)
			require.Len(t, got, 6)
			for i, e := range got {
				require.EqualValues(t, i+1, e.Seq)
				require.True(t, at.Equal(e.At), e.At)
				require.Equal(t, "key of "+e.UUID, e.Key)
			}
			for i := 0; i < 6; i += 3 {
				require.Equal(t, "one", string(got[i].Payload))
				require.Equal(t, []byte{0, 0xff, '\\', 0x27}, got[i+1].Payload)
				require.JSONEq(t, `{"quote": "\"'\\", "": "empty"}`, got[i+1].Meta)
				require.Equal(t, []byte{}, got[i+2].Payload)
				require.Equal(t, "{}", got[i+2].Meta)
			}
		})
	}
}

func TestEventsAreAppendedInATransactionOfTheirOwn(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	pool := db.Pool(t)
	acquired, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer acquired.Release()
	for i, by := range []publisher.BatchSender{pool, db.Conn(t), acquired} {
		require.NoError(t, newEventLog(t, by, publisher.EventLogConfig{}).Publish("orders", msg("one"), msg("two")))
		require.Len(t, log(t, db), 2*(i+1))
	}
	require.Equal(t, 3, pgtest.Value[int](t, db, `select count(distinct recorded_at) from event_log`))
}

func TestPublisherWithoutADatabaseIsForTransactionsOnly(t *testing.T) {
	t.Parallel()
	events := newEventLog(t, nil, publisher.EventLogConfig{})
	require.ErrorContains(t, events.Publish("orders", msg("one")), "InTx")
	require.NoError(t, events.Publish("orders"))
	require.NoError(t, events.Close())
	require.ErrorContains(t, events.Publish("orders", msg("one")), "InTx")
}

func TestTransactionOfTheCallerIsNeverCommitted(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	events := newEventLog(t, conn, publisher.EventLogConfig{})
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)

	_, err = publisher.NewEventLog(tx, publisher.EventLogConfig{})
	require.ErrorContains(t, err, "InTx")
	require.ErrorContains(t, events.Publish("orders", msg("one")), "InTx")
	require.ErrorContains(t, events.InSQLTx(db.SQL(t)).Publish("orders", msg("one")), "*sql.Tx")
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, events.Publish("orders", msg("two")))
	require.Equal(t, []string{"two"}, log(t, db))
}

func TestMaxPayloadIsChecked(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{-1, 256<<20 + 1} {
		_, err := publisher.NewEventLog(nil, publisher.EventLogConfig{MaxPayload: limit})
		require.ErrorContains(t, err, fmt.Sprintf("MaxPayload (%d)", limit))
	}
}

func TestFailedAppendLeavesTheConnectionUsable(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			db.Exec(t, `alter table event_outbox add check (topic <> 'refused');
				create function late() returns trigger language plpgsql as $$ begin
					if new.topic = 'later' then raise exception 'too late' using errcode = 'P0099'; end if; return null; end $$;
				create constraint trigger late after insert on event_outbox deferrable initially deferred
					for each row execute function late()`)
			pool := db.Pool(t, inMode(mode), func(c *pgxpool.Config) { c.MaxConns = 1 })
			acquired, err := pool.Acquire(t.Context())
			require.NoError(t, err)
			defer acquired.Release()
			for _, by := range []publisher.BatchSender{acquired, acquired.Conn()} {
				events := newEventLog(t, by, publisher.EventLogConfig{})
				for topic, code := range map[string]string{"refused": "23514", "later": "P0099"} {
					err := events.Publish(topic, msg("one"), msg("two"))
					var pgErr *pgconn.PgError
					require.ErrorAs(t, err, &pgErr)
					require.Equal(t, code, pgErr.Code)
					require.Equal(t, byte('I'), acquired.Conn().PgConn().TxStatus())
				}
				require.NoError(t, events.Publish("orders", msg("three")))
			}
			require.Equal(t, []string{"three", "three"}, log(t, db))
		})
	}
}

func TestContextOfTheFirstMessageEndsTheAppend(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	m := msg("one")
	m.SetContext(ctx)
	err := newEventLog(t, db.Pool(t), publisher.EventLogConfig{}).Publish("orders", m, msg("two"))
	require.ErrorIs(t, err, context.Canceled)
	require.Empty(t, log(t, db))
}

func TestEventsAreAppendedByPlainSQL(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	exec(t, conn, `insert into event_outbox (topic, payload) values ('orders', 'one')`)
	exec(t, conn, `begin; insert into event_outbox (topic, payload) values ('orders', 'lost'); rollback`)
	exec(t, conn, `begin; insert into event_outbox (topic, payload) values ('orders', 'two'), ('orders', 'three'); commit`)
	n, err := conn.CopyFrom(t.Context(), pgx.Identifier{"event_outbox"}, []string{"topic", "key", "payload", "metadata"},
		pgx.CopyFromRows([][]any{
			{"orders", "k", []byte("four"), `{"a": "b"}`},
			{"orders", nil, []byte("five"), `{}`},
		}))
	require.NoError(t, err)
	require.EqualValues(t, 2, n)
	exec(t, conn, `
		create table orders (id int);
		create function tell() returns trigger language plpgsql as $$ begin
			insert into event_outbox (topic, payload) values ('orders', convert_to('order ' || new.id, 'UTF8'));
			return null;
		end $$;
		create trigger tell after insert on orders for each row execute function tell();
		create constraint trigger tell_later after insert on orders deferrable initially deferred
			for each row execute function tell()`)
	exec(t, conn, `insert into orders values (1), (2)`)
	exec(t, conn, `begin; insert into orders values (3); rollback`)

	require.Equal(t, []string{"one", "two", "three", "four", "five", "order 1", "order 2", "order 1", "order 2"}, log(t, db))
	require.Equal(t, []string{"k"}, pgtest.Column[string](t, db, `select key from event_log where key is not null`))
	require.True(t, pgtest.Value[bool](t, db, `select bool_and(recorded_at >= occurred_at and uuid <> '') from event_log`))
}

func TestRowThatNoConsumerCouldReadIsRefusedByTheOutbox(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	for _, metadata := range []string{`{"n": 1}`, `{"a": ["x"]}`, `{"a": {"b": "c"}}`, `{"a": null}`, `[]`, `"text"`, `null`} {
		_, err := conn.Exec(t.Context(), `insert into event_outbox (topic, metadata) values ('orders', $1)`, metadata)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr, metadata)
		require.Equal(t, "23514", pgErr.Code, metadata)
	}
	_, err := conn.Exec(t.Context(), `insert into event_outbox (topic) values ('')`)
	require.ErrorContains(t, err, "23514")
	require.Empty(t, log(t, db))
}

func TestOutboxSaysWhyItRefusesARow(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	db.Exec(t, `create schema odd; create function odd.isfinite(timestamptz) returns boolean language sql return true;
		create domain odd.text as pg_catalog.text check (false)`)
	for _, path := range []string{"public", "odd, pg_catalog", ""} {
		conn := db.Conn(t)
		_, err := conn.Exec(t.Context(), `select set_config('search_path', $1, false)`, path)
		require.NoError(t, err)
		for values, reason := range map[string]string{
			`(topic) values ('')`:                                            "its topic is empty",
			`(topic) values ('*')`:                                           "its topic is what consumers of all topics subscribe to",
			`(topic, occurred_at) values ('orders', '-infinity')`:            "its occurred_at is infinite",
			`(topic, uuid, once) values ('orders', repeat('u', 2001), true)`: "its uuid is longer than 2000 bytes, and once keeps no more",
			`(topic, metadata, staged) values ('orders', '{"n": 1}', true)`:  "its metadata is not an object of strings",
		} {
			_, err := conn.Exec(t.Context(), "insert into public.event_outbox "+values)
			require.ErrorContains(t, err, "an event cannot be appended: "+reason, path)
			var pgErr *pgconn.PgError
			require.ErrorAs(t, err, &pgErr)
			require.Equal(t, []string{"23514", "outbox_check"}, []string{pgErr.Code, pgErr.ConstraintName})
		}
		_, err = conn.Exec(t.Context(), `insert into public.event_outbox (topic, uuid) values ('orders', repeat('u', 2001))`)
		require.NoError(t, err)
	}
	require.Len(t, log(t, db), 3)
}

func TestEventUndoneBySavepointIsNotAppended(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	events := newEventLog(t, nil, publisher.EventLogConfig{})
	err := pgx.BeginFunc(t.Context(), db.Conn(t), func(tx pgx.Tx) error {
		publish := func(tx pgx.Tx, payload string) { require.NoError(t, events.InTx(tx).Publish("orders", msg(payload))) }
		publish(tx, "one")
		nested, err := tx.Begin(t.Context())
		require.NoError(t, err)
		publish(nested, "undone")
		require.NoError(t, nested.Rollback(t.Context()))
		nested, err = tx.Begin(t.Context())
		require.NoError(t, err)
		publish(nested, "two")
		require.NoError(t, nested.Commit(t.Context()))
		publish(tx, "three")
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, []string{"one", "two", "three"}, log(t, db))
}

func TestConstraintsSetImmediateNumberAtOnceAndAgain(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	listener := db.Conn(t)
	exec(t, listener, `listen event_log`)
	conn := db.Conn(t)
	exec(t, conn, `begin; insert into event_outbox (topic, payload) values ('orders', 'one')`)
	exec(t, conn, `set constraints all immediate`)
	var seq int
	require.NoError(t, conn.QueryRow(t.Context(), `select seq from event_log`).Scan(&seq))
	require.Equal(t, 1, seq)
	exec(t, conn, `insert into event_outbox (topic, payload) values ('orders', 'two'), ('orders', 'three')`)
	exec(t, conn, `savepoint s; insert into event_outbox (topic, payload) values ('orders', 'undone'); rollback to s`)
	exec(t, conn, `set constraints all deferred`)
	exec(t, conn, `insert into event_outbox (topic, payload) values ('orders', 'four'); commit`)
	require.Equal(t, []string{"one", "two", "three", "four"}, log(t, db))
	require.Equal(t, 1, notifications(t, db, listener))
}

// notifications counts those that a connection has got by now: what comes before one that is sent here.
func notifications(t *testing.T, db *pgtest.DB, listener *pgx.Conn) (n int) {
	t.Helper()
	exec(t, listener, `listen "the end"`)
	db.Exec(t, `notify "the end"`)
	for {
		heard, err := listener.WaitForNotification(bounded(t))
		require.NoError(t, err)
		require.Empty(t, heard.Payload)
		if heard.Channel == "the end" {
			return n
		}
		n++
	}
}

func TestEveryCommittedTransactionNotifiesOnce(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	listener := db.Conn(t)
	exec(t, listener, `listen event_log`)
	conn := db.Conn(t)
	events := newEventLog(t, conn, publisher.EventLogConfig{})

	require.NoError(t, events.Publish("orders", msg("1"), msg("2"), msg("3")))
	exec(t, conn, `begin; insert into event_outbox (topic) values ('orders'); insert into event_outbox (topic) values ('orders'); commit`)
	exec(t, conn, `begin; insert into event_outbox (topic) values ('orders'); rollback`)
	exec(t, conn, `begin; savepoint s; insert into event_outbox (topic) values ('orders'); rollback to s; commit`)
	exec(t, conn, `begin; insert into event_outbox (topic) values ('orders'); delete from event_outbox; commit`)
	require.Equal(t, 2, notifications(t, db, listener))
	require.Len(t, log(t, db), 5)
}

func TestThousandsOfEventsInOneTransaction(t *testing.T) {
	t.Parallel()
	var want []string
	messages := make([]*message.Message, 10_000)
	for i := range messages {
		messages[i] = msg(fmt.Sprint(i))
		want = append(want, fmt.Sprint(i))
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			listener := db.Conn(t)
			exec(t, listener, `listen event_log`)
			require.NoError(t, newEventLog(t, db.Pool(t, inMode(mode)), publisher.EventLogConfig{}).Publish("orders", messages...))
			require.Equal(t, want, log(t, db))
			require.Equal(t, 1, notifications(t, db, listener))
		})
	}
}

func TestSnapshotThatIsTooOldFailsWithSerializationFailure(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			events := newEventLog(t, db.Pool(t), publisher.EventLogConfig{})
			tx, err := db.Conn(t).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			require.NoError(t, events.InTx(tx).Publish("orders", msg("late")))
			require.NoError(t, events.Publish("orders", msg("one")))
			err = tx.Commit(t.Context())
			var pgErr *pgconn.PgError
			require.ErrorAs(t, err, &pgErr)
			require.Equal(t, "40001", pgErr.Code)

			// Where the constraint is not deferred, it is Publish that gets it.
			tx, err = db.Conn(t).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), `set constraints all immediate; select last_seq from event_seq`)
			require.NoError(t, err)
			require.NoError(t, events.Publish("orders", msg("two")))
			err = events.InTx(tx).Publish("orders", msg("late"))
			require.ErrorAs(t, err, &pgErr)
			require.Equal(t, "40001", pgErr.Code)
			require.Equal(t, "40001", cursor.ErrorType(err))
			require.NoError(t, tx.Rollback(t.Context()))

			// Alone, it is committed.
			tx, err = db.Conn(t).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			require.NoError(t, events.InTx(tx).Publish("orders", msg("three")))
			require.NoError(t, tx.Commit(t.Context()))
			require.Equal(t, []string{"one", "two", "three"}, log(t, db))
		})
	}
}

func TestOwnTransactionDoesNotTakeTheSessionsIsolation(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	exec(t, conn, `set default_transaction_isolation = 'serializable'; create table seen (level text);
		create function look() returns trigger language plpgsql as $$ begin
			insert into seen values (current_setting('transaction_isolation')); return null; end $$;
		create trigger look after insert on event_outbox execute function look()`)
	require.NoError(t, newEventLog(t, conn, publisher.EventLogConfig{}).Publish("orders", msg("one")))
	require.Equal(t, "read committed", pgtest.Value[string](t, db, `select level from seen`))
}

func TestOutboxRowOfAnotherTransactionIsRefused(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	open := db.Conn(t)
	exec(t, open, `begin; insert into event_outbox (topic, payload) values ('orders', 'one')`)
	var other string
	require.NoError(t, open.QueryRow(t.Context(), `select pg_current_xact_id()::text`).Scan(&other))
	for _, xid := range []string{other, "0", "3"} {
		_, err := conn.Exec(t.Context(), `insert into event_outbox (xid, topic) values ($1::text::xid8, 'orders')`, xid)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, "23000", pgErr.Code)
	}
	exec(t, open, `commit`)
	require.Equal(t, []string{"one"}, log(t, db))
}

func TestTransactionWithAnAppendCannotBePrepared(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	exec(t, conn, `begin; insert into event_outbox (topic) values ('orders')`)
	_, err := conn.Exec(t.Context(), `prepare transaction 'one'`)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "0A000", pgErr.Code)
	require.Equal(t, byte('I'), conn.PgConn().TxStatus())
	require.Empty(t, log(t, db))
	// The counter is free.
	require.NoError(t, newEventLog(t, conn, publisher.EventLogConfig{}).Publish("orders", msg("two")))
}

func TestWorkBehindAnAppendHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	events := newEventLog(t, db.Pool(t), publisher.EventLogConfig{})
	tx, err := db.Conn(t).Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, events.InTx(tx).Publish("orders", msg("appended first")))
	m := msg("committed first")
	m.SetContext(bounded(t))
	require.NoError(t, events.Publish("orders", m))
	require.Equal(t, []string{"committed first"}, pgtest.Column[string](t, db, `select convert_from(payload, 'UTF8') from event_log`))
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []string{"committed first", "appended first"}, log(t, db))
}

func TestUnrelatedOpenTransactionsHoldNobodyUp(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	idle := db.Conn(t)
	exec(t, idle, `create table other (n int)`)
	exec(t, idle, `begin; insert into other values (1)`)
	prepared := db.Conn(t)
	exec(t, prepared, `begin; insert into other values (2); prepare transaction '`+db.Name()+`'`)
	m := msg("one")
	m.SetContext(bounded(t))
	require.NoError(t, newEventLog(t, db.Pool(t), publisher.EventLogConfig{}).Publish("orders", m))
	require.Equal(t, []string{"one"}, log(t, db))
	exec(t, prepared, `rollback prepared '`+db.Name()+`'`)
}

func TestWritersThatTouchRowsInOppositeOrderDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	events := newEventLog(t, nil, publisher.EventLogConfig{})
	one, two := db.Conn(t), db.Conn(t)
	exec(t, one, `create table business (a int); insert into business values (0)`)
	const update = `update business set a = a + 1`

	first, err := one.Begin(t.Context())
	require.NoError(t, err)
	second, err := two.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, events.InTx(first).Publish("orders", msg("append, then row")))
	_, err = second.Exec(t.Context(), update)
	require.NoError(t, err)
	updated := make(chan error, 1)
	go func() { // waits for the second transaction's row
		_, err := first.Exec(bounded(t), update)
		updated <- err
	}()
	require.NoError(t, events.InTx(second).Publish("orders", msg("row, then append")))
	require.NoError(t, second.Commit(t.Context()))
	require.NoError(t, <-updated)
	require.NoError(t, first.Commit(t.Context()))
	require.Equal(t, []string{"row, then append", "append, then row"}, log(t, db))
}

func TestMissingTablesNameTheNextStep(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, mode := range execModes {
		err := newEventLog(t, db.Pool(t, inMode(mode)), publisher.EventLogConfig{}).Publish("orders", msg("one"))
		require.ErrorIs(t, err, cursor.ErrNotMigrated)
		require.ErrorContains(t, err, "migrations.Up")
	}
	for _, handle := range []*sql.DB{db.SQL(t), openPQ(t, db)} {
		tx, err := handle.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		err = newEventLog(t, nil, publisher.EventLogConfig{}).InSQLTx(tx).Publish("orders", msg("one"))
		require.ErrorIs(t, err, cursor.ErrNotMigrated)
		require.NoError(t, tx.Rollback())
	}
}

func TestKeyIsHashedTheSameForEver(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	keys := map[string]string{"1": "customer 1", "2": "Zürich", "3": ""}
	require.NoError(t, newEventLog(t, db.Pool(t), publisher.EventLogConfig{
		Key: func(_ string, m *message.Message) string { return keys[m.UUID] },
	}).Publish("orders", msg("1"), msg("2"), msg("3")))
	require.Equal(t, []string{"customer 1 2126609710", "Zürich 1112631390", "none"}, pgtest.Column[string](t, db,
		`select coalesce(key || ' ' || key_hash, 'none') from event_log order by seq`))
}
