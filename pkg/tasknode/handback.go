package tasknode

import (
	"context"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// handBackLoop hands back locks that wait for too long, once a beat, until ctx ends. It ends before a drain, which
// hands back all that wait.
func (n *Node) handBackLoop(ctx context.Context) {
	ticks := time.NewTicker(n.cfg.Beat)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticks.C:
			n.handBackLate(now)
		}
	}
}

// handBackLate releases the locks at their positions that have waited for a thread for longer than a beat, but keeps
// as many as there are threads. They were claimed ahead of the threads because runs were short; now runs are long, and
// while their permits are in use the node claims nothing of any queue.
func (n *Node) handBackLate(now time.Time) {
	late := n.waiting.late(now.Add(-n.cfg.Beat))
	for _, j := range late {
		n.holdings.noteWait(j.served, now.Sub(j.since))
		n.endLast(j, invalidation.Release(j.lock, j.lock.Entries[0].ID, 0))
	}
	if len(late) > 0 {
		n.cfg.Log.Info("runs take longer than before: locks that wait for a thread are handed back",
			"node", n.cfg.Name, "locks", len(late))
	}
}
