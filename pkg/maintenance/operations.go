package maintenance

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Operations is the duty that carries out bulk operations on entries and failures, as fast as each one's throttle
// lets it, and ends pauses.
type Operations struct {
	cfg     Config
	db      postgres.DB
	fence   Fence
	changed atomic.Int64
	failed  map[int64]retry // operations whose last step failed
}

// retry is when an operation is tried again whose step failed so many times in a row.
type retry struct {
	tries int
	until time.Time
}

// NewOperations returns the duty for one term. It reads through db and writes through fence.
func NewOperations(db postgres.DB, fence Fence, cfg Config) *Operations {
	return &Operations{cfg: cfg.withDefaults(), db: db, fence: fence, failed: map[int64]retry{}}
}

// Run carries out operations until ctx ends.
func (o *Operations) Run(ctx context.Context) error { return o.cfg.loop("operations").Run(ctx, o.pass) }

// Changed returns how many entries and failures were changed in this term.
func (o *Operations) Changed() int64 { return o.changed.Load() }

// pass ends pauses whose time is over, and steps the operations. A step locks the row of its
// operation, so that two leaders never take the same step.
func (o *Operations) pass(ctx context.Context) (time.Duration, error) {
	ended, err := o.endPauses(ctx)
	if err != nil {
		return 0, err
	}
	n, err := o.stepAll(ctx)
	o.changed.Add(int64(n))
	if n > 0 || ended > 0 {
		return 0, err
	}
	return time.Second, err
}

// endPauses returns how many it ended. That the database refuses it keeps no operation from its turn, and is logged.
func (o *Operations) endPauses(ctx context.Context) (ended int, err error) {
	err = o.fence.InTx(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT penstock.end_pauses()`).Scan(&ended)
	})
	if err := o.cfg.tolerate(ctx, err, "end pauses"); err != nil {
		return 0, fmt.Errorf("end pauses: %w", err)
	}
	return ended, nil
}

const runningOperationsSQL = `SELECT id FROM penstock.operation WHERE status = 'running' ORDER BY id LIMIT 1000`

// operationPauseMax bounds the pause before an operation that failed is tried again.
const operationPauseMax = time.Minute

// stepAll steps every running operation for about a second each, as fast as its throttle
// allows, and returns how many entries and failures it changed. Progress is committed with each
// step: after a crash the next call continues from there.
//
// An operation that the database refuses ends neither the duty (it would fail under another leader as well) nor the
// turns of others: its error is logged and recorded, and it is tried again after a pause that doubles.
func (o *Operations) stepAll(ctx context.Context) (int, error) {
	ids, err := pgx.CollectRows(postgres.Query(ctx, o.db, runningOperationsSQL), pgx.RowTo[int64])
	if err != nil {
		return 0, fmt.Errorf("list operations: %w", err)
	}
	maps.DeleteFunc(o.failed, func(id int64, _ retry) bool { return !slices.Contains(ids, id) })
	total := 0
	for _, id := range ids {
		failed := o.failed[id]
		if time.Now().Before(failed.until) {
			continue
		}
		n, err := o.run(ctx, id)
		total += n
		if err := o.cfg.tolerate(ctx, err, "step an operation", "operation", id); err != nil {
			return total, fmt.Errorf("step operation %d: %w", id, err)
		}
		if err == nil {
			delete(o.failed, id)
			continue
		}
		pause := min(time.Second<<min(failed.tries, 10), operationPauseMax)
		o.failed[id] = retry{failed.tries + 1, time.Now().Add(pause)}
		if err := o.record(ctx, id, err); err != nil {
			return total, err
		}
	}
	return total, nil
}

const recordFailedStepSQL = `SELECT penstock.record_failed_step($1, $2)`

// record writes the error of a step to its operation, for operators. That the database refuses it is logged only.
func (o *Operations) record(ctx context.Context, id int64, failed error) error {
	err := o.fence.InTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, recordFailedStepSQL, id, failed.Error())
		return err
	})
	if err := o.cfg.tolerate(ctx, err, "record the error of an operation", "operation", id); err != nil {
		return fmt.Errorf("record the failed step of operation %d: %w", id, err)
	}
	return nil
}

// stepSQL does one bounded batch of operation $1: at most 500 changes in a transaction of its own.
const stepSQL = `SELECT changed, wait, ended FROM penstock.step_operation($1)`

// run steps one operation until it has ended, is throttled, or its second is over.
func (o *Operations) run(ctx context.Context, id int64) (int, error) {
	total := 0
	for until := time.Now().Add(time.Second); time.Now().Before(until); {
		var n int
		var wait time.Duration
		var ended bool
		err := inTerm(ctx, o.db, o.fence, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, stepSQL, id).Scan(&n, &wait, &ended)
		})
		if err != nil {
			return total, err
		}
		total += n
		if ended || wait > 0 {
			break
		}
	}
	return total, nil
}
