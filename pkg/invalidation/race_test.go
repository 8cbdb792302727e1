package invalidation

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/penstock/penstock/internal/postgres"
)

// Each test here opens one race window by hand and fails when the guard that it names is taken out.

// Guard: Claim looks at the end of the answer (rows.Err), which comes after the commit.
func TestClaimHandsOutNothingThatDoesNotCommit(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "K")
	b.exec(b.pool, `CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS
	                $$ BEGIN RAISE EXCEPTION 'the disk is gone'; END $$`)
	b.exec(b.pool, `CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON penstock.lock DEFERRABLE INITIALLY DEFERRED
	                FOR EACH ROW EXECUTE FUNCTION public.refuse()`)
	c, err := b.q.Claim(b.ctx, ClaimRequest{Node: here, ClaimID: 1, Lane: usual, Limit: 10})
	if err == nil || len(c.Locks) > 0 {
		t.Fatalf("claim handed out %d locks that were never committed (error: %v)", len(c.Locks), err)
	}
}

// Guard: the same, seen from the outside: while the commit is under way nothing is handed out.
func TestClaimReturnsAfterItsCommit(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	b.exec(b.pool, `CREATE FUNCTION public.linger() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS
	                $$ BEGIN PERFORM pg_advisory_xact_lock(4712); RETURN NULL; END $$`)
	b.exec(b.pool, `CREATE CONSTRAINT TRIGGER linger AFTER INSERT ON penstock.lock DEFERRABLE INITIALLY DEFERRED
	                FOR EACH ROW EXECUTE FUNCTION public.linger()`)
	disk := b.begin()
	b.exec(disk, `SELECT pg_advisory_xact_lock(4712)`)
	returned := make(chan struct{})
	claimed := later(b, func() (Claimed, error) {
		defer close(returned)
		return b.q.Claim(b.ctx, ClaimRequest{Node: here, ClaimID: 1, Lane: usual, Limit: 10})
	})
	b.awaitBlocked(disk)
	select {
	case <-returned:
		t.Fatal("claim returned before its commit")
	default:
	}
	b.commit(disk)
	locks := claimed().Locks
	if got := b.settleOn(b.pool, doneAll(locks...)...); got != 1 {
		t.Fatalf("settled %d of 1 lock right after the claim", got)
	}
}

// Guard: the sweep's FOR KEY SHARE SKIP LOCKED. A settler has looked for entries of K, and found none, but has not
// committed. The sweep still sees K's lock; if it took away the ready row of the entry that came since, nobody
// would ever put one back.
func TestSweepLeavesReadyRowsOfAKeyThatIsBeingSettled(t *testing.T) {
	b := newBed(t, Config{})
	b.push("K")
	lock := b.claimOne()
	settler := b.begin()
	b.settleOn(settler, doneAll(lock)...)
	came := b.push("K")
	swept, err := b.q.Sweep(b.ctx, usual, 0, 1<<40)
	if err != nil || swept != 0 {
		t.Fatalf("swept %d ready rows (%v), want none", swept, err)
	}
	b.commit(settler)
	if got := entryIDs(b.claim(1)...); !slices.Equal(got, came) {
		t.Fatalf("claimed %v, want %v", got, came)
	}
}

// Guard: hold first, then look for entries in a new statement. The settler waits for a sweep; an entry that comes
// meanwhile, and whose ready row the sweep takes, must be seen by the settler when it goes on.
func TestSettleSeesWhatASweepTookWhileItWaited(t *testing.T) {
	b := newBed(t, Config{})
	b.push("K")
	lock := b.claimOne()
	sweep := b.begin()
	b.exec(sweep, `SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = 'K' FOR KEY SHARE`, b.q.ID)
	settled := later(b, func() ([]Token, error) { return b.q.Settle(b.ctx, here, doneAll(lock)) })
	b.awaitBlocked(sweep)
	came := b.push("K")
	if swept, err := b.q.WithTx(sweep).Sweep(b.ctx, usual, 0, 1<<40); err != nil || swept != 1 {
		t.Fatalf("swept %d ready rows (%v), want the one of the locked key", swept, err)
	}
	b.commit(sweep)
	if ours := settled(); len(ours) != 1 {
		t.Fatalf("settled %d locks, want 1", len(ours))
	}
	if got := entryIDs(b.claim(1)...); !slices.Equal(got, came) {
		t.Fatalf("claimed %v, want %v", got, came)
	}
}

// Guard: the pusher's FOR UPDATE on the ready row it relies on. Were the row only looked at, a claim could take it
// away before the push commits, and the pushed entry would have none.
func TestClaimLeavesReadyRowsThatAPushReliesOn(t *testing.T) {
	b := newBed(t, Config{})
	first := b.push("K")
	pusher := b.begin()
	second := b.pushOn(pusher, "K")
	c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10})
	if len(c.Locks) != 0 || c.Skipped != 1 {
		t.Fatalf("claimed %v and left %d; a pusher holds the ready row", entryIDs(c.Locks...), c.Skipped)
	}
	b.commit(pusher)
	if got, want := entryIDs(b.claim(10)...), append(first, second...); !slices.Equal(got, want) {
		t.Fatalf("claimed %v, want %v", got, want)
	}
}

// Guard: a stubborn claim leaves the ready row where it is, for the pusher relies on it.
func TestAClaimThatIgnoresRowLocksPassesAnOpenPushByAndLosesNothing(t *testing.T) {
	b := newBed(t, Config{})
	first := b.push("K")
	pusher := b.begin()
	second := b.pushOn(pusher, "K")
	locks := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10, IgnoreRowLocks: true}).Locks
	if got := entryIDs(locks...); !slices.Equal(got, first) {
		t.Fatalf("claimed %v, want %v", got, first)
	}
	b.settle(doneAll(locks...)...)
	b.commit(pusher)
	if got := entryIDs(b.claim(10)...); !slices.Equal(got, second) {
		t.Fatalf("claimed %v, want %v", got, second)
	}
}

// Guard: the pusher's SKIP LOCKED. A ready row that a claim has in hand promises nothing: the push neither waits
// for it nor relies on it.
func TestPushNeitherWaitsForAClaimNorReliesOnItsReadyRow(t *testing.T) {
	b := newBed(t, Config{})
	b.push("K")
	claimer := b.begin()
	c, err := b.q.WithTx(claimer).Claim(b.ctx, ClaimRequest{Node: here, ClaimID: 1, Lane: usual, Limit: 1})
	if err != nil || c.Skipped != 0 {
		t.Fatalf("claim left %d (%v)", c.Skipped, err)
	}
	came := b.push("K") // would hang here
	b.commit(claimer)
	b.settle(endAll(func(l *Lock, e EntryID) Ending { return Done(l, e, nil, 0) }, c.Locks...)...)
	if got := entryIDs(b.claim(1)...); !slices.Equal(got, came) {
		t.Fatalf("claimed %v, want %v", got, came)
	}
}

// Guard: a push by a snapshot relies on no ready row of another transaction, which a claim may have deleted since: its lock
// would fail, and with it the transaction of the pusher, as often as a node claims the key.
func TestAPushBySnapshotIsNotRefusedForAClaimOfItsKey(t *testing.T) {
	for _, level := range []string{"REPEATABLE READ", "SERIALIZABLE"} {
		b := newBed(t, Config{})
		b.push("K", "J")
		pusher := b.begin()
		b.exec(pusher, `SET TRANSACTION ISOLATION LEVEL `+level)
		b.exec(pusher, `SELECT FROM penstock.queue`)
		running := b.claim(1)
		came := b.pushOn(pusher, "K", "J")
		b.settle(doneAll(running...)...)
		b.commit(pusher)
		rest := b.claim(10)
		if got := entryIDs(rest...); !slices.Contains(got, came[0]) || !slices.Contains(got, came[1]) || len(got) != 3 {
			t.Errorf("%s: claimed %v, want %v and the one before them", level, got, came)
		}
		b.settle(doneAll(rest...)...)
		b.claim(10) // deletes ready rows of keys without entries
		b.checkInvariants()
	}
}

// Guard: a push by a snapshot relies on a ready row of its own transaction, which no claim can have deleted. With a row for
// each push, claims of the lane met nothing else for as many rounds as it takes the sweep to delete them. The transaction
// ages a row before it has an id of its own, as any statement of the application may.
func TestUnracedPushesOfATransactionBySnapshotShareAReadyRow(t *testing.T) {
	const (
		plain  = `PERFORM penstock.push_many(name, ARRAY['{}'::jsonb], ARRAY['K']);`
		nested = `BEGIN ` + plain + ` EXCEPTION WHEN division_by_zero THEN NULL; END;` // a savepoint for each push
		undone = `BEGIN ` + plain + ` PERFORM 1 / 0; EXCEPTION WHEN division_by_zero THEN NULL; END; ` + plain
	)
	for name, push := range map[string]string{"plain": plain, "savepoints": nested, "savepoints undone": undone} {
		b := newBed(t, Config{})
		b.push("K")
		pusher := b.begin()
		b.exec(pusher, `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`)
		b.exec(pusher, `SELECT age(xmin) FROM penstock.queue`)
		b.exec(pusher, fmt.Sprintf(`DO $$
			DECLARE name text := '%s';
			BEGIN FOR i IN 1..2000 LOOP %s END LOOP; END $$`, b.q.Name, push))
		b.commit(pusher)
		other := b.push("J")
		if n := b.count(`SELECT count(*) FROM penstock.ready WHERE lock_key = 'K'`); n != 2 {
			t.Errorf("%s: %d ready rows after 2,000 pushes, want the one from before and another", name, n)
		}
		locks := b.claim(10)
		if got := entryIDs(locks...); !slices.Contains(got, other[0]) {
			t.Errorf("%s: the claim takes %d entries, and none of the key that was pushed after", name, len(got))
		}
		b.settle(doneAll(locks...)...)
		b.checkInvariants()
	}
}

// Guard: entries of a group are read after the claim, by a statement of its own. K has ready rows in two lanes.
// The claim of one lane is held up on key J with a snapshot in which K's entries are pending; meanwhile K is
// claimed by the other lane and finished. What the old snapshot shows must not run again.
func TestGroupClaimIgnoresEntriesThatItsSnapshotIsTooOldFor(t *testing.T) {
	b := newBed(t, Config{})
	low := int16(0)
	b.pushAll(b.pool, Push{LockKey: "J", Priority: &low}, Push{LockKey: "K", Priority: &low}, Push{LockKey: "K"})
	gate := b.gate(`NEW.lock_key = 'J'`)
	slow := later(b, func() (Claimed, error) {
		return b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: Lane{Priority: 0}, Limit: 10})
	})
	b.awaitBlocked(gate)
	b.settle(doneAll(b.claimOne())...)
	b.commit(gate)
	locks := slow().Locks
	for _, l := range locks {
		if l.Key == "K" {
			t.Errorf("handed out %v of K, which ended before", entryIDs(l))
		}
	}
	b.settle(doneAll(locks...)...)
	if n := b.count(`SELECT count(*) FROM penstock.lock`); n != 0 {
		t.Errorf("%d lock records are left, of keys without entries", n)
	}
}

// Guard: the try-lock under which a key's token is drawn and its lock inserted. A claimer that drew its token and
// was then held up would else insert a smaller token than one that was handed out meanwhile.
func TestTokensOfAKeyOnlyGrow(t *testing.T) {
	b := newBed(t, Config{})
	low := int16(0)
	b.pushAll(b.pool, Push{LockKey: "K", Priority: &low}, Push{LockKey: "K"})
	gate := b.gate(`true`)
	slow := later(b, func() (Claimed, error) {
		return b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 1, Lane: Lane{Priority: 0}, Limit: 1})
	})
	b.awaitBlocked(gate)
	var newest Token
	for _, l := range b.claim(1) {
		newest = l.Token
		b.settle(releaseAll(l)...)
	}
	b.commit(gate)
	for _, l := range slow().Locks {
		if l.Token <= newest {
			t.Errorf("token %d was handed out after %d", l.Token, newest)
		}
		b.settle(releaseAll(l)...)
	}
}

// Guard: hold locks records in key order. The other settler has A and goes on to B; were this one to take B before
// it waits for A, the two would wait for each other.
func TestSettlersNeverWaitInARing(t *testing.T) {
	for _, keys := range [][]string{{"A", "B"}, {"", ""}} {
		b := newBed(t, Config{})
		b.push(keys...)
		locks := b.claim(2)
		slices.SortFunc(locks, func(a, b *Lock) int { return int(a.Token - b.Token) })
		other := b.begin()
		b.exec(other, `SELECT FROM penstock.lock WHERE token = $1 FOR UPDATE`, locks[0].Token)
		settled := later(b, func() ([]Token, error) { return b.q.Settle(b.ctx, here, doneAll(locks[1], locks[0])) })
		b.awaitBlocked(other)
		if _, err := other.Exec(b.ctx, `SELECT FROM penstock.lock WHERE token = $1 FOR UPDATE NOWAIT`, locks[1].Token); err != nil {
			t.Fatalf("a settler that waits for the first lock holds the second: %v", err)
		}
		b.commit(other)
		if ours := settled(); len(ours) != 2 {
			t.Fatalf("settled %d locks, want 2", len(ours))
		}
	}
}

// Guard: bulk pushes insert their idempotency keys, and their unique keys, in sorted order.
func TestBulkPushesNeverWaitInARing(t *testing.T) {
	for name, push := range map[string]func(key string) Push{
		"idempotency": func(key string) Push { return Push{IdempotencyKey: key} },
		"uniqueness":  func(key string) Push { return Push{UniqueKey: key, UniquePolicy: WhileActive} },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{})
			other := b.begin()
			first := b.pushAll(other, push("a"))
			bulk := later(b, func() ([]EntryID, error) {
				pushed, err := b.q.Push(b.ctx, withPayload(push("b")), withPayload(push("a")))
				if err != nil {
					return nil, err
				}
				return []EntryID{pushed[0].ID, pushed[1].ID}, nil
			})
			b.awaitBlocked(other)
			second := b.pushAll(other, push("b"))
			b.commit(other)
			if got, want := bulk(), append(second, first...); !slices.Equal(got, want) {
				t.Fatalf("the bulk push got %v, want the entries that were first, %v", got, want)
			}
		})
	}
}

// Guard: a settle in a transaction must see what was committed after it began, so it is refused where it could not.
func TestFinishTxIsRefusedUnderAFixedSnapshot(t *testing.T) {
	b := newBed(t, Config{})
	b.push("K")
	lock := b.claimOne()
	tx := b.begin()
	b.exec(tx, `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`)
	ending := last(Done(lock, lock.Entries[0].ID, nil, 0))
	if err := b.q.FinishTx(b.ctx, tx, here, ending); err == nil {
		t.Fatal("FinishTx under REPEATABLE READ was accepted; it cannot see entries that came since")
	} else if code := postgres.Code(err); code != "" {
		t.Fatalf("FinishTx was refused by the server (%s), want a plain answer: %v", code, err)
	}
}

// FinishTx cannot try again what meets a change: the caller's transaction is aborted by then.
func TestFinishTxThatMeetsAChangeSaysSo(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	lock := b.claimOne()
	ending := last(Done(lock, lock.Entries[0].ID, nil, 0))
	operatorTx, tx := b.begin(), b.begin()
	b.exec(operatorTx, `UPDATE penstock.entry SET cost = 2`)
	answer := later(b, func() (error, error) { return b.q.FinishTx(b.ctx, tx, here, ending), nil })
	b.awaitBlocked(operatorTx)
	b.commit(operatorTx)
	err := answer()
	if !errors.Is(err, ErrConflict) {
		t.Errorf("finish met a change: %v, want ErrConflict", err)
	}
	run := &Run{Queue: b.q, Entry: lock.Entries[0], Lock: lock, Node: here}
	if e := Judge(run, nil, fmt.Errorf("save: %w", err), 0, 0); e.verb != verbRelease {
		t.Errorf("a conflict is judged %+v, want a release: it spends no attempt", e)
	}
	if err := tx.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	b.settle(ending)
}
