-- Inference: models, their instances, and the leases of slots. Rules and their reasons: pkg/inference/doc.go.

-- bump_inference_version makes nodes read models and instances again.
-- Locks: the one row of inference_version: changes of models and instances wait for one another.
-- Callers: triggers model_version, instance_version, instance_change, queue_model.
CREATE OR REPLACE FUNCTION penstock.bump_inference_version() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE penstock.inference_version SET version = version + 1;
    RETURN NULL;
END $$;

-- Registration -------------------------------------------------------------------------------------------------------

-- model_queue returns the name of the queue of a model's entries.
-- Callers: fit_model_queue; pkg/operator.
CREATE OR REPLACE FUNCTION penstock.model_queue(model text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT q.name FROM penstock.queue q WHERE q.model = $1 AND q.kind = 'inference' ORDER BY q.id LIMIT 1),
                    left(regexp_replace(regexp_replace(lower($1), '[^a-z0-9_]+', '_', 'g'), '^([^a-z])', E'm_\\1'), 48))
$$;

-- fit_model_queue makes the queue of a model, or updates its number of attempts, and returns its
-- name. How many of its entries run at once is bounded by the slots themselves: a limit on locks
-- beside them would also count locks whose ending is being recorded.
-- Locks: those of create_queue or alter_queue: the lock of lock_all_limits, which the caller has taken before any
-- row, then the row of the queue.
-- Callers: register_model, set_model_override, register_instance, announce_instance.
-- SQLSTATE: PS002 the config is not valid, PS006 the queue of that name belongs to something else.
CREATE OR REPLACE FUNCTION penstock.fit_model_queue(wanted text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    m      penstock.model;
    called text := penstock.model_queue(wanted);
    q      penstock.queue;
    policy jsonb;
BEGIN
    SELECT * INTO m FROM penstock.model x WHERE x.name = wanted;
    SELECT * INTO q FROM penstock.queue x WHERE x.name = called;
    IF q.id IS NULL THEN
        PERFORM penstock.create_queue(called, jsonb_build_object('kind', 'inference', 'model', wanted));
        SELECT * INTO q FROM penstock.queue x WHERE x.name = called;
    ELSIF q.model IS DISTINCT FROM wanted OR q.kind <> 'inference' THEN
        RAISE EXCEPTION 'queue "%", which model "%" needs, belongs to something else', called, wanted
            USING ERRCODE = 'PS006', HINT = 'Give the model another name, or create an inference queue with option model yourself.';
    END IF;
    -- A zero that is stored means the default, and is refused in a new policy.
    policy := (SELECT coalesce(jsonb_object_agg(e.key, e.value), '{}') FROM jsonb_each(q.retry) e
                WHERE e.key = 'jitter' OR e.value <> '0')
        || jsonb_build_object('max_attempts',
               coalesce(((m.config || coalesce(m.override, '{}'))->>'max_retries')::integer, 50) + 1);
    IF policy <> q.retry THEN
        PERFORM penstock.alter_queue(called, jsonb_build_object('retry', policy));
    END IF;
    RETURN called;
EXCEPTION
    WHEN invalid_text_representation OR numeric_value_out_of_range THEN
        RAISE EXCEPTION 'config of model "%" is not valid: %', wanted, SQLERRM USING ERRCODE = 'PS002';
END $$;

-- check_model_fields refuses a field of a model whose name has capital letters. Nodes read names in any case, functions
-- in lower case alone: the nodes would heed such a field, and preemption, the queue and the retention of output would
-- not.
-- Callers: register_model, set_model_override.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_model_fields(model text, config jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    f record;
BEGIN
    SELECT x.field INTO f
      FROM (SELECT k FROM jsonb_object_keys(config) k
             UNION ALL
            SELECT lower(o.key) || '.' || m
              FROM jsonb_each(config) o
             CROSS JOIN LATERAL jsonb_object_keys(
                   CASE WHEN jsonb_typeof(o.value) = 'object' THEN o.value ELSE '{}' END) m
             WHERE lower(o.key) IN ('batch', 'statuses', 'timeouts')) x(field)
     WHERE x.field <> lower(x.field)
     ORDER BY x.field COLLATE "C" LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'settings of model "%" have no field %: write it %', model, quote_ident(f.field), lower(f.field)
            USING ERRCODE = 'PS002', HINT = 'Names of fields have no capital letters.';
    END IF;
END $$;

-- register_model registers a model, or replaces its config; an override stays. It returns the
-- model's queue.
-- Locks: those of lock_all_limits; the row of the model, the row of inference_version, then those of fit_model_queue.
-- Callers: pkg/inference, pkg/operator; psql.
-- SQLSTATE: PS002 invalid argument, PS006 not allowed in this state.
CREATE OR REPLACE FUNCTION penstock.register_model(name text, config jsonb, reason text DEFAULT '',
                                                   actor text DEFAULT NULL)
RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    IF jsonb_typeof(config) IS DISTINCT FROM 'object' OR coalesce(config->>'name', name) <> name THEN
        RAISE EXCEPTION 'config of model "%" must be a JSON object that names no other model',
            name USING ERRCODE = 'PS002';
    ELSIF coalesce(config->>'protocol', '') NOT IN ('dispatcher', 'cog', 'oip', 'openai') THEN
        RAISE EXCEPTION 'protocol of model "%" must be dispatcher, cog, oip or openai', name USING ERRCODE = 'PS002';
    ELSIF jsonb_typeof(config->'keep_output') NOT IN ('boolean', 'null') THEN
        RAISE EXCEPTION 'keep_output of model "%" must be true or false', name USING ERRCODE = 'PS002';
    END IF;
    PERFORM penstock.check_model_fields(name, config);
    PERFORM penstock.lock_all_limits();
    INSERT INTO penstock.model AS m (name, config) VALUES (register_model.name, register_model.config)
    ON CONFLICT ON CONSTRAINT model_pkey DO UPDATE SET config = excluded.config, version = m.version + 1,
    changed_at = now();
    PERFORM penstock.audit_log(register_model.actor, 'register_model', register_model.name,
                               register_model.reason, config);
    RETURN penstock.fit_model_queue(register_model.name);
END $$;

-- need_model raises an error for a model that is not registered.
-- Callers: set_model_override, remove_model, register_instance, free_dead_slots.
-- SQLSTATE: PS008 no such model.
CREATE OR REPLACE FUNCTION penstock.need_model(wanted text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.model WHERE name = wanted) THEN
        RAISE EXCEPTION 'model "%" is not registered', wanted
            USING ERRCODE = 'PS008', HINT = 'Register the model first (register_model).';
    END IF;
END $$;

-- set_model_override lays fields over a model's config for all nodes at once; null removes them.
-- Locks: those of lock_all_limits; the row of the model, the row of inference_version, then those of fit_model_queue.
-- Callers: delete_model_override; pkg/operator; psql.
-- SQLSTATE: PS008 no such model, PS002 the override is not an object or has a field in capital letters, PS006 the queue
-- of that name belongs to something else.
CREATE OR REPLACE FUNCTION penstock.set_model_override(name text, override jsonb, reason text DEFAULT '',
                                                       actor text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.need_model(name);
    IF jsonb_typeof(override) <> 'object' THEN
        RAISE EXCEPTION 'override of model "%" must be a JSON object', name USING ERRCODE = 'PS002';
    ELSIF override IS NOT NULL THEN
        PERFORM penstock.check_model_fields(name, override);
    END IF;
    PERFORM penstock.lock_all_limits();
    UPDATE penstock.model m SET override = set_model_override.override, version = m.version + 1, changed_at = now()
     WHERE m.name = set_model_override.name;
    PERFORM penstock.audit_log(set_model_override.actor, 'set_model_override', set_model_override.name,
                               set_model_override.reason, override);
    PERFORM penstock.fit_model_queue(set_model_override.name);
END $$;

-- delete_model_override removes the override, so that the config is in force again.
-- Locks: those of set_model_override.
-- Callers: psql.
-- SQLSTATE: PS008 no such model.
CREATE OR REPLACE FUNCTION penstock.delete_model_override(
    name   text,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE sql AS $$ SELECT penstock.set_model_override($1, NULL, $2, $3) $$;

-- remove_model deletes a model that has neither instances nor deployments: what its backends have started would be left
-- without one that stops it. Its queue stays, with its entries; its template of deployments goes.
-- Locks: the row of the model, then the row of inference_version.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS008 no such model, PS006 it has instances or deployments.
CREATE OR REPLACE FUNCTION penstock.remove_model(
    name   text,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.need_model(name);
    IF EXISTS (SELECT FROM penstock.instance i WHERE i.model = remove_model.name) THEN
        RAISE EXCEPTION 'model "%" still has instances', name USING ERRCODE = 'PS006', HINT = 'Remove them first.';
    END IF;
    IF EXISTS (SELECT FROM penstock.deployment d WHERE d.model = remove_model.name) THEN
        RAISE EXCEPTION 'model "%" still has deployments: %', name,
                        (SELECT string_agg(d.name, ', ' ORDER BY d.name) FROM penstock.deployment d
                         WHERE d.model = remove_model.name)
            USING ERRCODE = 'PS006', HINT = 'Override each deployment to 0 instances, wait until they are gone, then remove it (remove_deployment).';
    END IF;
    DELETE FROM penstock.model m WHERE m.name = remove_model.name;
    PERFORM penstock.audit_log(remove_model.actor, 'remove_model', remove_model.name, remove_model.reason);
END $$;

-- check_endpoint raises an error unless the endpoint of an instance is an http or https address without user or
-- password.
-- Callers: register_instance, announce_instance.
-- SQLSTATE: PS002 it is not.
CREATE OR REPLACE FUNCTION penstock.check_endpoint(endpoint text, server text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF endpoint ~* '^[a-z]*:?//[^/?#]*@' THEN
        -- The address itself is not repeated: it goes into logs.
        RAISE EXCEPTION 'endpoint of instance "%" carries a user or password', server
            USING ERRCODE = 'PS002', HINT = 'Give it in a header of the model, as env:NAME or file:/path.';
    ELSIF endpoint !~* '^https?://[^/?#[:space:]]+' THEN
        RAISE EXCEPTION 'endpoint "%" of instance "%" is not an address', endpoint, server USING ERRCODE = 'PS002',
            HINT = 'Write one such as http://gpu-1:8000/generate.';
    END IF;
END $$;

-- register_instance registers an endpoint of a model, or changes it: the same model and server name
-- the same instance. Registering again ends a drain, a quarantine and a time to live. With fewer slots than before,
-- nothing new is leased until the slots beyond have been freed. The endpoint must be an http or
-- https address without user or password.
-- Locks: those of lock_all_limits; the row of the instance, the row of inference_version, then those of
-- fit_model_queue.
-- Callers: pkg/inference, pkg/operator; psql.
-- SQLSTATE: PS008 no such model, PS002 the endpoint or a setting is not valid, PS006 the queue of
-- that name belongs to something else.
CREATE OR REPLACE FUNCTION penstock.register_instance(
    model    text,
    server   text,
    endpoint text,
    slots    integer,
    labels   jsonb   DEFAULT '{}',
    reason   text    DEFAULT '',
    actor    text    DEFAULT NULL
) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    instance integer;
BEGIN
    PERFORM penstock.need_model(model);
    PERFORM penstock.check_endpoint(endpoint, server);
    PERFORM penstock.lock_all_limits();
    -- An INSERT that meets a row draws an id as well, of which there are 2,147,483,647.
    UPDATE penstock.instance i
       SET slots = register_instance.slots, labels = coalesce(register_instance.labels, '{}'),
           draining_at = NULL, drain_by = NULL, drain_reason = NULL,
           expires_at = NULL, quarantined_until = NULL, quarantine_reason = NULL, next_check_at = clock_timestamp(),
           state = CASE WHEN i.endpoint = register_instance.endpoint THEN i.state ELSE 'unknown' END,
           endpoint = register_instance.endpoint
     WHERE i.model = register_instance.model AND i.server = register_instance.server
    RETURNING id INTO instance;
    IF NOT FOUND THEN
        INSERT INTO penstock.instance (model, server, endpoint, slots, labels)
        VALUES (register_instance.model, register_instance.server, register_instance.endpoint,
                register_instance.slots, coalesce(register_instance.labels, '{}'))
        RETURNING id INTO instance;
    END IF;
    PERFORM penstock.fit_model_queue(model);
    PERFORM penstock.audit_log(register_instance.actor, 'register_instance',
            register_instance.model || '/' || register_instance.server, register_instance.reason,
            jsonb_build_object('endpoint', endpoint, 'slots', slots, 'labels', labels));
    RETURN instance;
EXCEPTION
    WHEN check_violation OR not_null_violation THEN
        RAISE EXCEPTION 'instance "%" of model "%" is not valid: %', server, model, SQLERRM USING ERRCODE = 'PS002';
END $$;

-- instance_id returns the id of an instance.
-- Callers: drain_instance, remove_instance.
-- SQLSTATE: PS008 no such instance.
CREATE OR REPLACE FUNCTION penstock.instance_id(wanted_model text, wanted_server text) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_id integer;
BEGIN
    SELECT id INTO found_id FROM penstock.instance WHERE model = wanted_model AND server = wanted_server;
    IF found_id IS NULL THEN
        RAISE EXCEPTION 'model "%" has no instance "%"', wanted_model, wanted_server
            USING ERRCODE = 'PS008', HINT = 'The list of instances has their ids (instance_status).';
    END IF;
    RETURN found_id;
END $$;

-- drain_instance sends an instance no new calls; those in flight end. Register it again to end the
-- drain. A drain that the autoscaler asks for leaves one that is under way as it is: that is not the autoscaler's to
-- end.
-- Locks: the row of the instance, then the row of inference_version.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS008 no such instance.
CREATE OR REPLACE FUNCTION penstock.drain_instance(model text, server text, reason text DEFAULT '',
                                                   actor text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE penstock.instance i
       SET draining_at = coalesce(i.draining_at, clock_timestamp()),
           drain_by = penstock.actor_name(drain_instance.actor),
           drain_reason = coalesce(drain_instance.reason, '')
     WHERE i.id = penstock.instance_id(drain_instance.model, drain_instance.server)
       AND NOT (i.draining_at IS NOT NULL AND drain_instance.actor IS NOT DISTINCT FROM 'autoscaler');
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM penstock.audit_log(drain_instance.actor, 'drain_instance',
            drain_instance.model || '/' || drain_instance.server, drain_instance.reason);
END $$;

-- remove_instance deletes an instance. It refuses while slots of it are held, unless forced: calls
-- that still run there are then counted nowhere. An instance of a deployment whose backend was asked for its instances
-- within the last minute drains instead, until the backend has removed it: without its row it would be registered anew.
-- drain_by is 'removed' then, and the autoscaler has it removed whether it is replaced or not. Two are deleted all the
-- same, for nothing else would end their rows: one of a webhook that has no time to live, and, if forced, one that
-- drains so already.
-- Locks: the row of the instance (FOR UPDATE), which excludes leases; its slots; the row of inference_version.
-- Callers: expire_instances; pkg/operator, pkg/scale; psql.
-- SQLSTATE: PS008 no such instance, PS006 slots of it are held.
CREATE OR REPLACE FUNCTION penstock.remove_instance(model text, server text, force boolean DEFAULT false,
                                                    reason text DEFAULT '',
                                         actor text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    instance integer := penstock.instance_id(model, server);
    held     bigint;
BEGIN
    PERFORM FROM penstock.instance i WHERE i.id = instance FOR UPDATE; -- excludes leases
    SELECT count(*) INTO held FROM penstock.slot s WHERE s.instance_id = instance;
    IF held > 0 AND NOT force THEN
        RAISE EXCEPTION 'instance "%" of model "%" has % slots held', server, model, held
            USING ERRCODE = 'PS006', HINT = 'Drain it first and wait, or remove with force.';
    END IF;
    DELETE FROM penstock.slot s WHERE s.instance_id = instance;
    UPDATE penstock.instance i
       SET draining_at = coalesce(i.draining_at, clock_timestamp()), drain_by = 'removed',
           drain_reason = coalesce(remove_instance.reason, '')
      FROM penstock.deployment d JOIN penstock.deployment_state s ON s.name = d.name
     WHERE i.id = instance AND remove_instance.actor IS DISTINCT FROM 'autoscaler'
       AND d.name = i.deployment AND d.model = i.model AND s.seen_at > clock_timestamp() - interval '1 minute'
       AND (d.backend IN ('local', 'kubernetes') OR d.backend = 'webhook' AND i.expires_at IS NOT NULL)
       AND NOT (force AND i.drain_by IS NOT DISTINCT FROM 'removed');
    IF NOT FOUND THEN
        DELETE FROM penstock.instance i WHERE i.id = instance;
    END IF;
    PERFORM penstock.audit_log(remove_instance.actor, 'remove_instance',
            remove_instance.model || '/' || remove_instance.server, remove_instance.reason,
            jsonb_build_object('force', force, 'held', held));
END $$;

-- quarantine_instance keeps all nodes from an instance for a time: a node's breaker has opened.
-- Locks: the row of the instance, then the row of inference_version.
-- Callers: pkg/inference.
CREATE OR REPLACE FUNCTION penstock.quarantine_instance(instance integer, lasts interval, reason text) RETURNS void
LANGUAGE sql AS $$
    UPDATE penstock.instance i
       SET quarantined_until = greatest(i.quarantined_until, clock_timestamp() + lasts), quarantine_reason = $3
     WHERE i.id = $1
$$;

-- recycle_instance drains an instance whose process has lost its device, until a probe finds that
-- process gone: the process after it is a new one.
-- Locks: the row of the instance, then the row of inference_version.
-- Callers: pkg/inference.
CREATE OR REPLACE FUNCTION penstock.recycle_instance(instance integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE penstock.instance i
       SET draining_at = clock_timestamp(), drain_by = 'recycle',
           drain_reason = 'device context lost: restart its process'
     WHERE i.id = recycle_instance.instance AND i.draining_at IS NULL;
    IF FOUND THEN
        PERFORM penstock.audit_log(NULL, 'drain_instance', i.model || '/' || i.server,
                                   'device context lost: restart its process')
           FROM penstock.instance i WHERE i.id = recycle_instance.instance;
    END IF;
END $$;

-- note_harm counts a run of an entry that cost an instance its device or ran out of memory, and
-- returns on how many instances, and how often, the entry has caused that class of harm.
-- Locks: the row of entry_harm.
-- Callers: pkg/inference.
CREATE OR REPLACE FUNCTION penstock.note_harm(queue integer, entry bigint, instance integer, class text)
RETURNS TABLE (instances integer, times integer)
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO penstock.entry_harm AS h (queue_id, entry_id, instance_id, class)
    VALUES (note_harm.queue, note_harm.entry, note_harm.instance, note_harm.class)
    ON CONFLICT ON CONSTRAINT entry_harm_pkey DO UPDATE SET times = h.times + 1, at = clock_timestamp();
    RETURN QUERY SELECT count(*)::integer, sum(h.times)::integer FROM penstock.entry_harm h
     WHERE h.queue_id = note_harm.queue AND h.entry_id = note_harm.entry AND h.class = note_harm.class;
END $$;

-- entry_lives returns whether an entry has not ended. As entry_waits it is planned at each call, for the table of one
-- queue: a statement that joins penstock.entry to rows of any queues is planned over the tables of all, and locks them.
-- Callers: pkg/inference, pkg/batch, pkg/gateway/prediction.
CREATE OR REPLACE FUNCTION penstock.entry_lives(queue integer, entry bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_custom_plan AS $$
BEGIN
    RETURN EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = queue AND e.id = entry);
END $$;

-- entry_waits returns whether an entry is pending and its lock key is not locked.
-- Callers: pkg/inference.
CREATE OR REPLACE FUNCTION penstock.entry_waits(queue integer, entry bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_custom_plan AS $$
BEGIN
    RETURN EXISTS (SELECT FROM penstock.entry e
                    WHERE e.queue_id = queue AND e.id = entry AND e.status = 'pending'
                      AND NOT EXISTS (SELECT FROM penstock.lock l
                                       WHERE l.queue_id = queue
                                         AND l.lock_key = penstock.record_key(e.lock_key, e.id)));
END $$;

-- Slots --------------------------------------------------------------------------------------------------------------

-- usable returns whether calls may be sent to an instance. It is volatile, as are present, starts and pressed, for it
-- reads the clock: Postgres does not inline such a function otherwise.
-- Locks: none.
-- Callers: queue_capacity, admit_model, note_outages, fail_without_instance, slot_reserves, lease_room,
-- lease_slots_within, unpressed_room, instance_status.
CREATE OR REPLACE FUNCTION penstock.usable(i penstock.instance) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT i.draining_at IS NULL AND i.state IN ('unknown', 'ready', 'busy')
       AND (i.expires_at IS NULL OR i.expires_at > clock_timestamp())
       AND (i.quarantined_until IS NULL OR i.quarantined_until <= clock_timestamp())
$$;

-- pressed returns whether calls wait inside an instance's worker, or its cache is nearly full: a server such
-- as vLLM then preempts calls and computes them again. It gets calls only where no other instance has room.
-- Locks: none.
-- Callers: lease_slots_within, unpressed_room; pkg/inference.
CREATE OR REPLACE FUNCTION penstock.pressed(i penstock.instance) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce((i.queued > 0 OR i.kv_usage > 0.9) AND i.checked_at > clock_timestamp() - interval '1 minute',
                    false)
$$;

-- followed_slots lists the slots of a model that nodes hold. One in doubt is in no count of what a node holds, and in
-- no share: its call may still run, so that it takes room of its instance (slot_room), but no node can use it. It is
-- inlined.
-- Callers: held_by_kind, hungry_nodes, slot_share, equal_share, lease_room, slot_contention.
CREATE OR REPLACE FUNCTION penstock.followed_slots(wanted text) RETURNS TABLE (node_id bigint, leased_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT s.node_id, s.leased_at
      FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id
     WHERE i.model = wanted AND s.doubt_at IS NULL
$$;

-- hungry_nodes lists the live nodes that within the last 3 seconds got fewer slots of a model than
-- they requested, and still miss some, with the number of slots that they hold. A demand of a time in the
-- future is from before the clock was set back: it counts when it is repeated.
-- Callers: slot_share, equal_share, hungry_shares, kind_share, lease_room, slot_contention, hand_over_slots.
CREATE OR REPLACE FUNCTION penstock.hungry_nodes(
    wanted text
) RETURNS TABLE (node_id bigint, since timestamptz, held bigint)
LANGUAGE sql STABLE AS $$
    SELECT d.node_id, d.since,
           (SELECT count(*) FROM penstock.followed_slots(wanted) s WHERE s.node_id = d.node_id)
      FROM penstock.slot_demand d
     WHERE d.model = wanted AND d.missing > 0
       AND d.wanted_at > clock_timestamp() - interval '3 seconds' AND d.wanted_at <= clock_timestamp()
       AND penstock.node_lives(d.node_id)
$$;

-- set_device_group sets how many slots the instances with the label device_group => name hold
-- together, of whatever models; null removes the setting. Calls in flight beyond it end.
-- Locks: the row of device_group, the row of inference_version.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.set_device_group(name text, slots integer, reason text DEFAULT '',
                                                     actor text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF slots IS NULL THEN
        DELETE FROM penstock.device_group g WHERE g.name = set_device_group.name;
    ELSE
        INSERT INTO penstock.device_group AS g (name, slots) VALUES (set_device_group.name, set_device_group.slots)
        ON CONFLICT ON CONSTRAINT device_group_pkey DO UPDATE SET slots = excluded.slots, changed_at = now();
    END IF;
    UPDATE penstock.inference_version SET version = version + 1;
    PERFORM penstock.audit_log(set_device_group.actor, 'set_device_group', set_device_group.name,
                               set_device_group.reason,
                               jsonb_build_object('slots', set_device_group.slots));
EXCEPTION
    WHEN check_violation OR not_null_violation THEN
        RAISE EXCEPTION 'device group "%" cannot have % slots: from 1 to 100000', set_device_group.name,
            set_device_group.slots
            USING ERRCODE = 'PS002';
END $$;

-- slot_room returns how many more slots of an instance may be held: of its own, and of its device
-- group's.
-- Callers: lease_room, lease_slots_within, unpressed_room.
CREATE OR REPLACE FUNCTION penstock.slot_room(i penstock.instance) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT greatest(0, least(
        i.slots - (SELECT count(*) FROM penstock.slot s WHERE s.instance_id = i.id),
        CASE WHEN i.device_group IS NOT NULL THEN
             penstock.device_slots(i.device_group)
             - (SELECT count(*) FROM penstock.instance x JOIN penstock.slot s ON s.instance_id = x.id
                 WHERE x.device_group = i.device_group) END))::integer
$$;

-- unpressed_room returns how many free slots the usable instances of a model have that are not pressed.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.unpressed_room(wanted text) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(penstock.slot_room(x)), 0)::integer
      FROM penstock.instance x
     WHERE x.model = wanted AND penstock.usable(x) AND NOT penstock.pressed(x)
$$;

-- device_slots returns how many slots the instances of a device group hold together.
-- Callers: slot_room, slot_reserves, group_is_over.
CREATE OR REPLACE FUNCTION penstock.device_slots(wanted text) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT g.slots FROM penstock.device_group g WHERE g.name = wanted),
                    (SELECT max(x.slots) FROM penstock.instance x WHERE x.device_group = wanted))
$$;

-- peer_models lists the models that compete with a model for slots: itself, and those with an
-- instance in one of its device groups.
-- Callers: slot_share, equal_share, hungry_shares, lease_room.
CREATE OR REPLACE FUNCTION penstock.peer_models(wanted text) RETURNS TABLE (model text)
LANGUAGE sql STABLE AS $$
    SELECT wanted
     UNION
    SELECT y.model FROM penstock.instance x JOIN penstock.instance y ON y.device_group = x.device_group
     WHERE x.model = wanted AND x.device_group IS NOT NULL
$$;

-- slot_share returns how many slots of a model a node may hold while others have to go without: of
-- the slots of its kind of node (gateways, or task nodes; see kind_share) an equal part for each party of
-- that kind, which is a node with a model, of those models that share devices, that holds some or
-- wants some. Where there are fewer slots than parties they take turns of 5 s: one whose turn is over
-- may hold none. A single slot goes to and fro between the kinds in the same way. Null: nobody goes
-- without.
-- Callers: lease_room, slot_contention; pkg/slot.
CREATE OR REPLACE FUNCTION penstock.slot_share(wanted text, node bigint) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.peer_models(wanted) p CROSS JOIN LATERAL penstock.hungry_nodes(p.model) h
                    WHERE (p.model, h.node_id) <> (wanted, node)) THEN
        RETURN NULL;
    END IF;
    RETURN coalesce(penstock.equal_share(wanted, penstock.node_online(node), node),
                    (SELECT CASE WHEN min(s.leased_at) < clock_timestamp() - interval '5 seconds' THEN 0 ELSE 1 END
                       FROM penstock.followed_slots(wanted) s WHERE s.node_id = node));
END $$;

-- equal_share returns the share of each party of a kind in the slots of a model (see slot_share), of which `node` is
-- one, if it is given. Null: they take turns, or there is none: the demand of the last one has lapsed meanwhile.
-- Callers: slot_share, hungry_shares; pkg/slot.
CREATE OR REPLACE FUNCTION penstock.equal_share(wanted text, online boolean, node bigint) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT CASE WHEN slots >= parties AND NOT single
                        THEN ceil(slots::numeric / nullif(parties, 0))::integer END
              FROM (SELECT penstock.kind_share(wanted, online) AS slots,
                           (SELECT r.total = 1 FROM penstock.slot_reserves(wanted) r)
                           AND EXISTS (SELECT FROM penstock.hungry_nodes(wanted) h
                                        WHERE penstock.node_online(h.node_id) <> online) AS single) a,
                   (SELECT count(*) AS parties FROM (
                        SELECT p.model, h.node_id FROM penstock.peer_models(wanted) p CROSS
                            JOIN LATERAL penstock.hungry_nodes(p.model) h
                         UNION SELECT p.model, s.node_id
                                 FROM penstock.peer_models(wanted) p
                                CROSS JOIN LATERAL penstock.followed_slots(p.model) s
                                WHERE penstock.node_lives(s.node_id)
                         UNION SELECT wanted, node WHERE node IS NOT NULL) everybody
                     WHERE penstock.node_online(everybody.node_id) = online) b);
END $$;

-- hungry_shares lists the hungry nodes of a model with their shares, which it computes once for each kind. Where the
-- nodes of a kind take turns it is 1, also of a node that holds a slot for longer than its turn: none of those that
-- hold one lacks any. Null: no other node goes without.
-- Callers: hand_over_slots; pkg/slot.
CREATE OR REPLACE FUNCTION penstock.hungry_shares(
    wanted text
) RETURNS TABLE (node_id bigint, online boolean, since timestamptz, missing integer, held bigint, share integer)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY
    WITH hungry AS MATERIALIZED (
        SELECT h.node_id, penstock.node_online(h.node_id) AS online, h.since, h.held,
               (SELECT d.missing FROM penstock.slot_demand d
                 WHERE d.model = wanted AND d.node_id = h.node_id) AS missing
          FROM penstock.hungry_nodes(wanted) h
    ), kinds AS MATERIALIZED (
        SELECT c.online, coalesce(penstock.equal_share(wanted, c.online, NULL), 1) AS share
          FROM (SELECT DISTINCT x.online FROM hungry x) c
    )
    SELECT h.node_id, h.online, h.since, h.missing, h.held, CASE WHEN parties.hungry > 1 THEN kinds.share END
      FROM hungry h
      JOIN kinds ON kinds.online = h.online
     CROSS JOIN (SELECT count(*) AS hungry
                   FROM penstock.peer_models(wanted) p CROSS JOIN LATERAL penstock.hungry_nodes(p.model)) parties;
END $$;

-- lease_left_ms returns what is left of a node's lease (ms). A heartbeat that the clock has not come to was written
-- before the clock was set back: its age is not known, and nothing is left until the next one.
-- Locks: none.
-- Callers: lease_slots_within, held_slots.
CREATE OR REPLACE FUNCTION penstock.lease_left_ms(beat_at timestamptz, lease interval) RETURNS bigint
LANGUAGE sql AS $$
    SELECT CASE WHEN beat_at <= clock_timestamp()
        THEN floor(extract(epoch FROM beat_at + lease - clock_timestamp()) * 1000)::bigint ELSE 0 END
$$;

-- lease_room returns how many of `want` slots of a model a node may lease: no more than its kind has room for, none
-- where no usable instance has a free one, and, while others go without, no more than its share. It leaves one for each
-- node of its kind whose turn is before.
-- Callers: lease_slots_within.
CREATE OR REPLACE FUNCTION penstock.lease_room(wanted text, node bigint, want integer) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    room   integer := least(want, penstock.kind_room(wanted, node));
    online boolean := penstock.node_online(node);
    share  integer;
    mine   bigint;
BEGIN
    IF room <= 0 OR NOT EXISTS (
        SELECT FROM penstock.instance x
         WHERE x.model = wanted AND penstock.usable(x)
           AND x.slots > (SELECT count(*) FROM penstock.slot s WHERE s.instance_id = x.id)
           AND (x.device_group IS NULL OR penstock.slot_room(x) > 0)) THEN
        RETURN 0;
    END IF;
    share := penstock.slot_share(wanted, node);
    IF share IS NULL THEN
        RETURN room;
    END IF;
    SELECT count(*) INTO mine FROM penstock.followed_slots(wanted) s WHERE s.node_id = node;
    RETURN (SELECT greatest(0, least(room, share - mine, f.free - t.before))
              FROM (SELECT coalesce(sum(penstock.slot_room(x)), 0) AS free
                      FROM penstock.instance x WHERE x.model = wanted AND penstock.usable(x)) f,
                   (SELECT count(*) AS before
                      FROM penstock.peer_models(wanted) p CROSS JOIN LATERAL penstock.hungry_nodes(p.model) h
                     WHERE (p.model, h.node_id) <> (wanted, node) AND h.held = 0
                       AND penstock.node_online(h.node_id) = online
                       AND (mine > 0 OR h.since < coalesce((SELECT own.since FROM penstock.hungry_nodes(wanted) own
                                                             WHERE own.node_id = node), 'infinity'))) t);
END $$;

-- lease_slots_within gives a node up to `want` free slots of a model, spread over its instances, least
-- held first, and no more of a device group than it has. Pressed instances come after all others, unless
-- entries choose their instance by labels: one that only a pressed instance can take would wait until all
-- others are leased. While other nodes go without it leaves one for each of those whose turn is before
-- this node's. Locking the instance before counting keeps the sum within slots: where an
-- instance shrank, the numbers alone would not. No slot is freed before its node's lease has
-- lapsed: the node may use its slots for valid_ms from when it requested them. A node that gets
-- none is recorded in slot_demand; if it is a gateway, the holders of idle slots are told by NOTIFY. A task node that
-- drains gets none; a gateway does, for requests that it had accepted before.
-- The slots that are kept for the other kind (kind_room) are not touched.
-- It takes no lock where there is nothing for the node (lease_room): while a model is full its leases do not follow one
-- another. A task node does not wait for the lease of another node either, as it does not for an instance without a
-- gateway: it gets nothing and records no demand, for it may get a slot when it asks again, but a demand that it has
-- keeps its turn.
-- Locks: for a gateway, and while one lives, the advisory lock of the model's leases (task nodes: try), so that the
-- kind_room is exact, and a gateway that leaves meanwhile gets nothing; then instances one by one, least held first,
-- for one of a device group also the first of the group (FOR NO KEY UPDATE SKIP LOCKED), then new rows of slot, then
-- the row of slot_demand of the node. Without a gateway it waits for no other lease: an instance that another session
-- leases from is skipped.
-- Of the instances `limited`, to which the node sends no more than some calls, it gives `rooms` at most, in the same
-- order.
-- Callers: pkg/slot, lease_slots_within.
CREATE OR REPLACE FUNCTION penstock.lease_slots_within(wanted text, node bigint, want integer, limited integer[],
                                                       rooms integer[])
RETURNS TABLE (instance integer, slot_number integer, slot_token bigint, valid_ms bigint)
LANGUAGE plpgsql AS $$
DECLARE
    i      record;
    most   integer;
    room   integer;
    left_  integer;
    got    integer;
    millis bigint;
    allowed integer;
    online boolean := penstock.node_online(node);
BEGIN
    FOR pass IN 1..2 LOOP -- without the lock, then under it
        left_ := penstock.lease_room(wanted, node, want);
        SELECT penstock.lease_left_ms(n.beat_at, n.lease) INTO millis FROM penstock.node n
         WHERE n.id = node AND (online OR n.draining_at IS NULL);
        IF millis IS NULL OR millis <= 0 THEN
            RETURN;
        END IF;
        EXIT WHEN pass = 2 OR left_ <= 0 OR NOT online AND NOT EXISTS (
            SELECT FROM penstock.node n WHERE n.kind = 'gateway' AND n.beat_at + n.lease > clock_timestamp());
        IF online THEN
            PERFORM pg_advisory_xact_lock(hashtext('penstock.lease'), hashtext(wanted));
        ELSIF NOT pg_try_advisory_xact_lock(hashtext('penstock.lease'), hashtext(wanted)) THEN
            UPDATE penstock.slot_demand d SET wanted_at = clock_timestamp()
             WHERE d.model = wanted AND d.node_id = node
               AND d.wanted_at BETWEEN clock_timestamp() - interval '3 seconds' AND clock_timestamp();
            PERFORM set_config('synchronous_commit', 'off', true);
            RETURN;
        END IF;
    END LOOP;
    allowed := left_;
    FOR i IN SELECT x.id, x.device_group, count(*) OVER late - row_number() OVER by_load + 1 AS behind
               FROM penstock.instance x
               JOIN penstock.model m ON m.name = x.model
              CROSS JOIN LATERAL (SELECT count(*) AS held FROM penstock.slot s WHERE s.instance_id = x.id) h
              CROSS JOIN LATERAL (SELECT penstock.pressed(x)
                                         AND coalesce((m.config || coalesce(m.override, '{}'))->>'labels_field', '') = '' AS late) p
              WHERE x.model = wanted AND penstock.usable(x) AND h.held < x.slots
                AND coalesce(rooms[array_position(limited, x.id)] > 0, true)
             WINDOW late AS (PARTITION BY p.late),
             by_load AS (PARTITION BY p.late ORDER BY h.held::real / x.slots, x.id)
              ORDER BY p.late, h.held::real / x.slots, x.id
    LOOP
        EXIT WHEN left_ <= 0;
        SELECT x.slots INTO most FROM penstock.instance x
         WHERE x.id = i.id AND penstock.usable(x) FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        IF i.device_group IS NOT NULL THEN
            PERFORM FROM penstock.instance x
              WHERE x.id = (SELECT min(g.id) FROM penstock.instance g WHERE g.device_group = i.device_group)
                FOR NO KEY UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
        END IF;
        room := (SELECT penstock.slot_room(x) FROM penstock.instance x WHERE x.id = i.id);
        room := least(room, coalesce(rooms[array_position(limited, i.id)], room));
        RETURN QUERY
        INSERT INTO penstock.slot (instance_id, number, token, node_id)
        SELECT i.id, n.number, nextval('penstock.token_seq'), node
          FROM (SELECT g.number FROM generate_series(0, most - 1) g(number)
                 WHERE NOT EXISTS (SELECT FROM penstock.slot s WHERE s.instance_id = i.id AND s.number = g.number)
                 ORDER BY g.number
                 LIMIT greatest(0, least(ceil(left_::real / i.behind)::bigint, room))) n
        ON CONFLICT DO NOTHING
        RETURNING slot.instance_id, slot.number, slot.token, millis;
        GET DIAGNOSTICS got = ROW_COUNT;
        left_ := left_ - got;
    END LOOP;
    IF left_ = allowed OR (online AND allowed - left_ < want) THEN
        INSERT INTO penstock.slot_demand AS d (model, node_id, missing) VALUES (wanted, node, want - (allowed - left_))
        ON CONFLICT (model, node_id) DO UPDATE
           SET wanted_at = clock_timestamp(), missing = excluded.missing,
               since = CASE WHEN d.wanted_at BETWEEN clock_timestamp() - interval '3 seconds' AND clock_timestamp()
                       THEN d.since ELSE clock_timestamp() END;
        IF online THEN
            PERFORM penstock.notify('slots ' || wanted);
        END IF;
        IF left_ = allowed THEN -- a demand need not outlive a crash, and its hint does not wait for the disk
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
    ELSE
        DELETE FROM penstock.slot_demand d WHERE d.model = wanted AND d.node_id = node;
    END IF;
END $$;

-- lease_slots gives a node slots of any of the instances.
-- Locks: those of lease_slots_within.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.lease_slots(wanted text, node bigint, want integer)
RETURNS TABLE (instance integer, slot_number integer, slot_token bigint, valid_ms bigint)
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY SELECT * FROM penstock.lease_slots_within(wanted, node, want, '{}', '{}');
END $$;

-- held_slots returns the slots that a node holds, and for how long it may rely on them (ms); with
-- no slot at all it returns one row of nulls.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.held_slots(node bigint)
RETURNS TABLE (instance integer, slot_number integer, slot_token bigint, in_doubt boolean, valid_ms bigint)
LANGUAGE sql STABLE AS $$
    SELECT s.instance_id, s.number, s.token, s.doubt_at IS NOT NULL,
           coalesce((SELECT penstock.lease_left_ms(n.beat_at, n.lease) FROM penstock.node n WHERE n.id = $1), 0)
      FROM (SELECT) one LEFT JOIN penstock.slot s ON s.node_id = $1
$$;

-- adopt_slot gives a node the slot of a run that it follows on, under a new token: the holder is
-- dead, or has recorded that it does not follow the run any more. Null: another node was faster, or
-- the slot has been freed.
-- Locks: the row of the slot.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.adopt_slot(
    instance    integer,
    slot_number integer,
    slot_token  bigint,
    node        bigint
) RETURNS bigint
LANGUAGE sql AS $$
    UPDATE penstock.slot s
       SET node_id = $4, token = nextval('penstock.token_seq'), leased_at = clock_timestamp(), doubt_at = NULL,
           doubt = NULL,
           queue_id = NULL, entry_id = NULL
     WHERE s.instance_id = $1 AND s.number = $2 AND s.token = $3
       AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id)) AND penstock.node_lives($4)
    RETURNING s.token
$$;

-- orphan_slots lists the held slots of an instance that no live node follows: in doubt, or of a
-- node that died, with the time since then by the database's clock, and whether the node died.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.orphan_slots(
    instance integer
) RETURNS TABLE (slot_number integer, slot_token bigint, age interval, dead boolean)
LANGUAGE sql STABLE AS $$
    SELECT s.number, s.token,
           clock_timestamp() - coalesce(s.doubt_at,
               greatest(s.leased_at, (SELECT n.beat_at + n.lease FROM penstock.node n WHERE n.id = s.node_id))),
           s.doubt_at IS NULL
      FROM penstock.slot s
     WHERE s.instance_id = $1 AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id))
$$;

-- free_slots frees held slots of an instance under their tokens, if no live node follows them, and
-- returns how many.
-- Locks: the rows of the slots.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.free_slots(instance integer, tokens bigint[]) RETURNS integer
LANGUAGE sql AS $$
    WITH freed AS (
        DELETE FROM penstock.slot s
         WHERE s.instance_id = $1 AND s.token = ANY (tokens)
           AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id))
        RETURNING 1
    )
    SELECT count(*)::integer FROM freed
$$;

-- free_dead_slots frees the slots that dead nodes hold of a model, of one server of it or of all,
-- and returns how many. Where the worker still runs a call of theirs, it gets one more call than it
-- has slots.
-- Locks: the rows of the slots.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS008 no such model.
CREATE OR REPLACE FUNCTION penstock.free_dead_slots(model text, server text DEFAULT NULL, reason text DEFAULT '',
                                                    actor text DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    freed integer;
BEGIN
    PERFORM penstock.need_model(free_dead_slots.model);
    DELETE FROM penstock.slot s USING penstock.instance i
     WHERE i.id = s.instance_id AND i.model = free_dead_slots.model
       AND (free_dead_slots.server IS NULL OR i.server = free_dead_slots.server)
       AND s.doubt_at IS NULL AND NOT penstock.node_lives(s.node_id);
    GET DIAGNOSTICS freed = ROW_COUNT;
    PERFORM penstock.audit_log(free_dead_slots.actor, 'free_dead_slots',
            concat_ws('/', free_dead_slots.model, free_dead_slots.server), coalesce(free_dead_slots.reason, ''),
            jsonb_build_object('freed', freed));
    RETURN freed;
END $$;

-- keeps_output returns whether the output of a queue's runs is kept as long as their results. That
-- of a model is deleted once the result is stored, which holds all of it, unless the model's
-- keep_output is true.
-- Callers: sweep_output.
CREATE OR REPLACE FUNCTION penstock.keeps_output(q penstock.queue) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT q.model IS NULL
        OR coalesce((SELECT (m.config || coalesce(m.override, '{}'))->'keep_output' = 'true'
                       FROM penstock.model m WHERE m.name = q.model), false)
$$;

-- make_output_partitions gives penstock.output a partition for this hour and each of the next
-- three, and returns how many it made. Rows of an hour in the default partition keep it from
-- getting one.
-- Locks: that of hold_rights, before the name of a partition is taken; then SHARE UPDATE EXCLUSIVE on penstock.output
-- and ACCESS EXCLUSIVE on its default partition, for 200 ms of waiting at most; a partition that needs longer is left
-- to the next call.
-- Callers: sweep_output; pkg/inference.
CREATE OR REPLACE FUNCTION penstock.make_output_partitions() RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    hour  timestamptz;
    child text;
    made  integer := 0;
BEGIN
    FOR hour IN
        SELECT generate_series(date_trunc('hour', now(), 'UTC'), now() + interval '3 hours', interval '1 hour')
    LOOP
        child := 'output_' || to_char(hour, 'YYYYMMDDHH24');
        CONTINUE WHEN to_regclass('penstock.' || child) IS NOT NULL;
        BEGIN
            PERFORM penstock.hold_rights();
            EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.output INCLUDING ALL)', child);
            PERFORM penstock.copy_rights(child, 'output');
            EXECUTE format('ALTER TABLE penstock.output ATTACH PARTITION penstock.%I FOR VALUES FROM (%L) TO (%L)',
                           child, hour, hour + interval '1 hour');
            made := made + 1;
        EXCEPTION
            WHEN duplicate_table OR unique_violation OR check_violation OR lock_not_available OR deadlock_detected THEN
                NULL;
        END;
    END LOOP;
    RETURN made;
END $$;

-- sweep_output does one of four things, so that its locks are held for that one only: it makes the partitions of
-- penstock.output for the next hours; or drops the oldest one that is not read any more; or, where there is none,
-- deletes up to `most` rows of queues that do not keep theirs from the oldest one that stays and has some; or as many
-- of entries that are gone from the default partition, which has rows only where a partition could not be made. It
-- returns how many partitions it dropped or rows it deleted. A queue's rows of an hour go an hour after its end, unless
-- it keeps its output, or a run of it that began before that end goes on. Every prober calls it once a minute, and
-- again while it deletes `most` rows.
-- Locks: those of make_output_partitions; or ACCESS EXCLUSIVE on penstock.output, the partition and the default one,
-- for 200 ms of waiting at most; or the deleted rows.
-- Callers: pkg/inference.
CREATE OR REPLACE FUNCTION penstock.sweep_output(most integer) RETURNS bigint
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    part  record;
    stays integer[]; -- queues
    goes  integer[];
    mixed text[] := '{}'; -- partitions that stay and have rows that go
    whose text[] := '{}'; -- of these queues
    gone  bigint;
BEGIN
    IF penstock.make_output_partitions() > 0 THEN
        RETURN 0;
    END IF;
    FOR part IN
        SELECT c.relname AS name,
               to_timestamp(right(c.relname, 10), 'YYYYMMDDHH24') + interval '1 hour' AS until
          FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = 'penstock.output'::regclass AND c.relname ~ '^output_[0-9]{10}$'
         ORDER BY c.relname
    LOOP
        EXIT WHEN part.until > clock_timestamp() - interval '1 hour';
        BEGIN
            EXECUTE format($q$
                WITH RECURSIVE has AS (
                    (SELECT o.queue_id FROM penstock.%1$I o ORDER BY o.queue_id LIMIT 1)
                    UNION ALL
                    SELECT n.queue_id FROM has CROSS JOIN LATERAL (
                           SELECT o.queue_id FROM penstock.%1$I o WHERE o.queue_id > has.queue_id
                            ORDER BY o.queue_id LIMIT 1) n
                )
                SELECT array_agg(has.queue_id) FILTER (WHERE k.keeps),
                       array_agg(has.queue_id) FILTER (WHERE NOT k.keeps)
                  FROM has CROSS JOIN LATERAL (
                       SELECT EXISTS (SELECT FROM penstock.queue q
                                       WHERE q.id = has.queue_id AND penstock.keeps_output(q)
                                         AND $1 > clock_timestamp() - q.result_retention)
                           OR EXISTS (SELECT FROM penstock.lock l
                                       WHERE l.queue_id = has.queue_id AND l.claimed_at < $1) AS keeps) k$q$, part.name)
               INTO stays, goes USING part.until;
            IF stays IS NULL THEN
                EXECUTE format('DROP TABLE penstock.%I', part.name);
                RETURN 1;
            END IF;
            IF goes IS NOT NULL THEN
                mixed := mixed || part.name::text;
                whose := whose || goes::text;
            END IF;
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
                NULL;
        END;
    END LOOP;
    FOR i IN 1 .. cardinality(mixed) LOOP
        BEGIN
            EXECUTE format('DELETE FROM penstock.%1$I
                             WHERE ctid = ANY (ARRAY(SELECT ctid FROM penstock.%1$I WHERE queue_id = ANY ($1)
                                                      LIMIT $2 FOR UPDATE SKIP LOCKED))', mixed[i])
              USING whose[i]::integer[], most;
            GET DIAGNOSTICS gone = ROW_COUNT;
            IF gone > 0 THEN
                RETURN gone;
            END IF;
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
                NULL;
        END;
    END LOOP;
    IF NOT EXISTS (SELECT FROM penstock.output_default) THEN
        RETURN 0; -- the next statement is planned over the tables of entries of all queues, and locks them
    END IF;
    DELETE FROM penstock.output_default o
     WHERE o.ctid = ANY (ARRAY(
           SELECT x.ctid FROM penstock.output_default x
             LEFT JOIN penstock.queue q ON q.id = x.queue_id
            WHERE (q.id IS NULL OR x.at < clock_timestamp() - CASE WHEN penstock.keeps_output(q)
                                                                   THEN greatest(q.result_retention, interval '1 minute')
                                                                   ELSE interval '1 hour' END)
              AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = x.queue_id AND e.id = x.entry_id)
            LIMIT most));
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN gone;
END $$;
