package invalidation

import "context"

// SettleCancelRequests cancels up to limit entries whose cancel was requested while they ran and
// which do not run any more, and returns how many. The elected leader calls it in each pass over deadlines while the
// queue has cancel requests.
func (q *Queue) SettleCancelRequests(ctx context.Context, limit int) (int, error) {
	var n int
	err := q.db.QueryRow(ctx, `SELECT penstock.settle_cancel_requests($1, $2)`, q.ID, limit).Scan(&n)
	return n, q.errorf("settle cancel requests of", err)
}
