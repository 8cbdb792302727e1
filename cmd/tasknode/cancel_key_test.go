package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// The worker does not stop at a cancel: the next entry of the key waits until the run is over.
func TestTheKeyOfACancelledRunIsKeptUntilTheRunIsOver(t *testing.T) {
	t.Parallel()
	x := startBehindProxy(t, idle, longLease, func(cfg *Config) { cfg.TaskNode.Hints = true })
	x.eventually(time.Minute, "hints are heard", hintsSQL, "heard")
	var running, most atomic.Int32
	begun, finish := make(chan string, 8), make(chan struct{})
	end := sync.OnceFunc(func() { close(finish) })
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Method == http.MethodGet {
			_, _ = io.WriteString(w, `{"status": "ok"}`)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		most.Store(max(most.Load(), running.Add(1)))
		begun <- r.Header.Get("Penstock-Entry")
		<-finish
		running.Add(-1)
		_, _ = io.WriteString(w, `{"status": "success", "result": 1}`)
	}))
	t.Cleanup(server.Close)
	t.Cleanup(end) // the server waits for its calls
	never := false
	model := worker.Model{Name: "m", Protocol: worker.ProtocolGeneric, AbortStops: &never}
	name, err := inference.RegisterModel(t.Context(), x.pool, model, inference.By{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := inference.RegisterInstance(t.Context(), x.pool, "m", "gpu-1", server.URL+"/run", 4, nil, inference.By{}); err != nil {
		t.Fatal(err)
	}
	if x.queue, err = invalidation.Open(t.Context(), x.pool, name); err != nil {
		t.Fatal(err)
	}
	entry := invalidation.Push{Payload: json.RawMessage(`{}`), LockKey: "k"}
	pushed, err := x.queue.Push(t.Context(), entry, entry)
	if err != nil {
		t.Fatal(err)
	}
	<-begun
	if _, err := x.pool.Exec(t.Context(), `SELECT penstock.cancel_entry($1, 'unwanted')`, pushed[0].ID); err != nil {
		t.Fatal(err)
	}
	x.eventually(time.Minute, "the node has read the request", `
SELECT EXISTS (SELECT FROM penstock.cancel_request WHERE entry_id = $1 AND delivered_at < clock_timestamp() - interval '1 second')`, pushed[0].ID)
	select {
	case id := <-begun:
		t.Errorf("entry %s began beside the run that was cancelled", id)
	default:
	}
	end()
	x.eventually(time.Minute, "one is cancelled, the next one done", `
SELECT EXISTS (SELECT FROM penstock.result WHERE entry_id = $1 AND outcome = 'cancelled')
   AND EXISTS (SELECT FROM penstock.result WHERE entry_id = $2 AND outcome = 'done')`, pushed[0].ID, pushed[1].ID)
	if most.Load() > 1 {
		t.Errorf("%d runs of one key at once", most.Load())
	}
}
