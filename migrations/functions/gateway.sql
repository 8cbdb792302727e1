-- The online gateway: slots by kind of node, hand-over, preemption, and the book of fairness. Rules and their reasons:
-- pkg/gateway/doc.go. Functions that the statements about slots call are in PL/pgSQL where they would not be inlined: a
-- session plans their queries once, those of SQL functions in each statement.

-- node_online returns whether a node is a gateway.
-- Callers: kind_room, slot_share, equal_share, hungry_shares, kind_share, lease_room, lease_slots_within,
-- hand_over_slots.
CREATE OR REPLACE FUNCTION penstock.node_online(node bigint) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce((SELECT n.kind = 'gateway' FROM penstock.node n WHERE n.id = $1), false);
END $$;

-- register_gateway makes a gateway known.
-- Locks: the row of the node.
-- Callers: pkg/gateway.
CREATE OR REPLACE FUNCTION penstock.register_gateway(
    node        bigint,
    name        text,
    application text,
    lease       interval
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO penstock.node AS n (id, name, application, lease, threads, queue_ids, kind)
    VALUES ($1, $2, $3, $4, 0, '{}', 'gateway')
    ON CONFLICT (id) DO UPDATE SET beat_at = clock_timestamp(), kind = 'gateway'
$$;

-- slot_reserves returns how many slots of a model nodes may hold together (total): those of its usable instances, of
-- instances in a device group no more than the group has, without those in doubt (see followed_slots). And how many of
-- them are kept for online calls and for durable entries alone: the shares of the model's policy, 20 and 10 percent
-- without one, of all slots, also those in doubt, rounded down. Where so many are in doubt that the rest is less than
-- both reserves, these are the shares of the rest: else neither kind of node could lease it. While no gateway lives,
-- nothing is kept for either. A share that is not valid, of a policy that was set before set_gateway_policy refused it,
-- is taken as absent: gateways do the same.
-- Callers: kind_room, equal_share, kind_share.
CREATE OR REPLACE FUNCTION penstock.slot_reserves(wanted text, OUT total integer, OUT reserved integer,
                                                  OUT batch_reserved integer)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    slots bigint;
BEGIN
    SELECT t.slots, t.total::integer,
           CASE WHEN g.lives THEN floor(t.slots * penstock.policy_share(p.config, 'reserved', 0.2)) ELSE 0 END::integer,
           CASE WHEN g.lives THEN floor(t.slots * penstock.policy_share(p.config, 'batch_reserved', 0.1))
                ELSE 0 END::integer
      INTO slots, total, reserved, batch_reserved
      FROM (SELECT coalesce(sum(d.slots), 0) AS slots, coalesce(sum(greatest(0, d.slots - d.doubtful)), 0) AS total
              FROM (SELECT i.slots, (SELECT count(*) FROM penstock.slot s
                                      WHERE s.instance_id = i.id AND s.doubt_at IS NOT NULL) AS doubtful
                      FROM penstock.instance i
                     WHERE i.model = wanted AND penstock.usable(i) AND i.device_group IS NULL
                     UNION ALL
                    SELECT penstock.device_slots(e.device_group),
                           (SELECT count(*) FROM penstock.instance x JOIN penstock.slot s ON s.instance_id = x.id
                             WHERE x.device_group = e.device_group AND s.doubt_at IS NOT NULL)
                      FROM (SELECT DISTINCT i.device_group FROM penstock.instance i
                             WHERE i.model = wanted AND penstock.usable(i) AND i.device_group IS NOT NULL) e) d) t
     CROSS JOIN (SELECT EXISTS (SELECT FROM penstock.node n
                                 WHERE n.kind = 'gateway' AND n.draining_at IS NULL
                                   AND n.beat_at + n.lease > clock_timestamp()) AS lives) g
      LEFT JOIN penstock.gateway_policy p ON p.model = wanted;
    IF reserved + batch_reserved > total AND total < slots THEN
        reserved := reserved::bigint * total / slots;
        batch_reserved := batch_reserved::bigint * total / slots;
    END IF;
END $$;

-- policy_share returns a share of a policy: a number from 0 to 1, or what holds without one. It is inlined.
-- Callers: slot_reserves.
CREATE OR REPLACE FUNCTION penstock.policy_share(config jsonb, field text, standard numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN jsonb_typeof(config->field) <> 'number' THEN standard
                WHEN (config->>field)::numeric BETWEEN 0 AND 1 THEN (config->>field)::numeric
                ELSE standard END
$$;

-- held_by_kind counts the slots of a model that live or dead nodes of one kind (gateways, or task nodes) hold.
-- Callers: kind_room, kind_share, preempt_durable.
CREATE OR REPLACE FUNCTION penstock.held_by_kind(wanted text, online boolean) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT count(*)
              FROM penstock.followed_slots(wanted) s
              LEFT JOIN penstock.node n ON n.id = s.node_id
             WHERE coalesce(n.kind = 'gateway', false) = online);
END $$;

-- kind_room returns how many more slots of a model a node's kind may hold: all but those that are
-- kept for the other kind.
-- Callers: lease_room, hand_over_slots.
CREATE OR REPLACE FUNCTION penstock.kind_room(wanted text, node bigint) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    online boolean := penstock.node_online(node);
BEGIN
    RETURN (SELECT greatest(0, r.total - CASE WHEN online THEN r.batch_reserved ELSE r.reserved END
                               - penstock.held_by_kind(wanted, online))
              FROM penstock.slot_reserves(wanted) r);
END $$;

-- kind_share returns how many slots of a model the nodes of one kind may hold together while nodes
-- go without. If the other kind goes without, that kind gets what is kept for it and half of what is
-- kept for neither; otherwise it keeps what it holds.
-- Callers: equal_share, preempt_durable.
CREATE OR REPLACE FUNCTION penstock.kind_share(wanted text, online boolean) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT CASE WHEN EXISTS (SELECT FROM penstock.hungry_nodes(wanted) h WHERE penstock.node_online(h.node_id) <> online)
                        THEN r.total - CASE WHEN online THEN r.batch_reserved ELSE r.reserved END
                                     - (r.total - r.reserved - r.batch_reserved) / 2
                        ELSE greatest(0, r.total - penstock.held_by_kind(wanted, NOT online)) END
              FROM penstock.slot_reserves(wanted) r);
END $$;

-- hand_over_slots gives slots that a holder returns to the gateways that miss some of the model, those that hold fewest
-- first, each under a new token: what they lack of their share and, unless a task node has less than its own, the
-- rest. It frees the slots that no gateway gets, and those of instances that may not be leased from, with a number
-- beyond the instance's slots, or beyond what the device group has, and, from a task node, those beyond what online
-- calls may hold. It returns how many were handed over, and tells the gateways by NOTIFY.
-- Locks: the advisory lock of the model's leases, so that kind_room is exact; the rows of the slots,
-- then the rows of slot_demand of the gateways.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.hand_over_slots(wanted text, holder bigint, instances integer[], numbers integer[],
                                                    tokens bigint[])
RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    g     record;
    n     integer;
    room  integer := cardinality(tokens);
    moved integer := 0;
    short boolean; -- a task node has less than its share
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('penstock.lease'), hashtext(wanted));
    short := EXISTS (SELECT FROM penstock.hungry_shares(wanted) h
                      WHERE h.node_id <> holder AND NOT h.online AND h.held < h.share);
    FOR pass IN 1..CASE WHEN short THEN 1 ELSE 2 END LOOP -- what each lacks of its share, then the rest
        FOR g IN SELECT x.node_id, x.missing
                   FROM (SELECT h.node_id, least(h.missing, h.share - h.held) AS missing, h.held, h.since
                           FROM penstock.hungry_shares(wanted) h
                          WHERE pass = 1 AND h.online
                         UNION ALL
                         SELECT h.node_id, d.missing, h.held, h.since
                           FROM penstock.hungry_nodes(wanted) h
                           JOIN penstock.slot_demand d ON d.model = wanted AND d.node_id = h.node_id
                          WHERE pass = 2 AND penstock.node_online(h.node_id)) x
                  WHERE x.node_id <> holder
                  ORDER BY x.held, x.since, x.node_id
        LOOP
            EXIT WHEN moved >= room;
            IF moved = 0 AND NOT penstock.node_online(holder) THEN
                room := least(room, penstock.kind_room(wanted, g.node_id));
            END IF;
            WITH given AS (
                SELECT k.instance_id, k.number, k.token
                  FROM unnest(instances, numbers, tokens) k(instance_id, number, token)
                  JOIN penstock.slot s ON s.instance_id = k.instance_id AND s.number = k.number AND s.token = k.token
                  JOIN penstock.instance i ON i.id = k.instance_id
                 WHERE s.node_id = holder AND s.doubt_at IS NULL
                   AND penstock.usable(i) AND k.number < i.slots AND NOT penstock.group_is_over(i)
                 ORDER BY k.instance_id, k.number
                 LIMIT greatest(0, least(g.missing, room - moved))
            )
            UPDATE penstock.slot s
               SET node_id = g.node_id, token = nextval('penstock.token_seq'), leased_at = clock_timestamp()
              FROM given x
             WHERE s.instance_id = x.instance_id AND s.number = x.number AND s.token = x.token;
            GET DIAGNOSTICS n = ROW_COUNT;
            CONTINUE WHEN n = 0;
            moved := moved + n;
            UPDATE penstock.slot_demand d SET missing = greatest(0, d.missing - n)
                WHERE d.model = wanted AND d.node_id = g.node_id;
            PERFORM penstock.notify('granted ' || g.node_id);
        END LOOP;
    END LOOP;
    DELETE FROM penstock.slot s
     USING unnest(instances, numbers, tokens) k(instance_id, number, token)
     WHERE s.instance_id = k.instance_id AND s.number = k.number AND s.token = k.token AND s.node_id = holder
       AND s.doubt_at IS NULL;
    RETURN moved;
END $$;

-- leave_gateway removes the row of a gateway that stops, and frees its slots, apart from those in doubt and those under
-- the tokens `busy`, whose calls go on. That includes the slots of a lease or a hand-over that another session still
-- carries out, whose answer the gateway has not got: both hold the advisory lock of their model's leases, and one that
-- gets it later finds no such gateway. `asked` has the models of which it may have demanded slots. It returns how many
-- slots were freed.
-- Locks: the advisory locks of the leases of the models, in the order of their names; the row of the node; the rows of
-- the slots.
-- Callers: pkg/gateway.
CREATE OR REPLACE FUNCTION penstock.leave_gateway(gateway bigint, asked text[], busy bigint[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    model text;
    n     integer;
BEGIN
    FOR model IN SELECT DISTINCT a.name COLLATE "C" AS name FROM unnest(asked) a(name) ORDER BY name LOOP
        PERFORM pg_advisory_xact_lock(hashtext('penstock.lease'), hashtext(model));
    END LOOP;
    DELETE FROM penstock.node x WHERE x.id = gateway AND x.kind = 'gateway';
    DELETE FROM penstock.slot s WHERE s.node_id = gateway AND s.doubt_at IS NULL AND s.token <> ALL (busy);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- offer_slots hands over as many of the slots that a gateway could do without as the other nodes miss together, from
-- the first on, as hand_over_slots does; the rest stays the holder's. It returns how many slots they miss. Where they
-- miss none it waits for no lock.
-- Locks: those of hand_over_slots.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.offer_slots(wanted text, holder bigint, instances integer[], numbers integer[],
                                                tokens bigint[])
RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    missed integer := penstock.missed_slots(wanted, holder);
BEGIN
    IF missed = 0 THEN
        RETURN 0;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('penstock.lease'), hashtext(wanted));
    missed := penstock.missed_slots(wanted, holder); -- another holder may have given some meanwhile
    IF missed > 0 THEN
        PERFORM penstock.hand_over_slots(wanted, holder, instances[1:missed], numbers[1:missed], tokens[1:missed]);
    END IF;
    RETURN missed;
END $$;

-- missed_slots returns how many slots of a model the nodes other than one miss together.
-- Callers: offer_slots.
CREATE OR REPLACE FUNCTION penstock.missed_slots(wanted text, holder bigint) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT coalesce(sum(d.missing), 0)
              FROM penstock.slot_demand d
              JOIN penstock.hungry_nodes(wanted) h ON h.node_id = d.node_id
             WHERE d.model = wanted AND d.node_id <> holder);
END $$;

-- group_is_over returns whether the instances of an instance's device group hold more slots than the group has.
-- Callers: hand_over_slots.
CREATE OR REPLACE FUNCTION penstock.group_is_over(i penstock.instance) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT i.device_group IS NOT NULL
       AND penstock.device_slots(i.device_group)
           < (SELECT count(*) FROM penstock.instance x JOIN penstock.slot s ON s.instance_id = x.id
               WHERE x.device_group = i.device_group)
$$;

-- usual_run returns how long a call of a model's durable entries usually keeps its slot: the mean over those of
-- the last hours whose answer was kept. Null while fewer than 20 are known.
-- Callers: preempt_durable.
CREATE OR REPLACE FUNCTION penstock.usual_run(wanted text) RETURNS interval
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN sum(u.runs) >= 20 THEN (sum(u.run_ms)::float8 / sum(u.runs)) * interval '1 millisecond' END
      FROM penstock.usage_hour u
      JOIN penstock.queue q ON q.id = u.queue_id AND q.model = wanted AND q.kind = 'inference'
     WHERE u.hour >= date_trunc('hour', clock_timestamp(), 'UTC') - interval '2 hours' AND u.model = wanted
$$;

-- preemptible returns whether ending the call of an entry of the model is known to stop its run, concerns no
-- other entry, and lets the entry run again.
-- Callers: preempt_durable.
CREATE OR REPLACE FUNCTION penstock.preemptible(wanted text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce((c.config->>'abort_stops')::boolean,
                    c.config->>'protocol' = 'cog'
                    OR c.config->>'protocol' = 'openai' AND c.config->>'operation' IS DISTINCT FROM 'images')
       AND coalesce(c.config->>'model_type', 'sync') = 'sync'
       AND coalesce((c.config->'batch'->>'items')::integer, 1) <= 1
       AND coalesce(c.config->>'on_unknown', 'at_least_once') <> 'at_most_once'
      FROM (SELECT m.config || coalesce(m.override, '{}') AS config FROM penstock.model m WHERE m.name = wanted) c
$$;

-- preempt_durable orders the end of up to `want` runs of durable entries of a model, the youngest
-- first: of each entry at most twice, none that has run for more than 80 percent of its usual time,
-- at most a quarter of the runs in a second, and none within the share of task nodes. Orders of the last 5 seconds
-- whose runs have not ended yet count towards `want`. It returns how many were ordered, and tells the nodes by NOTIFY,
-- which does not wait for the disk: a crash of the server loses an order only together with the return of its entry,
-- whose node then returns it again without the order being counted.
-- Locks: the advisory lock of the model's preemptions, then the rows of preemption.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.preempt_durable(wanted text, gateway bigint, want integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    usual   interval;
    running integer;
    recent  integer;
    pending integer;
    ordered integer;
BEGIN
    IF NOT coalesce(penstock.preemptible(wanted), false) THEN
        RETURN 0;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('penstock.preemption'), hashtext(wanted));
    usual := penstock.usual_run(wanted);
    SELECT count(*) INTO running FROM penstock.queue q JOIN penstock.lock l ON l.queue_id = q.id
     WHERE q.model = wanted AND q.kind = 'inference';
    SELECT count(*) FILTER (WHERE p.ordered_at > clock_timestamp() - interval '1 second'), count(l.token) INTO recent,
           pending
      FROM penstock.queue q
      JOIN penstock.preemption p ON p.queue_id = q.id
      LEFT JOIN penstock.lock l ON l.queue_id = p.queue_id AND l.token = p.token
     WHERE q.model = wanted AND p.ordered_at > clock_timestamp() - interval '5 seconds';
    INSERT INTO penstock.preemption AS p (queue_id, entry_id, token, node_id, gateway_id)
    SELECT l.queue_id, l.last_entry_id, l.token, l.node_id, gateway
      FROM penstock.queue q
      JOIN penstock.lock l ON l.queue_id = q.id
      LEFT JOIN penstock.preemption b ON b.queue_id = l.queue_id AND b.entry_id = l.last_entry_id
     WHERE q.model = wanted AND q.kind = 'inference' AND l.entry_count = 1 AND penstock.node_lives(l.node_id)
       AND (b.entry_id IS NULL OR (b.times < 2 AND b.token <> l.token))
       AND (usual IS NULL OR clock_timestamp() - l.claimed_at < 0.8 * usual)
     ORDER BY l.claimed_at DESC, l.token DESC
     LIMIT greatest(0, least(want - pending, ceil(running / 4.0)::integer - recent,
                             penstock.held_by_kind(wanted, false) - penstock.kind_share(wanted, false) - pending))
    ON CONFLICT (queue_id, entry_id) DO UPDATE
       SET token = excluded.token, node_id = excluded.node_id, gateway_id = excluded.gateway_id, times = p.times + 1,
           ordered_at = clock_timestamp(), taken_at = NULL;
    GET DIAGNOSTICS ordered = ROW_COUNT;
    IF ordered > 0 THEN
        PERFORM penstock.notify('slots ' || wanted);
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    RETURN ordered;
END $$;

-- take_preemptions returns the orders for the runs of a node, each once. It does not wait for the disk: an order that
-- is returned again behind a crash of the server finds its run ended.
-- Locks: the rows of preemption.
-- Callers: pkg/slot.
CREATE OR REPLACE FUNCTION penstock.take_preemptions(node bigint) RETURNS TABLE (run_token bigint)
LANGUAGE sql AS $$
    UPDATE penstock.preemption p SET taken_at = clock_timestamp()
     WHERE p.node_id = node AND p.taken_at IS NULL AND set_config('synchronous_commit', 'off', true) <> ''
    RETURNING p.token
$$;

-- fold_online_gpu adds what online calls took to penstock.usage_hour, and, where shared is true, the
-- GPU-seconds to the use of the flow by which durable entries are ordered: in a row of priority -1, which task nodes
-- add to the use of the flow at each priority (pkg/fairness). gpu_ms is the time of slots, times GPUs and
-- sequences, and extra_ms its part beyond that time; wasted_ms is a part of gpu_ms. refused counts, by model, the
-- requests that were refused for want of room when they arrived. A gateway numbers its folds: one that has been applied
-- changes nothing. Use of a queue that was dropped before the fold is not counted. It returns whether the fold was
-- applied.
-- Locks: the row of gateway_fold of the gateway, then the rows of usage_hour, model_online and usage, each in the order
-- of their keys.
-- Callers: pkg/gateway.
CREATE OR REPLACE FUNCTION penstock.fold_online_gpu(
    gateway        bigint,
    fold           bigint,
    hours          timestamptz[],
    queues         text[],
    models         text[],
    flows          text[],
    calls          bigint[],
    gpu_ms         bigint[],
    extra_ms       bigint[],
    wasted_ms      bigint[],
    tokens_in      bigint[],
    tokens_out     bigint[],
    shared         boolean[],
    refused_models text[],
    refused        bigint[]
) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO penstock.gateway_fold AS f (node_id, seq) VALUES (gateway, fold)
    ON CONFLICT (node_id) DO UPDATE SET seq = excluded.seq, at = clock_timestamp() WHERE f.seq < excluded.seq;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO penstock.usage_hour AS u (hour, queue_id, model, flow, calls, gpu_ms, extra_ms, wasted_ms, tokens_in,
                                         tokens_cached, tokens_out, application)
    SELECT k.hour, q.id, k.model, k.flow, sum(k.calls), sum(k.gpu_ms), sum(k.extra_ms), sum(k.wasted_ms),
           sum(k.tokens_in), 0, sum(k.tokens_out), q.application
      FROM unnest(hours, queues, models, flows, calls, gpu_ms, extra_ms, wasted_ms, tokens_in, tokens_out)
           k(hour, queue, model, flow, calls, gpu_ms, extra_ms, wasted_ms, tokens_in, tokens_out)
      JOIN penstock.queue q ON q.name = k.queue
     GROUP BY k.hour, q.id, k.model, k.flow
     ORDER BY k.hour, q.id, k.model COLLATE "C", k.flow COLLATE "C"
    ON CONFLICT (hour, queue_id, model, flow) DO UPDATE
       SET calls = u.calls + excluded.calls, gpu_ms = u.gpu_ms + excluded.gpu_ms,
           extra_ms = u.extra_ms + excluded.extra_ms,
           wasted_ms = u.wasted_ms + excluded.wasted_ms,
           tokens_in = u.tokens_in + excluded.tokens_in, tokens_out = u.tokens_out + excluded.tokens_out,
           application = excluded.application;
    INSERT INTO penstock.model_online AS o (model, calls, refused)
    SELECT k.model, sum(k.calls), sum(k.refused)
      FROM (SELECT c.model, c.calls, 0 AS refused FROM unnest(models, calls) c(model, calls)
             UNION ALL
            SELECT r.model, 0, r.refused FROM unnest(refused_models, refused) r(model, refused)) k
     GROUP BY k.model ORDER BY k.model COLLATE "C"
    ON CONFLICT (model) DO UPDATE SET calls = o.calls + excluded.calls, refused = o.refused + excluded.refused;
    INSERT INTO penstock.usage AS u (queue_id, priority, whole, flow, service, lift, at)
    SELECT q.id, -1, false, k.flow, sum(k.gpu_ms) / 1000.0, 0, clock_timestamp()
      FROM unnest(queues, flows, gpu_ms, shared) k(queue, flow, gpu_ms, shared)
      JOIN penstock.queue q ON q.name = k.queue
     WHERE k.shared
     GROUP BY q.id, k.flow
     ORDER BY q.id, k.flow COLLATE "C"
    ON CONFLICT (queue_id, priority, whole, flow) DO UPDATE
       SET service = greatest(0, penstock.usage_left(u.service, u.at) + excluded.service),
           lift = penstock.usage_left(u.lift, u.at), at = clock_timestamp();
    RETURN true;
END $$;

-- sweep_gateways deletes preemptions of entries that are gone, and folds of nodes that are. It
-- returns how many rows.
-- Locks: the deleted rows.
-- Callers: pkg/gateway.
CREATE OR REPLACE FUNCTION penstock.sweep_gateways() RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    n    integer;
    gone integer;
BEGIN
    DELETE FROM penstock.preemption p
     WHERE p.ordered_at < clock_timestamp() - interval '1 minute'
       AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = p.queue_id AND e.id = p.entry_id);
    GET DIAGNOSTICS gone = ROW_COUNT;
    DELETE FROM penstock.gateway_fold f
     WHERE f.at < clock_timestamp() - interval '1 day'
       AND NOT EXISTS (SELECT FROM penstock.node n WHERE n.id = f.node_id);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN gone + n;
END $$;

-- cancel_batch_lines cancels up to `most` entries of a batch of requests, in the order of its lines, and
-- returns how many lines it took on. Each is cancelled once: one that runs ends when its node has read the
-- request. A line whose entry is being compacted is left for a later call.
-- Locks: the rows of gateway_batch_line in the order of lines, then those of cancel_one for each.
-- Callers: pkg/gateway/openaibatch.
-- SQLSTATE: those of cancel_one.
CREATE OR REPLACE FUNCTION penstock.cancel_batch_lines(batch text, most integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    l     record;
    taken integer := 0;
BEGIN
    FOR l IN SELECT x.line, x.entry_id, b.queue_id
               FROM penstock.gateway_batch_line x JOIN penstock.gateway_batch b ON b.id = x.batch_id
              WHERE x.batch_id = batch AND x.entry_id IS NOT NULL AND NOT x.cancelled
              ORDER BY x.line LIMIT most FOR UPDATE OF x
    LOOP
        CONTINUE WHEN penstock.cancel_one(l.queue_id, l.entry_id, 'its batch was cancelled', 'gateway') = 'busy';
        UPDATE penstock.gateway_batch_line x SET cancelled = true WHERE x.batch_id = batch AND x.line = l.line;
        taken := taken + 1;
    END LOOP;
    RETURN taken;
END $$;

-- cancel_request_batch ends a batch of requests, whoever made it: a gateway cancels the lines that have not ended. One
-- that is cancelled already stays so.
-- Locks: the row of gateway_batch.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS006 the batch has ended, PS012 no such batch.
CREATE OR REPLACE FUNCTION penstock.cancel_request_batch(batch text, reason text DEFAULT '', actor text DEFAULT NULL)
    RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    b penstock.gateway_batch;
BEGIN
    SELECT * INTO b FROM penstock.gateway_batch x WHERE x.id = batch FOR UPDATE;
    IF b.id IS NULL THEN
        RAISE EXCEPTION 'batch of requests "%" does not exist', batch
            USING ERRCODE = 'PS012', HINT = 'The list of request batches has their ids (gateway_batch).';
    ELSIF b.status NOT IN ('validating', 'in_progress', 'cancelling') THEN
        RAISE EXCEPTION 'batch of requests "%" is %: all its requests have ended', batch, b.status
            USING ERRCODE = 'PS006', HINT = 'Nothing is left to cancel.';
    END IF;
    UPDATE penstock.gateway_batch x
       SET status = 'cancelling', cancelling_at = clock_timestamp(), next_at = clock_timestamp()
     WHERE x.id = b.id AND x.status <> 'cancelling';
    PERFORM penstock.audit_log(actor, 'cancel_request_batch', 'batch of requests ' || batch, reason);
END $$;

-- Settings -----------------------------------------------------------------------------------------------------------

-- policy_fields lists the fields of a policy, and behind them those of its objects, as floors.default. word is the
-- value as text. A policy that is no object has none.
-- Callers: check_gateway_policy, check_scale_policy.
CREATE OR REPLACE FUNCTION penstock.policy_fields(config jsonb)
RETURNS TABLE (field text, value jsonb, word text, type text)
LANGUAGE sql IMMUTABLE AS $$
    SELECT p.field, p.value, p.value #>> '{}', jsonb_typeof(p.value)
      FROM jsonb_each(CASE WHEN jsonb_typeof(config) = 'object' THEN config ELSE '{}' END) o
     CROSS JOIN LATERAL (
           SELECT o.key, o.value
            UNION ALL
           SELECT o.key || '.' || m.key, m.value
             FROM jsonb_each(CASE WHEN jsonb_typeof(o.value) = 'object' THEN o.value ELSE '{}' END) m) p(field, value)
$$;

-- duration_seconds returns how many seconds a duration in Go's notation is, as 1m30.5s, null for another text. Each
-- part is cut to whole nanoseconds, as Go does.
-- Callers: check_gateway_policy, check_scale_policy.
CREATE OR REPLACE FUNCTION penstock.duration_seconds(duration text) RETURNS numeric
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN length(duration) > 100 THEN NULL
                WHEN duration = '0' THEN 0
                WHEN duration ~ '^(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|µs|ms|s|m|h))+$' THEN (
                     SELECT sum(trunc(('0' || p.part[1])::numeric * u.ns)) / 1e9
                       FROM regexp_matches(duration, '([0-9.]+)(ns|us|µs|ms|s|m|h)', 'g') p(part)
                       JOIN (VALUES ('ns', 1), ('us', 1e3), ('µs', 1e3), ('ms', 1e6), ('s', 1e9), ('m', 6e10),
                                    ('h', 3.6e12)) u(unit, ns) ON u.unit = p.part[2]) END
$$;

-- check_gateway_policy refuses a policy with a field that is not valid or does not exist, by its name. Durations are
-- numbers of seconds or texts in Go's notation, as 1m30s.
-- Callers: set_gateway_policy.
-- SQLSTATE: PS002 a field is not valid, or does not exist.
CREATE OR REPLACE FUNCTION penstock.check_gateway_policy(config jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    f  record;
    ok boolean;
BEGIN
    FOR f IN
        SELECT p.field, p.value, p.word, p.type, v.kind, v.wanted, v.least, v.most, v.words
          FROM penstock.policy_fields(config) p
          LEFT JOIN (VALUES
            ('total',                  'integer',  'a whole number of 0 or more',      0::numeric, 1e9::numeric, NULL::jsonb),
            ('flow_total',             'integer',  'a whole number of 0 or more',      0, 1e9, NULL),
            ('queue_ttl',              'duration', 'a duration above 0 s, up to 1000000000 s', 1e-9, 1e9, NULL),
            ('cold_ttl',               'duration', 'a duration from 0 to 1000000000 s', 0, 1e9, NULL),
            ('preempt_after',          'duration', 'a duration from 0 to 1000000000 s', 0, 1e9, NULL),
            ('tpot_max',               'duration', 'a duration from 0 to 1000000000 s', 0, 1e9, NULL),
            ('first_byte_max',         'duration', 'a duration from 0 to 1000000000 s', 0, 1e9, NULL),
            ('silence_max',            'duration', 'a duration from 0 to 1000000000 s', 0, 1e9, NULL),
            ('client_stall',           'duration', 'a duration from 0 to 1000000000 s', 0, 1e9, NULL),
            ('holdback',               'object',   'an object with a number by criticality', NULL, NULL, NULL),
            ('holdback.critical',      'number',   'a number from 0 to 1',             0, 1, NULL),
            ('holdback.default',       'number',   'a number from 0 to 1',             0, 1, NULL),
            ('holdback.sheddable',     'number',   'a number from 0 to 1',             0, 1, NULL),
            ('floors',                 'object',   'an object with a number by criticality', NULL, NULL, NULL),
            ('floors.critical',        'number',   'a number from 0 to 1',             0, 1, NULL),
            ('floors.default',         'number',   'a number from 0 to 1',             0, 1, NULL),
            ('floors.sheddable',       'number',   'a number from 0 to 1',             0, 1, NULL),
            ('watermark_per_instance', 'number',   'a number of 0 or more',            0, 1e9, NULL),
            ('deviation',              'number',   'a number from 0 to 0.99',          0, 0.99, NULL),
            ('reserved',               'number',   'a number from 0 to 1',             0, 1, NULL),
            ('batch_reserved',         'number',   'a number from 0 to 1',             0, 1, NULL),
            ('affinity_bound',         'number',   'a number of 1 or more',            1, 1e9, NULL),
            ('refuse_status',          'word',     '429 or 503',                       NULL, NULL, '[429, 503]'),
            ('fair_scope',             'word',     'shared or separate',               NULL, NULL, '["shared", "separate"]'),
            ('on_full',                'word',     'refuse or push',                   NULL, NULL, '["refuse", "push"]'),
            ('may_start',              'boolean',  'true or false',                    NULL, NULL, NULL),
            ('strict_band',            'boolean',  'true or false',                    NULL, NULL, NULL),
            ('preempt',                'boolean',  'true or false',                    NULL, NULL, NULL),
            ('strict_slots',           'boolean',  'true or false',                    NULL, NULL, NULL)
               ) v(field, kind, wanted, least, most, words) USING (field)
         ORDER BY p.field COLLATE "C"
    LOOP
        IF f.kind IS NULL THEN
            RAISE EXCEPTION 'a policy has no field %: docs/gateway.md lists them',
                quote_ident(f.field) USING ERRCODE = 'PS002';
        END IF;
        ok := CASE
            WHEN f.type = 'null' THEN true -- the default
            WHEN f.kind IN ('object', 'boolean') THEN f.type = f.kind
            WHEN f.type = 'number' AND f.kind IN ('integer', 'word') AND f.word !~ '^[0-9]+$' THEN false -- 5.0 to Go
            WHEN f.kind = 'word' THEN f.value IN (SELECT jsonb_array_elements(f.words))
            WHEN f.type = 'number' THEN f.word::numeric BETWEEN f.least AND f.most
            WHEN f.type = 'string' AND f.kind = 'duration' THEN
                coalesce(penstock.duration_seconds(f.word) BETWEEN f.least AND f.most, false)
            ELSE false
        END;
        IF NOT ok THEN
            RAISE EXCEPTION '% is %: want %', f.field, f.value, f.wanted USING ERRCODE = 'PS002';
        END IF;
    END LOOP;
    IF penstock.policy_share(config, 'reserved', 0.2) + penstock.policy_share(config, 'batch_reserved', 0.1) > 1 THEN
        RAISE EXCEPTION 'reserved + batch_reserved is %: want 1 at most',
            penstock.policy_share(config, 'reserved', 0.2) + penstock.policy_share(config, 'batch_reserved', 0.1)
                USING ERRCODE = 'PS002';
    END IF;
END $$;

-- set_gateway_policy replaces the settings of a model's pool; null brings the defaults back. Gateways
-- read it within two seconds.
-- Locks: the row of gateway_policy.
-- Callers: psql.
-- SQLSTATE: PS008 no such model, PS002 the config is not an object, or a field of it is not valid or does not exist.
CREATE OR REPLACE FUNCTION penstock.set_gateway_policy(model text, config jsonb, reason text DEFAULT '',
                                                       actor text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.need_model(set_gateway_policy.model);
    IF config IS NULL THEN
        DELETE FROM penstock.gateway_policy p WHERE p.model = set_gateway_policy.model;
    ELSIF jsonb_typeof(config) <> 'object' THEN
        RAISE EXCEPTION 'policy of model "%" must be a JSON object', set_gateway_policy.model USING ERRCODE = 'PS002';
    ELSE
        PERFORM penstock.check_gateway_policy(set_gateway_policy.config);
        INSERT INTO penstock.gateway_policy AS p (model, config)
        VALUES (set_gateway_policy.model, set_gateway_policy.config)
        ON CONFLICT ON CONSTRAINT gateway_policy_pkey DO UPDATE
            SET config = excluded.config, changed_at = clock_timestamp();
    END IF;
    PERFORM penstock.audit_log(set_gateway_policy.actor, 'set_gateway_policy', set_gateway_policy.model,
                               set_gateway_policy.reason, set_gateway_policy.config);
END $$;

-- set_flow_criticality sets the criticality of a flow's requests that name none, which is also the highest
-- that they may name; null removes it.
-- Locks: the row of flow_criticality.
-- Callers: psql.
-- SQLSTATE: PS002 no such criticality.
CREATE OR REPLACE FUNCTION penstock.set_flow_criticality(flow text, criticality text, reason text DEFAULT '',
                                                         actor text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF set_flow_criticality.criticality IS NULL THEN
        DELETE FROM penstock.flow_criticality c WHERE c.flow = set_flow_criticality.flow;
    ELSIF set_flow_criticality.criticality NOT IN ('critical', 'default', 'sheddable') THEN
        RAISE EXCEPTION 'criticality of flow "%" must be critical, default or sheddable, not "%"',
            set_flow_criticality.flow,
            set_flow_criticality.criticality USING ERRCODE = 'PS002';
    ELSE
        INSERT INTO penstock.flow_criticality AS c (flow, criticality)
        VALUES (set_flow_criticality.flow, set_flow_criticality.criticality)
        ON CONFLICT ON CONSTRAINT flow_criticality_pkey
           DO UPDATE SET criticality = excluded.criticality, changed_at = clock_timestamp();
    END IF;
    PERFORM penstock.audit_log(set_flow_criticality.actor, 'set_flow_criticality', 'flow ' || set_flow_criticality.flow,
                               set_flow_criticality.reason, jsonb_build_object('criticality', set_flow_criticality.criticality));
END $$;

-- set_gateway_token sets the limits of the tokens of a name at gateways. A limit that is not given, or null, stays; the
-- first time it is none. '{}', '' for the criticality, and 0 remove one: without a criticality of its own a token has
-- that of the flow of each request, else default.
-- Locks: the row of gateway_token.
-- Callers: psql.
-- SQLSTATE: PS002 a limit is not valid.
CREATE OR REPLACE FUNCTION penstock.set_gateway_token(name text, models text[] DEFAULT NULL,
                                                      criticality text DEFAULT NULL,
                                                      rate real DEFAULT NULL, in_flight integer DEFAULT NULL,
                                                      waiting integer DEFAULT NULL,
                                                      reason text DEFAULT '', actor text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT set_gateway_token.rate < 'Infinity' THEN -- NaN is above it
        RAISE EXCEPTION 'rate of token "%" is %: want a number of requests a second, 0 for no bound',
            set_gateway_token.name, set_gateway_token.rate USING ERRCODE = 'PS002';
    END IF;
    INSERT INTO penstock.gateway_token AS t (name, models, criticality, rate, in_flight, waiting)
    VALUES (set_gateway_token.name, coalesce(set_gateway_token.models, '{}'),
            nullif(set_gateway_token.criticality, ''), coalesce(set_gateway_token.rate, 0),
            coalesce(set_gateway_token.in_flight, 0), coalesce(set_gateway_token.waiting, 0))
    ON CONFLICT ON CONSTRAINT gateway_token_pkey DO UPDATE
       SET models = coalesce(set_gateway_token.models, t.models),
           criticality = nullif(coalesce(set_gateway_token.criticality, t.criticality), ''),
           rate = coalesce(set_gateway_token.rate, t.rate),
           in_flight = coalesce(set_gateway_token.in_flight, t.in_flight),
           waiting = coalesce(set_gateway_token.waiting, t.waiting);
    PERFORM penstock.audit_log(set_gateway_token.actor, 'set_gateway_token', 'token ' || set_gateway_token.name,
                               set_gateway_token.reason, jsonb_strip_nulls(
                               jsonb_build_object('models', set_gateway_token.models,
                                                  'criticality', set_gateway_token.criticality,
                                                  'rate', set_gateway_token.rate, 'in_flight', set_gateway_token.in_flight,
                                                  'waiting', set_gateway_token.waiting)));
EXCEPTION
    WHEN check_violation OR not_null_violation THEN
        RAISE EXCEPTION 'limits of token "%" are not valid: %', set_gateway_token.name, SQLERRM USING ERRCODE = 'PS002';
END $$;
