package tasknode

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// job is a lock on its way through the node: claimed, waiting for a thread, running, settled.
type job struct {
	lock     *invalidation.Lock
	queue    *invalidation.Queue // as it was when the lock was claimed, as is the handler
	handler  invalidation.Handler
	served   *servedQueue
	lane     *lane
	ranked   invalidation.Candidate // the lane as it was ranked
	reserved reservation            // of this lock
	losses   int64                  // of the node's lease, before the claim
	traced   *traced                // nil: it is not
	exited   bool                   // its handler ended the goroutine of the thread
	freed    atomic.Bool            // its lock was freed: it begins no run
	ended    atomic.Bool            // it runs nothing any more: the settler has its last ending

	// guarded by jobs
	charged float64   // what the ranker was told that its entries cost which it has not settled
	used    float64   // what those of them cost that have run
	timed   time.Time // since when a run lasts whose cost is its time; zero while there is none
	cancel  context.CancelCauseFunc
	cancels map[invalidation.EntryID]string // entries to be cancelled, and the reasons
	now     []invalidation.EntryID          // the entries of the run that goes on, several of a batch
	begun   invalidation.EntryID            // whose run was prepared last, see markBegun; 0 while none was
}

func (j *job) covers(id invalidation.EntryID) bool {
	return slices.ContainsFunc(j.lock.Entries, func(e invalidation.Entry) bool { return e.ID == id })
}

// allCancelled says that the cancellation of each of the entries was asked for.
func (j *job) allCancelled(entries []invalidation.EntryID) bool {
	return !slices.ContainsFunc(entries, func(id invalidation.EntryID) bool {
		_, asked := j.cancels[id]
		return !asked
	})
}

// lose ends a job whose lock was freed, and says whether this is news; called with jobs' mu held.
func (j *job) lose() bool {
	before := j.freed.Swap(true)
	if j.cancel != nil {
		j.cancel(errFreed)
	}
	return !before
}

// runsThrough says that a run which has begun goes on when the node loses its lease.
func (j *job) runsThrough() bool { return j.queue.Config.Lapse == invalidation.LapseRunThrough }

// claimAnswer is what one claim brought, on its way into the line of waiting jobs.
type claimAnswer struct {
	node     *Node
	reserved reservation
	start    time.Time // of the claim
	losses   int64     // of the node's lease, before the claim
	traced   *traced
	others   []*job
}

// accept takes the claimed locks of a lane in. If the node holds no others of the lane, the first is urgent.
//
// Locks whose claim began three quarters of a lease ago are handed back: while the answer was on its way no
// heartbeat listed them, and the leader may take a lock that is older than a lease for one that its node does
// not know.
func (a *claimAnswer) accept(l *laneLease, locks []*invalidation.Lock) {
	if len(locks) == 0 {
		return
	}
	n := a.node
	late := time.Since(a.start) >= n.leaseBound()
	if late {
		n.cfg.Log.Warn("claim answered too late, its locks are handed back", "queue", l.name, "locks", len(locks),
			"took", time.Since(a.start))
	}
	seconds, total := n.holdings.runTime(l.servedQueue).Seconds(), 0.0
	for _, lock := range locks {
		total += cost(atOnce(l.handler, lock), seconds)
	}
	n.cfg.Ranker.Charge(l.ranked, total)
	urgent := n.holdings.hold(l.lane.key, len(locks))
	for _, lock := range locks {
		j := &job{
			lock: lock, queue: l.queue, handler: l.handler, served: l.servedQueue, lane: l.lane, ranked: l.ranked,
			charged: cost(atOnce(l.handler, lock), seconds), reserved: a.reserved.part(1), losses: a.losses,
			traced: a.traced.another(),
		}
		beside, lost := n.jobs.add(j)
		if lost != nil {
			n.cfg.Log.Warn("a run is ended: its lock was freed, and its key was claimed again", "queue", l.name,
				"key", lost.lock.Key, "token", lost.lock.Token)
		}
		switch {
		case len(lock.Entries) == 0:
			// The key's entries went between its ready row and the claim. The ending looks for others once more.
			n.endLast(j, last(invalidation.Done(lock, 0, nil, 0)))
		case late:
			n.endLast(j, last(invalidation.Release(lock, lock.Entries[0].ID, 0)))
		case beside:
			n.endLast(j, last(invalidation.Release(lock, lock.Entries[0].ID, n.jitter(n.cfg.Beat/4))))
		case urgent:
			n.waiting.add(true, j)
			urgent = false
		default:
			a.others = append(a.others, j)
		}
	}
}

// enqueue puts the jobs that are not urgent into the line, by position whatever the lane: recovery counts on
// that order when it tells which runs a dead node had begun after its last heartbeat.
func (a *claimAnswer) enqueue() {
	slices.SortStableFunc(a.others, func(x, y *job) int { return x.lock.Compare(y.lock) })
	a.node.waiting.add(false, a.others...)
}

func last(e invalidation.Ending) invalidation.Ending {
	e.Last = true
	return e
}
