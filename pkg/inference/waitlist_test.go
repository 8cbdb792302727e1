package inference

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// item is what the workers of these tests are sent; Do says what they shall do.
type item struct {
	N   int    `json:"n"`
	Key string `json:"key,omitempty"`
	Do  string `json:"do,omitempty"`
}

// batcher is a worker that takes a call of one item or of several, and remembers the calls.
type batchWorker struct {
	*gpu
	mu    sync.Mutex
	calls [][]item
}

func (b *bed) batchWorker(run func(items []item)) *batchWorker {
	w := &batchWorker{}
	w.gpu = b.gpu(func(r *http.Request) (int, string) {
		var payload struct {
			item
			Items []item `json:"items"`
		}
		text, err := io.ReadAll(r.Body)
		if err == nil {
			err = json.Unmarshal(text, &payload)
		}
		if err != nil {
			return 400, `{"error":"not for this worker"}`
		}
		if len(payload.Items) == 0 {
			payload.Items = []item{payload.item}
		}
		w.mu.Lock()
		w.calls = append(w.calls, payload.Items)
		w.mu.Unlock()
		run(payload.Items)
		return answerItems(payload.Items, strings.Contains(string(text), `"items"`))
	})
	return w
}

func answerItems(items []item, joined bool) (int, string) {
	var results []string
	for _, i := range items {
		switch i.Do {
		case "break": // the whole call
			return 422, `{"error":"item is malformed"}`
		case "fail":
			results = append(results, `{"status":"failed","error":"no","error_class":"input"}`)
		default:
			results = append(results, fmt.Sprintf(`{"status":"success","result":%d}`, i.N))
		}
	}
	if !joined {
		return 200, results[0]
	}
	return 200, `{"status":"success","result":[` + strings.Join(results, ",") + `]}`
}

func (w *batchWorker) seen() [][]item {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.calls)
}

func items(n int, change func(i *item)) []string {
	payloads := make([]string, n)
	for i := range payloads {
		it := item{N: i}
		if change != nil {
			change(&it)
		}
		text, _ := json.Marshal(it) // it always encodes
		payloads[i] = string(text)
	}
	return payloads
}

var batching = worker.Model{Batch: worker.BatchLimits{Items: 8, Wait: worker.Seconds(100 * time.Millisecond)}}

// joining is a model whose calls go out once they have so many items: a busy machine claims entries one after another.
func joining(items int, wait time.Duration) worker.Model {
	return worker.Model{Batch: worker.BatchLimits{Items: items, Wait: worker.Seconds(wait)}}
}

func TestEntriesShareACallAndEachEndsOnItsOwn(t *testing.T) {
	b := newBed(t, joining(8, time.Minute))
	w := b.batchWorker(func([]item) { time.Sleep(20 * time.Millisecond) })
	b.instance("gpu-1", w.URL, 1)
	ids := b.push(items(40, func(i *item) {
		if i.N%10 == 3 {
			i.Do = "fail"
		}
	})...)
	b.start(ServiceConfig{})
	for n, id := range ids {
		o := b.outcome(id)
		if n%10 == 3 {
			if o.Outcome != "failed" || o.Class != "input" {
				t.Errorf("entry %d, which fails by itself: %+v", n, o)
			}
			continue
		}
		if o.Outcome != "done" || string(o.Result) != fmt.Sprint(n) || o.Attempt != 0 {
			t.Errorf("entry %d: %+v %s", n, o, o.Result)
		}
	}
	shared := 0
	for n, id := range ids {
		if n%10 == 3 {
			continue
		}
		m := b.meta(id)
		if m["batch"] != nil {
			shared++
		}
		if m["slot"] != 0.0 || m["instance"] != "gpu-1" {
			t.Errorf("noted %v", m)
		}
	}
	if shared < 24 {
		t.Errorf("%d of 36 entries shared a call", shared)
	}
	_, peak := w.gpu.seen()
	if calls := w.seen(); len(calls) > 15 || peak != 1 {
		t.Errorf("%d calls for 40 entries, %d at once through one slot", len(calls), peak)
	}
	b.await(0, `SELECT count(*) FROM penstock.slot`)
}

// One malformed entry makes the worker refuse the whole call.
func TestInnocentEntriesDoNotPayForTheCallTheyWereIn(t *testing.T) {
	b := newBed(t, batching)
	w := b.batchWorker(func([]item) {})
	b.instance("gpu-1", w.URL, 1)
	ids := b.push(items(12, func(i *item) {
		if i.N == 5 {
			i.Do = "break"
		}
	})...)
	b.start(ServiceConfig{})
	for n, id := range ids {
		o := b.outcome(id)
		if want := map[bool]string{true: "failed", false: "done"}[n == 5]; o.Outcome != want || o.Attempt > 1 || (n != 5 && o.Attempt != 0) {
			t.Errorf("entry %d: %+v", n, o)
		}
	}
}

func TestEntriesOfOneLockKeyAreNeverInOneCallAndKeepTheirOrder(t *testing.T) {
	b := newBed(t, joining(8, 2*time.Second))
	w := b.batchWorker(func([]item) { time.Sleep(5 * time.Millisecond) })
	b.instance("gpu-1", w.URL, 2)
	b.alter(map[string]any{"grouping": "key"})
	ids := b.push(items(30, func(i *item) { i.Key = fmt.Sprint(i.N % 6) })...)
	b.start(ServiceConfig{})
	for _, id := range ids {
		b.outcome(id)
	}
	last, shared := map[string]int{}, false
	for _, call := range w.seen() {
		keys := map[string]bool{}
		for _, i := range call {
			if keys[i.Key] {
				t.Errorf("two entries of key %s in one call: %v", i.Key, call)
			}
			if keys[i.Key] = true; i.N < last[i.Key] {
				t.Errorf("entry %d of key %s ran after %d", i.N, i.Key, last[i.Key])
			}
			last[i.Key] = i.N
		}
		shared = shared || len(call) > 1
	}
	if !shared {
		t.Error("no call carried more than one entry")
	}
}

// A cancel of one entry in a call must not stop the others, and the last one stops the call.
func TestCancelOfOneEntryLeavesTheCallToTheOthers(t *testing.T) {
	b := newBed(t, joining(4, time.Minute))
	goOn := make(chan struct{})
	answer := sync.OnceFunc(func() { close(goOn) })
	w := b.batchWorker(func([]item) { <-goOn })
	t.Cleanup(answer)
	b.instance("gpu-1", w.URL, 1)
	ids := b.push(items(4, nil)...)
	n := b.start(ServiceConfig{})
	workertest.WaitFor(t, func() bool { return len(w.seen()) == 1 })
	if len(w.seen()[0]) != 4 {
		t.Fatalf("the call carries %d of 4 entries", len(w.seen()[0]))
	}
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.cancel_entry($1, 'unwanted')`, ids[1])
	b.must(err)
	if o := b.outcome(ids[1]); o.Outcome != "cancelled" || !strings.Contains(o.Reason, "cancel_unconfirmed") {
		t.Errorf("outcome %+v", o)
	}
	b.await(1, `SELECT count(*) FROM penstock.slot`) // the call goes on
	answer()
	for _, i := range []int{0, 2, 3} {
		if o := b.outcome(ids[i]); o.Outcome != "done" {
			t.Errorf("entry %d: %+v", i, o)
		}
	}
	n.leave()
	b.await(0, `SELECT count(*) FROM penstock.slot`)
	n.work.Wait()
	n.Pool.mu.Lock()
	if l := n.Pool.stateOf(b.model.Name).ledger; l.unassigned != 0 {
		t.Errorf("%d permits are out at rest", l.unassigned)
	}
	n.Pool.mu.Unlock()
}

// A member that leaves a call which goes on for the others has its part of the whole call: all parts are its time.
func TestTheTimeOfACallIsThatOfAllItsMembers(t *testing.T) {
	b := newBed(t, joining(4, 40*time.Second))
	var began atomic.Pointer[time.Time]
	goOn := make(chan struct{})
	answer := sync.OnceFunc(func() { close(goOn) })
	w := b.batchWorker(func([]item) {
		now := time.Now()
		began.Store(&now)
		<-goOn
	})
	t.Cleanup(answer)
	b.instance("gpu-1", w.URL, 1)
	ids := b.push(items(4, nil)...)
	n := b.start(ServiceConfig{}, folding)
	b.eventually("the call has begun", func() bool { return began.Load() != nil })
	n.endRun(ids[1], invalidation.ErrCancelled)
	if o := b.outcome(ids[1]); o.Outcome != "cancelled" {
		t.Errorf("outcome %+v", o)
	}
	left := time.Since(*began.Load()) // at most this of the call is behind its member
	b.eventually("the call goes on for as long again, and a second", func() bool {
		return time.Since(*began.Load()) > 2*left+time.Second
	})
	answer()
	least := time.Since(*began.Load()).Milliseconds()
	for _, i := range []int{0, 2, 3} {
		if o := b.outcome(ids[i]); o.Outcome != "done" {
			t.Errorf("entry %d: %+v", i, o)
		}
	}
	b.await(4, `SELECT sum(calls)::int FROM penstock.usage_hour`)
	if ms := int64(b.count(`SELECT sum(gpu_ms)::int FROM penstock.usage_hour`)); ms < least-4 {
		t.Errorf("the members of a call of %d ms have used %d ms", least, ms)
	}
}

// A call that its worker refuses as a whole is counted to none of its members: each is tried alone. The one that left it
// has its part until then.
func TestTheRestOfACallThatIsRefusedIsNotCounted(t *testing.T) {
	b := newBed(t, joining(4, 40*time.Second))
	goOn := make(chan struct{})
	answer := sync.OnceFunc(func() { close(goOn) })
	w := b.batchWorker(func([]item) { <-goOn })
	t.Cleanup(answer)
	b.instance("gpu-1", w.URL, 1)
	pushing := time.Now()
	ids := b.push(items(4, func(i *item) {
		if i.N == 3 {
			i.Do = "break"
		}
	})...)
	n := b.start(ServiceConfig{}, folding)
	b.eventually("the call has begun", func() bool { return len(w.seen()) == 1 })
	n.endRun(ids[1], invalidation.ErrCancelled)
	if o := b.outcome(ids[1]); o.Outcome != "cancelled" {
		t.Errorf("outcome %+v", o)
	}
	most := time.Since(pushing) // of the call, until its member left it
	b.eventually("the call goes on for twice as long, and a second", func() bool {
		return time.Since(pushing) > 3*most+time.Second
	})
	answer()
	for i, outcome := range map[int]string{0: "done", 2: "done", 3: "failed"} {
		if o := b.outcome(ids[i]); o.Outcome != outcome {
			t.Errorf("entry %d: %+v", i, o)
		}
	}
	b.await(3, `SELECT coalesce(sum(calls), 0)::int FROM penstock.usage_hour`) // the last one was refused
	if ms := int64(b.count(`SELECT sum(wasted_ms)::int FROM penstock.usage_hour`)); ms > most.Milliseconds()/4+1 {
		t.Errorf("%d ms of a call of %v for four entries are counted to the one that left it", ms, most)
	}
}

// Shapes that do not mix share neither calls nor fates: all get through one slot.
func TestEntriesOfManyShapesGetThroughOneSlot(t *testing.T) {
	model := batching
	model.Batch.ShapeField = "key"
	b := newBed(t, model)
	w := b.batchWorker(func([]item) { time.Sleep(10 * time.Millisecond) })
	b.instance("gpu-1", w.URL, 1)
	ids := b.push(items(40, func(i *item) { i.Key = fmt.Sprint(i.N % 5) })...)
	b.start(ServiceConfig{})
	for n, id := range ids {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
			t.Fatalf("entry %d: %+v", n, o)
		}
	}
	for _, call := range w.seen() {
		for _, i := range call {
			if i.Key != call[0].Key {
				t.Fatalf("shapes mixed: %v", call)
			}
		}
	}
	t.Logf("%d calls for 40 entries of 5 shapes", len(w.seen()))
}

// Nodes die with calls of several entries in flight: nothing is lost, nobody pays, no slot is counted twice.
func TestLongBatchesUnderCrashes(t *testing.T) {
	b := newBed(t, batching)
	b.alter(map[string]any{"crash_limit": 1000})
	b.watchSlots()
	w := b.batchWorker(func([]item) { time.Sleep(30 * time.Millisecond) })
	b.instance("gpu-1", w.URL, 2)
	ids := b.push(items(200, nil)...)
	nodes := []*miniNode{b.start(ServiceConfig{}), b.start(ServiceConfig{})}
	for i := range 4 {
		calls := len(w.seen())
		workertest.WaitFor(t, func() bool { return len(w.seen()) > calls || b.count(`SELECT count(*) FROM penstock.entry`) == 0 })
		nodes[i%2].die()
		nodes[i%2] = b.start(ServiceConfig{})
	}
	for n, id := range ids {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 || string(o.Result) != fmt.Sprint(n) {
			t.Fatalf("entry %d: %+v", n, o)
		}
	}
	for _, n := range nodes {
		n.leave()
	}
	b.await(0, `SELECT count(*) FROM penstock.slot`)
	if _, peak := w.gpu.seen(); peak > 2 {
		t.Errorf("%d calls at once through 2 slots", peak)
	}
}

// The key of a cancelled member stays locked as long as the call goes on for the others: the next entry of the key must not
// start beside it. The member that would be the last to leave keeps a call open whose end the worker may not notice.
func TestCancelledMemberOfACallKeepsItsKeyUntilTheCallIsOver(t *testing.T) {
	for _, c := range []struct {
		name    string
		cancels []int // of the first call's members, in this order
	}{{"one of two", []int{0}}, {"both", []int{1, 0}}} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t, joining(2, 40*time.Second)) // the two are claimed within a tenth of that
			goOn := make(chan struct{})
			answer := sync.OnceFunc(func() { close(goOn) })
			w := b.batchWorker(func([]item) { <-goOn })
			t.Cleanup(answer)
			b.instance("gpu-1", w.URL, 2)
			pushes := []invalidation.Push{
				{Payload: json.RawMessage(`{"n":0}`), LockKey: "k"},
				{Payload: json.RawMessage(`{"n":1}`)},
				{Payload: json.RawMessage(`{"n":2}`), LockKey: "k"},
			}
			pushed, err := b.queue.Push(b.ctx, pushes...)
			b.must(err)
			n := b.start(ServiceConfig{})
			workertest.WaitFor(t, func() bool { return len(w.seen()) == 1 })
			if len(w.seen()[0]) != 2 {
				t.Fatalf("the call carries %d entries, want the two that may run", len(w.seen()[0]))
			}
			for _, i := range c.cancels {
				_, err := b.pool.Exec(b.ctx, `SELECT penstock.cancel_entry($1, 'unwanted')`, pushed[i].ID)
				b.must(err)
			}
			b.await(0, `SELECT count(*) FROM penstock.cancel_request WHERE delivered_at IS NULL`)
			select {
			case <-time.After(500 * time.Millisecond):
			case <-t.Context().Done():
			}
			if calls := len(w.seen()); calls != 1 {
				t.Errorf("%d calls while the first goes on", calls)
			}
			b.await(1, `SELECT count(*) FROM penstock.lock WHERE lock_key = 'k'`)
			answer()
			if o := b.outcome(pushed[0].ID); o.Outcome != "cancelled" || !strings.Contains(o.Reason, "ended after the cancel") {
				t.Errorf("the cancelled entry: %+v", o)
			}
			if o := b.outcome(pushed[2].ID); o.Outcome != "done" {
				t.Errorf("the next entry of the key: %+v", o)
			}
			n.leave()
			b.await(0, `SELECT count(*) FROM penstock.slot`)
			n.work.Wait()
			n.Pool.mu.Lock()
			if l := n.Pool.stateOf(b.model.Name).ledger; l.unassigned != 0 {
				t.Errorf("%d permits are out at rest", l.unassigned)
			}
			n.Pool.mu.Unlock()
		})
	}
}

// An entry whose call went wrong as a whole waits longer for a slot of its own, but not for ever.
func TestWaitForASlotIsBounded(t *testing.T) {
	now := time.Now()
	d := &Dispatcher{tuning: usualTuning()}
	l := &waitlist{dispatcher: d, batcher: newBatcher(worker.BatchLimits{}), waiters: map[string]*waiter{}}
	for id, r := range map[string]*waiter{
		"came just now":       {since: now},
		"found none":          {since: now.Add(-2 * maxWait)},
		"must be alone":       {since: now.Add(-2 * maxWait), alone: true},
		"must be alone still": {since: now.Add(-2 * d.tuning.aloneWait), alone: true},
	} {
		r.entry, r.granted = &dispatch{}, make(chan grant, 1)
		r.member = worker.Member{Entry: id, Shape: id, At: r.since, Alone: true}
		l.batcher.Add(r.member)
		l.waiters[id] = r
	}
	l.sendBack(now)
	if len(l.waiters) != 2 || l.waiters["came just now"] == nil || l.waiters["must be alone"] == nil {
		t.Errorf("left are %v", slices.Sorted(maps.Keys(l.waiters)))
	}
}
