package invalidation

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

func TestClaimTakesALaneInOrderOfAcceptance(t *testing.T) {
	b := newBed(t, Config{})
	want := slices.Concat(b.push("", "", ""), b.push(""), b.push("", ""))
	got := append(entryIDs(b.claim(4)...), entryIDs(b.claim(4)...)...)
	if !slices.Equal(got, want) {
		t.Fatalf("claimed %v, want %v", got, want)
	}
	if c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 4}); len(c.Locks) != 0 || c.TryLater || c.Scanned != 0 {
		t.Fatalf("an empty lane gave %+v", c)
	}
}

func TestClaimTakesAGroupWholeAndInOrder(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("K", "L", "K", "", "K")
	locks := b.claim(10)
	want := map[string][]EntryID{"K": {ids[0], ids[2], ids[4]}, "L": {ids[1]}, soloKey(ids[3]): {ids[3]}}
	if len(locks) != len(want) {
		t.Fatalf("claimed %d locks, want %d", len(locks), len(want))
	}
	for _, l := range locks {
		if got := entryIDs(l); !slices.Equal(got, want[l.Key]) {
			t.Errorf("lock of %s covers %v, want %v", l.Key, got, want[l.Key])
		}
	}
}

func TestClaimStaysInItsLane(t *testing.T) {
	b := newBed(t, Config{})
	high := int16(9)
	ids := b.pushAll(b.pool, Push{}, Push{Flow: "x"}, Push{Priority: &high}, Push{Flow: "x", Priority: &high})
	for i, lane := range []Lane{{1, ""}, {1, "x"}, {9, ""}, {9, "x"}} {
		if got := entryIDs(b.claimAs(ClaimRequest{Node: here, Lane: lane, Limit: 9}).Locks...); !slices.Equal(got, ids[i:i+1]) {
			t.Errorf("lane %v gave %v, want %v", lane, got, ids[i])
		}
	}
}

func TestLanesListsEachLaneOnceHighestPriorityFirst(t *testing.T) {
	b := newBed(t, Config{})
	high := int16(9)
	ids := b.pushAll(b.pool, Push{}, Push{}, Push{Flow: "x"}, Push{Flow: "x"}, Push{Priority: &high})
	found, err := Lanes(b.ctx, b.pool, []int32{b.q.ID, b.q.ID + 1}, 10)
	lanes := found[b.q.ID]
	want := []LaneHead{{Lane{9, ""}, int64(ids[4])}, {Lane{1, ""}, int64(ids[0])}, {Lane{1, "x"}, int64(ids[2])}}
	if err != nil || !slices.Equal(lanes, want) {
		t.Fatalf("lanes are %v (%v), want %v", lanes, err, want)
	}
	// However many flows there are: those of low priority never hide those of high priority.
	if found, err = Lanes(b.ctx, b.pool, []int32{b.q.ID}, 2); err != nil || !slices.Equal(found[b.q.ID], want[:2]) {
		t.Fatalf("the first lanes are %v (%v), want %v", found, err, want[:2])
	}
}

func TestClaimLeavesALaneThatAnotherClaimerIsIn(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "")
	other := b.begin()
	if c, err := b.q.WithTx(other).Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 1}); err != nil || len(c.Locks) != 1 {
		t.Fatalf("the first claimer got %d locks (%v)", len(c.Locks), err)
	}
	if c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 1}); !c.TryLater || len(c.Locks) != 0 {
		t.Fatalf("the second claimer got %+v, want to hear that the lane is busy", c)
	}
}

func TestLowWaterSkipsWhatWasClaimedAndNothingElse(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "", "", "")
	first := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 2})
	second := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 9, From: first.LowWater})
	if got := entryIDs(second.Locks...); !slices.Equal(got, ids[2:]) {
		t.Fatalf("from mark %d claimed %v, want %v", first.LowWater, got, ids[2:])
	}
	b.settle(releaseAll(first.Locks...)...)
	if c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 9, From: second.LowWater}); len(c.Locks) != 0 {
		t.Fatalf("claimed %v from behind everything", entryIDs(c.Locks...))
	}
	if got := entryIDs(b.claim(9)...); !slices.Equal(got, ids[:2]) {
		t.Fatalf("from the head claimed %v, want what came back, %v", got, ids[:2])
	}
}

func TestALockedKeyIsNotClaimedAgainAndItsReadyRowsAreSwept(t *testing.T) {
	b := newBed(t, Config{})
	b.push("K")
	lock := b.claimOne()
	waiting := b.push("K", "K")
	for range 2 {
		if c := b.claimAs(ClaimRequest{Node: there, Lane: usual, Limit: 9, IgnoreRowLocks: true}); len(c.Locks) != 0 || c.Skipped != 1 {
			t.Fatalf("claimed %v and left %d of a locked key", entryIDs(c.Locks...), c.Skipped)
		}
	}
	if n, err := b.q.Sweep(b.ctx, usual, 0, 1<<40); n != 1 || err != nil {
		t.Fatalf("swept %d ready rows (%v), want 1", n, err)
	}
	b.settle(doneAll(lock)...)
	if got := entryIDs(b.claim(9)...); !slices.Equal(got, waiting) {
		t.Fatalf("claimed %v, want what waited, %v", got, waiting)
	}
}

func TestSweepLeavesWhatCanBeClaimed(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "K", "L", "")
	b.exec(b.pool, `DELETE FROM penstock.entry WHERE id = $1`, ids[3]) // as an end that left its ready row behind
	if n, err := b.q.Sweep(b.ctx, usual, 0, 1<<40); n != 1 || err != nil {
		t.Fatalf("swept %d ready rows (%v), want that of the entry that is gone", n, err)
	}
	got := entryIDs(b.claim(9)...)
	slices.Sort(got)
	if !slices.Equal(got, ids[:3]) {
		t.Fatalf("claimed %v, want %v", got, ids[:3])
	}
}

func TestClaimIsExclusive(t *testing.T) {
	const claimers, lanes, n = 8, 3, 900
	b := newBed(t, Config{QuantumCount: 7})
	var pushes []Push
	for i := range n {
		p := Push{Flow: fmt.Sprint(i % lanes)}
		if i%2 == 0 {
			p.LockKey = fmt.Sprint(i % 20) // a key has entries in several lanes
		}
		pushes = append(pushes, p)
	}
	b.pushAll(b.pool, pushes...)
	seen := &held{}
	var wg sync.WaitGroup
	for c := range claimers {
		wg.Go(func() { b.drainBeside(seen, NodeID(100+c), lanes) })
	}
	wg.Wait()
	if len(seen.order) != n {
		t.Fatalf("%d entries ran, want %d", len(seen.order), n)
	}
	if left := b.count(`SELECT (SELECT count(*) FROM penstock.lock) + (SELECT count(*) FROM penstock.entry)`); left != 0 {
		t.Errorf("%d locks and entries are left", left)
	}
	seen.check(t)
}

// drainBeside claims lane after lane and finishes what it gets, until no entry is left.
func (b *bed) drainBeside(seen *held, node NodeID, lanes int) {
	q := *b.q
	for id := int32(1); ; id++ {
		lane := Lane{Priority: 1, Flow: fmt.Sprint((int(id) + int(node)) % lanes)}
		c, err := q.Claim(b.ctx, ClaimRequest{Node: node, ClaimID: id, Lane: lane, Limit: 9})
		if err != nil {
			b.Error(err)
			return
		}
		seen.take(b.T, c.Locks)
		if len(c.Locks) > 0 {
			seen.give(c.Locks)
			if ours, err := q.Settle(b.ctx, node, doneAll(c.Locks...)); err != nil || len(ours) != len(c.Locks) {
				b.Errorf("settled %d of %d locks: %v", len(ours), len(c.Locks), err)
				return
			}
			continue
		}
		if c.Skipped > 0 {
			if _, err := q.Sweep(b.ctx, lane, 0, c.LowWater); err != nil {
				b.Error(err)
				return
			}
		}
		var left int
		if err := b.pool.QueryRow(b.ctx, `SELECT count(*) FROM penstock.entry_work`).Scan(&left); err != nil || left == 0 {
			return
		}
	}
}

// held records what claimers hold, to find a key that two hold, an entry that ran twice, a token that did not
// grow, an entry that overtook another of its key.
type held struct {
	sync.Mutex
	keys   map[string]bool
	tokens map[string]Token
	newest map[string]EntryID
	order  map[EntryID]bool
}

func (h *held) take(t *testing.T, locks []*Lock) {
	h.Lock()
	defer h.Unlock()
	if h.keys == nil {
		h.keys, h.tokens, h.newest, h.order = map[string]bool{}, map[string]Token{}, map[string]EntryID{}, map[EntryID]bool{}
	}
	for _, l := range locks {
		if h.keys[l.Key] {
			t.Errorf("key %s is held twice", l.Key)
		}
		if l.Token <= h.tokens[l.Key] {
			t.Errorf("key %s got token %d after %d", l.Key, l.Token, h.tokens[l.Key])
		}
		h.keys[l.Key], h.tokens[l.Key] = true, l.Token
		for _, e := range l.Entries {
			if h.order[e.ID] {
				t.Errorf("entry %d ran twice", e.ID)
			}
			if e.ID <= h.newest[l.Key] {
				t.Errorf("entry %d of key %s ran after %d", e.ID, l.Key, h.newest[l.Key])
			}
			h.order[e.ID], h.newest[l.Key] = true, e.ID
		}
	}
}

func (h *held) give(locks []*Lock) {
	h.Lock()
	defer h.Unlock()
	for _, l := range locks {
		delete(h.keys, l.Key)
	}
}

func (h *held) check(t *testing.T) {
	t.Helper()
	if len(h.keys) != 0 {
		t.Errorf("%d keys are still held", len(h.keys))
	}
}

func TestReclaimFindsAClaimWhoseAnswerWasLost(t *testing.T) {
	b := newBed(t, Config{QuantumCount: 2})
	ids := b.push("", "K", "K")
	claimed := b.claim(9) // and suppose that nobody heard
	b.push("K", "L")
	again, err := locksIn(b.q.Reclaim(b.ctx, here, b.n))
	if err != nil || len(again) != len(claimed) {
		t.Fatalf("found %d locks (%v), want %d", len(again), err, len(claimed))
	}
	got := entryIDs(again...)
	slices.Sort(got)
	if !slices.Equal(got, ids) {
		t.Fatalf("found entries %v, want %v", got, ids)
	}
	if none, err := locksIn(b.q.Reclaim(b.ctx, here, b.n+1)); err != nil || len(none) != 0 {
		t.Fatalf("found %d locks (%v) of a claim that never was", len(none), err)
	}
	b.settle(doneAll(again...)...)
	if n := b.count(`SELECT count(*) FROM penstock.ready k JOIN penstock.ready l ON k.pos > l.pos
		WHERE k.lock_key = 'K' AND l.lock_key = 'L'`); n != 1 {
		t.Error("the key has used up its quantum, and does not go behind the next one")
	}
}

// A node with a hundred large entries of a key under each lock would run out of memory, and so would the one that follows it.
func TestAGroupOfLargeEntriesIsClaimedUpToANumberOfBytes(t *testing.T) {
	b := newBed(t, Config{PayloadLimit: 8 << 20, QuantumCount: 10})
	large := make([]byte, groupBytes/5) // as hexadecimal digits 2/5 of it
	if _, err := rand.Read(large); err != nil {
		t.Fatal(err)
	}
	payload := json.RawMessage(fmt.Sprintf(`"%x"`, large))
	var ids []EntryID
	for range 5 {
		ids = append(ids, b.pushAll(b.pool, Push{LockKey: "K", Payload: payload})...)
	}
	for range 12 {
		ids = append(ids, b.push("K")...)
	}
	// Nothing was read before the first one, each of which may have 8 MiB. The estimate falls again with the small ones.
	for _, want := range []int{1, 2, 2, 2, 3, 4, 3} {
		l := b.claimOne()
		if !slices.Equal(entryIDs(l), ids[:want]) {
			t.Fatalf("the lock covers %v, want %d of %v", entryIDs(l), want, ids)
		}
		ids = ids[want:]
		b.settle(doneAll(l)...)
	}
	b.want(len(ids), 0)
	b.checkInvariants()
}

// A key of large entries goes behind the others of its lane with each lock, as one whose locks have quantum_count does.
func TestAKeyOfLargeEntriesGivesWayToOthers(t *testing.T) {
	b := newBed(t, Config{PayloadLimit: 8 << 20, QuantumCount: 10})
	large := make([]byte, groupBytes/5)
	if _, err := rand.Read(large); err != nil {
		t.Fatal(err)
	}
	for range 7 {
		b.pushAll(b.pool, Push{LockKey: "K", Payload: json.RawMessage(fmt.Sprintf(`"%x"`, large))})
	}
	b.push("L")
	var order []string
	for range 5 {
		l := b.claimOne()
		order = append(order, fmt.Sprint(l.Key, len(l.Entries)))
		b.settle(doneAll(l)...)
	}
	if want := []string{"K1", "L1", "K3", "K2", "K1"}; !slices.Equal(order, want) {
		t.Errorf("locks %v, want %v", order, want)
	}
}

func TestAGroupIsClaimedUpToItsQuantum(t *testing.T) {
	b := newBed(t, Config{QuantumCount: 3})
	ids := b.push("K", "K", "K", "K", "K", "L")
	first := b.claimOne()
	if got := entryIDs(first); !slices.Equal(got, ids[:3]) {
		t.Fatalf("claimed %v, want a quantum, %v", got, ids[:3])
	}
	b.settle(doneAll(first)...)
	// K used up its quantum: L, which waited, comes first.
	if got := entryIDs(b.claimOne(), b.claimOne()); !slices.Equal(got, []EntryID{ids[5], ids[3], ids[4]}) {
		t.Fatalf("claimed %v, want L and then the rest of K", got)
	}
}

// Somebody who has locked a ready row, an operator who is about to disable its entry say, holds up nobody else's.
func TestAClaimPassesByAReadyRowThatSomebodyHasLocked(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "", "")
	holder := b.begin()
	if _, err := holder.Exec(b.ctx, `SELECT FROM penstock.ready WHERE entry_id = $1 FOR UPDATE`, ids[0]); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	claimed, err := b.q.Claim(ctx, ClaimRequest{Node: here, ClaimID: 1, Lane: usual, Limit: 10})
	if err != nil || len(claimed.Locks) != 2 || claimed.Locks[0].Entries[0].ID != ids[1] {
		t.Errorf("claimed %d locks: %v; want the two that nobody holds", len(claimed.Locks), err)
	}
	b.commit(holder)
}

// A claim whose snapshot is older than the end of another one scans rows that are gone; a trigger stands for that here.
// Behind them are rows still to be claimed, and from a lane that is called drained nothing is claimed before the next hint.
func TestALaneOfWhichScannedRowsAreGoneIsNotDrained(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "", "", "", "", "", "")
	b.exec(b.pool, `CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`)
	b.exec(b.pool, `CREATE TRIGGER keep BEFORE DELETE ON penstock.ready FOR EACH ROW
	                  WHEN (OLD.pos = `+fmt.Sprint(b.count(`SELECT min(pos) FROM penstock.ready`))+`) EXECUTE FUNCTION public.keep()`)
	c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 5})
	if len(c.Locks) != 4 || c.Scanned != 5 || c.Drained || c.TryLater {
		t.Errorf("%d locks, %d rows scanned, drained %v, contended %v; want 4, 5, false, false",
			len(c.Locks), c.Scanned, c.Drained, c.TryLater)
	}
	b.exec(b.pool, `DROP TRIGGER keep ON penstock.ready`)
	b.want(len(b.claim(5)), 3)
}
