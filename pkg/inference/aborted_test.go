package inference

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

const (
	abortedAnswer  = `{"choices":[{"index":0,"finish_reason":"abort","message":{"content":"The ans"}}]}`
	finishedAnswer = `{"choices":[{"index":0,"finish_reason":"stop","message":{"content":"The answer"}}]}`
)

// A rolling update: the server that stops ends the generations that it has, and answers probes for a moment more.
func TestGenerationOfAServerThatStopsCostsNoAttempt(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI})
	var stopping, aborted atomic.Int32
	replaced := make(chan struct{}) // closed once the next server is registered
	old := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodGet && stopping.Load() > 3:
			workertest.Resets(w, r) // the process is gone
		case r.Method == http.MethodGet:
			if aborted.Load() > 0 {
				stopping.Add(1)
			}
			workertest.Says(200, ``)(w, r)
		default:
			aborted.Add(1)
			select {
			case <-replaced:
			case <-r.Context().Done():
			}
			workertest.Says(200, abortedAnswer)(w, r)
		}
	})
	b.instance("old", old.URL, 1)
	n := b.start(ServiceConfig{}, func(t *tuning) { t.probeEvery = time.Hour })
	id := b.push(`{"messages":[]}`)[0]
	awaitAtLeast(t, &aborted, 1)
	next := workertest.NewScript(t, healthy(workertest.Says(200, finishedAnswer)))
	b.instance("next", next.URL, 1)
	// A node that does not know it yet sends the entry to the old one again.
	workertest.WaitFor(t, func() bool { return len(n.Registry.Endpoints(b.model.Name)) == 2 })
	close(replaced)
	o := b.outcome(id)
	if o.Outcome != "done" || o.Attempt != 0 {
		t.Errorf("ended %s after %d attempts: %s", o.Outcome, o.Attempt, o.Result)
	}
	if aborted.Load() != 1 {
		t.Errorf("%d generations were given up", aborted.Load())
	}
}

// A server that gives a generation up and stays has a reason in the entry, or one that passes: that costs attempts.
func TestGenerationOfAServerThatStaysCostsAttempts(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI})
	b.alter(map[string]any{"retry": map[string]any{"base": 0.01, "cap": 0.01, "max_attempts": 2}})
	w := workertest.NewScript(t, healthy(workertest.Says(200, abortedAnswer)))
	b.instance("gpu-1", w.URL, 1)
	b.start(ServiceConfig{}, func(t *tuning) { t.abortWait = 600 * time.Millisecond })
	if o := b.outcome(b.push(`{"messages":[]}`)[0]); o.Outcome != "failed" {
		t.Errorf("ended %s", o.Outcome)
	}
	if n := posts(w); n != 2 {
		t.Errorf("%d calls for two attempts", n)
	}
}

// A worker that stops may call its runs cancelled. Nobody has cancelled the entry.
func TestRunThatItsWorkerCancelledByItselfIsTriedAgain(t *testing.T) {
	for name, model := range map[string]worker.Model{"answered": {}, "polled": asyncModel()} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, model)
			var calls atomic.Int32
			w := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.URL.Path == "/health":
					workertest.Says(200, `{"active_jobs":0}`)(w, r)
				case r.Method == http.MethodPost && calls.Add(1) == 1 && model.Type == worker.TypeAsync:
					workertest.Says(200, `{"status":"processing","job_id":"j"}`)(w, r)
				case calls.Load() == 1:
					workertest.Says(200, `{"status":"cancelled"}`)(w, r)
				default:
					workertest.Says(200, `{"status":"success","result":1}`)(w, r)
				}
			})
			b.instance("gpu-1", w.URL, 1)
			b.start(ServiceConfig{}, func(t *tuning) { t.abortWait = 100 * time.Millisecond })
			if o := b.outcome(b.push(`{}`)[0]); o.Outcome != "done" || o.Attempt != 1 {
				t.Errorf("ended %s after %d attempts: %s", o.Outcome, o.Attempt, o.Reason)
			}
		})
	}
}
