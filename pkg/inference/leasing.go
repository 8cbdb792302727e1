package inference

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

const leaseSlotsSQL = `SELECT instance, slot_number, slot_token, valid_ms FROM penstock.lease_slots($1, $2, $3)`

// abandonedSQL counts the runs of a model that no node follows, and whose entries can be claimed.
const abandonedSQL = `
SELECT count(*)
  FROM penstock.remote_run r
  JOIN penstock.instance i ON i.id = r.instance_id AND i.model = $1
  JOIN penstock.slot s ON s.instance_id = r.instance_id AND s.number = r.slot_number AND s.token = r.slot_token
  JOIN penstock.entry e ON e.queue_id = r.queue_id AND e.id = r.entry_id
 WHERE e.status = 'pending' AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id))
   AND NOT EXISTS (SELECT FROM penstock.lock l
                    WHERE l.queue_id = r.queue_id AND l.lock_key = coalesce(e.lock_key, '#' || e.id))`

func (p *SlotPool) countAbandoned(ctx context.Context, model string) {
	var n int
	if err := p.db.QueryRow(ctx, abandonedSQL, model).Scan(&n); err != nil {
		p.log.Warn("count abandoned runs", "model", model, "error", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stateOf(model).abandoned = n
}

type leasedSlot struct {
	Instance, Number int32
	Token            int64
	ValidMS          int64
}

// lease asks for slots for so many permits. It says whether there are any new ones.
func (p *SlotPool) lease(model string, want int) bool {
	if !p.talk.TryLock() {
		return false // another goroutine leases
	}
	defer p.talk.Unlock()
	start := time.Now()
	p.mu.Lock()
	a := p.stateOf(model)
	backingOff := start.Before(a.nextLease)
	block := min((want+a.ledger.perSlot-1)/a.ledger.perSlot, max(len(a.ledger.held), 1), blockMax)
	p.mu.Unlock()
	if backingOff || len(p.registry.Endpoints(model)) == 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), exchangeMax)
	defer cancel()
	got, err := pgx.CollectRows(postgres.Query(ctx, p.db, leaseSlotsSQL, model, p.node(), block),
		pgx.RowToStructByPos[leasedSlot])
	if err != nil {
		p.log.Warn("lease slots", "model", model, "error", err)
		p.lostAnswer()
		return p.leased(model, nil, start)
	}
	if len(got) == 0 {
		p.countAbandoned(ctx, model)
	}
	return p.leased(model, got, start)
}

func (p *SlotPool) leased(model string, got []leasedSlot, start time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.stateOf(model)
	if len(got) == 0 {
		a.nextLease = time.Now().Add(p.config.RetryInterval)
		return false
	}
	a.nextLease = time.Time{}
	for _, s := range got {
		a.ledger.add(slotKey{s.Instance, s.Number}, s.Token, time.Now())
		p.rely(start, s.ValidMS)
	}
	p.limit(model, a)
	return true
}

// lostAnswer notes that the database may have done something about slots of which the node knows
// nothing: it asks.
func (p *SlotPool) lostAnswer() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unsure = true
}

// doubtSQL marks slots $1 to $3 as in doubt: they have no caller any more, but their calls may still run.
const doubtSQL = `
UPDATE penstock.slot s
   SET doubt_at = clock_timestamp(), doubt = k.reason, queue_id = k.queue_id, entry_id = k.entry_id
  FROM unnest($1::int[], $2::int[], $3::bigint[], $4::text[], $5::int[], $6::bigint[])
       k(instance_id, number, token, reason, queue_id, entry_id)
 WHERE s.instance_id = k.instance_id AND s.number = k.number AND s.token = k.token`

func (p *SlotPool) markDoubts(ctx context.Context) error {
	p.mu.Lock()
	var all []doubtful
	for _, a := range p.models {
		all = append(all, a.doubts...)
		a.doubts = nil
	}
	p.mu.Unlock()
	if len(all) == 0 {
		return nil
	}
	instances, numbers, tokens := columnsOf(all, func(d doubtful) *heldSlot { return d.slot })
	reasons, queues, entries := make([]string, len(all)), make([]int32, len(all)), make([]int64, len(all))
	for i, d := range all {
		reasons[i], queues[i], entries[i] = d.reason, d.queue, int64(d.entry)
	}
	_, err := p.db.Exec(ctx, doubtSQL, instances, numbers, tokens, reasons, queues, entries)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range all {
		a := p.models[p.modelOf(d.slot)]
		switch {
		case a == nil: // lost meanwhile
		case err != nil:
			a.doubts = append(a.doubts, d)
		default:
			a.ledger.lose(d.slot)
		}
	}
	if err != nil {
		return fmt.Errorf("mark %d slots in doubt: %w", len(all), err)
	}
	return nil
}

// modelOf finds the ledger that knows a slot; called with mu held.
func (p *SlotPool) modelOf(h *heldSlot) string {
	for model, a := range p.models {
		if a.ledger.held[h.slotKey] == h {
			return model
		}
	}
	return ""
}

const returnSlotsSQL = `
DELETE FROM penstock.slot s
 USING unnest($1::int[], $2::int[], $3::bigint[]) k(instance_id, number, token)
 WHERE s.instance_id = k.instance_id AND s.number = k.number AND s.token = k.token AND s.node_id = $4`

// giveBack returns what the node has no use for. If the answer is lost, it is returned again.
func (p *SlotPool) giveBack(ctx context.Context, idleMax time.Duration) error {
	now := time.Now()
	p.mu.Lock()
	var out []*heldSlot
	of := map[string][]*heldSlot{}
	for model, a := range p.models {
		of[model] = a.ledger.surplus(now, idleMax, p.usable(model, now))
		out = append(out, of[model]...)
	}
	p.mu.Unlock()
	if len(out) == 0 {
		return nil
	}
	instances, numbers, tokens := columnsOf(out, func(h *heldSlot) *heldSlot { return h })
	if _, err := p.db.Exec(ctx, returnSlotsSQL, instances, numbers, tokens, p.node()); err != nil {
		p.leaveAgain(of)
		return fmt.Errorf("give back %d slots: %w", len(out), err)
	}
	return nil
}

func columnsOf[T any](list []T, slot func(T) *heldSlot) (instances, numbers []int32, tokens []int64) {
	for _, item := range list {
		h := slot(item)
		instances, numbers, tokens = append(instances, h.instance), append(numbers, h.number), append(tokens, h.token)
	}
	return instances, numbers, tokens
}

const sharesSQL = `SELECT name, coalesce(penstock.slot_share(name, $2), -1) FROM unnest($1::text[]) m(name)`

// readShares learns how much the node may hold of each model: everything, unless others go without.
func (p *SlotPool) readShares(ctx context.Context) error {
	var names []string
	p.mu.Lock()
	for model, a := range p.models {
		if len(a.ledger.held) > 0 {
			names = append(names, model)
		}
	}
	p.mu.Unlock()
	var name string
	var share int
	_, err := pgx.ForEachRow(postgres.Query(ctx, p.db, sharesSQL, names, p.node()), []any{&name, &share}, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.stateOf(name).ledger.share = share
		return nil
	})
	if err != nil {
		return fmt.Errorf("read shares of slots: %w", err)
	}
	return nil
}

const reliefSQL = `SELECT name, penstock.unpressed_room(name) FROM unnest($1::text[]) m(name)`

// readRelief learns how many slots of pressed instances may be exchanged for slots of others. Where entries
// choose their instance by labels there is no exchange: the others may not be for them.
func (p *SlotPool) readRelief(ctx context.Context) error {
	pressed := p.registry.Pressed()
	var names []string
	p.mu.Lock()
	for name, a := range p.models {
		a.ledger.pressed, a.ledger.relief = pressed, 0
		model, known := p.registry.Model(name)
		if known && model.LabelsField == "" && a.ledger.holdsPressed() {
			names = append(names, name)
		}
	}
	p.mu.Unlock()
	if len(names) == 0 {
		return nil
	}
	var name string
	var room int
	_, err := pgx.ForEachRow(postgres.Query(ctx, p.db, reliefSQL, names), []any{&name, &room}, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.stateOf(name).ledger.relief = room
		return nil
	})
	if err != nil {
		return fmt.Errorf("count free slots of instances that are not pressed: %w", err)
	}
	return nil
}

const heldSlotsSQL = `SELECT instance, slot_number, slot_token, in_doubt, valid_ms FROM penstock.held_slots($1)`

type heldRow struct {
	Instance, Number *int32
	Token            *int64
	Doubt            bool
	ValidMS          int64
}

// verify learns which slots are ours: those that were freed meanwhile are dropped, those whose
// lease we never heard the answer to are taken in.
func (p *SlotPool) verify(ctx context.Context) error {
	start := time.Now()
	held, err := pgx.CollectRows(postgres.Query(ctx, p.db, heldSlotsSQL, p.node()), pgx.RowToStructByPos[heldRow])
	if err != nil {
		return fmt.Errorf("read held slots: %w", err)
	}
	p.mu.Lock()
	p.unsure = false
	came := p.reconcile(held, start)
	p.mu.Unlock()
	if came {
		p.config.Freed()
	}
	return nil
}

// reconcile is called with mu held. It says whether slots came in.
func (p *SlotPool) reconcile(held []heldRow, start time.Time) (came bool) {
	ours := map[slotKey]int64{}
	for _, r := range held {
		p.rely(start, r.ValidMS)
		if r.Instance != nil && !r.Doubt {
			ours[slotKey{*r.Instance, *r.Number}] = *r.Token
		}
	}
	for _, a := range p.models {
		for key, h := range a.ledger.held {
			if ours[key] != h.token {
				a.ledger.lose(h)
			} else {
				delete(ours, key)
			}
		}
	}
	for key, token := range ours {
		if e := p.registry.Endpoint(key.instance); e != nil {
			a := p.stateOf(e.Model.Name)
			if a.ledger.isLeaving(key, token) {
				continue // its row exists until it is given back
			}
			a.ledger.add(key, token, time.Now())
			p.limit(e.Model.Name, a)
			came = true
		}
	}
	return came
}
