package main

import (
	"time"

	"github.com/penstock/penstock/internal/version"
)

// report is the part of a heartbeat that people read: hints, the levels of the governor with their marks, refused
// claims by reason, counts since the start, and the version of the program.
func (n *node) report() map[string]any {
	report := n.status()
	stats := n.task.Stats()
	report["claims"], report["claimed"], report["runs"] = stats.Claims.Load(), stats.Claimed.Load(), stats.Runs.Load()
	report["run_errors"] = stats.RunErrors.Load()
	report["claim_ms"] = time.Duration(stats.ClaimTime.Load()).Milliseconds()
	report["version"] = version.Read().String()
	if refusals := n.refusals(); len(refusals) > 0 {
		report["refusals"] = refusals
	}
	if n.governor != nil {
		report["governor"] = n.governor.Levels()
	}
	return report
}

// refusals counts claims that were not made, by reason, over all queues.
func (n *node) refusals() map[string]int64 {
	counts := map[string]int64{}
	n.observer.mu.Lock()
	for r, count := range n.observer.refusals {
		counts[r.reason] += int64(count)
	}
	n.observer.mu.Unlock()
	if n.governor != nil {
		for _, c := range n.governor.Refusals() {
			counts[string(c.Code)] += int64(c.Count) //nolint:gosec // counts from the start of a process
		}
	}
	return counts
}
