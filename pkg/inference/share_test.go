package inference

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// contended is a model with 8 slots, of which a gateway misses some while task nodes hold those that are not
// kept for online calls. The share of task nodes is then 4: what is kept for neither class, halved.
type contended struct {
	*bed
	gateway invalidation.NodeID
}

const durableShare = 4

func newContended(t *testing.T) *contended {
	t.Helper()
	stops := true
	b := newBed(t, worker.Model{AbortStops: &stops})
	b.instance("gpu-1", nowhere, 8)
	gateway := invalidation.NodeID(rand.Int64())
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.register_gateway($1, 'gateway', 'default', interval '1 minute')`, gateway)
	b.must(err)
	return &contended{b, gateway}
}

// starve makes the gateway lease what is left, and miss more.
func (c *contended) starve() {
	c.Helper()
	if n := len(c.lease(c.gateway, 8)); n != 1 {
		c.Fatalf("the gateway got %d slots, want the one that is kept for online calls", n)
	}
	if n := len(c.lease(c.gateway, 8)); n != 0 {
		c.Fatalf("the gateway got %d slots when all were held", n)
	}
}

// A node hands over the slots whose runs end while a gateway misses some, down to its share and no further.
func TestRunsThatEndLeaveTheNodeItsShareWhileGatewaysMissSlots(t *testing.T) {
	c := newContended(t)
	node := c.node(time.Minute)
	s := NewService(ServiceConfig{Log: quiet, Pool: PoolConfig{IdleMax: time.Hour, RetryInterval: time.Nanosecond}}, c.pool,
		func() invalidation.NodeID { return node })
	c.must(s.Registry.Refresh(c.ctx))
	held := 0
	for n, release := s.Pool.Take(c.queue.Name, 64, 64); n > 0; n, release = s.Pool.Take(c.queue.Name, 64, 64) {
		held += n
		defer release(n)
	}
	var calls []*slotRef
	for range held {
		call, _ := s.Pool.assign(c.model.Name, slotRequest{})
		if call == nil {
			t.Fatalf("%d of %d permits had a slot", len(calls), held)
		}
		calls = append(calls, call)
	}
	if held != 7 {
		t.Fatalf("the node got %d of 8 slots, want all but the one that is kept for online calls", held)
	}
	c.starve()
	c.must(s.Pool.readShares(c.ctx))
	s.Pool.mu.Lock()
	state := s.Pool.stateOf(c.model.Name)
	state.wanted = time.Now().Add(time.Hour) // as a hint does, for longer than the test takes
	s.Pool.mu.Unlock()
	for _, call := range calls {
		call.release()
	}
	if n := s.Pool.Tallies()[c.model.Name].Held; n != durableShare {
		t.Errorf("the node keeps %d slots, want its share of %d", n, durableShare)
	}
	c.await(1+held-durableShare, `SELECT count(*) FROM penstock.slot WHERE node_id = $1`, c.gateway)
}

// Runs are preempted for a gateway down to the share of task nodes and no further, however often it asks.
func TestPreemptionLeavesTaskNodesTheirShare(t *testing.T) {
	c := newContended(t)
	node := c.node(time.Minute)
	held := c.lease(node, 8)
	c.push(empty(len(held))...)
	for i := range int32(len(held)) { //nolint:gosec // 7
		got, err := c.queue.Claim(c.ctx, invalidation.ClaimRequest{
			Node: node, ClaimID: i + 1, Lane: invalidation.Lane{Priority: 1}, Limit: 1, IgnoreRowLocks: true,
		})
		c.must(err)
		if len(got.Locks) != 1 {
			t.Fatalf("claim %d took %d entries", i, len(got.Locks))
		}
	}
	c.starve()
	ordered := 0
	for range 20 {
		ordered += c.count(`SELECT penstock.preempt_durable($1, $2, 8)`, c.model.Name, c.gateway)
		// The node carries the orders out, and a second passes.
		_, err := c.pool.Exec(c.ctx, `UPDATE penstock.preemption SET ordered_at = ordered_at - interval '2 seconds'`)
		c.must(err)
		for range c.count(`SELECT count(*) FROM penstock.take_preemptions($1)`, node) {
			c.giveBack(node, held[0])
			held = held[1:]
		}
	}
	if ordered != 7-durableShare || len(held) != durableShare {
		t.Errorf("%d runs were preempted and %d slots are left to task nodes, want %d and %d", ordered, len(held), 7-durableShare, durableShare)
	}
}
