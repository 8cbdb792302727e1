package inference

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// joiner lets the entries of one model on this node wait for each other, or for a worker that has loaded what they need.
// Each of them was claimed like any other, on a permit, under its own lock and limits, and ends on its own: only the
// call is one, on one slot. Nothing waits long: what finds no slot goes back to its place in line.
type joiner struct {
	*Dispatcher
	model string

	mu     sync.Mutex
	former *Former
	riders map[string]*rider // waiting, by entry id
	alarm  *time.Timer
}

// rider is an entry that waits here, or is on its way in a call with others.
type rider struct {
	*attempt
	member worker.Member
	seat   chan seat // takes one
	call   *joint    // nil while it waits
}

// joint is a call for several entries. Its fields are guarded by the joiner.
type joint struct {
	held    *held
	began   time.Time
	members int                     // that it began with
	left    int                     // that still wait for it
	over    bool                    // it has an outcome, which is on its way to them
	end     context.CancelCauseFunc // when none is left
}

// seat is what a rider is told: a slot of its own to make its call on, or what became of it in a call with others. With
// neither, there was no slot.
type seat struct {
	held    *held
	outcome *worker.Outcome
	call    *joint
}

// patience is how long an entry waits for a slot before it goes back to its place in line, where others may take it.
const patience = time.Second

// joins says whether entries of the model wait for each other at all.
func joins(m worker.Model) bool { return m.Batch.Items > 1 || m.AffinityWait > 0 }

func (d *Dispatcher) joiner(model string) *joiner {
	d.mu.Lock()
	defer d.mu.Unlock()
	j := d.joiners[model]
	if j == nil {
		j = &joiner{Dispatcher: d, model: model, former: NewFormer(worker.BatchLimits{}), riders: map[string]*rider{}}
		j.alarm = time.AfterFunc(time.Hour, j.look)
		d.joiners[model] = j
	}
	return j
}

// slotIdled is called by the pool: somebody may wait for the slot.
func (d *Dispatcher) slotIdled(model string) {
	d.mu.Lock()
	j := d.joiners[model]
	d.mu.Unlock()
	if j != nil {
		j.look()
	}
}

// join runs an entry in a call with others of its kind. What cannot be joined, or was in a call that went wrong as a
// whole, waits for a slot of its own.
func (a *attempt) join(ctx context.Context) (json.RawMessage, error) {
	j, alone := a.joiner(a.model.Name), false
	for {
		s := j.wait(ctx, &rider{attempt: a, member: a.measured(alone), seat: make(chan seat, 1)})
		switch {
		case s.held != nil:
			a.held = s.held
			return a.submit(ctx)
		case s.call == nil:
			return nil, a.noRoom(*s.outcome)
		}
		a.held, a.began, a.members = s.call.held, s.call.began, s.call.members
		a.tries++
		switch o := *s.outcome; {
		case o.Alone && ctx.Err() == nil:
			alone, a.tries = true, 0
		case !a.elsewhere(ctx, o):
			return a.answer(ctx, o)
		case a.tries >= a.config.Instances:
			return nil, a.noRoom(o)
		}
	}
}

// measured is the attempt as a member of a batch.
func (a *attempt) measured(alone bool) worker.Member {
	if b, ok := a.batcher(); ok && !alone {
		if m, err := b.Measure(a.call, a.start); err == nil {
			m.Shape = a.hint() + "|" + m.Shape
			return m
		}
	}
	return worker.Member{Entry: a.call.Entry, Shape: "alone|" + a.call.Entry, At: a.start, Alone: true}
}

func (a *attempt) batcher() (worker.BatchCodec, bool) {
	if a.model.Batch.Items <= 1 {
		return nil, false
	}
	for _, e := range a.registry.Endpoints(a.model.Name) {
		b, ok := e.adapter.(worker.BatchCodec)
		return b, ok
	}
	return nil, false
}

func (j *joiner) wait(ctx context.Context, r *rider) seat {
	j.mu.Lock()
	j.former.limits = r.model.Batch.WithDefaults()
	j.former.Add(r.member)
	j.riders[r.member.Entry] = r
	j.mu.Unlock()
	j.look()
	select {
	case s := <-r.seat:
		return s
	case <-ctx.Done():
		return j.leave(r, context.Cause(ctx))
	}
}

// leave ends the wait of a rider whose run was ended. If its call has begun, that goes on for the others: nobody knows
// then whether this one ran. The last to leave ends the call.
func (j *joiner) leave(r *rider, cause error) seat {
	j.mu.Lock()
	if j.former.Withdraw(r.member.Entry) {
		delete(j.riders, r.member.Entry)
		j.mu.Unlock()
		return seat{outcome: &worker.Outcome{Kind: worker.NotReady, Reason: "ended while it waited for a slot", Err: cause}}
	}
	call := r.call
	begun := call != nil && !call.over
	if begun {
		call.left--
	}
	goesOn := begun && call.left > 0
	switch {
	case goesOn:
		call.held.alight()
	case begun:
		call.end(cause)
	}
	j.mu.Unlock()
	if !goesOn {
		return <-r.seat // a slot of its own, or what became of the call
	}
	return seat{call: call, outcome: &worker.Outcome{
		Kind: worker.Unknown, MaybeRunning: true, Err: cause, Reason: "cancel_unconfirmed: the call goes on for the other entries in it",
	}}
}

// look gives idle slots to those who should leave now, and sends back who has waited too long for one.
func (j *joiner) look() {
	j.mu.Lock()
	defer j.mu.Unlock()
	now := time.Now()
	for given := true; given; {
		given = false
		j.pool.unawait(j.model)
		for _, batch := range j.former.Due(now) {
			first := j.riders[batch[0].Entry]
			a := ask{riders: len(batch), hint: first.hint(), until: oldest(batch).Add(first.model.AffinityWait.Duration())}
			held, await := j.pool.assign(j.model, a)
			if held != nil {
				j.start(batch, held)
				given = true
			} else if await != 0 {
				j.pool.await(j.model, await, len(batch))
			}
		}
	}
	j.sendBack(now)
	if at, waiting := j.former.Next(); waiting {
		wait := at.Sub(now)
		if wait <= 0 {
			wait = 20 * time.Millisecond // slots that come free tell; instances that may be tried again do not
		}
		j.alarm.Reset(wait)
	}
}

// sendBack ends the wait of those who found no slot. Entries that must be alone stay: in line they would be joined again.
func (j *joiner) sendBack(now time.Time) {
	for id, r := range j.riders {
		if now.Sub(r.member.At) > max(patience, r.model.AffinityWait.Duration()) && !r.member.Alone && j.former.Withdraw(id) {
			delete(j.riders, id)
			r.seat <- seat{outcome: &worker.Outcome{}}
		}
	}
}

// start sends a batch on its way. An entry by itself makes its call as if nobody ever joined; called with mu held.
func (j *joiner) start(batch Batch, held *held) {
	riders := make([]*rider, len(batch))
	for i, m := range batch {
		riders[i] = j.riders[m.Entry]
		delete(j.riders, m.Entry)
	}
	j.former.Leave(batch)
	if len(riders) == 1 {
		riders[0].seat <- seat{held: held}
		return
	}
	ctx, end := context.WithCancelCause(context.Background())
	call := &joint{held: held, began: time.Now(), members: len(riders), left: len(riders), end: end}
	for _, r := range riders {
		r.call = call
	}
	go j.run(ctx, call, riders)
}

// run makes the call of a batch and tells each rider what became of it.
func (j *joiner) run(ctx context.Context, call *joint, riders []*rider) {
	calls := make([]worker.Call, len(riders))
	for i, r := range riders {
		calls[i] = r.attempt.call
	}
	first := riders[0]
	var whole worker.Outcome
	outcomes := worker.SameForAll(calls, worker.Outcome{Kind: worker.Failed, Class: worker.ClassTransient, Reason: "worker's protocol carries one entry a call"})
	if batcher, ok := call.held.endpoint.adapter.(worker.BatchCodec); ok {
		if joined, err := batcher.Join(calls); err != nil {
			outcomes = worker.SameForAll(calls, worker.BadPayload(err))
		} else {
			a := &attempt{Dispatcher: j.Dispatcher, model: first.model, call: joined, held: call.held}
			whole = a.exchange(ctx)
			outcomes = batcher.Split(calls, whole)
		}
	}
	j.mu.Lock()
	call.over = true
	j.mu.Unlock()
	call.end(nil)
	if whole.MaybeRunning {
		call.held.doubt(first.run.Queue.ID, first.run.Entry.ID, worker.Clip(whole.Kind.String()+": "+whole.Reason))
	} else {
		call.held.release()
	}
	for i, r := range riders {
		r.seat <- seat{call: call, outcome: &outcomes[i]}
	}
}
