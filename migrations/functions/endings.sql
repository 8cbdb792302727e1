-- How an entry ends or comes back: cancel, expiry, failures that are retried or discarded, compaction.

-- find_entry returns from one snapshot where an entry is: in a queue (ended is null), or ended with
-- an outcome. It reads each queue once, because the id alone does not tell the queue. In PL/pgSQL a session plans it
-- once: each plan locks the tables of all queues with all of their indexes, each further call one index of each.
-- Callers: living_entry, failed_entry, explain_entry; pkg/inference, pkg/invalidation, pkg/operator.
CREATE OR REPLACE FUNCTION penstock.find_entry(
    bigint,
    OUT queue_id   integer,
    OUT queue_name text,
    OUT ended      penstock.outcome
)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    SELECT q.id, q.name, f.outcome INTO find_entry.queue_id, find_entry.queue_name, find_entry.ended
      FROM penstock.queue q CROSS JOIN LATERAL (
           (SELECT NULL::penstock.outcome AS outcome FROM penstock.entry e
             WHERE e.queue_id = q.id AND e.id = $1 LIMIT 1)
           UNION ALL
           (SELECT r.outcome FROM penstock.result r
             WHERE r.queue_id = q.id AND r.entry_id = $1 AND penstock.kept(r.finished_at, q.result_retention) LIMIT 1)
           UNION ALL
           (SELECT 'failed' FROM penstock.failure f
             WHERE f.queue_id = q.id AND f.entry_id = $1 AND penstock.kept(f.failed_at, q.failure_retention) LIMIT 1)) f
     LIMIT 1;
END $$;

-- living_entry returns the queue of an entry that has not ended.
-- Callers: switch_entry, cancel_entry, failed_entry, explain_entry; pkg/invalidation.
-- SQLSTATE: PS007 no such entry, PS006 the entry has ended.
CREATE OR REPLACE FUNCTION penstock.living_entry(wanted bigint) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_at record;
BEGIN
    SELECT * INTO found_at FROM penstock.find_entry(wanted);
    IF found_at.queue_id IS NULL THEN
        RAISE EXCEPTION 'entry % does not exist', wanted
            USING ERRCODE = 'PS007',
                  HINT = 'It was never accepted, or its outcome is older than the retention of its queue.';
    ELSIF found_at.ended IS NOT NULL THEN
        RAISE EXCEPTION 'entry % of queue "%" has ended: %', wanted, found_at.queue_name, found_at.ended
            USING ERRCODE = 'PS006', DETAIL = found_at.ended::text;
    END IF;
    RETURN found_at.queue_id;
END $$;

-- runs returns whether a lock record covers the entry. One that came due or was retried while its
-- key was locked counts as running until the key is unlocked, although the node does not know it:
-- the record cannot tell the two apart.
-- Callers: enable_one, take_entry, cancel_one, settle_cancel_requests, overdue, entry_reasons, position_reasons,
-- throttle_reasons, explain_entry; pkg/operator.
CREATE OR REPLACE FUNCTION penstock.runs(e penstock.entry) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT e.status = 'pending' AND EXISTS (
        SELECT FROM penstock.lock l
         WHERE l.queue_id = e.queue_id AND l.lock_key = penstock.record_key(e.lock_key, e.id)
           AND l.last_entry_id >= e.id)
$$;

-- entry_state returns the state of an entry that has not ended: disabled, initial, computing or pending. Disabled goes
-- before computing: a disabled entry that runs shows as disabled. covered says whether a lock record covers the entry,
-- as runs does: statements that read many entries join the records instead, and a null, of no record, is no. It is
-- inlined.
-- Callers: entry_status, explain_entry; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.entry_state(status penstock.status, priority smallint, covered boolean) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN $2 < 0 THEN 'disabled' WHEN $1 = 'initial' THEN 'initial' WHEN $3 THEN 'computing'
                ELSE 'pending' END
$$;

-- exclude_claims excludes claims of a lock key, and pushes that rely on one of its entries (share_key), until
-- this transaction ends, or returns false if one is in progress. Claims that lock first take the same locks.
-- Locks: the advisory lock of all lock keys of the queue (shared, try), then that of the key (try).
-- Callers: compactable, lock_to_switch, take_entry.
CREATE OR REPLACE FUNCTION penstock.exclude_claims(queue integer, key text) RETURNS boolean
LANGUAGE sql AS $$
    SELECT pg_try_advisory_xact_lock_shared(hashtextextended('penstock keys ' || $1, 0))
       AND pg_try_advisory_xact_lock(hashtextextended('penstock key ' || $1 || ' ' || $2, 0))
$$;

-- take_entry locks an entry that does not run, so that none can start it until the transaction
-- ends, and returns it. The ready row of a solo entry is deleted; that of a group stays, for other
-- entries may need it (tidy_key). It returns null if the entry runs, is being claimed, is locked by
-- another session, or is gone. It rests on these rules:
--   solo     The claim of a solo entry deletes its ready row and inserts its lock in one transaction. A session that
--            has locked the ready row has excluded the claim until it commits.
--   group    A claim may take a key without its ready row (when it ignores row locks), but never without the key's
--            advisory lock. A session that has that has excluded every claim of the key; a lock record that exists by
--            then covers the entries up to last_entry_id, and no others will be handed out under it.
--   initial  Only promotion and the cron engine turn it pending, and both skip entries whose row is locked.
-- Locks: the ready row (FOR UPDATE SKIP LOCKED) of a solo entry or the advisory lock of the key
-- (try), then the entry (FOR UPDATE SKIP LOCKED). It waits for none; a running entry is left alone
-- before anything is locked, so that its settler never waits either.
-- Callers: withdraw_batch, withdraw_cron_entry, cancel_one, settle_cancel_requests, expire_entries,
-- apply_operation, fail_unreadable, fail_without_instance.
CREATE OR REPLACE FUNCTION penstock.take_entry(queue integer, wanted bigint) RETURNS penstock.entry
LANGUAGE plpgsql AS $$
DECLARE
    e       penstock.entry;
    nothing penstock.entry;
    ready_tid tid;
BEGIN
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted;
    IF NOT FOUND OR penstock.runs(e) THEN
        RETURN nothing; -- before anything is locked, so that a settler of a running entry never waits for us
    END IF;
    IF e.lock_key IS NULL THEN
        SELECT r.ctid INTO ready_tid FROM penstock.ready r
         WHERE r.queue_id = queue AND r.priority = coalesce(e.enabled_priority, e.priority) AND r.flow = e.flow
           AND r.pos = coalesce(e.pos, e.id) AND r.entry_id = wanted
           FOR UPDATE SKIP LOCKED;
    ELSIF NOT penstock.exclude_claims(queue, e.lock_key) THEN
        RETURN nothing;
    END IF;
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted FOR UPDATE SKIP LOCKED;
    -- From here on the row cannot change, so it cannot be requeued. If it has a ready row that we have not locked, a
    -- claim or a pusher has. No ready row and no lock in one snapshot: it is not queued.
    IF NOT FOUND OR penstock.runs(e) OR (ready_tid IS NULL AND penstock.in_line(e)) THEN
        RETURN nothing;
    END IF;
    DELETE FROM penstock.ready WHERE queue_id = queue AND ctid = ready_tid;
    RETURN e;
END $$;

-- in_line returns whether a solo entry has a ready row.
-- Callers: lock_to_switch, take_entry, check_invariants.
CREATE OR REPLACE FUNCTION penstock.in_line(e penstock.entry) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT e.lock_key IS NULL AND EXISTS (
        SELECT FROM penstock.ready r
         WHERE r.queue_id = e.queue_id AND r.priority = coalesce(e.enabled_priority, e.priority) AND r.flow = e.flow
           AND r.pos = coalesce(e.pos, e.id) AND r.entry_id = e.id)
$$;

-- tidy_key deletes the ready rows of a group that has no claimable entries left. They are locked
-- first: a pusher that relied on one of them has committed by then, and the next statement sees its
-- entries; a pusher that comes later cannot lock them and inserts its own.
-- Locks: the ready rows of the key (FOR UPDATE SKIP LOCKED).
-- Callers: disable_one, end_entry, fail_entry, fail_without_instance.
CREATE OR REPLACE FUNCTION penstock.tidy_key(queue integer, key text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    mine tid[];
BEGIN
    mine := ARRAY(SELECT ctid FROM penstock.ready WHERE lock_key = key AND queue_id + 0 = queue FOR UPDATE SKIP LOCKED);
    IF cardinality(mine) > 0 AND NOT EXISTS (
        SELECT FROM penstock.entry
         WHERE queue_id = queue AND lock_key = key AND penstock.claimable(status, priority)) THEN
        DELETE FROM penstock.ready WHERE queue_id = queue AND ctid = ANY (mine);
    END IF;
END $$;

-- all_ended raises, and so undoes a statement, unless it has changed as many entries as it has found: another session
-- was changing one of them. Statements that end entries call it, and those that retry or mark them.
-- Callers: pkg/invalidation.
-- SQLSTATE: 40001 an entry changed while it was ended; retry the statement.
CREATE OR REPLACE FUNCTION penstock.all_ended(locks bigint, entries bigint) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF locks <> entries THEN
        RAISE EXCEPTION 'entry changed while it was ended' USING ERRCODE = 'serialization_failure';
    END IF;
    RETURN true;
END $$;

-- end_entry ends an entry that take_entry has locked: result, callback, counters, ready rows of its
-- key.
-- Locks: those of push_many for a callback, then those of tidy_key.
-- Callers: withdraw_batch, withdraw_cron_entry, cancel_one, settle_cancel_requests, expire_entries,
-- apply_operation.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.end_entry(e penstock.entry, how penstock.outcome, why text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF e.callback IS NOT NULL THEN
        PERFORM penstock.call_back(e, how::text, jsonb_build_object('reason', why));
    END IF;
    DELETE FROM penstock.entry WHERE queue_id = e.queue_id AND id = e.id;
    DELETE FROM penstock.progress WHERE queue_id = e.queue_id AND entry_id = e.id;
    DELETE FROM penstock.cancel_request WHERE queue_id = e.queue_id AND entry_id = e.id;
    INSERT INTO penstock.result (queue_id, entry_id, created_at, attempt, outcome, reason)
    VALUES (e.queue_id, e.id, e.created_at, e.attempt, how, why);
    PERFORM penstock.count(d.queue_id, 'removed', 1) FROM penstock.depth d WHERE d.queue_id = e.queue_id;
    IF e.lock_key IS NOT NULL THEN
        PERFORM penstock.tidy_key(e.queue_id, e.lock_key);
    END IF;
END $$;

-- fail_entry moves an entry that take_entry has locked to the failures: failure, callback, counters,
-- ready rows of its key. A callback that cannot be made is left out. Its checkpoint stays, for a retry.
-- Locks: those of push_many for a callback, then those of tidy_key.
-- Callers: fail_unreadable, fail_without_instance.
CREATE OR REPLACE FUNCTION penstock.fail_entry(e penstock.entry, class text, error text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    BEGIN
        IF e.callback IS NOT NULL THEN
            PERFORM penstock.call_back(e, 'failed', jsonb_build_object('class', class, 'error', error));
        END IF;
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
        error := error || ' (nor can its callback: ' || SQLERRM || ')';
    END;
    DELETE FROM penstock.entry WHERE queue_id = e.queue_id AND id = e.id;
    DELETE FROM penstock.cancel_request WHERE queue_id = e.queue_id AND entry_id = e.id;
    PERFORM penstock.add_failure(e, e.attempt, class, error, regexp_replace(error, '[0-9]+', '_', 'g'), e.history);
    PERFORM penstock.count(d.queue_id, 'removed', 1) FROM penstock.depth d WHERE d.queue_id = e.queue_id;
    IF e.lock_key IS NOT NULL THEN
        PERFORM penstock.tidy_key(e.queue_id, e.lock_key);
    END IF;
END $$;

-- readable_error returns why an entry cannot be written as text, null if it can.
-- Callers: fail_unreadable.
CREATE OR REPLACE FUNCTION penstock.readable_error(e penstock.entry) RETURNS text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM octet_length(e.payload::text), octet_length(e.callback::text);
    RETURN NULL;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
    RETURN SQLERRM;
END $$;

-- fail_unreadable ends the entries that no claim can read, as failures of class unreadable, and returns
-- how many: among those of the first `most` ready rows of a lane from a position on, of each lock key
-- the first 1,000. An entry that runs or is being claimed is left alone.
-- Locks: for each such entry those of take_entry and fail_entry.
-- Callers: pkg/invalidation.
-- SQLSTATE: PS006 the transaction is not read committed.
CREATE OR REPLACE FUNCTION penstock.fail_unreadable(
    queue       integer,
    in_priority smallint,
    in_flow     text,
    from_pos    bigint,
    most        integer
) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    found_at record;
    e        penstock.entry;
    problem  text;
    failed   integer := 0;
BEGIN
    PERFORM penstock.need_read_committed();
    FOR found_at IN
        SELECT x.id
          FROM (SELECT r.entry_id, r.lock_key FROM penstock.ready r
                 WHERE r.queue_id = queue AND r.priority = in_priority AND r.flow = in_flow AND r.pos >= from_pos
                 ORDER BY r.pos LIMIT most) r
         CROSS JOIN LATERAL (
               SELECT r.entry_id AS id WHERE r.entry_id IS NOT NULL
               UNION ALL
               (SELECT g.id FROM penstock.entry g
                 WHERE g.queue_id = queue AND g.lock_key = r.lock_key AND penstock.claimable(g.status, g.priority)
                 ORDER BY g.id LIMIT 1000)) x
    LOOP
        SELECT * INTO e FROM penstock.entry x WHERE x.queue_id = queue AND x.id = found_at.id;
        problem := penstock.readable_error(e);
        CONTINUE WHEN problem IS NULL;
        e := penstock.take_entry(queue, found_at.id);
        IF e.id IS NOT NULL THEN
            PERFORM penstock.fail_entry(e, 'unreadable', 'the entry cannot be read: ' || problem);
            failed := failed + 1;
        END IF;
    END LOOP;
    RETURN failed;
END $$;

-- history_add adds a note of an error to the history of an entry, with the time, and keeps the
-- newest 20.
-- Locks: none.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.history_add(history jsonb, note jsonb) RETURNS jsonb
LANGUAGE sql AS $$
    SELECT CASE WHEN jsonb_array_length(coalesce($1, '[]')) >= 20 THEN $1 - 0 ELSE coalesce($1, '[]') END
           || (jsonb_build_object('at', clock_timestamp()) || $2)
$$;

-- run_note is the note in a history of a run that ended in an error: {"error", "class", "stack",
-- "meta"} from the node, the number of the attempt, the node and the duration of the run (ms).
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.run_note(attempt integer, error jsonb, node bigint, run_ms bigint) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_build_object('attempt', $1, 'error', $2->>'error', 'class', $2->>'class', 'stack', $2->'stack',
                              'node', $3, 'run_ms', $4, 'meta', $2->'meta')
$$;

-- add_failure makes the failure of an entry that its caller has deleted from its queue, and returns
-- the id. For a disabled entry the failure keeps the priority that it had before. In a queue with on_failure =
-- block_key it blocks the lock key of the entry, unless another failure does.
-- Locks: the row of blocked_key, which is new: it waits for a session that unblocks the key.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.add_failure(
    e           penstock.entry,
    attempt     smallint,
    class       text,
    error       text,
    fingerprint text,
    history     jsonb
) RETURNS bigint
LANGUAGE sql AS $$
    WITH blocked AS (
        INSERT INTO penstock.blocked_key (queue_id, lock_key, entry_id, class, error)
        SELECT e.queue_id, e.lock_key, e.id, $3, $4
          FROM penstock.queue q
         WHERE q.id = e.queue_id AND q.on_failure = 'block_key' AND e.lock_key IS NOT NULL
        ON CONFLICT DO NOTHING
    )
    INSERT INTO penstock.failure (queue_id, entry_id, created_at, start_by, finish_by, cost, weight,
                                  priority, attempt, crashes, flow,
                                  lock_key, name, class, error, fingerprint, trace, callback, payload, depth, history)
    VALUES (e.queue_id, e.id, e.created_at, e.start_by, e.finish_by, e.cost, e.weight,
            CASE WHEN e.priority < 0 THEN e.enabled_priority ELSE e.priority END, $2, e.crashes, e.flow,
            e.lock_key, e.name, $3, $4, $5, e.trace, e.callback, e.payload, e.depth, $6)
    RETURNING entry_id
$$;

-- Cancel and expire --------------------------------------------------------------------------------------------------

-- cancel_one ends an entry that does not run ('cancelled'), records a request for one that runs or
-- is locked by another session ('requested'), returns 'busy' for one whose lock key is being compacted, and
-- null for one that is gone. A compaction leaves out what has a request. It sees the request because this transaction
-- either keeps compactions of the key away, or has its part in the lock of cancels, with which the next one gives way.
-- The compaction in progress has no part in an entry that runs by then: it has kept claims away.
-- Locks: those of take_entry, then for an entry of a lock key that it did not get the advisory lock of
-- compactions of the key (shared, try), else that of its cancels (shared: a compaction has it only for a moment),
-- then those of end_entry or the row of cancel_request, where it waits for another session that cancels the same
-- entry. A node that holds the entry's lock is notified of the request when this transaction commits (which therefore
-- cannot be prepared for a two-phase commit). Without that it reads the request with its next heartbeat.
-- Callers: cancel_waiting, cancel_batch_lines, cancel_cron_runs, apply_operation.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.cancel_one(queue integer, wanted bigint, why text, who text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    e   penstock.entry := penstock.take_entry(queue, wanted);
    key text;
BEGIN
    IF e.id IS NULL THEN
        SELECT x.lock_key INTO key FROM penstock.entry x WHERE x.queue_id = queue AND x.id = wanted;
        IF key IS NULL THEN
            NULL; -- no compaction can have it
        ELSIF pg_try_advisory_xact_lock_shared(hashtextextended('penstock compaction ' || queue || ' ' || key, 0)) THEN
            e := penstock.take_entry(queue, wanted); -- a compaction may have ended between the two
        ELSE
            PERFORM pg_advisory_xact_lock_shared(hashtextextended('penstock cancels ' || queue || ' ' || key, 0));
            IF EXISTS (SELECT FROM penstock.entry x
                        WHERE x.queue_id = queue AND x.id = wanted AND NOT penstock.runs(x)) THEN
                RETURN 'busy';
            END IF;
        END IF;
    END IF;
    IF e.id IS NOT NULL THEN
        PERFORM penstock.end_entry(e, 'cancelled', why);
        RETURN 'cancelled';
    END IF;
    INSERT INTO penstock.cancel_request (queue_id, entry_id, lock_key, actor, reason)
    VALUES (queue, wanted, key, penstock.actor_name(who), coalesce(why, ''))
    ON CONFLICT DO NOTHING;
    IF NOT EXISTS (SELECT FROM penstock.entry x WHERE x.queue_id = queue AND x.id = wanted) THEN
        DELETE FROM penstock.cancel_request WHERE queue_id = queue AND entry_id = wanted;
        RETURN NULL;
    END IF;
    PERFORM penstock.notify('cancel ' || l.node_id)
       FROM penstock.lock l
      WHERE l.queue_id = queue AND l.lock_key = penstock.record_key(key, wanted) AND l.last_entry_id >= wanted;
    RETURN 'requested';
END $$;

-- cancel_waiting is cancel_one, which waits for the end of a compaction of the entry's lock key and is never 'busy'.
-- Locks: those of cancel_one, and before a second try of it that of await_compaction.
-- Callers: cancel_entry, cancel_batch.
-- SQLSTATE: those of cancel_one, 55P03 a compaction of the lock key does not end.
CREATE OR REPLACE FUNCTION penstock.cancel_waiting(queue integer, wanted bigint, why text, who text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    answer text := penstock.cancel_one(queue, wanted, why, who);
BEGIN
    IF answer = 'busy' THEN
        PERFORM penstock.await_compaction(queue, x.lock_key)
           FROM penstock.entry x WHERE x.queue_id = queue AND x.id = wanted;
        answer := penstock.cancel_one(queue, wanted, why, who);
    END IF;
    RETURN answer;
END $$;

-- cancel_entry returns 'cancelled' if the entry has ended, and 'requested' if a node runs it or is
-- about to: that node reads the request with its next heartbeat, and if the entry is requeued instead,
-- settle_cancel_requests ends it.
-- Locks: those of cancel_waiting.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS007 no such entry, PS006 the entry has ended, or the transaction is not read
-- committed, 55P03 a compaction of the lock key does not end.
CREATE OR REPLACE FUNCTION penstock.cancel_entry(
    id     bigint,
    reason text   DEFAULT '',
    actor  text   DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    queue  integer;
    answer text;
BEGIN
    PERFORM penstock.need_read_committed();
    queue := penstock.living_entry(cancel_entry.id);
    answer := penstock.cancel_waiting(queue, cancel_entry.id, cancel_entry.reason, cancel_entry.actor);
    IF answer IS NULL THEN
        PERFORM penstock.living_entry(cancel_entry.id); -- raises an error: it ended meanwhile
    END IF;
    PERFORM penstock.audit_log(cancel_entry.actor, 'cancel_entry', 'entry ' || cancel_entry.id,
                               cancel_entry.reason, jsonb_build_object('answer', answer));
    RETURN answer;
END $$;

-- settle_cancel_requests ends entries that were to be cancelled while they ran and have been
-- requeued since (a retry, a release, a dead node), and removes requests whose entry is gone: up to
-- `most` of both. It returns how many entries it ended. A request that was delivered and whose key a claim took after
-- that is to be delivered again: heartbeats of the node that has the key now read it as a new one.
-- Locks: rows of cancel_request (FOR UPDATE SKIP LOCKED), then more of them in order of entry (likewise), for each
-- those of take_entry and end_entry.
-- Callers: pkg/invalidation.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.settle_cancel_requests(queue integer, most integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    c     record;
    e     penstock.entry;
    ended integer := 0;
BEGIN
    UPDATE penstock.cancel_request SET delivered_at = NULL
     WHERE ctid = ANY (ARRAY(
           SELECT r.ctid FROM penstock.cancel_request r
            WHERE r.queue_id = queue AND r.delivered_at IS NOT NULL
              AND EXISTS (SELECT FROM penstock.lock l
                           WHERE l.queue_id = queue AND l.lock_key = penstock.record_key(r.lock_key, r.entry_id)
                             AND r.entry_id <= l.last_entry_id AND l.claimed_at > r.delivered_at)
            LIMIT most FOR UPDATE SKIP LOCKED));
    FOR c IN SELECT r.entry_id, r.reason FROM penstock.cancel_request r
              WHERE r.queue_id = queue
                AND NOT EXISTS (SELECT FROM penstock.entry x
                                 WHERE x.queue_id = queue AND x.id = r.entry_id AND penstock.runs(x))
              ORDER BY r.entry_id LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        e := penstock.take_entry(queue, c.entry_id);
        IF e.id IS NOT NULL THEN
            PERFORM penstock.end_entry(e, 'cancelled', c.reason);
            ended := ended + 1;
        ELSIF NOT EXISTS (SELECT FROM penstock.entry x WHERE x.queue_id = queue AND x.id = c.entry_id) THEN
            DELETE FROM penstock.cancel_request r WHERE r.queue_id = queue AND r.entry_id = c.entry_id;
        END IF;
    END LOOP;
    RETURN ended;
END $$;

-- overdue lists entries of one queue whose start_by or finish_by has passed and that no lock
-- covers. It reads two ranges of two partial indexes, however long the backlog; running entries are
-- in those ranges too, but they are as few as the locks.
-- Callers: expire_entries.
CREATE OR REPLACE FUNCTION penstock.overdue(queue_name text, most integer) RETURNS TABLE (id bigint, why text)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY EXECUTE format($q$
        (SELECT e.id, 'not started by ' || e.start_by FROM penstock.%1$I e
          WHERE e.start_by <= $1 AND NOT penstock.runs(e) ORDER BY e.start_by LIMIT $2)
        UNION ALL
        (SELECT e.id, 'not finished by ' || e.finish_by FROM penstock.%1$I e
          WHERE e.finish_by <= $1 AND NOT penstock.runs(e) ORDER BY e.finish_by LIMIT $2)
        LIMIT $2$q$, 'entry_' || queue_name)
    USING clock_timestamp(), most;
END $$;

-- expire_entries ends up to `most` entries of a queue whose deadline has passed and that do not
-- run, and returns how many.
-- Locks: for each entry those of take_entry and end_entry.
-- Callers: pkg/invalidation.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS006 not allowed in this state, PS011
-- entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.expire_entries(queue_id integer, most integer) RETURNS integer
LANGUAGE plpgsql
-- Walk the index of deadlines up to the bound: a bitmap would fetch every late entry first, and sort them.
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    late  record;
    e     penstock.entry;
    ended integer := 0;
BEGIN
    PERFORM penstock.need_read_committed();
    FOR late IN SELECT o.id, o.why FROM penstock.queue q CROSS JOIN LATERAL penstock.overdue(q.name, most) o
                 WHERE q.id = expire_entries.queue_id
    LOOP
        e := penstock.take_entry(expire_entries.queue_id, late.id);
        IF e.id IS NOT NULL THEN
            PERFORM penstock.end_entry(e, 'expired', late.why);
            ended := ended + 1;
        END IF;
    END LOOP;
    RETURN ended;
END $$;

-- expired_locks lists entries that still run more than grace after their finish_by: their node
-- should have ended them. It starts from the lock records, which are as few as the work in flight.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.expired_locks(grace interval DEFAULT '30 seconds')
RETURNS TABLE (queue_id integer, lock_key text, token bigint, node_id bigint, entry_id bigint, finish_by timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT l.queue_id, l.lock_key, l.token, l.node_id, e.id, e.finish_by
      FROM penstock.lock l
      JOIN penstock.entry e ON e.queue_id = l.queue_id AND e.id = l.last_entry_id
     WHERE penstock.is_solo(l.lock_key) AND e.status = 'pending' AND e.finish_by < clock_timestamp() - grace
    UNION ALL
    SELECT l.queue_id, l.lock_key, l.token, l.node_id, e.id, e.finish_by
      FROM penstock.lock l
      JOIN penstock.entry e ON e.queue_id = l.queue_id AND e.lock_key = l.lock_key AND e.id <= l.last_entry_id
     WHERE NOT penstock.is_solo(l.lock_key) AND penstock.claimable(e.status, e.priority)
       AND e.finish_by < clock_timestamp() - grace
$$;

-- Failures -----------------------------------------------------------------------------------------------------------

-- is_off returns whether the entries of a name or lock key are disabled.
-- Callers: return_failure_at, operation_filter.
CREATE OR REPLACE FUNCTION penstock.is_off(queue integer, name text, lock_key text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.disabled d
                    WHERE d.queue_id = $1
                      AND ((d.scope = 'name' AND d.value = $2) OR (d.scope = 'lock_key' AND d.value = $3)))
$$;

-- return_failure requeues a failed entry at the back of its lane, as return_failure_at.
-- Locks: those of return_failure_at.
-- Callers: retry_failure, retry_one.
CREATE OR REPLACE FUNCTION penstock.return_failure(queue integer, wanted bigint) RETURNS boolean
LANGUAGE sql AS $$ SELECT penstock.return_failure_at($1, $2, nextval('penstock.entry_id_seq')) $$;

-- return_failure_at requeues a failed entry at a position of its lane: the same id, history and depth,
-- no attempts used (in its group, the id still is its position). Deadlines that have passed are
-- dropped, or it would expire at once, and start_by where it has run: it was started. That of a run of a cron job is
-- the job's run again. False: there is no such failure.
-- Locks: the row of failure (FOR UPDATE), then those of resume_cron_run, then the row of cancel_request.
-- Callers: return_failure, unblock_one.
-- SQLSTATE: PS006 another run of its cron job is in progress, or the transaction is not read committed: by an older
-- snapshot the entry could pass a pause of its name or key.
CREATE OR REPLACE FUNCTION penstock.return_failure_at(queue integer, wanted bigint, at_pos bigint) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    f     penstock.failure;
    off   boolean;
BEGIN
    PERFORM penstock.need_read_committed();
    SELECT * INTO f FROM penstock.failure x WHERE x.queue_id = queue AND x.entry_id = wanted FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF f.name IS NOT NULL THEN
        PERFORM penstock.resume_cron_run(queue, f.name, wanted);
    END IF;
    DELETE FROM penstock.failure x WHERE x.queue_id = queue AND x.entry_id = wanted;
    DELETE FROM penstock.cancel_request WHERE queue_id = queue AND entry_id = wanted;
    off := penstock.is_off(queue, f.name, f.lock_key);
    INSERT INTO penstock.entry (id, queue_id, created_at, status, start_by, finish_by, cost, weight,
                                priority, enabled_priority, pos,
                                flow, lock_key, name, trace, callback, history, payload, depth)
    VALUES (wanted, queue, f.created_at, 'pending',
            CASE WHEN f.start_by > clock_timestamp() AND f.attempt = 0 AND f.crashes = 0 THEN f.start_by END,
            CASE WHEN f.finish_by > clock_timestamp() THEN f.finish_by END, f.cost, f.weight,
            CASE WHEN off THEN -1 ELSE f.priority END, CASE WHEN off THEN f.priority END, at_pos,
            f.flow, f.lock_key, f.name, f.trace, f.callback, f.history, f.payload, f.depth);
    IF NOT off THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id, lock_key)
        VALUES (queue, f.priority, f.flow, at_pos, CASE WHEN f.lock_key IS NULL THEN wanted END, f.lock_key)
        -- A row of the same key, which was locked under another one. Written anew: see enable_one.
        ON CONFLICT (queue_id, priority, flow, pos) DO UPDATE
           SET entry_id = excluded.entry_id, lock_key = excluded.lock_key;
    END IF;
    PERFORM penstock.count(d.queue_id, 'accepted', 1) FROM penstock.depth d WHERE d.queue_id = queue;
    RETURN true;
END $$;

-- failed_entry returns the queue of a failure.
-- Callers: retry_failure, discard_failure.
-- SQLSTATE: PS007 no such entry, PS006 the entry has not failed.
CREATE OR REPLACE FUNCTION penstock.failed_entry(wanted bigint) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_at record;
BEGIN
    SELECT * INTO found_at FROM penstock.find_entry(wanted);
    IF found_at.queue_id IS NULL THEN
        PERFORM penstock.living_entry(wanted); -- raises PS007
    ELSIF found_at.ended IS DISTINCT FROM 'failed' THEN
        RAISE EXCEPTION 'entry % of queue "%" has not failed: %', wanted, found_at.queue_name,
                        coalesce(found_at.ended::text, 'it has not ended')
            USING ERRCODE = 'PS006', DETAIL = coalesce(found_at.ended::text, '');
    END IF;
    RETURN found_at.queue_id;
END $$;

-- retry_failure requeues a failed entry.
-- Locks: those of return_failure.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS007 no such entry, PS006 the entry has not failed, or is a step of a batch that has ended, a line of a
-- batch of requests that has recorded its failure, or a run of a cron job of which another run is in progress.
CREATE OR REPLACE FUNCTION penstock.retry_failure(
    entry_id bigint,
    reason   text   DEFAULT '',
    actor    text   DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    queue   integer := penstock.failed_entry(retry_failure.entry_id);
    useless text := (SELECT penstock.ended_step(queue, f.entry_id, f.payload, f.name) FROM penstock.failure f
                      WHERE f.queue_id = queue AND f.entry_id = retry_failure.entry_id);
BEGIN
    IF useless IS NOT NULL THEN
        RAISE EXCEPTION '%', useless USING ERRCODE = 'PS006';
    ELSIF NOT penstock.return_failure(queue, retry_failure.entry_id) THEN
        PERFORM penstock.failed_entry(retry_failure.entry_id); -- raises an error: another session was faster
    END IF;
    PERFORM penstock.audit_log(retry_failure.actor, 'retry_failure', 'entry ' || retry_failure.entry_id,
                               retry_failure.reason);
END $$;

-- discard_failure deletes a failure before its retention ends. Only the audit has the error then.
-- Locks: those of record_in_batch, then the row of failure, which is deleted.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS007 no such entry, PS006 the entry has not failed, or its batch has not recorded the failure.
CREATE OR REPLACE FUNCTION penstock.discard_failure(
    entry_id bigint,
    reason   text   DEFAULT '',
    actor    text   DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    queue integer := penstock.failed_entry(discard_failure.entry_id);
    f     penstock.failure;
BEGIN
    IF NOT penstock.record_in_batch(queue, discard_failure.entry_id) THEN
        RAISE EXCEPTION 'the batch of entry % has not recorded its failure yet', discard_failure.entry_id
            USING ERRCODE = 'PS006', HINT = 'The elected leader does that within a second: try again.';
    END IF;
    DELETE FROM penstock.failure x WHERE x.queue_id = queue AND x.entry_id = discard_failure.entry_id
    RETURNING * INTO f;
    IF NOT FOUND THEN
        PERFORM penstock.failed_entry(discard_failure.entry_id); -- raises an error: another session was faster
    END IF;
    PERFORM penstock.audit_log(discard_failure.actor, 'discard_failure',
            'entry ' || discard_failure.entry_id, discard_failure.reason,
            jsonb_build_object('class', f.class, 'fingerprint', f.fingerprint, 'failed_at', f.failed_at));
END $$;
