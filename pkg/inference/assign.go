package inference

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/worker"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// slotRef is a permit that is assigned to an entry: the right to one call at a time to an instance.
// It ends once, in release or doubt.
type slotRef struct {
	pool     *SlotPool
	model    string
	slot     *heldSlot
	endpoint *Endpoint
	swapped  bool // the worker ran another thing before
}

// assign gives an entry, or a batch of them, its slot. nil: no instance can take a call just now;
// await then names the one that is worth waiting for, if any is.
func (p *SlotPool) assign(model string, a slotRequest) (h *slotRef, await int32) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !now.Before(p.until) {
		return nil, 0
	}
	state, usable, breaker := p.stateOf(model), p.usable(model, now), p.breakerOf(model)
	slot, swapped, await := state.ledger.assign(now, a, func(instance int32) bool {
		return usable(instance) && breaker.Admit(now, p.registry.Endpoint(instance).Server)
	})
	if slot == nil {
		return nil, await
	}
	state.tally.Calls++
	state.tally.Entries += int64(slot.permits)
	if swapped {
		state.tally.Swaps++
	}
	return &slotRef{
		pool: p, model: model, slot: slot, endpoint: p.registry.Endpoint(slot.instance),
		swapped: swapped,
	}, 0
}

// idle says whether any slot of a model is idle here.
func (p *SlotPool) idle(model string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.stateOf(model).ledger.instances {
		if len(s.idle) > 0 {
			return true
		}
	}
	return false
}

const adoptSQL = `SELECT penstock.adopt_slot($1, $2, $3, $4)`

// adopt takes over the slot of a run that this node follows on. nil: it is not to be had any more.
func (p *SlotPool) adopt(ctx context.Context, e *Endpoint, number int32, token int64) (*slotRef, error) {
	p.talk.Lock() // a slot must not appear in between the question and the answer of verify
	defer p.talk.Unlock()
	var fresh *int64
	if err := p.db.QueryRow(ctx, adoptSQL, e.ID, number, token,
		p.node()).Scan(&fresh); err != nil && !errors.Is(err, pgx.ErrNoRows) {
		p.lostAnswer()
		return nil, fmt.Errorf("adopt slot %d of instance %d: %w", number, e.ID, err)
	}
	if fresh == nil {
		return nil, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	slot := p.stateOf(e.Model.Name).ledger.adopt(slotKey{e.ID, number}, *fresh, time.Now())
	return &slotRef{pool: p, model: e.Model.Name, slot: slot, endpoint: e}, nil
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
	return &slotRef{pool: p, model: e.Model.Name, slot: h, endpoint: e}
}

// release ends the call: the slot is free.
func (h *slotRef) release() {
	p := h.pool
	p.mu.Lock()
	l := p.stateOf(h.model).ledger
	l.finish(h.slot, time.Now(), false)
	owed := l.share >= 0 && len(l.held) > l.share
	p.mu.Unlock()
	if owed {
		select {
		case p.kick <- struct{}{}:
		default:
		}
	}
	p.idled(h.model)
}

// leave takes one entry off the call, which goes on for the others of its batch.
func (h *slotRef) leave() {
	h.pool.mu.Lock()
	defer h.pool.mu.Unlock()
	h.pool.stateOf(h.model).ledger.leave(h.slot)
}

// doubt ends the caller's part of a call that may still run at the worker. The slot stays counted
// until a probe says otherwise, and whoever follows the run on can adopt it.
func (h *slotRef) doubt(queue int32, entry invalidation.EntryID, reason string) {
	p := h.pool
	p.mu.Lock()
	a := p.stateOf(h.model)
	a.ledger.finish(h.slot, time.Now(), true)
	if a.ledger.held[h.slot.slotKey] == h.slot {
		a.doubts = append(a.doubts, doubtful{slot: h.slot, queue: queue, entry: entry, reason: reason})
	}
	p.mu.Unlock()
	go func() {
		p.talk.Lock()
		defer p.talk.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), exchangeMax)
		defer cancel()
		if err := p.markDoubts(ctx); err != nil {
			p.log.Warn("mark slots in doubt", "error", err) // Renew tries again
		}
	}()
}

// cool keeps calls from an instance whose worker had no room, for d.
func (h *slotRef) cool(d time.Duration) {
	h.pool.mu.Lock()
	defer h.pool.mu.Unlock()
	h.pool.stateOf(h.model).ledger.of(h.slot.instance).cool = time.Now().Add(d)
}

// record tells the breaker what a call came to, and the other nodes if that opened it.
func (h *slotRef) record(ctx context.Context, o worker.Outcome, ran time.Duration) verdict {
	p := h.pool
	p.mu.Lock()
	v := p.breakerOf(h.model).Record(time.Now(), h.endpoint.Server, o, ran)
	until, reason, _ := p.breakerOf(h.model).Quarantine(time.Now(), h.endpoint.Server)
	p.mu.Unlock()
	if v.Quarantined {
		p.log.Warn("instance quarantined", "model", h.model, "server", h.endpoint.Server, "until", until, "reason",
			reason)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), exchangeMax)
		defer cancel()
		if err := quarantine(ctx, p.db, h.endpoint.ID, time.Until(until), reason); err != nil {
			p.log.Warn("quarantine", "error", err)
		}
	}
	return v
}

const quarantineSQL = `SELECT penstock.quarantine_instance($1, $2, $3)`

func quarantine(ctx context.Context, db postgres.DB, instance int32, lasts time.Duration, reason string) error {
	_, err := db.Exec(ctx, quarantineSQL, instance, lasts, reason)
	if err != nil {
		return fmt.Errorf("quarantine instance %d: %w", instance, err)
	}
	return nil
}
