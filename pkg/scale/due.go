package scale

import (
	"maps"
	"slices"
	"time"
)

// nudge has the deployments of the models applied at once.
func (a *applier) nudge(models ...string) {
	if len(models) == 0 {
		return
	}
	a.mu.Lock()
	for _, m := range models {
		a.due[m] = true
	}
	a.mu.Unlock()
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// take returns the models whose deployments are due, nil for all.
func (a *applier) take() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	models := slices.AppendSeq([]string{}, maps.Keys(a.due))
	clear(a.due)
	if len(models) > wokenMax {
		return nil
	}
	return models
}

// withoutResting leaves out deployments at rest but for those whose reports are oldest: asking the backends of a
// thousand idle models once a second would hold up the one that is wanted.
func withoutResting(rows []share, now time.Time) []share {
	var old, kept []share
	for _, s := range rows {
		switch {
		case !s.rests():
			kept = append(kept, s)
		case now.Sub(*s.SeenAt) >= restEvery:
			old = append(old, s)
		}
	}
	slices.SortFunc(old, func(a, b share) int { return a.SeenAt.Compare(*b.SeenAt) })
	return append(kept, old[:min(len(old), restMax)]...)
}

// readable are the deployments whose policy can be read. The pass of decisions reports the others.
func readable(rows []share) []share {
	kept := rows[:0]
	for _, s := range rows {
		if s.read() == nil {
			kept = append(kept, s)
		}
	}
	return kept
}

// begin says whether a call of the deployment may begin: none is under way. A round that was asked for is not lost
// then: it follows the call.
func (a *applier) begin(name string, asked bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.busy[name] {
		a.again[name] = a.again[name] || asked
		return false
	}
	a.busy[name] = true
	return true
}

// end notes the end of a call, and says whether another round was asked for meanwhile.
func (a *applier) end(name string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	again := a.again[name]
	delete(a.busy, name)
	delete(a.again, name)
	return again
}
