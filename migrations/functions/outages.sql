-- Models without an instance that takes calls, of queues that do not wait for one (on_no_instance = fail).

-- note_outages records since when models have had no usable instance, and forgets those that have one again.
-- Locks: rows of model_outage.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.note_outages() RETURNS void
LANGUAGE sql AS $$
    DELETE FROM penstock.model_outage o
     WHERE EXISTS (SELECT FROM penstock.instance i WHERE i.model = o.model AND penstock.usable(i))
        OR NOT EXISTS (SELECT FROM penstock.queue q WHERE q.model = o.model AND q.on_no_instance = 'fail');
    INSERT INTO penstock.model_outage (model)
    SELECT DISTINCT q.model FROM penstock.queue q
     WHERE q.on_no_instance = 'fail' AND NOT EXISTS (SELECT FROM penstock.instance i
                                                     WHERE i.model = q.model AND penstock.usable(i))
    ON CONFLICT DO NOTHING;
$$;

-- fail_without_instance ends up to `most` entries of a queue that are pending and do not run, if its model has had no
-- usable instance for the queue's no_instance_timeout, as failures of class no_instance, and returns how many. It goes
-- by ready rows, so that entries that are not due cost nothing. Rows of lock keys that are blocked or have no claimable
-- entry, which a claim would take away, it takes away itself, so that they are not in its way the next time. Entries
-- behind a lock of their key wait until it is unlocked: the claim took a ready row of the key away, and the ending of
-- the lock writes one.
-- Locks: for each entry those of take_entry and fail_entry; ready rows of blocked keys and of keys without claimable
-- entries (FOR UPDATE SKIP LOCKED).
-- Callers: pkg/invalidation.
-- SQLSTATE: PS006 the transaction is not read committed.
CREATE OR REPLACE FUNCTION penstock.fail_without_instance(queue integer, most integer) RETURNS integer
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off
AS $$
DECLARE
    q      penstock.queue;
    since  timestamptz;
    error  text;
    waits  record;
    wanted bigint;
    e      penstock.entry;
    failed integer := 0;
BEGIN
    PERFORM penstock.need_read_committed();
    SELECT * INTO q FROM penstock.queue x WHERE x.id = queue;
    SELECT o.since INTO since FROM penstock.model_outage o
     WHERE o.model = q.model AND q.on_no_instance = 'fail' AND o.since + q.no_instance_timeout <= clock_timestamp();
    IF NOT FOUND OR EXISTS (SELECT FROM penstock.instance i WHERE i.model = q.model AND penstock.usable(i)) THEN
        RETURN 0;
    END IF;
    error := format('model %s has had no instance that takes calls for %s', q.model,
                    penstock.ago(clock_timestamp() - since));
    -- A running key has at most one row for each lane in which its entries wait. They are passed by here and count
    -- nothing.
    FOR waits IN SELECT r.entry_id, r.lock_key FROM penstock.ready r
                  WHERE r.queue_id = queue
                    AND NOT EXISTS (SELECT FROM penstock.lock l
                                     WHERE l.queue_id = queue
                                       AND l.lock_key = penstock.record_key(r.lock_key, r.entry_id))
                  ORDER BY r.queue_id, r.priority, r.flow, r.pos LIMIT most
    LOOP
        FOR wanted IN SELECT waits.entry_id WHERE waits.entry_id IS NOT NULL
                      UNION ALL
                      (SELECT x.id FROM penstock.entry x
                        WHERE x.queue_id = queue AND x.lock_key = waits.lock_key
                          AND penstock.claimable(x.status, x.priority)
                        ORDER BY x.id LIMIT most - failed)
        LOOP
            -- The first failure of a key may have blocked it: later entries wait for unblock_key.
            EXIT WHEN EXISTS (SELECT FROM penstock.blocked_key b
                              WHERE b.queue_id = queue AND b.lock_key = waits.lock_key);
            e := penstock.take_entry(queue, wanted);
            IF e.id IS NOT NULL THEN
                PERFORM penstock.fail_entry(e, 'no_instance', error);
                failed := failed + 1;
            END IF;
        END LOOP;
        IF NOT FOUND THEN -- a key without claimable entries
            PERFORM penstock.tidy_key(queue, waits.lock_key);
        END IF;
        PERFORM penstock.drop_blocked_ready(queue, waits.lock_key);
        EXIT WHEN failed >= most;
    END LOOP;
    RETURN failed;
END $$;
