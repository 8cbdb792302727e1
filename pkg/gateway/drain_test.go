package gateway

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// Requests that a gateway had accepted before it was to drain get slots: it goes on to lease while they wait. A task
// node that drains leases none.
func TestAGatewayThatDrainsLeasesForRequestsThatWait(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	x.exec(`INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids)
	        VALUES (2, 'task node', 'default', '1 hour', 1, '{}')`)
	pool := x.join(1)
	x.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id)
	        SELECT $1, n, nextval('penstock.token_seq'), 2 FROM generate_series(0, 9) n`, x.instance)
	served := make(chan error, 1)
	go func() { served <- pool.await(t.Context(), &Request{Flow: "f", TTL: 2 * time.Minute}) }()
	x.eventually("the request waits", func() bool { return x.count(missedSlots) == 1 })
	x.exec(`SELECT penstock.drain_node(1, 'test')`)
	x.exec(`SELECT penstock.drain_node(2, 'test')`)
	pool.do(func(_ time.Time, p *Pool) { p.Drain() })
	x.exec(`DELETE FROM penstock.slot`)
	if err := <-served; err != nil {
		t.Errorf("a request that waited when the drain began got no slot: %v", err)
	}
	if n := x.count(`SELECT count(*) FROM penstock.lease_slots('m', 2, 1)`); n != 0 {
		t.Errorf("a task node that drains leased %d slots", n)
	}
}

// A request that was accepted before the drain is tried on another instance as any other one.
func TestASecondAttemptIsServedAfterTheDrainHasBegun(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := NewPool(DefaultPolicy(), &byteBudget{most: 1 << 30})
	p.SetInstances(now, []InstanceState{{ID: 1, Slots: 1, Usable: true}, {ID: 2, Slots: 1, Usable: true}})
	p.Grant(now, []slot.Held{{Instance: 1, Token: 1}, {Instance: 2, Token: 2}})
	first := &Request{Flow: "f"}
	if inFlight, refused := p.Arrive(now, first); !inFlight {
		t.Fatal(refused)
	}
	p.Drain()
	p.End(now, first, CallEnd{Busy: true})
	if inFlight, refused := p.Arrive(now, first.elsewhere()); !inFlight {
		t.Errorf("the second attempt got no slot: %v", refused)
	}
	if _, refused := p.Arrive(now, &Request{Flow: "f"}); refused == nil {
		t.Error("a new request was accepted")
	}
}
