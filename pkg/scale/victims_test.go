package scale

import (
	"slices"
	"testing"
	"time"
)

func TestVictimsAreThoseWhoseRemovalCostsLeast(t *testing.T) {
	all := []removable{
		{ID: "long run", Ready: true, Running: 1, Remaining: time.Hour},
		{ID: "short run", Ready: true, Running: 2, Remaining: time.Second},
		{ID: "idle and warm", Ready: true, Affinity: 3},
		{ID: "idle", Ready: true},
		{ID: "quarantined", Ready: true, Quarantined: true, Running: 1},
		{ID: "starting long", Started: noon},
		{ID: "starting", Started: noon.Add(time.Minute)},
	}
	want := []string{"starting", "starting long", "quarantined", "idle", "idle and warm", "short run", "long run"}
	for n := range len(all) + 2 {
		got := victims(all, n)
		if !slices.Equal(got, want[:min(n, len(want))]) {
			t.Errorf("%d victims are %q, want %q", n, got, want[:min(n, len(want))])
		}
	}
}
