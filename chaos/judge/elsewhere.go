package judge

import (
	"slices"
	"time"
)

// elsewhereMax is how long after the lease of a dead node, without a disturbance, its locks are free.
const elsewhereMax = 2 * time.Second

// freedInTime looks at each lock of a node that was killed: it is free within the lease and two seconds, from the death
// or from the end of the last disturbance since. How soon its entry runs then goes by what is in line before it, which
// the promises about places are about. A leader that frees locks one by one makes no such promise.
//
// What it judges is the product and not the machine: the time begins anew wherever a commit of the harness itself was
// slow, wherever a leader was answered an error, and where no node was heard. A lock counts as a case where nothing of
// that came about for as long as it may take, so that a machine that is always busy has no case.
func freedInTime(x *index, r *report) {
	if x.FreedOneByOne || x.ClockJumped {
		return
	}
	spans := x.troubled()
	limit := x.Lease + elsewhereMax + x.Tolerance
	for i := range x.Grants {
		g := &x.Grants[i]
		died := x.killedAt(g.Process)
		if died.IsZero() || !g.At.Before(died) || !g.Freed.After(died) || x.forked(g.Freed) {
			continue
		}
		from := died
		for _, d := range spans {
			if d.From.Before(g.Freed) && d.To.After(died) {
				from = laterOf(from, d.To)
			}
		}
		waited := g.Freed.Sub(from)
		undisturbed := !slices.ContainsFunc(spans, func(d Disturbance) bool {
			return d.From.After(from) && d.From.Before(from.Add(limit))
		})
		if undisturbed || waited > limit {
			r.checked++
		}
		if waited > limit {
			r.bad("the lock of key %s of %s was free %v after the death of %s at %s, %v after the last disturbance",
				g.Key, g.Queue, g.Freed.Sub(died), g.Process, died.Format(time.TimeOnly), waited)
		}
	}
}

// unheard are the times for which no node was heard, and a third of a lease more: recovery suspends itself then.
func (x *index) unheard() (spans []Disturbance) {
	nodes := map[string]bool{}
	for i := range x.Grants {
		nodes[x.Grants[i].Process] = true
	}
	var beats []time.Time
	for _, b := range x.Beats {
		if nodes[b.Process] {
			beats = append(beats, b.At)
		}
	}
	slices.SortFunc(beats, time.Time.Compare)
	for i := 1; i < len(beats); i++ {
		if beats[i].Sub(beats[i-1]) >= x.Lease/2 {
			spans = append(spans, Disturbance{"no node is heard", beats[i-1], beats[i].Add(x.Lease / 3)})
		}
	}
	return spans
}
