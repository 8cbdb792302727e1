package invalidation

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// expireSQL ends up to $2 entries of queue $1 whose deadline has passed and that do not run. It skips rows that others
// have locked, and never waits: what a claim has locked is left to its node, which checks the deadline before the run.
const expireSQL = `SELECT penstock.expire_entries($1, $2)`

// Expire removes up to limit entries whose start_by or finish_by has passed and which do not run.
// The node of a running entry ends its context; ExpiredLocks finds entries whose handler ignores
// that.
func (q *Queue) Expire(ctx context.Context, limit int) (int, error) {
	var n int
	err := q.db.QueryRow(ctx, expireSQL, q.ID, limit).Scan(&n)
	return n, q.errorf("expire entries of", err)
}

// ExpiredLock is an entry that still runs although its finish_by has passed.
type ExpiredLock struct {
	QueueID  int32
	Key      string
	Token    Token
	Node     NodeID
	Entry    EntryID
	FinishBy time.Time
}

// ExpiredLocks returns the entries that still run more than grace after their finish_by, of all queues.
func ExpiredLocks(ctx context.Context, db postgres.DB, grace time.Duration) ([]ExpiredLock, error) {
	const sql = `SELECT queue_id, lock_key, token, node_id, entry_id, finish_by FROM penstock.expired_locks($1)`
	locks, err := pgx.CollectRows(postgres.Query(ctx, db, sql, grace), pgx.RowToStructByPos[ExpiredLock])
	if err != nil {
		return nil, fmt.Errorf("list expired locks: %w", err)
	}
	return locks, nil
}
