package tasknode

import (
	"slices"
	"time"
)

// Affinity reports which flows the workers have loaded; the flow names what a worker loads.
type Affinity interface {
	// Loaded returns the flows of a queue that are loaded on a worker with a free slot, and for how
	// long at most other flows wait for them; 0: the queue asks for no such preference.
	Loaded(queue string) (flows []string, maxWait time.Duration)
}

// choice is a lane that has work, as the preference sees it.
type choice struct {
	queue    int32
	priority int16
	loaded   bool
	maxWait  time.Duration
	passed   time.Time // since when it has been passed over; zero: it has not
}

// keep says which lanes may be claimed from, and marks the others as passed over. A lane is passed over for
// one of the same queue and of no lower priority whose flow is loaded. Once it has waited for maxWait
// those are passed over for it: so its first entry waits for no more than that and what runs.
func keep(lanes []choice, now time.Time) []bool {
	kept := make([]bool, len(lanes))
	for i := range lanes {
		l := &lanes[i]
		switch {
		case l.maxWait <= 0 || l.overdue(now):
			kept[i] = true
		case l.loaded:
			kept[i] = !outdone(lanes, l, func(o *choice) bool { return o.overdue(now) })
		default:
			kept[i] = !outdone(lanes, l, func(o *choice) bool { return o.loaded || o.overdue(now) })
			if !kept[i] && l.passed.IsZero() {
				l.passed = now
			}
		}
	}
	return kept
}

func (c *choice) overdue(now time.Time) bool {
	return c.maxWait > 0 && !c.loaded && !c.passed.IsZero() && now.Sub(c.passed) >= c.maxWait
}

// outdone says whether a lane of the queue that is like that has no lower priority.
func outdone(lanes []choice, l *choice, like func(*choice) bool) bool {
	for i := range lanes {
		if o := &lanes[i]; o.queue == l.queue && o.priority >= l.priority && like(o) {
			return true
		}
	}
	return false
}

// passOver returns the lanes that are not to be claimed from for the sake of others; leased ones count,
// those that rest because they were refused do not.
func (t *laneTable) passOver(affinity Affinity, now time.Time) map[*lane]bool {
	if affinity == nil {
		return nil
	}
	type preference struct {
		flows   []string
		maxWait time.Duration
	}
	asked := map[int32]preference{}
	for id, s := range t.queues {
		if flows, maxWait := affinity.Loaded(s.name); maxWait > 0 {
			asked[id] = preference{flows, maxWait}
		}
	}
	if len(asked) == 0 {
		return nil
	}
	var choices []choice
	var lanes []*lane
	for _, l := range t.awake {
		refused := l.lease == nil && l.rest.refused() && l.rest.lasts(now, t.epoch)
		if p, asks := asked[l.key.queue]; asks && !refused && t.open(l, now) {
			choices = append(choices, choice{
				l.key.queue, l.Lane.Priority, slices.Contains(p.flows, l.Lane.Flow), p.maxWait, l.passed,
			})
			lanes = append(lanes, l)
		}
	}
	over := map[*lane]bool{}
	for i, kept := range keep(choices, now) {
		lanes[i].passed, over[lanes[i]] = choices[i].passed, !kept
	}
	return over
}
