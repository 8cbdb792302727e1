package peers

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// inferenceSlots is how many calls the worker takes at once: enough for a drain that waits for commits,
// and as many threads as the node then has.
const inferenceSlots = 256

// instantWorker is an inference worker on the loopback interface that answers at once. An entry counts as handled
// when its call has arrived: what lies between a claim and that is part of the queue. For drains it runs in the
// contender's own process, so that its CPU is in the client's. For pick-ups it runs in the process of the Runner, the
// same for all contenders that call it, and tells the times of arrival afterwards.
type instantWorker struct {
	server  *http.Server
	url     string
	handle  atomic.Pointer[func(n int)] // nil while no node is measured
	arrived *arrivals                   // nil: it is not asked for them
}

// newInstantWorker starts a worker; n, if above 0, is how many arrivals it records.
func newInstantWorker(ctx context.Context, n int) (*instantWorker, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for calls: %w", err)
	}
	w := &instantWorker{url: "http://" + listener.Addr().String() + "/run"}
	if n > 0 {
		w.arrived = newArrivals(n)
		note := w.arrived.note
		w.handle.Store(&note)
	}
	w.server = &http.Server{Handler: w, ReadHeaderTimeout: 10 * time.Second}
	go w.server.Serve(listener) //nolint:errcheck // it ends with Close
	return w, nil
}

func (w *instantWorker) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/run":
	case "/arrivals":
		w.tellArrivals(rw, r)
		return
	default: // a probe
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

// tellArrivals answers, when all entries have arrived, with the times as nanoseconds of CLOCK_MONOTONIC.
func (w *instantWorker) tellArrivals(rw http.ResponseWriter, r *http.Request) {
	if w.arrived == nil {
		http.Error(rw, "this worker records no arrivals", http.StatusNotFound)
		return
	}
	at, err := w.arrived.wait(r.Context())
	if err != nil {
		http.Error(rw, err.Error(), http.StatusServiceUnavailable)
		return
	}
	_ = json.NewEncoder(rw).Encode(at)
}

// arrivalsAt asks the worker at url for its arrivals.
func arrivalsAt(ctx context.Context, url string) (at []time.Duration, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(url, "/run")+"/arrivals", nil)
	if err != nil {
		return nil, fmt.Errorf("ask for arrivals: %w", err)
	}
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, fmt.Errorf("ask for arrivals: %w", err)
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("ask for arrivals: %s", reply.Status)
	}
	if err := json.NewDecoder(reply.Body).Decode(&at); err != nil {
		return nil, fmt.Errorf("read arrivals: %w", err)
	}
	return at, nil
}

// setupInference registers a model and the worker as its only instance. A process that is measured
// follows others on the same database, whose workers have gone: the instance gets the new address.
func (p *Penstock) setupInference(ctx context.Context) (err error) {
	url := p.WorkerURL
	if url == "" {
		if p.worker, err = newInstantWorker(ctx, 0); err != nil {
			return err
		}
		url = p.worker.url
	}
	by := inference.By{Actor: "bench"}
	name, err := inference.RegisterModel(ctx, p.pushes, worker.Model{Name: "bench", Protocol: worker.ProtocolGeneric},
		by)
	if err != nil {
		return err
	}
	if _, err := inference.RegisterInstance(ctx, p.pushes, "bench", "here", url, inferenceSlots, nil,
		by); err != nil {
		return err
	}
	p.queue, err = invalidation.Open(ctx, p.pushes, name)
	return err
}
