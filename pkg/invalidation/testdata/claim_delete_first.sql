WITH headroom AS MATERIALIZED (
    SELECT set_config('lock_timeout', '100ms', true), $5::int AS locks, NULL::float8 AS wait
     WHERE NOT EXISTS (SELECT FROM penstock.limit_use WHERE queue_id = $1)
), lane AS MATERIALIZED (
    SELECT l.ord, l.flow, l.position, b.wait, headroom.locks,
           pg_try_advisory_xact_lock(
               hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || l.flow, 0)) AS exclusive
      FROM headroom
     CROSS JOIN LATERAL unnest($3::text[], $4::bigint[]) WITH ORDINALITY l(flow, position, ord)
     CROSS JOIN LATERAL (
           SELECT nullif(greatest(0, extract(epoch FROM max(until) - clock_timestamp())), 0)::float8 AS wait
             FROM penstock.throttles($1, l.flow)) b
), head AS MATERIALIZED (
    SELECT a.ord, a.flow, a.position, a.exclusive, a.wait, a.locks, r.row, r.pos, r.entry_id
      FROM lane a
      LEFT JOIN LATERAL (
           SELECT ready.ctid AS row, pos, entry_id
             FROM penstock.ready
            WHERE a.exclusive AND a.wait IS NULL AND queue_id = $1 AND priority = $2 AND flow = a.flow
              AND pos >= a.position AND penstock.ready_now(not_before)
            ORDER BY pos
            LIMIT a.locks) r ON true
     LIMIT (SELECT greatest(1, locks) FROM headroom)
), mine AS MATERIALIZED (
    DELETE FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM head WHERE entry_id IS NOT NULL))
    RETURNING pos, entry_id, flow
), solo AS MATERIALIZED (
    SELECT nextval('penstock.token_seq') AS token, m.pos, m.flow, e.id, e.attempt, e.crashes,
           e.may_have_run, e.cost, e.weight, e.created_at, e.start_by, e.finish_by, e.name, e.trace, e.callback,
           e.payload, e.row
      FROM mine m
     CROSS JOIN LATERAL (SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
), locked AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost,
           weight, priority, flow, claimed_at)
    SELECT $1, '#' || id, token, $6::bigint, $7::int, pos, id, 1, coalesce(cost, 1), coalesce(weight, 1),
           $2, flow, clock_timestamp()
      FROM solo
    RETURNING ctid AS row
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
UNION ALL
SELECT NULL, h.position, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, h.flow,
       CASE WHEN h.ord = 1 THEN (SELECT array_agg(row) FROM locked) END, h.exclusive, h.scanned, h.skipped,
       h.wait, CASE WHEN h.scanned = 0 AND h.exclusive THEN (
           SELECT date_part('epoch', min(not_before) - clock_timestamp())
             FROM (SELECT not_before FROM penstock.ready
                    WHERE queue_id = $1 AND priority = $2 AND flow = h.flow AND pos >= h.start
                    ORDER BY pos LIMIT 100) d) END, CASE WHEN h.wait IS NULL THEN h.locks ELSE 0 END, h.locks, false
  FROM (
       SELECT ord, flow, min(position) AS start, bool_and(exclusive) AS exclusive, max(wait) AS wait,
              max(locks) AS locks, coalesce(max(pos), 0) AS position, count(pos) AS scanned,
              count(pos) - count(entry_id) AS skipped
         FROM head GROUP BY ord, flow) h
