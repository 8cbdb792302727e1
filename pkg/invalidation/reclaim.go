package invalidation

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/penstock/penstock/internal/postgres"
)

// reclaimSQL finds the locks of claim $3 of node $2, with their entries if they are solo. The lock table is
// as small as the work in flight.
const reclaimSQL = `
SELECT l.token, l.pos AS position, e.id AS entry_id, l.lock_key, e.attempt, e.crashes, e.may_have_run,
       coalesce(e.cost, 0) AS cost, e.name, e.trace,
       e.callback, e.payload, date_part('epoch', statement_timestamp() - e.created_at) AS waited,
       date_part('epoch', e.start_by - clock_timestamp()) AS start_in,
       date_part('epoch', e.finish_by - clock_timestamp()) AS finish_in,
       e.row AS entry_tid, l.flow, l.row AS lock_tid, l.priority
  FROM (SELECT ctid AS row, * FROM penstock.lock
         WHERE queue_id = $1 AND node_id = $2 AND claim_id = $3 OFFSET 0) l
  LEFT JOIN LATERAL (
       SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = l.last_entry_id
           AND penstock.is_solo(l.lock_key) OFFSET 0) e ON true
 ORDER BY l.pos`

const awaitStandbySQL = `SELECT penstock.await_standby()`

// Reclaim returns the locks of a claim whose answer was lost, none if it was not committed. It waits for a synchronous
// standby, as the claim did: its tokens must not be given out again after a failover.
func (q *Queue) Reclaim(ctx context.Context, node NodeID, claimID int32) ([]*Lock, error) {
	start := time.Now()
	rows := postgres.Query(ctx, q.db, q.sql.reclaim, q.ID, node, claimID)
	var locks, groups []*Lock
	var row claimRow
	var tid pgtype.TID
	var priority int16
	_, err := pgx.ForEachRow(rows, append(row.lock(), &tid, &priority), func() error {
		l := &Lock{
			Key: row.key.String, Token: Token(row.token.Int64), Lane: Lane{priority, row.flow.String}, ClaimedAt: start,
			position: row.position.Int64,
		}
		if row.id.Valid {
			l.Entries, l.tid = []Entry{row.entry()}, tid
		}
		locks = append(locks, l)
		if !l.Solo() {
			groups = append(groups, l)
		}
		return nil
	})
	if err == nil && len(locks) > 0 {
		_, err = q.db.Exec(ctx, awaitStandbySQL)
	}
	if err == nil && len(groups) > 0 {
		err = q.readGroups(ctx, groups)
	}
	if err != nil {
		return nil, q.errorf("find claim in", err)
	}
	return q.handBackEmpty(ctx, node, locks)
}
