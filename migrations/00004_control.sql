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
    mine := ARRAY(SELECT ctid FROM penstock.ready WHERE queue_id = queue AND lock_key = key FOR UPDATE SKIP LOCKED);
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

-- hold_to_switch locks what disabling or enabling an entry must exclude: the settler of its lock, and whoever changes
-- the entry. A settler locks the record first and then puts back into line what it sees in later statements; with
-- the record FOR KEY SHARE, it either has committed or will see our change. False: busy just now, try again.
-- +goose StatementBegin
CREATE FUNCTION penstock.hold_to_switch(queue integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    key text;
BEGIN
    SELECT coalesce(lock_key, '#' || wanted) INTO key FROM penstock.entry WHERE queue_id = queue AND id = wanted;
    IF EXISTS (SELECT FROM penstock.lock WHERE queue_id = queue AND lock_key = key) THEN
        PERFORM FROM penstock.lock WHERE queue_id = queue AND lock_key = key FOR KEY SHARE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    PERFORM FROM penstock.entry WHERE queue_id = queue AND id = wanted FOR NO KEY UPDATE SKIP LOCKED;
    RETURN FOUND OR NOT EXISTS (SELECT FROM penstock.entry WHERE queue_id = queue AND id = wanted);
END $$;
-- +goose StatementEnd

-- disable_one takes an entry out of line: priority -1, no ready row. One that runs ends its run; one that a claim is
-- just starting is started. True: it was disabled now; false: it was before, or is gone; null: busy, try again.
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

-- enable_one puts a disabled entry back into line where it stood. While its lock record stands, the settler does that.
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
        VALUES (queue, e.priority, e.flow, coalesce(e.pos, e.id), CASE WHEN e.lock_key IS NULL THEN e.id END, e.lock_key)
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
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
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
