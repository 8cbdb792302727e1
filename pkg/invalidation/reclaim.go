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

// Reclaim returns the locks of a claim whose answer was lost, of all its lanes, none if it was not committed; of the
// state of the lanes it returns Refunded and Requeued alone. It waits for a synchronous standby, as the claim did: its
// tokens must not be given out again after a failover.
func (q *Queue) Reclaim(ctx context.Context, node NodeID, claimID int32) (Claimed, error) {
	locks, err := q.findClaim(ctx, node, claimID)
	if err == nil && len(locks) > 0 {
		_, err = q.db.Exec(ctx, awaitStandbySQL)
	}
	if err != nil {
		return Claimed{}, q.errorf("find claim in", err)
	}
	covered, err := q.cover(ctx, node, locks)
	if err != nil {
		return Claimed{}, q.errorf("find claim in", err)
	}
	// Whether the claim gave units back before its answer was lost is not known. Entries that cannot be read are left
	// to the next claim.
	c := Claimed{Locks: covered.locks, Refunded: q.rates != rateNone}
	for _, l := range locks {
		if l.Requeued != nil {
			c.Requeued = append(c.Requeued, *l.Requeued)
		}
	}
	return c, nil
}

// findClaim returns the locks of a claim, those of groups without their entries.
func (q *Queue) findClaim(ctx context.Context, node NodeID, claimID int32) (locks []*Lock, err error) {
	start, quantum := time.Now(), q.quantum() // the claim's is not known any more
	rows := postgres.Query(ctx, q.db, q.sql.reclaim, q.ID, node, claimID)
	var row claimRow
	var tid pgtype.TID
	var priority int16
	_, err = pgx.ForEachRow(rows, append(row.lock(), &tid, &priority), func() error {
		l := &Lock{
			Key: row.key.String, Token: Token(row.token.Int64), Lane: Lane{priority, row.flow.String}, ClaimedAt: start,
			position: row.position.Int64, quantum: quantum,
		}
		if row.id.Valid {
			l.Entries, l.tid = []Entry{row.entry()}, tid
		}
		locks = append(locks, l)
		return nil
	})
	return locks, err
}
