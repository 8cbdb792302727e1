package tasknode

import (
	"cmp"
	"slices"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Ranker orders lanes for the scheduling threads, and hears what came of it. Costs are seconds of a processing thread,
// or what entries declare.
type Ranker interface {
	// Next appends to dst the indexes of the lanes to claim from in one go, best first, none of the busy ones; none to
	// wait until one of those is free. They are of one queue and priority, at most so many. idle says that processing threads have
	// nothing to do. It is called by one thread at a time.
	Next(dst []int, lanes []*invalidation.Candidate, most int, idle bool) []int
	// Charge tells what a claim is estimated to cost, Extend what a run has cost beyond that so far, and Settle what was
	// charged for a lock, extensions included, and what it cost in the end.
	Charge(lane invalidation.Candidate, estimate float64)
	Extend(lane invalidation.Candidate, more float64)
	Settle(lane invalidation.Candidate, charged, actual float64)
}

// turns serves queues in turn, in each its highest priority first, and lanes of one priority in turn.
type turns struct {
	turn   uint64
	queues map[int32]uint64 // the turn in which each was served last
}

// Next implements Ranker.
func (r *turns) Next(dst []int, lanes []*invalidation.Candidate, most int, _ bool) []int {
	for i, l := range lanes {
		if !l.Busy {
			dst = append(dst, i)
		}
	}
	slices.SortStableFunc(dst, func(i, j int) int { return r.compare(lanes[i], lanes[j]) })
	for n, i := range dst {
		if l, best := lanes[i], lanes[dst[0]]; n == most || l.Queue != best.Queue || l.Lane.Priority != best.Lane.Priority {
			dst = dst[:n]
			break
		}
	}
	if r.queues == nil {
		r.queues = map[int32]uint64{}
	}
	for _, i := range dst[:min(1, len(dst))] { // those that come along take what it leaves, which may be nothing
		r.turn++
		r.queues[lanes[i].Queue.ID], lanes[i].Note = r.turn, r.turn
	}
	return dst
}

func (r *turns) compare(a, b *invalidation.Candidate) int {
	served := func(l *invalidation.Candidate) uint64 {
		turn, _ := l.Note.(uint64)
		return turn
	}
	return cmp.Or(cmp.Compare(r.queues[a.Queue.ID], r.queues[b.Queue.ID]), cmp.Compare(b.Lane.Priority, a.Lane.Priority),
		cmp.Compare(served(a), served(b)))
}

// Charge implements Ranker.
func (*turns) Charge(invalidation.Candidate, float64) {}

// Extend implements Ranker.
func (*turns) Extend(invalidation.Candidate, float64) {}

// Settle implements Ranker.
func (*turns) Settle(invalidation.Candidate, float64, float64) {}
