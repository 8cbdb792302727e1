package invalidation

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/penstock/penstock/internal/postgres"
)

// What a push is answered with stands for the change of its transaction: either the entry does not start before the push
// has committed, or another entry is queued for the change. Each test has a pusher that is open while something else
// happens to the entry.

// queuedBehind pushes an entry, claims it, and pushes another one of the same unique key, which waits for the first.
func (b *bed) queuedBehind(p Push) (running *Lock, queued EntryID) {
	b.Helper()
	b.pushAll(b.pool, p)
	running = b.claimOne()
	return running, b.pushAll(b.pool, p)[0]
}

func TestADuplicateIsNotStartedWhenTheLockBeforeItEnds(t *testing.T) {
	b := newBed(t, Config{})
	p := Push{UniqueKey: "u", UniquePolicy: OneRunningOneQueued}
	running, queued := b.queuedBehind(p)
	if _, err := b.q.Sweep(b.ctx, usual, 0, 1<<40); err != nil {
		t.Fatal(err)
	}
	pusher := b.begin()
	came := b.pushAll(pusher, p)[0]
	if came != queued {
		t.Errorf("answered with entry %d, want the queued entry %d", came, queued)
	}
	b.settle(doneAll(running)...)
	b.wantStartAfter(came, func() { b.commit(pusher) })
}

func TestADuplicateIsNotStartedByAClaimThatIgnoresRowLocks(t *testing.T) {
	b := newBed(t, Config{})
	p := Push{UniqueKey: "u", UniquePolicy: WhileQueued, LockKey: "K"}
	queued := b.pushAll(b.pool, p)[0]
	pusher := b.begin()
	came := b.pushAll(pusher, p)[0]
	if came != queued {
		t.Errorf("answered with entry %d, want the queued entry %d", came, queued)
	}
	b.wantStartAfter(came, func() { b.commit(pusher) })
}

func TestAPushBesideAnOpenClaimIsNoDuplicate(t *testing.T) {
	for _, p := range []Push{
		{UniqueKey: "u", UniquePolicy: WhileQueued},
		{UniqueKey: "u", UniquePolicy: WhileQueued, LockKey: "K"},
		{UniqueKey: "u", UniquePolicy: OneRunningOneQueued},
	} {
		b := newBed(t, Config{})
		queued := b.pushAll(b.pool, p)[0]
		b.q.policy.lockFirst([]ClaimLane{{Lane: usual}})
		gate := b.gate("true")
		claimed := later(b, func() (Claimed, error) {
			return b.q.Claim(b.ctx, ClaimRequest{Node: there, ClaimID: 99, Lane: usual, Limit: 1})
		})
		b.awaitBlocked(gate)
		pusher := b.begin()
		came := b.pushAll(pusher, p)[0]
		if came == queued {
			t.Errorf("%+v: answered with entry %d, which a claim has taken", p, queued)
		}
		b.commit(gate)
		if ours, err := b.q.Settle(b.ctx, there, doneAll(claimed().Locks...)); len(ours) != 1 || err != nil {
			t.Fatal(ours, err)
		}
		b.wantStartAfter(came, func() { b.commit(pusher) })
	}
}

// A disabled entry waits for an operator; it is not started before the pusher commits either.
func TestADuplicateOfADisabledEntryIsNotEnabledBeforeItCommits(t *testing.T) {
	b := newControlBed(t, Config{})
	p := Push{UniqueKey: "u", UniquePolicy: WhileQueued}
	queued := b.pushAll(b.pool, p)[0]
	b.exec(b.pool, `SELECT penstock.disable_entry($1, 'test')`, queued)
	pusher := b.begin()
	came := b.pushAll(pusher, p)[0]
	b.want(came, queued)
	var changed *bool
	b.must(b.pool.QueryRow(b.ctx, `SELECT penstock.enable_one($1, $2)`, b.q.ID, queued).Scan(&changed))
	if changed != nil {
		t.Errorf("enable_one answered %v while a push relied on the entry, want busy", *changed)
	}
	b.commit(pusher)
	b.exec(b.pool, `SELECT penstock.enable_entry($1, 'test')`, queued)
	b.want(entryIDs(b.claim(9)...), []EntryID{queued})
}

// A snapshot that is older than the claim or the ending of the holder shows an entry that waits: a push by it either makes
// an entry of its own, or fails as a transaction to be run again. What it may not do is to be lost as a duplicate.
func TestAPushByAnOlderSnapshotIsNoDuplicateOfAnEntryThatHasEnded(t *testing.T) {
	b := newBed(t, Config{})
	for i, p := range []Push{
		{UniquePolicy: WhileQueued},
		{UniquePolicy: WhileQueued, LockKey: "K"},
		{UniquePolicy: OneRunningOneQueued},
		{UniquePolicy: WhileActive},
		{UniquePolicy: WhileActive, LockKey: "K"},
	} {
		for _, level := range []string{"REPEATABLE READ", "SERIALIZABLE"} {
			for _, ended := range []bool{false, true} {
				if p.UniquePolicy == WhileActive && !ended {
					continue
				}
				p.UniqueKey = fmt.Sprint(i, level, ended)
				first := b.pushAll(b.pool, p)[0]
				tx := b.begin()
				b.exec(tx, `SET TRANSACTION ISOLATION LEVEL `+level)
				b.exec(tx, `SELECT FROM penstock.queue`)
				running := b.claimOne()
				if ended {
					b.settle(doneAll(running)...)
				}
				pushed, err := b.q.WithTx(tx).Push(b.ctx, withPayload(p))
				if postgres.Code(err) != postgres.SerializationFailure && (err != nil || pushed[0].ID == first) {
					t.Errorf("%s: %+v was answered with %v, %v; entry %d started before it", level, p, pushed, err, first)
				}
				b.must(tx.Rollback(b.ctx))
				if !ended {
					b.settle(doneAll(running)...)
				}
			}
		}
	}
}

// Pushers of the same lock key share it: neither is refused the other's entry.
func TestDuplicatesOfOneLockKeyDoNotMeet(t *testing.T) {
	b := newBed(t, Config{})
	p := func(u string) Push { return Push{UniqueKey: u, UniquePolicy: WhileQueued, LockKey: "K"} }
	first, second := b.pushAll(b.pool, p("1"))[0], b.pushAll(b.pool, p("2"))[0]
	one, two := b.begin(), b.begin()
	got := []EntryID{b.pushAll(one, p("1"))[0], b.pushAll(two, p("2"))[0]}
	if !slices.Equal(got, []EntryID{first, second}) {
		t.Errorf("answered with %v, want %v", got, []EntryID{first, second})
	}
	b.commit(one)
	b.commit(two)
}

// A bulk push of many keys takes few places in the lock table of the server, and no key of it starts before it commits.
func TestABulkOfDuplicatesTakesFewLocks(t *testing.T) {
	const keys = 2000
	b := newBed(t, Config{})
	pushes := make([]Push, keys)
	for i := range pushes {
		pushes[i] = Push{UniqueKey: fmt.Sprint("u", i), UniquePolicy: OneRunningOneQueued}
	}
	queued := b.pushAll(b.pool, pushes...)
	pusher := b.begin()
	if again := b.pushAll(pusher, pushes...); !slices.Equal(again, queued) {
		t.Error("the second bulk was not answered with the entries of the first")
	}
	var locks int
	if err := b.pool.QueryRow(b.ctx, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = $1`,
		pusher.Conn().PgConn().PID()).Scan(&locks); err != nil {
		t.Fatal(err)
	}
	if locks < 1 || locks > 257 {
		t.Errorf("the push holds %d advisory locks, want 1 to 257", locks)
	}
	if got := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: keys, IgnoreRowLocks: true}).Locks; len(got) > 0 {
		t.Errorf("%d keys started before the push committed", len(got))
	}
	b.commit(pusher)
	if got := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10}).Locks; len(got) != 10 {
		t.Errorf("%d keys could be claimed after it committed, want 10", len(got))
	}
}

// wantStartAfter fails if entry came starts before the pusher has committed.
func (b *bed) wantStartAfter(came EntryID, commit func()) {
	b.Helper()
	early := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 9, IgnoreRowLocks: true}).Locks
	b.settle(doneAll(early...)...)
	commit()
	late := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 9, IgnoreRowLocks: true}).Locks
	if got := entryIDs(late...); !slices.Contains(got, came) {
		b.Errorf("entry %d started before the push that was answered with it committed (started then: %v)", came, entryIDs(early...))
	}
	b.settle(doneAll(late...)...)
}

// A client that sends again what it was not answered about sends entries that have started since beside new ones.
func TestAnEntryThatIsReplayedBesideANewOneIsAskedWhetherItHasItsUniqueKey(t *testing.T) {
	for _, policy := range []UniquePolicy{WhileQueued, WhileActive, OneRunningOneQueued} {
		b := newBed(t, Config{})
		again := Push{IdempotencyKey: "a", UniqueKey: "u", UniquePolicy: policy}
		first := b.pushAll(b.pool, again)[0]
		running := b.claimOne()
		if policy == WhileActive { // the others give the key back when the entry starts
			b.settle(doneAll(running)...)
		}
		fresh := Push{IdempotencyKey: "b", UniqueKey: "u", UniquePolicy: policy}
		ids := b.pushAll(b.pool, again, fresh)
		if ids[0] != first || ids[1] == first {
			t.Errorf("%s: entry %d was answered with %d, and a change that it does not see with %d", policy, first, ids[0], ids[1])
		}
		if replayed := b.pushAll(b.pool, again, fresh); !slices.Equal(replayed, ids) {
			t.Errorf("%s: answered with %v, and then with %v", policy, ids, replayed)
		}
	}
}

// Two lines of a push may have both keys in common.
func TestAReplayOfADuplicateIsAnsweredWithItsHolder(t *testing.T) {
	b := newBed(t, Config{})
	holder := b.pushAll(b.pool, Push{UniqueKey: "u", UniquePolicy: WhileActive})[0]
	twice := Push{IdempotencyKey: "a", UniqueKey: "u", UniquePolicy: WhileActive}
	for range 2 {
		b.want(b.pushAll(b.pool, twice, twice), []EntryID{holder, holder})
	}
}

// Entries of this policy run one after another by their lock key, which must be the same for all of a unique key.
func TestOneRunningOneQueuedIsRefusedBesideAnotherLockKey(t *testing.T) {
	b := newBed(t, Config{Grouping: "customer"})
	push := func(lockKey, payload string) error {
		_, err := b.q.Push(b.ctx, Push{
			UniqueKey: "u", UniquePolicy: OneRunningOneQueued, LockKey: lockKey, Payload: json.RawMessage(payload),
		})
		return err
	}
	for _, c := range []struct{ lockKey, payload string }{{"a", `{}`}, {"", `{"customer": "c7"}`}} {
		if err := push(c.lockKey, c.payload); !errors.Is(err, ErrInvalid) {
			t.Errorf("lock key %q with payload %s: %v, want it refused", c.lockKey, c.payload, err)
		}
	}
	for _, lockKey := range []string{"", "unique:u"} {
		if err := push(lockKey, `{}`); err != nil {
			t.Errorf("lock key %q: %v", lockKey, err)
		}
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry`); n != 1 {
		t.Errorf("%d entries wait, want 1", n)
	}
}
