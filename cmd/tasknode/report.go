package main

import (
	"runtime/debug"
	"time"
)

// report is the part of a heartbeat that people read: hints, the levels of the governor with their marks, refused
// claims by reason, counts since the start, and the version of the program.
func (n *node) report() map[string]any {
	report := n.status()
	stats := n.task.Stats()
	report["claims"], report["claimed"], report["runs"] = stats.Claims.Load(), stats.Claimed.Load(), stats.Runs.Load()
	report["run_errors"] = stats.RunErrors.Load()
	report["claim_ms"] = time.Duration(stats.ClaimTime.Load()).Milliseconds()
	report["version"] = version()
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

// version is that of the module that this program was built from, with the revision where it has no release.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return "dev " + s.Value[:12]
		}
	}
	return "dev"
}
