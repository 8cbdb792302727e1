package gateway

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// recent is the prefix cache of an instance: the prompts that it served last.
type recent struct{ prompts []string }

// serve says whether the prompt is in the cache, and puts it in front.
func (c *recent) serve(prompt string, most int) (hit bool) {
	if at := slices.Index(c.prompts, prompt); at >= 0 {
		c.prompts = slices.Delete(c.prompts, at, at+1)
		hit = true
	}
	c.prompts = slices.Insert(c.prompts, 0, prompt)
	c.prompts = c.prompts[:min(len(c.prompts), most)]
	return hit
}

// cacheHits sends 300 prompts again and again through two gateways to instances that keep 100 prompts each, at 60 % of
// what their slots could serve, and returns the part of the calls that found their prompt: with four instances, and after a
// fifth has come.
func cacheHits(key func(r *Request, prompt int)) (four, five float64) {
	x := newTraffic(2, 4, 8, DefaultPolicy())
	x.took = func(*Request) time.Duration { return time.Duration(50+x.rand.IntN(100)) * time.Millisecond }
	caches := map[int32]*recent{1: {}, 2: {}, 3: {}, 4: {}, 5: {}}
	hits, calls := 0, 0
	x.began = func(_ int, r *Request) {
		calls++
		if caches[r.slot.Instance].serve(r.ID, 100) {
			hits++
		}
	}
	x.poisson(0.6*64/0.1, func() {
		n := x.rand.IntN(300)
		r := &Request{ID: fmt.Sprint(n), Flow: fmt.Sprint(n % 7), Criticality: Default}
		key(r, n)
		x.send(x.rand.IntN(2), r)
	})
	x.run(10 * time.Second)
	hits, calls = 0, 0
	x.run(20 * time.Second)
	four = float64(hits) / float64(calls)
	x.setInstances(5, 8)
	hits, calls = 0, 0
	x.run(20 * time.Second)
	return four, float64(hits) / float64(calls)
}

// Two gateways that do not talk send a prompt to the instance that has it in its cache, also after an instance has come.
func TestUnracedPromptsGoWhereTheyAreCached(t *testing.T) {
	t.Parallel()
	var hashes [300][]uint64
	for i := range hashes {
		// All prompts begin alike: one block is a system prompt that tells nothing.
		hashes[i] = prefixHashes([]byte(strings.Repeat("s", prefixBlock) + strings.Repeat(fmt.Sprintf("%04d", i), prefixBlock)))
	}
	for _, c := range []struct {
		name string
		key  func(r *Request, prompt int)
		four float64 // at least
		five float64
	}{
		{"prefix", func(r *Request, n int) { r.Prefix = hashes[n] }, 0.85, 0.9},
		{"session", func(r *Request, n int) { r.Session = hashKey(fmt.Sprint(n)) }, 0.85, 0.9},
		{"neither", func(*Request, int) {}, 0, 0},
	} {
		four, five := cacheHits(c.key)
		t.Logf("%s: %.1f %% of the calls hit, %.1f %% after a fifth instance has come", c.name, 100*four, 100*five)
		if four < c.four || five < c.five {
			t.Errorf("%s: %.3f and %.3f of the calls hit", c.name, four, five)
		}
	}
}

// Requests for a LoRA adapter go to the instances that have it loaded, while those have room.
func TestUnracedAdaptersStayWhereTheyAreLoaded(t *testing.T) {
	t.Parallel()
	share := func(named bool) float64 {
		x := newTraffic(1, 4, 8, DefaultPolicy())
		x.took = func(*Request) time.Duration { return 100 * time.Millisecond }
		loaded := map[string]bool{}
		hits, calls := 0, 0
		x.began = func(_ int, r *Request) {
			at := r.ID + fmt.Sprint(r.slot.Instance)
			calls++
			if loaded[at] {
				hits++
			}
			loaded[at] = true
			if len(loaded) > 16 { // an instance keeps few adapters: the model of a cache that is too small
				clear(loaded)
				loaded[at] = true
			}
		}
		x.poisson(150, func() { // of 320
			adapter := fmt.Sprint("lora-", x.rand.IntN(6))
			r := &Request{ID: adapter, Criticality: Default}
			if named {
				r.Adapter = adapter
			}
			x.send(0, r)
		})
		x.run(time.Minute)
		return float64(hits) / float64(calls)
	}
	with, without := share(true), share(false)
	t.Logf("%.1f %% of the calls find their adapter loaded, %.1f %% without its name", 100*with, 100*without)
	if with < 0.95 || with <= without {
		t.Errorf("%.3f of the calls find their adapter loaded, %.3f without its name", with, without)
	}
}

// jain is Jain's index of fairness: 1 where all have the same.
func jain(got []float64) float64 {
	var sum, squares float64
	for _, g := range got {
		sum += g
		squares += g * g
	}
	return sum * sum / (float64(len(got)) * squares)
}

// Flows share the slots by cost whatever they offer, over several gateways that do not talk.
func TestUnracedFlowsShareTheSlotsOfSeveralGateways(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		gateways, flows int
		greedy          float64 // offers of the first flow over those of the others
		within          float64 // of the mean
	}{
		{1, 10, 100, 0.02},
		{2, 3, 20, 0.02},
		{4, 10, 100, 0.03},
	} {
		t.Run(fmt.Sprintf("%d gateways, %d flows", c.gateways, c.flows), func(t *testing.T) {
			t.Parallel()
			policy := DefaultPolicy()
			policy.QueueTTL = worker.Seconds(5 * time.Minute)
			x := newTraffic(c.gateways, 2, 16/c.gateways, policy)
			got := make([]float64, c.flows)
			var flow func(r *Request) int
			names := map[string]int{}
			for i := range c.flows {
				names[fmt.Sprint("flow-", i)] = i
			}
			flow = func(r *Request) int { return names[r.Flow] }
			// Calls of some flows take longer than those of others: cost is shared, not calls.
			x.took = func(r *Request) time.Duration {
				took := time.Duration(20+10*flow(r)) * time.Millisecond
				return took + time.Duration(x.rand.Int64N(int64(took)))
			}
			counting := false
			x.began = func(_ int, r *Request) {
				if counting {
					got[flow(r)] += 1.5 * float64(20+10*flow(r))
				}
			}
			// Each flow offers 1.5 times its share, the first one much more: up to 4,000 calls a second.
			share := 32 / float64(c.flows)
			for i := range c.flows {
				rate := 1.5 * share / (1.5 * float64(20+10*i) / 1000)
				if i == 0 {
					rate = min(rate*c.greedy, 4_000)
				}
				x.poisson(rate, func() { x.send(x.rand.IntN(c.gateways), &Request{Flow: fmt.Sprint("flow-", i), Criticality: Default}) })
			}
			x.run(5 * time.Second)
			counting = true
			x.run(25 * time.Second)
			mean := 0.0
			for _, g := range got {
				mean += g / float64(c.flows)
			}
			worst := 0.0
			for _, g := range got {
				worst = max(worst, max(g/mean-1, 1-g/mean))
			}
			t.Logf("Jain's index %.5f, the worst flow is %.2f %% from the mean", jain(got), 100*worst)
			if worst > c.within {
				t.Errorf("the worst flow is %.2f %% from the mean: %.0f", 100*worst, got)
			}
		})
	}
}

// At twice the capacity nearly all of it does work that is of use, critical requests are served at once, and refusals
// come at arrival.
func TestUnracedTwiceTheCapacityIsOffered(t *testing.T) {
	t.Parallel()
	policy := DefaultPolicy()
	policy.QueueTTL = worker.Seconds(2 * time.Second)
	x := newTraffic(1, 2, 16, policy)
	x.took = func(*Request) time.Duration { return time.Duration(50+x.rand.IntN(100)) * time.Millisecond }
	const capacity = 32 / 0.1 // calls a second
	var busy time.Duration
	counting := false
	var waits, late []float64
	arrived := map[*Request]time.Time{}
	lost := map[Criticality]int{}
	sent := map[Criticality]int{}
	x.began = func(_ int, r *Request) {
		if counting {
			waits = append(waits, milliseconds(x.now.Sub(arrived[r])))
			busy += 100 * time.Millisecond
		}
		delete(arrived, r)
	}
	x.dropped = func(_ int, r *Request, _ Dropped, after time.Duration) {
		if counting {
			lost[r.Criticality]++
			late = append(late, milliseconds(after))
		}
		delete(arrived, r)
	}
	offer := func(criticality Criticality, rate float64) {
		n := 0
		x.poisson(rate, func() {
			n++
			r := &Request{Criticality: criticality, Flow: fmt.Sprint(criticality, n%20)}
			arrived[r] = x.now
			if counting {
				sent[criticality]++
			}
			x.send(0, r)
		})
	}
	offer(Critical, 0.3*capacity)
	offer(Default, 0.9*capacity)
	offer(Sheddable, 0.8*capacity)
	x.run(20 * time.Second)
	counting = true
	x.run(60 * time.Second)
	goodput := busy.Seconds() / 0.1 / (60 * capacity)
	slices.Sort(waits)
	slices.Sort(late)
	t.Logf("goodput %.2f %% of the capacity, p99 of the waits of the served %.0f ms, refused: critical %d of %d, default %d of %d, "+
		"sheddable %d of %d, p50 and p99 until a refusal %.0f and %.0f ms", 100*goodput, waits[len(waits)*99/100],
		lost[Critical], sent[Critical], lost[Default], sent[Default], lost[Sheddable], sent[Sheddable],
		late[len(late)/2], late[len(late)*99/100])
	if goodput < 0.98 {
		t.Errorf("goodput is %.4f of the capacity", goodput)
	}
	// What is refused is refused at once: nearly none is let wait until the end of its wait.
	if p99 := late[len(late)*99/100]; p99 > 5 {
		t.Errorf("p99 until a refusal is %.0f ms", p99)
	}
	if served := sent[Sheddable] - lost[Sheddable]; float64(served) < 0.9*policy.Floors.Sheddable*60*capacity {
		t.Errorf("%d sheddable requests were served, less than the floor of their criticality", served)
	}
	if lost[Critical] > 0 {
		t.Errorf("%d critical requests were lost at 30 %% of the capacity", lost[Critical])
	}
}

// A criticality whose calls turn out shorter than estimated, after their estimates have left the window, has no debt from
// that: a floor of a fifth gives it at most one dispatch in five, and one of rounding, while a higher criticality waits.
func TestAFloorGivesNoMoreWhereCallsAreShorterThanEstimated(t *testing.T) {
	policy := DefaultPolicy()
	policy.QueueTTL = worker.Seconds(time.Hour)
	policy.Floors = ByCriticality{Default: .2, Sheddable: .05}
	x := newTraffic(1, 1, 10, policy)
	p, now := x.pools[0], x.now
	for range 30 {
		r := &Request{Flow: "d", Criticality: Default}
		if dispatched, _ := p.Arrive(now, r); !dispatched {
			t.Fatal("a request waits beside an idle slot")
		}
		now = now.Add(time.Minute)
		p.End(now, r, CallEnd{Took: time.Minute})
	}
	now = now.Add(time.Minute)
	var inFlight []*Request
	for range 10 {
		r := &Request{Flow: "d", Criticality: Default}
		if dispatched, _ := p.Arrive(now, r); !dispatched {
			t.Fatal("a request waits beside an idle slot")
		}
		inFlight = append(inFlight, r)
	}
	var dispatched [criticalityCount]int
	leave := func(r *Request, d Dropped) {
		if d == DropNone {
			inFlight = append(inFlight, r)
			dispatched[r.Criticality]++
		}
	}
	for range 60 {
		for _, r := range []*Request{{Flow: "c", Criticality: Critical, Leave: leave}, {Flow: "d", Criticality: Default, Leave: leave}} {
			if dispatched, refused := p.Arrive(now, r); dispatched || refused != nil {
				t.Fatal("a request does not wait although no slot is idle")
			}
		}
	}
	for range 5 {
		now = now.Add(11 * time.Second) // not a minute
		ended := inFlight
		inFlight = nil
		for _, r := range ended {
			p.End(now, r, CallEnd{Took: 11 * time.Second})
		}
		for c, sum := range p.served.sums {
			if sum < 0 {
				t.Fatalf("criticality %d was served for %.0f ms", c, sum)
			}
		}
	}
	if n := dispatched[Default]; n > 15 {
		t.Errorf("%d of %d dispatches for a floor of a fifth", n, n+dispatched[Critical])
	}
}

// A request says whether it went before those of a higher criticality because of its floor.
func TestATraceTellsWhichRequestWentFirstByItsFloor(t *testing.T) {
	x := newTraffic(1, 1, 1, DefaultPolicy())
	p, now := x.pools[0], x.now
	running := &Request{Flow: "c", Criticality: Critical}
	critical, sheddable := &Request{Flow: "c", Criticality: Critical}, &Request{Flow: "s", Criticality: Sheddable}
	for _, r := range []*Request{running, critical, sheddable} {
		if _, refused := p.Arrive(now, r); refused != nil {
			t.Fatal(refused)
		}
	}
	for _, next := range []*Request{sheddable, critical} {
		now = now.Add(time.Second)
		p.End(now, running, CallEnd{Took: time.Second})
		if running = next; next.state != stateInFlight || next.trace.Floor != (next == sheddable) {
			t.Errorf("the %s request: state %d, by its floor: %t", next.Criticality, next.state, next.trace.Floor)
		}
	}
}

// While requests of all criticalities wait, two criticalities get their floors and critical requests the rest, however few calls
// begin in ten seconds.
func TestFloorsHoldHoweverLongCallsTake(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		slots int
		call  time.Duration
	}{{64, 2 * time.Second}, {10, time.Minute}, {2, 20 * time.Second}, {1, 5 * time.Second}} {
		policy := DefaultPolicy()
		policy.QueueTTL = worker.Seconds(1000 * time.Hour)
		x := newTraffic(1, 1, c.slots, policy)
		x.took = func(*Request) time.Duration { return c.call/2 + time.Duration(x.rand.Int64N(int64(c.call))) }
		var begun [criticalityCount]float64
		send := func(criticality Criticality) {
			x.send(0, &Request{Flow: criticality.String(), Criticality: criticality})
		}
		x.began = func(_ int, r *Request) {
			begun[r.Criticality]++
			x.after(0, func() { send(r.Criticality) })
		}
		for criticality := range Criticality(criticalityCount) {
			for range 20 {
				send(criticality)
			}
		}
		const calls = 1000
		x.run(30 * time.Second)
		x.run(calls / 5 * c.call / time.Duration(c.slots))
		begun = [criticalityCount]float64{}
		x.run(calls * c.call / time.Duration(c.slots))
		all := begun[Critical] + begun[Default] + begun[Sheddable]
		for criticality, want := range map[Criticality]float64{Critical: 0.75, Default: 0.2, Sheddable: 0.05} {
			if got := begun[criticality] / all; got < want-0.04 || got > want+0.04 {
				t.Errorf("%d slots, calls of %s: %s requests were %.3f of %.0f, want %.2f", c.slots, c.call, criticality, got, all, want)
			}
		}
	}
}
