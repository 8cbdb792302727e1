-- +goose Up

-- take_seat as before, but a seat that one push may not have is left for others, seats are found again after a crash of the server,
-- and those of a node that has not been heard for a quarter of its lease are passed by.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.take_seat(queue integer, in_flow text, look_from bigint, OUT node bigint, OUT claim integer, OUT next bigint) RETURNS record
    LANGUAGE plpgsql
    AS $$
DECLARE
    after bigint := coalesce((SELECT last_value FROM penstock.seat_seat_seq WHERE is_called), 0) + 1; -- all that are offered later
    mark  bigint := CASE WHEN look_from > after THEN 0 ELSE look_from END; -- after a crash seats are numbered anew
BEGIN
    look_from := mark;
    LOOP
        DELETE FROM penstock.seat t
         WHERE t.ctid = (
               SELECT s.row
                 FROM penstock.queue q
                CROSS JOIN LATERAL (
                      SELECT x.ctid AS row
                        FROM penstock.seat x
                       WHERE x.queue_id = queue AND x.seat >= look_from
                         AND (SELECT n.id FROM penstock.node n
                               WHERE n.id = x.node_id AND n.application = q.application AND n.draining_at IS NULL
                                 AND n.beat_at + n.lease / 4 > clock_timestamp()
                                 AND NOT EXISTS (SELECT FROM penstock.pause p WHERE p.scope = 'node' AND p.value IN (n.name, n.id::text)
                                                    AND coalesce(p.until > clock_timestamp(), true))) IS NOT NULL
                       ORDER BY x.seat
                       LIMIT 1
                         FOR UPDATE SKIP LOCKED) s
                WHERE q.id = queue AND q.algorithm = 'fair' AND q.model IS NULL AND q.disabled_at IS NULL
                  AND (q.paused_at IS NULL OR coalesce(q.paused_until <= clock_timestamp(), false))
                  AND NOT EXISTS (SELECT FROM penstock.limit_use u WHERE u.queue_id = queue)
                  AND NOT EXISTS (SELECT FROM penstock.push_back b
                                   WHERE b.queue_id = queue AND b.whole AND b.flow = '' AND b.until > clock_timestamp())
                  AND NOT EXISTS (SELECT FROM penstock.push_back b
                                   WHERE b.queue_id = queue AND NOT b.whole AND b.flow = in_flow AND b.until > clock_timestamp())
                  AND NOT EXISTS (SELECT FROM penstock.pause p WHERE p.scope = 'application' AND p.value = q.application
                                     AND coalesce(p.until > clock_timestamp(), true))
                  AND NOT EXISTS (SELECT FROM penstock.pause p WHERE p.scope = 'flow' AND p.value = in_flow AND coalesce(p.queue_id, 0) IN (0, queue)
                                     AND coalesce(p.until > clock_timestamp(), true)))
        RETURNING t.node_id, t.claim_id, t.seat + 1 INTO node, claim, next;
        -- One that was offered or came back late may stand before: once in 200 pushes without a seat it is looked for.
        EXIT WHEN node IS NOT NULL OR look_from = 0 OR random() > 0.005;
        look_from := 0;
    END LOOP;
    -- Seats that this push may not have, or that are just taken, are there for others.
    IF node IS NULL THEN
        next := CASE WHEN EXISTS (SELECT FROM penstock.seat x WHERE x.queue_id = queue AND x.seat >= mark) THEN mark ELSE after END;
    END IF;
END $$;
-- +goose StatementEnd

-- hand_over as before, and a limit under which the queue comes meanwhile holds.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.hand_over(queue integer, payload jsonb, in_flow text, trace text, look_from bigint)
    RETURNS TABLE(id bigint, node bigint, claim integer, next bigint)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
DECLARE
    level smallint;
BEGIN
    SELECT q.entry_priority INTO level FROM penstock.queue q
     WHERE q.id = queue AND q.grouping IS NULL AND q.capacity IS NULL AND pg_column_size(hand_over.payload) <= q.payload_limit;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    INSERT INTO penstock.entry (id, queue_id, status, priority, flow, trace, payload)
    VALUES (nextval('penstock.entry_id_seq'), queue, 'pending', level, in_flow, nullif(hand_over.trace, ''), hand_over.payload)
    RETURNING entry.id INTO hand_over.id;
    SELECT s.node, s.claim, s.next INTO hand_over.node, hand_over.claim, hand_over.next FROM penstock.take_seat(queue, in_flow, look_from) s;
    IF hand_over.node IS NULL THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id) VALUES (queue, level, in_flow, hand_over.id, hand_over.id);
    ELSE
        INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost, priority, flow, claimed_at)
        VALUES (queue, '#' || hand_over.id, nextval('penstock.token_seq'), hand_over.node, hand_over.claim, hand_over.id, hand_over.id, 1, 1, level,
                in_flow, clock_timestamp());
        -- We have penstock.lock now: a limit that this statement does not see waits for us, and counts what we lock (await_claims).
        IF EXISTS (SELECT FROM penstock.limit_use u WHERE u.queue_id = queue) THEN
            DELETE FROM penstock.lock WHERE queue_id = queue AND lock_key = '#' || hand_over.id;
            INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id) VALUES (queue, level, in_flow, hand_over.id, hand_over.id);
            hand_over.node := NULL;
        END IF;
    END IF;
    RETURN NEXT;
END $$;
-- +goose StatementEnd
