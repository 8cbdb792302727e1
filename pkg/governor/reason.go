package governor

import (
	"fmt"
	"time"
)

// RefusalCode is the reason why a node takes no more entries: the label of a metric.
type RefusalCode string

// The reasons for a refusal.
const (
	Threads    RefusalCode = "threads"     // no idle processing thread
	Stale      RefusalCode = "stale"       // no recent reading
	MemoryHigh RefusalCode = "memory_high" // measured memory passed its high mark
	MemoryNeed RefusalCode = "memory_need" // the declared need does not fit beside those of running entries
	MemorySize RefusalCode = "memory_size" // the declared need exceeds the node's memory up to the low mark
	CPUHigh    RefusalCode = "cpu_high"    // CPU use beyond the declared needs passed its high mark
	CPUNeed    RefusalCode = "cpu_need"    // the declared need does not fit beside those of running entries
	CPUSize    RefusalCode = "cpu_size"    // the declared need exceeds the node's cores
)

// RefusalReason is a code with its numbers. They are threads, seconds, bytes or cores by
// the code; for the two high marks, fractions of the limit.
type RefusalReason struct {
	Code  RefusalCode
	Have  float64 // free now; for marks and staleness, the level now
	Want  float64 // needed by one entry; for marks, the level to fall under
	Limit float64 // the node's total; for marks, the level that closed the gate
}

// String returns the reason as a sentence for operators.
func (r RefusalReason) String() string {
	switch r.Code {
	case Threads:
		return fmt.Sprintf("%.0f processing threads idle, an entry needs %.0f", r.Have, r.Want)
	case Stale:
		return stale(r)
	case MemoryHigh:
		return fmt.Sprintf("memory %.0f%% used; closed above %.0f%%, opens below %.0f%%", 100*r.Have, 100*r.Limit,
			100*r.Want)
	case MemoryNeed:
		return fmt.Sprintf("memory: %s free of %s, an entry needs %s", size(r.Have), size(r.Limit), size(r.Want))
	case MemorySize:
		return fmt.Sprintf("memory: an entry needs %s, this node gives at most %s; run the queue on a larger node",
			size(r.Want), size(r.Limit))
	case CPUHigh:
		return fmt.Sprintf("CPU %.0f%% used by others; closed above %.0f%%, opens below %.0f%%", 100*r.Have,
			100*r.Limit, 100*r.Want)
	case CPUNeed:
		return fmt.Sprintf("CPU: %.2f cores free of %.2f, an entry needs %.2f", r.Have, r.Limit, r.Want)
	case CPUSize:
		return fmt.Sprintf("CPU: an entry needs %.2f cores, this node has %.2f; run the queue on a larger node", r.Want,
			r.Limit)
	}
	return string(r.Code)
}

func stale(r RefusalReason) string {
	if r.Have == 0 {
		return "no reading of CPU and memory yet"
	}
	age := time.Duration(r.Have * float64(time.Second)).Round(100 * time.Millisecond)
	return fmt.Sprintf("last reading of CPU and memory is %v old, at most %v is believed", age,
		time.Duration(r.Limit*float64(time.Second)))
}

func size(bytes float64) string {
	const mebi, gibi = 1 << 20, 1 << 30
	if bytes >= gibi {
		return fmt.Sprintf("%.1f GiB", bytes/gibi)
	}
	return fmt.Sprintf("%.0f MiB", bytes/mebi)
}
