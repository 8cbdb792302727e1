package governor

import "time"

// Report is what a node tells people of its governor with each heartbeat.
type Report struct {
	// Levels has one for each resource whose capacity is known; none while the reading is stale.
	Levels []GateLevel `json:"levels,omitempty"`
	// Refused says why a queue was refused a moment ago. penstock.limit_reasons reads it.
	Refused map[string]string `json:"refused,omitempty"`
}

// GateLevel is a measured resource beside the marks of its gate, for people to read. Fractions are 0 to 1.
type GateLevel struct {
	Resource string  `json:"resource"` // cpu or memory
	Used     float64 `json:"used"`     // of the cores, or of the memory limit
	High     float64 `json:"high"`     // the gate closes above it
	Low      float64 `json:"low"`      // and opens below it
	Closed   bool    `json:"closed"`   // the gate refuses claims
	// DeclaredOnly: when closed, the gate refuses only queues that declare a need of the resource.
	DeclaredOnly bool `json:"declared_only"`
}

// Report returns the last reading beside the marks, and the last refusals.
func (g *Governor) Report() Report {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Report{g.levels(), g.lately(time.Now())}
}

// levels is called with mu held.
func (g *Governor) levels() []GateLevel {
	if g.sample.At.IsZero() || time.Since(g.sample.At) > staleAfter {
		return nil
	}
	var levels []GateLevel
	if g.sample.Cores > 0 {
		levels = append(levels, GateLevel{
			Resource: "cpu", Used: g.sample.CPUUsed,
			High: g.config.CPUHigh, Low: g.config.CPULow, Closed: g.state.CPU.Closed,
			DeclaredOnly: !g.config.RefuseUndeclared,
		})
	}
	if g.sample.MemoryLimitBytes > 0 {
		used := float64(g.sample.MemoryUsedBytes) / float64(g.sample.MemoryLimitBytes)
		levels = append(levels, GateLevel{
			Resource: "memory", Used: used,
			High: g.config.MemoryHigh, Low: g.config.MemoryLow, Closed: g.state.Memory.Closed,
		})
	}
	return levels
}
