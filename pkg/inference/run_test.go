package inference

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

func TestEntryRunsOnAWorkerAndSaysWhere(t *testing.T) {
	b := newBed(t, worker.Model{})
	g := b.gpu(func(r *http.Request) (int, string) {
		if r.Header.Get("X-Source") != "dispatcher" || r.Header.Get("Penstock-Token") == "" {
			return 400, `{"error":"not from the dispatcher"}`
		}
		return answers(r)
	})
	b.instance("gpu-1", g.URL+"/generate", 2)
	if b.queue.Name != "flux_1" {
		t.Errorf("queue is called %q", b.queue.Name)
	}
	b.start(ServiceConfig{})
	id := b.push(`{"prompt": "a sunset"}`)[0]
	if o := b.outcome(id); o.Outcome != "done" || !strings.Contains(string(o.Result), "true") {
		t.Fatalf("outcome %+v", o)
	}
	first, measured := b.meta(id)["first_byte_ms"].(float64)
	if took, _ := b.meta(id)["run_ms"].(float64); !measured || first <= 0 || first > took+1 {
		t.Errorf("the first byte came after %v ms, the run took %v", first, took)
	}
	if m := b.meta(id); m["instance"] != "gpu-1" || m["attempts"] != 1.0 || m["outcome"] != "done" {
		t.Errorf("noted %v", m)
	}
	b.await(0, `SELECT count(*) FROM penstock.slot`)
}

func TestBusyAndNotReadyCostNoAttemptAndAreTriedElsewhere(t *testing.T) {
	for name, body := range map[string]string{"busy": `{"detail":"GPU busy"}`, "not ready": `{"detail":"model is loading"}`} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, worker.Model{})
			var refusals atomic.Int32
			full := b.gpu(func(*http.Request) (int, string) { refusals.Add(1); return 503, body })
			free := b.gpu(answers)
			b.instance("full", full.URL, 1)
			b.instance("free", free.URL, 1)
			b.start(ServiceConfig{}, func(t *tuning) { t.quarantine.failures = 1000 })
			ids := b.push(empty(20)...)
			for _, id := range ids {
				if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
					t.Fatalf("outcome %+v", o)
				}
			}
			if refusals.Load() == 0 {
				t.Error("the full worker was never asked")
			}
		})
	}
}

func TestEveryWorkerBusyHandsTheEntryBackUnspent(t *testing.T) {
	b := newBed(t, worker.Model{})
	var busy atomic.Bool
	busy.Store(true)
	var refusals atomic.Int32
	g := b.gpu(func(r *http.Request) (int, string) {
		if busy.Load() {
			refusals.Add(1)
			return 503, `{"detail":"GPU busy"}`
		}
		return answers(r)
	})
	b.instance("gpu-1", g.URL, 1)
	b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &refusals, 6) // more often than there are attempts
	busy.Store(false)
	if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
		t.Fatalf("outcome %+v", o)
	}
}

// The header of one instance, which may be wrong, puts an entry off for half a minute at most, and not at all where there
// is another instance, which may come free.
func TestEntryIsNotPutOffForLongByOneInstance(t *testing.T) {
	spent := healthy(workertest.Says(429, ``, "Retry-After", "3600"))
	const putOff = `SELECT count(*) FROM penstock.ready WHERE entry_id = $1
		AND not_before > clock_timestamp() + make_interval(secs => $2)`
	t.Run("alone", func(t *testing.T) {
		b := newBed(t, worker.Model{})
		b.instance("spent", workertest.NewScript(t, spent).URL, 1)
		b.start(ServiceConfig{})
		id := b.push(`{}`)[0]
		b.await(1, `SELECT count(*) FROM penstock.ready WHERE entry_id = $1 AND not_before IS NOT NULL`, id)
		if b.count(putOff, id, worker.RetryAfterMax.Seconds()) != 0 {
			t.Errorf("it is put off for more than %s", worker.RetryAfterMax)
		}
	})
	t.Run("beside another", func(t *testing.T) {
		b := newBed(t, worker.Model{})
		began, release := make(chan struct{}, 2), make(chan struct{})
		free := b.gpu(func(r *http.Request) (int, string) {
			began <- struct{}{}
			<-release
			return answers(r)
		})
		end := sync.OnceFunc(func() { close(release) })
		t.Cleanup(end)
		b.instance("free", free.URL, 1)
		b.start(ServiceConfig{})
		first := b.push(`{}`)[0]
		<-began
		s := workertest.NewScript(t, spent)
		b.instance("spent", s.URL, 1)
		second := b.push(`{}`)[0]
		b.eventually("the other instance was asked", func() bool { return posts(s) > 0 })
		b.await(1, `SELECT count(*) FROM penstock.ready WHERE entry_id = $1`, second)
		if b.count(putOff, second, 1) != 0 {
			t.Fatal("it is put off by the one that has no room")
		}
		end()
		for _, id := range []invalidation.EntryID{first, second} {
			if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
				t.Errorf("outcome %+v", o)
			}
		}
	})
}

// A run that fails late, in the words of a full server or of one that is not ready, is no refusal: what it costs is bounded.
func TestLongLateRefusalIsNotFreeForEver(t *testing.T) {
	const full = `{"status":"failed","error":"429 Client Error: Too Many Requests"}`
	for name, c := range map[string]struct {
		model  worker.Model
		status int
		body   string
	}{
		"by itself":  {worker.Model{}, 200, full},
		"in batches": {joining(2, 50*time.Millisecond), 200, full},
		"not ready":  {worker.Model{}, 503, `{"error":"no answer of the backend"}`},
		"busy":       {worker.Model{}, 503, `{"error":"server busy"}`},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, c.model)
			g := b.gpu(func(*http.Request) (int, string) {
				time.Sleep(20 * time.Millisecond)
				return c.status, c.body
			})
			b.instance("gpu-1", g.URL, 1)
			b.start(ServiceConfig{}, func(t *tuning) { t.quarantine.fast, t.quarantine.failures = 5*time.Millisecond, 1000 })
			ids := b.push(empty(max(c.model.Batch.Items, 1))...)
			b.ended(ids...)
			for _, id := range ids {
				if o := b.outcome(id); o.Outcome != "failed" || o.Attempt != 4 {
					t.Errorf("outcome %+v", o)
				}
			}
			if calls, _ := g.seen(); len(ids) == 1 && calls != freeMax+4 {
				t.Errorf("it was run %d times, want %d", calls, freeMax+4)
			}
		})
	}
}

func TestErrorClassesDecideWhatFollows(t *testing.T) {
	for _, c := range []struct {
		name, body, class string
		status, calls     int
	}{
		{"input", `{"error":"prompt is missing"}`, "input", 422, 1},
		{"out of memory", `{"status":"failed","error":"CUDA out of memory"}`, "oom", 500, 4},
		{"transient", `{"status":"failed","error":"odd"}`, "transient", 500, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t, worker.Model{})
			g := b.gpu(func(*http.Request) (int, string) { return c.status, c.body })
			b.instance("gpu-1", g.URL, 1)
			b.start(ServiceConfig{}, func(t *tuning) { t.quarantine.failures = 1000 })
			o := b.outcome(b.push(`{}`)[0])
			if calls, _ := g.seen(); o.Outcome != "failed" || o.Class != c.class || calls != c.calls {
				t.Errorf("%d calls, want %d; outcome %+v", calls, c.calls, o)
			}
		})
	}
}

func TestUnknownOutcomeFollowsTheDeclaredPolicy(t *testing.T) {
	for policy, wantCalls := range map[string]int{worker.AtLeastOnce: 2, worker.AtMostOnce: 1} {
		t.Run(policy, func(t *testing.T) {
			b := newBed(t, worker.Model{OnUnknown: policy})
			var calls atomic.Int32
			s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.URL.Path == "/health":
					workertest.Says(200, `{"active_jobs":0}`)(w, r)
				case calls.Add(1) == 1:
					workertest.Resets(w, r)
				default:
					workertest.Says(200, `{"status":"success","result":1}`)(w, r)
				}
			})
			b.instance("gpu-1", s.URL, 2)
			b.start(ServiceConfig{})
			o := b.outcome(b.push(`{}`)[0])
			if int(calls.Load()) != wantCalls {
				t.Errorf("%d calls, want %d", calls.Load(), wantCalls)
			}
			if policy == worker.AtMostOnce && (o.Outcome != "failed" || o.Class != "unknown") {
				t.Errorf("outcome %+v", o)
			}
			if policy == worker.AtLeastOnce && (o.Outcome != "done" || o.Attempt != 1) {
				t.Errorf("outcome %+v", o)
			}
			b.await(0, `SELECT count(*) FROM penstock.slot`) // the one in doubt too, once a probe found the worker idle
		})
	}
}

// longQuarantine lasts for longer than a test on a busy machine, where failures are not fast either.
func longQuarantine(t *tuning) {
	t.quarantine.fast, t.quarantine.lasts, t.quarantine.lastsMax = time.Minute, time.Hour, time.Hour
}

// A proxy that hangs up on calls that are longer than it waits must not have an entry run for ever, nor keep its slot.
func TestCallThatAProxyGaveUpSpendsAnAttempt(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI})
	s := workertest.NewScript(t, healthy(workertest.Says(504, ``)))
	b.instance("gpu-1", s.URL, 1)
	m := b.start(ServiceConfig{}, func(t *tuning) { t.quarantine.failures, t.usageEvery = 1000, 50*time.Millisecond })
	id := b.push(`{"messages":[]}`)[0]
	for deadline := time.Now().Add(time.Minute); posts(s) < 4; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			m.die()
			t.Fatalf("%d calls, want 4", posts(s))
		}
	}
	b.await(1, `SELECT count(*) FROM penstock.failure WHERE entry_id = $1 AND class = 'unknown'`, id)
	if n := posts(s); n != 4 {
		t.Errorf("%d calls, want as many as there are attempts", n)
	}
	b.await(0, `SELECT count(*) FROM penstock.slot`)
	b.await(4, `SELECT coalesce(sum(calls), 0)::int FROM penstock.usage_hour`)
}

func TestInstanceThatFailsFastIsQuarantinedAndEntriesDoNotPay(t *testing.T) {
	b := newBed(t, worker.Model{})
	broken := b.gpu(func(*http.Request) (int, string) {
		return 500, `{"status":"failed","error":"CUDA error: an illegal memory access was encountered"}`
	})
	good := b.gpu(func(r *http.Request) (int, string) { time.Sleep(2 * time.Millisecond); return answers(r) })
	b.instance("broken", broken.URL, 1)
	b.instance("good", good.URL, 1)
	b.start(ServiceConfig{}, longQuarantine)
	for _, id := range b.push(empty(60)...) {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
			t.Fatalf("outcome %+v", o)
		}
	}
	if calls, _ := broken.seen(); calls > 3 {
		t.Errorf("the broken instance got %d calls", calls)
	}
	if n := b.count(`SELECT count(*) FROM penstock.instance WHERE server = 'broken' AND quarantined_until > now()`); n != 1 {
		t.Error("the quarantine is not in the database")
	}
}

// longWorker speaks the asynchronous side of the dispatcher protocol; runs end when told. It refuses a cancel where that is
// answered by nothing.
type longWorker struct {
	*workertest.Script
	submits, polls, cancels, probes atomic.Int32
	finished                        atomic.Bool
}

func (b *bed) longWorker(cancel string) *longWorker {
	w := &longWorker{}
	w.Script = workertest.NewScript(b.T, func(rw http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
			w.probes.Add(1)
			workertest.Says(200, fmt.Sprintf(`{"active_jobs":%d}`, w.submits.Load()-boolInt(w.finished.Load())*w.submits.Load()))(rw, r)
		case strings.HasPrefix(r.URL.Path, "/cancel/"):
			w.cancels.Add(1)
			status := http.StatusOK
			if cancel == "" {
				status = http.StatusConflict
			}
			workertest.Says(status, cancel)(rw, r)
		case strings.HasPrefix(r.URL.Path, "/status/"):
			w.polls.Add(1)
			if w.finished.Load() {
				workertest.Says(200, `{"status":"completed","result":{"job":"`+strings.TrimPrefix(r.URL.Path, "/status/")+`"}}`)(rw, r)
				return
			}
			workertest.Says(200, `{"status":"processing"}`)(rw, r)
		default:
			workertest.Says(200, fmt.Sprintf(`{"status":"processing","job_id":"job-%d"}`, w.submits.Add(1)))(rw, r)
		}
	})
	return w
}

func boolInt(b bool) int32 {
	if b {
		return 1
	}
	return 0
}

func asyncModel() worker.Model {
	return worker.Model{
		Type: worker.TypeAsync, PollPath: "/status/{id}", CancelPath: "/cancel/{id}", PollInterval: worker.Seconds(20 * time.Millisecond),
	}
}

func awaitAtLeast(t *testing.T, n *atomic.Int32, least int32) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); n.Load() < least; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("got %d, want at least %d", n.Load(), least)
		}
	}
}

func TestRunIsFollowedOnAfterTheDeathOfItsNode(t *testing.T) {
	b := newBed(t, asyncModel())
	w := b.longWorker(`{"cancelled":true}`)
	b.instance("gpu-1", w.URL, 1)
	first := b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &w.polls, 2)
	first.die()
	b.began5MinutesAgo()
	polls := w.polls.Load()
	b.start(ServiceConfig{}, folding)
	awaitAtLeast(t, &w.polls, polls+3)
	if n := b.count(`SELECT count(*) FROM penstock.slot`); n != 1 {
		t.Errorf("%d slots are held for one run", n)
	}
	w.finished.Store(true)
	o := b.outcome(id)
	if o.Outcome != "done" || !strings.Contains(string(o.Result), "job-1") || o.Attempt != 0 {
		t.Fatalf("outcome %+v", o)
	}
	if w.submits.Load() != 1 {
		t.Errorf("the run was submitted %d times", w.submits.Load())
	}
	if w.cancels.Load() != 0 {
		t.Error("the node that lost its lease cancelled the run, which is another node's")
	}
	if m := b.meta(id); m["reattached"] != true || m["remote_id"] != "job-1" {
		t.Errorf("noted %v", m)
	}
	b.await(0, `SELECT count(*) FROM penstock.slot`)
	b.await(0, `SELECT count(*) FROM penstock.remote_run`)
	b.used(5*time.Minute, true)
}

func TestDrainHandsARunOverToTheNextNode(t *testing.T) {
	b := newBed(t, asyncModel())
	w := b.longWorker(`{}`)
	b.instance("gpu-1", w.URL, 1)
	first := b.start(ServiceConfig{}, folding)
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &w.polls, 1)
	first.leave()
	first.drain(invalidation.ErrDraining)
	first.work.Wait()
	b.began5MinutesAgo()
	b.start(ServiceConfig{}, folding)
	w.finished.Store(true)
	if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
		t.Fatalf("outcome %+v", o)
	}
	if w.submits.Load() != 1 {
		t.Errorf("the run was submitted %d times", w.submits.Load())
	}
	if ms, _ := b.meta(id)["run_ms"].(float64); ms < 5*60_000 {
		t.Errorf("%v ms are noted of a run of more than 5 minutes", ms)
	}
	b.used(5*time.Minute, true)
}

// Between two nodes nobody runs the entry: a cancel ends it at once, and the sweep tells the worker.
func TestCancelOfARunThatNoNodeFollowsReachesTheWorker(t *testing.T) {
	b := newBed(t, asyncModel())
	w := b.longWorker(`{"cancelled":true}`)
	b.instance("gpu-1", w.URL, 1)
	first := b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &w.polls, 1)
	first.leave()
	first.drain(invalidation.ErrDraining)
	first.work.Wait()
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.cancel_entry($1, 'unwanted')`, id)
	b.must(err)
	if o := b.outcome(id); o.Outcome != "cancelled" {
		t.Fatalf("outcome %+v", o)
	}
	_, err = b.pool.Exec(b.ctx, `UPDATE penstock.remote_run SET started_at = started_at - interval '2 minutes'`)
	b.must(err)
	next := b.start(ServiceConfig{})
	next.Prober.stopRuns(b.ctx, next.Prober.sweeper.sweepEnded(b.ctx)) // as it does when it is its turn
	awaitAtLeast(t, &w.cancels, 1)
	b.await(0, `SELECT count(*) FROM penstock.remote_run`)
	if next.Prober.stopRuns(b.ctx, next.Prober.sweeper.sweepEnded(b.ctx)); w.cancels.Load() != 1 {
		t.Errorf("the worker was asked %d times", w.cancels.Load())
	}
}

// One that the worker refuses has ended there; one that gets no answer says that the instance is away.
func TestARefusedStopKeepsNoOtherRunFromBeingStopped(t *testing.T) {
	for name, c := range map[string]struct {
		cancel http.HandlerFunc
		want   int32
	}{
		"refused":   {workertest.Says(404, `{}`), 3},
		"no answer": {workertest.Resets, 1},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, asyncModel())
			var asked atomic.Int32
			w := workertest.NewScript(t, func(rw http.ResponseWriter, r *http.Request) {
				if !strings.HasPrefix(r.URL.Path, "/cancel/") {
					workertest.Says(200, `{"active_jobs":0}`)(rw, r)
					return
				}
				asked.Add(1)
				c.cancel(rw, r)
			})
			id := b.instance("gpu-1", w.URL, 1)
			b.start(ServiceConfig{}).Prober.stopRuns(b.ctx, []endedRun{
				{Instance: id, Remote: "a"}, {Instance: id, Remote: "b"}, {Instance: id, Remote: "c"},
			})
			if n := asked.Load(); n != c.want {
				t.Errorf("%d of 3 runs were asked to stop, want %d", n, c.want)
			}
		})
	}
}

func TestCancelReachesTheWorker(t *testing.T) {
	for name, c := range map[string]struct {
		answer, reason string
		slots          int
		wait           time.Duration // for the answer, and then for the run to end: the machine may be busy
	}{
		"confirmed":   {`{"cancelled":true}`, "worker confirmed", 0, time.Minute},
		"unconfirmed": {`{}`, "cancel_unconfirmed", 1, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, asyncModel())
			w := b.longWorker(c.answer)
			b.instance("gpu-1", w.URL, 1)
			b.start(ServiceConfig{}, folding, func(t *tuning) { t.cancelWait = c.wait })
			id := b.push(`{}`)[0]
			awaitAtLeast(t, &w.polls, 1)
			_, err := b.pool.Exec(b.ctx, `SELECT penstock.cancel_entry($1, 'unwanted')`, id)
			b.must(err)
			o := b.outcome(id)
			if o.Outcome != "cancelled" || !strings.Contains(o.Reason, c.reason) || !strings.Contains(o.Reason, "unwanted") {
				t.Errorf("outcome %+v", o)
			}
			if w.cancels.Load() != 1 {
				t.Errorf("the worker was asked %d times", w.cancels.Load())
			}
			// An unconfirmed one stays counted as long as the worker reports a call.
			b.await(c.slots, `SELECT count(*) FROM penstock.slot`)
			b.await(c.slots, `SELECT count(*) FROM penstock.slot WHERE doubt_at < clock_timestamp() - interval '300 ms'`)
			awaitAtLeast(t, &w.probes, w.probes.Load()+3) // two behind its grace, of which one was judged
			if n := b.count(`SELECT count(*) FROM penstock.slot WHERE doubt_at IS NOT NULL`); n != c.slots {
				t.Errorf("%d slots are in doubt, want %d", n, c.slots)
			}
			w.finished.Store(true)
			b.await(0, `SELECT count(*) FROM penstock.slot`)
			b.used(b.model.PollInterval.Duration(), false)
		})
	}
}

func TestDeadlineReachesTheWorkerAsMilliseconds(t *testing.T) {
	b := newBed(t, worker.Model{})
	remaining := make(chan string, 1)
	g := b.gpu(func(r *http.Request) (int, string) {
		remaining <- r.Header.Get("Penstock-Remaining-Ms")
		return answers(r)
	})
	b.instance("gpu-1", g.URL, 1)
	b.start(ServiceConfig{})
	_, err := b.queue.Push(b.ctx, invalidation.Push{Payload: json.RawMessage(`{}`), FinishBy: time.Now().Add(5 * time.Minute)})
	b.must(err)
	var ms int
	if _, err := fmt.Sscan(<-remaining, &ms); err != nil || ms < 240_000 || ms > 300_000 {
		t.Errorf("remaining %d ms (%v), want nearly 300000", ms, err)
	}
}

func TestOverrideTakesEffectWithoutARestartAndFallsBackWhenDeleted(t *testing.T) {
	b := newBed(t, worker.Model{})
	g := b.gpu(func(r *http.Request) (int, string) {
		return 200, `{"status":"success","result":"` + r.Header.Get("X-Tone") + `"}`
	})
	b.instance("gpu-1", g.URL, 1)
	m := b.start(ServiceConfig{})
	said := func() string { return string(b.outcome(b.push(`{}`)[0]).Result) }
	if got := said(); got != `""` {
		t.Errorf("worker heard %s", got)
	}
	b.must(SetOverride(b.ctx, b.pool, b.model.Name, json.RawMessage(`{"headers":{"X-Tone":"loud"},"max_retries":7}`), By{}))
	b.must(m.Registry.Refresh(b.ctx))
	if got := said(); got != `"loud"` {
		t.Errorf("worker heard %s after the override", got)
	}
	if n := b.count(`SELECT (retry->>'max_attempts')::int FROM penstock.queue WHERE name = $1`, b.queue.Name); n != 8 {
		t.Errorf("queue has %d attempts, want 8", n)
	}
	b.must(SetOverride(b.ctx, b.pool, b.model.Name, nil, By{}))
	b.must(m.Registry.Refresh(b.ctx))
	if got := said(); got != `""` {
		t.Errorf("worker heard %s after the override was deleted", got)
	}
	if n := b.count(`SELECT count(*) FROM penstock.audit WHERE object = $1`, b.model.Name); n != 3 {
		t.Errorf("%d lines of audit, want 3", n)
	}
}

func TestLargeResultGoesToTheObjectStoreBeforeTheCommit(t *testing.T) {
	b := newBed(t, worker.Model{})
	large := `"` + strings.Repeat("x", 5000) + `"`
	g := b.gpu(func(*http.Request) (int, string) { return 200, `{"status":"success","result":` + large + `}` })
	b.instance("gpu-1", g.URL, 1)
	dir := t.TempDir()
	b.start(ServiceConfig{Objects: Directory(dir)}, func(t *tuning) { t.inlineBytes = 1000 })
	o := b.outcome(b.push(`{}`)[0])
	var ref struct {
		Object ObjectRef `json:"$object"`
	}
	b.must(json.Unmarshal(o.Result, &ref))
	kept, err := os.ReadFile(strings.TrimPrefix(ref.Object.URL, "file://"))
	b.must(err)
	if string(kept) != large || ref.Object.Size != len(large) {
		t.Errorf("kept %d bytes, reference says %+v", len(kept), ref.Object)
	}
}

// empty are n payloads without anything in them.
func empty(n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = `{}`
	}
	return list
}

// A worker that knows entries by their id is asked again, on the slot that stayed counted for the lost call.
func TestReattachAsksTheSameInstanceAgain(t *testing.T) {
	b := newBed(t, worker.Model{OnUnknown: worker.Reattach})
	var calls, elsewhere atomic.Int32
	var entries [2]string
	first := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
			workertest.Says(200, `{"active_jobs":1}`)(w, r)
		case calls.Add(1) == 1:
			entries[0] = r.Header.Get("Penstock-Entry")
			workertest.Resets(w, r)
		default:
			entries[1] = r.Header.Get("Penstock-Entry")
			workertest.Says(200, `{"status":"success","result":"kept"}`)(w, r)
		}
	})
	b.instance("first", first.URL, 1)
	b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &calls, 1)
	second := b.gpu(func(r *http.Request) (int, string) { elsewhere.Add(1); return answers(r) })
	b.instance("second", second.URL, 4)
	if o := b.outcome(id); o.Outcome != "done" || string(o.Result) != `"kept"` || o.Attempt != 1 {
		t.Errorf("outcome %+v", o)
	}
	if elsewhere.Load() != 0 || entries[0] != entries[1] || entries[0] == "" {
		t.Errorf("%d calls went elsewhere; asked as %v", elsewhere.Load(), entries)
	}
	b.await(0, `SELECT count(*) FROM penstock.remote_run`)
}

// An entry that costs workers their device takes two of them out for a while, and is then dead-lettered.
func TestEntryThatKillsDevicesIsPoisonAfterTwoInstances(t *testing.T) {
	b := newBed(t, worker.Model{Name: "flux", Protocol: worker.ProtocolGeneric})
	var kills atomic.Int32
	for i := range 4 {
		s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			if strings.Contains(string(body), "kill") {
				kills.Add(1)
				workertest.Says(500, `{"error":"CUDA error: device-side assert triggered"}`)(w, r)
				return
			}
			workertest.Says(200, `{"status":"success","result":{}}`)(w, r)
		})
		b.instance(fmt.Sprintf("gpu-%d", i), s.URL+"/run", 2)
	}
	b.start(ServiceConfig{}, longQuarantine)
	others := b.push(empty(40)...) // served by all instances
	for _, id := range others {
		b.outcome(id)
	}
	poison := b.push(`{"do":"kill"}`)[0]
	if o := b.outcome(poison); o.Outcome != "failed" || o.Attempt != 1 || !strings.Contains(o.Reason, "device lost") {
		t.Errorf("outcome %+v", o)
	}
	if n := kills.Load(); n != 2 {
		t.Errorf("it was run %d times", n)
	}
	b.await(2, `SELECT count(*) FROM penstock.instance WHERE quarantined_until > now()`)
	others = append(others, b.push(empty(10)...)...)
	for _, id := range others {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
			t.Fatalf("outcome %+v", o)
		}
	}
}

func TestLastInstanceOutlivesAnEntryThatSaysItsDeviceIsLost(t *testing.T) {
	b := newBed(t, worker.Model{Name: "flux", Protocol: worker.ProtocolGeneric})
	s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), "kill") {
			workertest.Says(500, `{"error":"CUDA error: device-side assert triggered"}`)(w, r)
			return
		}
		workertest.Says(200, `{"status":"success","result":{}}`)(w, r)
	})
	b.instance("gpu-1", s.URL+"/run", 2)
	b.start(ServiceConfig{}, func(t *tuning) { t.readyWait = 10 * time.Millisecond })
	poison := b.push(`{"do":"kill"}`)[0]
	b.eventually("the entry ends while others are served", func() bool {
		b.outcome(b.push(`{}`)[0])
		return b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1`, poison) == 0
	})
	if o := b.outcome(poison); o.Outcome != "failed" || !strings.Contains(o.Reason, "3 runs") {
		t.Errorf("outcome %+v", o)
	}
	if n := b.count(`SELECT count(*) FROM penstock.instance WHERE quarantined_until > now()`); n != 0 {
		t.Error("the only instance is quarantined by one entry")
	}
}

// A process that has lost its device for good gets no calls until a probe finds it gone. A drain by an operator goes on.
func TestAnInstanceWithoutItsDeviceDrainsUntilItsProcessIsGone(t *testing.T) {
	b := newBed(t, worker.Model{})
	broken := b.gpu(func(*http.Request) (int, string) { return 500, `{"error":"CUDA error: unspecified launch failure"}` })
	id := b.instance("broken", broken.URL, 1)
	b.instance("good", b.gpu(answers).URL, 1)
	b.start(ServiceConfig{}, func(t *tuning) { t.quarantine.lasts, t.quarantine.lastsMax = 50*time.Millisecond, 50*time.Millisecond })
	b.eventually("the instance drains", func() bool {
		b.ended(b.push(empty(4)...)...)
		return b.count(`SELECT count(*) FROM penstock.instance WHERE id = $1 AND draining_at IS NOT NULL AND drain_by = 'recycle'`, id) == 1
	})
	broken.Close()
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE id = $1 AND draining_at IS NULL AND drain_by IS NULL AND drain_reason IS NULL`, id)
	b.must(DrainInstance(b.ctx, b.pool, b.model.Name, "broken", By{Actor: "ann", Reason: "new driver"}))
	for _, sql := range []string{`SELECT penstock.recycle_instance($1)`, `UPDATE penstock.instance SET checked_at = NULL WHERE id = $1`} {
		_, err := b.pool.Exec(b.ctx, sql, id)
		b.must(err)
	}
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE id = $1 AND checked_at IS NOT NULL`, id)
	if n := b.count(`SELECT count(*) FROM penstock.instance WHERE id = $1 AND draining_at IS NOT NULL AND drain_by = 'ann'`, id); n != 1 {
		t.Error("the drain of an operator has ended")
	}
}

func TestInputThatAlwaysRunsOutOfMemoryIsNotTriedForEver(t *testing.T) {
	b := newBed(t, worker.Model{Name: "flux", Protocol: worker.ProtocolGeneric})
	s := workertest.NewScript(t, healthy(workertest.Says(500, `{"error":"CUDA out of memory"}`)))
	b.instance("gpu-1", s.URL+"/run", 2)
	b.alter(map[string]any{"retry": map[string]any{"base": 0.02, "cap": 0.1, "max_attempts": 1000}})
	b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	if o := b.outcome(id); o.Outcome != "failed" || !strings.Contains(o.Reason, "ran out of memory") {
		t.Errorf("outcome %+v", o)
	}
}

// One of two servers does not have the model: nothing fails for good, and the other serves all.
func TestServerWithoutTheModelFailsNothing(t *testing.T) {
	b := newBed(t, worker.Model{Name: "flux", Protocol: worker.ProtocolGeneric})
	lost := workertest.NewScript(t, healthy(workertest.Says(404, `{"error":"The model does not exist"}`)))
	good := workertest.NewScript(t, workertest.Says(200, `{"status":"success","result":{}}`))
	b.instance("gpu-1", lost.URL+"/run", 4)
	b.instance("gpu-2", good.URL+"/run", 4)
	b.start(ServiceConfig{}, longQuarantine, func(t *tuning) { t.readyWait = 10 * time.Millisecond })
	for _, id := range b.push(empty(100)...) {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
			t.Fatalf("outcome %+v", o)
		}
	}
	if n := posts(lost); n > 6 {
		t.Errorf("%d calls went to the server without the model", n)
	}
}

// An adapter that no server has, while others are served: the entry asks for what is not there.
func TestWhatNoServerHasIsTheEntrysFault(t *testing.T) {
	b := newBed(t, worker.Model{Name: "flux", Protocol: worker.ProtocolGeneric})
	answer := func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), "absent") {
			workertest.Says(404, `{"error":"The model absent does not exist"}`)(w, r)
			return
		}
		workertest.Says(200, `{"status":"success","result":{}}`)(w, r)
	}
	for i := range 2 {
		b.instance(fmt.Sprintf("gpu-%d", i), workertest.NewScript(t, answer).URL+"/run", 2)
	}
	b.start(ServiceConfig{}, func(t *tuning) { t.readyWait = 10 * time.Millisecond })
	b.outcome(b.push(`{}`)[0])
	if o := b.outcome(b.push(`{"adapter":"absent"}`)[0]); o.Outcome != "failed" || !strings.Contains(o.Reason, "every instance") {
		t.Errorf("outcome %+v", o)
	}
}

// A worker that only fails costs the entries nothing, and gets few calls, over two nodes.
func TestWorkerThatOnlyFailsCostsNobodyAnAttempt(t *testing.T) {
	b := newBed(t, worker.Model{Name: "flux", Protocol: worker.ProtocolGeneric})
	broken := workertest.NewScript(t, healthy(workertest.Says(500, `{"detail":"boom"}`)))
	good := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(20 * time.Millisecond)
		workertest.Says(200, `{"status":"success","result":{}}`)(w, r)
	})
	b.instance("gpu-1", broken.URL+"/run", 2)
	b.instance("gpu-2", good.URL+"/run", 2)
	for range 2 {
		b.start(ServiceConfig{}, longQuarantine, func(t *tuning) { t.readyWait = 10 * time.Millisecond })
	}
	for _, id := range b.push(empty(100)...) {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
			t.Fatalf("outcome %+v", o)
		}
	}
	if n := posts(broken); n >= 10 {
		t.Errorf("%d calls went to the broken worker", n)
	}
}

// posts counts the calls among the requests to a worker, which is probed as well.
func posts(s *workertest.Script) (n int) {
	for _, r := range s.Requests() {
		if r.Method == http.MethodPost {
			n++
		}
	}
	return n
}

// healthy answers probes well, and calls as it is given.
func healthy(calls http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			workertest.Says(200, `{}`)(w, r)
			return
		}
		calls(w, r)
	}
}

// A cancel that the worker does not hear must not let the next entry of the key start beside the run.
func TestCancelKeepsTheKeyUntilTheRunIsOver(t *testing.T) {
	for name, model := range map[string]worker.Model{
		"sync": {}, "async": asyncModel(), "images of a model of chats": {Protocol: worker.ProtocolOpenAI},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, model)
			var running, most atomic.Int32
			finish := make(chan struct{})
			end := sync.OnceFunc(func() { close(finish) })
			begun := make(chan string, 8)
			s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
				switch {
				case strings.HasPrefix(r.URL.Path, "/status/"):
					select {
					case <-finish:
						running.Store(0)
						workertest.Says(200, `{"status":"success","result":1}`)(w, r)
					default:
						workertest.Says(200, `{"status":"processing"}`)(w, r)
					}
				case r.Method == http.MethodGet:
					workertest.Says(200, fmt.Sprintf(`{"active_jobs":%d}`, running.Load()))(w, r)
				case strings.Contains(r.URL.Path, "cancel"):
					workertest.Says(200, `{}`)(w, r)
				default:
					most.Store(max(most.Load(), running.Add(1)))
					begun <- r.Header.Get("Penstock-Entry")
					if model.Type == worker.TypeAsync {
						workertest.Says(200, `{"status":"processing","job_id":"j`+r.Header.Get("Penstock-Entry")+`"}`)(w, r)
						return
					}
					<-finish
					running.Add(-1)
					workertest.Says(200, `{"status":"success","result":1}`)(w, r)
				}
			})
			t.Cleanup(end)
			b.instance("gpu-1", s.URL+"/run", 4)
			m := b.start(ServiceConfig{}, func(t *tuning) { t.cancelWait = 50 * time.Millisecond })
			entry := invalidation.Push{Payload: json.RawMessage(`{"operation":"images"}`), LockKey: "k"}
			pushed, err := b.queue.Push(b.ctx, entry, entry)
			b.must(err)
			<-begun
			_, err = b.pool.Exec(b.ctx, `SELECT penstock.cancel_entry($1, 'unwanted')`, pushed[0].ID)
			b.must(err)
			b.await(0, `SELECT count(*) FROM penstock.cancel_request WHERE delivered_at IS NULL`)
			awaitAtLeast(t, &m.claims, m.claims.Load()+30) // of which each one may find the other entry
			select {
			case id := <-begun:
				t.Errorf("entry %s began beside the run that was cancelled", id)
			default:
			}
			end()
			if o := b.outcome(pushed[0].ID); o.Outcome != "cancelled" || !strings.Contains(o.Reason, "ended after the cancel") {
				t.Errorf("outcome %+v", o)
			}
			if o := b.outcome(pushed[1].ID); o.Outcome != "done" {
				t.Errorf("outcome %+v", o)
			}
			if most.Load() > 1 {
				t.Error("two runs of one key at once")
			}
		})
	}
}
