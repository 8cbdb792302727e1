package governor

import (
	"cmp"
	"slices"
	"strings"
	"time"
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

// refused is the last refusal of a queue.
type refused struct {
	at      time.Time
	reasons []RefusalReason
}

const (
	// refusedFor is how long a refusal is reported: a queue with work is asked for again within a second.
	refusedFor = 5 * time.Second
	// refusedMax is how many queues a report names.
	refusedMax = 50
)

// lately are the reasons of the last refusals by queue, without those for threads. It forgets older ones.
func (g *Governor) lately(now time.Time) map[string]string {
	texts := map[string]string{}
	for queue, r := range g.refused {
		if now.Sub(r.at) > refusedFor {
			delete(g.refused, queue)
			continue
		}
		var why []string
		for _, reason := range r.reasons {
			if reason.Code != Threads {
				why = append(why, reason.String())
			}
		}
		if len(why) > 0 && len(texts) < refusedMax {
			texts[queue] = strings.Join(why, ", ")
		}
	}
	return texts
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
