package operator

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Group is a lock key with entries that wait or run.
type Group struct {
	LockKey       string   `json:"lock_key"`
	Entries       int64    `json:"entries"` // pending, running ones included; up to 10,000
	OldestID      int64    `json:"oldest_id"`
	OldestSeconds float64  `json:"oldest_age_seconds"`
	Token         *int64   `json:"token,omitempty"` // of its lock
	Node          string   `json:"node,omitempty"`
	HeldSeconds   *float64 `json:"held_seconds,omitempty"`
}

// groupsSQL reads distinct lock keys of a queue's own table by a loose index scan.
const groupsSQL = `
WITH RECURSIVE key AS (
    (SELECT lock_key, 1 AS n FROM penstock.entry_X
      WHERE lock_key > $2 AND penstock.claimable(status, priority) ORDER BY lock_key LIMIT 1)
    UNION ALL
    SELECT next.lock_key, key.n + 1
      FROM key CROSS JOIN LATERAL (
           SELECT e.lock_key FROM penstock.entry_X e
            WHERE e.lock_key > key.lock_key AND penstock.claimable(e.status, e.priority)
                   ORDER BY e.lock_key LIMIT 1) next
     WHERE key.n < $3
)
SELECT key.lock_key, c.n AS entries, o.id AS oldest_id, extract(epoch
       FROM clock_timestamp() - o.created_at)::float8 AS oldest_seconds,
       l.token, coalesce(l.node, l.node_id::text, '') AS node, extract(epoch FROM l.age)::float8 AS held_seconds
  FROM key
 CROSS JOIN LATERAL (SELECT count(*) AS n FROM (SELECT FROM penstock.entry_X e
       WHERE e.lock_key = key.lock_key AND penstock.claimable(e.status, e.priority) LIMIT 10000) s) c
 CROSS JOIN LATERAL (SELECT e.id, e.created_at FROM penstock.entry_X e
       WHERE e.lock_key = key.lock_key AND penstock.claimable(e.status, e.priority) ORDER BY e.id LIMIT 1) o
  LEFT JOIN penstock.lock_status l ON l.queue_id = $1 AND l.lock_key = key.lock_key
 ORDER BY key.lock_key`

// Groups returns the lock keys of a queue that have pending entries, in their order, from the first
// key after the given one.
func (d *Database) Groups(ctx context.Context, queue, after string, limit int) ([]Group, error) {
	id, err := d.queueID(ctx, queue)
	if err != nil {
		return nil, err
	}
	return list[Group](ctx, d.db, "groups of queue "+queue, invalidation.OnTable(queue, groupsSQL), id, after,
		page(limit))
}

// Compact merges the waiting entries of one lock key or, if key is empty, of the next 1,000 keys
// after the key after with at least two entries. It returns how many entries it replaced, and the
// last key that it read, empty at the end.
func (d *Database) Compact(ctx context.Context, queue, key, after string,
	by invalidation.By,
) (replaced int, next string, err error) {
	q, err := invalidation.Open(ctx, d.db, queue)
	if err != nil {
		return 0, "", err
	}
	err = postgres.InTx(ctx, d.db, func(tx pgx.Tx) error {
		var err error
		if key != "" {
			replaced, err = q.WithTx(tx).Compact(ctx, key)
		} else {
			replaced, next, err = q.WithTx(tx).CompactQueue(ctx, 2, 1000, after)
		}
		if err != nil || replaced == 0 {
			return err
		}
		return record(ctx, tx, by, "compact", queue,
			map[string]any{"lock_key": key, "after": after, "replaced": replaced})
	})
	if err != nil {
		return 0, "", err
	}
	return replaced, next, nil
}
