package invalidation

import (
	"github.com/jackc/pgx/v5"
)

// Expire ends an entry whose start_by or finish_by has passed.
func Expire(l *Lock, e EntryID, reason string) Ending {
	return Ending{Lock: l, Entry: e, verb: verbExpire, reason: reason}
}

// Cancel ends an entry that somebody wished cancelled while it ran.
func Cancel(l *Lock, e EntryID, reason string) Ending {
	return Ending{Lock: l, Entry: e, verb: verbCancel, reason: reason}
}

// removeSQL ends entries $4 as expired or cancelled ($5), for reasons $6.
const removeSQL = `
WITH gone AS (
    DELETE FROM penstock.entry_X e
     USING unnest($2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::text[]) k(lock_key, token, id, outcome, reason)
      JOIN penstock.lock l ON l.queue_id = $1 AND l.lock_key = k.lock_key AND l.token = k.token
     WHERE e.queue_id = $1 AND e.id = k.id
    RETURNING e.id, e.created_at, e.attempt, k.token, k.outcome, k.reason
), asked AS (
    DELETE FROM penstock.cancel_request c USING gone WHERE c.queue_id = $1 AND c.entry_id = gone.id
)
INSERT INTO penstock.result (queue_id, entry_id, created_at, node_id, token, attempt, outcome, reason)
SELECT $1, id, created_at, $7::bigint, token, attempt, outcome::penstock.outcome, reason
  FROM gone`

func (q *Queue) queueRemove(batch *pgx.Batch, node NodeID, endings []Ending) {
	if c := pick(endings, verbExpire, verbCancel); len(c.ids) > 0 {
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
