package fairness

import (
	"cmp"
	"slices"
)

// Standing is all that ranks one lane among others at one moment.
type Standing struct {
	// Due is above zero if the lane's band must be served now to keep its guaranteed
	// share: by how much it has fallen behind.
	Due      float64
	Priority int16 // larger goes first
	// Queue is the virtual time of the lane's queue, Flow that of the lane within it:
	// normalised service; smaller goes first. Fifo queues give the place in line as Flow.
	Queue, Flow float64
	// QueueTurn and FlowTurn number the last service, for round robin among equals.
	QueueTurn, FlowTurn uint64
	QueueID             int32
	Tie                 uint64 // decides what is left, differently on each node
	Index               int    // of the lane in the caller's list
}

// Before says whether a lane goes before another one. It is a strict order if no two ties are the same.
func (a *Standing) Before(b *Standing) bool { return a.compare(b) < 0 }

func (a *Standing) compare(b *Standing) int {
	if a.Due != b.Due {
		return cmp.Compare(b.Due, a.Due)
	}
	if a.Priority != b.Priority {
		return cmp.Compare(b.Priority, a.Priority)
	}
	if a.QueueID != b.QueueID {
		return cmp.Or(
			cmp.Compare(a.Queue, b.Queue),
			cmp.Compare(a.QueueTurn, b.QueueTurn),
			cmp.Compare(a.QueueID, b.QueueID),
		)
	}
	if a.Flow != b.Flow {
		return cmp.Compare(a.Flow, b.Flow)
	}
	return cmp.Or(cmp.Compare(a.FlowTurn, b.FlowTurn), cmp.Compare(a.Tie, b.Tie), cmp.Compare(a.Index, b.Index))
}

// Order appends to dst the indexes of the first limit lanes, best first; of all lanes if
// limit is 0. It reorders standings. A few of many cost one pass and no sorting.
func Order(dst []int, standings []Standing, limit int) []int {
	if limit <= 0 || limit > len(standings) {
		limit = len(standings)
	}
	const few = 16
	if limit > few {
		slices.SortFunc(standings, func(a, b Standing) int { return a.compare(&b) })
	} else {
		selectFew(standings, limit)
	}
	for i := range limit {
		dst = append(dst, standings[i].Index)
	}
	return dst
}

// selectFew moves the first limit standings to the front, in order.
func selectFew(standings []Standing, limit int) {
	sorted := 0
	for i := range standings {
		if sorted == limit && (limit == 0 || !standings[i].Before(&standings[limit-1])) {
			continue
		}
		s := standings[i]
		if sorted < limit {
			sorted++
		} else {
			standings[i] = standings[limit-1]
		}
		at := sorted - 1
		for ; at > 0 && s.Before(&standings[at-1]); at-- {
			standings[at] = standings[at-1]
		}
		standings[at] = s
	}
}
