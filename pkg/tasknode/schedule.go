package tasknode

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// scheduler is one scheduling thread: it claims while there is work and permits, and sleeps when there is not.
func (n *Node) scheduler(ctx context.Context) {
	for ctx.Err() == nil {
		if n.claiming() {
			// Lanes that never run dry must not hide those that nobody has looked at yet.
			if n.look.due(time.Now(), n.board.busy()) {
				n.look.want()
				n.discover(ctx)
			}
			if n.step(ctx) {
				continue
			}
			if n.discover(ctx) {
				continue
			}
		}
		n.rest(ctx)
	}
}

// rest waits for a hint, a permit that comes free, a lane that has rested or the poll, whichever is first. The poll keeps
// everything going without hints.
func (n *Node) rest(ctx context.Context) {
	now := time.Now()
	poll, rested := min(n.jitter(n.look.every(n.cfg.Poll)), n.look.wait(now)), n.board.rested(now)
	timer := time.NewTimer(min(poll, rested))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-n.wake:
	case <-timer.C:
		if poll <= rested {
			n.look.want()
		}
	}
}

func (n *Node) jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.75 + 0.5*n.random()))
}

func (n *Node) random() float64 {
	if n.cfg.Random != nil {
		return n.cfg.Random()
	}
	return rand.Float64()
}

// lanesAtOnce bounds the lanes of one claim. Each costs the database a place in its table of locks for a moment.
const lanesAtOnce = 100

// step claims from the lanes that come first. It says whether to go on at once: not if there is none, and not without
// permits. What these lanes did not bring others may.
func (n *Node) step(ctx context.Context) bool {
	visits := n.board.take(n.cfg.Ranker, n.cfg.Affinity, n.permits.held() < n.cfg.Threads, lanesAtOnce, time.Now())
	if len(visits) == 0 {
		return false
	}
	first := visits[0]
	a := n.allow(first)
	// A lane that has work brings a lock at least.
	for _, v := range visits[max(1, min(a.locks, len(visits))):] {
		n.board.leave(v, true, time.Time{})
	}
	if a.crowded {
		// It stays first in line for what comes free: no other lane may be let in before it.
		n.board.leave(first, true, time.Time{})
		return false
	}
	if a.locks == 0 {
		n.board.refuse(first, time.Now().Add(n.jitter(200*time.Millisecond)))
		return true
	}
	n.claim(ctx, visits[:min(a.locks, len(visits))], a)
	return true
}

// claim claims from the lanes of visits, in one go, and ends the visits.
func (n *Node) claim(ctx context.Context, visits []*visit, a allowance) {
	first := visits[0]
	start, losses := time.Now(), n.losses() // before the id: see reincarnate
	request := invalidation.ClaimRequest{
		Node: n.id(), ClaimID: n.claims.Add(1), Lane: first.lane.key.lane, From: first.from, Limit: a.locks, IgnoreRowLocks: first.fromHead,
	}
	along := make([]invalidation.LaneHead, 0, len(visits)-1)
	for _, v := range visits[1:] {
		along = append(along, invalidation.LaneHead{Lane: v.lane.key.lane, Position: v.from})
	}
	claim, end := n.outlive(ctx)
	claimed, err := first.queue.ClaimLanes(claim, request, along)
	end()
	if err != nil {
		claimed = n.resolve(ctx, first.queue, request, visits, err)
	}
	took := time.Since(start)
	var locks []*invalidation.Lock
	limited := false
	for _, c := range claimed {
		locks, limited = append(locks, c.Locks...), limited || c.Limited
	}
	n.stats.claimed(len(locks), took)
	n.cfg.Observer.Claimed(first.name, len(locks), took, limited)
	n.giveBack(first, a, a.locks-len(locks), limited)
	t := n.traceClaim(first.name, locks, start)
	var rest []*assignment
	for i, c := range claimed {
		rest = append(rest, n.accept(visits[i], c.Locks, a, losses, start, t)...)
	}
	n.enqueue(rest)
	for i, v := range visits {
		if i >= len(claimed) { // the limit was reached before
			n.board.leave(v, true, time.Time{})
			continue
		}
		n.after(ctx, v, claimed[i], err, took)
	}
}

// allowance is what a claim may bring: so many locks, each with a permit, a place under the queue's limit on this
// node, and the leave of every gate.
type allowance struct {
	locks   int
	grants  []grant
	crowded bool // there was no permit
}

// grant is the leave of one gate, to be given back as runs end.
type grant struct {
	allowed int
	release func(n int)
}

func (n *Node) allow(v *visit) allowance {
	reserved := n.board.reserve(v.service, n.cfg.ClaimMax)
	spare := n.board.spare(v.service, n.cfg.Threads)
	taken := n.permits.take(reserved, spare)
	if taken == 0 && n.board.fits(v, reserved, n.cfg.Threads) {
		taken = n.permits.take(min(1, reserved), spare+n.cfg.Threads)
	}
	switch {
	case reserved == 0:
		n.cfg.Observer.Refused(v.name, "queue_limit")
	case taken == 0:
		n.cfg.Observer.Refused(v.name, "threads")
	}
	a := n.pass(v.name, taken)
	a.crowded = reserved > 0 && taken == 0
	n.board.unhold(v.service, reserved-a.locks)
	n.unused(taken - a.locks)
	return a
}

// pass takes the leave of all gates for up to want entries of a queue.
func (n *Node) pass(queue string, want int) allowance {
	a := allowance{locks: want}
	for _, g := range n.cfg.Gates {
		if a.locks == 0 {
			break
		}
		k, release := g.Take(queue, a.locks, a.locks)
		a.grants = append(a.grants, grant{k, release})
		a.locks = min(a.locks, k)
	}
	for _, g := range a.grants {
		g.giveBack(g.allowed - a.locks)
	}
	return a
}

// giveBack returns what k claims took that brought nothing. That is news to other lanes, but not if a limit was in the way.
func (n *Node) giveBack(v *visit, a allowance, k int, limited bool) {
	a.ran(k)
	n.board.unhold(v.service, k)
	if limited {
		n.unused(k)
		return
	}
	n.permits.put(k)
}

// unused returns permits that were of no use since something else refused. Lanes that rest since they were refused stay
// at rest: two of them would wake each other for ever.
func (n *Node) unused(k int) {
	if k > 0 {
		n.permits.back(k)
		n.signal()
	}
}

// ran returns the leave of the gates for k runs.
func (a allowance) ran(k int) {
	for _, g := range a.grants {
		g.giveBack(k)
	}
}

func (g grant) giveBack(n int) {
	if n > 0 {
		g.release(n)
	}
}

// after updates what the board knows about a lane from how the claim found it.
func (n *Node) after(ctx context.Context, v *visit, c invalidation.Claimed, err error, took time.Duration) {
	switch {
	case err != nil:
		n.board.leave(v, true, time.Now().Add(n.jitter(200*time.Millisecond)))
		return
	case c.Contended:
		// Somebody else is in the lane; they leave it within a few milliseconds, but others may come.
		n.board.leave(v, true, time.Now().Add(n.jitter(n.board.met(v))))
		return
	case c.Limited:
		// A bucket fills at a known time; a lock of another node ends at an unknown one.
		wait := n.jitter(max(50*time.Millisecond, min(c.Wait, time.Minute)))
		n.board.refuse(v, time.Now().Add(wait))
		if c.QueueWide { // the wait may be that of the flow alone
			n.board.refuseQueue(v, time.Now().Add(min(wait, time.Second)))
		}
		return
	}
	swept := 0
	if c.Skipped > 0 {
		sweep, end := n.bound(ctx)
		var err error
		swept, err = v.queue.Sweep(sweep, v.lane.key.lane, v.from, c.LowWater)
		end()
		if err != nil && ctx.Err() == nil {
			n.cfg.Log.Warn("sweep lane", "queue", v.queue.Name, "flow", v.lane.key.lane.Flow, "error", err)
		}
	}
	n.board.advance(v, c, swept < c.Skipped, took)
	work, again := n.board.more(v, c), time.Time{}
	if !work {
		if pause := n.board.goBack(v); pause > 0 {
			work, again = true, time.Now().Add(n.jitter(pause))
		}
	}
	n.board.leave(v, work, again)
}

// outlive is a context that ends a beat after ctx does, and at the latest after a lease: the answer may never come, and a
// claim can be asked about again. A claim that is cut off may be committed after its node asked about it and left; its locks
// would then count as crashes. So a drain waits for claims, which take milliseconds.
func (n *Node) outlive(ctx context.Context) (context.Context, func()) {
	late, cancel := n.bound(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-late.Done():
		case <-time.After(n.cfg.Beat):
			cancel()
		}
	})
	return late, func() { stop(); cancel() }
}

// bound gives statements a lease: on a connection that froze without an error they would wait for TCP to give up, which
// takes a quarter of an hour. Every statement of the node may be repeated.
func (n *Node) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, n.cfg.Lease)
}

// resolve finds out what of a claim that ended in an error was committed, lane by lane. Whatever the error, that may be some
// of it: a claim has parts, and the entries of groups are read after its commit. It does not give up while the node lives;
// a node that stops, or that the database refuses, leaves the locks to recovery after a lease, which ends them as its
// heartbeats do not name them.
func (n *Node) resolve(ctx context.Context, q *invalidation.Queue, r invalidation.ClaimRequest, visits []*visit, err error) []invalidation.Claimed {
	if ctx.Err() == nil {
		n.cfg.Log.Warn("claim", "queue", q.Name, "claim", r.ClaimID, "error", err)
	}
	claimed := make([]invalidation.Claimed, len(visits))
	start := time.Now()
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		ask, end := n.bound(context.WithoutCancel(ctx))
		locks, err := q.Reclaim(ask, r.Node, r.ClaimID)
		end()
		if err == nil {
			for _, l := range locks {
				i := slices.IndexFunc(visits, func(v *visit) bool { return v.lane.key.lane == l.Lane })
				claimed[max(0, i)].Locks = append(claimed[max(0, i)].Locks, l)
			}
			return claimed
		}
		refused := !postgres.Unavailable(err)
		if refused {
			n.cfg.Log.Error("find out what a claim brought", "queue", q.Name, "claim", r.ClaimID, "since", time.Since(start), "error", err)
		}
		if (refused || ctx.Err() != nil) && time.Since(start) > n.cfg.Lease {
			return claimed
		}
		time.Sleep(n.jitter(pause))
	}
}

// discover asks which lanes have work, if that was not asked just now. It says whether any has.
func (n *Node) discover(ctx context.Context) bool {
	if !n.look.start(time.Now()) {
		return false
	}
	start := time.Now()
	ctx, end := n.bound(ctx)
	defer end()
	found, err := invalidation.Lanes(ctx, n.db, n.board.served(), lanesMax)
	for queue, heads := range found {
		n.board.found(queue, heads)
	}
	if err == nil {
		err = n.lookFurther(ctx, found)
	}
	n.look.end(time.Now(), time.Since(start), len(n.beyond) > 0)
	if err != nil && ctx.Err() == nil {
		n.cfg.Log.Warn("look for work", "error", err)
	}
	return len(found) > 0
}

// lanesMax bounds how many lanes of a queue one look lists.
const lanesMax = 1000

// lookFurther lists lanes of the queues that have more than found shows. Each look goes on where the one before it
// ended, so that all lanes are met in turn, however many there are.
func (n *Node) lookFurther(ctx context.Context, found map[int32][]invalidation.LaneHead) error {
	after := map[int32]invalidation.Lane{}
	for queue, heads := range found {
		if len(heads) == lanesMax {
			after[queue] = heads[lanesMax-1].Lane
			if last, begun := n.beyond[queue]; begun {
				after[queue] = last
			}
		}
	}
	clear(n.beyond)
	if len(after) == 0 {
		return nil
	}
	more, err := invalidation.LanesAfter(ctx, n.db, after, lanesMax)
	if err != nil {
		return err
	}
	for queue, heads := range more {
		n.board.found(queue, heads)
		if len(heads) == lanesMax {
			n.beyond[queue] = heads[lanesMax-1].Lane
		}
	}
	return nil
}
