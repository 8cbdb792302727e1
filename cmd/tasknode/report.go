package main

import (
	"time"

	"github.com/penstock/penstock/internal/version"
)

// report is what the node tells of itself with each heartbeat, for people and for penstock doctor: whether it hears
// hints, its calls by instance, refused claims by reason, counts since the start, the version of the program, and what
// the governor reports.
func (n *node) report() map[string]any {
	report := n.hintStatus()
	report["instances"] = n.inference.Pool.Report(time.Now())
	stats := n.task.Stats()
	report["claims"], report["claimed"], report["runs"] = stats.Claims.Load(), stats.Claimed.Load(), stats.Runs.Load()
	report["run_errors"] = stats.RunErrors.Load()
	report["claim_ms"] = time.Duration(stats.ClaimTime.Load()).Milliseconds()
	report["version"] = version.Read().String()
	if refusals := n.refusals(); len(refusals) > 0 {
		report["refusals"] = refusals
	}
	if n.governor != nil {
		report["governor"] = n.governor.Report()
	}
	return report
}

// hintStatus tells whether hints are heard.
func (n *node) hintStatus() map[string]any {
	switch {
	case n.listener == nil && !n.cfg.TaskNode.Hints:
		return map[string]any{"hints": "off"}
	case n.listener == nil:
		return map[string]any{"hints": "pooler"}
	}
	s := n.listener.Status()
	if s.Connected {
		return map[string]any{"hints": "heard"}
	}
	return map[string]any{"hints": "lost", "hints_since": s.Since.UTC().Format(time.RFC3339), "hints_error": s.Error}
}

// refusals counts claims that were not made, by reason, over all queues.
func (n *node) refusals() map[string]int64 {
	counts := map[string]int64{}
	n.observer.mu.Lock()
	for r, count := range n.observer.refusals {
		counts[r.reason] += int64(count)
	}
	n.observer.mu.Unlock()
	return counts
}
