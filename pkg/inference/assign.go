package inference

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
)

// slotRef is a permit that is assigned to an entry: the right to one call at a time to an instance.
// It ends once, in release or doubt.
type slotRef struct {
	pool     *SlotPool
	model    string
	slot     *heldSlot
	endpoint *Endpoint
	swapped  bool // the worker ran another thing before
	probe    bool // the call is to show whether the instance is well again, and has not been made yet
	ended    bool // by release or doubt
}

// assign gives an entry, or a batch of them, its slot. nil: no instance can take a call just now;
// await then names the one that is worth waiting for, if any is.
func (p *SlotPool) assign(model string, want slotRequest) (h *slotRef, await int32) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !now.Before(p.until) {
		return nil, 0
	}
	state, usable, breaker := p.stateOf(model), p.usable(model, now), p.breakerOf(model)
	want.pressed = p.registry.Pressed()
	probe := false
	given, swapped, await := state.ledger.assign(now, want, func(instance int32) (admitted bool) {
		if usable(instance) {
			admitted, probe = breaker.Admit(now, p.registry.Endpoint(instance).Server)
		}
		return admitted
	})
	if given == nil && want.caution == alone {
		state.ledger.reserve(now, want, usable)
		return nil, 0
	}
	if given == nil {
		return nil, await
	}
	state.tally.Calls++
	state.tally.Entries += int64(given.Call.permits)
	if swapped {
		state.tally.Swaps++
	}
	return &slotRef{
		pool: p, model: model, slot: given, endpoint: p.registry.Endpoint(given.Instance),
		swapped: swapped, probe: probe,
	}, 0
}

// idle says whether any slot of a model is idle here.
func (p *SlotPool) idle(model string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stateOf(model).ledger.idle() > 0
}

// adopt takes over the slot of a run that this node follows on. nil: it is not to be had any more.
func (p *SlotPool) adopt(ctx context.Context, e *Endpoint, s slot.Held) (*slotRef, error) {
	ctx, done, err := p.exchange(ctx) // a slot must not appear in between the question and the answer of verify
	if err != nil {
		return nil, err
	}
	defer done()
	own, adopted, err := p.holder.Adopt(ctx, s)
	if err != nil {
		p.lostAnswer()
		return nil, err
	}
	if !adopted {
		return nil, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.stateOf(e.Model.Name).ledger.adopt(own, time.Now())
	h.Call.company = true // as far as is known: its call began before
	return &slotRef{pool: p, model: e.Model.Name, slot: h, endpoint: e}, nil
}

// assignOn gives an entry a slot of one certain instance.
func (p *SlotPool) assignOn(e *Endpoint) *slotRef {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !now.Before(p.until) {
		return nil
	}
	h, _, _ := p.stateOf(e.Model.Name).ledger.assign(now, slotRequest{},
		func(instance int32) bool { return instance == e.ID })
	if h == nil {
		return nil
	}
	h.Call.company = true // as far as is known: its call began before
	return &slotRef{pool: p, model: e.Model.Name, slot: h, endpoint: e}
}

// solitary says whether no other call of this node ran on the instance since this one began.
func (r *slotRef) solitary() bool {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	return r.pool.stateOf(r.model).ledger.solitary(r.slot)
}

// release ends the call: the slot is free.
func (r *slotRef) release() { r.end(false) }

// cede ends the call of a run that was preempted: its slot goes to the gateway that ordered that.
func (r *slotRef) cede() { r.end(true) }

func (r *slotRef) end(ceded bool) {
	p := r.pool
	p.mu.Lock()
	state := p.stateOf(r.model)
	l := state.ledger
	now := time.Now()
	r.forgo()
	r.ended = true
	l.finish(r.slot, now, false)
	owed := l.share >= 0 && l.held() > l.share
	// A slot within the node's share is kept: entries would starve under online load that never ends.
	goes := (ceded || owed && now.Before(state.wanted)) && l.has(r.slot)
	if goes {
		l.sendAway(r.slot) // the permit of the run that has ended goes back without it
	}
	going := l.leaving.Back() > 0
	var wait time.Duration
	if ceded {
		wait = p.ceded()
	}
	p.mu.Unlock()
	if goes {
		time.AfterFunc(wait, func() { p.sendGoing(r.model) })
		return
	}
	if owed || going {
		select {
		case p.kick <- struct{}{}:
		default:
		}
	}
	p.idled(r.model)
}

// forgo lets another call show whether an instance is well again, where the one that was to do so was not made.
// Called with the pool's mu held.
func (r *slotRef) forgo() {
	if r.probe {
		r.probe = false
		r.pool.breakerOf(r.model).Forgo(r.endpoint.Server)
	}
}

// dropPermit takes one entry off the call, which goes on for the others of its batch.
func (r *slotRef) dropPermit() {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	r.pool.stateOf(r.model).ledger.dropPermit(r.slot)
}

// doubt ends the caller's part of a call that may still run at the worker. The slot stays counted
// until a probe says otherwise, and the next follower of the run can adopt it.
func (r *slotRef) doubt(queue int32, entry invalidation.EntryID, reason string) {
	p := r.pool
	p.mu.Lock()
	state := p.stateOf(r.model)
	r.forgo()
	r.ended = true
	held := state.ledger.has(r.slot)
	state.ledger.finish(r.slot, time.Now(), true)
	if held {
		state.ledger.leaving.Doubt(slot.Doubt{Held: r.slot.Held, Queue: queue, Entry: entry, Reason: reason})
	}
	p.mu.Unlock()
	go func() {
		ctx, done, err := p.exchange(context.Background())
		if err == nil {
			defer done()
			err = p.markDoubts(ctx)
		}
		// Renew tries again.
		p.failing.Note(context.Background(), p.log, slog.LevelWarn, "mark slots in doubt", "doubt", err)
	}()
}

// backOff keeps calls of this node from the instance, whose worker had no room, and asked for that wait (0: none).
// Nodes that are refused together do not come again together: the wait is jittered by a quarter.
func (r *slotRef) backOff(asked time.Duration) {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	jitter := 0.75 + 0.5*rand.Float64() //nolint:gosec // jitter
	r.pool.stateOf(r.model).ledger.of(r.slot.Instance).backoff.NoRoom(time.Now(), asked, jitter)
}
