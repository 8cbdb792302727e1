package invalidation

import (
	"fmt"
	"testing"
)

// A limit that is far from what runs is not counted (ADR 12): a claim under it reads a page more for each lock than one
// of a queue without limits, and as many where ten thousand locks are held.
func TestALimitThatDoesNotBindCostsTheSameAtAnyNumberOfLocks(t *testing.T) {
	b := newBed(t, Config{})
	b.freeze()
	b.fill(30_000)
	x := b.explainer()
	args := fmt.Sprintf(`%d, 1::smallint, '{""}', '{%%d}', 100, %d, 1`, b.q.ID, int64(here))
	cost := func(name, sql, more string, from int64) int {
		s := statement{sql, fmt.Sprintf(args, from) + more}
		x.explain(name, s)
		return x.explain(name, s).buffers()
	}
	hold := func(n int) (mark int64) {
		for n > 0 {
			c := b.claimAs(ClaimRequest{Node: here, Lane: soloLane, Limit: 1000, From: mark})
			n, mark = n-len(c.Locks), c.LowWater
		}
		return mark
	}
	free := cost("free", b.q.sql.claim.deleteFirst, "", 0)
	many := 1_000_000
	b.q = b.under("units", limitOptions{MaxUnits: &many}, map[string]int{"work": 1})["work"]
	limits := fmt.Sprintf(`, '{%d}', 0`, b.q.limits[0])
	hold(1) // counts the locks once
	few := cost("limited", b.q.sql.claim.deleteFirstLimited, limits, 0)
	mark := hold(10_000)
	held := cost("limited", b.q.sql.claim.deleteFirstLimited, limits, mark)
	near := 15_000
	b.must(setLimit(b.ctx, b.pool, "units", limitOptions{MaxUnits: &near}))
	counted := cost("limited", b.q.sql.claim.deleteFirstLimited, limits, mark)
	t.Logf("a claim of 100 reads %d buffers without a limit, %d under a distant one, %d of these beside 10,000 locks, %d where "+
		"these are counted", free, few, held, counted)
	if few > free+150 || held > few+20 {
		t.Errorf("a claim reads %d buffers without a limit, %d under one that does not bind, %d with 10,000 locks", free, few, held)
	}
	if counted < held+100 {
		t.Errorf("a claim that counts 10,000 locks reads %d buffers, one that does not %d: this test tests nothing", counted, held)
	}
	b.exec(b.pool, `TRUNCATE penstock.entry_work, penstock.ready, penstock.lock`)
}
