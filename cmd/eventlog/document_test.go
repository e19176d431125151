package main

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

var update = flag.Bool("update", false, "write docs/cli.md anew")

const document = "../../docs/cli.md"

// jsonOf is what each verb writes with --json. Its fields are part of the program's promise.
var jsonOf = map[string]any{
	"status": statusJSON{}, "check": watch.Report{}, "event": recordJSON{}, "tail": eventJSON{}, "verify": verdictJSON{}, "interventions": []interventionJSON{},
	"seek": changeJSON{}, "skip": changeJSON{}, "pause": changeJSON{}, "resume": changeJSON{}, "retire": changeJSON{}, "redact": changeJSON{},
	"retention status": retentionJSON{}, "retention set": settingsJSON{}, "retention run": maintenanceJSON{},
	"parked list": []parkedJSON{}, "parked replay": changeJSON{}, "parked discard": changeJSON{},
	"losses list": []lossJSON{}, "losses settle": changeJSON{},
	"migrate up": []migrationJSON{}, "migrate status": []migrationJSON{}, "migrate print": []sqlJSON{},
}

// fields are the paths of a value's fields in its JSON.
func fields(value any) []string { return fieldsOf(reflect.TypeOf(value), "") }

func fieldsOf(t reflect.Type, at string) (all []string) {
	switch t.Kind() {
	case reflect.Pointer:
		return fieldsOf(t.Elem(), at)
	case reflect.Slice:
		return fieldsOf(t.Elem(), at+"[]")
	case reflect.Struct:
		if t.PkgPath() == "time" {
			return []string{at}
		}
		for i := range t.NumField() {
			f := t.Field(i)
			if f.Anonymous {
				all = append(all, fieldsOf(f.Type, at)...)
				continue
			}
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name == "-" {
				continue
			}
			all = append(all, fieldsOf(f.Type, strings.TrimPrefix(at+"."+name, "."))...)
		}
		return all
	case reflect.Map:
		return []string{at + ".*"}
	}
	return []string{at}
}

// paths are those of a decoded value; what is null or empty has none.
func paths(value any, at string) (all []string) {
	switch v := value.(type) {
	case nil:
		return nil
	case []any:
		for _, e := range v {
			all = append(all, paths(e, at+"[]")...)
		}
		return all
	case map[string]any:
		for name, e := range v {
			if strings.HasSuffix(at, "metadata") {
				name = "*"
			}
			all = append(all, paths(e, strings.TrimPrefix(at+"."+name, "."))...)
		}
		return all
	}
	return []string{at}
}

func markdown(root *cobra.Command) string {
	var out strings.Builder
	fmt.Fprintf(&out, "# eventlog\n\nWritten from the program's own help: `go test ./cmd/eventlog -run TestDocumentIsTheHelp -update`.\n\n")
	fmt.Fprintf(&out, "    go run github.com/watermill-eventlog/watermill-eventlog/cmd/eventlog@latest status\n\n%s\n\n", root.Long)
	fmt.Fprintf(&out, "`eventlog completion bash`, `zsh`, `fish` and `powershell` print completions, which offer the log's consumers too.\n\n")
	fmt.Fprintf(&out, "Flags of all commands:\n\n```\n%s```\n", root.PersistentFlags().FlagUsages())
	for _, verb := range verbs(root) {
		fmt.Fprintf(&out, "\n## %s\n\n    %s\n\n%s\n\n", path(verb), verb.UseLine(), verb.Long)
		if usages := verb.LocalNonPersistentFlags().FlagUsages(); usages != "" {
			fmt.Fprintf(&out, "```\n%s```\n\n", usages)
		}
		for _, example := range strings.Split(verb.Example, "\n") {
			fmt.Fprintf(&out, "    %s\n", strings.TrimSpace(example))
		}
		fmt.Fprintf(&out, "\nJSON: `%s`\n", strings.Join(fields(jsonOf[path(verb)]), "`, `"))
	}
	return out.String()
}

func TestDocumentIsTheHelp(t *testing.T) {
	t.Parallel()
	root := (&program{}).root()
	want := markdown(root)
	if *update {
		require.NoError(t, os.WriteFile(document, []byte(want), 0o644))
	}
	found, err := os.ReadFile(document)
	require.NoError(t, err)
	require.Equal(t, want, string(found), "run it with -update")
	var names []string
	for _, verb := range verbs(root) {
		names = append(names, path(verb))
	}
	for name := range jsonOf {
		require.True(t, slices.Contains(names, name), name)
	}
}
