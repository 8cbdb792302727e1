-- Bulk operations on entries and failures.

-- operation_source is the table that a verb works on, as a subquery with the columns that a filter
-- may name. Failures past their retention are not in it, as in lists: they are deleted by then, or up to a day later.
-- Callers: count_first, count_matching_to, start_operation, step_operation.
CREATE OR REPLACE FUNCTION penstock.operation_source(q penstock.queue, verb text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN verb IN ('retry_failures', 'discard_failures')
           THEN format('(SELECT entry_id AS id, failed_at AS since, name, lock_key, flow, class, fingerprint, payload
                           FROM penstock.failure
                          WHERE queue_id = %s AND penstock.kept(failed_at, %L)) s', q.id, q.failure_retention)
           ELSE format('(SELECT id, created_at AS since, name, lock_key, flow, priority
                           FROM penstock.%I WHERE queue_id = %s) s', 'entry_' || q.name, q.id) END
$$;

-- operation_filter turns {"name": "mail", "older_than": "2 days"} into a condition. Values are
-- quoted; a key that does not exist is refused, so that a misspelt filter does not match
-- everything. {"all": true} does.
-- Callers: count_first, count_matching_to, start_operation, step_operation.
-- SQLSTATE: PS002 the verb or a filter does not exist, or the filter is empty.
CREATE OR REPLACE FUNCTION penstock.operation_filter(q penstock.queue, verb text, filter jsonb) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    of_failures boolean := verb IN ('retry_failures', 'discard_failures');
    k           text;
    v           text;
    conditions  text[] := CASE verb
        WHEN 'disable' THEN ARRAY['priority >= 0']
        WHEN 'enable' THEN ARRAY[format('priority < 0 AND NOT penstock.is_off(%s, name, lock_key)', q.id)]
        ELSE ARRAY['true'] END;
BEGIN
    IF verb NOT IN ('retry_failures', 'discard_failures', 'cancel', 'disable', 'enable', 'delete') OR verb IS NULL THEN
        RAISE EXCEPTION 'operation "%" does not exist', verb USING ERRCODE = 'PS002',
            HINT = 'The operations are retry_failures, discard_failures, cancel, disable, enable and delete.';
    ELSIF filter IS NULL OR jsonb_typeof(filter) <> 'object' OR filter = '{}' THEN
        RAISE EXCEPTION 'filter is empty' USING ERRCODE = 'PS002',
            HINT = 'Write {"all": true} to mean everything in the queue.';
    END IF;
    FOR k, v IN SELECT * FROM jsonb_each_text(filter) LOOP
        IF v IS NULL
           OR k NOT IN ('all', 'name', 'lock_key', 'flow', 'ids', 'older_than', 'before', 'class', 'fingerprint')
           OR (k IN ('class', 'fingerprint') AND NOT of_failures) THEN
            RAISE EXCEPTION 'filter "%" does not exist for operation %', k, verb USING ERRCODE = 'PS002',
                HINT = 'The filters are all, name, lock_key, flow, ids, older_than, before, and for failures class and fingerprint.';
        END IF;
        conditions := conditions || CASE k
            WHEN 'all' THEN format('%L::boolean', v)
            WHEN 'ids' THEN format('id = ANY (%L::bigint[])', translate(v, '[]', '{}'))
            WHEN 'older_than' THEN format('since < clock_timestamp() - %L::interval', v)
            WHEN 'before' THEN format('since < %L::timestamptz', v)
            ELSE format('%I = %L', k, v) END;
    END LOOP;
    RETURN array_to_string(conditions, ' AND ');
END $$;

-- count_first counts what an operation would match now among the first `most` entries, or failures, of a queue, in
-- order of id. whole: there are no others. With any filter it reads no more than those.
-- Callers: start_operation, switch_entries; pkg/operator.
-- SQLSTATE: PS002 the filter is not valid.
CREATE OR REPLACE FUNCTION penstock.count_first(q penstock.queue, verb text, filter jsonb, most integer DEFAULT 100000,
                                                OUT matched bigint, OUT whole boolean)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    EXECUTE format('SELECT count(*) FILTER (WHERE hit), count(*) < $1
                      FROM (SELECT %s AS hit FROM %s ORDER BY id LIMIT $1) w',
                   penstock.operation_filter(q, verb, filter), penstock.operation_source(q, verb))
       INTO matched, whole USING most;
EXCEPTION WHEN invalid_text_representation OR invalid_datetime_format OR datetime_field_overflow
            OR interval_field_overflow OR numeric_value_out_of_range THEN
    RAISE EXCEPTION 'filter is not valid: %', SQLERRM USING ERRCODE = 'PS002';
END $$;

-- count_matching_to counts the entries that an operation would match now, up to a bound: with few or
-- selective filters it reads as many rows, with others, or where the bound is null, the whole table.
-- Callers: none but dashboards of the version before.
-- SQLSTATE: PS001 no such queue, PS002 the filter is not valid.
CREATE OR REPLACE FUNCTION penstock.count_matching_to(queue text, verb text, filter jsonb, bound bigint) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
    n bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM (SELECT FROM %s WHERE %s LIMIT $1) b', penstock.operation_source(q, verb),
                   penstock.operation_filter(q, verb, filter)) INTO n USING bound;
    RETURN n;
EXCEPTION WHEN invalid_text_representation OR invalid_datetime_format OR datetime_field_overflow
            OR interval_field_overflow OR numeric_value_out_of_range THEN
    RAISE EXCEPTION 'filter is not valid: %', SQLERRM USING ERRCODE = 'PS002';
END $$;

-- start_operation begins an operation on the current entries or failures of a queue, and returns its id. The
-- elected leader steps it. What it matches is counted among the first 100,000 of the queue alone, and goes up with what
-- it changes. Steps of ended batches are refused where the queue has no more failures than that.
-- Locks: none but those of an insert.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 verb, filter or per_second is not valid, PS006 it would retry
-- steps of ended batches and lines of batches of requests alone.
CREATE OR REPLACE FUNCTION penstock.start_operation(queue text, verb text, filter jsonb, reason text DEFAULT '',
                                         actor text DEFAULT NULL, per_second integer DEFAULT 1000) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    q       penstock.queue := penstock.queue_row(queue);
    n       bigint;
    whole   boolean;
    useless text;
BEGIN
    SELECT c.matched, c.whole INTO n, whole FROM penstock.count_first(q, verb, filter) c;
    IF verb = 'retry_failures' AND n > 0 AND whole THEN
        -- The first failure that can be retried ends the search.
        EXECUTE format('WITH matching AS NOT MATERIALIZED (
                            SELECT s.id, penstock.ended_step(%s, s.id, s.payload, s.name) AS useless FROM %s WHERE %s)
                        SELECT min(useless) FROM matching
                         WHERE NOT EXISTS (SELECT FROM matching WHERE useless IS NULL)',
                       q.id, penstock.operation_source(q, verb), penstock.operation_filter(q, verb, filter))
           INTO useless;
        IF useless IS NOT NULL THEN
            RAISE EXCEPTION 'none of % failures can be retried by itself: %', n, useless USING ERRCODE = 'PS006';
        END IF;
    END IF;
    IF per_second < 1 OR per_second IS NULL THEN
        RAISE EXCEPTION 'per_second is not at least 1' USING ERRCODE = 'PS002';
    END IF;
    RETURN penstock.begin_operation(q, verb, filter, reason, actor, per_second, n, NOT whole);
END $$;

-- The form of an earlier version, which no program calls.
DROP FUNCTION IF EXISTS penstock.begin_operation(penstock.queue, text, jsonb, text, text, integer, bigint);

-- begin_operation inserts an operation, and its line of the audit: both say where more may match than were counted
-- (partial). An age in its filter is counted from now: an entry
-- that was too young stays so however long the operation takes. So is a time: steps run in sessions of other time
-- zones.
-- Locks: none but those of an insert.
-- Callers: start_operation, switch_entries.
CREATE OR REPLACE FUNCTION penstock.begin_operation(
    q          penstock.queue,
    verb       text,
    filter     jsonb,
    reason     text,
    actor      text,
    per_second integer,
    matched    bigint,
    partial    boolean
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz := clock_timestamp();
    made  bigint;
BEGIN
    IF filter ?| '{older_than,before}' THEN
        filter := filter - 'older_than' || jsonb_build_object('before',
                      least(began - (filter->>'older_than')::interval, (filter->>'before')::timestamptz));
    END IF;
    INSERT INTO penstock.operation (queue_id, verb, filter, per_second, actor, reason, matched, partial, until_id,
                                    created_at)
    VALUES (q.id, begin_operation.verb, begin_operation.filter, begin_operation.per_second,
            penstock.actor_name(begin_operation.actor), coalesce(begin_operation.reason, ''), begin_operation.matched,
            begin_operation.partial, coalesce(pg_sequence_last_value('penstock.entry_id_seq'), 0), began)
    RETURNING id INTO made;
    PERFORM penstock.audit_log(begin_operation.actor, 'start_operation', q.name, begin_operation.reason,
            jsonb_build_object('operation', made, 'verb', begin_operation.verb, 'filter', begin_operation.filter,
                               'matched', begin_operation.matched)
            || CASE WHEN begin_operation.partial THEN '{"partial": true}' ELSE '{}' END::jsonb);
    RETURN made;
END $$;

-- cancel_operation ends an operation; the entries that it has changed stay changed.
-- Locks: the row of the operation (FOR UPDATE).
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS008 no such operation, PS006 it has ended.
CREATE OR REPLACE FUNCTION penstock.cancel_operation(
    id     bigint,
    reason text   DEFAULT '',
    actor  text   DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    was text;
BEGIN
    SELECT o.status INTO was FROM penstock.operation o WHERE o.id = cancel_operation.id FOR UPDATE;
    IF was IS NULL THEN
        RAISE EXCEPTION 'operation % does not exist', cancel_operation.id USING ERRCODE = 'PS008';
    ELSIF was <> 'running' THEN
        RAISE EXCEPTION 'operation % has ended: %', cancel_operation.id, was USING ERRCODE = 'PS006';
    END IF;
    UPDATE penstock.operation o SET status = 'cancelled', ended_at = clock_timestamp() WHERE o.id = cancel_operation.id;
    PERFORM penstock.audit_log(cancel_operation.actor, 'cancel_operation', 'operation ' || cancel_operation.id,
                               cancel_operation.reason);
END $$;

-- apply_operation applies the verb of an operation to one entry. True: changed; false: nothing to
-- do; null: busy, try again.
-- Locks: those of retry_one, cancel_one, take_entry and end_entry, disable_one or enable_one.
-- The caller has the row of the operation.
-- Callers: step_operation.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.apply_operation(o penstock.operation, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e      penstock.entry;
    answer text;
BEGIN
    CASE o.verb
        WHEN 'retry_failures' THEN
            IF EXISTS (SELECT FROM penstock.failure f WHERE f.queue_id = o.queue_id AND f.entry_id = wanted
                          AND penstock.ended_step(f.queue_id, f.entry_id, f.payload, f.name) IS NOT NULL) THEN
                RETURN false; -- it would fail again
            END IF;
            RETURN penstock.retry_one(o.queue_id, wanted);
        WHEN 'discard_failures' THEN
            IF NOT penstock.record_in_batch(o.queue_id, wanted) THEN
                RETURN NULL;
            END IF;
            DELETE FROM penstock.failure WHERE queue_id = o.queue_id AND entry_id = wanted;
            RETURN FOUND;
        WHEN 'cancel' THEN
            answer := penstock.cancel_one(o.queue_id, wanted, o.reason, o.actor);
            RETURN CASE WHEN answer = 'busy' THEN NULL ELSE answer IS NOT NULL END;
        WHEN 'delete' THEN -- cancels an entry that does not run; a running one stays
            e := penstock.take_entry(o.queue_id, wanted);
            IF e.id IS NOT NULL THEN
                PERFORM penstock.end_entry(e, 'cancelled', o.reason);
            END IF;
            RETURN e.id IS NOT NULL;
        WHEN 'disable' THEN
            SELECT * INTO e FROM penstock.entry WHERE queue_id = o.queue_id AND id = wanted;
            IF o.switched_in IS NOT NULL AND NOT penstock.is_off(o.queue_id, e.name, e.lock_key) THEN
                RETURN false; -- enabled again since
            END IF;
            RETURN penstock.disable_one(o.queue_id, wanted);
        WHEN 'enable' THEN
            SELECT * INTO e FROM penstock.entry WHERE queue_id = o.queue_id AND id = wanted;
            IF penstock.is_off(o.queue_id, e.name, e.lock_key) THEN
                RETURN false; -- disabled again since
            END IF;
            RETURN penstock.enable_one(o.queue_id, wanted);
    END CASE;
END $$;

-- open_before returns the number of open transactions whose id is below the given one, which must be
-- assigned. Ids from the snapshot's xmax on have not ended.
-- Locks: none.
-- Callers: step_operation.
CREATE OR REPLACE FUNCTION penstock.open_before(id xid8) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT (SELECT count(*) FROM pg_snapshot_xip(s.now) x WHERE x < $1)
         + greatest(0, $1::text::bigint - pg_snapshot_xmax(s.now)::text::bigint)
      FROM (SELECT pg_current_snapshot() AS now OFFSET 0) s
$$;

-- step_operation does one bounded batch of an operation (10,000 entries read, 500 changed at most)
-- and records its progress, in one transaction: after a crash the operation goes on behind the last
-- entry that it changed. changed is the number of entries, wait how long to wait before the next
-- step (0: step again), ended whether nothing is left or another session steps it. An entry that
-- another transaction has locked is kept in operation.busy and tried again in later steps, a
-- hundred of them in each; the others go on. With a thousand of them the operation waits for some
-- to become free.
-- Of failures it deals with those of entries that had failed when it began.
-- An operation of disable_entries or enable_entries reads the queue again until no transaction is open
-- that may have read penstock.disabled before the switch. For that, each function that reads
-- penstock.disabled to decide whether an entry is disabled must have a transaction id by then (push_many,
-- return_failure_at, step_operation). Transactions that only read have none. A push by a snapshot that is older
-- than the switch is refused (check_snapshot).
-- Locks: the row of the operation (FOR UPDATE SKIP LOCKED), then those of apply_operation for the
-- busy entries and for each match in order of id. Only cancel_one may wait: for another cancel of the same entry.
-- Callers: switch_entries; pkg/maintenance, pkg/operator.
-- SQLSTATE: PS006 the transaction is not read committed.
CREATE OR REPLACE FUNCTION penstock.step_operation(id bigint, OUT changed integer, OUT wait interval, OUT ended boolean)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    busy_most CONSTANT integer := 1000;
    again_most CONSTANT integer := 100;
    o     penstock.operation;
    q     penstock.queue;
    quota integer;
    seen  record;
    again bigint[]; -- busy in an earlier step
    fresh bigint[]; -- matches of this step
    one   bigint;
    did   boolean;
    older bigint; -- open transactions that may have read penstock.disabled before the switch
BEGIN
    PERFORM penstock.need_read_committed();
    changed := 0; wait := '0'; ended := false;
    SELECT * INTO o FROM penstock.operation x
     WHERE x.id = step_operation.id AND x.status = 'running' FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        ended := true;
        RETURN;
    END IF;
    IF o.stepped_at IS NULL OR o.stepped_at > clock_timestamp() THEN -- the clock was set back since it stepped
        o.stepped_at := clock_timestamp() - interval '1 second';
    END IF;
    quota := least(500, floor(o.per_second * extract(epoch FROM clock_timestamp() - o.stepped_at)));
    IF quota < 1 THEN
        wait := greatest('1 millisecond', o.stepped_at + interval '1 second' / o.per_second - clock_timestamp());
        RETURN;
    END IF;
    SELECT * INTO q FROM penstock.queue x WHERE x.id = o.queue_id;
    IF o.switched_in <> pg_current_xact_id() THEN -- the switch has committed, else we would not see its operation
        IF o.barrier > pg_current_xact_id() THEN -- an id of the server from which the database was restored
            o.barrier := NULL; o.open_before := NULL;
        END IF;
        o.barrier := coalesce(o.barrier, pg_current_xact_id());
        older := penstock.open_before(o.barrier);
        IF o.open_before IS NULL OR older < o.open_before THEN
            o.open_before := older; o.last_id := 0; o.busy := '{}';
            o.until_id := coalesce(pg_sequence_last_value('penstock.entry_id_seq'), 0);
        END IF;
    END IF;
    EXECUTE format('SELECT coalesce(array_agg(id ORDER BY id) FILTER (WHERE hit), ''{}'') AS ids,
                           max(id) AS last, count(*) AS n
                      FROM (SELECT id, coalesce(%s%s, false) AS hit FROM %s
                             WHERE id > $1 AND id <= $2 ORDER BY id LIMIT 10000) w',
                   penstock.operation_filter(q, o.verb, o.filter),
                   CASE WHEN o.verb IN ('retry_failures', 'discard_failures') THEN ' AND since <= $3' END,
                   penstock.operation_source(q, o.verb))
       INTO seen USING o.last_id, o.until_id, o.created_at;
    again := o.busy[1:least(again_most, quota)];
    fresh := seen.ids[1:least(quota - cardinality(again), busy_most - cardinality(o.busy))];
    o.busy := o.busy[cardinality(again) + 1:];
    FOREACH one IN ARRAY again || fresh LOOP
        did := penstock.apply_operation(o, one);
        changed := changed + coalesce(did, false)::integer;
        o.busy := CASE WHEN did IS NULL THEN o.busy || one ELSE o.busy END;
    END LOOP;
    IF cardinality(fresh) = cardinality(seen.ids) THEN
        o.last_id := coalesce(seen.last, o.until_id);
        ended := seen.n < 10000 AND cardinality(o.busy) = 0;
        IF ended AND o.switched_in IS NOT NULL AND o.open_before IS DISTINCT FROM 0 THEN
            ended := false;
            wait := '100 milliseconds';
        END IF;
    ELSIF cardinality(fresh) > 0 THEN
        o.last_id := fresh[cardinality(fresh)];
    END IF;
    IF changed = 0 AND NOT ended AND cardinality(o.busy) > 0
       AND (cardinality(fresh) = 0 OR cardinality(fresh) = cardinality(seen.ids)) THEN
        wait := '100 milliseconds'; -- only busy entries are left
    END IF;
    UPDATE penstock.operation x
       SET last_id = o.last_id, until_id = o.until_id, busy = o.busy, barrier = o.barrier, open_before = o.open_before,
           changed = x.changed + step_operation.changed,
           matched = greatest(x.matched, x.changed + step_operation.changed), stepped_at = clock_timestamp(),
           failed_steps = 0,
           status = CASE WHEN ended THEN 'done' ELSE 'running' END,
           ended_at = CASE WHEN ended THEN clock_timestamp() END
     WHERE x.id = o.id;
END $$;

-- record_failed_step makes the error of a step visible to operators, since the step itself was rolled back. An
-- operation that has ended stays as it is.
-- Locks: the row of the operation.
-- Callers: pkg/maintenance.
CREATE OR REPLACE FUNCTION penstock.record_failed_step(id bigint, error text) RETURNS void
LANGUAGE sql AS $$
    UPDATE penstock.operation o
       SET failed_steps = o.failed_steps + 1, failed_at = clock_timestamp(),
           error = left(record_failed_step.error, 2000)
     WHERE o.id = record_failed_step.id AND o.status = 'running'
$$;
