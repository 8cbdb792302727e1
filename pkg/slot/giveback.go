package slot

import (
	"context"
	"fmt"
)

const returnSQL = `
DELETE FROM penstock.slot s
 USING unnest($1::int[], $2::int[], $3::bigint[]) k(instance_id, number, token)
 WHERE s.instance_id = k.instance_id AND s.number = k.number AND s.token = k.token AND s.node_id = $4`

// Return frees slots of any models, without a look at what other nodes miss: task nodes return what has been idle for a
// while, and a gateway that misses slots has told them before (HandOver). It waits for no lease of the models.
func (h *Holder) Return(ctx context.Context, slots []Held) error {
	instances, numbers, tokens := columns(slots)
	if _, err := h.DB.Exec(ctx, returnSQL, instances, numbers, tokens, h.Node()); err != nil {
		return fmt.Errorf("return %d slots: %w", len(slots), err)
	}
	return nil
}

const handOverSQL = `SELECT penstock.hand_over_slots($1, $2, $3, $4, $5)`

// HandOver gives slots of a model to the gateways that miss some, and frees the rest.
func (h *Holder) HandOver(ctx context.Context, model string, slots []Held) error {
	instances, numbers, tokens := columns(slots)
	if _, err := h.DB.Exec(ctx, handOverSQL, model, h.Node(), instances, numbers, tokens); err != nil {
		return fmt.Errorf("hand over %d slots of model %q: %w", len(slots), model, err)
	}
	return nil
}

const offerSQL = `SELECT penstock.offer_slots($1, $2, $3, $4, $5)`

// Offer is HandOver of as many slots as the other nodes miss together, from the first on; the rest stays the node's. It
// returns how many they missed, which may be more than were offered. Gateways offer, as they have a use for what nobody
// misses: requests may come that would wait for a lease.
func (h *Holder) Offer(ctx context.Context, model string, slots []Held) (missed int, err error) {
	instances, numbers, tokens := columns(slots)
	err = h.DB.QueryRow(ctx, offerSQL, model, h.Node(), instances, numbers, tokens).Scan(&missed)
	if err != nil {
		return 0, fmt.Errorf("offer %d slots of model %q: %w", len(slots), model, err)
	}
	return missed, nil
}
