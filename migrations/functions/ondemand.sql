-- Autoscaling: deployments that the first request of a model makes, and that go when they are idle.

-- template_target_holder returns what of another model sets the number of the object of a cluster that a template
-- names: a deployment, or what its template would make; null where nothing does.
-- Callers: set_deployment_template.
CREATE OR REPLACE FUNCTION penstock.template_target_holder(wanted text, backend text, target jsonb) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT x.holder
      FROM (SELECT format('deployment "%s"', d.name) AS holder, d.target AS held FROM penstock.deployment d
             WHERE d.model <> wanted AND d.backend = 'kubernetes'
            UNION ALL
            SELECT format('the template of model "%s"', t.model), t.target FROM penstock.deployment_template t
             WHERE t.model <> wanted AND t.backend = 'kubernetes') x
     WHERE $2 = 'kubernetes' AND penstock.same_kubernetes_object(x.held, $3)
     ORDER BY x.holder LIMIT 1
$$;

-- set_deployment_template sets what the first request of a model makes a deployment from, while it has none: backend,
-- target, policy, template, cost, fill_order, and idle_seconds after which an unused deployment goes (a day). Fields
-- that are not given take their defaults. A deployment that was made from it follows: its instances are replaced one by
-- one where its template changed. Null options remove the template; a deployment that was made from it stays until it
-- is idle. A target of a deployment or template of another model is refused: no deployment could be made. So is another
-- backend or object of a cluster while the deployment has instances.
-- Locks: the row of the template, then those of the deployments that were made from it, in the order of their names.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS002 invalid argument, PS008 no such model.
CREATE OR REPLACE FUNCTION penstock.set_deployment_template(model text, options jsonb, reason text DEFAULT '',
                                                            actor text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    unknown text := (SELECT string_agg(k, ', ') FROM jsonb_object_keys(options) k
                      WHERE k NOT IN ('backend', 'target', 'policy', 'template', 'cost', 'fill_order', 'idle_seconds'));
    t       penstock.deployment_template;
    moved   text;
    holder  text;
BEGIN
    PERFORM penstock.need_model(model);
    IF unknown IS NOT NULL THEN
        RAISE EXCEPTION 'a template of deployments has no %', unknown
            USING ERRCODE = 'PS002', HINT = 'It has backend, target, policy, template, cost, fill_order and idle_seconds.';
    END IF;
    PERFORM penstock.check_scale_policy(options->'policy');
    PERFORM penstock.check_deployment_numbers(options);
    PERFORM penstock.audit_log(set_deployment_template.actor, 'set_deployment_template', set_deployment_template.model,
                               set_deployment_template.reason, options);
    IF options IS NULL OR jsonb_typeof(options) = 'null' THEN
        DELETE FROM penstock.deployment_template x WHERE x.model = set_deployment_template.model;
        RETURN;
    END IF;
    INSERT INTO penstock.deployment_template AS x (model, backend, target, policy, template, cost, fill_order, idle)
    VALUES (set_deployment_template.model, coalesce(options->>'backend', 'advise'), coalesce(options->'target', '{}'),
            coalesce(options->'policy', '{}'), options->'template', coalesce((options->>'cost')::double precision, 1),
            coalesce((options->>'fill_order')::integer, 0),
            coalesce((options->>'idle_seconds')::double precision, 86400) * interval '1 second')
    ON CONFLICT ON CONSTRAINT deployment_template_pkey DO UPDATE
       SET backend = excluded.backend, target = excluded.target, policy = excluded.policy, template = excluded.template,
           cost = excluded.cost, fill_order = excluded.fill_order, idle = excluded.idle, changed_at = now()
    RETURNING * INTO t;
    PERFORM penstock.check_kubernetes_kind(t.backend, t.target);
    holder := penstock.template_target_holder(t.model, t.backend, t.target);
    IF holder IS NOT NULL THEN
        RAISE EXCEPTION 'target: it is the target of %', holder USING ERRCODE = 'PS002',
            HINT = 'One object of a cluster belongs to one deployment. Name the namespace in both where they are two objects.';
    END IF;
    PERFORM FROM penstock.deployment d WHERE d.model = t.model AND d.on_demand ORDER BY d.name FOR NO KEY UPDATE;
    SELECT d.name INTO moved FROM penstock.deployment d
     WHERE d.model = t.model AND d.on_demand AND (d.backend, d.target) IS DISTINCT FROM (t.backend, t.target);
    PERFORM penstock.check_deployment_stays(moved, t.backend, t.target);
    UPDATE penstock.deployment d
       SET backend = t.backend, target = t.target, policy = t.policy, template = t.template, cost = t.cost,
           fill_order = t.fill_order, changed_at = now()
     WHERE d.model = t.model AND d.on_demand;
    IF moved IS NOT NULL THEN
        PERFORM penstock.check_kubernetes_target(moved);
    END IF;
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range OR datetime_field_overflow
         OR interval_field_overflow THEN
        RAISE EXCEPTION 'template of model "%" is not valid: %', set_deployment_template.model,
            SQLERRM USING ERRCODE = 'PS002';
END $$;

-- demand_name is the name of a deployment that is made for a model: that of the model where it may be one and is free.
-- Callers: make_wanted_deployments.
CREATE OR REPLACE FUNCTION penstock.demand_name(model text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN demand_name.model ~ '^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$'
                     AND NOT EXISTS (SELECT FROM penstock.deployment d WHERE d.name = demand_name.model)
                         THEN demand_name.model
                ELSE 'model-' || left(md5(demand_name.model), 24) END
$$;

-- make_wanted_deployments makes a deployment of each of the models that has a template and none yet, and returns their
-- names. The caller has found in scale_wanted that something waits for them. Under scale.off none is made, nor is one
-- whose target belongs to another deployment.
-- Locks: the rows of the templates (FOR KEY SHARE), the new rows of deployment.
-- Callers: pkg/scale.
CREATE OR REPLACE FUNCTION penstock.make_wanted_deployments(models text[]) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    t    penstock.deployment_template;
    made text[] := '{}';
    name_ text;
BEGIN
    FOR t IN SELECT x.* FROM penstock.deployment_template x
              WHERE x.model = ANY (models) AND NOT EXISTS (SELECT FROM penstock.deployment d WHERE d.model = x.model)
                AND NOT EXISTS (SELECT FROM penstock.setting v WHERE v.name = 'scale.off' AND v.value = 'true')
              ORDER BY x.model FOR KEY SHARE
    LOOP
        CONTINUE WHEN penstock.kubernetes_target_holder(penstock.demand_name(t.model), t.backend, t.target) IS NOT NULL;
        INSERT INTO penstock.deployment (name, model, backend, target, policy, template, cost, fill_order, on_demand)
        VALUES (penstock.demand_name(t.model), t.model, t.backend, t.target, t.policy, t.template, t.cost, t.fill_order,
                true)
        ON CONFLICT DO NOTHING RETURNING deployment.name INTO name_;
        CONTINUE WHEN NOT FOUND;
        PERFORM penstock.audit_log('autoscaler', 'make_deployment', name_, 'the first request of model "' || t.model
                                   || '"');
        made := made || name_;
    END LOOP;
    RETURN made;
END $$;

-- scale_last_use is when a request of a model last came, waited or ran, as the decisions recorded it; null where that
-- is not known.
-- Callers: prune_deployments.
CREATE OR REPLACE FUNCTION penstock.scale_last_use(wanted text) RETURNS timestamptz
LANGUAGE sql STABLE AS $$
    SELECT greatest((s.state->>'last_use')::timestamptz,
                    (SELECT max(m.minute) + interval '1 minute' FROM penstock.model_minute m
                      WHERE m.model = wanted AND (m.arrived > 0 OR m.waiting > 0 OR m.running > 0)
                        AND m.minute > clock_timestamp() - interval '2 days'))
      FROM penstock.scale_state s
     WHERE s.model = wanted AND s.state ? 'last_use'
$$;

-- prune_deployments removes deployments that were made on demand and are not used, at most `most`, and returns their
-- names: no instance is registered, ordered or reported, nothing waits, and the last request is known and older than
-- the idle time of the template (a day without one). One with an override or another mode than full stays, since the
-- next would be made without it. Under scale.off none is removed.
-- Locks: the rows of the deployments (FOR UPDATE SKIP LOCKED).
-- Callers: pkg/scale.
CREATE OR REPLACE FUNCTION penstock.prune_deployments(most integer DEFAULT 100) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    d      penstock.deployment;
    pruned text[] := '{}';
BEGIN
    FOR d IN SELECT x.* FROM penstock.deployment x
               LEFT JOIN penstock.deployment_state s ON s.name = x.name
               LEFT JOIN penstock.deployment_template t ON t.model = x.model
              WHERE x.on_demand AND x.mode = 'full'
                AND NOT EXISTS (SELECT FROM penstock.setting v WHERE v.name = 'scale.off' AND v.value = 'true')
                AND (x.override_until IS NULL OR x.override_until <= clock_timestamp())
                AND NOT EXISTS (SELECT FROM penstock.instance i WHERE i.deployment = x.name)
                AND coalesce(s.existing, 0) = 0 AND coalesce(s.ordered, 0) = 0 AND coalesce(s.desired, 0) = 0
                AND coalesce(s.starting, '{}') = '{}' AND coalesce(s.applied_id, 0) = coalesce(s.order_id, 0)
                AND penstock.scale_last_use(x.model) < clock_timestamp() - coalesce(t.idle, interval '1 day')
                AND x.model NOT IN (SELECT e.model FROM penstock.scale_over_limit() e)
                AND penstock.scale_running(x.model) + penstock.scale_waiting(x.model, 1)
                    + (SELECT b.missing FROM penstock.scale_slots_missing(x.model) b)
                        + penstock.scale_due(x.model, 60) = 0
              ORDER BY x.name LIMIT least(greatest(most, 0), 100) FOR UPDATE OF x SKIP LOCKED
    LOOP
        DELETE FROM penstock.deployment x WHERE x.name = d.name;
        PERFORM penstock.audit_log('autoscaler', 'prune_deployment', d.name, 'no instance, and no request of model "'
                                   || d.model || '"');
        pruned := pruned || d.name;
    END LOOP;
    RETURN pruned;
END $$;
