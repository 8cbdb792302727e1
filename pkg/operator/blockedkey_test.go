package operator_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	. "github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// newBlockingBed is a queue in which a failure blocks the lock key.
func newBlockingBed(t *testing.T) *queueBed {
	t.Helper()
	return newQueueBed(t, Config{OnFailure: OnFailureBlockKey})
}

// failHead claims the key at the head and fails the first entry of it, as a node does: the lock ends with it.
func (b *queueBed) failHead() EntryID {
	b.Helper()
	l := b.claimOne()
	b.settle(last(Fail(l, l.Entries[0].ID, Failure{Class: "input", Error: "no such address"}, 0)))
	return l.Entries[0].ID
}

func (b *queueBed) blocked() []operator.BlockedKey {
	b.Helper()
	found, err := b.d.BlockedKeys(b.ctx, "", operator.BlockedKeyName{}, 0)
	b.must(err)
	return found
}

// unblock unblocks the key K.
func (b *queueBed) unblock(retry bool) {
	b.Helper()
	_, _, err := b.d.UnblockKeys(b.ctx, operator.Unblock{Queue: "work", LockKey: "K", Retry: retry, By: ann})
	b.must(err)
}

func TestAFailureBlocksItsKeyUntilItIsUnblocked(t *testing.T) {
	b := newBlockingBed(t)
	ids := b.push("K", "K", "L", "")
	failed := b.failHead()
	b.want(failed, ids[0])
	other := b.claim(10)
	b.want(entryIDs(other...), []EntryID{ids[2], ids[3]})
	b.settle(doneAll(other...)...)

	keys := b.blocked()
	if len(keys) != 1 || keys[0].BlockedAt.Before(time.Now().Add(-time.Hour)) {
		t.Fatalf("blocked keys are %+v, want K alone", keys)
	}
	k := keys[0]
	b.want([]any{k.Queue, k.LockKey, k.EntryID, k.Class, k.Error, k.Waiting},
		[]any{"work", "K", failed, "input", "no such address", 1})
	b.want(b.reasons(ids[1]), []string{"key_blocked"})
	e, err := b.d.Explain(b.ctx, int64(ids[1]))
	b.must(err)
	if want := fmt.Sprintf("lock key K is blocked since entry %d failed", failed); len(e.Reasons) == 0 || e.Reasons[0].Text[:len(want)] != want {
		t.Errorf("explained %+v, want %q", e.Reasons, want)
	}

	later := b.push("K")[0] // a ready row that no claim may act on
	b.want(len(b.claim(10)), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.ready`), 0)
	b.checkInvariants()

	b.unblock(false)
	b.want(b.blocked(), []operator.BlockedKey{})
	l := b.claimOne()
	b.want(entryIDs(l), []EntryID{ids[1], later})
	b.settle(doneAll(l)...)
	b.want(b.count(`SELECT count(*) FROM penstock.audit WHERE verb = 'unblock_key' AND object = 'work' AND actor = 'ann'
	                   AND detail->>'lock_key' = 'K' AND (detail->>'entry_id')::bigint = $1`, failed), 1)
}

func TestUnblockWithRetryPutsTheFailedEntryBackAtItsPlace(t *testing.T) {
	b := newBlockingBed(t)
	ids := b.push("K", "K", "L", "M")
	failed := b.failHead()
	b.unblock(true)
	locks := b.claim(10)
	b.want(entryIDs(locks...), []EntryID{failed, ids[1], ids[2], ids[3]})
	b.settle(doneAll(locks...)...)
}

func TestUnblockRefusesWhatIsNotBlockedAndRetryOfAFailureThatIsGone(t *testing.T) {
	b := newBlockingBed(t)
	b.push("K", "K")
	failed := b.failHead()
	try := func(key string, retry bool) error {
		_, _, err := b.d.UnblockKeys(b.ctx, operator.Unblock{Queue: "work", LockKey: key, Retry: retry, By: ann})
		return err
	}
	if err := try("L", false); !errors.Is(err, ErrState) {
		t.Errorf("unblocking a key that is not blocked: %v, want ErrState", err)
	}
	b.must(b.do(operator.DiscardFailure, failed, ann))
	if err := try("K", true); !errors.Is(err, ErrState) {
		t.Errorf("retrying a failure that is gone: %v, want ErrState", err)
	}
	b.want(len(b.blocked()), 1)
	b.must(try("K", false))
	b.settle(doneAll(b.claimOne())...)
}

func TestAllKeysAreUnblockedInPages(t *testing.T) {
	b := newBlockingBed(t)
	const n = 1203
	keys := make([]string, 0, 2*n)
	for i := range n {
		keys = append(keys, fmt.Sprintf("K%04d", i), fmt.Sprintf("K%04d", i))
	}
	b.push(keys...)
	var endings []Ending
	for _, l := range b.claim(2 * n) {
		endings = append(endings, last(Fail(l, l.Entries[0].ID, Failure{Error: "wrong"}, 0)))
	}
	b.settle(endings...)
	b.want(b.count(`SELECT count(*) FROM penstock.blocked_key`), n)
	first, err := b.d.BlockedKeys(b.ctx, "work", operator.BlockedKeyName{Queue: "work", LockKey: "K0999"}, 2)
	b.must(err)
	b.want([]string{first[0].LockKey, first[1].LockKey}, []string{"K1000", "K1001"})
	total := b.count(`SELECT penstock.unblock_keys('work', true, most => 5000)`)
	b.want(total, 1000)
	for more := true; more; {
		var got int
		got, more, err = b.d.UnblockKeys(b.ctx, operator.Unblock{Queue: "work", Retry: true, By: ann})
		b.must(err)
		total += got
	}
	b.want(total, n)
	locks := b.claim(2 * n)
	b.want(len(entryIDs(locks...)), 2*n)
	for _, l := range locks {
		if !slices.IsSortedFunc(l.Entries, func(x, y Entry) int { return int(x.ID - y.ID) }) || len(l.Entries) != 2 {
			t.Fatalf("key %s has entries %v", l.Key, entryIDs(l))
		}
	}
}

// A claim may have taken a key by a snapshot from before the failure was committed, or by the ready row of a push
// that did not know of it. Its read of the entries comes behind its commit and sees that the key is blocked.
func TestAClaimOfABlockedKeyHandsItBackWithoutAnEntry(t *testing.T) {
	b := newBlockingBed(t)
	ids := b.push("K", "K")
	b.failHead()
	b.exec(b.pool, `INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key) VALUES ($1, 1, '', $2, 'K')`, b.q.ID, ids[1])
	c := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 10})
	b.want(len(c.Locks), 0)
	b.want(b.count(`SELECT (SELECT count(*) FROM penstock.ready) + (SELECT count(*) FROM penstock.lock)`), 0)
	b.unblock(false)
	b.want(entryIDs(b.claim(10)...), []EntryID{ids[1]})
}

// A node that read the settings before they were changed goes on with the group that it has, and a setting that
// was changed back releases nothing by itself.
func TestBlockedKeysStayBlockedWhenTheSettingIsChangedBack(t *testing.T) {
	b := newBlockingBed(t)
	b.push("K", "K")
	b.failHead()
	_, err := Alter(b.ctx, b.pool, "work", map[string]any{"on_failure": "continue"})
	b.must(err)
	b.push("K")
	b.want(len(b.claim(10)), 0)
	b.unblock(false)
	b.want(len(entryIDs(b.claim(10)...)), 2)
}

// Claims, pushes, failures and unblocking of one key beside each other: no entry runs while the key is blocked,
// entries run in their order, and none is left behind.
func TestUnblockingRacesWithClaimsAndPushes(t *testing.T) {
	b := newBlockingBed(t)
	const rounds, pushes = 60, 3
	var work sync.WaitGroup
	stop := make(chan struct{})
	errs := make(chan error, 8)
	check := func(err error) {
		if err != nil {
			select {
			case errs <- err:
			default:
			}
		}
	}
	work.Go(func() { // unblocks
		for {
			select {
			case <-stop:
				return
			default:
			}
			_, _, err := b.d.UnblockKeys(b.ctx, operator.Unblock{Queue: "work", Retry: true, By: ann})
			check(err)
		}
	})
	work.Go(func() { // pushes
		for range rounds {
			for range pushes {
				_, err := b.q.Push(b.ctx, Push{Payload: []byte(`{}`), LockKey: "K"})
				check(err)
			}
		}
	})
	var ran []EntryID
	failedOnce := map[EntryID]bool{}
	deadline := time.Now().Add(time.Minute)
	for claim := int32(1); len(ran) < rounds*pushes && time.Now().Before(deadline); claim++ {
		c, err := b.q.Claim(b.ctx, ClaimRequest{Node: here, ClaimID: claim, Lane: usual, Limit: 5})
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range c.Locks {
			var endings []Ending
			for i, e := range l.Entries {
				if i == 0 && e.ID%3 == 0 && !failedOnce[e.ID] {
					failedOnce[e.ID] = true
					endings = append(endings, last(Fail(l, e.ID, Failure{Error: "wrong"}, 0)))
					break
				}
				if e.ID%3 == 0 && !failedOnce[e.ID] { // it fails as the head of the next lock
					endings = append(endings, last(Release(l, e.ID, 0)))
					break
				}
				ran = append(ran, e.ID)
				done := Done(l, e.ID, nil, 0)
				done.Last = i == len(l.Entries)-1
				endings = append(endings, done)
			}
			b.settle(endings...)
		}
	}
	close(stop)
	work.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	if len(ran) != rounds*pushes || !slices.IsSorted(ran) {
		t.Errorf("%d of %d entries ran, in the order %v", len(ran), rounds*pushes, ran)
	}
}
