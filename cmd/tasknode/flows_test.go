package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// Two flows, each with a variant that a worker has to load, in one line where they alternate: the node goes on with the
// flow that is loaded, and changes over when the other has waited for its time. The metrics count the swaps.
func TestTimedNodeGoesOnWithTheFlowThatIsLoaded(t *testing.T) {
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 10})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	var mu sync.Mutex
	var ran []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var payload struct{ Variant string }
		if body, err := io.ReadAll(r.Body); err == nil && json.Unmarshal(body, &payload) == nil {
			mu.Lock()
			ran = append(ran, payload.Variant)
			mu.Unlock()
			time.Sleep(2 * time.Millisecond)
		}
		_, _ = io.WriteString(w, `{"status":"success","result":1,"active_jobs":0}`)
	}))
	t.Cleanup(server.Close)
	model := worker.Model{
		Name: "variants", Protocol: worker.ProtocolGeneric, AffinityField: worker.AffinityFlow, AffinityWait: worker.Seconds(400 * time.Millisecond),
	}
	name, err := inference.RegisterModel(t.Context(), pool, model, inference.By{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := inference.RegisterInstance(t.Context(), pool, model.Name, "gpu-1", server.URL, 1, nil, inference.By{}); err != nil {
		t.Fatal(err)
	}
	queue, err := invalidation.Open(t.Context(), pool, name)
	if err != nil {
		t.Fatal(err)
	}
	const entries = 200
	pushes := make([]invalidation.Push, entries)
	for i := range pushes {
		flow := string(rune('x' + i%2))
		pushes[i] = invalidation.Push{Payload: json.RawMessage(fmt.Sprintf(`{"variant":%q}`, flow)), Flow: flow}
	}
	if _, err := queue.Push(t.Context(), pushes...); err != nil {
		t.Fatal(err)
	}
	cfg := defaults()
	cfg.TaskNode.Governor, cfg.TaskNode.Hints, cfg.TaskNode.Threads = false, false, 4
	n, err := newNode(cfg, &penstock.DB{Pool: pool, Beats: pool}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.run(ctx, listener) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	deadline := time.Now().Add(time.Minute)
	for n.task.Stats().Settled.Load() < entries {
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d entries ended", n.task.Stats().Settled.Load(), entries)
		}
		time.Sleep(5 * time.Millisecond)
	}
	swaps := 0
	for i := 1; i < len(ran); i++ {
		if ran[i] != ran[i-1] {
			swaps++
		}
	}
	if len(ran) != entries || swaps > 15 {
		t.Errorf("%d calls, %d swaps; in line they alternate", len(ran), swaps)
	}
	t.Logf("%d swaps in %d calls", swaps, len(ran))
	metrics, err := n.registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := 0.0
	for _, m := range metrics {
		if strings.HasSuffix(m.GetName(), "_model_swaps_total") {
			found = m.GetMetric()[0].GetCounter().GetValue()
		}
	}
	if int(found) != swaps {
		t.Errorf("the metrics count %g swaps, the worker saw %d", found, swaps)
	}
}
