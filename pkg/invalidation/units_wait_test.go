package invalidation

import (
	"strings"
	"testing"
)

// unitsBed has the queues work and other under a limit gpu of eight units, which their locks take several of.
func unitsBed(t *testing.T, perFlow bool, work, other int) (b *bed, queues map[string]*Queue) {
	t.Helper()
	b = newBed(t, Config{})
	_, err := Create(b.ctx, b.pool, "other", Config{})
	b.must(err)
	eight := 8
	queues = b.under("gpu", limitOptions{MaxUnits: &eight, PerFlow: perFlow}, map[string]int{"work": work, "other": other})
	b.keepUnits()
	return b, queues
}

// TestUnitsAreKeptForALaneOfAQueueThatTakesMore has a queue that takes four units a lock beside one that takes one.
func TestUnitsAreKeptForALaneOfAQueueThatTakesMore(t *testing.T) {
	for _, perFlow := range []bool{false, true} {
		b, q := unitsBed(t, perFlow, 4, 1)
		work, other := q["work"], q["other"]
		b.must(pushFlow(b.ctx, work, 2, "a"))
		b.must(pushFlow(b.ctx, other, 40, "a"))
		running := b.inLane(other, "a", 8).Locks
		b.want(len(running), 8)
		b.want(len(b.inLane(work, "a", 1).Locks), 0)
		b.want(b.waiting(), 1)
		for range 3 {
			b.q = other
			b.done(running[0])
			running = running[1:]
			if c := b.inLane(other, "a", 9); len(c.Locks) != 0 || !c.Limited {
				t.Errorf("per flow %v: %d locks of one unit take what is kept, limited %v", perFlow, len(c.Locks), c.Limited)
			}
			b.want(len(b.inLane(work, "a", 9).Locks), 0)
		}
		if why := b.reasons(work); !strings.Contains(why, "the entry needs 4") {
			t.Errorf("the reasons do not name the units that the entry needs: %s", why)
		}
		b.q = other
		b.done(running[0])
		b.want(len(b.inLane(work, "a", 9).Locks), 1)
		b.want(len(b.inLane(work, "a", 9).Locks), 0) // the next one waits behind the lane of the other queue
		b.done(running[1])
		b.want(len(b.inLane(other, "a", 9).Locks), 1)
	}
}

// TestLanesOfEqualUnitsDoNotWait has queues whose locks all take four units meet a full limit.
func TestLanesOfEqualUnitsDoNotWait(t *testing.T) {
	b, q := unitsBed(t, false, 4, 4)
	for _, queue := range q {
		b.must(pushFlow(b.ctx, queue, 20, ""))
	}
	b.want(len(b.inLane(q["work"], "", 9).Locks), 2)
	b.want(len(b.inLane(q["other"], "", 1).Locks), 0)
	b.want(b.waiting(), 0)
	b.q = q["work"]
	c, err := b.q.ClaimLanes(b.ctx, LanesRequest{Node: here, Limit: 2, Lanes: []ClaimLane{{Lane: usual}, {Lane: Lane{Priority: 1, Flow: "b"}}}})
	b.must(err)
	if len(c) == 0 || !c[0].Limited {
		t.Errorf("lanes are not claimed together under a limit whose locks take equal units: %+v", c)
	}
}
