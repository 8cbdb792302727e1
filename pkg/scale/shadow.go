package scale

import (
	"math"
	"time"
)

// base finds the least number of instances that would have kept the waits short, had there been as many
// all along. A backlog that cold starts caused is not in it: the shadow queue of a level knows no cold start.
func (t *decider) base() {
	if t.stale {
		t.d.Base = t.s.Base
		return
	}
	service := t.service()
	t.s.Shadow = t.shadow(t.s.Shadow, t.arrived()*service, false)
	if t.p.Tolerated > 0 {
		t.s.Bare = t.shadow(t.s.Bare, t.arrived()*service, true)
	}
	t.countLate()
	base := t.least(t.s.Shadow, t.p.Theta*t.p.SLO.Float())
	if most := t.tolerable(); base > most {
		t.note(NoteTolerated, float64(base), float64(most), 100*t.p.Tolerated)
		base = most
	}
	measured, code := t.s.Shadow, NoteBase
	if t.o.Gateway {
		online := min(t.o.Online+t.arrived()-t.o.Arrived, t.arrived())
		t.s.Online = t.shadow(t.s.Online, online*service, false)
		if least := t.least(t.s.Online, t.p.Theta*t.p.OnlineSLO.Float()); least > base {
			base, measured, code = least, t.s.Online, NoteBaseOnline
		}
	}
	t.d.Base, t.s.Base = base, base
	if base > 0 {
		t.note(code, float64(base), t.shadowWait(measured, base), t.shadowWait(measured, base-1))
	}
}

// shadow moves the queue of each level on by the elapsed time: W = max(0, W + arrived - c). It returns a new
// slice, or the old one where nothing changes: a state that was stored is not written to. The wait of a level is
// no longer than that of a lower one, so that all levels from the first empty queue on are empty.
func (t *decider) shadow(w []float64, arrived float64, bare bool) []float64 {
	if len(w) == t.p.Max && arrived == 0 && w[0] == 0 {
		return w
	}
	next := t.row()
	copy(next, w)
	for i := range next {
		c := t.capacity(i + 1)
		if bare {
			c = t.bareCapacity(i + 1)
		}
		next[i] = max(0, min(next[i]+arrived-c*t.elapsed, t.free(i+1)+c*t.p.Drain.Float()+arrived))
		if next[i] == 0 {
			clear(next[i:])
			break
		}
	}
	return next
}

// row is a number for each level. The rows of a decision share one allocation.
func (t *decider) row() []float64 {
	n := t.p.Max
	if len(t.rows) < n {
		t.rows = make([]float64, rowsMax*n)
	}
	row := t.rows[:n:n]
	t.rows = t.rows[n:]
	return row
}

// rowsMax is how many rows a decision writes: Shadow, Bare and Late; Online comes with a gateway.
const rowsMax = 3

// capacity of l instances in slot-seconds a second. The reserve is that of the square root rule
// (Halfin and Whitt 1981): a large fleet can run closer to its limit than a small one.
func (t *decider) capacity(l int) float64 {
	slots := float64(l) * t.slots
	return slots * t.p.Rho / (1 + t.p.Beta/math.Sqrt(slots))
}

// bareCapacity is the capacity without the reserve of a small fleet. Whether requests would have been late is
// estimated with it, because the reserve guards against the error that lateError accounts for.
func (t *decider) bareCapacity(l int) float64 { return float64(l) * t.slots * t.p.Rho }

// free is the work that l instances hold in their slots, which therefore does not wait.
func (t *decider) free(l int) float64 { return t.p.Phi * float64(l) * t.slots * t.service() }

// shadowWait is the wait in seconds in the queue of a level; 0 for no level.
func (t *decider) shadowWait(w []float64, l int) float64 {
	if l < 1 || l > len(w) {
		return 0
	}
	return t.wait(w, l, t.capacity(l))
}

func (t *decider) wait(w []float64, l int, capacity float64) float64 {
	return max(0, w[l-1]-t.free(l)) / capacity
}

// least is the least level whose wait is at most limit seconds; 0 if its queue is empty with one instance.
func (t *decider) least(w []float64, limit float64) int {
	if len(w) == 0 || w[0] == 0 {
		return 0
	}
	for l := 1; l < len(w); l++ {
		if t.shadowWait(w, l) <= limit {
			return l
		}
	}
	return len(w)
}

// fluidError is how many service times the wait in the shadow queue of one slot may be too short: the queue is
// a fluid, and does not know that service times differ and that slots are filled one by one. With n slots the
// error falls with the square root of n, as that of a mean of n.
const fluidError = 4

// lateError is the error in seconds of the wait in the shadow queue of a level.
func (t *decider) lateError(l int) float64 {
	return fluidError * t.service() / math.Sqrt(float64(l)*t.slots)
}

// countLate counts, for each level, the requests that would have waited longer than the SLO. Both sides of
// the share decay over the hold time, and only with requests: an idle hour forgets nothing.
func (t *decider) countLate() {
	arrived := t.arrived()
	if t.p.Tolerated == 0 || arrived == 0 && len(t.s.Late) == t.p.Max {
		return
	}
	keep := math.Exp(-t.now.Sub(t.s.SeenAt).Seconds() / time.Duration(t.p.Hold).Seconds())
	if t.s.SeenAt.IsZero() {
		keep, t.s.Since = 0, t.now
	}
	t.s.SeenAt = t.now
	t.s.Seen = t.s.Seen*keep + arrived
	late := t.row()
	copy(late, t.s.Late)
	slo := t.p.SLO.Float()
	for i := range late {
		late[i] *= keep
		limit := max(t.p.Theta*slo, slo-t.lateError(i+1))
		if t.wait(t.s.Bare, i+1, t.bareCapacity(i+1)) > limit {
			late[i] += arrived
		}
		if late[i] < lateLeast { // and so are the levels above, see shadow
			clear(late[i:])
			break
		}
	}
	t.s.Late = late
}

// lateLeast is the decayed number of late requests that counts as none.
const lateLeast = 1e-6

// tolerable is the least level with which no more than the tolerated share of the requests would have been
// late. One short peak of many does not hold its level then. Without the history of a hold time the last
// peak is all that is known, and each counts.
func (t *decider) tolerable() int {
	if t.p.Tolerated == 0 || len(t.s.Late) == 0 || t.now.Sub(t.s.Since) < time.Duration(t.p.Hold) {
		return math.MaxInt
	}
	for i, late := range t.s.Late {
		if late <= t.p.Tolerated*t.s.Seen {
			return i + 1
		}
	}
	return len(t.s.Late)
}
