package tasknode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// process runs the entries of one lock, oldest first, and passes on how each ended.
func (n *Node) process(j *job) {
	start := time.Now()
	h := j.handler
	if batch, ok := h.(invalidation.BatchHandler); ok {
		if runsTogether(j) {
			n.processBatch(j, batch)
			return
		}
		h = batchOfOne(batch)
	}
	entries := j.lock.Entries
	if len(entries) > 1 {
		defer func() { n.holdings.took(j.served, time.Since(start)) }()
	}
	for i := range entries {
		if stop := n.stop(j, start, i); stop != nil {
			n.endLast(j, last(stop(j.lock, entries[i].ID)))
			return
		}
		if i > 0 {
			n.chargeNext(j, &entries[i])
		}
		ending := n.runOne(j, h, &entries[i])
		ending.Last = i == len(entries)-1 || j.queue.EndsLock(&ending)
		if ending.Last {
			n.endLast(j, ending)
			return
		}
		n.settleCharge(j)
		n.settler.add(j, ending)
	}
}

// endLast ends a job: its run is accounted for and its gates are free before the settler has its last ending, since the
// settler releases the rest of the reservation.
func (n *Node) endLast(j *job, endings ...invalidation.Ending) {
	n.settleCharge(j)
	j.reserved.releaseGates()
	n.settler.add(j, endings...)
}

// stop says how to end a lock before entry i has run, nil to go on. Between two entries a lock goes back to
// its position if another lane is to have its turn first.
func (n *Node) stop(j *job, start time.Time, i int) func(*invalidation.Lock, invalidation.EntryID) invalidation.Ending {
	release := func(l *invalidation.Lock, e invalidation.EntryID) invalidation.Ending {
		return invalidation.Release(l, e, 0)
	}
	switch {
	case n.leaseLost(j) || n.handingBack.Load():
		return release
	case i == 0:
		return nil
	}
	switch ran := time.Since(start); {
	case ran >= j.queue.Config.QuantumTime:
		return invalidation.Yield
	case ran >= aheadTime && (n.waiting.urgentWaits() || n.lanes.givesWay(j.lane, n.holdings.held, time.Now())):
		return release
	}
	return nil
}

// runOne runs an entry under its context and judges the outcome.
func (n *Node) runOne(j *job, h invalidation.Handler, e *invalidation.Entry) invalidation.Ending {
	sinceClaim := time.Since(j.lock.ClaimedAt)
	if sinceClaim >= e.StartIn {
		return invalidation.Expire(j.lock, e.ID, "start_by has passed")
	}
	if sinceClaim >= e.FinishIn {
		return invalidation.Expire(j.lock, e.ID, invalidation.ErrFinishBy.Error())
	}
	if suspect(j.queue, e) {
		done := n.admitSuspect()
		if done == nil {
			return invalidation.Release(j.lock, e.ID, n.cfg.Lease)
		}
		defer done()
	}
	ctx, stop := n.runContext(j, e, sinceClaim)
	defer stop()
	if reason, asked := n.jobs.begin(j, e.ID); asked {
		return invalidation.Cancel(j.lock, e.ID, reason)
	}
	// The lease may have been lost before the table of jobs knew how to end this run.
	if n.leaseLost(j) {
		return invalidation.Release(j.lock, e.ID, 0)
	}
	start := time.Now()
	ctx, span := n.startRun(ctx, j, e)
	r := &invalidation.Run{Queue: j.queue, Entry: *e, Lock: j.lock, Node: n.ID()}
	judge := func(result json.RawMessage, err error) invalidation.Ending {
		ran := time.Since(start)
		endRun(span, j, err, e)
		n.holdings.ran(j.served, ran, len(j.lock.Entries) == 1)
		n.jobs.ran(j, cost([]invalidation.Entry{*e}, r.Charged(ran).Seconds()))
		n.stats.ran(err)
		n.cfg.Observer.Ran(j.served.name, e.Waited+sinceClaim, ran, err)
		if err != nil {
			err = withCause(ctx, err)
		}
		return invalidation.Judge(r, result, err, ran, n.cfg.Random())
	}
	var result json.RawMessage
	var err error
	unlessExit(
		func() { result, err = n.handle(ctx, h, r) },
		func() { n.exit(j, judge(nil, n.panicked(errExit, r))) })
	return judge(result, err)
}

// unlessExit calls f, and exit if f ends the goroutine: then nothing else of the caller follows.
func unlessExit(f, exit func()) {
	returned := false
	defer func() {
		if !returned {
			exit()
		}
	}()
	f()
	returned = true
}

var errExit = errors.New("the handler ended its goroutine (runtime.Goexit)")

// exit ends a job whose handler ended the goroutine.
func (n *Node) exit(j *job, endings ...invalidation.Ending) {
	j.exited = true
	endings[len(endings)-1].Last = true
	n.endLast(j, endings...)
}

// withCause adds why the context ended, where that is why the handler returned an error.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// runContext is the context of one run. Its cause says why it ended.
func (n *Node) runContext(j *job, e *invalidation.Entry, sinceClaim time.Duration) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(n.runs)
	n.jobs.markBegun(j, e.ID, cancel, e.Cost == 0)
	if e.FinishIn == invalidation.NoDeadline && j.queue.Config.RunTimeout == 0 {
		return ctx, func() { cancel(nil) }
	}
	stops := []func(){func() { cancel(nil) }}
	if e.FinishIn != invalidation.NoDeadline {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, e.FinishIn-sinceClaim, invalidation.ErrFinishBy)
		stops = append(stops, stop)
	}
	if limit := j.queue.Config.RunTimeout; limit > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, limit, invalidation.ErrRunTimeout)
		stops = append(stops, stop)
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// handle calls the handler; a panic is an error like others.
func (n *Node) handle(ctx context.Context, h invalidation.Handler, r *invalidation.Run) (
	result json.RawMessage, err error,
) {
	defer func() {
		if v := recover(); v != nil {
			err = n.panicked(v, r)
		}
	}()
	result, err = h.Handle(ctx, r)
	return result, n.readable(err, r)
}

// readable returns the error of a handler, whose methods are called where no panic of theirs is an error: one that
// panics gives way to the error of that. The usual case is a nil pointer in a non-nil error.
func (n *Node) readable(err error, r *invalidation.Run) (readable error) {
	defer func() {
		if v := recover(); v != nil {
			readable = n.panicked(v, r)
		}
	}()
	if err != nil {
		var p *invalidation.PanicError
		_, _, _ = err.Error(), errors.Is(err, invalidation.ErrCancelled), errors.As(err, &p)
	}
	return err
}

// panicked logs that a handler panicked with v while it ran r, and returns the error of that.
func (n *Node) panicked(v any, r *invalidation.Run) error {
	n.cfg.Log.Error("handler panicked", "queue", r.Queue.Name, "entry", r.Entry.ID, "entries", len(r.Lock.Entries),
		"token", r.Lock.Token, "panic", v)
	return &invalidation.PanicError{Value: v, Stack: string(debug.Stack())}
}
