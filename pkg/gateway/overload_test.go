package gateway

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// Overload that has lasted for no longer than its first waits is judged as one that lasts: what cannot be served is
// refused at arrival, and next to nothing waits in vain.
func TestUnracedYoungOverloadIsRefusedAtArrival(t *testing.T) {
	t.Parallel()
	const slots, capacity, ttl = 16, 16 / 0.1, 2 * time.Second // calls a second
	var after []float64                                        // milliseconds until a refusal
	served, inVain := 0, 0
	for seed := range uint64(20) {
		x := newTraffic(1, 1, slots, DefaultPolicy())
		x.rand = rand.New(rand.NewPCG(seed, 1))
		x.took = func(*Request) time.Duration { return time.Duration(50+x.rand.IntN(100)) * time.Millisecond }
		from := x.now.Add(ttl)
		counts := func(r *Request) bool { return !r.arrived.Before(from) }
		x.dropped = func(_ int, r *Request, why Dropped, waited time.Duration) {
			switch {
			case r.Criticality == Critical:
				t.Errorf("a critical request was dropped: %s", why)
			case waited > ttl+5*time.Millisecond:
				t.Errorf("a wait of %s ended after %s", ttl, waited)
			case counts(r):
				after = append(after, milliseconds(waited))
				if why == DropTimeout {
					inVain++
				}
			}
		}
		x.began = func(_ int, r *Request) {
			if counts(r) {
				served++
			}
		}
		for criticality, part := range []float64{Critical: 0.3, Default: 0.9, Sheddable: 0.8} {
			n := 0
			x.poisson(part*capacity, func() {
				n++
				criticality := Criticality(criticality) //nolint:gosec // below criticalityCount
				x.send(0, &Request{Criticality: criticality, Flow: fmt.Sprint(criticality, n%20), TTL: ttl})
			})
		}
		x.run(ttl + 3*time.Second)
	}
	slices.Sort(after)
	p99 := after[len(after)*99/100]
	t.Logf("%d served, %d refused, %d of them behind a wait; p99 until a refusal %.0f ms", served, len(after), inVain, p99)
	if p99 > 5 {
		t.Errorf("p99 until a refusal is %.0f ms", p99)
	}
}

// Where the bytes of other pools, or of critical requests, leave no room, a request is refused and no other is evicted
// for it.
func TestNoRequestIsEvictedForNothing(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	budget := &byteBudget{most: 1000}
	p, other := NewPool(DefaultPolicy(), budget), NewPool(DefaultPolicy(), budget)
	for _, x := range []*Pool{p, other} {
		x.SetInstances(now, []InstanceState{{ID: 1, Slots: 1, Usable: true}})
	}
	evicted := 0
	send := func(p *Pool, criticality Criticality, bytes int) *Rejection {
		_, refused := p.Arrive(now, &Request{
			Flow: criticality.String(), Criticality: criticality, Bytes: bytes, Leave: func(*Request, Dropped) { evicted++ },
		})
		return refused
	}
	for range 50 {
		if refused := send(p, Sheddable, 2); refused != nil {
			t.Fatal(refused)
		}
	}
	if refused := send(other, Default, 800); refused != nil {
		t.Fatal(refused)
	}
	if refused := send(p, Critical, 300); refused == nil || evicted != 0 {
		t.Errorf("got %v, and %d of 50 are evicted", refused, evicted)
	}
	if refused := send(p, Critical, 150); refused != nil || evicted != 25 {
		t.Errorf("got %v, and %d are evicted, want 25: their 50 bytes are enough", refused, evicted)
	}
	if refused := send(p, Default, 51); refused == nil || evicted != 25 {
		t.Errorf("got %v, and %d are evicted: the bytes of a critical request are no room", refused, evicted)
	}
	if b := p.lines[Sheddable].bytes + p.lines[Critical].bytes; b != p.bytes || b != 200 {
		t.Errorf("the criticalities have %d bytes, and the pool %d", b, p.bytes)
	}
}

// Requests of its own criticality go for a newcomer only if they are enough, and if it is served before them.
func TestNoRequestOfTheOwnCriticalityIsEvictedForNothing(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	setUp := func(total int) (p *Pool, send func(flow string, bytes int) *Rejection, evicted *int) {
		policy := DefaultPolicy()
		policy.Total = total
		p, evicted = NewPool(policy, &byteBudget{most: 1000}), new(int)
		p.SetInstances(now, []InstanceState{{ID: 1, Slots: 1, Usable: true}})
		return p, func(flow string, bytes int) *Rejection {
			_, refused := p.Arrive(now, &Request{
				Flow: flow, Criticality: Default, Bytes: bytes, Leave: func(*Request, Dropped) { *evicted++ },
			})
			return refused
		}, evicted
	}

	_, send, evicted := setUp(100)
	for range 10 {
		if refused := send("long", 100); refused != nil {
			t.Fatal(refused)
		}
	}
	if refused := send("new", 950); refused == nil || *evicted != 0 {
		t.Errorf("too large for what may go: got %v, and %d of 10 are evicted", refused, *evicted)
	}
	if refused := send("new", 150); refused != nil || *evicted != 2 {
		t.Errorf("got %v, and %d are evicted, want 2", refused, *evicted)
	}

	p, send, evicted := setUp(4)
	p.Grant(now, []slot.Held{{Instance: 1, Number: 0, Token: 1}})
	if refused := send("debtor", 1); refused != nil || p.inFlight != 1 {
		t.Fatal(refused, p.inFlight)
	}
	debtor := p.lines[Default].flow("debtor", 1)
	debtor.finish += 50_000 // its calls took longer than estimated
	for range 4 {
		if refused := send("long", 1); refused != nil {
			t.Fatal(refused)
		}
	}
	if refused := send("debtor", 1); refused == nil || *evicted != 0 {
		t.Errorf("served behind all that wait: got %v, and %d of 4 are evicted", refused, *evicted)
	}
	if refused := send("new", 1); refused != nil || *evicted != 1 {
		t.Errorf("served before the last that wait: got %v, and %d are evicted, want 1", refused, *evicted)
	}
}
