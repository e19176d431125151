package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEveryScenarioIsRightAndReported(t *testing.T) {
	dir := t.TempDir()
	jsonFile, markdown, readme := filepath.Join(dir, "bench.json"), filepath.Join(dir, "bench.md"), filepath.Join(dir, "README.md")
	require.NoError(t, os.WriteFile(readme, []byte("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n"), 0o600))
	var out, progress bytes.Buffer
	err := run(t.Context(), []string{"-n", "500", "-repeat", "1", "-fsync=false", "-json", jsonFile, "-markdown", markdown, "-readme", readme}, &out, &progress)
	require.NoError(t, err, progress.String())

	text, err := os.ReadFile(jsonFile)
	require.NoError(t, err)
	var report Report
	require.NoError(t, json.Unmarshal(text, &report))
	require.Empty(t, report.Wrong)
	require.Contains(t, report.Machine, "PostgreSQL 1")
	ratios := map[string]int{}
	for _, r := range report.Ratios {
		ratios[r.Scenario]++
		require.Positive(t, r.Median, r.Name)
	}
	for _, s := range scenarios {
		require.Positive(t, ratios[s.name], "ratios of %s", s.name)
	}

	table, err := os.ReadFile(markdown)
	require.NoError(t, err)
	require.Contains(t, string(table), "| drain | ours (default) to the hand-written loop |")
	filled, err := os.ReadFile(readme)
	require.NoError(t, err)
	require.Equal(t, "before\n<!-- bench -->\n"+string(table)+"<!-- /bench -->\nafter\n", string(filled))
	require.Contains(t, out.String(), "RATIOS")
}

func TestWrongResultIsNoTime(t *testing.T) {
	b, err := newBench(t.Context(), options{n: 3, repeat: 1}, regexp.MustCompile(""), &bytes.Buffer{})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.close()) }()
	insert := func(db *database, numbers ...string) {
		_, err := db.Exec(t.Context(), `insert into watermill_jobs (uuid, transaction_id)
			select $1 || n, '1' from unnest($2::text[]) with ordinality u(n, i) order by i`, uuidPrefix, numbers)
		require.NoError(t, err)
	}
	for what, numbers := range map[string][]string{
		"one is missing":         {"000000000001", "000000000003"},
		"one is there twice":     {"000000000001", "000000000002", "000000000002", "000000000003"},
		"two are the wrong way":  {"000000000001", "000000000003", "000000000002"},
		"one is of another work": {"000000000001", "000000000002", "000000000004"},
	} {
		require.NoError(t, b.inDatabase(t.Context(), func(db *database) error {
			insert(db, numbers...)
			require.Error(t, db.checkJobs(t.Context(), 3, true), what)
			return nil
		}))
	}
	require.NoError(t, b.inDatabase(t.Context(), func(db *database) error {
		insert(db, "000000000002", "000000000001", "000000000003")
		require.NoError(t, db.checkJobs(t.Context(), 3, false), "in any order")
		return nil
	}))

	b.report.scenario = "drain"
	b.report.add("a rival", "events/s", 1)
	b.report.fail("a rival", os.ErrInvalid)
	b.report.finish()
	require.Empty(t, b.report.Figures)
	require.Len(t, b.report.Wrong, 1)
}

func TestRatioIsTakenRoundByRound(t *testing.T) {
	r := &Report{}
	for i, v := range []float64{10, 40, 90} {
		r.add("a", "", v)
		r.add("b", "", float64(i+1))
	}
	r.add("slow", "", 1)
	r.ratio("a to b", "a", "b", atLeast(25))
	r.ratioToBest("b to the best", "b", []string{"slow", "a", "missing"}, target{})
	require.Equal(t, []float64{10, 20, 30}, r.Ratios[0].Values)
	require.Equal(t, Spread{Median: 20, Min: 10, Max: 30}, r.Ratios[0].Spread)
	require.Equal(t, "at least 25: missed", r.Ratios[0].verdict())
	require.Equal(t, "b to the best (a)", r.Ratios[1].Name)
	require.Empty(t, r.Ratios[1].verdict())
	require.Equal(t, "1,234,567", number(1234567.2))
	require.Equal(t, "12.3", number(12.34))
}

func TestDistanceIsKept(t *testing.T) {
	b, err := newBench(t.Context(), options{n: 1, repeat: 1}, regexp.MustCompile(""), &bytes.Buffer{})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.close()) }()
	require.NoError(t, b.inDatabase(t.Context(), func(db *database) error {
		w := &wire{}
		pool, err := db.open(t.Context(), 1, w.count)
		require.NoError(t, err)
		defer pool.Close()
		before := w.trips.Load()
		for range 5 {
			require.NoError(t, pool.Ping(t.Context()))
		}
		require.Equal(t, int64(5), w.trips.Load()-before)
		return nil
	}))
	require.Error(t, run(context.Background(), []string{"-run", "nothing"}, &bytes.Buffer{}, &bytes.Buffer{}))
}
