package gateway

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// makeRoom says why a request cannot wait; nil: it can, and where the pool was full another request was
// evicted for it.
func (p *Pool) makeRoom(now time.Time, r *Request) *Rejection {
	if r.flow.waiting >= p.policy.FlowTotal {
		return &Rejection{
			Reason: DropFlowFull, RetryAfter: p.retryAfter(now, r),
			Detail: fmt.Sprintf("%d requests of this flow wait, as many as may", r.flow.waiting),
		}
	}
	if late := p.late(now, r); late != nil {
		return late
	}
	if !p.budget.allows(r.Held, r.Bytes) {
		return &Rejection{
			Reason: DropOverloaded, RetryAfter: p.retryAfter(now, r),
			Detail: "the bodies of the token's requests that wait take as many bytes as those of one token may",
		}
	}
	if !p.budget.fits(r.Bytes - p.evictable(r)) {
		return &Rejection{
			Reason: DropOverloaded, RetryAfter: p.retryAfter(now, r),
			Detail: "the bodies of the requests that wait take as many bytes as they may",
		}
	}
	victims, enough := p.victims(r)
	if !enough {
		return &Rejection{
			Reason: DropOverloaded, RetryAfter: p.retryAfter(now, r),
			Detail: fmt.Sprintf("%d requests wait, as many as may", p.waiting),
		}
	}
	for _, victim := range victims {
		p.evictions++
		victim.flow.evicted = p.evictions
		p.count.Evicted[victim.Criticality]++
		p.drop(now, victim, DropEvicted)
	}
	return nil
}

// victims chooses the requests that make room for r, in the order in which they go. It is not enough where it finds too
// few: then none goes.
func (p *Pool) victims(r *Request) (list []*Request, enough bool) {
	places, bytes := p.waiting+1-p.policy.Total, p.budget.short(r.Bytes)
	if places <= 0 && bytes <= 0 {
		return nil, true
	}
	e := eviction{pool: p, of: r, flows: map[*flow]evictedFlow{}}
	for places > 0 || bytes > 0 {
		victim := e.next()
		if victim == nil {
			return nil, false
		}
		e.take(victim)
		list = append(list, victim)
		places--
		bytes -= int64(victim.Bytes)
	}
	return list, true
}

// evictable is how many bytes evictions for a request can free at most: others are those of critical requests, and of
// other pools.
func (p *Pool) evictable(r *Request) (bytes int) {
	for c := max(r.Criticality, Default); c <= Sheddable; c++ {
		bytes += p.lines[c].bytes
	}
	return bytes
}

// eviction is a choice of requests that make room for another one, none of which has gone yet.
type eviction struct {
	pool  *Pool
	of    *Request
	turns uint64
	flows map[*flow]evictedFlow // that requests were chosen of
}

// evictedFlow is what an eviction has chosen of a flow.
type evictedFlow struct {
	turn  uint64   // of the last choice
	taken int      // requests
	first *Request // of those, the one that has waited longest
}

func (e *eviction) take(r *Request) {
	e.turns++
	e.flows[r.flow] = evictedFlow{e.turns, e.flows[r.flow].taken + 1, r}
}

// waiting is how many requests of a flow are left.
func (e *eviction) waiting(f *flow) int { return f.waiting - e.flows[f].taken }

// newest is the newest request of a flow that is left.
func (e *eviction) newest(f *flow) *Request {
	if of, chosen := e.flows[f]; chosen {
		return of.first.prev
	}
	return f.tail
}

// evicted orders flows by their last eviction.
func (e *eviction) evicted(f *flow) uint64 {
	if of, chosen := e.flows[f]; chosen {
		return e.pool.evictions + of.turn
	}
	return f.evicted
}

// longer orders flows by their waiting requests, most first; names decide between equal ones.
func (e *eviction) longer(a, b *flow) int {
	return cmp.Or(cmp.Compare(e.waiting(b), e.waiting(a)), cmp.Compare(a.name, b.name))
}

// next returns the next request that makes room: the newest of the flow that was evicted from least recently, in the
// lowest criticality below; else the newest of the longest flow of its own criticality, if the flow of the arrival has
// less than its share, and the arrival is served before it. Critical requests are never evicted.
func (e *eviction) next() *Request {
	p, r := e.pool, e.of
	for c := Sheddable; c > r.Criticality; c-- {
		var best *flow
		for _, f := range p.lines[c].heap {
			if e.waiting(f) > 0 && (best == nil ||
				cmp.Or(cmp.Compare(e.evicted(f), e.evicted(best)), e.longer(f, best)) < 0) {
				best = f
			}
		}
		if best != nil {
			return e.newest(best)
		}
	}
	own := p.lines[r.Criticality]
	if r.Criticality == Critical || len(own.heap) == 0 {
		return nil
	}
	longest := slices.MinFunc(own.heap, e.longer)
	if longest == r.flow || e.waiting(longest) <= r.flow.waiting+1 {
		return nil
	}
	if float64(r.flow.waiting) >= own.share(r.flow, p.policy.Total) {
		return nil
	}
	victim := e.newest(longest)
	if own.tagBehind(r.flow, r.flow.tail) >= own.tagBehind(longest, victim.prev) {
		return nil // the arrival would be served behind the one that went for it
	}
	return victim
}
