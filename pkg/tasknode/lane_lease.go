package tasknode

import (
	"cmp"
	"time"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
)

// laneLease is the right of a scheduling thread to claim from a lane. While it lasts no other thread of the
// node claims from it. One of three methods of the table ends it: end after a claim, endRefused and endUnclaimed
// without one. Their cases are the rows of the table in doc.go.
type laneLease struct {
	servedLane
	from      int64 // position at which the claim begins
	fromHead  bool  // that is the head of the lane
	fruitless bool  // as lane.fruitless was when the lease began
	began     epoch // in which the lease began: what comes free during the claim must not be missed

	// What came during the lease, which the claim may have been too early to see. Guarded by laneTable.mu.
	heard   bool  // a hint, or a key that is ready again
	arrived int64 // the first of the positions at which ready rows were noted; 0: none was
}

// servedLane is a lane with what is known of it when a lease begins: a job of the lane has this until it ends, whatever
// the queues are by then.
type servedLane struct {
	lane    *lane
	ranked  fairness.Candidate // the lane as it was ranked
	served  *servedQueue
	queue   *invalidation.Queue
	handler invalidation.Handler
}

// lease begins the lease of a lane.
func (t *laneTable) lease(l *lane, now time.Time) *laneLease {
	s := t.queues[l.key.queue]
	s.last, l.Queue = l, s.queue
	v := &laneLease{
		servedLane: servedLane{lane: l, ranked: l.Candidate, served: s, queue: s.queue, handler: s.handler},
		fruitless:  l.fruitless, began: t.epoch,
	}
	v.from, v.fromHead = l.marks.next(now)
	l.lease = v
	return v
}

// hear notes that there may be work which the claim that is under way, if one is, was too early to see.
func (l *lane) hear() {
	if l.lease != nil {
		l.lease.heard = true
	}
}

// claimEnd is how a claim ended in one of its lanes.
type claimEnd struct {
	answer invalidation.Claimed
	err    error // of the claim; the answer is what was found out afterwards
	swept  int   // how many of the ready rows that the claim skipped are deleted
	took   time.Duration
}

// complete says that the claim scanned the lane: nothing kept it from what was there.
func (e *claimEnd) complete() bool { return e.err == nil && !e.answer.TryLater && !e.answer.Limited }

// missed says that the claim left ready rows of which some may be claimed later.
func (e *claimEnd) missed() bool { return e.swept < e.answer.Skipped }

// fruitless says that the claim met nothing but rows that could not be claimed.
func (e *claimEnd) fruitless() bool { return e.missed() && len(e.answer.Locks) == 0 }

// refusedRest is for how long a lane rests that was refused, or whose claim ended in an error.
const refusedRest = 200 * time.Millisecond

// end ends the lease of a lane that was claimed from. Each case is a row of the table in doc.go.
func (t *laneTable) end(v *laneLease, e claimEnd, now time.Time, jitter func(time.Duration) time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l, c := v.lane, &e.answer
	after := func(d time.Duration) rest { return rest{until: now.Add(jitter(d))} }
	if e.complete() {
		t.top = max(t.top, c.LowWater)
		v.advance(&e, t.top, now)
		if len(c.Locks) > 0 {
			t.wants.remove(l)
		}
	}
	switch {
	case e.err != nil: // failed
		l.contentions = 0
		t.leave(v, after(refusedRest))
	case c.TryLater: // contended
		// The other claimer leaves the lane within a few milliseconds, but others may come.
		t.leave(v, after(l.backOff()))
	case c.Limited: // limited
		t.endLimited(v, c, now, jitter)
	case l.leftRows(c): // left rows
		t.leave(v, rest{})
	case l.marks.left != 0: // rewound
		l.marks.rewind()
		t.leave(v, after(l.backOff()))
	case c.DelayedFor > 0: // delayed
		l.contentions = 0
		t.leave(v, after(min(c.DelayedFor, 100*time.Millisecond)))
	default: // drained
		l.contentions = 0
		t.leaveDrained(v)
	}
}

// endLimited ends the lease of a lane in which a limit of its queue left no headroom.
func (t *laneTable) endLimited(
	v *laneLease, c *invalidation.Claimed, now time.Time, jitter func(time.Duration) time.Duration,
) {
	// A bucket fills at a known time; a lock of another node ends at an unknown one.
	wait := jitter(max(time.Millisecond, min(cmp.Or(c.Wait, 50*time.Millisecond), time.Minute)))
	if byLocks := c.Wait == 0; byLocks {
		t.leave(v, rest{now.Add(wait), v.began})
		t.want(v.lane, false, now)
	} else {
		t.leave(v, rest{now.Add(wait), epoch{changed: v.began.changed}})
	}
	if c.QueueWide { // the wait may be that of the flow alone
		v.restQueue(now.Add(min(wait, time.Second)))
	}
}

// endRefused ends the lease of a lane for which there was no room. It wants what running jobs have.
func (t *laneTable) endRefused(
	v *laneLease, why refusal, now time.Time, jitter func(time.Duration) time.Duration,
) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.want(v.lane, why == refusedThreads, now)
	if why == refusedThreads {
		// It stays first for what comes free: no other lane may be let in before it.
		t.leave(v, rest{})
		return
	}
	again := now.Add(jitter(refusedRest))
	t.leave(v, rest{again, v.began})
	if why == refusedByLimit {
		v.restQueue(again)
	}
}

// endUnclaimed ends the lease of a lane that its claim did not reach.
func (t *laneTable) endUnclaimed(v *laneLease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leave(v, rest{})
}

// leave ends a lease: the lane is awake, and rests.
func (t *laneTable) leave(v *laneLease, r rest) {
	v.lane.lease, v.lane.rest = nil, r
	t.wake(v.lane)
}

// leaveDrained ends a lease after which the lane is asleep. A hint that came during the lease may be about what the
// claim could not see yet: it leaves the lane awake.
func (t *laneTable) leaveDrained(v *laneLease) {
	if v.heard {
		t.leave(v, rest{})
		return
	}
	v.lane.lease, v.lane.rest = nil, rest{}
	t.sleep(v.lane)
}

// restQueue has all lanes of the queue rest, which would be refused as well, until something comes free: the answer of
// a claim does not tell a rate of the queue from one of the flow beside a limit of the queue.
func (v *laneLease) restQueue(until time.Time) { v.served.rest = rest{until, v.began} }

// advance notes what a claim scanned; top is the last position that is known of any lane.
func (v *laneLease) advance(e *claimEnd, top int64, now time.Time) {
	l, c := v.lane, &e.answer
	l.marks.advance(v, e, now)
	if len(c.Locks) > 0 {
		l.contentions = 0
	}
	l.fruitless = e.fruitless() || l.fruitless && len(c.Locks) == 0
	if c.Scanned == 0 || len(c.Locks) > 0 {
		l.passed = time.Time{}
	}
	if c.Drained || c.LowWater >= v.from { // else keys were met by a claim that leaves them to another
		l.large = !c.Drained
	}
	if c.Drained {
		l.moved(top + 1) // it is empty: what comes now comes after all that is known
	} else {
		l.moved(c.LowWater + 1)
	}
}
