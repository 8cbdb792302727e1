package operator

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Slot is a slot of an instance that a node holds.
type Slot struct {
	Model    string     `json:"model"`
	Server   string     `json:"server"`
	Number   int32      `json:"number"`
	Token    int64      `json:"token"`
	NodeID   NodeID     `json:"node_id"`
	LeasedAt time.Time  `json:"leased_at"`
	DoubtAt  *time.Time `json:"doubt_at,omitempty"` // since when the call of a lost node may still run
	Doubt    string     `json:"doubt,omitempty"`
	EntryID  *int64     `json:"entry_id,omitempty"`
}

const slotsSQL = `
SELECT i.model, i.server, s.number, s.token, s.node_id, s.leased_at, s.doubt_at, coalesce(s.doubt, '') AS doubt,
       s.entry_id
  FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id
 WHERE ($1::text IS NULL OR i.model = $1) AND s.token > $2
 ORDER BY s.token
 LIMIT $3`

// Slots returns the held slots, oldest lease first, from the first token after the given one; of
// one model if it is not empty.
func (d *Database) Slots(ctx context.Context, model string, after int64, limit int) ([]Slot, error) {
	return list[Slot](ctx, d.db, "slots", slotsSQL, given(model), after, page(limit))
}

// DeadSlots are the slots of one instance that one dead node holds: calls of that node may still
// run there.
type DeadSlots struct {
	Model  string    `json:"model"`
	Server string    `json:"server"`
	NodeID NodeID    `json:"node_id"`
	Slots  int       `json:"slots"`
	Since  time.Time `json:"since"` // the lapse of the node's lease
}

// DeadSlotsKey is the position of DeadSlots in the list.
type DeadSlotsKey struct {
	Model, Server string
	NodeID        NodeID
}

const deadSlotsSQL = `
SELECT model, server, node_id, slots, since
  FROM penstock.dead_slots
 WHERE ($1::text IS NULL OR model = $1) AND (model, server, node_id) > ($2, $3, $4)
 ORDER BY model, server, node_id
 LIMIT $5`

// DeadSlots returns the slots that dead nodes hold by model, instance and node, from the first behind the given key;
// of one model if it is not empty.
func (d *Database) DeadSlots(ctx context.Context, model string, after DeadSlotsKey, limit int) ([]DeadSlots, error) {
	return list[DeadSlots](ctx, d.db, "slots of dead nodes", deadSlotsSQL, given(model), after.Model, after.Server,
		int64(after.NodeID), page(limit))
}

// FreeDeadSlots frees the slots of a model that dead nodes hold, on one instance or, if server is
// empty, on all, and returns how many. Where the worker still runs a call of theirs, it gets one
// call more than it has slots. It returns invalidation.ErrNotFound for an unknown model.
func (d *Database) FreeDeadSlots(ctx context.Context, model, server string, by invalidation.By) (freed int, err error) {
	const sql = `SELECT penstock.free_dead_slots($1, $2, $3, coalesce($4, current_user))`
	if err := d.db.QueryRow(ctx, sql, model, given(server), by.Reason, given(by.Actor)).Scan(&freed); err != nil {
		return 0, fmt.Errorf("free slots of dead nodes of model %q: %w", model, invalidation.Translate(err))
	}
	return freed, nil
}

// SetDeviceGroup sets how many slots the instances with this value of the label device_group have
// together, whatever their models. With 0 they have as many as the largest of them.
func (d *Database) SetDeviceGroup(ctx context.Context, name string, slots int, by invalidation.By) error {
	const sql = `SELECT penstock.set_device_group($3, $4, $1, coalesce($2, current_user))`
	return d.change(ctx, fmt.Sprintf("set device group %q", name), sql, by, name, given(slots))
}
