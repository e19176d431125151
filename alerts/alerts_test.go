package alerts_test

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"

	"github.com/watermill-eventlog/watermill-eventlog/watch"
)

type rule struct {
	Alert, Record, Expr, For string
	Labels, Annotations      map[string]string
}

// rules are those of a file.
func rules(t *testing.T, file string) []rule {
	t.Helper()
	var content struct {
		Groups []struct {
			Name  string
			Rules []rule
		}
	}
	decoder := yaml.NewDecoder(bytes.NewReader(read(t, file)))
	decoder.KnownFields(true)
	require.NoError(t, decoder.Decode(&content))
	var all []rule
	for _, group := range content.Groups {
		all = append(all, group.Rules...)
	}
	require.NotEmpty(t, all)
	return all
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	return content
}

// expressions are the dashboard's queries.
func expressions(t *testing.T) []string {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
		Templating struct{ List []struct{ Definition string } }
	}
	require.NoError(t, json.Unmarshal(read(t, "dashboard.json"), &dashboard))
	var all []string
	for _, panel := range dashboard.Panels {
		require.NotEmpty(t, panel.Targets, panel.Title)
		for _, target := range panel.Targets {
			all = append(all, target.Expr)
		}
	}
	for _, variable := range dashboard.Templating.List {
		if variable.Definition != "" {
			all = append(all, variable.Definition)
		}
	}
	require.Greater(t, len(all), 8)
	return all
}

func TestAlertOnPendingAgeHasTheDefaultsNumber(t *testing.T) {
	t.Parallel()
	main := rules(t, "eventlog.rules.yml")[0]
	require.Equal(t, "EventlogPendingAge", main.Alert)
	found := regexp.MustCompile(`^max by \(eventlog_log_name, eventlog_consumer_name\) \(eventlog_consumer_pending_age_seconds\) > (\d+)\n$`).FindStringSubmatch(main.Expr)
	require.Len(t, found, 2, main.Expr)
	number, err := time.ParseDuration(found[1] + "s")
	require.NoError(t, err)
	require.Equal(t, watch.DefaultPendingAlertAfter, number)
	require.Equal(t, "5m", main.For)
	require.Equal(t, "page", main.Labels["severity"])

	var dashboard struct {
		Panels []struct {
			Title       string
			FieldConfig struct {
				Defaults struct {
					Thresholds struct{ Steps []struct{ Value *float64 } }
				}
			}
		}
	}
	require.NoError(t, json.Unmarshal(read(t, "dashboard.json"), &dashboard))
	require.Equal(t, "Pending age", dashboard.Panels[0].Title)
	require.Equal(t, number.Seconds(), *dashboard.Panels[0].FieldConfig.Defaults.Thresholds.Steps[1].Value)
}

func TestEachAlertHasItsSectionAndItsTests(t *testing.T) {
	t.Parallel()
	runbook := string(read(t, "../docs/runbook.md"))
	var tests struct {
		Tests []struct {
			AlertRuleTest []struct {
				Alertname string
				ExpAlerts []any `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}
	require.NoError(t, yaml.Unmarshal(read(t, "rules_test.yml"), &tests))
	fires, silent := map[string]bool{}, map[string]bool{}
	for _, test := range tests.Tests {
		for _, c := range test.AlertRuleTest {
			fires[c.Alertname] = fires[c.Alertname] || len(c.ExpAlerts) > 0
			silent[c.Alertname] = silent[c.Alertname] || len(c.ExpAlerts) == 0
		}
	}
	for _, r := range rules(t, "eventlog.rules.yml") {
		require.Contains(t, runbook, "\n## "+r.Alert+"\n")
		require.True(t, strings.HasSuffix(r.Annotations["runbook_url"], "/docs/runbook.md#"+strings.ToLower(r.Alert)), r.Alert)
		require.NotEmpty(t, r.Annotations["summary"])
		require.NotEmpty(t, r.Annotations["description"])
		require.NotEmpty(t, r.For, r.Alert)
		require.Contains(t, []string{"page", "ticket"}, r.Labels["severity"])
		require.True(t, fires[r.Alert] && silent[r.Alert], "%s is not tested with promtool both ways", r.Alert)
	}
}

var (
	quoted = regexp.MustCompile(`"[^"]*"`)
	name   = regexp.MustCompile(`\beventlog[a-z_:]*|\berror_type\b`)
)

func TestQueriesNameOnlySeriesAndLabelsThatExist(t *testing.T) {
	t.Parallel()
	all := series(t)
	labels := map[string]bool{}
	for _, names := range all {
		for _, n := range names {
			labels[n] = true
		}
	}
	queries := expressions(t)
	recorded := map[string]bool{}
	for _, file := range []string{"eventlog.rules.yml", "expected.rules.yml"} {
		for _, r := range rules(t, file) {
			queries = append(queries, r.Expr)
			if r.Record != "" {
				recorded[r.Record] = true
			}
		}
	}
	named := map[string]bool{}
	for _, query := range queries {
		for _, n := range name.FindAllString(quoted.ReplaceAllString(query, ""), -1) {
			require.True(t, labels[n] || recorded[n] || all[n] != nil, "%q of query %s", n, query)
			named[n] = true
		}
	}
	for _, n := range []string{"eventlog_consumer_lag", "eventlog_consumer_pending_age_seconds", "eventlog_consumer_problem", "eventlog_gauges_failures_total",
		"eventlog_consumer_parked", "eventlog_consumer_lost", "eventlog_rounds_total", "eventlog_round_duration_seconds_bucket", "eventlog_handler_duration_seconds_bucket"} {
		require.True(t, named[n], "nothing shows %s", n)
	}
}

// problems are the values of eventlog.problem.
var problems = []string{"cursor_missing", "cursor_ahead", "gap", "failing", "parked", "lost", "paused", "retired"}

func TestThereIsAnAlertForEachProblem(t *testing.T) {
	t.Parallel()
	var alerted []string
	for _, r := range rules(t, "eventlog.rules.yml") {
		for _, found := range regexp.MustCompile(`eventlog_problem="([a-z_]+)"`).FindAllStringSubmatch(r.Expr, -1) {
			alerted = append(alerted, found[1])
		}
	}
	require.ElementsMatch(t, problems, alerted)
	// What package watch finds as well has the same name there.
	for _, problem := range problems {
		if problem != "retired" { // which is no problem of the work
			require.True(t, slices.Contains(watch.Kinds(), watch.Kind(problem)), problem)
		}
	}
}
