package slot

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// leaseLocked runs fn while another session has the lock of the leases of the model.
func (r *rack) leaseLocked(fn func(ctx context.Context)) {
	r.Helper()
	r.must(pgx.BeginFunc(r.Context(), r.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(r.Context(), `SELECT pg_advisory_xact_lock(hashtext('penstock.lease'), hashtext('m'))`)
		bounded, cancel := context.WithTimeout(r.Context(), time.Minute)
		defer cancel()
		fn(bounded)
		return err
	}))
}

// While a model is full, the leases of nodes that wait for its slots do not follow one another.
func TestLeasesOfAFullModelWaitForNoLock(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	full, gateway, node := r.gateway(1), r.gateway(2), r.node(3)
	r.query(`SELECT penstock.set_gateway_policy('m', '{"batch_reserved": 0}')`)
	r.lease(full, 4)
	r.leaseLocked(func(ctx context.Context) {
		for _, h := range []*Holder{gateway, node} {
			if got, err := h.Lease(ctx, "m", 2); err != nil || len(got.Slots) > 0 {
				t.Errorf("node %d got %v, %v", h.Node(), got.Slots, err)
			}
		}
	})
	var missing int
	r.query(`SELECT sum(missing) FROM penstock.slot_demand`, &missing)
	if missing != 4 {
		t.Errorf("the nodes miss %d slots, want 2 each", missing)
	}
}

// A task node that meets the lease of another node gets nothing and has no demand by that, but keeps the turn of one
// that it has.
func TestATaskNodeDoesNotWaitForAnotherLease(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	r.lastingDemands()
	r.gateway(1)
	node := r.node(2)
	lease := func(ctx context.Context) {
		t.Helper()
		if got, err := node.Lease(ctx, "m", 1); err != nil || len(got.Slots) > 0 {
			t.Errorf("got %v, %v", got.Slots, err)
		}
	}
	r.leaseLocked(lease)
	var demands int
	r.query(`SELECT count(*) FROM penstock.slot_demand`, &demands)
	if demands != 0 {
		t.Error("it has a demand though slots are free")
	}
	r.query(`INSERT INTO penstock.slot_demand (model, node_id, since, wanted_at)
	         VALUES ('m', 2, clock_timestamp() - interval '9 seconds', clock_timestamp() - interval '2 seconds')`)
	r.leaseLocked(lease)
	var kept bool
	r.query(`SELECT wanted_at - since > interval '8 seconds'
	            AND since < clock_timestamp() - interval '8 seconds' FROM penstock.slot_demand`, &kept)
	if !kept {
		t.Error("its demand lost its turn")
	}
	if got := r.lease(node, 1); len(got.Slots) != 1 {
		t.Errorf("it got %v when no other lease was under way", got.Slots)
	}
}

// Two of four slots are in doubt, of calls of one node, and two are free. No node can use those in doubt: the nodes share
// the others, whoever's the calls were.
func TestSlotsInDoubtAreInNoShare(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	r.lastingDemands()
	one, two := r.node(1), r.node(2)
	leased := r.lease(one, 4).Slots
	r.lease(two, 4)
	r.must(one.Doubt(t.Context(), []Doubt{{Held: leased[0], Reason: "test"}, {Held: leased[1], Reason: "test"}}))
	r.must(one.Return(t.Context(), leased[2:]))
	var held, share int
	r.query(`SELECT coalesce(sum(held), 0), penstock.slot_share('m', 1) FROM penstock.slot_contention`, &held, &share)
	if held != 0 || share != 1 {
		t.Errorf("nodes hold %d slots, and one may hold %d, want 0 and 1", held, share)
	}
	if got := r.lease(one, 4).Slots; len(got) != 1 {
		t.Errorf("the node whose calls are in doubt got %d slots while the other misses some, want 1", len(got))
	}
}

// Almost all slots of a gateway that is gone are in doubt. What is left is less than what is kept for either kind of
// node: it is no use to keep it from both.
func TestReservesLeaveASlotBesideThoseInDoubt(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	r.query(`UPDATE penstock.instance SET slots = 10`)
	gone, gateway, node := r.gateway(1), r.gateway(2), r.node(3)
	r.putInDoubt(gone, r.lease(gone, 9).Slots)
	for _, h := range []*Holder{gateway, node} {
		got := r.lease(h, 1).Slots
		if len(got) != 1 {
			t.Errorf("node %d got %d slots, want the one that is free", h.Node(), len(got))
		}
		r.must(h.Return(t.Context(), got))
	}
}

// An instance that got fewer slots has more in doubt than slots. Those of another are not fewer for that.
func TestSlotsInDoubtBeyondThoseOfTheirInstanceCountOnce(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	gone, node := r.node(1), r.node(2)
	r.putInDoubt(gone, r.lease(gone, 4).Slots)
	r.query(`UPDATE penstock.instance SET slots = 1`)
	r.query(`SELECT penstock.register_instance('m', 'gpu-2', 'http://gpu-2', 3, '{}', 'test')`)
	if got := r.lease(node, 3).Slots; len(got) != 3 {
		t.Errorf("the node got %d slots, want the 3 of the other instance", len(got))
	}
}

func (r *rack) putInDoubt(h *Holder, held []Held) {
	r.Helper()
	doubts := make([]Doubt, len(held))
	for i, s := range held {
		doubts[i] = Doubt{Held: s, Reason: "test"}
	}
	r.must(h.Doubt(r.Context(), doubts))
}

// Shares that are computed once for each kind of node are those of the nodes, as far as these lack something of them.
func TestSharesOfKindsAreThoseOfNodes(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	r.lastingDemands()
	r.query(`SELECT penstock.register_model('peer', '{"protocol": "openai"}', 'test')`)
	for id := range 8 {
		if r.node(invalidation.NodeID(id + 1)); id%2 == 0 {
			r.gateway(invalidation.NodeID(id + 1))
		}
	}
	lacking := 0
	for seed := range uint64(60) {
		random := rand.New(rand.NewPCG(seed, 1))
		tx, err := r.pool.Begin(t.Context())
		r.must(err)
		t.Cleanup(func() { _ = tx.Rollback(context.Background()) }) // a pool that is closed waits for it
		exec := func(sql string, args ...any) {
			t.Helper()
			if _, err := tx.Exec(t.Context(), sql, args...); err != nil {
				t.Fatal(err)
			}
		}
		group := []string{"{}", `{"device_group": "g"}`}[random.IntN(2)]
		for i := range 1 + random.IntN(3) {
			exec(`SELECT penstock.register_instance($1, $2, 'http://gpu', $3, $4, 'test')`,
				[]string{"m", "peer"}[min(i/2, 1)], fmt.Sprint("gpu-", i+1), 1+random.IntN(4), group)
		}
		exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id, leased_at)
		      SELECT i.id, n, nextval('penstock.token_seq'), 1 + (i.id * 3 + n * $1) % 8,
		             clock_timestamp() - $2 * interval '4 seconds'
		        FROM penstock.instance i CROSS JOIN generate_series(0, i.slots - 1) n
		       WHERE (i.id + n) % $3 > 0`, 1+random.IntN(7), random.IntN(3), 1+random.IntN(4))
		for id := range 8 {
			if random.IntN(3) == 0 {
				exec(`INSERT INTO penstock.slot_demand (model, node_id, missing) VALUES ($1, $2, $3)`,
					[]string{"m", "m", "peer"}[random.IntN(3)], invalidation.NodeID(id+1), random.IntN(4))
			}
		}
		var differ, lack int
		r.must(tx.QueryRow(t.Context(), `
SELECT count(*) FILTER (WHERE greatest(h.share - h.held, CASE WHEN h.share > 0 THEN 0 END)
                              IS DISTINCT FROM greatest(o.share - h.held, CASE WHEN o.share >= 0 THEN 0 END)),
       count(*) FILTER (WHERE h.held < h.share)
  FROM penstock.hungry_shares('m') h
 CROSS JOIN LATERAL (SELECT penstock.slot_share('m', h.node_id) AS share) o`).Scan(&differ, &lack))
		if differ > 0 {
			t.Errorf("seed %d: %d nodes have another share than their kind", seed, differ)
		}
		lacking += lack
		r.must(tx.Rollback(t.Context()))
	}
	if lacking < 10 {
		t.Errorf("only %d nodes lacked a part of their share", lacking)
	}
}
