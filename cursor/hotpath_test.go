package cursor

import (
	"testing"

	"github.com/stretchr/testify/require"
)

var numbers = func() []int64 {
	numbers := make([]int64, 1000)
	for i := range numbers {
		numbers[i] = int64(i) + 1
	}
	return numbers
}()

var metadata = []byte(`{"correlation_id": "1234567890", "kind": "orders.placed", "tenant": "1234567890"}`)

func BenchmarkPlanRound(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if plan, err := PlanRound(0, numbers, 1, 1000); err != nil || plan.Through != 1000 {
			b.Fatal(plan, err)
		}
	}
}

func BenchmarkDecodeMetadata(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if m, err := decodeMetadata(metadata); err != nil || len(m) != 3 {
			b.Fatal(m, err)
		}
	}
}

// What is done for each event may not grow by accident.
func TestHotPathAllocatesLittle(t *testing.T) {
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = PlanRound(0, numbers, 1, 1000) }), "PlanRound")
	require.LessOrEqual(t, testing.AllocsPerRun(100, func() { _, _ = decodeMetadata(metadata) }), 3.0, "decodeMetadata: the text, the map and its table")
}
