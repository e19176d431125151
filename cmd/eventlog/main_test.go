package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/migrations"
	"github.com/watermill-eventlog/watermill-eventlog/operate"
	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// prepared is a log in which there is something for every verb: push stands at 3 and fails at 4, mail@orders has
// handled, lost and parked, old is paused.
const prepared = `
begin;
insert into event_outbox (topic, key, occurred_at, payload, metadata)
select case when i % 3 = 0 then 'invoices' else 'orders' end, 'k' || i, now() - interval '1 hour' + i * interval '1 minute',
    convert_to('{"n": ' || i || '}', 'UTF8'), '{"name": "order placed"}'
from generate_series(1, 10) i order by i;
commit; -- it numbers them
insert into event_consumer_cursors (consumer, topic, last_seq, moved_at, moved_by, rounds, paused_at) values
    ('push', '', 3, now() - interval '10 minutes', 'host-1', 3, null),
    ('mail', 'orders', 10, now() - interval '5 seconds', 'host-2', 7, null),
    ('old', '', 0, null, null, 0, now() - interval '1 day');
insert into event_consumer_interventions (consumer, topic, shard, action, from_seq, to_seq, by, reason) values
    ('push', '', '', 'create', null, 0, 'host-1', ''), ('mail', 'orders', '', 'create', null, 0, 'host-2', ''),
    ('old', '', '', 'create', null, 0, 'host-1', ''), ('old', '', '', 'pause', 0, 0, 'anna', 'the mail server is being moved');
insert into event_consumer_failures (consumer, topic, shard, seq, through, since, failed_at, retry_at, attempts, error_type, permanent, failed_by, edge)
values ('push', '', '', 4, 4, now() - interval '9 minutes', now(), now(), 7, '23514', false, 'host-1', false);
insert into event_consumer_rounds (consumer, topic, shard, slot, round, first_seq, last_seq, handled, committed_at, committed_by) values
    ('push', '', '', 0, 'host-1/17', 1, 3, 3, now() - interval '10 minutes', 'host-1'),
    ('mail', 'orders', '', 0, 'host-2/4', 6, 10, 3, now(), 'host-2');
insert into event_consumer_losses (consumer, topic, shard, first_seq, last_seq, reason, recorded_by) values ('mail', 'orders', '', 1, 2, 'resume_age', 'host-2');
insert into event_consumer_parked (consumer, topic, shard, seq, occurred_at, recorded_at, event_topic, key, uuid, payload, metadata, error_type, attempts, parked_by)
select 'mail', 'orders', '', seq, occurred_at, recorded_at, topic, key, uuid, payload, metadata, 'smtp', 5, 'host-2' from event_log where seq = 5;
update event_consumer_cursors c set occurred_seq = last_seq, last_occurred_at = (select occurred_at from event_log l where l.seq = c.last_seq) where last_seq > 0;`

func newPrepared(t *testing.T) *pgtest.DB {
	t.Helper()
	template := logtest.Template()
	template.Key += fmt.Sprintf(" prepared %x", sha256.Sum256([]byte(prepared)))
	migrate := template.Setup
	template.Setup = func(ctx context.Context, conn *pgx.Conn) error {
		if err := migrate(ctx, conn); err != nil {
			return err
		}
		_, err := conn.PgConn().Exec(ctx, prepared).ReadAll()
		return err
	}
	return pgtest.New(t, template)
}

// buffer is a stream that others may read while it is written.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// call runs the program on a database.
func call(t *testing.T, db *pgtest.DB, args ...string) (code int, out, err string) {
	t.Helper()
	return callIn(t.Context(), func(name string) string {
		if name == "DATABASE_URL" {
			return db.URL()
		}
		return ""
	}, args...)
}

func callIn(ctx context.Context, env func(string) string, args ...string) (code int, out, errors string) {
	var o, e buffer
	p := &program{out: stream{Writer: &o}, err: stream{Writer: &e}, env: env}
	code = p.run(ctx, args)
	return code, o.String(), e.String()
}

// verbs are the commands that do something.
func verbs(c *cobra.Command) (all []*cobra.Command) {
	for _, below := range c.Commands() {
		if name := below.Name(); name == "help" || name == "completion" {
			continue
		}
		if below.HasSubCommands() {
			all = append(all, verbs(below)...)
		} else {
			all = append(all, below)
		}
	}
	return all
}

func path(c *cobra.Command) string { return strings.TrimPrefix(c.CommandPath(), "eventlog ") }

// words splits a line as a shell does.
func words(t *testing.T, line string) (all []string) {
	t.Helper()
	var word strings.Builder
	quoted := rune(0)
	for _, r := range strings.TrimSpace(line) + " " {
		switch {
		case quoted != 0 && r == quoted:
			quoted = 0
		case quoted == 0 && (r == '"' || r == '\''):
			quoted = r
		case quoted == 0 && r == ' ':
			all = append(all, word.String())
			word.Reset()
		default:
			word.WriteRune(r)
		}
	}
	require.Zero(t, quoted, line)
	return all
}

func TestExamplesOfTheHelpRunAsTheyStand(t *testing.T) {
	t.Parallel()
	for _, verb := range verbs((&program{}).root()) {
		require.NotEmpty(t, verb.Example, path(verb))
		require.NotEmpty(t, verb.Long, path(verb))
		for _, example := range strings.Split(verb.Example, "\n") {
			t.Run(strings.TrimSpace(example), func(t *testing.T) {
				t.Parallel()
				args := words(t, example)
				require.Equal(t, "eventlog", args[0])
				args = args[1:]
				if strings.Contains(example, "--watch") {
					db := newPrepared(t)
					text := watched(t, db, args...)
					require.Contains(t, text, "mail@orders")
					return
				}
				want := exitOK
				if args[0] == "check" {
					want = int(watch.Critical) // push fails, and mail has lost events
				}
				code, out, errors := call(t, newPrepared(t), args...)
				require.Equal(t, []any{want, ""}, []any{code, errors}, out)
				require.NotEmpty(t, out)
				if !strings.Contains(example, "--json") {
					for _, l := range strings.Split(out, "\n") {
						require.Equal(t, strings.TrimRight(l, " \t"), l)
					}
					code, out, errors = call(t, newPrepared(t), append(args, "--json")...)
					require.Equal(t, []any{want, ""}, []any{code, errors}, out)
				}
				// What is documented of the JSON is what there is.
				documented := fields(jsonOf[path(verb)])
				require.NotEmpty(t, documented, path(verb))
				for decoder := json.NewDecoder(strings.NewReader(out)); decoder.More(); {
					var value any
					require.NoError(t, decoder.Decode(&value))
					require.Subset(t, documented, paths(value, ""))
				}
			})
		}
	}
}

// watched runs the program until it has shown something twice.
func watched(t *testing.T, db *pgtest.DB, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out buffer
	p := &program{out: stream{&out, func() (int, int) { return 200, 50 }}, err: stream{Writer: &out}, env: func(string) string { return "" }}
	done := make(chan int, 1)
	go func() { done <- p.run(ctx, append(args, "--database", db.URL())) }()
	require.Eventually(t, func() bool { return strings.Count(out.String(), "CONSUMER") >= 2 }, time.Minute, 5*time.Millisecond)
	cancel()
	require.Equal(t, exitOK, <-done, "interrupting it is its good end")
	return out.String()
}

func TestWatchIsDrawnInPlace(t *testing.T) {
	t.Parallel()
	text := watched(t, newPrepared(t), "status", "--watch", "--interval", "10ms")
	frames := strings.Split(text, "\x1b[H")
	require.Equal(t, "\x1b[2J", frames[0])
	require.Contains(t, frames[1], "seq 4 for 9m")
	require.Contains(t, frames[1], "23514, attempts 7\x20")
	require.True(t, strings.HasSuffix(frames[1], "\x1b[J"))
	require.Equal(t, strings.Count(frames[1], "\n"), strings.Count(frames[1], "\x1b[K"))

	// What does not fit is cut, so that nothing scrolls.
	p := &program{out: stream{size: func() (int, int) { return 10, 4 }}}
	frame := p.frame("one\ntwo is longer than that\nthree\nfour\nfive\n")
	require.Equal(t, "\x1b[Hone\x1b[K\ntwo is lo…\x1b[K\n… 3 more\x1b[K\n\x1b[J", frame)
}

func TestWatchOutlivesTheDatabase(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, errs buffer
	p := &program{out: stream{Writer: &out}, err: stream{Writer: &errs}, env: func(string) string { return "" }}
	done := make(chan int, 1)
	go func() {
		done <- p.run(ctx, []string{"status", "--watch", "--json", "--interval", "10ms", "--database", db.URL()})
	}()
	require.Eventually(t, func() bool { return strings.Count(out.String(), "\n") >= 2 }, time.Minute, 5*time.Millisecond)
	db.Exec(t, "alter table event_seq rename to away")
	require.Eventually(t, func() bool { return strings.Contains(errs.String(), "migrate up") }, time.Minute, 5*time.Millisecond)
	db.Exec(t, "alter table away rename to event_seq")
	seen := strings.Count(out.String(), "\n")
	require.Eventually(t, func() bool { return strings.Count(out.String(), "\n") > seen }, time.Minute, 5*time.Millisecond)
	cancel()
	require.Equal(t, exitOK, <-done)
	first, _, _ := strings.Cut(out.String(), "\n")
	require.NoError(t, json.Unmarshal([]byte(first), &statusJSON{}), "one line is one look")
}

func TestStatusShowsWhereEachConsumerStands(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	_, out, _ := call(t, db, "status")
	lines := strings.Split(out, "\n")
	require.Contains(t, lines[0], "log public.event_log, head 10")
	require.Regexp(t, `^CONSUMER +POSITION +LAG +PENDING +MOVED +BY +FAILING +PARKED +LOST +HELD$`, lines[2])
	require.Regexp(t, `^mail@orders +10 +0 +- +\S+ ago +host-2 +- +1 +2 +-$`, lines[3])
	require.Regexp(t, `^old +0 +10 +59m\d\ds +never +- +- +- +- +paused$`, lines[4])
	require.Regexp(t, `^push +3 +7 +56m\d\ds +10m\d\ds ago +host-1 +seq 4 for 9m\d\ds: 23514, attempts 7 +- +- +-$`, lines[5])

	_, out, _ = call(t, db, "status", "push", "--json")
	var s statusJSON
	require.NoError(t, json.Unmarshal([]byte(out), &s))
	require.Len(t, s.Consumers, 1)
	require.Equal(t, []any{"push", int64(7), int64(4)}, []any{s.Consumers[0].Name, s.Consumers[0].Lag, s.Consumers[0].Failure.Seq})
}

func TestEventShowsWhatEachConsumerDid(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	states := func(seq string) (all []string) {
		code, out, errors := call(t, db, "event", seq, "--json")
		require.Equal(t, exitOK, code, errors)
		var r recordJSON
		require.NoError(t, json.Unmarshal([]byte(out), &r))
		for _, d := range r.Deliveries {
			all = append(all, d.Name+" "+string(d.State))
		}
		return all
	}
	require.Equal(t, []string{"mail@orders lost", "old not_reached", "push handled"}, states("1"))
	require.Equal(t, []string{"mail@orders not_its_topic", "old not_reached", "push handled"}, states("3"))
	require.Equal(t, []string{"mail@orders handled", "old not_reached", "push failing"}, states("4"))
	require.Equal(t, []string{"mail@orders parked", "old not_reached", "push not_reached"}, states("5"))
	_, out, _ := call(t, db, "event", "3")
	require.Regexp(t, `(?m)^push +handled by host-1 in round host-1/17 at 20`, out)
	code, _, errors := call(t, db, "event", "11")
	require.Equal(t, exitFailed, code)
	require.Contains(t, errors, "which goes from 1 to 10")
}

func TestDryRunChangesNothing(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	everything := func() string {
		text := ""
		for _, table := range []string{"consumer_cursors", "consumer_failures", "consumer_interventions", "consumer_losses", "consumer_parked", "log"} {
			text += pgtest.Value[string](t, db, "select coalesce(string_agg(x::text, chr(10) order by x::text), '') from event_"+table+" x")
		}
		return text
	}
	before := everything()
	for _, args := range []string{
		"seek push 8", "skip push 4", "pause push", "resume old", "retire old", "parked replay mail@orders 5", "parked discard mail@orders 5",
		"losses settle mail@orders", "redact 5",
	} {
		code, out, errors := call(t, db, append(strings.Fields(args), "--dry-run")...)
		require.Equal(t, exitOK, code, errors)
		require.Contains(t, out, "dry run: nothing was changed", args)
		require.Equal(t, before, everything(), args)
		code, _, errors = call(t, db, strings.Fields(args)...)
		require.Equal(t, exitUsage, code)
		require.Contains(t, errors, "missing --reason", args)
		require.Equal(t, before, everything(), args)
	}
}

func TestChangesAreRecordedWithWhoAndWhy(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	code, out, _ := call(t, db, "seek", "push", "8", "--reason", "by hand")
	require.Equal(t, exitOK, code)
	require.Equal(t, "push moved from 3 to 7: 4 of its events are skipped\n", out)
	_, out, _ = call(t, db, "seek", "mail", "beginning", "--topic", "orders", "--reason", "again", "--by", "anna")
	require.Equal(t, "mail@orders moved from 10 to 0: 7 of its events come again\n", out)
	require.Equal(t, []string{"push " + whoami() + " by hand", "mail anna again"},
		pgtest.Column[string](t, db, "select consumer || ' ' || by || ' ' || reason from event_consumer_interventions where action = 'seek' order by id"))
	_, out, _ = call(t, db, "interventions", "--limit", "1")
	require.Regexp(t, `mail@orders +seek +10 +0 +anna +again`, out)
}

func TestCommandLineThatIsWrongIsToldApart(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	for args, text := range map[string]string{
		"":                             "", // the help
		"sek push 1":                   "unknown command",
		"parked":                       "what is to be done with parked is missing",
		"parked lst":                   `unknown command "lst"`,
		"seek push":                    "accepts 2 arg(s)",
		"status --nothing":             "unknown flag",
		"event x":                      `"x" is not the number of an event`,
		"seek push nowhere --reason r": "neither head nor beginning",
		"seek push 0 --reason r":       "the first event has seq 1",
		`pause push@ --reason r`:       `no topic behind "@"`,
		"status --timeout 0s":          "--timeout must be positive",
		"status --log " + strings.Repeat("x", 60): "the limit is 33",
		"status --database ://":                   "it is taken from --database",
		"status --watch --interval 0s":            "--interval must be positive",
	} {
		code, out, errors := call(t, db, strings.Fields(args)...)
		if args == "" {
			require.Equal(t, exitOK, code)
			require.Contains(t, out, "Usage:")
			continue
		}
		require.Equal(t, exitUsage, code, "%s: %s", args, errors)
		require.Contains(t, errors, text, args)
		require.Contains(t, errors, "--help", args)
		require.Empty(t, out)
	}
}

func TestErrorsNameTheNextStep(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	for args, text := range map[string]string{
		"status --database postgres://127.0.0.1:1/x": "cannot connect",
		"status --log other":                         "run eventlog migrate up",
		"losses list nobody":                         "no such consumer: the log has mail@orders, old, push",
		"interventions nobody":                       "no such consumer: the log has mail@orders, old, push",
		"parked list nobody":                         "no such consumer: the log has mail@orders, old, push",
		"status nobody":                              "no such consumer: the log has mail@orders, old, push",
		"pause mail --reason r":                      "no such consumer: the log has mail@orders, old, push",
		"event 1 nobody":                             "no such consumer: the log has mail@orders, old, push",
		"skip push 5 --reason r":                     "that is event 4",
		"pause old --reason r":                       "paused since",
		"retire mail@orders --reason r":              "moved within the last minute",
		"parked discard push 4 --reason r":           "event is not parked",
		"losses settle push --reason r":              "no unsettled loss",
		"redact 11 --reason r":                       "neither in the log nor parked",
	} {
		code, out, errors := call(t, db, strings.Fields(args)...)
		require.Equal(t, exitFailed, code, args)
		require.Contains(t, errors, text, args)
		require.Empty(t, out, args)
	}
	empty := logtest.New(t)
	_, _, errors := call(t, empty, "pause", "push", "--reason", "r")
	require.Contains(t, errors, "the log has none yet")
	_, out, _ := call(t, empty, "status")
	require.Contains(t, out, "no consumers yet")
}

func TestPasswordIsNotShown(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"postgres://me:hush@127.0.0.1:1/x", "postgres://me:hush@127.0.0.1:port/x"} {
		code, out, errors := callIn(t.Context(), func(string) string { return address }, "status")
		require.NotEqual(t, exitOK, code)
		require.NotContains(t, out+errors, "hush")
		require.Contains(t, errors, "DATABASE_URL")
	}
}

func TestTailFollowsWhatIsAppended(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	var out buffer
	p := &program{out: stream{Writer: &out}, err: stream{Writer: &out}, env: func(string) string { return "" }}
	done := make(chan int, 1)
	go func() {
		done <- p.run(t.Context(), []string{"tail", "--from", "8", "--topic", "orders", "--payload", "--limit", "3", "--database", db.URL()})
	}()
	require.Eventually(t, func() bool { return strings.Count(out.String(), "\n") == 2 }, time.Minute, 5*time.Millisecond)
	db.Exec(t, "insert into event_outbox (topic, payload) values ('invoices', 'no'), ('orders', E'\\\\x1b5b410a')")
	require.Equal(t, exitOK, <-done)
	lines := strings.Split(out.String(), "\n")
	require.Regexp(t, `^8  \S+Z  orders  k8  8B  {"n": 8}$`, lines[0])
	require.Regexp(t, `^10  `, lines[1])
	require.Regexp(t, `^12  \S+Z  orders  -  4B   \[A $`, lines[2], "a payload does not steer the terminal")
}

func TestTailEndsWellWhenItIsInterrupted(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	ctx, cancel := context.WithCancel(t.Context())
	var out buffer
	p := &program{out: stream{Writer: &out}, err: stream{Writer: &out}, env: func(string) string { return "" }}
	done := make(chan int, 1)
	go func() { done <- p.run(ctx, []string{"tail", "--from", "10", "--database", db.URL()}) }()
	require.Eventually(t, func() bool { return strings.Count(out.String(), "\n") == 1 }, time.Minute, 5*time.Millisecond)
	cancel()
	require.Equal(t, exitOK, <-done)
	require.Equal(t, 1, strings.Count(out.String(), "\n"))
}

func TestVerifyEndsWithOneWhenTheLogIsNotWhole(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	db.Exec(t, "delete from event_log where seq in (5, 6)")
	code, out, errors := call(t, db, "verify")
	require.Equal(t, exitFailed, code)
	require.Empty(t, errors)
	require.Regexp(t, `hole +- +5 +6 +the numbers 5 to 6 are missing from the log`, out)
	code, out, _ = call(t, db, "verify", "--json")
	require.Equal(t, exitFailed, code)
	var v verdictJSON
	require.NoError(t, json.Unmarshal([]byte(out), &v))
	require.Equal(t, []any{false, operate.FaultHole}, []any{v.OK, v.Faults[0].Kind})
}

func TestProgressIsForTerminals(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	for _, terminal := range []bool{true, false} {
		var out, errs buffer
		p := &program{out: stream{Writer: &out}, err: stream{Writer: &errs}, env: func(string) string { return "" }}
		if terminal {
			p.err.size = func() (int, int) { return 80, 24 }
		}
		require.Equal(t, exitOK, p.run(t.Context(), []string{"verify", "--database", db.URL()}))
		require.Equal(t, terminal, strings.Contains(errs.String(), "verify"))
		require.Contains(t, out.String(), "the log is whole")
		require.NotContains(t, out.String(), "\x1b")
	}
}

func TestConsumersAreOfferedForCompletion(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	code, out, _ := call(t, db, "__complete", "seek", "")
	require.Equal(t, exitOK, code)
	require.Equal(t, []string{"mail@orders", "old", "push"}, strings.Split(out, "\n")[:3])
	_, out, _ = call(t, db, "__complete", "seek", "push", "")
	require.Equal(t, []string{"head", "beginning"}, strings.Split(out, "\n")[:2])
}

func TestAnotherLogIsMigratedAndLookedAt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "create schema shop")
	where := []string{"--schema", "shop", "--log", "orders"}
	code, out, errors := call(t, db, append([]string{"migrate", "up"}, where...)...)
	require.Equal(t, exitOK, code, errors)
	require.Contains(t, out, "0001")
	_, out, _ = call(t, db, append([]string{"migrate", "up"}, where...)...)
	require.Contains(t, out, "up to date")
	_, out, _ = call(t, db, append([]string{"status"}, where...)...)
	require.Contains(t, out, "log shop.orders_log, head 0")
	_, out, _ = call(t, db, append([]string{"migrate", "print"}, where...)...)
	require.Contains(t, out, `create table "shop"."orders_seq"`)
	_, out, _ = call(t, db, append([]string{"tail", "--from", "head", "--follow=false"}, where...)...)
	require.Empty(t, out)
}

func TestVerbsRunInEveryExecModeAndOnEveryLog(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"cache_describe", "describe_exec", "exec", "simple_protocol", "another log"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			var db *pgtest.DB
			var flags []string
			if mode != "another log" {
				db = newPrepared(t)
				flags = []string{"--database", db.URL() + "&default_query_exec_mode=" + mode}
			} else {
				db = pgtest.New(t)
				log, err := cursor.NewLog(cursor.LogConfig{Name: "Shop's", Channel: "x"})
				require.NoError(t, err)
				flags = []string{"--log", "Shop's", "--channel", "x"}
				_, err = migrations.Up(t.Context(), db.Conn(t), log)
				require.NoError(t, err)
				_, err = db.Conn(t).PgConn().Exec(t.Context(), log.Render(prepared)).ReadAll()
				require.NoError(t, err)
			}
			for _, args := range [][]string{
				{"migrate", "status"}, {"migrate", "up"}, {"status", "push", "mail@orders"}, {"event", "4", "push"}, {"verify"},
				{"tail", "--from", "2026-01-31T15:04:05Z", "--payload", "--topic", "orders", "--limit", "2"},
				{"seek", "mail@orders", "2026-01-31T15:04:05Z", "--reason", "r"}, {"seek", "mail@orders", "head", "--reason", "r"},
				{"skip", "push", "4", "--reason", "r"}, {"pause", "push", "--reason", "r"}, {"resume", "push", "--reason", "r"},
				{"retire", "old", "--reason", "r"}, {"parked", "list", "mail@orders", "--payload"},
				{"parked", "replay", "mail@orders", "5", "--reason", "r"}, {"parked", "discard", "mail@orders", "5", "--reason", "r"},
				{"losses", "list", "mail@orders"}, {"losses", "settle", "mail@orders", "--reason", "r"}, {"interventions", "push"},
				{"redact", "5", "--reason", "r"},
			} {
				code, out, errors := call(t, db, append(args, flags...)...)
				require.Equal(t, []any{exitOK, ""}, []any{code, errors}, "%v", args)
				require.NotEmpty(t, out)
			}
		})
	}
}

// What an operator's role needs, and no more: the README says it.
func TestOperatorsRoleNeedsTheConsumersTables(t *testing.T) {
	t.Parallel()
	db := newPrepared(t)
	role := db.Name() + "_operator"
	db.Exec(t, "create role "+role+" login password 'x'")
	t.Cleanup(func() { db.Exec(t, "drop owned by "+role+" cascade; drop role "+role) })
	for _, grant := range []string{"select on event_log, event_seq, event_migrations",
		"select, insert, update, delete on event_consumer_cursors, event_consumer_failures, event_consumer_marks, event_consumer_parked, event_consumer_losses, event_consumer_rounds, event_consumer_interventions"} {
		db.Exec(t, "grant "+grant+" to "+role)
	}
	address := "options=-c%20role%3D" + role
	for _, args := range []string{
		"status", "event 4", "verify", "tail --from 1 --limit 1", "skip push 4 --reason r", "seek push head --reason r", "pause push --reason r",
		"resume push --reason r", "retire old --reason r", "parked list", "parked replay mail@orders 5 --reason r", "parked discard mail@orders 5 --reason r",
		"losses list", "losses settle mail@orders --reason r", "interventions", "migrate status",
	} {
		code, _, errors := call(t, db, append(strings.Fields(args), "--database", db.URL()+"&"+address)...)
		require.Equal(t, exitOK, code, "%s: %s", args, errors)
	}
	code, _, errors := call(t, db, "redact", "5", "--reason", "r", "--database", db.URL()+"&"+address)
	require.Equal(t, exitFailed, code)
	require.Contains(t, errors, "42501")
	db.Exec(t, "grant update (payload, metadata) on event_log to "+role)
	code, _, errors = call(t, db, "redact", "5", "--reason", "r", "--database", db.URL()+"&"+address)
	require.Equal(t, exitOK, code, errors)
}
