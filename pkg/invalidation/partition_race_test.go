package invalidation

import "testing"

// A settle that is under way while a partition is attached sends its result to the default partition, which takes it
// no more. It must try again, not turn a good result into a failure.
func TestResultIsKeptWhileAPartitionIsAttached(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	locks := b.claim(1)
	holder := b.begin()
	b.exec(holder, `SELECT FROM penstock.lock FOR UPDATE`)
	settled := later(b, func() ([]Token, error) { return b.q.Settle(b.ctx, here, doneAll(locks...)) })
	b.awaitBlocked(holder)
	if _, err := EnsurePartitions(b.ctx, b.pool, 2); err != nil {
		t.Fatal(err)
	}
	b.commit(holder)
	if ours := settled(); len(ours) != 1 {
		t.Errorf("settled %d, want 1", len(ours))
	}
	if n := b.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`); n != 1 {
		t.Errorf("%d results, want 1", n)
	}
}
