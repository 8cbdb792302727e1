-- Batch jobs: a set, split into parts, each the work of one entry.

-- batch_row locks a batch and returns it. With open_only it raises an error for a batch that has
-- ended.
-- Locks: the row of the batch (FOR UPDATE), until the transaction ends.
-- Callers: split_batch, pause_batch, resume_batch, cancel_batch, retry_batch.
-- SQLSTATE: PS012 no such batch, PS006 the batch has ended.
CREATE OR REPLACE FUNCTION penstock.batch_row(wanted bigint, open_only boolean DEFAULT true) RETURNS penstock.batch
LANGUAGE plpgsql AS $$
DECLARE
    b penstock.batch;
BEGIN
    SELECT * INTO b FROM penstock.batch WHERE id = wanted FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', wanted USING ERRCODE = 'PS012',
            HINT = 'The list of batches has their ids (batch_status).';
    ELSIF open_only AND b.ended_at IS NOT NULL THEN
        RAISE EXCEPTION 'batch % has ended: %', wanted, b.status USING ERRCODE = 'PS006', DETAIL = b.status;
    END IF;
    RETURN b;
END $$;

-- batch_payload is the payload of an entry of a batch.
-- Callers: push_batch_entry, feed_batch, check_batch_entry.
CREATE OR REPLACE FUNCTION penstock.batch_payload(b penstock.batch, step text, more jsonb DEFAULT '{}') RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT b.detail || jsonb_build_object('batch', b.id, 'step', step) || more
$$;

-- push_batch_entry pushes one entry of a batch and returns its id.
-- Locks: those of push_many.
-- Callers: create_batch, complete_batch.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.push_batch_entry(
    target text,
    b      penstock.batch,
    step   text,
    more   jsonb          DEFAULT '{}'
) RETURNS bigint
LANGUAGE sql AS $$
    SELECT (penstock.push_many(target, ARRAY[penstock.batch_payload(b, step, more)], flows => ARRAY[b.flow], priorities => ARRAY[b.priority],
                               names => ARRAY['batch:' || b.id], inside => true)).ids[1]
$$;

-- check_batch_entry refuses what the push of an entry of a batch would refuse for good.
-- Callers: create_batch.
-- SQLSTATE: PS002 invalid argument, PS003 payload too large.
CREATE OR REPLACE FUNCTION penstock.check_batch_entry(
    q    penstock.queue,
    b    penstock.batch,
    step text,
    more jsonb
) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    payloads jsonb[] := ARRAY[penstock.batch_payload(b, step, more)];
BEGIN
    PERFORM penstock.check_payloads(q, payloads);
    PERFORM penstock.check_options(q, payloads, '{}', ARRAY[b.flow], ARRAY[b.priority], ARRAY['batch:' || b.id],
                                   '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}');
EXCEPTION WHEN SQLSTATE 'PS002' OR SQLSTATE 'PS003' THEN
    RAISE EXCEPTION 'entry "%" of the batch: %', step, SQLERRM
        USING ERRCODE = SQLSTATE, HINT = 'The entries of a batch have its detail as payload.';
END $$;

-- create_batch makes a batch of a list of items, split at once, or of the rows of a query, split by
-- the node that runs its first entry. Options: items or query, part_size, window_parts, detail,
-- flow, priority, completion_queue. It refuses a queue whose kind has handlers of its own,
-- items or options that are null, and a detail or flow with which no part could be pushed, or not the completion entry.
-- Locks: none that another session has; the batch is new.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS006 not allowed in this state, PS011
-- entries push one another without end, PS012 no such batch.
CREATE OR REPLACE FUNCTION penstock.create_batch(
    name    text,
    queue   text,
    options jsonb,
    reason  text  DEFAULT '',
    actor   text  DEFAULT NULL
) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
DECLARE
    q       penstock.queue := penstock.queue_row(queue);
    b       penstock.batch;
    unknown text;
    parts   bigint; -- 1 where only the query can tell
BEGIN
    IF q.kind NOT IN ('batch', 'task') THEN
        RAISE EXCEPTION 'queue "%" is of kind %, not batch', q.name, q.kind
            USING ERRCODE = 'PS002', HINT = 'Create a queue of kind batch (create_queue).';
    ELSIF q.refusal IS NOT NULL THEN
        PERFORM penstock.refuse_push(q); -- raises
    ELSIF jsonb_typeof(options) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'options of a batch are not a JSON object' USING ERRCODE = 'PS002';
    ELSIF penstock.has_wild_number(options) THEN
        RAISE EXCEPTION 'options of a batch have a number that is beyond 1e308, below 1e-308 or longer than 408 decimals'
            USING ERRCODE = 'PS002', HINT = 'Give such a number as a text.';
    END IF;
    SELECT k INTO unknown FROM jsonb_object_keys(options) k
     WHERE k NOT IN ('items', 'query', 'part_size', 'window_parts', 'detail', 'flow', 'priority', 'completion_queue');
    IF FOUND THEN
        RAISE EXCEPTION 'batch option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are items or query, part_size, window_parts, detail, flow, priority and completion_queue.';
    ELSIF num_nonnulls(options->>'items', options->>'query') <> 1 THEN
        RAISE EXCEPTION 'a batch needs items or a query, one of them' USING ERRCODE = 'PS002';
    ELSIF options->>'query' IS NOT NULL THEN
        PERFORM penstock.check_query(options->>'query');
    ELSIF (SELECT t.kind FROM penstock.queue t WHERE t.name = options->>'completion_queue') = 'webhook' THEN
        RAISE EXCEPTION 'completion_queue is a queue of callbacks' USING ERRCODE = 'PS002';
    END IF;
    b := jsonb_populate_record(NULL::penstock.batch, options);
    INSERT INTO penstock.batch AS x (queue_id, name, query, items, part_size, window_parts, detail, flow, priority,
                                     actor, completion_queue_id)
    VALUES (q.id, create_batch.name, b.query, b.items, coalesce(b.part_size, 100), coalesce(b.window_parts, 1000),
            coalesce(b.detail, '{}'),
            b.flow, b.priority, penstock.actor_name(create_batch.actor),
            CASE WHEN options->>'completion_queue' IS NOT NULL
                 THEN (penstock.queue_row(options->>'completion_queue')).id END)
    RETURNING * INTO b;
    parts := CASE WHEN b.items IS NULL THEN 1 ELSE (jsonb_array_length(b.items) + b.part_size - 1) / b.part_size END;
    IF parts > 0 THEN
        PERFORM penstock.check_batch_entry(q, b, 'part', jsonb_build_object('part', parts));
    END IF;
    PERFORM penstock.check_batch_entry(t, b, 'end',
                                       jsonb_build_object('status', 'cancelled', 'parts', parts, 'bad', parts))
       FROM penstock.queue t WHERE t.id = b.completion_queue_id;
    IF b.items IS NOT NULL THEN
        PERFORM penstock.split_batch(b.id);
    ELSE
        UPDATE penstock.batch x SET split_entry_id = penstock.push_batch_entry(q.name, b, 'split') WHERE x.id = b.id;
    END IF;
    PERFORM penstock.audit_log(create_batch.actor, 'create_batch', 'batch ' || b.id,
                               create_batch.reason, jsonb_build_object('queue', q.name, 'name', create_batch.name));
    RETURN b.id;
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range OR not_null_violation THEN
        RAISE EXCEPTION 'batch option is not valid: %', penstock.in_words(SQLERRM) USING ERRCODE = 'PS002';
END $$;

-- query_sql is the query of a batch as split_batch runs it: its rows as objects, numbered. As a
-- subquery it can neither change rows nor be followed by another statement.
-- Callers: check_query, split_batch.
CREATE OR REPLACE FUNCTION penstock.query_sql(query text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT format(E'SELECT to_jsonb(q) AS item, row_number() OVER () AS n FROM (%s\n) q', rtrim(query, E'; \t\r\n'))
$$;

-- check_query refuses a text that is not one SELECT, VALUES or TABLE, or that changes rows. For
-- tables that do not exist yet only the grammar is checked: names are resolved by the node that
-- splits, with its rights.
-- Locks: none but those of parsing the query.
-- Callers: create_batch.
-- SQLSTATE: PS002 the text is not one statement that only reads.
CREATE OR REPLACE FUNCTION penstock.check_query(query text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.check_statement(penstock.query_sql(query));
    PERFORM penstock.check_statement(query);
EXCEPTION
    WHEN undefined_table OR undefined_column OR undefined_function OR undefined_object OR invalid_schema_name THEN
        RETURN;
    WHEN OTHERS THEN
        RAISE EXCEPTION 'query is not one statement that reads: %', SQLERRM
            USING ERRCODE = 'PS002', HINT = 'Write one SELECT, without a semicolon in between.';
END $$;

-- split_batch makes the parts of a batch, all in one transaction: a crash leaves none, and a second
-- call starts over or finds them made. The query may end in a comment. The planner settings of
-- Penstock's own sessions, which leave the planner no choice, are reset for it.
-- Locks: the row of the batch (FOR UPDATE), then those of the batch's own query.
-- Callers: create_batch; pkg/batch.
-- SQLSTATE: PS002 a number of the query's rows, PS006 not allowed in this state, PS012 no such batch.
CREATE OR REPLACE FUNCTION penstock.split_batch(batch bigint) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'on'
    SET enable_hashjoin TO 'on'
    SET enable_mergejoin TO 'on'
    SET plan_cache_mode TO 'auto'
    AS $_$
DECLARE
    b penstock.batch := penstock.batch_row(batch, false);
BEGIN
    IF b.status <> 'splitting' THEN
        RETURN;
    END IF;
    EXECUTE format($q$
        INSERT INTO penstock.batch_part (batch_id, no, items)
        SELECT $1, (r.n - 1) / $2 + 1, jsonb_agg(r.item ORDER BY r.n)
          FROM (%s) r
         GROUP BY (r.n - 1) / $2$q$,
        CASE WHEN b.query IS NULL THEN 'SELECT i.item, i.n FROM jsonb_array_elements($3) WITH ORDINALITY i(item, n)'
             ELSE penstock.query_sql(b.query) END)
    USING b.id, b.part_size, b.items;
    IF b.query IS NOT NULL AND EXISTS (SELECT FROM penstock.batch_part p
                                       WHERE p.batch_id = b.id AND penstock.has_wild_number(p.items)) THEN
        RAISE EXCEPTION 'query of batch % returns a number that is beyond 1e308, below 1e-308 or longer than 408 decimals', b.id
            USING ERRCODE = 'PS002', HINT = 'Cast it to text in the query.';
    END IF;
    UPDATE penstock.batch SET status = 'running', items = NULL WHERE id = b.id;
END $_$;

-- finish_batch_part records the result of a part if the lock of its entry still carries the token,
-- and returns whether it did. The lock record is kept, so that the entry cannot be given to another
-- node before this commits. A part that was recorded is not run again, even if the node dies before
-- its entry ends. The part must be one of a batch of the queue, and its entry be under that lock:
-- the ids come from a payload, which any producer may have written.
-- Locks: the lock record (FOR KEY SHARE), then the row of the part.
-- Callers: pkg/batch.
CREATE OR REPLACE FUNCTION penstock.finish_batch_part(
    batch  bigint,
    part   integer,
    queue  integer,
    key    text,
    token  bigint,
    result jsonb
) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM penstock.lock l WHERE l.queue_id = queue AND l.lock_key = key
        AND l.token = finish_batch_part.token FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE penstock.batch_part p SET outcome = 'done', ended_at = clock_timestamp(), result = finish_batch_part.result
      FROM penstock.batch b, penstock.entry e
     WHERE p.batch_id = finish_batch_part.batch AND p.no = part AND p.ended_at IS NULL
       AND b.id = p.batch_id AND b.queue_id = finish_batch_part.queue
       AND e.queue_id = b.queue_id AND e.id = p.entry_id AND penstock.record_key(e.lock_key, e.id) = key;
    RETURN FOUND;
END $$;

-- record_in_batch records a failure that is about to be discarded in the batch of its entry, if it has one: reap_batch
-- would not find it. It returns false, and the failure has to wait, where the batch has yet to learn that its splitting
-- or its completion failed, and while another session has locked the part.
-- Locks: the row of failure (FOR UPDATE), then that of the part (FOR UPDATE SKIP LOCKED).
-- Callers: discard_failure, apply_operation.
CREATE OR REPLACE FUNCTION penstock.record_in_batch(queue integer, entry bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    f    penstock.failure;
    b    penstock.batch;
    part integer;
BEGIN
    SELECT * INTO f FROM penstock.failure x WHERE x.queue_id = queue AND x.entry_id = entry FOR UPDATE;
    IF f.name IS NULL OR f.name !~ '^batch:[0-9]{1,18}$' THEN
        RETURN true;
    END IF;
    SELECT * INTO b FROM penstock.batch x WHERE x.id = substr(f.name, 7)::bigint AND x.ended_at IS NULL;
    IF b.queue_id = queue AND b.split_entry_id = entry AND b.status = 'splitting'
       OR b.completion_queue_id = queue AND b.completion_entry_id = entry THEN
        RETURN false;
    END IF;
    SELECT p.no INTO part FROM penstock.batch_part p
     WHERE p.batch_id = b.id AND b.queue_id = queue AND p.ended_at IS NULL AND p.entry_id IS NOT NULL
       AND p.entry_id = entry;
    IF NOT FOUND THEN
        RETURN true;
    END IF;
    PERFORM FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.no = part FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE penstock.batch_part p SET outcome = 'failed', ended_at = clock_timestamp(), error = f.error
     WHERE p.batch_id = b.id AND p.no = part AND p.ended_at IS NULL AND p.entry_id = entry;
    RETURN true;
END $$;

-- reap_batch records the outcome of parts whose entry is gone without having recorded it: it
-- failed, was cancelled, or was run by a handler that does not know batches. An entry that left
-- neither result nor failure counts as done in a queue that keeps no results, and as failed in others.
-- Locks: the rows of the parts. The caller has the row of the batch.
-- Callers: step_batch.
CREATE OR REPLACE FUNCTION penstock.reap_batch(b penstock.batch) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    n integer;
BEGIN
    WITH gone AS MATERIALIZED (
        SELECT p.no, p.entry_id FROM penstock.batch_part p
         WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NOT NULL
           AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = b.queue_id AND e.id = p.entry_id)
    )
    UPDATE penstock.batch_part p
       SET ended_at = clock_timestamp(), result = w.result,
           outcome = CASE WHEN w.outcome IS NOT NULL THEN w.outcome WHEN kept.none THEN 'done' ELSE 'failed' END,
           error = CASE WHEN w.outcome IS NOT NULL OR kept.none THEN w.error
               ELSE 'its entry left neither a result nor a failure' END
      FROM gone g
     CROSS JOIN (SELECT result_retention = '0' AS none FROM penstock.queue WHERE id = b.queue_id) kept
      LEFT JOIN LATERAL (
           SELECT 'failed'::penstock.outcome AS outcome, NULL::jsonb AS result, f.error
             FROM penstock.failure f WHERE f.queue_id = b.queue_id AND f.entry_id = g.entry_id
           UNION ALL
           SELECT r.outcome, r.result, r.reason FROM penstock.result r
               WHERE r.queue_id = b.queue_id AND r.entry_id = g.entry_id
            LIMIT 1) w ON true
     WHERE p.batch_id = b.id AND p.no = g.no AND p.ended_at IS NULL;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- feed_batch pushes the next parts of a batch, as many as the headroom of its window and of the
-- capacities of its queue and flow: more than a capacity at once would be refused for ever.
-- Locks: those of push_many, then the rows of the parts. The caller has the row of the batch.
-- Callers: step_batch.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.feed_batch(b penstock.batch) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    headroom integer := b.window_parts - (SELECT count(*) FROM penstock.batch_part p
                                          WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NOT NULL);
    next integer[];
    made bigint[];
BEGIN
    headroom := least(headroom, (SELECT penstock.queue_capacity(q) - (d.counted + (penstock.counter('accepted', q.id) - d.accepted) - (penstock.counter('removed', q.id) - d.removed))
                           FROM penstock.queue q JOIN penstock.depth d ON d.queue_id = q.id WHERE q.id = b.queue_id));
    headroom := least(headroom, (SELECT q.capacity_per_flow - f.entries
                           FROM penstock.queue q
                          CROSS JOIN LATERAL (SELECT coalesce(b.flow, '') AS flow
                                              WHERE coalesce(b.flow, '') <> '' OR q.shards = 1
                                               UNION ALL -- of shards the fullest counts
                                              SELECT penstock.shard_name(s) FROM generate_series(0, q.shards - 1) s
                                               WHERE coalesce(b.flow, '') = '' AND q.shards > 1) w
                          CROSS JOIN LATERAL (SELECT count(*) AS entries
                                                FROM (SELECT FROM penstock.entry e WHERE e.queue_id = q.id
                                                      AND e.flow = w.flow
                                                       LIMIT q.capacity_per_flow) e) f
                          WHERE q.id = b.queue_id AND q.capacity_per_flow IS NOT NULL ORDER BY f.entries DESC LIMIT 1));
    next := ARRAY(SELECT p.no FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.ended_at IS NULL
                  AND p.entry_id IS NULL
                   ORDER BY p.no LIMIT greatest(headroom, 0));
    IF cardinality(next) = 0 THEN
        RETURN 0;
    END IF;
    SELECT p.ids INTO made
      FROM penstock.push_many((SELECT name FROM penstock.queue WHERE id = b.queue_id),
               ARRAY(SELECT penstock.batch_payload(b, 'part', jsonb_build_object('part', n))
                     FROM unnest(next) WITH ORDINALITY u(n, i) ORDER BY i),
               flows => array_fill(b.flow, ARRAY[cardinality(next)]),
               priorities => array_fill(b.priority, ARRAY[cardinality(next)]),
               names => array_fill('batch:' || b.id, ARRAY[cardinality(next)]), inside => true) p;
    UPDATE penstock.batch_part p SET entry_id = u.id
      FROM unnest(next, made) u(no, id) WHERE p.batch_id = b.id AND p.no = u.no;
    RETURN cardinality(next);
END $$;

-- end_waiting_parts ends up to 10,000 parts that are not in the queue, and returns how many.
-- Locks: the rows of the parts. The caller has the row of the batch.
-- Callers: step_batch.
CREATE OR REPLACE FUNCTION penstock.end_waiting_parts(b penstock.batch, how penstock.outcome, why text) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    n integer;
BEGIN
    UPDATE penstock.batch_part p SET outcome = how, ended_at = clock_timestamp(), error = why
     WHERE p.batch_id = b.id AND p.no = ANY (ARRAY(SELECT w.no FROM penstock.batch_part w
            WHERE w.batch_id = b.id AND w.ended_at IS NULL AND w.entry_id IS NULL ORDER BY w.no LIMIT 10000));
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- complete_batch pushes the completion entry, once: the row of the batch names that entry from then
-- on. Where the push is refused for good the batch ends without one: as failed, unless it was cancelled. The counts of
-- its parts are kept: they change no more, but by a retry of the batch.
-- Locks: those of push_many. The caller has the row of the batch.
-- Callers: step_batch.
-- SQLSTATE: PS001 no such queue, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.complete_batch(b penstock.batch) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    verdict text;
    bad     bigint := (SELECT count(*) FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.outcome <> 'done');
    total   bigint := (SELECT count(*) FROM penstock.batch_part p WHERE p.batch_id = b.id);
    target  text := (SELECT name FROM penstock.queue WHERE id = b.completion_queue_id);
    pushed  bigint;
    flaw    text;
    refused text;
BEGIN
    verdict := CASE WHEN b.cancelled_by IS NOT NULL THEN 'cancelled' WHEN bad > 0 OR b.problem IS NOT NULL THEN 'failed'
        ELSE 'done' END;
    flaw := CASE WHEN bad > 0 AND verdict = 'failed' THEN bad || ' of ' || total || ' parts did not end well' END;
    IF target IS NOT NULL THEN
        BEGIN
            pushed := penstock.push_batch_entry(target, b, 'end',
                                                jsonb_build_object('status', verdict, 'parts', total, 'bad', bad));
        EXCEPTION WHEN SQLSTATE 'PS002' OR SQLSTATE 'PS003' THEN
            refused := 'completion: ' || SQLERRM;
            verdict := CASE verdict WHEN 'done' THEN 'failed' ELSE verdict END;
        END;
    END IF;
    UPDATE penstock.batch
       SET status = CASE WHEN pushed IS NULL THEN verdict ELSE 'ending' END, completion_entry_id = pushed,
           problem = nullif(concat_ws('; ', coalesce(problem, flaw), refused), ''),
           ended_at = CASE WHEN pushed IS NULL THEN clock_timestamp() END,
           parts = total, bad_parts = bad
     WHERE id = b.id;
END $$;

-- need_no_completions raises an error if open batches push their completion entries to a queue that is to be dropped.
-- With force it locks them: a step has the row of a batch before it locks tables of entries, as the drop does.
-- Locks: the rows of these batches in order of id (FOR UPDATE).
-- Callers: drop_queue.
-- SQLSTATE: PS006 a batch needs the queue.
CREATE OR REPLACE FUNCTION penstock.need_no_completions(q penstock.queue, force boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    b penstock.batch;
BEGIN
    FOR b IN SELECT * FROM penstock.batch x
              WHERE x.ended_at IS NULL AND x.completion_queue_id = q.id AND x.queue_id <> q.id ORDER BY x.id FOR UPDATE
    LOOP
        IF NOT force THEN
            RAISE EXCEPTION 'queue "%" is the completion_queue of batch %, which has not ended', q.name, b.id
                USING ERRCODE = 'PS006',
                      HINT = 'Wait until it has, or drop with force: the batch ends as failed.';
        END IF;
    END LOOP;
END $$;

-- keep_completions makes open batches end as failed whose completion queue is dropped: they would end as done without.
-- Locks: the rows of these batches, in a transaction that has the row of the queue.
-- Callers: trigger keep_completions.
CREATE OR REPLACE FUNCTION penstock.keep_completions() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE penstock.batch b
       SET problem = concat_ws('; ', b.problem, format('completion: queue "%s" was dropped', OLD.name))
     WHERE b.ended_at IS NULL AND b.completion_queue_id = OLD.id AND b.queue_id <> OLD.id;
    RETURN OLD;
END $$;

-- undone_step returns why the entry of a split or a completion ended without having done its step: the error of its
-- failure, or that it was cancelled or has expired. Null: it was done, or no outcome of it is kept.
-- Callers: end_batch, step_batch.
CREATE OR REPLACE FUNCTION penstock.undone_step(queue integer, entry bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT f.error FROM penstock.failure f WHERE f.queue_id = queue AND f.entry_id = entry
    UNION ALL
    SELECT concat_ws(': ', CASE r.outcome WHEN 'expired' THEN 'its entry has expired'
                           ELSE 'its entry was cancelled' END, nullif(r.reason, ''))
      FROM penstock.result r
     WHERE r.queue_id = queue AND r.entry_id = entry AND r.outcome <> 'done'
     LIMIT 1
$$;

-- end_batch records that the completion entry has ended, and with it the batch: as failed where it did not complete it.
-- Locks: none further. The caller has the row of the batch.
-- Callers: step_batch.
CREATE OR REPLACE FUNCTION penstock.end_batch(b penstock.batch) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    undone text := penstock.undone_step(b.completion_queue_id, b.completion_entry_id);
BEGIN
    UPDATE penstock.batch
       SET status = CASE WHEN b.cancelled_by IS NOT NULL THEN 'cancelled' WHEN b.problem IS NOT NULL
           OR undone IS NOT NULL THEN 'failed' ELSE 'done' END,
           problem = coalesce(b.problem, 'completion: ' || undone), ended_at = clock_timestamp()
     WHERE id = b.id;
END $$;

-- step_batch does the next step of a batch: it records parts that ended, pushes the next ones or ends
-- up to 10,000 of those that a cancel leaves, or completes the batch. Parts whose push is refused for good, which a
-- later step would try again for ever, end as failed with the error. It returns how many parts it
-- pushed, ended or found ended. A batch that another session has locked is skipped.
-- Locks: the row of the batch (FOR UPDATE SKIP LOCKED), then rows of its parts, then those of
-- push_many.
-- Callers: pkg/batch.
-- SQLSTATE: PS001 no such queue, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.step_batch(batch bigint) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    b penstock.batch;
    n integer := 0;
BEGIN
    SELECT * INTO b FROM penstock.batch x WHERE x.id = batch AND x.ended_at IS NULL FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    ELSIF b.status = 'splitting' AND NOT EXISTS (SELECT FROM penstock.entry e
                                                 WHERE e.queue_id = b.queue_id AND e.id = b.split_entry_id) THEN
        -- Splitting commits before its entry ends; the batch was read after that. So it went wrong, or did not run.
        UPDATE penstock.batch
           SET problem = 'split: ' || coalesce(penstock.undone_step(b.queue_id, b.split_entry_id),
                                               'its entry was cancelled')
         WHERE id = b.id AND status = 'splitting' RETURNING * INTO b;
        IF FOUND THEN
            PERFORM penstock.complete_batch(b);
        END IF;
    ELSIF b.status = 'running' THEN
        n := penstock.reap_batch(b);
        IF b.cancelled_by IS NOT NULL THEN
            n := n + penstock.end_waiting_parts(b, 'cancelled', b.cancelled_reason);
        END IF;
        IF NOT EXISTS (SELECT FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.ended_at IS NULL) THEN
            PERFORM penstock.complete_batch(b);
        ELSIF b.cancelled_by IS NULL AND (b.paused_at IS NULL OR NOT penstock.paused_until(b.paused_until)) THEN
            BEGIN
                n := n + penstock.feed_batch(b);
            EXCEPTION WHEN SQLSTATE 'PS002' OR SQLSTATE 'PS003' THEN
                UPDATE penstock.batch x SET problem = coalesce(x.problem, 'parts cannot be pushed: ' || SQLERRM)
                 WHERE x.id = b.id;
                n := n + penstock.end_waiting_parts(b, 'failed', SQLERRM);
            END;
        END IF;
    ELSIF b.status = 'ending' AND NOT EXISTS (
          SELECT FROM penstock.entry e WHERE e.queue_id = b.completion_queue_id AND e.id = b.completion_entry_id) THEN
        PERFORM penstock.end_batch(b);
    END IF;
    RETURN n;
END $$;

-- ended_step returns why the failure of an entry cannot be retried by itself: the entry is the split, a
-- part or the completion of a batch that has recorded its end, or a line of a batch of requests that has
-- put the failure into its error file. Null: it can. Handlers of batches find
-- the same, for a step that ends after this was read. Anybody may push a payload with a batch's number, or an entry
-- with its name: the rows of the batch decide.
-- Callers: retry_failure, start_operation, apply_operation.
CREATE OR REPLACE FUNCTION penstock.ended_step(
    queue   integer,
    wanted  bigint,
    payload jsonb,
    name    text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    step   text := payload->>'step';
    number bigint := CASE WHEN payload->>'batch' ~ '^[0-9]{1,18}$' THEN payload->>'batch' END;
    part   integer := CASE WHEN payload->>'part' ~ '^[0-9]{1,9}$' THEN payload->>'part' END;
BEGIN
    IF left(name, 6) = 'batch_' THEN -- and the line. Those that are entries are the first ones, up to number fed.
        RETURN (SELECT format('entry %s is a line of batch %s and in its error file: the client sends it again',
                              wanted, g.id)
                  FROM penstock.gateway_batch g
                 WHERE g.id = split_part(name, '/', 1) AND g.queue_id = queue
                   AND NOT EXISTS (SELECT FROM penstock.gateway_batch_line l
                                    WHERE l.batch_id = g.id AND l.line <= g.fed AND l.entry_id = wanted));
    ELSIF number IS NULL THEN
        RETURN NULL;
    ELSIF step = 'part' THEN
        RETURN (SELECT format('part %s of batch %s has ended as %s (%s): penstock batch retry %s runs it again', p.no, b.id, p.outcome, coalesce(p.error, ''), b.id)
                  FROM penstock.batch b
                  JOIN penstock.batch_part p ON p.batch_id = b.id
                 WHERE b.id = number AND b.queue_id = queue AND p.no = part AND p.entry_id = wanted
                   AND p.outcome <> 'done');
    ELSIF step = 'split' THEN
        RETURN (SELECT format('batch %s has ended as %s (%s): create it anew', b.id, b.status, b.problem)
                  FROM penstock.batch b
                 WHERE b.id = number AND b.queue_id = queue AND b.split_entry_id = wanted AND b.ended_at IS NOT NULL
                   AND b.problem LIKE 'split: %');
    ELSIF step = 'end' THEN
        RETURN (SELECT format('batch %s has ended as %s (%s): penstock batch retry %s runs its completion again', b.id, b.status, coalesce(b.problem, ''), b.id)
                  FROM penstock.batch b
                 WHERE b.id = number AND b.completion_queue_id = queue AND b.completion_entry_id = wanted
                   AND b.ended_at IS NOT NULL);
    END IF;
    RETURN NULL;
END $$;

-- Operators -----------------------------------------------------------------------------------------------------------

-- withdraw_batch removes the entries of parts that do not run from the queue; the parts wait again.
-- Locks: for each part in order of its number, those of take_entry, then the row of the part. The
-- caller has the row of the batch.
-- Callers: pause_batch.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.withdraw_batch(b penstock.batch, why text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    p record;
    e penstock.entry;
BEGIN
    FOR p IN SELECT x.no, x.entry_id FROM penstock.batch_part x WHERE x.batch_id = b.id AND x.ended_at IS NULL
        AND x.entry_id IS NOT NULL ORDER BY x.no LOOP
        e := penstock.take_entry(b.queue_id, p.entry_id);
        IF e.id IS NOT NULL THEN
            PERFORM penstock.end_entry(e, 'cancelled', why);
            UPDATE penstock.batch_part x SET entry_id = NULL WHERE x.batch_id = b.id AND x.no = p.no
                AND x.ended_at IS NULL;
        END IF;
    END LOOP;
END $$;

-- pause_batch lets running parts end and starts no others. It replaces a pause in force, and returns that
-- (replaced_pause).
-- Locks: the row of the batch (FOR UPDATE), then those of withdraw_batch.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS006 not allowed in this state, PS011
-- entries push one another without end, PS012 no such batch.
CREATE OR REPLACE FUNCTION penstock.pause_batch(
    batch  bigint,
    reason text        DEFAULT '',
    actor  text        DEFAULT NULL,
    until  timestamptz DEFAULT NULL
) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    b        penstock.batch;
    replaced jsonb;
BEGIN
    PERFORM penstock.need_read_committed();
    PERFORM penstock.check_until(until);
    b := penstock.batch_row(batch);
    replaced := penstock.replaced_pause(b.paused_at, b.paused_by, b.paused_reason, b.paused_until);
    UPDATE penstock.batch SET paused_at = clock_timestamp(), paused_by = penstock.actor_name(pause_batch.actor),
        paused_reason = coalesce(reason, ''),
                              paused_until = until
     WHERE id = b.id;
    PERFORM penstock.withdraw_batch(b, 'the batch was paused');
    PERFORM penstock.audit_pause(actor, 'pause_batch', 'batch ' || batch, reason, until, replaced);
    RETURN replaced;
END $$;

-- resume_batch ends the pause of a batch.
-- Locks: the row of the batch (FOR UPDATE).
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS006 not allowed in this state, PS012 no such batch.
CREATE OR REPLACE FUNCTION penstock.resume_batch(
    batch  bigint,
    reason text   DEFAULT '',
    actor  text   DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    b penstock.batch := penstock.batch_row(batch);
BEGIN
    UPDATE penstock.batch SET paused_at = NULL, paused_by = NULL, paused_reason = NULL, paused_until = NULL
        WHERE id = b.id;
    PERFORM penstock.audit_log(actor, 'resume_batch', 'batch ' || batch, reason);
END $$;

-- cancel_batch ends the parts that do not run, with the next step, and requests the end of those
-- that do. The completion entry still comes, with status cancelled. One that was pushed already says how the batch
-- ended: from then on it alone can be cancelled.
-- Locks: the row of the batch (FOR UPDATE), then those of cancel_waiting for each part.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS006 not allowed in this state, PS011
-- entries push one another without end, PS012 no such batch, 55P03 a compaction of a part's lock key does not end.
CREATE OR REPLACE FUNCTION penstock.cancel_batch(
    batch  bigint,
    reason text   DEFAULT '',
    actor  text   DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    b penstock.batch;
BEGIN
    PERFORM penstock.need_read_committed();
    b := penstock.batch_row(batch);
    IF b.status = 'ending' AND b.cancelled_by IS NULL THEN
        RAISE EXCEPTION 'batch % is ending: all its parts have ended', b.id USING ERRCODE = 'PS006', DETAIL = b.status,
            HINT = format('Cancel its completion, entry %s.', b.completion_entry_id);
    END IF;
    UPDATE penstock.batch SET cancelled_by = penstock.actor_name(cancel_batch.actor),
        cancelled_reason = coalesce(reason, '') WHERE id = b.id;
    PERFORM penstock.cancel_waiting(b.queue_id, p.entry_id, reason, penstock.actor_name(actor))
       FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NOT NULL;
    IF b.status = 'splitting' THEN
        PERFORM penstock.cancel_waiting(b.queue_id, b.split_entry_id, reason, penstock.actor_name(actor));
    END IF;
    PERFORM penstock.audit_log(actor, 'cancel_batch', 'batch ' || batch, reason);
END $$;

-- retry_batch runs the parts of an ended batch again that did not end as done, and then the
-- completion entry once more. A pause from before its end is over. It returns the number of parts, 0 where the
-- completion alone went wrong.
-- Locks: the row of the batch (FOR UPDATE), then the rows of its parts.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS012 no such batch, PS006 the batch has not ended, is done or was never split.
CREATE OR REPLACE FUNCTION penstock.retry_batch(
    batch  bigint,
    reason text   DEFAULT '',
    actor  text   DEFAULT NULL
) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    b penstock.batch := penstock.batch_row(batch, false);
    n integer;
BEGIN
    IF b.ended_at IS NULL THEN
        RAISE EXCEPTION 'batch % has not ended', batch USING ERRCODE = 'PS006',
            HINT = 'Wait until it has, or cancel it.';
    ELSIF b.status = 'done' THEN
        RAISE EXCEPTION 'batch % is done: nothing of it went wrong', batch USING ERRCODE = 'PS006', DETAIL = b.status,
            HINT = 'Create another one to run it again.';
    END IF;
    UPDATE penstock.batch_part p SET outcome = NULL, ended_at = NULL, entry_id = NULL, error = NULL
        WHERE p.batch_id = b.id AND p.outcome <> 'done';
    GET DIAGNOSTICS n = ROW_COUNT;
    IF b.problem LIKE 'split: %' -- see ended_step
       OR EXISTS (SELECT FROM penstock.batch_part p WHERE p.batch_id = b.id) -- parts are deleted in their order
          AND NOT EXISTS (SELECT FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.no = 1) THEN
        RAISE EXCEPTION 'batch % was never split, or its parts are being deleted', batch USING ERRCODE = 'PS006',
            HINT = 'Create it anew.';
    END IF;
    UPDATE penstock.batch
       SET status = 'running', ended_at = NULL, completion_entry_id = NULL, problem = NULL,
           cancelled_by = NULL, cancelled_reason = NULL, paused_at = NULL, paused_by = NULL, paused_reason = NULL,
           paused_until = NULL, parts = NULL, bad_parts = NULL
     WHERE id = b.id;
    PERFORM penstock.audit_log(actor, 'retry_batch', 'batch ' || batch, reason, jsonb_build_object('parts', n));
    RETURN n;
END $$;
