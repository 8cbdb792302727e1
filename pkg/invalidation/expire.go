package invalidation

import "context"

// expireSQL removes up to $2 entries whose time has passed and that nobody runs, without waiting for a thread.
// Entries that are running end with their node's context; penstock.expired_locks finds those whose node does not
// act on it. A ready row of an entry that goes is taken first, so that no claim can start it meanwhile; where a
// claim holds it, the claim sees the deadline itself.
const expireSQL = `
SELECT penstock.expire_entries($1, $2) -- penstock.entry_X`

// Expire removes up to limit entries whose start_by or finish_by has passed and that nobody runs.
func (q *Queue) Expire(ctx context.Context, limit int) (int, error) {
	var n int
	err := q.db.QueryRow(ctx, q.sql.expire, q.ID, limit).Scan(&n)
	return n, q.errorf("expire entries of", err)
}
