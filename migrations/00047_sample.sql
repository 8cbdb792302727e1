-- +goose Up

-- Samples: how each queue stood every few seconds, written by the elected leader and by nobody else. Status pages,
-- metrics and the live view read these, so that no page counts a table. What counts is measure(), once a queue and pass.

CREATE TABLE penstock.sample (
    queue_id       integer NOT NULL,
    at             timestamptz NOT NULL,
    initial        bigint NOT NULL,
    pending        bigint NOT NULL,
    disabled       bigint NOT NULL,
    computing      bigint NOT NULL,
    failed         bigint NOT NULL,
    estimated      boolean NOT NULL,
    serving        integer NOT NULL,
    head_age       double precision,
    blocked        text,
    accepted       bigint NOT NULL,
    gone           bigint NOT NULL,
    dead_tuples    bigint NOT NULL,
    in_per_second  double precision,
    out_per_second double precision,
    PRIMARY KEY (queue_id, at)
) PARTITION BY RANGE (at);
COMMENT ON COLUMN penstock.sample.estimated IS 'some count passed the bound up to which counting is exact';
COMMENT ON COLUMN penstock.sample.head_age IS 'seconds that the entry has waited which a node would take first; null: there is none';
COMMENT ON COLUMN penstock.sample.blocked IS 'why no node claims from the queue, as a code of explain_entry; null: nothing is in the way';
COMMENT ON COLUMN penstock.sample.accepted IS 'rows inserted into the queue''s table since its statistics began; gone: deleted';
COMMENT ON COLUMN penstock.sample.in_per_second IS 'entries accepted a second since the sample before; out_per_second: gone, which is the drain rate';

-- The same by the minute: depths, rates and serving are means, head_age is the worst, counters are the last.
CREATE TABLE penstock.sample_minute (LIKE penstock.sample INCLUDING ALL) PARTITION BY RANGE (at);

-- retention says how long rows of each table that is dropped by partition are kept.
CREATE VIEW penstock.retention AS
SELECT 'result' AS parent, 'finished_at' AS by_column, coalesce(max(result_retention), '1 day') AS kept FROM penstock.queue
UNION ALL SELECT 'failure', 'failed_at', coalesce(max(failure_retention), '1 day') FROM penstock.queue
UNION ALL SELECT 'sample', 'at', '1 day'
UNION ALL SELECT 'sample_minute', 'at', '30 days';

-- ensure_partitions gives every table of penstock.retention a partition for each day from today to days_ahead, and
-- returns how many it made. Each is made on its own and then attached. What a default partition already holds of a day
-- keeps that day from getting one; that is only the first day of an installation, or after the leader was away for
-- days_ahead. Samples have no default partition: they wait for theirs.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.ensure_partitions(days_ahead integer DEFAULT 7) RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    made   integer := 0;
    kind   record;
    day    date;
    child  text;
BEGIN
    FOR kind IN SELECT parent FROM penstock.retention LOOP
        FOR day IN SELECT generate_series(current_date, current_date + days_ahead, interval '1 day')::date LOOP
            child := kind.parent || to_char(day, '_YYYYMMDD');
            CONTINUE WHEN to_regclass('penstock.' || child) IS NOT NULL;
            BEGIN
                EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.%I INCLUDING ALL)', child, kind.parent);
                EXECUTE format('ALTER TABLE penstock.%I ATTACH PARTITION penstock.%I FOR VALUES FROM (%L) TO (%L)',
                               kind.parent, child, day, day + 1);
                made := made + 1;
            EXCEPTION
                -- Somebody else makes it, the default partition has rows of the day, or a long query is in the way:
                -- the next call tries again.
                WHEN duplicate_table OR unique_violation OR check_violation OR lock_not_available OR deadlock_detected THEN
                    NULL;
            END;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;
-- +goose StatementEnd

-- old_partitions lists partitions whose every row has passed its retention, and since when.
CREATE VIEW penstock.old_partitions AS
SELECT c.relname AS partition, p.parent, now() - p.kept - (to_date(right(c.relname, 8), 'YYYYMMDD') + 1)::timestamp AT TIME ZONE 'UTC' AS behind
  FROM penstock.retention p
  JOIN pg_inherits i ON i.inhparent = to_regclass('penstock.' || p.parent)
  JOIN pg_class c ON c.oid = i.inhrelid
 WHERE c.relname ~ ('^' || p.parent || '_[0-9]{8}$')
   AND (to_date(right(c.relname, 8), 'YYYYMMDD') + 1)::timestamp AT TIME ZONE 'UTC' < now() - p.kept;

-- drop_old_partitions drops the oldest of them, and returns how many it dropped: 1 or 0, so that its locks are held for
-- one drop only. Call it until it returns 0. The lock_timeout bounds how long anybody can wait behind it.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.drop_old_partitions() RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    old text := (SELECT partition FROM penstock.old_partitions ORDER BY behind DESC LIMIT 1);
BEGIN
    IF old IS NULL THEN
        RETURN 0;
    END IF;
    EXECUTE format('DROP TABLE penstock.%I', old);
    RETURN 1;
EXCEPTION
    WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
        RETURN 0;
END $$;
-- +goose StatementEnd

-- count_queue counts one queue. Up to 10,000 entries (100,000 failures) of a kind it counts exactly, through an index
-- that holds only them; what goes beyond is an estimate and marked as one. initial and pending leave out what is disabled.
-- The settings keep the plan at walking an index up to the bound, in whatever session it is asked.
-- +goose StatementBegin
CREATE FUNCTION penstock.count_queue(q penstock.queue)
RETURNS TABLE (queue_id integer, initial bigint, pending bigint, disabled bigint, computing bigint, failed bigint, estimated boolean)
LANGUAGE sql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
    SELECT q.id, s.initial, greatest(s.total - s.disabled - s.initial, computing.n), s.disabled, computing.n, failed.n,
           total.n > 10000 OR failed.n > 100000
      FROM (SELECT count(*) AS n FROM (SELECT FROM penstock.entry e WHERE e.queue_id = q.id LIMIT 10001) b) total
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM (
           SELECT FROM penstock.entry e WHERE e.queue_id = q.id AND e.status = 'initial' LIMIT 10001) b) initial
     CROSS JOIN LATERAL (SELECT count(*) AS n, count(*) FILTER (WHERE b.status = 'initial') AS initial FROM (
           SELECT e.status FROM penstock.entry e WHERE e.queue_id = q.id AND e.priority = -1 LIMIT 10001) b) disabled
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM (SELECT FROM penstock.failure f WHERE f.queue_id = q.id LIMIT 100001) b) failed
     CROSS JOIN LATERAL (
           -- The locks are as few as the work in flight: each is looked up.
           SELECT coalesce(sum(c.n), 0)::bigint AS n
             FROM penstock.lock l CROSS JOIN LATERAL (
                  SELECT count(*) AS n FROM penstock.entry e
                   WHERE left(l.lock_key, 1) = '#' AND e.queue_id = q.id AND e.id = l.last_entry_id
                     AND e.status = 'pending' AND e.priority >= 0
                  UNION ALL
                  SELECT count(*) FROM penstock.entry e
                   WHERE left(l.lock_key, 1) <> '#' AND e.queue_id = q.id AND e.lock_key = l.lock_key AND e.id <= l.last_entry_id
                     AND e.status = 'pending' AND e.priority >= 0) c
            WHERE l.queue_id = q.id) computing
     CROSS JOIN LATERAL (
           SELECT CASE WHEN total.n <= 10000 THEN total.n ELSE greatest(total.n, penstock.live_entries(q.name)) END AS total,
                  greatest(0, CASE WHEN initial.n <= 10000 THEN initial.n
                                   ELSE greatest(initial.n, penstock.indexed_entries(q.name, 'due_at')) END - disabled.initial) AS initial,
                  CASE WHEN disabled.n <= 10000 THEN disabled.n
                       ELSE greatest(disabled.n, penstock.indexed_entries(q.name, 'disabled')) END AS disabled) s
$$;
-- +goose StatementEnd

-- count_queues counts each queue, see count_queue.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.count_queues()
RETURNS TABLE (queue_id integer, initial bigint, pending bigint, disabled bigint, computing bigint, failed bigint, estimated boolean)
LANGUAGE sql STABLE AS $$
    SELECT c.* FROM penstock.queue q CROSS JOIN LATERAL penstock.count_queue(q) c
$$;
-- +goose StatementEnd

-- head_age is for how many seconds the entry has waited that a node would claim first, null if there is none: in the
-- first 100 lanes that nobody paused, a lane's first key that nobody holds, among its first 20 ready rows. It waits
-- since it was accepted, or came due. Entries of a queue that is paused or out of service do not count.
-- +goose StatementBegin
CREATE FUNCTION penstock.head_age(q penstock.queue) RETURNS double precision
LANGUAGE sql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
    WITH RECURSIVE lane AS (
        (SELECT priority, flow FROM penstock.ready WHERE queue_id = q.id ORDER BY priority, flow, pos LIMIT 1)
        UNION ALL
        SELECT n.priority, n.flow
          FROM lane CROSS JOIN LATERAL (
               SELECT r.priority, r.flow FROM penstock.ready r
                WHERE r.queue_id = q.id AND (r.priority, r.flow) > (lane.priority, lane.flow)
                ORDER BY r.priority, r.flow, r.pos LIMIT 1) n
    ), few AS (
        SELECT priority, flow FROM lane
         WHERE NOT EXISTS (
               SELECT FROM penstock.pause p
                WHERE coalesce(p.until > clock_timestamp(), true)
                  AND ((p.scope = 'flow' AND p.value = lane.flow AND coalesce(p.queue_id = q.id, true))
                    OR (p.scope = 'application' AND p.value = q.application)
                    OR (p.scope = 'model' AND p.value = q.model)))
         LIMIT 100)
    SELECT extract(epoch FROM clock_timestamp() - min(e.since))::float8
      FROM few CROSS JOIN LATERAL (
           SELECT f.entry_id, f.lock_key FROM (
               SELECT r.entry_id, r.lock_key, r.pos FROM penstock.ready r
                WHERE r.queue_id = q.id AND r.priority = few.priority AND r.flow = few.flow ORDER BY r.pos LIMIT 20) f
            WHERE NOT EXISTS (SELECT FROM penstock.lock l WHERE l.queue_id = q.id AND l.lock_key = coalesce(f.lock_key, '#' || f.entry_id))
            ORDER BY f.pos LIMIT 1) first
      CROSS JOIN LATERAL (
           (SELECT greatest(x.created_at, x.due_at) AS since FROM penstock.entry x
             WHERE x.queue_id = q.id AND x.id = first.entry_id)
           UNION ALL
           (SELECT greatest(x.created_at, x.due_at) FROM penstock.entry x
             WHERE x.queue_id = q.id AND x.lock_key = first.lock_key AND x.status = 'pending' AND x.priority >= 0
             ORDER BY x.id LIMIT 1)) e
     WHERE q.disabled_at IS NULL AND (q.paused_at IS NULL OR q.paused_until <= clock_timestamp())
$$;
-- +goose StatementEnd

-- measure looks at one queue as it stands. The cost does not grow with its depth. Rates are for whoever has two of them.
-- +goose StatementBegin
CREATE FUNCTION penstock.measure(q penstock.queue) RETURNS penstock.sample
LANGUAGE sql STABLE AS $$
    SELECT ROW(q.id, clock_timestamp(), c.initial, c.pending, c.disabled, c.computing, c.failed, c.estimated,
               (SELECT count(*)::integer FROM penstock.serving(q.id)), penstock.head_age(q),
               coalesce((SELECT r->>'code' FROM penstock.queue_reasons(q) r LIMIT 1),
                        (SELECT p.scope || '_paused' FROM penstock.pause p
                          WHERE coalesce(p.until > clock_timestamp(), true)
                            AND ((p.scope = 'application' AND p.value = q.application) OR (p.scope = 'model' AND p.value = q.model)) LIMIT 1),
                        (SELECT 'pushed_back' FROM penstock.push_back b WHERE b.queue_id = q.id AND b.whole AND b.until > clock_timestamp())),
               coalesce(pg_stat_get_tuples_inserted(t.oid), 0), coalesce(pg_stat_get_tuples_deleted(t.oid), 0),
               coalesce(pg_stat_get_dead_tuples(t.oid), 0), NULL, NULL)::penstock.sample
      FROM penstock.count_queue(q) c
      LEFT JOIN pg_class t ON t.oid = to_regclass(format('penstock.%I', 'entry_' || q.name))
$$;
-- +goose StatementEnd

-- last_sample is the newest sample of a queue, null if it is older than `within`: then no leader leads.
-- +goose StatementBegin
CREATE FUNCTION penstock.last_sample(queue integer, within interval DEFAULT '30 seconds') RETURNS penstock.sample
LANGUAGE sql STABLE AS $$
    SELECT s FROM penstock.sample s WHERE s.queue_id = queue AND s.at > clock_timestamp() - within ORDER BY s.at DESC LIMIT 1
$$;
-- +goose StatementEnd

-- roll_up_samples writes the minutes that are over and were not written yet, the last hour's at most, and returns how
-- many rows it wrote.
-- +goose StatementBegin
CREATE FUNCTION penstock.roll_up_samples() RETURNS bigint
LANGUAGE sql AS $$
    WITH written AS (
        INSERT INTO penstock.sample_minute
        SELECT m.*
          FROM penstock.queue q
         CROSS JOIN LATERAL (
               SELECT greatest(date_trunc('minute', now()) - interval '1 hour',
                               (SELECT max(d.at) + interval '1 minute' FROM penstock.sample_minute d
                                 WHERE d.queue_id = q.id AND d.at > now() - interval '1 hour')) AS since) span
         CROSS JOIN LATERAL (
               SELECT s.queue_id, date_trunc('minute', s.at), avg(s.initial)::bigint, avg(s.pending)::bigint, avg(s.disabled)::bigint,
                      avg(s.computing)::bigint, max(s.failed), bool_or(s.estimated), round(avg(s.serving))::integer, max(s.head_age),
                      mode() WITHIN GROUP (ORDER BY s.blocked), max(s.accepted), max(s.gone), max(s.dead_tuples),
                      avg(s.in_per_second), avg(s.out_per_second)
                 FROM penstock.sample s
                WHERE s.queue_id = q.id AND s.at >= span.since AND s.at < date_trunc('minute', now())
                GROUP BY 1, 2) m
        ON CONFLICT DO NOTHING
        RETURNING 1
    )
    SELECT count(*) FROM written
$$;
-- +goose StatementEnd

-- server_status is what of the database itself an operator watches: horizon_age is that of the oldest transaction that
-- keeps vacuum from cleaning, in seconds; dead_tuples are those of ready and lock; notify_usage is from 0 to 1.
CREATE VIEW penstock.server_status AS
SELECT (SELECT count(*)::integer FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
       current_setting('max_connections')::integer AS max_connections,
       coalesce((SELECT extract(epoch FROM max(clock_timestamp() - xact_start))::float8 FROM pg_stat_activity
                  WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid() AND backend_type <> 'walsender'), 0) AS horizon_age,
       pg_notification_queue_usage() AS notify_usage,
       coalesce((SELECT sum(n_dead_tup)::bigint FROM pg_stat_user_tables WHERE schemaname = 'penstock' AND relname IN ('ready', 'lock')), 0) AS dead_tuples;
