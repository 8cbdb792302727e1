-- The registry of queues: their settings, the valid range of each, and the counters of those with a capacity.

-- create_queue registers a queue and gives it a table. The table is made on its own and then
-- attached, so that a reader or writer of another queue does not wait for it.
-- Locks: those of lock_all_limits first, in the order of changes of limits; the row of the queue, which
-- is new; SHARE UPDATE EXCLUSIVE on penstock.entry to attach the table; then those of alter_queue.
-- Callers: fit_model_queue; pkg/invalidation, pkg/operator; psql.
-- SQLSTATE: PS002 the name or an option is not valid, PS006 the queue exists.
CREATE OR REPLACE FUNCTION penstock.create_queue(queue_name text, options jsonb DEFAULT '{}'::jsonb) RETURNS integer
    LANGUAGE plpgsql
    AS $_$
DECLARE
    q       penstock.queue;
    child   text;
    subject text;
    rows    text; -- columns and condition of an index
BEGIN
    PERFORM penstock.lock_all_limits(); -- before the quota of the application, whose row the new queue takes
    IF queue_name !~ '^[a-z][a-z0-9_]{0,47}$' THEN
        RAISE EXCEPTION 'queue name "%" is not valid', queue_name
            USING ERRCODE = 'PS002', HINT = 'Use 1 to 48 lower-case letters, digits and underscores, beginning with a letter.';
    END IF;
    IF EXISTS (SELECT FROM penstock.queue WHERE name = queue_name) THEN
        RAISE EXCEPTION 'queue "%" exists already', queue_name USING ERRCODE = 'PS006',
            HINT = 'Alter that queue (alter_queue), or give the new one another name.';
    ELSIF to_regclass('penstock.entry_' || queue_name) IS NOT NULL THEN
        RAISE EXCEPTION 'queue name "%" is not valid: its table would be penstock.entry_%, which exists',
                        queue_name, queue_name
            USING ERRCODE = 'PS002', HINT = 'Use another name.';
    END IF;
    INSERT INTO penstock.queue (name) VALUES (queue_name) RETURNING * INTO q;
    child := 'entry_' || queue_name;
    EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.entry INCLUDING ALL, CONSTRAINT %I CHECK (queue_id = %s))',
                   child, child || '_queue', q.id);
    EXECUTE format('ALTER TABLE penstock.%I SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)', child);
    -- Indexes for the claim of a group, promotion and deadlines; the last two for lists of entries, in order of id.
    -- Each is partial. Their names have the id (entry_index): with the name of the queue they could be that of another
    -- queue's table, and too long.
    FOR subject, rows IN VALUES
        ('lock_key', '(lock_key, id) WHERE lock_key IS NOT NULL AND status = ''pending'' AND priority >= 0'),
        ('due_at', '(due_at, id) WHERE status = ''initial'''),
        ('start_by', '(start_by) WHERE start_by IS NOT NULL'),
        ('finish_by', '(finish_by) WHERE finish_by IS NOT NULL'),
        ('name', '(name, id) WHERE name IS NOT NULL'),
        ('disabled', '(id) WHERE priority = -1'),
        ('initial', '(id) WHERE status = ''initial'' AND priority >= 0'),
        ('lock_key_apart', '(lock_key, id) WHERE lock_key IS NOT NULL AND (status = ''initial'' OR priority < 0)')
    LOOP
        EXECUTE format('CREATE INDEX %I ON penstock.%I %s', subject || '_' || q.id, child, rows);
    END LOOP;
    PERFORM penstock.copy_rights(child, 'entry');
    EXECUTE format('ALTER TABLE penstock.entry ATTACH PARTITION penstock.%I FOR VALUES IN (%s)', child, q.id);
    EXECUTE format('ALTER TABLE penstock.%I DROP CONSTRAINT %I', child, child || '_queue');
    PERFORM penstock.alter_queue(queue_name, options);
    RETURN q.id;
END $_$;

-- entry_index returns a partial index of a queue's table, by the column or state that it is for. In tables that were
-- made before names of indexes had the id of the queue, they have its name.
-- Callers: indexed_entries, scale_queues, scale_due, scale_late.
CREATE OR REPLACE FUNCTION penstock.entry_index(q penstock.queue, subject text) RETURNS regclass
LANGUAGE sql STABLE AS $$
    SELECT coalesce(to_regclass('penstock.' || subject || '_' || q.id),
                    to_regclass('penstock.entry_' || q.name || '_' || subject))
$$;

-- alter_queue changes settings of a queue: {"capacity": 1000, "max_concurrent": null}. Unknown
-- names are refused. Nodes read the settings again by the queue's version.
-- Locks: those of lock_all_limits, the row of the queue (FOR NO KEY UPDATE), then those of the triggers
-- for max_concurrent, application and max_weight (await_claims, count_again). A change of capacity_per_flow makes or
-- drops an index: pushes and endings of the queue wait meanwhile (SHARE or ACCESS EXCLUSIVE on its table).
-- Callers: fit_model_queue, create_queue; pkg/invalidation, pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 an option does not exist or is not valid, PS006 the kind is
-- needed by cron jobs, watches or batches, or a claim took longer than 3 seconds.
CREATE OR REPLACE FUNCTION penstock.alter_queue(queue_name text, options jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q       penstock.queue;
    unknown text;
    reading text; -- the option that is being read
    keyed   text; -- the first ten cron jobs with a lock key
BEGIN
    PERFORM penstock.lock_all_limits();
    IF jsonb_typeof(options) <> 'object' THEN
        RAISE EXCEPTION 'options must be an object' USING ERRCODE = 'PS002';
    END IF;
    SELECT * INTO q FROM penstock.queue_row(queue_name);
    PERFORM FROM penstock.queue WHERE id = q.id FOR NO KEY UPDATE;
    SELECT k INTO unknown FROM jsonb_object_keys(options) k
     WHERE k NOT IN ('kind', 'application', 'priority', 'entry_priority', 'algorithm', 'grouping', 'mergeable', 'merge',
                     'max_concurrent', 'max_concurrent_per_node', 'max_concurrent_per_name', 'max_weight', 'shards',
                     'capacity', 'capacity_per_flow', 'capacity_per_slot', 'on_no_instance',
                     'no_instance_timeout', 'retry', 'crash_limit', 'run_timeout',
                     'start_within', 'finish_within', 'on_failure',
                     'quantum_count', 'quantum_time', 'payload_limit', 'result_retention', 'failure_retention', 'model', 'lapse', 'needs');
    IF FOUND THEN
        RAISE EXCEPTION 'queue option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'A queue shows its settings; in SQL they are columns of penstock.queue.';
    END IF;
    FOR reading IN SELECT jsonb_object_keys(options) LOOP
        q := jsonb_populate_record(q, jsonb_build_object(reading, options->reading));
    END LOOP;
    reading := NULL;
    IF options->>'max_concurrent_per_name' IS NOT NULL THEN
        SELECT string_agg(j.name, ', ' ORDER BY j.name) INTO keyed
          FROM (SELECT c.name FROM penstock.cron_job c WHERE c.queue_id = q.id AND c.lock_key IS NOT NULL
                ORDER BY c.name LIMIT 10) j;
        IF keyed IS NOT NULL THEN
            RAISE EXCEPTION 'max_concurrent_per_name of queue "%" does not go with lock_key of its cron jobs: %',
                queue_name, keyed
                USING ERRCODE = 'PS002', HINT = 'Alter the cron jobs first: set their lock_key to null (alter_cron_job).';
        END IF;
    END IF;
    UPDATE penstock.queue SET
        kind = q.kind, application = q.application, priority = q.priority, entry_priority = q.entry_priority,
        algorithm = q.algorithm, grouping = q.grouping, mergeable = q.mergeable, merge = q.merge,
        max_concurrent = q.max_concurrent, max_concurrent_per_node = q.max_concurrent_per_node,
        max_concurrent_per_name = q.max_concurrent_per_name, max_weight = q.max_weight, shards = q.shards,
        capacity = q.capacity,
        capacity_per_flow = q.capacity_per_flow, capacity_per_slot = q.capacity_per_slot,
        on_no_instance = q.on_no_instance,
        no_instance_timeout = q.no_instance_timeout,
        retry = q.retry, crash_limit = q.crash_limit, run_timeout = q.run_timeout,
        start_within = q.start_within, finish_within = q.finish_within, on_failure = q.on_failure,
        quantum_count = q.quantum_count,
        quantum_time = q.quantum_time, payload_limit = q.payload_limit, result_retention = q.result_retention,
        failure_retention = q.failure_retention, model = q.model, lapse = q.lapse, needs = q.needs,
        version = version + 1
     WHERE id = q.id;
    -- admit_flows counts by an index of flows. Its name has the id: names of queues are parts of names of tables.
    IF q.capacity_per_flow IS NOT NULL AND to_regclass('penstock.flow_' || q.id) IS NULL THEN
        EXECUTE format('CREATE INDEX %I ON penstock.%I (flow)', 'flow_' || q.id, 'entry_' || queue_name);
    ELSIF q.capacity_per_flow IS NULL AND to_regclass('penstock.flow_' || q.id) IS NOT NULL THEN
        EXECUTE format('DROP INDEX penstock.%I', 'flow_' || q.id);
    END IF;
    IF coalesce(q.capacity, q.capacity_per_slot) IS NOT NULL
        AND NOT EXISTS (SELECT FROM penstock.depth WHERE queue_id = q.id) THEN
        EXECUTE format('CREATE SEQUENCE penstock.%I', 'accepted_' || q.id);
        EXECUTE format('CREATE SEQUENCE penstock.%I', 'removed_' || q.id);
        PERFORM penstock.copy_rights(c || '_' || q.id, 'entry_id_seq') FROM unnest(ARRAY['accepted', 'removed']) c;
        INSERT INTO penstock.depth (queue_id, counted, accepted, removed) VALUES (q.id, 0, 0, 0);
        PERFORM penstock.count_depth(q.id);
    ELSIF coalesce(q.capacity, q.capacity_per_slot) IS NULL
        AND EXISTS (SELECT FROM penstock.depth WHERE queue_id = q.id) THEN
        DELETE FROM penstock.depth WHERE queue_id = q.id;
        EXECUTE format('DROP SEQUENCE penstock.%I, penstock.%I', 'accepted_' || q.id, 'removed_' || q.id);
    END IF;
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range
      OR invalid_datetime_format OR interval_field_overflow THEN
        RAISE EXCEPTION 'queue option %of "%" is not valid: %', coalesce('"' || reading || '" ', ''), queue_name,
            SQLERRM
            USING ERRCODE = 'PS002';
    WHEN not_null_violation THEN
        GET STACKED DIAGNOSTICS reading = COLUMN_NAME;
        RAISE EXCEPTION 'queue option "%" of "%" is not valid: it always has a value', reading,
            queue_name USING ERRCODE = 'PS002';
END $$;

-- lock_entries locks the table of all entries and that of a queue, drops the counters of the queue, and returns whether
-- it could. Other transactions lock these in any order, so that it waits for less than deadlock_timeout and then lets
-- all go: no other one is the victim of a deadlock.
-- Locks: ACCESS EXCLUSIVE on penstock.entry, on the queue's own table and on its counters, each for 200 ms of waiting
-- at most.
-- Callers: drop_queue.
CREATE OR REPLACE FUNCTION penstock.lock_entries(queue_name text) RETURNS boolean
LANGUAGE plpgsql SET lock_timeout = '200ms' SET client_min_messages = warning AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue_name);
BEGIN
    LOCK TABLE ONLY penstock.entry IN ACCESS EXCLUSIVE MODE;
    EXECUTE format('LOCK TABLE penstock.%I IN ACCESS EXCLUSIVE MODE', 'entry_' || queue_name);
    EXECUTE format('DROP SEQUENCE IF EXISTS penstock.%I, penstock.%I', 'accepted_' || q.id, 'removed_' || q.id);
    RETURN true;
EXCEPTION
    WHEN lock_not_available OR deadlock_detected THEN
        RETURN false;
END $$;

-- need_no_entries raises an error if a queue has entries; where force is true it returns how many, up to a million.
-- Locks: none.
-- Callers: drop_queue.
-- SQLSTATE: PS006 it has entries.
CREATE OR REPLACE FUNCTION penstock.need_no_entries(queue_name text, force boolean) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    n bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM (SELECT FROM penstock.%I LIMIT 1000000) e', 'entry_' || queue_name) INTO n;
    IF n > 0 AND NOT force THEN
        RAISE EXCEPTION 'queue "%" still has % entries', queue_name, n
            USING ERRCODE = 'PS006', HINT = 'Wait until it is empty, cancel them, or drop with force.';
    END IF;
    RETURN n;
END $$;

-- need_no_callbacks raises an error if clients are still to be told of the end of entries of a queue that is to be
-- dropped: by callbacks, or by webhooks of predictions. Their entries would end without. It reads the entries with ids
-- above `after`, and returns the largest one.
-- Locks: none.
-- Callers: drop_queue.
-- SQLSTATE: PS006 clients are still to be told.
CREATE OR REPLACE FUNCTION penstock.need_no_callbacks(q penstock.queue, after bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    n      bigint;
    newest bigint;
BEGIN
    EXECUTE format('SELECT count(*) FILTER (WHERE callback->>''url'' <> ''''), coalesce(max(id), 0)
                      FROM penstock.%I WHERE queue_id = $1 AND id > $2', 'entry_' || q.name)
       INTO n, newest USING q.id, after;
    IF n > 0 THEN
        RAISE EXCEPTION 'queue "%" has % entries with a callback, which would never be sent', q.name, n
            USING ERRCODE = 'PS006', HINT = 'Cancel these entries first: that sends their callbacks.';
    ELSIF EXISTS (SELECT FROM penstock.prediction p
                   WHERE p.webhook IS NOT NULL AND p.notified_at IS NULL AND p.queue_id = q.id) THEN
        RAISE EXCEPTION 'queue "%" has predictions whose end was not reported to their webhooks yet', q.name
            USING ERRCODE = 'PS006',
                  HINT = 'Cancel their entries first, and let a gateway report them, which takes seconds.';
    END IF;
    RETURN newest;
END $$;

-- drop_queue removes a queue and all rows of it. It refuses while clients are still to be told of the end of entries,
-- and, unless forced, while there are entries, or open batches that complete into it. What may be millions of
-- rows goes first: no push to another queue and no change of limits waits for that. A push or an ending that has locked
-- the queue's table would wait for deleted ready rows of lock keys, and for deleted unique keys: these ready rows go
-- behind the locks, with the progress of entries that have not ended, the parts of open batches, and the few results,
-- failures and other ready rows that were added meanwhile. Unique keys go last, up to 10,000 that no transaction has
-- locked: a push that waits for one has no lock that the drop still needs. The others, idempotency
-- keys that were added, and what a longer transaction adds, go by retention.
-- Locks: those of need_no_completions; results, failures, idempotency keys and ready rows of the queue; its ended
-- batches in order of id (FOR UPDATE SKIP LOCKED) with their parts; progress of ended entries; firings of its cron
-- jobs; those of lock_all_limits; those of lock_entries, tried again for 3 s, or for as long as lock_timeout is set
-- to, so that no push comes between; rows of the queue; its unique keys (SKIP LOCKED). Each of the others waits 3 s
-- at most, unless lock_timeout is set.
-- Callers: pkg/invalidation; psql.
-- SQLSTATE: PS001 no such queue, PS006 it has entries, is needed, or has clients to be told, 55P03 a lock was not to be
-- had in time.
CREATE OR REPLACE FUNCTION penstock.drop_queue(
    queue_name text,
    force      boolean DEFAULT false,
    reason     text    DEFAULT NULL,
    actor      text    DEFAULT current_user::text
) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q       penstock.queue := penstock.queue_row(queue_name);
    began   timestamptz := clock_timestamp() - interval '1 minute';
    n       bigint := penstock.need_no_entries(queue_name, force);
    newest  bigint;
    give_up timestamptz;
BEGIN
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '3s', true); -- no limit can be changed meanwhile
    END IF;
    newest := penstock.need_no_callbacks(q, 0);
    PERFORM penstock.need_no_completions(q, force);
    DELETE FROM penstock.result WHERE queue_id = q.id;
    DELETE FROM penstock.failure WHERE queue_id = q.id;
    DELETE FROM penstock.idempotency WHERE queue_id = q.id;
    DELETE FROM penstock.ready WHERE queue_id = q.id AND lock_key IS NULL;
    WITH ended AS MATERIALIZED (
        SELECT b.id FROM penstock.batch b WHERE b.queue_id = q.id AND b.ended_at IS NOT NULL
         ORDER BY b.id FOR UPDATE SKIP LOCKED
    )
    DELETE FROM penstock.batch_part p USING ended e WHERE p.batch_id = e.id;
    EXECUTE format('DELETE FROM penstock.progress p
                     WHERE p.queue_id = $1
                       AND NOT EXISTS (SELECT FROM penstock.%I e WHERE e.queue_id = $1 AND e.id = p.entry_id)',
                   'entry_' || queue_name) USING q.id;
    DELETE FROM penstock.cron_firing f USING penstock.cron_job j WHERE j.queue_id = q.id AND f.job_id = j.id;
    newest := greatest(newest, penstock.need_no_callbacks(q, newest - 1000000)); -- of transactions that were open
    PERFORM penstock.lock_all_limits();
    q := penstock.queue_row(queue_name); -- another drop may have been faster, and the queue have been made again
    give_up := clock_timestamp() + current_setting('lock_timeout')::interval;
    WHILE NOT penstock.lock_entries(queue_name) LOOP
        IF clock_timestamp() > give_up THEN
            RAISE EXCEPTION 'queue "%" cannot be dropped: other transactions use the tables of entries', queue_name
                USING ERRCODE = '55P03', HINT = 'Try again.';
        END IF;
        PERFORM pg_sleep(0.1); -- transactions that wait for these tables go on
    END LOOP;
    IF NOT force THEN
        PERFORM penstock.need_no_entries(queue_name, force);
    END IF;
    PERFORM penstock.need_no_callbacks(q, newest - 100000); -- those that came since, whose ids may be older
    EXECUTE format('ALTER TABLE penstock.entry DETACH PARTITION penstock.%I', 'entry_' || queue_name);
    EXECUTE format('DROP TABLE penstock.%I', 'entry_' || queue_name);
    DELETE FROM penstock.ready WHERE queue_id = q.id;
    DELETE FROM penstock.lock WHERE queue_id = q.id;
    DELETE FROM penstock.limit_wait WHERE queue_id = q.id;
    DELETE FROM penstock.progress WHERE queue_id = q.id;
    DELETE FROM penstock.cancel_request WHERE queue_id = q.id;
    DELETE FROM penstock.blocked_key WHERE queue_id = q.id;
    DELETE FROM penstock.result WHERE queue_id = q.id AND finished_at > began;
    DELETE FROM penstock.failure WHERE queue_id = q.id AND failed_at > began;
    DELETE FROM penstock.queue WHERE id = q.id;
    DELETE FROM penstock.uniqueness
     WHERE ctid = ANY (ARRAY(SELECT ctid FROM penstock.uniqueness WHERE queue_id = q.id LIMIT 10000 FOR UPDATE SKIP LOCKED));
    PERFORM penstock.audit_log(drop_queue.actor, 'drop_queue', queue_name,
                               drop_queue.reason, jsonb_build_object('force', force, 'entries', n));
END $$;

-- needs_flaw returns what is wrong with the needs of a queue's entries, null if nothing is. The governor counts
-- millionths of a core; a number that is far less has no double precision, and could be read by no node.
-- Callers: check_queue.
CREATE OR REPLACE FUNCTION penstock.needs_flaw(needs jsonb) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT 'needs is not {"cpu": cores, "memory_mib": MiB}, of up to 1000000 cores and 1000000000 MiB, '
        || 'each 0 or at least 0.000001: ' || string_agg(n.key, ', ' ORDER BY n.key)
      FROM jsonb_each(CASE WHEN jsonb_typeof(needs) = 'object' THEN needs END) n
     WHERE n.key NOT IN ('cpu', 'memory_mib')
        OR CASE WHEN jsonb_typeof(n.value) = 'number'
                THEN n.value::numeric NOT BETWEEN 0.000001 AND CASE n.key WHEN 'cpu' THEN 1e6 ELSE 1e9 END
                     AND n.value <> '0' ELSE true END
$$;

-- check_queue refuses settings that are out of range, by name, with the range. A setting that a
-- node or a leader could not read is refused where it is set: one invalid retry policy kept every
-- node from reading any queue, and a retention of 300,000 years kept every partition.
-- Locks: none.
-- Callers: trigger check_queue.
-- SQLSTATE: PS002 a setting is not valid.
CREATE OR REPLACE FUNCTION penstock.check_queue() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    flaw text;
BEGIN
    IF TG_OP = 'INSERT' OR NEW.retry IS DISTINCT FROM OLD.retry THEN
        flaw := penstock.retry_flaw(NEW.retry);
    END IF;
    BEGIN
        PERFORM CASE WHEN left(NEW.grouping, 1) = '$' THEN NEW.grouping::jsonpath END;
    EXCEPTION WHEN OTHERS THEN
        flaw := format('grouping is not a jsonpath: %s', SQLERRM);
    END;
    IF TG_OP = 'INSERT' OR NEW.needs IS DISTINCT FROM OLD.needs THEN
        flaw := coalesce(flaw, penstock.needs_flaw(NEW.needs));
    END IF;
    flaw := coalesce(flaw, (
        SELECT v.flaw FROM (VALUES
            (NEW.priority > 0 AND NEW.priority <= 1000, 'priority is not above 0 and at most 1000'),
            (NEW.entry_priority BETWEEN 0 AND 9, 'entry_priority is not from 0 to 9'),
            (NEW.algorithm IN ('fair', 'fifo'), 'algorithm is not fair or fifo'),
            (NEW.merge IN ('first', 'last', 'object', 'array'), 'merge is not first, last, object or array'),
            (NEW.on_failure IN ('continue', 'block_key'), 'on_failure is not continue or block_key'),
            (NEW.on_failure <> 'block_key' OR NEW.mergeable IS NOT TRUE,
             'on_failure block_key does not go with mergeable: merged entries fail together'),
            (NEW.lapse IN ('end', 'run_through'),
             'lapse is not end or run_through; leave it out for run_through with a model and end without'),
            (NEW.grouping <> '', 'grouping is empty; leave it out for entries without a key'),
            (NEW.application <> '', 'application is empty'),
            (NEW.max_concurrent > 0, 'max_concurrent is not at least 1; leave it out for no bound, pause the queue to stop it'),
            (NEW.max_concurrent_per_node > 0, 'max_concurrent_per_node is not at least 1; leave it out for no bound'),
            (NEW.max_concurrent_per_name BETWEEN 1 AND 100,
             'max_concurrent_per_name is not from 1 to 100; leave it out for no bound'),
            (NEW.max_concurrent_per_name IS NULL OR NEW.grouping IS NULL AND NEW.mergeable IS NOT TRUE,
             'max_concurrent_per_name does not go with grouping or mergeable: names have lock keys of their own'),
            (NEW.max_concurrent_per_name = 1 OR NEW.on_failure <> 'block_key',
             'on_failure block_key does not go with max_concurrent_per_name above 1: entries of a name have several lock keys'),
            (NEW.max_weight BETWEEN 1 AND 1000, 'max_weight is not from 1 to 1000; 1 is for no weights'),
            (NEW.shards BETWEEN 1 AND 64, 'shards is not from 1 to 64; 1 is for none'),
            (NEW.capacity > 0, 'capacity is not at least 1; leave it out for no bound'),
            (NEW.capacity_per_flow > 0, 'capacity_per_flow is not at least 1; leave it out for no bound'),
            (NEW.capacity_per_slot > 0 AND NEW.capacity_per_slot <= 1e9,
             'capacity_per_slot is not above 0 and at most 1000000000; leave it out for no bound'),
            (NEW.capacity_per_slot IS NULL OR NEW.model IS NOT NULL,
             'capacity_per_slot is given for a queue without a model'),
            (NEW.on_no_instance IN ('wait', 'fail'), 'on_no_instance is not wait or fail'),
            (NEW.on_no_instance = 'wait' OR NEW.model IS NOT NULL,
             'on_no_instance is fail for a queue without a model'),
            (NEW.no_instance_timeout >= '0' AND NEW.no_instance_timeout <= '10 years',
             'no_instance_timeout is not from 0 to 10 years'),
            (NEW.crash_limit > 0, 'crash_limit is not at least 1'),
            (NEW.quantum_count BETWEEN 1 AND 10000, 'quantum_count is not from 1 to 10000'),
            (NEW.quantum_time > '0' AND NEW.quantum_time <= '1 day', 'quantum_time is not above 0 and at most 1 day'),
            (NEW.run_timeout > '0' AND NEW.run_timeout <= '10 years',
             'run_timeout is not above 0 and at most 10 years; leave it out for none'),
            (NEW.start_within > '0' AND NEW.start_within <= '10 years',
             'start_within is not above 0 and at most 10 years; leave it out for none'),
            (NEW.finish_within > '0' AND NEW.finish_within <= '10 years',
             'finish_within is not above 0 and at most 10 years; leave it out for none'),
            (NEW.finish_within >= NEW.start_within, 'finish_within is less than start_within'),
            (NEW.payload_limit BETWEEN 1 AND 16777216, 'payload_limit is not from 1 to 16777216 bytes'),
            (NEW.result_retention BETWEEN '0' AND '10 years', 'result_retention is not from 0 to 10 years'),
            (NEW.failure_retention BETWEEN '1 day' AND '10 years',
             'failure_retention is not from 1 day to 10 years')) v(fine, flaw)
         WHERE NOT v.fine LIMIT 1));
    IF flaw IS NOT NULL THEN
        RAISE EXCEPTION 'setting of queue "%" is not valid: %', NEW.name, flaw USING ERRCODE = 'PS002';
    END IF;
    RETURN NEW;
END $$;

-- before_weights gives a change of max_weight the lock of all limits, in their order: before the row of the queue.
-- Locks: that of lock_all_limits.
-- Callers: trigger before_weights.
CREATE OR REPLACE FUNCTION penstock.before_weights() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.lock_all_limits();
    RETURN NULL;
END $$;

-- mark_weighed records that entries of a queue may have weights from now on. Claims that know no weights end before
-- this is committed, and later ones are refused until their node has read the queue again.
-- Locks: the uses of limits of the queue, then those of count_again. The caller has the lock of all limits.
-- Callers: trigger mark_weighed.
CREATE OR REPLACE FUNCTION penstock.mark_weighed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.weighed := true;
    NEW.version := NEW.version + 1;
    UPDATE penstock.limit_use u SET weighed = true WHERE u.queue_id = NEW.id;
    RETURN NEW;
END $$;

-- retry_flaw returns the error in a new retry policy, or null. Stored ones may have zeros, which mean the defaults.
-- Callers: check_queue.
CREATE OR REPLACE FUNCTION penstock.retry_flaw(policy jsonb, within text DEFAULT 'retry') RETURNS text
    LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(
        (SELECT within || ' is not a JSON object' WHERE jsonb_typeof(policy) <> 'object'),
        (SELECT within || '.' || f.key || ' ' || f.flaw
           FROM (SELECT e.key, CASE
                     WHEN e.key = 'max_attempts' THEN CASE WHEN n.text !~ '^[0-9]{1,5}$'
                         OR n.text::numeric NOT BETWEEN 1 AND 30000
                         THEN 'is not a whole number from 1 to 30000; 1 is for no retries' END
                     WHEN e.key IN ('base', 'cap') THEN CASE WHEN n.text !~ '^[0-9.]+$'
                         OR n.text::numeric NOT BETWEEN 1e-9 AND 315360000
                         THEN 'is not a number of seconds above 0 and up to ten years; leave it out for the default' END
                     WHEN e.key = 'factor' THEN CASE WHEN n.text !~ '^[0-9.]+$'
                         OR n.text::numeric NOT BETWEEN 1 AND 1000
                         THEN 'is not a number from 1 to 1000; leave it out for the default' END
                     WHEN e.key = 'jitter' THEN CASE WHEN n.text !~ '^[0-9.]+$'
                         OR n.text::numeric > 1 THEN 'is not a number from 0 to 1' END
                     WHEN e.key = 'classes' AND within = 'retry' THEN CASE
                         WHEN jsonb_typeof(e.value) <> 'object' THEN 'is not a JSON object' END
                     ELSE 'does not exist; there are max_attempts, base, cap, factor, jitter and, for errors of a class, classes' END AS flaw
                   FROM jsonb_each(CASE jsonb_typeof(policy) WHEN 'object' THEN policy END) e
                  CROSS JOIN LATERAL (SELECT CASE jsonb_typeof(e.value) WHEN 'number' THEN e.value::text
                                      ELSE '' END AS text) n) f
          WHERE f.flaw IS NOT NULL ORDER BY f.key LIMIT 1),
        (SELECT penstock.retry_flaw(c.value, within || '.classes.' || c.key)
           FROM jsonb_each(CASE WHEN within = 'retry'
                           AND jsonb_typeof(policy->'classes') = 'object' THEN policy->'classes' END) c
          WHERE penstock.retry_flaw(c.value, within || '.classes.' || c.key) IS NOT NULL ORDER BY c.key LIMIT 1))
$$;

-- in_words replaces a message that names a violated constraint by the values that are allowed; other messages are
-- returned as they are. The language of messages (lc_messages) decides what quotes stand around the name.
-- Callers: create_batch, create_cron_job, alter_cron_job, set_limit.
CREATE OR REPLACE FUNCTION penstock.in_words(said text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
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
     WHERE said ~ ('[[:<:]]' || v.name || '[[:>:]]') ORDER BY v.name LIMIT 1), said)
$$;

-- keep_queue_kind refuses a change of the kind of a queue that cron jobs, watches or batches need:
-- with another kind their entries would wait for ever without an error. Rows that refer to a queue
-- are few and rarely made; one that is made at the same moment is not seen.
-- Locks: none further: the statement has the row of the queue.
-- Callers: trigger keep_queue_kind.
-- SQLSTATE: PS006 the kind is needed.
CREATE OR REPLACE FUNCTION penstock.keep_queue_kind() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    needs text;
BEGIN
    SELECT format('%s %s', n.what, n.name) INTO needs FROM (
        SELECT 'cron job' AS what, j.name FROM penstock.cron_job j WHERE j.queue_id = OLD.id
        UNION ALL SELECT 'the watch of', w.watched::text FROM penstock.watch w WHERE w.queue_id = OLD.id
        UNION ALL SELECT 'batch', b.id::text FROM penstock.batch b
            WHERE b.queue_id = OLD.id AND b.ended_at IS NULL) n LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'queue "%" cannot change its kind from % to %: % needs it', OLD.name, OLD.kind, NEW.kind, needs
            USING ERRCODE = 'PS006', HINT = 'Drop the cron jobs, end the watches and wait for the batches first, or make another queue.';
    END IF;
    RETURN NEW;
END $$;

-- count_depth counts a queue with a capacity again. Pushes go on meanwhile: the counter of accepted entries is read
-- first, and then how many entries of open pushes no count can see, so that a push that commits during
-- the count is counted twice at worst, never left out. That of removed ones is read last, so that an entry that ends
-- during the count is counted until the next one, and not removed twice.
-- Locks: the row of depth.
-- Callers: alter_queue; pkg/maintenance.
CREATE OR REPLACE FUNCTION penstock.count_depth(queue integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    accepted_now bigint := penstock.counter('accepted', queue);
    removed_now  bigint;
    open_now     bigint;
    counted_now  bigint;
BEGIN
    SELECT coalesce(sum(o.entries), 0) INTO open_now FROM penstock.open_pushes() o
     WHERE o.key = penstock.open_pushes_key(queue)::oid AND NOT o.mine;
    SELECT count(*) + open_now INTO counted_now FROM penstock.entry WHERE queue_id = queue;
    removed_now := penstock.counter('removed', queue);
    UPDATE penstock.depth d
       SET counted = counted_now, accepted = accepted_now, removed = removed_now, counted_at = clock_timestamp(),
           drain_rate = greatest(0, removed_now - d.removed)
                        / greatest(0.001, extract(epoch FROM clock_timestamp() - d.counted_at))
     WHERE d.queue_id = queue;
    RETURN counted_now;
END $$;
