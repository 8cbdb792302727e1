package invalidation

import (
	"encoding/json"

	"github.com/jackc/pgx/v5"
)

// callBackSQL pushes an entry of the webhook queue for each entry $4 that ends with outcome $5 and
// has a callback address. It is part of the ending: the push commits with it or not at all, and
// only under the lock's token.
const callBackSQL = `
SELECT penstock.call_back(e.entry::penstock.entry, k.outcome, k.detail)
  FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::jsonb[]) k(lock_key, token, id, outcome, detail)
 CROSS JOIN LATERAL (
       SELECT token FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
 CROSS JOIN LATERAL (
       SELECT x AS entry FROM penstock.entry_X x WHERE queue_id = $1 AND id = k.id AND callback IS NOT NULL OFFSET 0) e
 ORDER BY k.id`

// callBackPoisonSQL does the same for entries $2 that are about to be dead-lettered.
const callBackPoisonSQL = `
SELECT penstock.call_back(e::penstock.entry, 'failed', jsonb_build_object('class', 'poison',
           'error', 'poison: ' || e.crashes || ' nodes died while they ran this entry'))
  FROM penstock.entry_X e
 WHERE e.queue_id = $1 AND e.id = ANY ($2::bigint[]) AND e.callback IS NOT NULL
 ORDER BY e.id`

func (q *Queue) addCallbacks(batch *pgx.Batch, endings []Ending) {
	c := pick(endings, func(e *Ending) bool { return e.outcome() != "" && e.Lock.callback(e.Entry) != nil })
	if len(c.ids) > 0 {
		batch.Queue(q.sql.callBack, q.ID, c.keys, c.tokens, c.ids, each(c, (*Ending).outcome),
			each(c, (*Ending).detail))
	}
}

// outcome is how the ending ends its entry, empty if it does not.
func (e *Ending) outcome() string {
	switch e.verb {
	case verbDone:
		return "done"
	case verbFail:
		return "failed"
	case verbExpire:
		return "expired"
	case verbCancel:
		return "cancelled"
	default:
		return ""
	}
}

// detail is the fields of a callback beside the outcome.
func (e *Ending) detail() map[string]any {
	switch e.verb {
	case verbDone:
		if e.result == nil {
			return map[string]any{"result": json.RawMessage("null")}
		}
		return map[string]any{"result": e.result}
	case verbFail:
		f := e.failure.clean()
		return map[string]any{"class": f.Class, "error": f.Error}
	default:
		return map[string]any{"reason": tidy(e.reason)}
	}
}
