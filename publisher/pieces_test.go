package publisher

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPiecesAreBoundedInNumberAndBytes(t *testing.T) {
	t.Parallel()
	const most, tooMuch = 3, maxPiece + 1
	for _, c := range []struct {
		sizes []int
		want  [][]int
	}{
		{nil, nil},
		{[]int{1}, [][]int{{1}}},
		{[]int{0, 0, 0, 0, 0, 0, 0}, [][]int{{0, 0, 0}, {0, 0, 0}, {0}}},
		{[]int{maxPiece, 0, 1}, [][]int{{maxPiece, 0}, {1}}},
		{[]int{1, tooMuch, 1, maxPiece - 1, 1}, [][]int{{1}, {tooMuch}, {1, maxPiece - 1}, {1}}},
		{[]int{tooMuch, tooMuch}, [][]int{{tooMuch}, {tooMuch}}},
	} {
		require.Equal(t, c.want, pieces(c.sizes, most, func(n int) int { return n }))
	}
}
