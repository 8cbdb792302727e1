-- Throttles: for a time, no node claims from a queue or from one of its flows. A handler orders one when a service
-- downstream is overloaded (throttleSQL in pkg/invalidation/throttle.go), an operator by psql.

-- throttles is the part of the claim condition that concerns the lane: the throttles in force of its queue and of its
-- flow. No row: a claim may begin. Without a flow it is about the queue alone. One that was ordered at a time to come
-- was so before the clock was set back, and is over: a service that is still overloaded orders the next. Claims call it
-- in FROM, where Postgres inlines it and plans it with them.
-- Callers: explain, samples; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.throttles(queue integer, flow text) RETURNS SETOF penstock.throttle
LANGUAGE sql STABLE AS $$
    SELECT t.* FROM penstock.throttle t
     WHERE t.queue_id = $1 AND t.flow = ANY (ARRAY['', $2]) AND (t.queue_wide OR t.flow = $2)
       AND t.until > clock_timestamp() AND t.at <= clock_timestamp()
$$;

-- throttle keeps claims off a queue, or one flow of it, for a time. A longer throttle that is in force is
-- left alone. Handlers call it as well, many at once when a service downstream is overloaded: a
-- call that would move the end by little does not touch the row.
-- Locks: the row of table throttle for that queue and flow.
-- Callers: pkg/invalidation; psql.
-- SQLSTATE: PS001 no such queue, PS002 wait is out of range.
CREATE OR REPLACE FUNCTION penstock.throttle(
    queue  text,
    wait   interval,
    flow   text DEFAULT NULL,
    reason text DEFAULT ''
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    IF wait IS NULL OR wait <= '0' OR wait > '1 day' THEN
        RAISE EXCEPTION 'wait is not between 0 and 1 day' USING ERRCODE = 'PS002',
            HINT = 'Pause the queue to stop it for longer.';
    END IF;
    INSERT INTO penstock.throttle AS p (queue_id, queue_wide, flow, until, reason)
    VALUES (q.id, throttle.flow IS NULL, coalesce(throttle.flow, ''), clock_timestamp() + wait, throttle.reason)
    ON CONFLICT ON CONSTRAINT throttle_pkey DO UPDATE
       SET until = excluded.until, at = excluded.at, reason = excluded.reason
     WHERE excluded.until - p.until > least(interval '100 ms', wait / 4) OR p.at > clock_timestamp();
END $$;

-- lift_throttle ends a throttle before its time, and returns whether there was one. Nodes read the queue again with
-- their next heartbeat, and try its lanes then.
-- Locks: the row of table throttle for that queue and flow; the row of the queue.
-- Callers: psql.
-- SQLSTATE: PS001 no such queue.
CREATE OR REPLACE FUNCTION penstock.lift_throttle(queue text, flow text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    q      penstock.queue := penstock.queue_row(queue);
    lifted boolean;
BEGIN
    DELETE FROM penstock.throttle p
     WHERE p.queue_id = q.id AND p.queue_wide = (lift_throttle.flow IS NULL)
       AND p.flow = coalesce(lift_throttle.flow, '') AND p.until > clock_timestamp();
    lifted := FOUND;
    IF lifted THEN
        UPDATE penstock.queue x SET version = x.version + 1 WHERE x.id = q.id;
    END IF;
    RETURN lifted;
END $$;
