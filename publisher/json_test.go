package publisher

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/webhooks"
)

var texts = []string{
	``, ` `, `{}`, `[]`, ` [ ] `, `{"a": 1, "b": [true, false, null]}`, `"a\"\\\/\b\f\n\r\t\u00e4"`, `-0`, `0.5e+10`, `1E-2`, `[1,2]`, "\"\u00e4\"", "\"\xff\"",
	`{`, `}`, `[1,]`, `[,1]`, `{"a"}`, `{"a":}`, `{"a":1,}`, `{a:1}`, `{"a" 1}`, `{1:1}`, `"`, `"a`, `"\`, `"\x"`, `"\u12"`, `"\u12g4"`, "\"\n\"", "\"\x00\"", `01`, `-`, `-a`,
	`1.`, `.1`, `1e`, `1e+`, `+1`, `tru`, `True`, `nul`, `nan`, `1 2`, `{} x`, "\v1", `"a" "b"`, `[1 2]`, `[]]`, `[[]`, "\ufeff1",
	strings.Repeat("[", maxPlainDepth) + strings.Repeat("]", maxPlainDepth),
	strings.Repeat("[", maxPlainDepth+2) + strings.Repeat("]", maxPlainDepth+2),
	strings.Repeat("[", maxPlainDepth+2) + strings.Repeat("]", maxPlainDepth+1),
	strings.Repeat("[", 1<<20), // nobody's stack may overflow
	strings.Repeat(`{"a":`, 20_000) + "1" + strings.Repeat("}", 20_000),
}

func TestTextIsJSONWhereEncodingJSONSaysSo(t *testing.T) {
	for _, text := range texts {
		require.Equal(t, json.Valid([]byte(text)), validJSON([]byte(text)), "%.100q", text)
	}
	events, err := webhooks.Webhooks()
	require.NoError(t, err)
	for i := range events {
		whole := events[i].Payload
		require.True(t, validJSON(whole))
		for n := 0; n < len(whole); n += 1 + len(whole)/50 {
			require.Equal(t, json.Valid(whole[:n]), validJSON(whole[:n]), "%s, cut at %d", events[i].Topic, n)
			broken := append([]byte{}, whole...)
			broken[n] = byte(n)
			require.Equal(t, json.Valid(broken), validJSON(broken), "%s, %q at %d", events[i].Topic, byte(n), n)
		}
	}
}

func FuzzTextIsJSONWhereEncodingJSONSaysSo(f *testing.F) {
	for _, text := range texts {
		if len(text) < 1000 {
			f.Add([]byte(text))
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		require.Equal(t, json.Valid(text), validJSON(text))
	})
}

func BenchmarkValidJSON(b *testing.B) {
	events, err := webhooks.Webhooks()
	require.NoError(b, err)
	for _, size := range []struct {
		name string
		text []byte
	}{{"webhook", events[100].Payload}, {"short", []byte(`{"job": "0123456789", "kind": "orders.placed", "count": 17, "text": "0123456789012345678901234567890123456789"}`)}} {
		for _, way := range []struct {
			name  string
			valid func([]byte) bool
		}{{"encoding/json", json.Valid}, {"ours", validJSON}} {
			b.Run(size.name+"/"+way.name, func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(len(size.text)))
				for b.Loop() {
					if !way.valid(size.text) {
						b.Fatal("not JSON")
					}
				}
			})
		}
	}
}
