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
	dispatcher *Dispatcher
	model      string

	mu      sync.Mutex
	batcher *batcher
	waiters map[string]*waiter // waiting, by entry id
	alarm   *time.Timer
}

// waiter is an entry that waits here, or is on its way in a call with others.
type waiter struct {
	entry   *dispatch
	member  worker.Member
	alone   bool        // a shared call failed as a whole: it must be called alone. Handed back it would be joined
	since   time.Time   // it waits
	granted chan grant  // takes one
	shared  *sharedCall // nil while it waits
	left    time.Time   // it left a call that went on for others; zero: it did not
}

// sharedCall is a call for several entries. Its fields are guarded by the waitlist.
type sharedCall struct {
	held    *slotRef
	began   time.Time
	members int                     // that it began with
	left    int                     // that still wait for its outcome
	locked  int                     // cancelled members that wait for its end, with their lock keys
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

// usesWaitlist says whether entries of the model wait for each other at all.
func usesWaitlist(m worker.Model) bool { return m.Batch.Items > 1 || m.AffinityWait > 0 }

func (d *Dispatcher) waitlistOf(model string) *waitlist {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.waitlists[model]
	if l == nil {
		l = &waitlist{
			dispatcher: d, model: model, batcher: newBatcher(worker.BatchLimits{}),
			waiters: map[string]*waiter{},
		}
		l.alarm = time.AfterFunc(time.Hour, l.fill)
		d.waitlists[model] = l
	}
	return l
}

// forgetWaitlists drops those of models that are not registered any more, once no entry waits there.
func (d *Dispatcher) forgetWaitlists() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for model, l := range d.waitlists {
		if _, registered := d.registry.Model(model); registered {
			continue
		}
		l.mu.Lock()
		if len(l.waiters) == 0 {
			l.alarm.Stop() // an entry that finds the waitlist at this moment sets it again
			delete(d.waitlists, model)
		}
		l.mu.Unlock()
	}
}

// slotIdled is called by the pool: an entry may wait for the slot.
func (d *Dispatcher) slotIdled(model string) {
	d.mu.Lock()
	l := d.waitlists[model]
	d.mu.Unlock()
	if l != nil {
		l.fill()
	}
}

// runShared runs an entry in a call with others of its kind. What cannot be joined, or was in a call
// that went wrong as a whole, waits for a slot of its own; a suspect waits for none.
func (d *dispatch) runShared(ctx context.Context) (json.RawMessage, error) {
	l, alone := d.waitlistOf(d.model.Name), false
	for {
		if d.blame.caution(d.call.Entry) > together {
			return d.submit(ctx)
		}
		if unfit, _ := d.unfit(); !d.anyUsable(unfit) {
			return nil, d.fitsNowhere() // it would keep the slot of its permit idle
		}
		g := l.wait(ctx, &waiter{entry: d, member: d.measured(alone), alone: alone, granted: make(chan grant, 1)})
		switch {
		case g.held != nil:
			d.held = g.held
			return d.submit(ctx)
		case g.call == nil:
			return nil, d.noRoom(*g.outcome)
		}
		d.held, d.began, d.members = g.call.held, g.call.began, g.call.members
		d.use(*g.outcome, g.call.members)
		d.tries++
		switch o := *g.outcome; {
		case o.Alone && ctx.Err() == nil:
			alone, d.tries = true, 0
		case !d.elsewhere(ctx, o):
			return d.answer(ctx, o)
		case d.tries >= triesMax:
			return nil, d.noRoom(o)
		}
		d.held, d.members = nil, 0 // they were those of the call
	}
}

// measured is the call as a member of a batch.
func (d *dispatch) measured(alone bool) worker.Member {
	if b, ok := d.batchCodec(); ok && !alone {
		if m, err := b.Measure(d.call, d.start); err == nil {
			m.Shape = d.affinity() + "|" + d.labels() + "|" + m.Shape
			return m
		}
	}
	return worker.Member{Entry: d.call.Entry, Shape: "alone|" + d.call.Entry, At: d.start, Alone: true}
}

func (d *dispatch) batchCodec() (worker.BatchCodec, bool) {
	if d.model.Batch.Items <= 1 {
		return nil, false
	}
	for _, e := range d.registry.Endpoints(d.model.Name) {
		b, ok := e.adapter.(worker.BatchCodec)
		return b, ok
	}
	return nil, false
}

func (l *waitlist) wait(ctx context.Context, w *waiter) grant {
	w.since = time.Now()
	l.mu.Lock()
	l.batcher.limits = w.entry.model.Batch.WithDefaults()
	l.batcher.Add(w.member)
	l.waiters[w.member.Entry] = w
	l.mu.Unlock()
	l.fill()
	select {
	case g := <-w.granted:
		return g
	case <-ctx.Done():
		return l.leave(w, context.Cause(ctx))
	}
}

// leave ends the wait of an entry whose run was ended. If its call has begun, that goes on for the
// others: it is unknown then whether this one ran. A cancelled entry with a lock key waits for the end
// all the same: the next entry of the key must not start beside it. The last to leave ends the call,
// unless the worker is not known to notice and a key depends on it.
func (l *waitlist) leave(w *waiter, cause error) grant {
	keyed := !w.entry.run.Lock.Solo() && errors.Is(cause, invalidation.ErrCancelled)
	l.mu.Lock()
	if l.batcher.Withdraw(w.member.Entry) {
		delete(l.waiters, w.member.Entry)
		l.mu.Unlock()
		return grant{outcome: &worker.Outcome{
			Kind: worker.NotReady, Reason: "ended while it waited for a slot",
			Err: cause,
		}}
	}
	call := w.shared
	begun := call != nil && !call.over
	if begun {
		call.left--
		if keyed {
			call.locked++
		}
	}
	goesOn := begun && (call.left > 0 || call.locked > 0 && !w.entry.model.StopsOnClose(w.entry.call))
	if goesOn && !keyed {
		w.left = time.Now()
	}
	switch {
	case begun && call.left > 0:
		call.held.dropPermit()
	case begun && !goesOn:
		call.end(cause)
	}
	l.mu.Unlock()
	switch {
	case goesOn && keyed:
		return l.outlast(w, call, cause)
	case !goesOn:
		return <-w.granted // a slot of its own, or what became of the call
	}
	return goesOnWithout(call, cause)
}

// goesOnWithout is for an entry that has left a call which goes on for others.
func goesOnWithout(call *sharedCall, cause error) grant {
	return grant{call: call, outcome: &worker.Outcome{
		Kind: worker.Unknown, MaybeRunning: true, Err: cause,
		Reason: "cancel_unconfirmed: the call goes on for the other entries in it",
	}}
}

// outlast waits for the end of a call with the lock key of a cancelled member, for as long as the node may have it. The
// last to wait so ends the call.
func (l *waitlist) outlast(w *waiter, call *sharedCall, cause error) grant {
	lasting := w.entry.lasting()
	select {
	case g := <-w.granted:
		return cancelledMember(g, cause)
	case <-lasting.Done():
	}
	l.mu.Lock()
	call.locked--
	ends := call.over || call.left == 0 && call.locked == 0
	if ends {
		call.end(context.Cause(lasting))
	} else {
		w.left = time.Now()
	}
	l.mu.Unlock()
	if ends {
		return cancelledMember(<-w.granted, cause)
	}
	return goesOnWithout(call, cause)
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

// fill gives idle slots to the batches that are due, and sends back entries that have waited
// too long for one.
func (l *waitlist) fill() {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for given := true; given; {
		given = false
		l.dispatcher.pool.unawait(l.model)
		for _, batch := range l.batcher.Due(now) {
			first := l.waiters[batch[0].Entry].entry
			unfit, _ := first.unfit()
			want := first.slotRequest(unfit)
			want.permits, want.until = len(batch), oldest(batch).Add(first.model.AffinityWait.Duration())
			held, await := l.dispatcher.pool.assign(l.model, want)
			if held != nil {
				l.start(batch, held)
				given = true
			} else if await != 0 {
				l.dispatcher.pool.await(l.model, await, len(batch))
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
	for id, w := range l.waiters {
		if w.waitedLong(now, l.dispatcher.tuning.aloneWait) && l.batcher.Withdraw(id) {
			delete(l.waiters, id)
			w.granted <- grant{outcome: &worker.Outcome{}}
		}
	}
}

func (w *waiter) waitedLong(now time.Time, aloneWait time.Duration) bool {
	if w.alone {
		return now.Sub(w.since) > aloneWait
	}
	return now.Sub(w.member.At) > max(maxWait, w.entry.model.AffinityWait.Duration())
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
	for _, w := range waiters {
		w.shared = call
	}
	go l.run(ctx, call, waiters)
}

// run makes the call of a batch and tells each waiter its outcome.
func (l *waitlist) run(ctx context.Context, call *sharedCall, waiters []*waiter) {
	calls := make([]worker.Call, len(waiters))
	for i, w := range waiters {
		calls[i] = w.entry.call
	}
	first := waiters[0].entry
	whole, outcomes := l.callAll(ctx, &dispatch{Dispatcher: l.dispatcher, model: first.model, held: call.held}, calls)
	l.mu.Lock()
	call.over = true
	l.mu.Unlock()
	call.end(nil)
	if lostDevice(whole) {
		for _, w := range waiters {
			l.dispatcher.blame.suspect(w.entry.call.Entry)
		}
	}
	if whole.MaybeRunning {
		call.held.doubt(first.run.Queue.ID, first.run.Entry.ID, worker.Clip(whole.Kind.String()+": "+whole.Reason))
	} else {
		call.held.release()
	}
	for i, w := range waiters {
		if !w.left.IsZero() && ran(outcomes[i]) {
			w.entry.useAfterLeave(time.Since(w.left), call)
		}
	}
	for i, w := range waiters {
		w.granted <- grant{call: call, outcome: &outcomes[i]}
	}
}

// callAll makes one call for several and returns its outcome as a whole and for each. This goroutine is no thread of
// the node, which recovers from a panic of a run.
func (l *waitlist) callAll(ctx context.Context, d *dispatch, calls []worker.Call) (
	whole worker.Outcome, outcomes []worker.Outcome,
) {
	defer func() {
		if v := recover(); v != nil {
			l.dispatcher.log.Error("call for several entries panicked", "model", l.model, "entries", len(calls),
				"panic", v, "stack", string(debug.Stack()))
			whole = unanswered(fmt.Sprintf("%s: %v", leftByPanic, v), nil)
			outcomes = worker.SameForAll(calls, whole)
		}
	}()
	codec, joins := d.held.endpoint.adapter.(worker.BatchCodec)
	if !joins {
		return whole, worker.SameForAll(calls, worker.Outcome{
			Kind: worker.Failed, Class: worker.ClassTransient,
			Reason: "worker's protocol carries one entry a call",
		})
	}
	var err error
	if d.call, err = codec.Join(calls); err != nil {
		return whole, worker.SameForAll(calls, worker.BadPayload(err))
	}
	whole = d.exchange(ctx)
	return whole, codec.Split(calls, whole)
}
