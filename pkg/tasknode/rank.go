package tasknode

import (
	"sync"

	"github.com/penstock/penstock/pkg/invalidation"
)

// roundRobin serves the queue that has used the least time for its weight, and within it the highest priority and
// then the flow that has used the least. A lane that comes back is lifted to the least used of those present, so
// that it neither saves up credit nor pays for its absence.
type roundRobin struct {
	mu     sync.Mutex
	queues map[int32]float64 // seconds used, divided by weight
	flows  map[flowKey]float64
	floor  float64
}

type flowKey struct {
	queue int32
	lane  invalidation.Lane
}

// Next implements Ranker.
func (r *roundRobin) Next(lanes []Candidate) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	best := 0
	for i := 1; i < len(lanes); i++ {
		if r.before(&lanes[i], &lanes[best]) {
			best = i
		}
	}
	r.floor = max(r.floor, r.queues[lanes[best].Queue.ID])
	return best
}

func (r *roundRobin) before(a, b *Candidate) bool {
	if a.Queue.ID != b.Queue.ID {
		return r.queueUse(a.Queue.ID) < r.queueUse(b.Queue.ID)
	}
	if a.Lane.Priority != b.Lane.Priority {
		return a.Lane.Priority > b.Lane.Priority
	}
	return r.flows[flowKey{a.Queue.ID, a.Lane}] < r.flows[flowKey{b.Queue.ID, b.Lane}]
}

// queueUse lifts a queue that was away to the floor, at most a second of service below the queue served last.
func (r *roundRobin) queueUse(id int32) float64 { return max(r.queues[id], r.floor-1) }

// Charge implements Ranker.
func (r *roundRobin) Charge(lane Candidate, seconds float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.queues == nil {
		r.queues, r.flows = map[int32]float64{}, map[flowKey]float64{}
	}
	if len(r.flows) > 10_000 {
		clear(r.flows) // flows come and go; forgetting them all treats them alike
	}
	r.queues[lane.Queue.ID] = r.queueUse(lane.Queue.ID) + seconds/max(lane.Weight, 1e-3)
	r.flows[flowKey{lane.Queue.ID, lane.Lane}] += seconds
}

// Settle implements Ranker.
func (r *roundRobin) Settle(lane Candidate, estimate, actual float64) {
	r.Charge(lane, actual-estimate)
}
