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
	servedLane
	lock     *invalidation.Lock
	reserved reservation // of this lock
	losses   int64       // of the node's lease, before the claim
	since    time.Time   // when the answer to the claim had come, which may have waited in the database for long
	traced   *traced     // nil: it is not
	lockLost atomic.Bool // its lock was freed: it begins no run
	ended    atomic.Bool // it runs nothing any more: the settler has its last ending
	// a try to record endings of it ended with an error, and may have recorded them: its lock was not found since. Of
	// the settling thread that has them
	unanswered bool

	// guarded by jobs
	charged float64   // what the ranker was told that its entries cost which it has not settled
	used    float64   // what those of them cost that have run
	timed   time.Time // since when a run lasts whose cost is its use; zero while there is none
	// the entries of the run that began last, oldest first, and what ends it: where they are cancelled, and otherwise,
	// with all that goes on after a cancel; nil while none has begun
	latest  []invalidation.EntryID
	cancel  context.CancelCauseFunc
	end     context.CancelCauseFunc
	cancels map[invalidation.EntryID]string // entries to be cancelled, and the reasons
}

// perRun is how many entries of the lock a run has: all of them where the handler takes batches, else one. They run one
// by one as well where one of them is a suspect, since a death of the node would blame the others as well, and where a
// failure blocks the key, since none may run beside the one that fails.
func (j *job) perRun() int {
	_, batches := j.handler.(invalidation.BatchHandler)
	if batches && j.queue.Config.OnFailure != invalidation.OnFailureBlockKey &&
		!slices.ContainsFunc(j.lock.Entries, func(e invalidation.Entry) bool { return suspect(j.queue, &e) }) {
		return len(j.lock.Entries)
	}
	return 1
}

// begun says that a run of the job has begun, whether or not it goes on. If the node dies, recovery counts a crash for
// the first entry of the latest one.
func (j *job) begun() bool { return len(j.latest) > 0 }

func (j *job) covers(id invalidation.EntryID) bool {
	for i := range j.lock.Entries { // not by value: a handler that finishes an entry by itself writes to it meanwhile
		if j.lock.Entries[i].ID == id {
			return true
		}
	}
	return false
}

// allCancelled says that the cancellation of each entry of the latest run was asked for.
func (j *job) allCancelled() bool {
	return !slices.ContainsFunc(j.latest, func(id invalidation.EntryID) bool {
		_, asked := j.cancels[id]
		return !asked
	})
}

// lose ends a job whose lock was freed, and says whether this is news; called with jobs' mu held.
func (j *job) lose() bool {
	before := j.lockLost.Swap(true)
	if j.begun() {
		j.end(errLockFreed)
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
		n.cfg.Log.Warn("claim answered too late, its locks are handed back", "queue", l.served.name,
			"locks", len(locks), "took", time.Since(a.start))
	}
	jobs, expected := a.jobs(l, locks)
	n.cfg.Ranker.Charge(l.ranked, expected)
	urgent := n.holdings.hold(l.lane.key, len(locks))
	for _, j := range jobs {
		beside, lost := n.jobs.add(j)
		if lost != nil {
			n.cfg.Log.Warn("a run is ended: its lock was freed, and its key was claimed again", "queue", l.served.name,
				"key", lost.lock.Key, "token", lost.lock.Token)
		}
		switch lock := j.lock; {
		case late:
			n.endLast(j, invalidation.Release(lock, lock.Entries[0].ID, 0))
		case beside:
			n.endLast(j, invalidation.Release(lock, lock.Entries[0].ID, n.jitter(n.cfg.Beat/4)))
		case urgent:
			n.waiting.add(true, j)
			urgent = false
		default:
			a.others = append(a.others, j)
		}
	}
}

// jobs makes the jobs of locks of a lane, and says what their first runs are expected to cost.
func (a *claimAnswer) jobs(l *laneLease, locks []*invalidation.Lock) (jobs []*job, expected float64) {
	use, _ := a.node.holdings.expected(l.served)
	now := time.Now()
	jobs = make([]*job, len(locks))
	for i, lock := range locks {
		j := &job{
			servedLane: l.servedLane, lock: lock, reserved: a.reserved.part(1), losses: a.losses, since: now,
			traced: a.traced.another(),
		}
		j.charged = estimate(lock.Entries[:j.perRun()], use)
		expected += j.charged
		jobs[i] = j
	}
	return jobs, expected
}

// enqueue puts the jobs that are not urgent into the line, by position whatever the lane: recovery counts on
// that order when it tells which runs a dead node had begun after its last heartbeat.
func (a *claimAnswer) enqueue() {
	slices.SortStableFunc(a.others, func(x, y *job) int { return x.lock.Compare(y.lock) })
	a.node.waiting.add(false, a.others...)
}
