package operator

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Operation is a bulk operation and how far it has come.
type Operation struct {
	ID        int64          `json:"id"`
	Queue     string         `json:"queue"`
	Verb      string         `json:"verb"`
	Filter    map[string]any `json:"filter"`
	Status    string         `json:"status"` // running, done, cancelled
	Matched   int64          `json:"matched"`
	Changed   int64          `json:"changed"`
	PerSecond int32          `json:"per_second"`
	Actor     string         `json:"actor"`
	Reason    string         `json:"reason"`
	CreatedAt time.Time      `json:"created_at"`
	EndedAt   *time.Time     `json:"ended_at,omitempty"`
}

const operationColumns = `
SELECT o.id, q.name AS queue, o.verb, o.filter, o.status, o.matched, o.changed, o.per_second, o.actor, o.reason, o.created_at, o.ended_at
  FROM penstock.operation o JOIN penstock.queue q ON q.id = o.queue_id`

// OperationFilter chooses bulk operations; all fields that are set must match.
type OperationFilter struct {
	Queue   string
	Running bool
	Before  int64 // ids below this one
	Limit   int
}

// Operations returns bulk operations, the newest first.
func (d *Database) Operations(ctx context.Context, f OperationFilter) ([]Operation, error) {
	const sql = operationColumns + `
 WHERE ($1::text IS NULL OR q.name = $1) AND (NOT $2::boolean OR o.status = 'running') AND ($4::bigint IS NULL OR o.id < $4)
 ORDER BY o.id DESC
 LIMIT $3`
	return list[Operation](ctx, d.db, "operations", sql, given(f.Queue), f.Running, page(f.Limit), given(f.Before))
}

// Operation returns one bulk operation, or invalidation.ErrNotFound.
func (d *Database) Operation(ctx context.Context, id int64) (Operation, error) {
	return show[Operation](ctx, d.db, fmt.Sprintf("operation %d", id), invalidation.ErrNotFound, operationColumns+` WHERE o.id = $1`, id)
}

// CountMatching says how many an operation would find now.
func (d *Database) CountMatching(ctx context.Context, o invalidation.Operation) (int64, error) {
	return invalidation.CountMatching(ctx, d.db, o)
}

// StartOperation begins a bulk operation. Whoever steps it carries it out: the elected leader, and Step.
func (d *Database) StartOperation(ctx context.Context, o invalidation.Operation) (int64, error) {
	id, err := invalidation.StartOperation(ctx, d.db, o)
	return int64(id), err
}

// Step carries an operation on by one bounded batch and says how long its throttle holds it. It may be called while
// the leader steps the same operation: then only one of them changes anything.
func (d *Database) Step(ctx context.Context, id int64) (wait time.Duration, err error) {
	var changed int
	var ended bool
	err = d.db.QueryRow(ctx, `SELECT changed, wait, ended FROM penstock.step_operation($1)`, id).Scan(&changed, &wait, &ended)
	if err != nil {
		return 0, fmt.Errorf("step operation %d: %w", id, err)
	}
	return wait, nil
}
