package cursor_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

func TestPlanRound(t *testing.T) {
	t.Parallel()
	gap := func(seq int64) error { return &cursor.GapError{Seq: seq} }
	ahead := &cursor.AheadError{}
	for _, tt := range []struct {
		name         string
		position     int64
		numbers      []int64
		lowest, head int64
		want         cursor.Plan
		err          error
	}{
		{name: "a new log is idle", want: cursor.Plan{Kind: cursor.Idle}},
		{name: "at the head it is idle", position: 7, lowest: 1, head: 7, want: cursor.Plan{Kind: cursor.Idle, Through: 7}},
		{name: "at the head of an emptied log it is idle", position: 7, head: 7, want: cursor.Plan{Kind: cursor.Idle, Through: 7}},
		{name: "the first event", numbers: []int64{1}, lowest: 1, head: 1, want: cursor.Plan{Kind: cursor.Process, Through: 1}},
		{name: "numbers that follow", position: 3, numbers: []int64{4, 5, 6}, lowest: 1, head: 9, want: cursor.Plan{Kind: cursor.Process, Through: 6}},
		{name: "numbers that follow where the log begins", position: 3, numbers: []int64{4, 5}, lowest: 4, head: 5, want: cursor.Plan{Kind: cursor.Process, Through: 5}},

		{name: "a number above the head", position: 3, numbers: []int64{4, 5}, lowest: 1, head: 4, err: gap(5)},
		{name: "a number above the head goes before a head below the position", position: 9, numbers: []int64{10}, lowest: 1, head: 8, err: gap(10)},
		{name: "a head below the position", position: 500, lowest: 1, head: 300, err: ahead},
		{name: "a head below the position in an empty log", position: 500, head: 300, err: ahead},

		{name: "an emptied log is lost up to its head", position: 100, head: 400, want: cursor.Plan{Kind: cursor.Loss, Through: 400}},
		{name: "a missing tail", position: 100, lowest: 50, head: 101, err: gap(101)},
		{name: "a missing tail behind an untouched log", position: 0, lowest: 1, head: 1, err: gap(1)},

		{name: "what retention removed is lost up to the lowest number", position: 100, numbers: []int64{301, 302}, lowest: 301, head: 400, want: cursor.Plan{Kind: cursor.Loss, Through: 300}},
		{name: "one removed event is lost", position: 100, numbers: []int64{102}, lowest: 102, head: 102, want: cursor.Plan{Kind: cursor.Loss, Through: 101}},
		{name: "a jump to what is not the lowest number", position: 100, numbers: []int64{301}, lowest: 50, head: 400, err: gap(101)},
		{name: "the only event is two after the position", position: 4, numbers: []int64{6}, lowest: 1, head: 6, err: gap(5)},
		{name: "a hole in the middle", position: 0, numbers: []int64{1, 2, 4}, lowest: 1, head: 4, err: gap(3)},
		{name: "a hole at the end", position: 0, numbers: []int64{1, 2, 3, 9}, lowest: 1, head: 9, err: gap(4)},
		{name: "the first of two holes is named", position: 0, numbers: []int64{1, 3, 5}, lowest: 1, head: 5, err: gap(2)},
		{name: "a hole behind a loss is named before anything is lost", position: 0, numbers: []int64{5, 7}, lowest: 5, head: 7, err: gap(6)},
		{name: "a repeat", position: 0, numbers: []int64{1, 2, 2, 3}, lowest: 1, head: 3, err: gap(2)},
		{name: "a repeat that hides a hole from a count", position: 0, numbers: []int64{1, 2, 2, 4}, lowest: 1, head: 4, err: gap(2)},
		{name: "a repeat of the position", position: 5, numbers: []int64{5, 6}, lowest: 1, head: 6, err: gap(5)},
		{name: "disorder", position: 0, numbers: []int64{2, 1}, lowest: 1, head: 2, err: gap(1)},
		{name: "numbers below the lowest are no retention", position: 3, numbers: []int64{6, 7}, lowest: 7, head: 7, err: gap(4)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			plan, err := cursor.PlanRound(tt.position, tt.numbers, tt.lowest, tt.head)
			var want *cursor.GapError
			switch {
			case tt.err == nil:
				require.NoError(t, err)
				require.Equal(t, tt.want, plan)
			case errors.As(tt.err, &want):
				var got *cursor.GapError
				require.ErrorAs(t, err, &got)
				require.Equal(t, want.Seq, got.Seq)
				require.ErrorIs(t, err, cursor.ErrConsumerGap)
				require.Equal(t, "consumer_gap", cursor.ErrorType(err))
			default:
				var got *cursor.AheadError
				require.ErrorAs(t, err, &got)
				require.Equal(t, cursor.AheadError{Position: tt.position, Head: tt.head}, *got)
				require.ErrorIs(t, err, cursor.ErrCursorAhead)
				require.Equal(t, "cursor_ahead", cursor.ErrorType(err))
			}
		})
	}
}

func FuzzPlanRound(f *testing.F) {
	f.Add(int64(0), []byte{1, 1, 1}, int64(1), int64(3))
	f.Add(int64(5), []byte{3, 1}, int64(8), int64(9))
	f.Add(int64(5), []byte{}, int64(0), int64(9))
	f.Add(int64(5), []byte{1, 0, 2}, int64(1), int64(9))
	f.Add(int64(500), []byte{}, int64(1), int64(300))
	f.Fuzz(func(t *testing.T, position int64, steps []byte, lowest, head int64) {
		const limit = 1 << 40
		position, lowest, head = abs(position)%limit, abs(lowest)%limit, abs(head)%limit
		// Each step is the distance to the next number; those above 127 go back.
		numbers := make([]int64, len(steps))
		at := position
		for i, step := range steps {
			at += int64(int8(step))
			numbers[i] = at
		}

		plan, err := cursor.PlanRound(position, numbers, lowest, head)
		again, errAgain := cursor.PlanRound(position, numbers, lowest, head)
		if plan != again || (err == nil) != (errAgain == nil) {
			t.Fatal("it is not a function of its arguments")
		}
		if err != nil {
			if plan != (cursor.Plan{}) {
				t.Fatal("an error comes with a plan")
			}
			return
		}
		if plan.Through < position {
			t.Fatal("it moves back")
		}
		if plan.Through > head {
			t.Fatal("it moves beyond the head")
		}
		for i := 1; i < len(numbers); i++ {
			if numbers[i] != numbers[i-1]+1 {
				t.Fatal("it lets a hole, a repeat or a disorder pass")
			}
		}
		switch plan.Kind {
		case cursor.Idle:
			if plan.Through != position || head != position || len(numbers) > 0 {
				t.Fatal("it is idle although there is something to do")
			}
		case cursor.Process:
			if len(numbers) == 0 || numbers[0] != position+1 || plan.Through != numbers[len(numbers)-1] {
				t.Fatal("what it processes is not what was read from the position on")
			}
		case cursor.Loss:
			if plan.Through == position {
				t.Fatal("nothing is lost")
			}
			if len(numbers) == 0 && (lowest != 0 || plan.Through != head) {
				t.Fatal("without events only an emptied log is lost, up to its head")
			}
			if len(numbers) > 0 && (numbers[0] != lowest || plan.Through != lowest-1) {
				t.Fatal("a loss does not end just before the lowest number")
			}
		default:
			t.Fatal("an unknown kind")
		}
	})
}

func abs(n int64) int64 {
	if n < 0 {
		return -(n + 1)
	}
	return n
}
