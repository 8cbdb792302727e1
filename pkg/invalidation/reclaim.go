package invalidation

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// reclaimSQL finds the locks of one claim. The lock table is as small as the work in flight.
const reclaimSQL = `
SELECT lock_key, token, priority, flow, last_entry_id, pos
  FROM penstock.lock
 WHERE queue_id = $1 AND node_id = $2 AND claim_id = $3
 ORDER BY pos`

// Reclaim returns the locks of a claim whose answer was lost, none if it was not committed.
func (q *Queue) Reclaim(ctx context.Context, node NodeID, claimID int32) ([]*Lock, error) {
	start := time.Now()
	rows, err := q.db.Query(ctx, reclaimSQL, q.ID, node, claimID)
	if err != nil {
		return nil, q.errorf("find claim in", err)
	}
	locks, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Lock, error) {
		l := &Lock{ClaimedAt: start}
		var last EntryID
		return l, row.Scan(&l.Key, &l.Token, &l.Lane.Priority, &l.Lane.Flow, &last, &l.pos)
	})
	if err != nil || len(locks) == 0 {
		return nil, q.errorf("find claim in", err)
	}
	if err := q.readEntries(ctx, locks); err != nil {
		return nil, err
	}
	return q.handBackEmpty(ctx, node, locks)
}

// readSoloSQL reads the entries of solo locks; claimGroupsSQL reads the others.
const readSoloSQL = `
SELECT l.token, e.id, e.attempt, e.crashes, coalesce(e.cost, 0), e.name, e.trace, e.callback, e.payload,
       extract(epoch FROM clock_timestamp() - e.created_at)::float8,
       extract(epoch FROM e.start_by - clock_timestamp())::float8, extract(epoch FROM e.finish_by - clock_timestamp())::float8, NULL::tid
  FROM unnest($2::text[], $3::bigint[]) k(lock_key, token)
  CROSS JOIN LATERAL (
       SELECT * FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
  CROSS JOIN LATERAL (
       SELECT * FROM penstock.entry WHERE queue_id = $1 AND id = l.last_entry_id OFFSET 0) e`

func (q *Queue) readEntries(ctx context.Context, locks []*Lock) error {
	var groups []*Lock
	byToken := map[Token]*Lock{}
	var keys []string
	var tokens []Token
	for _, l := range locks {
		if !l.Solo() {
			groups = append(groups, l)
			continue
		}
		byToken[l.Token] = l
		keys, tokens = append(keys, l.Key), append(tokens, l.Token)
	}
	rows, err := q.db.Query(ctx, readSoloSQL, q.ID, keys, tokens)
	if err != nil {
		return q.errorf("read entries claimed from", err)
	}
	if err := readCovered(rows, byToken); err != nil {
		return q.errorf("read entries claimed from", err)
	}
	if len(groups) == 0 {
		return nil
	}
	return q.readGroups(ctx, groups)
}
