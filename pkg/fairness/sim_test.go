package fairness

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// cluster simulates nodes that share lanes with endless backlogs. Every free slot ranks,
// claims one entry and runs it; nodes exchange usage at their own moments.
type cluster struct {
	random   *rand.Rand
	now      float64 // seconds
	events   events
	nodes    []*simNode
	flows    []*simFlow
	table    map[Key]AttainedService // the shared usage, each row as of its own time
	asOf     map[Key]float64
	halfLife time.Duration
	every    float64 // seconds between exchanges, 0 for none
	claims   int
}

type simNode struct {
	book  *Book
	slots int
	live  int // nodes it believes to be alive
	tasks map[*task]bool
}

// task is a running entry.
type task struct {
	flow             *simFlow
	started, charged float64
}

type simFlow struct {
	Lane
	active   bool
	cost     func(*rand.Rand) float64
	estimate float64
	finished float64 // service of entries that ended
	running  int
	starts   float64 // sum of the start times of running entries
	claims   int
	last     int // number of the cluster's claim that served it last
}

// attained is the service given up to now, running entries included.
func (f *simFlow) attained(now float64) float64 {
	return f.finished + float64(f.running)*now - f.starts
}

func (c *cluster) clock() time.Time {
	return time.Unix(1_000_000, 0).Add(time.Duration(c.now * float64(time.Second)))
}

func newCluster(seed uint64, nodes, slots int, every float64, flows []*simFlow) *cluster {
	c := &cluster{
		random: rand.New(rand.NewPCG(seed, 1)), flows: flows, every: every, halfLife: 5 * time.Minute,
		table: map[Key]AttainedService{}, asOf: map[Key]float64{},
	}
	for i := range uint64(nodes) {
		c.nodes = append(c.nodes, &simNode{book: New(Config{Seed: seed<<32 + i + 1}), slots: slots, live: nodes, tasks: map[*task]bool{}})
	}
	for i, n := range c.nodes {
		for range slots {
			c.at(c.random.Float64()/10, func() { c.fill(n) })
		}
		if every > 0 {
			c.at(every*float64(i)/float64(nodes)+every, func() { c.exchange(n) })
		}
	}
	return c
}

// fill gives one free slot of a node its next entry.
func (c *cluster) fill(n *simNode) {
	var lanes []Lane
	var flows []*simFlow
	for _, f := range c.flows {
		if f.active {
			lanes = append(lanes, f.Lane)
			flows = append(flows, f)
		}
	}
	order := n.book.Rank(nil, lanes, 1, c.clock())
	if len(order) == 0 {
		c.at(c.now+0.05, func() { c.fill(n) })
		return
	}
	f := flows[order[0]]
	cost := f.cost(c.random)
	n.book.Charge(f.Lane, f.estimate, c.clock())
	c.claims++
	f.claims++
	f.last = c.claims
	f.running++
	f.starts += c.now
	running := &task{f, c.now, f.estimate}
	n.tasks[running] = true
	c.at(c.now+cost, func() {
		delete(n.tasks, running)
		f.running--
		f.starts -= running.started
		f.finished += cost
		n.book.Correct(f.Lane, running.charged, cost, c.clock())
		c.fill(n)
	})
}

func (c *cluster) exchange(n *simNode) {
	for t := range n.tasks {
		if over := c.now - t.started - t.charged; over > 0 {
			n.book.Extend(t.flow.Lane, over, c.clock())
			t.charged += over
		}
	}
	for _, delta := range n.book.Report(c.clock()) {
		old := c.table[delta.Key]
		old.Key = delta.Key
		elapsed := time.Duration((c.now - c.asOf[delta.Key]) * float64(time.Second))
		c.table[delta.Key], c.asOf[delta.Key] = Fold(old, delta, elapsed, c.halfLife), c.now
	}
	var snapshot []AttainedService
	for key, u := range c.table {
		elapsed := time.Duration((c.now - c.asOf[key]) * float64(time.Second))
		u.Service, u.Lift = Decay(u.Service, elapsed, c.halfLife), Decay(u.Lift, elapsed, c.halfLife)
		snapshot = append(snapshot, u)
	}
	n.book.Adopt(snapshot, n.live, c.clock())
	c.at(c.now+c.every, func() { c.exchange(n) })
}

// run goes on for some seconds.
func (c *cluster) run(seconds float64) {
	end := c.now + seconds
	for len(c.events) > 0 && c.events[0].at <= end {
		if e, ok := heap.Pop(&c.events).(event); ok {
			c.now = e.at
			e.do()
		}
	}
	c.now = end
}

func (c *cluster) at(at float64, do func()) { heap.Push(&c.events, event{at, do}) }

type event struct {
	at float64
	do func()
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

// meter measures normalised service from the moment it was made.
type meter struct {
	c     *cluster
	flows []*simFlow
	from  []float64
}

func (c *cluster) meter(flows ...*simFlow) *meter {
	m := &meter{c: c, flows: flows}
	for _, f := range flows {
		m.from = append(m.from, f.attained(c.now))
	}
	return m
}

func (m *meter) normalised() []float64 {
	var values []float64
	for i, f := range m.flows {
		values = append(values, (f.attained(m.c.now)-m.from[i])/positive(f.Weight))
	}
	return values
}

// gap is the largest difference of normalised service over its mean.
func (m *meter) gap() float64 {
	v := m.normalised()
	return (slices.Max(v) - slices.Min(v)) / mean(v)
}

// jain is the fairness index of Jain, Chiu and Hawe 1984: 1 if all are equal, 1/n if one has all.
func (m *meter) jain() float64 {
	v := m.normalised()
	squares := 0.0
	for _, x := range v {
		squares += x * x
	}
	return mean(v) * mean(v) * float64(len(v)) / squares
}

func mean(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// skewed costs are lognormal: most entries are short, a few take many times the mean.
func skewed(mean, sigma float64) func(*rand.Rand) float64 {
	return func(r *rand.Rand) float64 {
		return mean * math.Exp(sigma*r.NormFloat64()-sigma*sigma/2)
	}
}

// tenants are flows of one queue with weights 1 to 4 and mean costs from 0.1 s to 3 s.
func tenants(n int) []*simFlow {
	var flows []*simFlow
	for i := range n {
		mean := 0.1 * math.Pow(30, float64(i)/float64(max(n-1, 1)))
		flows = append(flows, &simFlow{
			Lane:   Lane{Queue: 1, Flow: string(rune('a' + i)), Weight: float64(1 + i%4)},
			active: true, cost: skewed(mean, 1), estimate: mean,
		})
	}
	return flows
}
