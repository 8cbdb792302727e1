package recovery

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Operations is the duty that carries out bulk operations on entries and failures, as fast as each one's throttle
// lets it, and ends pauses.
type Operations struct {
	cfg     Config
	db      postgres.DB // its statements commit only within the term
	fence   Fence
	changed atomic.Int64
}

// NewOperations returns the duty for one term.
func NewOperations(db postgres.DB, fence Fence, cfg Config) *Operations {
	return &Operations{cfg: cfg.withDefaults(), db: termDB{db, fence}, fence: fence}
}

// Run carries out operations until ctx ends.
func (o *Operations) Run(ctx context.Context) error { return loop(ctx, o.cfg, "operations", o.pass) }

// Changed returns how many entries and failures were changed in this term.
func (o *Operations) Changed() int64 { return o.changed.Load() }

// pass ends pauses whose time is over, and steps the operations. A step locks the row of its
// operation, so that two leaders never take the same step.
func (o *Operations) pass(ctx context.Context) (time.Duration, error) {
	err := o.fence.InTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT penstock.end_pauses()`)
		if err != nil {
			return fmt.Errorf("end pauses: %w", err)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	n, err := runOperations(ctx, o.db)
	o.changed.Add(int64(n))
	if err != nil && !general(err) {
		// A failed operation does not end the duty: it would fail under another leader as well.
		o.cfg.Log.ErrorContext(ctx, "cannot step operation; the next pass tries again", "error", err)
		err = nil
	}
	if n > 0 {
		return 0, err
	}
	return time.Second, err
}

const runningOperationsSQL = `SELECT id FROM penstock.operation WHERE status = 'running' ORDER BY id LIMIT 100`

// runOperations steps every running operation for about a second each, as fast as its throttle
// allows, and returns how many entries and failures it changed. Progress is committed with each
// step: after a crash the next call continues from there.
func runOperations(ctx context.Context, db postgres.DB) (int, error) {
	ids, err := pgx.CollectRows(postgres.Query(ctx, db, runningOperationsSQL), pgx.RowTo[int64])
	if err != nil {
		return 0, fmt.Errorf("list operations: %w", err)
	}
	total := 0
	for _, id := range ids {
		n, err := runOperation(ctx, db, id)
		total += n
		if err != nil {
			return total, fmt.Errorf("step operation %d: %w", id, err)
		}
	}
	return total, nil
}

// stepSQL does one bounded batch of operation $1: at most 500 changes in a transaction of its own.
const stepSQL = `SELECT changed, wait, ended FROM penstock.step_operation($1)`

// runOperation steps one operation until it has ended, is throttled, or its second is over.
func runOperation(ctx context.Context, db postgres.DB, id int64) (int, error) {
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
