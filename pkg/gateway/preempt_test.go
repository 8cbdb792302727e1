package gateway

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// Runs are preempted youngest first, at most a quarter of them in a second, none more than twice, none beyond 80 percent of
// its usual time, none of a node that is dead, and none within the share of task nodes.
func TestPreemptionHasBounds(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	x.keepDemand()
	x.exec(`SELECT penstock.register_instance('m', 'gpu-1', 'http://gpu-1', 40, '{}', 'test')`)
	x.exec(`SELECT penstock.register_gateway(1, 'gateway', 'default', interval '1 hour')`)
	x.exec(`INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES
		(7, 'node', 'default', interval '1 hour', 40, '{}'), (8, 'dead', 'default', interval '0', 40, '{}')`)
	x.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id)
		SELECT id, n, n, 7 FROM penstock.instance, generate_series(0, 31) n WHERE model = 'm'`)
	x.exec(`INSERT INTO penstock.slot_demand (model, node_id, missing) VALUES ('m', 1, 30)`)
	// 32 runs: that of the entry n has the token n, and began n tenths of a second ago. The first is of the dead node.
	x.exec(`INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id, entry_count, cost, priority, flow, lock_key)
		SELECT n, CASE n WHEN 1 THEN 8 ELSE 7 END, n, n, now() - n * interval '100 ms', q.id, 1, 1, 1, 5, 'f', '#' || n
		  FROM penstock.queue q, generate_series(1, 32) n WHERE q.model = 'm'`)
	order := func(want int) int {
		x.exec(`UPDATE penstock.slot_demand SET wanted_at = clock_timestamp()`) // of the last seconds, however long the test takes
		return x.count(fmt.Sprintf(`SELECT penstock.preempt_durable('m', 1, %d)`, want))
	}
	ordered := func() string {
		var list string
		err := x.pool.QueryRow(t.Context(), `SELECT coalesce(string_agg(entry_id::text, ' ' ORDER BY entry_id), '') FROM penstock.preemption`).Scan(&list)
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	if n := order(3); n != 3 || ordered() != "2 3 4" {
		t.Errorf("%d runs are preempted, of the entries %s, want the three youngest of the live node", n, ordered())
	}
	x.exec(`UPDATE penstock.preemption SET ordered_at = ordered_at + interval '1 hour'`) // so are the first orders
	if n := order(3); n != 0 {
		t.Errorf("%d more are preempted for requests that the first orders are for", n)
	}
	if n := order(30); n != 5 { // 8 of 32 in a second
		t.Errorf("%d more are preempted in the same second, want 5", n)
	}
	// The first orders are an hour old, and their runs have begun anew. Those of the entries 3 and 4 were preempted twice.
	x.exec(`UPDATE penstock.preemption SET ordered_at = ordered_at - interval '2 hours', times = CASE WHEN entry_id IN (3, 4) THEN 2 ELSE 1 END`)
	x.exec(`UPDATE penstock.lock SET token = token + 1000`)
	if n := order(2); n != 2 {
		t.Errorf("%d runs are preempted, want 2", n)
	}
	if n := x.count(`SELECT count(*) FROM penstock.preemption WHERE ordered_at > clock_timestamp() - interval '1 minute' AND entry_id IN (2, 5)`); n != 2 {
		t.Errorf("the orders are not those for the youngest runs that were preempted once: %s", ordered())
	}
	// Runs usually take 2.5 s: those that began more than 2 s ago go on.
	x.exec(`UPDATE penstock.preemption SET ordered_at = ordered_at - interval '1 hour', times = 2`)
	x.exec(`UPDATE penstock.lock SET claimed_at = clock_timestamp() - last_entry_id * interval '100 ms'`)
	x.exec(`INSERT INTO penstock.usage_hour (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out, runs, run_ms)
		SELECT date_trunc('hour', clock_timestamp()), q.id, 'm', 'f', 20, 50000, 0, 0, 0, 0, 20, 50000 FROM penstock.queue q WHERE q.model = 'm'`)
	x.exec(`DELETE FROM penstock.lock WHERE last_entry_id BETWEEN 10 AND 19`)
	if n := order(8); n != 0 {
		t.Errorf("%d runs are preempted beyond 80 percent of their usual time: %s", n, ordered())
	}
	// Without a request that misses slots task nodes may hold all that they have.
	x.exec(`DELETE FROM penstock.usage_hour`)
	x.exec(`UPDATE penstock.slot_demand SET missing = 0`)
	if n := order(8); n != 0 {
		t.Errorf("%d runs are preempted within the share of task nodes", n)
	}
	x.exec(`UPDATE penstock.slot_demand SET missing = 30`)
	if n := order(3); n != 3 {
		t.Errorf("%d runs are preempted where all bounds allow it, want 3", n)
	}
}

// newShortage is an exchange where node 7 has all eight slots of a model, and gateway 1 lacks as many.
func newShortage(t *testing.T) *exchange {
	t.Helper()
	x := newExchange(t)
	x.keepDemand()
	x.exec(`SELECT penstock.register_instance('m', 'gpu-1', 'http://gpu-1', 8, '{}', 'test')`)
	x.exec(`SELECT penstock.register_gateway(1, 'gateway', 'default', interval '1 hour')`)
	x.exec(`INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES
		(7, 'node', 'default', interval '1 hour', 40, '{}')`)
	x.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id)
		SELECT id, n, n, 7 FROM penstock.instance, generate_series(0, 7) n WHERE model = 'm'`)
	x.exec(`INSERT INTO penstock.slot_demand (model, node_id, missing) VALUES ('m', 1, 8)`)
	return x
}

// A run is ordered to end once, however long it takes to; a group of entries is not.
func TestARunIsPreemptedOnceAndAGroupNever(t *testing.T) {
	t.Parallel()
	x := newShortage(t)
	x.exec(`INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id, entry_count, cost, priority, flow, lock_key)
		SELECT n, 7, n, n, clock_timestamp(), q.id, 1, n, n, 5, 'f', '#' || n FROM penstock.queue q, generate_series(1, 2) n WHERE q.model = 'm'`)
	for i, want := range []int{1, 0} {
		x.exec(`UPDATE penstock.slot_demand SET wanted_at = clock_timestamp()`)
		if n := x.count(`SELECT penstock.preempt_durable('m', 1, 8)`); n != want {
			t.Errorf("order %d: %d runs are preempted, want %d", i+1, n, want)
		}
		x.exec(`UPDATE penstock.preemption SET ordered_at = ordered_at - interval '6 seconds'`) // it no longer counts towards what is asked for
	}
	if n := x.count(`SELECT times FROM penstock.preemption WHERE entry_id = 1`); n != 1 {
		t.Errorf("%d preemptions of one run are counted", n)
	}
}

// Orders, and the node that takes them, do not wait for the disk: a request waits for both.
func TestOrdersOfPreemptionDoNotWaitForTheDisk(t *testing.T) {
	t.Parallel()
	x := newShortage(t)
	x.exec(`INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id, entry_count, cost, priority, flow, lock_key)
		SELECT 1, 7, 1, 1, clock_timestamp(), q.id, 1, 1, 1, 5, 'f', '#1' FROM penstock.queue q WHERE q.model = 'm'`)
	for _, statement := range []string{
		`SELECT penstock.preempt_durable('m', 1, 1)`, `SELECT count(*) FROM penstock.take_preemptions(7)`,
	} {
		tx, err := x.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var n int
		var commit string
		if err := tx.QueryRow(t.Context(), statement).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if err := tx.QueryRow(t.Context(), `SHOW synchronous_commit`).Scan(&commit); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n != 1 || commit != "off" {
			t.Errorf("%s: %d runs, synchronous_commit is %s", statement, n, commit)
		}
	}
}

// A lease is sent a moment before runs are preempted, and none between that moment and the order.
func TestLeaseGoesBeforeThePreemption(t *testing.T) {
	t.Parallel()
	begin := time.Unix(1_700_000_000, 0)
	at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	for _, c := range []struct {
		name                            string
		asked, gap, oldest, due, before int // milliseconds; due 0: none are preempted
		next                            int
	}{
		{"no preemption", 54, 50, 0, 0, -1, 104},
		{"the gap reaches into the moment", 54, 50, 0, 100, -1, 85},
		{"a lease was sent just before", 83, 50, 0, 100, -1, 88},
		{"the gap is over before", 1, 25, 0, 100, -1, 26},
		{"the lease of the moment was sent", 85, 50, 0, 100, -1, 135},
		{"and brought something", 90, 0, 0, 100, -1, 105},
		{"the moment begins with the request", 90, 0, 92, 102, -1, 95},
		{"runs are preempted at once", 90, 0, 96, 96, -1, 95},
		{"runs were preempted just now", 54, 250, 100, 200, 200, 304},
	} {
		p := leasePacing{lastLease: at(c.asked), gap: time.Duration(c.gap) * time.Millisecond, preemptFrom: at(c.before)}
		var due time.Time
		if c.due > 0 {
			due = at(c.due)
		}
		if got := p.next(at(c.oldest), due); !got.Equal(at(c.next)) {
			t.Errorf("%s: the next lease goes at %s, want %d ms", c.name, got.Sub(begin), c.next)
		}
	}
}

// A pool that preempts at once orders so with its first lease, and then no more often than runs can end.
func TestOrdersOfPreemptionHaveAGap(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &bank{}
		g := New(Config{Open: true})
		l := NewLeases(LeasesConfig{every: time.Hour}, g, db, func() invalidation.NodeID { return 1 })
		policy := DefaultPolicy()
		policy.PreemptAfter = 0
		g.SetModels([]ModelState{{
			Name: "m", Protocol: worker.ProtocolOpenAI, Policy: policy, Instances: []InstanceState{{ID: 1, Slots: 4, Usable: true}},
		}})
		ctx, stop := context.WithCancel(t.Context())
		go func() { _ = l.Run(ctx) }()
		go func() { _ = l.pool("m").await(ctx, &Request{Flow: "f", TTL: time.Hour}) }()
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		if n := db.orders.Load(); n != 1 {
			t.Errorf("%d orders within 10 ms, want 1", n)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if n, most := db.orders.Load(), int32(time.Second/preemptGap)+1; n < 2 || n > most {
			t.Errorf("%d orders in a second, want some, %d at most", n, most)
		}
		stop()
		synctest.Wait()
	})
}
