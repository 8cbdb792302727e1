-- Samples: the state of each queue every few seconds.

-- live_rows estimates the rows of a table from the cumulative statistics. A crash loses them, and a standby that is
-- promoted has none: they count from 0 then, and name no vacuum or analyze, until there is one. Meanwhile they are
-- added to the rows that the last one found, which are in the catalog. CREATE INDEX writes these as well: a table that
-- was filled before it counts twice until it is vacuumed or analyzed.
-- Callers: live_entries; pkg/doctor, pkg/operator.
CREATE OR REPLACE FUNCTION penstock.live_rows(relation oid) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT pg_stat_get_live_tuples(c.oid)
           + CASE WHEN greatest(pg_stat_get_last_vacuum_time(c.oid), pg_stat_get_last_autovacuum_time(c.oid),
                                pg_stat_get_last_analyze_time(c.oid), pg_stat_get_last_autoanalyze_time(c.oid)) IS NULL
                  THEN greatest(c.reltuples, 0)::bigint ELSE 0 END
      FROM pg_class c WHERE c.oid = relation
$$;

-- live_entries estimates the entries of a queue's table.
-- Callers: count_queue.
CREATE OR REPLACE FUNCTION penstock.live_entries(queue_name text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT penstock.live_rows(to_regclass(format('penstock.%I', 'entry_' || queue_name)))
$$;

-- The form by the name of the queue, which no program calls.
DROP FUNCTION IF EXISTS penstock.indexed_entries(text, text);

-- indexed_entries estimates the entries in one of a queue's partial indexes, from the last vacuum
-- or analyze.
-- Callers: count_queue.
CREATE OR REPLACE FUNCTION penstock.indexed_entries(q penstock.queue, subject text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT greatest(c.reltuples, 0)::bigint FROM pg_class c WHERE c.oid = penstock.entry_index(q, subject)
$$;

-- planned_rows is the number of rows of a query that the planner expects, by the statistics of the
-- last ANALYZE. Volatile, since Postgres allows no EXPLAIN in others.
-- Locks: those of planning the query.
-- Callers: count_queue.
CREATE OR REPLACE FUNCTION penstock.planned_rows(query text) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    plan json;
BEGIN
    EXECUTE 'EXPLAIN (FORMAT JSON) ' || query INTO plan;
    RETURN (plan->0->'Plan'->>'Plan Rows')::numeric::bigint;
END $$;

-- count_queue counts one queue. Up to 10,000 entries or failures of a kind it counts exactly, through an index that
-- holds only them; beyond that it estimates, and sets estimated. initial and pending leave out disabled entries. A
-- queue that is being dropped has no entries. The settings keep the plan at walking an index up to the bound. It
-- names the queue's own table: through penstock.entry each call was planned over the tables of all queues, and with a
-- hundred queues that took twelve seconds.
-- Callers: count_queues, measure; pkg/maintenance.
CREATE OR REPLACE FUNCTION penstock.count_queue(q penstock.queue)
RETURNS TABLE (queue_id integer, initial bigint, pending bigint, disabled bigint, computing bigint, failed bigint,
               estimated boolean)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    total        bigint;
    off_initial  bigint; -- disabled and initial
BEGIN
    queue_id := q.id;
    -- The locks are as few as the work in flight: each is looked up.
    EXECUTE format($sql$
        SELECT (SELECT count(*) FROM (SELECT FROM penstock.%1$I e WHERE e.queue_id = $1 LIMIT 10001) b),
               (SELECT count(*) FROM (SELECT FROM penstock.%1$I e
                                       WHERE e.queue_id = $1 AND e.status = 'initial' LIMIT 10001) b),
               d.n, d.initial,
               (SELECT coalesce(sum(c.n), 0)::bigint
                  FROM penstock.lock l CROSS JOIN LATERAL (
                       SELECT count(*) AS n FROM penstock.%1$I e
                        WHERE penstock.is_solo(l.lock_key) AND e.queue_id = $1 AND e.id = l.last_entry_id
                          AND penstock.claimable(e.status, e.priority)
                       UNION ALL
                       SELECT count(*) FROM penstock.%1$I e
                        WHERE NOT penstock.is_solo(l.lock_key) AND e.queue_id = $1 AND e.lock_key = l.lock_key
                          AND e.id <= l.last_entry_id AND penstock.claimable(e.status, e.priority)) c
                 WHERE l.queue_id = $1)
          FROM (SELECT count(*) AS n, count(*) FILTER (WHERE b.status = 'initial') AS initial FROM (
                SELECT e.status FROM penstock.%1$I e WHERE e.queue_id = $1 AND e.priority = -1 LIMIT 10001) b) d
        $sql$, 'entry_' || q.name) INTO total, initial, disabled, off_initial, computing USING q.id;
    SELECT count(*) INTO failed FROM (SELECT FROM penstock.failure f WHERE f.queue_id = q.id LIMIT 10001) b;
    estimated := total > 10000 OR failed > 10000;
    IF failed > 10000 THEN
        failed := greatest(failed,
                           penstock.planned_rows(format('SELECT FROM penstock.failure WHERE queue_id = %s', q.id)));
    END IF;
    IF total > 10000 THEN
        total := greatest(total, penstock.live_entries(q.name));
    END IF;
    IF initial > 10000 THEN
        initial := greatest(initial, penstock.indexed_entries(q, 'due_at'));
    END IF;
    IF disabled > 10000 THEN
        disabled := greatest(disabled, penstock.indexed_entries(q, 'disabled'));
    END IF;
    initial := greatest(0, initial - off_initial);
    pending := greatest(total - disabled - initial, computing);
    RETURN NEXT;
EXCEPTION WHEN undefined_table THEN
    initial := 0; pending := 0; disabled := 0; computing := 0; failed := 0; estimated := false;
    RETURN NEXT;
END $$;

-- count_queues counts each queue, see count_queue.
-- Callers: queue_status.
CREATE OR REPLACE FUNCTION penstock.count_queues()
RETURNS TABLE (queue_id integer, initial bigint, pending bigint, disabled bigint, computing bigint, failed bigint,
               estimated boolean)
LANGUAGE sql STABLE AS $$
    SELECT c.* FROM penstock.queue q CROSS JOIN LATERAL penstock.count_queue(q) c
$$;

-- The form of an earlier version, which no program calls.
DROP FUNCTION IF EXISTS penstock.queue_heads(penstock.queue);

-- queue_heads returns the heads of the lanes of a queue, and since when each one waits: the push, or the due time. It
-- reads the first 100 lanes whose flow is not paused, from the highest priority on, and of each the first key without a
-- lock record among its first 20 ready rows that are not delayed. With `open` lanes are passed by as well whose flow is
-- throttled, or of which a limit for each flow, of a rate or of units, lets nothing in now. Either way it goes through
-- 2,000 lanes at most, so that the cost does not grow with the number of flows: a head behind 2,000 lanes that are
-- passed by is not found. A queue that is not open (queue_stops) has none; throttled keys (see throttle_key) are in no
-- lane.
-- Callers: head_age, head_reasons.
CREATE OR REPLACE FUNCTION penstock.queue_heads(q penstock.queue, open boolean)
RETURNS TABLE (priority smallint, entry_id bigint, since timestamptz)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    priorities smallint[];
    ids        bigint[];
    keys       text[];
    rated      boolean := open AND EXISTS (
        SELECT FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id
         WHERE u.queue_id = q.id AND g.per_flow AND g.rate IS NOT NULL);
    crowded    text[] := '{}'; -- flows whose locks leave no unit of a limit for each flow
BEGIN
    IF EXISTS (SELECT FROM penstock.queue_stops(q)) THEN
        RETURN;
    END IF;
    IF open THEN
        SELECT coalesce(array_agg(f.flow), '{}') INTO crowded
          FROM penstock.limit_use u
          JOIN penstock."limit" g ON g.id = u.limit_id AND g.per_flow AND g.max_units IS NOT NULL
         CROSS JOIN LATERAL (
               SELECT k.flow FROM penstock.limit_use o JOIN penstock.lock k ON k.queue_id = o.queue_id
                WHERE o.limit_id = g.id
                GROUP BY k.flow HAVING sum(o.units::bigint * k.weight) + u.units > g.max_units) f
         WHERE u.queue_id = q.id;
    END IF;
    WITH RECURSIVE lane AS (
        SELECT 10::smallint AS priority, ''::text COLLATE "C" AS flow -- above all, and no lane itself
        UNION ALL
        SELECT n.priority, n.flow
          FROM lane CROSS JOIN LATERAL (
               SELECT x.priority, x.flow FROM (
                   (SELECT r.priority, r.flow FROM penstock.ready r
                     WHERE r.queue_id = q.id AND r.priority = lane.priority AND r.flow > lane.flow
                     ORDER BY r.flow, r.pos LIMIT 1)
                   UNION ALL
                   (SELECT f.priority, f.flow
                      FROM (SELECT r.priority FROM penstock.ready r
                             WHERE r.queue_id = q.id AND r.priority < lane.priority AND r.priority >= 0
                             ORDER BY r.priority DESC, r.flow DESC, r.pos DESC LIMIT 1) lower
                     CROSS JOIN LATERAL (
                           SELECT r.priority, r.flow FROM penstock.ready r
                            WHERE r.queue_id = q.id AND r.priority = lower.priority
                            ORDER BY r.flow, r.pos LIMIT 1) f)) x LIMIT 1) n
    ), few AS (
        SELECT priority, flow FROM (SELECT priority, flow FROM lane LIMIT 2001) lane
         WHERE priority < 10 AND NOT EXISTS (
               SELECT FROM penstock.pause p
                WHERE penstock.paused_until(p.until)
                  AND p.scope = 'flow' AND p.value = lane.flow AND coalesce(p.queue_id = q.id, true))
           AND NOT (open AND EXISTS (SELECT FROM penstock.throttles(q.id, lane.flow)))
           AND NOT lane.flow = ANY (crowded)
           AND NOT (rated AND coalesce((penstock.flow_headroom(q.id, ARRAY[lane.flow])).headrooms[1] < 1, false))
         LIMIT 100)
    SELECT array_agg(few.priority), array_agg(first.entry_id), array_agg(first.lock_key) INTO priorities, ids, keys
      FROM few CROSS JOIN LATERAL (
           SELECT f.entry_id, f.lock_key FROM (
               SELECT r.entry_id, r.lock_key, r.pos, r.not_before FROM penstock.ready r
                WHERE r.queue_id = q.id AND r.priority = few.priority AND r.flow = few.flow ORDER BY r.pos LIMIT 20) f
            WHERE penstock.ready_now(f.not_before)
              AND NOT EXISTS (SELECT FROM penstock.lock l
                               WHERE l.queue_id = q.id AND l.lock_key = penstock.record_key(f.lock_key, f.entry_id))
            ORDER BY f.pos LIMIT 1) first;
    IF ids IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format($sql$
        SELECT first.priority, e.id, e.since
          FROM unnest($1, $2, $3) first(priority, entry_id, lock_key) CROSS JOIN LATERAL (
               (SELECT x.id, greatest(x.created_at, x.due_at) AS since FROM penstock.%1$I x
                 WHERE x.queue_id = $4 AND x.id = first.entry_id)
               UNION ALL
               (SELECT x.id, greatest(x.created_at, x.due_at) FROM penstock.%1$I x
                 WHERE x.queue_id = $4 AND x.lock_key = first.lock_key AND penstock.claimable(x.status, x.priority)
                 ORDER BY x.id LIMIT 1)) e
        $sql$, 'entry_' || q.name) USING priorities, ids, keys, q.id;
EXCEPTION WHEN undefined_table THEN
    RETURN;
END $$;

-- head_age is the age in seconds of the oldest head of a queue (queue_heads) that may not wait: of the priority that
-- the queue gives to entries that name none, or above. Entries below it, as the lines of OpenAI batches, run when
-- there is time, and their age says nothing. Null: there is none.
-- Callers: measure.
CREATE OR REPLACE FUNCTION penstock.head_age(q penstock.queue) RETURNS double precision
LANGUAGE sql STABLE AS $$
    SELECT extract(epoch FROM clock_timestamp() - min(h.since))::float8
      FROM penstock.queue_heads(q, false) h WHERE h.priority >= q.entry_priority
$$;

-- measure samples one queue. The cost does not grow with its depth, nor with the number of queues.
-- Rates need two samples and are left null. In PL/pgSQL, so that it is planned once in a session.
-- Callers: pkg/maintenance, pkg/operator.
CREATE OR REPLACE FUNCTION penstock.measure(q penstock.queue) RETURNS penstock.sample
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s penstock.sample;
BEGIN
    SELECT q.id, clock_timestamp(), c.initial, c.pending, c.disabled, c.computing, c.failed, c.estimated,
           (SELECT count(*)::integer FROM penstock.serving(q.id)), penstock.head_age(q),
           coalesce((SELECT x.code FROM penstock.queue_stops(q) x LIMIT 1), -- first: a queue may rest without nodes
                    (SELECT r->>'code' FROM penstock.queue_reasons(q) r LIMIT 1),
                    (SELECT 'throttled' FROM penstock.throttles(q.id, NULL) LIMIT 1)),
           coalesce(pg_stat_get_tuples_inserted(t.oid), 0), coalesce(pg_stat_get_tuples_deleted(t.oid), 0),
           coalesce(pg_stat_get_dead_tuples(t.oid), 0), NULL, NULL
      INTO s
      FROM penstock.count_queue(q) c
      LEFT JOIN (SELECT to_regclass(format('penstock.%I', 'entry_' || q.name))::oid AS oid) t ON true;
    RETURN s;
END $$;

-- last_sample returns the newest sample of a queue, null if it is older than `within`. Where that is not given, it is
-- null once there is no leader: if the sample is older than 30 seconds and than three times its distance from the one
-- before, since samples are further apart the longer one takes (pkg/maintenance). One of a time to come is from before
-- the clock was set back, and hides no newer one. The time of the statement can be used with the index;
-- clock_timestamp() cannot: without a leader it was compared with every sample.
-- Callers: degraded_queues, admit_flows, refuse_push; pkg/operator.
CREATE OR REPLACE FUNCTION penstock.last_sample(
    queue  integer,
    within interval DEFAULT NULL
) RETURNS penstock.sample
LANGUAGE sql STABLE AS $$
    SELECT n.s
      FROM (SELECT s, s.at FROM penstock.sample s
             WHERE s.queue_id = queue AND s.at > statement_timestamp() - coalesce(within, interval '1 hour')
               AND s.at <= statement_timestamp()
             ORDER BY s.at DESC LIMIT 1) n
     WHERE within IS NOT NULL OR n.at > statement_timestamp() - interval '30 seconds'
        OR n.at > statement_timestamp() - 3 * (n.at - (
           SELECT max(o.at) FROM penstock.sample o
            WHERE o.queue_id = queue AND o.at < n.at AND o.at > n.at - interval '1 hour'))
$$;

-- roll_up_samples writes the past minutes that were not written yet, of the last hour at most, and
-- returns how many rows it wrote. blocked is the most frequent value of the minute's samples, null among them, which
-- mode() by itself leaves out.
-- Locks: none but those of an insert.
-- Callers: pkg/maintenance.
CREATE OR REPLACE FUNCTION penstock.roll_up_samples() RETURNS bigint
LANGUAGE sql AS $$
    WITH written AS (
        INSERT INTO penstock.sample_minute
        SELECT m.*
          FROM penstock.queue q
         CROSS JOIN LATERAL (
               SELECT greatest(date_trunc('minute', now()) - interval '1 hour',
                               (SELECT max(d.at) + interval '1 minute' FROM penstock.sample_minute d
                                 WHERE d.queue_id = q.id AND d.at > now() - interval '1 hour'
                                   AND d.at < date_trunc('minute', now()))) AS since) span
         CROSS JOIN LATERAL (
               SELECT s.queue_id, date_trunc('minute', s.at),
                      avg(s.initial)::bigint, avg(s.pending)::bigint, avg(s.disabled)::bigint, avg(s.computing)::bigint,
                      max(s.failed), bool_or(s.estimated), round(avg(s.serving))::integer, max(s.head_age),
                      nullif(mode() WITHIN GROUP (ORDER BY coalesce(s.blocked, '')), ''),
                      max(s.accepted), max(s.gone), max(s.dead_tuples),
                      avg(s.in_per_second), avg(s.out_per_second)
                 FROM penstock.sample s
                WHERE s.queue_id = q.id AND s.at >= span.since AND s.at < date_trunc('minute', now())
                GROUP BY 1, 2) m
        ON CONFLICT DO NOTHING
        RETURNING 1
    )
    SELECT count(*) FROM written
$$;
