package scale

import "time"

// surge is the level that the backlog needs which is really there: what waits when a start begun now is
// ready must not exceed what spare capacity works off in the drain time. Starts under way count.
// It does not enter the hold: a level that one backlog needed is given up soon after the backlog.
func (t *decider) surge() {
	waiting := float64(t.waiting())
	if t.o.Late > 0 {
		t.note(NoteLate, float64(t.o.Late), 0, 0)
	}
	t.followUnused()
	if waiting == 0 {
		return
	}
	load := t.s.Rate * t.service()
	work := waiting * t.service()
	useful := ceil((waiting + float64(t.o.Running) + load) / t.slots)
	t.d.Surge = min(t.sufficient(work, load), useful)
	if most := max(1, ceil(unusedGrowth*float64(t.o.Running))); t.s.Unusable && t.d.Surge > most {
		t.note(NoteUnused, float64(t.o.Running), float64(t.o.Ready), float64(most))
		t.d.Surge = most
	}
	if t.d.Surge > max(t.d.Base, t.alive) {
		t.note(NoteSurge, float64(t.d.Surge), waiting, work)
	}
}

// Where instances are ready and task nodes do not use them, more of them would be used no more: no node serves the
// queue, or all have as many threads as requests run. The limit grows with what runs, so that it is tried how many are
// used.
const (
	unusedMin    = 30  // seconds for which this is so, at least, and at least a cold start
	unusedGrowth = 1.5 // instances for each request that runs
	usedShare    = 0.8 // of the slots that are ready; from there on there is no limit
)

// followUnused notes since when fewer requests of queues run than instances are ready, while others wait, and whether
// that limits the surge. Requests that wait at a gateway wait for nothing but slots.
func (t *decider) followUnused() {
	running, ready := t.o.Running, t.o.Ready
	used := ready > 0 && running >= ready && float64(running) >= usedShare*float64(ready)*t.slots
	switch {
	case t.stale:
	case t.waiting() == 0 || t.o.Urgent > 0 || used:
		t.s.Unused, t.s.Unusable = time.Time{}, false
	case running >= ready:
		t.s.Unused = time.Time{}
	case t.s.Unused.IsZero() || t.elapsed >= elapsedMax.Seconds(): // what was in between is not known
		t.s.Unused = t.now
	case t.now.Sub(t.s.Unused).Seconds() >= max(t.coldStart(), unusedMin):
		t.s.Unusable = true
	}
}

// sufficient is the least level that works off the work in slot-seconds, with load more coming each second.
// Instances that are ready come first, then starts by their age, then new starts.
func (t *decider) sufficient(work, load float64) int {
	cold, drain := t.coldStart(), t.p.Drain.Float()
	back := work + load*cold
	starts := t.liveStarts()
	level := 0
	for ; level < t.alive; level++ {
		if level > 0 && back <= t.spare(level, load)*drain {
			return level
		}
		age := cold
		if level >= t.o.Ready {
			age = min(cold, max(0, t.now.Sub(starts[level-t.o.Ready]).Seconds()))
		}
		back -= t.slots * age
	}
	back = max(0, back)
	missing := back - t.spare(level, load)*drain
	if missing <= 0 {
		return level
	}
	lack := max(0, load-float64(level)*t.slots) * drain
	return level + ceil((missing+lack)/(t.slots*drain))
}

// spare is the capacity of a level, in slots, that the load leaves.
func (t *decider) spare(level int, load float64) float64 {
	return max(0, float64(level)*t.slots-load)
}
