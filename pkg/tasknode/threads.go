package tasknode

import (
	"context"
	"log/slog"
	"time"

	"github.com/penstock/penstock/internal/duty"
)

// thread is one processing thread: it runs one job after another.
func (n *Node) thread() { n.processAll(n.waiting.next, n.waiting.done) }

// spareThread runs urgent jobs while all other threads run jobs: so the first lock of a lane does not wait
// for a run to end, and the node runs one job more than it has threads meanwhile.
func (n *Node) spareThread() { n.processAll(n.waiting.nextSpare, n.waiting.doneSpare) }

// processAll processes jobs until there is none. Where a handler ends the goroutine (runtime.Goexit), another one goes
// on in its place.
func (n *Node) processAll(next func() *job, done func()) {
	var j *job
	defer func() {
		if j != nil {
			done()
			n.processors.Go(func() { n.processAll(next, done) })
		}
	}()
	for j = next(); j != nil; j = next() {
		n.process(j)
		done()
	}
}

const (
	threadsMax = 4096        // to which a node grows by itself
	growEvery  = time.Second // between questions how many threads are needed
)

// growLoop adds processing threads as more are needed, until ctx ends.
func (n *Node) growLoop(ctx context.Context) {
	ticks := time.NewTicker(growEvery)
	defer ticks.Stop()
	var failing duty.Failing
	for {
		err := n.grow(ctx, n.cfg.ThreadsFor())
		failing.Note(ctx, n.cfg.Log, slog.LevelWarn, "grow node", err, "node", n.cfg.Name)
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
	}
}

// grow adds processing threads until there are so many. The node's row says so first: recovery counts
// the runs that a node may have begun since its last heartbeat by the number of its threads.
func (n *Node) grow(ctx context.Context, wanted int) error {
	before := n.Threads()
	more := min(wanted, threadsMax) - before
	if more <= 0 {
		return nil
	}
	n.threads.Add(int64(more))
	statement, end := n.bound(ctx)
	err := n.register(statement)
	end()
	if err != nil {
		n.threads.Add(int64(-more))
		return err
	}
	n.cfg.Log.Info("node grows", "node", n.cfg.Name, "threads", before+more)
	for range more {
		n.processors.Go(n.thread)
	}
	n.waiting.grow(more)
	n.permits.grow(more)
	n.TryAgain()
	return nil
}
