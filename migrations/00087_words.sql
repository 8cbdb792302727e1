-- +goose Up

-- in_words says what a value must be instead of the name of the constraint that it violates; other messages pass through.
-- +goose StatementBegin
CREATE FUNCTION penstock.in_words(said text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce((SELECT v.words FROM (VALUES
        ('cron_job_catch_up_check', 'catch_up is not none, last or all'),
        ('cron_job_catch_up_max_check', 'catch_up_max is not from 1 to 1000'),
        ('cron_job_starts_at_check', 'starts_at is not finite'),
        ('cron_job_ends_at_check', 'ends_at is not finite'),
        ('cron_job_fold_check', 'fold is not first or both'),
        ('cron_job_gap_check', 'gap is not fire or skip'),
        ('cron_job_grace_check', 'grace is not above 0'),
        ('cron_job_jitter_check', 'jitter is not from 0 to 1 day'),
        ('cron_job_name_check', 'name is not from 1 to 256 bytes long'),
        ('cron_job_overlap_check', 'overlap is not skip, queue or cancel_running'),
        ('cron_job_priority_check', 'priority is not from 0 to 9'),
        ('batch_detail_check', 'detail is not an object'),
        ('batch_items_check', 'items is not an array'),
        ('batch_part_size_check', 'part_size is not from 1 to 100000'),
        ('batch_priority_check', 'priority is not from 0 to 9'),
        ('batch_window_parts_check', 'window_parts is not from 1 to 10000'),
        ('limit_check', 'rate and burst are not given together'),
        ('limit_check1', 'neither max_units nor rate is given'),
        ('limit_check2', 'per_key is given with max_units or per_flow'),
        ('limit_finite_check', 'rate or burst is not finite'),
        ('limit_burst_check', 'burst is not above 0'),
        ('limit_rate_check', 'rate is not above 0'),
        ('limit_max_units_check', 'max_units is not at least 0'),
        ('limit_name_check', 'name is empty')) v(name, words)
     WHERE strpos(said, '"' || v.name || '"') > 0), said)
$$;
-- +goose StatementEnd

-- What takes options says what they must be. Otherwise as before.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.alter_queue(queue_name text, options jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q       penstock.queue;
    unknown text;
BEGIN
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
CREATE OR REPLACE FUNCTION penstock.alter_cron_job(job text, options jsonb, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    j       penstock.cron_job;
    was     penstock.cron_job;
    unknown text;
BEGIN
    IF jsonb_typeof(options) <> 'object' THEN
        RAISE EXCEPTION 'options must be an object' USING ERRCODE = 'PS002';
    END IF;
    PERFORM penstock.need_read_committed();
    SELECT * INTO was FROM penstock.cron_job_row(job);
    SELECT k INTO unknown FROM jsonb_object_keys(options) k
     WHERE k NOT IN ('spec', 'zone', 'jitter', 'starts_at', 'ends_at', 'catch_up', 'catch_up_max', 'grace', 'gap', 'fold', 'overlap',
                     'payload', 'lock_key', 'flow', 'priority');
    IF FOUND THEN
        RAISE EXCEPTION 'cron job option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are the columns of penstock.cron_job that are settings.';
    END IF;
    j := jsonb_populate_record(was, options);
    UPDATE penstock.cron_job SET
        spec = j.spec, zone = j.zone, jitter = j.jitter, starts_at = j.starts_at, ends_at = j.ends_at, catch_up = j.catch_up,
        catch_up_max = j.catch_up_max, grace = j.grace, gap = j.gap, fold = j.fold, overlap = j.overlap, payload = j.payload,
        lock_key = j.lock_key, flow = j.flow, priority = j.priority, problem = NULL, look_at = '-infinity',
        handled_at = CASE WHEN (j.spec, j.zone, j.starts_at, j.ends_at, j.gap, j.fold)
                               IS DISTINCT FROM (was.spec, was.zone, was.starts_at, was.ends_at, was.gap, was.fold)
                          THEN greatest(handled_at, clock_timestamp()) ELSE handled_at END
     WHERE id = j.id;
    PERFORM penstock.withdraw_cron_entry(j.id, 'the cron job was altered');
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(alter_cron_job.actor, current_user), 'alter_cron_job', 'cron job ' || job, alter_cron_job.reason, options);
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range OR invalid_datetime_format
      OR datetime_field_overflow OR interval_field_overflow OR not_null_violation THEN
        RAISE EXCEPTION 'option of cron job "%" is not valid: %', job, penstock.in_words(SQLERRM) USING ERRCODE = 'PS002';
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.create_cron_job(job text, queue text, spec text, payload jsonb DEFAULT '{}'::jsonb, options jsonb DEFAULT '{}'::jsonb, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue);
    made bigint;
BEGIN
    IF q.kind <> 'cron' THEN
        RAISE EXCEPTION 'queue "%" is of kind %, not cron', q.name, q.kind
            USING ERRCODE = 'PS002', HINT = 'Make one: SELECT penstock.create_queue(''name'', ''{"kind": "cron"}'').';
    END IF;
    INSERT INTO penstock.cron_job (queue_id, name, spec, payload)
    VALUES (q.id, job, create_cron_job.spec, create_cron_job.payload) RETURNING id INTO made;
    PERFORM penstock.alter_cron_job(job, options, reason, actor);
    RETURN made;
EXCEPTION
    WHEN unique_violation THEN
        RAISE EXCEPTION 'cron job "%" exists already', job USING ERRCODE = 'PS006', HINT = 'Change it with penstock.alter_cron_job.';
    WHEN check_violation OR not_null_violation THEN
        RAISE EXCEPTION 'cron job "%" is not valid: %', job, penstock.in_words(SQLERRM) USING ERRCODE = 'PS002';
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.create_batch(name text, queue text, options jsonb, reason text DEFAULT ''::text, actor text DEFAULT CURRENT_USER) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
DECLARE
    q       penstock.queue := penstock.queue_row(queue);
    b       penstock.batch;
    unknown text;
BEGIN
    IF q.kind NOT IN ('batch', 'task') THEN
        RAISE EXCEPTION 'queue "%" is of kind %, not batch', q.name, q.kind
            USING ERRCODE = 'PS002', HINT = 'Make one: SELECT penstock.create_queue(''name'', ''{"kind": "batch"}'').';
    ELSIF jsonb_typeof(options) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'options of a batch are not a JSON object' USING ERRCODE = 'PS002';
    END IF;
    SELECT k INTO unknown FROM jsonb_object_keys(options) k
     WHERE k NOT IN ('items', 'query', 'part_size', 'window_parts', 'detail', 'flow', 'priority', 'completion_queue');
    IF FOUND THEN
        RAISE EXCEPTION 'batch option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are items or query, part_size, window_parts, detail, flow, priority and completion_queue.';
    ELSIF num_nonnulls(options->>'items', options->>'query') <> 1 THEN
        RAISE EXCEPTION 'a batch needs items or a query, one of them' USING ERRCODE = 'PS002';
    END IF;
    b := jsonb_populate_record(NULL::penstock.batch, options);
    INSERT INTO penstock.batch AS x (queue_id, name, query, items, part_size, window_parts, detail, flow, priority, actor, completion_queue_id)
    VALUES (q.id, create_batch.name, b.query, b.items, coalesce(b.part_size, 100), coalesce(b.window_parts, 1000), coalesce(b.detail, '{}'),
            b.flow, b.priority, coalesce(create_batch.actor, current_user),
            CASE WHEN options->>'completion_queue' IS NOT NULL THEN (penstock.queue_row(options->>'completion_queue')).id END)
    RETURNING * INTO b;
    IF b.items IS NOT NULL THEN
        PERFORM penstock.split_batch(b.id);
    ELSE
        UPDATE penstock.batch x SET split_entry_id = penstock.push(q.name, penstock.batch_payload(b, 'split'), flow => b.flow,
                                                                   priority => b.priority, name => 'batch:' || b.id)
         WHERE x.id = b.id;
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(create_batch.actor, current_user), 'create_batch', 'batch ' || b.id, create_batch.reason,
            jsonb_build_object('queue', q.name, 'name', create_batch.name));
    RETURN b.id;
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range OR not_null_violation THEN
        RAISE EXCEPTION 'batch option is not valid: %', penstock.in_words(SQLERRM) USING ERRCODE = 'PS002';
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.set_limit(limit_name text, options jsonb, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    l       penstock."limit";
    unknown text;
BEGIN
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
