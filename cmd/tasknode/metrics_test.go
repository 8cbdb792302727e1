package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/internal/telemetry/telemetrytest"
	"github.com/penstock/penstock/pkg/governor"
	"github.com/penstock/penstock/pkg/invalidation"
)

// assembled is a node with the defaults on a database of the test, which does not run.
func assembled(t *testing.T) (*node, *penstock.DB) {
	t.Helper()
	cfg := defaults()
	cfg.Database.URL = pgtest.DSN(t)
	db, err := penstock.Open(t.Context(), cfg.Database.Connect(2))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	n, err := newNode(cfg, db, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return n, db
}

func TestMetricsCanBeRead(t *testing.T) {
	n, db := assembled(t)
	n.observer.Claimed("work", 3, time.Millisecond, true)
	n.observer.Refused("work", "threads")
	n.observer.Ran("work", time.Second, time.Minute, errors.New("no"))
	resources{n.governor, n.observer}.Take("work", 0) // no reading yet: refused
	if _, err := db.Pool.Exec(t.Context(), `SELECT penstock.register_model('m', '{"protocol": "dispatcher"}')`); err != nil {
		t.Fatal(err)
	}
	if err := n.inference.Registry.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	found := telemetrytest.Check(t, telemetry.TaskNode, n.registry())
	reasons := map[string]float64{}
	for _, m := range found["penstock_node_refusals_total"].GetMetric() {
		reasons[m.GetLabel()[1].GetValue()] = m.GetCounter().GetValue()
	}
	if reasons["threads"] == 0 || reasons["limit"] != 1 || reasons["stale"] != 1 {
		t.Errorf("refusals are %v", reasons)
	}
}

// An alert names the queue of callbacks.
func TestCallbacksAreNotAmongTheRest(t *testing.T) {
	o := newObserver()
	for i := range 150 {
		o.Refused(fmt.Sprint("queue_", i), "threads")
	}
	if label := o.queues.Label("webhook"); label != "webhook" {
		t.Errorf("the queue of callbacks is %q", label)
	}
}

// Queues come and go: a node remembers no more of them than have a label of their own.
func TestQueuesWithoutALabelOfTheirOwnAreNotRemembered(t *testing.T) {
	o := newObserver()
	g, err := governor.New(governor.Config{}, still{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	const queues = 1000
	for i := range queues {
		queue := fmt.Sprint("queue_", i)
		o.Claimed(queue, 1, time.Millisecond, false)
		o.Ran(queue, time.Millisecond, time.Millisecond, nil)
		resources{g, o}.Take(queue, 1) // no reading yet: refused
	}
	known := 0
	o.byQueue.Range(func(any, any) bool { known++; return true })
	if most := 101; known > most || len(o.refusals) > most {
		t.Errorf("%d queues are remembered, and refusals of %d, of %d queues", known, len(o.refusals), queues)
	}
	var sum float64
	for _, n := range o.refusals {
		sum += n
	}
	if sum != queues {
		t.Errorf("%v refusals are counted, want %d", sum, queues)
	}
}

// An explanation looks there (penstock.limit_reasons), and so does the dashboard.
func TestAReportHasWhatTheGovernorRefuses(t *testing.T) {
	n, db := assembled(t)
	n.governor.Take("work", 1, 1) // no reading yet: refused
	var refused, levels bool
	const sql = `SELECT $1::jsonb->'governor'->'refused' ? 'work', $1::jsonb->'governor' ? 'levels'`
	if err := db.Pool.QueryRow(t.Context(), sql, n.report()).Scan(&refused, &levels); err != nil || !refused || levels {
		t.Errorf("before the first reading: refused %v, levels %v (%v)", refused, levels, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() { _ = n.governor.Run(ctx) }()
	for n.governor.Report().Levels == nil {
		time.Sleep(time.Millisecond)
	}
	if err := n.governor.Declare("work", governor.Need{MemoryBytes: 1 << 60}); err != nil {
		t.Fatal(err)
	}
	n.governor.Take("work", 1, 1)
	if err := db.Pool.QueryRow(t.Context(), sql, n.report()).Scan(&refused, &levels); err != nil || !refused || !levels {
		t.Errorf("with a reading: refused %v, levels %v (%v)", refused, levels, err)
	}
}

// What a node does shows in its metrics: an entry that nobody has slots for is refused, not run.
func TestEntriesWithoutSlotsShowAsRefusals(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), `SELECT penstock.register_model('m', '{"protocol": "dispatcher"}')`); err != nil {
		t.Fatal(err)
	}
	queue, err := invalidation.Open(t.Context(), pool, "m")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := queue.Push(t.Context(), invalidation.Push{Payload: json.RawMessage(`{}`)}); err != nil {
		t.Fatal(err)
	}
	cfg := defaults()
	cfg.TaskNode.Governor, cfg.TaskNode.Hints = false, false
	n, err := newNode(cfg, &penstock.DB{Pool: pool, Beats: pool}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := n.inference.Registry.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.task.Run(ctx) }()
	refused := func() float64 {
		n.observer.mu.Lock()
		defer n.observer.mu.Unlock()
		return n.observer.refusals[refusal{"m", "slots"}]
	}
	for deadline := time.Now().Add(time.Minute); refused() == 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no refusal was counted")
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func BenchmarkObserverOfOneRun(b *testing.B) {
	o := newObserver()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			o.Ran("work", time.Millisecond, time.Millisecond, nil)
		}
	})
}
