package invalidation

import (
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
)

func (b *bed) pushNamed(names ...string) {
	b.Helper()
	pushes := make([]Push, len(names))
	for i, name := range names {
		pushes[i] = Push{Payload: json.RawMessage(`{}`), Name: name}
	}
	b.pushAll(b.pool, pushes...)
}

// names counts the locks by the names of the entries that they cover.
func names(locks []*Lock) map[string]int {
	of := map[string]int{}
	for _, l := range locks {
		of[strings.TrimPrefix(strings.Split(l.Key, "#")[0], "name:")]++
	}
	return of
}

func TestNoMoreEntriesOfANameRunAtOnceThanItsQueueLets(t *testing.T) {
	b := newBed(t, Config{MaxConcurrentPerName: 3})
	b.want(b.q.Config.MaxConcurrentPerName, 3)
	for range 6 { // each by itself, so that each sees those before it
		b.pushNamed("acme")
	}
	b.pushNamed("acme", "acme", "acme", "beta", "beta", "", "")
	locks := b.claim(100)
	of := names(locks)
	if of["acme"] != 3 || of["beta"] != 2 || len(locks) != 7 {
		t.Fatalf("claimed locks of %v, want 3 of acme, 2 of beta and 2 without a name", of)
	}
	for _, l := range locks {
		if strings.HasPrefix(l.Key, "name:acme") && len(l.Entries) != 3 {
			t.Errorf("%s has %d entries, want 9 on 3 keys", l.Key, len(l.Entries))
		}
	}
	b.pushNamed("acme", "acme", "acme", "acme")
	b.want(len(b.claimAs(ClaimRequest{Node: there, Lane: usual, Limit: 100, IgnoreRowLocks: true}).Locks), 0)
	b.settle(doneAll(locks...)...)
	b.want(names(b.claim(100))["acme"], 3)
}

// The bound holds for pushes and claims of many sessions at once: it is that of lock keys.
func TestPushesOfANameThatMeetBreakNoBound(t *testing.T) {
	b := newBed(t, Config{MaxConcurrentPerName: 2})
	var pushers sync.WaitGroup
	for range 8 {
		pushers.Go(func() {
			for range 10 {
				if _, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`), Name: "acme"}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	pushers.Wait()
	locks := b.claim(100)
	b.want(len(locks), 2)
	entries := 0
	for _, l := range locks {
		entries += len(l.Entries)
	}
	b.want(entries+b.count(`SELECT count(*) FROM penstock.entry`)-80, entries) // none is lost
}

// With one at a time the entries of a name run in the order of acceptance.
func TestOneEntryOfANameAtATimeIsInOrder(t *testing.T) {
	b := newBed(t, Config{MaxConcurrentPerName: 1, QuantumCount: 2})
	b.pushNamed("acme", "beta", "acme", "acme")
	var order []EntryID
	for range 3 {
		locks := b.claim(100)
		for _, l := range locks {
			if l.Key == "name:acme" {
				order = append(order, entryIDs(l)...)
			}
		}
		b.settle(doneAll(locks...)...)
	}
	if len(order) != 3 || order[0] > order[1] || order[1] > order[2] {
		t.Errorf("entries of acme ran in the order %v", order)
	}
}

// A backlog that was pushed with another bound shares its keys with later pushes, so that the bounds do not add up.
func TestAHigherBoundOfANameHoldsBesideItsBacklog(t *testing.T) {
	b := newBed(t, Config{MaxConcurrentPerName: 1, QuantumCount: 1})
	b.pushNamed("acme", "acme", "acme")
	_, err := Alter(b.ctx, b.pool, "work", map[string]any{"max_concurrent_per_name": 2})
	b.must(err)
	for range 10 {
		b.pushNamed("acme")
	}
	b.want(names(b.claim(100)), map[string]int{"acme": 2})
}

func TestWhatDoesNotGoWithABoundOfNamesIsRefusedByName(t *testing.T) {
	b := newBed(t, Config{MaxConcurrentPerName: 2})
	for field, p := range map[string]Push{
		"lock_key":      {Name: "acme", LockKey: "k"},
		"unique_policy": {Name: "acme", UniqueKey: "u", UniquePolicy: OneRunningOneQueued},
	} {
		p.Payload = json.RawMessage(`{}`)
		if _, err := b.q.Push(b.ctx, p); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s beside name: %v, want ErrInvalid that names it", field, err)
		}
	}
	b.push("k") // without a name
	for setting, options := range map[string]map[string]any{
		"grouping":   {"grouping": "k"},
		"mergeable":  {"mergeable": true},
		"on_failure": {"on_failure": "block_key"},
		"from 1":     {"max_concurrent_per_name": 101},
	} {
		if _, err := Alter(b.ctx, b.pool, "work", options); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), setting) {
			t.Errorf("%v: %v, want ErrInvalid that names %s", options, err, setting)
		}
	}
}

// A push by name looks at the heads of the keys of its name alone.
func TestAPushByNameReadsNoBacklog(t *testing.T) {
	b := newBed(t, Config{MaxConcurrentPerName: 3})
	x := b.explainer()
	push := statement{`SELECT penstock.push('work', $1, name => $2)`, `'{}', 'acme'`}
	fill := func(n int) {
		b.exec(b.pool, `SELECT count(*) FROM penstock.push_many('work', array_fill('{}'::jsonb, ARRAY[$1::int]), names => array_fill('acme'::text, ARRAY[$1::int]))`, n)
	}
	fill(100)
	x.explain("warm", push)
	before := x.explain("push", push).buffers()
	fill(20_000)
	if after := x.explain("push", push).buffers(); after > 2*before {
		t.Errorf("a push reads %d buffers behind 20,100 entries of its name, and %d behind 100", after, before)
	}
}
