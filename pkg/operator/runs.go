package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// RecentRun is a run that ended with a result: the last one of its entry.
type RecentRun struct {
	EntryID     int64     `json:"entry_id"`
	FinishedAt  time.Time `json:"finished_at"`
	WaitSeconds float64   `json:"wait_seconds"` // from the push to the begin of the run
	RunSeconds  float64   `json:"run_seconds"`
}

// recentRunsSQL reads the newest entries of a queue backwards along the index of results. Results
// without a duration are of entries that did not run.
const recentRunsSQL = `
SELECT r.entry_id, r.finished_at,
       greatest(0, extract(epoch FROM r.finished_at - r.created_at) - r.run_ms / 1000.0)::float8 AS wait_seconds,
       r.run_ms / 1000.0::float8 AS run_seconds
  FROM (SELECT entry_id, created_at, finished_at, run_ms FROM penstock.result
         WHERE queue_id = $1 ORDER BY entry_id DESC LIMIT $2) r
 WHERE r.run_ms IS NOT NULL
 ORDER BY r.finished_at`

// RecentRuns returns the runs of the newest entries of a queue that ended with a result, in the
// order of their ends. Of a busy queue the limit bounds the time that they cover.
func (d *Database) RecentRuns(ctx context.Context, queue string, limit int) ([]RecentRun, error) {
	id, err := d.queueID(ctx, queue)
	if err != nil {
		return nil, err
	}
	return list[RecentRun](ctx, d.db, "recent runs of queue "+queue, recentRunsSQL, id, page(limit))
}

// runMetaSQL reads the measurements of the last run of an entry that has ended.
const runMetaSQL = `
SELECT coalesce(r.meta, '{}')
  FROM penstock.queue q JOIN penstock.result r ON r.queue_id = q.id AND r.entry_id = $2
 WHERE q.name = $1
 LIMIT 1`

// RunMeta returns the measurements that the handler kept of an entry's last run: model, instance,
// slot, times in milliseconds. It is empty where there are none.
func (d *Database) RunMeta(ctx context.Context, queue string, id int64) (json.RawMessage, error) {
	var meta json.RawMessage
	err := d.db.QueryRow(ctx, runMetaSQL, queue, id).Scan(&meta)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the run of entry %d: %w", id, err)
	}
	return meta, nil
}
