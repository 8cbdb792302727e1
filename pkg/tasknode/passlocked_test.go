package tasknode_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// A push over many keys keeps their ready rows locked until it commits. An entry behind them is found in a few claims,
// not after as many as it takes to walk over all of them.
func TestAnOpenPushOverManyKeysHidesNothingBehindThem(t *testing.T) {
	const keys = 20_000
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	pushes := make([]invalidation.Push, keys)
	for i := range pushes {
		pushes[i] = invalidation.Push{LockKey: fmt.Sprint("key-", i), Payload: json.RawMessage(`{}`)}
	}
	push(t, q, pushes...)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background()) // the push is not wanted
	if _, err := q.WithTx(tx).Push(t.Context(), pushes...); err != nil {
		t.Fatal(err)
	}
	push(t, q, invalidation.Push{Name: "behind", Payload: json.RawMessage(`{}`)})
	ran := make(chan struct{})
	handler := func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		if r.Entry.Name == "behind" {
			close(ran)
		}
		time.Sleep(20 * time.Millisecond)
		return nil, nil
	}
	n, _ := start(t, pool, tasknode.Config{Threads: 4}, map[string]invalidation.HandlerFunc{"work": handler})
	select {
	case <-ran:
	case <-time.After(time.Minute):
		t.Fatal("the entry behind an open push does not run")
	}
	if claims := n.Stats().Claims.Load(); claims > keys/4/10 {
		t.Errorf("%d claims until the entry behind %d keys of an open push ran, want at most %d", claims, keys, keys/4/10)
	}
}
