-- +goose Up

-- Inference: models, their instances, and who holds which slot. Rules and their reasons: pkg/inference/doc.go.

-- What inference knows changes rarely and is read by every node: one number says whether to read it again. A row and
-- not a sequence, because the number must not be seen before what it stands for.
CREATE TABLE penstock.inference_version (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version bigint NOT NULL DEFAULT 1
) WITH (fillfactor = 50);
INSERT INTO penstock.inference_version DEFAULT VALUES;

-- +goose StatementBegin
CREATE FUNCTION penstock.bump_inference_version() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE penstock.inference_version SET version = version + 1;
    RETURN NULL;
END $$;
-- +goose StatementEnd

CREATE TABLE penstock.model (
    name       text COLLATE "C" PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 200),
    config     jsonb NOT NULL CHECK (jsonb_typeof(config) = 'object'),
    override   jsonb CHECK (jsonb_typeof(override) = 'object'),
    version    bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN penstock.model.config IS 'how its workers are spoken to; a field that is absent takes its default';
COMMENT ON COLUMN penstock.model.override IS 'fields laid over config while it is there; deleting it brings config back';
CREATE TRIGGER model_version AFTER INSERT OR UPDATE OR DELETE ON penstock.model
    FOR EACH ROW EXECUTE FUNCTION penstock.bump_inference_version();

CREATE TABLE penstock.instance (
    id                integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    model             text COLLATE "C" NOT NULL REFERENCES penstock.model,
    server            text COLLATE "C" NOT NULL CHECK (octet_length(server) BETWEEN 1 AND 200),
    endpoint          text NOT NULL,
    slots             integer NOT NULL CHECK (slots BETWEEN 1 AND 100000),
    labels            jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(labels) = 'object'),
    state             text NOT NULL DEFAULT 'unknown'
                      CHECK (state IN ('unknown', 'starting', 'ready', 'busy', 'unhealthy', 'defunct')),
    reason            text,
    active            integer,
    capacity          integer,
    queued            integer,
    kv_usage          real,
    checked_at        timestamptz,
    next_check_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    draining_at       timestamptz,
    drain_by          text,
    drain_reason      text,
    quarantined_until timestamptz,
    quarantine_reason text,
    created_at        timestamptz NOT NULL DEFAULT now(),
    UNIQUE (model, server)
) WITH (fillfactor = 50);
COMMENT ON COLUMN penstock.instance.state IS 'what the last probe found; unknown before the first one, which keeps nobody from using it';
COMMENT ON COLUMN penstock.instance.active IS 'calls that the worker said it was running; null where its protocol does not say';
COMMENT ON COLUMN penstock.instance.next_check_at IS 'whoever moves it forward probes the instance';
CREATE TRIGGER instance_version AFTER INSERT OR DELETE ON penstock.instance
    FOR EACH ROW EXECUTE FUNCTION penstock.bump_inference_version();
-- Load and the time of a check change all the time, and nobody has to read anything again for them.
CREATE TRIGGER instance_change AFTER UPDATE ON penstock.instance
    FOR EACH ROW WHEN (OLD.endpoint IS DISTINCT FROM NEW.endpoint
          OR OLD.slots IS DISTINCT FROM NEW.slots
          OR OLD.labels IS DISTINCT FROM NEW.labels
          OR OLD.state IS DISTINCT FROM NEW.state
          OR OLD.draining_at IS DISTINCT FROM NEW.draining_at
          OR OLD.quarantined_until IS DISTINCT FROM NEW.quarantined_until)
    EXECUTE FUNCTION penstock.bump_inference_version();

CREATE TRIGGER queue_model AFTER UPDATE OF model ON penstock.queue
    FOR EACH ROW WHEN (OLD.model IS DISTINCT FROM NEW.model) EXECUTE FUNCTION penstock.bump_inference_version();

-- A held slot is a lock record: this node may have one call at a time in flight to the instance. There is a row only
-- while it is held. A slot in doubt has no caller any more, but its call may still run at the worker: it stays counted
-- until a probe, a confirmed cancel or time says otherwise.
CREATE TABLE penstock.slot (
    instance_id integer NOT NULL REFERENCES penstock.instance,
    number      integer NOT NULL CHECK (number >= 0),
    token       bigint NOT NULL,
    node_id     bigint NOT NULL,
    leased_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    doubt_at    timestamptz,
    doubt       text,
    queue_id    integer,
    entry_id    bigint,
    PRIMARY KEY (instance_id, number)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
COMMENT ON COLUMN penstock.slot.doubt IS 'why the call may still run; queue_id and entry_id say whose it was';

-- Nodes that got fewer slots than they have work for. Others give back what is beyond their share.
CREATE TABLE penstock.slot_demand (
    model     text COLLATE "C" NOT NULL,
    node_id   bigint NOT NULL,
    wanted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (model, node_id)
) WITH (fillfactor = 50);

-- A run that a worker accepted: what the next node needs to follow it to its end instead of starting it again.
CREATE TABLE penstock.remote_run (
    entry_id    bigint NOT NULL,
    token       bigint NOT NULL,
    slot_token  bigint NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    ran_ms      bigint NOT NULL DEFAULT 0,
    queue_id    integer NOT NULL,
    instance_id integer NOT NULL,
    slot_number integer NOT NULL,
    remote_id   text,
    report      jsonb,
    PRIMARY KEY (queue_id, entry_id)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX remote_run_remote ON penstock.remote_run (instance_id, remote_id);
COMMENT ON COLUMN penstock.remote_run.token IS 'under which the worker was asked: the fencing token of the lock then';
COMMENT ON COLUMN penstock.remote_run.remote_id IS 'the worker''s name for the run; null if its answer never came';
COMMENT ON COLUMN penstock.remote_run.report IS 'the last that the worker reported to a callback address while nobody listened there';

-- Registration -------------------------------------------------------------------------------------------------------

-- model_queue is the name of the queue that a model's entries go through.
-- +goose StatementBegin
CREATE FUNCTION penstock.model_queue(model text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT q.name FROM penstock.queue q WHERE q.model = $1 AND q.kind = 'inference' ORDER BY q.id LIMIT 1),
                    left(regexp_replace(regexp_replace(lower($1), '[^a-z0-9_]+', '_', 'g'), '^([^a-z])', 'm_\1'), 48))
$$;
-- +goose StatementEnd

-- fit_model_queue makes the queue of a model, or brings its attempts up to date. How many of its entries run at once is
-- bounded by the slots themselves: a limit on locks beside them would also count those whose ending is being recorded.
-- +goose StatementBegin
CREATE FUNCTION penstock.fit_model_queue(wanted text) RETURNS text
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
    policy := q.retry || jsonb_build_object('max_attempts',
        coalesce(((m.config || coalesce(m.override, '{}'))->>'max_retries')::integer, 50) + 1);
    IF policy <> q.retry THEN
        PERFORM penstock.alter_queue(called, jsonb_build_object('retry', policy));
    END IF;
    RETURN called;
EXCEPTION
    WHEN invalid_text_representation OR numeric_value_out_of_range THEN
        RAISE EXCEPTION 'config of model "%" is not valid: %', wanted, SQLERRM USING ERRCODE = 'PS002';
END $$;
-- +goose StatementEnd

-- register_model makes a model known, or replaces its config; an override stays. It returns the model's queue.
-- +goose StatementBegin
CREATE FUNCTION penstock.register_model(name text, config jsonb, reason text DEFAULT '', actor text DEFAULT current_user::text)
RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    IF jsonb_typeof(config) IS DISTINCT FROM 'object' OR coalesce(config->>'name', name) <> name THEN
        RAISE EXCEPTION 'config of model "%" must be a JSON object that names no other model', name USING ERRCODE = 'PS002';
    ELSIF coalesce(config->>'protocol', '') NOT IN ('dispatcher', 'cog', 'oip', 'openai') THEN
        RAISE EXCEPTION 'protocol of model "%" must be dispatcher, cog, oip or openai', name USING ERRCODE = 'PS002';
    END IF;
    INSERT INTO penstock.model AS m (name, config) VALUES (register_model.name, register_model.config)
    ON CONFLICT ON CONSTRAINT model_pkey DO UPDATE SET config = excluded.config, version = m.version + 1, changed_at = now();
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(register_model.actor, current_user), 'register_model', register_model.name, register_model.reason, config);
    RETURN penstock.fit_model_queue(register_model.name);
END $$;
-- +goose StatementEnd

-- need_model raises PS008 where there is no such model.
-- +goose StatementBegin
CREATE FUNCTION penstock.need_model(wanted text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.model WHERE name = wanted) THEN
        RAISE EXCEPTION 'model "%" is not registered', wanted
            USING ERRCODE = 'PS008', HINT = 'Register it first: SELECT penstock.register_model(name, config).';
    END IF;
END $$;
-- +goose StatementEnd

-- set_model_override lays fields over a model's config for all nodes at once; null takes them away again.
-- +goose StatementBegin
CREATE FUNCTION penstock.set_model_override(name text, override jsonb, reason text DEFAULT '', actor text DEFAULT current_user::text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.need_model(name);
    IF jsonb_typeof(override) <> 'object' THEN
        RAISE EXCEPTION 'override of model "%" must be a JSON object', name USING ERRCODE = 'PS002';
    END IF;
    UPDATE penstock.model m SET override = set_model_override.override, version = m.version + 1, changed_at = now()
     WHERE m.name = set_model_override.name;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(set_model_override.actor, current_user), 'set_model_override', set_model_override.name,
            set_model_override.reason, override);
    PERFORM penstock.fit_model_queue(set_model_override.name);
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION penstock.delete_model_override(name text, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE sql AS $$ SELECT penstock.set_model_override($1, NULL, $2, $3) $$;
-- +goose StatementEnd

-- remove_model forgets a model that has no instances. Its queue stays, with what is in it.
-- +goose StatementBegin
CREATE FUNCTION penstock.remove_model(name text, reason text DEFAULT '', actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.need_model(name);
    IF EXISTS (SELECT FROM penstock.instance i WHERE i.model = remove_model.name) THEN
        RAISE EXCEPTION 'model "%" still has instances', name USING ERRCODE = 'PS006', HINT = 'Remove them first.';
    END IF;
    DELETE FROM penstock.model m WHERE m.name = remove_model.name;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(remove_model.actor, current_user), 'remove_model', remove_model.name, remove_model.reason);
END $$;
-- +goose StatementEnd

-- register_instance makes an endpoint of a model known, or changes it: the same model and server name the same
-- instance. Registering again ends a drain and a quarantine. With fewer slots than before, what is held beyond them
-- comes home first: nothing new is leased meanwhile.
-- +goose StatementBegin
CREATE FUNCTION penstock.register_instance(model text, server text, endpoint text, slots integer, labels jsonb DEFAULT '{}',
                                           reason text DEFAULT '', actor text DEFAULT current_user::text)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    instance integer;
BEGIN
    PERFORM penstock.need_model(model);
    INSERT INTO penstock.instance AS i (model, server, endpoint, slots, labels)
    VALUES (register_instance.model, register_instance.server, register_instance.endpoint, register_instance.slots,
            coalesce(register_instance.labels, '{}'))
    ON CONFLICT ON CONSTRAINT instance_model_server_key DO UPDATE
       SET slots = excluded.slots, labels = excluded.labels, draining_at = NULL, drain_by = NULL, drain_reason = NULL,
           quarantined_until = NULL, quarantine_reason = NULL, next_check_at = clock_timestamp(),
           state = CASE WHEN i.endpoint = excluded.endpoint THEN i.state ELSE 'unknown' END, endpoint = excluded.endpoint
    RETURNING id INTO instance;
    PERFORM penstock.fit_model_queue(model);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(register_instance.actor, current_user), 'register_instance', register_instance.model || '/' || register_instance.server,
            register_instance.reason, jsonb_build_object('endpoint', endpoint, 'slots', slots, 'labels', labels));
    RETURN instance;
EXCEPTION
    WHEN check_violation OR not_null_violation THEN
        RAISE EXCEPTION 'instance "%" of model "%" is not valid: %', server, model, SQLERRM USING ERRCODE = 'PS002';
END $$;
-- +goose StatementEnd

-- instance_id finds an instance and raises PS008 where there is none.
-- +goose StatementBegin
CREATE FUNCTION penstock.instance_id(wanted_model text, wanted_server text) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_id integer;
BEGIN
    SELECT id INTO found_id FROM penstock.instance WHERE model = wanted_model AND server = wanted_server;
    IF found_id IS NULL THEN
        RAISE EXCEPTION 'model "%" has no instance "%"', wanted_model, wanted_server
            USING ERRCODE = 'PS008', HINT = 'penstock.instance_status lists the instances.';
    END IF;
    RETURN found_id;
END $$;
-- +goose StatementEnd

-- drain_instance sends an instance no new calls; those in flight end. Register it again to end the drain.
-- +goose StatementBegin
CREATE FUNCTION penstock.drain_instance(model text, server text, reason text DEFAULT '', actor text DEFAULT current_user::text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE penstock.instance i
       SET draining_at = coalesce(i.draining_at, clock_timestamp()), drain_by = coalesce(drain_instance.actor, current_user),
           drain_reason = coalesce(drain_instance.reason, '')
     WHERE i.id = penstock.instance_id(drain_instance.model, drain_instance.server);
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(drain_instance.actor, current_user), 'drain_instance', drain_instance.model || '/' || drain_instance.server,
            drain_instance.reason);
END $$;
-- +goose StatementEnd

-- remove_instance forgets an instance. It refuses while slots of it are held, unless forced: then calls that still run
-- there are counted nowhere.
-- +goose StatementBegin
CREATE FUNCTION penstock.remove_instance(model text, server text, force boolean DEFAULT false, reason text DEFAULT '',
                                         actor text DEFAULT current_user::text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    instance integer := penstock.instance_id(model, server);
    held     bigint;
BEGIN
    PERFORM FROM penstock.instance i WHERE i.id = instance FOR UPDATE; -- nobody leases while we look
    SELECT count(*) INTO held FROM penstock.slot s WHERE s.instance_id = instance;
    IF held > 0 AND NOT force THEN
        RAISE EXCEPTION 'instance "%" of model "%" has % slots held', server, model, held
            USING ERRCODE = 'PS006', HINT = 'Drain it first and wait, or remove with force => true.';
    END IF;
    DELETE FROM penstock.slot s WHERE s.instance_id = instance;
    DELETE FROM penstock.instance i WHERE i.id = instance;
    PERFORM penstock.fit_model_queue(model);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(remove_instance.actor, current_user), 'remove_instance', remove_instance.model || '/' || remove_instance.server,
            remove_instance.reason, jsonb_build_object('force', force, 'held', held));
END $$;
-- +goose StatementEnd

-- quarantine_instance keeps everybody from an instance for a while: a node's breaker has opened.
-- +goose StatementBegin
CREATE FUNCTION penstock.quarantine_instance(instance integer, lasts interval, reason text) RETURNS void
LANGUAGE sql AS $$
    UPDATE penstock.instance i
       SET quarantined_until = greatest(i.quarantined_until, clock_timestamp() + lasts), quarantine_reason = $3
     WHERE i.id = $1
$$;
-- +goose StatementEnd

-- Slots --------------------------------------------------------------------------------------------------------------

-- usable says whether calls may be sent to an instance.
-- +goose StatementBegin
CREATE FUNCTION penstock.usable(i penstock.instance) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT i.draining_at IS NULL AND i.state IN ('unknown', 'ready', 'busy')
       AND (i.quarantined_until IS NULL OR i.quarantined_until <= clock_timestamp())
$$;
-- +goose StatementEnd

-- node_lives says whether a node's lease has not lapsed.
-- +goose StatementBegin
CREATE FUNCTION penstock.node_lives(bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.node n WHERE n.id = $1 AND n.beat_at + n.lease > clock_timestamp())
$$;
-- +goose StatementEnd

-- slot_share says how many slots of a model a node may hold while other nodes have to go without: an equal part for
-- everybody who holds some or wants some. Null: nobody goes without.
-- +goose StatementBegin
CREATE FUNCTION penstock.slot_share(wanted text, node bigint) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT ceil((SELECT sum(i.slots) FROM penstock.instance i WHERE i.model = wanted AND penstock.usable(i))::numeric
                / (SELECT count(*) FROM (
                       SELECT d.node_id FROM penstock.slot_demand d
                        WHERE d.model = wanted AND d.wanted_at > clock_timestamp() - interval '3 seconds' AND penstock.node_lives(d.node_id)
                        UNION SELECT s.node_id FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id
                               WHERE i.model = wanted AND s.doubt_at IS NULL AND penstock.node_lives(s.node_id)
                        UNION SELECT node) everybody))::integer
     WHERE EXISTS (SELECT FROM penstock.slot_demand d
                    WHERE d.model = wanted AND d.node_id <> node AND d.wanted_at > clock_timestamp() - interval '3 seconds'
                      AND penstock.node_lives(d.node_id))
$$;
-- +goose StatementEnd

-- lease_slots gives a node up to want free slots of a model, spread over its instances, least held first. It waits for
-- nobody: an instance that somebody else is leasing from just now is passed by. Locking the instance before counting
-- is what keeps the sum within slots: where an instance shrank, numbers alone would not.
--
-- Nobody frees a slot before its node's lease has lapsed: the node may use what it got for valid_ms from when it asked.
-- +goose StatementBegin
CREATE FUNCTION penstock.lease_slots(wanted text, node bigint, want integer)
RETURNS TABLE (instance integer, slot_number integer, slot_token bigint, valid_ms bigint)
LANGUAGE plpgsql AS $$
DECLARE
    i      record;
    most   integer;
    share  integer := penstock.slot_share(wanted, node);
    mine   bigint;
    left_  integer := want;
    got    integer;
    millis bigint;
BEGIN
    SELECT floor(extract(epoch FROM n.beat_at + n.lease - clock_timestamp()) * 1000) INTO millis
      FROM penstock.node n WHERE n.id = node AND n.draining_at IS NULL;
    IF millis IS NULL OR millis <= 0 THEN
        RETURN;
    END IF;
    IF share IS NOT NULL THEN
        SELECT count(*) INTO mine FROM penstock.instance x JOIN penstock.slot s ON s.instance_id = x.id
         WHERE x.model = wanted AND s.node_id = node;
        left_ := least(left_, greatest(share - mine, 0));
    END IF;
    FOR i IN SELECT x.id, count(*) OVER () - row_number() OVER (ORDER BY h.held::real / x.slots, x.id) + 1 AS behind
               FROM penstock.instance x
              CROSS JOIN LATERAL (SELECT count(*) AS held FROM penstock.slot s WHERE s.instance_id = x.id) h
              WHERE x.model = wanted AND penstock.usable(x) AND h.held < x.slots
              ORDER BY h.held::real / x.slots, x.id
    LOOP
        EXIT WHEN left_ <= 0;
        SELECT x.slots INTO most FROM penstock.instance x
         WHERE x.id = i.id AND penstock.usable(x) FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        RETURN QUERY
        INSERT INTO penstock.slot (instance_id, number, token, node_id)
        SELECT i.id, n.number, nextval('penstock.token_seq'), node
          FROM (SELECT g.number FROM generate_series(0, most - 1) g(number)
                 WHERE NOT EXISTS (SELECT FROM penstock.slot s WHERE s.instance_id = i.id AND s.number = g.number)
                 ORDER BY g.number
                 LIMIT greatest(0, least(ceil(left_::real / i.behind)::bigint,
                                         most - (SELECT count(*) FROM penstock.slot s WHERE s.instance_id = i.id)))) n
        ON CONFLICT DO NOTHING
        RETURNING slot.instance_id, slot.number, slot.token, millis;
        GET DIAGNOSTICS got = ROW_COUNT;
        left_ := left_ - got;
    END LOOP;
    IF left_ = want THEN
        INSERT INTO penstock.slot_demand AS d (model, node_id) VALUES (wanted, node)
        ON CONFLICT (model, node_id) DO UPDATE SET wanted_at = clock_timestamp();
    END IF;
END $$;
-- +goose StatementEnd

-- held_slots is what a node holds, and for how long it may rely on it; with no slot at all it answers one row of nulls.
-- +goose StatementBegin
CREATE FUNCTION penstock.held_slots(node bigint)
RETURNS TABLE (instance integer, slot_number integer, slot_token bigint, in_doubt boolean, valid_ms bigint)
LANGUAGE sql STABLE AS $$
    SELECT s.instance_id, s.number, s.token, s.doubt_at IS NOT NULL,
           coalesce((SELECT floor(extract(epoch FROM n.beat_at + n.lease - clock_timestamp()) * 1000)::bigint
                       FROM penstock.node n WHERE n.id = $1), 0)
      FROM (SELECT) one LEFT JOIN penstock.slot s ON s.node_id = $1
$$;
-- +goose StatementEnd

-- adopt_slot gives a node the slot of a run that it follows on, under a new token: the one who held it is gone, or has
-- said that he does not follow the run any more. Null: somebody was faster, or it has been freed.
-- +goose StatementBegin
CREATE FUNCTION penstock.adopt_slot(instance integer, slot_number integer, slot_token bigint, node bigint) RETURNS bigint
LANGUAGE sql AS $$
    UPDATE penstock.slot s
       SET node_id = $4, token = nextval('penstock.token_seq'), leased_at = clock_timestamp(), doubt_at = NULL, doubt = NULL,
           queue_id = NULL, entry_id = NULL
     WHERE s.instance_id = $1 AND s.number = $2 AND s.token = $3
       AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id)) AND penstock.node_lives($4)
    RETURNING s.token
$$;
-- +goose StatementEnd

-- orphan_slots lists the held slots of an instance that no living node answers for: in doubt, or of a node that died;
-- since when, by the database's clock.
-- +goose StatementBegin
CREATE FUNCTION penstock.orphan_slots(instance integer) RETURNS TABLE (slot_number integer, slot_token bigint, age interval)
LANGUAGE sql STABLE AS $$
    SELECT s.number, s.token,
           clock_timestamp() - coalesce(s.doubt_at,
               greatest(s.leased_at, (SELECT n.beat_at + n.lease FROM penstock.node n WHERE n.id = s.node_id)))
      FROM penstock.slot s
     WHERE s.instance_id = $1 AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id))
$$;
-- +goose StatementEnd

-- free_slots ends held slots of an instance under their tokens, if no living node answers for them, and returns how many.
-- +goose StatementBegin
CREATE FUNCTION penstock.free_slots(instance integer, tokens bigint[]) RETURNS integer
LANGUAGE sql AS $$
    WITH freed AS (
        DELETE FROM penstock.slot s
         WHERE s.instance_id = $1 AND s.token = ANY (tokens) AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id))
        RETURNING 1
    )
    SELECT count(*)::integer FROM freed
$$;
-- +goose StatementEnd

CREATE VIEW penstock.instance_status AS
SELECT i.id, i.model, i.server, i.endpoint, i.state, i.slots, h.held, h.doubtful, i.active, i.capacity, i.queued,
       i.draining_at IS NOT NULL AS draining, penstock.usable(i) AS usable,
       coalesce(i.drain_reason, CASE WHEN i.quarantined_until > clock_timestamp() THEN i.quarantine_reason END, i.reason) AS reason,
       CASE WHEN i.quarantined_until > clock_timestamp() THEN i.quarantined_until END AS quarantined_until,
       i.checked_at, i.labels
  FROM penstock.instance i
 CROSS JOIN LATERAL (SELECT count(*) AS held, count(s.doubt_at) AS doubtful FROM penstock.slot s WHERE s.instance_id = i.id) h;
COMMENT ON VIEW penstock.instance_status IS 'instances, their slots and why no calls are sent to them';

-- Outcomes -----------------------------------------------------------------------------------------------------------

ALTER TABLE penstock.result ADD COLUMN meta jsonb;
COMMENT ON COLUMN penstock.result.meta IS 'what the handler measured: instance, slot, times in milliseconds';

-- Where callbacks are delivered. The address '' holds the secret of every address that has none of its own.
CREATE TABLE penstock.webhook_endpoint (
    url             text COLLATE "C" PRIMARY KEY CHECK (octet_length(url) <= 2048),
    secret          text CHECK (secret LIKE 'whsec\_%'),
    old_secret      text CHECK (old_secret LIKE 'whsec\_%'),
    old_until       timestamptz,
    disabled_at     timestamptz,
    disabled_reason text,
    created_at      timestamptz NOT NULL DEFAULT now()
);
COMMENT ON COLUMN penstock.webhook_endpoint.old_secret IS 'signs beside secret until old_until, so that a receiver can change over';

SELECT penstock.create_queue('webhook', '{"kind": "webhook", "payload_limit": 1048576, "retry": {"max_attempts": 10}}');

-- call_back pushes an entry of the webhook queue for an entry that ends with the given outcome, in the transaction of
-- the ending. A result beyond 64 KiB is not sent along: the receiver asks for it.
-- +goose StatementBegin
CREATE FUNCTION penstock.call_back(e penstock.entry, outcome text, detail jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(e.callback->>'url', '') = '' THEN
        RETURN;
    ELSIF pg_column_size(detail->'result') > 65536 THEN
        detail := detail - 'result' || '{"result_omitted": true}';
    END IF;
    PERFORM penstock.push_many('webhook',
        ARRAY[jsonb_build_object('url', e.callback->>'url', 'type', 'entry.' || outcome, 'at', clock_timestamp(), 'data',
            jsonb_build_object('id', e.id, 'queue', (SELECT q.name FROM penstock.queue q WHERE q.id = e.queue_id), 'outcome', outcome)
            || CASE WHEN e.callback ? 'context' THEN jsonb_build_object('context', e.callback->'context') ELSE '{}' END
            || jsonb_strip_nulls(detail - 'result') || CASE WHEN detail ? 'result' THEN jsonb_build_object('result', detail->'result') ELSE '{}' END)],
        flows => ARRAY[left(coalesce(lower(substring(e.callback->>'url' FROM '^[A-Za-z]+://([^/?#]+)')), ''), 128)],
        traces => ARRAY[e.trace]);
END $$;
-- +goose StatementEnd
