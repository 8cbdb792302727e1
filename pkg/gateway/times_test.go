package gateway

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// open returns a pool with one instance of one slot, which is held.
func open(policy PoolPolicy) *sharedPool {
	pool := newSharedPool("m", policy, nil, nil, nil)
	pool.do(func(now time.Time, p *Pool) {
		p.SetInstances(now, []InstanceState{{ID: 1, Slots: 1, Usable: true}})
		p.Grant(now, []slot.Held{{Instance: 1, Number: 0, Token: 1}})
	})
	return pool
}

func dropped(err error) Dropped {
	var r *Rejection
	if errors.As(err, &r) {
		return r.Reason
	}
	return DropNone
}

func TestAWaitEndsOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		policy := DefaultPolicy()
		policy.QueueTTL = worker.Seconds(3 * time.Second)
		pool := open(policy)
		if err := pool.await(t.Context(), &Request{}); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			r    Request
			want time.Duration
			why  Dropped
		}{
			{Request{}, 3 * time.Second, DropTimeout},
			{Request{TTL: 700 * time.Millisecond}, 700 * time.Millisecond, DropTimeout},
			{Request{Deadline: time.Now().Add(40 * time.Second), TTL: time.Minute}, 0, DropDeadline},
		} {
			start := time.Now()
			if !c.r.Deadline.IsZero() {
				c.want = c.r.Deadline.Sub(start)
			}
			err := pool.await(t.Context(), &c.r)
			if took := time.Since(start); dropped(err) != c.why || took < c.want || took > c.want+5*time.Millisecond {
				t.Errorf("%v after %s, want %s after %s", err, took, c.why, c.want)
			}
		}
	})
}

func TestASlotIsHandedOverInTheSameMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := open(DefaultPolicy())
		first := &Request{}
		_ = pool.await(t.Context(), first)
		var waited time.Duration
		go func() {
			start := time.Now()
			second := &Request{}
			if err := pool.await(context.Background(), second); err != nil {
				t.Error(err)
			}
			waited = time.Since(start)
			pool.end(second, CallEnd{})
		}()
		time.Sleep(time.Second)
		pool.end(first, CallEnd{Took: time.Second})
		synctest.Wait()
		if waited != time.Second {
			t.Errorf("waited %s", waited)
		}
	})
}

// A cold pool lets requests wait for a start, and gives them their wait anew when an instance has come.
func TestAColdStartDoesNotUseUpTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		policy := DefaultPolicy()
		policy.MayStart, policy.ColdTTL, policy.QueueTTL = new(true), worker.Seconds(time.Minute), worker.Seconds(5*time.Second)
		pool := newSharedPool("m", policy, nil, nil, nil)
		start := time.Now()
		var group sync.WaitGroup
		group.Go(func() {
			if err := pool.await(context.Background(), &Request{}); dropped(err) != DropTimeout || time.Since(start) != 35*time.Second {
				t.Errorf("%v after %s", err, time.Since(start))
			}
		})
		time.Sleep(30 * time.Second)
		if mode := pool.view().Mode; mode != "cold" {
			t.Errorf("mode is %s", mode)
		}
		pool.do(func(now time.Time, p *Pool) { p.SetInstances(now, []InstanceState{{ID: 1, Slots: 1, Usable: true}}) })
		group.Wait() // it holds no slot of the instance
		pool.do(func(now time.Time, p *Pool) { p.SetInstances(now, nil) })
		start = time.Now()
		if err := pool.await(t.Context(), &Request{}); dropped(err) != DropCold || time.Since(start) != time.Minute {
			t.Errorf("%v after %s", err, time.Since(start))
		}
	})
}

func TestACancelFreesItsPlaceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := open(DefaultPolicy())
		_ = pool.await(t.Context(), &Request{})
		ctx, leave := context.WithCancel(t.Context())
		go func() {
			time.Sleep(time.Second)
			leave()
		}()
		if err := pool.await(ctx, &Request{}); dropped(err) != DropCancelled {
			t.Errorf("got %v", err)
		}
		if s := pool.view(); s.Waiting["default"] != 0 || s.InFlight != 1 {
			t.Errorf("got %+v", s)
		}
	})
}

// A process that was stopped for longer than its slots may be trusted uses none of them before it has
// compared them with the database.
func TestSlotsAreNotUsedAfterAStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := open(DefaultPolicy())
		pool.do(func(now time.Time, p *Pool) { p.Trust(now, now.Add(trustMax)) })
		time.Sleep(time.Minute)
		r := &Request{TTL: time.Second}
		if err := pool.await(t.Context(), r); dropped(err) != DropTimeout {
			t.Errorf("got %v", err)
		}
		pool.do(func(now time.Time, p *Pool) { p.Trust(now, now.Add(trustMax)) })
		if err := pool.await(t.Context(), &Request{}); err != nil {
			t.Error(err)
		}
	})
}

// contest serves backlogged flows on some slots, and returns the service of each divided by its weight.
// Calls of flow i take service(i, n) ms; each flow keeps as many requests waiting as offer says.
func contest(seconds int, slots int, weights []float64, offer []int, service func(flow, n int) int) []float64 {
	now := time.Unix(1_700_000_000, 0)
	policy := DefaultPolicy()
	policy.Total, policy.FlowTotal, policy.QueueTTL = 1<<20, 1<<20, worker.Seconds(24*time.Hour)
	p := NewPool(policy, nil)
	p.SetInstances(now, []InstanceState{{ID: 1, Slots: slots, Usable: true}})
	for n := range slots {
		p.Grant(now, []slot.Held{{Instance: 1, Number: int32(n), Token: int64(n) + 1}}) //nolint:gosec // small
	}
	type flight struct {
		r    *Request
		flow int
		took time.Duration
		ends time.Time
	}
	var inFlight []flight
	waiting, sent := make([]int, len(weights)), make([]int, len(weights))
	got := make([]float64, len(weights))
	begin := func(flow int, r *Request) {
		sent[flow]++
		took := time.Duration(service(flow, sent[flow])) * time.Millisecond
		inFlight = append(inFlight, flight{r, flow, took, now.Add(took)})
	}
	fill := func() {
		for i := range weights {
			for waiting[i] < offer[i] {
				r := &Request{Flow: fmt.Sprint(i), Criticality: Default, Weight: weights[i]}
				r.Leave = func(r *Request, _ Dropped) { waiting[i]--; begin(i, r) }
				if on, _ := p.Arrive(now, r); on {
					begin(i, r)
				} else {
					waiting[i]++
				}
			}
		}
	}
	fill()
	for end := now.Add(time.Duration(seconds) * time.Second); now.Before(end); {
		first := 0
		for i := range inFlight {
			if inFlight[i].ends.Before(inFlight[first].ends) {
				first = i
			}
		}
		f := inFlight[first]
		inFlight = append(inFlight[:first], inFlight[first+1:]...)
		now = f.ends
		got[f.flow] += milliseconds(f.took)
		p.End(now, f.r, CallEnd{Took: f.took})
		fill()
	}
	for i := range got {
		got[i] /= weights[i]
	}
	return got
}

func spread(shares []float64) float64 {
	low, high := math.Inf(1), 0.0
	for _, s := range shares {
		low, high = min(low, s), max(high, s)
	}
	return (high - low) / high
}

// One flow offers a hundred times as much as the nine others and gets no more than they.
func TestUnracedFlowsShareByCost(t *testing.T) {
	t.Parallel()
	weights, offer := make([]float64, 10), make([]int, 10)
	for i := range weights {
		weights[i], offer[i] = 1, 10
	}
	offer[0] = 1000
	shares := contest(600, 16, weights, offer, func(flow, n int) int { return 50 + 37*flow + (n*7919)%100 })
	if s := spread(shares); s > 0.02 {
		t.Errorf("shares of equal flows differ by %.1f %%: %.0f", 100*s, shares)
	}
	shares = contest(600, 16, []float64{1, 2, 4}, []int{50, 50, 50}, func(flow, n int) int { return 100 + n%50*(flow+1) })
	if s := spread(shares); s > 0.02 {
		t.Errorf("shares by weight differ by %.1f %%: %.0f", 100*s, shares)
	}
}

// Flows share by weight where a call costs more, for a unit of weight, than what a flow may owe for a wrong estimate.
func TestFlowsShareByCostHoweverMuchACallCosts(t *testing.T) {
	t.Parallel()
	shares := contest(4040, 1, []float64{1, 0.01}, []int{5, 5}, func(int, int) int { return 2000 })
	if s := spread(shares); s > 0.3 {
		t.Errorf("shares by weight differ by %.0f %%: %.0f", 100*s, shares)
	}
	weights, offer := make([]float64, 64), make([]int, 64)
	for i := range weights {
		weights[i], offer[i] = 1, 5
	}
	shares = contest(8*3600, 16, weights, offer, func(flow, _ int) int { return []int{20_000, 180_000}[flow%2] })
	if s := spread(shares); s > 0.3 {
		t.Errorf("shares of equal flows differ by %.0f %%: %.0f", 100*s, shares)
	}
}

// A flow whose call took far longer than estimated falls behind by a minute for each unit of its weight, and no more.
func TestTheDebtOfAFlowIsBounded(t *testing.T) {
	t.Parallel()
	for _, weight := range []float64{1, 4} {
		x := newTraffic(1, 1, 1, DefaultPolicy())
		p := x.pools[0]
		r := &Request{Flow: "f", Criticality: Default, Weight: weight}
		if inFlight, refused := p.Arrive(x.now, r); !inFlight {
			t.Fatal(refused)
		}
		line := p.lines[Default]
		line.inFlight++ // another call keeps the busy period going
		p.End(x.now.Add(time.Hour), r, CallEnd{Took: time.Hour})
		if debt := (line.flows["f"].finish - line.virtual) * weight; debt != debtMax*weight {
			t.Errorf("a flow of weight %g owes %.0f slot-milliseconds, want %.0f", weight, debt, debtMax*weight)
		}
	}
}

// Clients are told to come back later where no instance is there, and at once, to another gateway, where this one drains.
func TestRefusalsSayWhenToComeBack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(p *Pool)
		reason Dropped
		want   time.Duration
	}{
		"no instance": {func(*Pool) {}, DropNoEndpoints, 30 * time.Second},
		"drains":      {func(p *Pool) { p.Drain() }, DropShutdown, time.Second},
	} {
		p := NewPool(DefaultPolicy(), nil)
		c.change(p)
		_, refused := p.Arrive(time.Unix(1_700_000_000, 0), &Request{Criticality: Default})
		if refused == nil || refused.Reason != c.reason || refused.RetryAfter != c.want {
			t.Errorf("%s: got %+v, want %s and %s", name, refused, c.reason, c.want)
		}
	}
}

// Ten thousand requests wait in a thousand flows: the time of each operation, in the mean.
func BenchmarkPoolWithTenThousandWaiting(b *testing.B) {
	now := time.Unix(1_700_000_000, 0)
	policy := DefaultPolicy()
	policy.Total, policy.FlowTotal, policy.QueueTTL = 20_000, 1000, worker.Seconds(24*time.Hour)
	p := NewPool(policy, nil)
	p.SetInstances(now, []InstanceState{{ID: 1, Slots: 100, Usable: true}})
	for n := range 100 {
		p.Grant(now, []slot.Held{{Instance: 1, Number: int32(n), Token: int64(n) + 1}}) //nolint:gosec // small
	}
	var inFlight []*Request
	n := 0
	arrive := func() *Request {
		n++
		r := &Request{Flow: fmt.Sprint("flow-", n*7919%1000), Criticality: Default}
		r.Leave = func(r *Request, _ Dropped) { inFlight = append(inFlight, r) }
		if on, _ := p.Arrive(now, r); on {
			inFlight = append(inFlight, r)
		}
		return r
	}
	for p.waiting < 10_000 {
		arrive()
	}
	b.ResetTimer()
	for b.Loop() {
		now = now.Add(time.Microsecond)
		arrive()
		r := inFlight[0]
		inFlight = inFlight[1:]
		p.End(now, r, CallEnd{Took: 10 * time.Millisecond})
		p.Cancel(now, arrive(), DropCancelled)
	}
}

// A client that leaves in the moment in which its request is dispatched says nothing of the instance.
func TestAClientThatLeavesAtItsDispatchDoesNotSlowTheInstance(t *testing.T) {
	t.Parallel()
	pool := newSharedPool("m", DefaultPolicy(), nil, nil, nil)
	pool.do(func(now time.Time, p *Pool) {
		p.SetInstances(now, []InstanceState{{ID: 1, Slots: 10, Usable: true}})
		p.Grant(now, []slot.Held{{Instance: 1, Number: 0, Token: 1}})
	})
	left := 0
	for range 1000 { // which of the two the waiter sees first is chance
		first := &Request{}
		if err := pool.await(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		ctx, leave := context.WithCancel(t.Context())
		second, done := &Request{}, make(chan error, 1)
		go func() { done <- pool.await(ctx, second) }()
		for waits := false; !waits; {
			pool.do(func(_ time.Time, p *Pool) { waits = p.waiting == 1 })
		}
		pool.do(func(now time.Time, p *Pool) {
			leave()
			p.End(now, first, CallEnd{Took: time.Millisecond})
		})
		if err := <-done; err == nil {
			pool.end(second, CallEnd{Took: time.Millisecond})
		} else {
			left++
		}
		pool.do(func(_ time.Time, p *Pool) {
			if i := p.fleet.find(1); i.limit.limit != 10 || !i.backoff.Until.IsZero() {
				t.Fatalf("the limit is %.1f of 10, and the instance gets no call until %s", i.limit.limit, i.backoff.Until)
			}
		})
		if left == 20 {
			return
		}
	}
	t.Errorf("only %d of 1000 clients left in time", left)
}

// A request that is tried on a second instance has waited for both.
func TestBothWaitsOfARequestCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := open(DefaultPolicy())
		if err := pool.await(t.Context(), &Request{}); err != nil {
			t.Fatal(err)
		}
		s := &serving{gateway: &Gateway{}, route: &route{pool: pool}}
		for _, wait := range []time.Duration{3 * time.Second, 4 * time.Second} {
			s.ticket = &Request{TTL: wait}
			if err := s.wait(t.Context()); dropped(err) != DropTimeout {
				t.Errorf("got %v", err)
			}
		}
		if s.queued != 7*time.Second {
			t.Errorf("the request has waited for %s, want 7s", s.queued)
		}
	})
}
