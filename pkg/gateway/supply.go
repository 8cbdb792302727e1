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

// Grant takes in slots that were leased or handed over, and returns how many. It leaves out those that it has, and
// those of instances that are not known here.
func (p *Pool) Grant(now time.Time, slots []slot.Held) (taken int) {
	for _, s := range slots {
		if p.fleet.add(s) {
			taken++
		}
	}
	p.dispatch(now)
	return taken
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
// pool's lock that they leave: until they are given back no comparison with the database may grant them again. A slot
// that was lost meanwhile stays, for it may have come in again under its token, with another call.
func (p *Pool) surrender() (out []slot.Held) {
	for _, s := range p.returning {
		if i := p.fleet.find(s.Instance); i != nil && i.slots.Drop(s) {
			out = append(out, s.Held)
		}
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
