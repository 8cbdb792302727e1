package governor

import (
	"math"
	"time"
)

// Need is the declared use of resources by one entry of a queue while it runs. The zero Need
// takes one processing thread, and only the gates for measured use apply to it.
type Need struct {
	CPU         float64 // cores
	MemoryBytes int64
	Threads     int // processing threads; 0 means 1
}

// Measurement is the state of the node at one time. A capacity of zero is unknown and not checked.
type Measurement struct {
	At               time.Time
	Cores            float64 // cores the node may use: quota, or those of the machine
	CPUUsed          float64 // fraction of Cores in use, 0 to 1
	MemoryLimitBytes int64
	MemoryUsedBytes  int64 // without page cache that can be dropped at once
}

// Readings are the inputs of an admission.
type Readings struct {
	Measurement
	// Sampled is the sum of the needs of running entries when the sample was taken,
	// Running the sum now. Threads are not counted here.
	Sampled, Running Need
	// FreeThreads is the number of idle processing threads now.
	FreeThreads int
}

// Gates are the gates between two decisions. The zero value has them open.
type Gates struct {
	CPU, Memory Hysteresis
}

// Hysteresis is a gate: it closes above a high mark and opens after a calm time below a low one.
type Hysteresis struct {
	Closed bool
	Since  time.Time // when it closed
	// Below is the time since which the level has been under the low mark, zero while it is not.
	Below time.Time
}

// Admission says how many entries of the asking queue the node may take now.
// Reasons name every resource that kept Allow under the number of free processing threads.
type Admission struct {
	Allow   int
	Reasons []RefusalReason
}

// Decide checks one queue's need against the readings. It returns the state to pass to the next
// call.
func Decide(c Config, s Gates, r Readings, n Need, now time.Time) (Admission, Gates) {
	s = s.Step(c, r, now)
	threads := max(n.Threads, 1)
	v := Admission{Allow: max(r.FreeThreads, 0) / threads}
	if v.Allow == 0 {
		v.refuse(RefusalReason{Code: Threads, Have: float64(r.FreeThreads), Want: float64(threads)})
	}
	if age := now.Sub(r.At); age > staleAfter {
		if r.At.IsZero() {
			age = 0
		}
		v.refuse(RefusalReason{Code: Stale, Have: age.Seconds(), Limit: staleAfter.Seconds()})
		return v, s
	}
	v.judgeMemory(c, s.Memory, r, n)
	v.judgeCPU(c, s.CPU, r, n)
	return v, s
}

// Step updates the gates by one reading. Decide calls it itself; the sampling loop calls it
// as well, so that a gate opens in time on a node without decisions meanwhile.
func (s Gates) Step(c Config, r Readings, now time.Time) Gates {
	if now.Sub(r.At) > staleAfter {
		return s
	}
	s.Memory = s.Memory.step(r.memoryLevel(), c.MemoryLow, c.MemoryHigh, c.Calm, now)
	s.CPU = s.CPU.step(r.unexplainedCPU(), c.CPULow, c.CPUHigh, c.Calm, now)
	return s
}

func (g Hysteresis) step(level, low, high float64, calm time.Duration, now time.Time) Hysteresis {
	switch {
	case !g.Closed && level > high:
		return Hysteresis{Closed: true, Since: now}
	case !g.Closed:
		return g
	case level >= low:
		g.Below = time.Time{}
	case g.Below.IsZero():
		g.Below = now
	case now.Sub(g.Below) >= calm:
		return Hysteresis{}
	}
	return g
}

func (v *Admission) judgeMemory(c Config, g Hysteresis, r Readings, n Need) {
	if r.MemoryLimitBytes <= 0 {
		return
	}
	limit := float64(r.MemoryLimitBytes)
	if g.Closed {
		v.refuse(RefusalReason{Code: MemoryHigh, Have: r.memoryLevel(), Want: c.MemoryLow, Limit: c.MemoryHigh})
	}
	if n.MemoryBytes <= 0 {
		return
	}
	want, room := float64(n.MemoryBytes), limit*c.MemoryLow
	if want > room {
		v.refuse(RefusalReason{Code: MemorySize, Want: want, Limit: room})
		return
	}
	undeclared := math.Max(0, float64(r.MemoryUsedBytes-r.Sampled.MemoryBytes))
	free := math.Max(0, room-undeclared-float64(r.Running.MemoryBytes))
	v.limit(math.Floor(free/want), RefusalReason{Code: MemoryNeed, Have: free, Want: want, Limit: room})
}

// judgeCPU lets the last entry overlap the use by others, as CPU is shared: with two
// cores and a tenth of one in use, two entries of one core each may run.
func (v *Admission) judgeCPU(c Config, g Hysteresis, r Readings, n Need) {
	if r.Cores <= 0 {
		return
	}
	if g.Closed && (n.CPU > 0 || c.RefuseUndeclared) {
		v.refuse(RefusalReason{Code: CPUHigh, Have: r.unexplainedCPU(), Want: c.CPULow, Limit: c.CPUHigh})
	}
	if n.CPU <= 0 {
		return
	}
	if n.CPU > r.Cores {
		v.refuse(RefusalReason{Code: CPUSize, Want: n.CPU, Limit: r.Cores})
		return
	}
	undeclared := math.Max(0, r.Cores-r.Running.CPU)
	free := math.Max(0, undeclared-r.unexplainedCPU()*r.Cores)
	fits := math.Min(floor(undeclared/n.CPU), math.Ceil(free/n.CPU))
	v.limit(fits, RefusalReason{Code: CPUNeed, Have: free, Want: n.CPU, Limit: r.Cores})
}

// floor tolerates the rounding of sums such as 0.1 + 0.2, so that ten tenths fit in one core.
func floor(x float64) float64 { return math.Floor(x + 1e-9) }

func (v *Admission) limit(fits float64, why RefusalReason) {
	if fits < float64(v.Allow) {
		v.Allow = int(fits)
		v.Reasons = append(v.Reasons, why)
	} else if fits < 1 {
		v.Reasons = append(v.Reasons, why)
	}
}

func (v *Admission) refuse(why RefusalReason) {
	v.Allow = 0
	v.Reasons = append(v.Reasons, why)
}

func (r Readings) memoryLevel() float64 {
	if r.MemoryLimitBytes <= 0 {
		return 0
	}
	return float64(r.MemoryUsedBytes) / float64(r.MemoryLimitBytes)
}

// unexplainedCPU is the fraction of the cores used beyond the declared needs of running entries.
func (r Readings) unexplainedCPU() float64 {
	if r.Cores <= 0 {
		return 0
	}
	return math.Max(0, r.CPUUsed-r.Sampled.CPU/r.Cores)
}
