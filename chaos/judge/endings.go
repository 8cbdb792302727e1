package judge

import "time"

// Classes of failures: it is unknown whether the entry ran, and too many nodes died that ran it.
const (
	classUnknown = "unknown"
	classPoison  = "poison"
)

// failuresHaveCauses looks at what an entry spent before it failed: no fewer errors or crashes than it may have, and no
// entry, however it ends, spends more. It counts the failures.
func failuresHaveCauses(x *index, r *report) {
	for i := range x.Endings {
		e := &x.Endings[i]
		p := x.pushByEntry[e.Entry]
		if p == nil {
			continue
		}
		if p.FailMax > 0 && e.Attempt > p.FailMax || p.CrashMax > 0 && e.Crashes > p.CrashMax {
			r.bad("entry %d spent %d attempts and %d crashes, and may spend %d and %d", e.Entry, e.Attempt, e.Crashes,
				p.FailMax, p.CrashMax)
		}
		if e.Outcome != "failed" {
			continue
		}
		r.checked++
		switch {
		case p.Once && e.Class == classUnknown:
			if !x.mayBeUnknown(p) {
				r.bad("entry %d failed because it is unknown whether it ran, and its calls were answered", e.Entry)
			}
		case (p.FailMax == 0 || e.Attempt < p.FailMax) && (p.CrashMax == 0 || e.Crashes < p.CrashMax):
			r.bad("entry %d failed as %s after %d attempts and %d crashes", e.Entry, e.Class, e.Attempt, e.Crashes)
		}
	}
}

// earlyMax is how long before its deadline an entry may seem to expire. Programs and database have one clock here, and
// record the end behind the decision: it is for the precision of times alone.
const earlyMax = 10 * time.Millisecond

// deadline is the first of the times by which an entry has to start or to end; zero: it has none.
func (p *Push) deadline() time.Time {
	if p.StartBy.IsZero() || !p.FinishBy.IsZero() && p.FinishBy.Before(p.StartBy) {
		return p.FinishBy
	}
	return p.StartBy
}

// actMax is for how long a node that is not disturbed goes on after it should have ended a run: it may be stopped for
// half a lease without a record.
func (x *index) actMax() time.Duration { return x.Lease/2 + time.Second + x.Tolerance }

// deadlinesHold looks at each entry that expired, which had a deadline that had passed, and at each entry with a
// deadline: one that waits expires soon after it, and no run begins after start_by or goes on after finish_by. Time
// counts without disturbances. Cases are the entries that wait at their deadline and have as much of that time after it
// as they may take to expire: a leader that expires nothing, or late, shows in no others.
func deadlinesHold(x *index, r *report) {
	for i := range x.Endings {
		e := &x.Endings[i]
		p := x.pushByEntry[e.Entry]
		if e.Outcome != "expired" || p == nil {
			continue
		}
		switch at := p.deadline(); {
		case at.IsZero():
			r.bad("entry %d expired, and has no deadline", e.Entry)
		case !e.At.IsZero() && at.Sub(e.At) > earlyMax:
			r.bad("entry %d expired %v before its deadline", e.Entry, at.Sub(e.At))
		}
	}
	calm := x.newCalm()
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if x.ClockJumped || p.Entry == 0 || p.deadline().IsZero() {
			continue
		}
		x.waitsToItsDeadline(p, calm, r)
		x.runsToItsDeadline(p, calm, r)
	}
}

// waitsToItsDeadline is that an entry which was not granted before its deadline ends soon after it, and is not granted
// later. A push whose commit came late may be answered after the deadline: the entry ends soon after the answer then.
func (x *index) waitsToItsDeadline(p *Push, calm *calm, r *report) {
	var first time.Time
	if ends := x.endings[p.Entry]; len(ends) > 0 {
		first = ends[0].At
	}
	for _, g := range x.covering(p) {
		if first.IsZero() || g.At.Before(first) {
			first = g.At
		}
	}
	if first.IsZero() || x.forked(first) {
		return
	}
	from, limit := laterOf(p.deadline(), p.Returned), ExpiryMax(x.Lease, x.Tolerance)
	late := calm.between(from, first)
	if late > limit || first.After(from) && calm.between(from, from.Add(limit)) == limit {
		r.checked++
	}
	if late > limit {
		r.bad("entry %d was neither granted nor ended until %v after its deadline, %v of that without a disturbance",
			p.Entry, first.Sub(p.deadline()), late)
	}
}

// covering are the grants that covered an entry since its client pushed it. One of a key that is covered waits for the
// entries before it, under a lock that may be older than it.
func (x *index) covering(p *Push) (grants []*Grant) {
	if p.Key == "" {
		return x.grantsOf(p)
	}
	for _, g := range x.byKey[[2]string{p.Queue, p.Key}] {
		if g.Last >= p.Entry && (g.Freed.IsZero() || g.Freed.After(p.Called)) {
			grants = append(grants, g)
		}
	}
	return grants
}

// ExpiryMax is how long after its deadline an entry that waits may take to expire, without a disturbance.
func ExpiryMax(lease, tolerance time.Duration) time.Duration { return lease + dueMax + tolerance }

// runsToItsDeadline is that a run under the first grant of an entry begins before start_by, which later ones may be
// free of, and that no run goes on after finish_by.
func (x *index) runsToItsDeadline(p *Push, calm *calm, r *report) {
	for i, c := range x.inTime(p.Entry) {
		g := x.grants[c.Token]
		if g == nil || x.forked(c.Closed) || x.disturbed(g.Process, g.At, c.Closed) ||
			x.away(g.Process, g.At, c.Closed) {
			continue
		}
		own := x.covering(p)
		first := i == 0 && len(own) > 0 && g == own[0]
		if late := calm.between(p.StartBy, c.Begin); first && !p.StartBy.IsZero() && late > x.actMax() {
			r.bad("entry %d was run %v after the time by which it had to start", p.Entry, late)
		}
		if late := calm.between(p.FinishBy, c.Closed); !p.FinishBy.IsZero() && late > x.actMax() {
			r.bad("entry %d was run until %v after the time by which it had to end", p.Entry, late)
		}
	}
}

// cancelsHold looks at what was told to be cancelled: it has no other outcome and does not run. It counts these.
func cancelsHold(x *index, r *report) {
	for i := range x.Endings {
		e := &x.Endings[i]
		if p := x.pushByEntry[e.Entry]; e.Outcome == "cancelled" && p != nil && p.Cancel == nil {
			r.bad("entry %d was cancelled, and its client did not ask for that", e.Entry)
		}
	}
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if p.Cancel == nil || !p.Cancel.Cancelled || p.Entry == 0 {
			continue
		}
		r.checked++
		for _, e := range x.endings[p.Entry] {
			if e.Outcome != "cancelled" {
				r.bad("entry %d is %s, and its client was told that it is cancelled", p.Entry, e.Outcome)
			}
		}
		for _, c := range x.calls[p.Entry] {
			if c.Begin.After(p.Cancel.Returned) {
				r.bad("entry %d was run after its client was told that it is cancelled", p.Entry)
			}
		}
	}
}

// heardBeats is how many heartbeats of a node are committed before it has read a cancel for certain: one may have been
// on its way when the cancel was requested, and the node may be stopped between the next one and its answer.
const heardBeats = 3

// requestsEndRuns looks at each solo entry whose cancel was requested while it ran, or was about to. The node ends the
// run when it has read the request, which the answer to its heartbeat has: a machine on which that takes long has
// heartbeats that come late. An entry that comes back is ended by the leader, in its pass over due entries, unless a
// node had it before. It counts the calls that were on their way when the client was told.
func requestsEndRuns(x *index, r *report) {
	calm := x.newCalm()
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if p.Cancel == nil || !p.Cancel.Requested || p.Entry == 0 || p.Key != "" {
			continue
		}
		told := p.Cancel.Returned
		for _, c := range x.calls[p.Entry] {
			if c.Closed.Before(told) {
				continue
			}
			if c.Begin.Before(told) {
				r.checked++
			}
			x.endsWhenHeard(p, c, r)
		}
		back := told // since when the entry was not granted
		for _, g := range x.grantsOf(p) {
			known := !x.ClockJumped && !x.forked(g.At)
			if waited := calm.between(back, g.At); known && waited > x.Lease+dueMax+x.Tolerance {
				r.bad("entry %d was granted %v after its cancel was requested, and waited %v of that without a "+
					"disturbance", p.Entry, g.At.Sub(told), waited)
			}
			back = laterOf(back, g.Freed)
		}
	}
}

func (x *index) endsWhenHeard(p *Push, c *Call, r *report) {
	g, from := x.grants[c.Token], laterOf(c.Begin, p.Cancel.Returned)
	if g == nil || x.forked(c.Closed) || x.disturbed(g.Process, from, c.Closed) || x.away(g.Process, from, c.Closed) {
		return
	}
	heard := 0
	for _, b := range x.beats[g.Process] {
		if !b.After(from) {
			continue
		}
		if heard++; heard == heardBeats {
			if goesOn := c.Closed.Sub(b); goesOn > x.actMax() {
				r.bad("entry %d ran for %v after its cancel was requested, and for %v after heartbeat %d of %s since",
					p.Entry, c.Closed.Sub(from), goesOn, heardBeats, g.Process)
			}
			return
		}
	}
}
