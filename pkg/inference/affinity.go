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
	for _, c := range candidates {
		fits := affinity != "" && c.loaded == affinity
		switch {
		case c.idle > 0 && fits:
			mayWait, await = false, 0
		case fits && mayWait && c.awaited < awaitedMax*c.busy:
			await = c.id
		}
		if c.idle > 0 {
			idle = append(idle, c)
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
	for _, c := range idle {
		order = append(order, c.id)
	}
	return order, 0
}

// swapCost is 0 where the affinity is empty or loaded, 1 where it can be loaded without
// unloading another, 2 elsewhere.
func (c candidate) swapCost(affinity string) int {
	switch {
	case affinity == "" || c.loaded == affinity:
		return 0
	case c.loaded == "":
		return 1
	}
	return 2
}

// pressure is 0 or 1: one more call on a pressed instance waits there, or evicts what others have cached.
func (c candidate) pressure() int {
	if c.pressed {
		return 1
	}
	return 0
}

// awaitedMax is how many may wait for a busy slot while others idle.
const awaitedMax = 4

func (c candidate) load() float64 { return float64(c.busy) / float64(c.busy+c.idle) }
