package gateway

import (
	"container/heap"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// faultRun is a pool of instances with 8 slots, before which 1,000 requests wait, in simulated time.
type faultRun struct {
	pool  *Pool
	now   time.Time
	ends  ends
	fails map[int32]bool // instances whose calls fail in 5 ms; those of others take 20 s

	failed, served map[int32]int
}

type ends []*Request

func (e ends) Len() int           { return len(e) }
func (e ends) Less(i, j int) bool { return e[i].limit.Before(e[j].limit) }
func (e ends) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *ends) Push(x any)        { *e = append(*e, x.(*Request)) } //nolint:errcheck,forcetypeassert // only requests
func (e *ends) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func newFaultRun(instances int32) *faultRun {
	policy := DefaultPolicy()
	policy.Total, policy.FlowTotal, policy.QueueTTL = 2000, 2000, worker.Seconds(time.Hour)
	f := &faultRun{
		pool: NewPool(policy, nil), now: time.Unix(1_700_000_000, 0), fails: map[int32]bool{},
		failed: map[int32]int{}, served: map[int32]int{},
	}
	var list []InstanceState
	var slots []slot.Held
	for id := range instances {
		list = append(list, InstanceState{ID: id + 1, Slots: 8, Usable: true})
		for n := range int32(8) {
			slots = append(slots, slot.Held{Instance: id + 1, Number: n, Token: int64(id*8+n) + 1})
		}
	}
	f.pool.SetInstances(f.now, list)
	f.pool.Grant(f.now, slots)
	return f
}

// wait makes requests that wait.
func (f *faultRun) wait(n int) {
	for range n {
		r := &Request{Criticality: Critical, Leave: func(r *Request, _ Dropped) { f.begin(r) }}
		if inFlight, _ := f.pool.Arrive(f.now, r); inFlight {
			f.begin(r)
		}
	}
}

func (f *faultRun) begin(r *Request) {
	r.limit = f.now.Add(20 * time.Second)
	if f.fails[r.slot.Instance] {
		r.limit = f.now.Add(5 * time.Millisecond)
	}
	heap.Push(&f.ends, r)
}

// run lets the pool serve until a time.
func (f *faultRun) run(d time.Duration) {
	until := f.now.Add(d)
	for f.now.Before(until) {
		next := f.pool.Next()
		if len(f.ends) > 0 && (next.IsZero() || f.ends[0].limit.Before(next)) {
			r := heap.Pop(&f.ends).(*Request) //nolint:errcheck,forcetypeassert // only requests
			f.now = r.limit
			id := r.slot.Instance
			took := f.now.Sub(r.began)
			fails := took < time.Second
			if fails {
				f.failed[id]++
			} else {
				f.served[id]++
			}
			f.pool.End(f.now, r, CallEnd{Took: took, Failed: fails, Fault: fails})
			continue
		}
		if next.IsZero() {
			return
		}
		f.now = next
		f.pool.Tick(f.now)
	}
}

// An instance whose calls fail at once has room again and again. It must not get all that waits, and has its share again
// when its calls succeed.
func TestAnInstanceThatFailsAtOnceDoesNotGetTheQueue(t *testing.T) {
	t.Parallel()
	f := newFaultRun(2)
	f.fails[1] = true
	f.wait(1000)
	f.run(2 * time.Minute)
	if f.failed[1] > 24 || f.served[2] < 40 {
		t.Errorf("%d requests failed at the one, and %d were served by the other", f.failed[1], f.served[2])
	}
	f.fails[1] = false
	f.run(time.Minute)
	f.served[1], f.served[2] = 0, 0
	f.run(2 * time.Minute)
	if f.served[1] < 40 {
		t.Errorf("the instance is sound again and served %d requests, the other %d", f.served[1], f.served[2])
	}
}

// Where no other instance is sound, nothing is held back: clients are to be told.
func TestTheOnlyInstanceIsCalledThoughItFails(t *testing.T) {
	t.Parallel()
	for _, instances := range []int32{1, 2} {
		f := newFaultRun(instances)
		f.fails[1], f.fails[2] = true, true
		f.wait(1000)
		f.run(10 * time.Second)
		if n := f.failed[1] + f.failed[2]; n != 1000 {
			t.Errorf("%d instances: %d of 1,000 requests were answered", instances, n)
		}
	}
}

func TestServerThatAnswersWithErrorsIsLeftForOthers(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]http.HandlerFunc{
		"500":        workertest.Says(500, `{"error":{"message":"CUDA error"}}`),
		"disconnect": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startTestbed(t, nil, broken, workertest.Says(200, "{}"))
			failed := 0
			for i := range 30 {
				if a := p.post(chat, fmt.Sprintf(`{"model":"m","seed":%d}`, i)); a.StatusCode >= 500 {
					failed++
				}
			}
			if failed == 0 || failed > 6 {
				t.Errorf("%d of 30 requests failed", failed)
			}
		})
	}
}
