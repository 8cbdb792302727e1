-- Autoscaling: instances that register themselves or that a backend has started, and what happens when they go.

-- present returns whether an instance is usable, but for its time to live: one that has not been heard is a part of the
-- number of its model until expire_instances finds that it could have been, and drains or removes it.
-- Locks: none.
-- Callers: scale_input, scale_share; pkg/scale.
CREATE OR REPLACE FUNCTION penstock.present(i penstock.instance) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT i.draining_at IS NULL AND i.state IN ('unknown', 'ready', 'busy')
       AND (i.quarantined_until IS NULL OR i.quarantined_until <= clock_timestamp())
$$;

-- starts returns whether an instance is being started: it has not been ready yet.
-- Locks: none.
-- Callers: scale_input; pkg/scale.
CREATE OR REPLACE FUNCTION penstock.starts(i penstock.instance) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT i.draining_at IS NULL AND (i.state = 'starting' OR i.deployment IS NOT NULL AND i.ready_at IS NULL
                                      AND NOT penstock.usable(i))
$$;

-- unhealthy returns whether an instance that is not being started fails its probes, or needs a restart.
-- Locks: none.
-- Callers: scale_input; pkg/scale.
CREATE OR REPLACE FUNCTION penstock.unhealthy(i penstock.instance) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT i.state IN ('unhealthy', 'defunct') AND NOT penstock.starts(i)
$$;

-- check_announced_deployment raises an error unless instances that announce themselves may belong to a deployment: it
-- is one of their model, and its backend does not list its instances itself.
-- Callers: announce_instance.
-- SQLSTATE: PS008 no such deployment, PS002 it is of another model, or its backend lists its instances.
CREATE OR REPLACE FUNCTION penstock.check_announced_deployment(wanted text, of_model text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    d penstock.deployment;
BEGIN
    PERFORM penstock.need_deployment(wanted);
    SELECT * INTO d FROM penstock.deployment x WHERE x.name = wanted;
    IF d.model <> of_model THEN
        RAISE EXCEPTION 'deployment "%" is of model "%", not of "%"', wanted, d.model, of_model USING ERRCODE = 'PS002';
    ELSIF d.backend IN ('local', 'kubernetes') THEN
        RAISE EXCEPTION 'backend % of deployment "%" reports its instances itself', d.backend, wanted
            USING ERRCODE = 'PS002',
                  HINT = 'Its instances announce nothing: webhook, advise and keda are for those that do.';
    END IF;
END $$;

-- announced_deployment returns the deployment of an instance that announces itself and names none: the one that it
-- has, or else the only one of its model if that has backend webhook, whose receiver started it; null where that cannot
-- be told. Beside one with backend keda or advise, whatever follows that number may have started the instance.
-- Callers: announce_instance.
CREATE OR REPLACE FUNCTION penstock.announced_deployment(of_model text, has text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT d.name FROM penstock.deployment d WHERE d.name = has AND d.model = of_model),
                    (SELECT min(d.name) FROM penstock.deployment d
                      WHERE d.model = of_model HAVING count(*) = 1 AND min(d.backend) = 'webhook'))
$$;

-- unmanaged returns whether no deployment of its model has an instance: it was registered by hand or announced, or its
-- deployment was removed. scale_input has the same condition in its own text.
-- Callers: announce_instance; pkg/scale.
CREATE OR REPLACE FUNCTION penstock.unmanaged(i penstock.instance) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT i.deployment IS NULL
        OR NOT EXISTS (SELECT FROM penstock.deployment d WHERE d.name = i.deployment AND d.model = i.model)
$$;

-- announce_instance registers an endpoint of a model for a time, or renews that: a worker calls it again before its
-- time to live ends, and takes no calls after that. It takes none either before a probe has found it ready. Unlike
-- register_instance it ends no quarantine, and no drain but one that began when its time to live ended, and it changes
-- no instance that register_instance or a backend made. An announcement of an endpoint that a backend has reported
-- changes nothing, whatever name it gives, and is answered for that instance. Without a deployment it keeps the one
-- that it has, or belongs to the only one of its model if that has backend webhook, which can have it stopped then. One
-- that was announced earlier belongs to it from when it takes calls, so that its age is no cold start.
-- A null ttl is none: the autoscaler registers an instance that its backend reported. Where the endpoint was registered
-- or announced and belongs to no deployment, this is that instance: it gets the deployment and the name, and keeps its
-- labels and its calls, so that no endpoint has two rows. The time to live counts from when the announcement has its
-- locks: an instance that could not renew it meanwhile would take no calls. began is when the start of the instance
-- began, null where it was not followed from then on; backend_began is that time as the backend gave it, by
-- which another start under the same name is told from this one. It returns what the instance is to do: serve, drain
-- (its calls end, and it gets no new ones), or stop (it drains and no slot is held).
-- A new instance is told to nodes by NOTIFY: one of them probes it until it is ready. The audit has a line
-- for it, and one wherever its endpoint, slots, labels or name become others.
-- Locks: the row of the instance, the row of inference_version. For a new instance those of lock_all_limits before
-- them, and those of fit_model_queue after them.
-- Callers: pkg/scale, pkg/operator; psql.
-- SQLSTATE: PS008 no such model or deployment, PS002 the endpoint or a setting is not valid, PS006 the instance or the
-- queue of that name belongs to something else.
CREATE OR REPLACE FUNCTION penstock.announce_instance(model text, server text, endpoint text, slots integer,
                                                      labels jsonb DEFAULT '{}',
                                                      ttl interval DEFAULT '30 seconds', deployment text DEFAULT NULL,
                                                      template_hash text DEFAULT NULL, began timestamptz DEFAULT NULL,
                                                      actor text DEFAULT NULL, backend_began timestamptz DEFAULT NULL)
    RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    before_ penstock.instance;
    found_  penstock.instance;
    adopted boolean;
BEGIN
    PERFORM penstock.need_model(model);
    PERFORM penstock.check_endpoint(endpoint, server);
    IF ttl NOT BETWEEN interval '1 second' AND interval '1 day' THEN
        RAISE EXCEPTION 'time to live of instance "%" is %', server, ttl USING ERRCODE = 'PS002',
            HINT = 'It is from 1 second to 1 day.';
    END IF;
    IF deployment IS NOT NULL AND ttl IS NOT NULL THEN
        PERFORM penstock.check_announced_deployment(deployment, model);
    END IF;
    FOR attempt IN 1..2 LOOP -- another session may make the row after the first update
        SELECT * INTO before_ FROM penstock.instance i
         WHERE i.model = announce_instance.model AND i.server = announce_instance.server FOR NO KEY UPDATE;
        IF before_.id IS NULL THEN
            SELECT * INTO before_ FROM penstock.instance i
             WHERE i.model = announce_instance.model AND i.endpoint = announce_instance.endpoint
               AND CASE WHEN ttl IS NULL THEN penstock.unmanaged(i)
                        ELSE i.deployment IS NOT NULL AND i.expires_at IS NULL END
             ORDER BY i.draining_at IS NOT NULL, i.id DESC LIMIT 1;
        END IF;
        -- An instance with a time to live was announced; one of a deployment and without it was reported by a backend.
        IF ttl IS NOT NULL AND before_.endpoint = announce_instance.endpoint
           AND before_.deployment IS NOT NULL AND before_.expires_at IS NULL THEN
            found_ := before_;
            EXIT;
        END IF;
        adopted := ttl IS NULL AND before_.deployment IS DISTINCT FROM announce_instance.deployment;
        UPDATE penstock.instance i
           SET server = announce_instance.server, endpoint = announce_instance.endpoint,
               slots = announce_instance.slots,
               labels = CASE WHEN adopted THEN i.labels ELSE '{}' END || coalesce(announce_instance.labels, '{}'),
               expires_at = clock_timestamp() + ttl, time_to_live = ttl,
               draining_at = CASE WHEN i.drain_by = 'expired' THEN NULL ELSE i.draining_at END,
               drain_reason = CASE WHEN i.drain_by = 'expired' THEN NULL ELSE i.drain_reason END,
               drain_by = nullif(i.drain_by, 'expired'),
               deployment = coalesce(announce_instance.deployment,
                                     CASE WHEN i.deployment IS NOT NULL OR penstock.usable(i)
                                          THEN penstock.announced_deployment(i.model, i.deployment) END,
                                     i.deployment),
               began_at = CASE WHEN NOT adopted THEN i.began_at END, backend_began_at = backend_began,
               ready_at = coalesce(i.ready_at,
                                   CASE WHEN adopted AND i.state <> 'starting' OR i.deployment IS NULL
                                       AND penstock.usable(i)
                                        THEN clock_timestamp() END),
               template_hash = coalesce(announce_instance.template_hash, i.template_hash),
               state = CASE WHEN i.endpoint = announce_instance.endpoint THEN i.state ELSE 'starting' END,
               next_check_at = CASE WHEN i.endpoint = announce_instance.endpoint THEN i.next_check_at
                   ELSE clock_timestamp() END
         WHERE i.id = before_.id
           AND (i.expires_at IS NOT NULL
             OR ttl IS NULL AND (i.deployment = announce_instance.deployment
                              OR i.endpoint = announce_instance.endpoint AND penstock.unmanaged(i)))
        RETURNING * INTO found_;
        IF found_.id IS NOT NULL AND (found_.server, found_.endpoint, found_.slots, found_.labels)
                                     IS DISTINCT FROM (before_.server, before_.endpoint, before_.slots, before_.labels) THEN
            PERFORM penstock.audit_log(announce_instance.actor, 'announce_instance', model || '/' || server,
                'its endpoint, slots, labels or name are others than before',
                jsonb_build_object('endpoint', found_.endpoint, 'slots', found_.slots, 'labels', found_.labels,
                    'before', jsonb_build_object('server', before_.server, 'endpoint', before_.endpoint,
                                                 'slots', before_.slots, 'labels', before_.labels)));
        END IF;
        EXIT WHEN found_.id IS NOT NULL
               OR EXISTS (SELECT FROM penstock.instance i WHERE i.model = announce_instance.model
                          AND i.server = announce_instance.server);
        PERFORM penstock.lock_all_limits();
        INSERT INTO penstock.instance AS i (model, server, endpoint, slots, labels, state, deployment, template_hash,
                                            expires_at, time_to_live, created_at, began_at, backend_began_at)
        VALUES (announce_instance.model, announce_instance.server, announce_instance.endpoint, announce_instance.slots,
                coalesce(announce_instance.labels, '{}'), 'starting',
                CASE WHEN ttl IS NULL THEN announce_instance.deployment
                     ELSE coalesce(announce_instance.deployment,
                                   penstock.announced_deployment(announce_instance.model, NULL)) END,
                announce_instance.template_hash,
                clock_timestamp() + ttl, ttl,
                least(coalesce(began, clock_timestamp()), clock_timestamp()),
                CASE WHEN ttl IS NULL AND began IS NULL THEN NULL
                     ELSE least(coalesce(began, clock_timestamp()), clock_timestamp()) END, backend_began)
        ON CONFLICT ON CONSTRAINT instance_model_server_key DO NOTHING
        RETURNING * INTO found_;
        IF found_.id IS NOT NULL THEN
            PERFORM penstock.fit_model_queue(model);
            PERFORM penstock.notify('starting ' || model);
            PERFORM penstock.audit_log(announce_instance.actor, 'announce_instance', model || '/' || server,
                                       coalesce(found_.deployment, ''),
                                       jsonb_build_object('endpoint', endpoint, 'slots', slots,
                                                          'labels', found_.labels));
            EXIT;
        END IF;
    END LOOP;
    IF found_.id IS NULL THEN
        RAISE EXCEPTION 'instance "%" of model "%" was not announced', server, model
            USING ERRCODE = 'PS006', HINT = 'It was registered, or a backend started it: announce another name, or remove it first.';
    END IF;
    RETURN CASE WHEN found_.draining_at IS NULL THEN 'serve'
                WHEN EXISTS (SELECT FROM penstock.slot s WHERE s.instance_id = found_.id) THEN 'drain'
                ELSE 'stop' END;
EXCEPTION
    WHEN check_violation OR not_null_violation THEN
        RAISE EXCEPTION 'instance "%" of model "%" is not valid: %', server, model, SQLERRM USING ERRCODE = 'PS002';
END $$;

-- note_ready notes the first time that a probe found an instance of a deployment ready, and how long its start took,
-- where that was followed: the age of an instance that ran before it was registered is no cold start, nor is the time
-- from an announcement to the first probe where that finds the instance ready. It tells gateways and nodes by NOTIFY:
-- requests and entries may wait for the instance.
-- Locks: a new row of cold_start.
-- Callers: triggers instance_ready.
CREATE OR REPLACE FUNCTION penstock.note_ready() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.ready_at IS NOT NULL THEN -- it was ready before it got its deployment
        RETURN NEW;
    END IF;
    NEW.ready_at := clock_timestamp();
    IF NEW.began_at IS NOT NULL AND (NEW.expires_at IS NULL OR OLD.checked_at IS NOT NULL) THEN
        INSERT INTO penstock.cold_start (model, server, seconds)
        VALUES (NEW.model, NEW.server, -- the clock may have been set back
                greatest(0, extract(epoch FROM NEW.ready_at - NEW.began_at)));
    END IF;
    PERFORM penstock.notify('slots ' || NEW.model);
    RETURN NEW;
END $$;

-- end_scale_drain lets instances take calls again whose drain the autoscaler began, and returns how many there were.
-- Locks: the rows of the instances, then the row of inference_version.
-- Callers: pkg/scale.
CREATE OR REPLACE FUNCTION penstock.end_scale_drain(instances integer[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    n integer;
BEGIN
    UPDATE penstock.instance i SET draining_at = NULL, drain_by = NULL, drain_reason = NULL
     WHERE i.id = ANY (instances) AND i.drain_by = 'autoscaler';
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- expire_instances drains instances whose time to live has ended, and removes those of them of which no slot is held.
-- It returns how many were removed. answered is for how long the database has answered its clients, by a clock that was
-- not stepped: an instance that could not announce itself for one time to live, of at most 5 minutes, is left as it is.
-- One that drains already and holds slots has nothing to be done, and takes none of the
-- 50 places of a call. The drain is not one of the autoscaler's, which would end it for the next start: drain_by is
-- 'expired', and the next announcement of the instance ends it.
-- Locks: the rows of the instances (FOR UPDATE SKIP LOCKED), their slots, the row of inference_version.
-- Callers: pkg/scale. Leaders of the version before give no time: nothing is left as it is.
-- SQLSTATE: none of its own.
CREATE OR REPLACE FUNCTION penstock.expire_instances(answered interval DEFAULT '1 day') RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    i penstock.instance;
    n integer := 0;
BEGIN
    FOR i IN SELECT * FROM penstock.instance x
              WHERE x.expires_at < clock_timestamp()
                AND answered >= least(coalesce(x.time_to_live, '30 seconds'), interval '5 minutes')
                AND (x.draining_at IS NULL OR NOT EXISTS (SELECT FROM penstock.slot s WHERE s.instance_id = x.id))
              ORDER BY x.id LIMIT 50 FOR UPDATE SKIP LOCKED LOOP
        IF NOT EXISTS (SELECT FROM penstock.slot s WHERE s.instance_id = i.id) THEN
            PERFORM penstock.remove_instance(i.model, i.server, false, 'its time to live ended', 'autoscaler');
            n := n + 1;
        ELSIF i.draining_at IS NULL THEN
            UPDATE penstock.instance x
               SET draining_at = clock_timestamp(), drain_by = 'expired', drain_reason = 'its time to live ended'
             WHERE x.id = i.id;
            PERFORM penstock.audit_log('autoscaler', 'drain_instance', i.model || '/' || i.server,
                                       'its time to live ended');
        END IF;
    END LOOP;
    RETURN n;
END $$;
