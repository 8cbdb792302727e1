-- Tables that are dropped by the day.

-- make_partition makes the first missing partition of a table of penstock.retention (parent) for a day from today to
-- days_ahead, and returns how many it made: 1 or 0, so that its locks are held for one partition only. Call it until it
-- returns 0.
-- The partition is made on its own and then attached. Rows of a day in a default partition keep that day from getting
-- one; that is only the first day of an installation, or after days_ahead without a leader. Samples have no default
-- partition: they wait for theirs.
-- Locks: that of hold_rights, before the name of a partition is taken: of two sessions one would wait for that name and
-- the other for the rights; then SHARE UPDATE EXCLUSIVE on the parent and ACCESS EXCLUSIVE on its default partition,
-- for 200 ms of waiting at most; a table that needs longer is left as it is. A transaction that has locked the
-- default partitions of two tables waits in a circle with a statement that reads both.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.make_partition(parent text, days_ahead integer) RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    day   date;
    child text;
BEGIN
    FOR day IN SELECT generate_series(current_date, current_date + days_ahead, interval '1 day')::date LOOP
        child := parent || to_char(day, '_YYYYMMDD');
        CONTINUE WHEN to_regclass('penstock.' || child) IS NOT NULL;
        BEGIN
            PERFORM penstock.hold_rights();
            EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.%I INCLUDING ALL)', child, parent);
            PERFORM penstock.copy_rights(child, parent);
            EXECUTE format('ALTER TABLE penstock.%I ATTACH PARTITION penstock.%I FOR VALUES FROM (%L) TO (%L)',
                           parent, child, day, day + 1);
            RETURN 1;
        EXCEPTION
            -- Another session makes it, or the default partition has rows of the day.
            WHEN duplicate_table OR unique_violation OR check_violation THEN
                NULL;
            -- A long query is in the way, of the other days too.
            WHEN lock_not_available OR deadlock_detected THEN
                EXIT;
        END;
    END LOOP;
    RETURN 0;
END $$;

-- drop_old_partitions drops the partition that is the longest past its retention, and returns how many it
-- dropped: 1 or 0, so that its locks are held for one drop only. Call it until it returns 0. Where another session
-- holds the table or that partition, the next table has its turn.
-- Locks: ACCESS EXCLUSIVE on the parent and the partition, for 200 ms of waiting at most in each table, which
-- bounds how long others wait behind it.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.drop_old_partitions() RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    old  record;
    held text[] := '{}';
BEGIN
    FOR old IN SELECT o.partition, o.parent FROM penstock.old_partitions o ORDER BY o.behind DESC LOOP
        CONTINUE WHEN old.parent = ANY (held);
        BEGIN
            EXECUTE format('DROP TABLE penstock.%I', old.partition);
            RETURN 1;
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
                held := held || old.parent;
        END;
    END LOOP;
    RETURN 0;
END $$;

-- kept returns whether a result or failure of that time may still be read: each queue keeps its own
-- for its own retention, and every queue for a minute, so that a caller that waits for an outcome
-- sees it. The rows are deleted later, see tidy_outcomes.
-- Callers: find_entry, outcome_of, operation_source; pkg/operator.
CREATE OR REPLACE FUNCTION penstock.kept(ended_at timestamptz, retention interval) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT ended_at > statement_timestamp() - greatest(retention, interval '1 minute')
$$;

-- outcome_of returns how an entry ended, after it is gone: exactly one row, or none for an entry
-- that has not ended.
-- Callers: explain_entry; pkg/invalidation, pkg/gateway/prediction.
CREATE OR REPLACE FUNCTION penstock.outcome_of(bigint)
RETURNS TABLE (queue text, outcome penstock.outcome, ended_at timestamptz, created_at timestamptz, attempt smallint,
               crashes smallint, node_id bigint, token bigint, run_ms bigint, reason text, class text, result jsonb)
LANGUAGE sql STABLE AS $$
    SELECT q.name, o.*
      FROM penstock.queue q CROSS JOIN LATERAL (
           SELECT r.outcome, r.finished_at, r.created_at, r.attempt, NULL::smallint,
                  r.node_id, r.token, r.run_ms, r.reason, NULL::text, r.result
             FROM penstock.result r
            WHERE r.queue_id = q.id AND r.entry_id = $1 AND penstock.kept(r.finished_at, q.result_retention)
           UNION ALL
           SELECT 'failed', f.failed_at, f.created_at, f.attempt, f.crashes,
                  NULL, NULL, NULL, f.error, f.class, NULL
             FROM penstock.failure f
            WHERE f.queue_id = q.id AND f.entry_id = $1 AND penstock.kept(f.failed_at, q.failure_retention)) o
$$;

-- tidy_outcomes deletes up to `most` results or failures (which: result, failure) that have passed
-- the retention of their queue, and returns how many. Partitions are dropped when they have passed
-- the longest retention of all queues; this is for queues with a shorter one, and for the default
-- partition, which is never dropped. penstock.retained records for each queue the time up to which
-- it was done, so that a pass reads the rows of one pass only; ten minutes are read again, for
-- transactions that began before and committed later. For a queue with the longest retention that is no later than the
-- oldest day that has a partition, since it is not looked for there: another queue may get a longer retention, and then
-- it is. Rows that another transaction has locked are skipped.
-- Locks: the deleted rows (FOR UPDATE SKIP LOCKED), then the row of retained.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.tidy_outcomes(which text, most integer) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET timezone = 'UTC'
AS $$
DECLARE
    at_column text := CASE which WHEN 'result' THEN 'finished_at' ELSE 'failed_at' END;
    longest   interval := (SELECT r.kept FROM penstock.retention r WHERE r.parent = which);
    oldest    timestamptz := (SELECT min(to_date(right(c.relname, 8), 'YYYYMMDD'))
                                FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                               WHERE i.inhparent = to_regclass('penstock.' || which)
                                 AND c.relname ~ '_[0-9]{8}$');
    q         record;
    part      text;
    n         bigint;
    gone      bigint := 0;
BEGIN
    FOR q IN
        SELECT x.id, k.keep < longest AS shorter, statement_timestamp() - k.keep AS before,
               coalesce(m.until, '-infinity') AS since
          FROM penstock.queue x
         CROSS JOIN LATERAL (
               SELECT greatest(CASE which WHEN 'result' THEN x.result_retention ELSE x.failure_retention END,
                               '1 minute') AS keep) k
          LEFT JOIN penstock.retained m ON m.queue_id = x.id AND m.kind = which
         ORDER BY m.until NULLS FIRST
    LOOP
        FOR part IN
            SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = to_regclass('penstock.' || which)
               AND CASE WHEN c.relname = which || '_default' THEN true
                        ELSE q.shorter AND to_date(right(c.relname, 8), 'YYYYMMDD') <= q.before
                             AND to_date(right(c.relname, 8), 'YYYYMMDD') + 1 >= q.since END
             ORDER BY c.relname
        LOOP
            EXECUTE format('WITH old AS (
                                DELETE FROM penstock.%1$I WHERE ctid = ANY (ARRAY(
                                       SELECT ctid FROM penstock.%1$I WHERE queue_id = $1 AND %2$I < $2 AND %2$I >= $3
                                        LIMIT $4 FOR UPDATE SKIP LOCKED))
                                RETURNING 1)
                            SELECT count(*) FROM old', part, at_column)
               INTO n USING q.id, q.before, q.since, most - gone;
            gone := gone + n;
            IF gone >= most THEN
                RETURN gone;
            END IF;
        END LOOP;
        INSERT INTO penstock.retained (queue_id, kind, until)
        VALUES (q.id, which, least(q.before - interval '10 minutes', CASE WHEN NOT q.shorter THEN oldest END))
        ON CONFLICT (queue_id, kind) DO UPDATE SET until = excluded.until;
    END LOOP;
    RETURN gone;
EXCEPTION WHEN undefined_table THEN
    RETURN 0; -- a partition was dropped meanwhile
END $$;

-- tidy_defaults deletes up to `most` rows that have passed their retention from the default partitions of the tables of
-- penstock.retention which keep their rows for a fixed time, and returns how many: these partitions are never dropped.
-- Locks: the deleted rows.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.tidy_defaults(most integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    old  record;
    n    bigint;
    gone bigint := 0;
BEGIN
    FOR old IN
        SELECT r.parent || '_default' AS name, r.by_column, statement_timestamp() - r.kept AS before
          FROM penstock.retention r
         WHERE r.parent NOT IN ('result', 'failure') AND to_regclass('penstock.' || r.parent || '_default') IS NOT NULL
    LOOP
        EXECUTE format('WITH old AS (
                            DELETE FROM penstock.%1$I WHERE ctid = ANY (ARRAY(
                                   SELECT ctid FROM penstock.%1$I WHERE %2$I < $1 LIMIT $2))
                            RETURNING 1)
                        SELECT count(*) FROM old', old.name, old.by_column)
           INTO n USING old.before, most - gone;
        gone := gone + n;
    END LOOP;
    RETURN gone;
END $$;
