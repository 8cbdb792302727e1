package operator

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// BlockedKey is a lock key whose entries do not run since one of them failed, in a queue with
// invalidation.OnFailureBlockKey.
type BlockedKey struct {
	Queue     string    `json:"queue"`
	LockKey   string    `json:"lock_key"`
	EntryID   int64     `json:"entry_id"` // whose failure blocks the key
	Class     string    `json:"class"`
	Error     string    `json:"error"`
	BlockedAt time.Time `json:"blocked_at"`
	Waiting   int64     `json:"waiting"` // entries of the key that wait, counted up to 1,000
}

// BlockedKeyName names a blocked key within the list of all.
type BlockedKeyName struct{ Queue, LockKey string }

// blockedKeysSQL reads a page of keys before their waiting entries are counted.
const blockedKeysSQL = `
SELECT s.queue, s.lock_key, s.entry_id, s.class, s.error, s.blocked_at, s.waiting
  FROM (SELECT b.queue_id, b.lock_key
          FROM penstock.blocked_key b JOIN penstock.queue q ON q.id = b.queue_id
         WHERE ($1::text IS NULL OR q.name = $1) AND (q.name, b.lock_key) > ($2, $3)
         ORDER BY q.name, b.lock_key
         LIMIT $4) k
  JOIN penstock.blocked_key_status s ON s.queue_id = k.queue_id AND s.lock_key = k.lock_key
 ORDER BY s.queue, s.lock_key`

// BlockedKeys returns the blocked keys of one queue, or of all if it is empty, behind a key, in order of queue
// and key. It returns invalidation.ErrQueueNotFound for a queue that does not exist.
func (d *Database) BlockedKeys(
	ctx context.Context, queue string, after BlockedKeyName, limit int,
) ([]BlockedKey, error) {
	if queue != "" {
		if _, err := d.queueID(ctx, queue); err != nil {
			return nil, err
		}
	}
	return list[BlockedKey](ctx, d.db, "blocked keys", blockedKeysSQL, given(queue), after.Queue, after.LockKey,
		page(limit))
}

// Unblock is a request to unblock the lock keys of a queue.
type Unblock struct {
	Queue   string
	LockKey string // empty: all
	Retry   bool   // requeue the failed entries first, at their old positions
	invalidation.By
}

// unblockPage is how many keys a call of UnblockKeys unblocks at most.
const unblockPage = 1000

// UnblockKeys unblocks one key, or up to 1,000 keys of a queue; more reports that some are left. For a single key it
// returns invalidation.ErrState if it is not blocked, or if the failure that is to be retried is gone.
func (d *Database) UnblockKeys(ctx context.Context, u Unblock) (unblocked int, more bool, err error) {
	if u.LockKey != "" {
		const sql = `SELECT penstock.unblock_key($3, $4, $5, $1, coalesce($2, current_user::text))`
		err := d.change(ctx, fmt.Sprintf("unblock key %q of queue %q", u.LockKey, u.Queue), sql, u.By, u.Queue,
			u.LockKey, u.Retry)
		if err != nil {
			return 0, false, err
		}
		return 1, false, nil
	}
	err = postgres.InTx(ctx, d.db, func(tx pgx.Tx) error {
		const sql = `SELECT penstock.unblock_keys($1, $2, $3, $4, coalesce($5, current_user::text))`
		err := tx.QueryRow(ctx, sql, u.Queue, u.Retry, unblockPage, u.Reason, given(u.Actor)).Scan(&unblocked)
		if err != nil {
			return invalidation.Translate(err)
		}
		const leftSQL = `SELECT EXISTS (SELECT FROM penstock.blocked_key b JOIN penstock.queue q ON q.id = b.queue_id
		                         WHERE q.name = $1)`
		return tx.QueryRow(ctx, leftSQL, u.Queue).Scan(&more)
	})
	if err != nil {
		return 0, false, fmt.Errorf("unblock keys of queue %q: %w", u.Queue, err)
	}
	return unblocked, more, nil
}
