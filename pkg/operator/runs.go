package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
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

// HeldKey is a lock key that a node holds.
type HeldKey struct {
	LockKey     string    `json:"lock_key"`
	LastEntryID int64     `json:"last_entry_id"` // later entries of the key wait
	NodeID      NodeID    `json:"node_id"`
	Node        string    `json:"node"`
	ClaimedAt   time.Time `json:"claimed_at"`
}

// heldKeysSQL looks up each key by the primary key of the locks.
const heldKeysSQL = `
SELECT l.lock_key, l.last_entry_id, l.node_id, coalesce(n.name, '') AS node, l.claimed_at
  FROM unnest($2::text[]) k(lock_key)
 CROSS JOIN LATERAL (SELECT lock_key, last_entry_id, node_id, claimed_at FROM penstock.lock
                      WHERE queue_id = $1 AND lock_key = k.lock_key OFFSET 0) l
  LEFT JOIN LATERAL (SELECT name FROM penstock.node WHERE id = l.node_id OFFSET 0) n ON true`

// HeldKeys returns those of some lock keys of a queue that nodes hold.
func (d *Database) HeldKeys(ctx context.Context, queue string, keys []string) ([]HeldKey, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	id, err := d.queueID(ctx, queue)
	if err != nil {
		return nil, err
	}
	return list[HeldKey](ctx, d.db, "held lock keys of queue "+queue, heldKeysSQL, id, keys)
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
      FROM (SELECT fingerprint, class, failed_at, entry_id,
                   CASE WHEN failed_at > statement_timestamp() - $2::float8 * $3::int * interval '1 second'
                        THEN greatest(0, floor(extract(epoch FROM statement_timestamp() - failed_at) / $2::float8))::int
                        ELSE -1 END AS step
              FROM penstock.failure WHERE queue_id = $1 ORDER BY entry_id DESC LIMIT $4) f
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

// CauseSteps groups the newest 10,000 failures of a queue by cause and by steps of time, the last
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

// CountMatchingTo returns how many entries or failures an operation would match now, counted up to
// a bound.
func (d *Database) CountMatchingTo(ctx context.Context, o OperationRequest, bound int) (int64, error) {
	var n int64
	err := d.db.QueryRow(ctx, `SELECT penstock.count_matching_to($1, $2, $3, $4)`, o.Queue, o.Verb, o.Filter,
		bound).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("count entries for %s in queue %q: %w", o.Verb, o.Queue, invalidation.Translate(err))
	}
	return n, nil
}

// SentCallback is the callback that reports an end of an entry: an entry of the queue webhook.
type SentCallback struct {
	ID int64     `json:"id"`
	At time.Time `json:"at"` // of its push
}

const callbacksSQL = `
SELECT callback_id AS id, at FROM penstock.callback_sent WHERE entry_id = $1 ORDER BY at DESC LIMIT $2`

// Callbacks returns the callbacks that report the ends of an entry, the newest first. They are known for
// seven days.
func (d *Database) Callbacks(ctx context.Context, entry int64, limit int) ([]SentCallback, error) {
	return list[SentCallback](ctx, d.db, fmt.Sprintf("callbacks of entry %d", entry), callbacksSQL, entry, page(limit))
}
