package scale

import (
	"slices"
	"time"
)

// replacementsMax is how many times stuck starts are replaced before the deployment is blocked.
const replacementsMax = 3

// stuckAfter is the age at which a start is stuck.
func (t *decider) stuckAfter() time.Duration { return stuckAfterOf(t.p, t.o.ColdStartP95) }

func stuckAfterOf(p Policy, coldStartP95 float64) time.Duration {
	return max(time.Duration(3*coldStartP95*float64(time.Second)), time.Duration(p.StuckMin))
}

// liveStarts are those that are not stuck. Starts are ordered, oldest first.
func (t *decider) liveStarts() []time.Time { return t.live(t.o.Starting) }

func (t *decider) live(starts []time.Time) []time.Time {
	for i, since := range starts {
		if t.now.Sub(since) <= t.stuckAfter() {
			return starts[i:]
		}
	}
	return nil
}

// deployments are those of the model. Where they are not given apart, the model has one.
func (t *decider) deployments() []DeploymentStarts {
	if len(t.o.Deployments) > 0 {
		return t.o.Deployments
	}
	return []DeploymentStarts{{Ready: t.o.Ready, Starting: t.o.Starting}}
}

// countStuck has stuck starts replaced, three times for each deployment. One that is blocked after them has one try
// at a time, until the try is ready; where an operator sets its number, nothing limits it, and the tries are the
// replacements of those starts.
func (t *decider) countStuck() {
	history := map[string]StuckHistory{}
	for _, d := range t.deployments() {
		h := t.s.Stuck[d.Name]
		stuck := len(d.Starting) - len(t.live(d.Starting))
		if stuck > 0 {
			t.note(NoteStuck, float64(stuck), t.stuckAfter().Seconds(), 0)
		}
		t.d.Replace += t.follow(&h, d, stuck)
		if h != (StuckHistory{}) {
			history[d.Name] = h
		}
	}
	t.s.Stuck = nil
	if len(history) > 0 {
		t.s.Stuck = history
	}
}

// follow brings the history of a deployment up to now, and returns how many starts of it are to be replaced.
func (t *decider) follow(h *StuckHistory, d DeploymentStarts, stuck int) (replace int) {
	again := t.now.Sub(h.ReplacedAt) > t.stuckAfter()
	blockedUntil := t.now.Add(time.Duration(t.p.BlockedFor))
	switch {
	case h.Blocked && d.Ready > h.Ready && !t.now.Before(h.BlockedUntil):
		*h = StuckHistory{}
	case h.Blocked:
		h.Ready = min(h.Ready, d.Ready)
		tried := func(began time.Time) bool { return !began.Before(h.BlockedUntil) }
		if slices.ContainsFunc(d.Starting[:stuck], tried) {
			h.BlockedUntil = blockedUntil
		}
		if stuck > 0 && again && (t.byHand || d.ByHand) && !t.now.Before(h.BlockedUntil) {
			h.ReplacedAt = t.now
			t.note(NoteAnew, float64(stuck), 0, 0)
			return stuck
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

// block limits the starts of blocked deployments. The only one of a model limits the number of the model, which may
// always fall; of several the others are asked for the share of a blocked one, see divide.
func (t *decider) block() {
	deployments := t.deployments()
	for _, d := range deployments {
		h := t.s.Stuck[d.Name]
		if !h.Blocked {
			continue
		}
		limit := t.kept(d, h)
		if len(deployments) == 1 {
			limit += t.o.Unhealthy
			t.d.Desired = min(t.d.Desired, limit)
		}
		t.note(NoteBlocked, max(0, h.BlockedUntil.Sub(t.now).Seconds()), float64(limit), 0)
	}
}

// kept are the instances of a blocked deployment that are ready or about to be, and a try where it is time for one.
func (t *decider) kept(d DeploymentStarts, h StuckHistory) int {
	live := t.live(d.Starting)
	n := d.Ready + len(live)
	trying := len(live) > 0 && !live[len(live)-1].Before(h.BlockedUntil)
	if t.now.Before(h.BlockedUntil) || trying {
		return n
	}
	return n + 1
}
