package invalidation

import (
	"fmt"
	"slices"
	"testing"
)

// A finish goes to where the claim saw lock record and entries. Others may stand there by then.
func TestAFinishEndsItsOwnEntriesWhereverTheyStand(t *testing.T) {
	keys := make([]string, 30)
	for i := range keys {
		keys[i] = fmt.Sprint("K", i)
	}
	for kind, keys := range map[string][]string{"solo": make([]string, 30), "groups": keys} {
		for _, table := range []string{"lock", "entry_work"} {
			t.Run(kind+" "+table, func(t *testing.T) {
				b := newBed(t, Config{})
				b.push(keys...)
				b.settle(doneAll(b.claim(10)...)...)
				mine, others := b.claim(10), b.claim(5)
				b.settle(releaseAll(others...)...)
				mine, gone := mine[:5], mine[5:]
				b.settle(releaseAll(gone...)...)
				b.exec(b.pool, `VACUUM FULL penstock.`+table)
				b.settle(doneAll(mine...)...)
				b.want(b.count(`SELECT count(*) FROM penstock.result`), 15)
				b.want(b.count(`SELECT count(*) FROM penstock.lock`), 0)
				left := entryIDs(b.claim(30)...)
				b.want(left[:10], slices.Concat(entryIDs(gone...), entryIDs(others...)))
				b.want(len(left), 15)
			})
		}
	}
}

// An entry that changes at the very moment is not ended as what it was: the finish waits, and sees it as it is.
func TestAFinishThatMeetsAChangeOfItsEntryLooksAgain(t *testing.T) {
	for _, key := range []string{"", "K"} {
		b := newBed(t, Config{})
		id := b.push(key)[0]
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
}

// A server that came back without its last commits hands tokens and places out again. What a node sends of before ends nothing.
func TestAStaleFinishUnderTokensHandedOutAgainEndsNothing(t *testing.T) {
	b := newBed(t, Config{})
	b.push(make([]string, 10)...)
	stale := b.claim(10)
	b.exec(b.pool, `DELETE FROM penstock.lock`)
	b.exec(b.pool, `VACUUM penstock.lock`)
	b.exec(b.pool, `SELECT setval('penstock.token_seq', $1)`, int64(stale[0].Token)+2)
	b.exec(b.pool, `INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id) SELECT queue_id, priority, flow, id, id FROM penstock.entry`)
	fresh := b.claimAs(ClaimRequest{Node: there, Lane: usual, Limit: 10}).Locks
	if stale[3].Token != fresh[0].Token || stale[3].tid != fresh[3].tid {
		t.Fatalf("tokens %d and %d, places %v and %v: not what this test is about", stale[3].Token, fresh[0].Token, stale[3].tid, fresh[3].tid)
	}
	b.want(b.settleOn(b.pool, doneAll(stale...)...), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.lock`), 10)
	b.settleOn(b.pool, doneAll(stale[3], fresh[0])...) // together with one that is ours, under the same token
	b.want(b.count(`SELECT count(*) FROM penstock.lock`), 9)
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 9)
	b.settle(doneAll(fresh[1:]...)...)
}

// Results that meet a new partition take the statement back, and it goes again.
func TestAFinishWhoseResultsMeetANewPartitionGoesAgain(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "")
	locks := b.claim(2)
	b.exec(b.pool, `CREATE SEQUENCE public.tries`)
	b.exec(b.pool, `CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	    IF nextval('public.tries') = 1 THEN RAISE EXCEPTION 'moved' USING ERRCODE = '23514'; END IF; RETURN NEW; END $$`)
	b.exec(b.pool, `CREATE TRIGGER refuse BEFORE INSERT ON penstock.result FOR EACH ROW EXECUTE FUNCTION public.refuse()`)
	b.want(b.settleOn(b.pool, doneAll(locks...)...), 2)
	b.want(b.count(`SELECT last_value FROM public.tries`), 3) // refused once
	b.want(b.count(`SELECT count(*) FROM penstock.lock`), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.result`), 2)
}
