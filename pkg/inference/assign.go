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

// held is a permit that is assigned to an entry: the right to one call at a time to an instance. It ends once, in
// release or doubt.
type held struct {
	pool     *SlotPool
	model    string
	slot     *heldSlot
	endpoint *Endpoint
	swapped  bool // the worker ran another thing before
}

// assign gives an entry, or a batch of them, its slot. nil: no instance can take a call just now; await then names the
// one that is worth waiting for, if any is.
func (p *SlotPool) assign(model string, a ask) (h *held, await int32) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !now.Before(p.until) {
		return nil, 0
	}
	account, usable, breaker := p.account(model), p.usable(model, now), p.breakerOf(model)
	slot, swapped, await := account.ledger.assign(now, a, func(instance int32) bool {
		return usable(instance) && breaker.Admit(now, p.registry.Endpoint(instance).Server)
	})
	if slot == nil {
		return nil, await
	}
	account.tally.Calls++
	account.tally.Entries += int64(slot.riders)
	if swapped {
		account.tally.Swaps++
	}
	return &held{pool: p, model: model, slot: slot, endpoint: p.registry.Endpoint(slot.instance), swapped: swapped}, 0
}

// idle says whether any slot of a model is idle here.
func (p *SlotPool) idle(model string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.account(model).ledger.instances {
		if len(s.idle) > 0 {
			return true
		}
	}
	return false
}

const adoptSQL = `SELECT penstock.adopt_slot($1, $2, $3, $4)`

// adopt takes over the slot of a run that this node follows on. nil: it is not to be had any more.
func (p *SlotPool) adopt(ctx context.Context, e *Endpoint, number int32, token int64) (*held, error) {
	p.talk.Lock() // a slot must not appear in between the question and the answer of verify
	defer p.talk.Unlock()
	var fresh *int64
	if err := p.db.QueryRow(ctx, adoptSQL, e.ID, number, token, p.node()).Scan(&fresh); err != nil && !errors.Is(err, pgx.ErrNoRows) {
		p.lostAnswer()
		return nil, fmt.Errorf("adopt slot %d of instance %d: %w", number, e.ID, err)
	}
	if fresh == nil {
		return nil, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	slot := p.account(e.Model.Name).ledger.adopt(slotKey{e.ID, number}, *fresh, time.Now())
	return &held{pool: p, model: e.Model.Name, slot: slot, endpoint: e}, nil
}

// assignOn gives an entry a slot of one certain instance.
func (p *SlotPool) assignOn(e *Endpoint) *held {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !now.Before(p.until) {
		return nil
	}
	h, _, _ := p.account(e.Model.Name).ledger.assign(now, ask{}, func(instance int32) bool { return instance == e.ID })
	if h == nil {
		return nil
	}
	return &held{pool: p, model: e.Model.Name, slot: h, endpoint: e}
}

// release ends the call: the slot is free.
func (h *held) release() {
	p := h.pool
	p.mu.Lock()
	l := p.account(h.model).ledger
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

// alight takes one entry off the call, which goes on for the others of its batch.
func (h *held) alight() {
	h.pool.mu.Lock()
	defer h.pool.mu.Unlock()
	h.pool.account(h.model).ledger.alight(h.slot)
}

// doubt ends the caller's part of a call that may still run at the worker. The slot stays counted until a probe says
// otherwise, and whoever follows the run on can adopt it.
func (h *held) doubt(queue int32, entry invalidation.EntryID, reason string) {
	p := h.pool
	p.mu.Lock()
	a := p.account(h.model)
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
func (h *held) cool(d time.Duration) {
	h.pool.mu.Lock()
	defer h.pool.mu.Unlock()
	h.pool.account(h.model).ledger.shelf(h.slot.instance).cool = time.Now().Add(d)
}

// record tells the breaker what a call came to, and the other nodes if that opened it.
func (h *held) record(ctx context.Context, o worker.Outcome, ran time.Duration) Verdict {
	p := h.pool
	p.mu.Lock()
	v := p.breakerOf(h.model).Record(time.Now(), h.endpoint.Server, o, ran)
	until, reason, _ := p.breakerOf(h.model).Quarantine(time.Now(), h.endpoint.Server)
	p.mu.Unlock()
	if v.Quarantined {
		p.log.Warn("instance quarantined", "model", h.model, "server", h.endpoint.Server, "until", until, "reason", reason)
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
