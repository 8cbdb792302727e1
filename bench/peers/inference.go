package peers

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// inferenceSlots is how many calls the worker takes at once: enough for a drain that waits for commits,
// and as many threads as the node then has.
const inferenceSlots = 256

// instantWorker is an inference worker on the loopback interface that answers at once. An entry counts as handled when its
// call has arrived: what lies between a claim and that is part of the queue. It runs in the contender's own process,
// so that its CPU is in the client's.
type instantWorker struct {
	server *http.Server
	url    string
	handle atomic.Pointer[func(n int)] // nil while no node is measured
}

func newInstantWorker(ctx context.Context) (*instantWorker, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for calls: %w", err)
	}
	w := &instantWorker{url: "http://" + listener.Addr().String() + "/run"}
	w.server = &http.Server{Handler: w, ReadHeaderTimeout: 10 * time.Second}
	go w.server.Serve(listener) //nolint:errcheck // it ends with Close
	return w, nil
}

func (w *instantWorker) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/run" { // a probe
		_, _ = io.WriteString(rw, `{"active_jobs":0}`)
		return
	}
	var payload penstockPayload
	if err := json.NewDecoder(r.Body).Decode(&payload); err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	if handle := w.handle.Load(); handle != nil {
		(*handle)(payload.N)
	}
	_, _ = io.WriteString(rw, `{"status":"success","result":{}}`)
}

// setupInference registers a model and the worker of this process as its only instance. A process that is measured
// follows others on the same database, whose workers have gone: the instance gets the new address.
func (p *Penstock) setupInference(ctx context.Context) (err error) {
	if p.worker, err = newInstantWorker(ctx); err != nil {
		return err
	}
	by := inference.By{Actor: "bench"}
	name, err := inference.RegisterModel(ctx, p.pushes, worker.Model{Name: "bench", Protocol: worker.ProtocolGeneric},
		by)
	if err != nil {
		return err
	}
	if _, err := inference.RegisterInstance(ctx, p.pushes, "bench", "here", p.worker.url, inferenceSlots, nil,
		by); err != nil {
		return err
	}
	p.queue, err = invalidation.Open(ctx, p.pushes, name)
	return err
}
