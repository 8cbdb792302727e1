package tasknode

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// seats are processing threads that wait for an entry which a push hands over: the push makes the lock record itself, so that
// behind its commit there is only the hint and one read (docs/adr/0013-seats.md). A node offers some while it is idle, in the
// background. Each has a permit and the leave of the gates, so that what is handed over finds a thread.
type seats struct {
	out   atomic.Int32
	quiet atomic.Pointer[time.Time] // none before then: permits ran out
	hints sync.Map                  // for each seat: claim id to chan HandOver; one of no entry recalls it
	taken chan struct{}             // a word that another may be offered
}

const (
	seatsMax   = 4                      // of a node, and a quarter of its threads: each asks the database now and then
	seatsEvery = 20 * time.Millisecond  // between offers of one to each queue, unless one was taken
	seatsAsk   = 500 * time.Millisecond // between questions to the database, whether a seat was taken without a word
	seatsQuiet = 5 * time.Second        // without seats after permits ran out
	seatsHeard = time.Minute            // for which a queue has seats after a hint: where none arrives they are of no use
)

// recall lets claims have the permits of the seats.
func (s *seats) recall(until time.Time) {
	s.quiet.Store(&until)
	s.hints.Range(func(_, hints any) bool { tell(hints, invalidation.HandOver{}); return true })
}

func tell(hints any, h invalidation.HandOver) {
	if c, ok := hints.(chan invalidation.HandOver); ok {
		select {
		case c <- h:
		default:
		}
	}
}

// HandedOver tells the node that a push has handed an entry over, to whichever node. It never blocks.
func (n *Node) HandedOver(h invalidation.HandOver) {
	if hints, ours := n.seats.hints.Load(h.Claim); ours && h.Node == n.id() {
		tell(hints, h)
	}
}

// seating keeps seats out while no lane has work and half of the threads are free, until ctx ends. Then it waits until each is
// withdrawn, or what was handed over to it is on its way.
func (n *Node) seating(ctx context.Context) {
	var sitting sync.WaitGroup
	defer sitting.Wait()
	for ctx.Err() == nil {
		for _, v := range n.seatable(time.Now()) {
			if losses := n.losses(); n.board.busy() == 0 && int(n.seats.out.Load()) < min(seatsMax, max(1, n.cfg.Threads/4)) && n.permits.take(1, -n.cfg.Threads/2) == 1 {
				a := n.pass(v.name, 1)
				if n.board.reserve(v.service, a.locks) == 1 {
					n.seats.out.Add(1)
					sitting.Go(func() { n.sit(ctx, &v, a, losses) })
				} else {
					a.ran(a.locks)
					n.unused(1)
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-n.seats.taken:
		case <-time.After(seatsEvery):
		}
	}
}

// seatable lists the queues that are to have seats.
func (n *Node) seatable(now time.Time) (list []visit) {
	if quiet := n.seats.quiet.Load(); !n.claiming() || n.cfg.Threads == 1 || (quiet != nil && now.Before(*quiet)) {
		return nil
	}
	n.board.mu.Lock()
	defer n.board.mu.Unlock()
	for _, s := range n.board.queues {
		if now.Sub(s.heardAt) < seatsHeard && s.queue.TakesSeats() && s.open("", now, n.board.freed) {
			list = append(list, visit{service: s, queue: s.queue, handler: s.handler})
		}
	}
	return list
}

// sit offers a seat and keeps it until it is withdrawn, or what was handed over to it is on its way. Nobody else reads that.
// losses were read before, see reincarnate.
func (n *Node) sit(ctx context.Context, v *visit, a allowance, losses int64) {
	self, hints := invalidation.HandOver{Node: n.id(), Claim: n.claims.Add(1)}, make(chan invalidation.HandOver, 1)
	n.seats.hints.Store(self.Claim, hints)
	defer n.seats.out.Add(-1)
	defer n.seats.hints.Delete(self.Claim)
	var late <-chan time.Time
	h, do, pause, drained := self, "offer", seatsAsk, ctx.Done()
	for !n.tend(v, a, losses, h, do) {
		h, do = self, "withdraw"
		select {
		case told := <-hints:
			h.Entry = told.Entry
		case <-time.After(n.jitter(n.look.every(pause))):
		case <-drained:
			pause, drained, late = 5*time.Millisecond, nil, time.After(n.cfg.Lease)
		case <-late: // it is left to recovery
			n.giveBack(v, a, 1, false)
			return
		}
		if losses == n.losses() && slices.ContainsFunc(n.seatable(time.Now()), func(w visit) bool { return w.queue == v.queue }) {
			do = "keep"
		}
	}
}

// tend looks after a seat, and says that it is no more. Where no hint said so it asks whether it was taken: the hint is lost or
// on its way, or the database crashed and its seats are gone. A queue whose hints get lost has no more seats until one is heard.
func (n *Node) tend(v *visit, a allowance, losses int64, h invalidation.HandOver, do string) bool {
	ctx, stop := context.WithTimeout(n.runs, n.cfg.Beat)
	defer stop()
	var locks []*invalidation.Lock
	var err error
	withdrawn, taken, start := false, true, time.Now()
	if h.Entry == 0 {
		withdrawn, taken, err = v.queue.TendSeat(ctx, h, do)
	}
	if err == nil && taken {
		locks, err = v.queue.Handed(ctx, h)
	}
	if err != nil {
		n.cfg.Log.Warn("look after a seat", "queue", v.name, "error", err)
		if taken, withdrawn = false, do == "offer" && !postgres.Unavailable(err); withdrawn { // it was refused
			n.seats.recall(time.Now().Add(seatsHeard))
		}
	}
	switch {
	case len(locks) > 0:
		n.board.handed(v, locks[0].Lane, h.Entry != 0)
		n.enqueue(n.accept(v, locks, a, losses, start, n.traceClaim(v.name, locks, start)))
		n.stats.claimed(1, time.Since(start))
		n.stats.HandedOver.Add(1)
		select {
		case n.seats.taken <- struct{}{}:
		default:
		}
		n.cfg.Observer.Claimed(v.name, 1, time.Since(start), false)
		return true
	case withdrawn || h.Entry == 0 && taken:
		n.giveBack(v, a, 1, false)
		return true
	}
	return false
}

// handed makes v the visit of a lane in which something was handed over.
func (b *board) handed(v *visit, l invalidation.Lane, hinted bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	v.lane, v.ranked = b.lane(flowKey{v.queue.ID, l}), invalidation.Candidate{Queue: v.queue, Lane: l}
	if v.heardAt = (time.Time{}); hinted {
		v.heardAt = time.Now()
	}
}
