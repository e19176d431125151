package operate_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
)

var (
	order  = operate.Order{By: "me", Reason: "why"}
	dry    = operate.Order{By: "me", Reason: "why", DryRun: true}
	orders = cursor.Key{Consumer: "push", Topic: "orders"}
)

func interventions(t *testing.T, db *pgtest.DB) []string {
	t.Helper()
	return pgtest.Column[string](t, db, `select concat_ws(' ', action, from_seq, to_seq, by, reason) from event_consumer_interventions
		where action <> 'create' order by id`)
}

func TestCursorIsSoughtToWhereANewOneWouldStart(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, orders, beginning)
	db.Exec(t, `insert into event_outbox (topic, occurred_at) select case when i % 2 = 0 then 'orders' else 'other' end,
		timestamptz '2026-01-01' + i * interval '1 hour' from generate_series(1, 20) i order by i`)
	db.Exec(t, "delete from event_log where seq <= 4")
	conn := db.Conn(t)
	for _, tt := range []struct {
		to       cursor.Start
		from, at int64
		events   int64
	}{
		{cursor.FromBeginning(), 0, 4, 0},
		{cursor.FromHead(), 4, 20, 8},
		{cursor.FromSeq(11), 20, 10, 5},
		{cursor.FromSeq(21), 10, 20, 5},
		{cursor.FromTime(time.Date(2026, 1, 1, 14, 30, 0, 0, time.UTC)), 20, 14, 3},
		{cursor.FromTime(time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)), 14, 20, 3},
	} {
		planned, err := operate.Seek(t.Context(), conn, nil, orders, tt.to, dry)
		require.NoError(t, err)
		require.Equal(t, tt.from, logtest.Position(t, db, orders), "a dry run moves nothing")
		done, err := operate.Seek(t.Context(), conn, nil, orders, tt.to, order)
		require.NoError(t, err)
		require.Equal(t, tt.at, logtest.Position(t, db, orders))
		require.WithinDuration(t, planned.At, done.At, time.Minute)
		planned.At = done.At
		require.Equal(t, operate.Change{Cursor: orders, Action: "seek", From: tt.from, To: tt.at, Events: tt.events, By: "me", Reason: "why", At: done.At}, done)
		done.DryRun = true
		require.Equal(t, done, planned)
	}
	require.Len(t, interventions(t, db), 6)
	require.Equal(t, "seek 0 4 me why", interventions(t, db)[0])

	for to, text := range map[cursor.Start]string{
		cursor.FromSeq(22): "whose head is 20", cursor.FromSeq(4): "whose oldest is 5",
	} {
		_, err := operate.Seek(t.Context(), conn, nil, orders, to, order)
		require.ErrorIs(t, err, operate.ErrRefused)
		require.ErrorContains(t, err, text)
	}
	_, err := operate.Seek(t.Context(), conn, nil, orders, cursor.FromSeq(0), order)
	require.ErrorContains(t, err, "the first event has seq 1")
	_, err = operate.Seek(t.Context(), conn, nil, push, cursor.FromHead(), order)
	require.ErrorIs(t, err, cursor.ErrCursorMissing)
	_, err = operate.Seek(t.Context(), conn, nil, orders, cursor.FromHead(), operate.Order{})
	require.ErrorContains(t, err, "missing By")
	require.Len(t, interventions(t, db), 6, "what is refused is not recorded")

	// A log that retention has emptied has a head, and no other place.
	db.Exec(t, "delete from event_log")
	_, err = operate.Seek(t.Context(), conn, nil, orders, cursor.FromBeginning(), order)
	require.NoError(t, err)
	require.Equal(t, int64(20), logtest.Position(t, db, orders))
}

func TestOnlyTheNextEventIsSkipped(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, orders, beginning)
	conn := db.Conn(t)
	_, err := operate.Skip(t.Context(), conn, nil, orders, 1, order)
	require.ErrorContains(t, err, "no event behind the cursor")
	logtest.Append(t, db, "other", 2)
	logtest.Append(t, db, "orders", 3)
	_, _, err = cursor.RecordFailure(t.Context(), conn, nil, orders, "test", cursor.Attempt{Seq: 3, Through: 3, ErrorType: "x", Jitter: 1})
	require.NoError(t, err)

	_, err = operate.Skip(t.Context(), conn, nil, orders, 4, order)
	require.ErrorIs(t, err, operate.ErrRefused)
	require.ErrorContains(t, err, "that is event 3")
	change, err := operate.Skip(t.Context(), conn, nil, orders, 3, dry)
	require.NoError(t, err)
	require.Equal(t, []int64{0, 3, 1}, []int64{change.From, change.To, change.Events})
	require.Equal(t, int64(1), pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures"))
	_, err = operate.Skip(t.Context(), conn, nil, orders, 3, order)
	require.NoError(t, err)
	require.Equal(t, int64(3), logtest.Position(t, db, orders))
	require.Equal(t, int64(0), pgtest.Value[int64](t, db, "select count(*) from event_consumer_failures"))
	require.Equal(t, []string{"skip 0 3 me why"}, interventions(t, db))

	db.Exec(t, "delete from event_log where seq = 4")
	_, err = operate.Skip(t.Context(), conn, nil, orders, 5, order)
	require.ErrorContains(t, err, "numbers are missing")
	db.Exec(t, "update event_consumer_cursors set last_seq = 9")
	_, err = operate.Skip(t.Context(), conn, nil, orders, 10, order)
	require.ErrorIs(t, err, operate.ErrRefused)
	require.ErrorIs(t, err, cursor.ErrCursorAhead)
}

func TestHeldCursorBeginsNoRound(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 1)
	conn := db.Conn(t)
	status := func() cursor.Status {
		r, o := open(t, db, push)
		defer r.Rollback(t.Context())
		return o.Status
	}
	step := func(f func(context.Context, cursor.Beginner, *cursor.Log, cursor.Key, operate.Order) (operate.Change, error), o operate.Order) error {
		_, err := f(t.Context(), conn, nil, push, o)
		return err
	}
	require.ErrorIs(t, step(operate.Resume, order), operate.ErrRefused)
	require.NoError(t, step(operate.Pause, dry))
	require.Equal(t, cursor.Ready, status())
	require.NoError(t, step(operate.Pause, order))
	require.Equal(t, cursor.Held, status())
	require.ErrorContains(t, step(operate.Pause, order), "paused since")
	require.NoError(t, step(operate.Resume, order))
	require.Equal(t, cursor.Ready, status())

	pass(t, db, push)
	require.ErrorContains(t, step(operate.Retire, order), "moved within the last minute")
	require.NoError(t, step(operate.Retire, operate.Order{By: "me", Reason: "why", Force: true}))
	require.Equal(t, cursor.Held, status())
	require.ErrorContains(t, step(operate.Retire, order), "retired since")
	require.ErrorContains(t, step(operate.Pause, order), "retired since")
	require.NoError(t, step(operate.Resume, order))
	require.Equal(t, cursor.CaughtUp, status())
	db.Exec(t, "update event_consumer_cursors set moved_at = now() - interval '2 minutes'")
	require.NoError(t, step(operate.Retire, order))
	require.Equal(t, []string{"pause 0 0 me why", "resume 0 0 me why", "retire 1 1 me why", "resume 1 1 me why", "retire 1 1 me why"}, interventions(t, db))
}

func TestChangeWaitsForTheRoundAndSaysWhoHoldsIt(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	logtest.Append(t, db, "orders", 2)
	pass(t, db, push, limits(1, 1<<20, 1000), as("worker-7", "worker-7/1", 10))

	r, conn := prepare(t, db, push)
	_, err := r.Open(t.Context())
	require.NoError(t, err)
	pid := conn.PgConn().PID()
	_, err = operate.Pause(t.Context(), db.Conn(t), nil, push, order)
	var locked *operate.LockedError
	require.ErrorAs(t, err, &locked)
	require.Equal(t, int(pid), locked.PID)
	require.Equal(t, "worker-7", locked.MovedBy)
	require.Greater(t, locked.Held, 5*time.Second)
	require.Empty(t, interventions(t, db))

	// Within a transaction of the caller's, which goes on.
	waiting, done := db.Conn(t), make(chan error, 1)
	go func() {
		_, err := operate.Pause(context.Background(), waiting, nil, push, order)
		done <- err
	}()
	require.Eventually(t, func() bool {
		return pgtest.Value[bool](t, db, "select cardinality(pg_blocking_pids($1)) > 0", int32(waiting.PgConn().PID()))
	}, time.Minute, time.Millisecond)
	r.Rollback(t.Context())
	require.NoError(t, <-done)
}

func TestLossesAreSettled(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	conn := db.Conn(t)
	logtest.Append(t, db, "orders", 10)
	db.Exec(t, "delete from event_log where seq <= 4")
	pass(t, db, push)
	pass(t, db, push)
	db.Exec(t, "insert into event_consumer_losses (consumer, topic, shard, first_seq, last_seq, reason, recorded_by) values ('push', '', '', 7, 9, 'resume_age', 'w')")
	list, err := operate.Losses(t.Context(), conn, nil, false, 10)
	require.NoError(t, err)
	require.Len(t, list, 2)
	require.Equal(t, []any{push, int64(1), int64(4), "retention", "test"}, []any{list[0].Cursor, list[0].First, list[0].Last, list[0].Reason, list[0].RecordedBy})

	_, err = operate.SettleLosses(t.Context(), conn, nil, push, 2, order)
	require.ErrorIs(t, err, operate.ErrRefused)
	change, err := operate.SettleLosses(t.Context(), conn, nil, push, 0, dry)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 9, 7}, []int64{change.From, change.To, change.Events})
	change, err = operate.SettleLosses(t.Context(), conn, nil, push, 1, order)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 4, 4}, []int64{change.From, change.To, change.Events})
	list, err = operate.Losses(t.Context(), conn, nil, false, 10, push)
	require.NoError(t, err)
	require.Len(t, list, 1)
	list, err = operate.Losses(t.Context(), conn, nil, true, 10, push)
	require.NoError(t, err)
	require.Len(t, list, 2, "the rows stay")
	require.Equal(t, "me", list[0].SettledBy)
	_, err = operate.SettleLosses(t.Context(), conn, nil, push, 0, order)
	require.NoError(t, err)
	_, err = operate.SettleLosses(t.Context(), conn, nil, push, 0, order)
	require.ErrorIs(t, err, operate.ErrRefused)
	history, err := operate.Interventions(t.Context(), conn, nil, 2, push)
	require.NoError(t, err)
	require.Len(t, history, 2)
	require.Equal(t, []any{"settle", int64(7), "me", "why"}, []any{history[0].Action, *history[0].From, history[0].By, history[0].Reason})
}

func TestRedactedEventKeepsItsNumber(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	conn := db.Conn(t)
	db.Exec(t, `insert into event_outbox (topic, key, payload, metadata) select 'orders', 'k', 'secret', '{"name": "secret"}' from generate_series(1, 2)`)
	_, _, err := cursor.RecordFailure(t.Context(), conn, nil, push, "test", cursor.Attempt{Seq: 1, Through: 1, ErrorType: "x", Jitter: 1})
	require.NoError(t, err)
	pass(t, db, push, func(c *cursor.RoundConfig) { c.ParkAfter = 1 })

	_, err = operate.Redact(t.Context(), conn, nil, 1, dry)
	require.NoError(t, err)
	require.Equal(t, int64(2), pgtest.Value[int64](t, db, "select count(*) from event_log where payload = 'secret'"))
	change, err := operate.Redact(t.Context(), conn, nil, 1, order)
	require.NoError(t, err)
	require.Equal(t, int64(2), change.Events, "the log's and the parked copy")
	list, err := operate.Parked(t.Context(), conn, nil, push, 0, 10)
	require.NoError(t, err)
	require.Equal(t, operate.Tombstone, string(list[0].Event.Payload))
	require.Equal(t, map[string]string{operate.TombstoneMetadata: "true"}, list[0].Event.Metadata)
	entries, through, err := operate.Events(t.Context(), conn, nil, 0, "", 10, true)
	require.NoError(t, err)
	require.Equal(t, int64(2), through)
	require.Equal(t, []string{operate.Tombstone, "secret"}, []string{string(entries[0].Payload), string(entries[1].Payload)})
	require.Equal(t, "k", entries[0].Key)
	require.Equal(t, []string{"redact 1 1 me why"}, interventions(t, db))
	_, err = operate.Redact(t.Context(), conn, nil, 3, order)
	require.ErrorIs(t, err, operate.ErrRefused)
}

func TestSurveySeesWhatStands(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	survey, err := operate.Survey(t.Context(), conn, nil)
	require.NoError(t, err)
	require.Empty(t, survey.Cursors)
	register(t, db, push, beginning)
	register(t, db, orders, beginning)
	db.Exec(t, "insert into event_outbox (topic, occurred_at) select 'orders', now() - interval '1 hour' from generate_series(1, 5)")
	pass(t, db, orders)
	_, _, err = cursor.RecordFailure(t.Context(), conn, nil, push, "w", cursor.Attempt{Seq: 1, Through: 1, ErrorType: "boom", Jitter: 1})
	require.NoError(t, err)
	_, err = operate.Pause(t.Context(), conn, nil, push, order)
	require.NoError(t, err)
	survey, err = operate.Survey(t.Context(), conn, nil)
	require.NoError(t, err)
	require.Equal(t, int64(5), survey.Head)
	require.Len(t, survey.Cursors, 2)
	p, o := survey.Cursors[0], survey.Cursors[1]
	require.Equal(t, []any{push, int64(5), int64(1), "boom", "w"}, []any{p.Cursor, p.Lag, p.Failure.Seq, p.Failure.ErrorType, p.FailedBy})
	require.InDelta(t, time.Hour.Seconds(), p.PendingAge.Seconds(), 120)
	require.NotNil(t, p.PausedAt)
	require.Equal(t, []any{orders, int64(0), time.Duration(0), "test", int64(1)}, []any{o.Cursor, o.Lag, o.PendingAge, o.MovedBy, o.Rounds})
	require.Nil(t, o.Failure)

	db.Exec(t, "update event_consumer_cursors set last_seq = 9 where topic = 'orders'")
	survey, err = operate.Survey(t.Context(), conn, nil, orders)
	require.NoError(t, err)
	require.Len(t, survey.Cursors, 1)
	require.True(t, survey.Cursors[0].Ahead)
}

func TestEventsAreListedByTopicUpToTheHead(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	logtest.Append(t, db, "orders", 3)
	logtest.Append(t, db, "other", 3)
	entries, through, err := operate.Events(t.Context(), conn, nil, 0, "orders", 2, false)
	require.NoError(t, err)
	require.Equal(t, []int64{2, 2, 1}, []int64{through, int64(len(entries)), entries[0].Size})
	require.Empty(t, entries[0].Payload)
	entries, through, err = operate.Events(t.Context(), conn, nil, 2, "orders", 2, true)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Equal(t, "3", string(entries[0].Payload))
	require.Equal(t, int64(6), through)
	entries, through, err = operate.Events(t.Context(), conn, nil, 6, "orders", 2, true)
	require.NoError(t, err)
	require.Empty(t, entries)
	require.Equal(t, int64(6), through)
}

func TestChangesNeedTheTables(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	conn := db.Conn(t)
	_, seek := operate.Seek(t.Context(), conn, nil, push, cursor.FromHead(), order)
	_, settle := operate.SettleLosses(t.Context(), conn, nil, push, 0, order)
	_, redact := operate.Redact(t.Context(), conn, nil, 1, order)
	_, discard := operate.Discard(t.Context(), conn, nil, push, 1, order)
	_, survey := operate.Survey(t.Context(), conn, nil)
	_, deliveries := operate.Deliveries(t.Context(), conn, nil, 1)
	_, verify := operate.Verify(t.Context(), conn, nil, nil)
	_, _, events := operate.Events(t.Context(), conn, nil, 0, "", 1, false)
	for i, err := range []error{seek, settle, redact, discard, survey, deliveries, verify, events} {
		require.ErrorIs(t, err, cursor.ErrNotMigrated, i)
	}
}

// In another log's names, and within a transaction of the caller's, which decides.
func TestChangesAreTheLogsOwn(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	register(t, db, push, beginning)
	tx, err := db.Conn(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = operate.Pause(t.Context(), tx, nil, push, order)
	require.NoError(t, err)
	_, err = operate.Pause(t.Context(), tx, nil, push, order)
	require.ErrorIs(t, err, operate.ErrRefused)
	_, err = operate.Resume(t.Context(), tx, nil, push, dry)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []string{"pause 0 0 me why"}, interventions(t, db))

	other, err := cursor.NewLog(cursor.LogConfig{Name: "other"})
	require.NoError(t, err)
	_, err = operate.Resume(t.Context(), db.Conn(t), other, push, order)
	require.ErrorIs(t, err, cursor.ErrNotMigrated)
	require.True(t, strings.Contains(err.Error(), "public.other_log") && !errors.Is(err, cursor.ErrCursorMissing))
}
