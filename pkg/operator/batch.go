package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Batch is a batch and its progress, a row of penstock.batch_status.
type Batch struct {
	ID           int64           `json:"id"`
	Name         string          `json:"name"`
	Queue        string          `json:"queue"`
	State        string          `json:"state" doc:"splitting, running, paused, cancelling, ending, done, failed or cancelled."`
	Parts        int64           `json:"parts"`
	Waiting      int64           `json:"waiting"` // parts that are not in the queue yet
	Queued       int64           `json:"queued"`
	Done         int64           `json:"done"`
	Bad          int64           `json:"bad"` // parts that failed, expired or were cancelled
	PausedBy     string          `json:"paused_by,omitempty"`
	PausedReason string          `json:"paused_reason,omitempty"`
	PausedUntil  *time.Time      `json:"paused_until,omitempty"`
	Problem      string          `json:"problem,omitempty"`
	Actor        string          `json:"actor"`
	CreatedAt    time.Time       `json:"created_at"`
	EndedAt      *time.Time      `json:"ended_at,omitempty"`
	Result       json.RawMessage `json:"result,omitempty"`
}

// batchesSQL counts the parts of the batches that it lists, and of no others.
const batchesSQL = `
SELECT s.id, s.name, s.queue, s.state, s.parts, s.waiting, s.queued, s.done, s.bad,
       coalesce(s.paused_by, '') AS paused_by,
       coalesce(s.paused_reason, '') AS paused_reason,
       penstock.json_time(s.paused_until) AS paused_until, coalesce(s.problem, '') AS problem, s.actor,
       s.created_at, s.ended_at, s.result
  FROM (SELECT b.id FROM penstock.batch b JOIN penstock.queue q ON q.id = b.queue_id
         WHERE ($1::bigint IS NULL OR b.id = $1) AND ($2::text IS NULL OR q.name = $2)
                AND ($4::bigint IS NULL OR b.id < $4) ORDER BY b.id DESC LIMIT $3) chosen
 CROSS JOIN LATERAL (SELECT * FROM penstock.batch_status x WHERE x.id = chosen.id OFFSET 0) s
 ORDER BY s.id DESC`

// BatchFilter chooses batches; all fields that are set must match.
type BatchFilter struct {
	Queue  string
	Before int64 // ids below this one
	Limit  int
}

// Batches returns batches, the newest first.
func (d *Database) Batches(ctx context.Context, f BatchFilter) ([]Batch, error) {
	return list[Batch](ctx, d.db, "batches", batchesSQL, nil, given(f.Queue), page(f.Limit), given(f.Before))
}

// Batch returns one batch, or invalidation.ErrNotFound.
func (d *Database) Batch(ctx context.Context, id int64) (Batch, error) {
	return show[Batch](ctx, d.db, fmt.Sprintf("batch %d", id), invalidation.ErrNotFound, batchesSQL, id, nil, 1, nil)
}

// CreateBatch makes a batch; options are those of penstock.create_batch: items or query, part_size, window_parts, ...
func (d *Database) CreateBatch(ctx context.Context, name, queue string, options map[string]any,
	by invalidation.By,
) (int64, error) {
	const sql = `SELECT penstock.create_batch($1, $2, $3, $4, coalesce($5, current_user))`
	var id int64
	if err := d.db.QueryRow(ctx, sql, name, queue, options, by.Reason, given(by.Actor)).Scan(&id); err != nil {
		return 0, fmt.Errorf("create batch %q: %w", name, invalidation.Translate(err))
	}
	return id, nil
}
