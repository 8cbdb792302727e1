package simulate

import (
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

// Faults are the failures of a simulated fleet.
type Faults struct {
	ColdSpread float64 // standard deviation of the logarithm of a cold start; 0 for the same each time
	Stuck      float64 // share of starts that never become ready
	DeathEvery float64 // seconds between deaths of a ready instance; 0 for none
	Seed       uint64
}

// instance is one simulated instance.
type instance struct {
	started  float64
	ready    float64 // when it is, or will be
	slots    []slot  // free from these times on
	draining bool
	stuck    bool
	queue    []Request // bound to it, in order of arrival; see Load.Bound
}

type slot struct {
	free float64  // when it is, or will be
	job  *Request // that began last
}

func (i *instance) busyAt(now float64) int {
	busy := 0
	for _, s := range i.slots {
		if s.free > now {
			busy++
		}
	}
	return busy
}

// fleet simulates the instances of one model and their queue.
type fleet struct {
	load      Load
	faults    Faults
	random    *rand.Rand
	instances []*instance
	queue     []Request // waiting, in order of arrival
	next      int       // the first request that has not arrived
	service   float64   // mean of those that ended, decayed
	nextDeath float64

	waits   []float64
	skipped int     // requests that began in the warm-up
	gpu     float64 // instance-seconds
	starts  int
	retried int // requests that began a second time, after a death
	arrived int
	last    float64
}

func newFleet(load Load, faults Faults, initial int) *fleet {
	f := &fleet{
		load: load, faults: faults,
		random: rand.New(rand.NewPCG(faults.Seed, 3)), //nolint:gosec // a simulation must be the same each time
	}
	f.waits = make([]float64, 0, len(load.Requests))
	for range initial {
		f.instances = append(f.instances, &instance{slots: make([]slot, load.Slots)})
	}
	f.nextDeath = faults.DeathEvery
	return f
}

// advance moves the fleet on to now: requests arrive, begin in order of arrival and end.
func (f *fleet) advance(now float64) {
	f.die(now)
	for f.next < len(f.load.Requests) && f.load.Requests[f.next].At <= now {
		request := f.load.Requests[f.next]
		if !f.load.Bound || !f.bind(request, request.At) {
			f.queue = append(f.queue, request)
		}
		f.next++
		f.arrived++
	}
	if f.load.Bound {
		f.serveBound(now)
	} else {
		f.serve(now)
	}
	if now > f.load.Warm {
		f.gpu += float64(len(f.instances)) * (now - f.last)
	}
	f.last = now
	f.remove(now)
}

// serve gives waiting requests to the slots that became free until now.
func (f *fleet) serve(now float64) {
	head := 0
	for head < len(f.queue) {
		request := &f.queue[head]
		free := f.earliest(request.At)
		if free == nil || free.free > now {
			break
		}
		f.begin(request, free)
		head++
	}
	f.queue = f.queue[head:]
	if head > 0 && len(f.queue) == 0 {
		f.queue = nil
	}
}

// begin gives a slot to a request, when both are there.
func (f *fleet) begin(request *Request, free *slot) {
	at := max(request.At, free.free)
	free.free, free.job = at+request.Service, request
	if request.At >= f.load.Warm {
		f.waits = append(f.waits, at-request.At)
	} else {
		f.skipped++
	}
	if f.service == 0 {
		f.service = request.Service
	}
	f.service += (request.Service - f.service) / 50
}

// bind gives a request to the ready instance with the fewest requests. It is false where none is ready.
func (f *fleet) bind(request Request, at float64) bool {
	var best *instance
	fewest := 0
	for _, i := range f.instances {
		if i.draining || i.stuck || i.ready > at {
			continue
		}
		f.serveOwn(i, at)
		if n := i.busyAt(at) + len(i.queue); best == nil || n < fewest {
			best, fewest = i, n
		}
	}
	if best != nil {
		best.queue = append(best.queue, request)
	}
	return best != nil
}

// serveBound binds what came while no instance was ready, and serves the queue of each instance.
func (f *fleet) serveBound(now float64) {
	for len(f.queue) > 0 && f.bind(f.queue[0], now) {
		f.queue = f.queue[1:]
	}
	for _, i := range f.instances {
		f.serveOwn(i, now)
	}
}

// serveOwn gives the requests that are bound to an instance to its slots that became free until now.
func (f *fleet) serveOwn(i *instance, now float64) {
	for len(i.queue) > 0 {
		free := &i.slots[0]
		for k := range i.slots {
			s := &i.slots[k]
			s.free = max(s.free, i.ready)
			if s.free < free.free {
				free = s
			}
		}
		if free.free > now {
			return
		}
		f.begin(&i.queue[0], free)
		i.queue = i.queue[1:]
	}
}

// earliest is the slot for a request that came at a time: that of the fullest instance with a free one, so
// that others become idle, or the next one to be free.
func (f *fleet) earliest(at float64) *slot {
	var best *slot
	for _, i := range f.instances {
		if i.draining || i.stuck {
			continue
		}
		for k := range i.slots {
			s := &i.slots[k]
			s.free = max(s.free, i.ready)
			if s.free <= at {
				return s
			}
			if best == nil || s.free < best.free {
				best = s
			}
		}
	}
	return best
}

// die takes one ready instance away. Its requests wait again.
func (f *fleet) die(now float64) {
	if f.faults.DeathEvery == 0 || now < f.nextDeath {
		return
	}
	f.nextDeath += f.faults.DeathEvery
	for k, i := range f.instances {
		if i.ready <= now && !i.stuck {
			f.requeue(i, now)
			f.instances = append(f.instances[:k], f.instances[k+1:]...)
			return
		}
	}
}

// requeue puts the requests of a dead instance back to the front of the queue. Their first waits stay
// counted; their second ones are not.
func (f *fleet) requeue(i *instance, now float64) {
	for _, s := range i.slots {
		if s.job != nil && s.free > now {
			again := *s.job
			again.At = now
			f.queue = append([]Request{again}, f.queue...)
			f.retried++
		}
	}
	f.queue = append(f.queue, i.queue...)
}

// remove drops the drained instances.
func (f *fleet) remove(now float64) {
	kept := f.instances[:0]
	for _, i := range f.instances {
		if i.draining && (i.stuck || i.ready > now || i.busyAt(now)+len(i.queue) == 0) {
			continue
		}
		kept = append(kept, i)
	}
	f.instances = kept
}

// resize drains or starts instances until as many live ones are there as are desired. A drain is undone
// before anything starts; starts that are not ready go first, then the least busy.
func (f *fleet) resize(now float64, desired int) {
	live := 0
	for _, i := range f.instances {
		if !i.draining {
			live++
		}
	}
	for ; live < desired && f.undrain(); live++ {
	}
	for ; live < desired; live++ {
		f.start(now)
	}
	for ; live > desired; live-- {
		f.drain(now)
	}
	f.remove(now)
}

func (f *fleet) undrain() bool {
	for _, i := range f.instances {
		if i.draining && !i.stuck {
			i.draining = false
			return true
		}
	}
	return false
}

func (f *fleet) start(now float64) {
	f.starts++
	i := &instance{started: now, ready: now + f.cold(), slots: make([]slot, f.load.Slots)}
	if f.faults.Stuck > 0 && f.random.Float64() < f.faults.Stuck {
		i.stuck, i.ready = true, 1e18
	}
	f.instances = append(f.instances, i)
}

func (f *fleet) drain(now float64) {
	var victim *instance
	fewest := 1 << 30
	for _, i := range f.instances {
		if i.draining {
			continue
		}
		busy := i.busyAt(now)
		if i.ready > now {
			busy = -1
		}
		if busy <= fewest { // the last of the equals: the first ones are filled first
			victim, fewest = i, busy
		}
	}
	victim.draining = true
}

// observe is the fleet as an autoscaler sees it.
func (f *fleet) observe(now float64) scale.Obs {
	o := scale.Obs{
		Waiting: len(f.queue), Arrived: float64(f.arrived), Service: f.service,
		ColdStart: f.load.Cold, ColdStartP95: f.load.Cold,
	}
	f.arrived = 0
	for _, i := range f.instances {
		o.Waiting += len(i.queue)
		if !i.stuck && i.ready <= now {
			o.Running += i.busyAt(now)
		}
		switch {
		case i.draining:
			o.Draining++
		case i.ready > now:
			o.Starting = append(o.Starting, moment(i.started))
		default:
			o.Ready++
		}
	}
	return o
}

// moment is a simulated time.
func moment(seconds float64) time.Time {
	return epoch.Add(time.Duration(seconds * float64(time.Second)))
}

func (f *fleet) cold() float64 {
	if f.faults.ColdSpread == 0 {
		return f.load.Cold
	}
	return f.load.Cold * logNormal(f.random, f.faults.ColdSpread)
}
