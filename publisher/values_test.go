package publisher_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/internal/logtest"
	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
	"github.com/watermill-eventlog/watermill-eventlog/publisher"
)

// untouched is a database, and a transaction, to which nothing may be sent.
type untouched struct{ pgx.Tx }

var errSent = errors.New("SQL was sent")

func (untouched) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	return nil, errSent
}

func (untouched) SendBatch(_ context.Context, b *pgx.Batch) pgx.BatchResults {
	return pgx.FailedBatchResults(b, errSent)
}

// sender is the part of it that is no transaction.
type sender struct{ publisher.BatchSender }

func TestEventThatCouldNotBeReadBackIsRefusedBeforeSQLIsSent(t *testing.T) {
	t.Parallel()
	const limit = 10
	var key string
	var at time.Time
	nothing := untouched{}
	events := newEventLog(t, sender{nothing}, publisher.EventLogConfig{
		MaxPayload: limit,
		Key:        func(string, *message.Message) string { return key },
		OccurredAt: func(string, *message.Message) time.Time { return at },
	})
	of := func(uuid, payload string, metadata ...string) *message.Message {
		m := message.NewMessage(uuid, []byte(payload))
		for i := 0; i < len(metadata); i += 2 {
			m.Metadata.Set(metadata[i], metadata[i+1])
		}
		return m
	}
	for name, c := range map[string]struct {
		topic, key string
		at         time.Time
		msg        *message.Message
		reason     string // none: it is taken
	}{
		"good":                      {topic: "t", key: "k", at: time.Unix(0, 0), msg: of("id", "0123456789", "k", "v")},
		"no id":                     {topic: "t", msg: of("", "")},
		"payload above the limit":   {topic: "t", msg: of("id", "0123456789a"), reason: "11 bytes, the limit is 10"},
		"empty topic":               {msg: of("id", ""), reason: "topic is empty"},
		"NUL in the topic":          {topic: "a\x00b", msg: of("id", ""), reason: "topic contains NUL"},
		"invalid topic":             {topic: "a\xffb", msg: of("id", ""), reason: "topic is not valid UTF-8"},
		"NUL in the id":             {topic: "t", msg: of("i\x00d", ""), reason: "id contains NUL"},
		"invalid id":                {topic: "t", msg: of("i\xc3", ""), reason: "id is not valid UTF-8"},
		"NUL in the key":            {topic: "t", key: "\x00", msg: of("id", ""), reason: "key contains NUL"},
		"invalid key":               {topic: "t", key: "\xed\xa0\x80", msg: of("id", ""), reason: "key is not valid UTF-8"},
		"NUL in metadata":           {topic: "t", msg: of("id", "", "a", "b\x00"), reason: `metadata "a" contains NUL`},
		"NUL in a metadata key":     {topic: "t", msg: of("id", "", "a\x00", "b"), reason: "contains NUL"},
		"invalid metadata":          {topic: "t", msg: of("id", "", "a", "\xff"), reason: `metadata "a" is not valid UTF-8`},
		"invalid metadata key":      {topic: "t", msg: of("id", "", "a\xff", "b"), reason: "is not valid UTF-8"},
		"occurred in a far future":  {topic: "t", at: time.Unix(math.MaxInt32*1000, 0), msg: of("id", ""), reason: "OccurredAt"},
		"occurred before year one":  {topic: "t", at: time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC), msg: of("id", ""), reason: "OccurredAt"},
		"occurred in the year 9999": {topic: "t", at: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC), msg: of("id", "")},
	} {
		key, at = c.key, c.at
		for _, by := range []*publisher.EventLog{events, events.InTx(nothing), events.InSQLTx(nothing)} {
			err := by.Publish(c.topic, of("first", ""), c.msg)
			if c.reason == "" {
				require.ErrorIs(t, err, errSent, name)
				continue
			}
			var refused *publisher.ValueError
			require.ErrorAs(t, err, &refused, name)
			require.Equal(t, c.topic, refused.Topic, name)
			require.Contains(t, err.Error(), c.reason, name)
			require.Equal(t, "invalid_message", cursor.ErrorType(err), name)
		}
	}
}

func TestLargestPayloadIsTaken(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	events := newEventLog(t, db.Pool(t), publisher.EventLogConfig{})
	require.NoError(t, events.Publish("t", message.NewMessage("largest", bytes.Repeat([]byte{0xff}, 32<<20))))
	var refused *publisher.ValueError
	require.ErrorAs(t, events.Publish("t", message.NewMessage("larger", make([]byte, 32<<20+1))), &refused)
	require.Equal(t, 32<<20, pgtest.Value[int](t, db, `select octet_length(payload) from event_log`))
}

// oddPayloads must come back byte for byte.
func oddPayloads() [][]byte {
	random := make([]byte, 1<<20)
	for i := range random {
		random[i] = byte(i * i >> 3)
	}
	all := [][]byte{
		{}, {0}, {0xff, 0xfe}, []byte(`\x41`), []byte(`\\`), []byte(`'; --`), []byte("$1"), random, []byte(strings.Repeat("😀", 3000)),
		[]byte("null"), []byte(`{"a": 1, "a":2 }`), []byte("  {\"b\":\n1}\t"), []byte(`12345678901234567890123.10`), []byte(`"\u0000"`),
		[]byte(`"\ud800"`), []byte("plain text"), []byte("\xed\xa0\x80"), []byte("a\x00b"),
	}
	for b := range 256 {
		all = append(all, []byte{byte(b)})
	}
	return all
}

func TestEventsComeBackAsTheyWereInEveryExecMode(t *testing.T) {
	t.Parallel()
	type event struct {
		Topic, UUID string
		Key         *string
		Payload     []byte
		Metadata    map[string]string
	}
	var messages []*message.Message
	var want []event
	add := func(uuid string, payload []byte, metadata map[string]string) {
		m := message.NewMessage(uuid, payload)
		m.Metadata = metadata
		messages = append(messages, m)
		e := event{Topic: `it's "T" \ $1 😀`, UUID: uuid, Payload: payload, Metadata: metadata}
		if uuid != "" {
			e.Key = &uuid
		}
		if payload == nil {
			e.Payload = []byte{}
		}
		if metadata == nil {
			e.Metadata = map[string]string{}
		}
		want = append(want, e)
	}
	add("", nil, nil)
	add(strings.Repeat("long", 1000), nil, map[string]string{})
	add(`it's "quoted" \ $1 😀`, nil, map[string]string{"": "", "a": `"'\$1`, "<&>": "\u2028\x01\x7f", "😀": "", "big": strings.Repeat("m", 1<<20)})
	for _, p := range oddPayloads() {
		add("id", p, map[string]string{"k": "v"})
	}

	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := logtest.New(t)
			events := newEventLog(t, db.Pool(t, inMode(mode)), publisher.EventLogConfig{
				Key: func(_ string, m *message.Message) string { return m.UUID },
			})
			require.NoError(t, events.Publish(want[0].Topic, messages...))

			rows, _ := db.Conn(t).Query(t.Context(), `select topic, uuid, key, payload, metadata from event_log order by seq`)
			got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[event])
			require.NoError(t, err)
			require.Len(t, got, len(want))
			for i := range want {
				require.Equal(t, want[i], got[i])
			}
		})
	}
}

func TestTimeOfAnEventIsThatOfItsSource(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	at := map[string]time.Time{
		"zone":  time.Date(2026, 3, 29, 2, 30, 0, 123456789, time.FixedZone("", -3*3600)),
		"first": time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC),
		"last":  time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
	}
	for _, mode := range execModes {
		events := newEventLog(t, db.Pool(t, inMode(mode)), publisher.EventLogConfig{
			OccurredAt: func(_ string, m *message.Message) time.Time { return at[m.UUID] },
		})
		require.NoError(t, events.Publish("t", msg("zone"), msg("first"), msg("last"), msg("none")))
	}
	rows, _ := db.Conn(t).Query(t.Context(), `select uuid, occurred_at, recorded_at from event_log`)
	var uuid string
	var occurred, recorded time.Time
	_, err := pgx.ForEachRow(rows, []any{&uuid, &occurred, &recorded}, func() error {
		if uuid == "none" {
			require.WithinDuration(t, recorded, occurred, time.Minute)
			return nil
		}
		require.True(t, at[uuid].Truncate(time.Microsecond).Equal(occurred), "%s %s", uuid, occurred)
		return nil
	})
	require.NoError(t, err)
}

// What Go takes for JSON and a column does not.
var refusedJSON = map[string]map[string]string{
	"json": {
		"plain text": "not JSON", `{"a":1`: "not JSON", "\x00": "not JSON", "{\"a\":\"\xff\"}": "UTF-8", `'a'`: "not JSON", `NaN`: "not JSON",
		"\"\x01\"": "not JSON", "01": "not JSON",
	},
	"jsonb": {
		"plain text": "not JSON", "{\"a\":\"\xff\"}": "UTF-8", `"\u0000"`: `\u0000`, `{"\u0000":1}`: `\u0000`, `["\\\u0000"]`: `\u0000`,
		`"\ud800"`: "surrogate", `"\udc00"`: "surrogate", `"\ud83dx"`: "surrogate", `"\uD800\uD800"`: "surrogate", `"\ud83d\n"`: "surrogate",
		`"\ud83d\u0041"`: "surrogate", `1e131072`: "number", `[-1.5e-16383]`: "number", `{"a":1e99999999999999999999}`: "number",
		`0.1e131073`: "number", "[" + strings.Repeat("9", 131073) + "]": "number",
	},
}

// What a column holds and keeps the meaning of.
var takenJSON = map[string][]string{
	"json": {
		`"\u0000"`, `"\ud800"`, `1e131072`, `{"a": 1, "a":2 }`, "  [ ]\n", `null`, `""`, `-0.0E+5`, `"😀 \ud83d\ude00"`,
		strings.Repeat("[", 10000) + strings.Repeat("]", 10000),
	},
	"jsonb": {
		`"\\u0000"`, `"\\\\u0000"`, `"\ud83d\ude00"`, `["\uDBFF\uDFFF","\ufffe"]`, `1e131071`, `1e-16383`, `[12345678901234567890.5]`,
		`{"u": "\\ud800", "n": -1.5E+3}`, `null`, `true`, `"\"1e999999"`, `{"1e999999":"\u0001"}`, "[" + strings.Repeat("9", 131072) + "]",
		strings.Repeat("[", 10000) + strings.Repeat("]", 10000),
	},
}

func TestJSONThatIsTakenIsWhatTheColumnHolds(t *testing.T) {
	t.Parallel()
	db := logtest.New(t)
	conn := db.Conn(t)
	for column, payloads := range takenJSON {
		jobs := newJobs(t, withPayload(column))
		for _, p := range payloads {
			require.ErrorIs(t, jobs.Publish("t", message.NewMessage("id", []byte(p))), publisher.ErrNoUnit, "%s %.60s", column, p)
			_, err := conn.Exec(t.Context(), `select $1::text::`+column, p)
			require.NoError(t, err, "%s %.60s", column, p)
		}
	}
	for column, payloads := range refusedJSON {
		jobs := newJobs(t, withPayload(column))
		for p, reason := range payloads {
			err := jobs.Publish("t", message.NewMessage("id", []byte(p)))
			var refused *publisher.ValueError
			require.ErrorAs(t, err, &refused, "%s %.60s", column, p)
			require.Contains(t, refused.Reason, reason, "%s %.60s", column, p)
			require.Less(t, len(err.Error()), 300)
			_, err = conn.Exec(t.Context(), `select $1::text::`+column, p)
			require.Error(t, err, "%s %.60s", column, p)
		}
	}
}

// FuzzJSONThatIsTaken looks for JSON that is taken for a jsonb column and that PostgreSQL does not take.
func FuzzJSONThatIsTaken(f *testing.F) {
	for _, column := range []string{"json", "jsonb"} {
		for _, p := range takenJSON[column] {
			if len(p) < 100 {
				f.Add(p)
			}
		}
		for p := range refusedJSON[column] {
			if len(p) < 100 {
				f.Add(p)
			}
		}
	}
	db := logtest.New(f)
	conn := db.Conn(f)
	jobs, err := publisher.NewJobs(publisher.JobsConfig{Schema: withPayload("jsonb")})
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, payload string) {
		err := jobs.Publish("t", message.NewMessage("id", []byte(payload)))
		if payload == "" || !errors.Is(err, publisher.ErrNoUnit) {
			return
		}
		require.True(t, json.Valid([]byte(payload)))
		_, err = conn.Exec(t.Context(), `select $1::text::jsonb`, payload)
		require.NoError(t, err)
	})
}
