package tasknode

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// scheduler is one scheduling thread: it claims while there is work and permits, and sleeps when there is not.
func (n *Node) scheduler(ctx context.Context) {
	for ctx.Err() == nil {
		if n.claiming() {
			// Lanes that never run dry must not hide those that no poll has met yet.
			if n.poll.due(time.Now(), n.lanes.countAwake()) {
				n.poll.want()
				n.discover(ctx)
			}
			if n.step(ctx) || n.discover(ctx) {
				continue
			}
		}
		n.rest(ctx)
	}
}

func (n *Node) claiming() bool { return !n.draining.Load() && !n.paused.Load() && !n.leaseOver.Load() }

// rest waits for a hint, a permit that comes free, a lane that has rested or the poll, whichever is first.
// The poll keeps everything going without hints.
func (n *Node) rest(ctx context.Context) {
	now := time.Now()
	poll, rested := min(n.jitter(n.poll.every(n.cfg.Poll)), n.poll.wait(now)), n.lanes.rested(now)
	timer := time.NewTimer(min(poll, rested))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-n.wake:
	case <-timer.C:
		if poll <= rested {
			n.poll.want()
		}
	}
}

func (n *Node) jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.75 + 0.5*n.cfg.Random()))
}

// lanesAtOnce bounds the lanes of one claim. Each costs the database a place in its table of locks for a moment.
const lanesAtOnce = 100

// step claims from the lanes that come first. It reports whether to try again at once: false if no lane may be claimed
// from, or if the node has no permit left. After any other refusal, and after a claim, other lanes may be worth one.
func (n *Node) step(ctx context.Context) bool {
	leases := n.lanes.take(n.cfg.Affinity, n.permits.held() < n.Threads(), lanesAtOnce, time.Now())
	if len(leases) == 0 {
		return false
	}
	first := leases[0]
	reserved, refused := n.reserve(first)
	// A lane that has work brings a lock at least.
	claimed := leases[:max(1, min(reserved.locks, len(leases)))]
	for _, l := range leases[len(claimed):] {
		n.lanes.endUnclaimed(l)
	}
	if refused != refusedNot {
		n.lanes.endRefused(first, refused, time.Now(), n.jitter)
		return refused != refusedThreads
	}
	n.claim(ctx, claimed, reserved)
	return true
}

// claim claims from lanes of one queue, in one statement, and ends their leases.
func (n *Node) claim(ctx context.Context, leases []*laneLease, reserved reservation) {
	first := leases[0]
	start, losses := time.Now(), n.losses() // before the id: see reincarnate
	request := invalidation.LanesRequest{
		Node: n.ID(), ClaimID: n.claims.Add(1), Limit: reserved.locks,
		Lanes: make([]invalidation.ClaimLane, len(leases)),
	}
	for i, l := range leases {
		request.Lanes[i] = invalidation.ClaimLane{Lane: l.lane.key.lane, From: l.from, IgnoreRowLocks: l.fromHead}
	}
	statement, end := n.outlive(ctx)
	claimed, err := first.queue.ClaimLanes(statement, request)
	end()
	n.note(ctx, slog.LevelWarn, "claim", first.queue, err)
	if err != nil {
		claimed = n.resolve(ctx, first.queue, request, leases)
	}
	took := time.Since(start)
	var locks []*invalidation.Lock
	limited, refunded := false, false
	for _, c := range claimed {
		locks, limited, refunded = append(locks, c.Locks...), limited || c.Limited, refunded || c.Refunded
		for _, head := range c.Requeued { // no other node knows
			n.lanes.readyAgain(first.queue.ID, head)
		}
	}
	if refunded {
		n.tryLimited()
	}
	n.stats.claimed(len(locks), took)
	n.cfg.Observer.Claimed(first.served.name, len(locks), took, limited)
	if limited {
		reserved.shrink(len(locks)) // other lanes of the queue would meet the same limit
	}
	unused := reserved.part(reserved.locks - len(locks))
	unused.release()
	answer := &claimAnswer{
		node: n, reserved: reserved, start: start, losses: losses,
		traced: n.traceClaim(first.served.name, locks, start),
	}
	for i, l := range leases[:len(claimed)] {
		answer.accept(l, claimed[i].Locks)
	}
	answer.enqueue()
	for i, l := range leases {
		if i >= len(claimed) { // the limit was reached before
			n.lanes.endUnclaimed(l)
			continue
		}
		n.endClaimed(ctx, l, claimEnd{answer: claimed[i], err: err, took: took})
	}
}

// endClaimed ends the lease of a lane that was claimed from. Before, it deletes what it can of the ready rows that the
// claim skipped.
func (n *Node) endClaimed(ctx context.Context, v *laneLease, e claimEnd) {
	if c := &e.answer; e.complete() && c.Skipped > 0 {
		e.swept = n.sweep(ctx, v, c.LowWater)
		if e.fruitless() && v.fruitless {
			c.LowWater = n.passLocked(ctx, v, c.LowWater)
		}
	}
	n.lanes.end(v, e, time.Now(), n.jitter)
}

// sweep deletes ready rows of locked keys among those that a claim scanned, and returns how many.
func (n *Node) sweep(ctx context.Context, v *laneLease, lowWater int64) int {
	statement, end := n.bound(ctx)
	defer end()
	swept, err := v.queue.Sweep(statement, v.lane.key.lane, v.from, lowWater)
	n.note(ctx, slog.LevelWarn, "sweep lanes", v.queue, err)
	return swept
}

// passLocked returns a low-water mark behind the ready rows that other transactions have locked. It is for a claim that
// met nothing else, as an earlier one did.
func (n *Node) passLocked(ctx context.Context, v *laneLease, lowWater int64) int64 {
	ctx, end := n.bound(ctx)
	defer end()
	position, err := v.queue.Unlocked(ctx, v.lane.key.lane, lowWater+1)
	n.note(ctx, slog.LevelWarn, "pass locked rows of lanes", v.queue, err)
	if err == nil && position != math.MaxInt64 {
		return position - 1
	}
	return lowWater
}

// note takes note of the outcome of a step for a queue, see duty.Failing.
func (n *Node) note(ctx context.Context, level slog.Level, step string, q *invalidation.Queue, err error) {
	n.failing.Note(ctx, n.cfg.Log, level, step, step+"\x00"+q.Name, err, "queue", q.Name)
}

// outlive is a context that ends a beat after ctx does, and at the latest after a lease: the answer may never
// come, and a claim can be asked about again. A claim that is cut off may be committed after its node asked
// about it and left; its locks would then count as crashes. So a drain waits for claims, which take
// milliseconds.
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

// resolveStep is the name in the log of what resolve does.
const resolveStep = "find out what a claim brought"

// resolve finds out what of a claim that ended in an error was committed, lane by lane. Whatever the error,
// that may be some of it: a claim has parts, and the entries of groups are read after its commit. It does not
// give up while the node lives; a node that stops, or that the database refuses, leaves the locks to recovery
// after a lease, which ends them as its heartbeats do not name them.
func (n *Node) resolve(
	ctx context.Context, q *invalidation.Queue, r invalidation.LanesRequest, leases []*laneLease,
) []invalidation.Claimed {
	claimed := make([]invalidation.Claimed, len(leases))
	start := time.Now()
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		ask, end := n.bound(context.WithoutCancel(ctx))
		found, err := q.Reclaim(ask, r.Node, r.ClaimID)
		end()
		if err == nil {
			n.note(ctx, slog.LevelError, resolveStep, q, nil)
			for _, l := range found.Locks {
				i := slices.IndexFunc(leases, func(v *laneLease) bool { return v.lane.key.lane == l.Lane })
				claimed[max(0, i)].Locks = append(claimed[max(0, i)].Locks, l)
			}
			claimed[0].Refunded, claimed[0].Requeued = found.Refunded, found.Requeued
			return claimed
		}
		if errors.Is(err, invalidation.ErrQueueNotFound) || postgres.Code(err) == postgres.UndefinedTable {
			return claimed // the queue was dropped, and its locks with it
		}
		refused := !postgres.Unavailable(err)
		if refused {
			n.note(context.WithoutCancel(ctx), slog.LevelError, resolveStep, q, err)
		}
		if (refused || ctx.Err() != nil) && time.Since(start) > n.cfg.Lease {
			return claimed
		}
		time.Sleep(n.jitter(pause))
	}
}
