-- +goose Up

-- Whoever changes limits, or which queues are under them, holds this until the end of the transaction, before any row: some
-- go from the limit to its queues, others from the queue to its limits, and would wait for each other for ever.
CREATE FUNCTION penstock.hold_limits() RETURNS void LANGUAGE sql
    AS $$ SELECT pg_advisory_xact_lock(hashtextextended('penstock limits', 0)) $$;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.set_limit(limit_name text, options jsonb, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    l       penstock."limit";
    unknown text;
BEGIN
    PERFORM penstock.hold_limits();
    IF jsonb_typeof(options) <> 'object' THEN
        RAISE EXCEPTION 'options must be an object' USING ERRCODE = 'PS002';
    END IF;
    SELECT k INTO unknown FROM jsonb_object_keys(options) k WHERE k NOT IN ('per_flow', 'per_key', 'max_units', 'rate', 'burst');
    IF FOUND THEN
        RAISE EXCEPTION 'limit option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are per_flow, per_key, max_units, rate and burst.';
    END IF;
    SELECT * INTO l FROM penstock."limit" WHERE name = limit_name FOR UPDATE;
    l := jsonb_populate_record(l, options);
    IF l.rate IS NOT NULL AND l.burst IS NULL THEN
        l.burst := greatest(1, l.rate);
    END IF;
    INSERT INTO penstock."limit" (name, per_flow, per_key, max_units, rate, burst)
    VALUES (limit_name, coalesce(l.per_flow, false), coalesce(l.per_key, false), l.max_units, l.rate, l.burst)
    ON CONFLICT (name) DO UPDATE SET per_flow = excluded.per_flow, per_key = excluded.per_key, max_units = excluded.max_units,
                                     rate = excluded.rate, burst = excluded.burst
    RETURNING * INTO l;
    IF options ?| '{per_flow,per_key}' THEN -- other buckets: what was spent before is not given back to these
        UPDATE penstock.limit_use SET since = clock_timestamp() WHERE limit_id = l.id;
    END IF;
    PERFORM penstock.limits_changed(l.id);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail) VALUES (actor, 'set_limit', limit_name, reason, options);
    RETURN l.id;
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range THEN
        RAISE EXCEPTION 'limit "%" is not valid: %', limit_name, penstock.in_words(SQLERRM)
            USING ERRCODE = 'PS002', HINT = 'Give max_units, or rate and burst (units a second, units), or all three; with per_key rate alone, since a key has one holder at a time.';
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.use_limit(queue_name text, limit_name text, units integer DEFAULT 1, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue_name);
    lim  penstock."limit";
BEGIN
    PERFORM penstock.hold_limits();
    IF units IS NULL OR units < 0 THEN
        RAISE EXCEPTION 'units is not at least 0; 0 ends the use' USING ERRCODE = 'PS002';
    END IF;
    SELECT * INTO lim FROM penstock."limit" WHERE name = limit_name FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'limit "%" does not exist', limit_name
            USING ERRCODE = 'PS002', HINT = 'Make it first: SELECT penstock.set_limit(''name'', ''{"max_units": 4}'').';
    END IF;
    IF units > 0 THEN
        INSERT INTO penstock.limit_use (queue_id, limit_id, units, since) VALUES (q.id, lim.id, use_limit.units, clock_timestamp())
        ON CONFLICT (queue_id, limit_id) DO UPDATE SET units = excluded.units, since = clock_timestamp();
    END IF;
    PERFORM penstock.limits_changed(lim.id);
    IF units = 0 THEN
        DELETE FROM penstock.limit_use WHERE queue_id = q.id AND limit_id = lim.id;
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (actor, 'use_limit', queue_name, reason, jsonb_build_object('limit', limit_name, 'units', units));
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.set_quota(application text, options jsonb, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    quota text := 'application:' || application;
    q     record;
BEGIN
    PERFORM penstock.hold_limits();
    IF coalesce(application, '') = '' THEN
        RAISE EXCEPTION 'application is empty' USING ERRCODE = 'PS002';
    END IF;
    IF options IS NULL THEN
        PERFORM penstock.limits_changed(l.id) FROM penstock."limit" l WHERE l.name = quota;
        DELETE FROM penstock."limit" l WHERE l.name = quota;
        INSERT INTO penstock.audit (actor, verb, object, reason) VALUES (set_quota.actor, 'set_quota', quota, set_quota.reason);
        RETURN;
    END IF;
    PERFORM penstock.set_limit(quota, options, reason, actor);
    FOR q IN SELECT x.name FROM penstock.queue x WHERE x.application = set_quota.application
                AND NOT EXISTS (SELECT FROM penstock.limit_use u JOIN penstock."limit" l ON l.id = u.limit_id WHERE u.queue_id = x.id AND l.name = quota)
              ORDER BY x.id
    LOOP
        PERFORM penstock.use_limit(q.name, quota, 1, reason, actor);
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.alter_queue(queue_name text, options jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q       penstock.queue;
    unknown text;
BEGIN
    PERFORM penstock.hold_limits();
    IF jsonb_typeof(options) <> 'object' THEN
        RAISE EXCEPTION 'options must be an object' USING ERRCODE = 'PS002';
    END IF;
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.drop_queue(queue_name text, force boolean DEFAULT false, reason text DEFAULT NULL::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue_name);
    n bigint;
BEGIN
    PERFORM penstock.hold_limits();
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
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(drop_queue.actor, current_user), 'drop_queue', queue_name, drop_queue.reason, jsonb_build_object('force', force, 'entries', n));
END $$;
-- +goose StatementEnd

-- A claim that does not know that its queue comes under a limit must have been committed before the limit is counted. It has
-- written, or will, to penstock.lock, and holds that table from before its snapshot: none of them is in flight while we
-- have it, and those that come later see the limit. Claims and endings wait meanwhile, so that we must not wait for long.
-- A queue that this transaction has made has no claims.
-- +goose StatementBegin
CREATE FUNCTION penstock.await_claims() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    before text := current_setting('lock_timeout');
BEGIN
    IF EXISTS (SELECT FROM penstock.queue q WHERE q.id = NEW.queue_id AND q.created_at < transaction_timestamp())
       AND NOT EXISTS (SELECT FROM penstock.limit_use u WHERE u.queue_id = NEW.queue_id AND u.limit_id = NEW.limit_id) THEN
        PERFORM set_config('lock_timeout', '3s', true);
        LOCK TABLE penstock.lock IN SHARE MODE;
        PERFORM set_config('lock_timeout', before, true);
    END IF;
    RETURN NEW;
EXCEPTION WHEN lock_not_available THEN
    RAISE EXCEPTION 'a claim or an ending has been under way for more than 3 seconds'
        USING ERRCODE = 'PS006', HINT = 'Put the queue under the limit again when it has ended: a transaction that writes to penstock.lock, see pg_locks.';
END $$;
-- +goose StatementEnd
CREATE TRIGGER await_claims BEFORE INSERT ON penstock.limit_use FOR EACH ROW EXECUTE FUNCTION penstock.await_claims();
