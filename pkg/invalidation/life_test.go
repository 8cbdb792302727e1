package invalidation_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	. "github.com/penstock/penstock/pkg/invalidation"
)

// This is the whole life of entries, told by a bakery. Orders are entries; what belongs to one customer is one group.
type order struct {
	Customer string `json:"customer"`
	Bread    string `json:"bread"`
}

var orders = Definition[order]{Name: "orders", Config: Config{
	Grouping: "customer",
	Retry:    RetryPolicy{MaxAttempts: 2, Base: Seconds(time.Minute)},
}}

func TestTheWholeLife(t *testing.T) {
	s := open(t)

	// The queue comes into being by its definition, and a second program that says the same finds it there.
	s.must(Sync(s.ctx, s.db, orders))
	s.must(Sync(s.ctx, s.db, orders))
	q, err := orders.Open(s.ctx, s.db)
	s.must(err)
	s.q = q

	// An order exists if the transaction that brought it commits, and only then.
	s.inTx(false, func(tx pgx.Tx) { s.push(tx, "eve", "rye") })
	var ann EntryID
	s.inTx(true, func(tx pgx.Tx) { ann = s.push(tx, "ann", "rye") })
	s.state("pending", ann)

	// A client that did not hear the answer asks again with the same key, and gets the same order.
	once := Push{IdempotencyKey: "web-4711"}
	bob := s.pushWith(order{"bob", "spelt"}, once)
	again := s.pushWith(order{"bob", "spelt"}, once)
	s.equal(again, Pushed{ID: bob.ID, Verdict: Replayed})

	// The first node comes to work. It takes what stands first; the key is its own from then on.
	oven := s.node("oven")
	lock := oven.claim()
	s.equal(lock.Key, "ann")
	s.state("computing", ann)

	// Ann orders more while her first bread is in the oven: it waits behind, and no other node may touch it.
	more := s.push(s.db, "ann", "wheat")
	stove := s.node("stove")
	second := stove.claim()
	s.equal(second.Key, "bob")
	s.nothingToClaim()
	s.because(more, "key_held")

	// Bob's bread burns. It is tried again in a minute; the error is remembered, the baker's notes too.
	run := stove.run(second)
	s.must(run.Progress(s.ctx, 0.5, "half done"))
	s.must(run.Save(s.ctx, map[string]int{"loaves": 3}))
	stove.end(run, nil, errors.New("burnt at 260 degrees"))
	s.state("initial", bob.ID)
	s.because(bob.ID, "not_due")

	// Ann's is done. Her next order comes up by itself.
	oven.end(oven.run(lock), json.RawMessage(`{"weight": 1000}`), nil)
	ended, err := Outcome(s.ctx, s.db, ann)
	s.must(err)
	s.equal([]any{ended.Outcome, string(ended.Result), ended.Attempt}, []any{"done", `{"weight": 1000}`, 0})
	lock = oven.claim()
	s.equal(lock.Entries[0].ID, more)

	// The oven loses its power with Ann's bread in it. Its lease lapses, the leader frees its locks: the order stands
	// where it stood. A crash is counted, an attempt is not.
	oven.die()
	s.equal(s.recover(), 1)
	s.state("pending", more)
	lock = stove.claim()
	s.equal([]int{lock.Entries[0].Attempt, lock.Entries[0].Crashes}, []int{0, 1})

	// The oven comes back and says that the bread is done. Nobody believes it: its token is dead.
	s.equal(oven.endLate(more), false)
	s.state("computing", more)

	// The stove hands the order back, for it is to be cleaned. That costs nothing either.
	stove.end(stove.run(lock), nil, NoCapacity(0, errors.New("cleaning")))
	lock = stove.claim()
	s.equal(lock.Entries[0].Attempt, 0)

	// It ends together with what it did, in one transaction.
	s.inTx(true, func(tx pgx.Tx) {
		_, err := tx.Exec(s.ctx, `CREATE TABLE public.shelf AS SELECT 'wheat' AS bread`)
		s.must(err)
		s.must(stove.run(lock).FinishTx(s.ctx, tx, nil))
	})
	stove.end(stove.run(lock), nil, nil)
	s.outcome("done", more)

	// The minute is over, the leader puts Bob's order back into line. The next attempt goes on from the notes, fails
	// for good, and is dead-lettered with all its history.
	s.due(bob.ID)
	lock = stove.claim()
	run = stove.run(lock)
	var notes struct{ Loaves int }
	found, err := run.Load(s.ctx, &notes)
	s.must(err)
	s.equal([]any{found, notes.Loaves}, []any{true, 3})
	stove.end(run, nil, errors.New("burnt at 280 degrees"))
	s.outcome("failed", bob.ID)

	// Somebody mends the thermostat and asks for another try. It is the same order still.
	s.operate("retry_failure", bob.ID, "thermostat mended", "ann")
	s.state("pending", bob.ID)
	lock = stove.claim()
	stove.end(stove.run(lock), nil, nil)
	s.outcome("done", bob.ID)

	// An order for tomorrow waits; one that nobody wants any more is cancelled; one that comes too late expires.
	tomorrow := s.pushWith(order{"cleo", "rye"}, Push{DueAt: time.Now().Add(24 * time.Hour)})
	s.state("initial", tomorrow.ID)
	s.operate("cancel_entry", tomorrow.ID, "on a diet", "cleo")
	s.outcome("cancelled", tomorrow.ID)
	late := s.pushWith(order{"dora", "rye"}, Push{StartBy: time.Now().Add(-time.Second)})
	n, err := s.q.Expire(s.ctx, 10)
	s.must(err)
	s.equal(n, 1)
	s.outcome("expired", late.ID)

	// An order can be taken out of line and put back.
	eve := s.push(s.db, "eve", "rye")
	s.operate("disable_entry", eve, "who is Eve?", "ann")
	s.nothingToClaim()
	s.because(eve, "disabled")
	s.operate("enable_entry", eve, "a friend", "ann")

	// The mill asks for quiet: nobody claims for a while, on any node, and nothing is lost by it.
	lock = stove.claim()
	stove.end(stove.run(lock), nil, ThrottleQueue(time.Minute, errors.New("429 from the mill")))
	s.nothingToClaim()
	s.because(eve, "throttled")
	s.equal(s.count(`SELECT penstock.lift_throttle('orders')::int`), 1)
	lock = stove.claim()
	stove.end(stove.run(lock), nil, nil)

	// At the end of the day every accepted order has exactly one outcome, and the tables are empty.
	s.equal(s.count(`SELECT count(*) FROM penstock.result`), 6)
	s.equal(s.count(`SELECT (SELECT count(*) FROM penstock.entry) + (SELECT count(*) FROM penstock.ready) + (SELECT count(*) FROM penstock.lock)`), 0)
	s.must(Drop(s.ctx, s.db, "orders", false, By{}))
}

// story is what the tale is told with.
type story struct {
	*testing.T
	ctx context.Context
	db  *pgxpool.Pool
	q   *Queue
}

func open(t *testing.T) *story {
	t.Helper()
	db, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	return &story{T: t, ctx: t.Context(), db: db}
}

func (s *story) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *story) equal(got, want any) {
	s.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		s.Fatalf("got %v, want %v", got, want)
	}
}

func (s *story) count(sql string) (n int) {
	s.Helper()
	s.must(s.db.QueryRow(s.ctx, sql).Scan(&n))
	return n
}

func (s *story) inTx(commit bool, fn func(pgx.Tx)) {
	s.Helper()
	err := postgres.InTx(s.ctx, s.db, func(tx pgx.Tx) error {
		fn(tx)
		if !commit {
			return errors.New("thought better of it")
		}
		return nil
	})
	if commit {
		s.must(err)
	}
}

func (s *story) push(db postgres.DB, customer, bread string) EntryID {
	s.Helper()
	pushed, err := orders.Push(s.ctx, db, order{customer, bread})
	s.must(err)
	return pushed[0].ID
}

// state wants an entry in a state, and everything else as it must be.
func (s *story) pushWith(o order, options Push) Pushed {
	s.Helper()
	push, err := orders.NewPush(o, options)
	s.must(err)
	pushed, err := s.q.Push(s.ctx, push)
	s.must(err)
	return pushed[0]
}

func (s *story) state(want string, id EntryID) {
	s.Helper()
	e := s.explain(id)
	s.equal(e.State, want)
	s.equal(s.count(`SELECT count(*) FROM penstock.check_invariants()`), 0)
}

func (s *story) outcome(want string, id EntryID) {
	s.Helper()
	e, err := Outcome(s.ctx, s.db, id)
	s.must(err)
	s.equal(e.Outcome, want)
	s.state(want, id)
}

// because wants a reason among those that keep an entry from running.
func (s *story) because(id EntryID, code string) {
	s.Helper()
	e := s.explain(id)
	for _, r := range e.Reasons {
		if r.Code == code {
			return
		}
	}
	s.Fatalf("entry %d does not run because of %+v, want %s", id, e.Reasons, code)
}

func (s *story) nothingToClaim() {
	s.Helper()
	c, err := s.q.Claim(s.ctx, ClaimRequest{Node: 1, ClaimID: 1, Lane: Lane{Priority: 1}, Limit: 10})
	s.must(err)
	s.equal(len(c.Locks), 0)
}

// due lets the time pass until an entry is due, and the leader notice.
func (s *story) due(id EntryID) {
	s.Helper()
	_, err := s.db.Exec(s.ctx, `UPDATE penstock.entry SET due_at = clock_timestamp() WHERE id = $1`, id)
	s.must(err)
	n, err := s.q.Promote(s.ctx, 10)
	s.must(err)
	s.equal(n, 1)
}

// recover is what the leader does for nodes that fell silent.
func (s *story) recover() int {
	s.Helper()
	held, err := HeldLocks(s.ctx, s.db)
	s.must(err)
	ran := make([]LockRef, len(held))
	for i, l := range held {
		ran[i] = l.LockRef
	}
	r, err := s.q.Recover(s.ctx, ran, nil, true)
	s.must(err)
	return len(r.Freed)
}

// node is a task node without threads: the test is its thread.
type node struct {
	*story
	id     NodeID
	claims int32
	held   *Lock
}

func (s *story) node(name string) *node {
	s.Helper()
	n := &node{story: s, id: NodeID(len(name)*1000 + int(name[0]))}
	s.must(Register(s.ctx, s.db, Node{ID: n.id, Name: name, Application: "default", Lease: 10 * time.Second, Threads: 1, Queues: []int32{s.q.ID}}))
	return n
}

func (n *node) claim() *Lock {
	n.Helper()
	n.claims++
	c, err := n.q.Claim(n.ctx, ClaimRequest{Node: n.id, ClaimID: n.claims, Lane: Lane{Priority: 1}, Limit: 1})
	n.must(err)
	if len(c.Locks) != 1 {
		n.Fatalf("claimed %d locks, want one", len(c.Locks))
	}
	n.held = c.Locks[0]
	return n.held
}

func (n *node) run(l *Lock) *Run {
	return &Run{Queue: n.q, Entry: l.Entries[0], Lock: l, Node: n.id}
}

// end records what the handler answered.
func (n *node) end(r *Run, result json.RawMessage, err error) {
	n.Helper()
	ending := Judge(r, result, err, time.Second, 0)
	ending.Last = true
	ours, err := n.q.Settle(n.ctx, n.id, []Ending{ending})
	n.must(err)
	n.equal(len(ours), 1)
}

// die stops the heartbeat: in a moment the lease is over.
func (n *node) die() {
	n.Helper()
	_, err := n.db.Exec(n.ctx, `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '1 minute' WHERE id = $1`, n.id)
	n.must(err)
}

// endLate says whether anybody still listens to the node.
func (n *node) endLate(id EntryID) bool {
	n.Helper()
	ending := Done(n.held, id, nil, time.Second)
	ending.Last = true
	ours, err := n.q.Settle(n.ctx, n.id, []Ending{ending})
	n.must(err)
	return len(ours) > 0
}

// operate runs one of the functions that operators have in psql.
func (s *story) operate(verb string, id EntryID, reason, actor string) {
	s.Helper()
	_, err := s.db.Exec(s.ctx, `SELECT penstock.`+verb+`($1, $2, $3)`, id, reason, actor)
	s.must(err)
}

// explained is as much of penstock.explain_entry's answer as the story needs.
type explained struct {
	State   string
	Reasons []struct{ Code, Text string }
}

func (s *story) explain(id EntryID) (e explained) {
	s.Helper()
	var text []byte
	s.must(s.db.QueryRow(s.ctx, `SELECT penstock.explain_entry($1)`, id).Scan(&text))
	s.must(json.Unmarshal(text, &e))
	return e
}
