package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
)

// Each window is opened by hand first: a transaction is held at the point that the guard protects.

// Guard: take_entry locks the ready row before it ends a solo entry.
func TestCancelDuringAClaimOnlyAsks(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("")[0]
	claimer := b.gate("true")
	claimed := later(b, func() (Claimed, error) {
		return b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 1})
	})
	b.awaitBlocked(claimer)
	b.want(b.cancel(id), cancelRequested)
	n, err := b.q.Expire(b.ctx, 10)
	b.must(err)
	b.want(n, 0)
	b.commit(claimer)
	b.want(entryIDs(claimed().Locks...), []EntryID{id})
}

// Guard: exclude_claims. A stubborn claim needs no ready row, only the key's advisory lock.
func TestCancelDuringAClaimThatIgnoresRowLocksOnlyAsks(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("K", "K")
	pusher := b.begin()
	b.pushOn(pusher, "K") // holds K's ready row
	claimer := b.gate("true")
	claimed := later(b, func() (Claimed, error) {
		return b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 1, IgnoreRowLocks: true})
	})
	b.awaitBlocked(claimer)
	b.want(b.cancel(ids[1]), cancelRequested)
	b.commit(claimer)
	b.want(entryIDs(claimed().Locks...), ids)
	b.commit(pusher)
}

// Guard: take_entry looks once more whether the entry runs when it has the key. A claim came and went in between.
func TestCancelSeesAClaimThatCameBeforeItHadTheKey(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("K")
	b.exec(b.pool, `ALTER FUNCTION penstock.exclude_claims RENAME TO exclude_claims_now`)
	b.exec(b.pool, `CREATE FUNCTION penstock.exclude_claims(queue integer, key text) RETURNS boolean LANGUAGE plpgsql AS
	                $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4713); RETURN penstock.exclude_claims_now(queue, key); END $$`)
	gate := b.begin()
	b.exec(gate, `SELECT pg_advisory_xact_lock(4713)`)
	answer := later(b, func() (string, error) { return cancelEntry(b.ctx, b.pool, ids[0], ann) })
	b.awaitBlocked(gate)
	lock := b.claimOne()
	b.commit(gate)
	b.want(answer(), cancelRequested)
	b.settle(doneAll(lock)...)
	b.want(b.outcome(ids[0]).Outcome, "done")
}

// Guard: the other way round. While a cancel is not committed, the entry is not claimed.
func TestClaimPassesByWhatIsBeingCancelled(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("", "K", "K")
	operatorTx := b.begin()
	for _, id := range ids[:2] {
		if answer, err := cancelEntry(b.ctx, operatorTx, id, ann); err != nil || answer != cancelDone {
			t.Fatal(answer, err)
		}
	}
	c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10, IgnoreRowLocks: true})
	b.want(len(c.Locks), 0)
	b.commit(operatorTx)
	b.want(entryIDs(b.claim(10)...), ids[2:])
}

// Guard: tidy_key deletes only ready rows that it has locked, and looks for entries after that. The pusher relies on
// the ready row that it has locked.
func TestCancelKeepsTheReadyRowThatAPusherReliesOn(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("K")[0]
	pusher := b.begin()
	came := b.pushOn(pusher, "K")
	b.want(b.cancel(id), cancelDone)
	b.commit(pusher)
	b.want(entryIDs(b.claim(1)...), came)
}

func TestPushDuringACancelGetsAReadyRowOfItsOwn(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("K")[0]
	operatorTx := b.begin()
	_, err := cancelEntry(b.ctx, operatorTx, id, ann)
	b.must(err)
	came := b.push("K")
	b.commit(operatorTx)
	b.want(entryIDs(b.claim(1)...), came)
}

// switchPatiently lets operators try for five minutes to switch an entry that somebody else has, instead of for two
// seconds.
func (b *bed) switchPatiently() {
	b.Helper()
	pgtest.Redefine(b, b.pool, "penstock.switch_entry", "1 .. 200", "1 .. 30000")
}

// awaitBusy returns when an operator has met an entry that somebody else has, and tries again after a while.
func (b *bed) awaitBusy() {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); b.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'`) == 0; {
		if time.Now().After(deadline) {
			b.Fatal("nobody tries again")
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// Guard: lock_to_switch takes the lock record FOR KEY SHARE. A settler that has looked at the entry while it was
// disabled, and put no ready row back, must have committed before enable looks whether the lock stands.
func TestEnableDuringASettleIsNotLost(t *testing.T) {
	for _, key := range []string{"", "K"} {
		b := newControlBed(t, Config{})
		b.switchPatiently()
		id := b.push(key)[0]
		lock := b.claimOne()
		b.must(disableEntry(b.ctx, b.pool, id, ann))
		settler := b.begin()
		b.settleOn(settler, releaseAll(lock)...)
		enabled := later(b, func() (bool, error) { return true, enableEntry(b.ctx, b.pool, id, ann) })
		b.awaitBusy()
		b.commit(settler)
		enabled()
		b.want(entryIDs(b.claim(1)...), []EntryID{id})
	}
}

// Guard: the same for disable. A settler that has seen the entry enabled puts a ready row back.
func TestDisableDuringASettleIsNotForgotten(t *testing.T) {
	b := newControlBed(t, Config{})
	b.switchPatiently()
	id := b.push("")[0]
	lock := b.claimOne()
	settler := b.begin()
	b.settleOn(settler, releaseAll(lock)...)
	disabled := later(b, func() (bool, error) { return true, disableEntry(b.ctx, b.pool, id, ann) })
	b.awaitBusy()
	b.commit(settler)
	disabled()
	b.want(len(b.claim(1)), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.ready`), 0)
}

// Guard: lock_to_switch waits for a claim of the entry. A ready row that enabling wrote during the claim would be left
// behind by it, and start the entry again for a claim whose snapshot is older than the finish.
func TestEntrySwitchedDuringItsClaimHasNoReadyRowLeft(t *testing.T) {
	b := newControlBed(t, Config{})
	b.switchPatiently()
	id := b.push("")[0]
	claimer := b.gate("true")
	claimed := later(b, func() (Claimed, error) {
		return b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 1})
	})
	b.awaitBlocked(claimer)
	switched := later(b, func() (bool, error) {
		if err := disableEntry(b.ctx, b.pool, id, ann); err != nil {
			return false, err
		}
		return true, enableEntry(b.ctx, b.pool, id, ann)
	})
	b.awaitBusy()
	b.commit(claimer)
	switched()
	b.want(b.count(`SELECT count(*) FROM penstock.ready`), 0)
	b.settle(releaseAll(claimed().Locks...)...)
	b.want(entryIDs(b.claim(1)...), []EntryID{id})
}

// Guard: lock_to_switch takes the key of a group. A settler that met the change of an entry it ends would miss it.
func TestClaimPassesByAKeyWhoseEntryIsBeingSwitched(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("K", "K")
	operatorTx := b.begin()
	b.must(disableEntry(b.ctx, operatorTx, ids[0], ann))
	b.want(len(b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 1, IgnoreRowLocks: true}).Locks), 0)
	b.commit(operatorTx)
	b.want(entryIDs(b.claim(1)...), ids[1:])
}

// Guard: the same, the other way round.
func TestEntryOfAGroupSwitchedDuringItsClaimIsNotLost(t *testing.T) {
	b := newControlBed(t, Config{})
	b.switchPatiently()
	ids := b.push("K", "K")
	b.must(disableEntry(b.ctx, b.pool, ids[0], ann))
	claimer := b.gate("true")
	claimed := later(b, func() (Claimed, error) {
		return b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 1})
	})
	b.awaitBlocked(claimer)
	enabled := later(b, func() (bool, error) { return true, enableEntry(b.ctx, b.pool, ids[0], ann) })
	b.awaitBusy()
	b.commit(claimer)
	enabled()
	b.settle(doneAll(claimed().Locks...)...)
	for _, l := range b.claim(1) { // what the claim read before the entry was enabled is done, the rest comes now
		b.settle(doneAll(l)...)
	}
	b.want([]string{b.outcome(ids[0]).Outcome, b.outcome(ids[1]).Outcome}, []string{"done", "done"})
}

// Guard: enable writes a ready row that is there anew. A sweep that found the old one dead must pass by it.
func TestEnableDuringASweepIsNotLost(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("")[0]
	// A claim that was rolled back left the ready row of an entry that was disabled meanwhile.
	b.exec(b.pool, `UPDATE penstock.entry SET priority = -1, enabled_priority = 1`)
	var found string // what a sweep finds dead
	b.must(b.pool.QueryRow(b.ctx, `SELECT ctid::text FROM penstock.ready WHERE entry_id = $1`, id).Scan(&found))
	b.must(enableEntry(b.ctx, b.pool, id, ann))
	b.exec(b.pool, `DELETE FROM penstock.ready WHERE ctid = $1::text::tid`, found)
	b.want(entryIDs(b.claim(1)...), []EntryID{id})
}

func TestCompactDuringAClaimDoesNothing(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true})
	ids := b.push("K", "K")
	claimer := b.gate("true")
	claimed := later(b, func() (Claimed, error) {
		return b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 1})
	})
	b.awaitBlocked(claimer)
	b.want(b.compact(), 0)
	b.commit(claimer)
	b.want(entryIDs(claimed().Locks...), ids)
}

func TestClaimPassesByAKeyThatIsBeingCompacted(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true})
	ids := b.push("K", "K")
	operatorTx := b.begin()
	n, err := b.q.WithTx(operatorTx).Compact(b.ctx, "K")
	b.must(err)
	b.want(n, 1)
	b.want(len(b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 1, IgnoreRowLocks: true}).Locks), 0)
	b.commit(operatorTx)
	b.want(entryIDs(b.claim(1)...), ids[:1])
}

// crew is claimers, pushers and operators at work on one queue at once, for a bounded time.
type crew struct {
	*bed
	mu     sync.Mutex
	pushed []EntryID
	ran    map[EntryID]int // times a claim handed it out and its end was accepted
	wg     sync.WaitGroup
	stop   context.Context
}

// newCrew returns a crew that works for d, and on a busy machine for up to a minute until enough has happened.
func newCrew(b *bed, d time.Duration, enough func() bool) *crew {
	c := &crew{bed: b, ran: map[EntryID]int{}}
	var cancel context.CancelFunc
	c.stop, cancel = context.WithTimeout(b.ctx, max(d, time.Minute))
	b.Cleanup(cancel)
	began := time.Now()
	c.work(func(*rand.Rand) error {
		time.Sleep(time.Millisecond)
		c.mu.Lock()
		defer c.mu.Unlock()
		if time.Since(began) > d && enough() {
			cancel()
		}
		return nil
	})
	return c
}

// work repeats step until the time is over.
func (c *crew) work(step func(r *rand.Rand) error) {
	seed := rand.Uint64()
	c.wg.Go(func() {
		r := rand.New(rand.NewPCG(seed, 1))
		for c.stop.Err() == nil {
			if err := step(r); err != nil {
				c.Errorf("seed %d: %v", seed, err)
				return
			}
		}
	})
}

func (c *crew) pushSome(r *rand.Rand) error {
	keys := []string{"", "A", "B"}
	pushes := make([]Push, 1+r.IntN(5))
	for i := range pushes {
		pushes[i] = Push{Payload: json.RawMessage(`1`), LockKey: keys[r.IntN(3)]}
		if r.IntN(4) == 0 {
			pushes[i].StartBy = time.Now().Add(time.Duration(r.IntN(30)) * time.Millisecond)
		}
	}
	pushed, err := c.q.Push(c.ctx, pushes...)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range pushed {
		c.pushed = append(c.pushed, p.ID)
	}
	time.Sleep(time.Millisecond) // a bound on the load, nothing hangs on it
	return nil
}

// claimer claims, then ends what it got well, or hands it back one time in three.
func (c *crew) claimer(node NodeID) func(r *rand.Rand) error {
	claims := int32(0)
	return func(r *rand.Rand) error {
		claims++
		got, err := c.q.Claim(c.ctx, ClaimRequest{Node: node, ClaimID: claims, Lane: usual, Limit: 5, IgnoreRowLocks: r.IntN(4) == 0})
		if err != nil {
			return err
		}
		return c.endAll(r, node, got.Locks)
	}
}

func (c *crew) endAll(r *rand.Rand, node NodeID, locks []*Lock) error {
	for _, l := range locks {
		endings := doneAll(l)
		back := r.IntN(3) == 0
		if back {
			endings = releaseAll(l)
		}
		if len(endings) == 0 {
			endings = []Ending{last(Release(l, 0, 0))}
		}
		ours, err := c.q.Settle(c.ctx, node, endings)
		if err != nil {
			return err
		}
		if back || len(ours) == 0 {
			continue
		}
		c.mu.Lock()
		for _, e := range l.Entries {
			c.ran[e.ID]++
		}
		c.mu.Unlock()
	}
	return nil
}

// some returns an entry that was pushed lately.
func (c *crew) some(r *rand.Rand) EntryID {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pushed) == 0 {
		return 0
	}
	return c.pushed[max(0, len(c.pushed)-1-r.IntN(20))]
}

// gone leaves out the errors of an operator who was slower than the entry.
func gone(err error) error {
	if errors.Is(err, ErrState) || errors.Is(err, ErrEntryNotFound) {
		return nil
	}
	return err
}

// drain enables, unpauses and runs what is left, and checks that every entry ended exactly once.
func (c *crew) drain() {
	c.Helper()
	c.wg.Wait()
	if c.Failed() {
		return
	}
	for _, v := range c.violations() {
		c.Errorf("before the drain: %s", v)
	}
	r := rand.New(rand.NewPCG(1, 1))
	claims := int32(1 << 20)
	for deadline := time.Now().Add(time.Minute); c.count(`SELECT count(*) FROM penstock.entry`) > 0; {
		if time.Now().After(deadline) {
			c.Fatalf("%d entries are left", c.count(`SELECT count(*) FROM penstock.entry`))
		}
		c.exec(c.pool, `SELECT penstock.enable_entry(id) FROM penstock.entry WHERE priority < 0`)
		_, err := c.q.SettleCancelRequests(c.ctx, 1000)
		c.must(err)
		claims++
		got := c.claimAs(ClaimRequest{Node: here, ClaimID: claims, Lane: usual, Limit: 100})
		c.must(c.endAll(r, here, got.Locks))
		if len(got.Locks) == 0 {
			_, err := c.q.Sweep(c.ctx, usual, 0, 1<<40)
			c.must(err)
		}
	}
	rows, err := c.pool.Query(c.ctx, `SELECT entry_id FROM penstock.result ORDER BY entry_id`)
	c.must(err)
	ended, err := pgx.CollectRows(rows, pgx.RowTo[EntryID])
	c.must(err)
	slices.Sort(c.pushed)
	if !slices.Equal(ended, c.pushed) {
		c.Errorf("%d entries were pushed and %d ended", len(c.pushed), len(ended))
	}
	rows, err = c.pool.Query(c.ctx, `SELECT entry_id FROM penstock.result WHERE outcome = 'done' ORDER BY entry_id`)
	c.must(err)
	done, err := pgx.CollectRows(rows, pgx.RowTo[EntryID])
	c.must(err)
	for id, n := range c.ran {
		if n > 1 {
			c.Errorf("entry %d ended well %d times", id, n)
		}
		if _, isDone := slices.BinarySearch(done, id); !isDone {
			c.Errorf("the end of entry %d was accepted, and its outcome is another", id)
		}
	}
	if n := c.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`); n < len(c.pushed)/10 {
		c.Errorf("only %d of %d entries are done: the test hardly claimed anything", n, len(c.pushed))
	}
}

// Every entry has one outcome, whoever was faster: the claim or the operator.
func TestLongCancelDisableAndExpireWhileClaiming(t *testing.T) {
	b := newControlBed(t, Config{})
	answers := map[string]int{}
	both := func() bool { return answers["cancelled"] > 0 && answers["requested"] > 0 }
	c := newCrew(b, pgtest.Long(time.Second, 3*time.Second), both)
	c.work(c.pushSome)
	c.work(c.claimer(here))
	c.work(c.claimer(there))
	c.work(func(r *rand.Rand) error {
		id := c.some(r)
		answer, err := cancelEntry(b.ctx, b.pool, id, ann)
		c.mu.Lock()
		answers[answer]++
		c.mu.Unlock()
		return gone(err)
	})
	c.work(func(r *rand.Rand) error {
		id := c.some(r)
		if err := disableEntry(b.ctx, b.pool, id, ann); err != nil {
			return gone(err)
		}
		return gone(enableEntry(b.ctx, b.pool, id, ann))
	})
	c.work(func(*rand.Rand) error {
		_, err := b.q.Expire(b.ctx, 10)
		return err
	})
	c.work(func(*rand.Rand) error {
		time.Sleep(5 * time.Millisecond)
		_, err := b.q.Sweep(b.ctx, usual, 0, 1<<40)
		return err
	})
	c.drain()
	t.Logf("%d entries, answers %v", len(c.pushed), answers)
	if !both() {
		t.Errorf("answers %v: no cancel came before a claim, or none after", answers)
	}
}

// No entry is lost or run twice, and payloads add up, while keys are compacted under pushers and claimers.
func TestLongCompactWhilePushingAndClaiming(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true, Merge: "array"})
	merged := 0
	c := newCrew(b, pgtest.Long(time.Second, 3*time.Second), func() bool { return merged > 0 })
	c.work(c.pushSome)
	c.work(c.pushSome)
	c.work(c.claimer(here))
	c.work(c.claimer(there))
	c.work(func(*rand.Rand) error {
		n, _, err := b.q.CompactQueue(b.ctx, 2, 10, "")
		c.mu.Lock()
		merged += n
		c.mu.Unlock()
		return err
	})
	c.drain()
	t.Logf("%d entries, %d merged", len(c.pushed), merged)
	if merged == 0 {
		t.Error("nothing was merged")
	}
}
