package cursor_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

func TestShownNameIsReadBack(t *testing.T) {
	t.Parallel()
	for _, key := range []cursor.Key{
		push, {Consumer: "push", Topic: "orders"}, {Consumer: "a", Topic: "b", Shard: "c"}, {Consumer: "a", Shard: "c"}, {Consumer: "a@b#c"}, {Consumer: `q"`, Topic: "#", Shard: `"`},
		{Consumer: "with space", Topic: "dots.and/slashes"}, {Consumer: "é☃", Topic: "\n@"}, {Consumer: `a\@`},
	} {
		read, err := cursor.ParseKey(key.String())
		require.NoError(t, err, "%s", key)
		require.Equal(t, key, read)
	}
	for _, name := range []string{"", "@b", "a@", "a#", "a@b#", "a@b@c", "a#b@c", `"a`, `"a"b`, `a"b`, "a@*", "a#b#c"} {
		_, err := cursor.ParseKey(name)
		require.Error(t, err, name)
		require.ErrorContains(t, err, "consumer@topic", name)
	}
}

func FuzzParseKey(f *testing.F) {
	f.Add("a", "b", "c")
	f.Add(`a"`, "@", "#")
	f.Fuzz(func(t *testing.T, consumer, topic, shard string) {
		key := cursor.Key{Consumer: consumer, Topic: topic, Shard: shard}
		if key.Validate() != nil {
			return
		}
		read, err := cursor.ParseKey(key.String())
		if err != nil || read != key {
			t.Fatalf("%#v is shown as %s and read as %#v, %v", key, key, read, err)
		}
	})
}
