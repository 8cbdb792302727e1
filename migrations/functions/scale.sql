-- Autoscaling: the work of a model, its deployments, and the switches.

-- scale_online_runs returns, in one row, how many requests of a model run through gateways: the calls in flight that
-- each gateway reported with its last heartbeat, and the slots that it leased since, which it leased for requests that
-- waited. It is never more than the slots that a gateway holds, and all of these where it reported nothing: idle slots
-- are no requests. It is one statement without settings, so that the planner puts it into those of its callers.
-- Callers: scale_running, scale_input.
CREATE OR REPLACE FUNCTION penstock.scale_online_runs(wanted text) RETURNS TABLE (running bigint)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(least(g.held, g.since + coalesce(g.flying, g.held))), 0)::bigint
      FROM (SELECT count(*) AS held, count(*) FILTER (WHERE s.leased_at > n.beat_at) AS since,
                   CASE WHEN jsonb_typeof(n.load->'pools'->wanted->'stock') = 'number'
                        THEN greatest((n.load->'pools'->wanted->>'stock')::numeric, 0) END AS flying
              FROM penstock.instance i
              JOIN penstock.slot s ON s.instance_id = i.id
              JOIN penstock.node n ON n.id = s.node_id
             WHERE i.model = wanted AND s.doubt_at IS NULL AND n.kind = 'gateway'
             GROUP BY n.id) g
$$;

-- scale_running returns how many requests of a model run: the locks of its queues, each of which runs one entry at a
-- time, and the calls of gateways.
-- Callers: scale_metric.
CREATE OR REPLACE FUNCTION penstock.scale_running(wanted text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT (SELECT count(*) FROM penstock.lock l JOIN penstock.queue q ON q.id = l.queue_id WHERE q.model = wanted)
           + (SELECT r.running FROM penstock.scale_online_runs(wanted) r)
$$;

-- scale_slots_missing returns, in one row, how many slots the gateways miss that asked for some of a model within the
-- last 3 seconds, at most 1,000,000. A demand of a time in the future is from before the clock was set back: it counts
-- when it is repeated. The planner puts it into the statements of its callers.
-- Callers: scale_online_waits, scale_input, scale_wanted, prune_deployments.
CREATE OR REPLACE FUNCTION penstock.scale_slots_missing(wanted text) RETURNS TABLE (missing bigint)
LANGUAGE sql STABLE AS $$
    SELECT least(coalesce(sum(d.missing), 0), 1000000)::bigint
      FROM penstock.slot_demand d
     WHERE d.model = wanted
       AND d.wanted_at > clock_timestamp() - interval '3 seconds' AND d.wanted_at <= clock_timestamp()
       AND penstock.node_online(d.node_id) AND penstock.node_lives(d.node_id)
$$;

-- scale_over_limit returns, for each model with such requests, how many wait because the instances take no more calls:
-- each gateway reported the number with its last heartbeat. It is at most 1,000,000, whatever they report: a number
-- that does not fit a column would end the decisions about all models. A report has all pools of a gateway and is
-- stored compressed, so each is read once for all models.
-- Callers: scale_online_waits, scale_input, scale_wanted, prune_deployments.
CREATE OR REPLACE FUNCTION penstock.scale_over_limit() RETURNS TABLE (model text, waiting bigint)
LANGUAGE sql STABLE AS $$
    SELECT p.key, least(sum((p.value->>'over_limit')::numeric), 1000000)::bigint
      FROM penstock.node n
     CROSS JOIN LATERAL jsonb_each(CASE WHEN jsonb_typeof(n.load->'pools') = 'object' THEN n.load->'pools' END) p
     WHERE n.kind = 'gateway' AND n.beat_at + n.lease > clock_timestamp()
       AND CASE WHEN jsonb_typeof(p.value->'over_limit') = 'number' THEN (p.value->>'over_limit')::numeric > 0 END
     GROUP BY p.key
$$;

-- scale_online_waits returns, in one row, how many requests of one model wait at gateways. Where many models are asked
-- for, scale_over_limit is read once instead.
-- Callers: scale_metric.
CREATE OR REPLACE FUNCTION penstock.scale_online_waits(wanted text) RETURNS TABLE (missing bigint)
LANGUAGE sql STABLE AS $$
    SELECT b.missing + coalesce((SELECT x.waiting FROM penstock.scale_over_limit() x WHERE x.model = wanted), 0)
      FROM penstock.scale_slots_missing(wanted) b
$$;

-- scale_closed_flows returns the flows of a queue that are paused or throttled, some of them twice. It is put into the
-- statements of its callers.
-- Callers: scale_lanes.
CREATE OR REPLACE FUNCTION penstock.scale_closed_flows(queue integer) RETURNS TABLE (flow text)
LANGUAGE sql STABLE AS $$
    SELECT x.value COLLATE "C" FROM penstock.pause x
     WHERE x.scope = 'flow' AND penstock.paused_until(x.until) AND coalesce(x.queue_id, $1) = $1
     UNION ALL
    SELECT t.flow FROM penstock.throttle t
     WHERE t.queue_id = $1 AND NOT t.queue_wide AND t.until > clock_timestamp() AND t.at <= clock_timestamp()
$$;

-- scale_flow_closed returns whether a flow of a queue is one of scale_closed_flows, by two look-ups in indexes. It is
-- put into the statements of its callers.
-- Callers: scale_late.
CREATE OR REPLACE FUNCTION penstock.scale_flow_closed(queue integer, flow text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.pause x
                    WHERE x.scope = 'flow' AND x.value = $2 AND penstock.paused_until(x.until)
                      AND coalesce(x.queue_id, $1) = $1)
           OR EXISTS (SELECT FROM penstock.throttle t
                       WHERE t.queue_id = $1 AND NOT t.queue_wide AND t.flow = $2 AND t.until > clock_timestamp()
                         AND t.at <= clock_timestamp())
$$;

-- scale_lanes returns the ranges of flows of a priority in which ready rows of a queue may start: all but the flows
-- that are paused or throttled. A range begins at first_flow and ends before end_flow. A flow that is left out costs no
-- reading, however many rows wait in it, but a range for each priority. chr(1) is the least character: nothing is
-- between a flow and the same with it appended.
-- Callers: scale_startable.
CREATE OR REPLACE FUNCTION penstock.scale_lanes(
    queue integer
) RETURNS TABLE (priority smallint, first_flow text, end_flow text)
LANGUAGE sql STABLE AS $$
    SELECT p::smallint, f.first_flow, coalesce(f.end_flow, z.flow || chr(1))
      FROM generate_series(0, 9) p
     CROSS JOIN LATERAL (
           SELECT y.flow FROM penstock.ready y WHERE y.queue_id = $1 AND y.priority = p::smallint
               ORDER BY y.flow DESC LIMIT 1) z
      JOIN (SELECT coalesce(x.flow || chr(1), '') COLLATE "C" AS first_flow,
            lead(x.flow) OVER (ORDER BY x.flow NULLS FIRST) AS end_flow
              FROM (SELECT NULL::text COLLATE "C" AS flow UNION ALL SELECT c.flow COLLATE "C"
                    FROM penstock.scale_closed_flows($1) c) x
            OFFSET 0) f
        ON f.first_flow <= z.flow
$$;

-- scale_startable returns, for each queue of a model whose entries may start, how many do wait, at most `most`, and how
-- many more locks its concurrency has room for. What is paused, disabled, throttled or delayed is left out. At most
-- 20,000 ready rows of a queue are read, of which those that are delayed or whose lock key is paused do not count.
-- Locks are found by a range of one queue: for an equality the planner expects the mean over all queues, and reads
-- every lock record for each model where few queues have many.
-- Callers: scale_waiting, scale_waiting_each, scale_late.
CREATE OR REPLACE FUNCTION penstock.scale_startable(wanted text, most integer)
RETURNS TABLE (queue_id integer, queue text, startable bigint, room bigint)
LANGUAGE sql STABLE AS $$
    SELECT q.id, q.name, r.waiting, greatest(0, coalesce(q.max_concurrent, 2147483647) - l.held)::bigint
      FROM penstock.queue q
     CROSS JOIN LATERAL (SELECT CASE WHEN q.weighed
                         THEN (SELECT coalesce(sum(k.weight), 0) FROM penstock.lock k
                               WHERE k.queue_id BETWEEN q.id AND q.id)
                                  ELSE (SELECT count(*) FROM penstock.lock k
                                        WHERE k.queue_id BETWEEN q.id AND q.id) END AS held) l
     CROSS JOIN LATERAL (
           SELECT count(*) AS waiting
             FROM (SELECT
                     FROM (SELECT y.not_before, y.lock_key
                             FROM penstock.scale_lanes(q.id) s
                            CROSS JOIN LATERAL (
                                  SELECT x.not_before, x.lock_key FROM penstock.ready x
                                   WHERE x.queue_id = q.id AND x.priority = s.priority AND x.flow >= s.first_flow
                                     AND x.flow < s.end_flow
                                   LIMIT 20000) y
                            LIMIT 20000) y
                    WHERE penstock.ready_now(y.not_before)
                      AND NOT EXISTS (SELECT FROM penstock.pause p
                                       WHERE p.scope = 'lock_key' AND p.value = y.lock_key AND p.queue_id = q.id
                                         AND penstock.paused_until(p.until))
                    LIMIT greatest(most, 0)) bounded) r
     WHERE q.model = wanted AND NOT EXISTS (SELECT FROM penstock.queue_stops(q))
       AND NOT EXISTS (SELECT FROM penstock.throttle t WHERE t.queue_id = q.id AND t.until > clock_timestamp()
                       AND t.at <= clock_timestamp() AND t.queue_wide)
$$;

-- scale_waiting returns how many requests of a model wait that may start, at most `most` a queue: the ready rows that a
-- claim could take and that the concurrency of their queue has room for.
-- Callers: scale_metric, scale_wanted, prune_deployments.
CREATE OR REPLACE FUNCTION penstock.scale_waiting(wanted text, most integer DEFAULT 10000) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(least(s.startable, s.room)), 0)::bigint FROM penstock.scale_startable(wanted, most) s
$$;

-- scale_waiting_each returns the same by queue: an object of ids, without queues whose entries may not start.
-- Callers: scale_input.
CREATE OR REPLACE FUNCTION penstock.scale_waiting_each(wanted text, most integer DEFAULT 10000) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT coalesce(jsonb_object_agg(s.queue_id, least(s.startable, s.room)), '{}')
        FROM penstock.scale_startable(wanted, most) s
$$;

-- scale_metric returns the demand of a model in requests: those that run, those that may start, and those that wait at
-- gateways. It is what the postgresql trigger of KEDA asks for, with the slots of an instance as targetQueryValue:
--   SELECT penstock.scale_metric('llama')
-- It counts in the database: no leader and no node needs to run for it.
-- Callers: psql.
-- SQLSTATE: PS008 no such model.
CREATE OR REPLACE FUNCTION penstock.scale_metric(model text) RETURNS double precision
LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM penstock.need_model(model);
    RETURN (penstock.scale_running(model) + penstock.scale_waiting(model)
            + (SELECT b.missing FROM penstock.scale_online_waits(model) b))::double precision;
END $$;

-- need_deployment raises an error for a deployment that does not exist.
-- Callers: set_scale_override, remove_deployment, check_announced_deployment.
-- SQLSTATE: PS008 no such deployment.
CREATE OR REPLACE FUNCTION penstock.need_deployment(wanted text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.deployment WHERE name = wanted) THEN
        RAISE EXCEPTION 'deployment "%" does not exist', wanted
            USING ERRCODE = 'PS008', HINT = 'Set the deployment first, with its model and backend (set_deployment).';
    END IF;
END $$;

-- check_scale_policy raises an error for a policy with a field that does not exist, or whose value pkg/scale does not
-- take, by its name. Gateways and degradations read these numbers as well. A bound of 0 is refused, since it would be
-- none to some readers and a stop to others. How fields go together, and floors, are checked where policies are read,
-- by pkg/scale.
-- Callers: set_deployment, set_deployment_template.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_scale_policy(policy jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    f record;
BEGIN
    IF policy->'max' = '0' OR policy->'emergency_max' = '0' THEN
        RAISE EXCEPTION 'max and emergency_max of a policy are at least 1' USING ERRCODE = 'PS002',
            HINT = 'Without them max is 10, and there is no emergency_max. Override a deployment to 0 to give up its instances.';
    END IF;
    SELECT p.field, p.value, v.kind, CASE v.kind
               WHEN 'whole' THEN 'a whole number from 0 to ' || v.most
               WHEN 'number' THEN 'a number from 0 to ' || v.most
               WHEN 'seconds' THEN 'from 0 to 1000000000 seconds, or a text as 10m30s'
               WHEN 'word' THEN 'penstock, replicate-v2, hpa or utilization'
               ELSE 'a JSON ' || v.kind END AS wanted
      INTO f
      FROM penstock.policy_fields(policy) p
      LEFT JOIN (VALUES
            ('algorithm',                     'word',    NULL::bigint),
            ('min',                           'whole',   1400),
            ('max',                           'whole',   1400),
            ('slots',                         'whole',   100000),
            ('slo_seconds',                   'seconds', NULL),
            ('online_slo_seconds',            'seconds', NULL),
            ('theta',                         'number',  1),
            ('rho',                           'number',  1),
            ('beta',                          'number',  1000),
            ('phi',                           'number',  1),
            ('tolerated',                     'number',  1),
            ('drain_seconds',                 'seconds', NULL),
            ('hold_seconds',                  'seconds', NULL),
            ('idle_min_seconds',              'seconds', NULL),
            ('idle_max_seconds',              'seconds', NULL),
            ('cold_price',                    'number',  1000000),
            ('scale_to_zero',                 'boolean', NULL),
            ('slow_start',                    'whole',   1000000000),
            ('stuck_min_seconds',             'seconds', NULL),
            ('blocked_for_seconds',           'seconds', NULL),
            ('emergency_max',                 'whole',   1000000000),
            ('floors',                        'array',   NULL),
            ('replicate',                     'object',  NULL),
            ('replicate.target',              'number',  1000000000),
            ('replicate.headroom',            'number',  1000000000),
            ('replicate.hysteresis',          'number',  1000000),
            ('replicate.computing',           'boolean', NULL),
            ('replicate.out_count',           'whole',   1000000000),
            ('replicate.out_window_seconds',  'seconds', NULL),
            ('replicate.in_window_seconds',   'seconds', NULL),
            ('replicate.idle_delay_seconds',  'seconds', NULL),
            ('hpa',                           'object',  NULL),
            ('hpa.target',                    'number',  1000000000),
            ('hpa.tolerance',                 'number',  1000000),
            ('hpa.period_seconds',            'seconds', NULL),
            ('hpa.window_seconds',            'seconds', NULL),
            ('hpa.cooldown_seconds',          'seconds', NULL),
            ('utilization',                   'object',  NULL),
            ('utilization.variant',           'string',  NULL),
            ('utilization.factor',            'number',  1000000),
            ('utilization.min_utilization',   'number',  1000000),
            ('utilization.max_utilization',   'number',  1000000),
            ('utilization.utilization_scale', 'number',  1000000),
            ('utilization.use_forecast',      'boolean', NULL),
            ('utilization.use_out_of_cap',    'boolean', NULL),
            ('utilization.period_seconds',    'seconds', NULL),
            ('utilization.down_max',          'whole',   1000000000)
           ) v(field, kind, most) USING (field)
     WHERE NOT CASE
           WHEN v.kind IS NULL THEN false
           WHEN p.type = 'null' THEN true -- the default
           WHEN v.kind = 'whole' THEN p.type = 'number' AND p.word ~ '^[0-9]+$' AND p.word::numeric <= v.most
           WHEN v.kind = 'number' THEN p.type = 'number' AND p.word::numeric BETWEEN 0 AND v.most
           WHEN v.kind = 'seconds' AND p.type = 'number' THEN p.word::numeric BETWEEN 0 AND 1e9
           WHEN v.kind = 'seconds' AND p.type = 'string' THEN coalesce(penstock.duration_seconds(p.word) <= 1e9, false)
           WHEN v.kind = 'word' THEN p.type = 'string'
                                     AND p.word IN ('', 'penstock', 'replicate-v2', 'hpa', 'utilization')
           ELSE p.type = v.kind END
     ORDER BY p.field COLLATE "C" LIMIT 1;
    IF FOUND AND f.kind IS NULL THEN
        RAISE EXCEPTION 'a policy has no field %: docs/autoscaling.md lists them', quote_ident(f.field)
            USING ERRCODE = 'PS002';
    ELSIF FOUND THEN
        RAISE EXCEPTION '% of a policy is %: want %', f.field, f.value, f.wanted USING ERRCODE = 'PS002';
    END IF;
END $$;

-- check_deployment_numbers raises an error for a number of a deployment, or of a template of deployments, that is none
-- or is out of its range, by its name. A cost is compared with a budget.
-- Callers: set_deployment, set_deployment_template.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_deployment_numbers(options jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    float_form CONSTANT text := '^ *[-+]?([0-9]{1,15}([.][0-9]{0,30})?|[.][0-9]{1,30})(e[-+]?[0-9]{1,2})? *$';
    f          record;
BEGIN
    SELECT v.field, options->v.field AS value, v.wanted INTO f
      FROM (VALUES
            ('cost',         float_form,                    0::numeric,  1000000::numeric,
             'a number from 0 to 1000000, an hour'),
            ('fill_order',   '^ *[-+]?[0-9]{1,10} *$',      -2147483648, 2147483647,
             'a whole number from -2147483648 to 2147483647'),
            ('idle_seconds', float_form,                    60,          31104000,
             'a number from 60 to 31104000')
           ) v(field, form, least, most, wanted)
     WHERE options ? v.field
       AND NOT CASE jsonb_typeof(options->v.field)
           WHEN 'null' THEN true -- the default
           WHEN 'number' THEN (options->v.field)::numeric BETWEEN v.least AND v.most
                              AND (v.field <> 'fill_order' OR options->>v.field ~ v.form)
           WHEN 'string' THEN CASE WHEN options->>v.field ~* v.form
                                   THEN (options->>v.field)::numeric BETWEEN v.least AND v.most ELSE false END
           ELSE false END
     ORDER BY v.field LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% is %: want %', f.field, left(f.value::text, 100), f.wanted USING ERRCODE = 'PS002';
    END IF;
END $$;

-- same_kubernetes_object returns whether two targets name the same object of a cluster. A target without a namespace is
-- in that of the leader, which may be any.
-- Callers: kubernetes_target_holder, moves_instances, template_target_holder.
CREATE OR REPLACE FUNCTION penstock.same_kubernetes_object(a jsonb, b jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT a->>'name' = b->>'name'
       AND coalesce(nullif(a->>'group', ''), 'apps') = coalesce(nullif(b->>'group', ''), 'apps')
       AND coalesce(nullif(a->>'resource', ''), 'deployments') = coalesce(nullif(b->>'resource', ''), 'deployments')
       AND coalesce(nullif(a->>'namespace', ''), b->>'namespace', '') = coalesce(nullif(b->>'namespace', ''), a->>'namespace', '')
$$;

-- kubernetes_target_holder returns the name of a deployment other than the wanted one that sets the number of the same
-- object of a cluster; null where none does.
-- Callers: check_kubernetes_target, make_wanted_deployments.
CREATE OR REPLACE FUNCTION penstock.kubernetes_target_holder(wanted text, backend text, target jsonb) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT o.name
      FROM penstock.deployment o
     WHERE $2 = 'kubernetes' AND o.backend = $2 AND o.name <> wanted AND penstock.same_kubernetes_object(o.target, $3)
     ORDER BY o.name LIMIT 1
$$;

-- check_kubernetes_kind raises an error for an object of a cluster whose controller does not heed the cost of a
-- deletion.
-- Callers: check_kubernetes_target, set_deployment_template.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_kubernetes_kind(backend text, target jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF backend = 'kubernetes' AND (target->>'resource' = 'statefulsets' OR target->>'kind' = 'StatefulSet') THEN
        RAISE EXCEPTION 'a StatefulSet ends its last pod, whichever is idle' USING ERRCODE = 'PS002',
            HINT = 'Make it a Deployment.';
    END IF;
END $$;

-- check_kubernetes_target raises an error where the deployment and another one set the number of one object of a
-- cluster, since each would undo what the other one does, and for one of a kind that is not fit.
-- Callers: set_deployment, set_deployment_template.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_kubernetes_target(wanted text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    d     penstock.deployment;
    other text;
BEGIN
    SELECT x.* INTO d FROM penstock.deployment x WHERE x.name = wanted;
    PERFORM penstock.check_kubernetes_kind(d.backend, d.target);
    other := penstock.kubernetes_target_holder(d.name, d.backend, d.target);
    IF other IS NOT NULL THEN
        RAISE EXCEPTION 'deployment "%" has the target of deployment "%"', wanted, other USING ERRCODE = 'PS002',
            HINT = 'One object of a cluster belongs to one deployment. Name the namespace in both where they are two objects.';
    END IF;
END $$;

-- moves_instances returns whether a deployment whose backend and target change would lose those of its instances that
-- exist: its backend before would never be told to end them, or the next one would not find those that are registered.
-- Backends advise and keda start nothing, and a webhook is told all numbers anew. A namespace is compared as it is
-- given, since that of the leader is not known here.
-- Callers: check_deployment_stays.
CREATE OR REPLACE FUNCTION penstock.moves_instances(
    was_backend text,
    was         jsonb,
    backend     text,
    target      jsonb
) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN was_backend <> backend THEN was_backend NOT IN ('advise', 'keda')
        OR backend NOT IN ('advise', 'keda', 'webhook')
                WHEN backend = 'kubernetes' THEN
                     NOT coalesce(penstock.same_kubernetes_object(was, target), false)
                     OR coalesce(was->>'namespace', '') <> coalesce(target->>'namespace', '')
                ELSE false END
$$;

-- has_instances returns whether a deployment has instances, or may have: registered, reported or ordered.
-- Callers: check_deployment_stays, set_deployment.
CREATE OR REPLACE FUNCTION penstock.has_instances(wanted text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.instance i WHERE i.deployment = wanted)
        OR EXISTS (SELECT FROM penstock.deployment_state s WHERE s.name = wanted AND (s.existing > 0 OR s.ordered > 0))
$$;

-- check_deployment_stays raises an error where a deployment with instances is to get another backend, or another object
-- of a cluster. Null stands for what it has.
-- Locks: the row of the deployment (FOR UPDATE), where they change.
-- Callers: set_deployment, set_deployment_template.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_deployment_stays(wanted text, backend text, target jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM penstock.deployment d
      WHERE d.name = wanted AND penstock.moves_instances(d.backend, d.target, coalesce($2, d.backend), coalesce($3, d.target)) FOR UPDATE;
    IF FOUND AND penstock.has_instances(wanted) THEN
        RAISE EXCEPTION 'deployment "%" has instances in its present backend and target',
            wanted USING ERRCODE = 'PS002',
            HINT = 'Override it to 0 instances first, or make a deployment of another name. Where they are out of '
                   'reach, or belong to the new target too, remove the deployment and make it again.';
    END IF;
END $$;

-- set_deployment makes a deployment of a model, or changes the given fields of one: backend, target,
-- policy, template, cost, fill_order, mode. One that has instances keeps its model, which they serve, and what runs
-- them.
-- Locks: the row of the deployment.
-- Callers: psql.
-- SQLSTATE: PS002 invalid argument, PS008 no such model.
CREATE OR REPLACE FUNCTION penstock.set_deployment(name text, model text, options jsonb DEFAULT '{}',
                                                   reason text DEFAULT '',
                                                   actor text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    unknown text := (SELECT string_agg(k, ', ') FROM jsonb_object_keys(options) k
                      WHERE k NOT IN ('backend', 'target', 'policy', 'template', 'cost', 'fill_order', 'mode'));
BEGIN
    PERFORM penstock.need_model(model);
    IF unknown IS NOT NULL THEN
        RAISE EXCEPTION 'a deployment has no %', unknown
            USING ERRCODE = 'PS002', HINT = 'It has backend, target, policy, template, cost, fill_order and mode.';
    END IF;
    PERFORM penstock.check_scale_policy(options->'policy');
    PERFORM penstock.check_deployment_numbers(options);
    PERFORM FROM penstock.deployment d WHERE d.name = set_deployment.name AND d.model <> set_deployment.model
        FOR UPDATE;
    IF FOUND AND penstock.has_instances(set_deployment.name) THEN
        RAISE EXCEPTION 'deployment "%" has instances of another model', set_deployment.name
            USING ERRCODE = 'PS002', HINT = 'Make a deployment of another name, or override this one to 0 instances first.';
    END IF;
    PERFORM penstock.check_deployment_stays(set_deployment.name, options->>'backend', options->'target');
    INSERT INTO penstock.deployment AS d (name, model, backend, target, policy, template, cost, fill_order, mode)
    VALUES (set_deployment.name, set_deployment.model, coalesce(options->>'backend', 'advise'),
            coalesce(options->'target', '{}'),
            coalesce(options->'policy', '{}'), options->'template', coalesce((options->>'cost')::double precision, 1),
            coalesce((options->>'fill_order')::integer, 0), coalesce(options->>'mode', 'full'))
    ON CONFLICT ON CONSTRAINT deployment_pkey DO UPDATE
       SET model = excluded.model,
           backend = coalesce(options->>'backend', d.backend), target = coalesce(options->'target', d.target),
           policy = coalesce(options->'policy', d.policy), template = coalesce(options->'template', d.template),
           cost = coalesce((options->>'cost')::double precision, d.cost),
           fill_order = coalesce((options->>'fill_order')::integer, d.fill_order),
           mode = coalesce(options->>'mode', d.mode), changed_at = now();
    -- others may be changed whatever the target, so that one of two can be disabled
    IF options ?| '{backend,target}' THEN
        PERFORM penstock.check_kubernetes_target(set_deployment.name);
    END IF;
    PERFORM penstock.audit_log(set_deployment.actor, 'set_deployment', set_deployment.name, set_deployment.reason,
                               options);
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range THEN
        RAISE EXCEPTION 'deployment "%" is not valid: %', set_deployment.name, SQLERRM USING ERRCODE = 'PS002';
END $$;

-- remove_deployment forgets a deployment. Its instances stay as they are.
-- Locks: the row of the deployment.
-- Callers: psql.
-- SQLSTATE: PS008 no such deployment.
CREATE OR REPLACE FUNCTION penstock.remove_deployment(
    name   text,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.need_deployment(remove_deployment.name);
    DELETE FROM penstock.deployment d WHERE d.name = remove_deployment.name;
    PERFORM penstock.audit_log(remove_deployment.actor, 'remove_deployment', remove_deployment.name,
                               remove_deployment.reason);
END $$;

-- set_scale_override sets the number of instances of a deployment until a time; null ends the override.
-- Locks: the row of the deployment.
-- Callers: psql.
-- SQLSTATE: PS002 invalid argument, PS008 no such deployment.
CREATE OR REPLACE FUNCTION penstock.set_scale_override(name text, instances integer, until timestamptz DEFAULT NULL,
                                                       reason text DEFAULT '', actor text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.need_deployment(set_scale_override.name);
    IF instances NOT BETWEEN 0 AND 1400 OR instances IS NOT NULL AND until IS NULL THEN
        RAISE EXCEPTION 'an override has 0 to 1400 instances and a time in the future at which it ends'
            USING ERRCODE = 'PS002';
    END IF;
    IF instances IS NOT NULL THEN
        PERFORM penstock.check_until(until);
    END IF;
    UPDATE penstock.deployment d
       SET override = instances, override_until = CASE WHEN instances IS NOT NULL THEN set_scale_override.until END,
           override_by = CASE WHEN instances IS NOT NULL THEN penstock.actor_name(set_scale_override.actor) END,
           changed_at = now()
     WHERE d.name = set_scale_override.name;
    PERFORM penstock.audit_log(set_scale_override.actor, 'set_scale_override', set_scale_override.name,
                               set_scale_override.reason,
                               jsonb_build_object('instances', instances, 'until', until));
END $$;

-- set_scale_setting sets a switch of all autoscaling, or removes it with null: scale.off and scale.zero_off are
-- booleans, scale.max_all a number of instances, scale.budget a cost an hour of all deployments. Neither is 0, which
-- would be no bound to some readers and a stop to others.
-- Locks: the row of the setting.
-- Callers: psql.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.set_scale_setting(
    name   text,
    value  jsonb,
    reason text  DEFAULT '',
    actor  text  DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT coalesce(CASE WHEN name IN ('scale.off', 'scale.zero_off') THEN jsonb_typeof(value) IN ('boolean', 'null')
                         WHEN name IN ('scale.max_all', 'scale.budget') THEN jsonb_typeof(value) = 'null'
                              OR jsonb_typeof(value) = 'number' AND value::numeric <= 1000000
                                 AND value::numeric >= CASE name WHEN 'scale.budget' THEN 0.000001 ELSE 1 END END,
                    name IN ('scale.off', 'scale.zero_off', 'scale.max_all', 'scale.budget')) THEN
        RAISE EXCEPTION 'setting "%" is not valid', name USING ERRCODE = 'PS002',
            HINT = 'scale.off and scale.zero_off are booleans; scale.max_all is a number from 1 to 1000000, '
                   'scale.budget one from 0.000001 to 1000000. Null removes a setting. An override to 0 gives up the '
                   'instances of a deployment.';
    END IF;
    IF value IS NULL OR jsonb_typeof(value) = 'null' THEN
        DELETE FROM penstock.setting s WHERE s.name = set_scale_setting.name;
    ELSE
        INSERT INTO penstock.setting AS s (name, value, actor, reason)
        VALUES (set_scale_setting.name, set_scale_setting.value, penstock.actor_name(set_scale_setting.actor),
                set_scale_setting.reason)
        ON CONFLICT ON CONSTRAINT setting_pkey DO UPDATE
           SET value = excluded.value, actor = excluded.actor, reason = excluded.reason, changed_at = clock_timestamp();
    END IF;
    PERFORM penstock.audit_log(set_scale_setting.actor, 'set_scale_setting', set_scale_setting.name,
                               set_scale_setting.reason, value);
END $$;

-- scale_queues returns, in one row, the queues of a model and the cheap facts about them: locked is the number of their
-- locks, any_ready whether one has a ready row, arrived how many rows were ever inserted into their tables since the
-- statistics of these began (a number that falls means that they began again), and any_due whether the index of entries
-- that are not due yet of one has more than a page. What costs more is asked for where these say so. The planner puts
-- it into the statements of its callers, in which it reads by indexes whatever the statistics of tables say: a pass
-- over all queues was run once a model where deployment had been empty when it was last analyzed.
-- Callers: scale_input, scale_wanted.
CREATE OR REPLACE FUNCTION penstock.scale_queues(wanted text)
RETURNS TABLE (queues integer[], locked bigint, any_ready boolean, arrived bigint, any_due boolean)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(q.id), '{}'), coalesce(sum(l.held), 0)::bigint, coalesce(bool_or(r.some), false),
           coalesce(sum(pg_stat_get_tuples_inserted(c.entries)), 0)::bigint,
           coalesce(bool_or(coalesce(pg_relation_size(c.due), 2147483647) > current_setting('block_size')::bigint),
                    false)
      FROM penstock.queue q
     CROSS JOIN LATERAL (SELECT count(*) AS held FROM penstock.lock k WHERE k.queue_id BETWEEN q.id AND q.id) l
     CROSS JOIN LATERAL (
           SELECT count(*) > 0 AS some
             FROM (SELECT FROM penstock.ready y WHERE y.queue_id = q.id AND y.priority >= 0 LIMIT 1) one) r
     CROSS JOIN LATERAL (
           SELECT (SELECT e.oid FROM pg_catalog.pg_class e
                    WHERE e.relnamespace = 'penstock'::regnamespace
                      AND e.relname = ('entry_' || q.name)::name) AS entries,
                  penstock.entry_index(q, 'due_at') AS due
           OFFSET 0) c
     WHERE q.model = wanted
$$;

-- scale_arrivals returns, in one row, an object of the queues of a model by id: inserted and deleted are how many rows
-- were ever inserted into and deleted from the table of the queue since its statistics began (a number that falls means
-- that they began again), running the locks of the queue. With the requests that wait and may start, deleted and
-- running are all that ever could start. The planner puts it into the statements of its callers.
-- Callers: scale_input.
CREATE OR REPLACE FUNCTION penstock.scale_arrivals(wanted text) RETURNS TABLE (arrivals jsonb)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(jsonb_object_agg(q.id, jsonb_build_object(
               'inserted', coalesce(pg_stat_get_tuples_inserted(e.entries), 0),
               'deleted', coalesce(pg_stat_get_tuples_deleted(e.entries), 0),
               'running', l.held)), '{}')
      FROM penstock.queue q
     CROSS JOIN LATERAL (SELECT count(*) AS held FROM penstock.lock k WHERE k.queue_id BETWEEN q.id AND q.id) l
     CROSS JOIN LATERAL (
           SELECT (SELECT c.oid FROM pg_catalog.pg_class c
                    WHERE c.relnamespace = 'penstock'::regnamespace
                      AND c.relname = ('entry_' || q.name)::name) AS entries
           OFFSET 0) e
     WHERE q.model = wanted
$$;

-- scale_bounded counts the entries of the queues of a model that meet a condition, at most 1,000 a queue. Queues that
-- are not open (queue_stops) are left out. It names the table of each queue: through penstock.entry each call would be
-- planned over, and would lock, the tables of all queues.
-- Callers: scale_due.
CREATE OR REPLACE FUNCTION penstock.scale_bounded(wanted text, condition text, before timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    q     record;
    n     bigint;
    total bigint := 0;
BEGIN
    FOR q IN SELECT x.id, x.name FROM penstock.queue x
              WHERE x.model = wanted AND NOT EXISTS (SELECT FROM penstock.queue_stops(x))
                AND to_regclass(format('penstock.%I', 'entry_' || x.name)) IS NOT NULL
    LOOP
        BEGIN
            EXECUTE format('SELECT count(*) FROM (SELECT FROM penstock.%I e WHERE e.queue_id = $1 AND %s LIMIT 1000) bounded',
                           'entry_' || q.name, condition) INTO n USING q.id, before;
            total := total + n;
        EXCEPTION WHEN undefined_table THEN
            NULL; -- the queue was dropped meanwhile
        END;
    END LOOP;
    RETURN total;
END $$;

-- scale_due returns how many entries of a model become ready within so many seconds, at most 1,000 a queue. A queue
-- whose index of entries that are not due yet is empty, one page, is not read: decisions ask for each model once a
-- second.
-- Callers: scale_input, scale_wanted.
CREATE OR REPLACE FUNCTION penstock.scale_due(wanted text, seconds double precision) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN EXISTS (SELECT FROM penstock.queue q
                              WHERE q.model = wanted
                                AND coalesce(pg_relation_size(penstock.entry_index(q, 'due_at')), 2147483647)
                                    > current_setting('block_size')::bigint)
                THEN penstock.scale_bounded(wanted, 'e.status = ''initial'' AND e.due_at <= $2',
                                            clock_timestamp() + seconds * interval '1 second')
                ELSE 0 END
$$;

-- scale_late returns how many of the requests that scale_waiting counts have to start within so many seconds: an
-- instance whose start takes as long cannot serve them. Late entries that may not start are left out, as they are
-- there, and where concurrency bounds what may start, others have the room first. At most 10,000 entries a queue are
-- read. It names the table of each queue, see scale_bounded, and reads none whose index of such deadlines is empty, one
-- page.
-- Callers: scale_input.
CREATE OR REPLACE FUNCTION penstock.scale_late(wanted text, seconds double precision) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    q     record;
    n     bigint;
    total bigint := 0;
BEGIN
    FOR q IN SELECT s.queue_id, s.queue, s.startable, s.room FROM penstock.scale_startable(wanted, 10000) s
              WHERE s.startable > 0
                AND EXISTS (SELECT FROM penstock.queue x
                             WHERE x.id = s.queue_id
                               AND pg_relation_size(penstock.entry_index(x, 'start_by')) > current_setting('block_size')::bigint)
    LOOP
        BEGIN
            EXECUTE format('
                SELECT count(*)
                  FROM (SELECT e.priority, e.flow, coalesce(e.pos, e.id) AS pos
                          FROM penstock.%I e
                         WHERE e.queue_id = $1 AND penstock.claimable(e.status, e.priority) AND e.start_by <= $2
                         LIMIT 10000) e
                  JOIN penstock.ready y ON y.queue_id = $1 AND y.priority = e.priority AND y.flow = e.flow
                      AND y.pos = e.pos
                 WHERE penstock.ready_now(y.not_before)
                   AND NOT penstock.scale_flow_closed($1, y.flow)
                   AND NOT EXISTS (SELECT FROM penstock.pause p
                                    WHERE p.scope = ''lock_key'' AND p.value = y.lock_key AND p.queue_id = $1
                                      AND penstock.paused_until(p.until))', 'entry_' || q.queue)
               INTO n USING q.queue_id, clock_timestamp() + seconds * interval '1 second';
            total := total + least(q.startable, q.room) - least(q.room, greatest(0, q.startable - n));
        EXCEPTION WHEN undefined_table THEN
            NULL; -- the queue was dropped meanwhile
        END;
    END LOOP;
    RETURN total;
END $$;

-- scale_input has all that a decision reads about the work and the instances of a model, a row for each model that has
-- a deployment. The use of the present hour and that of the hour before are apart, so that a reader can tell what came
-- since, and so are the starts that became ready: of those of the days before the last 50 alone are read.
-- unmanaged_starts is when each of those of them began that is not ready yet.
-- Sums of usage are at most 1e15: one that does not fit a column would end the decisions about all models. That of an
-- hour without use is 0 (least leaves a null out).
-- service and busy_ms are the time of slots, without the further GPUs and sequences that usage is charged.
-- ready and unmanaged count those of which it is not known yet that they are silent (present), unmanaged only instances
-- that take requests or are starting: others are no part of the number that is desired.
-- gateway_age is the age in seconds of the last sign of the gateway that was silent longest, of those that still hold a
-- slot of the model: the requests of others are known to be over. It is 0 where there is none. While no gateway lives,
-- it is the age of the last sign of any for a model that has had online requests: they may come again as soon as there
-- is one. Functions by model are called only where something waits or is due: an idle model costs a few joins.
-- Callers: pkg/scale.
CREATE OR REPLACE VIEW penstock.scale_input AS
  WITH u AS MATERIALIZED (
       SELECT h.model,
              (sum(h.gpu_ms::numeric - h.extra_ms) / nullif(sum(h.calls), 0) / 1000.0)::double precision AS service,
              least(coalesce(sum(h.calls) FILTER (WHERE h.hour = p.present), 0), 1e15)::bigint AS calls,
              least(coalesce(sum(h.calls) FILTER (WHERE h.hour < p.present), 0), 1e15)::bigint AS calls_before,
              least(coalesce(sum(h.gpu_ms::numeric - h.extra_ms) FILTER (WHERE h.hour = p.present), 0), 1e15)::bigint
                  AS busy_ms,
              least(coalesce(sum(h.gpu_ms::numeric - h.extra_ms) FILTER (WHERE h.hour < p.present), 0), 1e15)::bigint
                  AS busy_ms_before
         FROM (SELECT date_trunc('hour', statement_timestamp(), 'UTC') AS present) p
         JOIN penstock.usage_hour h ON h.hour >= p.present - interval '1 hour'
        GROUP BY h.model),
       e AS MATERIALIZED (SELECT x.model, x.waiting FROM penstock.scale_over_limit() x)
SELECT d.model, q.locked + r.running AS running, w.waiting,
       b.missing + coalesce(e.waiting, 0) AS urgent, r.running AS online_running,
       q.arrived, s.arrived AS arrived_before, s.counters, s.state,
       coalesce(u.service, 0) AS service, coalesce(u.calls, 0) AS calls, coalesce(u.calls_before, 0) AS calls_before,
       coalesce(u.busy_ms, 0) AS busy_ms, coalesce(u.busy_ms_before, 0) AS busy_ms_before, t.present AS hour, g.*,
       coalesce(o.calls, 0) AS online_calls, coalesce(o.refused, 0) AS refused,
       coalesce(c.median, 0) AS cold_start, coalesce(c.p95, 0) AS cold_start_p95,
       k.starts, coalesce(k.cold_seconds, 0) AS cold_seconds,
       CASE WHEN q.any_due THEN penstock.scale_due(d.model, coalesce(c.median, 60)) ELSE 0 END AS due,
       CASE WHEN w.waiting > 0 THEN penstock.scale_late(d.model, coalesce(c.median, 60)) ELSE 0 END AS late,
       i.*, m.*, v.*, q.queues, a.arrivals, y.waits,
       k.starts_before, coalesce(k.cold_seconds_before, 0) AS cold_seconds_before
  FROM (SELECT DISTINCT x.model FROM penstock.deployment x) d
 CROSS JOIN (SELECT date_trunc('hour', statement_timestamp(), 'UTC') AS present) t
  LEFT JOIN penstock.scale_state s ON s.model = d.model
  LEFT JOIN penstock.model_online o ON o.model = d.model
  LEFT JOIN u ON u.model = d.model
  LEFT JOIN e ON e.model = d.model
 CROSS JOIN LATERAL penstock.scale_queues(d.model) q
 CROSS JOIN LATERAL penstock.scale_arrivals(d.model) a
 CROSS JOIN LATERAL penstock.scale_online_runs(d.model) r
 CROSS JOIN LATERAL penstock.scale_slots_missing(d.model) b
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE n.beat_at + n.lease > clock_timestamp()) > 0 AS gateway,
              coalesce(CASE WHEN count(*) FILTER (WHERE n.beat_at + n.lease > clock_timestamp()) > 0
                            THEN max(extract(epoch FROM clock_timestamp() - n.beat_at)) FILTER (
                                     WHERE n.beat_at + n.lease <= clock_timestamp()
                                       AND EXISTS (SELECT FROM penstock.slot s
                                                   JOIN penstock.instance y ON y.id = s.instance_id
                                                    WHERE s.node_id = n.id AND y.model = d.model))
                            WHEN o.model IS NOT NULL THEN min(extract(epoch FROM clock_timestamp() - n.beat_at)) END,
                       0)::double precision AS gateway_age
         FROM penstock.node n
        WHERE n.kind = 'gateway' AND n.draining_at IS NULL AND n.beat_at > clock_timestamp() - interval '5 minutes') g
 CROSS JOIN LATERAL (
       SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY x.seconds) AS median,
              percentile_cont(0.95) WITHIN GROUP (ORDER BY x.seconds) AS p95
         FROM (SELECT y.seconds FROM penstock.cold_start y WHERE y.model = d.model ORDER BY y.at DESC LIMIT 50) x) c
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE x.at >= t.present) AS starts,
              sum(x.seconds) FILTER (WHERE x.at >= t.present) AS cold_seconds,
              count(*) FILTER (WHERE x.at < t.present) AS starts_before,
              sum(x.seconds) FILTER (WHERE x.at < t.present) AS cold_seconds_before
         FROM penstock.cold_start x WHERE x.model = d.model AND x.at >= t.present - interval '1 hour') k
 CROSS JOIN LATERAL (SELECT CASE WHEN q.any_ready THEN penstock.scale_waiting_each(d.model)
                     ELSE '{}' END AS waits OFFSET 0) y
 CROSS JOIN LATERAL (SELECT coalesce(sum(x.value::bigint), 0)::bigint AS waiting
                     FROM jsonb_each_text(y.waits) x OFFSET 0) w
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE penstock.present(n)) AS ready,
              coalesce(array_agg(n.created_at ORDER BY n.created_at) FILTER (WHERE penstock.starts(n)),
                       '{}') AS starting,
              count(*) FILTER (WHERE n.draining_at IS NOT NULL) AS draining,
              count(*) FILTER (WHERE n.draining_at IS NULL AND (penstock.unhealthy(n)
                                 OR n.quarantined_until > clock_timestamp() AND NOT penstock.starts(n))) AS unhealthy,
              count(*) FILTER (WHERE (penstock.present(n) OR penstock.starts(n) AND (n.expires_at IS NULL OR n.expires_at > clock_timestamp()))
                                 AND (n.deployment IS NULL OR NOT EXISTS (
                                     SELECT FROM penstock.deployment y
                                      WHERE y.name = n.deployment AND y.model = d.model))) AS unmanaged,
              coalesce(array_agg(n.created_at ORDER BY n.created_at) FILTER (
                  WHERE penstock.starts(n) AND (n.expires_at IS NULL OR n.expires_at > clock_timestamp())
                    AND (n.deployment IS NULL OR NOT EXISTS (
                         SELECT FROM penstock.deployment y WHERE y.name = n.deployment AND y.model = d.model))), '{}')
                  AS unmanaged_starts
         FROM penstock.instance n WHERE n.model = d.model) i
 CROSS JOIN LATERAL (
       SELECT coalesce(sum(x.busy_seconds) FILTER (WHERE x.minute > statement_timestamp() - interval '15 minutes'),
                       0) / 15 AS busy_a_minute,
              coalesce(sum(x.arrived) FILTER (WHERE x.minute > statement_timestamp() - interval '15 minutes'),
                       0) / 15 AS arrived_a_minute,
              coalesce(sum(x.busy_seconds) FILTER (WHERE x.minute < statement_timestamp() - interval '6 days'),
                       0) / 30 AS busy_last_week,
              max(x.minute) FILTER (WHERE x.arrived > 0) AS last_minute
         FROM penstock.model_minute x
        WHERE x.model = d.model
          AND (x.minute BETWEEN statement_timestamp() - interval '15 minutes' AND statement_timestamp()
            OR x.minute BETWEEN statement_timestamp() - interval '7 days 15 minutes'
            AND statement_timestamp() - interval '7 days' + interval '15 minutes')) m
 CROSS JOIN (
       SELECT coalesce(bool_or(x.value = 'true') FILTER (WHERE x.name = 'scale.off'), false) AS off,
              coalesce(bool_or(x.value = 'true') FILTER (WHERE x.name = 'scale.zero_off'), false) AS zero_off,
              coalesce(max(least(x.value::numeric, 1000000)::integer) FILTER (WHERE x.name = 'scale.max_all'), 0)
                  AS max_all,
              coalesce(max(x.value::float8) FILTER (WHERE x.name = 'scale.budget'), 0) AS budget
         FROM penstock.setting x WHERE x.name LIKE 'scale.%') v;

-- scale_wanted has the models with a template and without a deployment, and whether something waits for an instance of
-- theirs; under scale.off that is not asked.
-- Functions by model are called only where something waits or is due.
-- Callers: pkg/scale.
CREATE OR REPLACE VIEW penstock.scale_wanted AS
  WITH e AS MATERIALIZED (SELECT x.model, x.waiting FROM penstock.scale_over_limit() x)
SELECT t.model, q.queues,
       CASE WHEN EXISTS (SELECT FROM penstock.setting v WHERE v.name = 'scale.off' AND v.value = 'true') THEN false
            ELSE b.missing + coalesce(e.waiting, 0) > 0
                 OR CASE WHEN q.any_ready THEN penstock.scale_waiting(t.model, 1) > 0 ELSE false END
                 OR CASE WHEN q.any_due THEN penstock.scale_due(t.model, 60) > 0 ELSE false END END AS wanted
  FROM penstock.deployment_template t
 CROSS JOIN LATERAL penstock.scale_queues(t.model) q
 CROSS JOIN LATERAL penstock.scale_slots_missing(t.model) b
  LEFT JOIN e ON e.model = t.model
 WHERE NOT EXISTS (SELECT FROM penstock.deployment d WHERE d.model = t.model);

-- scale_share has a row for each deployment: its settings, what its backend was told and answered, and its instances.
-- Callers: pkg/scale.
CREATE OR REPLACE VIEW penstock.scale_share AS
SELECT d.name, d.model, d.backend, d.target, d.policy, d.template, coalesce(d.template_hash, '') AS template_hash,
       d.cost, d.fill_order,
       d.mode, d.override, d.override_until, d.on_demand, d.created_at,
       coalesce(s.desired, 0) AS desired, s.decided_at, coalesce(s.order_id, 0) AS order_id,
       coalesce(s.ordered, 0) AS ordered, s.ordered_at,
       coalesce(s.applied_id, 0) AS applied_id, s.applied_at, s.existing,
       coalesce(s.starting, '{}') AS starting, s.seen_at, s.replace_before, coalesce(s.failures, 0) AS failures,
       s.failed_at, s.retry_at,
       coalesce(s.error, '') AS error, coalesce(s.error_kind, '') AS error_kind, s.no_room_at,
       coalesce(s.place, '') AS place, i.ready, i.registered, i.draining,
       i.starts, coalesce(s.removing, '{}') AS removing, coalesce(s.unhealthy, '{}') AS unhealthy,
       coalesce(s.removing_since, '{}') AS removing_since
  FROM penstock.deployment d
  LEFT JOIN penstock.deployment_state s ON s.name = d.name
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE penstock.present(n)) AS ready,
              count(*) FILTER (WHERE n.draining_at IS NULL) AS registered,
              count(*) FILTER (WHERE n.draining_at IS NOT NULL) AS draining,
              coalesce(array_agg(n.created_at ORDER BY n.created_at) FILTER (WHERE n.draining_at IS NULL AND penstock.starts(n)), '{}') AS starts
         FROM penstock.instance n WHERE n.deployment = d.name) i;
