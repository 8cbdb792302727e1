package invalidation

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

func flowLanes(flows ...string) (lanes []ClaimLane) {
	for _, f := range flows {
		lanes = append(lanes, ClaimLane{Lane: Lane{Priority: 1, Flow: f}, IgnoreRowLocks: true})
	}
	return lanes
}

// claimLanes claims from lanes in their order.
func (b *bed) claimLanes(limit int, lanes ...ClaimLane) []Claimed {
	b.Helper()
	b.n++
	claimed, err := b.q.ClaimLanes(b.ctx, LanesRequest{Node: here, ClaimID: b.n, Limit: limit, Lanes: lanes})
	if err != nil {
		b.Fatal(err)
	}
	return claimed
}

// pushFlows pushes one solo entry for each flow named.
func (b *bed) pushFlows(flows ...string) []EntryID {
	b.Helper()
	pushes := make([]Push, len(flows))
	for i, f := range flows {
		pushes[i].Flow = f
	}
	return b.pushAll(b.pool, pushes...)
}

func TestWhatOneLaneLeavesGoesToTheNext(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushFlows("c", "a", "b", "b", "a", "d", "d")
	lanes := flowLanes("a", "b", "empty", "c", "d")
	claimed := b.claimLanes(4, lanes...)
	if len(claimed) != 2 || !claimed[0].Drained || claimed[1].Drained {
		t.Fatalf("claimed %+v, want the first two lanes, and to know that the first is empty", claimed)
	}
	b.want(entryIDs(claimed[0].Locks...), []EntryID{ids[1], ids[4]})
	b.want(entryIDs(claimed[1].Locks...), []EntryID{ids[2], ids[3]})
	for _, l := range claimed[1].Locks {
		b.want(l.Lane, lanes[1].Lane)
	}
	lanes[1].From, lanes[1].IgnoreRowLocks = claimed[1].LowWater, false
	claimed = b.claimLanes(100, lanes...)
	b.want(len(claimed), 5)
	b.want(entryIDs(claimed[3].Locks...), []EntryID{ids[0]})
	b.want(entryIDs(claimed[4].Locks...), []EntryID{ids[5], ids[6]})
	for i, c := range claimed {
		if !c.Drained || c.TryLater {
			t.Errorf("lane %d is found %+v, want it empty now", i, c)
		}
	}
}

// Lanes that the limit does not reach stay free for other claimers, and one that is taken holds up no other.
func TestAClaimOfSeveralLanesTakesOnlyThoseItComesTo(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushFlows("a", "a", "b", "c")
	other := b.begin()
	first, err := b.q.WithTx(other).ClaimLanes(b.ctx, LanesRequest{Node: there, ClaimID: 1, Limit: 1, Lanes: flowLanes("a", "b", "c")})
	if err != nil || len(first) != 1 {
		t.Fatalf("claimed %+v (%v), want one lane", first, err)
	}
	claimed := b.claimLanes(100, flowLanes("a", "b", "c")...)
	if !claimed[0].TryLater || len(claimed[0].Locks) > 0 {
		t.Errorf("the lane of another claimer is found %+v", claimed[0])
	}
	b.want(entryIDs(claimed[1].Locks...), []EntryID{ids[2]})
	b.want(entryIDs(claimed[2].Locks...), []EntryID{ids[3]})
}

func TestKeysAmongSeveralLanesAreClaimedNext(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushAll(b.pool, Push{Flow: "a", LockKey: "K"}, Push{Flow: "a"}, Push{Flow: "b"}, Push{Flow: "c", LockKey: "L"})
	claimed := b.claimLanes(100, flowLanes("a", "b", "c")...)
	b.want(entryIDs(claimed[0].Locks...), []EntryID{ids[1]})
	b.want(entryIDs(claimed[1].Locks...), []EntryID{ids[2]})
	if c := claimed[0]; c.Drained || c.Skipped > 0 || c.LowWater > int64(ids[0]) {
		t.Fatalf("the lane is found %+v, want to come back from where it begins", c)
	}
	more := b.pushFlows("a", "d") // beside keys
	claimed = b.claimLanes(100, append(flowLanes("b", "c", "d"), ClaimLane{Lane: Lane{1, "a"}, From: claimed[0].LowWater + 1})...)
	b.want(entryIDs(claimed[1].Locks...), ids[3:])
	b.want(entryIDs(claimed[2].Locks...), more[1:])
	b.want(entryIDs(claimed[3].Locks...), []EntryID{ids[0], more[0]})
	for i, c := range claimed {
		for _, l := range c.Locks {
			b.want(l.Lane.Flow, []string{"b", "c", "d", "a"}[i])
		}
		if !c.Drained || c.Skipped > 0 {
			t.Errorf("lane %d is found %+v, want it empty now", i, c)
		}
	}
}

// Whoever changes an entry holds its ready row for a moment: that row alone is passed by.
func TestARowThatSomebodyHoldsDoesNotStopAClaimOfSeveralLanes(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushFlows("a", "b", "b")
	holder := b.begin()
	b.exec(holder, `SELECT FROM penstock.ready WHERE entry_id = $1 FOR UPDATE`, ids[1])
	claimed := b.claimLanes(100, flowLanes("a", "b")...)
	b.want(entryIDs(claimed[0].Locks...), ids[:1])
	b.want(entryIDs(claimed[1].Locks...), ids[2:])
	b.want([]int{claimed[0].Skipped, claimed[1].Skipped}, []int{0, 1})
	b.commit(holder)
}

// A pusher holds the ready row that it relies on: a claim that ignores row locks in a lane claims the key without it.
func TestEachLaneOfAClaimSaysWhetherRowLocksAreIgnored(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushAll(b.pool, Push{Flow: "a", LockKey: "A"}, Push{Flow: "b", LockKey: "B"}, Push{Flow: "c", LockKey: "C"})
	pusher := b.begin()
	b.pushAll(pusher, Push{Flow: "a", LockKey: "A"}, Push{Flow: "b", LockKey: "B"}, Push{Flow: "c", LockKey: "C"})
	lanes := flowLanes("a", "b", "c")
	lanes[0].IgnoreRowLocks, lanes[1].IgnoreRowLocks = false, false
	b.q.policy.lockFirst(lanes)
	claimed := b.claimLanes(100, lanes...)
	b.want([]int{len(claimed[0].Locks), len(claimed[1].Locks)}, []int{0, 0})
	b.want(entryIDs(claimed[2].Locks...), ids[2:])
	b.want(claimed[2].Skipped, 1) // its ready row
	b.commit(pusher)
}

// A key stands in two lanes if its entries are of two flows: it is claimed once, for the flow that came first.
func TestAKeyThatStandsInTwoLanesIsClaimedOnce(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushAll(b.pool, Push{Flow: "b", LockKey: "K"}, Push{Flow: "a", LockKey: "K"})
	b.q.policy.lockFirst(flowLanes("a", "b"))
	claimed := b.claimLanes(100, flowLanes("a", "b")...)
	b.want(len(claimed[0].Locks), 0)
	b.want(claimed[0].Skipped, 1)
	b.want(entryIDs(claimed[1].Locks...), ids)
	b.settle(doneAll(claimed[1].Locks...)...)
}

func TestLanesOfAThrottledFlowArePassedBy(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushFlows("a", "b")
	b.exec(b.pool, `INSERT INTO penstock.throttle (queue_id, queue_wide, flow, until, reason) VALUES ($1, false, 'a', now() + interval '1 minute', 'test')`, b.q.ID)
	claimed := b.claimLanes(100, flowLanes("a", "b")...)
	if c := claimed[0]; !c.Limited || c.Wait == 0 || c.Drained || len(c.Locks) > 0 {
		t.Errorf("the lane is found %+v, want to hear how long to wait", c)
	}
	b.want(entryIDs(claimed[1].Locks...), ids[1:])
}

// A claim of several lanes whose answer was lost is found whole, each lock in its lane.
func TestReclaimFindsAllLanesOfAClaim(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushFlows("a", "b", "c")
	b.claimLanes(100, flowLanes("c", "a", "b")...) // and suppose that nobody heard
	again, err := locksIn(b.q.Reclaim(b.ctx, here, b.n))
	if err != nil || len(again) != 3 {
		t.Fatalf("found %d locks (%v), want 3", len(again), err)
	}
	for i, l := range again {
		b.want(entryIDs(l), ids[i:i+1])
		b.want(l.Lane, Lane{1, string(rune('a' + i))})
	}
}

// A claim is all or nothing: one that is rolled back, as by the death of its connection, leaves every lane as it was.
func TestAClaimOfSeveralLanesThatDiesLeavesThemAll(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushFlows("a", "b")
	tx := b.begin()
	if c, err := b.q.WithTx(tx).ClaimLanes(b.ctx, LanesRequest{Node: there, ClaimID: 1, Limit: 9, Lanes: flowLanes("a", "b")}); err != nil || len(c) != 2 {
		t.Fatalf("claimed %+v (%v)", c, err)
	}
	b.kill(tx)
	claimed := b.claimLanes(9, flowLanes("a", "b")...)
	b.want(entryIDs(append(claimed[0].Locks, claimed[1].Locks...)...), ids)
}

func TestClaimsOfSeveralLanesAreExclusive(t *testing.T) {
	const claimers, lanes, n = 8, 20, 2000
	b := newBed(t, Config{})
	var pushes []Push
	for i := range n {
		pushes = append(pushes, Push{Flow: fmt.Sprint(i % lanes)})
	}
	b.pushAll(b.pool, pushes...)
	seen := &held{}
	var wg sync.WaitGroup
	for c := range claimers {
		wg.Go(func() {
			for id := int32(1); b.count(`SELECT count(*) FROM penstock.entry_work`) > 0 && !t.Failed(); id++ {
				var all []ClaimLane
				for _, i := range rand.Perm(lanes) {
					all = append(all, flowLanes(fmt.Sprint(i))...)
				}
				b.claimAndFinish(seen, LanesRequest{Node: NodeID(100 + c), ClaimID: id, Limit: 1 + rand.IntN(50), Lanes: all})
			}
		})
	}
	wg.Wait()
	if len(seen.order) != n {
		t.Fatalf("%d entries ran, want %d", len(seen.order), n)
	}
	seen.check(t)
}

func (b *bed) claimAndFinish(seen *held, r LanesRequest) {
	claimed, err := b.q.ClaimLanes(b.ctx, r)
	if err != nil {
		b.Error(err)
	}
	var locks []*Lock
	for _, c := range claimed {
		byPlace := slices.IsSortedFunc(c.Locks, func(a, b *Lock) int { return int(a.position - b.position) })
		if !byPlace {
			b.Errorf("locks of a lane are out of order")
		}
		locks = append(locks, c.Locks...)
	}
	if len(locks) > r.Limit {
		b.Errorf("claimed %d locks, asked for %d", len(locks), r.Limit)
	}
	seen.take(b.T, locks)
	seen.give(locks)
	if ours, err := b.q.Settle(b.ctx, r.Node, doneAll(locks...)); err != nil || len(ours) != len(locks) {
		b.Errorf("settled %d of %d locks: %v", len(ours), len(locks), err)
	}
}

func TestLanesOfAQueueUnderALimitAreClaimedTogether(t *testing.T) {
	b := newBed(t, Config{})
	five := 5
	b.q = b.under("five", limitOptions{MaxUnits: &five}, map[string]int{"work": 1})["work"]
	ids := b.pushFlows("a", "b", "a", "b", "a", "b", "b")
	claimed := b.claimLanes(2, flowLanes("empty", "a", "b")...) // an empty lane counts
	b.want(len(claimed), 2)
	b.want(entryIDs(claimed[1].Locks...), ids[:1])
	claimed = b.claimLanes(100, flowLanes("a", "b")...)
	b.want(entryIDs(claimed[0].Locks...), []EntryID{ids[2], ids[4]})
	b.want(entryIDs(claimed[1].Locks...), []EntryID{ids[1], ids[3]})
	if !claimed[0].Drained || claimed[1].Drained {
		t.Errorf("found %+v, want the first lane empty and something left in the second", claimed)
	}
	if claimed = b.claimLanes(100, flowLanes("b", "a")...); len(claimed) != 1 || !claimed[0].Limited || !claimed[0].QueueWide {
		t.Errorf("found %+v beside a limit that is used up", claimed)
	}
	// A limit for each flow is counted for one flow at a time, where it is near.
	b.must(setLimit(b.ctx, b.pool, "five", limitOptions{MaxUnits: &five, PerFlow: true}))
	if claimed = b.claimLanes(100, flowLanes("b", "a")...); len(claimed) != 1 || len(claimed[0].Locks) != 2 {
		t.Errorf("found %+v, want the two that are left of one flow", claimed)
	}
}

// Only what all flows share says something about the other lanes. Each form of the claim says it.
func TestARefusalSaysWhetherItIsOfTheWholeQueue(t *testing.T) {
	one := 1
	for what, l := range map[string]limitOptions{"units": {MaxUnits: &one}, "rate": {Rate: 1e-6, Burst: 1}} {
		for _, perFlow := range []bool{false, true} {
			b := newBed(t, Config{})
			l.PerFlow = perFlow
			b.q = b.under("one", l, map[string]int{"work": 1})["work"]
			b.pushFlows("a", "a", "a", "b")
			b.claimAs(ClaimRequest{Node: here, Lane: Lane{1, "a"}, Limit: 1})
			for _, careful := range []bool{false, true} {
				if careful {
					b.q.policy.lockFirst(flowLanes("a"))
				}
				c := b.claimAs(ClaimRequest{Node: here, Lane: Lane{1, "a"}, Limit: 9})
				if !c.Limited || c.QueueWide == perFlow || len(c.Locks) > 0 {
					t.Errorf("%s, per flow %v, carefully %v: found %+v", what, perFlow, careful, c)
				}
			}
			claimed := b.claimLanes(9, flowLanes("a", "b")...)
			if c := claimed[0]; !c.Limited || c.QueueWide == perFlow {
				t.Errorf("%s, per flow %v: found %+v among several lanes", what, perFlow, claimed)
			}
		}
	}
}

// A claim waits until it is worth its cost, but no bucket is full by then: what would flow into it is lost.
func TestTheWaitForARateEndsBeforeItsBucketIsFull(t *testing.T) {
	b := newBed(t, Config{})
	for _, c := range []struct{ held, needs, rate, burst, wait float64 }{
		{0, 1, 1000, 1000, 0.05},
		{0, 1, 1000, 10, 0.005},
		{2, 3, 1000, 10, 0.003},
		{0, 1, 1000, 1, 0.001},
		{-9, 1, 1000, 10, 0.014},
		{0, 1, 10, 10, 0.1},
		{3, 1, 10, 10, -0.2},
	} {
		var wait float64
		row := b.pool.QueryRow(b.ctx, `SELECT round(penstock.bucket_wait($1, $2, $3, $4)::numeric, 6)`, c.held, c.needs, c.rate, c.burst)
		b.must(row.Scan(&wait))
		if wait != c.wait {
			t.Errorf("%+v: waits for %v s", c, wait)
		}
	}
}

// covered counts the entries that a claim brought, by flow.
func covered(claimed []Claimed) map[string]int {
	n := map[string]int{}
	for _, c := range claimed {
		for _, l := range c.Locks {
			n[l.Lane.Flow] += len(l.Entries)
		}
	}
	return n
}

func TestLanesOfAQueueUnderARateAreClaimedTogether(t *testing.T) {
	for what, c := range map[string]struct {
		limit limitOptions
		want  map[string]int
	}{
		"of the queue":  {limitOptions{Rate: 1e-6, Burst: 5}, map[string]int{"a": 4, "b": 1}},
		"of each flow":  {limitOptions{Rate: 1e-6, Burst: 3, PerFlow: true}, map[string]int{"a": 3, "b": 3, "c": 1}},
		"of each key":   {limitOptions{Rate: 1e-6, Burst: 2, PerKey: true}, map[string]int{"a": 2 + 2, "b": 2, "c": 1}}, // and what has none
		"many of these": {limitOptions{Rate: 1e6, Burst: 1e6, PerFlow: true}, map[string]int{"a": 5, "b": 4, "c": 1}},
	} {
		b := newBed(t, Config{})
		b.q = b.under("rate", c.limit, map[string]int{"work": 1})["work"]
		b.pushFlows("a", "a", "c")
		for range 4 {
			b.pushAll(b.pool, Push{Flow: "b", LockKey: "B"})
		}
		for range 3 {
			b.pushAll(b.pool, Push{Flow: "a", LockKey: "A"})
		}
		got := map[string]int{}
		var claimed []Claimed
		for range 8 {
			claimed = b.claimLanes(100, flowLanes("a", "empty", "b", "c")...)
			for flow, n := range covered(claimed) {
				got[flow] += n
			}
			for _, l := range claimed {
				b.settle(doneAll(l.Locks...)...)
			}
		}
		b.want(got, c.want)
		if c.limit.PerFlow && c.limit.Burst < 10 {
			if a := claimed[0]; !a.Limited || a.QueueWide || a.Wait < time.Hour || len(claimed) != 4 || !claimed[3].Drained {
				t.Errorf("%s: found %+v, want to hear how long to wait, and the others besides", what, claimed)
			}
		}
	}
}

// Whoever claims at once, and from whatever lanes, a bucket is never overdrawn.
func TestClaimsOfSeveralLanesNeverOverdrawABucket(t *testing.T) {
	const flows, each, burst = 6, 30, 20
	b := newBed(t, Config{QuantumCount: 4})
	b.q = b.under("rate", limitOptions{Rate: 1e-6, Burst: burst, PerFlow: true}, map[string]int{"work": 1})["work"]
	var pushes []Push
	for i := range flows * each {
		pushes = append(pushes, Push{Flow: fmt.Sprint(i % flows), LockKey: []string{"", fmt.Sprint("k", i%flows, i%5)}[i/flows%2]})
	}
	b.pushAll(b.pool, pushes...)
	var mu sync.Mutex
	taken := map[string]int{}
	full := func() bool {
		mu.Lock()
		defer mu.Unlock()
		n := 0
		for _, k := range taken {
			n += k
		}
		return n >= flows*burst
	}
	deadline := time.Now().Add(time.Minute)
	var wg sync.WaitGroup
	for c := range 4 {
		wg.Go(func() {
			for id := int32(1); !full() && time.Now().Before(deadline) && !t.Failed(); id++ {
				var all []ClaimLane
				for _, i := range rand.Perm(flows) {
					all = append(all, flowLanes(fmt.Sprint(i))...)
				}
				claimed, err := b.q.ClaimLanes(b.ctx, LanesRequest{Node: NodeID(100 + c), ClaimID: id, Limit: 1 + rand.IntN(12), Lanes: all})
				if err != nil {
					b.Error(err)
				}
				mu.Lock()
				for flow, n := range covered(claimed) {
					taken[flow] += n
				}
				mu.Unlock()
				for _, l := range claimed {
					if _, err := b.q.Settle(b.ctx, NodeID(100+c), doneAll(l.Locks...)); err != nil {
						b.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	for i := range flows {
		if n := taken[fmt.Sprint(i)]; n != burst {
			t.Errorf("%d entries of flow %d were claimed, want the %d that its bucket held", n, i, burst)
		}
	}
}
