-- +goose Up

-- Pauses of what is smaller or larger than a queue, and the quota of an application. A pause is a row with who, why and
-- until when. Nodes read those of flows, models and applications with their queues (RegistryVersion says when), and
-- whether they are paused themselves with every heartbeat. Entries of a paused name or lock key are disabled, for a
-- claim knows neither.

CREATE TABLE penstock.pause (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope      text NOT NULL CHECK (scope IN ('name', 'lock_key', 'flow', 'model', 'application', 'node')),
    value      text COLLATE "C" NOT NULL,
    queue_id   integer REFERENCES penstock.queue ON DELETE CASCADE,
    actor      text NOT NULL,
    reason     text NOT NULL,
    until      timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (CASE WHEN scope IN ('name', 'lock_key') THEN queue_id IS NOT NULL WHEN scope <> 'flow' THEN queue_id IS NULL ELSE true END)
);
CREATE UNIQUE INDEX pause_what ON penstock.pause (scope, value, coalesce(queue_id, 0));
COMMENT ON COLUMN penstock.pause.value IS 'a name, lock key or flow (empty: entries without one), a model, an application, or the name or id of a node';
COMMENT ON COLUMN penstock.pause.queue_id IS 'names and lock keys are those of a queue; a flow may be paused in one queue or, with null, in all';

-- pauses_changed makes nodes read their queues again: they compare the sum of all versions, so that one row will do.
-- +goose StatementBegin
CREATE FUNCTION penstock.pauses_changed(queue integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE penstock.queue SET version = version + 1 WHERE id = coalesce($1, (SELECT min(id) FROM penstock.queue))
$$;
-- +goose StatementEnd

-- pause stops claims of what it names; what runs goes on. To pause again changes reason and end.
-- +goose StatementBegin
CREATE FUNCTION penstock.pause(scope text, value text, queue text DEFAULT NULL, reason text DEFAULT '',
                               actor text DEFAULT current_user::text, until timestamptz DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    q     integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
    known boolean;
BEGIN
    IF until <= clock_timestamp() OR NOT isfinite(until) THEN
        RAISE EXCEPTION 'until is not a time to come' USING ERRCODE = 'PS002';
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

-- resume ends a pause.
-- +goose StatementBegin
CREATE FUNCTION penstock.resume(scope text, value text, queue text DEFAULT NULL, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
BEGIN
    DELETE FROM penstock.pause p WHERE p.scope = resume.scope AND p.value = resume.value AND p.queue_id IS NOT DISTINCT FROM q;
    IF NOT FOUND THEN
        RAISE EXCEPTION '% "%" is not paused', scope, value USING ERRCODE = 'PS006', HINT = 'penstock.pause lists what is.';
    END IF;
    IF resume.scope IN ('name', 'lock_key') AND EXISTS (
       SELECT FROM penstock.disabled d WHERE d.queue_id = q AND d.scope = resume.scope AND d.value = resume.value) THEN
        PERFORM penstock.enable_entries(queue, resume.scope, resume.value, resume.reason, resume.actor);
    END IF;
    PERFORM penstock.pauses_changed(q);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(resume.actor, current_user), 'resume', resume.scope || ' ' || resume.value, resume.reason,
            jsonb_strip_nulls(jsonb_build_object('queue', queue)));
END $$;
-- +goose StatementEnd

-- end_pauses ends the pauses whose time is over, and returns how many. Nodes go by the time themselves; this is for
-- names and lock keys, whose entries must be enabled, and so that the table shows what is paused.
-- +goose StatementBegin
CREATE FUNCTION penstock.end_pauses() RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    p     record;
    ended integer := 0;
BEGIN
    FOR p IN SELECT x.scope, x.value, q.name AS queue FROM penstock.pause x LEFT JOIN penstock.queue q ON q.id = x.queue_id
              WHERE x.until <= clock_timestamp() ORDER BY x.id LIMIT 100 FOR UPDATE OF x SKIP LOCKED
    LOOP
        PERFORM penstock.resume(p.scope, p.value, p.queue, 'its time is over', 'penstock');
        ended := ended + 1;
    END LOOP;
    RETURN ended;
END $$;
-- +goose StatementEnd

-- queue_pauses are the pauses by which nodes go that serve a queue: [{"scope", "value", "actor", "reason", "at", "left"}],
-- left in seconds, since a node's clock may show another time.
-- +goose StatementBegin
CREATE FUNCTION penstock.queue_pauses(q penstock.queue) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT coalesce(jsonb_agg(jsonb_build_object('scope', p.scope, 'value', p.value, 'actor', p.actor, 'reason', p.reason, 'at', p.created_at,
                    'left', extract(epoch FROM p.until - clock_timestamp()))), '[]')
      FROM penstock.pause p
     WHERE (p.scope = 'flow' AND (p.queue_id IS NULL OR p.queue_id = q.id))
        OR (p.scope = 'model' AND p.value = q.model) OR (p.scope = 'application' AND p.value = q.application)
$$;
-- +goose StatementEnd

-- node_paused says whether a node is paused, by its name or its id.
-- +goose StatementBegin
CREATE FUNCTION penstock.node_paused(node_id bigint, node_name text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.pause p
                    WHERE p.scope = 'node' AND p.value IN ($2, $1::text) AND coalesce(p.until > clock_timestamp(), true))
$$;
-- +goose StatementEnd

-- pause_reasons says by which pause an entry is kept from being claimed. A paused name or key shows as disabled.
-- +goose StatementBegin
CREATE FUNCTION penstock.pause_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because('paused', format('%s "%s" is paused by %s for %s%s', p->>'scope', p->>'value', p->>'actor',
               penstock.ago(clock_timestamp() - (p->>'at')::timestamptz), coalesce(': ' || nullif(p->>'reason', ''), '')),
               jsonb_build_object('scope', p->'scope', 'value', p->'value', 'by', p->'actor', 'reason', p->'reason', 'since', p->'at', 'left', p->'left'))
      FROM jsonb_array_elements(penstock.queue_pauses(q)) p
     WHERE (p->>'scope' <> 'flow' OR p->>'value' = e.flow) AND coalesce((p->>'left')::float8 > 0, true)
    UNION ALL
    SELECT penstock.because('nodes_paused', format('all %s nodes that serve the queue are paused', count(*)), jsonb_build_object('nodes', count(*)))
      FROM penstock.serving(q.id) s HAVING count(*) > 0 AND bool_and(penstock.node_paused(s.id, s.name))
    UNION ALL
    SELECT penstock.because('cron_paused', format('cron job "%s" is paused by %s%s', j.name, j.paused_by, coalesce(': ' || nullif(j.paused_reason, ''), '')),
               jsonb_build_object('job', j.name, 'by', j.paused_by, 'reason', j.paused_reason, 'until', j.paused_until))
      FROM penstock.cron_job j
     WHERE j.entry_id = e.id AND j.fired_at IS NULL AND j.paused_at IS NOT NULL AND coalesce(j.paused_until > clock_timestamp(), true)
$$;
-- +goose StatementEnd

-- hold_reasons, which explain_entry asks, takes the pauses in.
ALTER FUNCTION penstock.hold_reasons(penstock.queue, penstock.entry) RENAME TO limit_reasons;
-- +goose StatementBegin
CREATE FUNCTION penstock.hold_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.pause_reasons(q, e) UNION ALL SELECT penstock.limit_reasons(q, e)
$$;
-- +goose StatementEnd

-- Applications -------------------------------------------------------------------------------------------------------

-- set_quota bounds what an application may use at once, or how fast, over all its queues: a limit named after it, whose
-- options it takes. Queues that come to the application later are under it as well. Null options remove it.
-- +goose StatementBegin
CREATE FUNCTION penstock.set_quota(application text, options jsonb, reason text DEFAULT NULL, actor text DEFAULT current_user) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    quota text := 'application:' || application;
    q     record;
BEGIN
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

-- A queue that changes its application changes its quota.
-- +goose StatementBegin
CREATE FUNCTION penstock.follow_quota() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM penstock.limit_use u USING penstock."limit" l
     WHERE u.queue_id = NEW.id AND l.id = u.limit_id AND l.name LIKE 'application:%' AND l.name <> 'application:' || NEW.application;
    INSERT INTO penstock.limit_use (queue_id, limit_id)
    SELECT NEW.id, l.id FROM penstock."limit" l WHERE l.name = 'application:' || NEW.application
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER follow_quota AFTER INSERT OR UPDATE OF application ON penstock.queue
    FOR EACH ROW EXECUTE FUNCTION penstock.follow_quota();

-- application_status shows what each application has and uses: nodes and threads, locks held, and the units of its
-- quota.
CREATE VIEW penstock.application_status AS
SELECT a.application, a.queues, n.nodes, n.threads, coalesce(k.locks, 0) AS locks, coalesce(k.cost, 0) AS cost, k.oldest,
       l.max_units AS quota_units, coalesce(k.locks, 0) AS used_units, l.rate AS quota_rate,
       EXISTS (SELECT FROM penstock.pause p WHERE p.scope = 'application' AND p.value = a.application AND coalesce(p.until > clock_timestamp(), true)) AS paused
  FROM (SELECT application, count(*) AS queues FROM penstock.queue GROUP BY application) a
  LEFT JOIN LATERAL (SELECT count(*) AS nodes, coalesce(sum(x.threads), 0) AS threads FROM penstock.node x
                      WHERE x.application = a.application AND x.beat_at + x.lease > clock_timestamp()) n ON true
  LEFT JOIN LATERAL (SELECT count(*) AS locks, sum(o.cost)::real AS cost, clock_timestamp() - min(o.claimed_at) AS oldest
                       FROM penstock.lock o JOIN penstock.queue q ON q.id = o.queue_id WHERE q.application = a.application) k ON true
  LEFT JOIN penstock."limit" l ON l.name = 'application:' || a.application;
