package tasknode

import (
	"context"
	"fmt"
	"sync"

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
// not end this one.
func (d *desk) cancelWith(job *assignment, cancel context.CancelCauseFunc) {
	d.mu.Lock()
	job.cancel, job.now = cancel, 0
	d.mu.Unlock()
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
