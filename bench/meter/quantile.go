package meter

import (
	"cmp"
	"math"
	"slices"
)

// Quantile sorts the values and returns the smallest one that at least a share q of them do not exceed, 0 without any.
func Quantile[T cmp.Ordered](values []T, q float64) T {
	if len(values) == 0 {
		var none T
		return none
	}
	slices.Sort(values)
	at := int(math.Ceil(q*float64(len(values))-1e-6)) - 1
	return values[min(max(at, 0), len(values)-1)]
}
