package prediction

import "testing"

// A page has as many predictions as fit into its bytes, and at least one.
func TestPagesAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		stored []int
		want   int
	}{
		{nil, 0},
		{[]int{10, 10}, 2},
		{[]int{pageBytesMax + 1}, 1},
		{[]int{pageBytesMax + 1, 1}, 1},
		{[]int{pageBytesMax - 5, 5, 1}, 2},
	} {
		list := make([]listed, len(c.stored))
		for i, n := range c.stored {
			list[i].Stored = n
		}
		if got := fitting(list); got != c.want {
			t.Errorf("%v: %d are in the page, want %d", c.stored, got, c.want)
		}
	}
}
