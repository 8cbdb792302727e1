package invalidation

import (
	"strings"
	"testing"
	"time"
)

// reasons is the text of the limits and rates that keep the pending entries of a queue from being claimed.
func (b *bed) reasons(q *Queue) string {
	b.Helper()
	var why string
	b.must(b.pool.QueryRow(b.ctx, `SELECT coalesce(jsonb_agg(x.r), '[]')::text FROM penstock.entry e JOIN penstock.queue q ON q.id = e.queue_id
	    CROSS JOIN LATERAL penstock.limit_reasons(q, e) x(r) WHERE e.queue_id = $1 AND e.status = 'pending'`, q.ID).Scan(&why))
	return why
}

// waiting is how many lanes have a row in limit_wait.
func (b *bed) waiting() int {
	b.Helper()
	return b.count(`SELECT count(*) FROM penstock.limit_wait`)
}

// TestLocksThatNobodyCountsStayWithinTheLimit claims one by one in a limit that is far from binding at first.
func TestLocksThatNobodyCountsStayWithinTheLimit(t *testing.T) {
	for _, keyed := range []bool{false, true} {
		b := weighedBed(t, 100, Config{})
		pushes := []Push{{}}
		for i := range 20 {
			p := Push{Weight: 10}
			if keyed {
				p.LockKey = string(rune('a' + i))
			}
			pushes = append(pushes, p)
		}
		b.pushAll(b.pool, pushes...)
		for range 30 {
			b.claim(1)
		}
		b.want(b.unitsHeld(), 91)
	}
}

// TestTooHeavyEntryStopsItsLaneAlone lowers one of two limits below the weight of the first entry of a lane.
func TestTooHeavyEntryStopsItsLaneAlone(t *testing.T) {
	b := newBed(t, Config{MaxWeight: 8})
	eight, four := 8, 4
	b.under("gpu", limitOptions{MaxUnits: &eight}, map[string]int{"work": 1})
	b.q = b.under("slots", limitOptions{MaxUnits: &eight}, map[string]int{"work": 1})["work"]
	b.keepUnits()
	b.must(pushFlow(b.ctx, b.q, 20, "light"))
	b.pushAll(b.pool, Push{Flow: "heavy", Weight: 8})
	b.must(setLimit(b.ctx, b.pool, "slots", limitOptions{MaxUnits: &four}))
	b.want(len(b.inLane(b.q, "light", 1).Locks), 1) // the head does not fit gpu either
	if c := b.inLane(b.q, "heavy", 1); len(c.Locks) != 0 || !c.Limited || c.QueueWide {
		t.Errorf("%d locks, limited %v, queue-wide %v: 3 units are free for the other lanes", len(c.Locks), c.Limited, c.QueueWide)
	}
	b.want(len(b.inLane(b.q, "light", 9).Locks), 3)
	if c := b.inLane(b.q, "heavy", 1); !c.QueueWide {
		t.Error("no unit is free, and the claim does not say that the limit is queue-wide")
	}
	b.want(b.waiting(), 0)
}

// TestUnitsBeyondAnIntegerAreCounted puts heavy entries under a limit of bytes.
func TestUnitsBeyondAnIntegerAreCounted(t *testing.T) {
	for _, perFlow := range []bool{false, true} {
		b := newBed(t, Config{MaxWeight: 1000})
		most := 2_000_000_000
		b.q = b.under("bytes", limitOptions{MaxUnits: &most, PerFlow: perFlow}, map[string]int{"work": 1_000_000})["work"]
		b.pushAll(b.pool, weights(1000, 1000)...)
		b.want(len(b.claim(1)), 1)
		b.exec(b.pool, `SELECT penstock.use_limit('work', 'bytes', 3000000)`)
		var err error
		b.q, err = Open(b.ctx, b.pool, "work")
		b.must(err)
		if c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 1}); len(c.Locks) != 0 || !c.Limited {
			t.Errorf("%d locks beside 3000000000 of 2000000000 units, limited %v", len(c.Locks), c.Limited)
		}
		if why := b.reasons(b.q); !strings.Contains(why, "3000000000 of 2000000000 units") {
			t.Errorf("the reasons do not name the units in use: %s", why)
		}
		_, err = b.pool.Exec(b.ctx, `SELECT penstock.push('work', '1', weight => 1000)`)
		if err == nil || !strings.Contains(err.Error(), "3000000000 of 2000000000 units (entry 1)") {
			t.Errorf("the push ended with %v", err)
		}
	}
}

// TestEmptyLaneDoesNotWait polls lanes without rows, and one whose key is locked, while a heavy entry waits.
func TestEmptyLaneDoesNotWait(t *testing.T) {
	b := newBed(t, Config{MaxWeight: 8})
	eight := 8
	_, err := Create(b.ctx, b.pool, "other", Config{})
	b.must(err)
	q := b.under("gpu", limitOptions{MaxUnits: &eight}, map[string]int{"work": 1, "other": 1})
	work, other := q["work"], q["other"]
	b.q = work
	b.pushAll(b.pool, Push{Flow: "key", LockKey: "a", Weight: 8})
	b.want(len(b.inLane(work, "key", 1).Locks), 1)
	b.pushAll(b.pool, Push{Flow: "key", LockKey: "a", Weight: 8}, Push{Flow: "heavy", Weight: 8})
	b.want(len(b.inLane(work, "heavy", 1).Locks), 0)
	b.want(b.waiting(), 1)
	b.inLane(work, "key", 1)
	b.inLane(work, "none", 1)
	b.inLane(other, "", 1)
	b.want(b.waiting(), 1)
	b.must(pushFlow(b.ctx, other, 1, ""))
	b.inLane(other, "", 1)
	b.want(b.waiting(), 2)
}

// TestLaneThatWaitedBeforeTheClockWasSetBackKeepsNothing has the row of a lane whose entry was cancelled lie in the future.
func TestLaneThatWaitedBeforeTheClockWasSetBackKeepsNothing(t *testing.T) {
	b := weighedBed(t, 8, Config{})
	b.must(pushFlow(b.ctx, b.q, 20, "light"))
	ids := b.pushAll(b.pool, Push{Flow: "heavy", Weight: 8}, Push{Flow: "next", Weight: 8})
	running := b.inLane(b.q, "light", 1).Locks
	b.want(len(b.inLane(b.q, "heavy", 1).Locks), 0)
	b.exec(b.pool, `UPDATE penstock.limit_wait SET since = since + interval '1 hour', until = until + interval '1 hour'`)
	b.exec(b.pool, `SELECT penstock.cancel_entry($1)`, ids[0])
	b.want(len(b.inLane(b.q, "light", 2).Locks), 2)
	// A lane that is tried again has the place of one that comes now.
	b.exec(b.pool, `UPDATE penstock.limit_wait SET flow = 'next'`)
	b.want(len(b.inLane(b.q, "next", 1).Locks), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.limit_wait WHERE until <= clock_timestamp() + interval '1 hour' AND since <= clock_timestamp()`), 1)
	b.want(len(b.inLane(b.q, "light", 1).Locks), 0)
	b.want(len(running), 1)
}

// TestOtherFlowsDoNotOpenTheLimit has light entries of two flows beside a heavy one of the first, under a limit per flow: while
// it waits every claim is counted.
func TestOtherFlowsDoNotOpenTheLimit(t *testing.T) {
	b := newBed(t, Config{MaxWeight: 8})
	eight := 8
	_, err := Create(b.ctx, b.pool, "other", Config{})
	b.must(err)
	q := b.under("gpu", limitOptions{MaxUnits: &eight, PerFlow: true}, map[string]int{"work": 1, "other": 1})
	work, other := q["work"], q["other"]
	b.keepUnits()
	b.must(pushFlow(b.ctx, other, 200, "a"))
	b.must(pushFlow(b.ctx, other, 200, "b"))
	b.q = work
	b.pushAll(b.pool, Push{Flow: "a", Weight: 8})
	held := b.inLane(other, "a", 2).Locks
	b.want(len(held), 2)
	b.want(len(b.inLane(work, "a", 1).Locks), 0)
	b.q = other
	for range 2 {
		b.done(b.inLane(other, "b", 1).Locks...)
		b.want(len(b.inLane(other, "a", 1).Locks), 0)
	}
	// A lane that comes back closes what was opened while it was away.
	b.exec(b.pool, `UPDATE penstock.limit_wait SET until = clock_timestamp() - interval '1 second'`)
	b.done(b.inLane(other, "b", 1).Locks...)
	b.want(len(b.inLane(work, "a", 1).Locks), 0)
	b.want(len(b.inLane(other, "a", 1).Locks), 0)
	b.done(held...)
	b.want(len(b.inLane(work, "a", 1).Locks), 1)
}

// TestLaneKeepsItsPlaceForAMinute has two heavy lanes wait, of which the first is not tried for more than three seconds.
func TestLaneKeepsItsPlaceForAMinute(t *testing.T) {
	b := weighedBed(t, 8, Config{})
	b.must(pushFlow(b.ctx, b.q, 1, "light"))
	b.pushAll(b.pool, Push{Flow: "first", Weight: 8}, Push{Flow: "second", Weight: 8})
	running := b.inLane(b.q, "light", 1).Locks
	b.want(len(b.inLane(b.q, "first", 1).Locks), 0)
	b.want(len(b.inLane(b.q, "second", 1).Locks), 0)
	b.exec(b.pool, `UPDATE penstock.limit_wait SET until = clock_timestamp() - interval '50 seconds' WHERE flow = 'first'`)
	b.want(len(b.inLane(b.q, "first", 1).Locks), 0)
	b.done(running...)
	b.want(len(b.inLane(b.q, "second", 1).Locks), 0)
	b.want(len(b.inLane(b.q, "first", 1).Locks), 1)
	b.exec(b.pool, `UPDATE penstock.limit_wait SET until = clock_timestamp() - interval '61 seconds', since = since - interval '70 seconds'`)
	b.want(len(b.inLane(b.q, "second", 1).Locks), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.limit_wait WHERE since > clock_timestamp() - interval '1 minute'`), 1)
}

// TestLightLanesWaitBesideHeavyOnesAlone has lanes of weight 1 meet a full limit.
func TestLightLanesWaitBesideHeavyOnesAlone(t *testing.T) {
	b := weighedBed(t, 8, Config{})
	for _, flow := range []string{"a", "b", "c"} {
		b.must(pushFlow(b.ctx, b.q, 20, flow))
	}
	running := b.inLane(b.q, "a", 8).Locks
	b.want(len(running), 8)
	b.want(len(b.inLane(b.q, "b", 1).Locks), 0)
	b.want(b.waiting(), 0)
	b.done(running[0])
	b.want(len(b.inLane(b.q, "c", 1).Locks), 1) // b keeps nothing
	b.pushAll(b.pool, Push{Flow: "heavy", Weight: 8})
	b.want(len(b.inLane(b.q, "heavy", 1).Locks), 0)
	b.want(len(b.inLane(b.q, "b", 1).Locks), 0)
	b.want(b.waiting(), 2)
	b.done(running[1])
	b.want(len(b.inLane(b.q, "b", 1).Locks), 0)
	b.exec(b.pool, `DELETE FROM penstock.limit_wait WHERE flow = 'heavy'`)
	b.want(len(b.inLane(b.q, "c", 1).Locks), 1)
}

// TestLaneThatWaitsForARateKeepsNoUnits has an entry fit neither its rate nor the units that are free.
func TestLaneThatWaitsForARateKeepsNoUnits(t *testing.T) {
	b := newBed(t, Config{MaxWeight: 8})
	eight := 8
	_, err := Create(b.ctx, b.pool, "other", Config{})
	b.must(err)
	q := b.under("gpu", limitOptions{MaxUnits: &eight}, map[string]int{"work": 1, "other": 1})
	work, other := b.under("rate", limitOptions{Rate: 0.001, Burst: 1}, map[string]int{"work": 1})["work"], q["other"]
	b.must(pushFlow(b.ctx, other, 20, ""))
	b.q = work
	b.pushAll(b.pool, weights(8, 8)...)
	first := b.claim(1)
	b.want(len(first), 1)
	if c := b.inLane(work, "", 1); len(c.Locks) != 0 || c.Wait < time.Minute {
		t.Errorf("%d locks, wait %v", len(c.Locks), c.Wait)
	}
	b.want(b.waiting(), 0)
	b.done(first...)
	b.want(len(b.inLane(other, "", 9).Locks), 8)
}

// TestRepeatedPushIsAnsweredWhateverWasLowered repeats an accepted push under its idempotency key.
func TestRepeatedPushIsAnsweredWhateverWasLowered(t *testing.T) {
	b := weighedBed(t, 8, Config{})
	push := func() (id int64) {
		b.Helper()
		b.must(b.pool.QueryRow(b.ctx, `SELECT penstock.push('work', '1', weight => 8, idempotency_key => 'k')`).Scan(&id))
		return id
	}
	first := push()
	_, err := Alter(b.ctx, b.pool, "work", map[string]any{"max_weight": 4})
	b.must(err)
	b.want(push(), first)
	_, err = Alter(b.ctx, b.pool, "work", map[string]any{"max_weight": 8})
	b.must(err)
	four := 4
	b.must(setLimit(b.ctx, b.pool, "gpu", limitOptions{MaxUnits: &four}))
	b.want(push(), first)
	if _, err := b.pool.Exec(b.ctx, `SELECT penstock.push('work', '1', weight => 8, idempotency_key => 'other')`); err == nil {
		t.Error("a new push of the same weight is accepted")
	}
	b.want(b.count(`SELECT count(*) FROM penstock.idempotency`), 1)
}

// TestDropQueueDropsItsWaits drops a queue of which a lane waits.
func TestDropQueueDropsItsWaits(t *testing.T) {
	b := weighedBed(t, 8, Config{})
	b.pushAll(b.pool, weights(8, 8)...)
	b.want(len(b.claim(1)), 1)
	b.want(len(b.claim(1)), 0)
	b.want(b.waiting(), 1)
	b.exec(b.pool, `SELECT penstock.drop_queue('work', force => true)`)
	b.want(b.waiting(), 0)
}
