package fairness

import (
	"math"
	"time"
)

// account is the service of one key. Its amounts are inflated: a cost is multiplied by
// 2^(t/halfLife) when it is booked, t counted from the book's epoch, instead of dividing
// all older ones. Decay then costs nothing, and the order of accounts is the same.
type account struct {
	shared float64 // in the last snapshot, over all nodes
	own    float64 // of this node since then
	sent   float64 // part of own that the last report had
	lift   float64 // own, and reported to others
	fresh  float64 // own since the last snapshot; reported to others once the next one has corrected it
	theirs float64 // the largest lift in the last snapshot

	running float64 // estimates of what runs on this node; not inflated
	peak    float64 // the most that running was, with decay
	typical float64 // moving average of charges; not inflated
	tie     uint64  // random, other on each node

	weight float64
	seen   time.Time // when it last had work
	turn   uint64    // of the last charge
	back   bool      // it returned, and no node is known to have served it since
	level  float64   // virtual time in this ranking
}

// group is a set of accounts that compete: the flows of a queue's band, or the queues of a band.
type group struct {
	floor   float64 // virtual time: the least start of members with work, never falling between snapshots
	least   float64 // in this ranking
	ranking uint64
	// last is the time of this ranking, before that of the one before it.
	last, before time.Time
}

// stayed reports whether a member had work in every ranking of this node.
func (a *account) stayed(since, now time.Time, grace time.Duration) bool {
	return !a.seen.IsZero() && (!a.seen.Before(since) || now.Sub(a.seen) <= grace)
}

// levelAt computes the account's level, and takes its start into the group's least if the account had work all
// the time: its level without the estimates of what runs. Those are charges for service that it may never get.
func (g *group) levelAt(
	a *account, weight, nodes, scale float64, now time.Time, grace time.Duration, ranking uint64,
) {
	if g.ranking != ranking {
		g.ranking, g.least = ranking, math.Inf(1)
		g.before, g.last = g.last, now
	}
	a.weight = weight
	a.level = a.virtual(nodes)
	if a.stayed(g.before, now, grace) {
		g.least = min(g.least, a.level-a.running*nodes*scale/weight)
	}
}

// rise moves the floor up to the least level, once the levels of all members are known.
func (g *group) rise() {
	if !math.IsInf(g.least, 1) {
		g.floor = max(g.floor, g.least)
	}
}

// raise lifts an account that has fallen behind the floor. One that was away comes back at
// the floor itself: it saved nothing up. One that stayed may be behind by as much as its
// own estimates can have been too high, because a refund is not idleness.
func (g *group) raise(a *account, nodes float64, now time.Time, grace time.Duration) {
	floor := g.floor
	if !a.stayed(g.before, now, grace) {
		a.back = true
	} else {
		floor -= a.peak * nodes / a.weight
	}
	if a.level < floor {
		a.fresh = a.lifted() - a.lift + (floor-a.level)*a.weight
		a.level = floor
	}
	a.seen = now
}

func (a *account) virtual(nodes float64) float64 {
	return (Merge(a.shared, a.own, nodes) + a.lifted()) / a.weight
}

// dither spreads the nodes over accounts that are nearly equal. Each node sees its own
// charges multiplied by the number of nodes, so levels closer than that are the same to it;
// without dither all nodes would go for the same flow between two snapshots. The offsets
// are uniform from zero to just that step: then as many nodes answer a flow's lag as it takes.
// One that returned has no offset until it is served: each node would serve it next.
func (a *account) dither(nodes, scale float64, round uint64) float64 {
	if nodes <= 1 || a.back {
		return 0
	}
	u := float64(mix(a.tie^round*0x9e3779b97f4a7c15)>>11) / (1 << 53)
	return u * (nodes - 1) * a.typical * scale / a.weight
}

// pending is what the claim that is under way will add to the level, if it is like those before it.
func (a *account) pending(nodes, scale float64) float64 { return a.typical * nodes * scale / a.weight }

// mix is the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (a *account) lifted() float64 { return max(a.lift+a.fresh, a.theirs) }

// charged records that a claim was served, the turn-th of this node.
func (a *account) charged(estimate float64, turn uint64) {
	a.turn, a.back = turn, false
	a.typical += (estimate - a.typical) / 8
}

// add books inflated service, and estimates that began (or with running below zero, ended) to run.
func (a *account) add(cost, running, scale float64) {
	a.own += cost
	a.running = max(0, a.running+running)
	a.peak = max(a.peak, a.running*scale)
}

// rescale multiplies all inflated amounts, when the epoch moves.
func (a *account) rescale(factor float64) {
	for _, v := range []*float64{&a.shared, &a.own, &a.sent, &a.lift, &a.fresh, &a.theirs, &a.peak} {
		*v *= factor
	}
}
