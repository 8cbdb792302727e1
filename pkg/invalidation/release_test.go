package invalidation

import (
	"errors"
	"reflect"
	"testing"
	"time"
)

// An entry whose worker is busy comes back at its old position: the entries behind it in its key wait for it, and nobody has
// to promote it.
func TestAReleasedEntryKeepsItsPositionInItsKey(t *testing.T) {
	for _, delay := range []time.Duration{0, time.Hour} {
		b := newBed(t, Config{})
		ids := b.push("K", "K", "K")
		l := b.claimOne()
		b.want(entryIDs(l), ids)
		b.settle(last(Release(l, ids[0], delay)))
		if l.Requeued == nil {
			t.Errorf("after a release for %s the node is not told where the key stands", delay)
		}
		later := b.push("K", "")
		if delay > 0 {
			c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10})
			b.want(entryIDs(c.Locks...), later[1:])
			b.settle(doneAll(c.Locks...)...)
			if c = b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10}); c.DelayedFor <= 0 || c.DelayedFor > delay || len(c.Locks) != 0 {
				t.Errorf("found %+v, want to be told for how long the key is held back", c)
			}
			b.exec(b.pool, `UPDATE penstock.ready SET not_before = clock_timestamp() - interval '1 second' WHERE not_before IS NOT NULL`)
		}
		locks := b.claim(10)
		if len(locks) == 0 {
			t.Fatal("the key cannot be claimed again")
		}
		b.want(entryIDs(locks[0]), append(ids[:3:3], later[0]))
		if locks[0].position != int64(ids[0]) {
			t.Errorf("the key came back at position %d, want %d", locks[0].position, ids[0])
		}
		b.settle(doneAll(locks...)...)
	}
}

func TestAReleasedSoloEntryKeepsItsPosition(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "")
	l := b.claimOne()
	b.settle(last(Release(l, ids[0], 0)))
	b.want(l.Requeued, &LaneHead{Lane: usual, Position: int64(ids[0])})
	l = b.claimOne()
	b.settle(last(Release(l, ids[0], time.Hour)))
	b.want(b.count(`SELECT count(*) FROM penstock.ready WHERE entry_id = $1 AND pos = $1 AND not_before > now()`, ids[0]), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1 AND status = 'pending'`, ids[0]), 1)
	b.want(entryIDs(b.claim(10)...), ids[1:])
}

// The longest delay of a lock counts, whichever of its endings brings it.
func TestADelayOfALockOutlivesItsLaterEndings(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("K", "K")
	l := b.claimOne()
	b.settle(Release(l, ids[0], time.Hour))
	b.settle(last(Release(l, ids[1], 0)))
	b.want(len(b.claim(1)), 0)
}

// A snoozed entry becomes due later; what is behind it in its key goes on.
func TestAPostponedEntryLetsOthersOfItsKeyGo(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("K", "K")
	l := b.claimOne()
	b.settle(Postpone(l, ids[0], time.Hour), last(Release(l, ids[1], 0)))
	b.want(entryIDs(b.claim(1)...), ids[1:])
}

// The answer to a settle was lost, and the endings are settled again: no attempt is counted twice.
func TestARetryThatIsSettledAgainSpendsOneAttempt(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("K", "K")
	l := b.claimOne()
	for range 2 {
		b.settle(Retry(l, ids[0], Failure{Error: "x"}, time.Hour, 0))
	}
	b.want(b.count(`SELECT attempt FROM penstock.entry WHERE id = $1`, ids[0]), 1)
	b.want(b.count(`SELECT jsonb_array_length(history) FROM penstock.entry WHERE id = $1`, ids[0]), 1)
	b.settle(last(Done(l, ids[1], nil, 0)))
}

// Between the transaction that finishes a solo entry and its node's next settlement the lock is there and the entry is
// not: no violation, until the lock is older than the grace.
func TestInvariantsHoldBetweenAFinishAndTheEndOfItsLock(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("")
	l := b.claimOne()
	tx := b.begin()
	if err := b.q.FinishTx(b.ctx, tx, here, Done(l, ids[0], nil, 0)); err != nil {
		t.Fatal(err)
	}
	b.commit(tx)
	check := func(grace string) (found string) {
		const sql = `SELECT coalesce(string_agg(invariant, ', '), '') FROM penstock.check_invariants($1::text::interval)`
		b.must(b.pool.QueryRow(b.ctx, sql, grace).Scan(&found))
		return found
	}
	b.want(check("1 hour"), "")
	b.want(check("0"), "a lock has entries")
	b.exec(b.pool, `UPDATE penstock.result SET token = token + 1`)
	b.want(check("1 hour"), "tokens of a key grow")
	b.exec(b.pool, `UPDATE penstock.result SET token = token - 1`)
	b.settle(last(Done(l, ids[0], nil, 0)))
}

// The same for a cancelled entry, whose rate is given back once.
func TestACancelThatIsSettledAgainIsRefundedOnce(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("rate", limitOptions{Rate: 1e-7, Burst: 10}, map[string]int{"work": 1})["work"]
	ids := b.push("K", "K", "K")
	l := b.claimOne()
	for range 3 {
		b.settle(Cancel(l, ids[0], "by hand"))
	}
	b.want(b.count(`SELECT round(units)::int FROM penstock.bucket`), 10-2)
	b.settle(Done(l, ids[1], nil, 0), last(Done(l, ids[2], nil, 0)))
}

// A handler finishes its entry while the node settles those before it in the lock: it must not write to the lock.
func TestFinishTxWritesNothingToItsLock(t *testing.T) {
	b := newBed(t, Config{})
	b.q = b.under("rate", limitOptions{Rate: 1e-7, Burst: 10}, map[string]int{"work": 1})["work"]
	ids := b.push("K", "K")
	l := b.claimOne()
	before := *l
	tx := b.begin()
	b.must(b.q.FinishTx(b.ctx, tx, here, Done(l, ids[0], nil, 0)))
	b.commit(tx)
	if !reflect.DeepEqual(*l, before) {
		t.Errorf("the lock is %+v, was %+v", *l, before)
	}
	b.settle(Done(l, ids[0], nil, 0), last(Yield(l, ids[1])))
	b.want(b.count(`SELECT round(units)::int FROM penstock.bucket`), 10-1)
}

// A handler whose COMMIT had no answer tries again: what the first transaction committed must not be committed twice.
func TestFinishTxOfAnEntryThatHasEndedIsRefused(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("K", "K")
	l := b.claimOne()
	tx := b.begin()
	if err := b.q.FinishTx(b.ctx, tx, here, Done(l, ids[0], nil, 0)); err != nil {
		t.Fatal(err)
	}
	b.commit(tx)
	again := b.begin()
	if err := b.q.FinishTx(b.ctx, again, here, Done(l, ids[0], nil, 0)); !errors.Is(err, ErrLockLost) {
		t.Errorf("a second finish ended with %v, want ErrLockLost", err)
	}
	if err := again.Rollback(b.ctx); err != nil { // it holds the lock record, which the next finish takes
		t.Fatal(err)
	}
	b.settle(last(Done(l, ids[1], nil, 0)))
}
