-- +goose Up

-- A lock of a group takes out of the token buckets as many times its units as it covers entries, and covers no more than
-- they hold: so a rate that does not bind leaves groups whole.

-- limit_rooms says how many locks more, and of entries together, queue may take in a flow by its limits, and when to ask
-- again where a token bucket leaves none. It is exact for whoever holds the limits' rows, if the statement began after
-- that. Limits for each lock key do not bind the lane: see key_room.
-- +goose StatementBegin
CREATE FUNCTION penstock.limit_rooms(queue integer, in_flow text, OUT locks integer, OUT entries integer, OUT wait double precision)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    l    record;
    used bigint;
    held double precision;
BEGIN
    locks := 2147483647;
    entries := 2147483647;
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
            locks := least(locks, greatest(0, (l.max_units - used) / l.units));
        END IF;
        IF l.rate IS NOT NULL THEN
            held := penstock.bucket_units(l.row, in_flow);
            entries := least(entries, floor(greatest(0, held) / l.units));
            IF held < l.units THEN
                wait := greatest(wait, (l.units - held) / l.rate);
            END IF;
        END IF;
    END LOOP;
    locks := least(locks, entries);
END $$;
-- +goose StatementEnd

-- key_room says how many entries of a lock key its token buckets hold, and how long (s) it must wait where that is none.
-- +goose StatementBegin
CREATE FUNCTION penstock.key_room(queue integer, key text, OUT entries integer, OUT wait double precision)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT coalesce(min(floor(greatest(0, b.held) / u.units)), 2147483647), coalesce(max(greatest(0, (u.units - b.held) / g.rate)), 0) INTO entries, wait
      FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id
     CROSS JOIN LATERAL (SELECT penstock.bucket_units(g, key) AS held) b
     WHERE u.queue_id = queue AND g.per_key;
END $$;
-- +goose StatementEnd

-- spend_keys takes what so many entries of each key use out of their token buckets.
DROP FUNCTION penstock.spend_keys(integer, text[]);
-- +goose StatementBegin
CREATE FUNCTION penstock.spend_keys(queue integer, keys text[], entries bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO penstock.bucket AS b (limit_id, flow, units, at)
    SELECT g.id, k.key, g.burst - k.n * u.units, clock_timestamp()
      FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id CROSS JOIN unnest(keys, entries) k(key, n)
     WHERE u.queue_id = queue AND g.per_key ORDER BY g.id, k.key COLLATE "C"
    ON CONFLICT (limit_id, flow) DO UPDATE
       SET units = (SELECT penstock.bucket_units(g, b.flow) - g.burst FROM penstock."limit" g WHERE g.id = b.limit_id) + excluded.units, at = clock_timestamp();
END $$;
-- +goose StatementEnd

-- spend takes what n entries of a flow use out of the token buckets of a queue.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.spend(queue integer, in_flow text, n bigint) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    l record;
BEGIN
    IF n = 0 THEN
        RETURN; -- whoever claimed nothing may not hold the limits, and must not wait for who does
    END IF;
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

-- refund gives back what locks, which the caller holds, took out of token buckets for entries that were cancelled, and for
-- those behind that have not run, where rest says so. What a change of the limit came after is not given back.
DROP FUNCTION penstock.refund(integer, text[], bigint[]);
-- +goose StatementBegin
CREATE FUNCTION penstock.refund(queue integer, keys text[], tokens bigint[], cancelled integer[], rest boolean[]) RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT u.limit_id, CASE WHEN g.per_key THEN k.key WHEN g.per_flow THEN l.flow ELSE '' END COLLATE "C" AS scope,
                    sum(u.units * (k.cancelled + CASE WHEN NOT k.rest THEN 0 WHEN left(k.key, 1) = '#' THEN 1 ELSE
                        (SELECT count(*) FROM penstock.entry e WHERE e.queue_id = queue AND e.lock_key = k.key AND e.status = 'pending'
                                                                 AND e.priority >= 0 AND e.id <= l.last_entry_id) END)) AS units
               FROM penstock.limit_use u
               JOIN penstock."limit" g ON g.id = u.limit_id
              CROSS JOIN unnest(keys, tokens, cancelled, rest) k(key, token, cancelled, rest)
              CROSS JOIN LATERAL (SELECT x.flow, x.claimed_at, x.last_entry_id FROM penstock.lock x
                                   WHERE x.queue_id = queue AND x.lock_key = k.key AND x.token = k.token OFFSET 0) l
              WHERE u.queue_id = queue AND g.rate IS NOT NULL AND l.claimed_at >= u.since
              GROUP BY 1, 2 ORDER BY 1, 2
    LOOP
        -- What is beyond the burst is cut off when the bucket is read.
        UPDATE penstock.bucket b SET units = b.units + r.units WHERE b.limit_id = r.limit_id AND b.flow = r.scope;
    END LOOP;
END $$;
-- +goose StatementEnd

DROP FUNCTION penstock.key_wait(integer, text);
DROP FUNCTION penstock.limit_room(integer, text);
COMMENT ON FUNCTION penstock.queue_pace IS 'how claims of a queue go: 0 without rates, 1 with some, 2 with a look at each lock key as well';
