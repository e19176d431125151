//go:build external

package alerts_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func promtool(t *testing.T, args ...string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "promtool", args...).CombinedOutput()
	require.NoError(t, err, "promtool %s: %s", strings.Join(args, " "), out)
}

func TestPromtoolAcceptsTheRulesAndTheirTests(t *testing.T) {
	t.Parallel()
	promtool(t, "check", "rules", "eventlog.rules.yml", "expected.rules.yml")
	promtool(t, "test", "rules", "rules_test.yml")
}

// A dashboard's query is checked as a rule, with Grafana's variables replaced.
func TestPromtoolAcceptsTheDashboardsQueries(t *testing.T) {
	t.Parallel()
	type recording struct {
		Record string `json:"record"`
		Expr   string `json:"expr"`
	}
	var all []recording
	for _, query := range expressions(t) {
		if !strings.HasPrefix(query, "label_values(") { // Grafana's own
			query = strings.NewReplacer("$__rate_interval", "5m", "$consumer", ".*").Replace(query)
			require.NotContains(t, query, "$")
			all = append(all, recording{"x", query})
		}
	}
	file := filepath.Join(t.TempDir(), "dashboard.rules.yml")
	content, err := json.Marshal(map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": all}}}) // JSON is YAML
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, content, 0o600))
	promtool(t, "check", "rules", file)
}
