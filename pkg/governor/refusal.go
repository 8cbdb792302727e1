package governor

import (
	"strings"
	"time"
)

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
