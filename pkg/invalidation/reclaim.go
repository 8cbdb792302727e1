package invalidation

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// reclaimSQL finds the locks of claim $3 of node $2 whose keys lie from $4 to $5, with their entries if they are solo. The lock
// table is as small as the work in flight.
const reclaimSQL = `
SELECT l.token, l.pos, coalesce(e.id, 0), l.lock_key, coalesce(e.attempt, 0), coalesce(e.crashes, 0), coalesce(e.cost, 0), e.name, e.trace,
       e.callback, e.payload, date_part('epoch', clock_timestamp() - e.created_at), date_part('epoch', e.start_by - clock_timestamp()),
       date_part('epoch', e.finish_by - clock_timestamp()), e.row, ARRAY[l.row], l.flow, l.priority
  FROM (SELECT ctid AS row, * FROM penstock.lock
         WHERE queue_id = $1 AND node_id = $2 AND claim_id = $3 AND lock_key BETWEEN $4 AND $5 OFFSET 0) l
  LEFT JOIN LATERAL (
       SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = l.last_entry_id AND l.lock_key LIKE '#%' OFFSET 0) e ON true
 ORDER BY l.pos`

// Reclaim returns the locks of a claim whose answer was lost, none if it was not committed.
func (q *Queue) Reclaim(ctx context.Context, node NodeID, claimID int32) ([]*Lock, error) {
	return q.Handed(ctx, HandOver{Node: node, Claim: claimID})
}

// Handed returns what was handed over to a seat: a lock, or none if it has ended. Without an entry it looks at all locks.
func (q *Queue) Handed(ctx context.Context, h HandOver) ([]*Lock, error) {
	start, first, last := time.Now(), "", "\U0010ffff" // keys
	if h.Entry != 0 {
		first, last = soloKey(h.Entry), soloKey(h.Entry)
	}
	rows := postgres.Query(ctx, q.db, q.sql.reclaim, q.ID, h.Node, h.Claim, first, last)
	var locks, groups []*Lock
	var row claimRow
	var priority int16
	_, err := pgx.ForEachRow(rows, append(row.lock(), &priority), func() error {
		l := &Lock{Key: row.key.String, Token: row.token, Lane: Lane{priority, row.flow.String}, ClaimedAt: start, pos: row.pos}
		if row.entry.ID != 0 {
			l.Entries, l.row = []Entry{*row.settled()}, row.rows[0]
		}
		locks = append(locks, l)
		if !l.Solo() {
			groups = append(groups, l)
		}
		return nil
	})
	if err == nil && len(groups) > 0 {
		err = q.readGroups(ctx, groups)
	}
	if err != nil {
		return nil, q.errorf("find claim in", err)
	}
	return q.handBackEmpty(ctx, h.Node, locks)
}
