package operator

import "context"

// Degradation is a condition that stops or slows work although every process runs.
type Degradation struct {
	// Code is dead_slots, quarantined, no_instance, no_hints or standstill.
	Code     string `json:"code"`
	Object   string `json:"object"` // "model NAME", "node NAME" or "queue NAME"
	Critical bool   `json:"critical"`
	Detail   string `json:"detail"` // text for operators, which names the object, with figures and causes
}

const degradationsSQL = `SELECT code, object, critical, detail FROM penstock.degradations() LIMIT $1`

// Degradations returns the present degradations, critical ones first. The doctor and the leader's
// metrics use the same function. Standstills are found in the elected leader's samples: without a
// leader there are none.
func (d *Database) Degradations(ctx context.Context, limit int) ([]Degradation, error) {
	return list[Degradation](ctx, d.db, "degradations", degradationsSQL, page(limit))
}
