package invalidation

import (
	"context"
	"slices"
	"strings"
)

// several stands for claims of several lanes among the manners: where one of them met keys, they are careful for a while.
var several = Lane{Priority: -1}

// ClaimLanes is Claim for several lanes in one transaction: r.Lane from r.From on, and then those of along, which have the
// same priority; those that begin at 0 are claimed stubbornly. What one lane leaves of r.Limit goes to the next. It returns how it
// found the lanes in this order, as far as it came: there may be fewer than asked for, but one. Each lane that it comes to counts as a
// lock or more of the limit.
func (q *Queue) ClaimLanes(ctx context.Context, r ClaimRequest, along []LaneHead) ([]Claimed, error) {
	lanes := []LaneHead{{Lane: r.Lane, Pos: r.From}}
	for _, l := range along {
		if l.Priority != r.Lane.Priority {
			break
		}
		lanes = append(lanes, l)
	}
	if len(lanes) > 1 {
		claimed, err := q.claimSeveral(ctx, r, lanes)
		if err != nil || len(claimed) > 0 {
			return claimed, err
		}
	}
	c, err := q.Claim(ctx, r)
	return []Claimed{c}, err
}

// claimSeveral returns nothing where they can only be claimed from one by one.
func (q *Queue) claimSeveral(ctx context.Context, r ClaimRequest, lanes []LaneHead) ([]Claimed, error) {
	known := slices.ContainsFunc(lanes, func(l LaneHead) bool { return q.careful.in(l.Lane) })
	if known || q.careful.in(several) || q.pace > 0 {
		return q.claim(ctx, r, lanes, q.carefully)
	}
	claimed, err := q.claim(ctx, r, lanes, q.swiftly)
	if waits(err) {
		q.careful.be(several)
		return q.claim(ctx, r, lanes, q.carefully)
	}
	for i := range claimed {
		if c := &claimed[i]; c.Left > 0 { // keys, for a claim in the careful form, which begins where this one began
			q.careful.be(several)
			q.careful.be(lanes[i].Lane)
			c.Left, c.Mark = 0, lanes[i].Pos-1
		}
	}
	return claimed, err
}

// claimLanesSQL is swiftSQL for lanes of flows $3 from places $4 on, in their order. A lane is locked when the limit has
// been shown to reach it, and answers with one row that is empty if there is nothing to claim. The fourth column
// names the flow.
var claimLanesSQL = `
WITH alone AS MATERIALIZED (
    SELECT l.ord, l.flow, l.place, b.wait,
           pg_try_advisory_xact_lock(hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || l.flow, 0)) AS ok
      FROM (SELECT set_config('lock_timeout', '100ms', true) IS NOT NULL AND ` + unlimitedSQL + ` AS ok) g
     CROSS JOIN LATERAL unnest($3::text[], $4::bigint[]) WITH ORDINALITY l(flow, place, ord)
     CROSS JOIN LATERAL ` + laneHeldBackSQL + ` b
     WHERE g.ok
), head AS MATERIALIZED (
    SELECT a.ord, a.flow, a.ok, a.wait, r.row, r.pos, r.entry_id
      FROM alone a
      LEFT JOIN LATERAL (
           SELECT ready.ctid AS row, pos, entry_id
             FROM penstock.ready
            WHERE a.ok AND a.wait IS NULL AND queue_id = $1 AND priority = $2 AND flow = a.flow AND pos >= a.place
            ORDER BY pos
            LIMIT $5::int) r ON true
     LIMIT $5::int
), mine AS MATERIALIZED (
    DELETE FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM head WHERE entry_id IS NOT NULL))
    RETURNING pos, entry_id, flow
), solo AS MATERIALIZED (
    SELECT nextval('penstock.token_seq') AS token, m.pos, m.flow, e.id, e.attempt, e.crashes, e.cost, e.created_at, e.start_by,
           e.finish_by, e.name, e.trace, e.callback, e.payload, e.row
      FROM mine m
     CROSS JOIN LATERAL (SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
), locked AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost, priority, flow, claimed_at)
    SELECT $1, '#' || id, token, $6::bigint, $7::int, pos, id, 1, coalesce(cost, 1), $2, flow, clock_timestamp()
      FROM solo
    RETURNING ctid AS row
)
SELECT token, pos, id, NULL::text, attempt, crashes, coalesce(cost, 0), name, trace, callback, payload,
       date_part('epoch', clock_timestamp() - created_at), date_part('epoch', start_by - clock_timestamp()),
       date_part('epoch', finish_by - clock_timestamp()), row, NULL::tid[], flow
  FROM solo
UNION ALL
SELECT 0, h.pos, h.rows, NULL, h.ok::int, h.keys::int, /* shared */ $5::int, NULL, NULL, NULL, NULL,
       h.wait, CASE WHEN h.wait IS NOT NULL THEN 0::float8 END, NULL, NULL,
       CASE WHEN h.ord = 1 THEN (SELECT array_agg(row) FROM locked) END, h.flow
  FROM (SELECT ord, flow, bool_and(ok) AS ok, max(wait) AS wait, coalesce(max(pos), 0) AS pos, count(pos) AS rows, count(pos) - count(entry_id) AS keys
          FROM head GROUP BY ord, flow) h`

// claimLanesLimitedSQL is the same for a queue under limits $8, none of which is a rate. It answers nothing where what is in use
// must be counted for each flow.
var claimLanesLimitedSQL = strings.NewReplacer(
	"WITH alone", `WITH room AS MATERIALIZED (
    SELECT least($5::int, r.locks) AS locks, r.uncounted_to FROM penstock.claim_room($1, NULL, $5::int, $8::int[], $9::int) r WHERE r.ok
), alone`,
	unlimitedSQL, "EXISTS (SELECT FROM room)",
	"LIMIT $5::int) r ON true\n     LIMIT $5::int\n", "LIMIT (SELECT locks FROM room)) r ON true\n     LIMIT (SELECT greatest(1, locks) FROM room)\n",
	"/* shared */ $5::int", sharedSQL,
	"    RETURNING ctid AS row\n)\n", `    RETURNING ctid AS row
), spent AS MATERIALIZED (
    SELECT CASE WHEN max(token) > (SELECT uncounted_to FROM room) THEN
           penstock.charge($1, NULL, 0, 0, NULL, NULL, max(token), (SELECT uncounted_to FROM room)) END AS done
      FROM solo
)
`,
	"CASE WHEN h.wait IS NOT NULL THEN 0::float8 END, NULL,", "CASE WHEN h.wait IS NOT NULL THEN 0 ELSE (SELECT locks FROM room) END::float8, (SELECT 0 FROM spent),",
).Replace(claimLanesSQL)
