-- +goose Up

-- Several lanes of a queue under rates are claimed together as well. claim_room has the limits with a rate alone and says what
-- the buckets that all flows share hold; flow_rooms reads those of each flow, behind the same locks, and charge_lanes writes
-- them all.

-- flow_rooms says for how many entries the token buckets of flows of their own have room, and how long (s) to wait where one has
-- none, in the order of the flows. NULL: the queue has no such limit.
-- +goose StatementBegin
CREATE FUNCTION penstock.flow_rooms(queue integer, flows text[], OUT rooms integer[], OUT waits double precision[])
LANGUAGE plpgsql AS $$
BEGIN
    SELECT array_agg(f.room ORDER BY f.ord), array_agg(f.wait ORDER BY f.ord) INTO rooms, waits
      FROM (SELECT k.ord, least(min(floor(greatest(0, b.held) / g.units)), 2147483647)::integer AS room, max((g.units - b.held) / g.rate) AS wait
              FROM penstock.limit_use u
             CROSS JOIN LATERAL (SELECT x.id, x.rate::double precision AS rate, x.burst::double precision AS burst, u.units FROM penstock."limit" x
                                  WHERE x.id = u.limit_id AND x.rate IS NOT NULL AND x.per_flow AND NOT x.per_key OFFSET 0) g
             CROSS JOIN unnest(flows) WITH ORDINALITY k(flow, ord)
             CROSS JOIN LATERAL (SELECT coalesce((SELECT least(g.burst, x.units + g.rate * extract(epoch FROM clock_timestamp() - x.at)::double precision)
                                                    FROM penstock.bucket x WHERE x.limit_id = g.id AND x.flow = k.flow COLLATE "C"), g.burst) AS held) b
             WHERE u.queue_id = queue
             GROUP BY k.ord) f;
END $$;
-- +goose StatementEnd

-- charge_lanes takes what a claim took out of the token buckets of its queue: so many entries of each flow, and of each lock
-- key. It takes the claim back whose last token is beyond what claim_room said. Whoever writes buckets does so by limit and then
-- by flow or lock key, so that nobody waits in a ring.
-- +goose StatementBegin
CREATE FUNCTION penstock.charge_lanes(queue integer, pace integer, flows text[], taken bigint[], keys text[], entries bigint[], last_token bigint,
    uncounted_to bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF last_token > uncounted_to THEN
        RAISE EXCEPTION 'token % is above %: the limit must be counted', last_token, uncounted_to USING ERRCODE = 'serialization_failure';
    END IF;
    IF pace = 0 OR flows IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO penstock.bucket AS b (limit_id, flow, units, at)
    SELECT g.id, k.scope, g.burst - k.n * u.units, clock_timestamp()
      FROM penstock.limit_use u
     CROSS JOIN LATERAL (SELECT * FROM penstock."limit" x WHERE x.id = u.limit_id AND x.rate IS NOT NULL OFFSET 0) g
     CROSS JOIN LATERAL (
           SELECT '' COLLATE "C" AS scope, (SELECT sum(t.n)::bigint FROM unnest(charge_lanes.taken) t(n)) AS n WHERE NOT g.per_key AND NOT g.per_flow
           UNION ALL
           SELECT f.flow, f.n FROM unnest(flows, charge_lanes.taken) f(flow, n) WHERE g.per_flow AND NOT g.per_key
           UNION ALL
           SELECT c.key, c.n FROM unnest(keys, charge_lanes.entries) c(key, n) WHERE g.per_key) k
     WHERE u.queue_id = queue
     ORDER BY g.id, k.scope
    ON CONFLICT (limit_id, flow) DO UPDATE
       SET units = (SELECT least(0, b.units + g.rate * extract(epoch FROM clock_timestamp() - b.at) - g.burst) FROM penstock."limit" g WHERE g.id = b.limit_id)
                   + excluded.units, at = clock_timestamp();
END $$;
-- +goose StatementEnd

-- charge is the same for one lane, of which n entries were taken.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.charge(queue integer, in_flow text, pace integer, n bigint, keys text[], entries bigint[], last_token bigint, uncounted_to bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.charge_lanes(queue, CASE WHEN n = 0 THEN 0 ELSE pace END, ARRAY[in_flow], ARRAY[n], keys, entries, last_token, uncounted_to);
END $$;
-- +goose StatementEnd
