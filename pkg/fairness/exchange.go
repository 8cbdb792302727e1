package fairness

import (
	"math"
	"time"
)

// Report returns the addition of this node to the shared usage: its own service since the last
// snapshot that was adopted. If the exchange fails, the next report includes it again.
func (b *Book) Report(now time.Time) []AttainedService {
	b.mu.Lock()
	defer b.mu.Unlock()
	scale := b.scale(now)
	var report []AttainedService
	for key, f := range b.flows {
		report = f.tell(report, key, scale)
	}
	for key, q := range b.queues {
		report = q.tell(report, Key{Queue: key.id, Priority: key.priority, Whole: true}, scale)
	}
	return report
}

func (a *account) tell(report []AttainedService, key Key, scale float64) []AttainedService {
	a.sent = a.own
	const known = 1.001 // what all know already comes back a little different
	if a.own == 0 && a.lift <= a.theirs*known {
		return report
	}
	return append(report, AttainedService{key, a.own / scale, a.lift / scale})
}

// Adopt takes in the snapshot that answered the last report: the usage of all keys over all
// nodes, that report included. A key that is not in it has none. nodes is the number of live nodes.
func (b *Book) Adopt(snapshot []AttainedService, nodes int, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	scale := b.scale(now)
	b.nodes = max(1, float64(nodes))
	b.rounds++
	before := b.leasts(now)
	shared := make(map[Key]AttainedService, len(snapshot))
	for _, u := range snapshot {
		shared[u.Key] = u
		if u.Whole {
			b.queue(u.Queue, u.Priority)
		} else {
			b.flow(&Lane{Queue: u.Queue, Priority: u.Priority, Flow: u.Flow})
		}
	}
	for key, q := range b.queues {
		q.adopt(shared[Key{Queue: key.id, Priority: key.priority, Whole: true}], b.nodes, scale)
	}
	for key, f := range b.flows {
		f.take(shared[key], scale)
	}
	b.resetFloors(before, now)
	b.prune(scale, now)
}

// adopt also learns how many nodes serve the queue as this one does: all of its service by
// this node's part of it, since the last snapshot, at most the live nodes.
func (q *queue) adopt(u AttainedService, nodes, scale float64) {
	everyone, part := u.Service*scale-q.shared, q.sent
	seem := nodes
	if part > 0 && everyone > 0 {
		seem = min(nodes, max(1, everyone/part))
	}
	q.nodes = min(nodes, (q.nodes+seem)/2)
	q.take(u, scale)
}

func (a *account) take(u AttainedService, scale float64) {
	a.back = a.back && u.Service*scale <= a.shared
	a.shared = u.Service * scale
	a.own -= a.sent
	a.sent = 0
	a.theirs = u.Lift * scale
}

// leasts returns the least level of the members that stayed, of each group.
func (b *Book) leasts(now time.Time) map[*group]float64 {
	least := map[*group]float64{}
	lower := func(g *group, a *account, nodes float64) {
		if !a.stayed(g.last, now, b.config.Grace) {
			return
		}
		if old, ok := least[g]; !ok || a.virtual(nodes) < old {
			least[g] = a.virtual(nodes)
		}
	}
	for _, f := range b.flows {
		lower(&f.queue.members, &f.account, f.queue.nodes)
	}
	for _, q := range b.queues {
		lower(&q.band.members, &q.account, q.nodes)
	}
	return least
}

// resetFloors puts every floor at the least level again: a snapshot puts right the
// estimates that the floor was made from. The same goes for lifts made from it, which are
// told to others only after that.
func (b *Book) resetFloors(before map[*group]float64, now time.Time) {
	after := b.leasts(now)
	moved := map[*group]float64{}
	for g, old := range before {
		moved[g] = after[g] - old
		g.floor = after[g]
	}
	for _, f := range b.flows {
		f.agree(moved[&f.queue.members])
	}
	for _, q := range b.queues {
		q.agree(moved[&q.band.members])
	}
}

func (a *account) agree(moved float64) {
	if a.fresh > 0 {
		a.lift += math.Max(0, a.fresh+moved*a.weight)
		a.fresh = 0
	}
}

// prune forgets accounts that have decayed to nothing: flows, and queues of which no flow is left.
func (b *Book) prune(scale float64, now time.Time) {
	const nothing = 1e-6
	decayed := func(a *account) bool {
		// Estimates that were added and taken off again leave a rest: 0.1+0.1+0.1-0.1-0.1-0.1 is above zero.
		idle := now.Sub(a.seen) > 2*b.config.Grace && a.running < nothing
		return idle && a.own == 0 && (a.shared+a.lifted())/scale < nothing
	}
	for key, f := range b.flows {
		if decayed(&f.account) {
			f.book = nil
			delete(b.flows, key)
		} else {
			f.queue.kept = b.rounds
		}
	}
	for key, q := range b.queues {
		if q.kept != b.rounds && decayed(&q.account) {
			delete(b.queues, key)
		}
	}
}
