package slot

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

const leaseSQL = `
SELECT instance, slot_number, slot_token, false AS in_doubt, valid_ms FROM penstock.lease_slots($1, $2, $3)`

// Lease asks for up to want slots of a model, of any of its instances. If there are none the database remembers the
// demand of the node for 3 s.
func (h *Holder) Lease(ctx context.Context, model string, want int) (Holding, error) {
	leased, err := h.read(ctx, leaseSQL, model, h.Node(), want)
	if err != nil {
		return Holding{}, fmt.Errorf("lease %d slots of model %q: %w", want, model, err)
	}
	return leased, nil
}

// Limited is instances that could not use all of their slots, and how many more of its slots each could use.
type Limited struct{ Instances, Rooms []int32 }

const leaseWithinSQL = `
SELECT instance, slot_number, slot_token, false AS in_doubt, valid_ms
  FROM penstock.lease_slots_within($1, $2, $3, $4, $5)`

// LeaseWithin is Lease for a gateway, which sends an instance no more calls than it has seen it bear: of limited
// instances it gets no more slots than these could use. A task node has no such limits: entries come back when a worker
// has no room. If a gateway gets fewer slots than it asks for the database remembers how many are missing, and tells
// the holders of idle ones.
func (h *Holder) LeaseWithin(ctx context.Context, model string, want int, limited Limited) (Holding, error) {
	leased, err := h.read(ctx, leaseWithinSQL, model, h.Node(), want, limited.Instances, limited.Rooms)
	if err != nil {
		return Holding{}, fmt.Errorf("lease %d slots of model %q: %w", want, model, err)
	}
	return leased, nil
}

// slotsSQL returns a row without a slot if the node holds none.
const slotsSQL = `
SELECT instance, slot_number, slot_token, in_doubt, valid_ms
  FROM penstock.held_slots($1) CROSS JOIN (SELECT penstock.await_standby()) standby`

// Slots reads which slots of all models are the node's, those in doubt left out. It waits for a synchronous standby, as
// their leases did: after a failover that lost them other nodes could have the same slots.
func (h *Holder) Slots(ctx context.Context) (Holding, error) {
	held, err := h.read(ctx, slotsSQL, h.Node())
	if err != nil {
		return Holding{}, fmt.Errorf("read held slots: %w", err)
	}
	return held, nil
}

// read sends a statement that answers with slots of the node, and what is left of its lease.
func (h *Holder) read(ctx context.Context, sql string, args ...any) (Holding, error) {
	var (
		holding          Holding
		instance, number *int32
		token            *int64
		inDoubt          bool
		leftMS           int64
	)
	asked := time.Now()
	_, err := pgx.ForEachRow(postgres.Query(ctx, h.DB, sql, args...),
		[]any{&instance, &number, &token, &inDoubt, &leftMS}, func() error {
			holding.Until = asked.Add(time.Duration(leftMS) * time.Millisecond)
			if instance != nil && !inDoubt {
				holding.Slots = append(holding.Slots, Held{Instance: *instance, Number: *number, Token: *token})
			}
			return nil
		})
	return holding, err
}

const adoptSQL = `SELECT penstock.adopt_slot($1, $2, $3, $4)`

// Adopt takes over a slot whose holder is dead, or has put it in doubt, under a new token. adopted is false if it is
// not to be had any more.
func (h *Holder) Adopt(ctx context.Context, s Held) (own Held, adopted bool, err error) {
	var token *int64
	err = h.DB.QueryRow(ctx, adoptSQL, s.Instance, s.Number, s.Token, h.Node()).Scan(&token)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return Held{}, false, fmt.Errorf("adopt slot %d of instance %d: %w", s.Number, s.Instance, err)
	}
	if token == nil {
		return Held{}, false, nil
	}
	return Held{Instance: s.Instance, Number: s.Number, Token: *token}, true, nil
}
