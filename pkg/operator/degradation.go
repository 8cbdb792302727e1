package operator

import "context"

// Degradation is a state in which work stands still, or is slower than it should be, while every process runs.
type Degradation struct {
	// Code is dead_slots, quarantined, no_instance, no_hints or standstill.
	Code     string `json:"code"`
	Object   string `json:"object"` // "model NAME", "node NAME" or "queue NAME"
	Critical bool   `json:"critical"`
	Detail   string `json:"detail"` // for people, with figures and causes
}

const degradationsSQL = `SELECT code, object, critical, detail FROM penstock.degradations() LIMIT $1`

// Degradations returns them, the critical ones first; none is the good answer. The doctor and the leader's metrics show
// the same ones. Standstills are found in the elected leader's samples: without a leader there are none.
func (d *Database) Degradations(ctx context.Context, limit int) ([]Degradation, error) {
	return list[Degradation](ctx, d.db, "degradations", degradationsSQL, page(limit))
}
