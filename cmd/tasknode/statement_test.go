package main

import (
	"encoding/json"
	"testing"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// A node makes the handler of a queue anew with each change of the registry.
func TestInterruptionsInARowAreCountedOverChangesOfTheRegistry(t *testing.T) {
	declared, err := newStatements(config.Database{URL: pgtest.DSN(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(declared.pool.Close)
	q := &invalidation.Queue{
		Name: "deadly", Config: invalidation.Config{Kind: invalidation.KindTask},
		Statements: map[string]string{"run": `SELECT pg_terminate_backend(pg_backend_pid())`},
	}
	lock := &invalidation.Lock{Key: "#1"}
	run := &invalidation.Run{Queue: q, Lock: lock, Entry: invalidation.Entry{ID: 1, Payload: json.RawMessage(`{}`)}}
	var verbs []string
	for range 6 {
		_, err := declared.handler(q).Handle(t.Context(), run)
		ending := invalidation.Judge(run, nil, err, 0, 0)
		verbs = append(verbs, ending.Verb())
	}
	if verbs[4] != "release" || verbs[5] != "retry" {
		t.Errorf("six interruptions in a row were judged as %v, want the sixth as an error", verbs)
	}
}

// A queue that is dropped and made anew, or loses its statements, is not bound by the threads for statements.
func TestTheBudgetForStatementsFollowsTheQueues(t *testing.T) {
	s := &statements{budget: newBudget(1)}
	declares := &invalidation.Queue{Name: "declares", Statements: map[string]string{"run": `SELECT 1`}}
	stopped := &invalidation.Queue{Name: "stopped", Statements: declares.Statements}
	dropped := &invalidation.Queue{Name: "dropped", Statements: declares.Statements}
	for _, q := range []*invalidation.Queue{declares, stopped, dropped} {
		s.handler(q)
	}
	s.served([]*invalidation.Queue{declares, {Name: "stopped"}})
	for name, want := range map[string]int{"declares": 1, "stopped": 8, "dropped": 8} {
		n, release := s.Take(name, 8)
		if release(n); n != want {
			t.Errorf("queue %s may take %d threads, want %d", name, n, want)
		}
	}
}
