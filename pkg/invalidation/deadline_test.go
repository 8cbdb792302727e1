package invalidation

import (
	"testing"
	"time"
)

// Another session may hold up a claim for long, and the deadlines of its entries come no earlier for it.
func TestADeadlineIsNoEarlierForAClaimThatWaited(t *testing.T) {
	for _, key := range []string{"", "K"} {
		b := newBed(t, Config{})
		by := time.Now().Add(time.Minute).Truncate(time.Microsecond)
		b.pushAll(b.pool, Push{StartBy: by, FinishBy: by, LockKey: key})
		tx := b.gate("true")
		claimed := later(b, func() ([]*Lock, error) {
			c, err := b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 9})
			return c.Locks, err
		})
		b.awaitBlocked(tx)
		time.Sleep(time.Second)
		b.commit(tx)
		locks := claimed()
		if len(locks) != 1 || len(locks[0].Entries) != 1 {
			t.Fatalf("key %q: claimed %v, want one lock of one entry", key, locks)
		}
		e := &locks[0].Entries[0]
		for name, at := range map[string]time.Time{"start_by": e.StartBy, "finish_by": e.FinishBy} {
			if late := at.Sub(by); late < -10*time.Millisecond || late > 30*time.Second {
				t.Errorf("key %q: the %s of the claimed entry is %v after that of the push", key, name, late)
			}
		}
	}
}
