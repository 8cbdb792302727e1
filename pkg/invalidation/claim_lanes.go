package invalidation

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// ClaimLanes is Claim for several lanes in one transaction: r.Lane from r.From on, and then those of along, which have the
// same priority. What one lane leaves of r.Limit goes to the next. It returns how it found the lanes in this order, as far as
// it came: there may be fewer than asked for, but one. Each lane that it comes to counts as a lock or more of the limit.
func (q *Queue) ClaimLanes(ctx context.Context, r ClaimRequest, along []LaneHead) ([]Claimed, error) {
	lanes := []LaneHead{{Lane: r.Lane, Pos: r.From}}
	for _, l := range along {
		if l.Priority == r.Lane.Priority && !q.careful.in(l.Lane) {
			lanes = append(lanes, l)
			continue
		}
		break
	}
	if len(lanes) > 1 && q.pace == 0 && !q.careful.in(r.Lane) {
		claimed, err := q.claimLanes(ctx, r, lanes)
		if code := postgres.Code(err); code == lockNotAvailable || code == uniqueViolation {
			for _, l := range lanes {
				q.careful.be(l.Lane)
			}
		} else if code == entryChanged { // see claim
			return []Claimed{{Busy: true}}, nil
		} else if err != nil || len(claimed) > 0 {
			return claimed, err
		}
	}
	c, err := q.Claim(ctx, r)
	return []Claimed{c}, err
}

// claimLanesSQL is swiftSQL for lanes of flows $3 from places $4 on, in their order. A lane is locked when the limit has
// been shown to reach it, and answers with one row that is empty if there is nothing to claim. The fourth column
// names the flow.
var claimLanesSQL = `
WITH alone AS MATERIALIZED (
    SELECT l.ord, l.flow, l.place, b.wait,
           pg_try_advisory_xact_lock(hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || l.flow, 0)) AS ok
      FROM (SELECT set_config('lock_timeout', '100ms', true) IS NOT NULL ` + unlimitedSQL + ` AS ok) g
     CROSS JOIN LATERAL unnest($3::text[], $4::bigint[]) WITH ORDINALITY l(flow, place, ord)
     CROSS JOIN LATERAL ` + strings.ReplaceAll(heldBackSQL, "$3", "l.flow") + ` b
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
SELECT token, pos, id, flow, attempt, crashes, coalesce(cost, 0), name, trace, callback, payload,
       date_part('epoch', clock_timestamp() - created_at), date_part('epoch', start_by - clock_timestamp()),
       date_part('epoch', finish_by - clock_timestamp()), row, NULL::tid[]
  FROM solo
UNION ALL
SELECT 0, h.pos, h.rows, h.flow, h.ok::int, h.keys::int, 0, NULL, NULL, NULL, NULL,
       h.wait, CASE WHEN h.wait IS NOT NULL THEN 0::float8 END, NULL, NULL,
       CASE WHEN h.flow = ($3::text[])[1] THEN (SELECT array_agg(row) FROM locked) END
  FROM (SELECT flow, bool_and(ok) AS ok, max(wait) AS wait, coalesce(max(pos), 0) AS pos, count(pos) AS rows, count(pos) - count(entry_id) AS keys
          FROM head GROUP BY ord, flow) h`

// claimLanesLimitedSQL is the same for a queue under limits $8, none of which is a rate. It answers nothing where what is in use
// must be counted for each flow.
var claimLanesLimitedSQL = strings.NewReplacer(
	"WITH alone", `WITH room AS MATERIALIZED (
    SELECT least($5::int, r.locks) AS locks, r.uncounted_to FROM penstock.claim_room($1, NULL, $5::int, $8::int[], 0) r WHERE r.ok
), alone`,
	unlimitedSQL, "AND EXISTS (SELECT FROM room)",
	"     LIMIT $5::int\n)", "     LIMIT (SELECT locks FROM room)\n)",
	"    RETURNING ctid AS row\n)\n", `    RETURNING ctid AS row
), spent AS MATERIALIZED (
    SELECT CASE WHEN max(token) > (SELECT uncounted_to FROM room) THEN
           penstock.charge($1, NULL, 0, 0, NULL, NULL, max(token), (SELECT uncounted_to FROM room)) END AS done
      FROM solo
)
`,
	"CASE WHEN h.wait IS NOT NULL THEN 0::float8 END, NULL,", "CASE WHEN h.wait IS NOT NULL THEN 0 ELSE (SELECT locks FROM room) END::float8, (SELECT 0 FROM spent),",
).Replace(claimLanesSQL)

func (q *Queue) claimLanes(ctx context.Context, r ClaimRequest, lanes []LaneHead) ([]Claimed, error) {
	start := time.Now()
	index := make(map[string]int, len(lanes))
	flows, places := make([]string, len(lanes)), make([]int64, len(lanes))
	for i, l := range lanes {
		index[l.Flow], flows[i], places[i] = i, l.Flow, l.Pos
	}
	sql, args := q.sql.claimLanes, []any{q.ID, r.Lane.Priority, flows, places, r.Limit, r.Node, r.ClaimID}
	if len(q.limits) > 0 {
		sql, args = q.sql.claimLanesLimited, append(args, q.limits)
	}
	rows, err := q.db.Query(ctx, sql, args...)
	if err != nil {
		return nil, q.errorf("claim from", err)
	}
	claimed, came, met := make([]Claimed, len(lanes)), 0, 0
	var solo slab
	var row claimRow
	_, err = pgx.ForEachRow(rows, row.lock(), func() error {
		at := index[row.key.String]
		c := &claimed[at]
		if row.token == 0 {
			c.summary(&row, r.Limit)
			solo.place(row.rows)
			if row.startIn.Float64 > 0 {
				r.Limit = min(r.Limit, int(row.startIn.Float64)) // the room that the queue's limits left
			}
			came, met = max(came, at+1), met+max(1, c.Seen)
			return nil
		}
		c.Locks = append(c.Locks, solo.lock(&row, lanes[at].Lane, start))
		return nil
	})
	// The claim is committed when all has been read.
	if err != nil {
		return nil, q.errorf("claim from", err)
	}
	for i := range claimed[:came] {
		q.looked(&claimed[i], lanes[i], i < came-1 || met < r.Limit)
	}
	return claimed[:came], nil
}

// looked completes how a lane was found among several; all says that there was nothing behind the rows met. Keys are
// left for a claim in the careful form, which begins where this one began.
func (q *Queue) looked(c *Claimed, at LaneHead, all bool) {
	inLine(c.Locks)
	c.Emptied = all && !c.Busy && !c.Limited && c.Left == 0
	if c.Left > 0 {
		q.careful.be(at.Lane)
		c.Left, c.Mark = 0, at.Pos-1
	}
}
