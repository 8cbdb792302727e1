package gateway

import (
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// SetPolicy replaces the settings.
func (p *Pool) SetPolicy(now time.Time, policy PoolPolicy) {
	p.policy = policy
	p.dispatch(now)
}

// Starts is the report of the autoscaler about new instances of a model.
type Starts struct {
	May bool          `json:"may"`           // a deployment of the model may start one
	P95 time.Duration `json:"p95,omitempty"` // how long starts took; 0: not known
}

// SetStarts replaces the report about new instances.
func (p *Pool) SetStarts(now time.Time, s Starts) {
	p.starts = s
	p.updateMode(now)
}

// SetInstances replaces the instances by those of the registry, with their latest readings.
func (p *Pool) SetInstances(now time.Time, list []InstanceState) {
	p.fleet.set(now, list)
	for _, s := range list {
		i := p.fleet.find(s.ID)
		i.limit.report(now, s.At, s.Queued, s.KV)
		if s.KV != nil {
			i.kv, i.kvAt = *s.KV, s.At
		}
	}
	p.dispatch(now)
}

// Grant adds slots that were leased or handed over. Those of instances that are not known here are left out.
func (p *Pool) Grant(now time.Time, slots []slot.Held) {
	for _, s := range slots {
		p.fleet.add(s)
	}
	p.dispatch(now)
}

// Lose drops slots that are not this gateway's any more. Calls on them go on.
func (p *Pool) Lose(now time.Time, slots []slot.Held) {
	for _, s := range slots {
		p.fleet.drop(s)
	}
	p.dispatch(now)
}

// Retire takes up to n idle slots out, of unusable instances and beyond the slots of instances
// first, and returns them for the caller to give back.
func (p *Pool) Retire(now time.Time, n int) (out []slot.Held) {
	for _, i := range p.fleet.instances {
		for i.slots.Idle() > 0 && (!i.usable || i.slots.Held() > i.limit.slots) {
			out = append(out, i.retire())
		}
	}
	for len(out) < n {
		i := p.idlest()
		if i == nil {
			break
		}
		out = append(out, i.retire())
	}
	p.updateMode(now)
	return out
}

// retire takes an idle slot out.
func (i *instance) retire() slot.Held {
	s := i.slots.Last()
	i.slots.Drop(s)
	return s.Held
}

// owe sets how many busy slots are to be given back when their calls end.
func (p *Pool) owe(n int) { p.owed = max(0, n) }

// surrender takes the slots out that are owed and whose calls have ended, and returns them. The leases note under the
// pool's lock that they leave: until they are given back no comparison with the database may grant them again.
func (p *Pool) surrender() (out []slot.Held) {
	for _, s := range p.returning {
		p.fleet.drop(s.Held)
		out = append(out, s.Held)
	}
	p.returning = nil
	return out
}

// keepOwed ends what is owed, and makes the slots idle whose calls have ended and that surrender has not taken out.
func (p *Pool) keepOwed(now time.Time) {
	p.owe(0)
	for _, s := range p.returning {
		if i := p.fleet.find(s.Instance); i != nil {
			i.slots.Free(s)
		}
	}
	p.returning = nil
	p.dispatch(now)
}

// idlest is the instance with the most idle slots.
func (p *Pool) idlest() (best *instance) {
	for _, i := range p.fleet.instances {
		if i.slots.Idle() > 0 && (best == nil || i.slots.Idle() > best.slots.Idle()) {
			best = i
		}
	}
	return best
}

// Trust lets slots be used until then: a process that was stopped for a while must not use slots that others have got.
func (p *Pool) Trust(now, until time.Time) {
	p.fleet.until = until
	p.dispatch(now)
}

// Drain refuses requests that arrive from now on. Waiting requests and calls in flight go on, with their second
// attempts.
func (p *Pool) Drain() { p.draining = true }

// wanted is how many more slots the waiting requests could use, beyond the idle ones that may be used now.
func (p *Pool) wanted(now time.Time) int {
	need, usable := p.demand(now)
	return min(need, usable)
}

// overLimit is how many waiting requests could not use a slot if there were one: the instances take no more calls.
func (p *Pool) overLimit(now time.Time) int {
	need, usable := p.demand(now)
	return need - min(need, usable)
}

// demand is how many slots the waiting requests need beyond the idle ones that may be used now, and how many more the
// instances could use. usable is need itself while every instance takes as many calls as it has slots: the missing
// slots may be those of instances to come.
func (p *Pool) demand(now time.Time) (need, usable int) {
	if p.waiting == 0 {
		return 0, 0
	}
	free, room, below := 0, 0, false
	for _, i := range p.fleet.instances {
		free += max(0, i.room(now))
		room += i.headroom(now)
		below = below || i.usable && (now.Before(i.cool) || i.limit.value() < i.limit.slots)
	}
	need = max(0, p.waiting-free)
	if !below {
		return need, need
	}
	return need, room
}

// limited lists the instances that take no more calls than their limit, or none because they cool.
func (p *Pool) limited(now time.Time) slot.Limited {
	l := slot.Limited{Instances: []int32{}, Rooms: []int32{}} // not null
	for _, i := range p.fleet.instances {
		if i.usable && (now.Before(i.cool) || i.limit.value() < i.limit.slots) {
			l.Instances = append(l.Instances, i.id)
			l.Rooms = append(l.Rooms, int32(i.headroom(now))) //nolint:gosec // at most the slots of an instance
		}
	}
	return l
}

// oldest is when the longest waiting request of class default or above arrived; zero: none waits.
func (p *Pool) oldest() (at time.Time) {
	for _, l := range p.lines[:Sheddable] {
		for _, f := range l.heap {
			if at.IsZero() || f.head.arrived.Before(at) {
				at = f.head.arrived
			}
		}
	}
	return at
}

// PoolState is a view of a pool, for status and metrics.
type PoolState struct {
	Model     string            `json:"model"`
	Mode      string            `json:"mode"`
	ModeSince time.Time         `json:"mode_since"`
	Ceiling   int               `json:"ceiling"`
	InFlight  int               `json:"stock"` // the key is that of older programs
	Waiting   map[string]int    `json:"waiting"`
	Held      int               `json:"slots_held"`
	Idle      int               `json:"slots_idle"`
	OverLimit int               `json:"over_limit"` // waiting requests that more slots would not help
	Lower     float64           `json:"lower_bound"`
	Upper     float64           `json:"upper_bound"`
	Flows     int               `json:"active_flows"`
	Bytes     int               `json:"bytes_waiting"`
	Dropped   map[Dropped]int64 `json:"dropped"`
	Instances []InstanceView    `json:"instances"`

	counts Counts
}

// InstanceView is an instance as its pool sees it.
type InstanceView struct {
	ID       int32   `json:"id"`
	Server   string  `json:"server"`
	Usable   bool    `json:"usable"`
	Slots    int     `json:"slots"`
	Held     int     `json:"slots_held"`
	InFlight int     `json:"in_flight"`
	Limit    int     `json:"limit"`
	Rate     float64 `json:"tokens_per_second"`
	KVUsage  float64 `json:"kv_usage"`

	RemainingMS float64 `json:"remaining_ms"` // of its calls: the mean duration of one, whatever their age
}

// view returns the state of the pool.
func (p *Pool) view(now time.Time, model string) PoolState {
	s := PoolState{
		Model: model, Mode: p.mode.String(), ModeSince: p.modeSince, Ceiling: p.ceiling(), InFlight: p.inFlight,
		OverLimit: p.overLimit(now), Waiting: map[string]int{}, Bytes: p.bytes, Dropped: map[Dropped]int64{},
		counts: p.count,
	}
	s.Lower, s.Upper = p.bounds()
	s.Held, s.Idle = p.fleet.held()
	for c, l := range p.lines {
		s.Waiting[RequestClass(c).String()] = l.waiting //nolint:gosec // below classCount
		s.Flows += len(l.heap)
	}
	for reason, n := range p.count.Dropped {
		s.Dropped[reason] = n
	}
	s.counts.Dropped = s.Dropped
	for _, i := range p.fleet.instances {
		s.Instances = append(s.Instances, InstanceView{
			ID: i.id, Server: i.server, Usable: i.usable, Slots: i.limit.slots, Held: i.slots.Held(),
			InFlight: i.inFlight, Limit: i.limit.value(), Rate: i.rate, KVUsage: i.kv,
			RemainingMS: min(float64(i.inFlight), 1) * p.cost.ms,
		})
	}
	return s
}

// Counters returns the pool's counters since its start.
func (s PoolState) Counters() Counts { return s.counts }
