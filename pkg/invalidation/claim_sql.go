package invalidation

import (
	"fmt"
	"strings"
)

// heldBackSQL is how long queue $1 or its flow $3 is pushed back (s), NULL if it is not. It is written out, since
// a function in SQL is planned anew in each statement that calls it, which took half the time of a claim.
const heldBackSQL = `(SELECT nullif(greatest(0, extract(epoch FROM greatest(
        (SELECT until FROM penstock.push_back WHERE queue_id = $1 AND whole = true AND flow = ''),
        (SELECT until FROM penstock.push_back WHERE queue_id = $1 AND whole = false AND flow = $3)) - clock_timestamp())), 0)::float8 AS wait)`

// claimSQL takes up to $5 ready rows of lanes ($1 queue, $2 priority, $3 flows) from places $4 on, in this order, and puts
// lock records of node $6, claim $7 in their place. $8 is the queue's quantum in entries, $9 says for each lane whether to be
// stubborn (see Claim). A lane is locked when the limit has been shown to reach it.
//
// Claims of a lane exclude each other by a transaction-scoped try-lock: another claimer goes on to the next lane
// instead of waiting. That is for speed alone; a ready row can be deleted but once, and a key has but one lock.
//
// A ready row that somebody else has locked is passed by, a group's that is locked by a pusher (see push_many) is
// claimed without it when we are stubborn. A key is tried only under a try-lock of its own, so that the insert of
// its lock never waits and the token it draws is larger than that of any earlier lock of the key. One that stands in
// several lanes is claimed where it stood first; two places in line are the same only if they are of one key.
//
// Sets of this statement meet in "IN (...) IS TRUE", which Postgres answers from a hash table; internal/postgres
// says why they do not meet in joins.
//
// For groups only key and token come back: the entries must be read after this commits (claimGroupsSQL), for the
// snapshot here may be older than the finish that freed the key. Rows with token 0 say how each lane looked that the limit
// reached: pos the last place seen, id the rows seen, attempt 1 if we were alone, crashes the rows left behind,
// cost the room for locks that all lanes share, 0 if there is none, and what the queue's limits left: how long to wait for a token
// bucket or a push-back (s), and room for how many locks.
// No such row: what limits the queue is not as we know it, or somebody else has a limit alone.
// The last columns say where the rows of solo entries stand, those of all their locks in the same order (see
// finishSoloSQL; with the first lane alone), and the flow.
var claimSQL = `
WITH room AS MATERIALIZED (
    SELECT /* room */
), alone AS MATERIALIZED (
    SELECT l.ord, l.flow, l.place, l.stubborn, b.wait, room.locks, $8::int AS quantum,
           pg_try_advisory_xact_lock(hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || l.flow, 0)) AS ok
      FROM room
     CROSS JOIN LATERAL unnest($3::text[], $4::bigint[], $9::boolean[]) WITH ORDINALITY l(flow, place, stubborn, ord)
     CROSS JOIN LATERAL ` + laneHeldBackSQL + ` b
), head AS MATERIALIZED (
    SELECT a.ord, a.flow, a.stubborn, a.ok, a.wait, a.locks, a.quantum, r.row, r.pos, r.lock_key
      FROM alone a
      LEFT JOIN LATERAL (
           SELECT ready.ctid AS row, pos, lock_key
             FROM penstock.ready
            WHERE a.ok AND a.wait IS NULL AND queue_id = $1 AND priority = $2 AND flow = a.flow AND pos >= a.place
            ORDER BY pos
            LIMIT a.locks) r ON true
     LIMIT (SELECT greatest(1, locks) FROM room)
), mine AS MATERIALIZED (
    SELECT ctid AS row, pos, entry_id, flow
      FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM head))
       FOR UPDATE SKIP LOCKED
), solo AS MATERIALIZED (
    SELECT nextval('penstock.token_seq') AS token, m.pos, m.flow, e.id, e.attempt, e.crashes, e.cost, e.created_at, e.start_by,
           e.finish_by, e.name, e.trace, e.callback, e.payload, e.row
      FROM mine m
     CROSS JOIN LATERAL (SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
), groups AS MATERIALIZED (
    SELECT DISTINCT ON (h.lock_key) h.lock_key, h.pos, h.flow, c.entries, c.last_id, c.cost
      FROM head h
     CROSS JOIN LATERAL (
           SELECT count(*) AS entries, max(id) AS last_id, sum(coalesce(cost, 1)) AS cost
             FROM (SELECT id, cost FROM penstock.entry_X
                    WHERE lock_key = h.lock_key AND status = 'pending' AND priority >= 0
                    ORDER BY id LIMIT h.quantum) q) c
     WHERE h.lock_key IS NOT NULL
       AND (SELECT l.token FROM penstock.lock l WHERE l.queue_id = $1 AND l.lock_key = h.lock_key) IS NULL
       AND (h.pos IN (SELECT pos FROM mine) OR (h.stubborn AND c.entries > 0))
     ORDER BY h.lock_key, h.pos
), lock_solo AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost, priority, flow, claimed_at)
    SELECT $1, '#' || id, token, $6::bigint, $7::int, pos, id, 1, coalesce(cost, 1), $2, flow, clock_timestamp()
      FROM solo
    ON CONFLICT DO NOTHING
    RETURNING token, pos, ctid AS row
), lock_group AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost, priority, flow, claimed_at)
    SELECT $1, lock_key, nextval('penstock.token_seq'), $6, $7, pos, coalesce(last_id, 0), entries, coalesce(cost, 1), $2, flow, clock_timestamp()
      FROM groups
     WHERE pg_try_advisory_xact_lock(hashtextextended('penstock key ' || $1 || ' ' || lock_key, 0))
    ON CONFLICT DO NOTHING
    RETURNING token, pos, lock_key, last_entry_id, flow
), taken AS (
    DELETE FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM mine
                              WHERE (pos IN (SELECT pos FROM lock_solo UNION ALL SELECT pos FROM lock_group)) IS TRUE))
    RETURNING pos
)/* spent */
SELECT token, pos, id, NULL::text, attempt, crashes, coalesce(cost, 0), name, trace, callback, payload,
       date_part('epoch', clock_timestamp() - created_at),
       date_part('epoch', start_by - clock_timestamp()), date_part('epoch', finish_by - clock_timestamp()), row, NULL::tid[], flow
  FROM solo
 WHERE (token IN (SELECT token FROM lock_solo)) IS TRUE
UNION ALL
SELECT token, pos, last_entry_id, lock_key, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, flow
  FROM lock_group
UNION ALL
SELECT 0, h.pos, h.rows, NULL, h.ok::int, (h.rows - h.taken)::int, /* shared */ $5::int, NULL, NULL, NULL, NULL,
       greatest(h.wait, room.wait), CASE WHEN h.wait IS NULL THEN h.locks ELSE 0 END::float8, NULL /* spending */, NULL,
       CASE WHEN h.ord = 1 THEN (SELECT array_agg(row) FROM lock_solo) END, h.flow
  FROM (SELECT ord, flow, bool_and(ok) AS ok, max(wait) AS wait, max(locks) AS locks, coalesce(max(pos), 0) AS pos, count(pos) AS rows,
               count(*) FILTER (WHERE (pos IN (SELECT pos FROM taken)) IS TRUE) AS taken
          FROM head GROUP BY ord, flow) h
 CROSS JOIN room`

// A queue under limits $10 (of swiftSQL: $8) claims with forms of their own of both statements. penstock.claim_room says for
// how many locks there is room, if the limits are those that the queue knew of when it was opened and nobody else has one
// alone; if not, nothing is claimed. The migration that makes it has the argument for why no limit is ever exceeded.
// penstock.charge has the last word: it takes the claim back whose tokens lie beyond what may go uncounted. A group is covered
// as far as token buckets reach.
const (
	unlimitedSQL = "NOT EXISTS (SELECT FROM penstock.limit_use WHERE queue_id = $1)"
	roomSQL      = "CASE WHEN b.wait IS NULL THEN least($5::int, r.locks) ELSE 0 END AS locks, greatest(r.wait, b.wait) AS wait, r.uncounted_to"
	limited      = "penstock.claim_room($1, %s, $5, $%d::int[], $%d::int) r"
	chargeSQL    = ", spent AS MATERIALIZED (\n    SELECT CASE WHEN $%[1]d::int > 0 OR %[3]s > (SELECT uncounted_to FROM room) THEN\n           penstock.%[2]s, NULL, NULL, %[3]s, (SELECT uncounted_to FROM room)) END AS done\n)"
	sharedSQL    = "coalesce((SELECT CASE WHEN uncounted_to > 0 THEN greatest(1, locks) ELSE 0 END FROM room), 1)"
	oneFlow      = "CASE WHEN cardinality($3::text[]) = 1 THEN ($3::text[])[1] END"
)

var (
	laneHeldBackSQL = strings.ReplaceAll(heldBackSQL, "$3", "l.flow")
	claimFreeSQL    = strings.Replace(claimSQL, "/* room */", "$5::int AS locks, 0::float8 AS wait WHERE "+unlimitedSQL, 1)
	claimLimitedSQL = strings.NewReplacer(
		"/* room */", "least($5::int, r.locks) AS locks, r.entries, r.wait, r.uncounted_to, f.rooms, f.waits\n      FROM "+fmt.Sprintf(limited, oneFlow, 10, 11)+
			"\n      LEFT JOIN LATERAL (SELECT rooms, waits FROM penstock.flow_rooms($1, $3) WHERE $11::int > 0 AND cardinality($3::text[]) > 1 AND r.ok) f ON true\n     WHERE r.ok",
		"b.wait, room.locks, $8::int AS quantum,", `greatest(b.wait, CASE WHEN c.locks < 1 THEN room.waits[l.ord] END) AS wait, c.locks,
           greatest(1, least($8::int, room.entries / greatest(1, room.locks), room.rooms[l.ord] / greatest(1, c.locks))) AS quantum,`,
		laneHeldBackSQL+" b\n", laneHeldBackSQL+" b\n     CROSS JOIN LATERAL (SELECT least(room.locks, room.rooms[l.ord]) AS locks) c\n",
		"lock_key, last_entry_id, flow\n", "lock_key, last_entry_id, flow, entry_count\n",
		"RETURNING token, pos, ctid AS row\n", "RETURNING token, pos, ctid AS row, flow\n",
		"/* spent */", `, used AS MATERIALIZED (
    SELECT array_agg(flow) AS flows, array_agg(n) AS taken
      FROM (SELECT flow, sum(n)::bigint AS n
              FROM (SELECT flow, 1 AS n FROM lock_solo UNION ALL SELECT flow, entry_count FROM lock_group) l GROUP BY flow) f
)`+fmt.Sprintf(chargeSQL, 11, "charge_lanes($1, $11, (SELECT flows FROM used), (SELECT taken FROM used)",
			"greatest((SELECT max(token) FROM lock_solo), (SELECT max(token) FROM lock_group))"),
		"NULL /* spending */", "(SELECT 0 FROM spent)", "/* shared */ $5::int", sharedSQL,
	).Replace(claimSQL)
	// claimKeyedSQL is for queues with a rate for each lock key: it parks the keys that have to wait (see penstock.park).
	claimKeyedSQL = strings.NewReplacer(
		"), groups AS MATERIALIZED (", `), waits AS MATERIALIZED (
    SELECT k.pos, k.lock_key COLLATE "C" AS lock_key, k.room, k.wait, h.flows[a.at] AS flow, h.stubborn[a.at] AS stubborn, h.quantums[a.at] AS quantum
      FROM (SELECT array_agg(lock_key) AS keys, array_agg(pos) AS places, array_agg(flow) AS flows, array_agg(stubborn) AS stubborn,
                   array_agg(quantum) AS quantums
              FROM head WHERE lock_key IS NOT NULL) h
     CROSS JOIN LATERAL penstock.key_rooms($1, h.keys, h.places) k
     CROSS JOIN LATERAL (SELECT array_position(h.places, k.pos) AS at) a
), groups AS MATERIALIZED (`,
		"      FROM head h\n", "      FROM waits h\n",
		"LIMIT h.quantum", "LIMIT least(h.room, h.quantum)",
		"     WHERE h.lock_key IS NOT NULL\n", "     WHERE h.wait <= 0\n",
		"), taken AS (", `), parked AS MATERIALIZED (
    SELECT w.pos
      FROM waits w
     WHERE w.wait > 0 AND (w.pos IN (SELECT pos FROM mine)) IS TRUE
       AND (SELECT l.token FROM penstock.lock l WHERE l.queue_id = $1 AND l.lock_key = w.lock_key) IS NULL
       AND penstock.park($1, w.lock_key, w.wait)
), taken AS (`,
		"UNION ALL SELECT pos FROM lock_group)", "UNION ALL SELECT pos FROM lock_group UNION ALL SELECT pos FROM parked)",
		"NULL, NULL, greatest(", "(SELECT array_agg(lock_key) FROM lock_group), (SELECT array_agg(entry_count::bigint) FROM lock_group), greatest(",
	).Replace(claimLimitedSQL)
	swiftLimitedSQL = strings.NewReplacer(
		"AND "+unlimitedSQL, "", "/* shared */ $5::int", sharedSQL,
		"), head AS MATERIALIZED (", `), room AS MATERIALIZED (
    SELECT `+roomSQL+` FROM alone b CROSS JOIN LATERAL `+fmt.Sprintf(limited, "$3", 8, 9)+` WHERE b.ok AND r.ok
), head AS MATERIALIZED (`,
		"FROM alone CROSS JOIN LATERAL (", "FROM room CROSS JOIN LATERAL (",
		"alone.ok AND alone.wait IS NULL AND ", "",
		"LIMIT $5::int", "LIMIT (SELECT locks FROM room)",
		"    RETURNING ctid AS row\n)\n", "    RETURNING ctid AS row\n)"+fmt.Sprintf(chargeSQL, 9, "charge($1, $3, $9, (SELECT count(*) FROM solo)", "(SELECT max(token) FROM solo)")+"\n",
		"a.ok::int", "(SELECT count(*) FROM room)::int",
		"a.wait, CASE WHEN a.wait IS NOT NULL THEN 0::float8 END, NULL,", "(SELECT wait FROM room), (SELECT locks FROM room)::float8, (SELECT 0 FROM spent),",
	).Replace(swiftSQL)
)

// swiftSQL is the claim of a lane in which everything is solo and nobody has locked a ready row, as is usual: it
// deletes the rows without locking them first, which saves a WAL record each. Where it must wait for somebody it
// gives up after the lock_timeout that it sets for itself, and Claim goes on with claimSQL, as it does when there are keys in the lane. The ready row of
// a solo entry and a lock of it never exist at once, so that its insert needs no ON CONFLICT, which would look twice.
// Parameters and answer are those of claimSQL.
const swiftSQL = `
WITH alone AS MATERIALIZED (
    SELECT set_config('lock_timeout', '100ms', true) IS NOT NULL
           AND pg_try_advisory_xact_lock(hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || $3::text, 0))
           AND ` + unlimitedSQL + ` AS ok, b.wait
      FROM ` + heldBackSQL + ` b
), head AS MATERIALIZED (
    SELECT r.*
      FROM alone CROSS JOIN LATERAL (
           SELECT ready.ctid AS row, pos, entry_id
             FROM penstock.ready
            WHERE alone.ok AND alone.wait IS NULL AND queue_id = $1 AND priority = $2 AND flow = $3 AND pos >= $4::bigint
            ORDER BY pos
            LIMIT $5::int) r
), mine AS MATERIALIZED (
    DELETE FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM head WHERE entry_id IS NOT NULL))
    RETURNING pos, entry_id
), solo AS MATERIALIZED (
    SELECT nextval('penstock.token_seq') AS token, m.pos, e.id, e.attempt, e.crashes, e.cost, e.created_at, e.start_by,
           e.finish_by, e.name, e.trace, e.callback, e.payload, e.row
      FROM mine m
     CROSS JOIN LATERAL (SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
), locked AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost, priority, flow, claimed_at)
    SELECT $1, '#' || id, token, $6::bigint, $7::int, pos, id, 1, coalesce(cost, 1), $2, $3, clock_timestamp()
      FROM solo
    RETURNING ctid AS row
)
SELECT token, pos, id, NULL::text, attempt, crashes, coalesce(cost, 0), name, trace, callback, payload,
       date_part('epoch', clock_timestamp() - created_at), date_part('epoch', start_by - clock_timestamp()),
       date_part('epoch', finish_by - clock_timestamp()), row, NULL::tid[], NULL::text
  FROM solo
UNION ALL
SELECT 0, h.pos, h.rows, NULL, a.ok::int, (h.rows - (SELECT count(*) FROM mine))::int, /* shared */ $5::int, NULL, NULL, NULL, NULL,
       a.wait, CASE WHEN a.wait IS NOT NULL THEN 0::float8 END, NULL, NULL, (SELECT array_agg(row) FROM locked), NULL
  FROM alone a CROSS JOIN (SELECT coalesce(max(pos), 0) AS pos, count(*) AS rows FROM head) h`

// claimGroupsSQL reads the entries of groups that a claim has locked: keys $2 with tokens $3.
const claimGroupsSQL = `
SELECT l.token, e.id, e.attempt, e.crashes, coalesce(e.cost, 0), e.name, e.trace, e.callback, e.payload,
       date_part('epoch', clock_timestamp() - e.created_at),
       date_part('epoch', e.start_by - clock_timestamp()), date_part('epoch', e.finish_by - clock_timestamp()), e.row
  FROM unnest($2::text[], $3::bigint[]) k(lock_key, token)
  CROSS JOIN LATERAL (
       SELECT * FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
  CROSS JOIN LATERAL (
       SELECT ctid AS row, * FROM penstock.entry_X
        WHERE lock_key = l.lock_key AND status = 'pending' AND priority >= 0 AND id <= l.last_entry_id
        ORDER BY id LIMIT $4::int) e`
