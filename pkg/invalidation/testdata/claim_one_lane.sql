WITH lane AS MATERIALIZED (
    SELECT set_config('lock_timeout', '100ms', true),
           pg_try_advisory_xact_lock(
               hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || $3::text, 0)) AS exclusive
     WHERE NOT EXISTS (SELECT FROM penstock.limit_use WHERE queue_id = $1)
       AND NOT EXISTS (SELECT FROM penstock.throttles($1, $3))
), head AS MATERIALIZED (
    SELECT array_agg(r.row) AS rows, bool_and(r.entry_id IS NOT NULL) AS solo, count(*) AS scanned,
           max(r.pos) AS position
      FROM lane
     CROSS JOIN LATERAL (
           SELECT ctid AS row, pos, entry_id
             FROM penstock.ready
            WHERE lane.exclusive AND queue_id = $1 AND priority = $2 AND flow = $3 AND pos >= $4::bigint
              AND penstock.ready_now(not_before)
            ORDER BY pos
            LIMIT $5::int) r
), mine AS MATERIALIZED (
    DELETE FROM penstock.ready
     WHERE ctid = ANY ((SELECT rows FROM head WHERE solo)::tid[])
    RETURNING pos, entry_id
), solo AS MATERIALIZED (
    SELECT nextval('penstock.token_seq') AS token, m.pos, e.id, e.attempt, e.crashes, e.may_have_run, e.cost, e.weight,
           e.created_at, e.start_by, e.finish_by, e.name, e.trace, e.callback, e.payload, e.row
      FROM mine m
     CROSS JOIN LATERAL (
           SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
), locked AS (
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost,
           weight, priority, flow, claimed_at)
    SELECT $1, '#' || id, token, $6::bigint, $7::int, pos, id, 1, coalesce(cost, 1), coalesce(weight, 1),
           $2, $3, clock_timestamp()
      FROM solo
    RETURNING ctid AS row
)
SELECT token, pos AS position, id AS entry_id, NULL::text AS lock_key, attempt, crashes, may_have_run,
       coalesce(cost, 0) AS cost, name, trace, callback, payload,
       date_part('epoch', statement_timestamp() - created_at) AS waited,
       date_part('epoch', start_by - clock_timestamp()) AS start_in,
       date_part('epoch', finish_by - clock_timestamp()) AS finish_in, row AS entry_tid, $3 AS flow,
       NULL::tid[] AS lock_tids, NULL::boolean AS exclusive, NULL::bigint AS scanned, NULL::bigint AS skipped,
       NULL::float8 AS wait, NULL::float8 AS delayed_for, NULL::int AS headroom, NULL::int AS shared,
       NULL::boolean AS queue_wide
  FROM solo
UNION ALL
SELECT NULL, head.position, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, $3,
       (SELECT array_agg(row) FROM locked), lane.exclusive, head.scanned, 0, NULL, NULL, $5, $5, false
  FROM lane, head
 WHERE head.solo OR NOT lane.exclusive
