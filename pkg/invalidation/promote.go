package invalidation

import (
	"context"
	"strings"
)

// promoteSQL turns up to $2 due entries pending and gives them ready rows, oldest due first. A
// retried or deferred entry gets a new position, after the ready rows that exist when it comes due.
// Positions are drawn before the update, in the order of the due times: an update would draw them in
// the order of its rows on the disk. The array leaves the planner no choice but a scan by tid. Rows
// locked by other transactions are skipped until the next call. Waiting entries of cron jobs are
// skipped: the cron engine promotes them, since it applies the policies for missed times. Lock keys
// that waited for a token bucket become ready.
const promoteSQL = `
WITH due AS MATERIALIZED (
    SELECT ctid AS row
      FROM penstock.entry_X
     WHERE status = 'initial' AND due_at <= (SELECT clock_timestamp()) /* cron */
     ORDER BY due_at, id
     LIMIT $2::int
       FOR UPDATE SKIP LOCKED
), placed AS MATERIALIZED (
    SELECT row, nextval('penstock.entry_id_seq') AS pos FROM due
), fresh AS (
    UPDATE penstock.entry_X e
       SET status = 'pending', pos = p.pos
      FROM placed p
     WHERE e.ctid = ANY (ARRAY(SELECT row FROM placed)) AND e.ctid = p.row
    RETURNING e.id, e.priority, e.flow, e.lock_key, e.pos
), solo AS (
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
    SELECT $1, priority, flow, pos, id FROM fresh WHERE lock_key IS NULL AND priority >= 0
), grouped AS (
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
    SELECT $1, priority, flow, min(pos), lock_key FROM fresh WHERE lock_key IS NOT NULL AND priority >= 0
     GROUP BY priority, flow, lock_key
)
SELECT (SELECT count(*) FROM fresh)
       + CASE WHEN EXISTS (SELECT FROM penstock.ready WHERE queue_id = $1 AND priority = penstock.throttled_priority()
           AND flow = '') THEN penstock.requeue_throttled($1, $2::int) ELSE 0 END`

// promoteCronSQL is promoteSQL for queues of kind cron.
var promoteCronSQL = strings.Replace(promoteSQL, "/* cron */", "AND NOT penstock.waits_for_cron(id)", 1)

// Promote turns up to limit due entries pending and returns how many there were. Any process may call it; two at
// once share the work.
func (q *Queue) Promote(ctx context.Context, limit int) (int, error) {
	var n int
	err := q.db.QueryRow(ctx, q.sql.promote, q.ID, limit).Scan(&n)
	return n, q.errorf("promote due entries of", err)
}
