package judge

import "time"

// Delivery is a webhook that the receiver got, and whether the receiver accepted it.
type Delivery struct {
	ID       string
	Entry    int64
	Outcome  string
	At       time.Time
	Accepted bool
}

// claimMax is how long an entry that is due may wait for its claim, in line, where nothing else is left to do.
const claimMax = 3 * time.Second

// deliveriesOnce looks at what the receiver got for each end of an entry with a callback: it is under one id and tells
// the outcome, and one that was refused comes again.
func deliveriesOnce(x *index, r *report) {
	got := map[int64][]Delivery{}
	for _, d := range x.Deliveries {
		got[d.Entry] = append(got[d.Entry], d)
		switch ends := x.endings[d.Entry]; {
		case len(ends) == 0:
			r.bad("the end of entry %d was reported, and it has no outcome", d.Entry)
		case d.Outcome != ends[0].Outcome:
			r.bad("entry %d is %s and was reported as %s", d.Entry, ends[0].Outcome, d.Outcome)
		}
	}
	calm := x.newCalm()
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if !p.Callback || p.Entry == 0 || len(x.endings[p.Entry]) == 0 {
			continue
		}
		r.checked++
		ids := map[string]bool{}
		for _, d := range got[p.Entry] {
			ids[d.ID] = true
		}
		poisoned := x.poisoned(x.Callbacks[p.Entry])
		if len(ids) > 1 || len(ids) == 0 && !poisoned {
			r.bad("the end of entry %d was reported under %d ids", p.Entry, len(ids))
		}
		if !poisoned {
			x.comesAgain(got[p.Entry], calm, r)
		}
	}
}

// poisoned says that the entry of a callback was given up because nodes had died that ran it, as often as the queue of
// callbacks allows. That nodes did die so often is a promise about crashes.
func (x *index) poisoned(callback int64) bool {
	ends := x.endings[callback]
	return len(ends) > 0 && ends[0].Class == classPoison && ends[0].Crashes >= x.CallbackCrashes
}

// comesAgain is that a delivery which was refused is repeated after the wait of the schedule, until one is accepted.
// What is due is in line soon, and claimed soon once nothing else is left to do: before that other work may be in line
// before it. The wait after so many deliveries is what the schedule has at most: one whose refusal the node could not
// record is repeated sooner.
func (x *index) comesAgain(got []Delivery, calm *calm, r *report) {
	var last Delivery
	for _, d := range got {
		if d.Accepted {
			return
		}
		if d.At.After(last.At) {
			last = d
		}
	}
	if x.ClockJumped || last.At.IsZero() || len(got) > len(x.CallbackWaits) || x.forked(last.At) {
		return
	}
	due := laterOf(last.At.Add(x.CallbackWaits[len(got)-1]), x.Quiet)
	if calm.between(due, x.Received) > CallbackMax(x.Lease, x.Tolerance) {
		r.bad("the end of entry %d was refused by its receiver at %s, delivery %d of it, and did not come again "+
			"until %s", last.Entry, last.At.Format(time.TimeOnly), len(got), x.Received.Format(time.TimeOnly))
	}
}

// CallbackMax is how long a callback that is due again may take, without a disturbance, where nothing else is left.
func CallbackMax(lease, tolerance time.Duration) time.Duration {
	return lease + dueMax + claimMax + tolerance
}
