package invalidation

import (
	"testing"
	"time"
)

// A claim that waits before it reads the entries covers one that came due meanwhile: the heartbeat that names the entry
// is the evidence that it ran.
func TestACrashCountsForTheEntryThatTheHeartbeatNamesThoughItCameDueAfterTheClaim(t *testing.T) {
	b := newBed(t, Config{QuantumCount: 10})
	ids := b.push("K", "K", "K")
	b.exec(b.pool, `UPDATE penstock.entry SET due_at = clock_timestamp()`)
	l := b.claimOne()
	b.want(entryIDs(l), ids)
	b.exec(b.pool, `UPDATE penstock.lock SET claimed_at = claimed_at - interval '1 minute'`)
	beat := Beat{Tokens: []Token{l.Token}, Running: []Token{l.Token}, RunningEntries: []EntryID{ids[1]}}
	if _, err := Renew(b.ctx, b.pool, here, beat); err != nil {
		t.Fatal(err)
	}
	b.crash()
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 1 AND id = $1`, ids[1]), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE crashes > 0`), 1)
}

// An entry that is to be tried again may be in line again before its node dies, which runs the next one of the key.
func TestACrashCountsForNoEntryThatWasHandedBackAfterTheHeartbeat(t *testing.T) {
	b := newBed(t, Config{QuantumCount: 10})
	ids := b.push("K", "K")
	l := b.claimOne()
	b.want(entryIDs(l), ids)
	beat := Beat{Tokens: []Token{l.Token}, Running: []Token{l.Token}, RunningEntries: []EntryID{ids[0]}}
	if _, err := Renew(b.ctx, b.pool, here, beat); err != nil {
		t.Fatal(err)
	}
	b.settle(Retry(l, ids[0], Failure{Error: "x"}, time.Microsecond, 0))
	n, err := b.q.Promote(b.ctx, 10)
	b.must(err)
	b.want(n, 1)
	b.crash()
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 1 AND id = $1`, ids[1]), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE crashes > 0`), 1)
}

// crash lets the lease of the node lapse, with the time of its last heartbeat as it was, and recovers its lock.
func (b *bed) crash() {
	b.Helper()
	b.exec(b.pool, `UPDATE penstock.node SET lease = interval '1 microsecond' WHERE id = $1`, here)
	held, err := HeldLocks(b.ctx, b.pool)
	b.must(err)
	if r, err := b.q.Recover(b.ctx, refs(held), nil, true); err != nil || len(r.Freed) != 1 {
		b.Fatalf("freed %v (%v)", r.Freed, err)
	}
}
