package invalidation

import (
	"slices"
	"testing"
)

// A finish goes to where the claim saw lock record and entry. Others may stand there by then.
func TestAFinishEndsItsOwnEntriesWhereverTheyStand(t *testing.T) {
	for name, rewrite := range map[string]string{"locks": `VACUUM FULL penstock.lock`, "entries": `VACUUM FULL penstock.entry_work`} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{})
			b.push(slices.Repeat([]string{""}, 30)...)
			b.settle(doneAll(b.claim(10)...)...)
			mine, others := b.claim(10), b.claim(5)
			b.settle(releaseAll(others...)...)
			mine, gone := mine[:5], mine[5:]
			b.settle(releaseAll(gone...)...)
			b.exec(b.pool, rewrite)
			b.settle(doneAll(mine...)...)
			b.want(b.count(`SELECT count(*) FROM penstock.result`), 15)
			b.want(b.count(`SELECT count(*) FROM penstock.lock`), 0)
			left := entryIDs(b.claim(30)...)
			b.want(left[:10], slices.Concat(entryIDs(gone...), entryIDs(others...)))
			b.want(len(left), 15)
		})
	}
}

// An entry that changes at the very moment is not ended as what it was: the finish waits, and sees it as it is.
func TestAFinishThatMeetsAChangeOfItsEntryLooksAgain(t *testing.T) {
	b := newBed(t, Config{})
	id := b.push("")[0]
	lock := b.claimOne()
	operator := b.begin()
	b.exec(operator, `UPDATE penstock.entry SET attempt = 7 WHERE id = $1`, id)
	finished := later(b, func() (int, error) {
		ours, err := b.q.Settle(b.ctx, here, doneAll(lock))
		return len(ours), err
	})
	b.awaitBlocked(operator)
	b.commit(operator)
	b.want(finished(), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 0)
	b.want(b.count(`SELECT attempt FROM penstock.result`), 7)
}
