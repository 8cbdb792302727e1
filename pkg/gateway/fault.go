package gateway

import (
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// An instance whose calls fail at once has room again and again, and would draw all that waits to itself. It fails when
// faultsMax calls did so with no success in between, while another one is sound: it gets one call a second then, and
// fewer the longer it fails, until one succeeds.
const (
	faultFast = 2 * time.Second // a call that lasted longer has not failed at once
	faultsMax = 3
	faultMin  = time.Second // between two calls of an instance that fails; twice as long each time
	faultMax  = 15 * time.Second
)

// judge takes in what the end of a call says of its instance.
func (p *Pool) judge(now time.Time, r *Request, i *instance, end CallEnd) {
	if end.Misrouted {
		delete(i.adapters, r.Adapter)
	}
	switch {
	case end.Unused:
	case end.Busy:
		i.limit.busy(now)
		i.backoff.NoRoom(now, end.RetryAfter, 1)
	case end.Misrouted && r.Misrouted:
		p.acquit(r, i)
	case end.Fault && end.Took < faultFast:
		p.fault(now, r, i)
	default:
		if !end.Failed {
			i.clear()
		}
		if !i.failing {
			i.backoff.Reset()
		}
		i.limit.grow(now, i.inFlight+1)
		if !end.Failed {
			took, tokens := end.streamed()
			i.limit.pace(now, r.began, took, tokens, p.policy.TPOTMax.Duration())
		}
	}
}

// fault takes in a call that failed at once.
func (p *Pool) fault(now time.Time, r *Request, i *instance) {
	i.faults++
	switch {
	case i.failing && !r.trial: // it began with those that have shown it
	case i.faults >= faultsMax && p.fleet.sound(i):
		i.failing = true
		i.backoff.Grow(now, faultMin, faultMax)
	}
}

// acquit takes back what a request has held against the instance that it was at before: another one does not have what
// it asks for either, so that the request is to blame.
func (p *Pool) acquit(r *Request, other *instance) {
	for _, id := range r.Avoid {
		i := p.fleet.find(id)
		if i == nil || i == other {
			continue // it is gone, or was asked twice
		}
		if i.faults = max(0, i.faults-1); i.faults < faultsMax {
			i.heal()
		}
	}
}

// try notes that a call begins at an instance that fails: the next one waits.
func (i *instance) try(now time.Time, r *Request) {
	if r.trial = i.failing; r.trial {
		i.backoff.Repeat(now)
	}
}

// clear ends what is held against an instance for its failures.
func (i *instance) clear() {
	i.faults = 0
	i.heal()
}

// heal gives an instance that failed its share again.
func (i *instance) heal() {
	if i.failing {
		i.failing, i.backoff = false, worker.Backoff{}
	}
}

// sound says whether there is a usable instance that does not fail, beside one.
func (f *fleet) sound(beside *instance) bool {
	for _, i := range f.instances {
		if i != beside && i.usable && !i.failing {
			return true
		}
	}
	return false
}
