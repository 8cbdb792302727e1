package fairness

import (
	"cmp"
	"slices"
)

// SortKey is the sort key of one lane in a ranking.
type SortKey struct {
	// Due is above zero if the lane's band must be served now to keep its guaranteed
	// share: by how much it has fallen behind.
	Due      float64
	Priority int16 // larger goes first
	// Queue is the virtual time of the lane's queue, Flow that of the lane within it:
	// normalised service; smaller goes first. Fifo queues give the position as Flow.
	Queue, Flow float64
	// QueueTurn and FlowTurn number the last service, for round robin among equals.
	QueueTurn, FlowTurn uint64
	QueueID             int32
	Tie                 uint64 // breaks remaining ties, differently on each node
	Index               int    // of the lane in the caller's list
}

// Before reports whether a lane goes before another one. It is a strict order if no two ties are
// the same.
func (a *SortKey) Before(b *SortKey) bool { return a.compare(b) < 0 }

func (a *SortKey) compare(b *SortKey) int {
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
// limit is 0. It reorders sortKeys, and sorts no more of them than it appends.
func Order(dst []int, sortKeys []SortKey, limit int) []int {
	if limit <= 0 || limit > len(sortKeys) {
		limit = len(sortKeys)
	}
	first := sortKeys[:limit]
	selectFirst(first, sortKeys[limit:])
	slices.SortFunc(first, func(a, b SortKey) int { return a.compare(&b) })
	for i := range first {
		dst = append(dst, first[i].Index)
	}
	return dst
}

// selectFirst swaps those of others that go before some of first into it. First is meanwhile a heap with its
// last one on top.
func selectFirst(first, others []SortKey) {
	if len(first) == 0 || len(others) == 0 {
		return
	}
	for i := len(first)/2 - 1; i >= 0; i-- {
		sink(first, i)
	}
	for i := range others {
		if others[i].Before(&first[0]) {
			first[0], others[i] = others[i], first[0]
			sink(first, 0)
		}
	}
}

func sink(heap []SortKey, i int) {
	for {
		child := 2*i + 1
		if child >= len(heap) {
			return
		}
		if child+1 < len(heap) && heap[child].Before(&heap[child+1]) {
			child++
		}
		if !heap[i].Before(&heap[child]) {
			return
		}
		heap[i], heap[child] = heap[child], heap[i]
		i = child
	}
}
