package inference

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// DeadSlot is the slots of one instance that a dead node holds: its calls may still run there.
type DeadSlot struct {
	Model  string              `json:"model"`
	Server string              `json:"server"`
	Node   invalidation.NodeID `json:"node_id"`
	Slots  int                 `json:"slots"`
	Since  time.Time           `json:"since"` // the lapse of the node's lease
}

const deadSlotsSQL = `
SELECT model, server, node_id, slots, since
  FROM penstock.dead_slots
 WHERE $1 = '' OR model = $1
 ORDER BY model, server, node_id`

// DeadSlots lists the slots that dead nodes hold, of one model or, where it is empty, of all.
func DeadSlots(ctx context.Context, db postgres.DB, model string) ([]DeadSlot, error) {
	found, err := pgx.CollectRows(postgres.Query(ctx, db, deadSlotsSQL, model), pgx.RowToStructByPos[DeadSlot])
	if err != nil {
		return nil, fmt.Errorf("list slots of dead nodes: %w", err)
	}
	return found, nil
}

const freeDeadSlotsSQL = `SELECT penstock.free_dead_slots($1, nullif($2, ''), $3, coalesce($4, current_user))`

// FreeDeadSlots frees the slots that dead nodes hold of a model, on one server or, where that is
// empty, on all, and returns how many. Where a worker still runs a call of theirs, it gets one call
// more than it has slots. It returns invalidation.ErrNotFound for a model that is not registered.
func FreeDeadSlots(ctx context.Context, db postgres.DB, model, server string, by By) (freed int, err error) {
	err = db.QueryRow(ctx, freeDeadSlotsSQL, model, server, by.Reason, postgres.Given(by.Actor)).Scan(&freed)
	return freed, explained("free slots of dead nodes of model "+model, err)
}

const setDeviceGroupSQL = `SELECT penstock.set_device_group($1, nullif($2, 0), $3, $4)`

// SetDeviceGroup sets how many slots the instances with the label device_group of that name hold
// together, whatever their models; 0 removes the setting, and then they hold as many as the largest
// of them has.
func SetDeviceGroup(ctx context.Context, db postgres.DB, name string, slots int, by By) error {
	_, err := db.Exec(ctx, setDeviceGroupSQL, name, slots, by.Reason, postgres.Given(by.Actor))
	return explained("set device group "+name, err)
}
