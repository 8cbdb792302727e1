package gateway

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// traffic plays arrivals and ends of calls against pools with their code unchanged, on a clock of its own.
type traffic struct {
	pools []*Pool
	rand  *rand.Rand
	now   time.Time
	queue moments

	// took returns for how long a call keeps its slot.
	took func(r *Request) time.Duration
	// Called when a request begins, and when it is refused or dropped.
	began   func(gateway int, r *Request)
	dropped func(gateway int, r *Request, why Dropped, after time.Duration)
}

// moment is something that happens at a time.
type moment struct {
	at time.Time
	do func()
}

type moments []moment

func (m moments) Len() int           { return len(m) }
func (m moments) Less(i, j int) bool { return m[i].at.Before(m[j].at) }
func (m moments) Swap(i, j int)      { m[i], m[j] = m[j], m[i] }
func (m *moments) Push(x any)        { *m = append(*m, x.(moment)) } //nolint:errcheck,forcetypeassert // only moments
func (m *moments) Pop() any {
	old := *m
	last := old[len(old)-1]
	*m = old[:len(old)-1]
	return last
}

// newTraffic returns gateways that hold so many slots each of every instance.
func newTraffic(gateways, instances, slots int, policy PoolPolicy) *traffic {
	x := &traffic{rand: rand.New(rand.NewPCG(7, 11)), now: time.Unix(1_700_000_000, 0)}
	for range gateways {
		x.pools = append(x.pools, NewPool(policy, nil))
	}
	x.setInstances(instances, slots)
	return x
}

// setInstances gives every gateway slots of the instances 1 to n.
func (x *traffic) setInstances(n, slots int) {
	var list []InstanceState
	for id := range int32(n) {
		list = append(list, InstanceState{
			ID: id + 1, Server: fmt.Sprint("gpu-", id+1), Slots: slots * len(x.pools), Usable: true,
		})
	}
	for g, p := range x.pools {
		p.SetInstances(x.now, list)
		var granted []slot.Held
		for id := range int32(n) {
			for k := range slots {
				number := int32(g*slots + k)
				granted = append(granted, slot.Held{Instance: id + 1, Number: number, Token: int64(number) + 1})
			}
		}
		p.Grant(x.now, granted)
	}
}

func (x *traffic) after(d time.Duration, do func()) { heap.Push(&x.queue, moment{x.now.Add(d), do}) }

// poisson calls arrive at random, so often a second in the mean.
func (x *traffic) poisson(rate float64, arrive func()) {
	var next func()
	next = func() {
		x.after(time.Duration(x.rand.ExpFloat64()/rate*float64(time.Second)), func() {
			arrive()
			next()
		})
	}
	next()
}

// send lets a request arrive at a gateway.
func (x *traffic) send(gateway int, r *Request) {
	p := x.pools[gateway]
	arrived := x.now
	r.Leave = func(r *Request, why Dropped) {
		if why == DropNone {
			x.fly(gateway, r)
		} else if x.dropped != nil {
			x.dropped(gateway, r, why, x.now.Sub(arrived))
		}
	}
	inFlight, refused := p.Arrive(x.now, r)
	switch {
	case refused != nil:
		if x.dropped != nil {
			x.dropped(gateway, r, refused.Reason, 0)
		}
	case inFlight:
		x.fly(gateway, r)
	}
}

func (x *traffic) fly(gateway int, r *Request) {
	if x.began != nil {
		x.began(gateway, r)
	}
	took := x.took(r)
	x.after(took, func() { x.pools[gateway].End(x.now, r, CallEnd{Took: took}) })
}

// run plays until d is over. Waits end at their time.
func (x *traffic) run(d time.Duration) {
	until := x.now.Add(d)
	for {
		at, ends := until, -1
		if len(x.queue) > 0 && x.queue[0].at.Before(at) {
			at = x.queue[0].at
		}
		for g, p := range x.pools {
			if next := p.Next(); !next.IsZero() && next.Before(at) {
				at, ends = next, g
			}
		}
		if !at.Before(until) {
			x.now = until
			return
		}
		if at.After(x.now) {
			x.now = at
		}
		if ends >= 0 {
			x.pools[ends].Tick(x.now)
			continue
		}
		heap.Pop(&x.queue).(moment).do() //nolint:errcheck,forcetypeassert // only moments
	}
}
