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

// Batch is a set to be worked on. Name, Queue and one of Items and Query are needed.
type Batch struct {
	Name  string // for people
	Queue string // whose handler runs the parts
	// Items is the set, each a JSON value.
	Items []json.RawMessage
	// Query is a SELECT whose rows are the set, each an object by column names. A task node runs it
	// with its own rights, so it must come from a client that may have these rights. Give it an
	// ORDER BY if the order of items matters.
	Query    string
	PartSize int // items of a part: 100
	Window   int // parts in the queue at a time: 1000
	// Detail goes into the payload of every entry of the batch; it must be an object.
	Detail   json.RawMessage
	Flow     string
	Priority *int16 // 0 to 9; nil for the queue's default
	// CompletionQueue gets the completion entry: the batch's own queue for a Reduce, any other for
	// a notification. Empty: none.
	CompletionQueue string
}

func (b Batch) options() map[string]any {
	set := map[string]any{}
	put := func(name string, given bool, value any) {
		if given {
			set[name] = value
		}
	}
	put("items", b.Items != nil, b.Items)
	put("query", b.Query != "", b.Query)
	put("part_size", b.PartSize != 0, b.PartSize)
	put("window_parts", b.Window != 0, b.Window)
	put("detail", b.Detail != nil, b.Detail)
	put("flow", b.Flow != "", b.Flow)
	put("priority", b.Priority != nil, b.Priority)
	put("completion_queue", b.CompletionQueue != "", b.CompletionQueue)
	return set
}

// Create makes a batch and returns its id. On a transaction it begins when that commits.
func Create(ctx context.Context, db postgres.DB, b Batch, by invalidation.By) (id int64, err error) {
	const sql = `SELECT penstock.create_batch($1, $2, $3, $4, coalesce($5, current_user::text))`
	if err := db.QueryRow(ctx, sql, b.Name, b.Queue, b.options(), by.Reason, postgres.Given(by.Actor)).Scan(&id); err != nil {
		return 0, fmt.Errorf("create batch %q: %w", b.Name, translate(err))
	}
	return id, nil
}

// Pause lets running parts end and starts no others, until the batch is resumed or until a time to
// come if that is not zero.
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

// Read returns the status of a batch, counted now.
func Read(ctx context.Context, db postgres.DB, id int64) (Status, error) {
	rows, err := db.Query(ctx, statusSQL, id)
	if err != nil {
		return Status{}, fmt.Errorf("read batch %d: %w", id, err)
	}
	s, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Status])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Status{}, fmt.Errorf("read batch %d: %w", id, err)
	}
	return s, nil
}
