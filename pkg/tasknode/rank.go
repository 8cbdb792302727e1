package tasknode

import "github.com/penstock/penstock/pkg/fairness"

// Ranker orders lanes for the scheduling threads, and is told the actual cost. A cost is the number
// that an entry declares, else seconds: those that handlers report (Run.Charge), else the time for
// which runs had a processing thread.
type Ranker interface {
	// Next appends to dst the indexes of the lanes to claim from in one go, best first, none that is taken;
	// none to wait until one of those is not. They are of one queue and priority, at most so many.
	// idle says that processing threads have nothing to do. It is called by one thread at a time.
	Next(dst []int, lanes []*fairness.Candidate, most int, idle bool) []int
	// Charge tells the estimated cost of a claim: of the first entry of each lock, or of all
	// entries of a lock that run together. Extend tells the cost of a run beyond its estimate so
	// far, and the estimated cost of the next entry of a lock. Correct tells the charges of entries,
	// extensions included, and their actual cost.
	Charge(lane fairness.Candidate, estimate float64)
	Extend(lane fairness.Candidate, more float64)
	Correct(lane fairness.Candidate, charged, actual float64)
}
