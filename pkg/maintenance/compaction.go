package maintenance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Compaction is the duty that merges waiting entries of mergeable queues that fall behind: where more entries wait than
// a multiple of the locks held, those of one key are merged by the rule of the queue.
type Compaction struct {
	cfg   Config
	db    postgres.DB
	fence Fence
}

// NewCompaction returns the duty for one term. It reads through db and writes through fence.
func NewCompaction(db postgres.DB, fence Fence, cfg Config) *Compaction {
	return &Compaction{cfg: cfg.withDefaults(), db: db, fence: fence}
}

// Run compacts until ctx ends, or until the database has not answered for so long that another leader should try.
func (c *Compaction) Run(ctx context.Context) error {
	return c.cfg.loop("compaction").Run(ctx, func(ctx context.Context) (time.Duration, error) {
		return c.cfg.CompactPause, c.cfg.tolerate(ctx, c.pass(ctx), "compact queues")
	})
}

// compactOne is the name in the log of what compact does.
const compactOne = "compact a queue"

const (
	// More entries than so many for each lock held have a mergeable queue compacted.
	compactFactor = 10
	// A queue with fewer waiting entries is not worth compacting.
	compactEntriesMin = 100
	// Keys of one statement, which has a transaction of its own.
	compactKeys = 200
)

// fallingBehindSQL lists mergeable queues in which more than $1 entries wait for each lock held.
// The count of waiting entries stops at 10,000, and that bound is then compared with the number of
// locks.
const fallingBehindSQL = `
SELECT q.name
  FROM penstock.queue q
 CROSS JOIN LATERAL (SELECT count(*) AS n FROM penstock.lock l WHERE l.queue_id = q.id) held
 CROSS JOIN LATERAL (
       SELECT count(*) AS n
         FROM (SELECT FROM penstock.entry e
                WHERE e.queue_id = q.id AND e.lock_key IS NOT NULL AND penstock.claimable(e.status, e.priority)
                LIMIT 10000) bounded) waiting
 WHERE q.mergeable AND waiting.n >= $2 AND waiting.n > $1 * greatest(held.n, 1)`

func (c *Compaction) pass(ctx context.Context) error {
	rows := postgres.Query(ctx, c.db, fallingBehindSQL, compactFactor, compactEntriesMin)
	behind, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("list queues that fall behind: %w", err)
	}
	for _, name := range behind {
		q, err := invalidation.Open(ctx, c.db, name)
		if errors.Is(err, invalidation.ErrQueueNotFound) {
			continue // it was dropped meanwhile
		}
		if err != nil {
			return err
		}
		if err := c.compact(ctx, q); err != nil {
			return err
		}
	}
	return nil
}

// compact goes once over the keys of one queue. An error in one queue does not end the duty:
// another leader would meet it too.
func (c *Compaction) compact(ctx context.Context, q *invalidation.Queue) error {
	total, after := 0, ""
	for {
		var n int
		var next string
		err := inTerm(ctx, c.db, c.fence, func(tx pgx.Tx) (err error) {
			n, next, err = q.WithTx(tx).CompactQueue(ctx, 2, compactKeys, after)
			return err
		})
		if err != nil {
			return c.cfg.tolerate(ctx, err, compactOne, "queue", q.Name)
		}
		total += n
		if next == "" {
			break
		}
		after = next
	}
	_ = c.cfg.tolerate(ctx, nil, compactOne, "queue", q.Name)
	if total > 0 {
		c.cfg.Log.InfoContext(ctx, "merged waiting entries", "queue", q.Name, "replaced", total)
	}
	return nil
}
