package replay

import (
	"container/heap"
	"time"

	"github.com/penstock/penstock/pkg/fairness"
)

// Config is what the requests run on.
type Config struct {
	Nodes, Slots int     // slots of each node
	Every        float64 // seconds between exchanges of usage
	Algorithm    fairness.Algorithm
	Models       bool // each model has a queue of its own; else all are in one
	Seed         uint64
}

// Outcome is what became of the requests.
type Outcome struct {
	Waits  []float64 // seconds, of each request
	Began  []float64
	Span   float64 // seconds from the first request to the last end
	Idle   float64 // slot-seconds without a run
	Missed float64 // of those, while a request waited
}

type simulation struct {
	Config
	trace   []Request
	now     float64
	events  events
	nodes   []*node
	lanes   map[fairness.Key]*line
	busy    []*line // lanes with work, in no order
	waiting int
	running int
	shared  map[fairness.Key]fairness.AttainedService
	asOf    map[fairness.Key]float64
	out     Outcome
}

// line is a lane: the numbers of requests that wait, oldest first.
type line struct {
	fairness.Lane
	requests []int
	place    int // in busy; -1 while empty
}

type node struct {
	book    *fairness.Book
	free    int
	runs    map[int]*run
	typical map[int32]float64 // of a run by queue, as task nodes estimate it
	lanes   []fairness.Lane
	order   []int
}

type run struct {
	lane           fairness.Lane
	began, charged float64
}

const halfLife = 5 * time.Minute // what fairness.Config defaults to

// Run replays a trace, whose requests are ordered by time.
func Run(trace []Request, c Config) Outcome {
	s := &simulation{
		Config: c, trace: trace, lanes: map[fairness.Key]*line{},
		shared: map[fairness.Key]fairness.AttainedService{}, asOf: map[fairness.Key]float64{},
		out: Outcome{Waits: make([]float64, len(trace)), Began: make([]float64, len(trace))},
	}
	for i := range c.Nodes {
		n := &node{
			book: fairness.New(fairness.Config{HalfLife: halfLife, Seed: c.Seed<<16 + uint64(i) + 1}),
			free: c.Slots, runs: map[int]*run{}, typical: map[int32]float64{},
		}
		s.nodes = append(s.nodes, n)
		s.at(c.Every*float64(i)/float64(c.Nodes), func() { s.exchange(n) })
	}
	for i := range trace {
		s.at(trace[i].At, func() { s.arrive(i) })
	}
	for ended := 0; ended < len(trace); {
		e, _ := heap.Pop(&s.events).(event)
		s.pass(e.at)
		e.do()
		if e.last {
			ended++
		}
	}
	s.out.Span = s.now - trace[0].At
	return s.out
}

// pass lets time go by.
func (s *simulation) pass(to float64) {
	idle := float64(s.Nodes*s.Slots-s.running) * (to - s.now)
	s.out.Idle += idle
	s.out.Missed += min(idle, float64(s.waiting)*(to-s.now))
	s.now = to
}

func (s *simulation) clock() time.Time {
	return time.Unix(1_000_000, 0).Add(time.Duration(s.now * float64(time.Second)))
}

func (s *simulation) arrive(i int) {
	r := &s.trace[i]
	key := fairness.Key{Queue: 1, Flow: r.Tenant}
	if s.Models {
		for _, x := range []byte(r.Model) {
			key.Queue = key.Queue*31 + int32(x)
		}
	}
	l := s.lanes[key]
	if l == nil {
		l = &line{Lane: fairness.Lane{Queue: key.Queue, Flow: key.Flow, Algorithm: s.Algorithm}, place: -1}
		s.lanes[key] = l
	}
	l.requests = append(l.requests, i)
	s.waiting++
	if l.place < 0 {
		l.place = len(s.busy)
		s.busy = append(s.busy, l)
	}
	// Whoever hears the hint first claims: any node with a free slot.
	for k := range s.nodes {
		if n := s.nodes[(i+k)%len(s.nodes)]; n.free > 0 {
			s.claim(n)
			return
		}
	}
}

// claim gives a free slot of a node the request that its book puts first.
func (s *simulation) claim(n *node) {
	if len(s.busy) == 0 {
		return
	}
	n.lanes = n.lanes[:0]
	for _, l := range s.busy {
		l.HeadPos = int64(l.requests[0]) + 1
		l.HeadAge = time.Duration((s.now - s.trace[l.requests[0]].At) * float64(time.Second))
		n.lanes = append(n.lanes, l.Lane)
	}
	n.order = n.book.Rank(n.order[:0], n.lanes, 1, s.clock())
	l := s.busy[n.order[0]]
	i := l.requests[0]
	l.requests = l.requests[1:]
	if len(l.requests) == 0 {
		last := s.busy[len(s.busy)-1]
		last.place, s.busy[l.place] = l.place, last
		s.busy, l.place = s.busy[:len(s.busy)-1], -1
	}
	s.start(n, l.Lane, i)
}

func (s *simulation) start(n *node, lane fairness.Lane, i int) {
	service := s.trace[i].Service
	estimate := n.typical[lane.Queue]
	n.book.Charge(lane, estimate, s.clock())
	r := &run{lane, s.now, estimate}
	n.runs[i] = r
	n.free--
	s.waiting--
	s.running++
	s.out.Waits[i], s.out.Began[i] = s.now-s.trace[i].At, s.now
	heap.Push(&s.events, event{s.now + service, func() {
		delete(n.runs, i)
		n.free++
		s.running--
		n.book.Correct(lane, r.charged, service, s.clock())
		if n.typical[lane.Queue] == 0 {
			n.typical[lane.Queue] = service
		}
		n.typical[lane.Queue] += (service - n.typical[lane.Queue]) / 10
		s.claim(n)
	}, true})
}

// exchange shares usage with the other nodes, as the statement of pkg/fairness does.
func (s *simulation) exchange(n *node) {
	for _, r := range n.runs {
		if over := s.now - r.began - r.charged; over > 0 {
			n.book.Extend(r.lane, over, s.clock())
			r.charged += over
		}
	}
	since := func(key fairness.Key) time.Duration {
		return time.Duration((s.now - s.asOf[key]) * float64(time.Second))
	}
	for _, delta := range n.book.Report(s.clock()) {
		old := s.shared[delta.Key]
		old.Key = delta.Key
		s.shared[delta.Key], s.asOf[delta.Key] = fairness.Fold(old, delta, since(delta.Key), halfLife), s.now
	}
	var snapshot []fairness.AttainedService
	for key, u := range s.shared {
		u.Service, u.Lift = fairness.Decay(u.Service, since(key), halfLife),
			fairness.Decay(u.Lift, since(key), halfLife)
		if u.Service+u.Lift < 0.001 {
			delete(s.shared, key)
			continue
		}
		snapshot = append(snapshot, u)
	}
	n.book.Adopt(snapshot, s.Nodes, s.clock())
	s.at(s.now+s.Every, func() { s.exchange(n) })
}

func (s *simulation) at(at float64, do func()) { heap.Push(&s.events, event{at, do, false}) }

// event is something that happens at a time; last says that a request ends by it.
type event struct {
	at   float64
	do   func()
	last bool
}

type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, j int) bool { return e[i].at < e[j].at }
func (e events) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }

func (e *events) Push(x any) {
	if v, ok := x.(event); ok {
		*e = append(*e, v)
	}
}

func (e *events) Pop() any {
	old := *e
	last := old[len(old)-1]
	*e = old[:len(old)-1]
	return last
}
