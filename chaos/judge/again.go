package judge

import (
	"slices"
	"strconv"
	"time"
)

// inTime returns the calls of an entry in the order in which they began.
func (x *index) inTime(entry int64) []*Call {
	byBegin := func(a, b *Call) int { return a.Begin.Compare(b.Begin) }
	return slices.SortedStableFunc(slices.Values(x.calls[entry]), byBegin)
}

// calledAtMostOnce looks at each entry that must not run twice. A call of which the worker said that it failed, or that
// it was not begun, may be followed by another one, and no other call may: neither one that was answered well, nor one
// whose answer did not come. It counts the entries with a call that was not answered, or after whose call the entry was
// granted again: only these can be called twice.
func calledAtMostOnce(x *index, r *report) {
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if !p.Once || p.Entry == 0 {
			continue
		}
		calls := x.inTime(p.Entry)
		ran := slices.IndexFunc(calls, func(c *Call) bool { return c.Answer != "error" && c.Answer != "busy" })
		if ran < 0 {
			continue
		}
		if calls[ran].Answer != "ok" || x.grantedAfter(p, calls[ran].Token) {
			r.checked++
		}
		if ran+1 < len(calls) {
			r.bad("entry %d must not run twice, and was called under token %d after its call under token %d had the "+
				"answer %q", p.Entry, calls[ran+1].Token, calls[ran].Token, calls[ran].Answer)
		}
	}
}

// grantedAfter says that a solo entry was granted under a later token than this one.
func (x *index) grantedAfter(p *Push, token int64) bool {
	return slices.ContainsFunc(x.grantsOf(p), func(g *Grant) bool { return g.Token > token })
}

func (x *index) grantsOf(solo *Push) []*Grant {
	return x.byKey[[2]string{solo.Queue, "#" + strconv.FormatInt(solo.Entry, 10)}]
}

// mayBeUnknown says that the node of an entry may not know whether a call of it ran, or that the entry came back after
// another than its node had ended its lock.
func (x *index) mayBeUnknown(p *Push) bool {
	if len(x.grantsOf(p)) > 1 {
		return true
	}
	return slices.ContainsFunc(x.calls[p.Entry], func(c *Call) bool {
		g := x.grants[c.Token]
		return c.Answer == "none" || c.Answer == "died" || x.missed(c) ||
			g != nil && x.disturbed(g.Process, c.Begin, c.Closed.Add(x.Lease))
	})
}

// answeredOnce looks at each call that was answered well. Its entry runs again under another token only where the end
// may not have been recorded: where the node died, was stopped, cut off or drained, was silent for a lease, or met an
// error that makes it leave endings to recovery.
func answeredOnce(x *index, r *report) {
	for entry := range x.calls {
		calls := x.inTime(entry)
		for i, c := range calls {
			if c.Answer != "ok" || x.missed(c) || x.forked(c.Begin) {
				continue
			}
			r.checked++
			if i+1 == len(calls) || x.forked(calls[i+1].Begin) {
				continue
			}
			next, g := calls[i+1], x.grants[c.Token]
			if next.Token == c.Token || g != nil && !x.disturbed(g.Process, c.Begin, next.Begin) {
				r.bad("entry %d was answered well under token %d, and ran again under token %d; nothing kept its node "+
					"from recording the end", entry, c.Token, next.Token)
			}
		}
	}
}

// cutLasts is the longest time, in leases, for which a process is cut off.
const cutLasts = 3

// disturbed says that something may have kept a process from recording an end between two moments.
func (x *index) disturbed(process string, from, to time.Time) bool {
	concerns := func(d Death) bool {
		return d.Process == process && d.At.After(from.Add(-cutLasts*x.Lease)) && d.At.Before(to.Add(x.Tolerance))
	}
	return slices.ContainsFunc(x.Deaths, concerns) || slices.ContainsFunc(x.Hindrances, concerns) ||
		x.longestSilence(process, from, to) >= x.Lease-x.Tolerance
}

// longestSilence is the longest time between two committed heartbeats of a process, of which a part is between two
// moments.
func (x *index) longestSilence(process string, from, to time.Time) (longest time.Duration) {
	last := from
	for _, b := range x.beats[process] {
		switch {
		case !b.After(from):
			last = b
			continue
		case b.After(to):
			return max(longest, b.Sub(last))
		}
		longest, last = max(longest, b.Sub(last)), b
	}
	return max(longest, to.Sub(last))
}

// away says that a process was kept from the database, or did not hear the answer to a heartbeat, between two moments.
func (x *index) away(process string, from, to time.Time) bool {
	return slices.ContainsFunc(x.Away, func(d Death) bool {
		return d.Process == process && !d.At.After(to) && !laterOf(d.At, d.Until).Add(x.Tolerance).Before(from)
	})
}
