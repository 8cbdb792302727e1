package gateway

import "time"

// An instance whose calls fail at once has room again and again, and would draw all that waits to itself. It fails when
// faultsMost calls did so with no success in between, while another one is sound: it gets one call a second then, and
// fewer the longer it fails, until one succeeds.
const (
	faultFast  = 2 * time.Second // a call that lasted longer has not failed at once
	faultsMost = 3
	faultMin   = time.Second // between two calls of an instance that fails; twice as long each time
	faultMax   = 15 * time.Second
)

// fault takes in a call that failed at once.
func (p *Pool) fault(now time.Time, r *Request, i *instance) {
	i.faults++
	switch {
	case i.failing && !r.trial: // it began with those that have shown it
	case i.faults >= faultsMost && p.fleet.sound(i):
		i.failing = true
		i.coolFor = min(max(2*i.coolFor, faultMin), faultMax)
		i.cool = now.Add(i.coolFor)
	}
}

// try notes that a call begins at an instance that fails: the next one waits.
func (i *instance) try(now time.Time, r *Request) {
	if r.trial = i.failing; r.trial {
		i.cool = now.Add(i.coolFor)
	}
}

// clear ends what is held against an instance for its failures.
func (i *instance) clear() {
	i.faults = 0
	if i.failing {
		i.failing, i.cool, i.coolFor = false, time.Time{}, 0
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
