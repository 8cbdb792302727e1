package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/tasknode"
)

// begun is the order in which entries began.
type begun struct {
	mu    sync.Mutex
	names []string
	flows map[string]int
	seen  chan struct{} // one for each
}

func newBegun() *begun { return &begun{flows: map[string]int{}, seen: make(chan struct{}, 1<<20)} }

// note records that an entry has begun, and returns how many flows have had one by then.
func (b *begun) note(r *invalidation.Run) (flows int) {
	b.mu.Lock()
	b.names = append(b.names, r.Entry.Name)
	b.flows[r.Lock.Lane.Flow]++
	flows = len(b.flows)
	b.mu.Unlock()
	b.seen <- struct{}{}
	return flows
}

func (b *begun) await(t testing.TB, n int) {
	t.Helper()
	deadline := time.After(5 * time.Minute)
	for i := range n {
		select {
		case <-b.seen:
		case <-deadline:
			t.Fatalf("%d entries began, want %d", i, n)
		}
	}
}

// served is how many entries of each flow have begun.
func (b *begun) served() map[string]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	flows := map[string]int{}
	for flow, n := range b.flows {
		flows[flow] = n
	}
	return flows
}

func named(flow string, names ...int) []invalidation.Push {
	pushes := make([]invalidation.Push, len(names))
	for i, n := range names {
		pushes[i] = invalidation.Push{Flow: flow, Name: fmt.Sprint(flow, n), Payload: json.RawMessage(`{}`)}
	}
	return pushes
}

func upTo(n int) []int {
	numbers := make([]int, n)
	for i := range numbers {
		numbers[i] = i
	}
	return numbers
}

// A thousand flows that never run dry do not hide the two thousand behind them: a look at the lanes lists a thousand,
// and the next one goes on where it ended.
func TestTimedThreeThousandBusyFlowsAreAllServed(t *testing.T) {
	f := newFleet(t)
	q := f.queue(invalidation.Config{ResultRetention: -1})
	b := newBegun()
	var pushes []invalidation.Push
	for i := range 3000 {
		pushes = append(pushes, named(fmt.Sprintf("flow-%04d", i), upTo(3)...)...)
	}
	f.push(q, pushes...)
	done := make(chan struct{})
	var once sync.Once
	f.start(1, 32, func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
		if b.note(r) == 3000 {
			once.Do(func() { close(done) })
		}
		if flow := r.Lock.Lane.Flow; flow < "flow-1000" {
			if _, err := q.Push(ctx, named(flow, 0)...); err != nil && ctx.Err() == nil {
				t.Errorf("push: %v", err)
			}
		}
		return nil, nil
	})
	began := time.Now()
	select {
	case <-done:
	case <-time.After(90 * time.Second):
	}
	served := b.served()
	t.Logf("%d of 3000 flows served after %.1f s", len(served), time.Since(began).Seconds())
	if len(served) < 3000 {
		t.Errorf("%d of 3000 flows were served", len(served))
	}
}

// charges counts what a node has claimed of each flow.
type charges struct {
	tasknode.Ranker
	mu      sync.Mutex
	claimed map[string]float64 // by flow
	largest map[string]float64 // of one claim
}

func (c *charges) Charge(lane fairness.Candidate, estimate float64) {
	c.mu.Lock()
	flow := lane.Lane.Flow
	c.claimed[flow] += estimate
	c.largest[flow] = max(c.largest[flow], estimate)
	c.mu.Unlock()
	c.Ranker.Charge(lane, estimate)
}

// A saturated high band leaves the low one its guaranteed twentieth of what a node claims, whatever the threads of the node
// do at once, and keeps the rest but for one claim. Entries declare their cost: measured costs, and what has begun at a
// moment, would depend on what else the machine does.
func TestTimedLowBandGetsItsShareOnARealNode(t *testing.T) {
	f := newFleet(t)
	q := f.queue(invalidation.Config{ResultRetention: -1})
	b := newBegun()
	high, low := int16(9), int16(0)
	var pushes []invalidation.Push
	for i := range 12_000 {
		p := invalidation.Push{Flow: "high", Priority: &high, Cost: 1, Payload: json.RawMessage(`{}`)}
		if i%2 == 0 {
			p.Flow, p.Priority = "low", &low
		}
		pushes = append(pushes, p)
	}
	pushed := time.Now()
	f.push(q, pushes...)
	claims := &charges{claimed: map[string]float64{}, largest: map[string]float64{}}
	f.watch = func(r tasknode.Ranker) tasknode.Ranker {
		claims.Ranker = r
		return claims
	}
	f.start(1, 8, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		b.note(r)
		time.Sleep(4 * time.Millisecond)
		return nil, nil
	})
	b.await(t, 4500)
	claims.mu.Lock()
	defer claims.mu.Unlock()
	aged := 1 + time.Since(pushed).Minutes() // the guarantee doubles when the head has waited for a minute
	got, all := claims.claimed["low"], claims.claimed["low"]+claims.claimed["high"]
	t.Logf("low band: %.0f of %.0f, %.1f%%, %.0f of them by one claim; its guarantee grew from 5%% to %.1f%%",
		got, all, 100*got/all, claims.largest["low"], 5*aged)
	if got < 0.95*0.05*all || got > 0.05*aged*all+claims.largest["low"] {
		t.Errorf("the low band got %.1f%%, want 5%% to %.1f%% and one claim", 100*got/all, 5*aged)
	}
}

// Flows whose entries take 2 to 16 ms share two nodes by their weights, in time and not in entries.
func TestTimedFlowsShareRealNodesByWeight(t *testing.T) {
	f := newFleet(t)
	q := f.queue(invalidation.Config{ResultRetention: -1})
	flows := map[string]struct{ weight, ms float64 }{"a": {1, 2}, "b": {1, 16}, "c": {2, 4}, "d": {4, 8}}
	for flow, x := range flows {
		if err := operator.New(f.pool).SetFlowWeight(t.Context(), flow, "", x.weight, invalidation.By{Reason: "test"}); err != nil {
			t.Fatal(err)
		}
		f.push(q, named(flow, upTo(9000)...)...)
	}
	b := newBegun()
	var mu sync.Mutex
	used := map[string]time.Duration{}
	f.start(2, 8, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		flow, start := r.Lock.Lane.Flow, time.Now()
		b.note(r)
		time.Sleep(time.Duration(flows[flow].ms * float64(time.Millisecond)))
		mu.Lock()
		used[flow] += time.Since(start)
		mu.Unlock()
		return nil, nil
	})
	b.await(t, 2000) // the nodes have met and know how long runs take
	mu.Lock()
	before := maps.Clone(used)
	mu.Unlock()
	b.await(t, 10000) // of 36000, and before those of any flow have ended
	var share float64 // what an operator sees, as the nodes told it
	if err := f.pool.QueryRow(t.Context(), `SELECT share FROM penstock.usage_status WHERE flow = 'd'`).Scan(&share); err != nil || share < 0.4 || share > 0.6 {
		t.Errorf("usage shows the flow of weight 4 of 8 with a share of %.2f (%v)", share, err)
	}
	mu.Lock()
	defer mu.Unlock()
	var sum, squares, least, most float64
	least = math.Inf(1)
	for flow, x := range flows {
		v := (used[flow] - before[flow]).Seconds() / x.weight
		sum, squares, least, most = sum+v, squares+v*v, min(least, v), max(most, v)
	}
	gap, jain := (most-least)/(sum/4), sum*sum/squares/4
	t.Logf("largest gap of normalised service %.1f%%, Jain's index %.4f, %v runs", 100*gap, jain, b.served())
	if gap > 0.2 { // by entries instead of time, or without weights, it would be above 100 %
		t.Errorf("largest gap of normalised service is %.1f%%", 100*gap)
	}
}

// In a fifo queue an entry is overtaken by no more than one claim from each other flow.
func TestFifoQueueKeepsTheOrderOfAcceptanceAcrossFlows(t *testing.T) {
	f := newFleet(t)
	q := f.queue(invalidation.Config{Algorithm: "fifo", ResultRetention: -1})
	const n, flows, threads = 3000, 20, 4
	var pushes []invalidation.Push
	for i := range n {
		p := named(fmt.Sprint("flow-", rand.IntN(flows)), i)[0]
		p.Name = fmt.Sprint(i)
		pushes = append(pushes, p)
	}
	f.push(q, pushes...)
	b := newBegun()
	f.start(1, threads, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		b.note(r)
		time.Sleep(2 * time.Millisecond)
		return nil, nil
	})
	b.await(t, n)
	var most, sum int
	for i, name := range b.names {
		at, err := strconv.Atoi(name)
		if err != nil {
			t.Fatal(err)
		}
		overtaken := 0
		for _, before := range b.names[:i] {
			if other, err := strconv.Atoi(before); err == nil && other > at {
				overtaken++
			}
		}
		most, sum = max(most, overtaken), sum+overtaken
	}
	const claim = threads + threads*20/2 // permits, and 20 ms of work beside them
	t.Logf("an entry was overtaken by %d at most, %.1f on average", most, float64(sum)/n)
	if most > (flows-1)*claim {
		t.Errorf("an entry was overtaken by %d, more than one claim of each other flow (%d)", most, (flows-1)*claim)
	}
}

// The algorithm of a queue changes while it works: nothing is lost, nothing runs twice, and each flow keeps its order.
func TestLongQueueTurnsFairAndFifoWhileItWorks(t *testing.T) {
	f := newFleet(t)
	q := f.queue(invalidation.Config{Algorithm: "fifo", ResultRetention: -1})
	const many, few = 3000, 100
	f.push(q, named("many", upTo(many)...)...)
	f.push(q, named("few", upTo(few)...)...)
	b := newBegun()
	var pace atomic.Int64 // of the runs, in milliseconds
	pace.Store(1)
	f.start(1, 1, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		b.note(r)
		time.Sleep(time.Duration(pace.Load()) * time.Millisecond)
		return nil, nil
	})
	b.await(t, 500)
	pace.Store(20) // most of the queue is left when the node hears that it has turned
	// The other thread may be let into the later lane once while the first claims; in turn they would share evenly.
	if n := b.served()["few"]; n > 1+20 {
		t.Errorf("%d entries that were accepted last began among the first 500 of a fifo queue, more than one claim", n)
	}
	if _, err := invalidation.Alter(t.Context(), f.pool, q.Name, map[string]any{"algorithm": "fair"}); err != nil {
		t.Fatal(err)
	}
	// Nodes read the queue again within a heartbeat of 2 s; then both flows share it until the small one is done.
	deadline := time.Now().Add(time.Minute)
	for b.served()["few"] < few/2 && time.Now().Before(deadline) {
		b.await(t, 1)
	}
	if got := b.served(); got["few"] < few/2 || got["many"] == many {
		t.Errorf("after the turn the flows got %v", got)
	}
	pace.Store(1)
	if _, err := invalidation.Alter(t.Context(), f.pool, q.Name, map[string]any{"algorithm": "fifo"}); err != nil {
		t.Fatal(err)
	}
	for total := 0; total < many+few; {
		b.await(t, 1)
		total = b.served()["many"] + b.served()["few"]
	}
	for flow, n := range map[string]int{"many": many, "few": few} {
		var order []string
		for _, name := range b.names {
			if len(name) > len(flow) && name[:len(flow)] == flow {
				order = append(order, name)
			}
		}
		want := make([]string, n)
		for i := range want {
			want[i] = fmt.Sprint(flow, i)
		}
		if !slices.Equal(order, want) {
			t.Errorf("flow %s ran out of order, or not each entry once", flow)
		}
	}
}
