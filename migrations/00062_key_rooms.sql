-- +goose Up

-- key_rooms says for lock keys, each at a place in line, how many entries their token buckets hold, and how long (s) they
-- must wait where that is none: all keys of a claim at once.
DROP FUNCTION penstock.key_room(integer, text);
-- +goose StatementBegin
CREATE FUNCTION penstock.key_rooms(queue integer, keys text[], places bigint[]) RETURNS TABLE (pos bigint, lock_key text, room integer, wait double precision)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    asked timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    SELECT k.pos, k.key, least(min(floor(greatest(0, b.held) / g.units)), 2147483647)::integer, max(greatest(0, (g.units - b.held) / g.rate))::double precision
      FROM (SELECT l.id, l.rate::double precision AS rate, l.burst::double precision AS burst, u.units
              FROM penstock.limit_use u JOIN penstock."limit" l ON l.id = u.limit_id WHERE u.queue_id = queue AND l.per_key OFFSET 0) g
     CROSS JOIN unnest(keys, places) k(key, pos)
     CROSS JOIN LATERAL (SELECT coalesce((SELECT least(g.burst, x.units + g.rate * extract(epoch FROM asked - x.at)::double precision)
                                            FROM penstock.bucket x WHERE x.limit_id = g.id AND x.flow = k.key COLLATE "C"), g.burst) AS held) b
     GROUP BY k.pos, k.key;
END $$;
-- +goose StatementEnd

-- Looking up the limit for every bucket that a claim writes cost more than the bucket; Tidy removes those of no limit.
ALTER TABLE penstock.bucket DROP CONSTRAINT bucket_limit_id_fkey;
