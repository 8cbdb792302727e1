package inference

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// reattach follows a run that an earlier lock of the entry started, on the slot that is counted for
// it.
func (d *dispatch) reattach(ctx context.Context, old *remoteRun) (json.RawMessage, error) {
	defer d.abandon()
	run := d.call.RunRef
	run.Remote = old.Remote
	reported, err := d.model.ReadReport(run, old.Report)
	known := err == nil && reported.Final() // it was reported while no node followed
	endpoint := d.registry.Endpoint(old.Slot.Instance)
	if endpoint == nil {
		d.forget(ctx, old)
		return d.orphaned(ctx, old, reported, known)
	}
	if d.held, err = d.pool.adopt(ctx, endpoint, old.Slot); err == nil && d.held == nil {
		d.held = d.pool.assignOn(endpoint) // its slot was freed: the run is counted on another
	}
	if d.held == nil {
		if err == nil && old.Remote == "" && !known && old.Age >= runMax(d.model) {
			d.forget(ctx, old) // no run lasts so long
			return d.submit(ctx)
		}
		if err == nil {
			err = errors.New("no free slot on the instance that runs the entry")
		}
		return nil, invalidation.NoCapacity(d.tuning.busyWait, err)
	}
	d.takeOver(old, known)
	old.Slot = d.held.slot.Held
	if err := moveRun(ctx, d.db, *old); err != nil {
		d.log.Warn("store adopted slot", "entry", old.Entry, "error", err)
	}
	if known {
		return d.conclude(ctx, d.record(ctx, reported))
	}
	if old.Remote == "" {
		// The answer was lost: a worker that knows entries by their id gives it again. That it has no room, perhaps
		// because of this very run, or cannot be reached is true of the question alone. A failure is an answer, also
		// one that the entry does not pay for.
		o := d.exchange(ctx)
		if d.notRun && old.Age < runMax(d.model) {
			o.MaybeRunning, d.unreachable = true, true
		}
		return d.conclude(ctx, o)
	}
	reports, done := d.subscribe(old.Token)
	defer done()
	if old.Ran == 0 {
		// The node before died: it did not say how long it had followed the run, nor how much of that was a cold start.
		old.Ran = max(0, old.Age-d.model.Timeouts.Start.Duration())
	}
	o := endpoint.follower.Follow(ctx,
		worker.Pending{RunRef: run, FinishBy: d.call.FinishBy, Ran: old.Ran, Reports: reports})
	return d.conclude(ctx, d.record(ctx, o))
}

// takeOver makes the run of an earlier lock that of this one.
func (d *dispatch) takeOver(old *remoteRun, known bool) {
	d.tries, d.saved, d.stored, d.began = 1, old, true, time.Now()
	if old.Remote != "" || known { // else the worker is asked again, and that call counted
		ran := old.Age
		if !known {
			ran += time.Since(old.Found) // it went on while its slot was adopted
		}
		// It may have ended long ago. Where the clock of the database was set back, it has not begun yet.
		d.before = max(0, min(ran, runMax(d.model)))
	}
}

// orphaned is for a run whose instance was removed, and its slot with it.
func (d *dispatch) orphaned(
	ctx context.Context, old *remoteRun, reported worker.Outcome, known bool,
) (json.RawMessage, error) {
	d.takeOver(old, known)
	d.held = &slotRef{slot: &heldSlot{Held: old.Slot}, endpoint: &Endpoint{ID: old.Slot.Instance}, ended: true}
	const removed = "the instance that ran this entry was removed"
	switch {
	case known:
		d.use(reported, 1)
		return d.answer(ctx, reported)
	case old.Remote != "":
		d.use(unanswered(removed, nil), 1)
	}
	if d.model.OnUnknown == worker.AtMostOnce {
		return nil, d.unknownOutcome(removed)
	}
	d.tries, d.saved, d.stored, d.held, d.before = 0, nil, false, nil, 0
	return d.submit(ctx)
}
