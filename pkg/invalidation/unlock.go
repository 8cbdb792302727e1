package invalidation

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// forceUnlockSQL locks the record of key $2 with token $3 and returns whether its node lives and lists the token.
const forceUnlockSQL = `
SELECT EXISTS (SELECT FROM penstock.node n
                WHERE n.id = l.node_id AND n.beat_at + n.lease > clock_timestamp() AND l.token = ANY (n.tokens))
  FROM penstock.lock l
 WHERE l.queue_id = $1 AND l.lock_key = $2 AND l.token = $3
   FOR UPDATE OF l`

// ForceUnlock ends the lock of a key in a transaction of the caller, and makes the key ready at its old position
// without an attempt or a crash. The token fences its node: whatever it still writes about the lock is refused. It
// returns ErrNotFound if there is no such lock, and ErrState if a live node lists it, unless evenListed.
func (q *Queue) ForceUnlock(ctx context.Context, tx pgx.Tx, key string, token Token, evenListed bool) error {
	var listed bool
	err := tx.QueryRow(ctx, forceUnlockSQL, q.ID, key, token).Scan(&listed)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("unlock %q of queue %q: no lock has token %d any more: %w", key, q.Name, token, ErrNotFound)
	case err != nil:
		return q.errorf("unlock a key of", err)
	case listed && !evenListed:
		return fmt.Errorf("unlock %q of queue %q: its node lives and lists the lock; cancel the entry, "+
			"drain the node, or unlock it in spite of that: %w", key, q.Name, ErrState)
	}
	release := []Ending{Release(&Lock{Key: key, Token: token}, 0, 0)}
	release[0].Last = true
	if err := q.markMayHaveRun(ctx, tx, release); err != nil {
		return q.errorf("unlock a key of", err)
	}
	batch := &pgx.Batch{}
	q.queueUnlock(batch, release)
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return q.errorf("unlock a key of", err)
	}
	return nil
}
