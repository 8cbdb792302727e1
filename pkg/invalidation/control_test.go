package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

var operator = By{Actor: "ann", Reason: "it is on fire"}

// newControlBed is a bed with both nodes registered, so that the schema's own check of every invariant must hold too.
func newControlBed(t *testing.T, c Config) *bed {
	t.Helper()
	b := newBed(t, c)
	for _, id := range []NodeID{here, there} {
		n := Node{ID: id, Name: map[NodeID]string{here: "here", there: "there"}[id], Application: "default", Lease: time.Hour, Queues: []int32{b.q.ID}}
		if err := Register(b.ctx, b.pool, n); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if !t.Failed() {
			b.wantInvariants()
		}
	})
	return b
}

func (b *bed) wantInvariants() {
	b.Helper()
	for _, v := range b.violations() {
		b.Errorf("invariant broken: %s", v)
	}
}

func (b *bed) violations() []string {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	rows, err := b.pool.Query(ctx, `SELECT invariant || ': ' || detail FROM penstock.check_invariants()`)
	if err != nil {
		b.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		b.Fatal(err)
	}
	return found
}

func (b *bed) cancel(id EntryID) Cancelled {
	b.Helper()
	answer, err := CancelEntry(b.ctx, b.pool, id, operator)
	if err != nil {
		b.Fatal(err)
	}
	return answer
}

func (b *bed) outcome(id EntryID) Ended {
	b.Helper()
	e, err := Outcome(b.ctx, b.pool, id)
	if err != nil {
		b.Fatal(err)
	}
	return e
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *bed) want(got, want any) {
	b.Helper()
	g, err := json.Marshal(got)
	b.must(err)
	w, err := json.Marshal(want)
	b.must(err)
	if string(g) != string(w) {
		b.Errorf("got %s, want %s", g, w)
	}
}

// reasons are the codes of an entry's explanation.
func (b *bed) reasons(id EntryID) []string {
	b.Helper()
	e, err := Explain(b.ctx, b.pool, id)
	b.must(err)
	codes := []string{}
	for _, r := range e.Reasons {
		if r.Text == "" {
			b.Errorf("reason %s of entry %d has no text", r.Code, id)
		}
		codes = append(codes, r.Code)
	}
	slices.Sort(codes)
	return codes
}

func TestPauseSaysWhoWhyAndUntil(t *testing.T) {
	b := newControlBed(t, Config{})
	until := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	b.must(PauseQueue(b.ctx, b.pool, "work", operator, until))
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	p := q.Config.Paused
	if p == nil || p.Actor != "ann" || p.Reason != operator.Reason || !p.Until.Equal(until) || q.Config.Version <= b.q.Config.Version {
		t.Fatalf("paused is %+v at version %d, was %d", p, q.Config.Version, b.q.Config.Version)
	}
	b.must(ResumeQueue(b.ctx, b.pool, "work", operator))
	if q, err = Open(b.ctx, b.pool, "work"); err != nil || q.Config.Paused != nil {
		t.Fatalf("resumed queue is paused by %+v (%v)", q.Config.Paused, err)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE actor = 'ann' AND verb IN ('pause_queue', 'resume_queue')`), 2)
}

func TestPauseRefusesAnEndThatHasPassedAndAQueueThatIsNotThere(t *testing.T) {
	b := newControlBed(t, Config{})
	if err := PauseQueue(b.ctx, b.pool, "work", operator, time.Now().Add(-time.Second)); !errors.Is(err, ErrInvalid) {
		t.Errorf("pause until the past: %v", err)
	}
	if err := PauseQueue(b.ctx, b.pool, "nowhere", operator, time.Time{}); !errors.Is(err, ErrQueueNotFound) {
		t.Errorf("pause of a queue that is not there: %v", err)
	}
}

func TestDisabledQueueStillAccepts(t *testing.T) {
	b := newControlBed(t, Config{})
	b.must(DisableQueue(b.ctx, b.pool, "work", By{}))
	b.push("")
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	if q.Config.Disabled == nil || q.Config.Disabled.Actor == "" {
		t.Fatalf("disabled is %+v", q.Config.Disabled)
	}
	b.must(EnableQueue(b.ctx, b.pool, "work", By{}))
	if q, err = Open(b.ctx, b.pool, "work"); err != nil || q.Config.Disabled != nil {
		t.Fatalf("enabled queue is disabled by %+v (%v)", q.Config.Disabled, err)
	}
}

func TestDrainIsOrderedAtTheNextHeartbeat(t *testing.T) {
	b := newControlBed(t, Config{})
	b.must(DrainNode(b.ctx, b.pool, here, operator))
	o, err := Renew(b.ctx, b.pool, here, Beat{Tokens: []Token{}})
	if err != nil || !o.Draining || o.Reason != operator.Reason {
		t.Fatalf("orders are %+v (%v)", o, err)
	}
	if err := DrainNode(b.ctx, b.pool, 99, operator); !errors.Is(err, ErrNotFound) {
		t.Errorf("drain of a node that is not there: %v", err)
	}
}

func TestDisabledEntryIsNotClaimedAndComesBackWhereItStood(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("", "", "")
	b.must(DisableEntry(b.ctx, b.pool, ids[0], operator))
	b.must(DisableEntry(b.ctx, b.pool, ids[0], operator)) // a second time does nothing
	b.want(b.count(`SELECT count(*) FROM penstock.ready WHERE entry_id = $1`, ids[0]), 0)
	b.must(EnableEntry(b.ctx, b.pool, ids[0], operator))
	b.want(entryIDs(b.claim(1)...), ids[:1])
	b.want(len(b.claim(10)), 2)
	b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE verb IN ('disable_entry', 'enable_entry')`), 2)
}

func TestDisabledEntryOfAGroupLetsTheOthersPass(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("K", "K", "K")
	b.must(DisableEntry(b.ctx, b.pool, ids[0], operator))
	lock := b.claimOne()
	b.want(entryIDs(lock), ids[1:])
	b.must(EnableEntry(b.ctx, b.pool, ids[0], operator))
	b.settle(doneAll(lock)...)
	b.want(entryIDs(b.claim(1)...), ids[:1])
}

func TestDisablingTheWholeGroupLeavesNothingToClaimUntilEnabled(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("K", "K")
	for _, id := range ids {
		b.must(DisableEntry(b.ctx, b.pool, id, operator))
	}
	b.want(b.count(`SELECT count(*) FROM penstock.ready`), 0)
	for _, id := range ids {
		b.must(EnableEntry(b.ctx, b.pool, id, operator))
	}
	b.want(entryIDs(b.claim(10)...), ids)
}

func TestRunningEntryThatIsDisabledEndsItsRun(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("", "")
	locks := b.claim(2)
	for _, id := range ids {
		b.must(DisableEntry(b.ctx, b.pool, id, operator))
	}
	b.settle(append(doneAll(locks[0]), releaseAll(locks[1])...)...)
	b.want(b.outcome(ids[0]).Outcome, "done")
	b.want(len(b.claim(1)), 0) // handed back, but disabled
	b.must(EnableEntry(b.ctx, b.pool, ids[1], operator))
	b.want(entryIDs(b.claim(1)...), ids[1:])
}

func TestEntryEnabledWhileItRunsIsClaimedOnce(t *testing.T) {
	b := newControlBed(t, Config{})
	b.push("", "K")
	locks := b.claim(2)
	for _, id := range entryIDs(locks...) {
		b.must(DisableEntry(b.ctx, b.pool, id, operator))
		b.must(EnableEntry(b.ctx, b.pool, id, operator))
	}
	b.want(len(b.claim(5)), 0)
	b.settle(releaseAll(locks...)...)
	b.want(entryIDs(b.claim(5)...), entryIDs(locks...))
}

func TestDisabledEntryThatIsNotDueIsPromotedButNotClaimed(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.pushAll(b.pool, Push{DueAt: time.Now().Add(time.Hour)})[0]
	b.must(DisableEntry(b.ctx, b.pool, id, operator))
	b.exec(b.pool, `UPDATE penstock.entry SET due_at = now() WHERE id = $1`, id)
	n, err := b.q.Promote(b.ctx, 10)
	b.must(err)
	b.want(n, 1)
	b.want(len(b.claim(1)), 0)
	b.must(EnableEntry(b.ctx, b.pool, id, operator))
	b.want(entryIDs(b.claim(1)...), []EntryID{id})
}

func TestCancelEndsWhatDoesNotRun(t *testing.T) {
	b := newControlBed(t, Config{})
	solo := b.push("", "")
	group := b.push("K", "K", "K")
	later := b.pushAll(b.pool, Push{DueAt: time.Now().Add(time.Hour)})[0]
	disabled := b.push("")[0]
	b.must(DisableEntry(b.ctx, b.pool, disabled, operator))
	for _, id := range []EntryID{solo[0], group[0], group[2], later, disabled} {
		b.want(b.cancel(id), CancelDone)
		e := b.outcome(id)
		b.want([]string{e.Outcome, e.Reason}, []string{"cancelled", operator.Reason})
	}
	b.want(entryIDs(b.claim(10)...), []EntryID{solo[1], group[1]})
}

func TestCancelOfTheLastOfAGroupTakesItsReadyRow(t *testing.T) {
	b := newControlBed(t, Config{})
	b.want(b.cancel(b.push("K")[0]), CancelDone)
	b.want(b.count(`SELECT count(*) FROM penstock.ready`), 0)
	b.want(entryIDs(b.claim(1)...), []EntryID(nil))
	next := b.push("K")
	b.want(entryIDs(b.claim(1)...), next)
}

func TestCancelOfARunningEntryIsHeardAtTheHeartbeat(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("")[0]
	lock := b.claimOne()
	b.want(b.cancel(id), CancelRequested)
	b.want(b.cancel(id), CancelRequested)
	o, err := Renew(b.ctx, b.pool, here, Beat{Tokens: []Token{lock.Token}})
	b.must(err)
	b.want(o.Cancel, []CancelRequest{{QueueID: b.q.ID, Entry: id, Reason: operator.Reason}})
	b.settle(last(Cancel(lock, id, o.Cancel[0].Reason)))
	b.want(b.outcome(id).Outcome, "cancelled")
	b.want(b.count(`SELECT count(*) FROM penstock.cancel_request`), 0)
}

func TestCancelRequestOutlivesARetry(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("", "")
	locks := b.claim(2)
	b.want(b.cancel(ids[0]), CancelRequested)
	b.want(b.cancel(ids[1]), CancelRequested)
	b.settle(last(Retry(locks[0], ids[0], Failure{Error: "boom"}, time.Hour, 0)), last(Done(locks[1], ids[1], nil, 0)))
	n, err := b.q.SettleCancelRequests(b.ctx, 10)
	b.must(err)
	b.want(n, 1)
	b.want([]string{b.outcome(ids[0]).Outcome, b.outcome(ids[1]).Outcome}, []string{"cancelled", "done"})
	b.want(b.count(`SELECT count(*) FROM penstock.cancel_request`), 0)
}

func TestCancelOfAnEntryBehindARunningOneOfItsKeyEndsItAtOnce(t *testing.T) {
	b := newControlBed(t, Config{})
	b.push("K")
	lock := b.claimOne()
	behind := b.push("K")[0]
	b.want(b.cancel(behind), CancelDone)
	b.settle(doneAll(lock)...)
	b.want(len(b.claim(1)), 0)
}

func TestCancelOfWhatIsNotThereSaysSo(t *testing.T) {
	b := newControlBed(t, Config{})
	if _, err := CancelEntry(b.ctx, b.pool, 1<<40, operator); !errors.Is(err, ErrEntryNotFound) {
		t.Errorf("cancel of an unknown entry: %v", err)
	}
	id := b.push("")[0]
	b.settle(doneAll(b.claimOne())...)
	if _, err := CancelEntry(b.ctx, b.pool, id, operator); !errors.Is(err, ErrState) {
		t.Errorf("cancel of a done entry: %v", err)
	}
}

func TestCancelNeedsReadCommitted(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("")[0]
	tx, err := b.pool.BeginTx(b.ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	b.must(err)
	defer tx.Rollback(b.ctx)
	if _, err := CancelEntry(b.ctx, tx, id, operator); !errors.Is(err, ErrState) {
		t.Errorf("cancel under repeatable read: %v", err)
	}
}

func TestExpireEndsWhatIsLateAndLeavesWhatRuns(t *testing.T) {
	b := newControlBed(t, Config{})
	soon := time.Now().Add(time.Hour)
	ids := b.pushAll(b.pool, Push{StartBy: soon}, Push{FinishBy: soon}, Push{StartBy: soon, LockKey: "K"}, Push{StartBy: soon, DueAt: soon.Add(-time.Minute)},
		Push{StartBy: time.Now().Add(24 * time.Hour)}, Push{})
	runs := b.pushAll(b.pool, Push{StartBy: soon, FinishBy: soon, Flow: "running"}, Push{StartBy: soon, FinishBy: soon, Flow: "running", LockKey: "R"})
	lane := Lane{Priority: 1, Flow: "running"}
	b.want(len(b.claimAs(ClaimRequest{Node: here, Lane: lane, Limit: 5}).Locks), 2)
	b.exec(b.pool, `UPDATE penstock.entry SET start_by = now() - interval '1 minute' WHERE start_by = $1`, soon)
	b.exec(b.pool, `UPDATE penstock.entry SET finish_by = now() - interval '1 minute' WHERE finish_by = $1`, soon)
	n, err := b.q.Expire(b.ctx, 3)
	b.must(err)
	m, err := b.q.Expire(b.ctx, 3)
	b.must(err)
	b.want([]int{n, m}, []int{3, 1})
	for _, id := range ids[:4] {
		b.want(b.outcome(id).Outcome, "expired")
	}
	b.want(entryIDs(b.claim(10)...), ids[4:])
	late, err := ExpiredLocks(b.ctx, b.pool, 30*time.Second)
	b.must(err)
	got := []EntryID{}
	for _, l := range late {
		got = append(got, l.Entry)
	}
	slices.Sort(got)
	b.want(got, runs)
	late, err = ExpiredLocks(b.ctx, b.pool, time.Hour)
	b.must(err)
	b.want(len(late), 0)
}

func TestCancelledAndExpiredEntriesCallBack(t *testing.T) {
	b := newControlBed(t, Config{})
	call := json.RawMessage(`{"url": "https://example.com/hook", "context": {"order": 7}}`)
	ids := b.pushAll(b.pool, Push{Callback: call}, Push{Callback: call, StartBy: time.Now().Add(time.Hour)})
	b.cancel(ids[0])
	b.exec(b.pool, `UPDATE penstock.entry SET start_by = now() WHERE id = $1`, ids[1])
	_, err := b.q.Expire(b.ctx, 10)
	b.must(err)
	var said string
	b.must(b.pool.QueryRow(b.ctx, `SELECT string_agg(payload->>'type', ' ' ORDER BY e.id) FROM penstock.entry e JOIN penstock.queue q ON q.id = e.queue_id
	                               WHERE q.name = 'webhook' AND payload#>>'{data,context,order}' = '7'`).Scan(&said))
	b.want(said, "entry.cancelled entry.expired")
}

func TestInvariantsSeeAnEntryThatWasLost(t *testing.T) {
	b := newControlBed(t, Config{})
	b.push("", "K")
	b.want(len(b.violations()), 0)
	for _, damage := range []string{
		`DELETE FROM penstock.ready`,
		`INSERT INTO penstock.result (queue_id, entry_id, created_at, attempt, outcome) SELECT queue_id, id, now(), 0, 'done' FROM penstock.entry WHERE lock_key IS NULL`,
		`UPDATE penstock.entry SET status = 'initial'`,
		`DELETE FROM penstock.node`,
	} {
		tx := b.begin()
		if damage == `DELETE FROM penstock.node` {
			b.claim(5)
		}
		b.exec(tx, damage)
		var n int
		b.must(tx.QueryRow(b.ctx, `SELECT count(*) FROM penstock.check_invariants()`).Scan(&n))
		if n == 0 {
			t.Errorf("check_invariants sees nothing wrong after %s", damage)
		}
		b.must(tx.Rollback(b.ctx))
	}
}
