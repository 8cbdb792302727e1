package gateway

import (
	"math"
	"testing"
	"time"
	"unsafe"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// A criticality expects to wait for what goes before it, on the slots that it gets: those that the criticalities above leave, or its
// floor.
func TestExpectedWaitIsThatOfItsCriticality(t *testing.T) {
	t.Parallel()
	policy := DefaultPolicy()
	policy.Floors = ByCriticality{Sheddable: 0.1}
	policy.Total, policy.FlowTotal = 1000, 1000
	now := time.Unix(1_700_000_000, 0)
	fresh := func() *Pool {
		p := NewPool(policy, nil)
		p.SetInstances(now, []InstanceState{{ID: 1, Slots: 10, Usable: true}})
		for n := range int32(10) {
			p.Grant(now, []slot.Held{{Instance: 1, Number: n, Token: int64(n) + 1}})
		}
		p.cost = costModel{calls: 1, ms: 100}
		return p
	}
	wait := func(p *Pool, criticality Criticality) time.Duration {
		r := &Request{Criticality: criticality, Flow: "newcomer"}
		r.flow = p.lines[criticality].flow(r.Flow, 1)
		return p.expectedWait(now, r)
	}
	fill := func(p *Pool, criticality Criticality, n int) {
		for range n {
			if _, refused := p.Arrive(now, &Request{Criticality: criticality, Flow: "many", Weight: 1}); refused != nil {
				t.Fatal(refused)
			}
		}
	}

	idle := fresh()
	if got := wait(idle, Default); got != 10*time.Millisecond {
		t.Errorf("without waiters: got %s, want a tenth of a call on ten slots", got)
	}
	full := fresh()
	full.served.add(now, Critical, 0)
	fill(full, Default, 10+40) // 40 wait, all of one flow
	if got := wait(full, Default); got < 10*time.Millisecond || got > 30*time.Millisecond {
		t.Errorf("beside one flow with 40 requests: got %s, want no more before it than the newcomer has itself", got)
	}
	if got := wait(full, Sheddable); got != 100*time.Millisecond {
		t.Errorf("of the lowest criticality: got %s, want one call on a tenth of ten slots, its floor", got)
	}
	if got := wait(full, Critical); got != 10*time.Millisecond {
		t.Errorf("of the highest criticality: got %s, want no waiter before it", got)
	}
	taken := fresh()
	taken.served.add(now, Critical, 0)
	for range 9 {
		now = now.Add(time.Second)
		taken.served.add(now, Critical, 5_000) // five slots
	}
	if got := wait(taken, Default); got < 19*time.Millisecond || got > 21*time.Millisecond {
		t.Errorf("while the criticality above takes five slots of ten: got %s", got)
	}
}

// The slack follows the ratio that one wait in a hundred exceeds, and forgets it within minutes.
func TestSlackFollowsTheWaitsThatWereLonger(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	s := slack{at: now}
	exceeded := 0
	for n := range 20_000 {
		waited := 100.0
		if n%20 == 0 {
			waited = 300 // one in twenty takes three times as long as estimated
		}
		if n > 5_000 && waited > 100*s.value(now) {
			exceeded++
		}
		s.observe(now, 100, waited)
	}
	if part := float64(exceeded) / 15_000; part > 0.03 || s.value(now) < 2.5 || s.value(now) > 3.5 {
		t.Errorf("%.3f of the waits were longer, the factor is %.2f", part, s.value(now))
	}
	if later := s.value(now.Add(5 * time.Minute)); later > 1.01 {
		t.Errorf("after five minutes without an observation the factor is %.3f", later)
	}
	for range 1000 {
		s.observe(now, 1, math.Inf(1))
	}
	if s.value(now) > 21 {
		t.Errorf("the factor is %.1f", s.value(now))
	}
}

// Requests that wait while the instances are away wait longer than was estimated. That says nothing of waits for slots.
func TestAnOutageOfInstancesTeachesNoSlack(t *testing.T) {
	t.Parallel()
	for _, outage := range []time.Duration{15 * time.Second, 25 * time.Second} { // the waits end after 20 s
		policy := DefaultPolicy()
		may := true
		policy.MayStart = &may
		policy.QueueTTL, policy.ColdTTL = worker.Seconds(20*time.Second), worker.Seconds(20*time.Second)
		x := newTraffic(1, 1, 1, policy)
		x.took = func(*Request) time.Duration { return time.Second }
		p := x.pools[0]
		p.cost, p.durations.n = costModel{calls: 1, ms: 1000}, completionsKnown
		var last *Request
		for range 12 {
			last = &Request{Flow: "a", Criticality: Default}
			x.send(0, last)
		}
		if last.expected < 8000 {
			t.Fatalf("the last request expects %.0f ms, too little to be taken in", last.expected)
		}
		x.run(1500 * time.Millisecond)
		p.SetInstances(x.now, []InstanceState{{ID: 1, Slots: 1}})
		x.run(outage)
		p.SetInstances(x.now, []InstanceState{{ID: 1, Slots: 1, Usable: true}})
		x.run(15 * time.Second)
		if p.waiting > 0 || p.slacks[Default].log > 0 {
			t.Errorf("%d wait; the factor is %.3f after an outage of %s", p.waiting, p.slacks[Default].value(x.now), outage)
		}
	}
}

// Clients that were refused together are told different times, also those of a budget whose period ends in hours.
func TestARetryIsSpread(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ wait, earliest, latest time.Duration }{
		{4 * time.Second, 4 * time.Second, 5 * time.Second},
		{50 * time.Second, 50 * time.Second, time.Minute},
		{8 * time.Hour, 8 * time.Hour, 8*time.Hour + time.Minute},
	} {
		if got := jitter(c.wait, 0); got != c.earliest {
			t.Errorf("%v becomes %v at the earliest, want %v", c.wait, got, c.earliest)
		}
		if got := jitter(c.wait, 1); got != c.latest {
			t.Errorf("%v becomes %v at the latest, want %v", c.wait, got, c.latest)
		}
	}
}

// setBack is a reading of the clock behind which the system's clock was set back: the monotonic one was not.
func setBack(now time.Time, by time.Duration) time.Time {
	const secondBit = 30                                                    // see time.Time: of the first word, of a reading by both clocks
	*(*uint64)(unsafe.Pointer(&now)) -= uint64(by/time.Second) << secondBit //nolint:gosec // as said
	return now
}

// The service of the last ten seconds is that by the monotonic clock: where the system's clock is set back an hour, no
// criticality is taken to have been served for an hour.
func TestAClockThatIsSetBackKeepsNoOldService(t *testing.T) {
	t.Parallel()
	var s service
	now := time.Now()
	for range 20 {
		s.add(now, Default, 1000)
		now = now.Add(time.Second)
	}
	for range 20 {
		s.add(setBack(now, time.Hour), Critical, 1000)
		now = now.Add(time.Second)
	}
	later := setBack(now, time.Hour)
	if before := now.Add(-30 * time.Minute); !later.Before(before.Round(0)) || later.Sub(now) != 0 {
		t.Fatalf("%s is no reading of a clock that was set back an hour from %s", later, now)
	}
	s.advance(later)
	if share := s.share(Default); share > 0 {
		t.Errorf("a criticality that was not served for 20 s has a share of %.2f", share)
	}
	if slots := s.slots(later, Critical); slots > 1.2 {
		t.Errorf("a criticality that is served with a second each second has %.1f slots, want 1", slots)
	}
}
