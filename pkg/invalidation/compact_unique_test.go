package invalidation

import (
	"encoding/json"
	"fmt"
	"testing"
)

// pushUnique pushes an entry of lock key K under a unique key.
func (b *bed) pushUnique(key, payload string, policy UniquePolicy) EntryID {
	b.Helper()
	p := Push{LockKey: "K", UniqueKey: key, UniquePolicy: policy, Payload: json.RawMessage(payload)}
	return b.pushAll(b.pool, p)[0]
}

// The work of a unique key that was merged into another entry waits still: a push of the key is a duplicate of the entry
// that has it, until that one starts, ends or is cancelled.
func TestAUniqueKeyFollowsItsEntryIntoTheMerge(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true, Merge: "array"})
	oldest := b.pushUnique("one", `1`, WhileQueued)
	b.pushUnique("two", `2`, WhileQueued)
	for range 2 {
		b.want(b.compact(), 1)
		b.want(b.pushUnique("one", `1`, WhileQueued), oldest)
		b.want(b.pushUnique("two", `2`, WhileQueued), oldest)
		b.want(b.pushUnique("two", `2`, WhileActive), oldest)
		b.pushUnique(fmt.Sprint("three", b.n), `3`, WhileQueued)
		b.n++
	}
	b.want(b.compact(), 1)
	lock := b.claimOne()
	b.want(lock.Entries[0].Payload, json.RawMessage(`[1,2,3,3]`))
	b.want(b.pushUnique("two", `2`, WhileActive), oldest)
	next := b.pushUnique("one", `1`, WhileQueued) // the oldest has started
	b.settle(doneAll(lock)...)
	b.want(b.pushUnique("one", `1`, WhileQueued), next)
	two := b.pushUnique("two", `2`, WhileQueued)
	b.want(b.compact(), 1)
	b.exec(b.pool, `SELECT penstock.cancel_entry($1)`, next)
	if again := b.pushUnique("two", `2`, WhileQueued); again == two || again == next {
		b.Errorf("a push of a key whose entry was cancelled is answered with entry %d", again)
	}
}

// A push that has the row of a unique key has been answered, or will be, by what it read: the key is compacted later.
func TestCompactLeavesAUniqueKeyToAPushThatIsOpen(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true, Merge: "array"})
	b.pushUnique("one", `1`, WhileActive)
	two := b.pushUnique("two", `2`, WhileActive)
	pusher := b.begin()
	p := Push{LockKey: "K", UniqueKey: "two", UniquePolicy: WhileActive}
	b.want(b.pushAll(pusher, p)[0], two)
	b.want(b.compact(), 0)
	b.commit(pusher)
	b.want(b.compact(), 1)
}
