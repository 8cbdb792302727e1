package tasknode_test

import (
	"context"
	"encoding/json"
	"sync/atomic"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// A node that was made for few runs takes as many as there is room for at workers that came later, and its row says so.
func TestNodeGrowsToTheThreadsThatAreNeeded(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var needed, running, most atomic.Int32
	all, letGo := barrier()
	n, _ := start(t, pool, tasknode.Config{Threads: 2, ThreadsFor: func() int { return int(needed.Load()) }}, map[string]invalidation.HandlerFunc{
		"work": func(context.Context, *invalidation.Run) (json.RawMessage, error) {
			now := running.Add(1)
			defer running.Add(-1)
			for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
			}
			<-all
			return nil, nil
		},
	})
	t.Cleanup(letGo)
	pushes := make([]invalidation.Push, 40)
	for i := range pushes {
		pushes[i].Payload = json.RawMessage(`{}`)
	}
	push(t, q, pushes...)
	eventually(t, pool, "the first runs", `SELECT count(*) >= 2 FROM penstock.lock`)
	if n.Threads() != 2 {
		t.Fatalf("%d threads before more are needed", n.Threads())
	}
	needed.Store(40)
	eventually(t, pool, "the node to grow", `SELECT threads = 40 FROM penstock.node`)
	eventually(t, pool, "all to run at once", `SELECT $1 = (SELECT sum(cardinality(running)) FROM penstock.node)`, 40)
	letGo()
	eventually(t, pool, "all entries done", emptySQL)
	if n.Threads() != 40 || most.Load() < 40 {
		t.Errorf("%d threads, %d runs at once", n.Threads(), most.Load())
	}
}

// However many calls of workers a node waits for, none of them keeps a connection to the database.
func TestRunsHoldNoConnection(t *testing.T) {
	const threads = 64
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var running atomic.Int64
	over := make(chan struct{})
	start(t, pool, tasknode.Config{Threads: threads}, map[string]invalidation.HandlerFunc{
		"work": func(context.Context, *invalidation.Run) (json.RawMessage, error) {
			running.Add(1)
			<-over
			return nil, nil
		},
	})
	defer close(over)
	pushes := make([]invalidation.Push, threads)
	for i := range pushes {
		pushes[i].Payload = json.RawMessage(`{}`)
	}
	push(t, q, pushes...)
	eventuallyTrue(t, "all threads run", func() bool { return running.Load() == threads })
	eventuallyTrue(t, "no connection is in use", func() bool { return pool.Stat().AcquiredConns() == 0 })
	if n := pool.Stat().TotalConns(); n >= threads {
		t.Errorf("%d connections for %d runs", n, threads)
	}
}
