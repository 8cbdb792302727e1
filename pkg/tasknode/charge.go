package tasknode

import (
	"time"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The lane of a job is charged for the first run when the job is accepted (claimAnswer.accept), for each further one
// when it begins, and for what a run uses beyond its estimate, as far as its time tells. When a run has ended, the
// ranker is told what was charged for it and what it cost.

// estimate is what a run of entries is expected to cost, if runs use so much: what each declares, or its part.
func estimate(entries []invalidation.Entry, use float64) float64 {
	sum := 0.0
	for i := range entries {
		if cost := entries[i].Cost; cost > 0 {
			sum += cost
		} else {
			sum += use / float64(len(entries))
		}
	}
	return sum
}

// spent is what a run of an entry has cost that took so long and ended so: what the entry declares, or else what the
// run used. A declared cost is not due where the run was charged nothing, as one that a worker refused, or spent no
// attempt.
func spent(r *invalidation.Run, e *invalidation.Ending, took time.Duration) float64 {
	if r.Entry.Cost <= 0 {
		return r.Charged(took).Seconds()
	}
	saidNothingUsed := r.Charged(1) == 0
	if verb := e.Verb(); saidNothingUsed || verb == "release" || verb == "postpone" {
		return 0
	}
	return r.Entry.Cost
}

// chargeNext charges for the next run of a job just before it begins: a group may give way after each run, and a charge
// for entries that do not run would keep its flow behind others.
func (n *Node) chargeNext(j *job, entries []invalidation.Entry) {
	use, _ := n.holdings.expected(j.served)
	expected := estimate(entries, use)
	n.jobs.charge(j, expected)
	n.cfg.Ranker.Extend(j.ranked, expected)
}

// settleCharge tells the ranker what the entries have cost that were charged for.
func (n *Node) settleCharge(j *job) {
	charged, used := n.jobs.account(j)
	n.cfg.Ranker.Correct(j.ranked, charged, used)
}

// charge notes what was charged for the next run of a job.
func (r *jobs) charge(j *job, expected float64) {
	r.mu.Lock()
	j.charged += expected
	r.mu.Unlock()
}

// extend charges for runs that have outlived what was charged for them, by what they are expected to have used in their
// time.
func (r *jobs) extend(
	now time.Time, usedIn func(*servedQueue, time.Duration) float64,
	charge func(lane fairness.Candidate, more float64),
) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, j := range r.byLock {
		if j.timed.IsZero() {
			continue
		}
		if more := j.used + usedIn(j.served, now.Sub(j.timed)) - j.charged; more > 0 {
			j.charged += more
			charge(j.ranked, more)
		}
	}
}

// ran adds what a run has cost.
func (r *jobs) ran(j *job, cost float64) {
	r.mu.Lock()
	j.used, j.timed = j.used+cost, time.Time{}
	r.mu.Unlock()
}

// account closes a job's account: what was charged for it since the last, and what it has used. Nothing is added to
// it until the next charge.
func (r *jobs) account(j *job) (charged, used float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	charged, used = j.charged, j.used
	j.charged, j.used, j.timed = 0, 0, time.Time{}
	return charged, used
}
