package tasknode

import (
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// laneLease is the right of a scheduling thread to claim from a lane. While it lasts no other thread of the
// node claims from it.
type laneLease struct {
	*servedQueue
	queue    *invalidation.Queue // as it was when the lease began, as is the handler
	handler  invalidation.Handler
	lane     *lane
	ranked   invalidation.Candidate // the lane as it was ranked
	from     int64
	fromHead bool
	freed    int64 // what freed was when the lease began: what comes free during the claim must not be missed
}

// lease begins the lease of a lane.
func (t *laneTable) lease(l *lane, now time.Time) *laneLease {
	l.claiming, l.heard, l.arrivedPosition = true, false, 0
	s := t.queues[l.key.queue]
	s.last, s.seen = l.key.lane, true
	v := &laneLease{
		servedQueue: s, queue: s.queue, handler: s.handler, lane: l, ranked: l.Candidate,
		from: max(l.stuck, l.lowWater-claimOverlap), freed: t.freed,
	}
	if now.Sub(l.headAt) > l.headEvery() {
		v.from, v.fromHead = 0, true
	}
	return v
}

// advance moves the lane's low-water mark behind the rows that a claim scanned; missed says that it left ready rows of
// which some may be claimed later.
func (t *laneTable) advance(v *laneLease, c invalidation.Claimed, missed bool, took time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v.fromHead {
		v.lane.headAt, v.lane.headCost = time.Now(), took
	}
	if missed && (v.lane.behind == 0 || v.from < v.lane.behind) {
		v.lane.behind = max(1, v.from)
	}
	if len(c.Locks) > 0 {
		v.lane.contentions, v.lane.fruitless = 0, false
		t.unwant(v.lane)
	}
	if c.Scanned == 0 || len(c.Locks) > 0 {
		v.lane.passed = time.Time{}
	}
	switch {
	case c.Scanned == 0:
	case len(c.Locks) == 0:
		// What is left there (a key whose row a transaction holds) is met again when the lane is scanned from its head.
		v.lane.lowWater, v.lane.stuck = c.LowWater+1, c.LowWater+1
	default:
		v.lane.lowWater = c.LowWater
	}
	if at := v.lane.arrivedPosition; at != 0 { // the claim may have been too early to see it
		v.lane.lowWater, v.lane.stuck = min(v.lane.lowWater, at), min(v.lane.stuck, at)
	}
	t.top = max(t.top, c.LowWater)
	if c.Drained || c.LowWater >= v.from { // else keys were met by a claim that leaves them to another
		v.lane.large = !c.Drained
	}
	if c.Drained {
		v.lane.moved(t.top + 1) // it is empty: what comes now comes after all that is known
	} else {
		v.lane.moved(c.LowWater + 1)
	}
}

// stuckAgain notes that a claim brought nothing but rows that could not be claimed, and says whether the one before it
// had not either.
func (t *laneTable) stuckAgain(v *laneLease) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	fruitless := v.lane.fruitless
	v.lane.fruitless = true
	return fruitless
}

// leaveAwake ends a lease of a lane that is worth another claim at once.
func (t *laneTable) leaveAwake(v *laneLease) { t.leave(v, true, time.Time{}) }

// leaveUntil ends a lease of a lane that is worth another claim from a time on.
func (t *laneTable) leaveUntil(v *laneLease, at time.Time) { t.leave(v, true, at) }

// leaveAsleep ends a lease of a lane that has no work as far as the node knows.
func (t *laneTable) leaveAsleep(v *laneLease) { t.leave(v, false, time.Time{}) }

// leave ends a lease; work says whether it is worth coming back, again from when on. So it is if a hint came during the
// lease, which may be about what the claim could not see yet.
func (t *laneTable) leave(v *laneLease, work bool, retryAt time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end(v, work || v.lane.heard)
	v.lane.retryAt, v.lane.refused = retryAt, 0
}

func (t *laneTable) end(v *laneLease, work bool) {
	v.lane.claiming = false
	if work {
		t.wake(v.lane)
	} else {
		t.sleep(v.lane)
	}
}

// few is how many rows a lane without hints must bring at once to be tried again when it is empty.
const few = 10

// more says whether a lane is worth another claim. If the last one emptied it, what comes later is hinted at, as what
// came before was, or found by the next poll. Where no hints come, and much comes, the next claim finds out.
func (t *laneTable) more(v *laneLease, c invalidation.Claimed) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return c.Scanned > 0 && (!c.Drained || (!v.lane.hinted && c.Scanned >= few))
}

// contended notes that another claimer was in the lane, and returns for how long to leave it to them: 2 to 64 ms.
func (t *laneTable) contended(v *laneLease) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return v.lane.backOff()
}

// rewind lets a lease that came to the end of a lane begin anew at the first row that was left. It returns
// after how long to try, 0 if there is no such row: a transaction had it, or its key, locked for a moment.
func (t *laneTable) rewind(v *laneLease) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := v.lane
	if l.behind == 0 {
		l.contentions = 0
		return 0
	}
	l.lowWater, l.stuck, l.behind = min(l.lowWater, l.behind), min(l.stuck, l.behind), 0
	return l.backOff()
}

// refuse ends a lease for which there was no permit or no leave. The lane is tried again when something came free.
func (t *laneTable) refuse(v *laneLease, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end(v, true)
	v.lane.retryAt, v.lane.refused = at, v.freed
}

// refuseQueue notes that all lanes of the queue of a lease would be refused as well.
func (t *laneTable) refuseQueue(v *laneLease, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := v.servedQueue
	s.retryAt, s.refused = at, v.freed
}
