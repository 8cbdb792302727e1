package gateway

import "container/heap"

// flow is the state of one flow in one criticality of a pool.
type flow struct {
	name     string
	weight   float64
	start    float64 // S: tag of its next request; meaningful while it is backlogged
	finish   float64 // F: where its service so far ends in virtual time
	place    int     // in the heap of its criticality; -1: not backlogged
	turn     uint64  // when it became backlogged, or was served: the earlier of equal tags goes first
	evicted  uint64  // when one of its requests was evicted last; 0: never
	inFlight int
	cost     costModel

	head, tail *Request // waiting, first in first
	waiting    int
}

func (f *flow) push(r *Request) {
	r.prev = f.tail
	if f.tail == nil {
		f.head = r
	} else {
		f.tail.next = r
	}
	f.tail = r
	f.waiting++
}

func (f *flow) unlink(r *Request) {
	if r.prev == nil {
		f.head = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		f.tail = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.prev, r.next = nil, nil
	f.waiting--
}

// line is the waiting requests of one criticality: start-time fair queueing over its flows.
type line struct {
	flows    map[string]*flow // with requests or with a debt
	heap     flowHeap         // backlogged flows, least start tag first
	virtual  float64          // V
	last     float64          // the greatest finish tag
	waiting  int
	bytes    int // of their bodies
	inFlight int
	turns    uint64
	most     int // flows beyond which those without requests are dropped
}

func newLine() *line { return &line{flows: map[string]*flow{}, most: 10 * flowsKept} }

func (l *line) flow(name string, weight float64) *flow {
	f := l.flows[name]
	if f == nil {
		if len(l.flows) >= l.most {
			l.sweep()
		}
		f = &flow{name: name, place: -1}
		l.flows[name] = f
	}
	f.weight = weight
	return f
}

// enqueue puts a request behind those of its flow.
func (l *line) enqueue(r *Request) {
	f := r.flow
	f.push(r)
	l.waiting++
	l.bytes += r.Bytes
	if f.place < 0 {
		l.turns++
		f.start, f.turn = max(l.virtual, f.finish), l.turns
		heap.Push(&l.heap, f)
	}
}

// next returns the request that fair queueing serves next, nil if none waits.
func (l *line) next() *Request {
	if len(l.heap) == 0 {
		return nil
	}
	return l.heap[0].head
}

// tagBehind is the start tag of the request of a flow behind one of its waiting requests; nil: of its first one.
func (l *line) tagBehind(f *flow, last *Request) float64 {
	tag := max(l.virtual, f.finish)
	if f.place >= 0 {
		tag = f.start
	}
	if last == nil {
		return tag
	}
	for r := f.head; r != last.next; r = r.next {
		tag += r.estimate * r.units / f.weight
	}
	return tag
}

// remove takes a waiting request out without serving it.
func (l *line) remove(r *Request) {
	f := r.flow
	f.unlink(r)
	l.waiting--
	l.bytes -= r.Bytes
	if f.waiting == 0 && f.place >= 0 {
		heap.Remove(&l.heap, f.place)
	}
}

// charge serves a request of the flow: its virtual time moves on by the estimated cost, of each of its units.
func (l *line) charge(r *Request) {
	f := r.flow
	start := max(l.virtual, f.finish)
	if f.place >= 0 {
		start = f.start
	}
	l.virtual = max(l.virtual, start)
	f.finish = start + r.estimate*r.units/f.weight
	l.last = max(l.last, f.finish)
	f.inFlight++
	l.inFlight++
	if f.place >= 0 {
		l.turns++
		f.start, f.turn = f.finish, l.turns
		heap.Fix(&l.heap, f.place)
	}
}

// debtMax bounds, in slot-milliseconds for each unit of weight, how far a flow may fall behind because
// its calls took longer than estimated. What was charged when they began is not cut.
const debtMax = 60_000

// correct puts the account of a flow right when a call of it has ended.
func (l *line) correct(r *Request, actual float64) {
	f := r.flow
	f.inFlight--
	l.inFlight--
	served := f.start == f.finish // since it became backlogged: its next request starts where the last one ends
	f.finish = min(f.finish+(actual-r.estimate)*r.units/f.weight, max(f.finish, l.virtual+debtMax))
	if f.place >= 0 {
		// A backlogged flow gets back the whole of an estimate that was too high, even behind V: to cut
		// it off there would cost flows whose calls vary a part of their share.
		if f.start = max(f.start, f.finish); served {
			f.start = f.finish
		}
		heap.Fix(&l.heap, f.place)
	}
	if l.inFlight == 0 && l.waiting == 0 {
		l.virtual = max(l.virtual, l.last) // the busy period is over: past service no longer counts
	}
	l.forget(f)
}

// sweep drops every flow without requests, whatever it owes: names are the callers' choice, and must
// not fill the memory.
func (l *line) sweep() {
	for name, f := range l.flows {
		if f.waiting == 0 && f.inFlight == 0 {
			delete(l.flows, name)
		}
	}
	l.most = max(10*flowsKept, 2*len(l.flows))
}

// forget drops a flow without requests and without debt.
func (l *line) forget(f *flow) {
	if f.waiting == 0 && f.inFlight == 0 && f.finish <= l.virtual && len(l.flows) > flowsKept {
		delete(l.flows, f.name)
	}
}

// flowsKept is how many flows of a criticality keep their means of cost although nothing of them is here.
const flowsKept = 1000

// share is how many of the waiting requests a flow may have when the pool is full: by weight among the
// backlogged flows and itself.
func (l *line) share(f *flow, total int) float64 {
	var weights float64
	for _, other := range l.heap {
		weights += other.weight
	}
	if f.place < 0 {
		weights += f.weight
	}
	return float64(total) * f.weight / weights
}

// flowHeap implements container/heap.
type flowHeap []*flow

func (h flowHeap) Len() int { return len(h) }
func (h flowHeap) Less(i, j int) bool {
	if h[i].start != h[j].start {
		return h[i].start < h[j].start
	}
	return h[i].turn < h[j].turn
}

func (h flowHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}

// Push implements heap.Interface.
func (h *flowHeap) Push(x any) {
	f := x.(*flow) //nolint:errcheck,forcetypeassert // only flows are pushed
	f.place = len(*h)
	*h = append(*h, f)
}

// Pop implements heap.Interface.
func (h *flowHeap) Pop() any {
	old := *h
	f := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	f.place = -1
	return f
}
