package tasknode

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// lease knows when it was renewed last, on the monotonic clock of this process.
type lease struct {
	mu sync.Mutex
	at time.Time

	lockReads int // see endLost; of the heartbeat alone
}

func (l *lease) renew(start time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if start.After(l.at) {
		l.at = start
	}
}

func (l *lease) renewed() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.at
}

// leaseKeeper watches the lease. At three quarters of it without a renewal, runs end (see lapse): the leader waits
// for the whole of it, so that nothing of ours touches the world when others begin.
func (n *Node) leaseKeeper(ctx context.Context) {
	for {
		left := n.lapse()
		if left <= 0 {
			left = n.cfg.Beat / 4
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(left):
		}
	}
}

// lapse ends the runs, but those of queues that run through, if the lease has not been renewed for
// leaseBound. It returns how much of that is left.
func (n *Node) lapse() (left time.Duration) {
	left = n.leaseBound() - time.Since(n.lease.renewed())
	if left <= 0 && n.leaseOver.CompareAndSwap(false, true) {
		n.cfg.Log.Error("lease lost: runs end or run through, nothing is claimed until it is renewed",
			"node", n.cfg.Name, "running_through", n.jobs.through())
		n.loseLease(true)
	}
	return left
}

// leaseBound is for how long the node acts on what the database told it last.
func (n *Node) leaseBound() time.Duration { return invalidation.ActFor(n.cfg.Lease) }

// loseLease ends runs, and keeps from running what was claimed before: others may have it by the time when the lease is
// renewed. Where runThrough is set, runs that have begun go on if their queues say so: while no statement reaches the
// database no other node can be given their locks, and if only this node is cut off their tokens keep it from
// recording them, and endLost ends them once it is heard again.
func (n *Node) loseLease(runThrough bool) {
	n.leaseOver.Store(true)
	n.stats.LeasesLost.Add(1) // before the runs are ended: one that begins meanwhile sees it
	n.jobs.endAll(invalidation.ErrLeaseLost, runThrough)
}

func (n *Node) losses() int64 { return n.stats.LeasesLost.Load() }

// leaseLost says that the node lost its lease since it claimed this lock, or just before, whether or not it
// has it again, or that the lock was freed.
func (n *Node) leaseLost(j *job) bool {
	return n.leaseOver.Load() || n.losses() != j.losses || j.lockLost.Load()
}

// endLost ends the runs whose locks were freed while the lease was over, keeps from running what still waits under
// such locks, and lets the node claim again. It is called after each renewal, and reads the locks after the first two
// behind a lapse: a recovery that found the lease over before the first renewal may commit after the first reading.
// lapsed says that the lease was over by the database's clock: the monotonic clock, by which lapse goes, stands still
// while a machine is suspended.
func (n *Node) endLost(ctx context.Context, lapsed bool) error {
	if lapsed || n.leaseOver.Load() {
		n.lease.lockReads = 2
	}
	if n.lease.lockReads == 0 {
		return nil
	}
	if locks := n.jobs.held(); len(locks) > 0 {
		held, err := invalidation.StillHeld(ctx, n.beats, locks)
		if err != nil {
			return fmt.Errorf("read which locks were freed: %w", err)
		}
		if lost := n.jobs.loseOthers(locks, held); lost > 0 {
			n.cfg.Log.Warn("locks were freed while the lease was over, their runs end", "node", n.cfg.Name,
				"freed", lost, "held", len(held))
		}
	}
	n.lease.lockReads--
	n.regainLease()
	return nil
}

func (n *Node) regainLease() {
	if !n.leaseOver.Swap(false) {
		return
	}
	n.cfg.Log.Info("lease renewed", "node", n.cfg.Name)
	n.signal()
}
