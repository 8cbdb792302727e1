package gateway

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// completionsKnown is how many calls must have ended before expected waits are taken seriously.
const completionsKnown = 20

// late refuses a request now that would only time out later. Critical requests are never refused so.
func (p *Pool) late(now time.Time, r *Request) *Rejection {
	if r.Criticality == Critical || p.durations.n < completionsKnown || p.fleet.usable() == 0 || p.ceiling() == 0 {
		return nil
	}
	var wait time.Duration
	if !p.goesNext(now, r) {
		wait = p.expectedWait(now, r)
	}
	if wait > p.ttl(r) {
		return &Rejection{
			Reason: DropOverloaded, RetryAfter: p.retryAfter(now, r),
			Detail: fmt.Sprintf("the expected wait of %s is longer than the request may wait",
				wait.Round(time.Millisecond)),
		}
	}
	if !r.Deadline.IsZero() && now.Add(wait+p.durations.median()).After(r.Deadline) {
		return &Rejection{Reason: DropDeadline, Detail: "the deadline cannot be met: expected wait " +
			wait.Round(time.Millisecond).String()}
	}
	return nil
}

// expectedWait estimates how long a request would wait: estimateWait, times the slack of its criticality.
func (p *Pool) expectedWait(now time.Time, r *Request) time.Duration {
	p.served.advance(now)
	r.expected = p.estimateWait(now, r)
	ms := min(r.expected*p.slacks[r.Criticality].value(now), expectedMax)
	return time.Duration(ms * float64(time.Millisecond))
}

// expectedMax bounds an expected wait, in milliseconds: a criticality may get next to nothing.
const expectedMax = 24 * 60 * 60 * 1000

// estimateWait estimates a wait in milliseconds: the calls that go before the request, at the mean duration of a call,
// on the slots that its criticality gets while it has waiters. Those are the slots that the criticalities above leave,
// behind the requests of these that wait now, or its floor, which has nothing before it but the criticality itself,
// once the criticality has not had more than its floor of late; whichever is sooner. Of each flow of the criticality no
// more come first than the request's own flow has.
func (p *Pool) estimateWait(now time.Time, r *Request) float64 {
	call := p.cost.ms
	if call <= 0 {
		call = costInitial
	}
	own := p.lines[r.Criticality]
	before := float64(min(own.waiting, (r.flow.waiting+1)*max(len(own.heap), 1)) + 1)
	all := float64(max(p.ceiling(), 1))
	floor := p.policy.Floors.of(r.Criticality)
	byFloor := (p.served.lead(r.Criticality, floor) + call*before/floor) / all // infinite without a floor
	left := all
	for c := range r.Criticality {
		before += float64(p.lines[c].waiting)
		left -= p.served.slots(now, c)
	}
	for c := r.Criticality + 1; c < criticalityCount; c++ {
		if p.lines[c].waiting > 0 {
			left -= all * p.policy.Floors.of(c)
		}
	}
	return min(call*before/max(left, all/100), byFloor)
}

// goesNext says whether a request would be dispatched at once: nobody waits that comes before it, and an instance has
// room.
func (p *Pool) goesNext(now time.Time, r *Request) bool {
	for c := range r.Criticality + 1 {
		if p.lines[c].waiting > 0 {
			return false
		}
	}
	return slices.ContainsFunc(p.fleet.instances, func(i *instance) bool { return i.room(now) > 0 })
}

// slack is the factor by which waits of a criticality turned out longer than estimated, so that of the requests that
// the estimate lets wait about one in a hundred ends without service. It follows the 99th percentile of the ratio by
// stochastic approximation (Robbins and Monro, "A Stochastic Approximation Method", 1951), and returns to 1 with a
// half-life of 30 s, so that what was learned under one load does not refuse requests under another.
type slack struct {
	log float64 // natural logarithm of the factor
	at  time.Time
}

const (
	slackStep     = 0.02 // of a wait that was longer
	slackPart     = 0.01 // of the waits may be longer
	slackMax      = 3.0  // natural logarithm: a factor of 20
	slackHalfLife = 30 * time.Second
	slackTaught   = 0.25 // of the wait that is allowed: shorter estimates decide nothing
)

func (s *slack) value(now time.Time) float64 {
	if s.log > 0 {
		s.log *= math.Exp2(-now.Sub(s.at).Seconds() / slackHalfLife.Seconds())
	}
	s.at = now
	return math.Exp(s.log)
}

// observe takes in the wait of a request that was estimated as expected, both in milliseconds.
func (s *slack) observe(now time.Time, expected, waited float64) {
	if waited > expected*s.value(now) {
		s.log = min(s.log+slackStep, slackMax)
	} else {
		s.log = max(s.log-slackStep*slackPart, 0)
	}
}

// observeWait takes in how long a request has waited, or that it was dropped at the end of its wait. Waits for an
// instance are not taken in: the estimate is of waits for a slot.
func (p *Pool) observeWait(now time.Time, r *Request, dropped bool) {
	if p.fleet.usable() == 0 {
		return
	}
	slack := &p.slacks[r.Criticality]
	allowed := milliseconds(p.ttl(r))
	if r.expected*slack.value(now) < allowed*slackTaught {
		return
	}
	waited := milliseconds(now.Sub(r.arrived))
	if dropped {
		waited = math.Inf(1) // it would have taken longer yet
	}
	slack.observe(now, r.expected, waited)
}

// Bounds on what callers are told to wait.
const (
	retryMin = time.Second
	retryMax = time.Minute
)

// coldRetry is what callers are told to wait for a cold start while none has been measured.
const coldRetry = 30 * time.Second

func (p *Pool) retryAfter(now time.Time, r *Request) time.Duration {
	if p.fleet.usable() == 0 {
		return min(max(cmp.Or(p.starts.P95, coldRetry), retryMin), retryMax)
	}
	return min(max(p.expectedWait(now, r), retryMin), retryMax)
}

// durations keeps the last calls' durations, for their median.
type durations struct {
	last [64]time.Duration
	n    int
	mid  time.Duration
	at   int // n when mid was computed
}

func (d *durations) add(t time.Duration) {
	d.last[d.n%len(d.last)] = t
	d.n++
}

// median of the last calls; computed anew after every sixteenth.
func (d *durations) median() time.Duration {
	if d.n == 0 {
		return 0
	}
	if d.at == 0 || d.n-d.at >= 16 {
		known := slices.Clone(d.last[:min(d.n, len(d.last))])
		slices.Sort(known)
		d.mid, d.at = known[len(known)/2], d.n
	}
	return d.mid
}
