package invalidation

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Lane names a lane within its queue. Its ready rows are served by position: first in, first out.
type Lane struct {
	Priority int16
	Flow     string
}

// LaneHead is a lane that has ready rows, and the position of its first one.
type LaneHead struct {
	Lane
	Position int64
}

// lanesSQL reads the lanes of each queue in $1 by a loose index scan over the ready rows, highest
// priority first, then by flow, after the lane of priority $3 and flow $4: one lookup for each lane
// that has work and two for each priority, $2 lanes of a queue at most.
const lanesSQL = `
SELECT q.id, l.priority, l.flow, l.pos
  FROM unnest($1::int[], $3::smallint[], $4::text[]) q(id, priority, flow)
 CROSS JOIN LATERAL (
       WITH RECURSIVE lane AS (
           SELECT q.priority, q.flow COLLATE "C" AS flow, 0::bigint AS pos
           UNION ALL
           SELECT n.priority, n.flow, n.pos
             FROM lane CROSS JOIN LATERAL (
                  SELECT x.priority, x.flow, x.pos FROM (
                      (SELECT priority, flow, pos FROM penstock.ready
                        WHERE queue_id = q.id AND priority = lane.priority AND flow > lane.flow
                        ORDER BY flow, pos LIMIT 1)
                      UNION ALL
                      (SELECT f.priority, f.flow, f.pos
                         FROM (SELECT priority FROM penstock.ready
                                WHERE queue_id = q.id AND priority < lane.priority AND priority >= 0
                                ORDER BY priority DESC, flow DESC, pos DESC LIMIT 1) lower
                        CROSS JOIN LATERAL (
                              SELECT priority, flow, pos FROM penstock.ready
                               WHERE queue_id = q.id AND priority = lower.priority
                               ORDER BY flow, pos LIMIT 1) f)) x LIMIT 1) n
       )
       SELECT priority, flow, pos FROM lane OFFSET 1 LIMIT $2::int) l`

// Lanes returns the lanes of queues that have work, highest priority first, up to limit for each queue. Its
// cost grows with the lanes, not with the backlog, except that it walks over rows that are dead but cannot be
// vacuumed yet: time it, and ask less often where it is dear.
func Lanes(ctx context.Context, db postgres.DB, queues []int32, limit int) (map[int32][]LaneHead, error) {
	start := make(map[int32]Lane, len(queues))
	for _, id := range queues {
		start[id] = Lane{Priority: math.MaxInt16}
	}
	return LanesAfter(ctx, db, start, limit)
}

// LanesAfter is Lanes for those that come after a given lane of each queue: of less priority, or of the same and a
// later flow.
func LanesAfter(ctx context.Context, db postgres.DB, after map[int32]Lane, limit int) (map[int32][]LaneHead, error) {
	queues := slices.Sorted(maps.Keys(after))
	priorities, flows := make([]int16, len(queues)), make([]string, len(queues))
	for i, id := range queues {
		priorities[i], flows[i] = after[id].Priority, after[id].Flow
	}
	found := map[int32][]LaneHead{}
	var queue int32
	var head LaneHead
	_, err := pgx.ForEachRow(postgres.Query(ctx, db, lanesSQL, queues, limit, priorities, flows),
		[]any{&queue, &head.Priority, &head.Flow, &head.Position}, func() error {
			found[queue] = append(found[queue], head)
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	return found, nil
}
