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
	leased
	from      int64
	fromHead  bool
	fruitless bool  // as lane.fruitless was when the lease began
	began     epoch // in which the lease began: what comes free during the claim must not be missed
}

// leased is a lane with what is known of it when its lease begins: a job of the lane has this until it ends, whatever
// the queues are by then.
type leased struct {
	lane    *lane
	ranked  fairness.Candidate // the lane as it was ranked
	served  *servedQueue
	queue   *invalidation.Queue
	handler invalidation.Handler
}

// lease begins the lease of a lane.
func (t *laneTable) lease(l *lane, now time.Time) *laneLease {
	l.claiming, l.heard, l.arrivedPosition = true, false, 0
	s := t.queues[l.key.queue]
	s.last, l.Queue = l, s.queue
	v := &laneLease{
		leased: leased{lane: l, ranked: l.Candidate, served: s, queue: s.queue, handler: s.handler},
		from:   max(l.stuck, l.lowWater-claimOverlap), fruitless: l.fruitless, began: t.epoch,
	}
	if now.Sub(l.headAt) > l.headEvery() {
		v.from, v.fromHead = 0, true
	}
	return v
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

// end ends the lease of a lane that was claimed from.
func (t *laneTable) end(v *laneLease, e claimEnd, now time.Time, jitter func(time.Duration) time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l, c := v.lane, &e.answer
	if e.complete() {
		t.top = max(t.top, c.LowWater)
		v.advance(&e, t.top, now)
		if len(c.Locks) > 0 {
			t.unwant(l)
		}
	}
	switch {
	case e.err != nil: // failed
		t.rest(v, now.Add(jitter(refusedRest)))
	case c.TryLater:
		// The other claimer leaves the lane within a few milliseconds, but others may come.
		t.rest(v, now.Add(jitter(l.backOff())))
	case c.Limited:
		// A bucket fills at a known time; a lock of another node ends at an unknown one.
		wait := jitter(max(time.Millisecond, min(cmp.Or(c.Wait, 50*time.Millisecond), time.Minute)))
		t.refuse(v, now.Add(wait), c.Wait == 0)
		if c.QueueWide { // the wait may be that of the flow alone
			v.refuseQueue(now.Add(min(wait, time.Second)))
		}
		if c.Wait == 0 {
			t.wanted(l, false, now)
		}
	case l.leftRows(c):
		t.leave(v, true)
	case l.behind != 0: // rewound
		t.rest(v, now.Add(jitter(l.rewind())))
	case c.DelayedFor > 0:
		l.contentions = 0
		t.rest(v, now.Add(jitter(min(c.DelayedFor, 100*time.Millisecond))))
	default: // drained
		l.contentions = 0
		t.leave(v, false)
	}
}

// endRefused ends the lease of a lane for which there was no room. It wants what running jobs have.
func (t *laneTable) endRefused(
	v *laneLease, why refusal, now time.Time, jitter func(time.Duration) time.Duration,
) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wanted(v.lane, why == refusedThreads, now)
	if why == refusedThreads {
		// It stays first for what comes free: no other lane may be let in before it.
		t.leave(v, true)
		return
	}
	again := now.Add(jitter(refusedRest))
	t.refuse(v, again, true)
	if why == refusedByLimit {
		v.refuseQueue(again)
	}
}

// endUnclaimed ends the lease of a lane that its claim did not reach.
func (t *laneTable) endUnclaimed(v *laneLease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leave(v, true)
}

// leave ends a lease: the lane is awake or asleep then. A hint that came during the lease may be about what the claim
// could not see yet: it leaves the lane awake.
func (t *laneTable) leave(v *laneLease, awake bool) {
	l := v.lane
	l.claiming, l.retryAt, l.refusedIn = false, time.Time{}, epoch{}
	if awake || l.heard {
		t.wake(l)
	} else {
		t.sleep(l)
	}
}

// rest ends a lease: the lane is awake, and tried again from a time on.
func (t *laneTable) rest(v *laneLease, until time.Time) {
	t.leave(v, true)
	v.lane.retryAt = until
}

// refuse ends a lease as rest does, but the lane is tried again earlier if the limits change, or units return to token
// buckets, and, unless it waits for a rate or a throttling, if something comes free.
func (t *laneTable) refuse(v *laneLease, until time.Time, untilFreed bool) {
	t.rest(v, until)
	v.lane.refusedIn = v.began
	if !untilFreed {
		v.lane.refusedIn.freed = 0
	}
}

// refuseQueue notes that all lanes of the queue would be refused as well, until something comes free: the answer of a
// claim does not tell a rate of the queue from one of the flow beside a limit of the queue.
func (v *laneLease) refuseQueue(until time.Time) {
	v.served.retryAt, v.served.refusedIn = until, v.began
}

// advance moves the lane's low-water mark behind the rows that a claim scanned; top is the last position that is known
// of any lane.
func (v *laneLease) advance(e *claimEnd, top int64, now time.Time) {
	l, c := v.lane, &e.answer
	if v.fromHead {
		l.headAt, l.headCost = now, e.took
	}
	if e.missed() && (l.behind == 0 || v.from < l.behind) {
		l.behind = max(1, v.from)
	}
	if len(c.Locks) > 0 {
		l.contentions = 0
	}
	l.fruitless = e.fruitless() || l.fruitless && len(c.Locks) == 0
	if c.Scanned == 0 || len(c.Locks) > 0 {
		l.passed = time.Time{}
	}
	switch {
	case c.Scanned == 0:
	case len(c.Locks) == 0:
		// What is left there (a key whose row a transaction holds) is met again when the lane is scanned from its head.
		l.lowWater, l.stuck = c.LowWater+1, c.LowWater+1
	default:
		l.lowWater = c.LowWater
	}
	if at := l.arrivedPosition; at != 0 { // the claim may have been too early to see it
		l.lowWater, l.stuck = min(l.lowWater, at), min(l.stuck, at)
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
