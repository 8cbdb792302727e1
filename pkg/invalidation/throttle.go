package invalidation

import (
	"time"

	"github.com/jackc/pgx/v5"
)

// throttleOrder is a throttle that a handler ordered; none if wait is zero.
type throttleOrder struct {
	wait time.Duration
	flow bool // only the flow of the lock's lane
}

// throttleSQL writes the throttles of endings whose tokens are still valid, one for each flow, in
// sorted order. It is in the transaction that releases the entries, so that no claim can take them
// in between.
const throttleSQL = `
SELECT penstock.throttle($4, max(k.wait_ms) * interval '1 millisecond', k.flow, max(k.reason))
  FROM unnest($2::text[], $3::bigint[], $5::bigint[], $6::text[], $7::text[]) k(lock_key, token, wait_ms, flow, reason)
 CROSS JOIN LATERAL (
       SELECT token FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
 GROUP BY k.flow
 ORDER BY k.flow NULLS FIRST`

func (q *Queue) addThrottles(batch *pgx.Batch, endings []Ending) {
	c := pick(endings, func(e *Ending) bool { return e.throttle.wait != 0 })
	if len(c.ids) == 0 {
		return
	}
	batch.Queue(throttleSQL, q.ID, c.keys, c.tokens, q.Name,
		each(c, func(e *Ending) int64 { return min(e.throttle.wait, 24*time.Hour).Milliseconds() }),
		each(c, func(e *Ending) *string {
			if !e.throttle.flow {
				return nil
			}
			return &e.Lock.Lane.Flow
		}),
		each(c, func(e *Ending) string { return tidy(e.reason) }))
}
