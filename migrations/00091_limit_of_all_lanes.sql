-- +goose Up

-- A claim hears whether it is what all lanes share that leaves no room: then no other lane is worth a try.
-- claim_room says whether a claim may go on that knows its queue to be under these limits, with that pace, and for how many
-- locks, and entries together, there is room in a flow; and how long (s) to wait where a token bucket leaves none. No lock
-- may have a token above uncounted_to. The claim may not go on (ok is false) while another one has a limit alone.
-- Limits with a rate are had alone, since a bucket is read here and written later (see charge). Those for each lock key do
-- not bind the lane (see key_rooms). Without a flow it is about several: then what each has used is not counted, nor are its own buckets read.
-- Where a limit that all flows share leaves no room at all, uncounted_to is 0.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.claim_room(queue integer, in_flow text, wanted integer, known integer[], pace integer,
    OUT ok boolean, OUT locks integer, OUT entries integer, OUT wait double precision, OUT uncounted_to bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    l     record;
    id    integer;
    ids   integer[];
    needs integer := 0;
    used  bigint;
    most  bigint; -- of any flow, where the limit is for each
    whole boolean := false; -- what all flows share leaves no room
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM penstock.need_read_committed();
    END IF;
    ok := true;
    locks := 2147483647;
    entries := 2147483647;
    wait := 0;
    uncounted_to := 9223372036854775807;
    FOREACH id IN ARRAY known LOOP
        IF pace = 0 THEN
            ok := ok AND pg_try_advisory_xact_lock_shared(penstock.limit_lock(id));
        ELSE
            ok := ok AND pg_try_advisory_xact_lock(penstock.limit_lock(id));
        END IF;
    END LOOP;
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
              WHERE u.queue_id = queue ORDER BY u.limit_id
    LOOP
        IF l.id <> ALL (known) THEN
            ok := false;
            RETURN;
        END IF;
        ids := ids || l.id;
        needs := greatest(needs, CASE WHEN l.per_key THEN 2 WHEN l.rate IS NOT NULL THEN 1 ELSE 0 END);
        CONTINUE WHEN l.per_key;
        IF l.plenty THEN
            uncounted_to := least(uncounted_to, l.uncounted_to);
        ELSIF l.max_units IS NOT NULL THEN
            IF in_flow IS NULL AND l.per_flow OR NOT pg_try_advisory_xact_lock(penstock.limit_lock(l.id)) THEN -- somebody shares it with us
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
            whole := whole OR NOT l.per_flow AND l.max_units - used < l.units;
            most := (l.max_units - most) / (SELECT max(u.units) FROM penstock.limit_use u WHERE u.limit_id = l.id);
            IF most >= 4 * wanted THEN
                -- An operator may have the row, and waits for the lock that we have.
                UPDATE penstock."limit" x SET uncounted_to = l.drawn + most
                 WHERE x.ctid = (SELECT y.ctid FROM penstock."limit" y WHERE y.id = l.id FOR NO KEY UPDATE SKIP LOCKED);
            END IF;
        END IF;
        IF l.rate IS NOT NULL AND (in_flow IS NOT NULL OR NOT l.per_flow) THEN
            whole := whole OR NOT l.per_flow AND l.held < l.units;
            entries := least(entries, floor(greatest(0, l.held) / l.units));
            IF l.held < l.units THEN
                wait := greatest(wait, (l.units - l.held) / l.rate);
            END IF;
        END IF;
    END LOOP;
    locks := least(locks, entries);
    IF whole THEN
        uncounted_to := 0;
    END IF;
    ok := coalesce(ids = known AND needs = pace, false);
END $$;
-- +goose StatementEnd
