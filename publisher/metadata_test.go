package publisher

import (
	"encoding/json"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMetadataIsWrittenAsEncodingJSONReadsIt(t *testing.T) {
	many := map[string]string{}
	for i := range 40 {
		many["key "+strconv.Itoa(i)] = strconv.Itoa(i)
	}
	for _, metadata := range []map[string]string{
		{"": ""},
		{"trace": "0af7", "tenant": "north", "kind": "placed"},
		{"a\"b": `c\d`, "line": "one\ntwo\t\x01\x7f", "é <&> \u2028": "日本 😀"},
		many,
	} {
		encoded, reason := metadataJSON(metadata, "jsonb")
		require.Empty(t, reason)
		var back map[string]string
		require.NoError(t, json.Unmarshal([]byte(encoded), &back))
		require.Equal(t, metadata, back)
		again, _ := metadataJSON(metadata, "jsonb")
		require.Equal(t, encoded, again, "the order is the same each time")
	}
}

func TestPlainMetadataIsWrittenWithoutReflection(t *testing.T) {
	plain := map[string]string{"trace": "0af7", "tenant": "north", "kind": "placed"}
	require.LessOrEqual(t, testing.AllocsPerRun(100, func() { _, _ = metadataJSON(plain, "jsonb") }), 2.0)
}
