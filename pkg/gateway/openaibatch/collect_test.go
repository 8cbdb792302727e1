package openaibatch

import "testing"

// Answers that are read in one statement are few where they are large.
func TestAnswersAreReadInBoundedGroups(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		stored []int
		want   int
	}{
		{nil, 0},
		{[]int{10, 10, 10}, 3},
		{[]int{storedBytesMax, 10}, 1},
		{[]int{storedBytesMax - 1, 10, 10}, 2},
		{[]int{64 << 20, 64 << 20}, 1},
	} {
		lines := make([]endedLine, len(c.stored))
		for i, n := range c.stored {
			lines[i].Stored = n
		}
		if got := atOnce(lines); got != c.want {
			t.Errorf("%v: %d at once, want %d", c.stored, got, c.want)
		}
	}
}
