package inference

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// waitlist lets the entries of one model on this node wait for each other, or for a worker that has
// loaded what they need. Each of them was claimed like any other, on a permit, under its own lock
// and limits, and ends on its own: only the call is one, on one slot. Nothing waits long: what
// finds no slot goes back to its position.
type waitlist struct {
	*Dispatcher
	model string

	mu      sync.Mutex
	batcher *batcher
	waiters map[string]*waiter // waiting, by entry id
	alarm   *time.Timer
}

// waiter is an entry that waits here, or is on its way in a call with others.
type waiter struct {
	*dispatch
	member  worker.Member
	alone   bool        // the call that it was in went wrong as a whole: in the queue it would be joined again
	since   time.Time   // it waits
	granted chan grant  // takes one
	call    *sharedCall // nil while it waits
}

// sharedCall is a call for several entries. Its fields are guarded by the waitlist.
type sharedCall struct {
	held    *slotRef
	began   time.Time
	members int                     // that it began with
	left    int                     // that still wait for its outcome
	locked  bool                    // a member that left waits for its end, with its lock key
	over    bool                    // it has an outcome, which is on its way to them
	end     context.CancelCauseFunc // when none is left
}

// grant ends the wait of an entry: a slot of its own to make its call on, or the outcome of a call
// with others. With neither, there was no slot.
type grant struct {
	held    *slotRef
	outcome *worker.Outcome
	call    *sharedCall
}

// maxWait is how long an entry waits for a slot before it goes back to its position, where other
// nodes may claim it.
const maxWait = time.Second

// aloneWait is how long an entry waits that must be alone.
const aloneWait = 30 * time.Second

// usesWaitlist says whether entries of the model wait for each other at all.
func usesWaitlist(m worker.Model) bool { return m.Batch.Items > 1 || m.AffinityWait > 0 }

func (d *Dispatcher) waitlistOf(model string) *waitlist {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.waitlists[model]
	if l == nil {
		l = &waitlist{
			Dispatcher: d, model: model, batcher: newBatcher(worker.BatchLimits{}),
			waiters: map[string]*waiter{},
		}
		l.alarm = time.AfterFunc(time.Hour, l.dispatch)
		d.waitlists[model] = l
	}
	return l
}

// slotIdled is called by the pool: an entry may wait for the slot.
func (d *Dispatcher) slotIdled(model string) {
	d.mu.Lock()
	l := d.waitlists[model]
	d.mu.Unlock()
	if l != nil {
		l.dispatch()
	}
}

// runShared runs an entry in a call with others of its kind. What cannot be joined, or was in a call
// that went wrong as a whole, waits for a slot of its own; a suspect waits for none.
func (a *dispatch) runShared(ctx context.Context) (json.RawMessage, error) {
	l, alone := a.waitlistOf(a.model.Name), false
	for {
		if a.blame.caution(a.call.Entry) > together {
			return a.submit(ctx)
		}
		if unfit, _ := a.unfit(); !a.anyUsable(unfit) {
			return nil, a.fitsNowhere() // it would keep the slot of its permit idle
		}
		s := l.wait(ctx, &waiter{dispatch: a, member: a.measured(alone), alone: alone, granted: make(chan grant, 1)})
		switch {
		case s.held != nil:
			a.held = s.held
			return a.submit(ctx)
		case s.call == nil:
			return nil, a.noRoom(*s.outcome)
		}
		a.held, a.began, a.members = s.call.held, s.call.began, s.call.members
		a.use(*s.outcome, s.call.members)
		a.tries++
		switch o := *s.outcome; {
		case o.Alone && ctx.Err() == nil:
			alone, a.tries = true, 0
		case !a.elsewhere(ctx, o):
			return a.answer(ctx, o)
		case a.tries >= triesMax:
			return nil, a.noRoom(o)
		}
	}
}

// measured is the call as a member of a batch.
func (a *dispatch) measured(alone bool) worker.Member {
	if b, ok := a.batchCodec(); ok && !alone {
		if m, err := b.Measure(a.call, a.start); err == nil {
			m.Shape = a.affinity() + "|" + a.labels() + "|" + m.Shape
			return m
		}
	}
	return worker.Member{Entry: a.call.Entry, Shape: "alone|" + a.call.Entry, At: a.start, Alone: true}
}

func (a *dispatch) batchCodec() (worker.BatchCodec, bool) {
	if a.model.Batch.Items <= 1 {
		return nil, false
	}
	for _, e := range a.registry.Endpoints(a.model.Name) {
		b, ok := e.adapter.(worker.BatchCodec)
		return b, ok
	}
	return nil, false
}

func (l *waitlist) wait(ctx context.Context, r *waiter) grant {
	r.since = time.Now()
	l.mu.Lock()
	l.batcher.limits = r.model.Batch.WithDefaults()
	l.batcher.Add(r.member)
	l.waiters[r.member.Entry] = r
	l.mu.Unlock()
	l.dispatch()
	select {
	case s := <-r.granted:
		return s
	case <-ctx.Done():
		return l.leave(r, context.Cause(ctx))
	}
}

// leave ends the wait of an entry whose run was ended. If its call has begun, that goes on for the
// others: it is unknown then whether this one ran. A cancelled entry with a lock key waits for the end
// all the same: the next entry of the key must not start beside it. The last to leave ends the call,
// unless the worker is not known to notice and a key depends on it.
func (l *waitlist) leave(r *waiter, cause error) grant {
	keyed := !r.run.Lock.Solo() && errors.Is(cause, invalidation.ErrCancelled)
	l.mu.Lock()
	if l.batcher.Withdraw(r.member.Entry) {
		delete(l.waiters, r.member.Entry)
		l.mu.Unlock()
		return grant{outcome: &worker.Outcome{
			Kind: worker.NotReady, Reason: "ended while it waited for a slot",
			Err: cause,
		}}
	}
	call := r.call
	begun := call != nil && !call.over
	if begun {
		call.left--
		call.locked = call.locked || keyed
	}
	goesOn := begun && (call.left > 0 || call.locked && !r.model.StopsOnClose(r.dispatch.call))
	switch {
	case begun && call.left > 0:
		call.held.leave()
	case begun && !goesOn:
		call.end(cause)
	}
	l.mu.Unlock()
	if goesOn && keyed {
		return cancelledMember(<-r.granted, cause)
	}
	if !goesOn {
		return <-r.granted // a slot of its own, or what became of the call
	}
	return grant{call: call, outcome: &worker.Outcome{
		Kind: worker.Unknown, MaybeRunning: true, Err: cause,
		Reason: "cancel_unconfirmed: the call goes on for the other entries in it",
	}}
}

// cancelledMember is what becomes of a cancelled entry when the call that carried it is over.
func cancelledMember(g grant, cause error) grant {
	if g.outcome.MaybeRunning {
		return g // it is unknown whether it is over: its slot is in doubt
	}
	g.outcome = &worker.Outcome{
		Kind: worker.Cancelled, Err: cause, Reason: "the run ended after the cancel: " + g.outcome.Kind.String(),
	}
	return g
}

// dispatch gives idle slots to the batches that are due, and sends back entries that have waited
// too long for one.
func (l *waitlist) dispatch() {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for given := true; given; {
		given = false
		l.pool.unawait(l.model)
		for _, batch := range l.batcher.Due(now) {
			first := l.waiters[batch[0].Entry]
			unfit, _ := first.unfit()
			a := first.slotRequest(unfit)
			a.permits, a.until = len(batch), oldest(batch).Add(first.model.AffinityWait.Duration())
			held, await := l.pool.assign(l.model, a)
			if held != nil {
				l.start(batch, held)
				given = true
			} else if await != 0 {
				l.pool.await(l.model, await, len(batch))
			}
		}
	}
	l.sendBack(now)
	if at, waiting := l.batcher.Next(); waiting {
		wait := at.Sub(now)
		if wait <= 0 {
			wait = 20 * time.Millisecond // slots that come free tell; instances that may be tried again do not
		}
		l.alarm.Reset(wait)
	}
}

// sendBack ends the wait of entries that found no slot: others may have use for theirs.
func (l *waitlist) sendBack(now time.Time) {
	for id, r := range l.waiters {
		if r.waitedLong(now) && l.batcher.Withdraw(id) {
			delete(l.waiters, id)
			r.granted <- grant{outcome: &worker.Outcome{}}
		}
	}
}

func (r *waiter) waitedLong(now time.Time) bool {
	if r.alone {
		return now.Sub(r.since) > aloneWait
	}
	return now.Sub(r.member.At) > max(maxWait, r.model.AffinityWait.Duration())
}

// start sends a batch on its way. An entry by itself makes its call as without batching;
// called with mu held.
func (l *waitlist) start(batch batch, held *slotRef) {
	waiters := make([]*waiter, len(batch))
	for i, m := range batch {
		waiters[i] = l.waiters[m.Entry]
		delete(l.waiters, m.Entry)
	}
	l.batcher.Leave(batch)
	if len(waiters) == 1 {
		waiters[0].granted <- grant{held: held}
		return
	}
	ctx, end := context.WithCancelCause(context.Background())
	call := &sharedCall{held: held, began: time.Now(), members: len(waiters), left: len(waiters), end: end}
	for _, r := range waiters {
		r.call = call
	}
	go l.run(ctx, call, waiters)
}

// run makes the call of a batch and tells each waiter its outcome.
func (l *waitlist) run(ctx context.Context, call *sharedCall, waiters []*waiter) {
	calls := make([]worker.Call, len(waiters))
	for i, r := range waiters {
		calls[i] = r.dispatch.call
	}
	first := waiters[0]
	whole, outcomes := l.exchange(ctx, &dispatch{Dispatcher: l.Dispatcher, model: first.model, held: call.held}, calls)
	l.mu.Lock()
	call.over = true
	l.mu.Unlock()
	call.end(nil)
	if whole.Kind == worker.Failed && whole.Class == worker.ClassContextLost {
		for _, r := range waiters {
			l.blame.suspect(r.dispatch.call.Entry)
		}
	}
	if whole.MaybeRunning {
		call.held.doubt(first.run.Queue.ID, first.run.Entry.ID, worker.Clip(whole.Kind.String()+": "+whole.Reason))
	} else {
		call.held.release()
	}
	for i, r := range waiters {
		r.granted <- grant{call: call, outcome: &outcomes[i]}
	}
}

// exchange makes one call for several and returns its outcome as a whole and for each. This goroutine is no thread of
// the node, which recovers from a panic of a run.
func (l *waitlist) exchange(ctx context.Context, a *dispatch, calls []worker.Call) (
	whole worker.Outcome, outcomes []worker.Outcome,
) {
	defer func() {
		if v := recover(); v != nil {
			l.log.Error("call for several entries panicked", "model", l.model, "entries", len(calls), "panic", v,
				"stack", string(debug.Stack()))
			whole = unanswered(fmt.Sprintf("%s: %v", leftByPanic, v), nil)
			outcomes = worker.SameForAll(calls, whole)
		}
	}()
	codec, joins := a.held.endpoint.adapter.(worker.BatchCodec)
	if !joins {
		return whole, worker.SameForAll(calls, worker.Outcome{
			Kind: worker.Failed, Class: worker.ClassTransient,
			Reason: "worker's protocol carries one entry a call",
		})
	}
	var err error
	if a.call, err = codec.Join(calls); err != nil {
		return whole, worker.SameForAll(calls, worker.BadPayload(err))
	}
	whole = a.exchange(ctx)
	return whole, codec.Split(calls, whole)
}
