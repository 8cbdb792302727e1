package tasknode_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// What hands an entry of a group back hands back those behind it: none of them runs before it.
func TestAGroupKeepsItsOrderWhenAnEntryIsHandedBack(t *testing.T) {
	for name, answer := range map[string]error{
		"no capacity": invalidation.NoCapacity(0, errors.New("no room")),
		"conflict":    invalidation.ErrConflict,
	} {
		t.Run(name, func(t *testing.T) {
			pool := open(t)
			q := create(t, pool, "work", invalidation.Config{})
			for _, n := range []string{`1`, `2`, `3`} {
				push(t, q, invalidation.Push{LockKey: "k", Payload: json.RawMessage(n)})
			}
			var mu sync.Mutex
			var calls []string
			start(t, pool, tasknode.Config{Threads: 2, Poll: 20 * time.Millisecond}, map[string]invalidation.HandlerFunc{
				"work": func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
					mu.Lock()
					defer mu.Unlock()
					calls = append(calls, string(r.Entry.Payload))
					if len(calls) == 1 {
						return nil, answer
					}
					return nil, nil
				},
			})
			eventually(t, pool, "all done", emptySQL)
			if want := []string{"1", "1", "2", "3"}; !slices.Equal(calls, want) {
				t.Errorf("calls were %v, want %v", calls, want)
			}
		})
	}
}

// A failure blocks its key: the entries that the node has claimed along with the one that failed do not run, and
// those that are pushed afterwards do not either, until the key is unblocked. The other keys go on.
func TestAFailureKeepsTheRestOfItsGroupFromRunning(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{OnFailure: invalidation.OnFailureBlockKey})
	for _, n := range []string{`1`, `2`, `3`} {
		push(t, q, invalidation.Push{LockKey: "k", Payload: json.RawMessage(n)})
	}
	var mu sync.Mutex
	var calls []string
	failing := true
	start(t, pool, tasknode.Config{Threads: 2, Poll: 20 * time.Millisecond}, map[string]invalidation.HandlerFunc{
		"work": func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, string(r.Entry.Payload))
			if failing && string(r.Entry.Payload) == `1` {
				return nil, invalidation.Permanent(errors.New("no such address"))
			}
			return nil, nil
		},
	})
	eventually(t, pool, "key blocked", `SELECT count(*) = 1 FROM penstock.blocked_key`)
	push(t, q, invalidation.Push{LockKey: "k", Payload: json.RawMessage(`4`)})
	push(t, q, invalidation.Push{LockKey: "other", Payload: json.RawMessage(`"other"`)})
	eventually(t, pool, "other key done and no ready row left",
		`SELECT (SELECT count(*) FROM penstock.result) = 1 AND NOT EXISTS (SELECT FROM penstock.ready) AND NOT EXISTS (SELECT FROM penstock.lock)`)
	mu.Lock()
	if want := []string{`1`, `"other"`}; !slices.Equal(calls, want) {
		t.Errorf("calls were %v before the key was unblocked, want %v", calls, want)
	}
	failing = false
	mu.Unlock()
	if _, err := pool.Exec(t.Context(), `SELECT penstock.unblock_key('work', 'k', true)`); err != nil {
		t.Fatal(err)
	}
	eventually(t, pool, "all done", emptySQL)
	mu.Lock()
	defer mu.Unlock()
	if want := []string{`1`, `"other"`, `1`, `2`, `3`, `4`}; !slices.Equal(calls, want) {
		t.Errorf("calls were %v, want %v", calls, want)
	}
}
