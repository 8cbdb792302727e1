package invalidation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// unlockSQL ends locks $2 with tokens $3 and inserts ready rows for keys with more entries that are not blocked. $4
// is the position: the one that the key had ("front"), behind all others ("back"), or that of its oldest entry
// ("oldest"). $5 is the quantum of the queue in entries: the priority of the key is the highest of so many. $6 is for
// how long (ms) it may not be claimed; 0 for at once. The statement returns the keys that are ready again, of solo
// entries too, and their lanes and positions, also where a concurrent push had inserted a ready row: claimers may have
// skipped it while the key was locked. The node that ends its own lock goes back to them without a hint.
const unlockSQL = `
WITH freed AS (
    DELETE FROM penstock.lock d
     USING unnest($2::text[], $3::bigint[], $4::text[], $6::bigint[]) k(lock_key, token, requeue, delay_ms)
     CROSS JOIN LATERAL (
           SELECT ctid AS row FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key
               AND token = k.token OFFSET 0) l
     WHERE d.ctid = l.row
    RETURNING d.lock_key, d.pos, d.priority, d.flow, d.last_entry_id, k.requeue,
              CASE WHEN k.delay_ms > 0 THEN clock_timestamp() + k.delay_ms * interval '1 millisecond' END AS not_before
), solo AS MATERIALIZED (
    SELECT e.priority, e.flow, f.pos, e.id, f.lock_key, f.not_before
      FROM freed f
     CROSS JOIN LATERAL (SELECT * FROM penstock.entry_X WHERE queue_id = $1 AND id = f.last_entry_id OFFSET 0) e
     WHERE penstock.is_solo(f.lock_key) AND penstock.claimable(e.status, e.priority)
), again_solo AS (
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id, not_before)
    SELECT $1, priority, flow, pos, id, not_before FROM solo
    ON CONFLICT DO NOTHING
), more AS MATERIALIZED (
    SELECT CASE f.requeue WHEN 'front' THEN greatest(f.priority, n.priority) ELSE n.priority END AS priority,
           CASE f.requeue WHEN 'front' THEN f.flow ELSE n.flow END AS flow,
           CASE f.requeue WHEN 'front' THEN f.pos
                          WHEN 'back' THEN nextval('penstock.entry_id_seq')
                          ELSE n.id END AS pos, f.lock_key, f.not_before
      FROM freed f
     CROSS JOIN LATERAL (
           SELECT min(id) AS id, max(priority) AS priority, (array_agg(flow ORDER BY id))[1] AS flow
             FROM (SELECT id, priority, flow FROM penstock.entry_X
                    WHERE lock_key = f.lock_key AND penstock.claimable(status, priority)
                    ORDER BY id LIMIT $5::int) e) n
     WHERE NOT penstock.is_solo(f.lock_key) AND n.id IS NOT NULL
       AND (SELECT b.entry_id FROM penstock.blocked_key b WHERE b.queue_id = $1 AND b.lock_key = f.lock_key) IS NULL
), again AS (
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key, not_before)
    SELECT $1, priority, flow, pos, lock_key, not_before FROM more
    ON CONFLICT DO NOTHING
)
SELECT lock_key, priority, flow, pos AS position FROM more
UNION ALL
SELECT lock_key, priority, flow, pos FROM solo`

// unlocking is a lock that is to end.
type unlocking struct {
	key     string
	token   Token
	requeue string        // the position of the key if it has more entries: front, back or oldest
	delay   time.Duration // for which the key may not be claimed
	lock    *Lock         // its Requeued is set; nil: this process does not hold it
}

// keysAndTokens are the arrays by which statements name locks.
func keysAndTokens(locks []unlocking) (keys []string, tokens []Token) {
	keys, tokens = make([]string, len(locks)), make([]Token, len(locks))
	for i, l := range locks {
		keys[i], tokens[i] = l.key, l.token
	}
	return keys, tokens
}

// addUnlock ends locks.
func (q *Queue) addUnlock(batch *pgx.Batch, locks []unlocking) {
	if len(locks) == 0 {
		return
	}
	keys, tokens := keysAndTokens(locks)
	requeues, delays := make([]string, len(locks)), make([]int64, len(locks)) // ms
	ours := map[string]*Lock{}
	for i, l := range locks {
		requeues[i], delays[i] = l.requeue, l.delay.Milliseconds()
		if l.lock != nil {
			ours[l.key] = l.lock
		}
	}
	statement := batch.Queue(q.sql.unlock, q.ID, keys, tokens, requeues, q.Config.QuantumCount, delays)
	statement.Query(func(rows pgx.Rows) error {
		var key string
		var at LaneHead
		_, err := pgx.ForEachRow(rows, []any{&key, &at.Priority, &at.Flow, &at.Position}, func() error {
			if l := ours[key]; l != nil {
				head := at
				l.Requeued = &head
			}
			return nil
		})
		return err
	})
}

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
	locks := []unlocking{{key: key, token: token, requeue: "front"}}
	if err := q.markMayHaveRun(ctx, tx, locks); err != nil {
		return q.errorf("unlock a key of", err)
	}
	batch := &pgx.Batch{}
	q.addUnlock(batch, locks)
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return q.errorf("unlock a key of", err)
	}
	return nil
}
