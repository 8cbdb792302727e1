-- +goose Up

-- A limit bounds how many locks of its queues there may be at once (max_units), how fast they may be taken (rate,
-- burst), or both; over all flows together or for each flow by itself. A queue uses a limit with so many units a
-- lock. What is in use is counted from the lock records themselves: there is no counter that could drift.
CREATE TABLE penstock."limit" (
    id         integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text COLLATE "C" NOT NULL UNIQUE CHECK (name <> ''),
    per_flow   boolean NOT NULL DEFAULT false,
    max_units  integer CHECK (max_units >= 0),
    rate       real CHECK (rate > 0),
    burst      real CHECK (burst > 0),
    created_at timestamptz NOT NULL DEFAULT now(),
    CHECK ((rate IS NULL) = (burst IS NULL)),
    CHECK (max_units IS NOT NULL OR rate IS NOT NULL)
);
COMMENT ON COLUMN penstock."limit".max_units IS 'units at once';
COMMENT ON COLUMN penstock."limit".rate IS 'units a second that flow into the token bucket';
COMMENT ON COLUMN penstock."limit".burst IS 'units that the token bucket holds';

CREATE TABLE penstock.limit_use (
    queue_id integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    limit_id integer NOT NULL REFERENCES penstock."limit" ON DELETE CASCADE,
    units    integer NOT NULL DEFAULT 1 CHECK (units > 0),
    PRIMARY KEY (queue_id, limit_id)
);
CREATE INDEX limit_use_limit ON penstock.limit_use (limit_id);

-- Token buckets of limits with a rate: how many units there were at a time. Written by claims that hold the limit.
CREATE TABLE penstock.bucket (
    limit_id integer NOT NULL REFERENCES penstock."limit" ON DELETE CASCADE,
    units    double precision NOT NULL,
    at       timestamptz NOT NULL,
    flow     text COLLATE "C" NOT NULL,
    PRIMARY KEY (limit_id, flow)
) WITH (fillfactor = 50);

-- bucket_units is what a token bucket holds now.
-- +goose StatementBegin
CREATE FUNCTION penstock.bucket_units(l penstock."limit", in_flow text) RETURNS double precision
LANGUAGE sql AS $$
    SELECT coalesce((SELECT least(l.burst, b.units + l.rate * extract(epoch FROM clock_timestamp() - b.at))
                       FROM penstock.bucket b
                      WHERE b.limit_id = l.id AND b.flow = CASE WHEN l.per_flow THEN in_flow ELSE '' END), l.burst)
$$;
-- +goose StatementEnd

-- limit_room says how many locks more queue may take in a flow by each of its limits, and when to ask again where a
-- token bucket leaves none. It is exact for whoever holds the limits' rows, if the statement began after that.
-- +goose StatementBegin
CREATE FUNCTION penstock.limit_room(queue integer, in_flow text, OUT room integer, OUT wait double precision)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    l     record;
    used  bigint;
    units double precision;
BEGIN
    room := 2147483647;
    wait := 0;
    FOR l IN SELECT g AS row, g.*, u.units FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id
              WHERE u.queue_id = queue ORDER BY g.id
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

-- spend takes what n new locks of a queue use out of its token buckets.
-- +goose StatementBegin
CREATE FUNCTION penstock.spend(queue integer, in_flow text, n bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    l record;
BEGIN
    FOR l IN SELECT g AS row, g.*, u.units FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id
              WHERE u.queue_id = queue AND g.rate IS NOT NULL ORDER BY g.id
    LOOP
        INSERT INTO penstock.bucket (limit_id, flow, units, at)
        VALUES (l.id, CASE WHEN l.per_flow THEN in_flow ELSE '' END, l.burst - n * l.units, clock_timestamp())
        ON CONFLICT (limit_id, flow) DO UPDATE
           SET units = penstock.bucket_units(l.row, in_flow) - n * l.units, at = clock_timestamp();
    END LOOP;
END $$;
-- +goose StatementEnd

-- set_limit makes a limit or changes one: {"max_units": 4} or {"rate": 10, "burst": 20, "per_flow": true}.
-- +goose StatementBegin
CREATE FUNCTION penstock.set_limit(limit_name text, options jsonb, reason text DEFAULT NULL, actor text DEFAULT current_user) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    l       penstock."limit";
    unknown text;
BEGIN
    SELECT k INTO unknown FROM jsonb_object_keys(options) k WHERE k NOT IN ('per_flow', 'max_units', 'rate', 'burst');
    IF FOUND THEN
        RAISE EXCEPTION 'limit option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are per_flow, max_units, rate and burst.';
    END IF;
    SELECT * INTO l FROM penstock."limit" WHERE name = limit_name FOR UPDATE;
    l := jsonb_populate_record(l, options);
    IF l.rate IS NOT NULL AND l.burst IS NULL THEN
        l.burst := greatest(1, l.rate);
    END IF;
    INSERT INTO penstock."limit" (name, per_flow, max_units, rate, burst)
    VALUES (limit_name, coalesce(l.per_flow, false), l.max_units, l.rate, l.burst)
    ON CONFLICT (name) DO UPDATE SET per_flow = excluded.per_flow, max_units = excluded.max_units,
                                     rate = excluded.rate, burst = excluded.burst
    RETURNING * INTO l;
    PERFORM penstock.limits_changed(l.id);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail) VALUES (actor, 'set_limit', limit_name, reason, options);
    RETURN l.id;
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range THEN
        RAISE EXCEPTION 'limit "%" is not valid: %', limit_name, SQLERRM
            USING ERRCODE = 'PS002', HINT = 'Give max_units, or rate and burst (units a second, units), or all three.';
END $$;
-- +goose StatementEnd

-- limits_changed makes nodes read the queues of a limit again.
-- +goose StatementBegin
CREATE FUNCTION penstock.limits_changed(changed integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE penstock.queue SET version = version + 1
     WHERE id IN (SELECT queue_id FROM penstock.limit_use WHERE limit_id = changed)
$$;
-- +goose StatementEnd

-- use_limit puts a queue under a limit, with so many units for each of its locks; 0 takes it out again. From its
-- commit on no claim goes by without the limit: one that does not know of it is refused and reads the queue anew.
-- +goose StatementBegin
CREATE FUNCTION penstock.use_limit(queue_name text, limit_name text, units integer DEFAULT 1,
                                   reason text DEFAULT NULL, actor text DEFAULT current_user) RETURNS void
LANGUAGE plpgsql AS $$
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
        INSERT INTO penstock.limit_use (queue_id, limit_id, units) VALUES (q.id, lim.id, use_limit.units)
        ON CONFLICT (queue_id, limit_id) DO UPDATE SET units = excluded.units;
    END IF;
    PERFORM penstock.limits_changed(lim.id);
    IF units = 0 THEN
        DELETE FROM penstock.limit_use WHERE queue_id = q.id AND limit_id = lim.id;
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (actor, 'use_limit', queue_name, reason, jsonb_build_object('limit', limit_name, 'units', units));
END $$;
-- +goose StatementEnd

-- A queue's own max_concurrent is a limit of its own, named after it.
-- +goose StatementBegin
CREATE FUNCTION penstock.limit_own_concurrency() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.max_concurrent IS NOT NULL THEN
        INSERT INTO penstock."limit" (name, max_units) VALUES ('queue:' || NEW.name, NEW.max_concurrent)
        ON CONFLICT (name) DO UPDATE SET max_units = excluded.max_units;
        INSERT INTO penstock.limit_use (queue_id, limit_id)
        SELECT NEW.id, id FROM penstock."limit" WHERE name = 'queue:' || NEW.name
        ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM penstock."limit" WHERE name = 'queue:' || NEW.name;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER limit_own_concurrency AFTER UPDATE OF max_concurrent ON penstock.queue
    FOR EACH ROW WHEN (OLD.max_concurrent IS DISTINCT FROM NEW.max_concurrent)
    EXECUTE FUNCTION penstock.limit_own_concurrency();
-- +goose StatementBegin
CREATE FUNCTION penstock.drop_own_limit() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM penstock."limit" WHERE name = 'queue:' || OLD.name;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER drop_own_limit AFTER DELETE ON penstock.queue FOR EACH ROW EXECUTE FUNCTION penstock.drop_own_limit();
