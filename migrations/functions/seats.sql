-- Seats: processing threads that wait for an entry (docs/adr/0013-seats.md).

-- What keeps claims off keeps pushes off seats: pauses, limits, an order to hold off, a queue out of service. A queue in the order of
-- acceptance has none, since what is handed over may overtake what is ready, nor has one whose model has slots to be leased first.
-- Heartbeats come five times in a lease: a node whose last one is older than a third of it may be dead.
-- A seat that one push may not have is left for others; after a crash of the server seats are found again.
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
COMMENT ON FUNCTION penstock.take_seat IS 'takes the first seat of a queue from a place on, for the push that calls it; next is where to look from the next time';

-- The push of one entry without options but flow and trace, which hands it over if there is a seat: then it inserts the lock record that the
-- node's claim would insert, and no ready row. It answers no row where push_many has more to do or to say.
-- A limit under which the queue comes meanwhile holds.
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

-- Seats come and go without waiting for the disk: there is nothing to lose.
CREATE OR REPLACE FUNCTION penstock.tend_seat(queue integer, node bigint, claim integer, verb text, OUT withdrawn boolean, OUT taken boolean) RETURNS record
    LANGUAGE plpgsql
    AS $$
BEGIN
    withdrawn := false;
    IF verb <> 'keep' THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    IF verb = 'offer' THEN
        INSERT INTO penstock.seat (queue_id, node_id, claim_id) SELECT queue, n.id, claim FROM penstock.node n WHERE n.id = node;
    ELSIF verb = 'withdraw' THEN
        DELETE FROM penstock.seat t
         WHERE t.ctid = (SELECT s.ctid FROM penstock.seat s WHERE s.node_id = node AND s.claim_id = claim FOR UPDATE SKIP LOCKED);
        withdrawn := FOUND;
    END IF;
    taken := NOT withdrawn AND NOT EXISTS (SELECT FROM penstock.seat s WHERE s.node_id = node AND s.claim_id = claim);
END $$;
COMMENT ON FUNCTION penstock.tend_seat IS 'offers a seat of a node, keeps or withdraws it, unless a push is just taking it, and says whether it is still there';

-- remove_seats removes the seats of nodes that are dead or gone; no push takes them any more.
CREATE OR REPLACE FUNCTION penstock.remove_seats() RETURNS void
    LANGUAGE sql
    AS $$
    DELETE FROM penstock.seat t
     WHERE t.ctid = ANY (ARRAY(
           SELECT s.ctid FROM penstock.seat s
            WHERE (SELECT n.id FROM penstock.node n WHERE n.id = s.node_id AND n.beat_at + n.lease > clock_timestamp()) IS NULL
              FOR UPDATE SKIP LOCKED));
$$;
COMMENT ON FUNCTION penstock.remove_seats IS 'removes the seats of nodes that are dead or gone; no push takes them any more';
