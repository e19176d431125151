package cursor

import (
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Array is a parameter of a [Trip] for a large text[] or bytea[], as a round's jobs are. pgx takes it for the slice that
// it is, but makes room for all of it at once: otherwise it grows a buffer of a few bytes by quarters, copies
// everything each time, and leaves five times the array's size to the collector.
type Array[T string | []byte] []T

// knowArrays makes a connection know arrays, also where its pool has given it other types meanwhile.
func knowArrays(conn *pgx.Conn) {
	const key = "github.com/watermill-eventlog/watermill-eventlog/cursor.Array"
	data, types := conn.PgConn().CustomData(), conn.TypeMap()
	if funcs := types.TryWrapEncodePlanFuncs; len(funcs) > 0 && data[key] == &funcs[0] {
		return
	}
	// In front, as pgx would find the slice below the type.
	types.TryWrapEncodePlanFuncs = slices.Insert(slices.Clone(types.TryWrapEncodePlanFuncs), 0, wrapArray)
	data[key] = &types.TryWrapEncodePlanFuncs[0]
}

func wrapArray(value any) (pgtype.WrappedEncodePlanNextSetter, any, bool) {
	switch array := value.(type) {
	case Array[string]:
		return &arrayPlan[string]{}, []string(array), true
	case Array[[]byte]:
		return &arrayPlan[[]byte]{}, [][]byte(array), true
	}
	return nil, nil, false
}

// arrayPlan encodes an array as pgx encodes the slice.
type arrayPlan[T string | []byte] struct{ next pgtype.EncodePlan }

func (p *arrayPlan[T]) SetNext(next pgtype.EncodePlan) { p.next = next }

func (p *arrayPlan[T]) Encode(value any, buf []byte) ([]byte, error) {
	array := value.(Array[T])
	size := 20 // the header
	for i := range array {
		size += 4 + len(array[i])
	}
	return p.next.Encode([]T(array), slices.Grow(buf, size))
}
