package tasknode

import (
	"context"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// process runs the entries of one lock, oldest first, and passes on how each ended.
func (n *Node) process(j *job) {
	start := time.Now()
	entries, perRun := j.lock.Entries, j.perRun()
	endings := make([]invalidation.Ending, 0, 1) // of a run; on the stack where it has one entry

	done := false // an entry was
	if perRun < len(entries) {
		defer func() {
			if done {
				n.holdings.noteLock(j.served, time.Since(start))
			}
		}()
	}
	for i := 0; i < len(entries); i += perRun {
		if ending, stops := n.stop(j, start, i); stops {
			n.endLast(j, ending)
			return
		}
		next := entries[i : i+perRun]
		if i > 0 {
			n.chargeNext(j, next)
		}
		endings = n.runEntries(j, next, endings[:0])
		done = done || anyDone(endings)
		if i+perRun == len(entries) || j.queue.EndsLock(&endings[len(endings)-1]) {
			n.endLast(j, endings...)
			return
		}
		n.settleCharge(j)
		n.settler.add(j, endings...)
	}
}

// endLast ends a job with the last endings of its lock: its run is accounted for and its gates are free before the
// settler has them, since the settler releases the rest of the reservation.
func (n *Node) endLast(j *job, endings ...invalidation.Ending) {
	n.settleCharge(j)
	j.reserved.releaseGates()
	endings[len(endings)-1].Last = true
	n.settler.add(j, endings...)
}

// stop returns the ending of entry i where the lock is given up before it runs, and whether it is. Between two runs a
// lock goes back to its position if another lane is to have its turn first.
func (n *Node) stop(j *job, start time.Time, i int) (ending invalidation.Ending, stops bool) {
	next := j.lock.Entries[i].ID
	switch ran := time.Since(start); {
	case n.leaseLost(j) || n.handingBack.Load():
		return invalidation.Release(j.lock, next, 0), true
	case i == 0:
		return ending, false
	case ran >= j.queue.Config.QuantumTime:
		return invalidation.Yield(j.lock, next), true
	case ran >= aheadTime && (n.waiting.urgentWaits() || n.lanes.givesWay(j.lane, n.holdings.held, time.Now())):
		return invalidation.Release(j.lock, next, 0), true
	}
	return ending, false
}

// runEntries runs entries of a lock in one call of the handler, and adds to endings how they ended. Those whose time is
// over or whose cancel was requested are left out. Where the last ending is a release, it hands all others back.
func (n *Node) runEntries(
	j *job, entries []invalidation.Entry, endings []invalidation.Ending,
) []invalidation.Ending {
	now := time.Now()
	runs, endings := n.inTime(j, entries, now, endings)
	if len(runs) == 0 {
		return endings
	}
	if first := &runs[0].Entry; suspect(j.queue, first) { // it is alone, see job.perRun
		done := n.admitSuspect()
		if done == nil {
			return append(endings, invalidation.Release(j.lock, first.ID, n.cfg.Lease))
		}
		defer done()
	}
	lasting, end := context.WithCancelCause(n.runs)
	defer end(nil)
	ctx, cancel := lasting, end
	if !j.lock.Solo() { // else it would only cost: no other entry waits for the end of the run
		ctx, cancel = context.WithCancelCause(lasting)
		defer cancel(nil)
	}
	runs, cancelled := n.jobs.begin(j, runs, cancel, end)
	endings = append(endings, cancelled...)
	if len(runs) == 0 {
		return endings
	}
	// The lease may have been lost before the table of jobs knew how to end this run.
	if n.leaseLost(j) {
		return append(endings, invalidation.Release(j.lock, runs[0].Entry.ID, 0))
	}
	for _, r := range runs {
		r.Lasting = lasting
	}
	if by, cause := endBy(runs, time.Now()); cause != nil {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadlineCause(ctx, by, cause)
		defer stop()
	}
	return n.runBegun(ctx, j, runs, endings, now.Sub(j.lock.ClaimedAt))
}

// inTime prepares the runs of entries. One whose deadline has passed does not run: its ending is added.
func (n *Node) inTime(
	j *job, entries []invalidation.Entry, now time.Time, endings []invalidation.Ending,
) ([]*invalidation.Run, []invalidation.Ending) {
	runs := make([]*invalidation.Run, 0, len(entries))
	for i := range entries {
		switch e := &entries[i]; {
		case passed(e.StartBy, now):
			endings = append(endings, invalidation.Expire(j.lock, e.ID, "start_by has passed"))
		case passed(e.FinishBy, now):
			endings = append(endings, invalidation.Expire(j.lock, e.ID, invalidation.ErrFinishBy.Error()))
		default:
			runs = append(runs, &invalidation.Run{Queue: j.queue, Entry: *e, Lock: j.lock, Node: n.ID()})
		}
	}
	return runs, endings
}

func passed(deadline, now time.Time) bool { return !deadline.IsZero() && !now.Before(deadline) }

// endBy is when a run of entries that begins now has to end, and the cause of that; nil: nothing bounds it. A deadline
// ends the run once that of each entry has passed: else it goes on for the others.
func endBy(runs []*invalidation.Run, now time.Time) (by time.Time, cause error) {
	if last := lastFinishBy(runs); !last.IsZero() {
		by, cause = last, invalidation.ErrFinishBy
	}
	if limit := runs[0].Queue.Config.RunTimeout; limit > 0 && (cause == nil || now.Add(limit).Before(by)) {
		by, cause = now.Add(limit), invalidation.ErrRunTimeout
	}
	return by, cause
}

// lastFinishBy is when the last of the runs has to end; zero: one of them has no deadline.
func lastFinishBy(runs []*invalidation.Run) (last time.Time) {
	for _, r := range runs {
		by := r.Entry.FinishBy
		if by.IsZero() {
			return by
		}
		if by.After(last) {
			last = by
		}
	}
	return last
}

// runBegun calls the handler for entries whose run has begun, judges its answers, and adds their endings to those of
// the entries that were left out.
func (n *Node) runBegun(
	ctx context.Context, j *job, runs []*invalidation.Run, endings []invalidation.Ending, sinceClaim time.Duration,
) []invalidation.Ending {
	whole := len(endings)+len(runs) == len(j.lock.Entries)
	start := time.Now()
	if len(runs) == 1 {
		runs[0].Began = start
	}
	ctx, span := n.startRun(ctx, j, runs)
	judge := func(answers []invalidation.BatchAnswer) []invalidation.Ending {
		ran, err := time.Since(start), firstError(answers)
		endRun(span, j, runs, err)
		n.stats.ran(err)
		each, used, cost := ran/time.Duration(len(runs)), 0.0, 0.0
		for i, r := range runs {
			err := answers[i].Err
			ending := invalidation.Judge(r, answers[i].Result, withCause(ctx, err), each, n.cfg.Random())
			used += r.Charged(each).Seconds()
			cost += spent(r, &ending, each)
			if err != nil && ending.Verb() == "postpone" {
				err = nil // a snooze: the handler looked, and it is not time yet
			}
			n.handedBack.add(j.served.name, &ending, time.Now())
			n.cfg.Observer.Ran(j.served.name, r.Entry.Waited+sinceClaim, each, err)
			endings = append(endings, ending)
		}
		n.holdings.noteRun(j.served, ran)
		if anyDone(endings) {
			n.holdings.noteDone(j.served, ran, used, cost, whole)
		}
		n.jobs.ran(j, cost)
		return endings
	}
	answers := make([]invalidation.BatchAnswer, 0, 1) // on the stack where there is one
	unlessExit(
		func() { answers = n.call(ctx, j.handler, runs, answers) },
		func() { n.endLast(j, judge(failed(runs, n.panicked(errExit, runs[0])))...) })
	return judge(answers)
}

func anyDone(endings []invalidation.Ending) bool {
	return slices.ContainsFunc(endings, func(e invalidation.Ending) bool { return e.Verb() == "done" })
}
