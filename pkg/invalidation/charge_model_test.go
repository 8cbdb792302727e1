package invalidation

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// chargeMachine applies random operations to a queue under a rate that never refills, and counts what the bucket must
// have lost: a unit for each run that began, and one for each entry that a lock covers and whose run may begin.
type chargeMachine struct {
	*rapid.T
	b     *bed
	q     *Queue // whose reads of groups fail where a covered entry is unreadable
	began int
	locks []*chargedLock
}

type chargedLock struct {
	*Lock
	next int // the first entry that has not ended
}

const chargeBurst = 1_000_000

func (x *chargeMachine) must(err error) {
	x.Helper()
	if err != nil {
		x.Fatal(err)
	}
}

func (x *chargeMachine) Push() {
	for range rapid.IntRange(1, 4).Draw(x.T, "n") {
		x.b.pushAll(x.b.pool, x.draw())
	}
}

func (x *chargeMachine) draw() Push {
	p := Push{LockKey: rapid.SampledFrom([]string{"", "J", "K", "K"}).Draw(x.T, "key"), Payload: []byte(`{}`)}
	if rapid.IntRange(0, 9).Draw(x.T, "unreadable") == 0 {
		p.Payload = []byte(`{"bad": "no number"}`)
	}
	return p
}

// Claim claims. Its answer may be lost after each of its steps, and the node asks for it then. Meanwhile entries of its
// groups may be committed late, end, or be blocked.
func (x *chargeMachine) Claim() {
	x.b.n++
	r := LanesRequest{
		Node: here, ClaimID: x.b.n, Limit: rapid.IntRange(1, 3).Draw(x.T, "limit"), Lanes: []ClaimLane{{Lane: usual}},
	}
	late, err := x.b.pool.Begin(x.b.ctx)
	x.must(err)
	defer late.Rollback(x.b.ctx)
	if rapid.Bool().Draw(x.T, "late") {
		x.b.pushAll(late, Push{LockKey: "J"}, Push{LockKey: "K"})
		x.b.pushAll(x.b.pool, Push{LockKey: "J"}, Push{LockKey: "K"})
	}
	switch answer := rapid.SampledFrom([]string{"whole", "lost", "lost with groups"}).Draw(x.T, "answer"); answer {
	case "lost":
		r.quantum = x.q.quantum()
		_, _, err := x.q.readClaim(x.b.ctx, r, x.q.lockFirst)
		x.must(err)
		x.meanwhile()
		_ = late.Commit(x.b.ctx)
		x.reclaim()
	default:
		claimed, err := x.q.ClaimLanes(x.b.ctx, r)
		_ = late.Commit(x.b.ctx)
		if err != nil || answer == "lost with groups" {
			x.meanwhile()
			x.reclaim()
			return
		}
		x.hold(claimed[0].Locks)
	}
}

func (x *chargeMachine) reclaim() {
	locks, err := locksIn(x.q.Reclaim(x.b.ctx, here, x.b.n))
	x.must(err)
	x.hold(locks)
}

// meanwhile deletes, disables or blocks what the claim may have counted.
func (x *chargeMachine) meanwhile() {
	const one = `(SELECT min(id) FROM penstock.entry WHERE lock_key = $1 AND status = 'pending')`
	key := rapid.SampledFrom([]string{"J", "K"}).Draw(x.T, "of key")
	if slices.ContainsFunc(x.locks, func(l *chargedLock) bool { return l.Key == key }) {
		return
	}
	switch rapid.SampledFrom([]string{"nothing", "delete", "disable", "block", "unblock"}).Draw(x.T, "meanwhile") {
	case "delete":
		x.b.exec(x.b.pool, `DELETE FROM penstock.entry WHERE id = `+one, key)
	case "disable":
		x.b.exec(x.b.pool, `UPDATE penstock.entry SET priority = -1, enabled_priority = priority WHERE id = `+one, key)
	case "block":
		x.b.exec(x.b.pool, `INSERT INTO penstock.blocked_key (queue_id, lock_key, entry_id, class, error)
		    SELECT $2, $1, 1, 'permanent', 'broken' ON CONFLICT DO NOTHING`, key, x.q.ID)
	case "unblock":
		x.b.exec(x.b.pool, `DELETE FROM penstock.blocked_key WHERE lock_key = $1`, key)
	}
}

func (x *chargeMachine) hold(locks []*Lock) {
	for _, l := range locks {
		x.locks = append(x.locks, &chargedLock{Lock: l})
	}
}

func (x *chargeMachine) take() *chargedLock {
	if len(x.locks) == 0 {
		x.Skip("no locks")
	}
	i := rapid.IntRange(0, len(x.locks)-1).Draw(x.T, "lock")
	l := x.locks[i]
	x.locks = slices.Delete(x.locks, i, i+1)
	return l
}

// Settle ends entries of a lock in one settle or several, some of which are repeated. The entries that an ending of the
// lock leaves have not begun.
func (x *chargeMachine) Settle() {
	l := x.take()
	for over := false; !over; {
		e := l.Entries[l.next]
		run := &Run{Queue: x.q, Entry: e, Lock: l.Lock, Node: here}
		judge := func(err error) Ending { return Judge(run, nil, err, 0, 0) }
		var ending Ending
		began := true
		switch rapid.SampledFrom([]string{
			"done", "retry", "retried", "busy", "drain", "cancelled run", "cancel", "expired run", "expire", "release", "yield",
		}).Draw(x.T, "verb") {
		case "done":
			ending = Done(l.Lock, e.ID, nil, 0)
		case "retry":
			ending = Retry(l.Lock, e.ID, Failure{Error: "x"}, time.Hour, 0)
		case "retried": // and due again before the lock ends
			ending = Retry(l.Lock, e.ID, Failure{Error: "x"}, 0, 0)
		case "busy":
			ending, over = judge(NoCapacity(0, fmt.Errorf("busy"))), true
		case "drain":
			ending, over = judge(ErrDraining), true
		case "cancelled run":
			ending = judge(ErrCancelled)
		case "cancel":
			ending, began = Cancel(l.Lock, e.ID, "wish"), false
		case "expired run":
			ending = judge(ErrFinishBy)
		case "expire":
			ending, began = Expire(l.Lock, e.ID, "late"), false
		case "release":
			ending, began, over = Release(l.Lock, e.ID, 0), false, true
		case "yield":
			ending, began, over = Yield(l.Lock, e.ID), false, true
		}
		if l.next++; began {
			x.began++
		}
		over = over || l.next == len(l.Entries)
		ending.Last = over
		for range rapid.IntRange(1, 2).Draw(x.T, "times") {
			x.b.settleOn(x.b.pool, ending)
		}
		if !over {
			x.b.exec(x.b.pool, `UPDATE penstock.entry SET due_at = clock_timestamp() - interval '1 s'
			    WHERE status = 'initial' AND due_at < clock_timestamp()`)
			_, err := x.q.Promote(x.b.ctx, 10)
			x.must(err)
		}
	}
}

// Recover ends a lock that only waited on a node that died.
func (x *chargeMachine) Recover() {
	l := x.take()
	x.b.exec(x.b.pool, `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '1 day' WHERE id = $1`, here)
	_, err := x.q.Recover(x.b.ctx, nil, []LockRef{{QueueID: x.q.ID, Key: l.Key, Token: l.Token}}, true)
	x.must(err)
	x.b.exec(x.b.pool, `UPDATE penstock.node SET beat_at = clock_timestamp() WHERE id = $1`, here)
}

func (x *chargeMachine) Check() {
	want := x.began
	for _, l := range x.locks {
		want += len(l.Entries)
	}
	if got := chargeBurst - x.b.left(); got != want {
		x.Fatalf("%d units are gone, want %d: %d runs began, the others are of entries in locks", got, want, x.began)
	}
}

// However claims are answered and locks end, a rate loses a unit for each entry that began, and for no other.
func TestLongARateIsChargedForWhatBeganAlone(t *testing.T) {
	b := newBed(t, Config{QuantumCount: 3})
	b.q = b.under("slow", limitOptions{Rate: 1e-7, Burst: chargeBurst}, map[string]int{b.q.Name: 1})[b.q.Name]
	q := *b.q
	q.sql.claimGroups = strings.Replace(q.sql.claimGroups, "e.payload,",
		"coalesce(to_jsonb((e.payload->>'bad')::int), e.payload) AS payload,", 1)
	rapid.Check(t, func(rt *rapid.T) {
		b.exec(b.pool, `TRUNCATE penstock.entry, penstock.ready, penstock.lock, penstock.result, penstock.failure, penstock.bucket,
		                penstock.blocked_key`)
		x := &chargeMachine{T: rt, b: b, q: &q}
		op := func(fn func()) func(*rapid.T) { return func(*rapid.T) { fn() } }
		rt.Repeat(map[string]func(*rapid.T){
			"": op(x.Check), "push": op(x.Push), "claim": op(x.Claim), "claim more": op(x.Claim), "settle": op(x.Settle),
			"recover": op(x.Recover),
		})
		b.exec(b.pool, `TRUNCATE penstock.entry, penstock.ready, penstock.lock`)
	})
}

// A lock that a claim found empty gives its units back once, also where its node dies before it has ended it.
func TestRateOfALockThatWasFoundEmptyIsRefundedOnce(t *testing.T) {
	for _, key := range []string{"", "K"} {
		b := newBed(t, Config{})
		b.q = b.under("slow", limitOptions{Rate: 1e-7, Burst: 5}, map[string]int{b.q.Name: 2})[b.q.Name]
		b.push(key)
		l := b.claimOne()
		l.Entries = nil // as Reclaim found it
		b.must(b.q.refundUncovered(b.ctx, []*Lock{l}))
		b.want(b.left(), 5)
		b.exec(b.pool, `UPDATE penstock.node SET lease = interval '1 microsecond' WHERE id = $1`, here)
		r, err := b.q.Recover(b.ctx, nil, []LockRef{{QueueID: b.q.ID, Key: l.Key, Token: l.Token}}, true)
		b.must(err)
		b.want(len(r.Freed), 1)
		b.want(b.count(`SELECT round(units)::int FROM penstock.bucket`), 5)
	}
}
