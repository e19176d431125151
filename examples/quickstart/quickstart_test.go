package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/webhooks"
)

// asProgram makes this test binary the program itself; its workers inherit it.
const asProgram = "QUICKSTART_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	pgtest.Main(m)
}

// program is a run of quickstart, as a user starts it.
type program struct {
	cmd    *exec.Cmd
	stdout *watched
	stderr bytes.Buffer
	ended  chan struct{}
}

func start(t *testing.T, stdin io.Reader, args ...string) *program {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	p := &program{cmd: exec.Command(self, args...), stdout: newWatched(), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), asProgram+"=1")
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = stdin, p.stdout, &p.stderr
	require.NoError(t, p.cmd.Start())
	go func() {
		_ = p.cmd.Wait() // the exit code is looked at
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
		if t.Failed() {
			t.Logf("quickstart %q printed:\n%s%s", args, p.stdout, &p.stderr)
		}
	})
	return p
}

// wait waits for the end and returns the exit code.
func (p *program) wait(t *testing.T) int {
	t.Helper()
	select {
	case <-p.ended:
	case <-time.After(2 * time.Minute):
		t.Fatal("quickstart does not end")
	}
	return p.cmd.ProcessState.ExitCode()
}

// run0 runs quickstart and wants it to end well.
func run0(t *testing.T, stdin io.Reader, args ...string) *program {
	t.Helper()
	p := start(t, stdin, args...)
	require.Zero(t, p.wait(t), "exit code")
	assert.Empty(t, p.stderr.String())
	p.leftNothing(t)
	return p
}

// row is the table's row of a consumer: events, jobs, effects, duplicates, lost, lag.
func (p *program) row(t *testing.T, consumer string) []int {
	t.Helper()
	match := regexp.MustCompile(`(?m)^ +` + consumer + ` +(\d+(?: +\d+){5})$`).FindStringSubmatch(p.stdout.String())
	require.NotNil(t, match, "no row of %s", consumer)
	var figures []int
	for _, word := range strings.Fields(match[1]) {
		figure, err := strconv.Atoi(word)
		require.NoError(t, err)
		figures = append(figures, figure)
	}
	return figures
}

func (p *program) handledAll(t *testing.T, events int) {
	t.Helper()
	for _, consumer := range consumers {
		assert.Equal(t, []int{events, events, events, 0, 0, 0}, p.row(t, consumer), consumer)
	}
}

var printedPID = regexp.MustCompile(`pid (\d+)`)

// leftNothing wants the workers that the program has named to be gone, and its server, if it had one.
func (p *program) leftNothing(t *testing.T) {
	t.Helper()
	for _, match := range printedPID.FindAllStringSubmatch(p.stdout.String(), -1) {
		pid, err := strconv.Atoi(match[1])
		require.NoError(t, err)
		eventually(t, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
	}
	if match := regexp.MustCompile(`on port (\d+)`).FindStringSubmatch(p.stdout.String()); match != nil {
		eventually(t, func() bool {
			conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", match[1]))
			if err == nil {
				_ = conn.Close()
			}
			return err != nil
		})
	}
}

func eventually(t *testing.T, shown func() bool) {
	t.Helper()
	late := time.After(time.Minute)
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for !shown() {
		select {
		case <-late:
			t.Fatal("it does not come about")
		case <-again.C:
		}
	}
}

// watched is an output for which one can wait.
type watched struct {
	mu      sync.Mutex
	text    bytes.Buffer
	changed chan struct{}
}

func newWatched() *watched { return &watched{changed: make(chan struct{})} }

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.changed)
	w.changed = make(chan struct{})
	return w.text.Write(p)
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// wait waits until a text was printed.
func (w *watched) wait(t *testing.T, text string) {
	t.Helper()
	late := time.After(time.Minute)
	for {
		w.mu.Lock()
		found, changed := strings.Contains(w.text.String(), text), w.changed
		w.mu.Unlock()
		if found {
			return
		}
		select {
		case <-changed:
		case <-late:
			t.Fatalf("it does not print %q", text)
		}
	}
}

func TestTheDefaultRunKillsAWorkerAndLosesNothing(t *testing.T) {
	t.Parallel()
	began := time.Now()
	p := run0(t, nil)
	p.handledAll(t, 60*samplesForARun)
	output := p.stdout.String()
	assert.Regexp(t, `killed +worker \d+, by SIGKILL in the middle of a round`, output)
	assert.Regexp(t, `undone +[1-9]\d* effects, not committed: PostgreSQL rolled back transaction \d+`, output)
	assert.Contains(t, output, "each consumer handled every event exactly once")
	t.Logf("it took %s", time.Since(began))
}

func TestAFurtherRunOnADatabaseCarriesOn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "create table theirs (x int)")
	db.Exec(t, "insert into theirs values (1)")

	run0(t, nil, "-database", db.URL(), "-repeat", "5").handledAll(t, 300)
	run0(t, nil, "-database", db.URL(), "-repeat", "5").handledAll(t, 600)

	assert.Equal(t, 1, pgtest.Value[int](t, db, "select count(*)::int from theirs"))
	assert.Equal(t, int64(600), pgtest.Value[int64](t, db, "select last_seq from event_seq"))
	assert.Equal(t, int64(600), pgtest.Value[int64](t, db, "select count(distinct uuid) from event_log"), "a message id for each event")
}

func TestEveryGitHubWebhookIsHandledOnceAndUnchanged(t *testing.T) {
	t.Parallel()
	all, err := webhooks.Webhooks()
	require.NoError(t, err)
	require.Len(t, all, 329)
	text, err := webhooks.NDJSON()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "webhooks.ndjson")
	require.NoError(t, os.WriteFile(file, text, 0o600))
	db := pgtest.New(t)

	run0(t, nil, "-database", db.URL(), "-events", file).handledAll(t, len(all))

	var sent, actions []string
	for _, w := range all {
		sum := sha256.Sum256(w.Payload)
		sent = append(sent, hex.EncodeToString(sum[:]))
		actions = append(actions, w.Topic+" "+w.Action)
	}
	assert.Equal(t, actions, pgtest.Column[string](t, db,
		"select topic || ' ' || coalesce(metadata->>'action', '') from event_log order by seq"), "topics and actions, in their order")
	slices.Sort(sent)
	for _, consumer := range consumers {
		assert.Equal(t, sent, pgtest.Column[string](t, db,
			`select encode(payload_sha256, 'hex') collate "C" as sum from quickstart_effects where consumer = $1 order by sum`, consumer),
			"what %s has seen", consumer)
		assert.Equal(t, sent, pgtest.Column[string](t, db, fmt.Sprintf(
			`select payload->>'payload_sha256' collate "C" as sum from watermill_%s order by sum`, jobTopic(consumer))),
			"what the jobs of %s tell", consumer)
	}
}

func TestEventsComeFromStandardInput(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	input := `{"topic":"orders","action":null,"payload":{"id": 1}}` + "\r\n\n" +
		`{"topic":"orders","payload":[2]}` + "\n" +
		`{"payload":"three","topic":"shipments","more":true}` // without an end of line

	run0(t, strings.NewReader(input), "-database", db.URL(), "-events", "-").handledAll(t, 3)

	assert.Equal(t, []string{`orders {"id": 1}`, `orders [2]`, `shipments "three"`},
		pgtest.Column[string](t, db, "select topic || ' ' || convert_from(payload, 'UTF8') from event_log order by seq"))
}

func TestABadLineIsNamedAndNothingIsAppended(t *testing.T) {
	t.Parallel()
	good := `{"topic":"orders","action":"made","payload":{}}` + "\n"
	for name, test := range map[string]struct{ input, want string }{
		"not JSON":          {good + good + "oops\n", "line 3: not an event in JSON"},
		"cut":               {good + `{"topic":"orders","payl`, "line 2: not an event in JSON"},
		"not an object":     {"[1]\n" + good, "line 1: not an event in JSON"},
		"two on a line":     {strings.TrimSpace(good) + good, "line 1: not an event in JSON"},
		"missing topic":     {good + "\n" + `{"payload":{}}`, "line 3: missing topic"},
		"missing payload":   {good + `{"topic":"orders"}`, "line 2: missing payload"},
		"null payload":      {good + `{"topic":"orders","payload":null}`, "line 2: missing payload"},
		"NUL in the topic":  {good + `{"topic":"or\u0000ders","payload":1}`, "line 2: topic or action contains NUL"},
		"NUL in the action": {good + `{"topic":"orders","action":"\u0000","payload":1}`, "line 2: topic or action contains NUL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := parseEvents("events.ndjson", strings.NewReader(test.input))
			require.ErrorContains(t, err, "events.ndjson, "+test.want)
		})
	}
	t.Run("as a user sees it", func(t *testing.T) {
		t.Parallel()
		file := filepath.Join(t.TempDir(), "events.ndjson")
		require.NoError(t, os.WriteFile(file, []byte(strings.Repeat(good, 250)+"oops\n"+good), 0o600))
		db := logtest.New(t)
		p := start(t, nil, "-database", db.URL(), "-events", file)
		require.Equal(t, 1, p.wait(t))
		assert.Contains(t, p.stderr.String(), file+", line 251: not an event in JSON")
		assert.Equal(t, 1, strings.Count(p.stderr.String(), "\n"), "one line")
		assert.Zero(t, pgtest.Value[int64](t, db, "select last_seq from event_seq"))
	})
	t.Run("no events at all", func(t *testing.T) {
		t.Parallel()
		p := start(t, strings.NewReader("\n\n"), "-events", "-")
		require.Equal(t, 1, p.wait(t))
		assert.Contains(t, p.stderr.String(), "standard input holds no events")
	})
}

func TestADatabaseThatCannotBeReachedIsOneClearError(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ address, want string }{
		"nobody listens":      {"postgres://me:hunter2@127.0.0.1:1/mine", "connection refused"},
		"not an address":      {"postgres://me:hunter2@127.0.0.1:port/mine", "cannot parse"},
		"not even the format": {"hunter2", "cannot parse"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, nil, "-database", test.address)
			require.Equal(t, 1, p.wait(t))
			assert.Contains(t, p.stderr.String(), "quickstart: -database: ")
			assert.Contains(t, p.stderr.String(), test.want)
			assert.Equal(t, 1, strings.Count(p.stderr.String(), "\n"), "one line")
			if strings.Contains(test.address, "me:") {
				assert.NotContains(t, p.stderr.String(), "hunter2")
			}
		})
	}
}

func TestAForeignEventLogIsLeftAlone(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	logtest.Append(t, db, "orders", 3)
	p := start(t, nil, "-database", db.URL())
	require.Equal(t, 1, p.wait(t))
	assert.Contains(t, p.stderr.String(), "give it a database of its own")
	assert.Equal(t, int64(3), pgtest.Value[int64](t, db, "select last_seq from event_seq"))
	assert.False(t, pgtest.Value[bool](t, db, "select to_regclass('quickstart_effects') is not null"))
}

func TestWhatIsWrongInTheDatabaseIsFoundOut(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	run0(t, nil, "-database", db.URL(), "-repeat", "1")
	db.Exec(t, "insert into quickstart_effects (consumer, seq, payload_sha256) select consumer, seq, payload_sha256 from quickstart_effects where consumer = 'audit' and seq = 7")
	db.Exec(t, "delete from watermill_notify_jobs where metadata->>'event_seq' in ('8', '9')")
	db.Exec(t, "update quickstart_effects set payload_sha256 = '' where consumer = 'notify' and seq = 10")

	p := start(t, nil, "-database", db.URL(), "-repeat", "1")
	require.Equal(t, 1, p.wait(t))
	p.leftNothing(t)
	assert.Equal(t, []int{120, 120, 121, 1, 0, 0}, p.row(t, "audit"))
	assert.Equal(t, []int{120, 118, 120, 0, 2, 0}, p.row(t, "notify"))
	for _, sentence := range []string{"audit: 1 duplicate", "audit: 121 effects for 120 events", "notify: 2 events lost",
		"notify: 118 jobs for 120 events", "notify: 1 altered payload"} {
		assert.Contains(t, p.stderr.String(), sentence)
	}
	assert.NotContains(t, p.stdout.String(), "exactly once")
}

func TestEveryFaultOfTheFiguresIsASentence(t *testing.T) {
	t.Parallel()
	good := figures{Consumer: "audit", Events: 9, Jobs: 9, Effects: 9}
	assert.Empty(t, faults([]figures{good}))
	assert.Equal(t, []string{"audit: 2 duplicates", "audit: 1 event lost", "audit: its cursor is 3 events from the head of the log",
		"audit: 4 altered payloads", "audit: 8 jobs for 9 events", "audit: 10 effects for 9 events"},
		faults([]figures{{Consumer: "audit", Events: 9, Jobs: 8, Effects: 10, Duplicates: 2, Lost: 1, Lag: 3, Altered: 4}}))
}

func TestAnInterruptStopsEverything(t *testing.T) {
	t.Parallel()
	for _, moment := range []string{"starting a throw-away PostgreSQL", "database ", "worker 1 ", "killed ", "worker 2 "} {
		t.Run("at "+moment, func(t *testing.T) {
			t.Parallel()
			p := start(t, nil, "-repeat", "60")
			p.stdout.wait(t, moment)
			require.NoError(t, p.cmd.Process.Signal(os.Interrupt))
			require.Equal(t, 130, p.wait(t))
			assert.Equal(t, "quickstart: interrupted; nothing was left running\n", p.stderr.String())
			p.leftNothing(t)
		})
	}
}

func TestWorkersAndServerDoNotOutliveAKilledQuickstart(t *testing.T) {
	t.Parallel()
	p := start(t, nil)
	p.stdout.wait(t, "worker 1 ")
	require.NoError(t, p.cmd.Process.Kill())
	p.wait(t)
	p.leftNothing(t)
}

func TestASecondQuickstartOnADatabaseIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	first, err := openDatabase(ctx, db.URL(), &display{out: io.Discard})
	require.NoError(t, err)
	defer func() { require.NoError(t, first.close()) }()

	p := start(t, nil, "-database", db.URL())
	require.Equal(t, 1, p.wait(t))
	assert.Contains(t, p.stderr.String(), "another quickstart is running")
}

func TestTheFlagsAreExplained(t *testing.T) {
	t.Parallel()
	p := run0(t, nil, "-h")
	for _, flag := range []string{"-database URL", "-events FILE", "-repeat N", "-v", "130"} {
		assert.Contains(t, p.stdout.String(), flag)
	}
	for _, args := range [][]string{{"-nonsense"}, {"-repeat", "0"}, {"-database", ""}, {"-events", ""}, {"more"}} {
		p := start(t, nil, args...)
		assert.Equal(t, 2, p.wait(t), "%q", args)
		assert.Contains(t, p.stderr.String(), "-h shows the flags")
	}
}

func TestATerminalHasBarsBelowTheLines(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	d := &display{out: &out, terminal: true}
	s := standing{head: 4, positions: []position{{"audit", 1}, {"notify", 2}}}
	d.say("worker 1", "started")
	d.show(s)
	d.say("killed", "worker 1")
	d.stop()
	d.say("done", "well")

	// After each clearing of the bars, the rest of the screen is written anew.
	screens := strings.Split(out.String(), "\x1b[2A\x1b[J")
	require.Len(t, screens, 2)
	plain := regexp.MustCompile(`\x1b\[[?0-9;]*[a-zA-Z]`).ReplaceAllString(screens[1], "")
	quarter, half := bar(1, 4), bar(2, 4)
	assert.Equal(t, "killed    worker 1\naudit     "+quarter+" 1 of 4 events\nnotify    "+half+" 2 of 4 events\ndone      well\n", plain)
	assert.Equal(t, strings.Repeat("█", 10)+strings.Repeat("░", 30), quarter)
}
