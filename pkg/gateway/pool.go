package gateway

import (
	"cmp"
	"container/heap"
	"time"
)

// Pool is the admission of one model: see the package's documentation. It is not safe for concurrent
// use, and takes the time with each call.
type Pool struct {
	policy PoolPolicy
	fleet  fleet
	lines  [criticalityCount]*line
	budget *byteBudget

	inFlight, waiting, bytes int
	mode                     PoolMode
	modeSince                time.Time
	draining                 bool
	starts                   Starts
	served                   service
	cost                     costModel
	durations                durations
	timeouts                 timeouts
	slacks                   [criticalityCount]slack
	evictions                uint64
	owed                     int           // busy slots that are to be given back when their calls end
	returning                []*leasedSlot // those whose calls have ended: busy until surrender takes them out
	count                    Counts
}

// Counts are the pool's counters since its start.
type Counts struct {
	Arrived, Bypassed, Queued, Dispatched, Ended [criticalityCount]int64
	Dropped                                      map[Dropped]int64
	Expired                                      int64 // that had waited, of those dropped
	Evicted                                      [criticalityCount]int64
	CostMS                                       [criticalityCount]float64
}

// NewPool returns a pool without instances.
func NewPool(policy PoolPolicy, budget *byteBudget) *Pool {
	p := &Pool{policy: policy, budget: budget, count: Counts{Dropped: map[Dropped]int64{}}}
	p.fleet.affinity = newAffinity()
	for c := range p.lines {
		p.lines[c] = newLine()
	}
	return p
}

// ceiling is how many calls may be in flight.
func (p *Pool) ceiling() int { return p.fleet.ceiling() }

// Arrive decides about a new request: it is in flight, waiting, or refused with the error. In flight,
// its slot is known; waiting, Leave will tell.
func (p *Pool) Arrive(now time.Time, r *Request) (inFlight bool, refused *Rejection) {
	p.Expire(now)
	p.count.Arrived[r.Criticality]++
	if r.Weight <= 0 {
		r.Weight = 1
	}
	r.flow = p.lines[r.Criticality].flow(cmp.Or(r.Share, r.Flow), r.Weight)
	r.arrived, r.estimate, r.units = now, p.estimate(r), float64(max(r.Choices, 1))
	r.trace = Trace{Mode: p.mode.String(), Arrived: now, Ahead: p.waiting, Estimate: r.estimate}
	if refused := p.admissible(now, r); refused != nil {
		refused.noRoom = refused.Reason == DropNoEndpoints
		return false, p.refuse(now, r, refused)
	}
	if p.bypasses(r) && p.launch(now, r) {
		r.trace.Bypassed = true
		p.count.Bypassed[r.Criticality]++
		p.updateMode(now)
		return true, nil
	}
	if refused := p.makeRoom(now, r); refused != nil {
		refused.noRoom = true
		return false, p.refuse(now, r, refused)
	}
	p.enqueue(now, r)
	// With an idle slot the request may be the next of its criticality, and leave at once.
	leave := r.Leave
	r.Leave = nil
	p.dispatch(now)
	r.Leave = leave
	return r.state == stateInFlight, nil
}

// admissible refuses what cannot be served whatever waits.
func (p *Pool) admissible(now time.Time, r *Request) *Rejection {
	switch {
	case p.draining && len(r.Avoid) == 0: // a second attempt is one of a request that was accepted
		return &Rejection{Reason: DropShutdown, RetryAfter: time.Second, Detail: "this gateway drains"}
	case p.fleet.usable() == 0 && !p.mayStart():
		return &Rejection{
			Reason: DropNoEndpoints, RetryAfter: 30 * time.Second,
			Detail: "the model has no usable instance, and none may be started",
		}
	case !r.Deadline.IsZero() && !now.Before(r.Deadline):
		return &Rejection{Reason: DropDeadline, Detail: "the deadline was over at arrival"}
	}
	return nil
}

func (p *Pool) refuse(now time.Time, r *Request, refused *Rejection) *Rejection {
	r.state = stateEnded
	r.trace.Dropped = refused.Reason
	r.trace.WaitedMS = milliseconds(now.Sub(r.arrived))
	p.count.Dropped[refused.Reason]++
	p.lines[r.Criticality].forget(r.flow)
	return refused
}

// bypasses says whether the request may pass the queue by.
func (p *Pool) bypasses(r *Request) bool {
	for c := range r.Criticality + 1 {
		if p.lines[c].waiting > 0 {
			return false
		}
	}
	if p.policy.StrictBand {
		_, upper := p.bounds()
		return p.waiting == 0 && float64(p.inFlight) < upper
	}
	most := float64(p.ceiling()) * p.policy.Holdback.of(r.Criticality)
	first := p.inFlight == 0 && most > 0 // of a small pool, in which nobody may wait
	return p.inFlight < int(most) || first
}

func (p *Pool) enqueue(now time.Time, r *Request) {
	ttl := p.ttl(r)
	r.state, r.expires = stateWaiting, now.Add(ttl)
	p.lines[r.Criticality].enqueue(r)
	p.waiting++
	p.bytes += r.Bytes
	p.budget.add(r.Held, r.Bytes)
	p.count.Queued[r.Criticality]++
	p.watch(r)
	p.updateMode(now)
}

// ttl is how long the request may wait as things are.
func (p *Pool) ttl(r *Request) time.Duration {
	if p.fleet.usable() == 0 {
		return p.coldLimit()
	}
	if r.TTL > 0 {
		return r.TTL
	}
	return p.policy.QueueTTL.Duration()
}

// leftOf is how much of the time that it may wait for a slot a request has left. A wait for a cold start is not part of
// that time: what is left is whole then, as restartTTLs has it.
func (p *Pool) leftOf(now time.Time, r *Request) time.Duration {
	if r.state == stateWaiting && p.mode != ModeCold {
		return r.expires.Sub(now)
	}
	return p.ttl(r)
}

// Waits for a cold start that the policy does not set.
const (
	coldUnknown = 300 * time.Second // while no start has been measured
	coldFactor  = 3                 // x p95 of the starts
)

func (p *Pool) coldLimit() time.Duration {
	switch {
	case p.policy.ColdTTL > 0:
		return p.policy.ColdTTL.Duration()
	case p.starts.P95 > 0:
		return coldFactor * p.starts.P95
	}
	return coldUnknown
}

// mayStart says whether an instance may come up while there is none: by the policy, else by the autoscaler.
func (p *Pool) mayStart() bool {
	if p.policy.MayStart != nil {
		return *p.policy.MayStart
	}
	return p.starts.May
}

// watch puts the earlier end of a waiting request into the heap of ends.
func (p *Pool) watch(r *Request) {
	r.limit = r.expires
	if !r.Deadline.IsZero() && r.Deadline.Before(r.limit) {
		r.limit = r.Deadline
	}
	heap.Push(&p.timeouts, timeout{r.limit, r})
}

// launch gives the request a slot, if an instance has room for it.
func (p *Pool) launch(now time.Time, r *Request) bool {
	i := p.fleet.pick(now, r, p.policy.AffinityBound)
	if i == nil {
		return false
	}
	r.trace.Start, r.trace.Virtual = r.flow.start, p.lines[r.Criticality].virtual
	r.trace.Instance, r.trace.Score = i.id, i.score(now, i.rate)
	r.units = float64(max(r.Choices, 1) * i.gpus)
	r.left = p.leftOf(now, r)
	p.lines[r.Criticality].charge(r)
	if r.state == stateWaiting {
		p.observeWait(now, r, false)
		p.unqueue(r)
	}
	r.slot, r.instance, r.state, r.began = i.begin(r.estimate), i, stateInFlight, now
	r.server, r.address = i.server, i.address
	i.limit.grow(now, i.inFlight)
	i.try(now, r)
	p.fleet.remember(r, i.id)
	if r.Adapter != "" {
		i.adapters[r.Adapter] = now
	}
	p.inFlight++
	r.bucket = p.served.add(now, r.Criticality, r.estimate)
	p.count.Dispatched[r.Criticality]++
	r.trace.WaitedMS = milliseconds(now.Sub(r.arrived))
	return true
}

// unqueue takes a waiting request out of the queue.
func (p *Pool) unqueue(r *Request) {
	p.lines[r.Criticality].remove(r)
	p.waiting--
	p.bytes -= r.Bytes
	p.budget.add(r.Held, -r.Bytes)
}

// drop ends a waiting request without a call.
func (p *Pool) drop(now time.Time, r *Request, reason Dropped) {
	p.unqueue(r)
	r.state = stateEnded
	r.trace.Dropped, r.trace.WaitedMS = reason, milliseconds(now.Sub(r.arrived))
	p.count.Dropped[reason]++
	p.lines[r.Criticality].forget(r.flow)
	if r.Leave != nil {
		r.Leave(r, reason)
	}
}

// dispatch gives idle slots to waiting requests until there are no more of either.
func (p *Pool) dispatch(now time.Time) {
	p.Expire(now)
	p.served.width = p.serviceWidth()
	p.served.advance(now)
	for p.waiting > 0 {
		if p.policy.StrictBand {
			if lower, _ := p.bounds(); float64(p.inFlight) >= lower {
				break
			}
		}
		if !p.dispatchOne(now) {
			break
		}
	}
	p.updateMode(now)
}

// dispatchOne launches the next request of the first criticality that has one with a place to go.
func (p *Pool) dispatchOne(now time.Time) bool {
	order, byFloor := p.order()
	for n, c := range order {
		r := p.lines[c].next()
		if r == nil || !p.launch(now, r) {
			continue
		}
		r.trace.Floor = n < byFloor
		if r.Leave != nil {
			r.Leave(r, DropNone)
		}
		return true
	}
	return false
}

// order lists the criticalities as they are served: critical, default, sheddable, but first those that got less than
// their floor although requests of theirs wait, and how many these are.
func (p *Pool) order() (order [criticalityCount]Criticality, byFloor int) {
	others := 0
	var rest [criticalityCount]Criticality
	for c := range Criticality(criticalityCount) {
		if p.lines[c].waiting > 0 && p.served.share(c) < p.policy.Floors.of(c) {
			order[byFloor] = c
			byFloor++
		} else {
			rest[others] = c
			others++
		}
	}
	copy(order[byFloor:], rest[:others])
	return order, byFloor
}

// Cancel ends a waiting request whose client went away. It is false if the request does not wait any
// more: then it is in flight and End must follow, or it has ended.
func (p *Pool) Cancel(now time.Time, r *Request, reason Dropped) bool {
	if r.state != stateWaiting {
		return false
	}
	r.Leave = nil
	p.drop(now, r, reason)
	p.updateMode(now)
	return true
}

// End ends a call: its slot is idle, unless it is in doubt, its flow is charged its use, and the
// next request gets the slot. Each call ends once; a second End changes nothing.
func (p *Pool) End(now time.Time, r *Request, end CallEnd) {
	if r.state != stateInFlight {
		return
	}
	r.state = stateEnded
	p.inFlight--
	i := r.instance
	i.end(r.estimate)
	switch {
	case end.Doubt:
		p.fleet.drop(r.slot.Held)
	case p.owed > 0 && i.slots.Has(r.slot):
		p.owed--
		p.returning = append(p.returning, r.slot) // it stays busy until it is given back
	default:
		i.slots.Free(r.slot)
	}
	actual := milliseconds(end.Took)
	if end.Unused || end.Busy || end.Unfit {
		actual = 0
	}
	p.judge(now, r, i, end)
	p.learn(r, i, end, actual)
	p.lines[r.Criticality].correct(r, actual)
	p.served.correct(now, r.bucket, r.Criticality, r.estimate, actual)
	r.trace.CostMS = actual
	p.count.Ended[r.Criticality]++
	p.count.CostMS[r.Criticality] += actual
	p.dispatch(now)
}

// learn takes in what a call took, for the estimates of those to come.
func (p *Pool) learn(r *Request, i *instance, end CallEnd, actual float64) {
	if end.Unused || end.Busy || end.Failed {
		return
	}
	in, out := float64(end.TokensIn), float64(end.TokensOut)
	r.flow.cost.observe(actual, in, out)
	p.cost.observe(actual, in, out)
	p.durations.add(end.Took)
	if out > 0 && end.Took > 0 {
		rate := out / end.Took.Seconds() * float64(i.inFlight+1)
		i.rate += 0.1 * (rate - i.rate)
	}
}

// estimate is the cost to expect: by the flow's calls, else by the pool's, else one second.
func (p *Pool) estimate(r *Request) float64 {
	if ms, ok := r.flow.cost.estimate(r.TokensIn, r.TokenMax); ok {
		return ms
	}
	if ms, ok := p.cost.estimate(r.TokensIn, r.TokenMax); ok {
		return ms
	}
	return costInitial
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
