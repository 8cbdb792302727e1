-- +goose Up

-- The same with one look at the limits instead of two: a claim shares a limit until it sees that it must count.
-- claim_room says whether a claim may go on that knows its queue to be under these limits, with that pace, and for how many
-- locks, and entries together, there is room in a flow; and how long (s) to wait where a token bucket leaves none. No lock
-- may have a token above uncounted_to. The claim may not go on (ok is false) while another one has a limit alone.
-- Limits with a rate are had alone, since a bucket is read here and written later (see charge). Those for each lock key do
-- not bind the lane (see key_rooms).
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
            IF NOT pg_try_advisory_xact_lock(penstock.limit_lock(l.id)) THEN -- somebody shares it with us
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
    ok := coalesce(ids = known AND needs = pace, false);
END $$;
-- +goose StatementEnd

-- Nodes of before call limit_rooms, with spend and spend_keys: they go on, under the same locks.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.limit_rooms(queue integer, in_flow text, OUT locks integer, OUT entries integer, OUT wait double precision)
LANGUAGE sql AS $$
    SELECT CASE WHEN r.ok THEN r.locks ELSE 0 END, CASE WHEN r.ok THEN r.entries ELSE 0 END, r.wait
      FROM penstock.claim_room($1, $2, 500000000,
           coalesce((SELECT array_agg(u.limit_id ORDER BY u.limit_id) FROM penstock.limit_use u WHERE u.queue_id = $1), '{}'), penstock.queue_pace($1)) r
$$;
-- +goose StatementEnd

DROP FUNCTION penstock.held_back(integer, text);

-- head_age is for how many seconds the entry has waited that a node would claim first, null if there is none: in the
-- first 100 lanes that nobody paused, a lane's first key that nobody holds, among its first 20 ready rows. It waits
-- since it was accepted, or came due. Entries of a queue that is paused or out of service do not count, nor do keys that
-- wait for their rate (see park): nothing is wrong with those.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.head_age(q penstock.queue) RETURNS double precision
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    ids  bigint[];
    keys text[];
    age  double precision;
BEGIN
    IF q.disabled_at IS NOT NULL OR (q.paused_at IS NOT NULL AND coalesce(q.paused_until > clock_timestamp(), true)) THEN
        RETURN NULL;
    END IF;
    WITH RECURSIVE lane AS (
        (SELECT priority, flow FROM penstock.ready WHERE queue_id = q.id AND priority >= 0 ORDER BY priority, flow, pos LIMIT 1)
        UNION ALL
        SELECT n.priority, n.flow
          FROM lane CROSS JOIN LATERAL (
               SELECT r.priority, r.flow FROM penstock.ready r
                WHERE r.queue_id = q.id AND (r.priority, r.flow) > (lane.priority, lane.flow)
                ORDER BY r.priority, r.flow, r.pos LIMIT 1) n
    ), few AS (
        SELECT priority, flow FROM lane
         WHERE NOT EXISTS (
               SELECT FROM penstock.pause p
                WHERE coalesce(p.until > clock_timestamp(), true)
                  AND ((p.scope = 'flow' AND p.value = lane.flow AND coalesce(p.queue_id = q.id, true))
                    OR (p.scope = 'application' AND p.value = q.application)
                    OR (p.scope = 'model' AND p.value = q.model)))
         LIMIT 100)
    SELECT array_agg(first.entry_id), array_agg(first.lock_key) INTO ids, keys
      FROM few CROSS JOIN LATERAL (
           SELECT f.entry_id, f.lock_key FROM (
               SELECT r.entry_id, r.lock_key, r.pos FROM penstock.ready r
                WHERE r.queue_id = q.id AND r.priority = few.priority AND r.flow = few.flow ORDER BY r.pos LIMIT 20) f
            WHERE NOT EXISTS (SELECT FROM penstock.lock l WHERE l.queue_id = q.id AND l.lock_key = coalesce(f.lock_key, '#' || f.entry_id))
            ORDER BY f.pos LIMIT 1) first;
    IF ids IS NULL THEN
        RETURN NULL;
    END IF;
    EXECUTE format($sql$
        SELECT extract(epoch FROM clock_timestamp() - min(e.since))::float8
          FROM unnest($1, $2) first(entry_id, lock_key) CROSS JOIN LATERAL (
               (SELECT greatest(x.created_at, x.due_at) AS since FROM penstock.%1$I x WHERE x.queue_id = $3 AND x.id = first.entry_id)
               UNION ALL
               (SELECT greatest(x.created_at, x.due_at) FROM penstock.%1$I x
                 WHERE x.queue_id = $3 AND x.lock_key = first.lock_key AND x.status = 'pending' AND x.priority >= 0
                 ORDER BY x.id LIMIT 1)) e
        $sql$, 'entry_' || q.name) INTO age USING ids, keys, q.id;
    RETURN age;
EXCEPTION WHEN undefined_table THEN
    RETURN NULL;
END $$;
-- +goose StatementEnd
