-- +goose Up

-- What operators do to a queue that is being worked on: pause, disable, cancel, expire, retry, compact. The CLI, the
-- API and a person in psql call the same functions.
--
-- Further SQLSTATEs: PS007 no such entry, PS008 no such node or operation.
--
-- An entry that is not running is taken before it is ended, and here is what taking rests on:
--   solo     The claim of a solo entry deletes its ready row and inserts its lock in one transaction. Whoever has
--            locked the ready row has excluded the claim until he commits.
--   group    A claim may take a key without its ready row (claim.go, stubborn), but never without the key's advisory
--            lock. Whoever has that has excluded every claim of the key; a lock record that is there by then covers
--            the entries up to last_entry_id, and no others will be handed out under it.
--   initial  Only promote turns it pending, and it passes by entries whose row is locked.
-- Nothing here waits for a claim, a pusher or a node: what somebody else has locked is passed by or asked for.
-- Each step looks again in a statement of its own, so the functions need read committed.

-- +goose StatementBegin
CREATE FUNCTION penstock.need_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'this function needs read committed, and the transaction is %', current_setting('transaction_isolation')
            USING ERRCODE = 'PS006', HINT = 'Call it in a transaction of its own.';
    END IF;
END $$;
-- +goose StatementEnd

-- find_entry tells from one snapshot where an entry is: in a queue (outcome null), or ended with an outcome. It looks
-- once into each queue, because the id alone does not say which.
-- +goose StatementBegin
CREATE FUNCTION penstock.find_entry(bigint, OUT queue_id integer, OUT queue_name text, OUT ended penstock.outcome)
LANGUAGE sql STABLE AS $$
    SELECT q.id, q.name, f.outcome
      FROM penstock.queue q CROSS JOIN LATERAL (
           (SELECT NULL::penstock.outcome AS outcome FROM penstock.entry e WHERE e.queue_id = q.id AND e.id = $1 LIMIT 1)
           UNION ALL
           (SELECT r.outcome FROM penstock.result r WHERE r.queue_id = q.id AND r.entry_id = $1 LIMIT 1)
           UNION ALL
           (SELECT 'failed' FROM penstock.failure f WHERE f.queue_id = q.id AND f.entry_id = $1 LIMIT 1)) f
     LIMIT 1
$$;
-- +goose StatementEnd

-- living_entry returns the queue of an entry that has not ended, and raises PS007 or PS006 where there is none.
-- +goose StatementBegin
CREATE FUNCTION penstock.living_entry(wanted bigint) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_at record;
BEGIN
    SELECT * INTO found_at FROM penstock.find_entry(wanted);
    IF found_at.queue_id IS NULL THEN
        RAISE EXCEPTION 'entry % does not exist', wanted
            USING ERRCODE = 'PS007', HINT = 'It was never accepted, or its outcome is older than the retention of its queue.';
    ELSIF found_at.ended IS NOT NULL THEN
        RAISE EXCEPTION 'entry % of queue "%" has ended: %', wanted, found_at.queue_name, found_at.ended
            USING ERRCODE = 'PS006', DETAIL = found_at.ended::text;
    END IF;
    RETURN found_at.queue_id;
END $$;
-- +goose StatementEnd

-- runs says whether a lock record covers the entry. One that came due or was retried while its key was locked counts
-- as running until the key is unlocked, although the node does not know it: the record cannot tell the two apart.
-- +goose StatementBegin
CREATE FUNCTION penstock.runs(e penstock.entry) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT e.status = 'pending' AND EXISTS (
        SELECT FROM penstock.lock l
         WHERE l.queue_id = e.queue_id AND l.lock_key = coalesce(e.lock_key, '#' || e.id) AND l.last_entry_id >= e.id)
$$;
-- +goose StatementEnd

-- hold_key excludes claims of a group until this transaction ends, or answers false if one is under way.
-- claimSQL takes the same lock.
-- +goose StatementBegin
CREATE FUNCTION penstock.hold_key(queue integer, key text) RETURNS boolean
LANGUAGE sql AS $$
    SELECT pg_try_advisory_xact_lock(hashtextextended('penstock key ' || $1 || ' ' || $2, 0))
$$;
-- +goose StatementEnd

-- take_entry makes an entry ours until the transaction ends: it does not run and nobody can start it. Its ready row is
-- gone if it was solo; a group's stays, for other entries may need it (tidy_key). It returns null if the entry runs, is
-- being claimed, is locked by somebody else, or is gone.
-- +goose StatementBegin
CREATE FUNCTION penstock.take_entry(queue integer, wanted bigint) RETURNS penstock.entry
LANGUAGE plpgsql AS $$
DECLARE
    e       penstock.entry;
    nothing penstock.entry;
    place   tid;
BEGIN
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted;
    IF NOT FOUND OR penstock.runs(e) THEN
        RETURN nothing; -- before anything is locked, so that a settler of a running entry never waits for us
    END IF;
    IF e.lock_key IS NULL THEN
        SELECT r.ctid INTO place FROM penstock.ready r
         WHERE r.queue_id = queue AND r.priority = coalesce(e.enabled_priority, e.priority) AND r.flow = e.flow
           AND r.pos = coalesce(e.pos, e.id) AND r.entry_id = wanted
           FOR UPDATE SKIP LOCKED;
    ELSIF NOT penstock.hold_key(queue, e.lock_key) THEN
        RETURN nothing;
    END IF;
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted FOR UPDATE SKIP LOCKED;
    -- From here on the row cannot change, so nobody can put it into line anew. If it is in line and we do not have its
    -- ready row, then a claim or a pusher has it. No ready row and no lock in one snapshot: it is out of line.
    IF NOT FOUND OR penstock.runs(e) OR (place IS NULL AND penstock.in_line(e)) THEN
        RETURN nothing;
    END IF;
    DELETE FROM penstock.ready WHERE queue_id = queue AND ctid = place;
    RETURN e;
END $$;
-- +goose StatementEnd

-- in_line says whether a solo entry has a ready row.
-- +goose StatementBegin
CREATE FUNCTION penstock.in_line(e penstock.entry) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT e.lock_key IS NULL AND EXISTS (
        SELECT FROM penstock.ready r
         WHERE r.queue_id = e.queue_id AND r.priority = coalesce(e.enabled_priority, e.priority) AND r.flow = e.flow
           AND r.pos = coalesce(e.pos, e.id) AND r.entry_id = e.id)
$$;
-- +goose StatementEnd

-- tidy_key deletes the ready rows of a group that has nothing left to claim. They are locked first: a pusher that
-- relied on one of them has committed by then, and the next statement sees its entries; a pusher that comes later
-- cannot lock them and inserts its own.
-- +goose StatementBegin
CREATE FUNCTION penstock.tidy_key(queue integer, key text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    mine tid[];
BEGIN
    mine := ARRAY(SELECT ctid FROM penstock.ready WHERE lock_key = key AND queue_id + 0 = queue FOR UPDATE SKIP LOCKED);
    IF cardinality(mine) > 0 AND NOT EXISTS (
        SELECT FROM penstock.entry
         WHERE queue_id = queue AND lock_key = key AND status = 'pending' AND priority >= 0) THEN
        DELETE FROM penstock.ready WHERE queue_id = queue AND ctid = ANY (mine);
    END IF;
END $$;
-- +goose StatementEnd

-- end_entry ends an entry that take_entry has taken.
-- +goose StatementBegin
CREATE FUNCTION penstock.end_entry(e penstock.entry, how penstock.outcome, why text) RETURNS void
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
-- +goose StatementEnd

-- Pause and disable of a whole queue ---------------------------------------------------------------------------------

-- pause_queue stops claims from a queue; what runs goes on. A pause with an end ends by itself.
-- +goose StatementBegin
CREATE FUNCTION penstock.pause_queue(queue text, reason text DEFAULT '', actor text DEFAULT current_user::text,
                                     until timestamptz DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    IF until <= clock_timestamp() OR NOT isfinite(until) THEN
        RAISE EXCEPTION 'until is not a time to come' USING ERRCODE = 'PS002';
    END IF;
    UPDATE penstock.queue
       SET paused_at = clock_timestamp(), paused_by = coalesce(actor, current_user), paused_reason = coalesce(reason, ''),
           paused_until = until, version = version + 1
     WHERE id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(actor, current_user), 'pause_queue', q.name, reason, jsonb_strip_nulls(jsonb_build_object('until', until)));
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION penstock.resume_queue(queue text, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    UPDATE penstock.queue
       SET paused_at = NULL, paused_by = NULL, paused_reason = NULL, paused_until = NULL, version = version + 1
     WHERE id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'resume_queue', q.name, reason);
END $$;
-- +goose StatementEnd

-- disable_queue takes a queue out of service until somebody enables it. It still accepts entries.
-- +goose StatementBegin
CREATE FUNCTION penstock.disable_queue(queue text, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    UPDATE penstock.queue
       SET disabled_at = clock_timestamp(), disabled_by = coalesce(actor, current_user), disabled_reason = coalesce(reason, ''),
           version = version + 1
     WHERE id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'disable_queue', q.name, reason);
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION penstock.enable_queue(queue text, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    UPDATE penstock.queue
       SET disabled_at = NULL, disabled_by = NULL, disabled_reason = NULL, version = version + 1
     WHERE id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'enable_queue', q.name, reason);
END $$;
-- +goose StatementEnd

-- drain_node asks a node to claim nothing more, finish, hand back the rest and exit. It hears of it at its heartbeat.
-- +goose StatementBegin
CREATE FUNCTION penstock.drain_node(node bigint, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE penstock.node n
       SET draining_at = coalesce(n.draining_at, clock_timestamp()), drain_by = coalesce(actor, current_user),
           drain_reason = coalesce(reason, '')
     WHERE n.id = drain_node.node;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'node % is not registered', node USING ERRCODE = 'PS008', HINT = 'penstock.node_status lists the nodes.';
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'drain_node', 'node ' || node, reason);
END $$;
-- +goose StatementEnd

-- Disable and enable of entries --------------------------------------------------------------------------------------

-- hold_to_switch locks what disabling or enabling an entry must exclude, or answers false and holds nothing: busy just
-- now, try again.
--   the settler  It locks the lock record first and then puts back into line what it sees in later statements. With the
--                record FOR KEY SHARE, it either has committed or will see our change.
--   the claim    We have the ready row of a solo entry, or one snapshot shows neither ready row nor lock; we have the
--                key of a group. An entry that was claimed and settled before we commit would be missed by its settler,
--                whose DELETE meets a row that changed, and would run again; and a ready row that enabling wrote could
--                outlive the claim, to start the entry once more for a claim with an older snapshot.
-- +goose StatementBegin
CREATE FUNCTION penstock.hold_to_switch(queue integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e      penstock.entry;
    locked boolean := false; -- there is a lock record, and we hold it
    free   boolean := true;
BEGIN
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted;
    IF EXISTS (SELECT FROM penstock.lock WHERE queue_id = queue AND lock_key = coalesce(e.lock_key, '#' || wanted)) THEN
        PERFORM FROM penstock.lock WHERE queue_id = queue AND lock_key = coalesce(e.lock_key, '#' || wanted) FOR KEY SHARE SKIP LOCKED;
        locked := FOUND;
        free := FOUND;
    ELSIF e.lock_key IS NOT NULL THEN
        free := penstock.hold_key(queue, e.lock_key);
    END IF;
    IF free THEN
        SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted FOR NO KEY UPDATE SKIP LOCKED;
        free := FOUND OR NOT EXISTS (SELECT FROM penstock.entry WHERE queue_id = queue AND id = wanted);
    END IF;
    IF free AND NOT locked THEN
        PERFORM FROM penstock.ready r
          WHERE r.queue_id = queue AND r.priority = coalesce(e.enabled_priority, e.priority) AND r.flow = e.flow
            AND r.pos = coalesce(e.pos, wanted) AND r.entry_id = wanted
            FOR UPDATE SKIP LOCKED;
        free := FOUND OR (SELECT NOT penstock.in_line(e) AND NOT EXISTS (
            SELECT FROM penstock.lock WHERE queue_id = queue AND lock_key = coalesce(e.lock_key, '#' || wanted)));
    END IF;
    IF NOT free THEN
        RAISE SQLSTATE 'PS900';
    END IF;
    RETURN true;
EXCEPTION WHEN SQLSTATE 'PS900' THEN
    RETURN false; -- and what was locked is free again: a settler must not wait while we try again
END $$;
-- +goose StatementEnd

-- disable_one takes an entry out of line: priority -1, no ready row. One that runs ends its run. True: it was disabled now; false: it was before, or is gone; null: busy, try again.
-- +goose StatementBegin
CREATE FUNCTION penstock.disable_one(queue integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e penstock.entry;
BEGIN
    IF NOT penstock.hold_to_switch(queue, wanted) THEN
        RETURN NULL;
    END IF;
    UPDATE penstock.entry SET priority = -1, enabled_priority = priority
     WHERE queue_id = queue AND id = wanted AND priority >= 0
    RETURNING * INTO e;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF e.lock_key IS NOT NULL THEN
        PERFORM penstock.tidy_key(queue, e.lock_key);
    ELSE
        DELETE FROM penstock.ready
         WHERE queue_id = queue AND ctid = ANY (ARRAY(
               SELECT r.ctid FROM penstock.ready r
                WHERE r.queue_id = queue AND r.priority = e.enabled_priority AND r.flow = e.flow
                  AND r.pos = coalesce(e.pos, wanted) AND r.entry_id = wanted
                  FOR UPDATE SKIP LOCKED));
    END IF;
    RETURN true;
END $$;
-- +goose StatementEnd

-- enable_one puts a disabled entry back into line where it stood. If it runs, the settler does that.
-- A ready row that is there already is written anew, not left alone: a sweep that found it dead passes by the new version.
-- +goose StatementBegin
CREATE FUNCTION penstock.enable_one(queue integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e penstock.entry;
BEGIN
    IF NOT penstock.hold_to_switch(queue, wanted) THEN
        RETURN NULL;
    END IF;
    UPDATE penstock.entry SET priority = enabled_priority, enabled_priority = NULL
     WHERE queue_id = queue AND id = wanted AND priority < 0
    RETURNING * INTO e;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF e.status = 'pending' AND NOT penstock.runs(e) THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id, lock_key)
        VALUES (queue, e.priority, e.flow, CASE WHEN e.lock_key IS NULL THEN coalesce(e.pos, e.id) ELSE e.id END,
                CASE WHEN e.lock_key IS NULL THEN e.id END, e.lock_key)
        ON CONFLICT (queue_id, priority, flow, pos) DO UPDATE SET entry_id = excluded.entry_id, lock_key = excluded.lock_key;
    END IF;
    RETURN true;
END $$;
-- +goose StatementEnd

-- switch_entry disables or enables one entry, trying again for two seconds while somebody else has it.
-- +goose StatementBegin
CREATE FUNCTION penstock.switch_entry(wanted bigint, verb text, reason text, actor text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    queue   integer := penstock.living_entry(wanted);
    changed boolean;
BEGIN
    PERFORM penstock.need_read_committed();
    FOR i IN 1 .. 200 LOOP
        changed := CASE verb WHEN 'disable_entry' THEN penstock.disable_one(queue, wanted) ELSE penstock.enable_one(queue, wanted) END;
        EXIT WHEN changed IS NOT NULL;
        PERFORM pg_sleep(0.01);
    END LOOP;
    IF changed IS NULL THEN
        RAISE EXCEPTION 'entry % is held by another transaction', wanted USING ERRCODE = 'PS006', HINT = 'Try again.';
    ELSIF changed THEN
        INSERT INTO penstock.audit (actor, verb, object, reason)
        VALUES (coalesce(switch_entry.actor, current_user), switch_entry.verb, 'entry ' || wanted, switch_entry.reason);
    ELSE
        PERFORM penstock.living_entry(wanted); -- raises if it ended meanwhile
    END IF;
END $$;
-- +goose StatementEnd

-- disable_entry and enable_entry do nothing to an entry that is so already. They leave the queue's version alone:
-- nodes remember nothing about single entries.
-- +goose StatementBegin
CREATE FUNCTION penstock.disable_entry(id bigint, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE sql AS $$ SELECT penstock.switch_entry($1, 'disable_entry', $2, $3) $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION penstock.enable_entry(id bigint, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE sql AS $$ SELECT penstock.switch_entry($1, 'enable_entry', $2, $3) $$;
-- +goose StatementEnd

-- Cancel and expire --------------------------------------------------------------------------------------------------

-- cancel_one ends an entry that does not run ('cancelled'), asks for the end of one that does or that somebody else has
-- just now ('requested'), and answers null for one that is gone.
-- +goose StatementBegin
CREATE FUNCTION penstock.cancel_one(queue integer, wanted bigint, why text, who text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    e penstock.entry := penstock.take_entry(queue, wanted);
BEGIN
    IF e.id IS NOT NULL THEN
        PERFORM penstock.end_entry(e, 'cancelled', why);
        RETURN 'cancelled';
    END IF;
    INSERT INTO penstock.cancel_request (queue_id, entry_id, actor, reason)
    VALUES (queue, wanted, coalesce(who, current_user), coalesce(why, ''))
    ON CONFLICT DO NOTHING;
    IF NOT EXISTS (SELECT FROM penstock.entry WHERE queue_id = queue AND id = wanted) THEN
        DELETE FROM penstock.cancel_request WHERE queue_id = queue AND entry_id = wanted;
        RETURN NULL;
    END IF;
    RETURN 'requested';
END $$;
-- +goose StatementEnd

-- cancel_entry answers 'cancelled' if the entry has ended, and 'requested' if a node runs it or is about to: that node
-- hears of it at its heartbeat, and if the entry comes back into line instead, settle_cancel_requests ends it.
-- +goose StatementBegin
CREATE FUNCTION penstock.cancel_entry(id bigint, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    answer text;
BEGIN
    PERFORM penstock.need_read_committed();
    answer := penstock.cancel_one(penstock.living_entry(cancel_entry.id), cancel_entry.id, cancel_entry.reason, cancel_entry.actor);
    IF answer IS NULL THEN
        PERFORM penstock.living_entry(cancel_entry.id); -- raises: it ended while we looked
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(cancel_entry.actor, current_user), 'cancel_entry', 'entry ' || cancel_entry.id, cancel_entry.reason,
            jsonb_build_object('answer', answer));
    RETURN answer;
END $$;
-- +goose StatementEnd

-- settle_cancel_requests ends what was asked to end while it ran and has come back into line since (a retry, a release,
-- a dead node), and forgets requests whose entry is gone. It returns how many entries it ended.
-- +goose StatementBegin
CREATE FUNCTION penstock.settle_cancel_requests(queue integer, most integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    c     record;
    e     penstock.entry;
    ended integer := 0;
BEGIN
    FOR c IN SELECT r.entry_id, r.reason FROM penstock.cancel_request r WHERE r.queue_id = queue
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
-- +goose StatementEnd

-- overdue lists entries of one queue whose start_by or finish_by has passed and that no lock covers. Two ranges of two
-- partial indexes, however long the backlog; the entries that run stand in the way, but they are as few as the locks.
-- +goose StatementBegin
CREATE FUNCTION penstock.overdue(queue_name text, most integer) RETURNS TABLE (id bigint, why text)
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
-- +goose StatementEnd

-- expire_entries ends up to most entries of a queue whose time has passed and that nobody runs, and returns how many.
-- +goose StatementBegin
CREATE FUNCTION penstock.expire_entries(queue_id integer, most integer) RETURNS integer
LANGUAGE plpgsql
-- Walk the index of deadlines up to the bound: a bitmap would fetch every late entry first, and sort them.
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
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
-- +goose StatementEnd

-- expired_locks lists entries that still run more than grace after their finish_by: their node should have ended them.
-- It begins at the lock records, which are as few as the work in flight.
-- +goose StatementBegin
CREATE FUNCTION penstock.expired_locks(grace interval DEFAULT '30 seconds')
RETURNS TABLE (queue_id integer, lock_key text, token bigint, node_id bigint, entry_id bigint, finish_by timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT l.queue_id, l.lock_key, l.token, l.node_id, e.id, e.finish_by
      FROM penstock.lock l
      JOIN penstock.entry e ON e.queue_id = l.queue_id AND e.id = l.last_entry_id
     WHERE left(l.lock_key, 1) = '#' AND e.status = 'pending' AND e.finish_by < clock_timestamp() - grace
    UNION ALL
    SELECT l.queue_id, l.lock_key, l.token, l.node_id, e.id, e.finish_by
      FROM penstock.lock l
      JOIN penstock.entry e ON e.queue_id = l.queue_id AND e.lock_key = l.lock_key AND e.id <= l.last_entry_id
     WHERE left(l.lock_key, 1) <> '#' AND e.status = 'pending' AND e.priority >= 0
       AND e.finish_by < clock_timestamp() - grace
$$;
-- +goose StatementEnd

-- Failures -----------------------------------------------------------------------------------------------------------

-- is_off says whether the entries of a name or lock key are disabled.
-- +goose StatementBegin
CREATE FUNCTION penstock.is_off(queue integer, name text, lock_key text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.disabled d
                    WHERE d.queue_id = $1 AND ((d.scope = 'name' AND d.value = $2) OR (d.scope = 'lock_key' AND d.value = $3)))
$$;
-- +goose StatementEnd

-- return_failure puts a failed entry back: the same id and history, no attempts spent, behind everybody in its lane (in
-- its group, its id still says its place). Deadlines that have passed are dropped, or it would expire at once.
-- False: there is no such failure.
-- +goose StatementBegin
CREATE FUNCTION penstock.return_failure(queue integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    f     penstock.failure;
    place bigint;
    off   boolean;
BEGIN
    DELETE FROM penstock.failure WHERE queue_id = queue AND entry_id = wanted RETURNING * INTO f;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM penstock.cancel_request WHERE queue_id = queue AND entry_id = wanted;
    place := nextval('penstock.entry_id_seq');
    off := penstock.is_off(queue, f.name, f.lock_key);
    INSERT INTO penstock.entry (id, queue_id, created_at, status, start_by, finish_by, cost, priority, enabled_priority, pos,
                                flow, lock_key, name, trace, callback, history, payload)
    VALUES (wanted, queue, f.created_at, 'pending', CASE WHEN f.start_by > clock_timestamp() THEN f.start_by END,
            CASE WHEN f.finish_by > clock_timestamp() THEN f.finish_by END, f.cost,
            CASE WHEN off THEN -1 ELSE f.priority END, CASE WHEN off THEN f.priority END, place,
            f.flow, f.lock_key, f.name, f.trace, f.callback, f.history, f.payload);
    IF NOT off THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id, lock_key)
        VALUES (queue, f.priority, f.flow, place, CASE WHEN f.lock_key IS NULL THEN wanted END, f.lock_key);
    END IF;
    PERFORM penstock.count(d.queue_id, 'accepted', 1) FROM penstock.depth d WHERE d.queue_id = queue;
    RETURN true;
END $$;
-- +goose StatementEnd

-- failed_entry returns the queue of a failure, and raises PS007 or PS006 where there is none.
-- +goose StatementBegin
CREATE FUNCTION penstock.failed_entry(wanted bigint) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_at record;
BEGIN
    SELECT * INTO found_at FROM penstock.find_entry(wanted);
    IF found_at.queue_id IS NULL THEN
        PERFORM penstock.living_entry(wanted); -- raises PS007
    ELSIF found_at.ended IS DISTINCT FROM 'failed' THEN
        RAISE EXCEPTION 'entry % of queue "%" has not failed: %', wanted, found_at.queue_name, coalesce(found_at.ended::text, 'it has not ended')
            USING ERRCODE = 'PS006', DETAIL = coalesce(found_at.ended::text, '');
    END IF;
    RETURN found_at.queue_id;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION penstock.retry_failure(entry_id bigint, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT penstock.return_failure(penstock.failed_entry(retry_failure.entry_id), retry_failure.entry_id) THEN
        PERFORM penstock.failed_entry(retry_failure.entry_id); -- raises: somebody was faster
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(retry_failure.actor, current_user), 'retry_failure', 'entry ' || retry_failure.entry_id, retry_failure.reason);
END $$;
-- +goose StatementEnd

-- discard_failure forgets a failure before its retention does. Only the audit remembers the error then.
-- +goose StatementBegin
CREATE FUNCTION penstock.discard_failure(entry_id bigint, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    queue integer := penstock.failed_entry(discard_failure.entry_id);
    f     penstock.failure;
BEGIN
    DELETE FROM penstock.failure x WHERE x.queue_id = queue AND x.entry_id = discard_failure.entry_id RETURNING * INTO f;
    IF NOT FOUND THEN
        PERFORM penstock.failed_entry(discard_failure.entry_id); -- raises: somebody was faster
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(discard_failure.actor, current_user), 'discard_failure', 'entry ' || discard_failure.entry_id, discard_failure.reason,
            jsonb_build_object('class', f.class, 'fingerprint', f.fingerprint, 'failed_at', f.failed_at));
END $$;
-- +goose StatementEnd

-- Bulk operations ----------------------------------------------------------------------------------------------------
-- Durable: a row that says how far it has come. Throttled: a step changes no more than per_second allows since the step
-- before. Cancellable between steps. A step looks at 10,000 entries and changes 500 at most, so that it holds what it
-- locks for some tens of milliseconds whatever the filter leaves out.

ALTER TABLE penstock.operation DROP CONSTRAINT operation_verb_check;
ALTER TABLE penstock.operation ADD CONSTRAINT operation_verb_check
    CHECK (verb IN ('retry_failures', 'discard_failures', 'cancel', 'disable', 'enable', 'delete'));
CREATE INDEX operation_running ON penstock.operation (id) WHERE status = 'running';

-- operation_source is what a verb chooses from, with the columns that a filter may name.
-- +goose StatementBegin
CREATE FUNCTION penstock.operation_source(q penstock.queue, verb text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN verb IN ('retry_failures', 'discard_failures')
           THEN format('(SELECT entry_id AS id, failed_at AS since, name, lock_key, flow, class, fingerprint
                           FROM penstock.failure WHERE queue_id = %s) s', q.id)
           ELSE format('(SELECT id, created_at AS since, name, lock_key, flow, priority FROM penstock.%I WHERE queue_id = %s) s', 'entry_' || q.name, q.id) END
$$;
-- +goose StatementEnd

-- operation_filter turns {"name": "mail", "older_than": "2 days"} into a condition. Values are quoted; a key that does
-- not exist is refused, so that a misspelt filter does not match everything. {"all": true} does.
-- +goose StatementBegin
CREATE FUNCTION penstock.operation_filter(q penstock.queue, verb text, filter jsonb) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    of_failures boolean := verb IN ('retry_failures', 'discard_failures');
    k           text;
    v           text;
    conditions  text[] := CASE verb WHEN 'disable' THEN ARRAY['priority >= 0']
                                    WHEN 'enable' THEN ARRAY[format('priority < 0 AND NOT penstock.is_off(%s, name, lock_key)', q.id)]
                                    ELSE ARRAY['true'] END;
BEGIN
    IF verb NOT IN ('retry_failures', 'discard_failures', 'cancel', 'disable', 'enable', 'delete') OR verb IS NULL THEN
        RAISE EXCEPTION 'operation "%" does not exist', verb USING ERRCODE = 'PS002',
            HINT = 'The operations are retry_failures, discard_failures, cancel, disable, enable and delete.';
    ELSIF filter IS NULL OR jsonb_typeof(filter) <> 'object' OR filter = '{}' THEN
        RAISE EXCEPTION 'filter is empty' USING ERRCODE = 'PS002', HINT = 'Write {"all": true} to mean everything in the queue.';
    END IF;
    FOR k, v IN SELECT * FROM jsonb_each_text(filter) LOOP
        IF v IS NULL OR k NOT IN ('all', 'name', 'lock_key', 'flow', 'ids', 'older_than', 'before', 'class', 'fingerprint')
           OR (k IN ('class', 'fingerprint') AND NOT of_failures) THEN
            RAISE EXCEPTION 'filter "%" does not exist for operation %', k, verb USING ERRCODE = 'PS002',
                HINT = 'The filters are all, name, lock_key, flow, ids, older_than, before, and for failures class and fingerprint.';
        END IF;
        conditions := conditions || CASE k
            WHEN 'all' THEN format('%L::boolean', v)
            WHEN 'ids' THEN format('id = ANY (%L::bigint[])', translate(v, '[]', '{}'))
            WHEN 'older_than' THEN format('since < clock_timestamp() - %L::interval', v)
            WHEN 'before' THEN format('since < %L::timestamptz', v)
            ELSE format('%I = %L', k, v) END;
    END LOOP;
    RETURN array_to_string(conditions, ' AND ');
END $$;
-- +goose StatementEnd

-- count_matching is the preview: how many an operation would find now. It reads the queue's whole table.
-- +goose StatementBegin
CREATE FUNCTION penstock.count_matching(queue text, verb text, filter jsonb) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
    n bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM %s WHERE %s', penstock.operation_source(q, verb), penstock.operation_filter(q, verb, filter)) INTO n;
    RETURN n;
EXCEPTION WHEN invalid_text_representation OR invalid_datetime_format OR datetime_field_overflow OR interval_field_overflow
            OR numeric_value_out_of_range THEN
    RAISE EXCEPTION 'filter is not valid: %', SQLERRM USING ERRCODE = 'PS002';
END $$;
-- +goose StatementEnd

-- start_operation begins an operation on what is in the queue now, and returns its id. The elected leader steps it.
-- +goose StatementBegin
CREATE FUNCTION penstock.start_operation(queue text, verb text, filter jsonb, reason text DEFAULT '',
                                         actor text DEFAULT current_user::text, per_second integer DEFAULT 1000) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue);
    n    bigint := penstock.count_matching(queue, verb, filter);
    made bigint;
BEGIN
    IF per_second < 1 OR per_second IS NULL THEN
        RAISE EXCEPTION 'per_second is not at least 1' USING ERRCODE = 'PS002';
    END IF;
    INSERT INTO penstock.operation (queue_id, verb, filter, per_second, actor, reason, matched, until_id)
    VALUES (q.id, start_operation.verb, start_operation.filter, start_operation.per_second, coalesce(start_operation.actor, current_user),
            coalesce(start_operation.reason, ''), n, coalesce(pg_sequence_last_value('penstock.entry_id_seq'), 0))
    RETURNING id INTO made;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(start_operation.actor, current_user), 'start_operation', q.name, start_operation.reason,
            jsonb_build_object('operation', made, 'verb', start_operation.verb, 'filter', start_operation.filter, 'matched', n));
    RETURN made;
END $$;
-- +goose StatementEnd

-- cancel_operation ends an operation; what it has changed stays changed.
-- +goose StatementBegin
CREATE FUNCTION penstock.cancel_operation(id bigint, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    was text;
BEGIN
    SELECT o.status INTO was FROM penstock.operation o WHERE o.id = cancel_operation.id FOR UPDATE;
    IF was IS NULL THEN
        RAISE EXCEPTION 'operation % does not exist', cancel_operation.id USING ERRCODE = 'PS008';
    ELSIF was <> 'running' THEN
        RAISE EXCEPTION 'operation % has ended: %', cancel_operation.id, was USING ERRCODE = 'PS006';
    END IF;
    UPDATE penstock.operation o SET status = 'cancelled', ended_at = clock_timestamp() WHERE o.id = cancel_operation.id;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(cancel_operation.actor, current_user), 'cancel_operation', 'operation ' || cancel_operation.id, cancel_operation.reason);
END $$;
-- +goose StatementEnd

-- apply_operation does the verb of an operation to one entry. True: changed; false: nothing to do; null: busy, try again.
-- +goose StatementBegin
CREATE FUNCTION penstock.apply_operation(o penstock.operation, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e penstock.entry;
BEGIN
    CASE o.verb
        WHEN 'retry_failures' THEN
            RETURN penstock.return_failure(o.queue_id, wanted);
        WHEN 'discard_failures' THEN
            DELETE FROM penstock.failure WHERE queue_id = o.queue_id AND entry_id = wanted;
            RETURN FOUND;
        WHEN 'cancel' THEN
            RETURN penstock.cancel_one(o.queue_id, wanted, o.reason, o.actor) IS NOT NULL;
        WHEN 'delete' THEN -- cancels what does not run and leaves alone what does
            e := penstock.take_entry(o.queue_id, wanted);
            IF e.id IS NOT NULL THEN
                PERFORM penstock.end_entry(e, 'cancelled', o.reason);
            END IF;
            RETURN e.id IS NOT NULL;
        WHEN 'disable' THEN
            RETURN penstock.disable_one(o.queue_id, wanted);
        WHEN 'enable' THEN
            RETURN penstock.enable_one(o.queue_id, wanted);
    END CASE;
END $$;
-- +goose StatementEnd

-- step_operation does one bounded batch and remembers how far it came, in one transaction: after a crash the operation
-- goes on behind what it has changed. changed counts, wait says how long the throttle holds it (0: step again), ended
-- that there is nothing left.
-- +goose StatementBegin
CREATE FUNCTION penstock.step_operation(id bigint, OUT changed integer, OUT wait interval, OUT ended boolean)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    o     penstock.operation;
    q     penstock.queue;
    quota integer;
    seen  record;
    one   bigint;
    did   boolean;
BEGIN
    PERFORM penstock.need_read_committed();
    changed := 0; wait := '0'; ended := false;
    SELECT * INTO o FROM penstock.operation x WHERE x.id = step_operation.id AND x.status = 'running' FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        ended := true; -- or somebody else steps it
        RETURN;
    END IF;
    quota := least(500, floor(o.per_second * extract(epoch FROM clock_timestamp() - coalesce(o.stepped_at, o.created_at - interval '1 second'))));
    IF quota < 1 THEN
        wait := greatest('1 millisecond', coalesce(o.stepped_at, o.created_at) + interval '1 second' / o.per_second - clock_timestamp());
        RETURN;
    END IF;
    SELECT * INTO q FROM penstock.queue x WHERE x.id = o.queue_id;
    EXECUTE format('SELECT coalesce(array_agg(id ORDER BY id) FILTER (WHERE hit), ''{}'') AS ids, max(id) AS last, count(*) AS n
                      FROM (SELECT id, coalesce(%s, false) AS hit FROM %s WHERE id > $1 AND id <= $2 ORDER BY id LIMIT 10000) w',
                   penstock.operation_filter(q, o.verb, o.filter), penstock.operation_source(q, o.verb))
       INTO seen USING o.last_id, o.until_id;
    FOREACH one IN ARRAY (seen.ids)[1:quota] LOOP
        did := penstock.apply_operation(o, one);
        EXIT WHEN did IS NULL;
        o.last_id := one;
        changed := changed + did::integer;
    END LOOP;
    IF did IS NULL AND cardinality(seen.ids) > 0 THEN
        wait := '10 milliseconds'; -- the next step begins with the busy one
    ELSIF cardinality(seen.ids) <= quota THEN
        o.last_id := coalesce(seen.last, o.until_id);
        ended := seen.n < 10000;
    END IF;
    UPDATE penstock.operation x
       SET last_id = o.last_id, changed = x.changed + step_operation.changed, stepped_at = clock_timestamp(),
           status = CASE WHEN ended THEN 'done' ELSE 'running' END, ended_at = CASE WHEN ended THEN clock_timestamp() END
     WHERE x.id = o.id;
END $$;
-- +goose StatementEnd

-- disable_entries disables every entry of a name or lock key (scope), those to come as well: push_many reads
-- penstock.disabled. What is there already is disabled by an operation, whose id it returns; the first 500 at once.
-- A push under way while this is called may still have come in enabled: the operation sees it if it commits before the
-- operation ends, otherwise disable again.
-- +goose StatementBegin
CREATE FUNCTION penstock.disable_entries(queue text, scope text, value text, reason text DEFAULT '',
                                         actor text DEFAULT current_user::text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    IF scope NOT IN ('name', 'lock_key') OR coalesce(value, '') = '' THEN
        RAISE EXCEPTION 'scope is not one of name, lock_key, or value is empty' USING ERRCODE = 'PS002';
    END IF;
    INSERT INTO penstock.disabled AS d (queue_id, scope, value, actor, reason)
    VALUES (q.id, disable_entries.scope, disable_entries.value, coalesce(disable_entries.actor, current_user), coalesce(disable_entries.reason, ''))
    ON CONFLICT ON CONSTRAINT disabled_pkey DO UPDATE SET actor = excluded.actor, reason = excluded.reason;
    RETURN penstock.switch_entries(q, 'disable', disable_entries.scope, disable_entries.value, disable_entries.reason, disable_entries.actor);
END $$;
-- +goose StatementEnd

-- enable_entries ends disable_entries. Entries that are disabled by another name or key stay so; those that were
-- disabled one by one are enabled as well.
-- +goose StatementBegin
CREATE FUNCTION penstock.enable_entries(queue text, scope text, value text, reason text DEFAULT '',
                                        actor text DEFAULT current_user::text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    DELETE FROM penstock.disabled d WHERE d.queue_id = q.id AND d.scope = enable_entries.scope AND d.value = enable_entries.value;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'entries with % "%" are not disabled', scope, value USING ERRCODE = 'PS006', HINT = 'penstock.disabled lists what is.';
    END IF;
    RETURN penstock.switch_entries(q, 'enable', enable_entries.scope, enable_entries.value, enable_entries.reason, enable_entries.actor);
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION penstock.switch_entries(q penstock.queue, verb text, scope text, value text, reason text, actor text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    operation bigint := penstock.start_operation(q.name, verb, jsonb_build_object(scope, value), reason, actor, 5000);
BEGIN
    UPDATE penstock.queue SET version = version + 1 WHERE id = q.id;
    PERFORM penstock.step_operation(operation);
    RETURN operation;
END $$;
-- +goose StatementEnd

-- Compaction ---------------------------------------------------------------------------------------------------------
-- Entries of a group that nobody was handed become one. The key's advisory lock keeps claims away; a lock record that
-- stands by then has handed out the entries up to last_entry_id and no others, and is never changed. The oldest entry
-- of the run stays with its id, its place and the merged payload, so that no ready row need be touched: the key has
-- something to claim before and after. Producers take no part in it: what they push meanwhile is merged next time.
-- There is no merging inside a push: it would keep the key from being claimed until the pusher's transaction ends.

-- compactable lists the oldest run of two or more entries of a key that may be merged, and locks it: pending, enabled,
-- not handed out, without a callback (which is owed for each entry alone), together no larger than the queue's payloads
-- may be. Nothing if a claim is under way or somebody else has one of the entries.
-- +goose StatementBegin
CREATE FUNCTION penstock.compactable(q penstock.queue, key text, most integer DEFAULT 1000) RETURNS SETOF penstock.entry
LANGUAGE plpgsql AS $$
DECLARE
    e     penstock.entry;
    run   bigint[] := '{}';
    bytes bigint := 0;
BEGIN
    PERFORM penstock.need_read_committed();
    IF NOT penstock.hold_key(q.id, key) THEN
        RETURN;
    END IF;
    FOR e IN SELECT * FROM penstock.entry x
              WHERE x.queue_id = q.id AND x.lock_key = key AND x.status = 'pending' AND x.priority >= 0
                AND x.id > coalesce((SELECT l.last_entry_id FROM penstock.lock l WHERE l.queue_id = q.id AND l.lock_key = key), 0)
              ORDER BY x.id LIMIT most
    LOOP
        bytes := bytes + pg_column_size(e.payload);
        IF e.callback IS NOT NULL OR (bytes > q.payload_limit AND q.merge IN ('object', 'array')) THEN
            EXIT WHEN cardinality(run) > 1;
            run := '{}';
            bytes := pg_column_size(e.payload);
            CONTINUE WHEN e.callback IS NOT NULL;
        END IF;
        run := run || e.id;
    END LOOP;
    -- Lock first, return after: an error in the middle of RETURN QUERY would leave the rows before it in the answer.
    PERFORM FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (run) ORDER BY x.id FOR UPDATE NOWAIT;
    IF cardinality(run) > 1 AND cardinality(run) = (SELECT count(*) FROM penstock.entry x
        WHERE x.queue_id = q.id AND x.id = ANY (run) AND x.status = 'pending' AND x.priority >= 0) THEN
        RETURN QUERY SELECT * FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (run) ORDER BY x.id;
    END IF;
EXCEPTION WHEN lock_not_available THEN
    RETURN; -- disabling or cancelling one of them just now
END $$;
-- +goose StatementEnd

-- replace_merged puts one payload in the place of the entries, which compactable has locked. The oldest stays, with the
-- latest deadline of all (none if one has none); the others are done, merged into it.
-- +goose StatementBegin
CREATE FUNCTION penstock.replace_merged(q penstock.queue, ids bigint[], merged jsonb) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    oldest bigint := (SELECT min(i) FROM unnest(ids) i);
    gone   integer;
BEGIN
    IF merged IS NULL OR pg_column_size(merged) > q.payload_limit THEN
        RAISE EXCEPTION 'payload merged into entry % is missing or larger than % bytes', oldest, q.payload_limit USING ERRCODE = 'PS003';
    END IF;
    UPDATE penstock.entry e
       SET payload = merged, start_by = a.start_by, finish_by = a.finish_by, attempt = a.attempt, crashes = a.crashes, cost = a.cost
      FROM (SELECT CASE WHEN bool_and(x.start_by IS NOT NULL) THEN max(x.start_by) END AS start_by,
                   CASE WHEN bool_and(x.finish_by IS NOT NULL) THEN max(x.finish_by) END AS finish_by,
                   max(x.attempt) AS attempt, max(x.crashes) AS crashes, max(x.cost) AS cost
              FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (ids)) a
     WHERE e.queue_id = q.id AND e.id = oldest;
    WITH gone AS (
        DELETE FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (ids) AND x.id <> oldest
        RETURNING x.id, x.created_at, x.attempt
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
-- +goose StatementEnd

-- merge_payloads merges by the queue's rule: the first, the last, all fields of all objects (later ones win), or one
-- array of all (a payload that is an array adds its elements, so that a merged payload can be merged again).
-- +goose StatementBegin
CREATE FUNCTION penstock.merge_payloads(rule text, payloads jsonb[]) RETURNS jsonb
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
        merged := merged || CASE WHEN rule = 'array' AND jsonb_typeof(p) <> 'array' THEN jsonb_build_array(p) ELSE p END;
    END LOOP;
    RETURN merged;
END $$;
-- +goose StatementEnd

-- compact merges the oldest run of waiting entries of a key by the queue's rule, up to 1,000, and returns how many it
-- replaced: 0 if there is nothing to merge or a claim is under way.
-- +goose StatementBegin
CREATE FUNCTION penstock.compact(queue text, lock_key text) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    q        penstock.queue := penstock.queue_row(queue);
    ids      bigint[];
    payloads jsonb[];
BEGIN
    IF NOT q.mergeable THEN
        RAISE EXCEPTION 'queue "%" is not mergeable', q.name USING ERRCODE = 'PS006',
            HINT = 'Set mergeable, and merge to first, last, object or array, with penstock.alter_queue.';
    END IF;
    SELECT array_agg(c.id ORDER BY c.id), array_agg(c.payload ORDER BY c.id) INTO ids, payloads
      FROM penstock.compactable(q, compact.lock_key) c;
    IF ids IS NULL THEN
        RETURN 0;
    END IF;
    RETURN penstock.replace_merged(q, ids, penstock.merge_payloads(q.merge, payloads));
END $$;
-- +goose StatementEnd

-- compact_queue looks at up to most_keys keys of a queue, from behind the key after on, and compacts those with at least
-- min_entries waiting entries. It hops from key to key through the index, and returns the last key it saw, null at
-- the end: call it again from there.
-- +goose StatementBegin
CREATE FUNCTION penstock.compact_queue(queue text, min_entries integer DEFAULT 2, most_keys integer DEFAULT 1000,
                                       INOUT after text DEFAULT '', OUT replaced integer)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue);
    many boolean;
BEGIN
    replaced := 0;
    FOR i IN 1 .. most_keys LOOP
        SELECT min(e.lock_key) INTO after FROM (
            SELECT x.lock_key FROM penstock.entry x
             WHERE x.queue_id = q.id AND x.lock_key > after AND x.status = 'pending' AND x.priority >= 0
             ORDER BY x.lock_key LIMIT 1) e;
        EXIT WHEN after IS NULL;
        SELECT count(*) = min_entries INTO many FROM (
            SELECT FROM penstock.entry x
             WHERE x.queue_id = q.id AND x.lock_key = after AND x.status = 'pending' AND x.priority >= 0 LIMIT min_entries) e;
        IF many THEN
            replaced := replaced + penstock.compact(q.name, after);
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd
