package invalidation

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// OperationID numbers bulk operations.
type OperationID int64

// OperationVerb is what a bulk operation does to each match.
type OperationVerb string

// The verbs of bulk operations.
const (
	RetryFailures   OperationVerb = "retry_failures"
	DiscardFailures OperationVerb = "discard_failures"
	CancelEntries   OperationVerb = "cancel"
	DisableAll      OperationVerb = "disable"
	EnableAll       OperationVerb = "enable"
	DeleteEntries   OperationVerb = "delete" // cancels what does not run and leaves alone what does
)

// Filter chooses entries or failures; all fields that are set must match. The zero Filter is refused: set All.
type Filter struct {
	All       bool          `json:"all,omitempty"`
	Name      string        `json:"name,omitempty"`
	LockKey   string        `json:"lock_key,omitempty"`
	Flow      string        `json:"flow,omitempty"`
	IDs       []EntryID     `json:"ids,omitempty"`
	OlderThan time.Duration `json:"-"`                     // since it was accepted, or failed
	Class     string        `json:"class,omitempty"`       // of failures
	Pattern   string        `json:"fingerprint,omitempty"` // of failures, see Fingerprint
}

// MarshalJSON writes the filter as the schema reads it.
func (f Filter) MarshalJSON() ([]byte, error) {
	type plain Filter
	filter := struct {
		plain
		OlderThan string `json:"older_than,omitempty"`
	}{plain: plain(f)}
	if f.OlderThan > 0 {
		filter.OlderThan = seconds(f.OlderThan)
	}
	return json.Marshal(filter)
}

// Operation is a bulk operation to be: durable, throttled, cancellable.
type Operation struct {
	Queue     string
	Verb      OperationVerb
	Filter    Filter
	PerSecond int // 1000 if zero
	By
}

// CountMatching says how many entries or failures an operation would find now. It reads the queue's whole table.
func CountMatching(ctx context.Context, db postgres.DB, o Operation) (int64, error) {
	var n int64
	err := db.QueryRow(ctx, `SELECT penstock.count_matching($1, $2, $3)`, o.Queue, o.Verb, o.Filter).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("count entries for %s in queue %q: %w", o.Verb, o.Queue, translate(err))
	}
	return n, nil
}

// StartOperation begins a bulk operation on what is in the queue now. The elected leader carries it out (RunOperations).
func StartOperation(ctx context.Context, db postgres.DB, o Operation) (OperationID, error) {
	var id OperationID
	err := db.QueryRow(ctx, `SELECT penstock.start_operation($1, $2, $3, $4, coalesce($5, current_user::text), coalesce(nullif($6::int, 0), 1000))`,
		o.Queue, o.Verb, o.Filter, o.Reason, given(o.Actor), o.PerSecond).Scan(&id)
	if err != nil {
		return 0, fmt.Errorf("start %s in queue %q: %w", o.Verb, o.Queue, translate(err))
	}
	return id, nil
}

// CancelOperation ends a bulk operation; what it has changed stays changed.
func CancelOperation(ctx context.Context, db postgres.DB, id OperationID, by By) error {
	return control(ctx, db, fmt.Sprintf("cancel operation %d", id), `SELECT penstock.cancel_operation($1, $2, $3)`, id, by.Reason, given(by.Actor))
}

// Scope is by what entries are disabled or paused together.
type Scope string

// The scopes.
const (
	ByName    Scope = "name"
	ByLockKey Scope = "lock_key"
)

// DisableEntries disables every entry of a name or lock key, those to come as well. The first 500 are disabled when it
// returns, the rest by the operation.
func DisableEntries(ctx context.Context, db postgres.DB, queue string, scope Scope, value string, by By) (OperationID, error) {
	return switchEntries(ctx, db, "disable", `SELECT penstock.disable_entries($1, $2, $3, $4, coalesce($5, current_user::text))`, queue, scope, value, by)
}

// EnableEntries ends DisableEntries. What is disabled by another name or key stays so.
func EnableEntries(ctx context.Context, db postgres.DB, queue string, scope Scope, value string, by By) (OperationID, error) {
	return switchEntries(ctx, db, "enable", `SELECT penstock.enable_entries($1, $2, $3, $4, coalesce($5, current_user::text))`, queue, scope, value, by)
}

func switchEntries(ctx context.Context, db postgres.DB, verb, sql, queue string, scope Scope, value string, by By) (OperationID, error) {
	var id OperationID
	if err := db.QueryRow(ctx, sql, queue, scope, value, by.Reason, given(by.Actor)).Scan(&id); err != nil {
		return 0, fmt.Errorf("%s entries of queue %q with %s %q: %w", verb, queue, scope, value, translate(err))
	}
	return id, nil
}

// stepSQL does one bounded batch of operation $1: at most 500 changes in a transaction of its own.
const stepSQL = `SELECT changed, wait, ended FROM penstock.step_operation($1)`

// RunOperations carries every running operation on for about a second each, as fast as its throttle lets it, and
// returns how many entries it changed. The elected leader calls it once a second; a process that dies in the middle
// loses nothing, the next call goes on where it stopped.
func RunOperations(ctx context.Context, db postgres.DB) (int, error) {
	ids, err := pgx.CollectRows(postgres.Query(ctx, db, `SELECT id FROM penstock.operation WHERE status = 'running' ORDER BY id LIMIT 100`), pgx.RowTo[OperationID])
	if err != nil {
		return 0, fmt.Errorf("list operations: %w", err)
	}
	total := 0
	for _, id := range ids {
		n, err := runOperation(ctx, db, id)
		total += n
		if err != nil {
			return total, fmt.Errorf("step operation %d: %w", id, translate(err))
		}
	}
	return total, nil
}

// runOperation steps one operation until it has ended, is throttled, or its second is over.
func runOperation(ctx context.Context, db postgres.DB, id OperationID) (int, error) {
	total := 0
	for until := time.Now().Add(time.Second); time.Now().Before(until); {
		var n int
		var wait time.Duration
		var ended bool
		if err := db.QueryRow(ctx, stepSQL, id).Scan(&n, &wait, &ended); err != nil {
			return total, err
		}
		total += n
		if ended || wait > 0 {
			break
		}
	}
	return total, nil
}
