package invalidation

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func TestFinishLeavesAResultAndNothingElse(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "K", "K")
	for _, l := range b.claim(9) {
		b.settle(endAll(func(l *Lock, e EntryID) Ending {
			return Done(l, e, json.RawMessage(`{"ok": true}`), 1500*time.Millisecond)
		}, l)...)
	}
	for table, want := range map[string]int{"entry": 0, "ready": 0, "lock": 0, "result": 3, "failure": 0} {
		if n := b.count(`SELECT count(*) FROM penstock.` + table); n != want {
			t.Errorf("%d rows in %s, want %d", n, table, want)
		}
	}
	if n := b.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'done' AND node_id = $1 AND run_ms = 1500
	                 AND result = '{"ok": true}' AND attempt = 0 AND token IS NOT NULL`, here); n != 3 {
		t.Errorf("%d results are as they should be, want 3", n)
	}
}

func TestAQueueMayKeepNoResults(t *testing.T) {
	b := newBed(t, Config{ResultRetention: -1})
	b.push("", "K")
	b.settle(doneAll(b.claim(9)...)...)
	if n := b.count(`SELECT count(*) FROM penstock.result`); n != 0 {
		t.Errorf("%d results were kept", n)
	}
}

func TestEveryEndingUnderAStaleTokenIsRefused(t *testing.T) {
	endings := map[string]func(*Lock, EntryID) Ending{
		"done":    func(l *Lock, e EntryID) Ending { return Done(l, e, nil, 0) },
		"retry":   func(l *Lock, e EntryID) Ending { return Retry(l, e, Failure{Error: "x"}, 0, 0) },
		"fail":    func(l *Lock, e EntryID) Ending { return Fail(l, e, Failure{Error: "x"}, 0) },
		"release": func(l *Lock, e EntryID) Ending { return Release(l, e, 0) },
		"snooze":  func(l *Lock, e EntryID) Ending { return Postpone(l, e, time.Hour) },
		"yield":   Yield,
		"expire":  func(l *Lock, e EntryID) Ending { return Expire(l, e, "x") },
		"cancel":  func(l *Lock, e EntryID) Ending { return Cancel(l, e, "x") },
	}
	b := newBed(t, Config{})
	b.push("", "K", "K")
	old := b.claim(9)
	b.settle(releaseAll(old...)...)
	fresh := b.claim(9)
	before := b.snapshot()
	for name, end := range endings {
		for _, l := range old {
			if n := b.settleOn(b.pool, endAll(end, l)...); n != 0 {
				t.Errorf("%s of %s under a stale token was accepted", name, l.Key)
			}
		}
		if after := b.snapshot(); after != before {
			t.Fatalf("%s under a stale token changed the tables:\n%s\n%s", name, before, after)
		}
	}
	b.settle(doneAll(fresh...)...)
}

// snapshot is all that there is about entries, as one text.
func (b *bed) snapshot() (s string) {
	b.Helper()
	err := b.pool.QueryRow(b.ctx, `SELECT jsonb_build_array(
	    (SELECT jsonb_agg(to_jsonb(e) ORDER BY id) FROM penstock.entry e), (SELECT jsonb_agg(to_jsonb(r) ORDER BY pos) FROM penstock.ready r),
	    (SELECT jsonb_agg(to_jsonb(l) ORDER BY token) FROM penstock.lock l),
	    (SELECT count(*) FROM penstock.result), (SELECT count(*) FROM penstock.failure))::text`).Scan(&s)
	if err != nil {
		b.Fatal(err)
	}
	return s
}

func TestSettlingTwiceDoesNoHarm(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "K", "K")
	for _, l := range b.claim(9) {
		endings := doneAll(l)
		b.settle(endings...)
		before := b.snapshot()
		if n := b.settleOn(b.pool, endings...); n != 0 {
			t.Errorf("%s was ours still after it was settled", l.Key)
		}
		if b.snapshot() != before {
			t.Errorf("settling %s again changed something", l.Key)
		}
	}
	// A settle that is repeated while the lock goes on: the part that was recorded stays as it is.
	b.push("K", "K")
	l := b.claimOne()
	first := Done(l, l.Entries[0].ID, nil, 0)
	b.settle(first)
	b.settle(first, last(Done(l, l.Entries[1].ID, nil, 0)))
	if n := b.count(`SELECT count(*) FROM penstock.result`); n != 5 {
		t.Errorf("%d results, want 5", n)
	}
}

func TestAnEndingSettlesItsEntryOnlyWhileTheGroupGoesOn(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("K", "K", "K")
	l := b.claimOne()
	b.settle(Done(l, ids[0], nil, 0))
	if n := b.count(`SELECT count(*) FROM penstock.lock WHERE token = $1`, l.Token); n != 1 {
		t.Fatal("the lock went with an ending that was not the last")
	}
	if got := b.claim(9); len(got) != 0 {
		t.Fatal("a key was claimed whose lock goes on")
	}
	b.settle(Fail(l, ids[1], Failure{Error: "no"}, 0), last(Done(l, ids[2], nil, 0)))
	if n := b.count(`SELECT count(*) FROM penstock.entry`); n != 0 {
		t.Errorf("%d entries are left", n)
	}
}

func TestPushDuringALockIsNeverLost(t *testing.T) {
	endings := map[string]func(*Lock, EntryID) Ending{
		"done":    func(l *Lock, e EntryID) Ending { return Done(l, e, nil, 0) },
		"retry":   func(l *Lock, e EntryID) Ending { return Retry(l, e, Failure{Error: "x"}, time.Hour, 0) },
		"fail":    func(l *Lock, e EntryID) Ending { return Fail(l, e, Failure{Error: "x"}, 0) },
		"snooze":  func(l *Lock, e EntryID) Ending { return Postpone(l, e, time.Hour) },
		"expire":  func(l *Lock, e EntryID) Ending { return Expire(l, e, "x") },
		"cancel":  func(l *Lock, e EntryID) Ending { return Cancel(l, e, "x") },
		"release": func(l *Lock, e EntryID) Ending { return Release(l, e, 0) },
		"yield":   Yield,
	}
	b := newBed(t, Config{})
	for name, end := range endings {
		for _, swept := range []string{"", " swept"} {
			lane := Lane{Priority: 1, Flow: name + swept}
			push := func(n int) []EntryID {
				return b.pushAll(b.pool, slices.Repeat([]Push{{LockKey: name + swept, Flow: lane.Flow}}, n)...)
			}
			claim := func() []*Lock { return b.claimAs(ClaimRequest{Node: here, Lane: lane, Limit: 9}).Locks }
			old := push(1)
			locks := claim()
			came := push(2)
			if swept != "" {
				if n, err := b.q.Sweep(b.ctx, lane, 0, 1<<40); n != 1 || err != nil {
					t.Fatalf("%s: swept %d (%v)", name, n, err)
				}
			}
			b.settle(endAll(end, locks...)...)
			want := came
			if name == "release" || name == "yield" {
				want = append(old, came...)
			}
			if got := entryIDs(claim()...); !slices.Equal(got, want) {
				t.Errorf("%s%s: claimed %v, want %v", name, swept, got, want)
			}
		}
	}
}

func TestReleasePutsAKeyBackWhereItStood(t *testing.T) {
	for _, keys := range [][]string{{"", ""}, {"K", "L"}} {
		b := newBed(t, Config{})
		ids := b.push(keys...)
		b.settle(releaseAll(b.claimOne())...)
		first := b.claimOne()
		if got := entryIDs(first); !slices.Equal(got, ids[:1]) {
			t.Fatalf("claimed %v after the release, want the first again, %v", got, ids[:1])
		}
		if e := first.Entries[0]; e.Attempt != 0 || e.Crashes != 0 {
			t.Errorf("a release spent an attempt: %+v", e)
		}
	}
}

func TestAGroupThatIsHandedBackHalfDoneGoesOnInOrder(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("K", "K", "K", "L")
	l := b.claimOne()
	b.settle(Done(l, ids[0], nil, 0), Release(l, ids[1], 0), last(Release(l, ids[2], 0)))
	if got := entryIDs(b.claimOne()); !slices.Equal(got, ids[1:3]) {
		t.Fatalf("claimed %v, want %v", got, ids[1:3])
	}
}

// The entries of a batch end in their own ways; the position of the key does not go by the last of them.
func TestAnEntryOfABatchThatIsHandedBackKeepsItsPosition(t *testing.T) {
	b := newBed(t, Config{QuantumCount: 2})
	ids := b.push("K", "K", "L")
	l := b.claimOne()
	b.settle(Release(l, ids[0], 0), last(Done(l, ids[1], nil, 0)))
	if got := entryIDs(b.claimOne()); !slices.Equal(got, ids[:1]) {
		t.Fatalf("claimed %v, want the entry that was handed back, %d", got, ids[0])
	}
}

func TestAGroupThatIsHandedBackAgainAndAgainKeepsItsOrder(t *testing.T) {
	b := newBed(t, Config{QuantumCount: 2})
	want := b.push("K", "K", "K", "K", "K")
	var ran []EntryID
	for round := 0; len(ran) < len(want) && round < 20; round++ {
		l := b.claimOne()
		want = append(want, b.push("K")[:1*min(1, max(0, 3-round))]...)
		if round >= 3 {
			b.settle(doneAll(l)...)
			ran = append(ran, entryIDs(l)...)
			continue
		}
		first := l.Entries[0].ID
		ran = append(ran, first)
		endings := []Ending{Done(l, first, nil, 0)}
		for _, e := range l.Entries[1:] {
			endings = append(endings, Release(l, e.ID, 0))
		}
		endings[len(endings)-1].Last = true
		b.settle(endings...)
	}
	if len(ran) < len(want) || !slices.IsSorted(ran) || !slices.Equal(ran[:len(want)], want) {
		t.Fatalf("ran %v, want %v", ran, want)
	}
}

func TestYieldSendsAKeyToTheEndOfTheLine(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("K", "K", "L")
	l := b.claimOne()
	b.settle(Done(l, ids[0], nil, 0), Yield(l, ids[1]))
	if got := entryIDs(b.claimOne(), b.claimOne()); !slices.Equal(got, []EntryID{ids[2], ids[1]}) {
		t.Fatalf("claimed %v, want L before the rest of K", got)
	}
}

func TestRetryWaitsThenStandsBehindTheOthers(t *testing.T) {
	for _, keys := range [][]string{{"", ""}, {"K", "L"}} {
		b := newBed(t, Config{})
		ids := b.push(keys...)
		l := b.claimOne()
		b.settle(last(Retry(l, ids[0], Failure{Class: "oom", Error: "out of memory"}, time.Hour, time.Second)))
		if n, err := b.q.Promote(b.ctx, 10); n != 0 || err != nil {
			t.Fatalf("promoted %d (%v) an hour early", n, err)
		}
		b.exec(b.pool, `UPDATE penstock.entry SET due_at = clock_timestamp() WHERE id = $1`, ids[0])
		if n, err := b.q.Promote(b.ctx, 10); n != 1 || err != nil {
			t.Fatalf("promoted %d (%v), want 1", n, err)
		}
		second, first := b.claimOne(), b.claimOne()
		if got := entryIDs(second, first); !slices.Equal(got, []EntryID{ids[1], ids[0]}) {
			t.Fatalf("claimed %v, want the retry behind the other", got)
		}
		if first.Entries[0].Attempt != 1 {
			t.Errorf("attempt is %d, want 1", first.Entries[0].Attempt)
		}
		if n := b.count(`SELECT count(*) FROM penstock.entry WHERE history->0->>'error' = 'out of memory' AND history->0->>'class' = 'oom'
		                 AND history->0->'attempt' = '1' AND history->0->'run_ms' = '1000' AND jsonb_array_length(history) = 1`); n != 1 {
			t.Error("the history does not tell the error")
		}
	}
}

func TestSnoozeSpendsNoAttempt(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("")
	l := b.claimOne()
	b.settle(last(Postpone(l, ids[0], time.Millisecond)))
	if n := b.count(`SELECT count(*) FROM penstock.entry WHERE status = 'initial' AND attempt = 0 AND history IS NULL`); n != 1 {
		t.Error("a snoozed entry should be initial, with its attempts and history as they were")
	}
}

func TestHistoryKeepsTheNewestTwentyErrors(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("")
	for range 25 {
		b.settle(last(Retry(b.claimOne(), ids[0], Failure{Error: "again"}, 0, 0)))
		if n, err := b.q.Promote(b.ctx, 1); n != 1 || err != nil {
			t.Fatalf("promoted %d (%v)", n, err)
		}
	}
	if n := b.count(`SELECT jsonb_array_length(history) FROM penstock.entry WHERE attempt = 25 AND history->-1->'attempt' = '25'`); n != 20 {
		t.Errorf("history has %d errors, want 20", n)
	}
}

func TestFailKeepsTheEntryWholeWithItsHistory(t *testing.T) {
	b := newBed(t, Config{})
	high := int16(5)
	start := time.Now().Add(time.Hour)
	ids := b.pushAll(b.pool, Push{
		Payload: json.RawMessage(`{"a": 1}`), LockKey: "K", Flow: "f", Priority: &high, StartBy: start, FinishBy: start.Add(time.Hour),
		Cost: 2.5, Name: "job", Trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", Callback: json.RawMessage(`{"url": "u"}`),
	})
	l := b.claimAs(ClaimRequest{Node: here, Lane: Lane{5, "f"}, Limit: 1}).Locks[0]
	b.settle(last(Fail(l, ids[0], Failure{Class: "input", Error: `no such file "x" at line 17`}, time.Second)))
	if n := b.count(`SELECT count(*) FROM penstock.failure WHERE entry_id = $1 AND queue_id = $2 AND payload = '{"a": 1}' AND lock_key = 'K' AND flow = 'f'
	    AND priority = 5 AND cost = 2.5 AND name = 'job' AND trace = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01' AND callback = '{"url": "u"}' AND attempt = 1 AND crashes = 0
	    AND start_by IS NOT NULL AND finish_by IS NOT NULL AND class = 'input' AND fingerprint = 'no such file _ at line _'
	    AND history->0->>'error' = error`, ids[0], b.q.ID); n != 1 {
		t.Error("the failure row lost something")
	}
}

func TestTextsThatPostgresCannotStoreDoNotHoldUpABatch(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "", "", "")
	locks := b.claim(9)
	bad := Failure{Class: "a\x00b", Error: "nul \x00 and \xff " + strings.Repeat("é", 9000), Stack: "\x00"}
	b.settle(last(Fail(locks[0], ids[0], bad, 0)), last(Retry(locks[1], ids[1], bad, 0, 0)),
		last(Cancel(locks[2], ids[2], "nul \x00")), last(Done(locks[3], ids[3], nil, 0)))
}

func TestExpireAndCancelLeaveTheirOutcome(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "K")
	locks := b.claim(9)
	b.exec(b.pool, `INSERT INTO penstock.cancel_request (queue_id, entry_id, actor, reason) VALUES ($1, $2, 'me', 'enough')`, b.q.ID, ids[1])
	b.settle(last(Expire(locks[0], ids[0], "too late")), last(Cancel(locks[1], ids[1], "enough")))
	if n := b.count(`SELECT count(*) FROM penstock.result WHERE (entry_id, outcome, reason) IN (($1, 'expired', 'too late'), ($2, 'cancelled', 'enough'))`, ids[0], ids[1]); n != 2 {
		t.Errorf("%d outcomes, want 2", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.cancel_request`); n != 0 {
		t.Error("the wish to cancel outlived the entry")
	}
}

func TestTwoPromotersShareTheDue(t *testing.T) {
	b := newBed(t, Config{})
	b.pushAll(b.pool, Push{DueAt: time.Now().Add(time.Hour)}, Push{DueAt: time.Now().Add(time.Hour)}, Push{DueAt: time.Now().Add(time.Hour), LockKey: "K"})
	if got := b.claim(9); len(got) != 0 {
		t.Fatalf("claimed %d entries that are not due", len(got))
	}
	b.exec(b.pool, `UPDATE penstock.entry SET due_at = clock_timestamp() - id * interval '1 second'`)
	one := b.begin()
	if n, err := b.q.WithTx(one).Promote(b.ctx, 2); n != 2 || err != nil {
		t.Fatalf("the first promoted %d (%v), want 2", n, err)
	}
	if n, err := b.q.Promote(b.ctx, 2); n != 1 || err != nil {
		t.Fatalf("the second promoted %d (%v), want what was left, 1", n, err)
	}
	b.commit(one)
	if got := b.claim(9); len(got) != 3 {
		t.Fatalf("claimed %d locks, want 3", len(got))
	}
}

// Entries that come due together are placed by when each is due, wherever their rows are on the disk, and behind what was
// accepted before.
func TestDueEntriesAreInLineByWhenTheyAreDue(t *testing.T) {
	b := newBed(t, Config{})
	far := time.Now().Add(time.Hour)
	ids := b.pushAll(b.pool, Push{DueAt: far}, Push{DueAt: far}, Push{DueAt: far}, Push{DueAt: far, LockKey: "K"}, Push{})
	b.exec(b.pool, `UPDATE penstock.entry SET due_at = clock_timestamp() - id * interval '1 second' WHERE due_at IS NOT NULL`)
	if n, err := b.q.Promote(b.ctx, 9); n != 4 || err != nil {
		t.Fatalf("promoted %d (%v), want 4", n, err)
	}
	b.want(entryIDs(b.claim(9)...), []EntryID{ids[4], ids[3], ids[2], ids[1], ids[0]})
}

func TestFinishTxCommitsWithTheHandlersEffects(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `CREATE TABLE public.effect (n int)`)
	b.push("", "K")
	for _, l := range b.claim(9) {
		ending := last(Done(l, l.Entries[0].ID, nil, 0))
		for _, commit := range []bool{false, true} {
			tx := b.begin()
			b.exec(tx, `INSERT INTO public.effect VALUES (1)`)
			if err := b.q.FinishTx(b.ctx, tx, here, ending); err != nil {
				t.Fatal(err)
			}
			if commit {
				b.commit(tx)
			} else if err := tx.Rollback(b.ctx); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.q.FinishTx(b.ctx, b.begin(), here, ending); !errors.Is(err, ErrLockLost) {
			t.Errorf("finishing again: %v, want ErrLockLost", err)
		}
	}
	if n := b.count(`SELECT count(*) FROM public.effect`); n != 2 {
		t.Errorf("%d effects, want one an entry", n)
	}
}

func TestAttemptsBeyondWhatIsCountedAreStillRetriedAndFail(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "")
	b.exec(b.pool, `UPDATE penstock.entry SET attempt = 32767`)
	locks := b.claim(2)
	retry := Retry(locks[0], ids[0], Failure{Error: "no"}, time.Hour, 0)
	fail := Fail(locks[1], ids[1], Failure{Error: "no"}, 0)
	retry.Last, fail.Last = true, true
	if ours, err := b.q.Settle(b.ctx, here, []Ending{retry, fail}); err != nil || len(ours) != 2 {
		t.Errorf("settled %v: %v", ours, err)
	}
}

func TestPromotionDoesNotWalkOverWhatIsNotDue(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `INSERT INTO penstock.entry_work (id, queue_id, status, priority, due_at, payload)
	    SELECT nextval('penstock.entry_id_seq'), $1, 'initial', 1, now() + interval '1 hour', '{}' FROM generate_series(1, 5000)`, b.q.ID)
	b.explainer().explain("promote", statement{b.q.sql.promote, fmt.Sprintf(`%d, 100`, b.q.ID)}).walk(func(p *plan) {
		if p.Removed > 0 || p.buffers() > 100 {
			t.Errorf("%s on %s reads %d buffers and drops %.0f rows, though nothing is due", p.Type, p.Relation, p.buffers(), p.Removed)
		}
	})
}

func TestANodeThatHoldsNothingMayRenewWithNoTokens(t *testing.T) {
	b := newBed(t, Config{})
	if _, err := Renew(b.ctx, b.pool, here, Beat{}); err != nil {
		t.Error(err)
	}
}

func TestADroppedQueueLeavesNothing(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.push("", "", "")
	locks := b.claim(3)
	done, fail := Done(locks[0], ids[0], nil, 0), Fail(locks[1], ids[1], Failure{Error: "no"}, 0)
	done.Last, fail.Last = true, true
	b.settle(done, fail)
	b.exec(b.pool, `INSERT INTO penstock.cancel_request (entry_id, queue_id, actor, reason) VALUES ($1, $2, 'me', 'no')`, ids[2], b.q.ID)
	b.exec(b.pool, `SELECT penstock.drop_queue('work', force => true)`)
	var left int
	if err := b.pool.QueryRow(b.ctx, `SELECT (SELECT count(*) FROM penstock.result) + (SELECT count(*) FROM penstock.failure)
	    + (SELECT count(*) FROM penstock.cancel_request) + (SELECT count(*) FROM penstock.lock)`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d rows are left (%v)", left, err)
	}
}

func TestReclaimedLocksComeInTheOrderOfTheirPlaces(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "", "", "", "", "")
	first, rest := b.claim(3), b.claim(3)
	// Handed back, the first three take their places anew, on the disk behind the others.
	b.settle(releaseAll(append(rest, first...)...)...)
	b.exec(b.pool, `CREATE TABLE public.scratch AS SELECT * FROM penstock.ready ORDER BY pos DESC`)
	b.exec(b.pool, `DELETE FROM penstock.ready`)
	b.exec(b.pool, `INSERT INTO penstock.ready SELECT * FROM public.scratch ORDER BY pos DESC`)
	b.claim(6)
	locks, err := locksIn(b.q.Reclaim(b.ctx, here, b.n))
	if err != nil || len(locks) != 6 {
		t.Fatalf("reclaimed %d locks: %v", len(locks), err)
	}
	for i := range locks[1:] {
		if locks[i].Entries[0].ID > locks[i+1].Entries[0].ID {
			t.Errorf("entry %d comes before %d", locks[i].Entries[0].ID, locks[i+1].Entries[0].ID)
		}
	}
}

// A pool of a user may have another isolation by default. Under a fixed snapshot an ending would not see the entries of its
// key that came meanwhile, and nothing would be queued for them.
func TestEndingsAreRefusedUnderAFixedSnapshot(t *testing.T) {
	b := newBed(t, Config{})
	b.push("K")
	l := b.claimOne()
	tx, err := b.pool.BeginTx(b.ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(b.ctx)
	if _, err := b.q.WithTx(tx).Settle(b.ctx, here, doneAll(l)); !errors.Is(err, ErrState) {
		t.Errorf("settled under repeatable read: %v", err)
	}
}
