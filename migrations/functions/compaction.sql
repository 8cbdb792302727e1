-- Compaction: entries of one key of a mergeable queue become one.

-- Compaction ---------------------------------------------------------------------------------------------------------
-- Entries of a group that are not handed out become one. The key's advisory lock excludes claims; a lock record that
-- exists by then has handed out the entries up to last_entry_id and no others, and is never changed. The oldest entry
-- of the run stays with its id, its position and the merged payload, so that no ready row is changed: the key is
-- claimable before and after. Producers take no part in it: entries that are pushed meanwhile are merged next time.
-- Nor do entries whose cancel is requested: see cancel_one.
-- There is no merging inside a push: it would keep the key from being claimed until the pusher's transaction ends.

-- cancel_in_progress returns whether a transaction that has not ended cancels an entry of a key that was being
-- compacted.
-- Locks: the advisory lock of the key's cancels (try), which is given back before it returns.
-- Callers: compactable.
-- SQLSTATE: none: PS900 only undoes the lock.
CREATE OR REPLACE FUNCTION penstock.cancel_in_progress(queue integer, key text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_xact_lock(hashtextextended('penstock cancels ' || queue || ' ' || key, 0)) THEN
        RAISE SQLSTATE 'PS900';
    END IF;
    RETURN true;
EXCEPTION WHEN SQLSTATE 'PS900' THEN
    RETURN false;
END $$;

-- await_compaction waits until no other session compacts a lock key, and keeps the key from being compacted
-- until this transaction ends. A compaction never waits for a lock, so that nobody waits in a circle.
-- Locks: the advisory lock of compactions of the key (shared); it waits, at most 3 s.
-- Callers: cancel_waiting.
-- SQLSTATE: 55P03 the compaction did not end in time.
CREATE OR REPLACE FUNCTION penstock.await_compaction(queue integer, key text) RETURNS void
LANGUAGE sql SET lock_timeout = '3s' AS $$
    SELECT pg_advisory_xact_lock_shared(hashtextextended('penstock compaction ' || $1 || ' ' || $2, 0))
$$;

-- records_end returns whether another record waits for the end of this very entry: a batch, whose entries have its
-- number in their name, or the cron job of an entry of a cron queue.
-- Callers: compactable.
CREATE OR REPLACE FUNCTION penstock.records_end(
    kind  penstock.queue_kind,
    queue integer,
    entry bigint,
    name  text
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN $4 ~ '^batch:[0-9]{1,18}$' THEN EXISTS (
                     SELECT FROM penstock.batch b
                      WHERE b.id = substr($4, 7)::bigint AND b.ended_at IS NULL
                        AND $2 IN (b.queue_id, b.completion_queue_id))
                ELSE $1 = 'cron' AND EXISTS (SELECT FROM penstock.cron_job j WHERE j.entry_id = $3) END
$$;

-- compactable returns the oldest run of two or more entries of a key that may be merged, and locks
-- it: pending, enabled, not handed out, without a cancel request, together no larger than the queue's
-- payload_limit. A run ends before an entry whose own end is owed (to a callback, a batch or a cron job), or
-- with a payload that the queue's rule cannot merge. A run is looked for in the oldest 10,000 entries, and has `most`
-- at most. It returns nothing if a claim or cancel of the key is in progress or another session has locked one of the
-- entries, or the row of a unique key: a push that waits for such a row finds the entry that remains.
-- Locks: the advisory lock of the key (try), that of its compactions (try), then the entries in order of id (FOR UPDATE
-- NOWAIT), the rows of their unique keys (likewise), and for a moment the advisory lock of the key's cancels (try).
-- Callers: compact; pkg/invalidation.
-- SQLSTATE: PS006 not allowed in this state.
CREATE OR REPLACE FUNCTION penstock.compactable(
    q    penstock.queue,
    key  text,
    most integer        DEFAULT 1000
) RETURNS SETOF penstock.entry
LANGUAGE plpgsql AS $$
DECLARE
    e     record;
    run   bigint[] := '{}';
    keys  text[] := '{}'; -- unique keys of the run
    bytes bigint := 0;
BEGIN
    PERFORM penstock.need_read_committed();
    IF NOT (penstock.exclude_claims(q.id, key)
            AND pg_try_advisory_xact_lock(hashtextextended('penstock compaction ' || q.id || ' ' || key, 0))) THEN
        RETURN;
    END IF;
    -- size is null for an entry that cannot be merged. Within an array it is not compressed, as is the merged payload.
    FOR e IN SELECT x.id, x.unique_key,
                    CASE WHEN x.callback IS NULL AND NOT penstock.records_end(q.kind, q.id, x.id, x.name)
                                    AND pg_column_size(x.payload) <= q.payload_limit
                                    AND (q.merge <> 'object' OR jsonb_typeof(x.payload) = 'object')
                               THEN pg_column_size(jsonb_build_array(x.payload)) END AS size
               FROM penstock.entry x
              WHERE x.queue_id = q.id AND x.lock_key = key AND penstock.claimable(x.status, x.priority)
                AND x.id > coalesce((SELECT l.last_entry_id FROM penstock.lock l
                                      WHERE l.queue_id = q.id AND l.lock_key = key), 0)
                AND NOT EXISTS (SELECT FROM penstock.cancel_request c WHERE c.queue_id = q.id AND c.entry_id = x.id)
              ORDER BY x.id LIMIT 10000
    LOOP
        IF e.size IS NULL OR e.size > q.payload_limit
           OR bytes + e.size > q.payload_limit AND q.merge IN ('object', 'array') THEN
            EXIT WHEN cardinality(run) > 1;
            run := '{}';
            keys := '{}';
            bytes := 0;
        END IF;
        IF e.size <= q.payload_limit THEN
            bytes := bytes + e.size;
            run := run || e.id;
            IF e.unique_key IS NOT NULL THEN
                keys := keys || e.unique_key;
            END IF;
            EXIT WHEN cardinality(run) = most;
        END IF;
    END LOOP;
    -- Lock first, return after: an error in the middle of RETURN QUERY would leave the rows before it in the answer.
    PERFORM FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (run) ORDER BY x.id FOR UPDATE NOWAIT;
    IF cardinality(keys) > 0 THEN
        PERFORM FROM penstock.uniqueness u WHERE u.queue_id = q.id AND u.key = ANY (keys)
          ORDER BY u.key FOR UPDATE NOWAIT;
    END IF;
    -- A cancel that has not committed is not seen yet, one that has is seen by the next statement.
    IF cardinality(run) < 2 OR penstock.cancel_in_progress(q.id, key) THEN
        RETURN;
    END IF;
    IF cardinality(run) = (SELECT count(*) FROM penstock.entry x
        WHERE x.queue_id = q.id AND x.id = ANY (run) AND penstock.claimable(x.status, x.priority)
          AND NOT EXISTS (SELECT FROM penstock.cancel_request c WHERE c.queue_id = q.id AND c.entry_id = x.id)) THEN
        RETURN QUERY SELECT * FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (run) ORDER BY x.id;
    END IF;
EXCEPTION WHEN lock_not_available THEN
    RETURN; -- disabling or cancelling one of them just now
END $$;

-- replace_merged replaces the entries, which compactable has locked, by one payload. The oldest
-- stays, with the latest deadline of all (none if one has none), the greatest depth, and the unique keys
-- of all: until it starts or ends, a push of one of them is its duplicate. The others end as done, merged into it. Of
-- an entry that has keys of an earlier merge its own key alone goes along, since no index finds the others.
-- Locks: none further: compactable has locked the entries and the rows of their unique keys.
-- Callers: compact; pkg/invalidation.
-- SQLSTATE: PS003 the merged payload is missing or too large.
CREATE OR REPLACE FUNCTION penstock.replace_merged(q penstock.queue, ids bigint[], merged jsonb) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    oldest bigint := (SELECT min(i) FROM unnest(ids) i);
    gone   integer;
BEGIN
    IF merged IS NULL OR pg_column_size(merged) > q.payload_limit THEN
        RAISE EXCEPTION 'payload merged into entry % is missing or larger than % bytes', oldest, q.payload_limit
            USING ERRCODE = 'PS003';
    END IF;
    UPDATE penstock.entry e
       SET payload = merged, start_by = a.start_by, finish_by = a.finish_by, attempt = a.attempt, crashes = a.crashes,
           may_have_run = a.may_have_run, cost = a.cost, weight = a.weight, depth = a.depth
      FROM (SELECT CASE WHEN bool_and(x.start_by IS NOT NULL) THEN max(x.start_by) END AS start_by,
                   CASE WHEN bool_and(x.finish_by IS NOT NULL) THEN max(x.finish_by) END AS finish_by,
                   max(x.attempt) AS attempt, max(x.crashes) AS crashes,
                   bool_or(x.may_have_run) AS may_have_run, max(x.cost) AS cost, max(x.weight) AS weight,
                   max(x.depth) AS depth
              FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (ids)) a
     WHERE e.queue_id = q.id AND e.id = oldest;
    WITH gone AS (
        DELETE FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (ids) AND x.id <> oldest
        RETURNING x.id, x.created_at, x.attempt, x.unique_key
    ), kept AS (
        UPDATE penstock.uniqueness u SET entry_id = oldest FROM gone
         WHERE u.queue_id = q.id AND u.key = gone.unique_key AND u.entry_id = gone.id
    ), forgotten AS (
        DELETE FROM penstock.cancel_request c USING gone WHERE c.queue_id = q.id AND c.entry_id = gone.id
    ), unsaved AS (
        DELETE FROM penstock.progress p USING gone WHERE p.queue_id = q.id AND p.entry_id = gone.id
    )
    INSERT INTO penstock.result (queue_id, entry_id, created_at, attempt, outcome, reason)
    SELECT q.id, id, created_at, attempt, 'done', 'merged into ' || oldest FROM gone;
    GET DIAGNOSTICS gone = ROW_COUNT;
    PERFORM penstock.count(d.queue_id, 'removed', gone) FROM penstock.depth d WHERE d.queue_id = q.id;
    RETURN gone;
END $$;

-- merge_payloads merges by the queue's rule: the first, the last, all fields of all objects (later
-- ones win), or one array of all (a payload that is an array adds its elements, so that a merged
-- payload can be merged again).
-- Callers: compact; pkg/invalidation.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.merge_payloads(rule text, payloads jsonb[]) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    merged jsonb := CASE rule WHEN 'object' THEN '{}' ELSE '[]' END;
    p      jsonb;
BEGIN
    IF rule IN ('first', 'last') THEN
        RETURN payloads[CASE rule WHEN 'first' THEN 1 ELSE cardinality(payloads) END];
    END IF;
    FOREACH p IN ARRAY payloads LOOP
        IF rule = 'object' AND jsonb_typeof(p) <> 'object' THEN
            RAISE EXCEPTION 'payload to be merged is not an object' USING ERRCODE = 'PS002',
                HINT = 'Set merge of the queue to first, last or array.';
        END IF;
        merged := merged || CASE WHEN rule = 'array' AND jsonb_typeof(p) <> 'array'
                                 THEN jsonb_build_array(p) ELSE p END;
    END LOOP;
    RETURN merged;
END $$;

-- compact merges the oldest run of waiting entries of a key by the queue's rule, up to 1,000, and
-- returns how many it replaced: 0 if there is nothing that can be merged or a claim is in progress.
-- Locks: those of compactable.
-- Callers: compact_queue; pkg/invalidation.
-- SQLSTATE: PS001 no such queue, PS006 the queue is not mergeable or the transaction is not read
-- committed.
CREATE OR REPLACE FUNCTION penstock.compact(queue text, lock_key text) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    q        penstock.queue := penstock.queue_row(queue);
    ids      bigint[];
    payloads jsonb[];
    merged   jsonb;
BEGIN
    IF NOT q.mergeable THEN
        RAISE EXCEPTION 'queue "%" is not mergeable', q.name USING ERRCODE = 'PS006',
            HINT = 'Set mergeable of the queue, and its merge to first, last, object or array (alter_queue).';
    END IF;
    SELECT array_agg(c.id ORDER BY c.id), array_agg(c.payload ORDER BY c.id) INTO ids, payloads
      FROM penstock.compactable(q, compact.lock_key) c;
    IF ids IS NULL THEN
        RETURN 0;
    END IF;
    merged := penstock.merge_payloads(q.merge, payloads);
    IF pg_column_size(merged) > q.payload_limit THEN
        RETURN 0; -- fields of an object may need padding that they did not need before
    END IF;
    RETURN penstock.replace_merged(q, ids, merged);
END $$;

-- compact_queue visits up to most_keys keys of a queue, 1,000 at most, from the key behind `after`
-- on, and compacts those with at least min_entries waiting entries. It skips from key to key through
-- the index, and returns the last key that it visited, null at the end: call it again from there.
-- Locks: those of compact for each key, in order of keys, kept until the transaction ends.
-- Callers: pkg/invalidation; psql.
-- SQLSTATE: those of compact.
CREATE OR REPLACE FUNCTION penstock.compact_queue(
    queue       text,
    min_entries integer DEFAULT 2,
    most_keys   integer DEFAULT 1000,
    INOUT after text    DEFAULT '',
    OUT replaced integer
)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue);
    many boolean;
BEGIN
    replaced := 0;
    FOR i IN 1 .. least(most_keys, 1000) LOOP
        SELECT min(e.lock_key) INTO after FROM (
            SELECT x.lock_key FROM penstock.entry x
             WHERE x.queue_id = q.id AND x.lock_key > after AND penstock.claimable(x.status, x.priority)
             ORDER BY x.lock_key LIMIT 1) e;
        EXIT WHEN after IS NULL;
        SELECT count(*) = min_entries INTO many FROM (
            SELECT FROM penstock.entry x
             WHERE x.queue_id = q.id AND x.lock_key = after AND penstock.claimable(x.status, x.priority)
             LIMIT min_entries) e;
        IF many THEN
            replaced := replaced + penstock.compact(q.name, after);
        END IF;
    END LOOP;
END $$;
