package gateway

import "time"

// leasePacing decides when a pool leases slots and when it preempts, by its last leases.
type leasePacing struct {
	lastLease     time.Time     // when it was sent
	gap           time.Duration // from then to the next one; it doubles while leases bring nothing
	cold          bool          // the pool had no instance at the last lease
	demandKnown   bool          // the last lease brought too few: the database has the demand
	preemptFrom   time.Time     // no preemption before
	awaitingSince time.Time     // since when a lease waits for a comparison; zero: none does
}

// Gaps between two leases of a pool.
const (
	gapMin  = 5 * time.Millisecond
	gapTold = 25 * time.Millisecond  // after one that brought too few, of which the holders of idle slots were told
	gapMax  = 250 * time.Millisecond // the longest, to which that doubles while leases bring nothing
	gapCold = time.Second            // while no instance is there: the leases keep the demand known
)

// preemptLead is how long before the first preemption for the requests that wait a lease is sent: runs are ended only
// for slots that no node had to give just before, and without a statement in between.
const preemptLead = 15 * time.Millisecond

// preemptGap is the least time between two orders of preemption for a pool, whatever preempt_after is: the runs that
// one ends need some time to leave their slots.
const preemptGap = 25 * time.Millisecond

// adapt returns the longest gap between two leases for a demand. The gaps begin anew when an instance has come up, and
// when the last lease is so long ago that it says little.
func (p *leasePacing) adapt(d poolDemand) (longest time.Duration) {
	longest = gapMax
	if d.mode == ModeCold {
		longest = gapCold
		p.cold = true
	} else if p.cold {
		p.cold, p.gap, p.lastLease = false, 0, time.Time{}
	}
	if d.at.Sub(p.lastLease) > longest {
		p.gap = 0
	}
	return longest
}

// leased sets the gap to the next lease by the slots that the last one brought, and by those that are still missing.
func (p *leasePacing) leased(sent time.Time, got, missing int, longest time.Duration) {
	p.lastLease = sent
	if got > 0 {
		p.gap = 0
	}
	if missing > 0 {
		p.demandKnown = true
		p.gap = min(max(2*p.gap, gapTold), longest)
	}
}

// next is when the next lease may be sent. due is when durable runs may be preempted for requests that wait since
// oldest, zero if they may not. A lease from before oldest has not asked for these requests.
func (p *leasePacing) next(oldest, due time.Time) time.Time {
	at := p.lastLease.Add(max(p.gap, gapMin))
	early := due.Add(-preemptLead)
	if early.Before(oldest) {
		early = oldest
	}
	switch {
	case due.IsZero() || !due.After(p.preemptFrom): // or it is not the first preemption
	case p.lastLease.Before(early):
		if early.Before(at) {
			at = early
		}
		if soonest := p.lastLease.Add(gapMin); at.Before(soonest) {
			at = soonest
		}
	case at.Before(due.Add(gapMin)):
		at = due.Add(gapMin)
	}
	return at
}

// awaitsComparison says whether a lease waits for a comparison, by which slots are about to come in. It does so for a
// moment at most: hand-overs of other models may follow one another without a pause.
func (p *leasePacing) awaitsComparison(now time.Time, granting bool) bool {
	switch {
	case granting && p.awaitingSince.IsZero():
		p.awaitingSince = now
	case !granting || now.Sub(p.awaitingSince) >= gapTold:
		p.awaitingSince = time.Time{}
		return false
	}
	return true
}

// preemptDue is when durable runs may be preempted for the requests that wait, zero if they may not.
func preemptDue(p PoolPolicy, mode PoolMode, oldest, before time.Time) time.Time {
	if !p.Preempt || mode != ModeQueue || oldest.IsZero() {
		return time.Time{}
	}
	due := oldest.Add(p.PreemptAfter.Duration())
	if due.Before(before) {
		return before
	}
	return due
}
