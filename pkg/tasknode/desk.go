package tasknode

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// desk knows every lock that the node holds, from the claim until its last ending is recorded.
type desk struct {
	mu   sync.Mutex
	jobs map[invalidation.Token]*assignment
}

func newDesk() *desk { return &desk{jobs: map[invalidation.Token]*assignment{}} }

func (d *desk) add(job *assignment) {
	d.mu.Lock()
	d.jobs[job.lock.Token] = job
	d.mu.Unlock()
}

func (d *desk) remove(tokens ...invalidation.Token) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range tokens {
		delete(d.jobs, t)
	}
}

func (d *desk) tokens() []invalidation.Token {
	d.mu.Lock()
	defer d.mu.Unlock()
	tokens := make([]invalidation.Token, 0, len(d.jobs))
	for t := range d.jobs {
		tokens = append(tokens, t)
	}
	return tokens
}

// cancelWith keeps the function that ends the run which is about to begin. What ran before is over: a wish for it must
// not end this one. timed says that the run costs its time.
func (d *desk) cancelWith(job *assignment, cancel context.CancelCauseFunc, timed bool) {
	d.mu.Lock()
	job.cancel, job.now = cancel, 0
	if timed {
		job.began = time.Now()
	}
	d.mu.Unlock()
}

// ran adds what a run has cost.
func (d *desk) ran(job *assignment, cost float64) {
	d.mu.Lock()
	job.used, job.began = job.used+cost, time.Time{}
	d.mu.Unlock()
}

// account closes a job's account: what was charged for it, and what it has used. Nothing is added from then on.
func (d *desk) account(job *assignment) (charged, used float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	job.began = time.Time{}
	return job.charged, job.used
}

// extend charges for runs that have outlived what was charged for them.
func (d *desk) extend(now time.Time, charge func(lane invalidation.Candidate, more float64)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, job := range d.jobs {
		if job.began.IsZero() {
			continue
		}
		if more := job.used + now.Sub(job.began).Seconds() - job.charged; more > 0 {
			job.charged += more
			charge(job.lane, more)
		}
	}
}

// begin marks an entry as running, unless somebody wished it cancelled before.
func (d *desk) begin(job *assignment, e invalidation.EntryID) (reason string, wished bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if reason, wished = job.wishes[e]; wished {
		return reason, true
	}
	job.now = e
	return "", false
}

// wished says that somebody wished an entry cancelled that does not run yet, and why.
func (d *desk) wished(job *assignment, e invalidation.EntryID) (reason string, wished bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	reason, wished = job.wishes[e]
	return reason, wished
}

// cancelEntry ends the run of an entry, or keeps it from starting.
func (d *desk) cancelEntry(r invalidation.CancelRequest) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, job := range d.jobs {
		if job.queue.ID != r.QueueID || !job.covers(r.Entry) {
			continue
		}
		if job.wishes == nil {
			job.wishes = map[invalidation.EntryID]string{}
		}
		job.wishes[r.Entry] = r.Reason
		if job.now == r.Entry && job.cancel != nil {
			job.cancel(fmt.Errorf("%w: %s", invalidation.ErrCancelled, r.Reason))
		}
	}
}

func (job *assignment) covers(id invalidation.EntryID) bool {
	for i := range job.lock.Entries {
		if job.lock.Entries[i].ID == id {
			return true
		}
	}
	return false
}

// endAll ends every run.
func (d *desk) endAll(cause error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, job := range d.jobs {
		if job.cancel != nil {
			job.cancel(cause)
		}
	}
}
