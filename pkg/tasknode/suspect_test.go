package tasknode_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// The entries with two of three crashes run one at a time, beside those that are no suspects.
func TestANodeRunsOneSuspectAtATime(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{CrashLimit: 3})
	pushes := make([]invalidation.Push, 8)
	for i := range pushes {
		name := "innocent"
		if i < 2 {
			name = "suspect"
		}
		pushes[i] = invalidation.Push{Payload: json.RawMessage(`{}`), Name: name}
	}
	push(t, q, pushes...)
	if _, err := pool.Exec(t.Context(), `UPDATE penstock.entry SET crashes = 2 WHERE name = 'suspect'`); err != nil {
		t.Fatal(err)
	}
	var suspects, most, innocents, together atomic.Int32
	start(t, pool, tasknode.Config{Threads: 8, Lease: 6 * time.Second, Beat: 200 * time.Millisecond}, map[string]invalidation.HandlerFunc{
		"work": func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
			if r.Entry.Name == "innocent" {
				together.Store(max(together.Load(), innocents.Add(1)))
				defer innocents.Add(-1)
				time.Sleep(100 * time.Millisecond)
				return nil, nil
			}
			most.Store(max(most.Load(), suspects.Add(1)))
			defer suspects.Add(-1)
			time.Sleep(300 * time.Millisecond) // long enough that the others are claimed meanwhile
			return nil, nil
		},
	})
	go promote(t, q) // as the leader does: a suspect that has to wait comes back when a lease is over
	eventually(t, pool, "all entries done", emptySQL)
	if most.Load() != 1 {
		t.Errorf("%d suspects ran together", most.Load())
	}
	if together.Load() < 2 {
		t.Error("entries that are no suspects ran one at a time as well")
	}
	var attempts int
	if err := pool.QueryRow(t.Context(), `SELECT coalesce(sum(attempt), 0) FROM penstock.result`).Scan(&attempts); err != nil || attempts != 0 {
		t.Errorf("%d attempts were spent by waiting (%v)", attempts, err)
	}
}

// batched is a handler that takes groups, and notes which entries ran together.
type batched struct{ calls chan []invalidation.Entry }

func (h batched) Handle(context.Context, *invalidation.Run) (json.RawMessage, error) {
	return nil, errors.New("called for one entry")
}

func (h batched) HandleBatch(_ context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
	var together []invalidation.Entry
	for _, r := range runs {
		together = append(together, r.Entry)
	}
	h.calls <- together
	return make([]invalidation.BatchAnswer, len(runs))
}

// A handler of groups is given a suspect by itself, and the entries of its key in their order.
func TestSuspectRunsAloneInAGroup(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{CrashLimit: 3, QuantumCount: 100})
	var pushes []invalidation.Push
	for _, name := range []string{"innocent", "suspect", "innocent", "suspect", "innocent"} {
		pushes = append(pushes, invalidation.Push{Payload: json.RawMessage(`{}`), Name: name, LockKey: "k"})
	}
	pushed := push(t, q, pushes...)
	if _, err := pool.Exec(t.Context(), `UPDATE penstock.entry SET crashes = 2 WHERE name = 'suspect'`); err != nil {
		t.Fatal(err)
	}
	h := batched{make(chan []invalidation.Entry, 10)}
	n := tasknode.New(tasknode.Config{Threads: 4, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}, pool, pool)
	n.Handle("work", h)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	eventually(t, pool, "all entries done", emptySQL)
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	close(h.calls)
	next := 0
	for together := range h.calls {
		for _, e := range together {
			if e.ID != pushed[next].ID {
				t.Errorf("entry %d ran as number %d", e.ID, next)
			}
			next++
			if e.Crashes > 0 && len(together) > 1 {
				t.Errorf("suspect %d ran together with %d others", e.ID, len(together)-1)
			}
		}
	}
	if next != len(pushed) {
		t.Errorf("%d of %d entries ran", next, len(pushed))
	}
}
