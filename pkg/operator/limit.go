package operator

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Limit bounds the locks of the queues that use it.
type Limit struct {
	Name     string   `json:"name"`
	MaxUnits *int32   `json:"max_units,omitempty"` // in use at once
	InUse    int64    `json:"in_use"`              // over all flows
	Rate     *float64 `json:"rate,omitempty"`      // units a second
	Burst    *float64 `json:"burst,omitempty"`     // units
	Left     *float64 `json:"left,omitempty"`      // units in the bucket; none for a limit per flow
	PerFlow  bool     `json:"per_flow"`
	PerKey   bool     `json:"per_key"`
	Queues   []string `json:"queues"` // that use it
}

// limitColumns counts the units in use from the lock records, as the claim does.
const limitColumns = `
SELECT l.name, l.max_units, l.rate::numeric::float8 AS rate, l.burst::numeric::float8 AS burst, l.per_flow, l.per_key,
       coalesce((SELECT sum(u.units * (SELECT sum(k.weight) FROM penstock.lock k WHERE k.queue_id = u.queue_id))
                   FROM penstock.limit_use u WHERE u.limit_id = l.id), 0)::bigint AS in_use,
       CASE WHEN l.rate IS NOT NULL AND NOT l.per_flow AND NOT l.per_key THEN penstock.bucket_units(l, '') END AS left,
       ARRAY(SELECT q.name FROM penstock.limit_use u JOIN penstock.queue q ON q.id = u.queue_id
              WHERE u.limit_id = l.id ORDER BY q.name) AS queues
  FROM penstock."limit" l`

// Limits returns the limits by name, from the first behind the given one.
func (d *Database) Limits(ctx context.Context, after string, limit int) ([]Limit, error) {
	const sql = limitColumns + ` WHERE l.name > $1 ORDER BY l.name LIMIT $2`
	return list[Limit](ctx, d.db, "limits", sql, after, page(limit))
}

// Limit returns one limit, or ErrNotFound.
func (d *Database) Limit(ctx context.Context, name string) (Limit, error) {
	const sql = limitColumns + ` WHERE l.name = $1`
	return show[Limit](ctx, d.db, fmt.Sprintf("limit %q", name), invalidation.ErrNotFound, sql, name)
}

// SetLimit makes a limit or changes the options that are given: max_units, rate, burst, per_flow, per_key.
func (d *Database) SetLimit(ctx context.Context, name string, options map[string]any, by invalidation.By) error {
	return d.change(ctx, fmt.Sprintf("set limit %q", name),
		`SELECT penstock.set_limit($3, $4, $1, coalesce($2, current_user))`, by, name, options)
}

// UseLimit applies a limit to a queue, with the given units for each lock; 0 units end it.
func (d *Database) UseLimit(ctx context.Context, queue, limit string, units int, by invalidation.By) error {
	const sql = `SELECT penstock.use_limit($3, $4, $5, $1, coalesce($2, current_user))`
	return d.change(ctx, fmt.Sprintf("put queue %q under limit %q", queue, limit), sql, by, queue, limit, units)
}
