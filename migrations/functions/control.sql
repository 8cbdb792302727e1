-- The switches of operators: pauses, disabled queues and entries, draining nodes, weights.

-- paused_until returns whether a pause with this end is still in force; null means until it is
-- resumed. It is inlined.
-- Locks: none.
-- Callers: step_batch, node_paused, queue_stops, pause_reasons, queue_heads, the status
-- views; pkg/cron, pkg/doctor, pkg/operator.
CREATE OR REPLACE FUNCTION penstock.paused_until(
    until  timestamptz,
    moment timestamptz DEFAULT clock_timestamp()
) RETURNS boolean
LANGUAGE sql AS $$
    SELECT coalesce($1 > $2, true)
$$;

-- queue_stops returns what keeps all entries of a queue from being claimed by order of an operator, a row each: that
-- the queue is disabled (queue_disabled), or a pause in force of the queue (paused), its application
-- (application_paused) or its model (model_paused). A queue is open if there is no row: NOT EXISTS (SELECT FROM
-- penstock.queue_stops(q)). It is inlined. Nodes know the same from Queue.Paused of pkg/invalidation.
-- Locks: none.
-- Callers: queue_reasons, queue_heads, measure, scale_startable, scale_bounded; pkg/doctor.
CREATE OR REPLACE FUNCTION penstock.queue_stops(q penstock.queue)
RETURNS TABLE (code text, stopped_by text, reason text, since timestamptz, until timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT 'paused', q.paused_by, q.paused_reason, q.paused_at, q.paused_until
     WHERE q.paused_at IS NOT NULL AND penstock.paused_until(q.paused_until)
    UNION ALL
    SELECT 'queue_disabled', q.disabled_by, q.disabled_reason, q.disabled_at, NULL
     WHERE q.disabled_at IS NOT NULL
    UNION ALL
    SELECT p.scope || '_paused', p.actor, p.reason, p.created_at, p.until
      FROM penstock.pause p
     WHERE ((p.scope = 'application' AND p.value = q.application) OR (p.scope = 'model' AND p.value = q.model))
       AND penstock.paused_until(p.until)
$$;

-- json_time returns a time as JSON can have it, in each zone: one behind year 9999, or before year 1, is told as one of
-- the last day but one of these years.
-- Callers: pkg/operator.
CREATE OR REPLACE FUNCTION penstock.json_time(t timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN t >= '9999-12-31 UTC' THEN '9999-12-30 UTC'
                WHEN t < '0001-01-02 UTC' THEN '0001-01-02 UTC' ELSE t END
$$;

-- check_until raises an error for an end of a pause or an override that is past already, or that JSON cannot have in
-- each zone (json_time). Null is no end.
-- Callers: pause, pause_queue, pause_cron_job, pause_batch, set_scale_override.
-- SQLSTATE: PS002 until is not valid.
CREATE OR REPLACE FUNCTION penstock.check_until(until timestamptz) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF until <= clock_timestamp() OR until >= '9999-12-31 UTC' THEN
        RAISE EXCEPTION 'until is not a time to come before 9999-12-31' USING ERRCODE = 'PS002',
            HINT = 'A pause without until lasts until it is ended; an override has an end.';
    END IF;
END $$;

-- replaced_pause returns a pause in force that another one is about to replace, for the answer and for the audit:
-- {"actor": ..., "reason": ..., "since": ..., "until": ...}, without until if it has no end. Null: there is none.
-- Locks: none; the caller has the row of the pause.
-- Callers: pause, pause_queue, pause_cron_job, pause_batch.
CREATE OR REPLACE FUNCTION penstock.replaced_pause(since timestamptz, actor text, reason text, until timestamptz)
RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object('actor', $2, 'reason', $3, 'since', penstock.json_time($1),
                                                'until', penstock.json_time($4)))
     WHERE $1 IS NOT NULL AND penstock.paused_until($4)
$$;

-- audit_pause adds a pause to the audit, with its end and with the pause that it replaced, as far as there are any.
-- Locks: none but those of an insert.
-- Callers: pause, pause_queue, pause_cron_job, pause_batch.
CREATE OR REPLACE FUNCTION penstock.audit_pause(actor text, verb text, object text, reason text, until timestamptz,
                                                replaced jsonb, queue text DEFAULT NULL) RETURNS void
LANGUAGE sql AS $$
    SELECT penstock.audit_log($1, $2, $3, $4,
                              jsonb_strip_nulls(jsonb_build_object('queue', $7, 'until', $5, 'replaced', $6)))
$$;

-- Pause and disable of a whole queue ---------------------------------------------------------------------------------

-- pause_queue stops claims from a queue; running entries go on. A pause with an end ends by itself. It replaces one
-- that is in force, and returns that (replaced_pause).
-- Locks: the row of the queue.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.pause_queue(queue text, reason text DEFAULT '', actor text DEFAULT NULL,
                                     until timestamptz DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    q        penstock.queue;
    replaced jsonb;
BEGIN
    PERFORM penstock.check_until(until);
    PERFORM FROM penstock.queue x WHERE x.name = queue FOR NO KEY UPDATE;
    q := penstock.queue_row(queue);
    replaced := penstock.replaced_pause(q.paused_at, q.paused_by, q.paused_reason, q.paused_until);
    UPDATE penstock.queue
       SET paused_at = clock_timestamp(), paused_by = penstock.actor_name(actor), paused_reason = coalesce(reason, ''),
           paused_until = until, version = version + 1
     WHERE id = q.id;
    PERFORM penstock.audit_pause(actor, 'pause_queue', q.name, reason, until, replaced);
    RETURN replaced;
END $$;

-- resume_queue ends the pause of a queue.
-- Locks: the row of the queue.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue.
CREATE OR REPLACE FUNCTION penstock.resume_queue(
    queue  text,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    UPDATE penstock.queue
       SET paused_at = NULL, paused_by = NULL, paused_reason = NULL, paused_until = NULL, version = version + 1
     WHERE id = q.id;
    PERFORM penstock.audit_log(actor, 'resume_queue', q.name, reason);
END $$;

-- disable_queue takes a queue out of service until enable_queue. It still accepts entries.
-- Locks: the row of the queue.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue.
CREATE OR REPLACE FUNCTION penstock.disable_queue(
    queue  text,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    UPDATE penstock.queue
       SET disabled_at = clock_timestamp(), disabled_by = penstock.actor_name(actor),
           disabled_reason = coalesce(reason, ''), version = version + 1
     WHERE id = q.id;
    PERFORM penstock.audit_log(actor, 'disable_queue', q.name, reason);
END $$;

-- enable_queue puts a queue back into service.
-- Locks: the row of the queue.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue.
CREATE OR REPLACE FUNCTION penstock.enable_queue(
    queue  text,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    UPDATE penstock.queue
       SET disabled_at = NULL, disabled_by = NULL, disabled_reason = NULL, version = version + 1
     WHERE id = q.id;
    PERFORM penstock.audit_log(actor, 'enable_queue', q.name, reason);
END $$;

-- drain_node requests that a node claim nothing more, finish, release the rest and exit. The node
-- reads the request with its heartbeat.
-- Locks: the row of the node.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS008 no such node.
CREATE OR REPLACE FUNCTION penstock.drain_node(
    node   bigint,
    reason text   DEFAULT '',
    actor  text   DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE penstock.node n
       SET draining_at = coalesce(n.draining_at, clock_timestamp()), drain_by = penstock.actor_name(actor),
           drain_reason = coalesce(reason, '')
     WHERE n.id = drain_node.node;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'node % is not registered', node
            USING ERRCODE = 'PS008', HINT = 'The list of nodes has their ids (node_status).';
    END IF;
    PERFORM penstock.audit_log(actor, 'drain_node', 'node ' || node, reason);
END $$;

-- Disable and enable of entries --------------------------------------------------------------------------------------

-- lock_to_switch takes the locks that disabling or enabling an entry needs, or returns false with
-- none of them kept: the entry is busy, try again.
--   settler  It locks the lock record first and requeues the entries that its later statements see. With the
--            record FOR KEY SHARE, it either has committed or will see our change.
--   claim    We have the ready row of a solo entry, or one snapshot shows neither ready row nor lock; we have the
--            key of a group. An entry that was claimed and settled before we commit would be missed by its settler,
--            whose DELETE meets a row that changed, and would run again; and a ready row that enabling wrote could
--            outlive the claim, to start the entry once more for a claim with an older snapshot.
-- Locks: the lock record (FOR KEY SHARE SKIP LOCKED), or, for an entry of a group without one, the
-- advisory lock of the key (try); the entry (FOR NO KEY UPDATE SKIP LOCKED); its ready row (FOR
-- UPDATE SKIP LOCKED). It waits for none.
-- Callers: disable_one, enable_one.
CREATE OR REPLACE FUNCTION penstock.lock_to_switch(queue integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e      penstock.entry;
    locked boolean := false; -- there is a lock record, and we hold it
    free   boolean := true;
BEGIN
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted;
    IF EXISTS (SELECT FROM penstock.lock
                WHERE queue_id = queue AND lock_key = penstock.record_key(e.lock_key, wanted)) THEN
        PERFORM FROM penstock.lock
          WHERE queue_id = queue AND lock_key = penstock.record_key(e.lock_key, wanted) FOR KEY SHARE SKIP LOCKED;
        locked := FOUND;
        free := FOUND;
    ELSIF e.lock_key IS NOT NULL THEN
        free := penstock.exclude_claims(queue, e.lock_key);
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
            SELECT FROM penstock.lock WHERE queue_id = queue AND lock_key = penstock.record_key(e.lock_key, wanted)));
    END IF;
    IF NOT free THEN
        RAISE SQLSTATE 'PS900';
    END IF;
    RETURN true;
EXCEPTION WHEN SQLSTATE 'PS900' THEN
    RETURN false; -- and the locks are released: a settler must not wait while we try again
END $$;

-- disable_one disables an entry: priority -1, no ready row. A running entry ends its run. True: it
-- was disabled now; false: it was already, or is gone; null: busy, try again.
-- Locks: those of lock_to_switch, then those of tidy_key for an entry of a group.
-- Callers: switch_entry, apply_operation.
CREATE OR REPLACE FUNCTION penstock.disable_one(queue integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e penstock.entry;
BEGIN
    IF NOT penstock.lock_to_switch(queue, wanted) THEN
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

-- enable_one enables a disabled entry again, at its old position. If it runs, the settler does
-- that. A ready row that is there already is written anew, not left alone: a sweep that found it
-- dead skips the new version. Results as of disable_one.
-- Locks: those of lock_to_switch.
-- Callers: switch_entry, apply_operation.
CREATE OR REPLACE FUNCTION penstock.enable_one(queue integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e penstock.entry;
BEGIN
    IF NOT penstock.lock_to_switch(queue, wanted) THEN
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
        ON CONFLICT (queue_id, priority, flow, pos) DO UPDATE
           SET entry_id = excluded.entry_id, lock_key = excluded.lock_key;
    END IF;
    RETURN true;
END $$;

-- switch_entry disables or enables one entry. While another session has it locked, it tries again
-- for two seconds.
-- Locks: those of disable_one or enable_one.
-- Callers: disable_entry, enable_entry.
-- SQLSTATE: PS007 no such entry, PS006 the entry has ended or is locked by another transaction.
CREATE OR REPLACE FUNCTION penstock.switch_entry(wanted bigint, verb text, reason text, actor text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    queue   integer := penstock.living_entry(wanted);
    changed boolean;
BEGIN
    PERFORM penstock.need_read_committed();
    FOR i IN 1 .. 200 LOOP
        changed := CASE verb WHEN 'disable_entry' THEN penstock.disable_one(queue, wanted)
                             ELSE penstock.enable_one(queue, wanted) END;
        EXIT WHEN changed IS NOT NULL;
        PERFORM pg_sleep(0.01);
    END LOOP;
    IF changed IS NULL THEN
        RAISE EXCEPTION 'entry % is held by another transaction', wanted USING ERRCODE = 'PS006', HINT = 'Try again.';
    ELSIF changed THEN
        PERFORM penstock.audit_log(switch_entry.actor, switch_entry.verb, 'entry ' || wanted, switch_entry.reason);
    ELSE
        PERFORM penstock.living_entry(wanted); -- raises an error if it ended meanwhile
    END IF;
END $$;

-- disable_entry disables one entry; for an entry that is disabled it does nothing. The queue's
-- version does not change: nodes cache nothing about single entries.
-- Locks: those of switch_entry.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS006 not allowed in this state, PS007 no such entry.
CREATE OR REPLACE FUNCTION penstock.disable_entry(
    id     bigint,
    reason text   DEFAULT '',
    actor  text   DEFAULT NULL
) RETURNS void
LANGUAGE sql AS $$ SELECT penstock.switch_entry($1, 'disable_entry', $2, $3) $$;

-- enable_entry undoes disable_entry.
-- Locks: those of switch_entry.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS006 not allowed in this state, PS007 no such entry.
CREATE OR REPLACE FUNCTION penstock.enable_entry(
    id     bigint,
    reason text   DEFAULT '',
    actor  text   DEFAULT NULL
) RETURNS void
LANGUAGE sql AS $$ SELECT penstock.switch_entry($1, 'enable_entry', $2, $3) $$;

-- disable_entries disables every entry of a name or lock key (scope), later ones as well: push_many
-- reads penstock.disabled. Entries that exist are disabled by a bulk operation, whose id it
-- returns; the first 500 at once. A push in progress may still come in enabled: the operation
-- lasts until there is none, and disables its entries.
-- Locks: the row of the queue, then those of switch_entries.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 scope or value is not valid, PS006 these entries are paused.
CREATE OR REPLACE FUNCTION penstock.disable_entries(queue text, scope text, value text, reason text DEFAULT '',
                                         actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    IF scope NOT IN ('name', 'lock_key') OR coalesce(value, '') = '' THEN
        RAISE EXCEPTION 'scope is not one of name, lock_key, or value is empty' USING ERRCODE = 'PS002';
    END IF;
    PERFORM penstock.need_no_pause(q, disable_entries.scope, disable_entries.value);
    RETURN penstock.switch_entries(q, 'disable', disable_entries.scope, disable_entries.value,
                                   disable_entries.reason, disable_entries.actor);
END $$;

-- enable_entries ends disable_entries. Entries that are disabled by another name or key stay
-- disabled; those that were disabled one by one are enabled as well.
-- Locks: the row of the queue, then those of switch_entries.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS006 these entries are not disabled, or are paused.
CREATE OR REPLACE FUNCTION penstock.enable_entries(queue text, scope text, value text, reason text DEFAULT '',
                                        actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    PERFORM penstock.need_no_pause(q, enable_entries.scope, enable_entries.value);
    RETURN penstock.switch_entries(q, 'enable', enable_entries.scope, enable_entries.value,
                                   enable_entries.reason, enable_entries.actor);
END $$;

-- need_no_pause raises an error if a name or lock key is paused: the pause has disabled its entries, and its end
-- enables them. It keeps other sessions from pausing it until the transaction ends.
-- Locks: the row of the queue (FOR NO KEY UPDATE).
-- Callers: disable_entries, enable_entries.
-- SQLSTATE: PS006 these entries are paused.
CREATE OR REPLACE FUNCTION penstock.need_no_pause(q penstock.queue, scope text, value text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM penstock.queue x WHERE x.id = q.id FOR NO KEY UPDATE;
    IF EXISTS (SELECT FROM penstock.pause p
                WHERE p.scope = need_no_pause.scope AND p.value = need_no_pause.value AND p.queue_id = q.id) THEN
        RAISE EXCEPTION 'entries with % "%" are paused', scope, value
            USING ERRCODE = 'PS006', HINT = 'End the pause of this name or lock key first (resume).';
    END IF;
END $$;

-- switch_entries disables or enables a name or lock key, and its existing entries by a bulk operation, whose id it
-- returns. What that operation matches is counted among the first 10,000 entries of the queue alone.
-- Locks: the row of disabled, then the row of the queue, then those of step_operation.
-- Callers: disable_entries, enable_entries, pause, resume.
-- SQLSTATE: PS002 invalid argument, PS006 these entries are not disabled.
CREATE OR REPLACE FUNCTION penstock.switch_entries(
    q      penstock.queue,
    verb   text,
    scope  text,
    value  text,
    reason text,
    actor  text
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    filter    jsonb := jsonb_build_object(scope, value);
    matched   bigint;
    whole     boolean;
    operation bigint;
BEGIN
    IF verb = 'disable' THEN
        INSERT INTO penstock.disabled AS d (queue_id, scope, value, actor, reason)
        VALUES (q.id, switch_entries.scope, switch_entries.value,
                penstock.actor_name(switch_entries.actor), coalesce(switch_entries.reason, ''))
        ON CONFLICT ON CONSTRAINT disabled_pkey DO UPDATE SET actor = excluded.actor, reason = excluded.reason;
    ELSE
        DELETE FROM penstock.disabled d
         WHERE d.queue_id = q.id AND d.scope = switch_entries.scope AND d.value = switch_entries.value;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'entries with % "%" are not disabled', scope, value
                USING ERRCODE = 'PS006',
                      HINT = 'The audit has the disables of names and lock keys; in SQL '
                          || 'penstock.disabled has those in force.';
        END IF;
    END IF;
    SELECT c.matched, c.whole INTO matched, whole FROM penstock.count_first(q, verb, filter, 10000) c;
    operation := penstock.begin_operation(q, verb, filter, reason, actor, 5000, matched, NOT whole);
    UPDATE penstock.operation o SET switched_in = pg_current_xact_id() WHERE o.id = operation;
    UPDATE penstock.queue SET version = version + 1 WHERE id = q.id;
    PERFORM penstock.step_operation(operation);
    RETURN operation;
END $$;

-- pauses_changed makes nodes read their queues again: they compare a hash of all versions, so that
-- one row is enough.
-- Locks: the row of the queue; without a queue, the row of the one with the smallest id.
-- Callers: pause, resume, set_flow_weight.
CREATE OR REPLACE FUNCTION penstock.pauses_changed(queue integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE penstock.queue SET version = version + 1 WHERE id = coalesce($1, (SELECT min(id) FROM penstock.queue))
$$;

-- pause stops claims in a scope: a flow, model, application, node, name or lock key; running
-- entries go on. It replaces a pause of the same that is in force, and returns that (replaced_pause). A model must
-- exist: a misspelt name would pause nothing. Entries of a paused name or lock key are disabled.
-- Locks: of a name or lock key the row of the queue (FOR NO KEY UPDATE), of the others the advisory lock of what is
-- paused; the row of pause (FOR UPDATE), then those of switch_entries, then the row of the queue.
-- Callers: cmd/leader, cmd/penstock, pkg/api, pkg/doctor, pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 scope, value or until is not valid, PS006 the entries are
-- disabled already.
CREATE OR REPLACE FUNCTION penstock.pause(
    scope  text,
    value  text,
    queue  text        DEFAULT NULL,
    reason text        DEFAULT '',
    actor  text        DEFAULT current_user::text,
    until  timestamptz DEFAULT NULL
) RETURNS jsonb LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    q        integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
    entries  boolean := pause.scope IN ('name', 'lock_key') AND queue IS NOT NULL;
    off      boolean; -- the entries are disabled
    known    boolean;
    replaced jsonb;
BEGIN
    PERFORM penstock.check_until(until);
    IF pause.scope = 'model' AND NOT EXISTS (SELECT FROM penstock.model m WHERE m.name = pause.value)
       AND NOT EXISTS (SELECT FROM penstock.queue x WHERE x.model = pause.value) THEN
        RAISE EXCEPTION 'value: there is no model "%"', value
            USING ERRCODE = 'PS002', HINT = 'Register the model first (register_model).';
    END IF;
    IF entries THEN
        PERFORM FROM penstock.queue x WHERE x.id = q FOR NO KEY UPDATE;
    ELSE -- of two first pauses at once the second sees the first
        PERFORM pg_advisory_xact_lock(
            hashtextextended('penstock pause ' || coalesce(q, 0) || ' ' || pause.scope || ' ' || pause.value, 0));
    END IF;
    SELECT penstock.replaced_pause(p.created_at, p.actor, p.reason, p.until) INTO replaced FROM penstock.pause p
      WHERE p.scope = pause.scope AND p.value = pause.value AND p.queue_id IS NOT DISTINCT FROM q FOR UPDATE;
    known := FOUND;
    off := EXISTS (SELECT FROM penstock.disabled d
                    WHERE d.queue_id = q AND d.scope = pause.scope AND d.value = pause.value);
    IF entries AND off AND NOT known THEN
        RAISE EXCEPTION 'entries with % "%" are disabled', scope, value
            USING ERRCODE = 'PS006', HINT = 'Enable the entries of this name or lock key first (enable_entries).';
    END IF;
    INSERT INTO penstock.pause AS p (scope, value, queue_id, actor, reason, until)
    VALUES (pause.scope, pause.value, q, penstock.actor_name(pause.actor), coalesce(pause.reason, ''), pause.until)
    ON CONFLICT (scope, value, coalesce(queue_id, 0)) DO UPDATE
       SET actor = excluded.actor, reason = excluded.reason, until = excluded.until, created_at = excluded.created_at;
    IF entries AND NOT off THEN
        PERFORM penstock.switch_entries(penstock.queue_row(queue), 'disable', pause.scope, pause.value,
                                        pause.reason, pause.actor);
    END IF;
    PERFORM penstock.pauses_changed(q);
    PERFORM penstock.audit_pause(pause.actor, 'pause', pause.scope || ' ' || pause.value, pause.reason, until, replaced,
                                 queue);
    RETURN replaced;
EXCEPTION WHEN check_violation OR not_null_violation THEN
    RAISE EXCEPTION 'pause of % "%" is not valid', scope, value USING ERRCODE = 'PS002',
        HINT = 'The scopes are name and lock_key (with a queue), flow (with or without), model, application and node.';
END $$;

-- resume ends a pause.
-- Locks: of a name or lock key the row of the queue (FOR NO KEY UPDATE); the row of pause, then those of
-- switch_entries, then the row of the queue.
-- Callers: end_pauses; cmd/penstock, pkg/api, pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS006 there is no such pause.
CREATE OR REPLACE FUNCTION penstock.resume(
    scope  text,
    value  text,
    queue  text DEFAULT NULL,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
BEGIN
    IF resume.scope IN ('name', 'lock_key') THEN
        PERFORM FROM penstock.queue x WHERE x.id = q FOR NO KEY UPDATE;
    END IF;
    DELETE FROM penstock.pause p
     WHERE p.scope = resume.scope AND p.value = resume.value AND p.queue_id IS NOT DISTINCT FROM q;
    IF NOT FOUND THEN
        RAISE EXCEPTION '% "%" is not paused', scope, value
            USING ERRCODE = 'PS006', HINT = 'The list of pauses has those in force.';
    END IF;
    IF resume.scope IN ('name', 'lock_key') AND EXISTS (
       SELECT FROM penstock.disabled d WHERE d.queue_id = q AND d.scope = resume.scope AND d.value = resume.value) THEN
        PERFORM penstock.switch_entries(penstock.queue_row(queue), 'enable', resume.scope, resume.value,
                                        resume.reason, resume.actor);
    END IF;
    PERFORM penstock.pauses_changed(q);
    PERFORM penstock.audit_log(resume.actor, 'resume', resume.scope || ' ' || resume.value,
                               resume.reason, jsonb_strip_nulls(jsonb_build_object('queue', queue)));
END $$;

-- end_pauses resumes up to 100 pauses whose end has passed, for half a second, and returns how many: call it again
-- if there are some. A pause that cannot be ended since another transaction has locked a row is left for a later call,
-- with the others of its queue; if the row of the queue is locked, this takes no time of other pauses. Nodes compare
-- the end with the time themselves: this function is for names and lock keys, whose entries must be enabled, and
-- keeps the table current.
-- Locks: rows of pause in order of id (FOR UPDATE SKIP LOCKED), for each the row of the queue that pauses_changed
-- updates (SKIP LOCKED), then those of resume, for which it waits at most 50 ms.
-- Callers: pkg/maintenance.
-- SQLSTATE: PS001 no such queue, PS006 not allowed in this state.
CREATE OR REPLACE FUNCTION penstock.end_pauses() RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '50ms' AS $$
DECLARE
    p     record;
    ended integer := 0;
    held  integer[] := '{}'; -- queues; 0 is for the pauses of none
    began timestamptz := clock_timestamp();
BEGIN
    FOR p IN SELECT x.scope, x.value, coalesce(x.queue_id, 0) AS queue_id, q.name AS queue,
                    coalesce(x.queue_id, (SELECT min(id) FROM penstock.queue)) AS row
               FROM penstock.pause x LEFT JOIN penstock.queue q ON q.id = x.queue_id
              WHERE x.until <= clock_timestamp() ORDER BY x.id FOR UPDATE OF x SKIP LOCKED
    LOOP
        EXIT WHEN ended = 100 OR clock_timestamp() > began + interval '500 milliseconds';
        CONTINUE WHEN p.queue_id = ANY (held);
        BEGIN
            PERFORM FROM penstock.queue c WHERE c.id = p.row FOR NO KEY UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND AND p.row IS NOT NULL;
            PERFORM penstock.resume(p.scope, p.value, p.queue, 'its time is over', 'penstock');
            ended := ended + 1;
        EXCEPTION WHEN lock_not_available THEN
            held := held || p.queue_id;
        END;
    END LOOP;
    RETURN ended;
END $$;

-- queue_pauses returns the pauses that nodes apply to a queue: [{"scope", "value", "actor",
-- "reason", "at", "left"}], left in seconds, since a node's clock may differ.
-- Callers: pause_reasons; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.queue_pauses(q penstock.queue) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT coalesce(jsonb_agg(jsonb_build_object(
               'scope', p.scope, 'value', p.value, 'actor', p.actor, 'reason', p.reason, 'at', p.created_at,
               'left', extract(epoch FROM p.until - clock_timestamp()))), '[]')
      FROM penstock.pause p
     WHERE (p.scope = 'flow' AND (p.queue_id IS NULL OR p.queue_id = q.id))
        OR (p.scope = 'model' AND p.value = q.model) OR (p.scope = 'application' AND p.value = q.application)
$$;

-- node_paused returns whether a node is paused, by its name or its id.
-- Callers: pause_reasons; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.node_paused(node_id bigint, node_name text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.pause p
                    WHERE p.scope = 'node' AND p.value IN ($2, $1::text) AND penstock.paused_until(p.until))
$$;

-- set_flow_weight gives a flow a weight among the flows of one queue or of all; a null weight
-- removes it.
-- Locks: the row of flow_weight, then those of pauses_changed.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 the weight is not from 0.001 to 1000.
CREATE OR REPLACE FUNCTION penstock.set_flow_weight(
    flow   text,
    weight real,
    queue  text DEFAULT NULL,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    q integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
BEGIN
    IF set_flow_weight.weight IS NULL THEN
        DELETE FROM penstock.flow_weight w WHERE w.flow = set_flow_weight.flow AND w.queue_id IS NOT DISTINCT FROM q;
    ELSE
        INSERT INTO penstock.flow_weight AS w (flow, queue_id, weight)
        VALUES (set_flow_weight.flow, q, set_flow_weight.weight)
        ON CONFLICT (flow, coalesce(queue_id, 0)) DO UPDATE SET weight = excluded.weight;
    END IF;
    PERFORM penstock.pauses_changed(q);
    PERFORM penstock.audit_log(set_flow_weight.actor, 'set_flow_weight',
            'flow ' || set_flow_weight.flow, set_flow_weight.reason,
            jsonb_strip_nulls(jsonb_build_object('queue', queue, 'weight', set_flow_weight.weight)));
EXCEPTION WHEN check_violation OR not_null_violation THEN
    RAISE EXCEPTION 'weight of flow "%" is not valid: %', set_flow_weight.flow, set_flow_weight.weight
        USING ERRCODE = 'PS002', HINT = 'Give a number from 0.001 to 1000; 1 is what every other flow has.';
END $$;

-- queue_weights returns the flows of a queue whose weight is not 1: {"flow": weight}. The queue's
-- own go before those of all queues.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.queue_weights(q penstock.queue) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT coalesce(jsonb_object_agg(w.flow, w.weight ORDER BY w.queue_id NULLS FIRST), '{}')
      FROM penstock.flow_weight w WHERE w.queue_id IS NULL OR w.queue_id = q.id
$$;

-- usage_left is the part of an amount that is left after decay since a time, with a half-life in
-- seconds. Beyond 200 half-lives it is taken as 200.
-- Locks: none.
-- Callers: usage_status; pkg/fairness.
CREATE OR REPLACE FUNCTION penstock.usage_left(
    amount    double precision,
    at        timestamptz,
    half_life double precision DEFAULT 300
) RETURNS double precision
LANGUAGE sql VOLATILE AS $$
    SELECT amount * power(0.5::float8,
                          least(200, greatest(0, extract(epoch FROM clock_timestamp() - at)::float8 / half_life)))
$$;
