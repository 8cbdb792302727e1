package inference

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
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
	b.lastingDemands()
	b.instance("gpu-1", nowhere, 8)
	return &contended{b, b.gateway()}
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

// busyNode returns a node's pool with a call on each slot that it can get, while the gateway misses some and has said so.
// giveBack gives the permits of the calls back.
func (c *contended) busyNode(db postgres.DB) (pool *SlotPool, calls []*slotRef, giveBack func()) {
	c.Helper()
	node := c.node(time.Minute)
	s := newService(ServiceConfig{Log: quiet}, patient(func(t *tuning) { t.leaseRetry = time.Nanosecond }), db,
		func() invalidation.NodeID { return node })
	c.must(s.Registry.Refresh(c.ctx))
	held := 0
	n, release := s.Pool.Take(c.queue.Name, 64)
	// A lease that takes too long is given up, and the next question asks again.
	for until := time.Now().Add(time.Minute); n > 0 || held < 7 && time.Now().Before(until); n, _ = s.Pool.Take(c.queue.Name, 64) {
		held += n
	}
	for range held {
		call, _ := s.Pool.assign(c.model.Name, slotRequest{})
		if call == nil {
			c.Fatalf("%d of %d permits had a slot", len(calls), held)
		}
		calls = append(calls, call)
	}
	if held != 7 {
		c.Fatalf("the node got %d of 8 slots, want all but the one that is kept for online calls", held)
	}
	c.starve()
	c.must(s.Pool.readShares(c.ctx))
	s.Pool.mu.Lock()
	state := s.Pool.stateOf(c.model.Name)
	state.wanted = time.Now().Add(time.Hour) // as a hint does, for longer than the test takes
	s.Pool.mu.Unlock()
	return s.Pool, calls, func() { release(held) }
}

// A node hands over the slots whose runs end while a gateway misses some, down to its share and no further.
func TestRunsThatEndLeaveTheNodeItsShareWhileGatewaysMissSlots(t *testing.T) {
	c := newContended(t)
	pool, calls, giveBack := c.busyNode(c.pool)
	defer giveBack()
	for _, call := range calls {
		call.release()
	}
	if n := pool.Tallies()[c.model.Name].Held; n != durableShare {
		t.Errorf("the node keeps %d slots, want its share of %d", n, durableShare)
	}
	c.await(1+len(calls)-durableShare, `SELECT count(*) FROM penstock.slot WHERE node_id = $1`, c.gateway)
}

// callsFunction says whether a statement calls a function of the schema.
func callsFunction(sql, name string) bool { return strings.Contains(sql, "penstock."+name+"(") }

// slowAnswer is a database whose answer to the question which slots are held waits.
type slowAnswer struct {
	postgres.DB
	asked  chan struct{} // holds one: the question has reached the database
	answer chan struct{} // closed: the answer may go on
}

func (s slowAnswer) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := s.DB.Query(ctx, sql, args...)
	if callsFunction(sql, "held_slots") {
		s.asked <- struct{}{}
		<-s.answer
	}
	return rows, err
}

// A comparison with the database that was under way when a slot was let go has it as the node's: the node must not use
// it again, since a gateway gets it right after.
func TestASlotThatLeavesDuringAComparisonIsNotUsedAgain(t *testing.T) {
	for name, idle := range map[string]bool{"its run ends": false, "it was idle": true} {
		t.Run(name, func(t *testing.T) {
			c := newContended(t)
			db := slowAnswer{c.pool, make(chan struct{}, 1), make(chan struct{})}
			pool, calls, giveBack := c.busyNode(db)
			compared := make(chan error, 1)
			go func() { // as Renew does, whose limit of time is for its other statements as well
				if err := pool.talk.lock(c.ctx); err != nil {
					compared <- err
					return
				}
				defer pool.talk.Unlock()
				compared <- pool.verify(c.ctx)
			}()
			select {
			case <-db.asked:
			case err := <-compared:
				t.Fatalf("compared without an answer: %v", err)
			}
			for _, call := range calls {
				call.release()
			}
			giveBack()
			kept := durableShare
			if idle {
				pool.Wanted(c.model.Name)
				kept = 0
			}
			close(db.answer)
			c.must(<-compared)
			if n := pool.Tallies()[c.model.Name].Held; n != kept {
				t.Errorf("the node has %d slots after the comparison, want the %d that it kept", n, kept)
			}
			c.await(kept, `SELECT count(*) FROM penstock.slot s JOIN penstock.node n ON n.id = s.node_id WHERE n.kind = 'task'`)
		})
	}
}

// lateHandOver is a database that carries out each statement that lets slots go when its caller has given up.
type lateHandOver struct {
	postgres.DB

	mu   sync.Mutex // the ends of calls hand over in goroutines of their own
	late []func() error
}

func (d *lateHandOver) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if !callsFunction(sql, "hand_over_slots") && !strings.Contains(sql, "DELETE FROM penstock.slot") {
		return d.DB.Exec(ctx, sql, args...)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.late = append(d.late, func() error {
		_, err := d.DB.Exec(context.WithoutCancel(ctx), sql, args...)
		return err
	})
	return pgconn.CommandTag{}, context.DeadlineExceeded
}

// carryOut carries out the statements that have come so far.
func (d *lateHandOver) carryOut() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, statement := range d.late {
		if err := statement(); err != nil {
			return err
		}
	}
	return nil
}

// A statement that lets slots go and has no answer may be carried out at any later time: the node does not use them again.
func TestSlotsAreNotUsedBehindAHandOverWithoutAnAnswer(t *testing.T) {
	for name, releaseSlot := range map[string]func(c *contended, pool *SlotPool){
		"hand over": func(c *contended, pool *SlotPool) {
			pool.mu.Lock()
			pool.stateOf(c.model.Name).ledger.sendIdleAway()
			pool.mu.Unlock()
			pool.sendGoing(c.model.Name)
		},
		"give back": func(c *contended, pool *SlotPool) {
			c.must(pool.talk.lock(c.ctx))
			defer pool.talk.Unlock()
			if pool.returnSurplus(c.ctx, 0) == nil {
				t.Error("a give-back without an answer is no error")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newContended(t)
			db := &lateHandOver{DB: c.pool}
			pool, calls, giveBack := c.busyNode(db)
			for _, call := range calls {
				call.release()
			}
			giveBack()
			releaseSlot(c, pool)
			c.must(pool.verify(c.ctx))
			held := pool.Tallies()[c.model.Name].Held
			c.must(db.carryOut())
			if n := c.count(`SELECT count(*) FROM penstock.slot s JOIN penstock.node n ON n.id = s.node_id WHERE n.kind = 'task'`); held > n {
				t.Errorf("the node uses %d slots, and holds %d", held, n)
			}
		})
	}
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
	// A run that may not be repeated would end as a failure.
	setMode := func(mode string) {
		_, err := c.pool.Exec(c.ctx, `UPDATE penstock.model SET override = jsonb_build_object('on_unknown', $2::text) WHERE name = $1`,
			c.model.Name, mode)
		c.must(err)
	}
	setMode("at_most_once")
	if n := c.count(`SELECT penstock.preempt_durable($1, $2, 8)`, c.model.Name, c.gateway); n != 0 {
		t.Errorf("%d runs of a model that is called at most once were preempted", n)
	}
	setMode("at_least_once")
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

// Whether a node is to give slots away it learns from its share. The slot of a run that was preempted goes in any case,
// also before the share is known.
func TestSlotOfAPreemptedRunGoesToTheGateway(t *testing.T) {
	c := newContended(t)
	pool, calls, giveBack := c.busyNode(c.pool)
	defer giveBack()
	pool.mu.Lock()
	state := pool.stateOf(c.model.Name)
	state.ledger.share, state.wanted = -1, time.Time{}
	pool.mu.Unlock()
	calls[0].cede()
	c.await(2, `SELECT count(*) FROM penstock.slot WHERE node_id = $1`, c.gateway)
	calls[1].release()
	if n := pool.Tallies()[c.model.Name].Held; n != len(calls)-1 {
		t.Errorf("the node holds %d slots, want all but the one of the preempted run", n)
	}
}

// The one call that may show whether an instance is well again is not made, as where entries cannot be joined to one:
// another one shows it. The end of a call that began before the quarantine does not let a second one through beside it.
func TestAdmissionOfAHalfOpenInstanceIsGivenBackWithItsSlot(t *testing.T) {
	c := newContended(t)
	pool, calls, giveBack := c.busyNode(c.pool)
	defer giveBack()
	pool.mu.Lock()
	b := pool.breakerOf(c.model.Name)
	state := pool.stateOf(c.model.Name)
	state.ledger.share, state.wanted = -1, time.Time{} // slots that come free stay here
	pool.mu.Unlock()
	probing := func() bool {
		pool.mu.Lock()
		defer pool.mu.Unlock()
		return b.instances["gpu-1"].probing
	}
	for _, end := range []func(*slotRef){(*slotRef).release, func(h *slotRef) { h.doubt(1, 1, "test") }} {
		calls[0].release()
		pool.mu.Lock()
		b.Condemn(time.Now().Add(-time.Hour), "gpu-1", "test")
		pool.mu.Unlock()
		probe, _ := pool.assign(c.model.Name, slotRequest{})
		if probe == nil || !probing() {
			t.Fatal("no call may show whether the instance is well")
		}
		end(calls[1])
		calls = calls[2:]
		if !probing() {
			t.Error("the end of another call lets a second one through")
		}
		end(probe)
		if probing() {
			t.Error("the instance is shut for ever")
		}
	}
}

// recorder is a database that notes the questions about shares and orders.
type recorder struct {
	postgres.DB
	asked chan string
	hold  chan struct{} // closed, or nil: the shares are answered
}

func (r recorder) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if callsFunction(sql, "slot_share") || callsFunction(sql, "take_preemptions") {
		r.asked <- sql
	}
	if r.hold != nil && callsFunction(sql, "slot_share") {
		<-r.hold
	}
	return r.DB.Query(ctx, sql, args...)
}

// Requests wait for the orders of preemption: after a hint they are asked for first, and hints that come meanwhile ask
// once more together.
func TestHintsTakeTheOrdersOfPreemptionFirst(t *testing.T) {
	c := newContended(t)
	db := recorder{DB: c.pool, asked: make(chan string, 100)}
	pool, _, giveBack := c.busyNode(db)
	defer giveBack()
	for len(db.asked) > 0 {
		<-db.asked
	}
	c.must(pool.talk.lock(c.ctx)) // nothing is handed over, and no comparison asks
	defer pool.talk.Unlock()
	for range 50 {
		pool.Wanted(c.model.Name)
	}
	var asked []string
	for len(asked) == 0 || !callsFunction(asked[len(asked)-1], "slot_share") {
		select {
		case sql := <-db.asked:
			asked = append(asked, sql)
		case <-time.After(time.Minute):
			t.Fatal("the shares are not read")
		}
	}
	if !callsFunction(asked[0], "take_preemptions") {
		t.Errorf("asked first: %s", asked[0])
	}
	if n := len(asked) + len(db.asked); n >= 50 {
		t.Errorf("%d questions after 50 hints at once", n)
	}
}

// A database that is slow has one reading of shares of a node at a time, and one more for all hints that came meanwhile.
func TestSharesAreReadOneAtATime(t *testing.T) {
	c := newContended(t)
	db := recorder{c.pool, make(chan string, 100), make(chan struct{})}
	answer := sync.OnceFunc(func() { close(db.hold) })
	defer answer()
	node := c.node(time.Minute)
	pool := newService(ServiceConfig{Log: quiet}, patient(), db, func() invalidation.NodeID { return node }).Pool
	over := make(chan struct{}, 100)
	follow := func() { pool.followHints(); over <- struct{}{} }
	readings := 0
	next := func() (returned bool) {
		select {
		case <-over:
			return true
		case sql := <-db.asked:
			if callsFunction(sql, "slot_share") {
				readings++
			}
		case <-time.After(time.Minute):
			t.Fatal("neither are the shares read nor is a hint over")
		}
		return false
	}
	go follow()
	for readings == 0 {
		next()
	}
	const more = 10
	for range more {
		go follow()
	}
	for returned := 0; returned < more-1 && readings == 1; {
		if next() {
			returned++
		}
	}
	if readings != 1 {
		t.Error("the shares are read beside a reading of them")
	}
	answer()
	for returned := 0; returned < 2; {
		if next() {
			returned++
		}
	}
	for len(db.asked) > 0 { // among them questions for orders
		next()
	}
	if readings != 2 {
		t.Errorf("the shares were read %d times, want once more after the first reading", readings)
	}
	ended, end := context.WithCancel(c.ctx)
	end()
	pool.sharesTook = 0
	if err := pool.readShares(ended); err == nil || pool.sharesTook == 0 {
		t.Errorf("a reading that failed (%v) took %s", err, pool.sharesTook)
	}
}
