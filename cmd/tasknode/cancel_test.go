package main

import (
	"cmp"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/internal/pgtest"
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

// wait is from the request of a cancel until the worker was told.
type wait struct{ from, to time.Time }

func (w wait) took() time.Duration { return w.to.Sub(w.from) }

// cancelRunning lets a node make calls and cancels them one after another. It returns how long after their requests the
// worker was told, shortest first.
func cancelRunning(t *testing.T, calls int, settings func(*Config)) (waits []wait) {
	t.Helper()
	x := startBehindProxy(t, idle, settings, func(cfg *Config) { cfg.TaskNode.Threads = calls + 8 })
	if x.node.cfg.TaskNode.Hints {
		awaitCount(t, "hints are heard", 1, func() int {
			if x.node.hintStatus()["hints"] == "heard" {
				return 1
			}
			return 0
		})
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
	awaitCount(t, "all run", calls, func() int {
		x.node.task.Cancelled(x.node.task.ID()) // a heartbeat, with which the node hears of the queue
		begun, _ := w.count()
		return begun
	})
	asked := map[string]time.Time{}
	for _, e := range pushed {
		var answer string
		err := x.pool.QueryRow(t.Context(), `SELECT penstock.cancel_entry($1, 'unwanted')`, e.ID).Scan(&answer)
		if err != nil || answer != "requested" {
			t.Fatalf("cancel: %q, %v", answer, err)
		}
		asked[strconv.FormatInt(int64(e.ID), 10)] = time.Now()
		time.Sleep(100 * time.Millisecond) // several requests come between two heartbeats
	}
	awaitCount(t, "the worker was told of all", calls, func() int { _, told := w.count(); return told })
	for entry, at := range asked {
		waits = append(waits, wait{at, w.told[entry]})
	}
	slices.SortFunc(waits, func(a, b wait) int { return cmp.Compare(a.took(), b.took()) })
	t.Logf("told after %v at p50, %v at most", waits[calls/2].took(), waits[calls-1].took())
	x.eventually(time.Minute, "all are cancelled", `SELECT count(*) = $1 FROM penstock.result WHERE outcome = 'cancelled'`, calls)
	return waits
}

// The worker of a running entry is told of its cancel by a hint, where the next heartbeat is far away, and by heartbeats
// where no hints are heard.
func TestTheWorkerIsToldOfACancel(t *testing.T) {
	for _, c := range []struct {
		name  string
		hints bool
		beat  time.Duration
	}{{"by a hint", true, 20 * time.Minute}, {"by heartbeats", false, 500 * time.Millisecond}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cancelRunning(t, 10, func(cfg *Config) {
				cfg.TaskNode.Hints, cfg.TaskNode.Lease, cfg.TaskNode.Beat = c.hints, time.Hour, c.beat
			})
		})
	}
}

// With hints, and heartbeats as they are by default.
func TestTimedTheWorkerIsToldOfACancelWithinASecond(t *testing.T) {
	m := machine.WatchTest(t, pgtest.New(t)) // the database is another one of the same server
	waits := cancelRunning(t, 25, func(cfg *Config) {
		cfg.TaskNode.Hints, cfg.TaskNode.Lease, cfg.TaskNode.Beat = true, 10*time.Second, 2*time.Second
	})
	for _, w := range waits {
		m.Judge(t, "telling the worker of a cancel", w.from, w.to, time.Second)
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
