package scale

// keepRunning never asks for fewer instances than run requests: a drain ends by itself.
func (t *decider) keepRunning() {
	busy := ceil(float64(t.o.Running) / t.slots)
	if busy = min(busy, t.s.Desired); t.d.Desired < busy {
		t.note(NoteRunning, float64(busy), float64(t.o.Running), 0)
		t.d.Desired = busy
	}
}

// zero permits the way to zero only if nothing waits, runs or is due within a cold start, and the last
// request is known.
func (t *decider) zero() {
	if t.d.Desired > 0 {
		if t.s.Desired == 0 {
			t.note(NoteWake, float64(t.work()), 0, 0)
		}
		return
	}
	switch {
	case !*t.p.ScaleToZero || t.o.Switches.ZeroOff:
		t.keep(NoteZeroOff)
	case t.o.Due > 0:
		t.d.Desired = 1
		t.note(NoteDue, float64(t.o.Due), t.coldStart(), 0)
	case t.s.LastUse.IsZero() && t.o.LastRequest.IsZero():
		t.keep(NoteLastRequest)
	case t.stale: // NoteStale is there already
		t.d.Desired = min(t.s.Desired, 1)
	case t.s.Desired > 0:
		t.note(NoteZero, t.now.Sub(t.s.LastUse).Seconds(), 0, 0)
	}
}

// keep leaves the last instance where there is one.
func (t *decider) keep(code NoteCode) {
	if t.s.Desired > 0 {
		t.d.Desired = 1
		t.note(code, 0, 0, 0)
	}
}
