package gateway

import (
	"container/heap"
	"time"
)

// timeout is the end of the wait of a request. It is stale once the request does not wait any more, or
// waits until another time: stale ones are skipped, so that a cancel need not find its place.
type timeout struct {
	at time.Time
	r  *Request
}

func (t timeout) stale() bool { return t.r.state != stateWaiting || !t.r.limit.Equal(t.at) }

// timeouts is a heap, the earliest first.
type timeouts []timeout

func (t timeouts) Len() int           { return len(t) }
func (t timeouts) Less(i, j int) bool { return t[i].at.Before(t[j].at) }
func (t timeouts) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }

// Push implements heap.Interface.
func (t *timeouts) Push(x any) { *t = append(*t, x.(timeout)) } //nolint:errcheck,forcetypeassert // only timeouts

// Pop implements heap.Interface.
func (t *timeouts) Pop() any {
	old := *t
	last := old[len(old)-1]
	old[len(old)-1] = timeout{}
	*t = old[:len(old)-1]
	return last
}

// Expire drops the requests whose wait is over at now.
func (p *Pool) Expire(now time.Time) {
	for len(p.timeouts) > 0 {
		first := p.timeouts[0]
		if !first.stale() && now.Before(first.at) {
			break
		}
		heap.Pop(&p.timeouts)
		if first.stale() {
			continue
		}
		p.observeWait(now, first.r, true)
		p.count.Expired++
		p.drop(now, first.r, p.expiryReason(first.r))
	}
	p.compactTimeouts()
}

// compactTimeouts keeps stale ends from outnumbering the live ones.
func (p *Pool) compactTimeouts() {
	if len(p.timeouts) < 1024 || len(p.timeouts) < 4*p.waiting {
		return
	}
	live := p.timeouts[:0]
	for _, t := range p.timeouts {
		if !t.stale() {
			live = append(live, t)
		}
	}
	clear(p.timeouts[len(live):])
	p.timeouts = live
	heap.Init(&p.timeouts)
}

func (p *Pool) expiryReason(r *Request) Dropped {
	switch {
	case !r.Deadline.IsZero() && !r.Deadline.After(r.expires):
		return DropDeadline
	case p.fleet.usable() == 0:
		return DropCold
	}
	return DropTimeout
}

// Next is when Expire has something to do; zero: no request waits.
func (p *Pool) Next() time.Time {
	for len(p.timeouts) > 0 && p.timeouts[0].stale() {
		heap.Pop(&p.timeouts)
	}
	if len(p.timeouts) == 0 {
		return p.thaw()
	}
	next := p.timeouts[0].at
	if cool := p.thaw(); !cool.IsZero() && cool.Before(next) {
		return cool
	}
	return next
}

// thaw is when the first instance that had no room may be tried again; zero: none is held off, or nobody
// waits for it.
func (p *Pool) thaw() (at time.Time) {
	if p.waiting == 0 {
		return at
	}
	for _, i := range p.fleet.instances {
		if until := i.backoff.Until; i.usable && !until.IsZero() && (at.IsZero() || until.Before(at)) {
			at = until
		}
	}
	return at
}

// Tick carries out the actions that are due at now: waits end, and instances that had no room are
// tried again.
func (p *Pool) Tick(now time.Time) {
	for _, i := range p.fleet.instances {
		if !i.backoff.Active(now) {
			i.backoff.Until = time.Time{}
		}
	}
	p.dispatch(now)
}

// restartTTLs gives every waiting request its wait anew, once, when instances have come back: what it
// waited for a cold start does not count against its wait for a slot, nor as a wait that was longer than estimated.
func (p *Pool) restartTTLs(now time.Time) {
	for _, l := range p.lines {
		for _, f := range l.heap {
			for r := f.head; r != nil; r = r.next {
				if r.restarted {
					continue
				}
				r.restarted, r.expected = true, 0
				r.expires = now.Add(p.ttl(r))
				p.watch(r)
			}
		}
	}
}
