package tasknode

import "sync"

// reservation is the right to hold a number of locks of one queue. For each of them it has a permit
// of the node, a place under the queue's limit on this node, and the admission of every gate. A
// claim reserves first, shrinks the reservation to what it brought, and gives each lock its part of
// it; a part is released when the lock's last ending is recorded.
type reservation struct {
	node  *Node
	queue *servedQueue
	locks int
	gates []func(n int) // give the admission of each gate back
}

// refusal says what left no room for a claim.
type refusal int

const (
	refusedNot     refusal = iota // there is room
	refusedThreads                // all permits of the node are in use
	refusedByLimit                // the queue's limit on this node is reached
	refusedByGate                 // a gate lets no more entries of the queue through
)

// claimMax bounds the locks of a claim.
const claimMax = 500

// reserve reserves as many locks of the lane's queue as may be claimed now.
func (n *Node) reserve(l *laneLease) (reservation, refusal) {
	r := reservation{node: n, queue: l.served}
	places := n.holdings.reserve(l.served, l.queue.Config.MaxConcurrentPerNode, n.claimLimit(l))
	if places == 0 {
		n.cfg.Observer.Refused(l.served.name, "queue_limit")
		return r, refusedByLimit
	}
	ahead := n.holdings.ahead(l.served, n.Threads())
	r.locks = n.permits.take(places, ahead)
	if r.locks == 0 && n.holdings.fits(l, places, n.Threads()) {
		r.locks = n.permits.take(1, ahead+n.Threads())
	}
	n.holdings.unreserve(l.served, places-r.locks)
	if r.locks == 0 {
		n.cfg.Observer.Refused(l.served.name, "threads")
		return r, refusedThreads
	}
	for _, gate := range n.cfg.Gates {
		allowed, release := gate.Take(l.served.name, r.locks)
		r.shrink(allowed)
		if allowed == 0 {
			return r, refusedByGate
		}
		r.gates = append(r.gates, release)
	}
	return r, refusedNot
}

// claimLimit is how many locks a claim brings at most: a lane of a lower band that is owed its share no more than that.
func (n *Node) claimLimit(l *laneLease) int {
	if l.ranked.Owed == 0 {
		return claimMax
	}
	_, cost := n.holdings.expected(l.served)
	return int(max(1, min(claimMax, l.ranked.Owed/cost)))
}

// shrink keeps the rights to n locks at most. It wakes no lane that rests because it was refused:
// the rights given back here were of no use to this lane, and two such lanes would wake each other
// for ever.
func (r *reservation) shrink(n int) {
	if k := r.locks - n; k > 0 {
		r.giveBack(k)
		r.node.signal()
	}
}

// part splits the rights to n locks off.
func (r *reservation) part(n int) reservation {
	part := *r
	part.locks = n
	r.locks -= n
	return part
}

// release returns all rights that are left, and lets lanes that were refused be tried again.
func (r *reservation) release() {
	if r.locks > 0 {
		r.giveBack(r.locks)
		r.node.TryAgain()
	}
}

func (r *reservation) giveBack(k int) {
	for _, release := range r.gates {
		release(k)
	}
	r.node.holdings.unreserve(r.queue, k)
	r.node.permits.put(k)
	r.locks -= k
}

// releaseGates returns the admission of the gates, as soon as the run is over: its ending needs none.
func (r *reservation) releaseGates() {
	if len(r.gates) == 0 {
		return
	}
	for _, release := range r.gates {
		release(r.locks)
	}
	r.gates = nil
	r.node.TryAgain()
}

// permits bound how many locks the node holds, of queues with a model or without: what a model has room for is counted
// by its gate (inference.SlotPool), in permits of its own that end with the run, before the lock does.
type permits struct {
	mu      sync.Mutex
	threads int
	used    int
}

// take takes up to want permits. There are as many as processing threads, and ahead more.
func (p *permits) take(want, ahead int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := max(0, min(want, p.threads+ahead-p.used))
	p.used += n
	return n
}

func (p *permits) grow(more int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.threads += more
}

func (p *permits) put(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used -= n
}

func (p *permits) held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}
