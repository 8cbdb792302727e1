package invalidation

import "testing"

// A claim that waits before it reads the entries covers one that came due meanwhile, and the clock may be set back
// between the due time and the claim: the heartbeat that names the entry is the evidence that it ran.
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
	b.exec(b.pool, `UPDATE penstock.node SET beat_at = beat_at - interval '2 hours' WHERE id = $1`, here)
	held, err := HeldLocks(b.ctx, b.pool)
	b.must(err)
	if r, err := b.q.Recover(b.ctx, held, true); err != nil || len(r.Freed) != 1 {
		t.Fatalf("freed %v (%v)", r.Freed, err)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 1 AND id = $1`, ids[1]), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE crashes > 0`), 1)
}
