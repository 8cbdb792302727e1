package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Failure is an entry that ended in error.
type Failure struct {
	ID          int64     `json:"id"`
	Queue       string    `json:"queue"`
	FailedAt    time.Time `json:"failed_at"`
	CreatedAt   time.Time `json:"created_at"`
	Class       string    `json:"class"`
	Error       string    `json:"error"`
	Fingerprint string    `json:"fingerprint"`
	Attempt     int16     `json:"attempt"`
	Crashes     int16     `json:"crashes"`
	Name        string    `json:"name,omitempty"`
	LockKey     string    `json:"lock_key,omitempty"`
	Flow        string    `json:"flow,omitempty"`
}

// FailureDetail is a failure with the entry as it was pushed and its errors.
type FailureDetail struct {
	Failure
	Payload json.RawMessage `json:"payload"`
	History json.RawMessage `json:"history,omitempty"`
	Trace   string          `json:"trace,omitempty"`
}

// FailureFilter chooses failures of one queue; all fields that are set must match.
type FailureFilter struct {
	Queue               string
	Class, Fingerprint  string
	Flow, LockKey, Name string
	Since               time.Time // failed then or later; zero: at any time
	Before              int64     // ids below this one
	Limit               int
}

const failureColumns = `
SELECT f.entry_id AS id, q.name AS queue, f.failed_at, f.created_at, f.class, f.error, f.fingerprint, f.attempt,
       f.crashes,
       coalesce(f.name, '') AS name, coalesce(f.lock_key, '') AS lock_key, f.flow`

// Failures returns failures, those with the largest ids first.
func (d *Database) Failures(ctx context.Context, f FailureFilter) ([]Failure, error) {
	id, err := d.queueID(ctx, f.Queue)
	if err != nil {
		return nil, err
	}
	args := []any{id, page(f.Limit)}
	condition := ""
	where := func(text string, given bool, value any) {
		if given {
			args = append(args, value)
			condition += " AND f." + text + " $" + strconv.Itoa(len(args))
		}
	}
	where("class =", f.Class != "", f.Class)
	where("fingerprint =", f.Fingerprint != "", f.Fingerprint)
	where("flow =", f.Flow != "", f.Flow)
	where("lock_key =", f.LockKey != "", f.LockKey)
	where("name =", f.Name != "", f.Name)
	where("failed_at >=", !f.Since.IsZero(), f.Since)
	where("entry_id <", f.Before > 0, f.Before)
	sql := failureColumns + `
  FROM penstock.failure f JOIN penstock.queue q ON q.id = f.queue_id
 WHERE f.queue_id = $1 AND penstock.kept(f.failed_at, q.failure_retention)` + condition + `
 ORDER BY f.entry_id DESC LIMIT $2`
	return list[Failure](ctx, d.db, "failures of queue "+f.Queue, sql, args...)
}

// ModelFailure is a failure of a call to a model.
type ModelFailure struct {
	Failure
	Model string `json:"model"`
}

// ModelFailures returns failures of all models together, those with the largest ids first.
func (d *Database) ModelFailures(ctx context.Context, limit int) ([]ModelFailure, error) {
	const sql = failureColumns + `, m.name AS model
  FROM penstock.model m
  JOIN penstock.queue q ON q.name = penstock.model_queue(m.name)
 CROSS JOIN LATERAL (
       SELECT * FROM penstock.failure x WHERE x.queue_id = q.id AND penstock.kept(x.failed_at, q.failure_retention)
        ORDER BY x.entry_id DESC LIMIT $1) f
 ORDER BY f.entry_id DESC LIMIT $1`
	return list[ModelFailure](ctx, d.db, "failures of models", sql, page(limit))
}

// FailedModel is a model whose queue has failures.
type FailedModel struct {
	Model    string
	Queue    string
	Retrying int64 // the operation that retries all of them already; 0 for none
}

// FailedModels returns the models that have failures, by name.
func (d *Database) FailedModels(ctx context.Context) ([]FailedModel, error) {
	const sql = `
SELECT m.name AS model, q.name AS queue,
       coalesce((SELECT max(o.id) FROM penstock.operation o
                  WHERE o.status = 'running' AND o.queue_id = q.id AND o.verb = 'retry_failures'
                    AND o.filter = '{"all": true}'), 0) AS retrying
  FROM penstock.model m
  JOIN penstock.queue q ON q.name = penstock.model_queue(m.name)
 WHERE EXISTS (SELECT FROM penstock.failure f
                WHERE f.queue_id = q.id AND penstock.kept(f.failed_at, q.failure_retention))
 ORDER BY m.name`
	return list[FailedModel](ctx, d.db, "models with failures", sql)
}

// Failure returns one failure, or invalidation.ErrEntryNotFound.
func (d *Database) Failure(ctx context.Context, id int64) (FailureDetail, error) {
	const sql = failureColumns + `, f.payload, f.history, coalesce(f.trace, '') AS trace
  FROM penstock.queue q CROSS JOIN LATERAL (
       SELECT * FROM penstock.failure WHERE queue_id = q.id AND entry_id = $1 OFFSET 0) f
 WHERE penstock.kept(f.failed_at, q.failure_retention)`
	absent := fmt.Errorf("no failure of that id is kept; penstock entry show %d says what became of the entry: %w", id,
		invalidation.ErrEntryNotFound)
	return show[FailureDetail](ctx, d.db, fmt.Sprintf("failure %d", id), absent, sql, id)
}

// Cause is a group of failures with the same error class and fingerprint.
type Cause struct {
	Fingerprint string    `json:"fingerprint"`
	Class       string    `json:"class"`
	Failures    int64     `json:"failures"`
	Newest      time.Time `json:"newest"`
	ExampleID   int64     `json:"example_id"`
}

// causesSQL groups the 10,000 failures of a queue with the largest ids, of those that failed at $3 or later.
const causesSQL = `
SELECT fingerprint, class, count(*) AS failures, max(failed_at) AS newest, max(entry_id) AS example_id
  FROM (SELECT f.fingerprint, f.class, f.failed_at, f.entry_id
          FROM penstock.failure f JOIN penstock.queue q ON q.id = f.queue_id
         WHERE f.queue_id = $1 AND penstock.kept(f.failed_at, q.failure_retention) AND f.failed_at >= $3
         ORDER BY f.entry_id DESC LIMIT 10000) last
 GROUP BY fingerprint, class
 ORDER BY failures DESC, fingerprint
 LIMIT $2`

// Causes groups the 10,000 failures of a queue with the largest ids by cause, the most frequent first, of those that
// failed at since or later.
func (d *Database) Causes(ctx context.Context, queue string, since time.Time, limit int) ([]Cause, error) {
	id, err := d.queueID(ctx, queue)
	if err != nil {
		return nil, err
	}
	return list[Cause](ctx, d.db, "causes of failures of queue "+queue, causesSQL, id, page(limit), since)
}

// CauseStep is a group of failures with the same class and fingerprint, in one step of time.
type CauseStep struct {
	Fingerprint string    `json:"fingerprint"`
	Class       string    `json:"class"`
	Step        int       `json:"step"` // 0: the newest; -1: before the period
	Failures    int64     `json:"failures"`
	Newest      time.Time `json:"newest"`
	ExampleID   int64     `json:"example_id"`
	Example     string    `json:"example"` // the error of the example; empty beyond the 200 largest groups
}

// causeStepsSQL groups the $4 failures of a queue with the largest ids by cause and by steps of
// time, and reads the error of one failure of each of the $5 largest groups. The bound is a parameter:
// with a constant that exceeds the estimate, the planner would sort all failures of the queue. The
// errors are left out of the groups, which would be sorted for them.
const causeStepsSQL = `
WITH grouped AS MATERIALIZED (
    SELECT f.fingerprint, f.class, f.step, count(*) AS failures, max(f.failed_at) AS newest,
           max(f.entry_id) AS example_id
      FROM (SELECT f.fingerprint, f.class, f.failed_at, f.entry_id,
                   CASE WHEN f.failed_at > statement_timestamp() - $2::float8 * $3::int * interval '1 second'
                        THEN greatest(0, floor(extract(epoch FROM statement_timestamp() - f.failed_at)
                                               / $2::float8))::int
                        ELSE -1 END AS step
              FROM penstock.failure f JOIN penstock.queue q ON q.id = f.queue_id
             WHERE f.queue_id = $1 AND penstock.kept(f.failed_at, q.failure_retention)
             ORDER BY f.entry_id DESC LIMIT $4) f
     GROUP BY f.fingerprint, f.class, f.step
), largest AS (
    SELECT example_id FROM grouped ORDER BY failures DESC, example_id DESC LIMIT $5
)
SELECT g.fingerprint, g.class, g.step, g.failures, g.newest, g.example_id, coalesce(x.error, '') AS example
  FROM grouped g
  LEFT JOIN (SELECT l.example_id, left(f.error, 2000) AS error
               FROM largest l
              CROSS JOIN LATERAL (SELECT error FROM penstock.failure
                                   WHERE queue_id = $1 AND entry_id = l.example_id LIMIT 1) f) x USING (example_id)`

const (
	causesRead    = 10_000 // failures that CauseSteps reads
	causeExamples = 200    // groups of which it returns an error
)

// CauseSteps groups the 10,000 failures of a queue with the largest ids by cause and by steps of time, the last
// of which ends now.
func (d *Database) CauseSteps(ctx context.Context, queue string, step time.Duration, steps int) ([]CauseStep,
	error,
) {
	id, err := d.queueID(ctx, queue)
	if err != nil {
		return nil, err
	}
	return list[CauseStep](ctx, d.db, "causes of failures of queue "+queue, causeStepsSQL, id, step.Seconds(),
		steps, causesRead, causeExamples)
}

// failedSinceSQL looks at the failures of the newest entries of each queue.
const failedSinceSQL = `
SELECT coalesce(sum(f.n), 0)::bigint AS n
  FROM penstock.queue q CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE x.failed_at > statement_timestamp() - $1::interval) AS n
         FROM (SELECT failed_at FROM penstock.failure
                WHERE queue_id = q.id ORDER BY entry_id DESC LIMIT $2) x) f`

// FailedSince returns how many of the newest entries that failed did so in the period that ends
// now, looking at no more than most of each queue.
func (d *Database) FailedSince(ctx context.Context, over time.Duration, most int) (int64, error) {
	found, err := show[struct{ N int64 }](ctx, d.db, "number of recent failures", nil, failedSinceSQL, over,
		page(most))
	return found.N, err
}
