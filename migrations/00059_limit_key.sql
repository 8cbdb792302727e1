-- +goose Up

-- Rates for each lock key, and refunds. A lock of a queue under a rate covers one entry, so that units are counted by entry.
ALTER TABLE penstock."limit" ADD COLUMN per_key boolean NOT NULL DEFAULT false,
    ADD CHECK (NOT per_key OR (max_units IS NULL AND NOT per_flow)); -- a key has one holder at a time whatever a limit says
ALTER TABLE penstock.limit_use ADD COLUMN since timestamptz NOT NULL DEFAULT now();
COMMENT ON COLUMN penstock.limit_use.since IS 'when its units, or what the limit counts by, changed last: what was taken before is not refunded';
COMMENT ON COLUMN penstock.bucket.flow IS 'or lock key, of a limit for each key; empty for a limit over all';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.bucket_units(l penstock."limit", in_flow text) RETURNS double precision
    LANGUAGE sql
    AS $$
    SELECT coalesce((SELECT least(l.burst, b.units + l.rate * extract(epoch FROM clock_timestamp() - b.at))
                       FROM penstock.bucket b
                      WHERE b.limit_id = l.id AND b.flow = CASE WHEN l.per_flow OR l.per_key THEN in_flow ELSE '' END), l.burst)
$$;
-- +goose StatementEnd

-- limit_room leaves limits for each lock key to key_wait: they do not bind the lane.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.limit_room(queue integer, in_flow text, OUT room integer, OUT wait double precision) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
DECLARE
    l     record;
    used  bigint;
    units double precision;
BEGIN
    room := 2147483647;
    wait := 0;
    FOR l IN SELECT g AS row, g.*, u.units FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id
              WHERE u.queue_id = queue AND NOT g.per_key ORDER BY g.id
    LOOP
        IF l.max_units IS NOT NULL THEN
            SELECT coalesce(sum(u.units * c.locks), 0) INTO used
              FROM penstock.limit_use u
             CROSS JOIN LATERAL (SELECT count(*) AS locks FROM penstock.lock k
                                  WHERE k.queue_id = u.queue_id AND (NOT l.per_flow OR k.flow = in_flow)) c
             WHERE u.limit_id = l.id;
            room := least(room, greatest(0, (l.max_units - used) / l.units));
        END IF;
        IF l.rate IS NOT NULL THEN
            units := penstock.bucket_units(l.row, in_flow);
            room := least(room, floor(units / l.units)::integer);
            IF units < l.units THEN
                wait := greatest(wait, (l.units - units) / l.rate);
            END IF;
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.spend(queue integer, in_flow text, n bigint) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    l record;
BEGIN
    FOR l IN SELECT g AS row, g.*, u.units FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id
              WHERE u.queue_id = queue AND g.rate IS NOT NULL AND NOT g.per_key ORDER BY g.id
    LOOP
        INSERT INTO penstock.bucket (limit_id, flow, units, at)
        VALUES (l.id, CASE WHEN l.per_flow THEN in_flow ELSE '' END, l.burst - n * l.units, clock_timestamp())
        ON CONFLICT (limit_id, flow) DO UPDATE
           SET units = penstock.bucket_units(l.row, in_flow) - n * l.units, at = clock_timestamp();
    END LOOP;
END $$;
-- +goose StatementEnd

-- key_wait is how long (s) a lock key has to wait for its token buckets; 0: not at all.
-- +goose StatementBegin
CREATE FUNCTION penstock.key_wait(queue integer, key text) RETURNS double precision
LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT coalesce(max(greatest(0, (u.units - penstock.bucket_units(g, key)) / g.rate)), 0)
              FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id WHERE u.queue_id = queue AND g.per_key);
END $$;
-- +goose StatementEnd

-- spend_keys takes what a lock of each key uses out of their token buckets.
-- +goose StatementBegin
CREATE FUNCTION penstock.spend_keys(queue integer, keys text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO penstock.bucket AS b (limit_id, flow, units, at)
    SELECT g.id, k, g.burst - u.units, clock_timestamp()
      FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id CROSS JOIN unnest(keys) k
     WHERE u.queue_id = queue AND g.per_key ORDER BY g.id, k COLLATE "C"
    ON CONFLICT (limit_id, flow) DO UPDATE
       SET units = (SELECT penstock.bucket_units(g, b.flow) - g.burst FROM penstock."limit" g WHERE g.id = b.limit_id) + excluded.units, at = clock_timestamp();
END $$;
-- +goose StatementEnd

-- queue_pace is how claims of a queue go: 0 without rates, 1 an entry a lock, 2 with a look at each lock key as well.
-- +goose StatementBegin
CREATE FUNCTION penstock.queue_pace(queue integer) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(CASE WHEN g.per_key THEN 2 WHEN g.rate IS NOT NULL THEN 1 ELSE 0 END), 0)
      FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id WHERE u.queue_id = queue
$$;
-- +goose StatementEnd

-- Keys that wait for a token bucket are parked: their ready row stands in a lane that nobody claims from (priority -2),
-- at the microsecond at which they may go on. So a claim meets such a key once, not each time.
-- park puts a key there for so long, unless it stands there already. The row it finds stays until this commits, as that
-- of a pusher does: whoever takes it away sees what came meanwhile.
-- +goose StatementBegin
CREATE FUNCTION penstock.park(queue integer, key text, wait double precision) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM penstock.ready r WHERE r.lock_key = key AND r.queue_id + 0 = queue AND r.priority = -2 LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
        VALUES (queue, -2, '', (extract(epoch FROM clock_timestamp()) + wait) * 1000000, key) ON CONFLICT DO NOTHING;
    END IF;
    RETURN FOUND; -- false where another key has that microsecond: the next claim parks this one
END $$;
-- +goose StatementEnd

-- unpark puts keys back into line whose time has come, where their oldest entry belongs, and returns how many.
-- +goose StatementBegin
CREATE FUNCTION penstock.unpark(queue integer, most integer) RETURNS integer
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    now_us bigint := extract(epoch FROM clock_timestamp()) * 1000000;
    due    tid[];
    keys   text[];
BEGIN
    due := ARRAY(SELECT ctid FROM penstock.ready WHERE queue_id = queue AND priority = -2 AND flow = '' AND pos <= now_us
                  ORDER BY pos LIMIT most FOR UPDATE SKIP LOCKED);
    IF cardinality(due) = 0 THEN
        RETURN 0;
    END IF;
    -- A new statement: it sees the entries of pushers that relied on a row before we had it.
    WITH gone AS (DELETE FROM penstock.ready WHERE ctid = ANY (due) RETURNING lock_key)
    SELECT array_agg(lock_key) INTO keys FROM gone;
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
    SELECT queue, n.priority, n.flow, n.id, k.key
      FROM unnest(keys) k(key)
     CROSS JOIN LATERAL (
           SELECT min(e.id) AS id, max(e.priority) AS priority, (array_agg(e.flow ORDER BY e.id))[1] AS flow
             FROM (SELECT x.id, x.priority, x.flow FROM penstock.entry x
                    WHERE x.queue_id = queue AND x.lock_key = k.key AND x.status = 'pending' AND x.priority >= 0
                    ORDER BY x.id LIMIT 100) e) n
     WHERE n.id IS NOT NULL
    ON CONFLICT DO NOTHING;
    RETURN cardinality(due);
END $$;
-- +goose StatementEnd

-- refund gives back what locks took out of token buckets whose one entry did not run, or was cancelled. They are held by
-- the caller. What a change of the limit came after is not given back.
-- +goose StatementBegin
CREATE FUNCTION penstock.refund(queue integer, keys text[], tokens bigint[]) RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT u.limit_id, CASE WHEN g.per_key THEN k.key WHEN g.per_flow THEN l.flow ELSE '' END COLLATE "C" AS scope, sum(u.units) AS units
               FROM penstock.limit_use u
               JOIN penstock."limit" g ON g.id = u.limit_id
              CROSS JOIN unnest(keys, tokens) k(key, token)
              CROSS JOIN LATERAL (SELECT x.flow, x.claimed_at, x.entry_count FROM penstock.lock x
                                   WHERE x.queue_id = queue AND x.lock_key = k.key AND x.token = k.token OFFSET 0) l
              WHERE u.queue_id = queue AND g.rate IS NOT NULL AND l.entry_count = 1 AND l.claimed_at >= u.since
              GROUP BY 1, 2 ORDER BY 1, 2
    LOOP
        -- What is beyond the burst is cut off when the bucket is read.
        UPDATE penstock.bucket b SET units = b.units + r.units WHERE b.limit_id = r.limit_id AND b.flow = r.scope;
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.use_limit(queue_name text, limit_name text, units integer DEFAULT 1, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue_name);
    lim  penstock."limit";
BEGIN
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.set_limit(limit_name text, options jsonb, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    l       penstock."limit";
    unknown text;
BEGIN
    SELECT k INTO unknown FROM jsonb_object_keys(options) k WHERE k NOT IN ('per_flow', 'per_key', 'max_units', 'rate', 'burst');
    IF FOUND THEN
        RAISE EXCEPTION 'limit option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are per_flow, per_key, max_units, rate and burst.';
    END IF;
    SELECT * INTO l FROM penstock."limit" WHERE name = limit_name FOR UPDATE;
    l := jsonb_populate_record(l, options);
    IF l.rate IS NOT NULL AND l.burst IS NULL THEN
        l.burst := greatest(1, l.rate);
    END IF;
    INSERT INTO penstock."limit" (name, per_flow, per_key, max_units, rate, burst)
    VALUES (limit_name, coalesce(l.per_flow, false), coalesce(l.per_key, false), l.max_units, l.rate, l.burst)
    ON CONFLICT (name) DO UPDATE SET per_flow = excluded.per_flow, per_key = excluded.per_key, max_units = excluded.max_units,
                                     rate = excluded.rate, burst = excluded.burst
    RETURNING * INTO l;
    IF options ?| '{per_flow,per_key}' THEN -- other buckets: what was spent before is not given back to these
        UPDATE penstock.limit_use SET since = clock_timestamp() WHERE limit_id = l.id;
    END IF;
    PERFORM penstock.limits_changed(l.id);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail) VALUES (actor, 'set_limit', limit_name, reason, options);
    RETURN l.id;
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range THEN
        RAISE EXCEPTION 'limit "%" is not valid: %', limit_name, SQLERRM
            USING ERRCODE = 'PS002', HINT = 'Give max_units, or rate and burst (units a second, units), or all three; with per_key rate alone, since a key has one holder at a time.';
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.limit_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT penstock.because('limit', format('%s of %s units of limit "%s" are in use%s', u.used, g.max_units, g.name,
               CASE WHEN g.per_flow THEN format(' by flow "%s"', e.flow) ELSE '' END),
               jsonb_build_object('limit', g.name, 'held', u.used, 'max_units', g.max_units, 'units', m.units))
      FROM penstock.limit_use m
      JOIN penstock."limit" g ON g.id = m.limit_id
     CROSS JOIN LATERAL (SELECT coalesce(sum(o.units), 0) AS used
                           FROM penstock.limit_use o JOIN penstock.lock k ON k.queue_id = o.queue_id
                          WHERE o.limit_id = g.id AND (NOT g.per_flow OR k.flow = e.flow)) u
     WHERE m.queue_id = q.id AND g.name <> 'queue:' || q.name AND u.used + m.units > g.max_units
    UNION ALL
    SELECT penstock.because('rate', format('limit "%s" lets %s units a second through; the next in %s', g.name, g.rate,
               penstock.ago((m.units - b.units) / g.rate * interval '1 second')),
               jsonb_build_object('limit', g.name, 'rate', g.rate, 'units', round(b.units::numeric, 2), 'seconds', round(((m.units - b.units) / g.rate)::numeric, 2)))
      FROM penstock.limit_use m
      JOIN penstock."limit" g ON g.id = m.limit_id
     CROSS JOIN LATERAL (SELECT penstock.bucket_units(g, CASE WHEN g.per_key THEN e.lock_key ELSE e.flow END) AS units) b
     WHERE m.queue_id = q.id AND g.rate IS NOT NULL AND (e.lock_key IS NOT NULL OR NOT g.per_key) AND b.units < m.units
    UNION ALL
    SELECT penstock.because('no_thread', format('all %s processing threads of the nodes that serve the queue are taken', sum(n.threads)),
               jsonb_build_object('threads', sum(n.threads), 'nodes', count(*)))
      FROM penstock.serving(q.id) s JOIN penstock.node n ON n.id = s.id
    HAVING count(*) > 0 AND bool_and(n.threads > 0 AND (SELECT count(*) FROM penstock.lock l WHERE l.node_id = n.id) >= n.threads)
    UNION ALL
    SELECT CASE WHEN i.usable = 0 THEN
               penstock.because('no_instance', format('none of the %s instances of model %s takes calls%s', i.n, q.model, coalesce(': ' || i.why, '')),
                                jsonb_build_object('model', q.model, 'instances', i.n))
           ELSE penstock.because('no_slot', format('%s of %s slots of model %s are held', i.held, i.slots, q.model),
                                jsonb_build_object('model', q.model, 'held', i.held, 'slots', i.slots)) END
      FROM (SELECT count(*) AS n, count(*) FILTER (WHERE x.usable) AS usable, coalesce(sum(x.slots) FILTER (WHERE x.usable), 0) AS slots,
                   coalesce(sum(x.held) FILTER (WHERE x.usable), 0) AS held,
                   string_agg(DISTINCT x.server || ' ' || CASE WHEN x.draining THEN 'drains' ELSE x.state END || coalesce(' (' || nullif(x.reason, '') || ')', ''), ', ') AS why
              FROM penstock.instance_status x WHERE x.model = q.model) i
     WHERE q.model IS NOT NULL AND i.held >= i.slots
$$;
-- +goose StatementEnd
