package gateway

import (
	"cmp"
	"fmt"
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
			Reason: DropFlowFull, RetryAfter: p.retryAfter(now, r),
			Detail: fmt.Sprintf("%d requests of this flow wait, as many as may", r.flow.waiting),
		}
	}
	if late := p.late(now, r); late != nil {
		return late
	}
	if !p.budget.fits(r.Bytes - p.evictable(r)) {
		return &Rejection{
			Reason: DropOverloaded, RetryAfter: p.retryAfter(now, r),
			Detail: "the bodies of the requests that wait take as many bytes as they may",
		}
	}
	for p.waiting >= p.policy.Total || !p.budget.fits(r.Bytes) {
		victim := p.victim(r)
		if victim == nil {
			return &Rejection{
				Reason: DropOverloaded, RetryAfter: p.retryAfter(now, r),
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

// evictable is how many bytes evictions for a request can free at most: others are those of critical requests, and of
// other pools.
func (p *Pool) evictable(r *Request) (bytes int) {
	for c := max(r.Class, Default); c <= Sheddable; c++ {
		bytes += p.lines[c].bytes
	}
	return bytes
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
