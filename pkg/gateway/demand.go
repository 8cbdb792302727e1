package gateway

import (
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

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
		below = below || i.usable && (i.backoff.Active(now) || i.limit.value() < i.limit.slots)
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
		if i.usable && (i.backoff.Active(now) || i.limit.value() < i.limit.slots) {
			l.Instances = append(l.Instances, i.id)
			l.Rooms = append(l.Rooms, int32(i.headroom(now))) //nolint:gosec // at most the slots of an instance
		}
	}
	return l
}

// oldest is when the longest waiting request of criticality default or above arrived; zero: none waits.
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
