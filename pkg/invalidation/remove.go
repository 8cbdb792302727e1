package invalidation

import (
	"github.com/jackc/pgx/v5"
)

// removeSQL ends entries $4 as expired or cancelled ($5), for reasons $6.
const removeSQL = `
WITH found AS MATERIALIZED (
    SELECT k.*, e.row
      FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::text[])
          k(lock_key, token, id, outcome, reason)
     CROSS JOIN LATERAL (
           SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
     CROSS JOIN LATERAL (
           SELECT ctid AS row FROM penstock.entry_X WHERE queue_id = $1 AND id = k.id OFFSET 0) e
), gone AS (
    DELETE FROM penstock.entry_X d
     USING found f
     WHERE d.ctid = f.row
    RETURNING d.id, d.created_at, d.attempt, f.token, f.outcome, f.reason
), asked AS (
    DELETE FROM penstock.cancel_request d
     USING gone
     CROSS JOIN LATERAL (SELECT ctid AS row FROM penstock.cancel_request WHERE queue_id = $1
         AND entry_id = gone.id OFFSET 0) c
     WHERE d.ctid = c.row
), kept AS (
    INSERT INTO penstock.result (queue_id, entry_id, created_at, node_id, token, attempt, outcome, reason)
    SELECT $1, id, created_at, $7::bigint, token, attempt, outcome::penstock.outcome, reason
      FROM gone
)
SELECT penstock.all_ended((SELECT count(*) FROM found), (SELECT count(*) FROM gone))`

func (q *Queue) addRemove(batch *pgx.Batch, node NodeID, endings []Ending) {
	if c := pick(endings, is(verbExpire, verbCancel)); len(c.ids) > 0 {
		outcome := func(e *Ending) string {
			if e.verb == verbExpire {
				return "expired"
			}
			return "cancelled"
		}
		batch.Queue(q.sql.remove, q.ID, c.keys, c.tokens, c.ids, each(c, outcome),
			each(c, func(e *Ending) string { return tidy(e.reason) }), node)
	}
}
