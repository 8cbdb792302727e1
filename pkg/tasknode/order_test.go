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
