package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The verbs of the schema as the tests of the stepper give them. Operators have them in pkg/operator.

// Pause lets the parts that run end and starts no others, until somebody resumes the batch or until a time to come if
// that is not zero.
func Pause(ctx context.Context, db postgres.DB, id int64, by invalidation.By, until time.Time) error {
	return run(ctx, db, "pause", id, `SELECT penstock.pause_batch($1, $2, coalesce($3, current_user::text), $4)`, by, postgres.Given(until))
}

// Resume ends a pause. Parts that ended are not run again.
func Resume(ctx context.Context, db postgres.DB, id int64, by invalidation.By) error {
	return run(ctx, db, "resume", id, `SELECT penstock.resume_batch($1, $2, coalesce($3, current_user::text))`, by)
}

// Cancel ends the parts that do not run and asks those that do to end. The completion entry comes all the same.
func Cancel(ctx context.Context, db postgres.DB, id int64, by invalidation.By) error {
	return run(ctx, db, "cancel", id, `SELECT penstock.cancel_batch($1, $2, coalesce($3, current_user::text))`, by)
}

// Retry runs the parts of an ended batch again that did not end well. ErrState: it has not ended.
func Retry(ctx context.Context, db postgres.DB, id int64, by invalidation.By) error {
	return run(ctx, db, "retry", id, `SELECT penstock.retry_batch($1, $2, coalesce($3, current_user::text))`, by)
}

func run(ctx context.Context, db postgres.DB, verb string, id int64, sql string, by invalidation.By, rest ...any) error {
	if _, err := db.Exec(ctx, sql, append([]any{id, by.Reason, postgres.Given(by.Actor)}, rest...)...); err != nil {
		return fmt.Errorf("%s batch %d: %w", verb, id, translate(err))
	}
	return nil
}

// Status is how far a batch has come.
type Status struct {
	ID      int64
	Name    string
	Queue   string
	State   string // splitting, running, paused, cancelling, ending, done, failed, cancelled
	Parts   int64
	Waiting int64 // parts that are not in the queue yet
	Queued  int64 // parts in the queue, running or not
	Done    int64
	Bad     int64 // parts that failed, expired or were cancelled
	Problem string
	Result  json.RawMessage // of Reduce
}

const statusSQL = `
SELECT id, name, queue, state, parts, waiting, queued, done, bad, coalesce(problem, ''), result
  FROM penstock.batch_status
 WHERE id = $1`

// Look returns how far a batch has come, counted now.
func Look(ctx context.Context, db postgres.DB, id int64) (Status, error) {
	rows, err := db.Query(ctx, statusSQL, id)
	if err != nil {
		return Status{}, fmt.Errorf("look at batch %d: %w", id, err)
	}
	s, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Status])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Status{}, fmt.Errorf("look at batch %d: %w", id, err)
	}
	return s, nil
}
