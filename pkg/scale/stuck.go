package scale

import "time"

// replacementsMax is how many times stuck starts are replaced before the deployment is blocked.
const replacementsMax = 3

// stuckAfter is the age at which a start is stuck.
func (t *turn) stuckAfter() time.Duration { return stuckAfterOf(t.p, t.o.ColdStartP95) }

func stuckAfterOf(p Policy, coldStartP95 float64) time.Duration {
	return max(time.Duration(3*coldStartP95*float64(time.Second)), time.Duration(p.StuckMin))
}

// liveStarts are those that are not stuck. Starts are ordered, oldest first.
func (t *turn) liveStarts() []time.Time {
	for i, since := range t.o.Starting {
		if t.now.Sub(since) <= t.stuckAfter() {
			return t.o.Starting[i:]
		}
	}
	return nil
}

// countStuck leaves stuck starts out of the capacity and has them replaced, three times. A start that
// becomes ready forgives the ones before.
func (t *turn) countStuck() {
	live := len(t.liveStarts())
	stuck := len(t.o.Starting) - live
	t.alive = t.o.Ready + live
	if stuck == 0 {
		if t.s.Replaced > 0 && t.o.Ready > 0 && t.now.Sub(t.s.ReplacedAt) > t.stuckAfter() {
			t.s.Replaced = 0
		}
		return
	}
	t.note(NoteStuck, float64(stuck), t.stuckAfter().Seconds(), 0)
	again := t.now.Sub(t.s.ReplacedAt) > t.stuckAfter()
	switch {
	case t.now.Before(t.s.BlockedUntil):
	case again && t.s.Replaced >= replacementsMax:
		t.s.Replaced = 0
		t.s.BlockedUntil = t.now.Add(time.Duration(t.p.BlockedFor))
	case again:
		t.s.Replaced++
		t.s.ReplacedAt = t.now
		t.d.Replace = stuck
	case t.now.Equal(t.s.ReplacedAt):
		t.d.Replace = stuck
	}
	if t.d.Replace > 0 {
		t.note(NoteReplace, float64(t.d.Replace), float64(t.s.Replaced), replacementsMax)
	}
}

// block starts nothing more while the deployment is blocked. The number may always fall.
func (t *turn) block() {
	if !t.now.Before(t.s.BlockedUntil) {
		return
	}
	limit := t.o.Ready + len(t.liveStarts())
	t.note(NoteBlocked, t.s.BlockedUntil.Sub(t.now).Seconds(), float64(limit), 0)
	t.d.Desired = min(t.d.Desired, limit)
}
