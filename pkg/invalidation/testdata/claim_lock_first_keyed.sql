WITH headroom AS MATERIALIZED (
    SELECT least($5::int, r.locks) AS locks, r.entries, r.wait, r.uncounted_to, f.headrooms, f.waits
      FROM penstock.lane_headroom($1, $2, CASE WHEN cardinality($3::text[]) = 1 THEN ($3::text[])[1] END, $5,
           NULL, $10::int[], $11::int) r
      LEFT JOIN LATERAL (
           SELECT headrooms, waits
             FROM penstock.flow_headroom($1, $3)
            WHERE $11::int > 0 AND cardinality($3::text[]) > 1 AND r.ok) f ON true
     WHERE r.ok
), lane AS MATERIALIZED (
    SELECT l.ord, l.flow, l.position, l.ignore_row_locks,
           greatest(b.wait, CASE WHEN c.locks < 1 THEN headroom.waits[l.ord] END) AS wait, c.locks,
           greatest(1, least($8::int, headroom.entries / greatest(1, headroom.locks),
               headroom.headrooms[l.ord] / greatest(1, c.locks))) AS quantum,
           pg_try_advisory_xact_lock(
               hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || l.flow, 0)) AS exclusive
      FROM headroom
     CROSS JOIN LATERAL unnest($3::text[], $4::bigint[], $9::boolean[]) WITH ORDINALITY
         l(flow, position, ignore_row_locks, ord)
     CROSS JOIN LATERAL (
           SELECT nullif(greatest(0, extract(epoch FROM max(until) - clock_timestamp())), 0)::float8 AS wait
             FROM penstock.throttles($1, l.flow)) b
     CROSS JOIN LATERAL (SELECT least(headroom.locks, headroom.headrooms[l.ord]) AS locks) c
), head AS MATERIALIZED (
    SELECT a.ord, a.flow, a.position, a.ignore_row_locks, a.exclusive, a.wait, a.locks, a.quantum, r.row, r.pos,
           r.lock_key
      FROM lane a
      LEFT JOIN LATERAL (
           SELECT ready.ctid AS row, pos, lock_key
             FROM penstock.ready
            WHERE a.exclusive AND a.wait IS NULL AND queue_id = $1 AND priority = $2 AND flow = a.flow
              AND pos >= a.position AND penstock.ready_now(not_before)
            ORDER BY pos
            LIMIT a.locks) r ON true
     LIMIT (SELECT greatest(1, locks) FROM headroom)
), mine AS MATERIALIZED (
    SELECT ctid AS row, pos, entry_id, flow
      FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM head))
       FOR UPDATE SKIP LOCKED
), solo AS MATERIALIZED (
    SELECT nextval('penstock.token_seq') AS token, m.pos, m.flow, e.id, e.attempt, e.crashes, e.may_have_run,
           e.cost, e.weight, e.created_at, e.start_by, e.finish_by, e.name, e.trace, e.callback, e.payload, e.row
      FROM mine m
     CROSS JOIN LATERAL (SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
), bucket AS MATERIALIZED (
    SELECT k.pos, k.lock_key COLLATE "C" AS lock_key, k.headroom, k.wait, h.flows[a.at] AS flow,
           h.ignored[a.at] AS ignore_row_locks, h.quantums[a.at] AS quantum
      FROM (SELECT array_agg(lock_key) AS keys, array_agg(pos) AS positions, array_agg(flow) AS flows,
                   array_agg(ignore_row_locks) AS ignored, array_agg(quantum) AS quantums
              FROM head WHERE lock_key IS NOT NULL) h
     CROSS JOIN LATERAL penstock.key_headroom($1, h.keys, h.positions) k
     CROSS JOIN LATERAL (SELECT array_position(h.positions, k.pos) AS at) a
), groups AS MATERIALIZED (
    SELECT DISTINCT ON (h.lock_key) h.lock_key, h.pos, h.flow, c.entries, c.last_id, c.cost, c.weight
      FROM bucket h
     CROSS JOIN LATERAL (
           SELECT count(*) AS entries, max(id) AS last_id, sum(coalesce(cost, 1)) AS cost,
                  coalesce(max(weight), 1) AS weight
             FROM (SELECT id, cost, weight FROM penstock.entry_X
                    WHERE lock_key = h.lock_key AND penstock.claimable(status, priority)
                    ORDER BY id LIMIT least(h.headroom, h.quantum)) q) c
     WHERE h.wait <= 0
       AND (SELECT l.token FROM penstock.lock l WHERE l.queue_id = $1 AND l.lock_key = h.lock_key) IS NULL
       AND (h.pos IN (SELECT pos FROM mine) OR (h.ignore_row_locks AND c.entries > 0))
     ORDER BY h.lock_key, h.pos
), lock_solo AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost,
           weight, priority, flow, claimed_at)
    SELECT $1, '#' || id, token, $6::bigint, $7::int, pos, id, 1, coalesce(cost, 1), coalesce(weight, 1),
           $2, flow, clock_timestamp()
      FROM solo
    ON CONFLICT DO NOTHING
    RETURNING token, pos, ctid AS row, flow
), lock_group AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost,
           weight, priority, flow, claimed_at)
    SELECT $1, lock_key, nextval('penstock.token_seq'), $6, $7, pos,
           coalesce(last_id, 0), entries, coalesce(cost, 1), weight, $2, flow, clock_timestamp()
      FROM groups
     WHERE pg_try_advisory_xact_lock_shared(hashtextextended('penstock keys ' || $1, 0))
       AND pg_try_advisory_xact_lock(hashtextextended('penstock key ' || $1 || ' ' || lock_key, 0))
    ON CONFLICT DO NOTHING
    RETURNING token, pos, lock_key, last_entry_id, flow, entry_count
), throttled AS MATERIALIZED (
    SELECT b.pos
      FROM bucket b
     WHERE b.wait > 0 AND (b.pos IN (SELECT pos FROM mine)) IS TRUE
       AND (SELECT l.token FROM penstock.lock l WHERE l.queue_id = $1 AND l.lock_key = b.lock_key) IS NULL
       AND penstock.throttle_key($1, b.lock_key, b.wait)
), taken AS (
    DELETE FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM mine
                              WHERE (pos IN (SELECT pos FROM lock_solo UNION ALL SELECT pos FROM lock_group UNION ALL SELECT pos FROM throttled)) IS TRUE))
    RETURNING pos
), used AS MATERIALIZED (
    SELECT array_agg(flow) AS flows, array_agg(n) AS taken
      FROM (SELECT flow, sum(n)::bigint AS n
              FROM (SELECT flow, 1 AS n FROM lock_solo UNION ALL SELECT flow, entry_count FROM lock_group) l
             GROUP BY flow) f
), charged AS MATERIALIZED (
    SELECT CASE WHEN $11::int > 0 OR l.token > (SELECT uncounted_to FROM headroom) THEN
           penstock.charge_lanes($1, $11, (SELECT flows FROM used), (SELECT taken FROM used),
               (SELECT array_agg(lock_key) FROM lock_group),
               (SELECT array_agg(entry_count::bigint) FROM lock_group),
               l.token, (SELECT uncounted_to FROM headroom)) END AS done
      FROM (SELECT greatest((SELECT max(token) FROM lock_solo), (SELECT max(token) FROM lock_group)) AS token) l
)
SELECT token, pos AS position, id AS entry_id, NULL::text AS lock_key, attempt, crashes, may_have_run,
       coalesce(cost, 0) AS cost, name, trace, callback, payload,
       date_part('epoch', statement_timestamp() - created_at) AS waited,
       date_part('epoch', start_by - clock_timestamp()) AS start_in,
       date_part('epoch', finish_by - clock_timestamp()) AS finish_in, row AS entry_tid, flow,
       NULL::tid[] AS lock_tids, NULL::boolean AS exclusive, NULL::bigint AS scanned, NULL::bigint AS skipped,
       NULL::float8 AS wait, NULL::float8 AS delayed_for, NULL::int AS headroom, NULL::int AS shared,
       NULL::boolean AS queue_wide
  FROM solo
 WHERE (token IN (SELECT token FROM lock_solo)) IS TRUE
UNION ALL
SELECT token, pos, last_entry_id, lock_key, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
       flow, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
  FROM lock_group
UNION ALL
SELECT NULL, h.position, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, h.flow,
       CASE WHEN h.ord = 1 THEN (SELECT array_agg(row) FROM lock_solo) END, h.exclusive, h.scanned, h.scanned - h.taken,
       greatest(h.wait, headroom.wait), CASE WHEN h.scanned = 0 AND h.exclusive THEN (
           SELECT date_part('epoch', min(not_before) - clock_timestamp())
             FROM (SELECT not_before FROM penstock.ready
                    WHERE queue_id = $1 AND priority = $2 AND flow = h.flow AND pos >= h.start
                    ORDER BY pos LIMIT 100) d) END,
       CASE WHEN h.wait IS NULL THEN h.locks ELSE 0 END, headroom.locks, headroom.uncounted_to = 0
  FROM headroom CROSS JOIN (
       SELECT ord, flow, min(position) AS start, bool_and(exclusive) AS exclusive, max(wait) AS wait,
              max(locks) AS locks, coalesce(max(pos), 0) AS position, count(pos) AS scanned,
              count(*) FILTER (WHERE (pos IN (SELECT pos FROM taken)) IS TRUE) AS taken
         FROM head GROUP BY ord, flow) h
 WHERE (SELECT count(done) FROM charged) IS NOT NULL
