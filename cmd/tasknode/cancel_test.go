package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// toldWorker is a worker that never answers a run and records when it was told that the run is not wanted any more: its
// connection was closed.
type toldWorker struct {
	*httptest.Server
	mu    sync.Mutex
	begun map[string]bool
	told  map[string]time.Time
}

func newToldWorker(t *testing.T) *toldWorker {
	t.Helper()
	w := &toldWorker{begun: map[string]bool{}, told: map[string]time.Time{}}
	over := make(chan struct{})
	w.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			rw.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(rw, `{"status": "ok"}`)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		entry := r.Header.Get("Penstock-Entry")
		w.mu.Lock()
		w.begun[entry] = true
		w.mu.Unlock()
		select {
		case <-r.Context().Done():
			w.mu.Lock()
			w.told[entry] = time.Now()
			w.mu.Unlock()
		case <-over:
		}
	}))
	t.Cleanup(func() { close(over); w.CloseClientConnections(); w.Close() })
	return w
}

func (w *toldWorker) count() (begun, told int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.begun), len(w.told)
}

// The worker of a running entry is told of its cancel within a second where hints are heard, and after a heartbeat where
// they are not.
func TestTheWorkerIsToldOfACancelAtOnce(t *testing.T) {
	for _, c := range []struct {
		name   string
		hints  bool
		within time.Duration
	}{{"with hints", true, time.Second}, {"without", false, 3 * time.Second}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const calls = 40
			x := startBehindProxy(t, idle, func(cfg *Config) {
				cfg.TaskNode.Lease, cfg.TaskNode.Beat = 10*time.Second, 2*time.Second
				cfg.TaskNode.Hints, cfg.TaskNode.Threads = c.hints, calls+8
			})
			if c.hints {
				x.eventually(10*time.Second, "hints are heard", hintsSQL, "heard")
			}
			w := newToldWorker(t)
			model := worker.Model{Name: "m", Protocol: worker.ProtocolGeneric}
			name, err := inference.RegisterModel(t.Context(), x.pool, model, inference.By{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := inference.RegisterInstance(t.Context(), x.pool, "m", "gpu-1", w.URL+"/run", calls, nil, inference.By{}); err != nil {
				t.Fatal(err)
			}
			if x.queue, err = invalidation.Open(t.Context(), x.pool, name); err != nil {
				t.Fatal(err)
			}
			pushes := make([]invalidation.Push, calls)
			for i := range pushes {
				pushes[i].Payload = json.RawMessage(`{}`)
			}
			pushed, err := x.queue.Push(t.Context(), pushes...)
			if err != nil {
				t.Fatal(err)
			}
			awaitCount(t, "all run", calls, func() int { begun, _ := w.count(); return begun })
			asked := map[string]time.Time{}
			for _, e := range pushed { // spread over several heartbeats
				var answer string
				err := x.pool.QueryRow(t.Context(), `SELECT penstock.cancel_entry($1, 'unwanted')`, e.ID).Scan(&answer)
				if err != nil || answer != "requested" {
					t.Fatalf("cancel: %q, %v", answer, err)
				}
				asked[strconv.FormatInt(int64(e.ID), 10)] = time.Now()
				time.Sleep(100 * time.Millisecond)
			}
			awaitCount(t, "the worker was told of all", calls, func() int { _, told := w.count(); return told })
			var waits []time.Duration
			for entry, at := range asked {
				waits = append(waits, w.told[entry].Sub(at))
			}
			slices.Sort(waits)
			t.Logf("told after %v at p50, %v at most", waits[len(waits)/2], waits[len(waits)-1])
			if waits[len(waits)-1] > c.within {
				t.Errorf("the worker was told after up to %v, want %v", waits[len(waits)-1], c.within)
			}
			x.eventually(10*time.Second, "all are cancelled", `SELECT count(*) = $1 FROM penstock.result WHERE outcome = 'cancelled'`, calls)
		})
	}
}

func awaitCount(t *testing.T, contract string, want int, count func() int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); count() != want; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: %d of %d", contract, count(), want)
		}
	}
}
