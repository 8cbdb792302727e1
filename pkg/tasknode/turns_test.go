package tasknode

import (
	"cmp"
	"slices"

	"github.com/penstock/penstock/pkg/fairness"
)

// turns is a ranker for tests: it serves queues in turn, in each its highest priority first, and lanes of one priority in turn.
type turns struct {
	turn   uint64
	queues map[int32]uint64 // the turn in which each was served last
}

// Next implements Ranker.
func (r *turns) Next(dst []int, lanes []*fairness.Candidate, most int, _ bool) []int {
	for i, l := range lanes {
		if !l.Taken {
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

func (r *turns) compare(a, b *fairness.Candidate) int {
	served := func(l *fairness.Candidate) uint64 {
		turn, _ := l.Note.(uint64)
		return turn
	}
	return cmp.Or(cmp.Compare(r.queues[a.Queue.ID], r.queues[b.Queue.ID]), cmp.Compare(b.Lane.Priority, a.Lane.Priority),
		cmp.Compare(served(a), served(b)))
}

// Charge implements Ranker.
func (*turns) Charge(fairness.Candidate, float64) {}

// Extend implements Ranker.
func (*turns) Extend(fairness.Candidate, float64) {}

// Correct implements Ranker.
func (*turns) Correct(fairness.Candidate, float64, float64) {}
