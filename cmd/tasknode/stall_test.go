package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// Two nodes that hear every hint and never poll: whatever they do to each other, in bursts of keys and solo entries of
// queues that are fair, fifo and limited, no ready row is left that nobody comes back for.
func TestLongNothingWaitsForThePollWhereHintsAreHeard(t *testing.T) {
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 16})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	var queues []*invalidation.Queue
	for name, c := range map[string]invalidation.Config{"fair": {}, "fifo": {Algorithm: "fifo"}, "limited": {MaxConcurrent: 3}} {
		q, err := invalidation.Create(t.Context(), pool, name, c)
		if err != nil {
			t.Fatal(err)
		}
		queues = append(queues, q)
	}
	nodes := []*tasknode.Node{deaf(t, pool, queues), deaf(t, pool, queues)}
	for round := range pgtest.Long(30, 100) {
		for range 1 + rand.IntN(30) {
			q, priority := queues[rand.IntN(len(queues))], int16(rand.IntN(3)) //nolint:gosec // small
			p := invalidation.Push{Payload: json.RawMessage(`1`), Flow: fmt.Sprint(rand.IntN(4)), Priority: &priority}
			if rand.IntN(3) == 0 {
				p.LockKey = fmt.Sprintf("%s-%d", p.Flow, priority)
			}
			if _, err := q.Push(t.Context(), p, p); err != nil {
				t.Fatal(err)
			}
			for _, n := range nodes {
				n.Wake(q.ID, &invalidation.Lane{Priority: priority, Flow: p.Flow})
			}
		}
		for start, left := time.Now(), 1; left > 0; time.Sleep(2 * time.Millisecond) {
			if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.entry`).Scan(&left); err != nil {
				t.Fatal(err)
			}
			if time.Since(start) > time.Minute {
				t.Fatalf("round %d: %d entries are left:\n%s", round, left, leftOvers(t, pool))
			}
		}
	}
}

// leftOvers describes the entries, ready rows and lock records that are left.
func leftOvers(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	var rows string
	err := pool.QueryRow(t.Context(), `
SELECT concat_ws(E'\n', (SELECT string_agg(e::text, E'\n') FROM penstock.entry e), 'ready', (SELECT string_agg(r::text, E'\n') FROM penstock.ready r),
                 'locks', (SELECT string_agg(l::text, E'\n') FROM penstock.lock l))`).Scan(&rows)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// deaf runs a node without a poll until the test ends.
func deaf(t *testing.T, pool *pgxpool.Pool, queues []*invalidation.Queue) *tasknode.Node {
	n := tasknode.New(tasknode.Config{
		Threads: 3, Poll: time.Hour, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Ranker: fairness.NewRanker(fairness.RankerConfig{}, pool),
	}, pool, pool)
	for _, q := range queues {
		n.Handle(q.Name, invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) {
			time.Sleep(time.Duration(rand.IntN(6)) * time.Millisecond)
			return nil, nil
		}))
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run node: %v", err)
		}
	})
	return n
}
