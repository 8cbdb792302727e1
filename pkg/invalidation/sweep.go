package invalidation

import (
	"context"
	"errors"
	"math"

	"github.com/jackc/pgx/v5"
)

// sweepSQL deletes ready rows at positions $4 to $5 of a lane that cannot be claimed: those of keys
// that are locked, and those of solo entries that are gone. It locks the lock record FOR KEY SHARE,
// so that the holder's finish cannot have passed the point where it reads the key's entries again
// and inserts a ready row. It skips locked rows.
const sweepSQL = `
WITH head AS MATERIALIZED (
    SELECT ctid AS row, penstock.record_key(lock_key, entry_id) AS lock_key, entry_id
      FROM penstock.ready
     WHERE queue_id = $1 AND priority = $2 AND flow = $3 AND pos BETWEEN $4::bigint AND $5::bigint
), held AS MATERIALIZED (
    SELECT l.lock_key
      FROM (SELECT DISTINCT lock_key FROM head) k
     CROSS JOIN LATERAL (
           SELECT lock_key FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key FOR KEY SHARE SKIP LOCKED) l
), dead AS MATERIALIZED (
    SELECT ctid AS row
      FROM penstock.ready
     WHERE ctid = ANY (ARRAY(
           SELECT h.row FROM head h
            WHERE h.lock_key IN (SELECT lock_key FROM held)
               OR (h.entry_id IS NOT NULL AND NOT EXISTS (
                   SELECT FROM penstock.entry_X e WHERE e.queue_id = $1 AND e.id = h.entry_id
                       AND e.priority >= 0 OFFSET 0))))
       FOR UPDATE SKIP LOCKED
)
DELETE FROM penstock.ready
 WHERE ctid = ANY (ARRAY(SELECT row FROM dead))`

// Sweep deletes the ready rows of a lane between two positions that cannot be claimed, and returns
// how many.
func (q *Queue) Sweep(ctx context.Context, lane Lane, from, to int64) (int, error) {
	tag, err := q.db.Exec(ctx, q.sql.sweep, q.ID, lane.Priority, lane.Flow, from, to)
	if err != nil {
		return 0, q.errorf("sweep", err)
	}
	return int(tag.RowsAffected()), nil
}

// unlockedSQL returns the position of the first ready row of a lane, from position $4 on, that no other transaction has
// locked; no row if there is none. Its own lock on that row ends with the statement.
const unlockedSQL = `
SELECT pos FROM penstock.ready
 WHERE queue_id = $1 AND priority = $2 AND flow = $3 AND pos >= $4::bigint AND penstock.ready_now(not_before)
 ORDER BY pos LIMIT 1 FOR UPDATE SKIP LOCKED`

// Unlocked returns the position of the first ready row of a lane, from that position on, whose row no other transaction
// has locked, and math.MaxInt64 if all are. A push over many keys keeps the ready rows of all of them locked until it
// commits: claims would pass by them in steps of as many as a claim may bring.
func (q *Queue) Unlocked(ctx context.Context, lane Lane, from int64) (int64, error) {
	var position int64
	err := q.db.QueryRow(ctx, unlockedSQL, q.ID, lane.Priority, lane.Flow, from).Scan(&position)
	if errors.Is(err, pgx.ErrNoRows) {
		return math.MaxInt64, nil
	}
	return position, q.errorf("pass locked ready rows of", err)
}
