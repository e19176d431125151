// Package alerts holds alert rules for Prometheus (eventlog.rules.yml, and expected.rules.yml to edit), their tests for
// promtool (rules_test.yml), and a dashboard for Grafana (dashboard.json). It has no code: its tests hold the files to
// the names of the gauges and to the defaults of package watch.
package alerts
