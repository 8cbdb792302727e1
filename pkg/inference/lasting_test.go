package inference

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// What goes on after a cancel, to keep the lock key, ends when the node may not go on with it: a node that drains or
// has lost its lease would wait for the run, and reach out to its worker, for as long as the run's limits allow.
func TestWhatGoesOnAfterACancelEndsWithTheNode(t *testing.T) {
	for _, c := range []struct {
		name   string
		model  worker.Model
		cause  error
		stored int // runs that the next node would follow on
	}{
		{"a call", worker.Model{}, invalidation.ErrDraining, 0},
		{"an accepted run", asyncModel(), invalidation.ErrLeaseLost, 1},
		{"a call for several", joining(2, 5*time.Second), invalidation.ErrDraining, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t, c.model)
			finished := make(chan struct{})
			finish := sync.OnceFunc(func() { close(finished) })
			var url string
			var begun func() bool
			switch {
			case c.model.Type == worker.TypeAsync:
				w := b.longWorker(`{}`)
				url, begun = w.URL, func() bool { return w.polls.Load() > 0 }
				finish = func() { w.finished.Store(true) }
			case c.model.Batch.Items > 1:
				w := b.batchWorker(func([]item) { <-finished })
				url, begun = w.URL, func() bool { return len(w.seen()) == 1 }
			default:
				var calls atomic.Int32
				w := workertest.NewScript(t, healthy(func(rw http.ResponseWriter, r *http.Request) {
					calls.Add(1)
					<-finished
					workertest.Says(200, `{"status":"success","result":1}`)(rw, r)
				}))
				url, begun = w.URL, func() bool { return calls.Load() == 1 }
			}
			b.instance("gpu-1", url, 1)
			m := b.start(ServiceConfig{}, func(t *tuning) { t.cancelWait = 50 * time.Millisecond })
			t.Cleanup(finish)
			pushes := make([]invalidation.Push, max(c.model.Batch.Items, 1))
			for i := range pushes {
				pushes[i] = invalidation.Push{Payload: json.RawMessage(fmt.Sprintf(`{"n":%d}`, i)), LockKey: fmt.Sprint("k", i)}
			}
			pushed, err := b.queue.Push(b.ctx, pushes...)
			b.must(err)
			b.eventually("the run has begun", begun)
			for _, p := range pushed {
				m.endRun(p.ID, invalidation.ErrCancelled)
			}
			m.leave()
			m.drain(c.cause)
			for _, p := range pushed {
				b.ended(p.ID)
				if o := b.outcome(p.ID); o.Outcome != "cancelled" {
					t.Errorf("outcome %+v, want a cancel", o)
				}
			}
			if n := b.count(stored); n != c.stored {
				t.Errorf("%d runs are stored, want %d", n, c.stored)
			}
		})
	}
}
