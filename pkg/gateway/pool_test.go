package gateway

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// operationsWanted is how many random operations the pool and its model are compared over; the variable
// PENSTOCK_OPERATIONS sets another number.
func operationsWanted(t *testing.T, usual int) int {
	text := os.Getenv("PENSTOCK_OPERATIONS")
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// twin runs a pool beside its model and compares them after each step.
type twin struct {
	seed     uint64
	t        *testing.T
	pool     *Pool
	model    *naive
	rand     *rand.Rand
	now      time.Time
	next     int
	slots    []slot.Held
	live     map[int]*Request // waiting or in flight
	pairs    map[int]*naiveRequest
	inFlight []int
	ended    map[int]bool
	events   []event
	order    map[naiveFlow]int // id of the last request of a flow that was dispatched from the queue
}

func newTwin(t *testing.T, seed uint64) *twin {
	policy := DefaultPolicy()
	policy.MayStart, policy.ColdTTL = new(true), worker.Seconds(20*time.Second)
	policy.Total, policy.FlowTotal, policy.QueueTTL = 30, 12, worker.Seconds(8*time.Second)
	x := &twin{
		t: t, seed: seed, pool: NewPool(policy, nil), rand: rand.New(rand.NewPCG(seed, 1)), now: time.Unix(1_700_000_000, 0),
		model: &naive{policy: policy, flows: map[naiveFlow]*naiveTags{}, cold: true},
		live:  map[int]*Request{}, pairs: map[int]*naiveRequest{}, ended: map[int]bool{}, order: map[naiveFlow]int{},
	}
	x.model.serviceWidth = x.pool.serviceWidth
	return x
}

func (x *twin) leave(id int) func(*Request, Dropped) {
	return func(_ *Request, d Dropped) { x.events = append(x.events, event{id, d}) }
}

// check compares what both reported, and the state that they are in.
func (x *twin) check(step string, want []event) {
	x.t.Helper()
	byID := func(a, b event) int { return cmp.Compare(a.id, b.id) }
	// Waits that end in the same moment end in any order.
	got := slices.Clone(x.events)
	x.events = x.events[:0]
	drops := func(list []event) []event {
		list = slices.DeleteFunc(slices.Clone(list), func(e event) bool { return e.dropped == DropNone })
		slices.SortFunc(list, byID)
		return list
	}
	starts := func(list []event) []event {
		return slices.DeleteFunc(slices.Clone(list), func(e event) bool { return e.dropped != DropNone })
	}
	if !slices.Equal(drops(got), drops(want)) || !slices.Equal(starts(got), starts(want)) {
		x.t.Fatalf("seed %d, %s: pool reported %v, the model %v", x.seed, step, got, want)
	}
	for _, e := range got {
		x.report(step, e)
	}
	held, _ := x.pool.fleet.held()
	p := x.pool
	switch {
	case p.waiting != len(x.model.waiting):
		x.t.Fatalf("%s: %d wait, in the model %d", step, p.waiting, len(x.model.waiting))
	case p.inFlight != x.model.inFlight || p.inFlight != len(x.inFlight):
		x.t.Fatalf("%s: %d calls are in flight, in the model %d, and %d have not ended", step, p.inFlight, x.model.inFlight, len(x.inFlight))
	case p.inFlight < 0 || p.inFlight > held:
		x.t.Fatalf("%s: %d calls are in flight on %d slots held", step, p.inFlight, held)
	case p.waiting > p.policy.Total:
		x.t.Fatalf("%s: %d wait, of %d that may", step, p.waiting, p.policy.Total)
	case p.waiting > 0 && p.fleet.usable() > 0 && p.inFlight < p.ceiling():
		x.t.Fatalf("%s: %d wait although %d of %d slots are busy", step, p.waiting, p.inFlight, p.ceiling())
	}
}

func (x *twin) report(step string, e event) {
	if x.ended[e.id] {
		x.t.Fatalf("%s: request %d was heard of after its end", step, e.id)
	}
	if e.dropped != DropNone {
		x.ended[e.id] = true
		delete(x.live, e.id)
		return
	}
	r := x.live[e.id]
	if !x.now.Before(r.limit) {
		x.t.Fatalf("%s: request %d was dispatched %s after the end of its wait", step, e.id, x.now.Sub(r.limit))
	}
	f := naiveFlow{r.Criticality, r.Flow}
	if e.id < x.order[f] {
		x.t.Fatalf("%s: request %d of flow %s came after %d", step, e.id, r.Flow, x.order[f])
	}
	x.order[f] = e.id
	x.inFlight = append(x.inFlight, e.id)
}

func (x *twin) arrive() {
	x.next++
	id := x.next
	r := &Request{
		ID: strconv.Itoa(id), Flow: fmt.Sprint("f", x.rand.IntN(6)), Criticality: Criticality(x.rand.IntN(3)), //nolint:gosec // small
		Weight: 1,
	}
	if r.Flow == "f1" {
		r.Weight = 3
	}
	if x.rand.IntN(4) == 0 {
		r.TTL = time.Duration(1+x.rand.IntN(4000)) * time.Millisecond
	}
	if x.rand.IntN(6) == 0 {
		r.Deadline = x.now.Add(time.Duration(x.rand.IntN(5000)) * time.Millisecond)
	}
	r.Leave = x.leave(id)
	m := &naiveRequest{id: id, flow: naiveFlow{r.Criticality, r.Flow}, weight: r.Weight, deadline: r.Deadline, ttlAsked: r.TTL}
	x.live[id], x.pairs[id] = r, m
	inFlight, refused := x.pool.Arrive(x.now, r)
	wantInFlight, wantRefused, want := x.model.arrive(x.now, m, func(t *naiveTags) float64 {
		if ms, ok := t.cost.estimate(0, 0); ok {
			return ms
		}
		if ms, ok := x.pool.cost.estimate(0, 0); ok {
			return ms
		}
		return costInitial
	})
	step := fmt.Sprintf("arrive %d %s %s", id, r.Criticality, r.Flow)
	got := DropNone
	if refused != nil {
		got = refused.Reason
		x.ended[id] = true
		delete(x.live, id)
	}
	if inFlight != wantInFlight || got != wantRefused {
		x.t.Fatalf("%s: pool says in flight %v refused %q, the model %v %q", step, inFlight, got, wantInFlight, wantRefused)
	}
	if inFlight {
		x.inFlight = append(x.inFlight, id)
	}
	x.check(step, want)
}

func (x *twin) end() {
	if len(x.inFlight) == 0 {
		return
	}
	at := x.rand.IntN(len(x.inFlight))
	id := x.inFlight[at]
	x.inFlight = slices.Delete(x.inFlight, at, at+1)
	r := x.live[id]
	delete(x.live, id)
	x.ended[id] = true
	took := CallEnd{Took: time.Duration(1+x.rand.IntN(3000)) * time.Millisecond, Failed: x.rand.IntN(10) == 0}
	x.pool.End(x.now, r, took)
	x.pool.durations = durations{} // refusals by expected wait have a test of their own
	want := x.model.end(x.now, x.pairs[id], milliseconds(took.Took), !took.Failed)
	x.check(fmt.Sprint("end ", id), want)
	x.pool.End(x.now, r, took) // a second end changes nothing
	x.check(fmt.Sprint("end again ", id), nil)
}

func (x *twin) cancel() {
	ids := slices.Sorted(maps.Keys(x.live)) // a seed has the same operations each time
	if len(ids) == 0 {
		return
	}
	id := ids[x.rand.IntN(len(ids))]
	was := slices.Contains(x.model.waiting, x.pairs[id])
	if got := x.pool.Cancel(x.now, x.live[id], DropCancelled); got != was {
		x.t.Fatalf("cancel %d: pool says %v, the model %v", id, got, was)
	}
	if was {
		x.model.remove(x.pairs[id])
		delete(x.live, id)
		x.ended[id] = true
	}
	x.check(fmt.Sprint("cancel ", id), nil)
}

// supply changes the slots held, or takes the instance away.
func (x *twin) supply() {
	const most = 8
	instance := InstanceState{ID: 1, Server: "a", Slots: most, Usable: x.rand.IntN(8) > 0}
	step := "supply"
	if x.rand.IntN(2) == 0 && len(x.slots) < most {
		fresh := slot.Held{Instance: 1, Number: int32(x.rand.IntN(1 << 30)), Token: x.rand.Int64()} //nolint:gosec // bounded
		x.slots = append(x.slots, fresh)
		x.pool.SetInstances(x.now, []InstanceState{instance})
		want := x.model.supply(x.now, len(x.slots)-1, instance.Usable)
		x.check(step, want)
		x.pool.Grant(x.now, []slot.Held{fresh})
		x.check("grant", x.model.supply(x.now, len(x.slots), instance.Usable))
		return
	}
	x.pool.SetInstances(x.now, []InstanceState{instance})
	x.check(step, x.model.supply(x.now, len(x.slots), instance.Usable))
	out := x.pool.Retire(x.now, 0)
	if !instance.Usable {
		x.slots = slices.DeleteFunc(x.slots, func(s slot.Held) bool { return slices.Contains(out, s) })
		x.check("retire", x.model.supply(x.now, len(x.slots), false))
	}
}

// The pool does what its specification says, over random operations: the same requests fly, wait, are
// refused, evicted and expire, in the same order.
func TestUnracedPoolDoesAsItsModel(t *testing.T) {
	t.Parallel()
	const each, parts = 5_000, 4
	twins := uint64(max(1, operationsWanted(t, 1_000_000)/each)) //nolint:gosec // positive
	for part := range uint64(parts) {
		t.Run(fmt.Sprint(part), func(t *testing.T) {
			t.Parallel()
			for seed := part; seed < twins; seed += parts {
				newTwin(t, seed).play(each)
			}
		})
	}
}

// play carries out so many random operations.
func (x *twin) play(operations int) {
	x.t.Helper()
	for range 6 {
		x.supply()
	}
	for range operations {
		x.now = x.now.Add(time.Duration(x.rand.IntN(120)) * time.Millisecond)
		switch n := x.rand.IntN(100); {
		case n < 50:
			x.arrive()
		case n < 88:
			x.end()
		case n < 93:
			x.cancel()
		case n < 96:
			x.supply()
		default:
			x.now = x.now.Add(time.Duration(x.rand.IntN(2000)) * time.Millisecond)
			x.pool.Tick(x.now)
			x.check("tick", x.model.dispatch(x.now))
		}
	}
}
