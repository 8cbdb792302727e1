package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// PoolShare is how the slots of a model are divided between online calls and durable entries.
// Waiting requests of a pool are known to its gateways alone: each reports it with its heartbeats
// (Node.Load).
type PoolShare struct {
	Model         string          `json:"model"`
	Slots         int32           `json:"slots"`            // of usable instances
	Reserved      int32           `json:"reserved"`         // of them for online calls alone
	BatchReserved int32           `json:"batch_reserved"`   // of them for durable entries alone
	Policy        json.RawMessage `json:"policy,omitempty"` // fields laid over the defaults; absent: the defaults
	ChangedAt     *time.Time      `json:"changed_at,omitempty"`
}

const poolColumns = `
SELECT m.name AS model, r.total AS slots, r.reserved, r.batch_reserved, p.config AS policy, p.changed_at
  FROM penstock.model m
 CROSS JOIN LATERAL penstock.slot_reserves(m.name) r
  LEFT JOIN penstock.gateway_policy p ON p.model = m.name`

const poolsSQL = poolColumns + `
 WHERE m.name > $1
 ORDER BY m.name
 LIMIT $2`

// Pools returns the division of slots of each model, by name, from the first behind the given one.
func (d *Database) Pools(ctx context.Context, after string, limit int) ([]PoolShare, error) {
	return list[PoolShare](ctx, d.db, "pools", poolsSQL, after, page(limit))
}

// Pool returns the division of slots of one model, or ErrNotFound.
func (d *Database) Pool(ctx context.Context, model string) (PoolShare, error) {
	const sql = poolColumns + ` WHERE m.name = $1`
	return show[PoolShare](ctx, d.db, fmt.Sprintf("pool of model %q", model), invalidation.ErrNotFound, sql, model)
}

// SetGatewayPolicy replaces the settings of a model's pool; nil brings the defaults back. Gateways read it
// within two seconds.
func (d *Database) SetGatewayPolicy(ctx context.Context, model string, config []byte, by invalidation.By) error {
	const sql = `SELECT penstock.set_gateway_policy($3, $4::jsonb, $1, coalesce($2, current_user))`
	return d.change(ctx, fmt.Sprintf("set pool of model %q", model), sql, by, model, config)
}

// FlowCriticality is the criticality of a flow's online requests that name none, and the highest that they may name.
type FlowCriticality struct {
	Flow        string    `json:"flow"`
	Criticality string    `json:"criticality"` // critical, default, sheddable
	ChangedAt   time.Time `json:"changed_at"`
}

const flowCriticalitiesSQL = `
SELECT flow, criticality, changed_at FROM penstock.flow_criticality WHERE $1 = '' OR flow > $1 ORDER BY flow LIMIT $2`

// FlowCriticalities returns the flows that have a criticality of their own, by name, from the first behind the given
// one.
func (d *Database) FlowCriticalities(ctx context.Context, after string, limit int) ([]FlowCriticality, error) {
	return list[FlowCriticality](ctx, d.db, "criticalities of flows", flowCriticalitiesSQL, after, page(limit))
}

// SetFlowCriticality sets the criticality of a flow; an empty one removes it.
func (d *Database) SetFlowCriticality(ctx context.Context, flow, criticality string, by invalidation.By) error {
	const sql = `SELECT penstock.set_flow_criticality($3, $4, $1, coalesce($2, current_user))`
	return d.change(ctx, fmt.Sprintf("set criticality of flow %q", flow), sql, by, flow, given(criticality))
}
