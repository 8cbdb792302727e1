package scale

import "math"

// switched answers for the switches and modes under which nothing is calculated.
func (t *decider) switched() bool {
	sw := t.o.Switches
	t.d.Desired = t.s.Desired
	switch {
	case sw.Off:
		t.note(NoteOff, 0, 0, 0)
	case t.p.Mode == Disabled:
		t.note(NoteDisabled, 0, 0, 0)
	case sw.Override != nil && t.now.Before(sw.OverrideUntil):
		t.d.Desired = t.cap(*sw.Override)
		t.note(NoteOverride, float64(*sw.Override), sw.OverrideUntil.Sub(t.now).Seconds(), 0)
		return true
	case t.p.Mode == Manual:
		t.note(NoteManual, float64(t.s.Desired), 0, 0)
		return true
	default:
		return false
	}
	t.d.Apply = false
	return true
}

// bound keeps the number within the bounds of the policy, the schedules and the operators.
func (t *decider) bound() {
	if t.d.Desired < t.p.Min {
		t.note(NoteMin, float64(t.p.Min), float64(t.d.Desired), 0)
		t.d.Desired = t.p.Min
	}
	if t.d.Desired < t.o.Floor {
		t.note(NoteFloor, float64(t.o.Floor), float64(t.d.Desired), 0)
		t.d.Desired = t.o.Floor
	}
	if t.d.Desired > t.p.Max {
		t.note(NoteMax, float64(t.p.Max), float64(t.d.Desired), 0)
		t.d.Desired = min(t.d.Desired, t.most())
	}
	t.d.Desired = t.cap(t.d.Desired)
}

// most is the maximum. Where more instances exist, it is the number to which the way down may lead now: a maximum that
// was lowered, or left out, ends no more instances in a minute than a load that fell. It starts none.
func (t *decider) most() int {
	if t.s.Desired <= t.p.Max {
		return t.p.Max
	}
	held, _ := t.begun()
	return max(t.p.Max, min(t.s.Desired, t.o.Ready+len(t.o.Starting), max(t.downLimit(), held)))
}

// cap applies the emergency caps, which hold for overrides too.
func (t *decider) cap(n int) int {
	limit := math.MaxInt
	for _, most := range []int{t.p.EmergencyMax, t.o.Switches.MaxAll} {
		if most > 0 {
			limit = min(limit, most)
		}
	}
	if n > limit {
		t.note(NoteCap, float64(limit), float64(n), 0)
		return limit
	}
	return max(0, n)
}

// allow applies the mode and the age of the sources to the result.
func (t *decider) allow() {
	if t.d.Desired < t.s.Desired && t.frozen {
		t.noteSource(NoteFrozen, float64(t.d.Desired), float64(t.s.Desired))
		t.d.Desired = t.s.Desired
	}
	switch t.p.Mode {
	case UpOnly:
		if t.d.Desired < t.s.Desired {
			t.note(NoteUpOnly, float64(t.d.Desired), float64(t.s.Desired), 0)
			t.d.Desired = t.s.Desired
		}
	case Advise:
		t.note(NoteAdvise, float64(t.d.Desired), 0, 0)
		t.d.Apply = false
	}
}
