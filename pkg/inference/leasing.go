package inference

import (
	"context"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// abandonedSQL counts the runs of a model that no node follows, and whose entries can be claimed. It reads the entries
// of those runs alone.
const abandonedSQL = `
SELECT count(*) FILTER (WHERE penstock.entry_waits(r.queue_id, r.entry_id))
  FROM penstock.remote_run r
  JOIN penstock.instance i ON i.id = r.instance_id AND i.model = $1
  JOIN penstock.slot s ON s.instance_id = r.instance_id AND s.number = r.slot_number AND s.token = r.slot_token
 WHERE s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id)`

func (p *SlotPool) countAbandoned(ctx context.Context, model string) {
	var n int
	p.note("count abandoned runs", model, p.db.QueryRow(ctx, abandonedSQL, model).Scan(&n))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stateOf(model).abandoned = n
}

// lease asks for slots for so many permits. It says whether there are any new ones.
func (p *SlotPool) lease(model string, want int) bool {
	if !p.talk.TryLock() {
		return false // another goroutine leases
	}
	defer p.talk.Unlock()
	p.mu.Lock()
	state := p.stateOf(model)
	backingOff := time.Now().Before(state.nextLease)
	block := min((want+state.ledger.perSlot-1)/state.ledger.perSlot, max(state.ledger.held(), 1), blockMax)
	p.mu.Unlock()
	if backingOff || len(p.registry.Endpoints(model)) == 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), p.tuning.exchangeMax)
	defer cancel()
	got, err := p.holder.Lease(ctx, model, block)
	p.note("lease slots", model, err)
	switch {
	case err != nil:
		p.lostAnswer()
	case len(got.Slots) == 0:
		p.countAbandoned(ctx, model)
	}
	return p.leased(model, got)
}

func (p *SlotPool) leased(model string, got slot.Holding) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.stateOf(model)
	if len(got.Slots) == 0 {
		state.nextLease = time.Now().Add(p.tuning.leaseRetry)
		return false
	}
	state.nextLease = time.Time{}
	for _, s := range got.Slots {
		state.ledger.add(s, time.Now())
	}
	p.rely(got.Until)
	p.limit(model, state)
	return true
}

// lostAnswer notes that the database may have done something about slots of which the node knows
// nothing: it asks.
func (p *SlotPool) lostAnswer() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unsure = true
}

func (p *SlotPool) markDoubts(ctx context.Context) error {
	p.mu.Lock()
	var all []slot.Doubt
	of := map[*modelState][]slot.Doubt{}
	for _, state := range p.models {
		of[state] = state.ledger.leaving.TakeDoubts()
		all = append(all, of[state]...)
	}
	p.mu.Unlock()
	if len(all) == 0 {
		return nil
	}
	err := p.holder.Doubt(ctx, all)
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	for state, doubts := range of {
		state.ledger.leaving.Doubted(now, err == nil, doubts...)
	}
	return err
}

// returnSurplus returns the slots that the node has no use for. If the answer is lost, they are returned again.
func (p *SlotPool) returnSurplus(ctx context.Context, idleMax time.Duration) error {
	now := time.Now()
	p.mu.Lock()
	var out []slot.Held
	of := map[string][]slot.Held{}
	for model, state := range p.models {
		of[model] = state.ledger.surplus(now, idleMax, p.usable(model, now))
		out = append(out, of[model]...)
	}
	p.mu.Unlock()
	if len(out) == 0 {
		return nil
	}
	err := p.holder.Return(ctx, out)
	p.gaveBack(of, err == nil)
	return err
}

// readShares learns how much the node may hold of each model: everything, unless others go without.
func (p *SlotPool) readShares(ctx context.Context) error {
	var names []string
	p.mu.Lock()
	for model, state := range p.models {
		if state.ledger.held() > 0 {
			names = append(names, model)
		}
	}
	p.mu.Unlock()
	asked := time.Now()
	shares, err := p.holder.Shares(ctx, names)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sharesTook = time.Since(asked)
	if err != nil {
		return err
	}
	for _, name := range names {
		share, limited := shares[name]
		if !limited {
			share = -1
		}
		p.stateOf(name).ledger.share = share
	}
	return nil
}

// readRelief learns how many slots of pressed instances may be exchanged for slots of others. Where entries
// choose their instance by labels there is no exchange: the others may not be for them.
func (p *SlotPool) readRelief(ctx context.Context) error {
	pressed := p.registry.Pressed()
	var names []string
	p.mu.Lock()
	for name, state := range p.models {
		state.ledger.pressed, state.ledger.relief = pressed, 0
		model, known := p.registry.Model(name)
		if known && model.LabelsField == "" && state.ledger.holdsPressed() {
			names = append(names, name)
		}
	}
	p.mu.Unlock()
	if len(names) == 0 {
		return nil
	}
	rooms, err := p.holder.Unpressed(ctx, names)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, room := range rooms {
		p.stateOf(name).ledger.relief = room
	}
	return nil
}

// verify learns which slots are ours: those that were freed meanwhile are dropped, those whose
// lease we never heard the answer to are taken in.
func (p *SlotPool) verify(ctx context.Context) error {
	now := time.Now()
	p.mu.Lock()
	for _, state := range p.models {
		state.ledger.leaving.ForgetBefore(now)
	}
	p.mu.Unlock()
	held, err := p.holder.Slots(ctx)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.unsure = false
	p.rely(held.Until)
	came := p.reconcile(held.Slots)
	p.mu.Unlock()
	if came {
		p.freed()
	}
	return nil
}

// reconcile is called with mu held. It says whether slots came in.
func (p *SlotPool) reconcile(held []slot.Held) (came bool) {
	ours := map[slot.Held]bool{}
	for _, s := range held {
		ours[s] = true
	}
	for _, state := range p.models {
		for _, s := range state.ledger.instances {
			for h := range s.All() {
				if !ours[h.Held] {
					state.ledger.lose(h)
				} else {
					delete(ours, h.Held)
				}
			}
		}
	}
	for s := range ours {
		if e := p.registry.Endpoint(s.Instance); e != nil {
			state := p.stateOf(e.Model.Name)
			if state.ledger.leaving.Has(s) {
				continue // its row exists until it is given back
			}
			state.ledger.add(s, time.Now())
			p.limit(e.Model.Name, state)
			came = true
		}
	}
	return came
}
