package invalidation

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// under puts queues of the bed under a limit, and returns handles that know of it.
func (b *bed) under(name string, l limitOptions, units map[string]int) map[string]*Queue {
	b.Helper()
	if err := setLimit(b.ctx, b.pool, name, l); err != nil {
		b.Fatal(err)
	}
	queues := map[string]*Queue{}
	for queue, n := range units {
		if err := useLimit(b.ctx, b.pool, queue, name, n); err != nil {
			b.Fatal(err)
		}
		q, err := Open(b.ctx, b.pool, queue)
		if err != nil {
			b.Fatal(err)
		}
		queues[queue] = q
	}
	return queues
}

// TestLongLimitIsExactUnderConcurrentClaims runs claimers of two queues against one resource of 5 units, of which one
// queue takes 2 a lock, while finishes and releases come and go. Every claim's own view must keep to the limit.
func TestLongLimitIsExactUnderConcurrentClaims(t *testing.T) {
	b := newBed(t, Config{})
	five := 5
	for _, name := range []string{"light", "heavy"} {
		if _, err := Create(b.ctx, b.pool, name, Config{}); err != nil {
			t.Fatal(err)
		}
	}
	queues := b.under("gpu", limitOptions{MaxUnits: &five}, map[string]int{"light": 1, "heavy": 2})
	light, heavy := queues["light"], queues["heavy"]
	const n = 120
	for _, q := range []*Queue{light, heavy} {
		for i := range n {
			if _, err := q.Push(b.ctx, withPayload(Push{Flow: fmt.Sprint("flow-", i%3)})); err != nil {
				t.Fatal(err)
			}
		}
	}
	ctx, stop := context.WithTimeout(b.ctx, 60*time.Second)
	defer stop()
	var wg sync.WaitGroup
	var mu sync.Mutex
	finished, most := 0, 0
	for w := range 8 {
		wg.Go(func() {
			for id := int32(1); ctx.Err() == nil; id++ {
				q := light
				if (w+int(id))%2 == 0 {
					q = heavy
				}
				lane := Lane{Priority: 1, Flow: fmt.Sprint("flow-", rand.IntN(3))}
				c, err := q.Claim(ctx, ClaimRequest{Node: NodeID(w + 1), ClaimID: id, Lane: lane, Limit: 1 + rand.IntN(4)})
				if err != nil {
					t.Errorf("claim: %v", err)
					return
				}
				used := b.count(`SELECT coalesce(sum(CASE queue_id WHEN $1 THEN 1 WHEN $2 THEN 2 END), 0) FROM penstock.lock`, light.ID, heavy.ID)
				mu.Lock()
				most = max(most, used)
				over := used > five
				mu.Unlock()
				if over {
					t.Errorf("%d units in use, limit 5", used)
				}
				for _, l := range c.Locks {
					e := Done(l, l.Entries[0].ID, nil, 0)
					if rand.IntN(4) == 0 {
						e = Release(l, l.Entries[0].ID, 0)
					} else {
						mu.Lock()
						finished++
						mu.Unlock()
					}
					e.Last = true
					if _, err := q.Settle(ctx, NodeID(w+1), []Ending{e}); err != nil {
						t.Errorf("settle: %v", err)
					}
				}
				mu.Lock()
				all := finished == 2*n
				mu.Unlock()
				if all {
					return
				}
			}
		})
	}
	wg.Wait()
	if finished != 2*n || most < 4 {
		t.Errorf("finished %d of %d, at most %d units in use: the limit was never near", finished, 2*n, most)
	}
}

func TestClaimThatDoesNotKnowALimitIsRefused(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	fresh, err := Alter(b.ctx, b.pool, b.q.Name, map[string]any{"max_concurrent": 1})
	if err != nil {
		t.Fatal(err)
	}
	request := ClaimRequest{Node: here, Lane: usual, Limit: 1}
	if c := b.claimAs(request); len(c.Locks) != 0 || !c.TryLater {
		t.Errorf("claim by an old handle: %d locks, busy %v; want none, busy", len(c.Locks), c.TryLater)
	}
	b.q = fresh
	if c := b.claimAs(request); len(c.Locks) != 1 {
		t.Errorf("claim by a new handle: %d locks, want 1", len(c.Locks))
	}
	if c := b.claimAs(request); len(c.Locks) != 0 || !c.Limited {
		t.Errorf("claim beyond max_concurrent: %d locks, limited %v; want none, limited", len(c.Locks), c.Limited)
	}
}

func TestTokenBucketLetsBurstThenRateThrough(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("slow", limitOptions{Rate: 0.01, Burst: 3, PerFlow: true}, map[string]int{b.q.Name: 1})[b.q.Name]
	for range 10 {
		b.pushAll(b.pool, Push{Flow: "a"}, Push{Flow: "b"})
	}
	in := func(flow string) Claimed {
		return b.claimAs(ClaimRequest{Node: here, Lane: Lane{Priority: 1, Flow: flow}, Limit: 10})
	}
	if c := in("a"); len(c.Locks) != 3 {
		t.Fatalf("burst let %d through, want 3", len(c.Locks))
	}
	if c := in("a"); len(c.Locks) != 0 || !c.Limited || c.Wait <= 0 || c.Wait > 100*time.Second {
		t.Errorf("empty bucket: %d locks, limited %v, wait %v; want none, up to 100 s", len(c.Locks), c.Limited, c.Wait)
	}
	if c := in("b"); len(c.Locks) != 3 {
		t.Errorf("other flow got %d, want 3: the limit is for each flow", len(c.Locks))
	}
}

// left is what the token bucket of limit slow holds now, in whole units.
func (b *bed) left() int {
	b.Helper()
	return b.count(`SELECT floor(penstock.bucket_units(l, '')) FROM penstock."limit" l WHERE name = 'slow'`)
}

func TestRateIsRefundedForWhatWasCancelledOrDidNotRun(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("slow", limitOptions{Rate: 0.001, Burst: 10}, map[string]int{b.q.Name: 2})[b.q.Name]
	b.push("", "", "K", "", "")
	locks := b.claim(10)
	if len(locks) != 5 || b.left() != 0 {
		t.Fatalf("%d locks, %d units left", len(locks), b.left())
	}
	entry := func(i int) EntryID { return locks[i].Entries[0].ID }
	b.settle(last(Cancel(locks[0], entry(0), "wished")))
	b.settle(last(Release(locks[1], entry(1), 0)))
	if n := b.left(); n != 4 {
		t.Errorf("a cancel and a release: %d units left, want 4", n)
	}
	b.settle(last(Done(locks[2], entry(2), nil, 0)))
	run := &Run{Queue: b.q, Entry: locks[3].Entries[0], Lock: locks[3], Node: here}
	b.settle(last(Judge(run, nil, NoCapacity(0, errors.New("busy")), 0, 0)))
	if n := b.left(); n != 4 {
		t.Errorf("one that was done and one that called and was turned away: %d units left, want 4", n)
	}
	// What was taken by other weights is not given back by these.
	b.must(useLimit(b.ctx, b.pool, b.q.Name, "slow", 5))
	b.settle(last(Cancel(locks[4], entry(4), "wished")))
	if n := b.left(); n != 4 {
		t.Errorf("after the weight changed: %d units left, want 4", n)
	}
}

// Where a handler has no capacity for an entry, those behind it in its lock go back with it and have not run: their
// tokens come back, and those that are cancelled in the same transaction come back once.
func TestRateIsRefundedForWhatIsHandedBackBehindABusyEntry(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("slow", limitOptions{Rate: 0.001, Burst: 100}, map[string]int{b.q.Name: 1})[b.q.Name]
	b.push(slices.Repeat([]string{"K"}, 40)...)
	noCapacity := func(l *Lock, i int) Ending {
		run := &Run{Queue: b.q, Entry: l.Entries[i], Lock: l, Node: here}
		return Judge(run, nil, NoCapacity(0, errors.New("busy")), 0, 0)
	}
	for want := 99; want > 96; want-- {
		b.settle(last(noCapacity(b.claimOne(), 0)))
		b.want(b.left(), want)
	}
	lock := b.claimOne()
	b.settle(Cancel(lock, lock.Entries[0].ID, "wished"), last(noCapacity(lock, 1)))
	b.want(b.left(), 96)
	lock = b.claimOne() // a batch of entries that ran together
	b.settle(noCapacity(lock, 0), last(noCapacity(lock, 1)))
	b.want(b.left(), 94)
}

func TestRateForEachLockKeyParksWhatMustWait(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("calls", limitOptions{Rate: 0.001, Burst: 2, PerKey: true}, map[string]int{b.q.Name: 1})[b.q.Name]
	ids := b.push("A", "A", "A", "B", "A", "")
	for range 2 {
		for _, l := range b.claim(10) {
			b.settle(doneAll(l)...)
		}
	}
	if n := b.count(`SELECT count(*) FROM penstock.result`); n != 4 {
		t.Fatalf("%d done, want two of A, one of B, one alone", n)
	}
	if c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10}); len(c.Locks) != 0 {
		t.Fatalf("claimed %s beyond its rate", c.Locks[0].Key)
	}
	if c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10}); c.Scanned != 0 {
		t.Errorf("a key that must wait was met again, %d rows", c.Scanned)
	}
	if lanes, err := Lanes(b.ctx, b.pool, []int32{b.q.ID}, 10); err != nil || len(lanes) != 0 {
		t.Errorf("a key that must wait makes a lane: %v (%v)", lanes, err)
	}
	if n := b.count(`SELECT count(penstock.head_age(q)) FROM penstock.queue q WHERE id = $1`, b.q.ID); n != 0 {
		t.Error("a key that must wait is taken for one that nobody takes")
	}
	if n, err := b.q.Promote(b.ctx, 10); n != 0 || err != nil {
		t.Errorf("back in line before its time: %d (%v)", n, err)
	}
	more := b.push("A", "B") // who pushes does not see that A waits
	for _, l := range b.claim(10) {
		if l.Key != "B" {
			t.Errorf("claimed %s", l.Key)
		}
		b.settle(last(Done(l, l.Entries[0].ID, nil, 0)))
	}
	if n := b.count(`SELECT count(*) FROM penstock.ready`); n != 1 {
		t.Errorf("%d ready rows, want one for A", n)
	}
	b.exec(b.pool, `UPDATE penstock.ready SET pos = 1 WHERE priority = -2`)
	b.exec(b.pool, `UPDATE penstock.bucket SET at = at - interval '1 hour'`)
	if n, err := b.q.Promote(b.ctx, 10); n != 1 || err != nil {
		t.Fatalf("put %d keys back into line (%v), want 1", n, err)
	}
	l := b.claimOne()
	b.want(entryIDs(l), []EntryID{ids[2], ids[4]}) // the oldest, and no more than the bucket holds
	b.settle(doneAll(l)...)
	b.claim(1) // parks A with what was pushed since
	if n := b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1`, more[0]); n != 1 {
		t.Error("the entry that came while its key waited is gone")
	}
}

func TestGroupsTakeAsManyUnitsAsTheyCoverEntries(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("slow", limitOptions{Rate: 0.001, Burst: 10}, map[string]int{b.q.Name: 2})[b.q.Name]
	ids := b.push("A", "A", "A", "A", "B", "B", "B", "")
	l := b.claimOne()
	b.want(entryIDs(l), ids[:4])
	b.want(b.left(), 2)
	b.want(len(b.claim(9)), 1) // one of B and no more
	b.want(b.left(), 0)
	b.settle(Done(l, ids[0], nil, 0), Cancel(l, ids[1], "wished"), last(Release(l, ids[2], 0)))
	b.want(b.left(), 6) // one was cancelled, two did not run
	b.want(len(b.claim(9)), 2)
}

// plenty puts the queue under a limit of ten, of which one lock is taken: so far from it that others are not counted.
func (b *bed) plenty() *Queue {
	b.Helper()
	ten := 10
	b.q = b.under("ten", limitOptions{MaxUnits: &ten}, map[string]int{b.q.Name: 1})[b.q.Name]
	for _, flow := range []string{"a", "b"} {
		b.must(pushFlow(b.ctx, b.q, 20, flow))
	}
	b.want(len(b.in("a", 1).Locks), 1)
	b.want(b.count(`SELECT uncounted_to - last_value FROM penstock."limit", penstock.token_seq`), 9)
	return b.q
}

func (b *bed) in(flow string, limit int) Claimed {
	b.Helper()
	return b.claimAs(ClaimRequest{Node: here, Lane: Lane{Priority: 1, Flow: flow}, Limit: limit})
}

const drawSQL = `SELECT max(nextval('penstock.token_seq')) FROM generate_series(1, 100)`

func TestWhoCountsALimitWaitsForThoseWhoDoNot(t *testing.T) {
	b := newBed(t, Config{})
	q := b.plenty()
	late := b.begin()
	for i, flow := range []string{"a", "b"} { // claims that do not count do not meet
		if c, err := q.WithTx(late).Claim(b.ctx, ClaimRequest{Node: there, ClaimID: int32(i), Lane: Lane{Priority: 1, Flow: flow}, Limit: 2}); err != nil || len(c.Locks) != 2 {
			t.Fatalf("%d locks, %v", len(c.Locks), err)
		}
		if i == 0 {
			b.want(len(b.in("b", 1).Locks), 1)
		}
	}
	b.exec(b.pool, drawSQL)
	b.push("")
	if c := b.in("", 9); len(c.Locks) != 0 || !c.TryLater {
		t.Errorf("counted beside a claim that nobody sees yet: %d locks, busy %v", len(c.Locks), c.TryLater)
	}
	four := 4
	lowered := later(b, func() (int, error) { return 0, setLimit(b.ctx, b.pool, "ten", limitOptions{MaxUnits: &four}) })
	b.awaitBlocked(late)
	b.commit(late)
	lowered()
	if c := b.in("b", 9); len(c.Locks) != 0 || !c.Limited {
		t.Errorf("%d locks beside 6 of 4", len(c.Locks))
	}
	nine := 9
	b.must(setLimit(b.ctx, b.pool, "ten", limitOptions{MaxUnits: &nine}))
	b.want(len(b.in("b", 9).Locks), 3)
}

func TestAClaimWhoseTokensComeTooLateTakesItselfBack(t *testing.T) {
	b := newBed(t, Config{})
	b.plenty()
	// The moment in which others draw tokens lies between the look at the limit and the tokens of the claim.
	b.exec(b.pool, `CREATE FUNCTION public.draw() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN `+
		strings.Replace(drawSQL, "SELECT", "PERFORM", 1)+`; RETURN OLD; END $$`)
	b.exec(b.pool, `CREATE TRIGGER draw BEFORE DELETE ON penstock.ready FOR EACH ROW EXECUTE FUNCTION public.draw()`)
	if c := b.in("a", 5); len(c.Locks) != 0 || !c.TryLater {
		t.Errorf("%d locks, busy %v; want none, since others may have taken the rest of the limit", len(c.Locks), c.TryLater)
	}
	b.want(len(b.in("a", 20).Locks), 9) // counted
}

// A refund and a claim that take two buckets in different orders wait for each other for ever.
func TestRefundAndClaimTakeBucketsInOneOrder(t *testing.T) {
	b := newBed(t, Config{})
	if _, err := Create(b.ctx, b.pool, "other", Config{}); err != nil {
		t.Fatal(err)
	}
	b.under("first", limitOptions{Rate: 100, Burst: 100, PerKey: true}, map[string]int{"work": 1, "other": 1})
	queues := b.under("second", limitOptions{Rate: 100, Burst: 100}, map[string]int{"work": 1, "other": 1})
	other := queues["other"]
	b.q = queues["work"]
	b.push("K")
	l := b.claimOne()
	if _, err := other.Push(b.ctx, withPayload(Push{LockKey: "K"})); err != nil {
		t.Fatal(err)
	}
	between := b.begin()
	b.exec(between, `SELECT FROM penstock.bucket WHERE flow = '' FOR UPDATE`)
	claimed := later(b, func() (Claimed, error) {
		return other.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 1})
	})
	b.awaitBlocked(between)
	refunded := later(b, func() ([]Token, error) {
		return b.q.Settle(b.ctx, here, []Ending{last(Release(l, l.Entries[0].ID, 0))})
	})
	b.awaitWaiting(2)
	b.commit(between)
	b.want(len(claimed().Locks), 1)
	b.want(len(refunded()), 1)
}

func TestRecoveryRefundsWhatOnlyWaitedOnTheDeadNode(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("slow", limitOptions{Rate: 0.001, Burst: 10}, map[string]int{b.q.Name: 2})[b.q.Name]
	b.push("", "", "")
	b.claim(3)
	b.want(b.left(), 4)
	b.exec(b.pool, `UPDATE penstock.node SET beat_at = beat_at - interval '2 hours' WHERE id = $1`, here)
	held, err := HeldLocks(b.ctx, b.pool)
	b.must(err)
	ran := refs(held)
	waited := ran[1]
	ran = slices.Delete(ran, 1, 2)
	if r, err := b.q.Recover(b.ctx, ran, []LockRef{waited}, true); err != nil || len(r.Freed) != 3 {
		t.Fatalf("freed %d (%v)", len(r.Freed), err)
	}
	b.want(b.left(), 6)
}

// set_limit goes from the limit to its queues, alter_queue from the queue to its limits.
func TestLimitsAndQueuesAreChangedInOneOrder(t *testing.T) {
	b := newBed(t, Config{})
	alter := func(most int) (*Queue, error) {
		return Alter(b.ctx, b.pool, b.q.Name, map[string]any{"max_concurrent": most})
	}
	if _, err := alter(3); err != nil {
		t.Fatal(err)
	}
	gate := b.begin()
	b.exec(b.pool, `CREATE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NEW; END $$`)
	b.exec(b.pool, `CREATE TRIGGER gate BEFORE UPDATE ON penstock.queue FOR EACH ROW WHEN (NEW.max_concurrent = 4) EXECUTE FUNCTION public.gate()`)
	b.exec(gate, `SELECT pg_advisory_xact_lock(4711)`)
	altered := later(b, func() (*Queue, error) { return alter(4) }) // has the queue's row
	b.awaitBlocked(gate)
	seven := 7
	limited := later(b, func() (int, error) { return 0, setLimit(b.ctx, b.pool, "queue:work", limitOptions{MaxUnits: &seven}) })
	b.awaitWaiting(2)
	b.commit(gate)
	altered()
	limited()
	b.want(b.count(`SELECT max_units FROM penstock."limit" WHERE name = 'queue:work'`), 7)
}

// awaitWaiting returns when so many sessions wait for others.
func (b *bed) awaitWaiting(n int) {
	b.Helper()
	deadline := time.Now().Add(time.Minute)
	for b.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`) < n {
		if time.Now().After(deadline) {
			b.Fatal("too few wait")
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// Claims wait behind whoever puts a queue under a limit, so that one does not wait for long.
func TestAQueueDoesNotComeUnderALimitBesideALongTransactionOfAClaim(t *testing.T) {
	b := newBed(t, Config{})
	one := 1
	b.must(setLimit(b.ctx, b.pool, "one", limitOptions{MaxUnits: &one}))
	b.push("", "")
	late := b.begin()
	if c, err := b.q.WithTx(late).Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 1}); err != nil || len(c.Locks) != 1 {
		t.Fatalf("claimed %d (%v)", len(c.Locks), err)
	}
	if err := useLimit(b.ctx, b.pool, b.q.Name, "one", 1); !errors.Is(err, ErrState) || !strings.Contains(err.Error(), "3 seconds") {
		t.Errorf("beside a claim that nobody sees yet: %v", err)
	}
	if _, err := Alter(b.ctx, b.pool, b.q.Name, map[string]any{"max_concurrent": 1}); !errors.Is(err, ErrState) {
		t.Errorf("beside a claim that nobody sees yet: %v", err)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.limit_use`), 0)
	b.commit(late)
	b.must(useLimit(b.ctx, b.pool, b.q.Name, "one", 1))
	q, err := Open(b.ctx, b.pool, b.q.Name)
	b.must(err)
	b.q = q
	if c := b.in("", 1); len(c.Locks) != 0 || !c.Limited {
		t.Errorf("%d locks beyond the limit", len(c.Locks))
	}
}

// Entries that are committed between a claim and the read of its groups have lower ids than the one that was charged.
func TestALateCommitBehindAClaimIsNotRunUncharged(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("slow", limitOptions{Rate: 0.001, Burst: 1}, map[string]int{b.q.Name: 1})[b.q.Name]
	late := b.begin()
	b.pushOn(late, "A", "A", "A")
	b.push("A")
	b.want(len(b.claim(10)), 1)
	b.commit(late)
	again, err := locksIn(b.q.Reclaim(b.ctx, here, b.n)) // reads the groups of the claim as the claim does
	b.must(err)
	b.want(len(entryIDs(again...)), 1)
	b.want(b.left(), 0)
}

// The units of a lock that covers nothing, as that of a key that is blocked, are given back once.
func TestRateIsRefundedOnceForALockThatCoversNothing(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("slow", limitOptions{Rate: 0.001, Burst: 10}, map[string]int{b.q.Name: 1})[b.q.Name]
	b.push("K", "L", "M")
	b.want(len(b.claim(10)), 3)
	b.push("N", "N")
	_, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.blocked_key (queue_id, lock_key, entry_id, class, error)
	    SELECT queue_id, lock_key, max(id), 'permanent', 'broken' FROM penstock.entry WHERE lock_key = 'N' GROUP BY 1, 2`)
	b.must(err)
	b.want(len(b.claim(1)), 0)
	b.want(b.left(), 7)
	// The answer of a claim is lost: it is not known whether it gave back what its locks do not cover.
	_, err = b.pool.Exec(b.ctx, `INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
	    SELECT queue_id, 1, '', min(id), lock_key FROM penstock.entry WHERE lock_key = 'N' GROUP BY 1, 5`)
	b.must(err)
	b.n++
	_, _, err = b.q.readClaim(b.ctx, LanesRequest{Node: here, ClaimID: b.n, Limit: 1, Lanes: []ClaimLane{{Lane: Lane{Priority: 1}}}, quantum: 2}, b.q.lockFirst)
	b.must(err)
	b.want(b.left(), 5)
	locks, err := locksIn(b.q.Reclaim(b.ctx, here, b.n))
	b.must(err)
	b.want(len(locks), 0)
	b.want(b.left(), 7)
}

// A claim tells that it gave back units of entries that it counted and did not get.
func TestAClaimTellsWhatItRefunded(t *testing.T) {
	ten := 10
	for name, limit := range map[string]limitOptions{"rate": {Rate: 0.001, Burst: 10}, "units": {MaxUnits: &ten}} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{})
			b.q = b.under("slow", limit, map[string]int{b.q.Name: 1})[b.q.Name]
			b.push("K", "L")
			_, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.blocked_key (queue_id, lock_key, entry_id, class, error)
			    SELECT queue_id, lock_key, id, 'permanent', 'broken' FROM penstock.entry WHERE lock_key = 'K'`)
			b.must(err)
			if c := b.in("", 10); len(c.Locks) != 1 || c.Refunded != (limit.Rate > 0) {
				t.Errorf("%d locks, refunded %t", len(c.Locks), c.Refunded)
			}
			b.push("M")
			if c := b.in("", 10); len(c.Locks) != 1 || c.Refunded {
				t.Errorf("of a key that is free: %d locks, refunded %t", len(c.Locks), c.Refunded)
			}
		})
	}
}
