package fairness

import (
	"math/rand/v2"
	"testing"
)

// The target: 32 nodes that exchange once a second keep flows with skewed costs and
// weights 1 to 4 within 2 % of each other.
func TestUnracedGapIsUnderTwoPercentAt32Nodes(t *testing.T) {
	for seed := range uint64(seeds) {
		flows := tenants(20)
		c := newCluster(seed, 32, 8, 1, flows)
		c.run(30)
		m := c.meter(flows...)
		c.run(300)
		t.Logf("seed %d: %d claims, largest gap %.2f%%, Jain index %.6f", seed, c.claims, 100*m.gap(), m.jain())
		if m.gap() > 0.02 || m.jain() < 0.9999 {
			t.Errorf("seed %d: gap %.2f%%, Jain %.5f; want under 2%% and over 0.9999", seed, 100*m.gap(), m.jain())
		}
		for _, n := range c.nodes {
			for _, f := range n.book.flows {
				if f.lifted() != 0 {
					t.Fatalf("seed %d: %+v always had work and was lifted by %g", seed, f.queue.key, f.lifted())
				}
			}
		}
	}
}

// Nodes that do most of the work and nodes that do none of it count as live all the same.
func TestUnracedGapStaysSmallWithUnevenNodes(t *testing.T) {
	flows := tenants(20)
	c := newCluster(1, 32, 0, 1, flows)
	for i, slots := range []int{64, 32, 8, 1} {
		n := c.nodes[i]
		for range slots {
			c.at(0.1*c.random.Float64(), func() { c.fill(n) })
		}
	}
	c.run(30)
	m := c.meter(flows...)
	c.run(300)
	t.Logf("largest gap %.2f%%, Jain index %.6f", 100*m.gap(), m.jain())
	if m.gap() > 0.03 {
		t.Errorf("gap %.2f%%, want under 3%%", 100*m.gap())
	}
}

// Estimates may be wrong by any factor, differently for each flow: what is booked at the end counts.
func TestUnracedWrongEstimatesAreCorrected(t *testing.T) {
	flows := tenants(12)
	for i, f := range flows {
		f.estimate *= []float64{0.1, 1, 10}[i%3]
	}
	c := newCluster(2, 8, 8, 1, flows)
	c.run(60)
	m := c.meter(flows...)
	c.run(400)
	t.Logf("largest gap %.2f%%, Jain index %.6f", 100*m.gap(), m.jain())
	if m.gap() > 0.05 {
		t.Errorf("gap %.2f%%, want under 5%%", 100*m.gap())
	}
}

// Flows come and go. Every two that had work for the same while got the same for their
// weight, whatever either did before.
func TestUnracedGapStaysSmallUnderChurn(t *testing.T) {
	flows := tenants(16)
	c := newCluster(3, 16, 8, 1, flows)
	worst := 0.0
	for range 12 {
		for _, f := range flows {
			f.active = c.random.IntN(3) > 0
		}
		flows[0].active, flows[1].active = true, true
		c.run(3) // entries of flows that left run out, and all nodes hear of it
		var together []*simFlow
		for _, f := range flows {
			if f.active {
				together = append(together, f)
			}
		}
		m := c.meter(together...)
		c.run(60)
		worst = max(worst, m.gap())
	}
	t.Logf("largest gap over a minute %.2f%%", 100*worst)
	if worst > 0.10 {
		t.Errorf("gap %.2f%% over a minute, want under 10%%", 100*worst)
	}
}

// A flow that comes back is served within two rounds: before any other is served a third
// time for it. That holds across the cluster, not only for one node.
func TestUnracedReturningFlowIsServedWithinTwoRounds(t *testing.T) {
	flows := tenants(20)
	c := newCluster(4, 32, 8, 1, flows)
	worst := 0
	for trial := range 20 {
		back := flows[trial]
		back.active = false
		c.run(2 + float64(trial)/4)
		claims := back.claims
		c.claims, back.active = 0, true
		for back.claims == claims {
			c.run(0.001)
		}
		worst = max(worst, back.last)
		if back.last > 2*len(flows) {
			t.Errorf("flow %d: served at claim %d, want at most %d", trial, back.last, 2*len(flows))
		}
		c.run(3)
	}
	t.Logf("served at claim %d at the latest", worst)
}

// An hour away earns nothing: from its return on a flow gets its share and no more. And it
// costs nothing: a flow that had the cluster to itself is not made to wait for those who come later.
func TestUnracedNeitherCreditNorPunishment(t *testing.T) {
	for _, every := range []float64{0, 1} {
		flows := tenants(2)
		early, late := flows[0], flows[1]
		for _, f := range flows {
			f.Weight, f.cost, f.estimate = 1, skewed(0.5, 0.5), 0.5
		}
		nodes := 8
		if every == 0 {
			nodes = 1
		}
		c := newCluster(5, nodes, 8, every, flows)
		late.active = false
		c.run(600)
		late.active = true
		c.run(2)
		m := c.meter(early, late)
		c.run(60)
		v := m.normalised()
		t.Logf("%d nodes: early %.1f, late %.1f", nodes, v[0], v[1])
		if m.gap() > 0.08 {
			t.Errorf("%d nodes: early got %.1f, late %.1f in the first minute together", nodes, v[0], v[1])
		}
		early.active = false
		c.run(600)
		early.active = true
		c.run(2)
		m = c.meter(early, late)
		c.run(60)
		if m.gap() > 0.08 {
			t.Errorf("%d nodes: %v after the early one was away", nodes, m.normalised())
		}
	}
}

// A node that starts knows nothing of the lifts of the past; it learns them from the exchange.
func TestUnracedNewNodeKeepsToTheSharedOrder(t *testing.T) {
	flows := tenants(4)
	for _, f := range flows {
		f.Weight, f.cost, f.estimate = 1, skewed(0.5, 0.5), 0.5
	}
	c := newCluster(6, 4, 8, 1, flows)
	flows[3].active = false
	c.run(600)
	flows[3].active = true
	c.run(10)
	fresh := &simNode{book: New(Config{}), live: 5, tasks: map[*task]bool{}}
	c.nodes = append(c.nodes, fresh)
	c.exchange(fresh)
	for range 8 {
		c.at(c.now+0.5, func() { c.fill(fresh) })
	}
	before := flows[3].claims
	c.run(30)
	share := float64(flows[3].claims-before) / float64(40*30) * 0.5 * 4
	if share < 0.8 || share > 1.2 {
		t.Errorf("the flow that was lifted got %.2f of its share after a node joined", share)
	}
}

// Without any exchange each node is fair by itself, and so are all together.
func TestUnracedNodesAreFairWithoutAnExchange(t *testing.T) {
	flows := tenants(10)
	c := newCluster(7, 8, 8, 0, flows)
	c.run(30)
	m := c.meter(flows...)
	c.run(300)
	t.Logf("largest gap %.2f%%", 100*m.gap())
	if m.gap() > 0.05 {
		t.Errorf("gap %.2f%%, want under 5%%", 100*m.gap())
	}
}

// A saturated high band leaves the low one its five percent, and takes all the rest.
func TestUnracedLowBandGetsItsShareUnderASaturatedHighBand(t *testing.T) {
	for _, cost := range []float64{0.05, 0.5, 5} {
		high := &simFlow{Lane: Lane{Queue: 1, Priority: 9, Flow: "high"}, active: true, cost: skewed(0.5, 1), estimate: 0.5}
		low := &simFlow{Lane: Lane{Queue: 2, Priority: 0, Flow: "low"}, active: true, cost: skewed(cost, 1), estimate: cost}
		c := newCluster(8, 8, 8, 1, []*simFlow{high, low})
		c.run(60)
		m := c.meter(high, low)
		c.run(500)
		v := m.normalised()
		share := v[1] / (v[0] + v[1])
		t.Logf("low entries of %.2f s: low band got %.2f%%", cost, 100*share)
		if share < 0.049 || share > 0.06 {
			t.Errorf("low entries of %.2f s: low band got %.2f%%, want 5%%", cost, 100*share)
		}
	}
}

// The older the head of a low band, the larger its share, up to the cap.
func TestAgeingRaisesTheShareUpToItsCap(t *testing.T) {
	b := New(Config{})
	high := Lane{Queue: 1, Priority: 9, Flow: "high"}
	low := Lane{Queue: 1, Priority: 0, Flow: "low"}
	for _, test := range []struct{ minutes, share float64 }{{0, 0.05}, {1, 0.10}, {3, 0.20}, {600, 0.20}} {
		low.HeadAge = minutes(test.minutes)
		got := simulateShare(b, high, low)
		if got < test.share-0.01 || got > test.share+0.01 {
			t.Errorf("head %v min old: low band got %.1f%%, want %.0f%%", test.minutes, 100*got, 100*test.share)
		}
	}
}

// Many low bands together leave the highest at least half.
func TestGuaranteesNeverExceedOneHalf(t *testing.T) {
	b := New(Config{MinShare: 0.3})
	var lanes []Lane
	for p := range int16(10) {
		lanes = append(lanes, Lane{Queue: 1, Priority: p, Flow: "f"})
	}
	served := make([]int, len(lanes))
	for range 10_000 {
		i := b.Rank(nil, lanes, 1, at(0))[0]
		served[i]++
		b.Charge(lanes[i], 1, at(0))
		b.Correct(lanes[i], 1, 1, at(0))
	}
	if served[9] < 4900 || served[0] < 500 {
		t.Errorf("served by band %v, want half for the highest and the same for the others", served)
	}
}

// Two queues share by their weights, however many flows each has.
func TestUnracedQueuesShareByWeight(t *testing.T) {
	flows := tenants(12)
	for i, f := range flows {
		f.Weight, f.QueueWeight = 1, 1
		if i >= 10 {
			f.Queue, f.QueueWeight = 2, 3
		}
	}
	c := newCluster(9, 8, 8, 1, flows)
	c.run(60)
	m := c.meter(flows...)
	c.run(400)
	var queues [2]float64
	for i, v := range m.normalised() {
		queues[i/10] += v
	}
	if ratio := queues[1] / queues[0]; ratio < 2.9 || ratio > 3.1 {
		t.Errorf("queues got %v, ratio %.2f, want 3", queues, ratio)
	}
}

func simulateShare(b *Book, high, low Lane) float64 {
	random := rand.New(rand.NewPCG(1, 1))
	served := map[string]float64{}
	lanes := []Lane{high, low}
	for range 5000 {
		l := lanes[b.Rank(nil, lanes, 1, at(0))[0]]
		cost := 2 * random.Float64()
		b.Charge(l, 1, at(0))
		b.Correct(l, 1, cost, at(0))
		served[l.Flow] += cost
	}
	return served["low"] / (served["low"] + served["high"])
}
