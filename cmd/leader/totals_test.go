package main

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/maintenance"
)

// A sum that falls is a counter that began anew, to Prometheus: all of it would have been counted just now.
func TestTheSumOverQueuesNeverFalls(t *testing.T) {
	var all totals
	before := int64(0)
	for step, sample := range [][]maintenance.Sample{
		{{Queue: "a", Accepted: 100, Gone: 90}, {Queue: "b", Accepted: 10, Gone: 5}},
		{{Queue: "a", Accepted: 101, Gone: 91}, {Queue: "b", Accepted: 10, Gone: 5}},
		{{Queue: "b", Accepted: 11, Gone: 6}},                            // a was dropped
		{{Queue: "a", Accepted: 1}, {Queue: "b", Accepted: 12, Gone: 7}}, // and made again
		{{Queue: "a", Accepted: 2, Gone: 1}, {Queue: "b"}},               // b's statistics were reset
	} {
		rest := all.past(time.Unix(int64(step), 0), sample)
		accepted, gone := rest.accepted, rest.gone
		for _, q := range sample {
			accepted, gone = accepted+q.Accepted, gone+q.Gone
		}
		if accepted < before {
			t.Errorf("step %d: the sum is %d after %d", step, accepted, before)
		}
		before = accepted
		if step == 4 && (accepted != 115 || gone != 99) {
			t.Errorf("%d accepted and %d gone in all, want 115 and 99", accepted, gone)
		}
	}
}
