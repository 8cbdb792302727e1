package gateway

import (
	"slices"
	"time"
)

// naive is the specification of a pool, written down without any structure that makes it fast: one list
// of waiting requests that is searched anew for each decision. One instance, no affinity, no cooling.
type naive struct {
	policy        PoolPolicy
	slots         int // held
	usable        bool
	waiting       []*naiveRequest
	inFlight      int
	flows         map[naiveFlow]*naiveTags
	virtual       [criticalityCount]float64
	last          [criticalityCount]float64
	ofCriticality [criticalityCount]int // of those in flight
	turns         uint64
	evicted       uint64
	spent         []naiveSpent
	bucket        int64     // of the service: the number of the newest one
	begun         time.Time // and when it began; zero: none has
	width         time.Duration
	// serviceWidth is the pool's: the means of its calls are not part of the model.
	serviceWidth func() time.Duration
	cold         bool
}

type naiveFlow struct {
	criticality Criticality
	name        string
}

type naiveTags struct {
	start, finish float64
	turn, evicted uint64
	cost          costModel
}

type naiveRequest struct {
	id         int
	flow       naiveFlow
	weight     float64
	estimate   float64
	bucket     int64 // of its dispatch
	arrived    time.Time
	limit, ttl time.Time
	deadline   time.Time
	restarted  bool
	ttlAsked   time.Duration
}

type naiveSpent struct {
	bucket      int64
	criticality Criticality
	cost        float64
}

// event is one thing that a pool or its model reports.
type event struct {
	id      int
	dropped Dropped // DropNone: dispatched
}

func (n *naive) tags(f naiveFlow) *naiveTags {
	t := n.flows[f]
	if t == nil {
		t = &naiveTags{}
		n.flows[f] = t
	}
	return t
}

func (n *naive) of(f naiveFlow) (list []*naiveRequest) {
	for _, r := range n.waiting {
		if r.flow == f {
			list = append(list, r)
		}
	}
	return list
}

func (n *naive) inCriticality(c Criticality) (list []*naiveRequest) {
	for _, r := range n.waiting {
		if r.flow.criticality == c {
			list = append(list, r)
		}
	}
	return list
}

func (n *naive) remove(r *naiveRequest) {
	n.waiting = slices.DeleteFunc(n.waiting, func(x *naiveRequest) bool { return x == r })
}

func (n *naive) expire(now time.Time) (out []event) {
	for {
		var first *naiveRequest
		for _, r := range n.waiting {
			if !now.Before(r.limit) && (first == nil || r.limit.Before(first.limit)) {
				first = r
			}
		}
		if first == nil {
			return out
		}
		n.remove(first)
		reason := DropTimeout
		switch {
		case !first.deadline.IsZero() && !first.deadline.After(first.ttl):
			reason = DropDeadline
		case !n.usable:
			reason = DropCold
		}
		out = append(out, event{first.id, reason})
	}
}

func (n *naive) idle() bool { return n.usable && n.inFlight < n.slots }

func (n *naive) charge(r *naiveRequest, now time.Time) {
	c := r.flow.criticality
	t := n.tags(r.flow)
	start := max(n.virtual[c], t.finish)
	if len(n.of(r.flow)) > 0 {
		start = t.start
	}
	n.virtual[c] = max(n.virtual[c], start)
	t.finish = start + r.estimate/r.weight
	n.last[c] = max(n.last[c], t.finish)
	if len(n.of(r.flow)) > 0 {
		n.turns++
		t.start, t.turn = t.finish, n.turns
	}
	n.ofCriticality[c]++
	n.inFlight++
	n.advance(now)
	r.bucket = n.bucket
	n.spent = append(n.spent, naiveSpent{r.bucket, c, r.estimate})
}

// advance begins the buckets of the service that are due.
func (n *naive) advance(now time.Time) {
	width := max(n.width, time.Second)
	if n.begun.IsZero() {
		n.begun = now
	}
	for now.Sub(n.begun) >= width {
		n.bucket, n.begun = n.bucket+1, n.begun.Add(width)
	}
	n.spent = slices.DeleteFunc(n.spent, func(s naiveSpent) bool { return n.bucket-s.bucket >= 10 })
}

func (n *naive) share(c Criticality) float64 {
	var own, all float64
	for _, s := range n.spent {
		all += s.cost
		if s.criticality == c {
			own += s.cost
		}
	}
	if all <= 0 {
		return 1
	}
	return own / all
}

// next is the waiting request to be served next.
func (n *naive) next() *naiveRequest {
	criticalities := []Criticality{}
	for c := range Criticality(criticalityCount) {
		if len(n.inCriticality(c)) > 0 && n.share(c) < n.policy.Floors.of(c) {
			criticalities = append(criticalities, c)
		}
	}
	for c := range Criticality(criticalityCount) {
		if !slices.Contains(criticalities, c) {
			criticalities = append(criticalities, c)
		}
	}
	for _, c := range criticalities {
		var best *naiveRequest
		for _, r := range n.inCriticality(c) { // in order of arrival: the first of a flow is met first
			if best == nil || r.flow != best.flow && before(n.tags(r.flow), n.tags(best.flow)) {
				best = r
			}
		}
		if best != nil {
			return best
		}
	}
	return nil
}

func before(a, b *naiveTags) bool {
	return a.start < b.start || a.start == b.start && a.turn < b.turn
}

func (n *naive) dispatch(now time.Time) (out []event) {
	out = n.expire(now)
	n.width = n.serviceWidth()
	n.advance(now)
	for n.idle() {
		r := n.next()
		if r == nil {
			break
		}
		n.charge(r, now)
		n.remove(r)
		out = append(out, event{r.id, DropNone})
	}
	return out
}

func (n *naive) wait(r *naiveRequest, now time.Time) {
	ttl := r.ttlAsked
	if ttl == 0 {
		ttl = n.policy.QueueTTL.Duration()
	}
	if !n.usable {
		ttl = n.policy.ColdTTL.Duration()
	}
	r.ttl = now.Add(ttl)
	r.limit = r.ttl
	if !r.deadline.IsZero() && r.deadline.Before(r.limit) {
		r.limit = r.deadline
	}
}

// arrive decides about a request; the events are those of others, and its own if it was enqueued.
func (n *naive) arrive(now time.Time, r *naiveRequest, estimate func(*naiveTags) float64) (inFlight bool, refused Dropped, out []event) {
	out = n.expire(now)
	t := n.tags(r.flow)
	r.arrived, r.estimate = now, estimate(t)
	if !r.deadline.IsZero() && !now.Before(r.deadline) {
		return false, DropDeadline, out
	}
	above := 0
	for c := range r.flow.criticality + 1 {
		above += len(n.inCriticality(c))
	}
	ceiling := 0
	if n.usable {
		ceiling = n.slots
	}
	most := float64(ceiling) * n.policy.Holdback.of(r.flow.criticality)
	if above == 0 && (n.inFlight < int(most) || n.inFlight == 0 && most > 0) && n.idle() {
		n.charge(r, now)
		return true, DropNone, out
	}
	if len(n.of(r.flow)) >= n.policy.FlowTotal {
		return false, DropFlowFull, out
	}
	all, before := slices.Clone(n.waiting), len(out)
	for len(n.waiting) >= n.policy.Total {
		victim := n.victim(r)
		if victim == nil {
			n.waiting = all
			return false, DropOverloaded, out[:before]
		}
		n.evicted++
		n.tags(victim.flow).evicted = n.evicted
		n.remove(victim)
		out = append(out, event{victim.id, DropEvicted})
	}
	if len(n.of(r.flow)) == 0 {
		n.turns++
		t.start, t.turn = max(n.virtual[r.flow.criticality], t.finish), n.turns
	}
	n.wait(r, now)
	n.waiting = append(n.waiting, r)
	for _, e := range n.dispatch(now) {
		if e.id == r.id {
			inFlight = true
			continue
		}
		out = append(out, e)
	}
	return inFlight, DropNone, out
}

func (n *naive) victim(r *naiveRequest) *naiveRequest {
	newest := func(f naiveFlow) *naiveRequest { list := n.of(f); return list[len(list)-1] }
	for c := Sheddable; c > r.flow.criticality; c-- {
		var best *naiveFlow
		for _, w := range n.inCriticality(c) {
			if best == nil || n.tags(w.flow).evicted < n.tags(*best).evicted ||
				n.tags(w.flow).evicted == n.tags(*best).evicted && n.longer(w.flow, *best) {
				best = &w.flow
			}
		}
		if best != nil {
			return newest(*best)
		}
	}
	if r.flow.criticality == Critical {
		return nil
	}
	longest, weights := naiveFlow{}, 0.0
	seen := map[naiveFlow]bool{}
	for _, w := range n.inCriticality(r.flow.criticality) {
		if !seen[w.flow] {
			seen[w.flow] = true
			weights += w.weight
		}
		if n.longer(w.flow, longest) {
			longest = w.flow
		}
	}
	own := len(n.of(r.flow))
	if !seen[r.flow] {
		weights += r.weight
	}
	if len(seen) == 0 || longest == r.flow || len(n.of(longest)) <= own+1 ||
		float64(own) >= float64(n.policy.Total)*r.weight/weights {
		return nil
	}
	if n.tagOf(r.flow, own) >= n.tagOf(longest, len(n.of(longest))-1) {
		return nil
	}
	return newest(longest)
}

// tagOf is the start tag of the request of a flow behind the first k that wait.
func (n *naive) tagOf(f naiveFlow, k int) float64 {
	t, list := n.tags(f), n.of(f)
	tag := max(n.virtual[f.criticality], t.finish)
	if len(list) > 0 {
		tag = t.start
	}
	for _, r := range list[:k] {
		tag += r.estimate / r.weight
	}
	return tag
}

func (n *naive) end(now time.Time, r *naiveRequest, ms float64, learn bool) []event {
	c := r.flow.criticality
	t := n.tags(r.flow)
	n.inFlight--
	n.ofCriticality[c]--
	if learn {
		t.cost.observe(ms, 0, 0)
	}
	follows := t.start == t.finish
	t.finish = min(t.finish+(ms-r.estimate)/r.weight, max(t.finish, n.virtual[c]+debtMax))
	switch {
	case len(n.of(r.flow)) == 0:
	case follows:
		t.start = t.finish
	default:
		t.start = max(t.start, t.finish)
	}
	if n.ofCriticality[c] == 0 && len(n.inCriticality(c)) == 0 {
		n.virtual[c] = max(n.virtual[c], n.last[c])
	}
	n.advance(now)
	bucket := n.bucket
	if ms < r.estimate {
		bucket = r.bucket // and is forgotten with the estimate
	}
	n.spent = append(n.spent, naiveSpent{bucket, c, ms - r.estimate})
	return n.dispatch(now)
}

func (n *naive) supply(now time.Time, slots int, usable bool) []event {
	came := usable && !n.usable
	n.slots, n.usable = slots, usable
	out := n.dispatch(now)
	if came {
		for _, r := range n.waiting {
			if !r.restarted {
				r.restarted = true
				n.wait(r, now)
			}
		}
	}
	return out
}

func (n *naive) longer(a, b naiveFlow) bool {
	x, y := len(n.of(a)), len(n.of(b))
	return x > y || x == y && a.name < b.name
}
