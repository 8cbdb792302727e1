package tasknode_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// What the handler of a queue is made from changes while the node runs, and the handler with it.
func TestQueueThatTurnsMergeableIsMergedByARunningNode(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	if _, err := pool.Exec(t.Context(), `CREATE TABLE public.effect (n int)`); err != nil {
		t.Fatal(err)
	}
	by := invalidation.By{Actor: "ada"}
	if err := invalidation.SetStatements(t.Context(), pool, "work", map[string]string{"run": `INSERT INTO public.effect VALUES (($1->>'n')::int)`}, by); err != nil {
		t.Fatal(err)
	}
	n := tasknode.New(slowBeats(tasknode.Config{Threads: 2, Poll: 20 * time.Millisecond}), pool, pool)
	n.HandleStatements(func(q *invalidation.Queue) invalidation.Handler { return invalidation.StatementHandler(pool, q) })
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("node: %v", err)
		}
	})
	three := func() {
		var pushes []invalidation.Push
		for _, payload := range []string{`{"n": 1}`, `{"n": 2}`, `{"n": 3}`} {
			pushes = append(pushes, invalidation.Push{LockKey: "key", Payload: json.RawMessage(payload)})
		}
		push(t, q, pushes...)
		eventually(t, pool, "all ran", emptySQL)
	}
	three()
	eventually(t, pool, "one by one", `SELECT array_agg(n) = '{1,2,3}' FROM public.effect`)
	if _, err := invalidation.Alter(t.Context(), pool, "work", map[string]any{"mergeable": true, "merge": "last"}); err != nil {
		t.Fatal(err)
	}
	askedBeats(t, pool, n)
	three()
	eventually(t, pool, "the last for all", `SELECT array_agg(n) = '{1,2,3,3}' FROM public.effect`)
}
