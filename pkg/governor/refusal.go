package governor

import (
	"cmp"
	"slices"
)

// RefusalKey identifies a counter: one reason for one queue.
type RefusalKey struct {
	Queue string
	Code  RefusalCode
}

// RefusalCount is how often Take allowed no entry for a reason, since the start of the node.
type RefusalCount struct {
	RefusalKey
	Count uint64
}

func (g *Governor) count(queue string, reasons []RefusalReason) {
	for _, r := range reasons {
		g.refusals[RefusalKey{queue, r.Code}]++
	}
}

// Refusals returns the counts ordered by queue and code. A refusal for two reasons counts under both.
func (g *Governor) Refusals() []RefusalCount {
	g.mu.Lock()
	defer g.mu.Unlock()
	counts := make([]RefusalCount, 0, len(g.refusals))
	for refusal, n := range g.refusals {
		counts = append(counts, RefusalCount{refusal, n})
	}
	slices.SortFunc(counts, func(a, b RefusalCount) int {
		return cmp.Or(cmp.Compare(a.Queue, b.Queue), cmp.Compare(a.Code, b.Code))
	})
	return counts
}
