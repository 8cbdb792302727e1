package judge

import "time"

// Doubt is a time for which a slot was in doubt: since its node said that its call may still run, until it was freed or
// given to a node that follows the call on.
type Doubt struct {
	Slot         string // the instance and the number
	Token, Entry int64
	Reason       string
	From, To     time.Time // To is zero: it is in doubt still
}

// slotsFreed is that a slot whose call had an unknown end can be used again soon, once there are no faults: its time
// counts from the end of these, or from when its node gave the call up, and without disturbances. When all work has
// ended no slot is held, neither for a node that died nor by one that lives. Cases are the slots in doubt of that time.
func slotsFreed(x *index, r *report) {
	for _, slot := range x.Doubtful {
		r.bad("%s", slot)
	}
	if x.ClockJumped {
		return
	}
	calm, most := x.newCalm(), x.DoubtMax+x.Tolerance
	for _, d := range x.Doubts {
		from := laterOf(d.From, x.FaultsOver)
		if x.forked(d.From) || !d.To.After(from) {
			continue
		}
		r.checked++
		if took := calm.between(from, d.To); took > most {
			r.bad("slot %s was in doubt for %v, from %s on, of that for %v after the faults and without a "+
				"disturbance, at most %v are allowed: token %d, entry %d: %s", d.Slot, d.To.Sub(d.From),
				d.From.Format(time.TimeOnly), took, most, d.Token, d.Entry, d.Reason)
		}
	}
}
