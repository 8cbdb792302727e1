-- +goose Up

-- The kind of a queue says who reads its entries, and what cron jobs, watches and batches count on: with another kind
-- they would wait for ever and say nothing. What changes the kind holds the row of the queue, and rows that refer to it
-- are few and rarely made; one that is made in the same moment is not seen.
-- +goose StatementBegin
CREATE FUNCTION penstock.keep_queue_kind() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    needs text;
BEGIN
    SELECT format('%s %s', n.what, n.name) INTO needs FROM (
        SELECT 'cron job' AS what, j.name FROM penstock.cron_job j WHERE j.queue_id = OLD.id
        UNION ALL SELECT 'the watch of', w.watched::text FROM penstock.watch w WHERE w.queue_id = OLD.id
        UNION ALL SELECT 'batch', b.id::text FROM penstock.batch b WHERE b.queue_id = OLD.id AND b.ended_at IS NULL) n LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'queue "%" cannot change its kind from % to %: % needs it', OLD.name, OLD.kind, NEW.kind, needs
            USING ERRCODE = 'PS006', HINT = 'Drop the cron jobs, end the watches and wait for the batches first, or make another queue.';
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd

CREATE TRIGGER keep_queue_kind BEFORE UPDATE OF kind ON penstock.queue FOR EACH ROW
    WHEN (OLD.kind IS DISTINCT FROM NEW.kind) EXECUTE FUNCTION penstock.keep_queue_kind();

-- use_limit makes a queue use a limit. As before, and units below 0 are refused: they changed nothing and said so nowhere.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.use_limit(queue_name text, limit_name text, units integer DEFAULT 1, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue_name);
    lim  penstock."limit";
BEGIN
    IF units IS NULL OR units < 0 THEN
        RAISE EXCEPTION 'units is not at least 0; 0 ends the use' USING ERRCODE = 'PS002';
    END IF;
    SELECT * INTO lim FROM penstock."limit" WHERE name = limit_name FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'limit "%" does not exist', limit_name
            USING ERRCODE = 'PS002', HINT = 'Make it first: SELECT penstock.set_limit(''name'', ''{"max_units": 4}'').';
    END IF;
    IF units > 0 THEN
        INSERT INTO penstock.limit_use (queue_id, limit_id, units, since) VALUES (q.id, lim.id, use_limit.units, clock_timestamp())
        ON CONFLICT (queue_id, limit_id) DO UPDATE SET units = excluded.units, since = clock_timestamp();
    END IF;
    PERFORM penstock.limits_changed(lim.id);
    IF units = 0 THEN
        DELETE FROM penstock.limit_use WHERE queue_id = q.id AND limit_id = lim.id;
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (actor, 'use_limit', queue_name, reason, jsonb_build_object('limit', limit_name, 'units', units));
END $$;
-- +goose StatementEnd

-- set_quota bounds an application. As before, and it needs one.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.set_quota(application text, options jsonb, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    quota text := 'application:' || application;
    q     record;
BEGIN
    IF coalesce(application, '') = '' THEN
        RAISE EXCEPTION 'application is empty' USING ERRCODE = 'PS002';
    END IF;
    IF options IS NULL THEN
        PERFORM penstock.limits_changed(l.id) FROM penstock."limit" l WHERE l.name = quota;
        DELETE FROM penstock."limit" l WHERE l.name = quota;
        INSERT INTO penstock.audit (actor, verb, object, reason) VALUES (set_quota.actor, 'set_quota', quota, set_quota.reason);
        RETURN;
    END IF;
    PERFORM penstock.set_limit(quota, options, reason, actor);
    FOR q IN SELECT x.name FROM penstock.queue x WHERE x.application = set_quota.application
                AND NOT EXISTS (SELECT FROM penstock.limit_use u JOIN penstock."limit" l ON l.id = u.limit_id WHERE u.queue_id = x.id AND l.name = quota)
              ORDER BY x.id
    LOOP
        PERFORM penstock.use_limit(q.name, quota, 1, reason, actor);
    END LOOP;
END $$;
-- +goose StatementEnd

-- pause holds up what a scope says. As before, and a model must be one: a misspelt name paused nothing.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.pause(scope text, value text, queue text DEFAULT NULL::text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text, until timestamp with time zone DEFAULT NULL::timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
DECLARE
    q     integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
    known boolean;
BEGIN
    IF until <= clock_timestamp() OR NOT isfinite(until) THEN
        RAISE EXCEPTION 'until is not a time to come' USING ERRCODE = 'PS002';
    END IF;
    IF pause.scope = 'model' AND NOT EXISTS (SELECT FROM penstock.model m WHERE m.name = pause.value)
       AND NOT EXISTS (SELECT FROM penstock.queue x WHERE x.model = pause.value) THEN
        RAISE EXCEPTION 'value: there is no model "%"', value USING ERRCODE = 'PS002', HINT = 'Register it first: penstock.register_model.';
    END IF;
    PERFORM FROM penstock.pause p WHERE p.scope = pause.scope AND p.value = pause.value AND p.queue_id IS NOT DISTINCT FROM q FOR UPDATE;
    known := FOUND;
    IF NOT known AND pause.scope IN ('name', 'lock_key') AND EXISTS (
       SELECT FROM penstock.disabled d WHERE d.queue_id = q AND d.scope = pause.scope AND d.value = pause.value) THEN
        RAISE EXCEPTION 'entries with % "%" are disabled', scope, value USING ERRCODE = 'PS006', HINT = 'Enable them first: penstock.enable_entries.';
    END IF;
    INSERT INTO penstock.pause AS p (scope, value, queue_id, actor, reason, until)
    VALUES (pause.scope, pause.value, q, coalesce(pause.actor, current_user), coalesce(pause.reason, ''), pause.until)
    ON CONFLICT (scope, value, coalesce(queue_id, 0)) DO UPDATE SET actor = excluded.actor, reason = excluded.reason, until = excluded.until;
    IF NOT known AND pause.scope IN ('name', 'lock_key') THEN
        PERFORM penstock.disable_entries(queue, pause.scope, pause.value, pause.reason, pause.actor);
    END IF;
    PERFORM penstock.pauses_changed(q);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(pause.actor, current_user), 'pause', pause.scope || ' ' || pause.value, pause.reason,
            jsonb_strip_nulls(jsonb_build_object('queue', queue, 'until', until)));
EXCEPTION WHEN check_violation OR not_null_violation THEN
    RAISE EXCEPTION 'pause of % "%" is not valid', scope, value USING ERRCODE = 'PS002',
        HINT = 'The scopes are name and lock_key (with a queue), flow (with or without), model, application and node.';
END $$;
-- +goose StatementEnd

-- check_arrays refuses arrays of options that are longer than that of the payloads, and callbacks that nobody could make.
-- +goose StatementBegin
CREATE FUNCTION penstock.check_arrays(n integer, lengths integer[], callbacks jsonb[]) RETURNS void
    LANGUAGE plpgsql IMMUTABLE
    AS $$
DECLARE
    bad record;
BEGIN
    SELECT u.name, u.length INTO bad
      FROM unnest('{lock_keys,flows,priorities,dues,start_bys,finish_bys,costs,names,idempotency_keys,unique_keys,unique_policies,traces,callbacks}'::text[],
                  lengths) u(name, length)
     WHERE u.length > n LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% has % elements, and there are % payloads', bad.name, bad.length, n
            USING ERRCODE = 'PS002', HINT = 'Arrays of options are as long as that of the payloads; null stands for an option left out.';
    END IF;
    SELECT u.i, CASE WHEN jsonb_typeof(u.c) <> 'object' THEN 'callback is not an object with url and, if wanted, context'
                     ELSE 'callback.url is missing or not a text' END AS problem INTO bad
      FROM unnest(callbacks) WITH ORDINALITY u(c, i)
     WHERE jsonb_typeof(u.c) <> 'null'
       AND (jsonb_typeof(u.c) <> 'object' OR jsonb_typeof(u.c->'url') IS DISTINCT FROM 'string' OR u.c->>'url' = '')
     ORDER BY u.i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% (entry %)', bad.problem, bad.i USING ERRCODE = 'PS002';
    END IF;
END $$;
-- +goose StatementEnd

-- push_many accepts entries. As before, and it looks at the lengths of its arrays and at callbacks, where there are any.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.push_many(queue_name text, payloads jsonb[], lock_keys text[] DEFAULT '{}'::text[], flows text[] DEFAULT '{}'::text[], priorities smallint[] DEFAULT '{}'::smallint[], dues timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], start_bys timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], finish_bys timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], costs real[] DEFAULT '{}'::real[], names text[] DEFAULT '{}'::text[], idempotency_keys text[] DEFAULT '{}'::text[], unique_keys text[] DEFAULT '{}'::text[], unique_policies text[] DEFAULT '{}'::text[], traces text[] DEFAULT '{}'::text[], callbacks jsonb[] DEFAULT '{}'::jsonb[], OUT ids bigint[], OUT verdicts text[]) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
DECLARE
    q    penstock.queue;
    n    integer := coalesce(array_length(payloads, 1), 0);
    keep boolean[];
BEGIN
    SELECT * INTO q FROM penstock.queue WHERE name = queue_name;
    IF NOT FOUND THEN
        q := penstock.queue_row(queue_name); -- raises
    ELSIF n = 0 THEN
        ids := '{}';
        RETURN;
    END IF;
    PERFORM penstock.check_payloads(q, payloads);
    IF q.grouping IS NULL AND q.capacity IS NULL AND cardinality(lock_keys) + cardinality(flows) + cardinality(priorities)
       + cardinality(dues) + cardinality(start_bys) + cardinality(finish_bys) + cardinality(costs) + cardinality(names)
       + cardinality(idempotency_keys) + cardinality(unique_keys) + cardinality(unique_policies) + cardinality(traces)
       + cardinality(callbacks) = 0 THEN
        -- The plain push, which uses no option: the same as below with everything left out that is about options.
        WITH fresh AS (
            INSERT INTO penstock.entry (id, queue_id, status, priority, payload)
            SELECT nextval('penstock.entry_id_seq'), q.id, 'pending', q.entry_priority, p FROM unnest(payloads) p
            RETURNING id
        ), solo AS (
            INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
            SELECT q.id, q.entry_priority, '', f.id, f.id FROM fresh f
        )
        SELECT array_agg(f.id ORDER BY f.id) INTO ids FROM fresh f;
        RETURN;
    END IF;
    IF greatest(cardinality(lock_keys), cardinality(flows), cardinality(priorities), cardinality(dues), cardinality(start_bys),
                cardinality(finish_bys), cardinality(costs), cardinality(names), cardinality(idempotency_keys), cardinality(unique_keys),
                cardinality(unique_policies), cardinality(traces), cardinality(callbacks)) > n OR cardinality(callbacks) > 0 THEN
        PERFORM penstock.check_arrays(n, ARRAY[cardinality(lock_keys), cardinality(flows), cardinality(priorities), cardinality(dues),
            cardinality(start_bys), cardinality(finish_bys), cardinality(costs), cardinality(names), cardinality(idempotency_keys),
            cardinality(unique_keys), cardinality(unique_policies), cardinality(traces), cardinality(callbacks)], callbacks);
    END IF;
    PERFORM penstock.check_options(q, payloads, lock_keys, flows, priorities, names, idempotency_keys, unique_keys,
                                   unique_policies, dues, start_bys, finish_bys, costs);
    ids := ARRAY(SELECT nextval('penstock.entry_id_seq') FROM generate_series(1, n));
    IF cardinality(idempotency_keys) > 0 THEN
        SELECT r.ids, r.verdicts INTO ids, verdicts
          FROM penstock.resolve_idempotency(q, ids, payloads, flows, idempotency_keys, lock_keys, names) r;
    END IF;
    IF cardinality(unique_keys) > 0 THEN
        SELECT r.ids, r.verdicts INTO ids, verdicts
          FROM penstock.resolve_uniqueness(q, ids, verdicts, unique_keys, unique_policies) r;
    END IF;
    IF verdicts IS NOT NULL THEN
        keep := ARRAY(SELECT v = 'inserted' FROM unnest(verdicts) WITH ORDINALITY u(v, i) ORDER BY i);
        n := cardinality(array_positions(keep, true));
    END IF;
    IF q.capacity IS NOT NULL AND n > 0 THEN
        PERFORM penstock.admit(q, n);
    END IF;

    WITH fresh AS (
        INSERT INTO penstock.entry (id, queue_id, status, due_at, start_by, finish_by, cost, priority, enabled_priority,
                                    flow, lock_key, name, unique_key, trace, callback, payload)
        SELECT u.id, q.id, CASE WHEN u.due_at > now() THEN 'initial' ELSE 'pending' END::penstock.status,
               u.due_at, u.start_by, u.finish_by, u.cost,
               CASE WHEN off.off THEN -1 ELSE p.priority END, CASE WHEN off.off THEN p.priority END,
               coalesce(u.flow, ''), k.lock_key, u.name, u.unique_key, u.trace, u.callback, u.payload
          FROM unnest(ids, payloads, lock_keys, flows, priorities, dues, start_bys, finish_bys, costs, names,
                      unique_keys, unique_policies, traces, callbacks, keep)
               WITH ORDINALITY
               AS u(id, payload, lock_key, flow, priority, due_at, start_by, finish_by, cost, name,
                    unique_key, unique_policy, trace, callback, keep, i)
               CROSS JOIN LATERAL (SELECT coalesce(u.priority, q.entry_priority) AS priority) p
               CROSS JOIN LATERAL (SELECT coalesce(u.lock_key,
                    CASE WHEN q.grouping IS NOT NULL THEN penstock.lock_key_of(u.payload, q.grouping) END,
                    CASE WHEN u.unique_policy = 'one_running_one_queued' THEN 'unique:' || u.unique_key END) AS lock_key) k
               CROSS JOIN LATERAL (SELECT EXISTS (
                    SELECT FROM penstock.disabled d
                     WHERE d.queue_id = q.id AND ((d.scope = 'name' AND d.value = u.name)
                                               OR (d.scope = 'lock_key' AND d.value = k.lock_key))) AS off) off
         WHERE u.keep IS NOT FALSE
         ORDER BY u.i
        RETURNING id, priority, flow, lock_key, status
    ), solo AS (
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
        SELECT q.id, f.priority, f.flow, f.id, f.id
          FROM fresh f
         WHERE f.lock_key IS NULL AND f.status = 'pending' AND f.priority >= 0
    )
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
    SELECT q.id, g.priority, g.flow, g.pos, g.lock_key
      FROM (SELECT f.priority, f.flow, f.lock_key, min(f.id) AS pos
              FROM fresh f
             WHERE f.lock_key IS NOT NULL AND f.status = 'pending' AND f.priority >= 0
             GROUP BY f.priority, f.flow, f.lock_key) g
     WHERE NOT EXISTS (
        -- A ready row of the key that we can lock stays until we commit: whoever takes it away sees our entries.
        -- One that is locked already gives no such promise, so that the key gets another.
        SELECT FROM penstock.ready r
         WHERE r.lock_key = g.lock_key AND r.queue_id + 0 = q.id AND r.priority = g.priority AND r.flow = g.flow
         LIMIT 1
           FOR UPDATE SKIP LOCKED)
     ORDER BY g.lock_key;
END $$;
-- +goose StatementEnd
