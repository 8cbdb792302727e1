package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

var ann = By{Actor: "ann", Reason: "it is on fire"}

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
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
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

func (b *bed) cancel(id EntryID) string {
	b.Helper()
	answer, err := cancelEntry(b.ctx, b.pool, id, ann)
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

func TestCancelOfARunningEntryIsHeardAtTheHeartbeat(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("")[0]
	lock := b.claimOne()
	b.want(b.cancel(id), cancelRequested)
	b.want(b.cancel(id), cancelRequested)
	o, err := Renew(b.ctx, b.pool, here, Beat{Tokens: []Token{lock.Token}})
	b.must(err)
	b.want(o.Cancel, []CancelRequest{{QueueID: b.q.ID, Entry: id, Reason: ann.Reason}})
	b.settle(last(Cancel(lock, id, o.Cancel[0].Reason)))
	b.want(b.outcome(id).Outcome, "cancelled")
	b.want(b.count(`SELECT count(*) FROM penstock.cancel_request`), 0)
}

// A heartbeat whose node knew the lock has delivered the cancel. Others look its lock up no more, and the node hears of it
// again where it asks, and with each eighth heartbeat.
func TestADeliveredCancelIsNotLookedUpByEachHeartbeat(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("")[0]
	lock := b.claimOne()
	b.want(b.cancel(id), cancelRequested)
	beat := func(n NodeID, beat Beat) int {
		b.Helper()
		o, err := Renew(b.ctx, b.pool, n, beat)
		b.must(err)
		return len(o.Cancel)
	}
	b.want(beat(here, Beat{}), 1) // the answer of the claim is still on its way
	b.want(beat(there, Beat{}), 0)
	knows := Beat{Tokens: []Token{lock.Token}}
	b.want(beat(here, knows), 1)
	b.want(beat(here, knows), 0)
	x := b.explainer()
	x.explain("beat", statement{beatSQL, fmt.Sprintf(`%d, '{}', '{}', '{}', '{}', false`, there)}).walk(func(n *plan) {
		if n.Relation == "lock" && n.Loops > 0 {
			t.Errorf("a heartbeat of another node looks up the lock: %s %.0f times", n.Type, n.Loops)
		}
	})
	knows.Again = true
	b.want(beat(here, knows), 1)
	knows.Again = false
	again := 0
	for range 8 {
		again += beat(here, knows)
	}
	b.want(again, 1)
}

// A key may be claimed again before the leader settles the request. The node that has it now hears of the cancel with the
// first heartbeat after the leader's pass, once.
func TestACancelIsDeliveredAgainWhereItsKeyIsClaimedAgain(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("")[0]
	lock := b.claimOne()
	b.want(b.cancel(id), cancelRequested)
	pass := func() (delivered int) {
		b.Helper()
		_, err := b.q.SettleCancelRequests(b.ctx, 10)
		b.must(err)
		o, err := Renew(b.ctx, b.pool, here, Beat{Tokens: []Token{lock.Token}})
		b.must(err)
		return len(o.Cancel)
	}
	b.want(pass(), 1)
	b.want(pass(), 0)
	b.settle(releaseAll(lock)...)
	lock = b.claimOne()
	b.want(pass(), 1)
	b.want(pass(), 0)
}

func TestCancelRequestOutlivesARetry(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("", "")
	locks := b.claim(2)
	b.want(b.cancel(ids[0]), cancelRequested)
	b.want(b.cancel(ids[1]), cancelRequested)
	b.settle(last(Retry(locks[0], ids[0], Failure{Error: "boom"}, time.Hour, 0)), last(Done(locks[1], ids[1], nil, 0)))
	n, err := b.q.SettleCancelRequests(b.ctx, 10)
	b.must(err)
	b.want(n, 1)
	b.want([]string{b.outcome(ids[0]).Outcome, b.outcome(ids[1]).Outcome}, []string{"cancelled", "done"})
	b.want(b.count(`SELECT count(*) FROM penstock.cancel_request`), 0)
}

// Runs that do not end for their cancel keep no other request from being settled.
func TestCancelRequestsOfRunningEntriesHideNoOthers(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("", "", "", "")
	locks := b.claim(4)
	for _, id := range ids {
		b.want(b.cancel(id), cancelRequested)
	}
	b.settle(releaseAll(locks[3])...)
	n, err := b.q.SettleCancelRequests(b.ctx, 3)
	b.must(err)
	b.want(n, 1)
	b.want(b.outcome(locks[3].Entries[0].ID).Outcome, "cancelled")
	b.want(b.count(`SELECT count(*) FROM penstock.cancel_request`), 3)
}

// An entry that is tried again has started; what it ended in is not lost to a deadline for its start.
func TestStartByBindsUntilTheFirstError(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.pushAll(b.pool, Push{StartBy: time.Now().Add(time.Hour)}, Push{StartBy: time.Now().Add(time.Hour)})
	locks := b.claim(2)
	b.settle(last(Retry(locks[0], ids[0], Failure{Error: "boom"}, 0, 0)), last(Postpone(locks[1], ids[1], 0)))
	b.exec(b.pool, `UPDATE penstock.entry SET start_by = now() - interval '1 s' WHERE start_by IS NOT NULL`)
	n, err := b.q.Expire(b.ctx, 10)
	b.must(err)
	b.want(n, 1)
	b.want(b.outcome(ids[1]).Outcome, "expired")
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1`, ids[0]), 1)
}

// A run that was handed back had started, unless its handler says that it only waited, or no transaction was begun.
func TestStartByBindsNoEntryThatIsHandedBackAfterItsStart(t *testing.T) {
	interrupted := func(err error) error { return new(Interruptions).judge(t.Context(), 1, err) }
	runs := map[string]struct {
		used  time.Duration // below zero: the handler does not say
		err   error
		binds bool
	}{
		"drained":            {-1, errors.Join(errors.New("x"), ErrDraining), false},
		"lease lost":         {-1, ErrLeaseLost, false},
		"preempted":          {time.Second, NoCapacity(0, errors.New("preempted")), false},
		"no worker was free": {-1, NoCapacity(0, errors.New("busy")), true},
		"drained in line":    {0, ErrDraining, true},

		"its transaction was lost":          {-1, interrupted(io.ErrUnexpectedEOF), false},
		"its transaction was not begun":     {-1, interrupted(fmt.Errorf("%w: %w", postgres.ErrNotBegun, io.EOF)), true},
		"drained before its transaction":    {-1, errors.Join(postgres.ErrNotBegun, ErrDraining), true},
		"lease lost before it had begun it": {-1, fmt.Errorf("%w: %w", postgres.ErrNotBegun, ErrLeaseLost), true},
	}
	for _, key := range []string{"", "K"} {
		b := newControlBed(t, Config{})
		for name, run := range runs {
			soon := Push{StartBy: time.Now().Add(time.Hour), LockKey: key}
			ids := b.pushAll(b.pool, soon, soon)
			for _, l := range b.claim(2) {
				r := &Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}
				r.Charge(run.used)
				ending := last(Judge(r, nil, run.err, 0, 0))
				if r.Entry.ID != ids[0] {
					ending = last(Release(l, r.Entry.ID, 0))
				}
				_, _, err := b.q.SettleFree(b.ctx, here, []Ending{ending}, key == "")
				b.must(err)
			}
			b.exec(b.pool, `UPDATE penstock.entry SET start_by = now() - interval '1 s' WHERE start_by IS NOT NULL`)
			n, err := b.q.Expire(b.ctx, 10)
			b.must(err)
			if want := map[bool]int{true: 2, false: 1}[run.binds]; n != want {
				t.Errorf("%s, key %q: %d of 2 entries expired, want %d; one has not begun", name, key, n, want)
			}
			b.exec(b.pool, `DELETE FROM penstock.throttle`)
			b.exec(b.pool, `DELETE FROM penstock.ready`)
			b.exec(b.pool, `DELETE FROM penstock.entry`)
		}
	}
}

func TestStartByBindsNoEntryThatADeadNodeRan(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.pushAll(b.pool, Push{StartBy: time.Now().Add(time.Hour)})[0]
	b.claimOne()
	b.exec(b.pool, `UPDATE penstock.entry SET start_by = now() - interval '1 s'`)
	b.exec(b.pool, `UPDATE penstock.node SET beat_at = now() - interval '2 hours'`)
	held, err := HeldLocks(b.ctx, b.pool)
	b.must(err)
	r, err := b.q.Recover(b.ctx, refs(held), nil, true)
	b.must(err)
	b.want(len(r.Freed), 1)
	n, err := b.q.Expire(b.ctx, 10)
	b.must(err)
	b.want(n, 0)
	b.want(b.claimAs(ClaimRequest{Node: there, Lane: usual, Limit: 1}).Locks[0].Entries[0].ID, id)
}

func TestCancelOfAnEntryBehindARunningOneOfItsKeyEndsItAtOnce(t *testing.T) {
	b := newControlBed(t, Config{})
	b.push("K")
	lock := b.claimOne()
	behind := b.push("K")[0]
	b.want(b.cancel(behind), cancelDone)
	b.settle(doneAll(lock)...)
	b.want(len(b.claim(1)), 0)
}

func TestCancelNeedsReadCommitted(t *testing.T) {
	b := newControlBed(t, Config{})
	id := b.push("")[0]
	tx, err := b.pool.BeginTx(b.ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	b.must(err)
	defer tx.Rollback(b.ctx)
	if _, err := cancelEntry(b.ctx, tx, id, ann); !errors.Is(err, ErrState) {
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

func TestOutcomeIsReadableAfterTheEntryIsGone(t *testing.T) {
	b := newControlBed(t, Config{})
	ids := b.push("", "", "")
	if _, err := Outcome(b.ctx, b.pool, ids[0]); !errors.Is(err, ErrState) {
		t.Errorf("outcome of a living entry: %v", err)
	}
	if _, err := Outcome(b.ctx, b.pool, 1<<40); !errors.Is(err, ErrEntryNotFound) {
		t.Errorf("outcome of an unknown entry: %v", err)
	}
	locks := b.claim(2)
	b.settle(last(Done(locks[0], locks[0].Entries[0].ID, []byte(`{"n": 1}`), time.Second)),
		last(Fail(locks[1], locks[1].Entries[0].ID, Failure{Class: "input", Error: "no such file"}, time.Second)))
	b.cancel(ids[2])
	done, failed := b.outcome(ids[0]), b.outcome(ids[1])
	b.want([]any{done.Outcome, done.Result, done.Ran, done.Node, done.Token}, []any{"done", map[string]int{"n": 1}, time.Second, here, locks[0].Token})
	b.want([]any{failed.Outcome, failed.Class, failed.Reason, failed.Attempt}, []any{"failed", "input", "no such file", 1})
	b.want(b.outcome(ids[2]).Outcome, "cancelled")
}
