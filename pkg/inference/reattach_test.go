package inference

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
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

// A node that lost its lease neither replaces the run of the node behind it nor says how long that has followed it.
func TestTheRunOfAnEntryIsThatOfItsNewestNode(t *testing.T) {
	b := newBed(t, asyncModel())
	run := remoteRun{
		Queue: b.queue.ID, Entry: b.push(`{}`)[0], Token: 2, Remote: "newest",
		Slot: slot.Held{Instance: b.instance("gpu-1", nowhere, 2), Number: 1, Token: 20},
	}
	b.must(saveRun(b.ctx, b.pool, run))
	older, before := run, run
	older.Token, older.Remote = 1, "older"
	before.Slot.Token, before.Ran = 10, time.Minute // the node that followed it until the slot was adopted
	b.must(saveRun(b.ctx, b.pool, older))
	b.must(chargeRun(b.ctx, b.pool, before))
	found, err := findRun(b.ctx, b.pool, run.Queue, run.Entry)
	b.must(err)
	if found.Token != run.Token || found.Remote != run.Remote || found.Ran != 0 {
		t.Errorf("found %+v, want the run of the newest token, and nothing charged", found)
	}
}

// The time for which the adoption of its slot waits is a part of a run that goes on.
func TestARunIsChargedFromTheFirstCallUntilItEnds(t *testing.T) {
	t.Parallel()
	model := worker.Model{Type: worker.TypeAsync, MaxPollTime: worker.Seconds(time.Hour)}
	for name, c := range map[string]struct {
		remote      string
		known       bool
		least, less time.Duration
	}{
		"followed on":                        {"r", false, 7 * time.Minute, 30 * time.Minute},
		"over when it was found":             {"r", true, 5 * time.Minute, 7 * time.Minute},
		"asked about by a call of this lock": {"", false, 0, 2 * time.Minute},
	} {
		d := &dispatch{model: model}
		d.takeOver(&remoteRun{Remote: c.remote, Age: 5 * time.Minute, Found: time.Now().Add(-2 * time.Minute)}, c.known)
		if took := d.took(); took < c.least || took >= c.less {
			t.Errorf("%s: charged %s, want %s or little more", name, took, c.least)
		}
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

// A run that is asked for again reports to the address of the first call, whether the worker has it from that call, and
// says so or not, or begins it only now.
func TestReportOfARunThatIsAskedForAgainCounts(t *testing.T) {
	cog := worker.Model{Protocol: worker.ProtocolCog, Type: worker.TypeAsync, OnUnknown: worker.Reattach}
	generic := asyncModel()
	generic.OnUnknown = worker.Reattach
	for _, c := range []struct {
		name   string
		model  worker.Model
		answer string // to the second call
		fresh  bool   // the run is of the second call: it reports where that says
		report string
	}{
		{"cog, attached", cog, `{"id":"%d","status":"processing","input":{}}`, false, `{"id":"%d","status":"succeeded","output":"kept"}`},
		{"cog, begun anew", cog, `{"id":"%d","status":"starting","input":{}}`, true, `{"id":"%d","status":"succeeded","output":"kept"}`},
		{"generic, attached", generic, `{"job_id":"%d","status":"processing"}`, false, `{"job_id":"%d","status":"success","result":"kept"}`},
		{"generic, begun anew", generic, `{"job_id":"%d","status":"processing"}`, true, `{"job_id":"%d","status":"success","result":"kept"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t, c.model)
			leader := NewReports("", []byte("key"), b.pool, quiet)
			var calls atomic.Int32
			var told sync.Map // by the number of the call, the token of the address that it has
			w := workertest.NewScript(t, func(rw http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet {
					workertest.Says(200, `{"status":"BUSY"}`)(rw, r)
					return
				}
				var body struct{ Webhook string }
				_ = json.NewDecoder(r.Body).Decode(&body)
				at, _ := url.Parse(cmp.Or(r.Header.Get("Penstock-Callback"), body.Webhook))
				token, _ := strconv.ParseInt(at.Query().Get("token"), 10, 64)
				n := calls.Add(1)
				told.Store(n, token)
				if n == 1 {
					workertest.Resets(rw, r)
					return
				}
				entry, _ := strconv.ParseInt(r.Header.Get("Penstock-Entry"), 10, 64)
				workertest.Says(202, fmt.Sprintf(c.answer, entry))(rw, r)
			})
			b.instance("gpu-1", w.URL+"/generate", 1)
			m := b.start(ServiceConfig{Reports: NewReports("http://leader", []byte("key"), b.pool, quiet)})
			id := b.push(`{}`)[0]
			b.await(1, stored)
			call := int32(1)
			if c.fresh {
				call = 2
			}
			address, _ := told.Load(call)
			token, known := address.(int64)
			if !known {
				t.Fatalf("call %d named no address for a report", call)
			}
			if kept, err := leader.Take(b.ctx, int64(id), token, fmt.Appendf(nil, c.report, id)); !kept || err != nil {
				m.die()
				t.Fatalf("the report was not taken: %v", err)
			}
			if o := b.outcome(id); o.Outcome != "done" || string(o.Result) != `"kept"` {
				t.Errorf("outcome %+v", o)
			}
		})
	}
}
