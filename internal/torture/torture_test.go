package torture

import (
	"flag"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/internal/pgtest"
)

var (
	flagFaults   = flag.Int("torture.faults", 120, "how many faults that count end the run")
	flagDuration = flag.Duration("torture.duration", 0, "how long faults go on at most (0: no bound)")
	flagSeed     = flag.Uint64("torture.seed", 0, "the seed of another run (0: a random one)")
)

func TestMain(m *testing.M) {
	Worker()
	pgtest.Main(m)
}

func TestTorture(t *testing.T) {
	report := torture(t, Config{Faults: *flagFaults, Duration: *flagDuration, Seed: *flagSeed})
	require.Empty(t, report.Violations)
	total, byStep := 0, map[Step]int{}
	for fault, hits := range report.Hits {
		sum := 0
		for step, n := range hits {
			sum, byStep[step] = sum+n, byStep[step]+n
		}
		total += sum
		if *flagDuration == 0 && *flagFaults >= 100 {
			require.NotZero(t, sum, "no %s", fault)
		}
	}
	if total >= 100 {
		for _, step := range steps {
			require.NotZero(t, byStep[step], "no fault hit the step %q: are its statements still those of the library?", step)
		}
	}
}

func TestTortureFindsACursorMovedBeforeTheFlush(t *testing.T) {
	finds(t, plantCursorFirst, KindUnaccounted)
}

func TestTortureFindsACommitOnNack(t *testing.T) {
	finds(t, plantCommitOnNack, KindJobs)
}

func TestTortureFindsAPassedHole(t *testing.T) {
	finds(t, plantHole, KindPassedHole)
}

// finds requires a run with a planted bug to end by a violation of a kind.
func finds(t *testing.T, plant plant, kind Kind) {
	t.Helper()
	report := torture(t, Config{Faults: 1000, Duration: time.Minute, Seed: *flagSeed, plant: plant, until: kind})
	require.True(t, report.violatedBy(kind))
}

func torture(t *testing.T, config Config) *Report {
	t.Helper()
	config = config.withDefaults()
	config.Logf = t.Logf
	t.Logf("seed %d", config.Seed)
	report, err := Run(t.Context(), config)
	require.NoError(t, err)
	t.Log("\n" + report.String())
	return report
}
