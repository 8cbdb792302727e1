package scale

import (
	"cmp"
	"slices"
	"time"
)

// removable is an instance as a candidate for removal.
type removable struct {
	ID          string
	Ready       bool
	Quarantined bool
	Running     int           // requests that hold a slot
	Remaining   time.Duration // expected time until the last of them ends; 0 for unknown
	Affinity    float64       // how much cached state would be lost, in any unit
	Started     time.Time
}

// victims returns the ids of the n instances whose removal costs least, the cheapest first: those that are
// not ready (the youngest first), quarantined ones, idle ones, then those whose runs end soonest, and among
// equals those with the least affinity. A victim is drained and removed when its slots are free; it is never
// interrupted.
func victims(all []removable, n int) []string {
	candidates := slices.Clone(all)
	slices.SortFunc(candidates, func(a, b removable) int {
		return cmp.Or(
			cmp.Compare(a.rank(), b.rank()),
			cmp.Compare(a.Remaining, b.Remaining),
			cmp.Compare(a.Running, b.Running),
			cmp.Compare(a.Affinity, b.Affinity),
			b.Started.Compare(a.Started),
			cmp.Compare(a.ID, b.ID),
		)
	})
	candidates = candidates[:min(max(n, 0), len(candidates))]
	ids := make([]string, len(candidates))
	for i, m := range candidates {
		ids[i] = m.ID
	}
	return ids
}

func (m removable) rank() int {
	switch {
	case !m.Ready:
		return 0
	case m.Quarantined:
		return 1
	case m.Running == 0:
		return 2
	}
	return 3
}
