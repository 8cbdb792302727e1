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
     WHERE q.on_no_instance = 'fail' AND NOT EXISTS (SELECT FROM penstock.instance i WHERE i.model = q.model AND penstock.usable(i))
    ON CONFLICT DO NOTHING;
$$;

-- fail_without_instance ends up to `most` entries of a queue that are pending and do not run, if its model has had no usable
-- instance for the queue's no_instance_timeout, as failures of class no_instance, and returns how many. Entries that are
-- not due yet are left alone.
-- Locks: for each entry those of take_entry and fail_entry.
-- Callers: pkg/invalidation.
-- SQLSTATE: PS006 the transaction is not read committed.
CREATE OR REPLACE FUNCTION penstock.fail_without_instance(queue integer, most integer) RETURNS integer
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    q      penstock.queue;
    since  timestamptz;
    waited record;
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
    FOR waited IN SELECT x.id, x.lock_key FROM penstock.entry x
                   WHERE x.queue_id = queue AND penstock.claimable(x.status, x.priority) AND NOT penstock.runs(x)
                     AND NOT EXISTS (SELECT FROM penstock.blocked_key b WHERE b.queue_id = queue AND b.lock_key = x.lock_key)
                   ORDER BY x.id LIMIT most
    LOOP
        -- The first failure of a key may have blocked it: later entries wait for unblock_key.
        CONTINUE WHEN EXISTS (SELECT FROM penstock.blocked_key b WHERE b.queue_id = queue AND b.lock_key = waited.lock_key);
        e := penstock.take_entry(queue, waited.id);
        IF e.id IS NOT NULL THEN
            PERFORM penstock.fail_entry(e, 'no_instance', format('model %s has had no instance that takes calls for %s', q.model,
                                        penstock.ago(clock_timestamp() - since)));
            failed := failed + 1;
        END IF;
    END LOOP;
    RETURN failed;
END $$;
