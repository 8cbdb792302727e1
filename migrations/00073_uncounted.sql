-- +goose Up

-- Limits that are far from binding are not counted at each claim: tokens serve as tickets.
--
-- Every lock takes a token of its own out of one sequence. Whoever counts what a limit has in use, while no claim under it
-- is in flight, at token t, knows: however many claimers there are, and whatever they or their nodes do, until the
-- sequence has reached t + n no more than n locks can have come. So with u units in use and at most w units a lock, locks
-- with tokens up to t + (max_units - u) / w need not be counted. That token is uncounted_to. A claim looks whether the
-- sequence is before it, and takes itself back where a token that it drew is not (penstock.charge).
--
-- That no claim is in flight is what an advisory lock of the limit says, which is in memory alone: claims that do not count
-- share it until they have committed, one that counts has it alone. PL/pgSQL gives each of its statements a younger
-- snapshot, so that what is read behind the lock is no older than the lock. All claims of locks go this way, whoever makes
-- them, and nothing depends on what nodes say of themselves: locks of nodes that died are counted until they are
-- recovered, and a claim whose answer was lost has used its tokens up whether it was committed or not.
--
-- As long as max_units and units stay, the token only grows: a count at t' finds at most u + (t' - t) * w. So an older one is
-- never wrong. Whatever changes them sets it to 0 behind the same lock, alone.
ALTER TABLE penstock."limit" ADD COLUMN uncounted_to bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN penstock."limit".uncounted_to IS 'locks with tokens up to this one are within max_units without a count';

-- A sequence that was never drawn from stands at 1 like one that was drawn from once.
SELECT nextval('penstock.token_seq');

-- +goose StatementBegin
CREATE FUNCTION penstock.limit_lock(id integer) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT hashtextextended('penstock limit ' || id::text, 0) $$;
-- +goose StatementEnd

-- claim_room says whether a claim may go on that knows its queue to be under these limits, with that pace, and for how many
-- locks, and entries together, there is room in a flow; and how long (s) to wait where a token bucket leaves none. No lock
-- may have a token above uncounted_to. The claim may not go on (ok is false) while another one has a limit alone.
-- Limits with a rate are had alone, since a bucket is read here and written later (see charge). Those for each lock key do
-- not bind the lane (see key_rooms).
-- +goose StatementBegin
CREATE FUNCTION penstock.claim_room(queue integer, in_flow text, wanted integer, known integer[], pace integer,
    OUT ok boolean, OUT locks integer, OUT entries integer, OUT wait double precision, OUT uncounted_to bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    l     record;
    ids   integer[];
    needs integer := 0;
    used  bigint;
    most  bigint; -- of any flow, where the limit is for each
BEGIN
    PERFORM penstock.need_read_committed();
    ok := true;
    locks := 2147483647;
    entries := 2147483647;
    wait := 0;
    uncounted_to := 9223372036854775807;
    FOR l IN SELECT g.id, g.rate, g.per_key, g.uncounted_to >= t.last_value + wanted AS plenty
               FROM penstock.limit_use u
              CROSS JOIN LATERAL (SELECT * FROM penstock."limit" x WHERE x.id = u.limit_id OFFSET 0) g
              CROSS JOIN penstock.token_seq t
              WHERE u.queue_id = queue ORDER BY u.limit_id
    LOOP
        ids := ids || l.id;
        needs := greatest(needs, CASE WHEN l.per_key THEN 2 WHEN l.rate IS NOT NULL THEN 1 ELSE 0 END);
        IF l.plenty AND l.rate IS NULL THEN
            ok := ok AND pg_try_advisory_xact_lock_shared(penstock.limit_lock(l.id));
        ELSE
            ok := ok AND pg_try_advisory_xact_lock(penstock.limit_lock(l.id));
        END IF;
    END LOOP;
    ok := coalesce(ok AND needs = pace AND ids = known, false);
    IF NOT ok THEN
        RETURN;
    END IF;
    -- Only what is read from here on is no older than the locks.
    FOR l IN SELECT g.*, u.units, t.last_value AS drawn, g.uncounted_to >= t.last_value + wanted AS plenty,
                    coalesce((SELECT least(g.burst, b.units + g.rate * extract(epoch FROM clock_timestamp() - b.at)) FROM penstock.bucket b
                               WHERE b.limit_id = g.id AND b.flow = CASE WHEN g.per_flow THEN in_flow ELSE '' END), g.burst) AS held
               FROM penstock.limit_use u
              CROSS JOIN LATERAL (SELECT * FROM penstock."limit" x WHERE x.id = u.limit_id OFFSET 0) g
              CROSS JOIN penstock.token_seq t
              WHERE u.queue_id = queue AND NOT g.per_key ORDER BY u.limit_id
    LOOP
        IF l.plenty THEN
            uncounted_to := least(uncounted_to, l.uncounted_to);
        ELSIF l.max_units IS NOT NULL THEN
            IF NOT pg_try_advisory_xact_lock(penstock.limit_lock(l.id)) THEN -- we share it: it was plenty a moment ago
                ok := false;
                RETURN;
            END IF;
            IF l.per_flow THEN
                SELECT coalesce(max(f.used) FILTER (WHERE f.flow = in_flow), 0), coalesce(max(f.used), 0) INTO used, most
                  FROM (SELECT k.flow, sum(u.units) AS used
                          FROM penstock.limit_use u
                         CROSS JOIN LATERAL (SELECT x.flow FROM penstock.lock x WHERE x.queue_id = u.queue_id OFFSET 0) k
                         WHERE u.limit_id = l.id GROUP BY k.flow) f;
            ELSE
                SELECT coalesce(sum(u.units * c.locks), 0) INTO used
                  FROM penstock.limit_use u
                 CROSS JOIN LATERAL (SELECT count(*) AS locks FROM penstock.lock x WHERE x.queue_id = u.queue_id OFFSET 0) c
                 WHERE u.limit_id = l.id;
                most := used;
            END IF;
            locks := least(locks, greatest(0, (l.max_units - used) / l.units));
            most := (l.max_units - most) / (SELECT max(u.units) FROM penstock.limit_use u WHERE u.limit_id = l.id);
            IF most >= 4 * wanted THEN
                -- An operator may have the row, and waits for the lock that we have.
                UPDATE penstock."limit" x SET uncounted_to = l.drawn + most
                 WHERE x.ctid = (SELECT y.ctid FROM penstock."limit" y WHERE y.id = l.id FOR NO KEY UPDATE SKIP LOCKED);
            END IF;
        END IF;
        IF l.rate IS NOT NULL THEN
            entries := least(entries, floor(greatest(0, l.held) / l.units));
            IF l.held < l.units THEN
                wait := greatest(wait, (l.units - l.held) / l.rate);
            END IF;
        END IF;
    END LOOP;
    locks := least(locks, entries);
END $$;
-- +goose StatementEnd

-- charge takes what a claim took out of the token buckets of its queue: n entries of a flow, and so many of each lock key.
-- It takes the claim back whose last token is beyond what claim_room said. Whoever writes buckets does so by limit and then
-- by flow or lock key, so that nobody waits in a ring.
-- +goose StatementBegin
CREATE FUNCTION penstock.charge(queue integer, in_flow text, pace integer, n bigint, keys text[], entries bigint[], last_token bigint, uncounted_to bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF last_token > uncounted_to THEN
        RAISE EXCEPTION 'token % is above %: the limit must be counted', last_token, uncounted_to USING ERRCODE = 'serialization_failure';
    END IF;
    IF pace = 0 OR n = 0 THEN
        RETURN;
    END IF;
    INSERT INTO penstock.bucket AS b (limit_id, flow, units, at)
    SELECT g.id, k.scope, g.burst - k.n * u.units, clock_timestamp()
      FROM penstock.limit_use u
     CROSS JOIN LATERAL (SELECT * FROM penstock."limit" x WHERE x.id = u.limit_id AND x.rate IS NOT NULL OFFSET 0) g
     CROSS JOIN LATERAL (
           SELECT CASE WHEN g.per_flow THEN in_flow ELSE '' END COLLATE "C" AS scope, charge.n WHERE NOT g.per_key
           UNION ALL
           SELECT c.key, c.n FROM unnest(keys, charge.entries) c(key, n) WHERE g.per_key) k
     WHERE u.queue_id = queue
     ORDER BY g.id, k.scope
    ON CONFLICT (limit_id, flow) DO UPDATE
       SET units = (SELECT least(0, b.units + g.rate * extract(epoch FROM clock_timestamp() - b.at) - g.burst) FROM penstock."limit" g WHERE g.id = b.limit_id)
                   + excluded.units, at = clock_timestamp();
END $$;
-- +goose StatementEnd

-- What limits are worth is changed alone as well: claims in flight end first, and later ones go by the change.
-- +goose StatementBegin
CREATE FUNCTION penstock.count_again() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_TABLE_NAME = 'limit' THEN
        PERFORM pg_advisory_xact_lock(penstock.limit_lock(NEW.id));
        NEW.uncounted_to := 0;
    ELSE
        PERFORM pg_advisory_xact_lock(penstock.limit_lock(NEW.limit_id));
        UPDATE penstock."limit" SET uncounted_to = 0 WHERE id = NEW.limit_id;
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd
CREATE TRIGGER count_again BEFORE UPDATE ON penstock."limit" FOR EACH ROW
    WHEN (OLD.max_units IS DISTINCT FROM NEW.max_units OR OLD.rate IS DISTINCT FROM NEW.rate OR OLD.burst IS DISTINCT FROM NEW.burst
          OR OLD.per_flow IS DISTINCT FROM NEW.per_flow OR OLD.per_key IS DISTINCT FROM NEW.per_key)
    EXECUTE FUNCTION penstock.count_again();
CREATE TRIGGER count_again AFTER INSERT OR UPDATE ON penstock.limit_use FOR EACH ROW EXECUTE FUNCTION penstock.count_again();

-- Nodes of before call limit_rooms, spend and spend_keys: they go on, under the same locks.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.limit_rooms(queue integer, in_flow text, OUT locks integer, OUT entries integer, OUT wait double precision)
LANGUAGE sql AS $$
    SELECT CASE WHEN r.ok THEN r.locks ELSE 0 END, CASE WHEN r.ok THEN r.entries ELSE 0 END, r.wait
      FROM penstock.claim_room($1, $2, 500000000, (SELECT array_agg(u.limit_id ORDER BY u.limit_id) FROM penstock.limit_use u WHERE u.queue_id = $1), penstock.queue_pace($1)) r
$$;
-- +goose StatementEnd
