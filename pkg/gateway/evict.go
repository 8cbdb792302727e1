package gateway

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"
)

// byteBudget bounds the bodies of all requests that wait in a gateway.
type byteBudget struct {
	most int64
	used atomic.Int64
}

func (b *byteBudget) add(n int) {
	if b != nil {
		b.used.Add(int64(n))
	}
}

func (b *byteBudget) fits(n int) bool {
	return b == nil || b.used.Load()+int64(n) <= b.most
}

// makeRoom says why a request cannot wait; nil: it can, and where the pool was full another request was
// evicted for it.
func (p *Pool) makeRoom(now time.Time, r *Request) *Rejection {
	if r.flow.waiting >= p.policy.FlowTotal {
		return &Rejection{
			Reason: DropFlowFull, RetryAfter: p.retryAfter(r),
			Detail: fmt.Sprintf("%d requests of this flow wait, as many as may", r.flow.waiting),
		}
	}
	if late := p.late(now, r); late != nil {
		return late
	}
	for p.waiting >= p.policy.Total || !p.budget.fits(r.Bytes) {
		victim := p.victim(r)
		if victim == nil {
			return &Rejection{
				Reason: DropOverloaded, RetryAfter: p.retryAfter(r),
				Detail: fmt.Sprintf("%d requests wait, as many as may", p.waiting),
			}
		}
		p.evictions++
		victim.flow.evicted = p.evictions
		p.count.Evicted[victim.Class]++
		p.drop(now, victim, DropEvicted)
	}
	return nil
}

// completionsKnown is how many calls must have ended before expected waits are taken seriously.
const completionsKnown = 20

// late refuses a request now that would only time out later. Critical requests are never refused so.
func (p *Pool) late(now time.Time, r *Request) *Rejection {
	if r.Class == Critical || p.durations.n < completionsKnown || p.fleet.usable() == 0 || p.ceiling() == 0 {
		return nil
	}
	wait := p.expectedWait(r)
	if wait > p.ttl(r) {
		return &Rejection{
			Reason: DropOverloaded, RetryAfter: p.retryAfter(r),
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

// expectedWait estimates how long a request would wait: the calls that fair queueing serves before it,
// at the mean duration of a call, on all slots. Of each flow of its class no more come first than the
// request's own flow has.
func (p *Pool) expectedWait(r *Request) time.Duration {
	before := 0
	for c := range r.Class {
		before += p.lines[c].waiting
	}
	own := p.lines[r.Class]
	before += min(own.waiting, (r.flow.waiting+1)*max(len(own.heap), 1))
	mean := p.cost.ms
	if mean <= 0 {
		mean = costInitial
	}
	ms := mean * float64(before+1) / float64(max(p.ceiling(), 1))
	return time.Duration(ms * float64(time.Millisecond))
}

// Bounds on what callers are told to wait.
const (
	retryMin = time.Second
	retryMax = time.Minute
)

// coldRetry is what callers are told to wait for a cold start while none has been measured.
const coldRetry = 30 * time.Second

func (p *Pool) retryAfter(r *Request) time.Duration {
	if p.fleet.usable() == 0 {
		return min(max(cmp.Or(p.starts.P95, coldRetry), retryMin), retryMax)
	}
	return min(max(p.expectedWait(r), retryMin), retryMax)
}

// victim returns the request that makes room for r: the newest of the flow that was evicted from least
// recently, in the lowest class below that of r; else the newest of the longest flow of its own class, if
// r's flow has less than its share. Critical requests are never evicted.
func (p *Pool) victim(r *Request) *Request {
	for c := Sheddable; c > r.Class; c-- {
		if flows := p.lines[c].heap; len(flows) > 0 {
			return slices.MinFunc(flows, func(a, b *flow) int {
				return cmp.Or(cmp.Compare(a.evicted, b.evicted), longer(a, b))
			}).tail
		}
	}
	own := p.lines[r.Class]
	if r.Class == Critical || len(own.heap) == 0 {
		return nil
	}
	longest := slices.MinFunc(own.heap, longer)
	if longest == r.flow || longest.waiting <= r.flow.waiting+1 {
		return nil
	}
	if float64(r.flow.waiting) >= own.share(r.flow, p.policy.Total) {
		return nil
	}
	return longest.tail
}

// longer orders flows by their waiting requests, most first; names decide between equal ones.
func longer(a, b *flow) int {
	return cmp.Or(cmp.Compare(b.waiting, a.waiting), cmp.Compare(a.name, b.name))
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

// jitter lengthens the wait in an answer by up to a quarter, so that refused clients
// together do not come back together. part is from 0 to 1.
func jitter(d time.Duration, part float64) time.Duration {
	return min(d+time.Duration(part*float64(d)/4), retryMax)
}

// seconds rounds a Retry-After up: earlier than told makes no sense.
func seconds(d time.Duration) int { return max(1, int(math.Ceil(d.Seconds()))) }
