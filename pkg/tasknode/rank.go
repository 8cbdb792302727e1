package tasknode

import (
	"github.com/penstock/penstock/pkg/invalidation"
)

// Ranker orders lanes for the scheduling threads, and hears what came of it. Costs are what entries declare,
// or else seconds: what handlers say that their runs used (Run.Charge), or the time for which runs had a
// processing thread.
type Ranker interface {
	// Next appends to dst the indexes of the lanes to claim from in one go, best first, none of the busy
	// ones; none to wait until one of those is free. They are of one queue and priority, at most so many.
	// idle says that processing threads have nothing to do. It is called by one thread at a time.
	Next(dst []int, lanes []*invalidation.Candidate, most int, idle bool) []int
	// Charge tells what a claim is estimated to cost: the first entry of each lock, or all of a lock whose entries run
	// together. Extend tells what a run has cost beyond that so far, and what the next entry of a lock is estimated to
	// cost. Settle tells what was charged for entries, extensions included, and what they cost in the end.
	Charge(lane invalidation.Candidate, estimate float64)
	Extend(lane invalidation.Candidate, more float64)
	Settle(lane invalidation.Candidate, charged, actual float64)
}
