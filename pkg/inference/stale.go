package inference

import (
	"cmp"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// trusted returns the orphans whose state says something of their nodes. After a time in which the database did not
// answer, or after a step ahead of its clock, leases have lapsed of nodes that live and have not beaten since: their
// calls may run through.
func (p *Prober) trusted(orphans []slot.Orphan, now time.Time) []slot.Orphan {
	p.mu.Lock()
	returned, allBeat := p.returned, max(p.tuning.probeEvery, p.lease/3)
	p.mu.Unlock()
	if returned.IsZero() || now.Sub(returned) >= allBeat {
		return orphans
	}
	return slices.DeleteFunc(orphans, func(o slot.Orphan) bool { return o.Dead })
}

// staleOrphans returns the tokens of the slots that may be freed. It is pure.
//
// Slots that living nodes answer for are no orphans, and their calls may be part of the reported
// count: so at most as many orphans as the worker reports calls can really be running, and the
// others are not. One younger than the grace is never stale, nor does it use up the report: between
// the moment when a node takes a slot and the moment when the worker counts the call there is a
// request on its way, and a probe that overtakes it would free a slot in use. Of the others the
// oldest go first: which slot an anonymous count belongs to cannot be known, but how many are in
// use can.
func staleOrphans(orphans []slot.Orphan, h worker.Health, e *Endpoint, grace time.Duration) (stale []int64) {
	longest := runMax(e.Model)
	stops := e.Model.CloseEndsRun()
	active := running(h, e)
	var settled []slot.Orphan
	for _, o := range slices.SortedFunc(slices.Values(orphans), byAge) {
		grace := graceOf(o, grace)
		switch {
		case o.Age >= longest, o.Dead && stops && o.Age >= grace:
			// its connection is closed (unless its node lives, cut off), or no run lasts so long
			stale = append(stale, o.Token)
		case o.Age >= grace && active != nil:
			settled = append(settled, o)
		}
	}
	for i := 0; active != nil && i < len(settled)-max(*active, 0); i++ {
		stale = append(stale, settled[i].Token)
	}
	return stale
}

// graceOf is how old an orphan must be before a probe may free it: the grace, but that a dead node has not used the
// slot for a whole lease.
func graceOf(o slot.Orphan, grace time.Duration) time.Duration {
	if o.Dead {
		return min(grace, deadGrace)
	}
	return grace
}

// deadGrace is how long after the lapse of a node's lease a call that it sent may still be on its way.
const deadGrace = time.Second

func byAge(a, b slot.Orphan) int { return cmp.Compare(b.Age, a.Age) }

// runMax is how long a run of the model can last after its caller is gone.
func runMax(m worker.Model) time.Duration {
	if m.Type == worker.TypeAsync {
		return m.MaxPollTime.Duration() + m.Timeouts.Start.Duration()
	}
	return m.Timeouts.Run.Duration()
}

// running is how many calls the worker may be at, those that wait inside it included; nil if it does
// not say.
func running(h worker.Health, e *Endpoint) *int {
	none := 0
	switch {
	case h.Unreached:
		return nil
	case h.Gone || h.State == worker.StateDefunct || h.State == worker.StateStarting:
		return &none // the server is down, or has only just come up. One that answers that it is ill may be at work
	case h.Active == nil && e.Model.Protocol == worker.ProtocolCog && h.State == worker.StateReady && h.Idle(e.Slots):
		return &none
	case h.Active == nil || h.Queued == nil:
		return h.Active
	}
	all := *h.Active + max(*h.Queued, 0)
	return &all
}
