-- +goose Up

-- What a node or a leader could not read, or would choke on, is refused where it is set. One queue with a retry policy
-- that is no policy kept every node from reading any queue; one with a retention of 300,000 years kept every partition.

-- retry_flaw says what is wrong with a retry policy; null: nothing.
-- +goose StatementBegin
CREATE FUNCTION penstock.retry_flaw(policy jsonb, within text DEFAULT 'retry') RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(
        (SELECT within || ' is not a JSON object' WHERE jsonb_typeof(policy) <> 'object'),
        (SELECT within || '.' || f.key || ' ' || f.flaw
           FROM (SELECT e.key, CASE
                     WHEN e.key = 'max_attempts' THEN CASE WHEN n.text !~ '^\d{1,5}$' OR n.text::numeric > 30000 THEN 'is not a whole number from 0 to 30000' END
                     WHEN e.key IN ('base', 'cap') THEN CASE WHEN n.text !~ '^[\d.]+$' OR n.text::numeric > 315360000 THEN 'is not a number of seconds from 0 to ten years' END
                     WHEN e.key = 'factor' THEN CASE WHEN n.text !~ '^[\d.]+$' OR n.text::numeric NOT BETWEEN 1 AND 1000 AND n.text::numeric <> 0 THEN 'is not a number from 1 to 1000' END
                     WHEN e.key = 'jitter' THEN CASE WHEN n.text !~ '^[\d.]+$' OR n.text::numeric > 1 THEN 'is not a number from 0 to 1' END
                     WHEN e.key = 'classes' AND within = 'retry' THEN CASE WHEN jsonb_typeof(e.value) <> 'object' THEN 'is not a JSON object' END
                     ELSE 'does not exist; there are max_attempts, base, cap, factor, jitter and, for errors of a class, classes' END AS flaw
                   FROM jsonb_each(CASE jsonb_typeof(policy) WHEN 'object' THEN policy END) e
                  CROSS JOIN LATERAL (SELECT CASE jsonb_typeof(e.value) WHEN 'number' THEN e.value::text ELSE '' END AS text) n) f
          WHERE f.flaw IS NOT NULL ORDER BY f.key LIMIT 1),
        (SELECT penstock.retry_flaw(c.value, within || '.classes.' || c.key)
           FROM jsonb_each(CASE WHEN within = 'retry' AND jsonb_typeof(policy->'classes') = 'object' THEN policy->'classes' END) c
          WHERE penstock.retry_flaw(c.value, within || '.classes.' || c.key) IS NOT NULL ORDER BY c.key LIMIT 1))
$$;
-- +goose StatementEnd

-- check_queue names the setting that is wrong, and what it may be.
-- +goose StatementBegin
CREATE FUNCTION penstock.check_queue() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    flaw text := penstock.retry_flaw(NEW.retry);
BEGIN
    BEGIN
        PERFORM CASE WHEN left(NEW.grouping, 1) = '$' THEN NEW.grouping::jsonpath END;
    EXCEPTION WHEN OTHERS THEN
        flaw := format('grouping is not a jsonpath: %s', SQLERRM);
    END;
    flaw := coalesce(flaw, (
        SELECT v.flaw FROM (VALUES
            (NEW.priority > 0 AND NEW.priority <= 1000, 'priority is not above 0 and at most 1000'),
            (NEW.entry_priority BETWEEN 0 AND 9, 'entry_priority is not from 0 to 9'),
            (NEW.algorithm IN ('fair', 'fifo'), 'algorithm is not fair or fifo'),
            (NEW.merge IN ('first', 'last', 'object', 'array'), 'merge is not first, last, object or array'),
            (NEW.grouping <> '', 'grouping is empty; leave it out for entries without a key'),
            (NEW.application <> '', 'application is empty'),
            (NEW.max_concurrent > 0, 'max_concurrent is not at least 1; leave it out for no bound, pause the queue to stop it'),
            (NEW.max_concurrent_per_node > 0, 'max_concurrent_per_node is not at least 1; leave it out for no bound'),
            (NEW.capacity > 0, 'capacity is not at least 1; leave it out for no bound'),
            (NEW.crash_limit > 0, 'crash_limit is not at least 1'),
            (NEW.quantum_count BETWEEN 1 AND 10000, 'quantum_count is not from 1 to 10000'),
            (NEW.quantum_time > '0' AND NEW.quantum_time <= '1 day', 'quantum_time is not above 0 and at most 1 day'),
            (NEW.run_timeout > '0' AND NEW.run_timeout <= '10 years', 'run_timeout is not above 0 and at most 10 years; leave it out for none'),
            (NEW.payload_limit BETWEEN 1 AND 16777216, 'payload_limit is not from 1 to 16777216 bytes'),
            (NEW.result_retention BETWEEN '0' AND '10 years', 'result_retention is not from 0 to 10 years'),
            (NEW.failure_retention BETWEEN '1 day' AND '10 years', 'failure_retention is not from 1 day to 10 years')) v(fine, flaw)
         WHERE NOT v.fine LIMIT 1));
    IF flaw IS NOT NULL THEN
        RAISE EXCEPTION 'setting of queue "%" is not valid: %', NEW.name, flaw USING ERRCODE = 'PS002';
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd

CREATE TRIGGER check_queue BEFORE INSERT OR UPDATE OF priority, entry_priority, algorithm, merge, "grouping", application, max_concurrent,
    max_concurrent_per_node, capacity, crash_limit, quantum_count, quantum_time, run_timeout, payload_limit, result_retention, failure_retention, retry
    ON penstock.queue FOR EACH ROW EXECUTE FUNCTION penstock.check_queue();

-- A rate that is no number would fill its buckets with what is none.
ALTER TABLE penstock."limit" ADD CONSTRAINT limit_finite_check CHECK (rate < 'Infinity' AND burst < 'Infinity');

-- now() is when the transaction began: a statement that ran for an hour in the transaction of its end would have ended
-- before it began to work, and a nominal time of cron that came during the run would not have been skipped.
ALTER TABLE penstock.result ALTER finished_at SET DEFAULT clock_timestamp();
ALTER TABLE penstock.failure ALTER failed_at SET DEFAULT clock_timestamp();

-- create_batch splits a set that is given, or has a node split the rows of a query. As before, and it refuses a queue
-- whose kind has handlers of its own, and items or options that are null.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.create_batch(name text, queue text, options jsonb, reason text DEFAULT '', actor text DEFAULT current_user) RETURNS bigint
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
        RAISE EXCEPTION 'batch option is not valid: %', SQLERRM USING ERRCODE = 'PS002';
END $$;
-- +goose StatementEnd

-- split_batch makes the parts. As before; the query may end in a comment.
-- +goose StatementBegin
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
             ELSE format('SELECT to_jsonb(q) AS item, row_number() OVER () AS n FROM (%s' || E'\n' || ') q', rtrim(b.query, E'; \n')) END)
    USING b.id, b.part_size, b.items;
    UPDATE penstock.batch SET status = 'running', items = NULL WHERE id = b.id;
END $_$;
-- +goose StatementEnd

-- retry_batch runs the parts of an ended batch again that went wrong, and then what completes it. As before, and a
-- batch of which nothing went wrong is left alone.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.retry_batch(batch bigint, reason text DEFAULT '', actor text DEFAULT current_user) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    b penstock.batch := penstock.batch_row(batch, false);
    n integer;
BEGIN
    IF b.ended_at IS NULL THEN
        RAISE EXCEPTION 'batch % has not ended', batch USING ERRCODE = 'PS006', HINT = 'Wait until it has, or cancel it.';
    ELSIF b.status = 'done' THEN
        RAISE EXCEPTION 'batch % is done: nothing of it went wrong', batch USING ERRCODE = 'PS006', DETAIL = b.status, HINT = 'Create another one to run it again.';
    END IF;
    UPDATE penstock.batch_part p SET outcome = NULL, ended_at = NULL, entry_id = NULL, error = NULL WHERE p.batch_id = b.id AND p.outcome <> 'done';
    GET DIAGNOSTICS n = ROW_COUNT;
    IF NOT EXISTS (SELECT FROM penstock.batch_part p WHERE p.batch_id = b.id) THEN
        RAISE EXCEPTION 'batch % was never split', batch USING ERRCODE = 'PS006', HINT = 'Create it anew.';
    END IF;
    UPDATE penstock.batch SET status = 'running', ended_at = NULL, completion_entry_id = NULL, problem = NULL, cancelled_by = NULL, cancelled_reason = NULL
     WHERE id = b.id;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(actor, current_user), 'retry_batch', 'batch ' || batch, reason, jsonb_build_object('parts', n));
    RETURN n;
END $$;
-- +goose StatementEnd

-- watch records changes of a table. As before; the functions hold up whatever names columns have.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.watch(watched regclass, queue text, columns text[] DEFAULT NULL, keys text[] DEFAULT NULL, reason text DEFAULT '', actor text DEFAULT current_user) RETURNS void
    LANGUAGE plpgsql
    AS $_$
DECLARE
    q     penstock.queue := penstock.queue_row(queue);
    op    text;
    body  text;
    wrong text;
BEGIN
    IF q.kind <> 'change_log' THEN
        RAISE EXCEPTION 'queue "%" is of kind %, not change_log', q.name, q.kind
            USING ERRCODE = 'PS002', HINT = 'Make one: SELECT penstock.create_queue(''changes'', ''{"kind": "change_log", "grouping": "object"}'').';
    END IF;
    IF EXISTS (SELECT FROM pg_class c WHERE c.oid = watched AND c.relnamespace = 'penstock'::regnamespace) THEN
        RAISE EXCEPTION 'table % is one of Penstock''s own', watched USING ERRCODE = 'PS002', HINT = 'Only tables of applications can be watched.';
    END IF;
    keys := coalesce(keys, (SELECT array_agg(a.attname::text ORDER BY array_position(i.indkey::int[], a.attnum::int))
                              FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
                             WHERE i.indrelid = watched AND i.indisprimary));
    IF coalesce(cardinality(keys), 0) = 0 THEN
        RAISE EXCEPTION 'table % has no primary key', watched USING ERRCODE = 'PS002', HINT = 'Say which columns identify a row: keys => ARRAY[''...''].';
    END IF;
    columns := coalesce(columns, ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = watched AND a.attnum > 0 AND NOT a.attisdropped
                                        AND a.attname <> ALL (keys) ORDER BY a.attnum));
    SELECT c INTO wrong FROM unnest(columns || keys) c
     WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = watched AND a.attname = c AND a.attnum > 0 AND NOT a.attisdropped) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'table % has no column "%"', watched, wrong USING ERRCODE = 'PS002';
    ELSIF cardinality(columns) = 0 THEN
        columns := keys;
    END IF;
    PERFORM penstock.unwatch(watched, queue, reason, actor);
    FOREACH op IN ARRAY ARRAY['insert', 'update', 'delete', 'truncate'] LOOP
        body := format('watch_%s_%s_%s', watched::oid, q.id, op);
        EXECUTE format($f$CREATE FUNCTION penstock.%I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS %L $f$, body, format($b$
-- Written by penstock.watch.
DECLARE
    part record;
BEGIN
    IF current_setting('penstock.depth', true) <> '' THEN
        PERFORM penstock.check_depth(%L);
    END IF;
    FOR part IN SELECT array_agg(c.change) AS changes
                  FROM (SELECT row_number() OVER () AS n, c.change FROM (%s) c) c GROUP BY (c.n - 1) / 10000 ORDER BY (c.n - 1) / 10000
    LOOP
        PERFORM penstock.push_many(%L, part.changes);
    END LOOP;
    RETURN NULL;
END $b$, format('queue "%s" by a change of %s', q.name, watched), penstock.watch_changes_sql(watched, op, columns, keys), q.name));
        EXECUTE format('CREATE TRIGGER %I AFTER %s ON %s %s FOR EACH STATEMENT EXECUTE FUNCTION penstock.%I()',
                       'penstock_' || q.id || '_' || op, op, watched,
                       CASE op WHEN 'insert' THEN 'REFERENCING NEW TABLE AS new_rows' WHEN 'delete' THEN 'REFERENCING OLD TABLE AS old_rows'
                               WHEN 'update' THEN 'REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows' ELSE '' END, body);
    END LOOP;
    INSERT INTO penstock.watch (watched, queue_id, columns, keys, actor) VALUES (watched, q.id, columns, keys, coalesce(actor, current_user));
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(actor, current_user), 'watch', watched::text, reason, jsonb_build_object('queue', q.name, 'columns', columns, 'keys', keys));
END $_$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.watch_changes_sql(watched regclass, op text, columns text[], keys text[]) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $_$
DECLARE
    -- Names may hold a per cent sign, which format would read.
    label   text := (SELECT replace(quote_literal(n.nspname || '.' || c.relname), '%', '%%') FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = watched);
    object  text := CASE cardinality(keys) WHEN 1 THEN format('to_jsonb(%%1$s.%I)', replace(keys[1], '%', '%%'))
                    ELSE format('jsonb_build_object(%s)', (SELECT string_agg(format('%L, %%1$s.%I', k, k), ', ') FROM unnest(keys) x, replace(x, '%', '%%') k)) END;
    whole   text := format('jsonb_build_object(%s)', (SELECT string_agg(format('%L, penstock.watch_value(to_jsonb(%%1$s.%I))', c, c), ', ') FROM unnest(columns) x, replace(x, '%', '%%') c));
    shape   text := 'SELECT jsonb_build_object(''table'', ' || label || ', ''object'', %s, ''field'', %s, ''from'', %s, ''to'', %s) AS change';
    came    text := format(shape, format(object, 'n'), 'NULL', 'NULL', format(whole, 'n'));
    went    text := format(shape, format(object, 'o'), 'NULL', format(whole, 'o'), 'NULL');
    field   text := format(shape, format(object, 'n'), 'f.field', 'penstock.watch_value(f.was)', 'penstock.watch_value(f.became)');
BEGIN
    RETURN CASE op
        WHEN 'insert' THEN came || ' FROM new_rows n'
        WHEN 'delete' THEN went || ' FROM old_rows o'
        WHEN 'truncate' THEN format(shape, 'NULL', 'NULL', 'NULL', 'NULL')
        ELSE format($q$SELECT c.change
  FROM (SELECT true AS penstock_here, * FROM old_rows) o FULL JOIN (SELECT true AS penstock_here, * FROM new_rows) n ON %s
 CROSS JOIN LATERAL (
       %s FROM (VALUES %s) f(field, was, became) WHERE o.penstock_here AND n.penstock_here AND f.was IS DISTINCT FROM f.became
       UNION ALL %s WHERE n.penstock_here IS NULL
       UNION ALL %s WHERE o.penstock_here IS NULL) c$q$,
            -- The operators of types that extensions brought are not on the search path of the trigger.
            (SELECT string_agg(format(CASE WHEN t.typnamespace = 'pg_catalog'::regnamespace AND t.typname <> 'json' THEN 'n.%1$I = o.%1$I'
                                           ELSE 'to_jsonb(n.%1$I) = to_jsonb(o.%1$I)' END, a.attname), ' AND ')
               FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid WHERE a.attrelid = watched AND a.attname = ANY (keys)), field,
            (SELECT string_agg(format('(%L, to_jsonb(o.%I), to_jsonb(n.%I))', c, c, c), ', ') FROM unnest(columns) c), went, came)
    END;
END $_$;
-- +goose StatementEnd
