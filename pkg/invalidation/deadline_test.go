package invalidation

import (
	"testing"
	"time"
)

// Another session may hold up a claim for long: the deadlines of its entries come no earlier for it, and that time is
// counted once in the time for which they have waited.
func TestTimesOfEntriesHoldWhereTheirClaimWaited(t *testing.T) {
	for _, key := range []string{"", "K"} {
		b := newBed(t, Config{})
		pushing := time.Now()
		by := pushing.Add(time.Minute).Truncate(time.Microsecond)
		b.pushAll(b.pool, Push{StartBy: by, FinishBy: by, LockKey: key})
		pushed := time.Now()
		tx := b.gate("true")
		asking := time.Now()
		claimed := later(b, func() ([]*Lock, error) {
			c, err := b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 9})
			return c.Locks, err
		})
		b.awaitBlocked(tx)
		blocked := time.Now()
		time.Sleep(time.Second)
		released := time.Now()
		b.commit(tx)
		locks := claimed()
		now := time.Now()
		if len(locks) != 1 || len(locks[0].Entries) != 1 {
			t.Fatalf("key %q: claimed %v, want one lock of one entry", key, locks)
		}
		e := &locks[0].Entries[0]
		for name, at := range map[string]time.Time{"start_by": e.StartBy, "finish_by": e.FinishBy} {
			if late := at.Sub(by); late < -10*time.Millisecond || late > 30*time.Second {
				t.Errorf("key %q: the %s of the claimed entry is %v after that of the push", key, name, late)
			}
		}
		// Both statements may have waited for a connection, which is counted twice.
		twice := blocked.Sub(asking) + now.Sub(released) + 10*time.Millisecond
		waited := e.Waited + now.Sub(locks[0].ClaimedAt)
		if least, most := now.Sub(pushed), now.Sub(pushing)+twice; waited < least-10*time.Millisecond || waited > most {
			t.Errorf("key %q: the entry has waited for %v, want %v to %v", key, waited, least, most)
		}
	}
}
