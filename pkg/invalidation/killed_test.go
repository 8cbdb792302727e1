package invalidation

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// kill ends the connection of a transaction as a crash of its client would, and waits until the server knows.
func (b *bed) kill(tx pgx.Tx) {
	b.Helper()
	b.exec(b.pool, `SELECT pg_terminate_backend($1, 10000)`, tx.Conn().PgConn().PID())
	if err := tx.Commit(context.WithoutCancel(b.ctx)); err == nil {
		b.Fatal("the killed transaction committed")
	}
}

func TestAClaimerThatIsKilledBeforeItsCommitTakesNothing(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "K", "K")
	tx := b.begin()
	c, err := b.q.WithTx(tx).Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: usual, Limit: 9, IgnoreRowLocks: true})
	if err != nil || len(c.Locks) != 2 {
		t.Fatalf("claimed %d locks (%v)", len(c.Locks), err)
	}
	b.kill(tx)
	if n := b.settleOn(b.pool, doneAll(c.Locks...)...); n != 0 {
		t.Errorf("%d tokens of a claim that never was are accepted", n)
	}
	if found, err := locksIn(b.q.Reclaim(b.ctx, there, 1)); len(found) != 0 || err != nil {
		t.Errorf("found %d locks of a claim that never was (%v)", len(found), err)
	}
	again := b.claim(9)
	got := entryIDs(again...)
	if slices.Sort(got); !slices.Equal(got, ids) {
		t.Errorf("claimed %v, want %v", got, ids)
	}
	for _, l := range again {
		for _, dead := range c.Locks {
			if l.Key == dead.Key && l.Token <= dead.Token {
				t.Errorf("token %d of %s is not newer than that of the killed claim, %d", l.Token, l.Key, dead.Token)
			}
		}
	}
}

func TestASettlerThatIsKilledBeforeItsCommitSettlesNothing(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "K", "K")
	locks := b.claim(9)
	before := b.snapshot()
	tx := b.begin()
	if n := b.settleOn(tx, doneAll(locks...)...); n != 2 {
		t.Fatalf("settled %d", n)
	}
	b.kill(tx)
	if b.snapshot() != before {
		t.Error("a killed settler left something behind")
	}
	b.settle(doneAll(locks...)...)
}

// A settler that takes its time, or hangs, holds up nobody but those who settle the same locks.
func TestASlowSettlerHoldsUpNobody(t *testing.T) {
	b := newBed(t, Config{})
	b.pushAll(b.pool, Push{}, Push{LockKey: "K"}, Push{DueAt: time.Now().Add(time.Hour)})
	locks := b.claim(9)
	slow := b.begin()
	b.settleOn(slow, doneAll(locks...)...)

	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	quick := *b
	quick.ctx = ctx
	came := quick.push("K", "", "J")
	quick.exec(b.pool, `UPDATE penstock.entry SET due_at = clock_timestamp() WHERE status = 'initial'`)
	if n, err := b.q.Promote(ctx, 10); n != 1 || err != nil {
		t.Fatalf("promoted %d (%v)", n, err)
	}
	if _, err := b.q.Sweep(ctx, usual, 0, 1<<40); err != nil {
		t.Fatal(err)
	}
	if _, err := Lanes(ctx, b.pool, []int32{b.q.ID}, 10); err != nil {
		t.Fatal(err)
	}
	got := quick.claimAs(ClaimRequest{Node: there, Lane: usual, Limit: 9}).Locks
	if len(got) != 3 || slices.ContainsFunc(got, func(l *Lock) bool { return l.Key == "K" }) {
		t.Errorf("claimed %v beside a slow settler, want all but K", entryIDs(got...))
	}
	held, err := HeldLocks(ctx, b.pool)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := b.q.Recover(ctx, refs(held), nil, false); err != nil || len(r.Freed) != 3 {
		t.Errorf("recovered %v (%v), want the three that nobody settles", r.Freed, err)
	}
	b.commit(slow)
	rest := b.claim(9)
	if !slices.Contains(entryIDs(rest...), came[0]) {
		t.Errorf("claimed %v, want %d of K among them", entryIDs(rest...), came[0])
	}
}

// The caller of a settle whose answer was lost settles again: what was recorded stays recorded, once.
func TestASettleWhoseAnswerWasLostIsRepeatedSafely(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "K", "K")
	locks := b.claim(9)
	broken, cancel := context.WithCancel(b.ctx)
	cancel()
	if _, err := b.q.Settle(broken, here, doneAll(locks...)); err == nil {
		t.Fatal("a settle on a broken connection said it worked")
	}
	b.settle(doneAll(locks...)...) // committed, and suppose that nobody heard
	b.settleOn(b.pool, doneAll(locks...)...)
	if n := b.count(`SELECT count(*) FROM penstock.result`); n != 3 {
		t.Errorf("%d results, want 3", n)
	}
}
