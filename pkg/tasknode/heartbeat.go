package tasknode

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/pkg/invalidation"
)

// heartbeat renews the node's lease on connections of its own, and passes on the orders that come back. It goes
// on while the node drains, until ctx ends: a node with running entries must keep its lease.
func (n *Node) heartbeat(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var start time.Time
	missed := false
	var failing duty.Failing
	log := n.cfg.Log.With("node", n.cfg.Name)
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.beatSoon:
			timer.Reset(max(0, beatGapMin-time.Since(start)))
			continue
		case <-timer.C:
		}
		start = time.Now()
		err := n.beat(ctx)
		failing.Note(ctx, log, slog.LevelWarn, "heartbeat", err,
			duty.LeaseArgs(n.lease.renewed(), n.cfg.Lease)...)
		if err != nil && ctx.Err() == nil {
			n.dropIdleBeats()
			// Missed beats are tried again soon: each one counts against the lease.
			timer.Reset(n.jitter(n.cfg.Beat / 4))
			missed = true
			continue
		}
		timer.Reset(max(0, n.nextBeat(missed)-time.Since(start)))
		missed = false
	}
}

// nextBeat is the time from one heartbeat to the next. After missed ones it is random, once: the nodes of a database
// that was away are heard again at nearly the same time, and would go on in step.
func (n *Node) nextBeat(missed bool) time.Duration {
	if missed {
		return time.Duration(float64(n.cfg.Beat) * n.cfg.Random())
	}
	return n.cfg.Beat
}

// beatGapMin is how long after the begin of a heartbeat a hint may ask for the next one: cancels that come close
// together are read with one.
const beatGapMin = 50 * time.Millisecond

// Cancelled hints that an entry which a node runs is to be cancelled. If it is this node the next heartbeat,
// which brings the request, goes out at once. It never blocks, and nothing depends on it.
func (n *Node) Cancelled(node invalidation.NodeID) {
	if node != n.ID() {
		return
	}
	select {
	case n.beatSoon <- struct{}{}:
	default:
	}
}

// beat renews once. The lease is counted from before the request was sent: the database got it later than that.
func (n *Node) beat(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, n.cfg.Beat)
	defer cancel()
	start := time.Now()
	n.lapse() // after a stop of this process the beat may come before the keeper, and would renew what had lapsed
	n.jobs.extend(start, n.holdings.usedIn, n.cfg.Ranker.Extend)
	b := n.jobs.beat()
	b.Load, b.Again = n.load(), n.beatLost
	n.beatLost = true
	orders, err := invalidation.Renew(bounded, n.beats, n.ID(), b)
	if errors.Is(err, invalidation.ErrNodeGone) {
		return n.reincarnate(bounded, start)
	}
	if err != nil {
		return err
	}
	n.lease.renew(start)
	if err := n.endLost(bounded, orders.Lapsed); err != nil {
		return err
	}
	n.beatLost = false
	n.obey(ctx, orders)
	return nil
}

// dropIdleBeats makes the next heartbeat open a connection: what froze one connection may have frozen those that
// lie idle as well.
func (n *Node) dropIdleBeats() {
	if pool, ok := n.beats.(interface{ Reset() }); ok {
		pool.Reset()
	}
}

// reincarnate registers the node anew after its row was removed. What it held is lost and ends by itself: every
// run is told so, and every ending will be refused.
func (n *Node) reincarnate(ctx context.Context, start time.Time) error {
	n.cfg.Log.Error("node was given up by the leader, starting as another incarnation", "node", n.cfg.Name)
	n.incarnation.Store(newIncarnation()) // first: a claim reads the losses and then the id
	n.loseLease(false)                    // its tokens are dead: what would run through could not be recorded
	if err := n.register(ctx); err != nil {
		return err
	}
	n.lease.renew(start)
	n.regainLease()
	return nil
}

func (n *Node) obey(ctx context.Context, o invalidation.Orders) {
	if o.Draining && !n.draining.Swap(true) {
		n.cfg.Log.Info("drain ordered", "node", n.cfg.Name, "reason", o.Reason)
		close(n.drainOrdered)
	}
	if o.Paused != n.paused.Swap(o.Paused) {
		n.cfg.Log.Info("pause of this node", "node", n.cfg.Name, "paused", o.Paused)
		n.signal()
	}
	for _, c := range o.Cancel {
		n.jobs.cancelEntry(c)
	}
	if o.RegistryVersion != n.registry {
		// What is left of the heartbeat's time may not do for thousands of queues: they would never be read.
		ctx, cancel := context.WithTimeout(ctx, n.cfg.Lease/4)
		defer cancel()
		err := n.readQueues(ctx)
		n.reading.Note(ctx, n.cfg.Log, slog.LevelWarn, "read queues", err)
		if err != nil {
			return
		}
		n.registry = o.RegistryVersion
		n.tryLimited() // a lane that waits for a rate or a throttle may have to wait no longer
	}
}
