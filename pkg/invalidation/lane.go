package invalidation

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Lane is the unit in which ready rows are ordered: first in, first out.
type Lane struct {
	Priority int16
	Flow     string
}

// LaneHead is a lane that has ready rows, and the place of its first one.
type LaneHead struct {
	Lane
	Pos int64
}

// lanesSQL hops from lane to lane of each queue in $1 through the index of ready rows, highest priority first, then
// by flow: one look-up for each lane that has work and two for each priority, $2 lanes of a queue at most.
const lanesSQL = `
SELECT q.id, l.priority, l.flow, l.pos
  FROM unnest($1::int[]) q(id)
 CROSS JOIN LATERAL (
       WITH RECURSIVE lane AS (
           (SELECT f.priority, f.flow, f.pos
              FROM (SELECT priority FROM penstock.ready WHERE queue_id = q.id
                     ORDER BY priority DESC, flow DESC, pos DESC LIMIT 1) top
             CROSS JOIN LATERAL (
                   SELECT priority, flow, pos FROM penstock.ready WHERE queue_id = q.id AND priority = top.priority
                    ORDER BY flow, pos LIMIT 1) f)
           UNION ALL
           SELECT n.priority, n.flow, n.pos
             FROM lane CROSS JOIN LATERAL (
                  SELECT x.priority, x.flow, x.pos FROM (
                      (SELECT priority, flow, pos FROM penstock.ready
                        WHERE queue_id = q.id AND priority = lane.priority AND flow > lane.flow
                        ORDER BY flow, pos LIMIT 1)
                      UNION ALL
                      (SELECT f.priority, f.flow, f.pos
                         FROM (SELECT priority FROM penstock.ready WHERE queue_id = q.id AND priority < lane.priority
                                ORDER BY priority DESC, flow DESC, pos DESC LIMIT 1) lower
                        CROSS JOIN LATERAL (
                              SELECT priority, flow, pos FROM penstock.ready WHERE queue_id = q.id AND priority = lower.priority
                               ORDER BY flow, pos LIMIT 1) f)) x LIMIT 1) n
       )
       SELECT priority, flow, pos FROM lane LIMIT $2::int) l`

// Lanes returns the lanes of queues that have work, highest priority first, up to limit for each queue. Its cost grows with the lanes, not
// with the backlog, except that it walks over rows that are dead but cannot be vacuumed yet: time it, and ask less
// often where it is dear.
func Lanes(ctx context.Context, db postgres.DB, queues []int32, limit int) (map[int32][]LaneHead, error) {
	rows, err := db.Query(ctx, lanesSQL, queues, limit)
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	found := map[int32][]LaneHead{}
	var queue int32
	var head LaneHead
	_, err = pgx.ForEachRow(rows, []any{&queue, &head.Priority, &head.Flow, &head.Pos}, func() error {
		found[queue] = append(found[queue], head)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	return found, nil
}
