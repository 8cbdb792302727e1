-- +goose Up

-- create_queue registers a queue and gives it a table. The table is made on its own and then attached, so that
-- nobody who reads or writes other queues waits for it.
-- +goose StatementBegin
CREATE FUNCTION penstock.create_queue(queue_name text, options jsonb DEFAULT '{}') RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    q     penstock.queue;
    child text;
BEGIN
    IF queue_name !~ '^[a-z][a-z0-9_]{0,47}$' THEN
        RAISE EXCEPTION 'queue name "%" is not valid', queue_name
            USING ERRCODE = 'PS002', HINT = 'Use 1 to 48 lower-case letters, digits and underscores, beginning with a letter.';
    END IF;
    IF EXISTS (SELECT FROM penstock.queue WHERE name = queue_name) THEN
        RAISE EXCEPTION 'queue "%" exists already', queue_name USING ERRCODE = 'PS006',
            HINT = 'Change it with penstock.alter_queue.';
    END IF;
    INSERT INTO penstock.queue (name) VALUES (queue_name) RETURNING * INTO q;
    child := 'entry_' || queue_name;
    EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.entry INCLUDING ALL, CONSTRAINT %I CHECK (queue_id = %s))',
                   child, child || '_queue', q.id);
    EXECUTE format('ALTER TABLE penstock.%I SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)', child);
    -- What the claim of a group, promotion and deadlines read; each holds only the rows that concern it.
    EXECUTE format('CREATE INDEX %I ON penstock.%I (lock_key, id) WHERE lock_key IS NOT NULL AND status = ''pending'' AND priority >= 0',
                   child || '_lock_key', child);
    EXECUTE format('CREATE INDEX %I ON penstock.%I (due_at, id) WHERE status = ''initial''', child || '_due_at', child);
    EXECUTE format('CREATE INDEX %I ON penstock.%I (start_by) WHERE start_by IS NOT NULL', child || '_start_by', child);
    EXECUTE format('CREATE INDEX %I ON penstock.%I (finish_by) WHERE finish_by IS NOT NULL', child || '_finish_by', child);
    EXECUTE format('CREATE INDEX %I ON penstock.%I (name, id) WHERE name IS NOT NULL', child || '_name', child);
    EXECUTE format('CREATE INDEX %I ON penstock.%I (id) WHERE priority = -1', child || '_disabled', child);
    EXECUTE format('ALTER TABLE penstock.entry ATTACH PARTITION penstock.%I FOR VALUES IN (%s)', child, q.id);
    EXECUTE format('ALTER TABLE penstock.%I DROP CONSTRAINT %I', child, child || '_queue');
    PERFORM penstock.alter_queue(queue_name, options);
    RETURN q.id;
END $$;
-- +goose StatementEnd

-- alter_queue changes settings of a queue: {"capacity": 1000, "max_concurrent": null}. Unknown names are refused.
-- +goose StatementBegin
CREATE FUNCTION penstock.alter_queue(queue_name text, options jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q       penstock.queue;
    unknown text;
BEGIN
    SELECT * INTO q FROM penstock.queue_row(queue_name);
    PERFORM FROM penstock.queue WHERE id = q.id FOR NO KEY UPDATE;
    SELECT k INTO unknown FROM jsonb_object_keys(options) k
     WHERE k NOT IN ('kind', 'application', 'priority', 'entry_priority', 'algorithm', 'grouping', 'mergeable', 'merge',
                     'max_concurrent', 'max_concurrent_per_node', 'capacity', 'retry', 'crash_limit', 'run_timeout',
                     'quantum_count', 'quantum_time', 'payload_limit', 'result_retention', 'failure_retention', 'model');
    IF FOUND THEN
        RAISE EXCEPTION 'queue option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are the columns of penstock.queue that are settings.';
    END IF;
    q := jsonb_populate_record(q, options);
    UPDATE penstock.queue SET
        kind = q.kind, application = q.application, priority = q.priority, entry_priority = q.entry_priority,
        algorithm = q.algorithm, grouping = q.grouping, mergeable = q.mergeable, merge = q.merge,
        max_concurrent = q.max_concurrent, max_concurrent_per_node = q.max_concurrent_per_node, capacity = q.capacity,
        retry = q.retry, crash_limit = q.crash_limit, run_timeout = q.run_timeout, quantum_count = q.quantum_count,
        quantum_time = q.quantum_time, payload_limit = q.payload_limit, result_retention = q.result_retention,
        failure_retention = q.failure_retention, model = q.model, version = version + 1
     WHERE id = q.id;
    IF q.capacity IS NOT NULL AND NOT EXISTS (SELECT FROM penstock.depth WHERE queue_id = q.id) THEN
        EXECUTE format('CREATE SEQUENCE penstock.%I', 'accepted_' || q.id);
        EXECUTE format('CREATE SEQUENCE penstock.%I', 'removed_' || q.id);
        INSERT INTO penstock.depth (queue_id, counted, accepted, removed) VALUES (q.id, 0, 0, 0);
        PERFORM penstock.count_depth(q.id);
    ELSIF q.capacity IS NULL AND EXISTS (SELECT FROM penstock.depth WHERE queue_id = q.id) THEN
        DELETE FROM penstock.depth WHERE queue_id = q.id;
        EXECUTE format('DROP SEQUENCE penstock.%I, penstock.%I', 'accepted_' || q.id, 'removed_' || q.id);
    END IF;
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range
      OR invalid_datetime_format OR interval_field_overflow OR not_null_violation THEN
        RAISE EXCEPTION 'queue option of "%" is not valid: %', queue_name, SQLERRM USING ERRCODE = 'PS002';
END $$;
-- +goose StatementEnd

-- count_depth counts a queue with a capacity anew. Pushes go on meanwhile: the counters are read first, so that
-- what commits during the count is counted twice at worst, never left out.
-- +goose StatementBegin
CREATE FUNCTION penstock.count_depth(queue integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    accepted_now bigint := penstock.counter('accepted', queue);
    removed_now  bigint := penstock.counter('removed', queue);
    counted_now  bigint;
BEGIN
    SELECT count(*) INTO counted_now FROM penstock.entry WHERE queue_id = queue;
    UPDATE penstock.depth d
       SET counted = counted_now, accepted = accepted_now, removed = removed_now, counted_at = clock_timestamp(),
           drain_rate = greatest(0, removed_now - d.removed)
                        / greatest(0.001, extract(epoch FROM clock_timestamp() - d.counted_at))
     WHERE d.queue_id = queue;
    RETURN counted_now;
END $$;
-- +goose StatementEnd

-- drop_queue removes a queue and everything that is left of it. It refuses while there are entries, unless forced.
-- +goose StatementBegin
CREATE FUNCTION penstock.drop_queue(queue_name text, force boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue_name);
    n bigint;
BEGIN
    -- Nobody may push while we look: the lock is on this queue's table alone.
    EXECUTE format('LOCK TABLE penstock.%I IN ACCESS EXCLUSIVE MODE', 'entry_' || queue_name);
    EXECUTE format('SELECT count(*) FROM (SELECT FROM penstock.%I LIMIT 1000000) e', 'entry_' || queue_name) INTO n;
    IF n > 0 AND NOT force THEN
        RAISE EXCEPTION 'queue "%" still has % entries', queue_name, n
            USING ERRCODE = 'PS006', HINT = 'Wait until it is empty, cancel them, or drop with force => true.';
    END IF;
    PERFORM penstock.alter_queue(queue_name, '{"capacity": null}');
    EXECUTE format('ALTER TABLE penstock.entry DETACH PARTITION penstock.%I', 'entry_' || queue_name);
    EXECUTE format('DROP TABLE penstock.%I', 'entry_' || queue_name);
    DELETE FROM penstock.ready WHERE queue_id = q.id;
    DELETE FROM penstock.lock WHERE queue_id = q.id;
    DELETE FROM penstock.idempotency WHERE queue_id = q.id;
    DELETE FROM penstock.uniqueness WHERE queue_id = q.id;
    DELETE FROM penstock.progress WHERE queue_id = q.id;
    DELETE FROM penstock.cancel_request WHERE queue_id = q.id;
    DELETE FROM penstock.result WHERE queue_id = q.id;
    DELETE FROM penstock.failure WHERE queue_id = q.id;
    DELETE FROM penstock.queue WHERE id = q.id;
    INSERT INTO penstock.audit (actor, verb, object) VALUES (current_user, 'drop_queue', queue_name);
END $$;
-- +goose StatementEnd
