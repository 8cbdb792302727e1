package tasknode

import "time"

// rest is for how long a lane, or each lane of a queue, is not claimed from. One that follows a refusal may end early,
// by the epoch in which that was:
//
//	refusedIn       it ends early when              it is of a lane that
//	zero            never                           was contended, rewound or delayed, or whose claim failed
//	freed is 0      limits change, or token         waits for a rate or a throttling
//	                buckets have units back
//	freed is not 0  that, or something comes free   was refused by a gate or by a limit on locks
//
// The zero value is no rest.
type rest struct {
	until     time.Time
	refusedIn epoch
}

// lasts says that the rest is not over.
func (r rest) lasts(now time.Time, present epoch) bool {
	return now.Before(r.until) && (!r.refused() || !r.refusedIn.over(present))
}

// left is how much longer the rest lasts, 0 if it is over.
func (r rest) left(now time.Time, present epoch) time.Duration {
	if !r.lasts(now, present) {
		return 0
	}
	return r.until.Sub(now)
}

// refused says that the rest is that of a refusal, which may end early.
func (r rest) refused() bool { return r.refusedIn != epoch{} }

// epoch counts what ends a refusal early. A lane that was refused in an earlier epoch is tried again.
type epoch struct {
	freed   int64 // how often something came free that a claim may need
	changed int64 // how often the limits may have changed, or token buckets have units back
}

// over says that a refusal of this epoch is over at present. One with freed 0 waits for a rate or a throttling: what
// comes free does not end it.
func (e epoch) over(present epoch) bool {
	return e.changed != present.changed || e.freed != 0 && e.freed != present.freed
}

// nextEpoch notes that something came free that a claim may need.
func (t *laneTable) nextEpoch() {
	t.mu.Lock()
	t.epoch.freed++
	t.mu.Unlock()
}

// limitsChanged notes that no refusal need hold any longer: limits may have changed, or token buckets have units back.
func (t *laneTable) limitsChanged() {
	t.mu.Lock()
	t.epoch.changed++
	t.mu.Unlock()
}

// rested is how long until the first of the lanes that rest may be tried; an hour if none does.
func (t *laneTable) rested(now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	first := time.Hour
	for _, l := range t.awake {
		left := max(l.rest.left(now, t.epoch), t.queues[l.key.queue].rest.left(now, t.epoch))
		if l.lease == nil && left > 0 {
			first = min(first, left)
		}
	}
	return first
}
