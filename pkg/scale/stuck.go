package scale

import (
	"slices"
	"time"
)

// replacementsMax is how many times stuck starts are replaced before the deployment is blocked.
const replacementsMax = 3

// stuckAfter is the age at which a start is stuck.
func (t *turn) stuckAfter() time.Duration { return stuckAfterOf(t.p, t.o.ColdStartP95) }

func stuckAfterOf(p Policy, coldStartP95 float64) time.Duration {
	return max(time.Duration(3*coldStartP95*float64(time.Second)), time.Duration(p.StuckMin))
}

// liveStarts are those that are not stuck. Starts are ordered, oldest first.
func (t *turn) liveStarts() []time.Time { return t.live(t.o.Starting) }

func (t *turn) live(starts []time.Time) []time.Time {
	for i, since := range starts {
		if t.now.Sub(since) <= t.stuckAfter() {
			return starts[i:]
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
	if len(t.o.Deployments) > 1 {
		t.countStuckEach()
		return
	}
	t.s.Stuck = nil
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

// countStuckEach does so for each of several deployments. One that is blocked has one try at a time after it, until the
// try is ready: the others are asked for its share meanwhile, see Spread.
func (t *turn) countStuckEach() {
	history := map[string]StuckHistory{}
	for _, d := range t.o.Deployments {
		h := t.s.Stuck[d.Name]
		stuck := len(d.Starting) - len(t.live(d.Starting))
		if stuck > 0 {
			t.note(NoteStuck, float64(stuck), t.stuckAfter().Seconds(), 0)
		}
		t.d.Replace += t.follow(&h, d, stuck)
		if h.Blocked {
			left := max(0, h.BlockedUntil.Sub(t.now))
			t.note(NoteBlocked, left.Seconds(), float64(d.Ready+len(d.Starting)-stuck), 0)
		}
		if h != (StuckHistory{}) {
			history[d.Name] = h
		}
	}
	t.s.Stuck = history
}

// follow brings the history of a deployment up to now, and returns how many starts of it are to be replaced.
func (t *turn) follow(h *StuckHistory, d DeploymentStarts, stuck int) (replace int) {
	again := t.now.Sub(h.ReplacedAt) > t.stuckAfter()
	blockedUntil := t.now.Add(time.Duration(t.p.BlockedFor))
	switch {
	case h.Blocked && d.Ready > h.Ready && !t.now.Before(h.BlockedUntil):
		*h = StuckHistory{}
	case h.Blocked:
		h.Ready = min(h.Ready, d.Ready)
		tried := func(began time.Time) bool { return began.After(h.BlockedUntil) }
		if slices.ContainsFunc(d.Starting[:stuck], tried) {
			h.BlockedUntil = blockedUntil
		}
	case stuck == 0:
		if h.Replaced > 0 && d.Ready > 0 && again {
			*h = StuckHistory{}
		}
	case again && h.Replaced >= replacementsMax:
		*h = StuckHistory{Blocked: true, BlockedUntil: blockedUntil, Ready: d.Ready}
	case again:
		h.Replaced, h.ReplacedAt = h.Replaced+1, t.now
		fallthrough
	case t.now.Equal(h.ReplacedAt):
		t.note(NoteReplace, float64(stuck), float64(h.Replaced), replacementsMax)
		return stuck
	}
	return 0
}

// block starts nothing more while the deployment is blocked. The number may always fall.
func (t *turn) block() {
	if !t.now.Before(t.s.BlockedUntil) || len(t.o.Deployments) > 1 {
		return
	}
	limit := t.o.Ready + len(t.liveStarts())
	t.note(NoteBlocked, t.s.BlockedUntil.Sub(t.now).Seconds(), float64(limit), 0)
	t.d.Desired = min(t.d.Desired, limit)
}
