package tasknode

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// jobs knows every job of the node, from the claim until its last ending is recorded.
type jobs struct {
	mu sync.Mutex
	// by their locks, not by the tokens alone: a server that lost its last commits draws tokens again, for other keys
	byLock map[invalidation.LockRef]*job
	byKey  map[jobKey]*job // the job that may run entries of a lock key
}

// jobKey is a lock key of a queue.
type jobKey struct {
	queue int32
	key   string
}

func (j *job) key() jobKey { return jobKey{j.queue.ID, j.lock.Key} }

func (j *job) ref() invalidation.LockRef {
	return invalidation.LockRef{QueueID: j.queue.ID, Key: j.lock.Key, Token: j.lock.Token}
}

func newJobs() *jobs { return &jobs{byLock: map[invalidation.LockRef]*job{}, byKey: map[jobKey]*job{}} }

// errLockFreed is the cause where the lock of a run was freed: its endings are refused.
var errLockFreed = fmt.Errorf("%w, or an operator freed the lock", invalidation.ErrLeaseLost)

// add takes a job in. A key has one lock record: if another job of the key has not ended, the lock with the lower token
// was freed, and that job is ended; lost is a run that this ends. While a run goes on, no other job of its key may
// begin: beside is true.
func (r *jobs) add(j *job) (beside bool, lost *job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.byLock[j.ref()] = j
	other := r.byKey[j.key()]
	switch {
	case other == nil || other.ended.Load():
	case other.lock.Token > j.lock.Token: // the answer to an older claim
		j.lose()
		return true, nil
	case other.begun():
		if other.lose() {
			lost = other
		}
		return true, lost
	default:
		other.lose()
	}
	r.byKey[j.key()] = j
	return false, nil
}

func (r *jobs) remove(ended []*job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, j := range ended {
		delete(r.byLock, j.ref())
		if r.byKey[j.key()] == j {
			delete(r.byKey, j.key())
		}
	}
}

// held returns the locks of the jobs that have not ended, those that wait for a thread among them.
func (r *jobs) held() (locks []invalidation.LockRef) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for lock, j := range r.byLock {
		if !j.ended.Load() {
			locks = append(locks, lock)
		}
	}
	return locks
}

// loseOthers ends those of the jobs with some locks whose token is not among held, and returns how many.
func (r *jobs) loseOthers(locks []invalidation.LockRef, held []invalidation.Token) (lost int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := make(map[invalidation.Token]bool, len(held))
	for _, token := range held {
		kept[token] = true
	}
	for _, l := range locks {
		if j := r.byLock[l]; j != nil && !kept[l.Token] && !j.ended.Load() {
			j.lose()
			lost++
		}
	}
	return lost
}

// beat lists the locks of all jobs, and those of jobs that have begun to run with the entries.
func (r *jobs) beat() (b invalidation.Beat) {
	r.mu.Lock()
	defer r.mu.Unlock()
	b.Tokens = make([]invalidation.Token, 0, len(r.byLock))
	for lock, j := range r.byLock {
		b.Tokens = append(b.Tokens, lock.Token)
		if j.begun() {
			b.Running, b.RunningEntries = append(b.Running, lock.Token), append(b.RunningEntries, j.latest[0])
		}
	}
	return b
}

// begin notes the run of entries that is about to begin, and the functions that end it, see job. Entries whose cancel
// was requested before are left out: it returns the others, and the endings of these. From now on the job counts as
// begun, though the handler is not called if the lease was lost just now.
func (r *jobs) begin(j *job, runs []*invalidation.Run, cancel, end context.CancelCauseFunc) (
	begun []*invalidation.Run, cancelled []invalidation.Ending,
) {
	r.mu.Lock()
	defer r.mu.Unlock()
	begun = slices.DeleteFunc(runs, func(one *invalidation.Run) bool {
		reason, asked := j.cancels[one.Entry.ID]
		if asked {
			cancelled = append(cancelled, invalidation.Cancel(j.lock, one.Entry.ID, reason))
		}
		return asked
	})
	if len(begun) == 0 {
		return nil, cancelled
	}
	j.cancel, j.end, j.latest = cancel, end, j.latest[:0]
	for _, one := range begun {
		j.latest = append(j.latest, one.Entry.ID)
	}
	if begun[0].Entry.Cost == 0 {
		j.timed = time.Now()
	}
	return begun, cancelled
}

// cancelEntry keeps an entry from starting, or ends its run once all entries of the run are to be cancelled: else the
// run goes on for the others.
func (r *jobs) cancelEntry(c invalidation.CancelRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, j := range r.byLock {
		if j.queue.ID != c.QueueID || !j.covers(c.Entry) {
			continue
		}
		if j.cancels == nil {
			j.cancels = map[invalidation.EntryID]string{}
		}
		j.cancels[c.Entry] = c.Reason
		if slices.Contains(j.latest, c.Entry) && j.allCancelled() {
			j.cancel(fmt.Errorf("%w: %s", invalidation.ErrCancelled, c.Reason))
		}
	}
}

// through counts the runs that go on when the lease is lost.
func (r *jobs) through() (runs int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, j := range r.byLock {
		if j.begun() && j.runsThrough() {
			runs++
		}
	}
	return runs
}

// endAll ends every run, but those of queues that run through if these are spared.
func (r *jobs) endAll(cause error, spare bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, j := range r.byLock {
		if !j.begun() || spare && j.runsThrough() {
			continue
		}
		j.end(cause)
	}
}
