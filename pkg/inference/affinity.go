package inference

import (
	"cmp"
	"slices"
	"time"
)

// candidate is an instance that may get a call.
type candidate struct {
	id         int32
	idle, busy int
	awaited    int       // entries that wait for one of its busy slots
	loaded     string    // the affinity of the last call that had one
	used       time.Time // when that was
	served     int64
	pressed    bool // calls wait inside its worker, or its cache is nearly full
}

// rankCandidates decides where calls with an affinity should run: on an instance that has it loaded,
// else where the least is lost (nothing loaded, no pressure, little load, long unused). Where only busy
// instances have it loaded, and it may wait, it waits for one of those, whose id is returned
// instead of an order, unless so many wait for that already that another had better load it.
func rankCandidates(candidates []candidate, affinity string, mayWait bool) (order []int32, await int32) {
	var idle []candidate
	for _, s := range candidates {
		fits := affinity != "" && s.loaded == affinity
		switch {
		case s.idle > 0 && fits:
			mayWait, await = false, 0
		case fits && mayWait && s.awaited < awaitedMost*s.busy:
			await = s.id
		}
		if s.idle > 0 {
			idle = append(idle, s)
		}
	}
	if mayWait && await != 0 {
		return nil, await
	}
	slices.SortFunc(idle, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.swapCost(affinity), b.swapCost(affinity)),
			cmp.Compare(a.pressure(), b.pressure()), cmp.Compare(a.load(), b.load()),
			a.used.Compare(b.used), cmp.Compare(a.served, b.served), cmp.Compare(a.id, b.id))
	})
	for _, s := range idle {
		order = append(order, s.id)
	}
	return order, 0
}

// swapCost is 0 where the affinity is empty or loaded, 1 where it can be loaded without
// unloading another, 2 elsewhere.
func (s candidate) swapCost(affinity string) int {
	switch {
	case affinity == "" || s.loaded == affinity:
		return 0
	case s.loaded == "":
		return 1
	}
	return 2
}

// pressure is 0 or 1: one more call on a pressed instance waits there, or evicts what others have cached.
func (s candidate) pressure() int {
	if s.pressed {
		return 1
	}
	return 0
}

// awaitedMost is how many may wait for a busy slot while others idle.
const awaitedMost = 4

func (s candidate) load() float64 { return float64(s.busy) / float64(s.busy+s.idle) }
