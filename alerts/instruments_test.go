package alerts_test

import (
	"os"
	"strings"
	"testing"

	"github.com/prometheus/otlptranslator"
	"github.com/stretchr/testify/require"
)

// series are the Prometheus series that the exporter makes of the instruments, with their labels. The names are made by
// the package that the exporter itself makes them with.
func series(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	metrics := otlptranslator.NewMetricNamer("", otlptranslator.UnderscoreEscapingWithSuffixes)
	labels := otlptranslator.LabelNamer{}
	instruments, err := os.ReadFile("../docs/telemetry.md")
	require.NoError(t, err)
	for _, line := range strings.Split(string(instruments), "\n") {
		cells := strings.Split(strings.ReplaceAll(line, "`", ""), "|")
		if len(cells) < 6 || !strings.HasPrefix(strings.TrimSpace(cells[1]), "eventlog.") {
			continue
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		metric := otlptranslator.Metric{Name: cells[1], Unit: cells[3], Type: map[string]otlptranslator.MetricType{
			"gauge": otlptranslator.MetricTypeGauge, "counter": otlptranslator.MetricTypeMonotonicCounter, "histogram": otlptranslator.MetricTypeHistogram,
		}[cells[2]]}
		require.NotZero(t, metric.Type, line)
		name, err := metrics.Build(metric)
		require.NoError(t, err)
		names := []string{"job", "instance", "otel_scope_name", "otel_scope_version"}
		for _, attribute := range strings.Split(cells[4], ",") {
			if attribute = strings.TrimSpace(attribute); attribute != "" {
				label, err := labels.Build(attribute)
				require.NoError(t, err)
				names = append(names, label)
			}
		}
		if cells[2] != "histogram" {
			all[name] = names
			continue
		}
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			all[name+suffix] = append(names[:len(names):len(names)], "le")
		}
	}
	return all
}

func TestNamesOfTheSeriesAreTheExporters(t *testing.T) {
	t.Parallel()
	all := series(t)
	for _, name := range []string{
		"eventlog_consumer_lag", "eventlog_consumer_pending_age_seconds", "eventlog_consumer_problem", "eventlog_rounds_total",
		"eventlog_gauges_failures_total", "eventlog_round_duration_seconds_bucket", "eventlog_handler_duration_seconds_bucket",
	} {
		require.Contains(t, all, name)
	}
	require.Contains(t, all["eventlog_consumer_lag"], "eventlog_consumer_name")
	require.Contains(t, all["eventlog_consumer_problem"], "eventlog_problem")
}
