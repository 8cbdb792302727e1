package invalidation

import (
	"slices"

	"github.com/jackc/pgx/v5/pgtype"
)

// columns lays the endings of one verb out as arrays, the shape that their statement takes.
type columns struct {
	keys    []string
	tokens  numbers
	ids     numbers
	ran     numbers // milliseconds
	endings []*Ending
}

func pick(endings []Ending, verbs ...verb) columns {
	n := 0
	for i := range endings {
		if slices.Contains(verbs, endings[i].verb) {
			n++
		}
	}
	c := columns{
		make([]string, 0, n), make(numbers, 0, n), make(numbers, 0, n), make(numbers, 0, n),
		make([]*Ending, 0, n),
	}
	for i := range endings {
		e := &endings[i]
		if slices.Contains(verbs, e.verb) {
			c.keys, c.tokens, c.ids = append(c.keys, e.Lock.Key), append(c.tokens, number(e.Lock.Token)),
				append(c.ids, number(e.Entry))
			c.ran, c.endings = append(c.ran, number(e.ran.Milliseconds())), append(c.endings, e)
		}
	}
	return c
}

// tids are those of the lock records and entries.
func (c columns) tids() (locks, entries tids) {
	for _, e := range c.endings {
		locks, entries = append(locks, e.Lock.tid), append(entries, e.Lock.tidOf(e.Entry))
	}
	return locks, entries
}

func each[T any](c columns, field func(*Ending) T) []T {
	values := make([]T, len(c.endings))
	for i, e := range c.endings {
		values[i] = field(e)
	}
	return values
}

// numbers and tids are arrays for the wire. pgx would make a value on the heap of each element of a slice.
type (
	array[T any] []T
	numbers      = array[number]
	tids         = array[pgtype.TID]
)

// Dimensions implements pgtype.ArrayGetter.
func (a array[T]) Dimensions() []pgtype.ArrayDimension {
	return []pgtype.ArrayDimension{{Length: int32(len(a)), LowerBound: 1}}
}

// Index implements pgtype.ArrayGetter.
func (a array[T]) Index(i int) any { return &a[i] }

// IndexType implements pgtype.ArrayGetter.
func (a array[T]) IndexType() any { return new(T) }

type number int64

// Int64Value implements pgtype.Int64Valuer.
func (n *number) Int64Value() (pgtype.Int8, error) {
	return pgtype.Int8{Int64: int64(*n), Valid: true}, nil
}
