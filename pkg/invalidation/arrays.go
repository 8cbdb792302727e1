package invalidation

import "github.com/jackc/pgx/v5/pgtype"

// columns lays endings out as arrays, the shape that statements take.
type columns struct {
	keys    []string
	tokens  numbers
	ids     numbers
	ran     numbers // milliseconds
	endings []*Ending
}

// pick lays those of the endings out that a statement is about.
func pick(endings []Ending, wanted func(*Ending) bool) (c columns) {
	for i := range endings {
		if e := &endings[i]; wanted(e) {
			if c.endings == nil {
				c.endings = make([]*Ending, 0, len(endings)-i)
			}
			c.endings = append(c.endings, e)
		}
	}
	n := len(c.endings)
	c.keys, c.tokens, c.ids, c.ran = make([]string, n), make(numbers, n), make(numbers, n), make(numbers, n)
	for i, e := range c.endings {
		c.keys[i], c.tokens[i], c.ids[i] = e.Lock.Key, number(e.Lock.Token), number(e.Entry)
		c.ran[i] = number(e.ran.Milliseconds())
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
