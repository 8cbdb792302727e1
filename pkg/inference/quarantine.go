package inference

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/worker"
)

// record tells the breaker what a call came to, and the other nodes if that opened it.
func (r *slotRef) record(ctx context.Context, o worker.Outcome, e evidence) verdict {
	p := r.pool
	p.mu.Lock()
	if o.Kind == worker.Done {
		p.stateOf(r.model).ledger.of(r.slot.Instance).backoff.Reset()
	}
	e.probe, r.probe = r.probe, false
	v := p.breakerOf(r.model).Record(time.Now(), r.endpoint.Server, o, e)
	p.mu.Unlock()
	switch {
	case v.Quarantined:
		r.announce(ctx)
	case v.Suspicious:
		go r.probeSuspect(v.Reason)
	}
	if v.Recycle {
		r.recycle(ctx)
	}
	return v
}

// announce tells the other nodes of a quarantine.
func (r *slotRef) announce(ctx context.Context) {
	p := r.pool
	p.mu.Lock()
	until, reason, _ := p.breakerOf(r.model).Quarantine(time.Now(), r.endpoint.Server)
	p.mu.Unlock()
	p.log.Warn("instance quarantined", "model", r.model, "server", r.endpoint.Server, "until", until,
		"reason", reason)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.tuning.exchangeMax)
	defer cancel()
	if err := quarantine(ctx, p.db, r.endpoint.ID, time.Until(until), reason); err != nil {
		p.log.Warn("quarantine", "error", err)
	}
}

const quarantineSQL = `SELECT penstock.quarantine_instance($1, $2, $3)`

func quarantine(ctx context.Context, db postgres.DB, instance int32, lasts time.Duration, reason string) error {
	_, err := db.Exec(ctx, quarantineSQL, instance, lasts, reason)
	if err != nil {
		return fmt.Errorf("quarantine instance %d: %w", instance, err)
	}
	return nil
}

// probeSuspect asks the last usable instance how it is: it is quarantined only if that fails as well.
func (r *slotRef) probeSuspect(reason string) {
	p := r.pool
	if !p.beginProbe(r.endpoint.ID) {
		return // one at a time
	}
	defer p.endProbe(r.endpoint.ID)
	health := r.endpoint.adapter.Probe(context.Background())
	if health.State.Serving() || health.State == worker.StateStarting {
		return
	}
	p.mu.Lock()
	p.breakerOf(r.model).Condemn(time.Now(), r.endpoint.Server, reason+"; its probe says "+string(health.State))
	p.mu.Unlock()
	r.announce(context.Background())
}

func (p *SlotPool) beginProbe(instance int32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.probing[instance] {
		return false
	}
	p.probing[instance] = true
	return true
}

func (p *SlotPool) endProbe(instance int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.probing, instance)
}

// isLast says whether no other instance of the model takes calls of this node.
func (p *SlotPool) isLast(model string, instance int32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	usable := p.usable(model, time.Now())
	return !slices.ContainsFunc(p.registry.Endpoints(model), func(e *Endpoint) bool {
		return e.ID != instance && usable(e.ID)
	})
}

const recycleSQL = `SELECT penstock.recycle_instance($1)`

// recycle drains an instance whose process has lost its device: only a restart brings it back.
func (r *slotRef) recycle(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.pool.tuning.exchangeMax)
	defer cancel()
	r.pool.log.Error("instance lost its device and must be restarted", "model", r.model, "server", r.endpoint.Server)
	if _, err := r.pool.db.Exec(ctx, recycleSQL, r.endpoint.ID); err != nil {
		r.pool.log.Warn("drain instance", "server", r.endpoint.Server, "error", err)
	}
}
