package inference

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// That a worker cannot be asked about a run just now, perhaps because it is busy with it, does not mean that it is over.
func TestReattachAsksAgainWhereTheWorkerHasNoRoomForTheQuestion(t *testing.T) {
	b := newBed(t, worker.Model{OnUnknown: worker.Reattach})
	var calls, elsewhere atomic.Int32
	var over atomic.Bool
	first := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
			workertest.Says(200, `{"active_jobs":1}`)(w, r)
		case calls.Add(1) == 1:
			workertest.Resets(w, r)
		case over.Load():
			workertest.Says(200, `{"status":"success","result":"kept"}`)(w, r)
		default:
			workertest.Says(429, ``)(w, r)
		}
	})
	b.instance("first", first.URL, 1)
	b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &calls, 1)
	second := b.gpu(func(r *http.Request) (int, string) { elsewhere.Add(1); return answers(r) })
	b.instance("second", second.URL, 4)
	awaitAtLeast(t, &calls, 4)
	if n := b.count(`SELECT count(*) FROM penstock.remote_run`); n != 1 {
		t.Errorf("%d runs are stored", n)
	}
	over.Store(true)
	if o := b.outcome(id); o.Outcome != "done" || string(o.Result) != `"kept"` || o.Attempt != 1 {
		t.Errorf("outcome %+v", o)
	}
	if elsewhere.Load() != 0 {
		t.Errorf("%d calls went elsewhere beside the run", elsewhere.Load())
	}
	b.await(0, `SELECT count(*) FROM penstock.remote_run`)
	b.await(0, `SELECT count(*) FROM penstock.slot`)
}

// What a worker answers when it is asked again counts: a process without its device, or a server that does not have the
// model, is not asked for ever.
func TestReattachTakesARefusalForAnAnswer(t *testing.T) {
	for name, again := range map[string]http.HandlerFunc{
		"device lost": workertest.Says(500, `{"error":"CUDA error: an illegal memory access was encountered"}`),
		"misrouted":   workertest.Says(404, `{"error":"no such model"}`),
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, worker.Model{OnUnknown: worker.Reattach})
			var calls atomic.Int32
			first := workertest.NewScript(t, healthy(func(w http.ResponseWriter, r *http.Request) {
				switch calls.Add(1) {
				case 1:
					workertest.Resets(w, r)
				case 2:
					again(w, r)
				default:
					workertest.Says(200, `{"status":"success","result":"first"}`)(w, r)
				}
			}))
			second := b.gpu(func(r *http.Request) (int, string) {
				if calls.Load() < 2 {
					return 429, ``
				}
				return answers(r)
			})
			b.instance("first", first.URL, 1)
			b.instance("second", second.URL, 1)
			b.start(ServiceConfig{})
			id := b.push(`{}`)[0]
			if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 1 || b.meta(id)["instance"] != "second" {
				t.Errorf("outcome %+v, %v", o, b.meta(id))
			}
			if calls.Load() != 2 {
				t.Errorf("%d calls, want 2", calls.Load())
			}
		})
	}
}

// After as long as a run may last the worker is not asked for ever.
func TestReattachGivesUpWhenNoRunCouldLastSoLong(t *testing.T) {
	b := newBed(t, worker.Model{OnUnknown: worker.Reattach})
	var calls atomic.Int32
	first := workertest.NewScript(t, healthy(func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) == 1 {
			workertest.Resets(w, r)
			return
		}
		workertest.Says(429, ``)(w, r)
	}))
	b.instance("first", first.URL, 1)
	b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &calls, 3)
	b.instance("second", b.gpu(answers).URL, 1)
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.remote_run SET started_at = now() - interval '11 minutes'`)
	b.must(err)
	if o := b.outcome(id); o.Outcome != "done" {
		t.Errorf("outcome %+v", o)
	}
}

// A node that drains leaves a call whose worker knows it by its id to the next one, which asks there.
func TestReattachAsksTheSameInstanceAfterADrain(t *testing.T) {
	b := newBed(t, worker.Model{OnUnknown: worker.Reattach})
	var calls atomic.Int32
	goOn := make(chan struct{})
	first := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
			workertest.Says(200, `{"active_jobs":1}`)(w, r)
			return
		case calls.Add(1) == 1:
			<-goOn
		}
		workertest.Says(200, `{"status":"success","result":1}`)(w, r)
	})
	t.Cleanup(func() { close(goOn) })
	b.instance("first", first.URL, 1)
	m := b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &calls, 1)
	m.leave()
	m.drain(invalidation.ErrDraining)
	m.work.Wait()
	var elsewhere atomic.Int32
	second := b.gpu(func(r *http.Request) (int, string) { elsewhere.Add(1); return answers(r) })
	b.instance("second", second.URL, 4)
	if n := b.count(`SELECT count(*) FROM penstock.remote_run`); n != 1 {
		t.Errorf("%d runs are stored", n)
	}
	b.start(ServiceConfig{})
	if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 || b.meta(id)["instance"] != "first" {
		t.Errorf("outcome %+v, %v", o, b.meta(id))
	}
	if elsewhere.Load() != 0 {
		t.Errorf("%d calls went elsewhere beside the run", elsewhere.Load())
	}
}

// A worker that is asked again says that the run goes on: it reports to the address that it was first told, and that
// report counts.
func TestReportOfARunThatWasReattachedCounts(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolCog, Type: worker.TypeAsync, OnUnknown: worker.Reattach})
	leader := NewReports("", []byte("key"), b.pool, quiet)
	var calls atomic.Int32
	var first atomic.Int64 // the token of the first call
	w := workertest.NewScript(t, func(rw http.ResponseWriter, r *http.Request) {
		id := strings.TrimPrefix(r.URL.Path, "/predictions/")
		switch {
		case r.Method == http.MethodGet:
			workertest.Says(200, `{"status":"BUSY"}`)(rw, r)
		case calls.Load() == 0:
			n, err := strconv.ParseInt(r.Header.Get("Penstock-Token"), 10, 64)
			if err != nil {
				b.Error(err)
			}
			first.Store(n)
			calls.Add(1)
			workertest.Resets(rw, r)
		default:
			workertest.Says(202, `{"id":"`+id+`","status":"processing","input":{}}`)(rw, r)
		}
	})
	b.instance("gpu-1", w.URL, 1)
	m := b.start(ServiceConfig{Dispatch: DispatchConfig{Reports: NewReports("http://leader", []byte("key"), b.pool, quiet)}})
	id := b.push(`{}`)[0]
	b.await(1, stored)
	body := fmt.Sprintf(`{"id":"%d","status":"succeeded","output":"kept"}`, id)
	if kept, err := leader.Take(b.ctx, int64(id), first.Load(), []byte(body)); !kept || err != nil {
		m.die()
		t.Fatalf("the report was not taken: %v", err)
	}
	if o := b.outcome(id); o.Outcome != "done" || string(o.Result) != `"kept"` {
		t.Errorf("outcome %+v", o)
	}
}
