package inference

import (
	"context"
	"net/http"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// record notes what a call says of its instance and of its entry, and returns the outcome for which the entry pays.
func (d *dispatch) record(ctx context.Context, o worker.Outcome) worker.Outcome {
	known := d.evidence()
	v := d.held.record(ctx, o, known)             // the breaker
	if !d.shared() && o.Kind != worker.Accepted { // of a run that goes on: see conclude
		d.use(o, 1)
	}
	l := d.recordHarm(ctx, o)
	o = d.attribute(o, v)
	if o.FreeOfCharge() && !o.MaybeRunning {
		d.held.backOff(o.RetryAfter)
		if !known.last {
			o.RetryAfter = 0 // it asked for itself: another instance may have room sooner
		}
	}
	o.RetryAfter = min(o.RetryAfter, worker.RetryAfterMax) // its calls are not kept back for longer either
	if l.during {
		o.RetryAfter = max(o.RetryAfter, d.suspectWait())
	}
	return o
}

// lostDevice says whether a call ended with the device of its instance lost.
func lostDevice(o worker.Outcome) bool {
	return o.Kind == worker.Failed && o.Class == worker.ClassContextLost
}

// recordHarm notes that a call lost the device of its instance, or ran out of its memory: see suspect.go.
func (d *dispatch) recordHarm(ctx context.Context, o worker.Outcome) (l loss) {
	if lostDevice(o) {
		l = d.lose()
	}
	outOfMemory := o.Kind == worker.Failed && o.Class == worker.ClassOOM
	if !d.shared() && (lostDevice(o) || outOfMemory) {
		d.noteHarm(ctx, o.Class, l)
	}
	return l
}

// attribute decides who pays for a call that brought no result: its entry, with an attempt, or nobody. An outcome that
// costs the entry nothing (FreeOfCharge) lets it try another instance. It is excused so freeMax times on this node.
//
//	a call                                         is for its entry
//	of several entries, that lost the device       as it is: each is tried alone
//	that lost it, or failed while the breaker      not ready, while the entry is excused; then as it is
//	puts that down to the instance
//	that an instance without the model refused     as it is, and the entry avoids the instance
//	that was not sent                              as it is, while the entry is excused; then failed
//	that was refused so late that it may have run  as it is, while the entry is excused; then failed. Failed at once
//	                                               for several entries: each is tried alone
//	any other                                      as it is; a result forgets what the entry was excused for
func (d *dispatch) attribute(o worker.Outcome, v verdict) worker.Outcome {
	instanceFailed := o.Kind == worker.Failed && (v.Unspent || lostDevice(o)) && !o.MaybeRunning
	switch {
	case d.shared() && lostDevice(o):
	case instanceFailed && d.excused():
		o.Kind, o.Reason = worker.NotReady, worker.Clip(o.Reason+" (the instance is to blame: "+v.Reason+")")
	case o.Kind == worker.NotReady && o.Misrouted:
		d.blame.misrouted(d.call.Entry, d.held.endpoint.ID)
	case o.Unsent && !d.excused(): // our own fault, and it does not pass
		o.Kind, o.Class = worker.Failed, worker.ClassTransient
	case d.late(o) && (d.shared() || !d.excused()):
		o.Kind, o.Class = worker.Failed, worker.ClassTransient
	case o.Kind == worker.Done:
		d.blame.served(d.model.Name, d.call.Entry, d.held.endpoint.ID, time.Now())
	}
	return o
}

// excused counts a call that shall cost the entry nothing, and says whether it may.
func (d *dispatch) excused() bool { return d.blame.free(d.call.Entry, d.held.endpoint.ID) }

// late says whether a worker refused the call so long after it got it that it may have run: what that costs is
// bounded. A limit on the rate of calls (429) may be told late by a proxy that waits for it, and loading takes long.
// Where the worker is asked about an earlier run, only the question was refused.
func (d *dispatch) late(o worker.Outcome) bool {
	refused := o.FreeOfCharge() && !o.MaybeRunning && !o.Starting && o.StatusCode != http.StatusTooManyRequests
	return refused && d.saved == nil && !o.SentAt.IsZero() && time.Since(o.SentAt) > d.tuning.quarantine.fast
}
