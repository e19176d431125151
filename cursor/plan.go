package cursor

import "fmt"

// PlanKind is what a round has to do.
type PlanKind int

const (
	// Idle means that the cursor is at the head.
	Idle PlanKind = iota
	// Process means that the numbers up to Plan.Through follow each other from the position.
	Process
	// Loss means that the events up to Plan.Through are gone from the log's old end.
	Loss
)

func (k PlanKind) String() string {
	return [...]string{"idle", "process", "loss"}[k]
}

// Plan is what a round has to do, and the position it leads to.
type Plan struct {
	Kind    PlanKind
	Through int64
}

// PlanRound decides what a round at a position may do, given the numbers that one statement read after the
// position in ascending order, the lowest number in the log (0: the log is empty), and the head.
//
// It never moves back and never passes a hole. What it lets be processed follows from position+1 without a
// break. A loss ends just before the lowest number of the log, or at the head of an empty one. A number that
// is missing, repeated, out of order or above the head is a [GapError]; a head below the position is
// [ErrCursorAhead].
func PlanRound(position int64, numbers []int64, lowest, head int64) (Plan, error) {
	for _, n := range numbers {
		if n > head {
			return Plan{}, &GapError{Seq: n, Reason: fmt.Sprintf("it is above the head %d", head)}
		}
	}
	if head < position {
		return Plan{}, &AheadError{Position: position, Head: head}
	}
	if len(numbers) == 0 {
		switch {
		case head == position:
			return Plan{Kind: Idle, Through: position}, nil
		case lowest == 0:
			return Plan{Kind: Loss, Through: head}, nil
		default:
			return Plan{}, &GapError{Seq: position + 1, Reason: fmt.Sprintf("nothing can be read between it and the head %d", head)}
		}
	}

	lost := numbers[0] > position+1 && numbers[0] == lowest
	expected := position + 1
	if lost {
		expected = lowest
	}
	for _, n := range numbers {
		switch {
		case n > expected:
			return Plan{}, &GapError{Seq: expected, Reason: fmt.Sprintf("the next number found is %d", n)}
		case n < expected:
			return Plan{}, &GapError{Seq: n, Reason: "it was read twice or out of order"}
		}
		expected++
	}
	if lost {
		return Plan{Kind: Loss, Through: lowest - 1}, nil
	}
	return Plan{Kind: Process, Through: expected - 1}, nil
}
