package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// OperationVerb is the change that a bulk operation makes to each match.
type OperationVerb string

// The verbs of bulk operations.
const (
	RetryFailures   OperationVerb = "retry_failures"
	DiscardFailures OperationVerb = "discard_failures"
	CancelEntries   OperationVerb = "cancel"
	DisableAll      OperationVerb = "disable"
	EnableAll       OperationVerb = "enable"
	DeleteEntries   OperationVerb = "delete" // cancels entries that do not run and skips running ones
)

// Filter chooses entries or failures; all fields that are set must match. The zero Filter is refused: set All.
type Filter struct {
	All       bool                   `json:"all,omitempty"`
	Name      string                 `json:"name,omitempty"`
	LockKey   string                 `json:"lock_key,omitempty"`
	Flow      string                 `json:"flow,omitempty"`
	IDs       []invalidation.EntryID `json:"ids,omitempty"`
	OlderThan time.Duration          `json:"-"`                     // since it was accepted, or failed
	Class     string                 `json:"class,omitempty"`       // of failures
	Pattern   string                 `json:"fingerprint,omitempty"` // of failures, see invalidation.Fingerprint
}

// MarshalJSON writes the filter as the schema reads it.
func (f Filter) MarshalJSON() ([]byte, error) {
	type plain Filter
	filter := struct {
		plain
		OlderThan string `json:"older_than,omitempty"`
	}{plain: plain(f)}
	if f.OlderThan > 0 {
		filter.OlderThan = fmt.Sprintf("%d microseconds", f.OlderThan.Microseconds())
	}
	return json.Marshal(filter)
}

// OperationRequest asks for a bulk operation. It is durable, throttled and can be cancelled.
type OperationRequest struct {
	Queue     string
	Verb      OperationVerb
	Filter    Filter
	PerSecond int // changes a second, at most; 1000 if zero
	invalidation.By
}

// Operation is a bulk operation and its progress.
type Operation struct {
	ID        int64          `json:"id"`
	Queue     string         `json:"queue"`
	Verb      string         `json:"verb"`
	Filter    map[string]any `json:"filter"`
	Status    string         `json:"status" doc:"running, done or cancelled."`
	Matched   int64          `json:"matched"`
	Partial   bool           `json:"partial,omitempty"` // Matched is of the first rows of the queue, which had more
	Changed   int64          `json:"changed"`
	PerSecond int32          `json:"per_second"`
	Actor     string         `json:"actor"`
	Reason    string         `json:"reason"`
	CreatedAt time.Time      `json:"created_at"`
	EndedAt   *time.Time     `json:"ended_at,omitempty"`

	FailedSteps int32      `json:"failed_steps"` // since the last step that did not fail
	FailedAt    *time.Time `json:"failed_at,omitempty"`
	Error       string     `json:"error,omitempty"` // of the step that failed then
}

// AtLeast reports whether more may match than Matched: it was counted among the first rows of the queue alone, or the
// operation has changed as many and has not come to its end. Matched goes up with Changed then.
func (o Operation) AtLeast() bool {
	if o.Status == "done" {
		return o.Partial && o.Changed < o.Matched
	}
	return o.Partial || o.Changed >= o.Matched
}

const operationColumns = `
SELECT o.id, q.name AS queue, o.verb, o.filter, o.status, o.matched, o.partial, o.changed, o.per_second, o.actor,
       o.reason, o.created_at, o.ended_at, o.failed_steps, o.failed_at, coalesce(o.error, '') AS error
  FROM penstock.operation o JOIN penstock.queue q ON q.id = o.queue_id`

// OperationFilter chooses bulk operations; all fields that are set must match.
type OperationFilter struct {
	Queue   string
	Running bool
	Before  int64 // ids below this one
	Limit   int
}

const operationsSQL = operationColumns + `
 WHERE ($1::text IS NULL OR q.name = $1) AND (NOT $2::boolean OR o.status = 'running')
        AND ($4::bigint IS NULL OR o.id < $4)
 ORDER BY o.id DESC
 LIMIT $3`

// Operations returns bulk operations, the newest first.
func (d *Database) Operations(ctx context.Context, f OperationFilter) ([]Operation, error) {
	return list[Operation](ctx, d.db, "operations", operationsSQL, given(f.Queue), f.Running, page(f.Limit),
		given(f.Before))
}

// Operation returns one bulk operation, or invalidation.ErrNotFound.
func (d *Database) Operation(ctx context.Context, id int64) (Operation, error) {
	return show[Operation](ctx, d.db, fmt.Sprintf("operation %d", id), invalidation.ErrNotFound, operationColumns+
		` WHERE o.id = $1`, id)
}

// CountFirst returns how many entries or failures an operation would match now, of the first 100,000 of the queue, and
// whether it has no others: what StartOperation begins with.
func (d *Database) CountFirst(ctx context.Context, o OperationRequest) (n int64, whole bool, err error) {
	const sql = `SELECT matched, whole FROM penstock.count_first(penstock.queue_row($1), $2, $3)`
	if err := d.db.QueryRow(ctx, sql, o.Queue, o.Verb, o.Filter).Scan(&n, &whole); err != nil {
		return 0, false, fmt.Errorf("count entries for %s in queue %q: %w", o.Verb, o.Queue,
			invalidation.Translate(err))
	}
	return n, whole, nil
}

const startSQL = `
SELECT penstock.start_operation($1, $2, $3, $4, coalesce($5, current_user::text), coalesce(nullif($6::int, 0), 1000))`

// StartOperation begins a bulk operation on the entries or failures that the queue has now. The
// elected leader steps it, and so may a caller of Step.
func (d *Database) StartOperation(ctx context.Context, o OperationRequest) (int64, error) {
	var id int64
	err := d.db.QueryRow(ctx, startSQL, o.Queue, o.Verb, o.Filter, o.Reason, given(o.Actor), o.PerSecond).Scan(&id)
	if err != nil {
		return 0, fmt.Errorf("start %s in queue %q: %w", o.Verb, o.Queue, invalidation.Translate(err))
	}
	return id, nil
}

// SwitchEntries disables or enables every entry of a name or lock key, later pushes included, and
// returns the operation: the first 500 entries are changed when it returns, the rest by the
// operation. Entries that are also disabled by another name or key stay disabled.
func (d *Database) SwitchEntries(
	ctx context.Context, v Verb, queue string, scope Scope, value string, by invalidation.By,
) (int64, error) {
	sql := `SELECT penstock.enable_entries($1, $2, $3, $4, coalesce($5, current_user::text))`
	if v == DisableEntry {
		sql = `SELECT penstock.disable_entries($1, $2, $3, $4, coalesce($5, current_user::text))`
	}
	var id int64
	if err := d.db.QueryRow(ctx, sql, queue, scope, value, by.Reason, given(by.Actor)).Scan(&id); err != nil {
		return 0, fmt.Errorf("%s of queue %q with %s %q: %w", v, queue, scope, value, invalidation.Translate(err))
	}
	return id, nil
}

// Step processes one bounded batch of an operation and returns how long its throttle delays the
// next one. It may be called while the leader steps the same operation: then only one of the two
// changes rows.
func (d *Database) Step(ctx context.Context, id int64) (wait time.Duration, err error) {
	var changed int
	var ended bool
	err = d.db.QueryRow(ctx, `SELECT changed, wait, ended FROM penstock.step_operation($1)`, id).Scan(&changed, &wait,
		&ended)
	if err != nil {
		return 0, fmt.Errorf("step operation %d: %w", id, err)
	}
	return wait, nil
}
