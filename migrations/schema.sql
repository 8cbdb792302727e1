-- What the migrations make. Written by `make schema` with pg_dump 15; nothing applies this file.

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

-- Name: penstock; Type: SCHEMA; Schema: -; Owner: -

CREATE SCHEMA penstock;

-- Name: outcome; Type: TYPE; Schema: penstock; Owner: -

CREATE TYPE penstock.outcome AS ENUM (
    'done',
    'failed',
    'expired',
    'cancelled'
);

-- Name: queue_kind; Type: TYPE; Schema: penstock; Owner: -

CREATE TYPE penstock.queue_kind AS ENUM (
    'task',
    'batch',
    'cron',
    'change_log',
    'inference',
    'webhook'
);

-- Name: status; Type: TYPE; Schema: penstock; Owner: -

CREATE TYPE penstock.status AS ENUM (
    'initial',
    'pending'
);

SET default_tablespace = '';

SET default_table_access_method = heap;

-- Name: queue; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.queue (
    id integer NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    kind penstock.queue_kind DEFAULT 'task'::penstock.queue_kind NOT NULL,
    application text DEFAULT 'default'::text NOT NULL COLLATE pg_catalog."C",
    priority real DEFAULT 1 NOT NULL,
    entry_priority smallint DEFAULT 1 NOT NULL,
    algorithm text DEFAULT 'fair'::text NOT NULL,
    "grouping" text,
    mergeable boolean DEFAULT false NOT NULL,
    merge text DEFAULT 'last'::text NOT NULL,
    max_concurrent integer,
    max_concurrent_per_node integer,
    capacity bigint,
    retry jsonb DEFAULT '{}'::jsonb NOT NULL,
    crash_limit smallint DEFAULT 3 NOT NULL,
    run_timeout interval,
    quantum_count integer DEFAULT 100 NOT NULL,
    quantum_time interval DEFAULT '00:00:10'::interval NOT NULL,
    payload_limit integer DEFAULT 262144 NOT NULL,
    result_retention interval DEFAULT '1 day'::interval NOT NULL,
    failure_retention interval DEFAULT '30 days'::interval NOT NULL,
    model text,
    paused_at timestamp with time zone,
    paused_by text,
    paused_reason text,
    paused_until timestamp with time zone,
    disabled_at timestamp with time zone,
    disabled_by text,
    disabled_reason text,
    version bigint DEFAULT 1 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    statements jsonb DEFAULT '{}'::jsonb NOT NULL,
    CONSTRAINT queue_algorithm_check CHECK ((algorithm = ANY (ARRAY['fifo'::text, 'fair'::text]))),
    CONSTRAINT queue_application_check CHECK ((application <> ''::text)),
    CONSTRAINT queue_capacity_check CHECK ((capacity > 0)),
    CONSTRAINT queue_crash_limit_check CHECK ((crash_limit > 0)),
    CONSTRAINT queue_entry_priority_check CHECK (((entry_priority >= 0) AND (entry_priority <= 9))),
    CONSTRAINT queue_failure_retention_check CHECK ((failure_retention >= '1 day'::interval)),
    CONSTRAINT queue_grouping_check CHECK (("grouping" <> ''::text)),
    CONSTRAINT queue_max_concurrent_check CHECK ((max_concurrent > 0)),
    CONSTRAINT queue_max_concurrent_per_node_check CHECK ((max_concurrent_per_node > 0)),
    CONSTRAINT queue_merge_check CHECK ((merge = ANY (ARRAY['first'::text, 'last'::text, 'object'::text, 'array'::text]))),
    CONSTRAINT queue_name_check CHECK ((name ~ '^[a-z][a-z0-9_]{0,47}$'::text)),
    CONSTRAINT queue_payload_limit_check CHECK (((payload_limit >= 1) AND (payload_limit <= 16777216))),
    CONSTRAINT queue_priority_check CHECK (((priority > (0)::double precision) AND (priority <= (1000)::double precision))),
    CONSTRAINT queue_quantum_count_check CHECK (((quantum_count >= 1) AND (quantum_count <= 10000))),
    CONSTRAINT queue_quantum_time_check CHECK ((quantum_time > '00:00:00'::interval)),
    CONSTRAINT queue_result_retention_check CHECK ((result_retention >= '00:00:00'::interval)),
    CONSTRAINT queue_retry_check CHECK ((jsonb_typeof(retry) = 'object'::text)),
    CONSTRAINT queue_run_timeout_check CHECK ((run_timeout > '00:00:00'::interval)),
    CONSTRAINT queue_statements_check CHECK ((jsonb_typeof(statements) = 'object'::text))
);

-- Name: COLUMN queue.priority; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.queue.priority IS 'weight between queues: a queue of weight 2 is served twice as much as one of weight 1';

-- Name: COLUMN queue.entry_priority; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.queue.entry_priority IS 'priority of entries that name none, 0 to 9; higher is served first';

-- Name: COLUMN queue."grouping"; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.queue."grouping" IS 'where the lock key stands in the payload: a field, a path with dots, or a jsonpath that starts with $';

-- Name: COLUMN queue.version; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.queue.version IS 'grows with every change, so that nodes see from one number that they must read again';

-- Name: COLUMN queue.statements; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.queue.statements IS 'what task nodes run for its entries, with their rights; see set_statements';

-- Name: admit(penstock.queue, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.admit(q penstock.queue, n integer) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    d        penstock.depth;
    depth    bigint;
    wait     real;
BEGIN
    SELECT * INTO d FROM penstock.depth WHERE queue_id = q.id;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    depth := d.counted + (penstock.counter('accepted', q.id) - d.accepted) - (penstock.counter('removed', q.id) - d.removed);
    IF depth + n <= q.capacity THEN
        PERFORM penstock.count(q.id, 'accepted', n);
        RETURN;
    END IF;
    wait := CASE WHEN d.drain_rate > 0 THEN (depth + n - q.capacity) / d.drain_rate END;
    RAISE EXCEPTION 'queue "%" is full: % entries of at most %', q.name, depth, q.capacity
        USING ERRCODE = 'PS005',
              DETAIL = jsonb_build_object('depth', depth, 'capacity', q.capacity, 'drain_rate', d.drain_rate,
                                          'retry_after_ms', ceil(wait * 1000))::text,
              HINT = 'Push again after retry_after_ms, or raise the capacity of the queue.';
END $$;

-- Name: adopt_slot(integer, integer, bigint, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.adopt_slot(instance integer, slot_number integer, slot_token bigint, node bigint) RETURNS bigint
    LANGUAGE sql
    AS $_$
    UPDATE penstock.slot s
       SET node_id = $4, token = nextval('penstock.token_seq'), leased_at = clock_timestamp(), doubt_at = NULL, doubt = NULL,
           queue_id = NULL, entry_id = NULL
     WHERE s.instance_id = $1 AND s.number = $2 AND s.token = $3
       AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id)) AND penstock.node_lives($4)
    RETURNING s.token
$_$;

-- Name: ago(interval); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.ago(i interval) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT CASE WHEN s < 60 THEN s || ' s' WHEN s < 3600 THEN s / 60 || ' m ' || s % 60 || ' s'
                WHEN s < 86400 THEN s / 3600 || ' h ' || s % 3600 / 60 || ' m' ELSE s / 86400 || ' d ' || s % 86400 / 3600 || ' h' END
      FROM (SELECT greatest(0, floor(extract(epoch FROM i)))::bigint AS s) x
$$;

-- Name: all_ended(bigint, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.all_ended(locks bigint, entries bigint) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE
    AS $$
BEGIN
    IF locks <> entries THEN
        RAISE EXCEPTION 'entry changed while it was ended' USING ERRCODE = 'serialization_failure';
    END IF;
    RETURN true;
END $$;

-- Name: alter_cron_job(text, jsonb, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.alter_cron_job(job text, options jsonb, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
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

-- Name: alter_queue(text, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.alter_queue(queue_name text, options jsonb) RETURNS void
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

-- Name: operation; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.operation (
    id bigint NOT NULL,
    queue_id integer NOT NULL,
    verb text NOT NULL,
    filter jsonb NOT NULL,
    per_second integer NOT NULL,
    actor text NOT NULL,
    reason text NOT NULL,
    status text DEFAULT 'running'::text NOT NULL,
    matched bigint NOT NULL,
    changed bigint DEFAULT 0 NOT NULL,
    last_id bigint DEFAULT 0 NOT NULL,
    until_id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    stepped_at timestamp with time zone,
    ended_at timestamp with time zone,
    CONSTRAINT operation_per_second_check CHECK ((per_second > 0)),
    CONSTRAINT operation_status_check CHECK ((status = ANY (ARRAY['running'::text, 'done'::text, 'cancelled'::text]))),
    CONSTRAINT operation_verb_check CHECK ((verb = ANY (ARRAY['retry_failures'::text, 'discard_failures'::text, 'cancel'::text, 'disable'::text, 'enable'::text, 'delete'::text])))
);

-- Name: COLUMN operation.matched; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.operation.matched IS 'entries that matched when the operation was asked for';

-- Name: COLUMN operation.last_id; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.operation.last_id IS 'the operation has dealt with every match up to this entry id; it goes on behind it after a crash';

-- Name: apply_operation(penstock.operation, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.apply_operation(o penstock.operation, wanted bigint) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    e penstock.entry;
BEGIN
    CASE o.verb
        WHEN 'retry_failures' THEN
            RETURN penstock.return_failure(o.queue_id, wanted);
        WHEN 'discard_failures' THEN
            DELETE FROM penstock.failure WHERE queue_id = o.queue_id AND entry_id = wanted;
            RETURN FOUND;
        WHEN 'cancel' THEN
            RETURN penstock.cancel_one(o.queue_id, wanted, o.reason, o.actor) IS NOT NULL;
        WHEN 'delete' THEN -- cancels what does not run and leaves alone what does
            e := penstock.take_entry(o.queue_id, wanted);
            IF e.id IS NOT NULL THEN
                PERFORM penstock.end_entry(e, 'cancelled', o.reason);
            END IF;
            RETURN e.id IS NOT NULL;
        WHEN 'disable' THEN
            RETURN penstock.disable_one(o.queue_id, wanted);
        WHEN 'enable' THEN
            RETURN penstock.enable_one(o.queue_id, wanted);
    END CASE;
END $$;

-- Name: await_claims(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.await_claims() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
DECLARE
    before text := current_setting('lock_timeout');
BEGIN
    IF EXISTS (SELECT FROM penstock.queue q WHERE q.id = NEW.queue_id AND q.created_at < transaction_timestamp())
       AND NOT EXISTS (SELECT FROM penstock.limit_use u WHERE u.queue_id = NEW.queue_id AND u.limit_id = NEW.limit_id) THEN
        PERFORM set_config('lock_timeout', '3s', true);
        LOCK TABLE penstock.lock IN SHARE MODE;
        PERFORM set_config('idle_in_transaction_session_timeout', '5s', true); -- claims and endings wait until this commits
        PERFORM set_config('lock_timeout', before, true);
    END IF;
    RETURN NEW;
EXCEPTION WHEN lock_not_available THEN
    RAISE EXCEPTION 'a claim or an ending has been under way for more than 3 seconds'
        USING ERRCODE = 'PS006', HINT = 'Put the queue under the limit again when it has ended: a transaction that writes to penstock.lock, see pg_locks. Commit at once: claims and endings wait for it.';
END $$;

-- Name: batch; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.batch (
    id bigint NOT NULL,
    queue_id integer NOT NULL,
    name text NOT NULL,
    status text DEFAULT 'splitting'::text NOT NULL,
    query text,
    items jsonb,
    part_size integer DEFAULT 100 NOT NULL,
    window_parts integer DEFAULT 1000 NOT NULL,
    detail jsonb DEFAULT '{}'::jsonb NOT NULL,
    flow text COLLATE pg_catalog."C",
    priority smallint,
    completion_queue_id integer,
    actor text NOT NULL,
    paused_at timestamp with time zone,
    paused_by text,
    paused_reason text,
    paused_until timestamp with time zone,
    cancelled_by text,
    cancelled_reason text,
    split_entry_id bigint,
    completion_entry_id bigint,
    result jsonb,
    problem text,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    ended_at timestamp with time zone,
    CONSTRAINT batch_check CHECK ((num_nonnulls(query, items) <= 1)),
    CONSTRAINT batch_detail_check CHECK ((jsonb_typeof(detail) = 'object'::text)),
    CONSTRAINT batch_items_check CHECK ((jsonb_typeof(items) = 'array'::text)),
    CONSTRAINT batch_part_size_check CHECK (((part_size >= 1) AND (part_size <= 100000))),
    CONSTRAINT batch_priority_check CHECK (((priority >= 0) AND (priority <= 9))),
    CONSTRAINT batch_status_check CHECK ((status = ANY (ARRAY['splitting'::text, 'running'::text, 'ending'::text, 'done'::text, 'failed'::text, 'cancelled'::text]))),
    CONSTRAINT batch_window_parts_check CHECK (((window_parts >= 1) AND (window_parts <= 10000)))
);

-- Name: COLUMN batch.query; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.batch.query IS 'a SELECT whose rows are the set; it is run by a task node, with its rights';

-- Name: COLUMN batch.items; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.batch.items IS 'the set, until it is split';

-- Name: COLUMN batch.detail; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.batch.detail IS 'goes into the payload of every entry of the batch';

-- Name: COLUMN batch.completion_queue_id; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.batch.completion_queue_id IS 'where the completion entry goes: the one that is pushed once, when all parts have ended';

-- Name: batch_payload(penstock.batch, text, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.batch_payload(b penstock.batch, step text, more jsonb DEFAULT '{}'::jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT b.detail || jsonb_build_object('batch', b.id, 'step', step) || more
$$;

-- Name: batch_row(bigint, boolean); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.batch_row(wanted bigint, open_only boolean DEFAULT true) RETURNS penstock.batch
    LANGUAGE plpgsql
    AS $$
DECLARE
    b penstock.batch;
BEGIN
    SELECT * INTO b FROM penstock.batch WHERE id = wanted FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', wanted USING ERRCODE = 'PS012', HINT = 'penstock.batch_status lists the batches.';
    ELSIF open_only AND b.ended_at IS NOT NULL THEN
        RAISE EXCEPTION 'batch % has ended: %', wanted, b.status USING ERRCODE = 'PS006', DETAIL = b.status;
    END IF;
    RETURN b;
END $$;

-- Name: because(text, text, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.because(code text, sentence text, numbers jsonb DEFAULT '{}'::jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT jsonb_build_object('code', code, 'text', sentence, 'numbers', jsonb_strip_nulls(numbers))
$$;

-- Name: limit; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock."limit" (
    id integer NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    per_flow boolean DEFAULT false NOT NULL,
    max_units integer,
    rate real,
    burst real,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    per_key boolean DEFAULT false NOT NULL,
    uncounted_to bigint DEFAULT 0 NOT NULL,
    CONSTRAINT limit_burst_check CHECK ((burst > (0)::double precision)),
    CONSTRAINT limit_check CHECK (((rate IS NULL) = (burst IS NULL))),
    CONSTRAINT limit_check1 CHECK (((max_units IS NOT NULL) OR (rate IS NOT NULL))),
    CONSTRAINT limit_check2 CHECK (((NOT per_key) OR ((max_units IS NULL) AND (NOT per_flow)))),
    CONSTRAINT limit_finite_check CHECK (((rate < 'Infinity'::real) AND (burst < 'Infinity'::real))),
    CONSTRAINT limit_max_units_check CHECK ((max_units >= 0)),
    CONSTRAINT limit_name_check CHECK ((name <> ''::text)),
    CONSTRAINT limit_rate_check CHECK ((rate > (0)::double precision))
);

-- Name: COLUMN "limit".max_units; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock."limit".max_units IS 'units at once';

-- Name: COLUMN "limit".rate; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock."limit".rate IS 'units a second that flow into the token bucket';

-- Name: COLUMN "limit".burst; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock."limit".burst IS 'units that the token bucket holds';

-- Name: COLUMN "limit".uncounted_to; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock."limit".uncounted_to IS 'locks with tokens up to this one are within max_units without a count';

-- Name: bucket_units(penstock."limit", text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.bucket_units(l penstock."limit", in_flow text) RETURNS double precision
    LANGUAGE sql
    AS $$
    SELECT coalesce((SELECT least(l.burst, b.units + l.rate * extract(epoch FROM clock_timestamp() - b.at))
                       FROM penstock.bucket b
                      WHERE b.limit_id = l.id AND b.flow = CASE WHEN l.per_flow OR l.per_key THEN in_flow ELSE '' END), l.burst)
$$;

-- Name: bump_inference_version(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.bump_inference_version() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    UPDATE penstock.inference_version SET version = version + 1;
    RETURN NULL;
END $$;

-- Name: check_depth(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.check_depth(target text DEFAULT 'a queue'::text) RETURNS smallint
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    depth integer := current_setting('penstock.depth')::integer;
BEGIN
    IF depth > penstock.depth_max() THEN
        RAISE EXCEPTION 'loop: % pushes to %, at depth % of at most %', current_setting('penstock.working_for', true), target, depth, penstock.depth_max()
            USING ERRCODE = 'PS011', HINT = 'The entries push one another without end. Break the circle: do not watch what the handler writes, or write only what differs.';
    END IF;
    RETURN depth;
END $$;

-- Name: entry; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.entry (
    id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    due_at timestamp with time zone,
    start_by timestamp with time zone,
    finish_by timestamp with time zone,
    queue_id integer NOT NULL,
    status penstock.status NOT NULL,
    cost real,
    priority smallint NOT NULL,
    enabled_priority smallint,
    pos bigint,
    attempt smallint DEFAULT 0 NOT NULL,
    crashes smallint DEFAULT 0 NOT NULL,
    flow text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    lock_key text COLLATE pg_catalog."C",
    name text COLLATE pg_catalog."C",
    unique_key text COLLATE pg_catalog."C",
    trace text,
    callback jsonb,
    history jsonb,
    payload jsonb NOT NULL,
    depth smallint DEFAULT
CASE
    WHEN (COALESCE(current_setting('penstock.depth'::text, true), ''::text) = ''::text) THEN (0)::smallint
    ELSE penstock.check_depth()
END NOT NULL,
    CONSTRAINT entry_priority_check CHECK (((priority >= '-1'::integer) AND (priority <= 9)))
)
PARTITION BY LIST (queue_id);

-- Name: COLUMN entry.enabled_priority; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry.enabled_priority IS 'the priority a disabled entry had, for when it is enabled again';

-- Name: COLUMN entry.pos; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry.pos IS 'place in line of a solo entry that came back into line; null means its id';

-- Name: COLUMN entry.attempt; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry.attempt IS 'attempts that ended in an error so far';

-- Name: COLUMN entry.crashes; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry.crashes IS 'times the node died while it ran this entry; never counted as an attempt';

-- Name: COLUMN entry.history; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry.history IS 'errors of earlier attempts, oldest first';

-- Name: COLUMN entry.depth; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry.depth IS 'entries that lie between this one and a push from outside; bounded, so that loops end';

-- Name: call_back(penstock.entry, text, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.call_back(e penstock.entry, outcome text, detail jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    host text := lower(substring(e.callback->>'url' FROM '^[A-Za-z]+://([^/?#]+)'));
    data jsonb;
BEGIN
    IF coalesce(e.callback->>'url', '') = '' THEN
        RETURN;
    ELSIF pg_column_size(detail->'result') > 65536 THEN
        detail := detail - 'result' || '{"result_omitted": true}';
    END IF;
    data := jsonb_build_object('id', e.id, 'queue', (SELECT q.name FROM penstock.queue q WHERE q.id = e.queue_id), 'outcome', outcome)
            || jsonb_strip_nulls(detail - 'result') || CASE WHEN detail ? 'result' THEN jsonb_build_object('result', detail->'result') ELSE '{}' END
            || CASE WHEN octet_length(e.callback::text) > 262144 THEN '{"context_omitted": true}'
                    WHEN e.callback ? 'context' THEN jsonb_build_object('context', e.callback->'context') ELSE '{}' END;
    PERFORM penstock.push_many('webhook',
        ARRAY[jsonb_build_object('url', left(e.callback->>'url', 4096), 'type', 'entry.' || outcome, 'at', clock_timestamp(), 'data', data)],
        flows => ARRAY[coalesce(left(host, CASE WHEN octet_length(host) > length(host) THEN 64 ELSE 128 END), '')],
        traces => ARRAY[e.trace]);
END $$;

-- Name: cancel_batch(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.cancel_batch(batch bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    b penstock.batch;
BEGIN
    PERFORM penstock.need_read_committed();
    b := penstock.batch_row(batch);
    UPDATE penstock.batch SET cancelled_by = coalesce(cancel_batch.actor, current_user), cancelled_reason = coalesce(reason, '') WHERE id = b.id;
    PERFORM penstock.cancel_one(b.queue_id, p.entry_id, reason, coalesce(actor, current_user))
       FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NOT NULL;
    IF b.status = 'splitting' THEN
        PERFORM penstock.cancel_one(b.queue_id, b.split_entry_id, reason, coalesce(actor, current_user));
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason) VALUES (coalesce(actor, current_user), 'cancel_batch', 'batch ' || batch, reason);
END $$;

-- Name: cancel_entry(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.cancel_entry(id bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS text
    LANGUAGE plpgsql
    AS $$
DECLARE
    answer text;
BEGIN
    PERFORM penstock.need_read_committed();
    answer := penstock.cancel_one(penstock.living_entry(cancel_entry.id), cancel_entry.id, cancel_entry.reason, cancel_entry.actor);
    IF answer IS NULL THEN
        PERFORM penstock.living_entry(cancel_entry.id); -- raises: it ended while we looked
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(cancel_entry.actor, current_user), 'cancel_entry', 'entry ' || cancel_entry.id, cancel_entry.reason,
            jsonb_build_object('answer', answer));
    RETURN answer;
END $$;

-- Name: cancel_one(integer, bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.cancel_one(queue integer, wanted bigint, why text, who text) RETURNS text
    LANGUAGE plpgsql
    AS $$
DECLARE
    e penstock.entry := penstock.take_entry(queue, wanted);
BEGIN
    IF e.id IS NOT NULL THEN
        PERFORM penstock.end_entry(e, 'cancelled', why);
        RETURN 'cancelled';
    END IF;
    INSERT INTO penstock.cancel_request (queue_id, entry_id, actor, reason)
    VALUES (queue, wanted, coalesce(who, current_user), coalesce(why, ''))
    ON CONFLICT DO NOTHING;
    IF NOT EXISTS (SELECT FROM penstock.entry WHERE queue_id = queue AND id = wanted) THEN
        DELETE FROM penstock.cancel_request WHERE queue_id = queue AND entry_id = wanted;
        RETURN NULL;
    END IF;
    RETURN 'requested';
END $$;

-- Name: cancel_operation(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.cancel_operation(id bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
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
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(cancel_operation.actor, current_user), 'cancel_operation', 'operation ' || cancel_operation.id, cancel_operation.reason);
END $$;

-- Name: charge(integer, text, integer, bigint, text[], bigint[], bigint, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.charge(queue integer, in_flow text, pace integer, n bigint, keys text[], entries bigint[], last_token bigint, uncounted_to bigint) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM penstock.charge_lanes(queue, CASE WHEN n = 0 THEN 0 ELSE pace END, ARRAY[in_flow], ARRAY[n], keys, entries, last_token, uncounted_to);
END $$;

-- Name: charge_lanes(integer, integer, text[], bigint[], text[], bigint[], bigint, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.charge_lanes(queue integer, pace integer, flows text[], taken bigint[], keys text[], entries bigint[], last_token bigint, uncounted_to bigint) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF last_token > uncounted_to THEN
        RAISE EXCEPTION 'token % is above %: the limit must be counted', last_token, uncounted_to USING ERRCODE = 'serialization_failure';
    END IF;
    IF pace = 0 OR flows IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO penstock.bucket AS b (limit_id, flow, units, at)
    SELECT g.id, k.scope, g.burst - k.n * u.units, clock_timestamp()
      FROM penstock.limit_use u
     CROSS JOIN LATERAL (SELECT * FROM penstock."limit" x WHERE x.id = u.limit_id AND x.rate IS NOT NULL OFFSET 0) g
     CROSS JOIN LATERAL (
           SELECT '' COLLATE "C" AS scope, (SELECT sum(t.n)::bigint FROM unnest(charge_lanes.taken) t(n)) AS n WHERE NOT g.per_key AND NOT g.per_flow
           UNION ALL
           SELECT f.flow, f.n FROM unnest(flows, charge_lanes.taken) f(flow, n) WHERE g.per_flow AND NOT g.per_key
           UNION ALL
           SELECT c.key, c.n FROM unnest(keys, charge_lanes.entries) c(key, n) WHERE g.per_key) k
     WHERE u.queue_id = queue
     ORDER BY g.id, k.scope
    ON CONFLICT (limit_id, flow) DO UPDATE
       SET units = (SELECT least(0, b.units + g.rate * extract(epoch FROM clock_timestamp() - b.at) - g.burst) FROM penstock."limit" g WHERE g.id = b.limit_id)
                   + excluded.units, at = clock_timestamp();
END $$;

-- Name: check_arrays(integer, integer[], jsonb[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.check_arrays(n integer, lengths integer[], callbacks jsonb[]) RETURNS void
    LANGUAGE plpgsql IMMUTABLE
    AS $$
DECLARE
    bad record;
BEGIN
    SELECT u.name, u.length INTO bad
      FROM unnest('{lock_keys,flows,priorities,dues,start_bys,finish_bys,costs,names,idempotency_keys,unique_keys,unique_policies,traces,callbacks}'::text[],
                  lengths) u(name, length)
     WHERE u.length > n LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% has % elements, and there are % payloads', bad.name, bad.length, n
            USING ERRCODE = 'PS002', HINT = 'Arrays of options are as long as that of the payloads; null stands for an option left out.';
    END IF;
    SELECT u.i, CASE WHEN jsonb_typeof(u.c) <> 'object' THEN 'callback is not an object with url and, if wanted, context'
                     ELSE 'callback.url is missing or not a text' END AS problem INTO bad
      FROM unnest(callbacks) WITH ORDINALITY u(c, i)
     WHERE jsonb_typeof(u.c) <> 'null'
       AND (jsonb_typeof(u.c) <> 'object' OR jsonb_typeof(u.c->'url') IS DISTINCT FROM 'string' OR u.c->>'url' = '')
     ORDER BY u.i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% (entry %)', bad.problem, bad.i USING ERRCODE = 'PS002';
    END IF;
END $$;

-- Name: check_invariants(interval); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.check_invariants(grace interval DEFAULT '00:00:00'::interval) RETURNS TABLE(invariant text, detail text)
    LANGUAGE sql STABLE
    AS $$
    SELECT 'a pending entry has a ready row or a lock', format('entry %s of queue %s', e.id, e.queue_id)
      FROM penstock.entry e
     WHERE e.status = 'pending' AND e.priority >= 0
       AND NOT EXISTS (SELECT FROM penstock.lock l
                        WHERE l.queue_id = e.queue_id AND l.lock_key = coalesce(e.lock_key, '#' || e.id))
       AND NOT CASE WHEN e.lock_key IS NOT NULL
                    THEN EXISTS (SELECT FROM penstock.ready r WHERE r.queue_id = e.queue_id AND r.lock_key = e.lock_key)
                    ELSE penstock.in_line(e) END
    UNION ALL
    SELECT 'an initial entry has a due time', format('entry %s of queue %s', e.id, e.queue_id)
      FROM penstock.entry e WHERE e.status = 'initial' AND e.due_at IS NULL
    UNION ALL
    SELECT 'a disabled entry keeps its priority', format('entry %s of queue %s', e.id, e.queue_id)
      FROM penstock.entry e WHERE (e.priority < 0) <> (e.enabled_priority IS NOT NULL)
    UNION ALL
    SELECT 'the ready row of a solo entry has an entry', format('entry %s of queue %s at %s', r.entry_id, r.queue_id, r.pos)
      FROM penstock.ready r
     WHERE r.entry_id IS NOT NULL
       AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = r.queue_id AND e.id = r.entry_id AND e.status = 'pending')
    UNION ALL
    SELECT 'a solo entry has one ready row', format('entry %s of queue %s has %s', r.entry_id, r.queue_id, count(*))
      FROM penstock.ready r WHERE r.entry_id IS NOT NULL GROUP BY r.queue_id, r.entry_id HAVING count(*) > 1
    UNION ALL
    SELECT 'a lock has entries', format('key %s of queue %s, token %s', l.lock_key, l.queue_id, l.token)
      FROM penstock.lock l
     WHERE l.claimed_at < clock_timestamp() - grace
       AND NOT CASE WHEN left(l.lock_key, 1) = '#'
                    THEN EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = l.queue_id AND e.id = l.last_entry_id)
                    ELSE EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = l.queue_id AND e.lock_key = l.lock_key) END
    UNION ALL
    SELECT 'a lock has a node', format('key %s of queue %s, token %s, node %s', l.lock_key, l.queue_id, l.token, l.node_id)
      FROM penstock.lock l WHERE NOT EXISTS (SELECT FROM penstock.node n WHERE n.id = l.node_id)
    UNION ALL
    SELECT 'a token is handed out once', format('token %s is on %s locks', l.token, count(*))
      FROM penstock.lock l GROUP BY l.token HAVING count(*) > 1
    UNION ALL
    SELECT 'a token was handed out by the sequence', format('token %s of key %s', l.token, l.lock_key)
      FROM penstock.lock l WHERE l.token > (SELECT coalesce(pg_sequence_last_value('penstock.token_seq'), 0))
    UNION ALL
    -- A later run of an entry has the larger token: its result cannot name an older one than a lock that stands.
    SELECT 'tokens of a key grow', format('entry %s ended under token %s, its lock has %s', r.entry_id, r.token, l.token)
      FROM penstock.lock l JOIN penstock.result r ON r.queue_id = l.queue_id AND l.lock_key = '#' || r.entry_id AND r.token >= l.token
    UNION ALL
    SELECT 'an entry is in one place', format('entry %s of queue %s is in %s', w.id, w.queue_id, string_agg(w.place, ', ' ORDER BY w.place))
      FROM (SELECT queue_id, id, 'entry' AS place FROM penstock.entry
            UNION ALL SELECT queue_id, entry_id, 'result' FROM penstock.result
            UNION ALL SELECT queue_id, entry_id, 'failure' FROM penstock.failure) w
     GROUP BY w.queue_id, w.id HAVING count(*) > 1
    UNION ALL
    -- Each side counted by itself: the first by what is stored, the second by what the locks say.
    SELECT 'initial + pending = computing + awaiting_compute', format('queue %s: %s + %s, %s + %s', i.queue_id, i.initial, i.pending, i.computing, i.awaiting)
      FROM (SELECT e.queue_id,
                   count(*) FILTER (WHERE e.status = 'initial') AS initial, count(*) FILTER (WHERE e.status = 'pending') AS pending,
                   count(*) FILTER (WHERE s.state = 'computing') AS computing,
                   count(*) FILTER (WHERE s.state IN ('initial', 'pending')) AS awaiting
              FROM penstock.entry e LEFT JOIN penstock.entry_status s ON s.queue_id = e.queue_id AND s.id = e.id
             WHERE e.priority >= 0 GROUP BY e.queue_id) i
     WHERE i.initial + i.pending <> i.computing + i.awaiting
$$;

-- Name: check_options(penstock.queue, jsonb[], text[], text[], smallint[], text[], text[], text[], text[], timestamp with time zone[], timestamp with time zone[], timestamp with time zone[], real[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.check_options(q penstock.queue, payloads jsonb[], lock_keys text[], flows text[], priorities smallint[], names text[], idempotency_keys text[], unique_keys text[], unique_policies text[], dues timestamp with time zone[], start_bys timestamp with time zone[], finish_bys timestamp with time zone[], costs real[]) RETURNS void
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    bad record;
BEGIN
    SELECT i, problem INTO bad FROM (
        SELECT i, CASE
            WHEN coalesce(lock_key, penstock.lock_key_of(payload, q.grouping)) LIKE '#%'
                 THEN 'lock_key begins with "#", which stands for solo entries'
            WHEN coalesce(lock_key, penstock.lock_key_of(payload, q.grouping)) = '' THEN 'lock_key is empty; leave it out for a solo entry'
            WHEN octet_length(coalesce(lock_key, penstock.lock_key_of(payload, q.grouping))) > 512 THEN 'lock_key is longer than 512 bytes'
            WHEN octet_length(flow) > 256 THEN 'flow is longer than 256 bytes'
            WHEN priority NOT BETWEEN 0 AND 9 THEN 'priority is not between 0 and 9'
            WHEN octet_length(name) > 256 THEN 'name is longer than 256 bytes'
            WHEN ikey = '' OR octet_length(ikey) > 512 THEN 'idempotency_key is empty or longer than 512 bytes'
            WHEN ukey = '' OR octet_length(ukey) > 500 THEN 'unique_key is empty or longer than 500 bytes'
            WHEN ukey IS NOT NULL AND coalesce(upolicy, '') NOT IN ('while_queued', 'while_active', 'one_running_one_queued')
                 THEN 'unique_policy is not one of while_queued, while_active, one_running_one_queued'
            WHEN ukey IS NULL AND upolicy IS NOT NULL THEN 'unique_policy is given without unique_key'
            WHEN NOT isfinite(due) OR NOT isfinite(start_by) OR NOT isfinite(finish_by) THEN 'due_at, start_by and finish_by must be finite'
            WHEN finish_by < start_by THEN 'finish_by is before start_by'
            WHEN start_by < due THEN 'start_by is before due_at'
            WHEN cost < 0 OR cost = 'NaN' OR cost = 'Infinity' THEN 'cost is not a number of at least 0'
            END AS problem
          FROM unnest(payloads, lock_keys, flows, priorities, names, idempotency_keys, unique_keys, unique_policies,
                      dues, start_bys, finish_bys, costs)
               WITH ORDINALITY AS u(payload, lock_key, flow, priority, name, ikey, ukey, upolicy, due, start_by, finish_by, cost, i)
    ) c WHERE problem IS NOT NULL ORDER BY i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% (entry %)', bad.problem, bad.i USING ERRCODE = 'PS002';
    END IF;
END $$;

-- Name: check_payloads(penstock.queue, jsonb[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.check_payloads(q penstock.queue, payloads jsonb[]) RETURNS void
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    bad record;
BEGIN
    IF cardinality(payloads) = 1 AND pg_column_size(payloads[1]) <= q.payload_limit THEN
        RETURN; -- a push of one is too common to run a query for it
    END IF;
    SELECT i, pg_column_size(p) AS bytes, p IS NULL AS missing INTO bad
      FROM unnest(payloads) WITH ORDINALITY u(p, i)
     WHERE p IS NULL OR pg_column_size(p) > q.payload_limit LIMIT 1;
    IF FOUND AND bad.missing THEN
        RAISE EXCEPTION 'payload of entry % is missing', bad.i
            USING ERRCODE = 'PS002', HINT = 'Give a JSON value; null is written as the JSON text null.';
    ELSIF FOUND THEN
        RAISE EXCEPTION 'payload of entry % has % bytes; queue "%" takes at most %', bad.i, bad.bytes, q.name, q.payload_limit
            USING ERRCODE = 'PS003', HINT = 'Store the data elsewhere and push a reference to it, or raise payload_limit of the queue.';
    END IF;
END $$;

-- Name: check_queue(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.check_queue() RETURNS trigger
    LANGUAGE plpgsql
    AS $_$
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
END $_$;

-- Name: check_statement(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.check_statement(statement text) RETURNS void
    LANGUAGE plpgsql
    SET check_function_bodies TO 'on'
    AS $$
DECLARE
    body text;
BEGIN
    -- Nothing of the text is executed: it is a literal here, the body of a function that is parsed and never called. Between
    -- the parentheses of COPY stands one SELECT, INSERT, UPDATE, DELETE or MERGE; that form goes no further than the
    -- grammar. The other one resolves names and types. A text that closes the parenthesis itself fails there.
    FOREACH body IN ARRAY ARRAY[format(E'COPY (%s\n) TO STDOUT', rtrim(statement, E'; \t\r\n')), statement] LOOP
        EXECUTE format('CREATE OR REPLACE FUNCTION pg_temp.penstock_statement(jsonb, jsonb) RETURNS void LANGUAGE sql AS %L', body);
    END LOOP;
    DROP FUNCTION pg_temp.penstock_statement(jsonb, jsonb);
END $$;

-- Name: claim_room(integer, text, integer, integer[], integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.claim_room(queue integer, in_flow text, wanted integer, known integer[], pace integer, OUT ok boolean, OUT locks integer, OUT entries integer, OUT wait double precision, OUT uncounted_to bigint) RETURNS record
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
DECLARE
    l     record;
    id    integer;
    ids   integer[];
    needs integer := 0;
    used  bigint;
    most  bigint; -- of any flow, where the limit is for each
    whole boolean := false; -- what all flows share leaves no room
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM penstock.need_read_committed();
    END IF;
    ok := true;
    locks := 2147483647;
    entries := 2147483647;
    wait := 0;
    uncounted_to := 9223372036854775807;
    FOREACH id IN ARRAY known LOOP
        IF pace = 0 THEN
            ok := ok AND pg_try_advisory_xact_lock_shared(penstock.limit_lock(id));
        ELSE
            ok := ok AND pg_try_advisory_xact_lock(penstock.limit_lock(id));
        END IF;
    END LOOP;
    IF NOT ok THEN
        RETURN;
    END IF;
    -- Only what is read from here on is no older than the locks.
    FOR l IN SELECT g.*, u.units, t.last_value AS drawn, g.uncounted_to >= t.last_value + wanted AS plenty,
                    coalesce((SELECT least(g.burst, b.units + g.rate * extract(epoch FROM clock_timestamp() - b.at)) FROM penstock.bucket b
                               WHERE b.limit_id = g.id AND b.flow = CASE WHEN g.per_flow THEN in_flow ELSE '' END), g.burst) AS held
               FROM penstock.limit_use u
              CROSS JOIN LATERAL (SELECT * FROM penstock."limit" x WHERE x.id = u.limit_id OFFSET 0) g
              CROSS JOIN penstock.token_seq t
              WHERE u.queue_id = queue ORDER BY u.limit_id
    LOOP
        IF l.id <> ALL (known) THEN
            ok := false;
            RETURN;
        END IF;
        ids := ids || l.id;
        needs := greatest(needs, CASE WHEN l.per_key THEN 2 WHEN l.rate IS NOT NULL THEN 1 ELSE 0 END);
        CONTINUE WHEN l.per_key;
        IF l.plenty THEN
            uncounted_to := least(uncounted_to, l.uncounted_to);
        ELSIF l.max_units IS NOT NULL THEN
            IF in_flow IS NULL AND l.per_flow OR NOT pg_try_advisory_xact_lock(penstock.limit_lock(l.id)) THEN -- somebody shares it with us
                ok := false;
                RETURN;
            END IF;
            IF l.per_flow THEN
                SELECT coalesce(max(f.used) FILTER (WHERE f.flow = in_flow), 0), coalesce(max(f.used), 0) INTO used, most
                  FROM (SELECT k.flow, sum(u.units) AS used
                          FROM penstock.limit_use u
                         CROSS JOIN LATERAL (SELECT x.flow FROM penstock.lock x WHERE x.queue_id = u.queue_id OFFSET 0) k
                         WHERE u.limit_id = l.id GROUP BY k.flow) f;
            ELSE
                SELECT coalesce(sum(u.units * c.locks), 0) INTO used
                  FROM penstock.limit_use u
                 CROSS JOIN LATERAL (SELECT count(*) AS locks FROM penstock.lock x WHERE x.queue_id = u.queue_id OFFSET 0) c
                 WHERE u.limit_id = l.id;
                most := used;
            END IF;
            locks := least(locks, greatest(0, (l.max_units - used) / l.units));
            whole := whole OR NOT l.per_flow AND l.max_units - used < l.units;
            most := (l.max_units - most) / (SELECT max(u.units) FROM penstock.limit_use u WHERE u.limit_id = l.id);
            IF most >= 4 * wanted THEN
                -- An operator may have the row, and waits for the lock that we have.
                UPDATE penstock."limit" x SET uncounted_to = l.drawn + most
                 WHERE x.ctid = (SELECT y.ctid FROM penstock."limit" y WHERE y.id = l.id FOR NO KEY UPDATE SKIP LOCKED);
            END IF;
        END IF;
        IF l.rate IS NOT NULL AND (in_flow IS NOT NULL OR NOT l.per_flow) THEN
            whole := whole OR NOT l.per_flow AND l.held < l.units;
            entries := least(entries, floor(greatest(0, l.held) / l.units));
            IF l.held < l.units THEN
                wait := greatest(wait, (l.units - l.held) / l.rate);
            END IF;
        END IF;
    END LOOP;
    locks := least(locks, entries);
    IF whole THEN
        uncounted_to := 0;
    END IF;
    ok := coalesce(ids = known AND needs = pace, false);
END $$;

-- Name: compact(text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.compact(queue text, lock_key text) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    q        penstock.queue := penstock.queue_row(queue);
    ids      bigint[];
    payloads jsonb[];
BEGIN
    IF NOT q.mergeable THEN
        RAISE EXCEPTION 'queue "%" is not mergeable', q.name USING ERRCODE = 'PS006',
            HINT = 'Set mergeable, and merge to first, last, object or array, with penstock.alter_queue.';
    END IF;
    SELECT array_agg(c.id ORDER BY c.id), array_agg(c.payload ORDER BY c.id) INTO ids, payloads
      FROM penstock.compactable(q, compact.lock_key) c;
    IF ids IS NULL THEN
        RETURN 0;
    END IF;
    RETURN penstock.replace_merged(q, ids, penstock.merge_payloads(q.merge, payloads));
END $$;

-- Name: compact_queue(text, integer, integer, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.compact_queue(queue text, min_entries integer DEFAULT 2, most_keys integer DEFAULT 1000, INOUT after text DEFAULT ''::text, OUT replaced integer) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue);
    many boolean;
BEGIN
    replaced := 0;
    FOR i IN 1 .. most_keys LOOP
        SELECT min(e.lock_key) INTO after FROM (
            SELECT x.lock_key FROM penstock.entry x
             WHERE x.queue_id = q.id AND x.lock_key > after AND x.status = 'pending' AND x.priority >= 0
             ORDER BY x.lock_key LIMIT 1) e;
        EXIT WHEN after IS NULL;
        SELECT count(*) = min_entries INTO many FROM (
            SELECT FROM penstock.entry x
             WHERE x.queue_id = q.id AND x.lock_key = after AND x.status = 'pending' AND x.priority >= 0 LIMIT min_entries) e;
        IF many THEN
            replaced := replaced + penstock.compact(q.name, after);
        END IF;
    END LOOP;
END $$;

-- Name: compactable(penstock.queue, text, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.compactable(q penstock.queue, key text, most integer DEFAULT 1000) RETURNS SETOF penstock.entry
    LANGUAGE plpgsql
    AS $$
DECLARE
    e     penstock.entry;
    run   bigint[] := '{}';
    bytes bigint := 0;
BEGIN
    PERFORM penstock.need_read_committed();
    IF NOT penstock.hold_key(q.id, key) THEN
        RETURN;
    END IF;
    FOR e IN SELECT * FROM penstock.entry x
              WHERE x.queue_id = q.id AND x.lock_key = key AND x.status = 'pending' AND x.priority >= 0
                AND x.id > coalesce((SELECT l.last_entry_id FROM penstock.lock l WHERE l.queue_id = q.id AND l.lock_key = key), 0)
              ORDER BY x.id LIMIT most
    LOOP
        bytes := bytes + pg_column_size(e.payload);
        IF e.callback IS NOT NULL OR (bytes > q.payload_limit AND q.merge IN ('object', 'array')) THEN
            EXIT WHEN cardinality(run) > 1;
            run := '{}';
            bytes := pg_column_size(e.payload);
            CONTINUE WHEN e.callback IS NOT NULL;
        END IF;
        run := run || e.id;
    END LOOP;
    -- Lock first, return after: an error in the middle of RETURN QUERY would leave the rows before it in the answer.
    PERFORM FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (run) ORDER BY x.id FOR UPDATE NOWAIT;
    IF cardinality(run) > 1 AND cardinality(run) = (SELECT count(*) FROM penstock.entry x
        WHERE x.queue_id = q.id AND x.id = ANY (run) AND x.status = 'pending' AND x.priority >= 0) THEN
        RETURN QUERY SELECT * FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (run) ORDER BY x.id;
    END IF;
EXCEPTION WHEN lock_not_available THEN
    RETURN; -- disabling or cancelling one of them just now
END $$;

-- Name: complete_batch(penstock.batch); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.complete_batch(b penstock.batch) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    verdict text;
    bad     bigint := (SELECT count(*) FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.outcome <> 'done');
    parts   bigint := (SELECT count(*) FROM penstock.batch_part p WHERE p.batch_id = b.id);
    target  text := (SELECT name FROM penstock.queue WHERE id = b.completion_queue_id);
    pushed  bigint;
BEGIN
    verdict := CASE WHEN b.cancelled_by IS NOT NULL THEN 'cancelled' WHEN bad > 0 OR b.problem IS NOT NULL THEN 'failed' ELSE 'done' END;
    IF target IS NOT NULL THEN
        pushed := penstock.push(target, penstock.batch_payload(b, 'end', jsonb_build_object('status', verdict, 'parts', parts, 'bad', bad)),
                                flow => b.flow, priority => b.priority, name => 'batch:' || b.id);
    END IF;
    UPDATE penstock.batch SET status = CASE WHEN pushed IS NULL THEN verdict ELSE 'ending' END, completion_entry_id = pushed,
                              problem = coalesce(problem, CASE WHEN bad > 0 AND verdict = 'failed' THEN bad || ' of ' || parts || ' parts did not end well' END),
                              ended_at = CASE WHEN pushed IS NULL THEN clock_timestamp() END
     WHERE id = b.id;
END $$;

-- Name: count(integer, text, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.count(queue_id integer, what text, n bigint) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM count(nextval(format('penstock.%I', what || '_' || queue_id)::regclass)) FROM generate_series(1, n);
END $$;

-- Name: count_again(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.count_again() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF TG_TABLE_NAME = 'limit' THEN
        PERFORM pg_advisory_xact_lock(penstock.limit_lock(NEW.id));
        NEW.uncounted_to := 0;
    ELSE
        PERFORM pg_advisory_xact_lock(penstock.limit_lock(NEW.limit_id));
        UPDATE penstock."limit" SET uncounted_to = 0 WHERE id = NEW.limit_id;
    END IF;
    RETURN NEW;
END $$;

-- Name: count_depth(integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.count_depth(queue integer) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
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

-- Name: count_matching(text, text, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.count_matching(queue text, verb text, filter jsonb) RETURNS bigint
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
    n bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM %s WHERE %s', penstock.operation_source(q, verb), penstock.operation_filter(q, verb, filter)) INTO n;
    RETURN n;
EXCEPTION WHEN invalid_text_representation OR invalid_datetime_format OR datetime_field_overflow OR interval_field_overflow
            OR numeric_value_out_of_range THEN
    RAISE EXCEPTION 'filter is not valid: %', SQLERRM USING ERRCODE = 'PS002';
END $$;

-- Name: count_queue(penstock.queue); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.count_queue(q penstock.queue) RETURNS TABLE(queue_id integer, initial bigint, pending bigint, disabled bigint, computing bigint, failed bigint, estimated boolean)
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $_$
DECLARE
    total        bigint;
    off_initial  bigint; -- disabled and initial
BEGIN
    queue_id := q.id;
    -- The locks are as few as the work in flight: each is looked up.
    EXECUTE format($sql$
        SELECT (SELECT count(*) FROM (SELECT FROM penstock.%1$I e WHERE e.queue_id = $1 LIMIT 10001) b),
               (SELECT count(*) FROM (SELECT FROM penstock.%1$I e WHERE e.queue_id = $1 AND e.status = 'initial' LIMIT 10001) b),
               d.n, d.initial,
               (SELECT coalesce(sum(c.n), 0)::bigint
                  FROM penstock.lock l CROSS JOIN LATERAL (
                       SELECT count(*) AS n FROM penstock.%1$I e
                        WHERE left(l.lock_key, 1) = '#' AND e.queue_id = $1 AND e.id = l.last_entry_id
                          AND e.status = 'pending' AND e.priority >= 0
                       UNION ALL
                       SELECT count(*) FROM penstock.%1$I e
                        WHERE left(l.lock_key, 1) <> '#' AND e.queue_id = $1 AND e.lock_key = l.lock_key AND e.id <= l.last_entry_id
                          AND e.status = 'pending' AND e.priority >= 0) c
                 WHERE l.queue_id = $1)
          FROM (SELECT count(*) AS n, count(*) FILTER (WHERE b.status = 'initial') AS initial FROM (
                SELECT e.status FROM penstock.%1$I e WHERE e.queue_id = $1 AND e.priority = -1 LIMIT 10001) b) d
        $sql$, 'entry_' || q.name) INTO total, initial, disabled, off_initial, computing USING q.id;
    SELECT count(*) INTO failed FROM (SELECT FROM penstock.failure f WHERE f.queue_id = q.id LIMIT 100001) b;
    estimated := total > 10000 OR failed > 100000;
    IF total > 10000 THEN
        total := greatest(total, penstock.live_entries(q.name));
    END IF;
    IF initial > 10000 THEN
        initial := greatest(initial, penstock.indexed_entries(q.name, 'due_at'));
    END IF;
    IF disabled > 10000 THEN
        disabled := greatest(disabled, penstock.indexed_entries(q.name, 'disabled'));
    END IF;
    initial := greatest(0, initial - off_initial);
    pending := greatest(total - disabled - initial, computing);
    RETURN NEXT;
EXCEPTION WHEN undefined_table THEN
    initial := 0; pending := 0; disabled := 0; computing := 0; failed := 0; estimated := false;
    RETURN NEXT;
END $_$;

-- Name: count_queues(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.count_queues() RETURNS TABLE(queue_id integer, initial bigint, pending bigint, disabled bigint, computing bigint, failed bigint, estimated boolean)
    LANGUAGE sql STABLE
    AS $$
    SELECT c.* FROM penstock.queue q CROSS JOIN LATERAL penstock.count_queue(q) c
$$;

-- Name: counter(text, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.counter(what text, queue_id integer) RETURNS bigint
    LANGUAGE sql
    AS $$
    SELECT coalesce(pg_sequence_last_value(format('penstock.%I', what || '_' || queue_id)::regclass), 0)
$$;

-- Name: create_batch(text, text, jsonb, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.create_batch(name text, queue text, options jsonb, reason text DEFAULT ''::text, actor text DEFAULT CURRENT_USER) RETURNS bigint
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

-- Name: create_cron_entries(bigint[], timestamp with time zone[], timestamp with time zone[], timestamp with time zone[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.create_cron_entries(jobs bigint[], nominals timestamp with time zone[], dues timestamp with time zone[], handled timestamp with time zone[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    batch record;
    made  integer := 0;
BEGIN
    FOR batch IN
        SELECT q.name AS queue, array_agg(k.i ORDER BY k.i) AS picks
          FROM unnest(jobs) WITH ORDINALITY k(job, i)
          JOIN penstock.cron_job j ON j.id = k.job
          JOIN penstock.queue q ON q.id = j.queue_id
         GROUP BY q.name
    LOOP
        BEGIN
            made := made + penstock.push_cron_entries(batch.queue, batch.picks, jobs, nominals, dues, handled);
        EXCEPTION WHEN OTHERS THEN
            FOR i IN 1 .. cardinality(batch.picks) LOOP
                BEGIN
                    made := made + penstock.push_cron_entries(batch.queue, batch.picks[i:i], jobs, nominals, dues, handled);
                EXCEPTION WHEN OTHERS THEN
                    UPDATE penstock.cron_job SET problem = SQLERRM, look_at = clock_timestamp() + interval '1 minute'
                     WHERE id = jobs[batch.picks[i]];
                END;
            END LOOP;
        END;
    END LOOP;
    RETURN made;
END $$;

-- Name: create_cron_job(text, text, text, jsonb, jsonb, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.create_cron_job(job text, queue text, spec text, payload jsonb DEFAULT '{}'::jsonb, options jsonb DEFAULT '{}'::jsonb, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS bigint
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

-- Name: create_queue(text, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.create_queue(queue_name text, options jsonb DEFAULT '{}'::jsonb) RETURNS integer
    LANGUAGE plpgsql
    AS $_$
DECLARE
    q     penstock.queue;
    child text;
BEGIN
    PERFORM penstock.hold_limits(); -- before the quota of the application, whose row the new queue takes
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
END $_$;

-- Name: cron_job; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.cron_job (
    id bigint NOT NULL,
    queue_id integer NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    spec text NOT NULL,
    zone text DEFAULT 'UTC'::text NOT NULL,
    jitter interval DEFAULT '00:00:00'::interval NOT NULL,
    starts_at timestamp with time zone,
    ends_at timestamp with time zone,
    catch_up text DEFAULT 'last'::text NOT NULL,
    catch_up_max smallint DEFAULT 100 NOT NULL,
    grace interval DEFAULT '00:01:00'::interval NOT NULL,
    gap text,
    fold text,
    overlap text DEFAULT 'skip'::text NOT NULL,
    payload jsonb DEFAULT '{}'::jsonb NOT NULL,
    lock_key text COLLATE pg_catalog."C",
    flow text COLLATE pg_catalog."C",
    priority smallint,
    paused_at timestamp with time zone,
    paused_by text,
    paused_reason text,
    paused_until timestamp with time zone,
    problem text,
    run_now_at timestamp with time zone,
    handled_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    catching_up_to timestamp with time zone,
    nominal_at timestamp with time zone,
    due_at timestamp with time zone,
    entry_id bigint,
    fired_at timestamp with time zone,
    following_at timestamp with time zone,
    ended_at timestamp with time zone,
    look_at timestamp with time zone DEFAULT '-infinity'::timestamp with time zone NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT cron_job_catch_up_check CHECK ((catch_up = ANY (ARRAY['none'::text, 'last'::text, 'all'::text]))),
    CONSTRAINT cron_job_catch_up_max_check CHECK (((catch_up_max >= 1) AND (catch_up_max <= 1000))),
    CONSTRAINT cron_job_ends_at_check CHECK (isfinite(ends_at)),
    CONSTRAINT cron_job_fold_check CHECK ((fold = ANY (ARRAY['first'::text, 'both'::text]))),
    CONSTRAINT cron_job_gap_check CHECK ((gap = ANY (ARRAY['fire'::text, 'skip'::text]))),
    CONSTRAINT cron_job_grace_check CHECK ((grace > '00:00:00'::interval)),
    CONSTRAINT cron_job_jitter_check CHECK (((jitter >= '00:00:00'::interval) AND (jitter <= '1 day'::interval))),
    CONSTRAINT cron_job_name_check CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 256))),
    CONSTRAINT cron_job_overlap_check CHECK ((overlap = ANY (ARRAY['skip'::text, 'queue'::text, 'cancel_running'::text]))),
    CONSTRAINT cron_job_priority_check CHECK (((priority >= 0) AND (priority <= 9))),
    CONSTRAINT cron_job_starts_at_check CHECK (isfinite(starts_at))
)
WITH (fillfactor='70');

-- Name: COLUMN cron_job.problem; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.cron_job.problem IS 'why the job has no entry: a spec that cannot be read, or a push that was refused';

-- Name: COLUMN cron_job.handled_at; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.cron_job.handled_at IS 'nominal times up to this one have been fired or dropped';

-- Name: COLUMN cron_job.catching_up_to; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.cron_job.catching_up_to IS 'the last of several missed nominal times that are fired one after another';

-- Name: COLUMN cron_job.due_at; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.cron_job.due_at IS 'nominal time plus jitter: when the waiting entry fires; -infinity: somebody wants it now';

-- Name: COLUMN cron_job.fired_at; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.cron_job.fired_at IS 'when the entry was fired; null: it waits';

-- Name: COLUMN cron_job.following_at; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.cron_job.following_at IS 'when the running entry is to be cancelled, since the next nominal time has come';

-- Name: COLUMN cron_job.look_at; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.cron_job.look_at IS 'when a job without an entry is looked at again; infinity: after somebody has altered it';

-- Name: cron_job_row(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.cron_job_row(job text) RETURNS penstock.cron_job
    LANGUAGE plpgsql
    AS $$
DECLARE
    j penstock.cron_job;
BEGIN
    SELECT * INTO j FROM penstock.cron_job c WHERE c.name = job FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'cron job "%" does not exist', job USING ERRCODE = 'PS010', HINT = 'penstock.cron_status lists the jobs.';
    END IF;
    RETURN j;
END $$;

-- Name: delete_model_override(text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.delete_model_override(name text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE sql
    AS $_$ SELECT penstock.set_model_override($1, NULL, $2, $3) $_$;

-- Name: depth_max(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.depth_max() RETURNS integer
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce(nullif(current_setting('penstock.depth_max', true), '')::integer, 16)
$$;

-- Name: disable_entries(text, text, text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.disable_entries(queue text, scope text, value text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    IF scope NOT IN ('name', 'lock_key') OR coalesce(value, '') = '' THEN
        RAISE EXCEPTION 'scope is not one of name, lock_key, or value is empty' USING ERRCODE = 'PS002';
    END IF;
    INSERT INTO penstock.disabled AS d (queue_id, scope, value, actor, reason)
    VALUES (q.id, disable_entries.scope, disable_entries.value, coalesce(disable_entries.actor, current_user), coalesce(disable_entries.reason, ''))
    ON CONFLICT ON CONSTRAINT disabled_pkey DO UPDATE SET actor = excluded.actor, reason = excluded.reason;
    RETURN penstock.switch_entries(q, 'disable', disable_entries.scope, disable_entries.value, disable_entries.reason, disable_entries.actor);
END $$;

-- Name: disable_entry(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.disable_entry(id bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE sql
    AS $_$ SELECT penstock.switch_entry($1, 'disable_entry', $2, $3) $_$;

-- Name: disable_one(integer, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.disable_one(queue integer, wanted bigint) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    e penstock.entry;
BEGIN
    IF NOT penstock.hold_to_switch(queue, wanted) THEN
        RETURN NULL;
    END IF;
    UPDATE penstock.entry SET priority = -1, enabled_priority = priority
     WHERE queue_id = queue AND id = wanted AND priority >= 0
    RETURNING * INTO e;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF e.lock_key IS NOT NULL THEN
        PERFORM penstock.tidy_key(queue, e.lock_key);
    ELSE
        DELETE FROM penstock.ready
         WHERE queue_id = queue AND ctid = ANY (ARRAY(
               SELECT r.ctid FROM penstock.ready r
                WHERE r.queue_id = queue AND r.priority = e.enabled_priority AND r.flow = e.flow
                  AND r.pos = coalesce(e.pos, wanted) AND r.entry_id = wanted
                  FOR UPDATE SKIP LOCKED));
    END IF;
    RETURN true;
END $$;

-- Name: disable_queue(text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.disable_queue(queue text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    UPDATE penstock.queue
       SET disabled_at = clock_timestamp(), disabled_by = coalesce(actor, current_user), disabled_reason = coalesce(reason, ''),
           version = version + 1
     WHERE id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'disable_queue', q.name, reason);
END $$;

-- Name: discard_failure(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.discard_failure(entry_id bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    queue integer := penstock.failed_entry(discard_failure.entry_id);
    f     penstock.failure;
BEGIN
    DELETE FROM penstock.failure x WHERE x.queue_id = queue AND x.entry_id = discard_failure.entry_id RETURNING * INTO f;
    IF NOT FOUND THEN
        PERFORM penstock.failed_entry(discard_failure.entry_id); -- raises: somebody was faster
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(discard_failure.actor, current_user), 'discard_failure', 'entry ' || discard_failure.entry_id, discard_failure.reason,
            jsonb_build_object('class', f.class, 'fingerprint', f.fingerprint, 'failed_at', f.failed_at));
END $$;

-- Name: drain_instance(text, text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.drain_instance(model text, server text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    UPDATE penstock.instance i
       SET draining_at = coalesce(i.draining_at, clock_timestamp()), drain_by = coalesce(drain_instance.actor, current_user),
           drain_reason = coalesce(drain_instance.reason, '')
     WHERE i.id = penstock.instance_id(drain_instance.model, drain_instance.server);
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(drain_instance.actor, current_user), 'drain_instance', drain_instance.model || '/' || drain_instance.server,
            drain_instance.reason);
END $$;

-- Name: drain_node(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.drain_node(node bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    UPDATE penstock.node n
       SET draining_at = coalesce(n.draining_at, clock_timestamp()), drain_by = coalesce(actor, current_user),
           drain_reason = coalesce(reason, '')
     WHERE n.id = drain_node.node;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'node % is not registered', node USING ERRCODE = 'PS008', HINT = 'penstock.node_status lists the nodes.';
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'drain_node', 'node ' || node, reason);
END $$;

-- Name: drop_cron_job(text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.drop_cron_job(job text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    j penstock.cron_job;
BEGIN
    PERFORM penstock.need_read_committed();
    SELECT * INTO j FROM penstock.cron_job_row(job);
    PERFORM penstock.withdraw_cron_entry(j.id, 'the cron job was dropped');
    DELETE FROM penstock.cron_job WHERE id = j.id;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'drop_cron_job', 'cron job ' || job, reason);
END $$;

-- Name: drop_firings(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.drop_firings() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    DELETE FROM penstock.cron_firing WHERE job_id = ANY (ARRAY(SELECT id FROM gone));
    RETURN NULL;
END $$;

-- Name: drop_missing_cron_entries(bigint[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.drop_missing_cron_entries(jobs bigint[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    n integer;
BEGIN
    UPDATE penstock.cron_job j
       SET entry_id = NULL, look_at = '-infinity', handled_at = greatest(j.handled_at, j.nominal_at)
     WHERE j.id = ANY (jobs) AND j.entry_id IS NOT NULL AND j.fired_at IS NULL
       AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = j.queue_id AND e.id = j.entry_id);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- Name: drop_old_partitions(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.drop_old_partitions() RETURNS integer
    LANGUAGE plpgsql
    SET lock_timeout TO '200ms'
    SET "TimeZone" TO 'UTC'
    AS $$
DECLARE
    old text := (SELECT partition FROM penstock.old_partitions ORDER BY behind DESC LIMIT 1);
BEGIN
    IF old IS NULL THEN
        RETURN 0;
    END IF;
    EXECUTE format('DROP TABLE penstock.%I', old);
    RETURN 1;
EXCEPTION
    WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
        RETURN 0;
END $$;

-- Name: drop_own_limit(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.drop_own_limit() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    DELETE FROM penstock."limit" WHERE name = 'queue:' || OLD.name;
    RETURN NULL;
END $$;

-- Name: drop_queue(text, boolean, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.drop_queue(queue_name text, force boolean DEFAULT false, reason text DEFAULT NULL::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue_name);
    n bigint;
BEGIN
    PERFORM penstock.hold_limits();
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '3s', true); -- nobody can change a limit meanwhile
    END IF;
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

-- Name: enable_entries(text, text, text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.enable_entries(queue text, scope text, value text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    DELETE FROM penstock.disabled d WHERE d.queue_id = q.id AND d.scope = enable_entries.scope AND d.value = enable_entries.value;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'entries with % "%" are not disabled', scope, value USING ERRCODE = 'PS006', HINT = 'penstock.disabled lists what is.';
    END IF;
    RETURN penstock.switch_entries(q, 'enable', enable_entries.scope, enable_entries.value, enable_entries.reason, enable_entries.actor);
END $$;

-- Name: enable_entry(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.enable_entry(id bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE sql
    AS $_$ SELECT penstock.switch_entry($1, 'enable_entry', $2, $3) $_$;

-- Name: enable_one(integer, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.enable_one(queue integer, wanted bigint) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    e penstock.entry;
BEGIN
    IF NOT penstock.hold_to_switch(queue, wanted) THEN
        RETURN NULL;
    END IF;
    UPDATE penstock.entry SET priority = enabled_priority, enabled_priority = NULL
     WHERE queue_id = queue AND id = wanted AND priority < 0
    RETURNING * INTO e;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF e.status = 'pending' AND NOT penstock.runs(e) THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id, lock_key)
        VALUES (queue, e.priority, e.flow, CASE WHEN e.lock_key IS NULL THEN coalesce(e.pos, e.id) ELSE e.id END,
                CASE WHEN e.lock_key IS NULL THEN e.id END, e.lock_key)
        ON CONFLICT (queue_id, priority, flow, pos) DO UPDATE SET entry_id = excluded.entry_id, lock_key = excluded.lock_key;
    END IF;
    RETURN true;
END $$;

-- Name: enable_queue(text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.enable_queue(queue text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    UPDATE penstock.queue
       SET disabled_at = NULL, disabled_by = NULL, disabled_reason = NULL, version = version + 1
     WHERE id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'enable_queue', q.name, reason);
END $$;

-- Name: end_batch(penstock.batch); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.end_batch(b penstock.batch) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    failed text := (SELECT f.error FROM penstock.failure f WHERE f.queue_id = b.completion_queue_id AND f.entry_id = b.completion_entry_id LIMIT 1);
BEGIN
    UPDATE penstock.batch
       SET status = CASE WHEN b.cancelled_by IS NOT NULL THEN 'cancelled' WHEN b.problem IS NOT NULL OR failed IS NOT NULL THEN 'failed' ELSE 'done' END,
           problem = coalesce(b.problem, 'completion: ' || failed), ended_at = clock_timestamp()
     WHERE id = b.id;
END $$;

-- Name: end_cron_runs(timestamp with time zone, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.end_cron_runs(at timestamp with time zone, most integer) RETURNS integer
    LANGUAGE plpgsql
    AS $_$
DECLARE
    q     record;
    n     integer;
    ended integer := 0;
BEGIN
    FOR q IN SELECT x.id, 'entry_' || x.name AS entries FROM penstock.queue x
              WHERE x.kind = 'cron' AND EXISTS (SELECT FROM penstock.cron_job j WHERE j.queue_id = x.id AND j.entry_id IS NOT NULL AND j.fired_at IS NOT NULL)
    LOOP
        EXECUTE format($q$
            WITH gone AS MATERIALIZED (
                SELECT j.id, j.entry_id FROM penstock.cron_job j
                 WHERE j.queue_id = $1 AND j.entry_id IS NOT NULL AND j.fired_at IS NOT NULL
                   AND NOT EXISTS (SELECT FROM penstock.%I e WHERE e.queue_id = $1 AND e.id = j.entry_id)
                 ORDER BY j.id LIMIT $3 FOR UPDATE OF j SKIP LOCKED
            )
            UPDATE penstock.cron_job j
               SET entry_id = NULL, following_at = NULL, look_at = '-infinity',
                   ended_at = least($2, coalesce(
                       (SELECT r.finished_at FROM penstock.result r WHERE r.queue_id = $1 AND r.entry_id = gone.entry_id LIMIT 1),
                       (SELECT f.failed_at FROM penstock.failure f WHERE f.queue_id = $1 AND f.entry_id = gone.entry_id LIMIT 1), $2))
              FROM gone WHERE j.id = gone.id$q$, q.entries)
        USING q.id, at, most - ended;
        GET DIAGNOSTICS n = ROW_COUNT;
        ended := ended + n;
        EXIT WHEN ended >= most;
    END LOOP;
    RETURN ended;
END $_$;

-- Name: end_entry(penstock.entry, penstock.outcome, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.end_entry(e penstock.entry, how penstock.outcome, why text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF e.callback IS NOT NULL THEN
        PERFORM penstock.call_back(e, how::text, jsonb_build_object('reason', why));
    END IF;
    DELETE FROM penstock.entry WHERE queue_id = e.queue_id AND id = e.id;
    DELETE FROM penstock.progress WHERE queue_id = e.queue_id AND entry_id = e.id;
    DELETE FROM penstock.cancel_request WHERE queue_id = e.queue_id AND entry_id = e.id;
    INSERT INTO penstock.result (queue_id, entry_id, created_at, attempt, outcome, reason)
    VALUES (e.queue_id, e.id, e.created_at, e.attempt, how, why);
    PERFORM penstock.count(d.queue_id, 'removed', 1) FROM penstock.depth d WHERE d.queue_id = e.queue_id;
    IF e.lock_key IS NOT NULL THEN
        PERFORM penstock.tidy_key(e.queue_id, e.lock_key);
    END IF;
END $$;

-- Name: end_pauses(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.end_pauses() RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    p     record;
    ended integer := 0;
BEGIN
    FOR p IN SELECT x.scope, x.value, q.name AS queue FROM penstock.pause x LEFT JOIN penstock.queue q ON q.id = x.queue_id
              WHERE x.until <= clock_timestamp() ORDER BY x.id LIMIT 100 FOR UPDATE OF x SKIP LOCKED
    LOOP
        PERFORM penstock.resume(p.scope, p.value, p.queue, 'its time is over', 'penstock');
        ended := ended + 1;
    END LOOP;
    RETURN ended;
END $$;

-- Name: ensure_partitions(integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.ensure_partitions(days_ahead integer DEFAULT 7) RETURNS integer
    LANGUAGE plpgsql
    SET lock_timeout TO '200ms'
    SET "TimeZone" TO 'UTC'
    AS $$
DECLARE
    made   integer := 0;
    kind   record;
    day    date;
    child  text;
BEGIN
    FOR kind IN SELECT parent FROM penstock.retention LOOP
        FOR day IN SELECT generate_series(current_date, current_date + days_ahead, interval '1 day')::date LOOP
            child := kind.parent || to_char(day, '_YYYYMMDD');
            CONTINUE WHEN to_regclass('penstock.' || child) IS NOT NULL;
            BEGIN
                EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.%I INCLUDING ALL)', child, kind.parent);
                EXECUTE format('ALTER TABLE penstock.%I ATTACH PARTITION penstock.%I FOR VALUES FROM (%L) TO (%L)',
                               kind.parent, child, day, day + 1);
                made := made + 1;
            EXCEPTION
                -- Somebody else makes it, the default partition has rows of the day, or a long query is in the way:
                -- the next call tries again.
                WHEN duplicate_table OR unique_violation OR check_violation OR lock_not_available OR deadlock_detected THEN
                    NULL;
            END;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;

-- Name: entry_reasons(penstock.entry); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.entry_reasons(e penstock.entry) RETURNS SETOF jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT penstock.because('disabled', 'the entry is disabled' || coalesce(format(', as is every entry with %s %s, by %s%s', d.scope, d.value,
               d.actor, coalesce(': ' || nullif(d.reason, ''), '')), coalesce(format(' by %s%s', a.actor, coalesce(': ' || nullif(a.reason, ''), '')), '')),
               jsonb_build_object('scope', d.scope, 'value', d.value, 'by', coalesce(d.actor, a.actor), 'reason', coalesce(d.reason, a.reason)))
      FROM (SELECT 1) one
      LEFT JOIN LATERAL (SELECT * FROM penstock.disabled x WHERE x.queue_id = e.queue_id
                            AND ((x.scope = 'name' AND x.value = e.name) OR (x.scope = 'lock_key' AND x.value = e.lock_key)) LIMIT 1) d ON true
      LEFT JOIN LATERAL (SELECT * FROM penstock.audit x WHERE x.verb = 'disable_entry' AND x.object = 'entry ' || e.id ORDER BY x.id DESC LIMIT 1) a ON true
     WHERE e.priority < 0
    UNION ALL
    SELECT penstock.because('not_due', format('it is not due for %s%s', penstock.ago(e.due_at - clock_timestamp()),
               CASE WHEN e.attempt > 0 THEN format(', after %s attempts that ended in an error', e.attempt) ELSE '' END),
               jsonb_build_object('due_at', e.due_at, 'seconds', round(extract(epoch FROM e.due_at - clock_timestamp()), 1), 'attempt', e.attempt))
     WHERE e.status = 'initial' AND e.due_at > clock_timestamp()
    UNION ALL
    SELECT penstock.because('promotion_late', format('it came due %s ago and waits for the leader to put it into line', penstock.ago(clock_timestamp() - e.due_at)),
               jsonb_build_object('due_at', e.due_at, 'seconds', round(extract(epoch FROM clock_timestamp() - e.due_at), 1)))
     WHERE e.status = 'initial' AND e.due_at <= clock_timestamp()
    UNION ALL
    SELECT penstock.because('expired', format('its %s passed %s ago; the leader will end it as expired', t.what, penstock.ago(clock_timestamp() - t.at)),
               jsonb_build_object(t.what, t.at, 'seconds', round(extract(epoch FROM clock_timestamp() - t.at), 1)))
      FROM (VALUES ('start_by', e.start_by), ('finish_by', e.finish_by)) t(what, at)
     WHERE t.at <= clock_timestamp() AND NOT penstock.runs(e)
    UNION ALL
    SELECT penstock.because('cancel_requested', format('%s asked %s ago that it be cancelled%s', c.actor, penstock.ago(clock_timestamp() - c.requested_at),
               coalesce(': ' || nullif(c.reason, ''), '')), jsonb_build_object('by', c.actor, 'reason', c.reason, 'delivered_at', c.delivered_at))
      FROM penstock.cancel_request c WHERE c.queue_id = e.queue_id AND c.entry_id = e.id
$$;

-- Name: expire_entries(integer, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.expire_entries(queue_id integer, most integer) RETURNS integer
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
DECLARE
    late  record;
    e     penstock.entry;
    ended integer := 0;
BEGIN
    PERFORM penstock.need_read_committed();
    FOR late IN SELECT o.id, o.why FROM penstock.queue q CROSS JOIN LATERAL penstock.overdue(q.name, most) o
                 WHERE q.id = expire_entries.queue_id
    LOOP
        e := penstock.take_entry(expire_entries.queue_id, late.id);
        IF e.id IS NOT NULL THEN
            PERFORM penstock.end_entry(e, 'expired', late.why);
            ended := ended + 1;
        END IF;
    END LOOP;
    RETURN ended;
END $$;

-- Name: expired_locks(interval); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.expired_locks(grace interval DEFAULT '00:00:30'::interval) RETURNS TABLE(queue_id integer, lock_key text, token bigint, node_id bigint, entry_id bigint, finish_by timestamp with time zone)
    LANGUAGE sql STABLE
    AS $$
    SELECT l.queue_id, l.lock_key, l.token, l.node_id, e.id, e.finish_by
      FROM penstock.lock l
      JOIN penstock.entry e ON e.queue_id = l.queue_id AND e.id = l.last_entry_id
     WHERE left(l.lock_key, 1) = '#' AND e.status = 'pending' AND e.finish_by < clock_timestamp() - grace
    UNION ALL
    SELECT l.queue_id, l.lock_key, l.token, l.node_id, e.id, e.finish_by
      FROM penstock.lock l
      JOIN penstock.entry e ON e.queue_id = l.queue_id AND e.lock_key = l.lock_key AND e.id <= l.last_entry_id
     WHERE left(l.lock_key, 1) <> '#' AND e.status = 'pending' AND e.priority >= 0
       AND e.finish_by < clock_timestamp() - grace
$$;

-- Name: explain_entry(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.explain_entry(id bigint) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    found_at record;
    e        penstock.entry;
    q        penstock.queue;
    reasons  jsonb;
    state    text;
BEGIN
    SELECT * INTO found_at FROM penstock.find_entry(explain_entry.id);
    IF found_at.queue_id IS NULL THEN
        PERFORM penstock.living_entry(explain_entry.id); -- raises PS007
    ELSIF found_at.ended IS NOT NULL THEN
        RETURN (SELECT jsonb_build_object('id', explain_entry.id, 'queue', o.queue, 'state', o.outcome, 'reasons', jsonb_build_array(
                    penstock.because('ended', format('it ended %s ago: %s%s', penstock.ago(clock_timestamp() - o.ended_at), o.outcome, coalesce(', ' || o.reason, '')),
                                     jsonb_build_object('outcome', o.outcome, 'ended_at', o.ended_at, 'attempt', o.attempt))))
                  FROM penstock.outcome_of(explain_entry.id) o);
    END IF;
    SELECT * INTO q FROM penstock.queue x WHERE x.id = found_at.queue_id;
    SELECT * INTO e FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = explain_entry.id;
    state := CASE WHEN e.priority < 0 THEN 'disabled' WHEN e.status = 'initial' THEN 'initial' WHEN penstock.runs(e) THEN 'computing' ELSE 'pending' END;
    SELECT jsonb_agg(r) INTO reasons FROM (
        SELECT r FROM penstock.entry_reasons(e) r
        UNION ALL SELECT r FROM penstock.queue_reasons(q) r WHERE NOT penstock.runs(e)
        UNION ALL SELECT r FROM penstock.push_back_reasons(e) r
        UNION ALL SELECT r FROM penstock.hold_reasons(q, e) r WHERE NOT penstock.runs(e)
        UNION ALL SELECT r FROM penstock.place_reasons(e) r) all_reasons;
    RETURN jsonb_build_object('id', e.id, 'queue', q.name, 'state', state, 'reasons', coalesce(reasons, '[]'));
END $$;

-- Name: failed_entry(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.failed_entry(wanted bigint) RETURNS integer
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    found_at record;
BEGIN
    SELECT * INTO found_at FROM penstock.find_entry(wanted);
    IF found_at.queue_id IS NULL THEN
        PERFORM penstock.living_entry(wanted); -- raises PS007
    ELSIF found_at.ended IS DISTINCT FROM 'failed' THEN
        RAISE EXCEPTION 'entry % of queue "%" has not failed: %', wanted, found_at.queue_name, coalesce(found_at.ended::text, 'it has not ended')
            USING ERRCODE = 'PS006', DETAIL = coalesce(found_at.ended::text, '');
    END IF;
    RETURN found_at.queue_id;
END $$;

-- Name: feed_batch(penstock.batch); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.feed_batch(b penstock.batch) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    room integer := b.window_parts - (SELECT count(*) FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NOT NULL);
    next integer[];
    made bigint[];
BEGIN
    room := least(room, (SELECT q.capacity - (d.counted + (penstock.counter('accepted', q.id) - d.accepted) - (penstock.counter('removed', q.id) - d.removed))
                           FROM penstock.queue q JOIN penstock.depth d ON d.queue_id = q.id WHERE q.id = b.queue_id));
    next := ARRAY(SELECT p.no FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NULL
                   ORDER BY p.no LIMIT greatest(room, 0));
    IF cardinality(next) = 0 THEN
        RETURN 0;
    END IF;
    SELECT p.ids INTO made
      FROM penstock.push_many((SELECT name FROM penstock.queue WHERE id = b.queue_id),
               ARRAY(SELECT penstock.batch_payload(b, 'part', jsonb_build_object('part', n)) FROM unnest(next) WITH ORDINALITY u(n, i) ORDER BY i),
               flows => array_fill(b.flow, ARRAY[cardinality(next)]), priorities => array_fill(b.priority, ARRAY[cardinality(next)]),
               names => array_fill('batch:' || b.id, ARRAY[cardinality(next)])) p;
    UPDATE penstock.batch_part p SET entry_id = u.id
      FROM unnest(next, made) u(no, id) WHERE p.batch_id = b.id AND p.no = u.no;
    RETURN cardinality(next);
END $$;

-- Name: find_entry(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.find_entry(bigint, OUT queue_id integer, OUT queue_name text, OUT ended penstock.outcome) RETURNS record
    LANGUAGE sql STABLE
    AS $_$
    SELECT q.id, q.name, f.outcome
      FROM penstock.queue q CROSS JOIN LATERAL (
           (SELECT NULL::penstock.outcome AS outcome FROM penstock.entry e WHERE e.queue_id = q.id AND e.id = $1 LIMIT 1)
           UNION ALL
           (SELECT r.outcome FROM penstock.result r WHERE r.queue_id = q.id AND r.entry_id = $1 LIMIT 1)
           UNION ALL
           (SELECT 'failed' FROM penstock.failure f WHERE f.queue_id = q.id AND f.entry_id = $1 LIMIT 1)) f
     LIMIT 1
$_$;

-- Name: finish_batch_part(bigint, integer, integer, text, bigint, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.finish_batch_part(batch bigint, part integer, queue integer, key text, token bigint, result jsonb) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM FROM penstock.lock l WHERE l.queue_id = queue AND l.lock_key = key AND l.token = finish_batch_part.token FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE penstock.batch_part p SET outcome = 'done', ended_at = clock_timestamp(), result = finish_batch_part.result
     WHERE p.batch_id = batch AND p.no = part AND p.ended_at IS NULL;
    RETURN FOUND;
END $$;

-- Name: fire_cron_jobs(bigint[], timestamp with time zone[], timestamp with time zone[], timestamp with time zone[], timestamp with time zone[], timestamp with time zone); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.fire_cron_jobs(jobs bigint[], nominals timestamp with time zone[], handled timestamp with time zone[], catching timestamp with time zone[], following timestamp with time zone[], at timestamp with time zone) RETURNS integer
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'on'
    AS $_$
DECLARE
    q     record;
    n     integer;
    fired integer := 0;
BEGIN
    FOR q IN SELECT x.id, 'entry_' || x.name AS entries FROM penstock.queue x
              WHERE x.id = ANY (ARRAY(SELECT DISTINCT j.queue_id FROM penstock.cron_job j WHERE j.id = ANY (jobs)))
    LOOP
        EXECUTE format($q$
            WITH wish AS MATERIALIZED (
                -- OFFSET 0: look each job up, whatever the statistics of a table that was just filled say.
                SELECT j.id, j.entry_id, j.manual, e.row, f.nominal, f.handled, f.catching, f.following
                  FROM unnest($2, $3, $4, $5, $6) f(job, nominal, handled, catching, following)
                 CROSS JOIN LATERAL (
                       SELECT x.id, x.entry_id, x.run_now_at IS NOT NULL AS manual FROM penstock.cron_job x
                        WHERE x.id = f.job AND x.queue_id = $1 OFFSET 0) j
                 CROSS JOIN LATERAL (
                       SELECT x.ctid AS row FROM penstock.%1$I x
                        WHERE x.queue_id = $1 AND x.id = j.entry_id FOR UPDATE SKIP LOCKED) e
            ), firing AS (
                INSERT INTO penstock.cron_firing (job_id, nominal_at, fired_at, entry_id, manual)
                SELECT w.id, w.nominal, $7, w.entry_id, w.manual FROM wish w
                ON CONFLICT DO NOTHING
                RETURNING job_id, entry_id, nominal_at
            ), turned AS (
                UPDATE penstock.%1$I e
                   SET status = 'pending', due_at = $7, pos = nextval('penstock.entry_id_seq'),
                       payload = CASE WHEN jsonb_typeof(e.payload) = 'object'
                                      THEN jsonb_build_object('nominal_at', (SELECT jsonb_object_agg(entry_id, nominal_at) FROM firing) -> e.id::text)
                                           || e.payload
                                      ELSE e.payload END
                 WHERE e.queue_id = $1 AND e.ctid = ANY (ARRAY(SELECT row FROM wish))
                   AND (e.id IN (SELECT entry_id FROM firing)) IS TRUE AND (e.status = 'initial') IS TRUE
                RETURNING e.id, e.priority, e.flow, e.lock_key, e.pos
            ), solo AS (
                INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
                SELECT $1, priority, flow, pos, id FROM turned WHERE lock_key IS NULL AND priority >= 0
            ), grouped AS (
                INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
                SELECT $1, priority, flow, min(pos), lock_key FROM turned WHERE lock_key IS NOT NULL AND priority >= 0
                 GROUP BY priority, flow, lock_key
            )
            UPDATE penstock.cron_job j
               SET fired_at = $7, nominal_at = w.nominal, due_at = $7, handled_at = w.handled, run_now_at = NULL,
                   catching_up_to = w.catching, following_at = w.following
              FROM firing f JOIN wish w ON w.id = f.job_id
             WHERE j.id = f.job_id$q$, q.entries)
        USING q.id, jobs, nominals, handled, catching, following, at;
        GET DIAGNOSTICS n = ROW_COUNT;
        fired := fired + n;
    END LOOP;
    IF fired < cardinality(jobs) THEN
        UPDATE penstock.cron_job j SET handled_at = greatest(j.handled_at, f.nominal_at), run_now_at = NULL, due_at = at
          FROM unnest(jobs, nominals) w(job, nominal)
          JOIN penstock.cron_firing f ON f.job_id = w.job AND f.nominal_at = w.nominal
         WHERE j.id = w.job AND j.fired_at IS NULL;
        PERFORM penstock.drop_missing_cron_entries(jobs);
    END IF;
    RETURN fired;
END $_$;

-- Name: fit_model_queue(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.fit_model_queue(wanted text) RETURNS text
    LANGUAGE plpgsql
    AS $$
DECLARE
    m      penstock.model;
    called text := penstock.model_queue(wanted);
    q      penstock.queue;
    policy jsonb;
BEGIN
    SELECT * INTO m FROM penstock.model x WHERE x.name = wanted;
    SELECT * INTO q FROM penstock.queue x WHERE x.name = called;
    IF q.id IS NULL THEN
        PERFORM penstock.create_queue(called, jsonb_build_object('kind', 'inference', 'model', wanted));
        SELECT * INTO q FROM penstock.queue x WHERE x.name = called;
    ELSIF q.model IS DISTINCT FROM wanted OR q.kind <> 'inference' THEN
        RAISE EXCEPTION 'queue "%", which model "%" needs, belongs to something else', called, wanted
            USING ERRCODE = 'PS006', HINT = 'Give the model another name, or create an inference queue with option model yourself.';
    END IF;
    policy := q.retry || jsonb_build_object('max_attempts',
        coalesce(((m.config || coalesce(m.override, '{}'))->>'max_retries')::integer, 50) + 1);
    IF policy <> q.retry THEN
        PERFORM penstock.alter_queue(called, jsonb_build_object('retry', policy));
    END IF;
    RETURN called;
EXCEPTION
    WHEN invalid_text_representation OR numeric_value_out_of_range THEN
        RAISE EXCEPTION 'config of model "%" is not valid: %', wanted, SQLERRM USING ERRCODE = 'PS002';
END $$;

-- Name: flow_rooms(integer, text[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.flow_rooms(queue integer, flows text[], OUT rooms integer[], OUT waits double precision[]) RETURNS record
    LANGUAGE plpgsql
    AS $$
BEGIN
    SELECT array_agg(f.room ORDER BY f.ord), array_agg(f.wait ORDER BY f.ord) INTO rooms, waits
      FROM (SELECT k.ord, least(min(floor(greatest(0, b.held) / g.units)), 2147483647)::integer AS room, max((g.units - b.held) / g.rate) AS wait
              FROM penstock.limit_use u
             CROSS JOIN LATERAL (SELECT x.id, x.rate::double precision AS rate, x.burst::double precision AS burst, u.units FROM penstock."limit" x
                                  WHERE x.id = u.limit_id AND x.rate IS NOT NULL AND x.per_flow AND NOT x.per_key OFFSET 0) g
             CROSS JOIN unnest(flows) WITH ORDINALITY k(flow, ord)
             CROSS JOIN LATERAL (SELECT coalesce((SELECT least(g.burst, x.units + g.rate * extract(epoch FROM clock_timestamp() - x.at)::double precision)
                                                    FROM penstock.bucket x WHERE x.limit_id = g.id AND x.flow = k.flow COLLATE "C"), g.burst) AS held) b
             WHERE u.queue_id = queue
             GROUP BY k.ord) f;
END $$;

-- Name: follow_quota(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.follow_quota() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    DELETE FROM penstock.limit_use u USING penstock."limit" l
     WHERE u.queue_id = NEW.id AND l.id = u.limit_id AND l.name LIKE 'application:%' AND l.name <> 'application:' || NEW.application;
    INSERT INTO penstock.limit_use (queue_id, limit_id)
    SELECT NEW.id, l.id FROM penstock."limit" l WHERE l.name = 'application:' || NEW.application
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;

-- Name: free_slots(integer, bigint[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.free_slots(instance integer, tokens bigint[]) RETURNS integer
    LANGUAGE sql
    AS $_$
    WITH freed AS (
        DELETE FROM penstock.slot s
         WHERE s.instance_id = $1 AND s.token = ANY (tokens) AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id))
        RETURNING 1
    )
    SELECT count(*)::integer FROM freed
$_$;

-- Name: hand_over(integer, jsonb, text, text, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.hand_over(queue integer, payload jsonb, in_flow text, trace text, look_from bigint) RETURNS TABLE(id bigint, node bigint, claim integer, next bigint)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
DECLARE
    level smallint;
BEGIN
    SELECT q.entry_priority INTO level FROM penstock.queue q
     WHERE q.id = queue AND q.grouping IS NULL AND q.capacity IS NULL AND pg_column_size(hand_over.payload) <= q.payload_limit;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    INSERT INTO penstock.entry (id, queue_id, status, priority, flow, trace, payload)
    VALUES (nextval('penstock.entry_id_seq'), queue, 'pending', level, in_flow, nullif(hand_over.trace, ''), hand_over.payload)
    RETURNING entry.id INTO hand_over.id;
    SELECT s.node, s.claim, s.next INTO hand_over.node, hand_over.claim, hand_over.next FROM penstock.take_seat(queue, in_flow, look_from) s;
    IF hand_over.node IS NULL THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id) VALUES (queue, level, in_flow, hand_over.id, hand_over.id);
    ELSE
        INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost, priority, flow, claimed_at)
        VALUES (queue, '#' || hand_over.id, nextval('penstock.token_seq'), hand_over.node, hand_over.claim, hand_over.id, hand_over.id, 1, 1, level,
                in_flow, clock_timestamp());
        -- We have penstock.lock now: a limit that this statement does not see waits for us, and counts what we lock (await_claims).
        IF EXISTS (SELECT FROM penstock.limit_use u WHERE u.queue_id = queue) THEN
            DELETE FROM penstock.lock WHERE queue_id = queue AND lock_key = '#' || hand_over.id;
            INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id) VALUES (queue, level, in_flow, hand_over.id, hand_over.id);
            hand_over.node := NULL;
        END IF;
    END IF;
    RETURN NEXT;
END $$;

-- Name: head_age(penstock.queue); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.head_age(q penstock.queue) RETURNS double precision
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $_$
DECLARE
    ids  bigint[];
    keys text[];
    age  double precision;
BEGIN
    IF q.disabled_at IS NOT NULL OR (q.paused_at IS NOT NULL AND coalesce(q.paused_until > clock_timestamp(), true)) THEN
        RETURN NULL;
    END IF;
    WITH RECURSIVE lane AS (
        (SELECT priority, flow FROM penstock.ready WHERE queue_id = q.id AND priority >= 0 ORDER BY priority, flow, pos LIMIT 1)
        UNION ALL
        SELECT n.priority, n.flow
          FROM lane CROSS JOIN LATERAL (
               SELECT r.priority, r.flow FROM penstock.ready r
                WHERE r.queue_id = q.id AND (r.priority, r.flow) > (lane.priority, lane.flow)
                ORDER BY r.priority, r.flow, r.pos LIMIT 1) n
    ), few AS (
        SELECT priority, flow FROM lane
         WHERE NOT EXISTS (
               SELECT FROM penstock.pause p
                WHERE coalesce(p.until > clock_timestamp(), true)
                  AND ((p.scope = 'flow' AND p.value = lane.flow AND coalesce(p.queue_id = q.id, true))
                    OR (p.scope = 'application' AND p.value = q.application)
                    OR (p.scope = 'model' AND p.value = q.model)))
         LIMIT 100)
    SELECT array_agg(first.entry_id), array_agg(first.lock_key) INTO ids, keys
      FROM few CROSS JOIN LATERAL (
           SELECT f.entry_id, f.lock_key FROM (
               SELECT r.entry_id, r.lock_key, r.pos FROM penstock.ready r
                WHERE r.queue_id = q.id AND r.priority = few.priority AND r.flow = few.flow ORDER BY r.pos LIMIT 20) f
            WHERE NOT EXISTS (SELECT FROM penstock.lock l WHERE l.queue_id = q.id AND l.lock_key = coalesce(f.lock_key, '#' || f.entry_id))
            ORDER BY f.pos LIMIT 1) first;
    IF ids IS NULL THEN
        RETURN NULL;
    END IF;
    EXECUTE format($sql$
        SELECT extract(epoch FROM clock_timestamp() - min(e.since))::float8
          FROM unnest($1, $2) first(entry_id, lock_key) CROSS JOIN LATERAL (
               (SELECT greatest(x.created_at, x.due_at) AS since FROM penstock.%1$I x WHERE x.queue_id = $3 AND x.id = first.entry_id)
               UNION ALL
               (SELECT greatest(x.created_at, x.due_at) FROM penstock.%1$I x
                 WHERE x.queue_id = $3 AND x.lock_key = first.lock_key AND x.status = 'pending' AND x.priority >= 0
                 ORDER BY x.id LIMIT 1)) e
        $sql$, 'entry_' || q.name) INTO age USING ids, keys, q.id;
    RETURN age;
EXCEPTION WHEN undefined_table THEN
    RETURN NULL;
END $_$;

-- Name: held_slots(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.held_slots(node bigint) RETURNS TABLE(instance integer, slot_number integer, slot_token bigint, in_doubt boolean, valid_ms bigint)
    LANGUAGE sql STABLE
    AS $_$
    SELECT s.instance_id, s.number, s.token, s.doubt_at IS NOT NULL,
           coalesce((SELECT floor(extract(epoch FROM n.beat_at + n.lease - clock_timestamp()) * 1000)::bigint
                       FROM penstock.node n WHERE n.id = $1), 0)
      FROM (SELECT) one LEFT JOIN penstock.slot s ON s.node_id = $1
$_$;

-- Name: hold_key(integer, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.hold_key(queue integer, key text) RETURNS boolean
    LANGUAGE sql
    AS $_$
    SELECT pg_try_advisory_xact_lock(hashtextextended('penstock key ' || $1 || ' ' || $2, 0))
$_$;

-- Name: hold_limits(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.hold_limits() RETURNS void
    LANGUAGE sql
    AS $$ SELECT pg_advisory_xact_lock(hashtextextended('penstock limits', 0)) $$;

-- Name: hold_reasons(penstock.queue, penstock.entry); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.hold_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT penstock.pause_reasons(q, e) UNION ALL SELECT penstock.limit_reasons(q, e)
$$;

-- Name: hold_to_switch(integer, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.hold_to_switch(queue integer, wanted bigint) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    e      penstock.entry;
    locked boolean := false; -- there is a lock record, and we hold it
    free   boolean := true;
BEGIN
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted;
    IF EXISTS (SELECT FROM penstock.lock WHERE queue_id = queue AND lock_key = coalesce(e.lock_key, '#' || wanted)) THEN
        PERFORM FROM penstock.lock WHERE queue_id = queue AND lock_key = coalesce(e.lock_key, '#' || wanted) FOR KEY SHARE SKIP LOCKED;
        locked := FOUND;
        free := FOUND;
    ELSIF e.lock_key IS NOT NULL THEN
        free := penstock.hold_key(queue, e.lock_key);
    END IF;
    IF free THEN
        SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted FOR NO KEY UPDATE SKIP LOCKED;
        free := FOUND OR NOT EXISTS (SELECT FROM penstock.entry WHERE queue_id = queue AND id = wanted);
    END IF;
    IF free AND NOT locked THEN
        PERFORM FROM penstock.ready r
          WHERE r.queue_id = queue AND r.priority = coalesce(e.enabled_priority, e.priority) AND r.flow = e.flow
            AND r.pos = coalesce(e.pos, wanted) AND r.entry_id = wanted
            FOR UPDATE SKIP LOCKED;
        free := FOUND OR (SELECT NOT penstock.in_line(e) AND NOT EXISTS (
            SELECT FROM penstock.lock WHERE queue_id = queue AND lock_key = coalesce(e.lock_key, '#' || wanted)));
    END IF;
    IF NOT free THEN
        RAISE SQLSTATE 'PS900';
    END IF;
    RETURN true;
EXCEPTION WHEN SQLSTATE 'PS900' THEN
    RETURN false; -- and what was locked is free again: a settler must not wait while we try again
END $$;

-- Name: holds_term(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.holds_term(number bigint) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM FROM penstock.leader WHERE term = number AND renewed_at + lease > clock_timestamp() FOR KEY SHARE;
    RETURN FOUND;
END $$;

-- Name: holds_unique_key(bigint, bigint, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.holds_unique_key(queue bigint, held bigint, policy text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    e record;
BEGIN
    SELECT status, priority, flow, lock_key, pos INTO e FROM penstock.entry WHERE queue_id = queue AND id = held;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF policy = 'while_active' THEN
        RETURN true;
    ELSIF e.status = 'initial' THEN
        PERFORM FROM penstock.entry WHERE queue_id = queue AND id = held AND status = 'initial' FOR NO KEY UPDATE;
        IF FOUND THEN
            RETURN true;
        END IF;
    END IF;
    IF e.lock_key IS NULL THEN
        PERFORM FROM penstock.ready r WHERE r.queue_id = queue AND r.priority = e.priority AND r.flow = e.flow
           AND r.pos = coalesce(e.pos, held)
            FOR UPDATE SKIP LOCKED;
    ELSE
        PERFORM FROM penstock.ready r WHERE r.lock_key = e.lock_key AND r.queue_id + 0 = queue LIMIT 1 FOR UPDATE SKIP LOCKED;
    END IF;
    PERFORM FROM penstock.entry WHERE queue_id = queue AND id = held;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    RETURN NOT EXISTS (SELECT FROM penstock.lock l
                        WHERE l.queue_id = queue AND l.lock_key = coalesce(e.lock_key, '#' || held) AND l.last_entry_id >= held);
END $$;

-- Name: hungry_nodes(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.hungry_nodes(wanted text) RETURNS TABLE(node_id bigint, since timestamp with time zone, held bigint)
    LANGUAGE sql STABLE
    AS $$
    SELECT d.node_id, d.since,
           (SELECT count(*) FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id
             WHERE i.model = wanted AND s.node_id = d.node_id AND s.doubt_at IS NULL)
      FROM penstock.slot_demand d
     WHERE d.model = wanted AND d.wanted_at > clock_timestamp() - interval '3 seconds' AND penstock.node_lives(d.node_id)
$$;

-- Name: in_line(penstock.entry); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.in_line(e penstock.entry) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    SELECT e.lock_key IS NULL AND EXISTS (
        SELECT FROM penstock.ready r
         WHERE r.queue_id = e.queue_id AND r.priority = coalesce(e.enabled_priority, e.priority) AND r.flow = e.flow
           AND r.pos = coalesce(e.pos, e.id) AND r.entry_id = e.id)
$$;

-- Name: in_words(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.in_words(said text) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
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

-- Name: indexed_entries(text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.indexed_entries(queue_name text, suffix text) RETURNS bigint
    LANGUAGE sql STABLE
    AS $$
    SELECT greatest(c.reltuples, 0)::bigint
      FROM pg_class c WHERE c.oid = to_regclass(format('penstock.%I', 'entry_' || queue_name || '_' || suffix))
$$;

-- Name: instance_id(text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.instance_id(wanted_model text, wanted_server text) RETURNS integer
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    found_id integer;
BEGIN
    SELECT id INTO found_id FROM penstock.instance WHERE model = wanted_model AND server = wanted_server;
    IF found_id IS NULL THEN
        RAISE EXCEPTION 'model "%" has no instance "%"', wanted_model, wanted_server
            USING ERRCODE = 'PS008', HINT = 'penstock.instance_status lists the instances.';
    END IF;
    RETURN found_id;
END $$;

-- Name: is_off(integer, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.is_off(queue integer, name text, lock_key text) RETURNS boolean
    LANGUAGE sql STABLE
    AS $_$
    SELECT EXISTS (SELECT FROM penstock.disabled d
                    WHERE d.queue_id = $1 AND ((d.scope = 'name' AND d.value = $2) OR (d.scope = 'lock_key' AND d.value = $3)))
$_$;

-- Name: keep_audit(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.keep_audit() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION 'the audit is only ever added to' USING ERRCODE = 'insufficient_privilege';
END $$;

-- Name: keep_queue_kind(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.keep_queue_kind() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
DECLARE
    needs text;
BEGIN
    SELECT format('%s %s', n.what, n.name) INTO needs FROM (
        SELECT 'cron job' AS what, j.name FROM penstock.cron_job j WHERE j.queue_id = OLD.id
        UNION ALL SELECT 'the watch of', w.watched::text FROM penstock.watch w WHERE w.queue_id = OLD.id
        UNION ALL SELECT 'batch', b.id::text FROM penstock.batch b WHERE b.queue_id = OLD.id AND b.ended_at IS NULL) n LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'queue "%" cannot change its kind from % to %: % needs it', OLD.name, OLD.kind, NEW.kind, needs
            USING ERRCODE = 'PS006', HINT = 'Drop the cron jobs, end the watches and wait for the batches first, or make another queue.';
    END IF;
    RETURN NEW;
END $$;

-- Name: keep_watch_queue(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.keep_watch_queue() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
DECLARE
    watched text := (SELECT string_agg(w.watched::text, ', ') FROM penstock.watch w JOIN pg_class c ON c.oid = w.watched WHERE w.queue_id = OLD.id);
BEGIN
    IF watched IS NOT NULL THEN
        RAISE EXCEPTION 'queue "%" records changes of %', OLD.name, watched USING ERRCODE = 'PS006', HINT = 'End that first: SELECT penstock.unwatch(...).';
    END IF;
    DELETE FROM penstock.watch WHERE queue_id = OLD.id;
    RETURN OLD;
END $$;

-- Name: keep_webhook_queue(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.keep_webhook_queue() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        RAISE EXCEPTION 'queue "webhook" belongs to Penstock: entries with a callback could not end without it'
            USING ERRCODE = 'PS006', HINT = 'Pause it, or cancel its entries.';
    ELSIF NEW.kind <> 'webhook' OR NEW.capacity IS NOT NULL OR NEW."grouping" IS NOT NULL OR NEW.payload_limit < 1048576 THEN
        RAISE EXCEPTION 'kind, capacity, grouping and a payload_limit below 1048576 cannot be set for queue "webhook": entries with a callback could not end'
            USING ERRCODE = 'PS002', HINT = 'Pause it to stop deliveries.';
    END IF;
    RETURN NEW;
END $$;

-- Name: key_rooms(integer, text[], bigint[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.key_rooms(queue integer, keys text[], places bigint[]) RETURNS TABLE(pos bigint, lock_key text, room integer, wait double precision)
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    asked timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    SELECT k.pos, k.key, least(min(floor(greatest(0, b.held) / g.units)), 2147483647)::integer, max(greatest(0, (g.units - b.held) / g.rate))::double precision
      FROM (SELECT l.id, l.rate::double precision AS rate, l.burst::double precision AS burst, u.units
              FROM penstock.limit_use u JOIN penstock."limit" l ON l.id = u.limit_id WHERE u.queue_id = queue AND l.per_key OFFSET 0) g
     CROSS JOIN unnest(keys, places) k(key, pos)
     CROSS JOIN LATERAL (SELECT coalesce((SELECT least(g.burst, x.units + g.rate * extract(epoch FROM asked - x.at)::double precision)
                                            FROM penstock.bucket x WHERE x.limit_id = g.id AND x.flow = k.key COLLATE "C"), g.burst) AS held) b
     GROUP BY k.pos, k.key;
END $$;

-- Name: sample; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.sample (
    queue_id integer NOT NULL,
    at timestamp with time zone NOT NULL,
    initial bigint NOT NULL,
    pending bigint NOT NULL,
    disabled bigint NOT NULL,
    computing bigint NOT NULL,
    failed bigint NOT NULL,
    estimated boolean NOT NULL,
    serving integer NOT NULL,
    head_age double precision,
    blocked text,
    accepted bigint NOT NULL,
    gone bigint NOT NULL,
    dead_tuples bigint NOT NULL,
    in_per_second double precision,
    out_per_second double precision
)
PARTITION BY RANGE (at);

-- Name: COLUMN sample.estimated; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample.estimated IS 'some count passed the bound up to which counting is exact';

-- Name: COLUMN sample.head_age; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample.head_age IS 'seconds that the entry has waited which a node would take first; null: there is none';

-- Name: COLUMN sample.blocked; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample.blocked IS 'why no node claims from the queue, as a code of explain_entry; null: nothing is in the way';

-- Name: COLUMN sample.accepted; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample.accepted IS 'rows inserted into the queue''s table since its statistics began; gone: deleted';

-- Name: COLUMN sample.in_per_second; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample.in_per_second IS 'entries accepted a second since the sample before; out_per_second: gone, which is the drain rate';

-- Name: last_sample(integer, interval); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.last_sample(queue integer, within interval DEFAULT '00:00:30'::interval) RETURNS penstock.sample
    LANGUAGE sql STABLE
    AS $$
    SELECT s FROM penstock.sample s WHERE s.queue_id = queue AND s.at > statement_timestamp() - within ORDER BY s.at DESC LIMIT 1
$$;

-- Name: lease_slots(text, bigint, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.lease_slots(wanted text, node bigint, want integer) RETURNS TABLE(instance integer, slot_number integer, slot_token bigint, valid_ms bigint)
    LANGUAGE plpgsql
    AS $$
DECLARE
    i      record;
    most   integer;
    share  integer := penstock.slot_share(wanted, node);
    mine   bigint;
    left_  integer := want;
    got    integer;
    millis bigint;
BEGIN
    SELECT floor(extract(epoch FROM n.beat_at + n.lease - clock_timestamp()) * 1000) INTO millis
      FROM penstock.node n WHERE n.id = node AND n.draining_at IS NULL;
    IF millis IS NULL OR millis <= 0 THEN
        RETURN;
    END IF;
    IF share IS NOT NULL THEN
        SELECT count(*) INTO mine FROM penstock.instance x JOIN penstock.slot s ON s.instance_id = x.id
         WHERE x.model = wanted AND s.node_id = node;
        SELECT least(left_, share - mine, f.free - t.before) INTO left_
          FROM (SELECT coalesce(sum(greatest(x.slots - (SELECT count(*) FROM penstock.slot s WHERE s.instance_id = x.id), 0)), 0) AS free
                  FROM penstock.instance x WHERE x.model = wanted AND penstock.usable(x)) f,
               (SELECT count(*) AS before FROM penstock.hungry_nodes(wanted) h
                 WHERE h.node_id <> node AND h.held = 0
                   AND (mine > 0 OR h.since < coalesce((SELECT own.since FROM penstock.hungry_nodes(wanted) own WHERE own.node_id = node), 'infinity'))) t;
    END IF;
    want := greatest(left_, 0);
    left_ := want;
    FOR i IN SELECT x.id, count(*) OVER () - row_number() OVER (ORDER BY h.held::real / x.slots, x.id) + 1 AS behind
               FROM penstock.instance x
              CROSS JOIN LATERAL (SELECT count(*) AS held FROM penstock.slot s WHERE s.instance_id = x.id) h
              WHERE x.model = wanted AND penstock.usable(x) AND h.held < x.slots
              ORDER BY h.held::real / x.slots, x.id
    LOOP
        EXIT WHEN left_ <= 0;
        SELECT x.slots INTO most FROM penstock.instance x
         WHERE x.id = i.id AND penstock.usable(x) FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        RETURN QUERY
        INSERT INTO penstock.slot (instance_id, number, token, node_id)
        SELECT i.id, n.number, nextval('penstock.token_seq'), node
          FROM (SELECT g.number FROM generate_series(0, most - 1) g(number)
                 WHERE NOT EXISTS (SELECT FROM penstock.slot s WHERE s.instance_id = i.id AND s.number = g.number)
                 ORDER BY g.number
                 LIMIT greatest(0, least(ceil(left_::real / i.behind)::bigint,
                                         most - (SELECT count(*) FROM penstock.slot s WHERE s.instance_id = i.id)))) n
        ON CONFLICT DO NOTHING
        RETURNING slot.instance_id, slot.number, slot.token, millis;
        GET DIAGNOSTICS got = ROW_COUNT;
        left_ := left_ - got;
    END LOOP;
    IF left_ = want THEN
        INSERT INTO penstock.slot_demand AS d (model, node_id) VALUES (wanted, node)
        ON CONFLICT (model, node_id) DO UPDATE
           SET wanted_at = clock_timestamp(),
               since = CASE WHEN d.wanted_at > clock_timestamp() - interval '3 seconds' THEN d.since ELSE clock_timestamp() END;
    ELSE
        DELETE FROM penstock.slot_demand d WHERE d.model = wanted AND d.node_id = node;
    END IF;
END $$;

-- Name: lift_push_back(text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.lift_push_back(queue text, flow text DEFAULT NULL::text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    DELETE FROM penstock.push_back p
     WHERE p.queue_id = q.id AND p.whole = (lift_push_back.flow IS NULL) AND p.flow = coalesce(lift_push_back.flow, '')
       AND p.until > clock_timestamp();
    RETURN FOUND;
END $$;

-- Name: limit_lock(integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.limit_lock(id integer) RETURNS bigint
    LANGUAGE sql IMMUTABLE
    AS $$ SELECT hashtextextended('penstock limit ' || id::text, 0) $$;

-- Name: limit_own_concurrency(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.limit_own_concurrency() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF NEW.max_concurrent IS NOT NULL THEN
        INSERT INTO penstock."limit" (name, max_units) VALUES ('queue:' || NEW.name, NEW.max_concurrent)
        ON CONFLICT (name) DO UPDATE SET max_units = excluded.max_units;
        INSERT INTO penstock.limit_use (queue_id, limit_id)
        SELECT NEW.id, id FROM penstock."limit" WHERE name = 'queue:' || NEW.name
        ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM penstock."limit" WHERE name = 'queue:' || NEW.name;
    END IF;
    RETURN NULL;
END $$;

-- Name: limit_reasons(penstock.queue, penstock.entry); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.limit_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT penstock.because('limit', format('%s of %s units of limit "%s" are in use%s', u.used, g.max_units, g.name,
               CASE WHEN g.per_flow THEN format(' by flow "%s"', e.flow) ELSE '' END),
               jsonb_build_object('limit', g.name, 'held', u.used, 'max_units', g.max_units, 'units', m.units))
      FROM penstock.limit_use m
      JOIN penstock."limit" g ON g.id = m.limit_id
     CROSS JOIN LATERAL (SELECT coalesce(sum(o.units), 0) AS used
                           FROM penstock.limit_use o JOIN penstock.lock k ON k.queue_id = o.queue_id
                          WHERE o.limit_id = g.id AND (NOT g.per_flow OR k.flow = e.flow)) u
     WHERE m.queue_id = q.id AND g.name <> 'queue:' || q.name AND u.used + m.units > g.max_units
    UNION ALL
    SELECT penstock.because('rate', format('limit "%s" lets %s units a second through; the next in %s', g.name, g.rate,
               penstock.ago((m.units - b.units) / g.rate * interval '1 second')),
               jsonb_build_object('limit', g.name, 'rate', g.rate, 'units', round(b.units::numeric, 2), 'seconds', round(((m.units - b.units) / g.rate)::numeric, 2)))
      FROM penstock.limit_use m
      JOIN penstock."limit" g ON g.id = m.limit_id
     CROSS JOIN LATERAL (SELECT penstock.bucket_units(g, CASE WHEN g.per_key THEN e.lock_key ELSE e.flow END) AS units) b
     WHERE m.queue_id = q.id AND g.rate IS NOT NULL AND (e.lock_key IS NOT NULL OR NOT g.per_key) AND b.units < m.units
    UNION ALL
    SELECT penstock.because('no_thread', format('all %s processing threads of the nodes that serve the queue are taken', sum(n.threads)),
               jsonb_build_object('threads', sum(n.threads), 'nodes', count(*)))
      FROM penstock.serving(q.id) s JOIN penstock.node n ON n.id = s.id
    HAVING count(*) > 0 AND bool_and(n.threads > 0 AND (SELECT count(*) FROM penstock.lock l WHERE l.node_id = n.id) >= n.threads)
    UNION ALL
    SELECT CASE WHEN i.usable = 0 THEN
               penstock.because('no_instance', format('none of the %s instances of model %s takes calls%s', i.n, q.model, coalesce(': ' || i.why, '')),
                                jsonb_build_object('model', q.model, 'instances', i.n))
           ELSE penstock.because('no_slot', format('%s of %s slots of model %s are held', i.held, i.slots, q.model),
                                jsonb_build_object('model', q.model, 'held', i.held, 'slots', i.slots)) END
      FROM (SELECT count(*) AS n, count(*) FILTER (WHERE x.usable) AS usable, coalesce(sum(x.slots) FILTER (WHERE x.usable), 0) AS slots,
                   coalesce(sum(x.held) FILTER (WHERE x.usable), 0) AS held,
                   string_agg(DISTINCT x.server || ' ' || CASE WHEN x.draining THEN 'drains' ELSE x.state END || coalesce(' (' || nullif(x.reason, '') || ')', ''), ', ') AS why
              FROM penstock.instance_status x WHERE x.model = q.model) i
     WHERE q.model IS NOT NULL AND i.held >= i.slots
$$;

-- Name: limit_rooms(integer, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.limit_rooms(queue integer, in_flow text, OUT locks integer, OUT entries integer, OUT wait double precision) RETURNS record
    LANGUAGE sql
    AS $_$
    SELECT CASE WHEN r.ok THEN r.locks ELSE 0 END, CASE WHEN r.ok THEN r.entries ELSE 0 END, r.wait
      FROM penstock.claim_room($1, $2, 500000000,
           coalesce((SELECT array_agg(u.limit_id ORDER BY u.limit_id) FROM penstock.limit_use u WHERE u.queue_id = $1), '{}'), penstock.queue_pace($1)) r
$_$;

-- Name: limits_changed(integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.limits_changed(changed integer) RETURNS void
    LANGUAGE sql
    AS $$
    UPDATE penstock.queue SET version = version + 1
     WHERE id IN (SELECT queue_id FROM penstock.limit_use WHERE limit_id = changed)
$$;

-- Name: live_entries(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.live_entries(queue_name text) RETURNS bigint
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce(nullif(pg_stat_get_live_tuples(c.oid), 0), greatest(c.reltuples, 0)::bigint)
      FROM pg_class c WHERE c.oid = to_regclass(format('penstock.%I', 'entry_' || queue_name))
$$;

-- Name: living_entry(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.living_entry(wanted bigint) RETURNS integer
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    found_at record;
BEGIN
    SELECT * INTO found_at FROM penstock.find_entry(wanted);
    IF found_at.queue_id IS NULL THEN
        RAISE EXCEPTION 'entry % does not exist', wanted
            USING ERRCODE = 'PS007', HINT = 'It was never accepted, or its outcome is older than the retention of its queue.';
    ELSIF found_at.ended IS NOT NULL THEN
        RAISE EXCEPTION 'entry % of queue "%" has ended: %', wanted, found_at.queue_name, found_at.ended
            USING ERRCODE = 'PS006', DETAIL = found_at.ended::text;
    END IF;
    RETURN found_at.queue_id;
END $$;

-- Name: lock_key_of(jsonb, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.lock_key_of(payload jsonb, path text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $_$
    SELECT CASE WHEN left(path, 1) = '$' THEN jsonb_path_query_first(payload, path::jsonpath) #>> '{}'
                WHEN position('.' IN path) > 0 THEN payload #>> string_to_array(path, '.')
                ELSE payload ->> path END
$_$;

-- Name: measure(penstock.queue); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.measure(q penstock.queue) RETURNS penstock.sample
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    s penstock.sample;
BEGIN
    SELECT q.id, clock_timestamp(), c.initial, c.pending, c.disabled, c.computing, c.failed, c.estimated,
           (SELECT count(*)::integer FROM penstock.serving(q.id)), penstock.head_age(q),
           coalesce((SELECT r->>'code' FROM penstock.queue_reasons(q) r LIMIT 1),
                    (SELECT p.scope || '_paused' FROM penstock.pause p
                      WHERE coalesce(p.until > clock_timestamp(), true)
                        AND ((p.scope = 'application' AND p.value = q.application) OR (p.scope = 'model' AND p.value = q.model)) LIMIT 1),
                    (SELECT 'pushed_back' FROM penstock.push_back b WHERE b.queue_id = q.id AND b.whole AND b.until > clock_timestamp())),
           coalesce(pg_stat_get_tuples_inserted(t.oid), 0), coalesce(pg_stat_get_tuples_deleted(t.oid), 0),
           coalesce(pg_stat_get_dead_tuples(t.oid), 0), NULL, NULL
      INTO s
      FROM penstock.count_queue(q) c
      LEFT JOIN (SELECT to_regclass(format('penstock.%I', 'entry_' || q.name))::oid AS oid) t ON true;
    RETURN s;
END $$;

-- Name: merge_payloads(text, jsonb[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.merge_payloads(rule text, payloads jsonb[]) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE
    AS $$
DECLARE
    merged jsonb := CASE rule WHEN 'object' THEN '{}' ELSE '[]' END;
    p      jsonb;
BEGIN
    IF rule IN ('first', 'last') THEN
        RETURN payloads[CASE rule WHEN 'first' THEN 1 ELSE cardinality(payloads) END];
    END IF;
    FOREACH p IN ARRAY payloads LOOP
        IF rule = 'object' AND jsonb_typeof(p) <> 'object' THEN
            RAISE EXCEPTION 'payload to be merged is not an object' USING ERRCODE = 'PS002',
                HINT = 'Set merge of the queue to first, last or array.';
        END IF;
        merged := merged || CASE WHEN rule = 'array' AND jsonb_typeof(p) <> 'array' THEN jsonb_build_array(p) ELSE p END;
    END LOOP;
    RETURN merged;
END $$;

-- Name: model_queue(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.model_queue(model text) RETURNS text
    LANGUAGE sql STABLE
    AS $_$
    SELECT coalesce((SELECT q.name FROM penstock.queue q WHERE q.model = $1 AND q.kind = 'inference' ORDER BY q.id LIMIT 1),
                    left(regexp_replace(regexp_replace(lower($1), '[^a-z0-9_]+', '_', 'g'), '^([^a-z])', 'm_\1'), 48))
$_$;

-- Name: move_cron_jobs(bigint[], timestamp with time zone[], timestamp with time zone[], timestamp with time zone[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.move_cron_jobs(jobs bigint[], nominals timestamp with time zone[], dues timestamp with time zone[], handled timestamp with time zone[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'on'
    AS $$
BEGIN
    PERFORM penstock.drop_missing_cron_entries(jobs);
    UPDATE penstock.entry e SET due_at = m.due
      FROM unnest(jobs, dues) m(job, due) JOIN penstock.cron_job j ON j.id = m.job
     WHERE e.queue_id = j.queue_id AND e.id = j.entry_id AND e.status = 'initial' AND m.due IS NOT NULL;
    UPDATE penstock.cron_job j SET nominal_at = m.nominal, due_at = m.due, handled_at = m.handled
      FROM unnest(jobs, nominals, dues, handled) m(job, nominal, due, handled)
     WHERE j.id = m.job AND j.entry_id IS NOT NULL AND m.nominal IS NOT NULL;
    UPDATE penstock.cron_job j SET handled_at = m.handled, look_at = 'infinity'
      FROM unnest(jobs, nominals, handled) m(job, nominal, handled)
     WHERE j.id = m.job AND m.nominal IS NULL;
    PERFORM penstock.withdraw_cron_entry(m.job, 'the schedule has ended')
       FROM unnest(jobs, nominals) m(job, nominal) WHERE m.nominal IS NULL;
END $$;

-- Name: need_model(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.need_model(wanted text) RETURNS void
    LANGUAGE plpgsql STABLE
    AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.model WHERE name = wanted) THEN
        RAISE EXCEPTION 'model "%" is not registered', wanted
            USING ERRCODE = 'PS008', HINT = 'Register it first: SELECT penstock.register_model(name, config).';
    END IF;
END $$;

-- Name: need_read_committed(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.need_read_committed() RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'this function needs read committed, and the transaction is %', current_setting('transaction_isolation')
            USING ERRCODE = 'PS006', HINT = 'Call it in a transaction of its own.';
    END IF;
END $$;

-- Name: node_lives(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.node_lives(bigint) RETURNS boolean
    LANGUAGE sql STABLE
    AS $_$
    SELECT EXISTS (SELECT FROM penstock.node n WHERE n.id = $1 AND n.beat_at + n.lease > clock_timestamp())
$_$;

-- Name: node_paused(bigint, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.node_paused(node_id bigint, node_name text) RETURNS boolean
    LANGUAGE sql STABLE
    AS $_$
    SELECT EXISTS (SELECT FROM penstock.pause p
                    WHERE p.scope = 'node' AND p.value IN ($2, $1::text) AND coalesce(p.until > clock_timestamp(), true))
$_$;

-- Name: operation_filter(penstock.queue, text, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.operation_filter(q penstock.queue, verb text, filter jsonb) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    of_failures boolean := verb IN ('retry_failures', 'discard_failures');
    k           text;
    v           text;
    conditions  text[] := CASE verb WHEN 'disable' THEN ARRAY['priority >= 0']
                                    WHEN 'enable' THEN ARRAY[format('priority < 0 AND NOT penstock.is_off(%s, name, lock_key)', q.id)]
                                    ELSE ARRAY['true'] END;
BEGIN
    IF verb NOT IN ('retry_failures', 'discard_failures', 'cancel', 'disable', 'enable', 'delete') OR verb IS NULL THEN
        RAISE EXCEPTION 'operation "%" does not exist', verb USING ERRCODE = 'PS002',
            HINT = 'The operations are retry_failures, discard_failures, cancel, disable, enable and delete.';
    ELSIF filter IS NULL OR jsonb_typeof(filter) <> 'object' OR filter = '{}' THEN
        RAISE EXCEPTION 'filter is empty' USING ERRCODE = 'PS002', HINT = 'Write {"all": true} to mean everything in the queue.';
    END IF;
    FOR k, v IN SELECT * FROM jsonb_each_text(filter) LOOP
        IF v IS NULL OR k NOT IN ('all', 'name', 'lock_key', 'flow', 'ids', 'older_than', 'before', 'class', 'fingerprint')
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

-- Name: operation_source(penstock.queue, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.operation_source(q penstock.queue, verb text) RETURNS text
    LANGUAGE sql STABLE
    AS $$
    SELECT CASE WHEN verb IN ('retry_failures', 'discard_failures')
           THEN format('(SELECT entry_id AS id, failed_at AS since, name, lock_key, flow, class, fingerprint
                           FROM penstock.failure WHERE queue_id = %s) s', q.id)
           ELSE format('(SELECT id, created_at AS since, name, lock_key, flow, priority FROM penstock.%I WHERE queue_id = %s) s', 'entry_' || q.name, q.id) END
$$;

-- Name: orphan_slots(integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.orphan_slots(instance integer) RETURNS TABLE(slot_number integer, slot_token bigint, age interval)
    LANGUAGE sql STABLE
    AS $_$
    SELECT s.number, s.token,
           clock_timestamp() - coalesce(s.doubt_at,
               greatest(s.leased_at, (SELECT n.beat_at + n.lease FROM penstock.node n WHERE n.id = s.node_id)))
      FROM penstock.slot s
     WHERE s.instance_id = $1 AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id))
$_$;

-- Name: outcome_of(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.outcome_of(bigint) RETURNS TABLE(queue text, outcome penstock.outcome, ended_at timestamp with time zone, created_at timestamp with time zone, attempt smallint, crashes smallint, node_id bigint, token bigint, run_ms bigint, reason text, class text, result jsonb)
    LANGUAGE sql STABLE
    AS $_$
    SELECT q.name, o.*
      FROM penstock.queue q CROSS JOIN LATERAL (
           SELECT r.outcome, r.finished_at, r.created_at, r.attempt, NULL::smallint, r.node_id, r.token, r.run_ms, r.reason, NULL::text, r.result
             FROM penstock.result r WHERE r.queue_id = q.id AND r.entry_id = $1
           UNION ALL
           SELECT 'failed', f.failed_at, f.created_at, f.attempt, f.crashes, NULL, NULL, NULL, f.error, f.class, NULL
             FROM penstock.failure f WHERE f.queue_id = q.id AND f.entry_id = $1) o
$_$;

-- Name: overdue(text, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.overdue(queue_name text, most integer) RETURNS TABLE(id bigint, why text)
    LANGUAGE plpgsql STABLE
    AS $_$
BEGIN
    RETURN QUERY EXECUTE format($q$
        (SELECT e.id, 'not started by ' || e.start_by FROM penstock.%1$I e
          WHERE e.start_by <= $1 AND NOT penstock.runs(e) ORDER BY e.start_by LIMIT $2)
        UNION ALL
        (SELECT e.id, 'not finished by ' || e.finish_by FROM penstock.%1$I e
          WHERE e.finish_by <= $1 AND NOT penstock.runs(e) ORDER BY e.finish_by LIMIT $2)
        LIMIT $2$q$, 'entry_' || queue_name)
    USING clock_timestamp(), most;
END $_$;

-- Name: park(integer, text, double precision); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.park(queue integer, key text, wait double precision) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM FROM penstock.ready r WHERE r.lock_key = key AND r.queue_id + 0 = queue AND r.priority = -2 LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
        VALUES (queue, -2, '', (extract(epoch FROM clock_timestamp()) + wait) * 1000000, key) ON CONFLICT DO NOTHING;
    END IF;
    RETURN FOUND; -- false where another key has that microsecond: the next claim parks this one
END $$;

-- Name: pause(text, text, text, text, text, timestamp with time zone); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.pause(scope text, value text, queue text DEFAULT NULL::text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text, until timestamp with time zone DEFAULT NULL::timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
DECLARE
    q     integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
    known boolean;
BEGIN
    IF until <= clock_timestamp() OR NOT isfinite(until) THEN
        RAISE EXCEPTION 'until is not a time to come' USING ERRCODE = 'PS002';
    END IF;
    IF pause.scope = 'model' AND NOT EXISTS (SELECT FROM penstock.model m WHERE m.name = pause.value)
       AND NOT EXISTS (SELECT FROM penstock.queue x WHERE x.model = pause.value) THEN
        RAISE EXCEPTION 'value: there is no model "%"', value USING ERRCODE = 'PS002', HINT = 'Register it first: penstock.register_model.';
    END IF;
    PERFORM FROM penstock.pause p WHERE p.scope = pause.scope AND p.value = pause.value AND p.queue_id IS NOT DISTINCT FROM q FOR UPDATE;
    known := FOUND;
    IF NOT known AND pause.scope IN ('name', 'lock_key') AND EXISTS (
       SELECT FROM penstock.disabled d WHERE d.queue_id = q AND d.scope = pause.scope AND d.value = pause.value) THEN
        RAISE EXCEPTION 'entries with % "%" are disabled', scope, value USING ERRCODE = 'PS006', HINT = 'Enable them first: penstock.enable_entries.';
    END IF;
    INSERT INTO penstock.pause AS p (scope, value, queue_id, actor, reason, until)
    VALUES (pause.scope, pause.value, q, coalesce(pause.actor, current_user), coalesce(pause.reason, ''), pause.until)
    ON CONFLICT (scope, value, coalesce(queue_id, 0)) DO UPDATE SET actor = excluded.actor, reason = excluded.reason, until = excluded.until;
    IF NOT known AND pause.scope IN ('name', 'lock_key') THEN
        PERFORM penstock.disable_entries(queue, pause.scope, pause.value, pause.reason, pause.actor);
    END IF;
    PERFORM penstock.pauses_changed(q);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(pause.actor, current_user), 'pause', pause.scope || ' ' || pause.value, pause.reason,
            jsonb_strip_nulls(jsonb_build_object('queue', queue, 'until', until)));
EXCEPTION WHEN check_violation OR not_null_violation THEN
    RAISE EXCEPTION 'pause of % "%" is not valid', scope, value USING ERRCODE = 'PS002',
        HINT = 'The scopes are name and lock_key (with a queue), flow (with or without), model, application and node.';
END $$;

-- Name: pause_batch(bigint, text, text, timestamp with time zone); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.pause_batch(batch bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text, until timestamp with time zone DEFAULT NULL::timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    b penstock.batch;
BEGIN
    PERFORM penstock.need_read_committed();
    IF until <= clock_timestamp() OR NOT isfinite(until) THEN
        RAISE EXCEPTION 'until is not a time to come' USING ERRCODE = 'PS002';
    END IF;
    b := penstock.batch_row(batch);
    UPDATE penstock.batch SET paused_at = clock_timestamp(), paused_by = coalesce(pause_batch.actor, current_user), paused_reason = coalesce(reason, ''),
                              paused_until = until
     WHERE id = b.id;
    PERFORM penstock.withdraw_batch(b, 'the batch was paused');
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(actor, current_user), 'pause_batch', 'batch ' || batch, reason, jsonb_strip_nulls(jsonb_build_object('until', until)));
END $$;

-- Name: pause_cron_job(text, text, text, timestamp with time zone); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.pause_cron_job(job text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text, until timestamp with time zone DEFAULT NULL::timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    j penstock.cron_job;
BEGIN
    IF until <= clock_timestamp() OR NOT isfinite(until) THEN
        RAISE EXCEPTION 'until is not a time to come' USING ERRCODE = 'PS002';
    END IF;
    SELECT * INTO j FROM penstock.cron_job_row(job);
    UPDATE penstock.cron_job
       SET paused_at = clock_timestamp(), paused_by = coalesce(actor, current_user), paused_reason = coalesce(reason, ''), paused_until = until
     WHERE id = j.id;
    UPDATE penstock.entry e SET due_at = NULL WHERE j.fired_at IS NULL AND e.queue_id = j.queue_id AND e.id = j.entry_id AND e.status = 'initial';
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(actor, current_user), 'pause_cron_job', 'cron job ' || job, reason, jsonb_strip_nulls(jsonb_build_object('until', until)));
END $$;

-- Name: pause_queue(text, text, text, timestamp with time zone); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.pause_queue(queue text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text, until timestamp with time zone DEFAULT NULL::timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    IF until <= clock_timestamp() OR NOT isfinite(until) THEN
        RAISE EXCEPTION 'until is not a time to come' USING ERRCODE = 'PS002';
    END IF;
    UPDATE penstock.queue
       SET paused_at = clock_timestamp(), paused_by = coalesce(actor, current_user), paused_reason = coalesce(reason, ''),
           paused_until = until, version = version + 1
     WHERE id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(actor, current_user), 'pause_queue', q.name, reason, jsonb_strip_nulls(jsonb_build_object('until', until)));
END $$;

-- Name: pause_reasons(penstock.queue, penstock.entry); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.pause_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT penstock.because('paused', format('%s "%s" is paused by %s for %s%s', p->>'scope', p->>'value', p->>'actor',
               penstock.ago(clock_timestamp() - (p->>'at')::timestamptz), coalesce(': ' || nullif(p->>'reason', ''), '')),
               jsonb_build_object('scope', p->'scope', 'value', p->'value', 'by', p->'actor', 'reason', p->'reason', 'since', p->'at', 'left', p->'left'))
      FROM jsonb_array_elements(penstock.queue_pauses(q)) p
     WHERE (p->>'scope' <> 'flow' OR p->>'value' = e.flow) AND coalesce((p->>'left')::float8 > 0, true)
    UNION ALL
    SELECT penstock.because('nodes_paused', format('all %s nodes that serve the queue are paused', count(*)), jsonb_build_object('nodes', count(*)))
      FROM penstock.serving(q.id) s HAVING count(*) > 0 AND bool_and(penstock.node_paused(s.id, s.name))
    UNION ALL
    SELECT penstock.because('cron_paused', format('cron job "%s" is paused by %s%s', j.name, j.paused_by, coalesce(': ' || nullif(j.paused_reason, ''), '')),
               jsonb_build_object('job', j.name, 'by', j.paused_by, 'reason', j.paused_reason, 'until', j.paused_until))
      FROM penstock.cron_job j
     WHERE j.entry_id = e.id AND j.fired_at IS NULL AND j.paused_at IS NOT NULL AND coalesce(j.paused_until > clock_timestamp(), true)
$$;

-- Name: pauses_changed(integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.pauses_changed(queue integer) RETURNS void
    LANGUAGE sql
    AS $_$
    UPDATE penstock.queue SET version = version + 1 WHERE id = coalesce($1, (SELECT min(id) FROM penstock.queue))
$_$;

-- Name: place_of(penstock.entry); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.place_of(e penstock.entry) RETURNS TABLE(priority smallint, flow text, pos bigint)
    LANGUAGE sql STABLE
    AS $$
    (SELECT r.priority, r.flow, r.pos FROM penstock.ready r
      WHERE e.lock_key IS NULL AND r.queue_id = e.queue_id AND r.priority = e.priority AND r.flow = e.flow
        AND r.pos = coalesce(e.pos, e.id) AND r.entry_id = e.id)
    UNION ALL
    (SELECT r.priority, r.flow, r.pos FROM penstock.ready r
      WHERE r.queue_id = e.queue_id AND r.lock_key = e.lock_key ORDER BY r.priority DESC, r.pos LIMIT 1)
$$;

-- Name: place_reasons(penstock.entry); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.place_reasons(e penstock.entry) RETURNS SETOF jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT penstock.because(CASE WHEN l.last_entry_id >= e.id THEN 'running' ELSE 'key_held' END,
               CASE WHEN l.last_entry_id >= e.id THEN format('node %s has run it for %s', coalesce(n.name, l.node_id::text), penstock.ago(clock_timestamp() - l.claimed_at))
                    ELSE format('lock key %s is held by entry %s on node %s for %s', e.lock_key, h.id, coalesce(n.name, l.node_id::text),
                                penstock.ago(clock_timestamp() - l.claimed_at)) END
               || CASE WHEN n.id IS NULL OR n.beat_at + n.lease < clock_timestamp() THEN '; that node is dead' ELSE '' END,
               jsonb_build_object('node_id', l.node_id, 'node', n.name, 'token', l.token, 'entry_id', h.id, 'entries', l.entry_count,
                                  'seconds', round(extract(epoch FROM clock_timestamp() - l.claimed_at), 1)))
      FROM penstock.lock l
      LEFT JOIN penstock.node n ON n.id = l.node_id
      LEFT JOIN LATERAL (SELECT x.id FROM penstock.entry x WHERE x.queue_id = e.queue_id AND x.lock_key = e.lock_key
                            AND x.status = 'pending' AND x.priority >= 0 ORDER BY x.id LIMIT 1) h ON true
     WHERE l.queue_id = e.queue_id AND l.lock_key = coalesce(e.lock_key, '#' || e.id) AND e.status = 'pending'
    UNION ALL
    SELECT penstock.because('ahead_in_key', format('%s%s entries of lock key %s come before it', CASE WHEN k.n = 10000 THEN 'at least ' ELSE '' END, k.n, e.lock_key),
               jsonb_build_object('ahead', k.n))
      FROM (SELECT count(*) AS n FROM (SELECT FROM penstock.entry x WHERE x.queue_id = e.queue_id AND x.lock_key = e.lock_key
                AND x.status = 'pending' AND x.priority >= 0 AND x.id < e.id LIMIT 10000) s) k
     WHERE k.n > 0 AND e.status = 'pending' AND e.priority >= 0 AND NOT penstock.runs(e)
    UNION ALL
    SELECT penstock.because('ahead_in_lane', format('%s%s keys stand before it in its lane (priority %s, flow "%s")', CASE WHEN a.n = 10000 THEN 'at least ' ELSE '' END,
               a.n, p.priority, p.flow), jsonb_build_object('ahead', a.n, 'priority', p.priority, 'flow', p.flow))
      FROM penstock.place_of(e) p
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM (SELECT FROM penstock.ready r WHERE r.queue_id = e.queue_id
                AND r.priority = p.priority AND r.flow = p.flow AND r.pos < p.pos LIMIT 10000) s) a
     WHERE a.n > 0 AND e.status = 'pending' AND e.priority >= 0 AND NOT penstock.runs(e)
$$;

-- Name: prune_audit(interval, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.prune_audit(keep interval, most integer) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
DECLARE
    before timestamptz := date_trunc('day', clock_timestamp() - greatest(keep, interval '30 days'), 'UTC');
    gone   bigint;
BEGIN
    PERFORM set_config('penstock.pruning', 'audit', true);
    DELETE FROM penstock.audit a
     WHERE a.id = ANY (ARRAY(SELECT x.id FROM (SELECT o.id, o.at FROM penstock.audit o ORDER BY o.id LIMIT most) x WHERE x.at < before));
    GET DIAGNOSTICS gone = ROW_COUNT;
    PERFORM set_config('penstock.pruning', '', true);
    RETURN gone;
END $$;

-- Name: push(text, jsonb, text, text, integer, timestamp with time zone, timestamp with time zone, timestamp with time zone, real, text, text, text, text, text, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.push(queue text, payload jsonb, lock_key text DEFAULT NULL::text, flow text DEFAULT NULL::text, priority integer DEFAULT NULL::integer, due_at timestamp with time zone DEFAULT NULL::timestamp with time zone, start_by timestamp with time zone DEFAULT NULL::timestamp with time zone, finish_by timestamp with time zone DEFAULT NULL::timestamp with time zone, cost real DEFAULT NULL::real, name text DEFAULT NULL::text, idempotency_key text DEFAULT NULL::text, unique_key text DEFAULT NULL::text, unique_policy text DEFAULT NULL::text, trace text DEFAULT NULL::text, callback jsonb DEFAULT NULL::jsonb) RETURNS bigint
    LANGUAGE sql
    AS $$
    SELECT (penstock.push_many(queue, ARRAY[payload],
        CASE WHEN lock_key IS NULL THEN '{}' ELSE ARRAY[lock_key] END,
        CASE WHEN flow IS NULL THEN '{}' ELSE ARRAY[flow] END,
        CASE WHEN priority IS NULL THEN '{}' ELSE ARRAY[priority::smallint] END,
        CASE WHEN due_at IS NULL THEN '{}' ELSE ARRAY[due_at] END,
        CASE WHEN start_by IS NULL THEN '{}' ELSE ARRAY[start_by] END,
        CASE WHEN finish_by IS NULL THEN '{}' ELSE ARRAY[finish_by] END,
        CASE WHEN cost IS NULL THEN '{}' ELSE ARRAY[cost] END,
        CASE WHEN name IS NULL THEN '{}' ELSE ARRAY[name] END,
        CASE WHEN idempotency_key IS NULL THEN '{}' ELSE ARRAY[idempotency_key] END,
        CASE WHEN unique_key IS NULL THEN '{}' ELSE ARRAY[unique_key] END,
        CASE WHEN unique_policy IS NULL THEN '{}' ELSE ARRAY[unique_policy] END,
        CASE WHEN trace IS NULL THEN '{}' ELSE ARRAY[trace] END,
        CASE WHEN callback IS NULL THEN '{}' ELSE ARRAY[callback] END)).ids[1]
$$;

-- Name: push_back(text, interval, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.push_back(queue text, wait interval, flow text DEFAULT NULL::text, reason text DEFAULT ''::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    IF wait IS NULL OR wait <= '0' OR wait > '1 day' THEN
        RAISE EXCEPTION 'wait is not between 0 and 1 day' USING ERRCODE = 'PS002',
            HINT = 'Pause the queue to stop it for longer.';
    END IF;
    INSERT INTO penstock.push_back AS p (queue_id, whole, flow, until, reason)
    VALUES (q.id, push_back.flow IS NULL, coalesce(push_back.flow, ''), clock_timestamp() + wait, push_back.reason)
    ON CONFLICT ON CONSTRAINT push_back_pkey DO UPDATE
       SET until = excluded.until, at = excluded.at, reason = excluded.reason
     WHERE excluded.until - p.until > least(interval '100 ms', wait / 4);
END $$;

-- Name: push_back_reasons(penstock.entry); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.push_back_reasons(e penstock.entry) RETURNS SETOF jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT penstock.because('pushed_back', format('%s is held back for %s more%s',
               CASE WHEN p.whole THEN 'the queue' ELSE format('flow "%s"', p.flow) END,
               penstock.ago(p.until - clock_timestamp()), coalesce(': ' || nullif(p.reason, ''), '')),
               jsonb_build_object('until', p.until, 'reason', p.reason, 'seconds', round(extract(epoch FROM p.until - clock_timestamp()), 1)))
      FROM penstock.push_back p
     WHERE p.queue_id = e.queue_id AND (p.whole OR p.flow = e.flow) AND p.until > clock_timestamp() AND NOT penstock.runs(e)
$$;

-- Name: push_cron_entries(text, bigint[], bigint[], timestamp with time zone[], timestamp with time zone[], timestamp with time zone[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.push_cron_entries(queue text, picks bigint[], jobs bigint[], nominals timestamp with time zone[], dues timestamp with time zone[], handled timestamp with time zone[]) RETURNS integer
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'on'
    AS $$
BEGIN
    WITH wanted AS MATERIALIZED (
        SELECT p.i, j.id, j.payload, j.lock_key, j.flow, j.priority, j.name,
               greatest(dues[p.k], now() + interval '1 microsecond') AS due_at
          FROM unnest(picks) WITH ORDINALITY p(k, i) JOIN penstock.cron_job j ON j.id = jobs[p.k]
    ), pushed AS MATERIALIZED (
        SELECT penstock.push_many(queue, array_agg(w.payload ORDER BY w.i), array_agg(w.lock_key ORDER BY w.i),
                   array_agg(w.flow ORDER BY w.i), array_agg(w.priority ORDER BY w.i), array_agg(w.due_at ORDER BY w.i),
                   names => array_agg(w.name ORDER BY w.i)) AS answer
          FROM wanted w
    )
    UPDATE penstock.cron_job j
       SET entry_id = (p.answer).ids[w.i], fired_at = NULL, following_at = NULL, problem = NULL,
           nominal_at = nominals[picks[w.i]], handled_at = handled[picks[w.i]],
           due_at = CASE WHEN j.run_now_at IS NULL THEN dues[picks[w.i]] ELSE '-infinity' END
      FROM wanted w CROSS JOIN pushed p
     WHERE j.id = w.id;
    RETURN cardinality(picks);
END $$;

-- Name: push_json(text, jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.push_json(queue_name text, entries jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    AS $$
DECLARE
    unknown text;
    answer  jsonb;
BEGIN
    SELECT k INTO unknown FROM jsonb_array_elements(entries) e CROSS JOIN LATERAL jsonb_object_keys(e) k
     WHERE k NOT IN ('payload', 'lock_key', 'flow', 'priority', 'due_at', 'start_by', 'finish_by', 'cost', 'name',
                     'idempotency_key', 'unique_key', 'unique_policy', 'trace', 'callback') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'entry option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are those of penstock.push.';
    END IF;
    SELECT jsonb_agg(jsonb_build_object('id', i.id, 'verdict', coalesce(p.verdicts[i.n], 'inserted')) ORDER BY i.n) INTO answer
      FROM (SELECT array_agg(e->'payload' ORDER BY n) AS payloads, array_agg(e->>'lock_key' ORDER BY n) AS lock_keys,
                   array_agg(e->>'flow' ORDER BY n) AS flows, array_agg((e->>'priority')::smallint ORDER BY n) AS priorities,
                   array_agg((e->>'due_at')::timestamptz ORDER BY n) AS dues,
                   array_agg((e->>'start_by')::timestamptz ORDER BY n) AS start_bys,
                   array_agg((e->>'finish_by')::timestamptz ORDER BY n) AS finish_bys,
                   array_agg((e->>'cost')::real ORDER BY n) AS costs, array_agg(e->>'name' ORDER BY n) AS names,
                   array_agg(e->>'idempotency_key' ORDER BY n) AS idempotency_keys,
                   array_agg(e->>'unique_key' ORDER BY n) AS unique_keys,
                   array_agg(e->>'unique_policy' ORDER BY n) AS unique_policies,
                   array_agg(e->>'trace' ORDER BY n) AS traces, array_agg(e->'callback' ORDER BY n) AS callbacks
              FROM jsonb_array_elements(entries) WITH ORDINALITY u(e, n)) a
     CROSS JOIN LATERAL penstock.push_many(queue_name, a.payloads, a.lock_keys, a.flows, a.priorities, a.dues, a.start_bys,
                   a.finish_bys, a.costs, a.names, a.idempotency_keys, a.unique_keys, a.unique_policies, a.traces, a.callbacks) p
     CROSS JOIN LATERAL unnest(p.ids) WITH ORDINALITY i(id, n);
    RETURN coalesce(answer, '[]');
EXCEPTION
    WHEN invalid_text_representation OR invalid_datetime_format OR numeric_value_out_of_range OR datetime_field_overflow THEN
        RAISE EXCEPTION 'entry option is not valid: %', SQLERRM USING ERRCODE = 'PS002';
END $$;

-- Name: push_many(text, jsonb[], text[], text[], smallint[], timestamp with time zone[], timestamp with time zone[], timestamp with time zone[], real[], text[], text[], text[], text[], text[], jsonb[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.push_many(queue_name text, payloads jsonb[], lock_keys text[] DEFAULT '{}'::text[], flows text[] DEFAULT '{}'::text[], priorities smallint[] DEFAULT '{}'::smallint[], dues timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], start_bys timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], finish_bys timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], costs real[] DEFAULT '{}'::real[], names text[] DEFAULT '{}'::text[], idempotency_keys text[] DEFAULT '{}'::text[], unique_keys text[] DEFAULT '{}'::text[], unique_policies text[] DEFAULT '{}'::text[], traces text[] DEFAULT '{}'::text[], callbacks jsonb[] DEFAULT '{}'::jsonb[], OUT ids bigint[], OUT verdicts text[]) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
DECLARE
    q    penstock.queue;
    n    integer := coalesce(array_length(payloads, 1), 0);
    keep boolean[];
BEGIN
    SELECT * INTO q FROM penstock.queue WHERE name = queue_name;
    IF NOT FOUND THEN
        q := penstock.queue_row(queue_name); -- raises
    ELSIF n = 0 THEN
        ids := '{}';
        RETURN;
    END IF;
    PERFORM penstock.check_payloads(q, payloads);
    IF q.grouping IS NULL AND q.capacity IS NULL AND cardinality(lock_keys) + cardinality(flows) + cardinality(priorities)
       + cardinality(dues) + cardinality(start_bys) + cardinality(finish_bys) + cardinality(costs) + cardinality(names)
       + cardinality(idempotency_keys) + cardinality(unique_keys) + cardinality(unique_policies) + cardinality(traces)
       + cardinality(callbacks) = 0 THEN
        -- The plain push, which uses no option: the same as below with everything left out that is about options.
        WITH fresh AS (
            INSERT INTO penstock.entry (id, queue_id, status, priority, payload)
            SELECT nextval('penstock.entry_id_seq'), q.id, 'pending', q.entry_priority, p FROM unnest(payloads) p
            RETURNING id
        ), solo AS (
            INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
            SELECT q.id, q.entry_priority, '', f.id, f.id FROM fresh f
        )
        SELECT array_agg(f.id ORDER BY f.id) INTO ids FROM fresh f;
        RETURN;
    END IF;
    IF greatest(cardinality(lock_keys), cardinality(flows), cardinality(priorities), cardinality(dues), cardinality(start_bys),
                cardinality(finish_bys), cardinality(costs), cardinality(names), cardinality(idempotency_keys), cardinality(unique_keys),
                cardinality(unique_policies), cardinality(traces), cardinality(callbacks)) > n OR cardinality(callbacks) > 0 THEN
        PERFORM penstock.check_arrays(n, ARRAY[cardinality(lock_keys), cardinality(flows), cardinality(priorities), cardinality(dues),
            cardinality(start_bys), cardinality(finish_bys), cardinality(costs), cardinality(names), cardinality(idempotency_keys),
            cardinality(unique_keys), cardinality(unique_policies), cardinality(traces), cardinality(callbacks)], callbacks);
    END IF;
    PERFORM penstock.check_options(q, payloads, lock_keys, flows, priorities, names, idempotency_keys, unique_keys,
                                   unique_policies, dues, start_bys, finish_bys, costs);
    ids := ARRAY(SELECT nextval('penstock.entry_id_seq') FROM generate_series(1, n));
    IF cardinality(idempotency_keys) > 0 THEN
        SELECT r.ids, r.verdicts INTO ids, verdicts
          FROM penstock.resolve_idempotency(q, ids, payloads, flows, idempotency_keys, lock_keys, names) r;
    END IF;
    IF cardinality(unique_keys) > 0 THEN
        SELECT r.ids, r.verdicts INTO ids, verdicts
          FROM penstock.resolve_uniqueness(q, ids, verdicts, unique_keys, unique_policies) r;
        IF cardinality(idempotency_keys) > 0 AND 'duplicate' = ANY (verdicts) THEN
            UPDATE penstock.idempotency k SET entry_id = u.id
              FROM unnest(ids, flows, idempotency_keys, verdicts) u(id, flow, key, verdict)
             WHERE u.verdict = 'duplicate' AND k.queue_id = q.id AND k.flow = coalesce(u.flow, '') AND k.key = u.key;
        END IF;
    END IF;
    IF verdicts IS NOT NULL THEN
        keep := ARRAY(SELECT v = 'inserted' FROM unnest(verdicts) WITH ORDINALITY u(v, i) ORDER BY i);
        n := cardinality(array_positions(keep, true));
    END IF;
    IF q.capacity IS NOT NULL AND n > 0 THEN
        PERFORM penstock.admit(q, n);
    END IF;

    WITH fresh AS (
        INSERT INTO penstock.entry (id, queue_id, status, due_at, start_by, finish_by, cost, priority, enabled_priority,
                                    flow, lock_key, name, unique_key, trace, callback, payload)
        SELECT u.id, q.id, CASE WHEN u.due_at > now() THEN 'initial' ELSE 'pending' END::penstock.status,
               u.due_at, u.start_by, u.finish_by, u.cost,
               CASE WHEN off.off THEN -1 ELSE p.priority END, CASE WHEN off.off THEN p.priority END,
               coalesce(u.flow, ''), k.lock_key, u.name, u.unique_key, u.trace, u.callback, u.payload
          FROM unnest(ids, payloads, lock_keys, flows, priorities, dues, start_bys, finish_bys, costs, names,
                      unique_keys, unique_policies, traces, callbacks, keep)
               WITH ORDINALITY
               AS u(id, payload, lock_key, flow, priority, due_at, start_by, finish_by, cost, name,
                    unique_key, unique_policy, trace, callback, keep, i)
               CROSS JOIN LATERAL (SELECT coalesce(u.priority, q.entry_priority) AS priority) p
               CROSS JOIN LATERAL (SELECT coalesce(u.lock_key,
                    CASE WHEN q.grouping IS NOT NULL THEN penstock.lock_key_of(u.payload, q.grouping) END,
                    CASE WHEN u.unique_policy = 'one_running_one_queued' THEN 'unique:' || u.unique_key END) AS lock_key) k
               CROSS JOIN (SELECT EXISTS (SELECT FROM penstock.disabled d WHERE d.queue_id = q.id) AS off) any_off
               CROSS JOIN LATERAL (SELECT any_off.off AND EXISTS (
                    SELECT FROM penstock.disabled d
                     WHERE d.queue_id = q.id AND ((d.scope = 'name' AND d.value = u.name)
                                               OR (d.scope = 'lock_key' AND d.value = k.lock_key))) AS off) off
         WHERE u.keep IS NOT FALSE
         ORDER BY u.i
        RETURNING id, priority, flow, lock_key, status
    ), solo AS (
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
        SELECT q.id, f.priority, f.flow, f.id, f.id
          FROM fresh f
         WHERE f.lock_key IS NULL AND f.status = 'pending' AND f.priority >= 0
    )
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
    SELECT q.id, g.priority, g.flow, g.pos, g.lock_key
      FROM (SELECT f.priority, f.flow, f.lock_key, min(f.id) AS pos
              FROM fresh f
             WHERE f.lock_key IS NOT NULL AND f.status = 'pending' AND f.priority >= 0
             GROUP BY f.priority, f.flow, f.lock_key) g
     WHERE NOT EXISTS (
        -- A ready row of the key that we can lock stays until we commit: whoever takes it away sees our entries.
        -- One that is locked already gives no such promise, so that the key gets another.
        SELECT FROM penstock.ready r
         WHERE r.lock_key = g.lock_key AND r.queue_id + 0 = q.id AND r.priority = g.priority AND r.flow = g.flow
         LIMIT 1
           FOR UPDATE SKIP LOCKED)
     ORDER BY g.lock_key;
END $$;

-- Name: quarantine_instance(integer, interval, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.quarantine_instance(instance integer, lasts interval, reason text) RETURNS void
    LANGUAGE sql
    AS $_$
    UPDATE penstock.instance i
       SET quarantined_until = greatest(i.quarantined_until, clock_timestamp() + lasts), quarantine_reason = $3
     WHERE i.id = $1
$_$;

-- Name: queue_pace(integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.queue_pace(queue integer) RETURNS integer
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce(max(CASE WHEN g.per_key THEN 2 WHEN g.rate IS NOT NULL THEN 1 ELSE 0 END), 0)
      FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id WHERE u.queue_id = queue
$$;

-- Name: FUNCTION queue_pace(queue integer); Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON FUNCTION penstock.queue_pace(queue integer) IS 'how claims of a queue go: 0 without rates, 1 with some, 2 with a look at each lock key as well';

-- Name: queue_pauses(penstock.queue); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.queue_pauses(q penstock.queue) RETURNS jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce(jsonb_agg(jsonb_build_object('scope', p.scope, 'value', p.value, 'actor', p.actor, 'reason', p.reason, 'at', p.created_at,
                    'left', extract(epoch FROM p.until - clock_timestamp()))), '[]')
      FROM penstock.pause p
     WHERE (p.scope = 'flow' AND (p.queue_id IS NULL OR p.queue_id = q.id))
        OR (p.scope = 'model' AND p.value = q.model) OR (p.scope = 'application' AND p.value = q.application)
$$;

-- Name: queue_reasons(penstock.queue); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.queue_reasons(q penstock.queue) RETURNS SETOF jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT penstock.because('paused', format('the queue is paused by %s for %s%s%s', q.paused_by, penstock.ago(clock_timestamp() - q.paused_at),
               coalesce(', for ' || penstock.ago(q.paused_until - clock_timestamp()) || ' more', ''), coalesce(': ' || nullif(q.paused_reason, ''), '')),
               jsonb_build_object('by', q.paused_by, 'reason', q.paused_reason, 'since', q.paused_at, 'until', q.paused_until))
     WHERE q.paused_at IS NOT NULL AND coalesce(q.paused_until > clock_timestamp(), true)
    UNION ALL
    SELECT penstock.because('queue_disabled', format('the queue is disabled by %s for %s%s', q.disabled_by,
               penstock.ago(clock_timestamp() - q.disabled_at), coalesce(': ' || nullif(q.disabled_reason, ''), '')),
               jsonb_build_object('by', q.disabled_by, 'reason', q.disabled_reason, 'since', q.disabled_at))
     WHERE q.disabled_at IS NOT NULL
    UNION ALL
    SELECT penstock.because('limit', format('%s of at most %s locks of the queue are held', l.held, q.max_concurrent),
               jsonb_build_object('held', l.held, 'limit', q.max_concurrent))
      FROM (SELECT count(*) AS held FROM penstock.lock WHERE queue_id = q.id) l
     WHERE l.held >= q.max_concurrent
    UNION ALL
    SELECT penstock.because('node_limit', format('each of the %s nodes that serve the queue holds its %s locks', count(*), q.max_concurrent_per_node),
               jsonb_build_object('nodes', count(*), 'limit', q.max_concurrent_per_node))
      FROM penstock.serving(q.id) s
    HAVING count(*) > 0 AND bool_and((SELECT count(*) FROM penstock.lock l WHERE l.queue_id = q.id AND l.node_id = s.id) >= q.max_concurrent_per_node)
    UNION ALL
    SELECT penstock.because('nobody_serves', format('no live node serves the queue (application %s)%s', q.application,
               coalesce('; ' || d.dead || ' that did fell silent', '') || coalesce('; ' || d.draining || ' drain', '')),
               jsonb_build_object('application', q.application, 'dead', d.dead, 'draining', d.draining))
      FROM (SELECT nullif(count(*) FILTER (WHERE state = 'dead'), 0) AS dead, nullif(count(*) FILTER (WHERE state = 'draining'), 0) AS draining
              FROM penstock.node_status s WHERE q.name = ANY (s.queues)) d
     WHERE NOT EXISTS (SELECT FROM penstock.serving(q.id))
$$;

-- Name: queue_row(text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.queue_row(queue_name text) RETURNS penstock.queue
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    q penstock.queue;
BEGIN
    SELECT * INTO q FROM penstock.queue WHERE name = queue_name;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'queue "%" does not exist', queue_name
            USING ERRCODE = 'PS001', HINT = 'Create it first: SELECT penstock.create_queue(''name'').';
    END IF;
    RETURN q;
END $$;

-- Name: queue_weights(penstock.queue); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.queue_weights(q penstock.queue) RETURNS jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce(jsonb_object_agg(w.flow, w.weight ORDER BY w.queue_id NULLS FIRST), '{}')
      FROM penstock.flow_weight w WHERE w.queue_id IS NULL OR w.queue_id = q.id
$$;

-- Name: reap_batch(penstock.batch); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.reap_batch(b penstock.batch) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    n integer;
BEGIN
    WITH gone AS MATERIALIZED (
        SELECT p.no, p.entry_id FROM penstock.batch_part p
         WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NOT NULL
           AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = b.queue_id AND e.id = p.entry_id)
    )
    UPDATE penstock.batch_part p
       SET ended_at = clock_timestamp(), outcome = coalesce(w.outcome, 'done'), result = w.result, error = w.error
      FROM gone g
      LEFT JOIN LATERAL (
           SELECT 'failed'::penstock.outcome AS outcome, NULL::jsonb AS result, f.error
             FROM penstock.failure f WHERE f.queue_id = b.queue_id AND f.entry_id = g.entry_id
           UNION ALL
           SELECT r.outcome, r.result, r.reason FROM penstock.result r WHERE r.queue_id = b.queue_id AND r.entry_id = g.entry_id
            LIMIT 1) w ON true
     WHERE p.batch_id = b.id AND p.no = g.no AND p.ended_at IS NULL;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- Name: record_pruning(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.record_pruning() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    SELECT session_user, 'prune_audit', 'audit', 'retention', jsonb_build_object('rows', count(*), 'before', max(at))
      FROM gone HAVING count(*) > 0;
    RETURN NULL;
END $$;

-- Name: refund(integer, text[], bigint[], integer[], boolean[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.refund(queue integer, keys text[], tokens bigint[], cancelled integer[], rest boolean[]) RETURNS void
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT u.limit_id, CASE WHEN g.per_key THEN k.key WHEN g.per_flow THEN l.flow ELSE '' END COLLATE "C" AS scope,
                    sum(u.units * (k.cancelled + CASE WHEN NOT k.rest THEN 0 WHEN left(k.key, 1) = '#' THEN 1 ELSE
                        (SELECT count(*) FROM penstock.entry e WHERE e.queue_id = queue AND e.lock_key = k.key AND e.status = 'pending'
                                                                 AND e.priority >= 0 AND e.id <= l.last_entry_id) END)) AS units
               FROM penstock.limit_use u
               JOIN penstock."limit" g ON g.id = u.limit_id
              CROSS JOIN unnest(keys, tokens, cancelled, rest) k(key, token, cancelled, rest)
              CROSS JOIN LATERAL (SELECT x.flow, x.claimed_at, x.last_entry_id FROM penstock.lock x
                                   WHERE x.queue_id = queue AND x.lock_key = k.key AND x.token = k.token OFFSET 0) l
              WHERE u.queue_id = queue AND g.rate IS NOT NULL AND l.claimed_at >= u.since
              GROUP BY 1, 2 ORDER BY 1, 2
    LOOP
        -- What is beyond the burst is cut off when the bucket is read.
        UPDATE penstock.bucket b SET units = b.units + r.units WHERE b.limit_id = r.limit_id AND b.flow = r.scope;
    END LOOP;
END $$;

-- Name: register_instance(text, text, text, integer, jsonb, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.register_instance(model text, server text, endpoint text, slots integer, labels jsonb DEFAULT '{}'::jsonb, reason text DEFAULT ''::text, actor text DEFAULT CURRENT_USER) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    instance integer;
BEGIN
    PERFORM penstock.need_model(model);
    IF endpoint !~* '^https?://[^/?#[:space:]]+' THEN
        RAISE EXCEPTION 'endpoint "%" of instance "%" is not an address', endpoint, server USING ERRCODE = 'PS002', HINT = 'Write one such as http://gpu-1:8000/generate.';
    END IF;
    INSERT INTO penstock.instance AS i (model, server, endpoint, slots, labels)
    VALUES (register_instance.model, register_instance.server, register_instance.endpoint, register_instance.slots,
            coalesce(register_instance.labels, '{}'))
    ON CONFLICT ON CONSTRAINT instance_model_server_key DO UPDATE
       SET slots = excluded.slots, labels = excluded.labels, draining_at = NULL, drain_by = NULL, drain_reason = NULL,
           quarantined_until = NULL, quarantine_reason = NULL, next_check_at = clock_timestamp(),
           state = CASE WHEN i.endpoint = excluded.endpoint THEN i.state ELSE 'unknown' END, endpoint = excluded.endpoint
    RETURNING id INTO instance;
    PERFORM penstock.fit_model_queue(model);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(register_instance.actor, current_user), 'register_instance', register_instance.model || '/' || register_instance.server,
            register_instance.reason, jsonb_build_object('endpoint', endpoint, 'slots', slots, 'labels', labels));
    RETURN instance;
EXCEPTION
    WHEN check_violation OR not_null_violation THEN
        RAISE EXCEPTION 'instance "%" of model "%" is not valid: %', server, model, SQLERRM USING ERRCODE = 'PS002';
END $$;

-- Name: register_model(text, jsonb, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.register_model(name text, config jsonb, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS text
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF jsonb_typeof(config) IS DISTINCT FROM 'object' OR coalesce(config->>'name', name) <> name THEN
        RAISE EXCEPTION 'config of model "%" must be a JSON object that names no other model', name USING ERRCODE = 'PS002';
    ELSIF coalesce(config->>'protocol', '') NOT IN ('dispatcher', 'cog', 'oip', 'openai') THEN
        RAISE EXCEPTION 'protocol of model "%" must be dispatcher, cog, oip or openai', name USING ERRCODE = 'PS002';
    END IF;
    INSERT INTO penstock.model AS m (name, config) VALUES (register_model.name, register_model.config)
    ON CONFLICT ON CONSTRAINT model_pkey DO UPDATE SET config = excluded.config, version = m.version + 1, changed_at = now();
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(register_model.actor, current_user), 'register_model', register_model.name, register_model.reason, config);
    RETURN penstock.fit_model_queue(register_model.name);
END $$;

-- Name: remove_instance(text, text, boolean, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.remove_instance(model text, server text, force boolean DEFAULT false, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    instance integer := penstock.instance_id(model, server);
    held     bigint;
BEGIN
    PERFORM FROM penstock.instance i WHERE i.id = instance FOR UPDATE; -- nobody leases while we look
    SELECT count(*) INTO held FROM penstock.slot s WHERE s.instance_id = instance;
    IF held > 0 AND NOT force THEN
        RAISE EXCEPTION 'instance "%" of model "%" has % slots held', server, model, held
            USING ERRCODE = 'PS006', HINT = 'Drain it first and wait, or remove with force => true.';
    END IF;
    DELETE FROM penstock.slot s WHERE s.instance_id = instance;
    DELETE FROM penstock.instance i WHERE i.id = instance;
    PERFORM penstock.fit_model_queue(model);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(remove_instance.actor, current_user), 'remove_instance', remove_instance.model || '/' || remove_instance.server,
            remove_instance.reason, jsonb_build_object('force', force, 'held', held));
END $$;

-- Name: remove_model(text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.remove_model(name text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM penstock.need_model(name);
    IF EXISTS (SELECT FROM penstock.instance i WHERE i.model = remove_model.name) THEN
        RAISE EXCEPTION 'model "%" still has instances', name USING ERRCODE = 'PS006', HINT = 'Remove them first.';
    END IF;
    DELETE FROM penstock.model m WHERE m.name = remove_model.name;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(remove_model.actor, current_user), 'remove_model', remove_model.name, remove_model.reason);
END $$;

-- Name: remove_seats(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.remove_seats() RETURNS void
    LANGUAGE sql
    AS $$
    DELETE FROM penstock.seat t
     WHERE t.ctid = ANY (ARRAY(
           SELECT s.ctid FROM penstock.seat s
            WHERE (SELECT n.id FROM penstock.node n WHERE n.id = s.node_id AND n.beat_at + n.lease > clock_timestamp()) IS NULL
              FOR UPDATE SKIP LOCKED));
$$;

-- Name: FUNCTION remove_seats(); Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON FUNCTION penstock.remove_seats() IS 'removes the seats of nodes that are dead or gone; no push takes them any more';

-- Name: replace_merged(penstock.queue, bigint[], jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.replace_merged(q penstock.queue, ids bigint[], merged jsonb) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    oldest bigint := (SELECT min(i) FROM unnest(ids) i);
    gone   integer;
BEGIN
    IF merged IS NULL OR pg_column_size(merged) > q.payload_limit THEN
        RAISE EXCEPTION 'payload merged into entry % is missing or larger than % bytes', oldest, q.payload_limit USING ERRCODE = 'PS003';
    END IF;
    UPDATE penstock.entry e
       SET payload = merged, start_by = a.start_by, finish_by = a.finish_by, attempt = a.attempt, crashes = a.crashes, cost = a.cost,
           depth = a.depth
      FROM (SELECT CASE WHEN bool_and(x.start_by IS NOT NULL) THEN max(x.start_by) END AS start_by,
                   CASE WHEN bool_and(x.finish_by IS NOT NULL) THEN max(x.finish_by) END AS finish_by,
                   max(x.attempt) AS attempt, max(x.crashes) AS crashes, max(x.cost) AS cost, max(x.depth) AS depth
              FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (ids)) a
     WHERE e.queue_id = q.id AND e.id = oldest;
    WITH gone AS (
        DELETE FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = ANY (ids) AND x.id <> oldest
        RETURNING x.id, x.created_at, x.attempt
    ), forgotten AS (
        DELETE FROM penstock.cancel_request c USING gone WHERE c.queue_id = q.id AND c.entry_id = gone.id
    ), unsaved AS (
        DELETE FROM penstock.progress p USING gone WHERE p.queue_id = q.id AND p.entry_id = gone.id
    )
    INSERT INTO penstock.result (queue_id, entry_id, created_at, attempt, outcome, reason)
    SELECT q.id, id, created_at, attempt, 'done', 'merged into ' || oldest FROM gone;
    GET DIAGNOSTICS gone = ROW_COUNT;
    PERFORM penstock.count(d.queue_id, 'removed', gone) FROM penstock.depth d WHERE d.queue_id = q.id;
    RETURN gone;
END $$;

-- Name: resolve_idempotency(penstock.queue, bigint[], jsonb[], text[], text[], text[], text[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.resolve_idempotency(q penstock.queue, INOUT ids bigint[], payloads jsonb[], flows text[], keys text[], lock_keys text[], names text[], OUT verdicts text[]) RETURNS record
    LANGUAGE plpgsql
    AS $$
DECLARE
    fingerprints bytea[];
    conflict     record;
BEGIN
    fingerprints := ARRAY(
        SELECT sha256(convert_to(jsonb_build_array(u.payload, u.lock_key, u.name)::text, 'UTF8'))
          FROM unnest(payloads, lock_keys, names) WITH ORDINALITY u(payload, lock_key, name, i) ORDER BY u.i);
    INSERT INTO penstock.idempotency (queue_id, flow, key, entry_id, fingerprint)
    SELECT q.id, coalesce(u.flow, ''), u.key, u.id, u.fingerprint
      FROM unnest(ids, flows, keys, fingerprints) WITH ORDINALITY u(id, flow, key, fingerprint, i)
     WHERE u.key IS NOT NULL
     ORDER BY coalesce(u.flow, ''), u.key COLLATE "C", u.i
    ON CONFLICT DO NOTHING;
    SELECT u.i, u.key INTO conflict
      FROM unnest(flows, keys, fingerprints) WITH ORDINALITY u(flow, key, fingerprint, i)
           CROSS JOIN LATERAL (SELECT fingerprint FROM penstock.idempotency
                                WHERE queue_id = q.id AND flow = coalesce(u.flow, '') AND key = u.key OFFSET 0) k
     WHERE k.fingerprint <> u.fingerprint ORDER BY u.i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'idempotency_key "%" was used with another body (entry %)', conflict.key, conflict.i
            USING ERRCODE = 'PS004', HINT = 'Use a new key for new work; the same key must come with the same payload, lock key and name.';
    END IF;
    SELECT array_agg(coalesce(k.entry_id, u.id) ORDER BY u.i),
           array_agg(CASE WHEN k.entry_id <> u.id THEN 'replayed' ELSE 'inserted' END ORDER BY u.i)
      INTO ids, verdicts
      FROM unnest(ids, flows, keys) WITH ORDINALITY u(id, flow, key, i)
           LEFT JOIN LATERAL (SELECT entry_id FROM penstock.idempotency
                               WHERE queue_id = q.id AND flow = coalesce(u.flow, '') AND key = u.key OFFSET 0) k ON true;
END $$;

-- Name: resolve_uniqueness(penstock.queue, bigint[], text[], text[], text[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.resolve_uniqueness(q penstock.queue, INOUT ids bigint[], INOUT verdicts text[], keys text[], policies text[]) RETURNS record
    LANGUAGE plpgsql
    AS $$
DECLARE
    u    record;
    held bigint;
BEGIN
    verdicts := coalesce(verdicts, array_fill('inserted'::text, ARRAY[cardinality(ids)]));
    FOR u IN SELECT k.key, k.policy, k.i FROM unnest(keys, policies) WITH ORDINALITY k(key, policy, i)
              WHERE k.key IS NOT NULL ORDER BY k.key COLLATE "C", k.i
    LOOP
        CONTINUE WHEN verdicts[u.i] <> 'inserted';
        LOOP
            INSERT INTO penstock.uniqueness (queue_id, key, entry_id) VALUES (q.id, u.key, ids[u.i])
            ON CONFLICT DO NOTHING;
            EXIT WHEN FOUND;
            SELECT entry_id INTO held FROM penstock.uniqueness WHERE queue_id = q.id AND key = u.key FOR UPDATE;
            CONTINUE WHEN NOT FOUND; -- swept between the two statements
            IF held = ANY (ids) OR penstock.holds_unique_key(q.id, held, u.policy) THEN
                ids[u.i] := held;
                verdicts[u.i] := 'duplicate';
            ELSE
                UPDATE penstock.uniqueness SET entry_id = ids[u.i] WHERE queue_id = q.id AND key = u.key;
            END IF;
            EXIT;
        END LOOP;
    END LOOP;
END $$;

-- Name: resume(text, text, text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.resume(scope text, value text, queue text DEFAULT NULL::text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
BEGIN
    DELETE FROM penstock.pause p WHERE p.scope = resume.scope AND p.value = resume.value AND p.queue_id IS NOT DISTINCT FROM q;
    IF NOT FOUND THEN
        RAISE EXCEPTION '% "%" is not paused', scope, value USING ERRCODE = 'PS006', HINT = 'penstock.pause lists what is.';
    END IF;
    IF resume.scope IN ('name', 'lock_key') AND EXISTS (
       SELECT FROM penstock.disabled d WHERE d.queue_id = q AND d.scope = resume.scope AND d.value = resume.value) THEN
        PERFORM penstock.enable_entries(queue, resume.scope, resume.value, resume.reason, resume.actor);
    END IF;
    PERFORM penstock.pauses_changed(q);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(resume.actor, current_user), 'resume', resume.scope || ' ' || resume.value, resume.reason,
            jsonb_strip_nulls(jsonb_build_object('queue', queue)));
END $$;

-- Name: resume_batch(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.resume_batch(batch bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    b penstock.batch := penstock.batch_row(batch);
BEGIN
    UPDATE penstock.batch SET paused_at = NULL, paused_by = NULL, paused_reason = NULL, paused_until = NULL WHERE id = b.id;
    INSERT INTO penstock.audit (actor, verb, object, reason) VALUES (coalesce(actor, current_user), 'resume_batch', 'batch ' || batch, reason);
END $$;

-- Name: resume_cron_job(text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.resume_cron_job(job text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    j penstock.cron_job;
BEGIN
    SELECT * INTO j FROM penstock.cron_job_row(job);
    UPDATE penstock.cron_job SET paused_at = NULL, paused_by = NULL, paused_reason = NULL, paused_until = NULL WHERE id = j.id;
    UPDATE penstock.entry e SET due_at = j.due_at
     WHERE j.fired_at IS NULL AND e.queue_id = j.queue_id AND e.id = j.entry_id AND e.status = 'initial' AND isfinite(j.due_at);
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'resume_cron_job', 'cron job ' || job, reason);
END $$;

-- Name: resume_queue(text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.resume_queue(queue text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    UPDATE penstock.queue
       SET paused_at = NULL, paused_by = NULL, paused_reason = NULL, paused_until = NULL, version = version + 1
     WHERE id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'resume_queue', q.name, reason);
END $$;

-- Name: retry_batch(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.retry_batch(batch bigint, reason text DEFAULT ''::text, actor text DEFAULT CURRENT_USER) RETURNS integer
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

-- Name: retry_failure(bigint, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.retry_failure(entry_id bigint, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF NOT penstock.return_failure(penstock.failed_entry(retry_failure.entry_id), retry_failure.entry_id) THEN
        PERFORM penstock.failed_entry(retry_failure.entry_id); -- raises: somebody was faster
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(retry_failure.actor, current_user), 'retry_failure', 'entry ' || retry_failure.entry_id, retry_failure.reason);
END $$;

-- Name: retry_flaw(jsonb, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.retry_flaw(policy jsonb, within text DEFAULT 'retry'::text) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $_$
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
$_$;

-- Name: return_failure(integer, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.return_failure(queue integer, wanted bigint) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    f     penstock.failure;
    place bigint;
    off   boolean;
BEGIN
    DELETE FROM penstock.failure WHERE queue_id = queue AND entry_id = wanted RETURNING * INTO f;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM penstock.cancel_request WHERE queue_id = queue AND entry_id = wanted;
    place := nextval('penstock.entry_id_seq');
    off := penstock.is_off(queue, f.name, f.lock_key);
    INSERT INTO penstock.entry (id, queue_id, created_at, status, start_by, finish_by, cost, priority, enabled_priority, pos,
                                flow, lock_key, name, trace, callback, history, payload, depth)
    VALUES (wanted, queue, f.created_at, 'pending', CASE WHEN f.start_by > clock_timestamp() THEN f.start_by END,
            CASE WHEN f.finish_by > clock_timestamp() THEN f.finish_by END, f.cost,
            CASE WHEN off THEN -1 ELSE f.priority END, CASE WHEN off THEN f.priority END, place,
            f.flow, f.lock_key, f.name, f.trace, f.callback, f.history, f.payload, f.depth);
    IF NOT off THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id, lock_key)
        VALUES (queue, f.priority, f.flow, place, CASE WHEN f.lock_key IS NULL THEN wanted END, f.lock_key);
    END IF;
    PERFORM penstock.count(d.queue_id, 'accepted', 1) FROM penstock.depth d WHERE d.queue_id = queue;
    RETURN true;
END $$;

-- Name: roll_up_samples(); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.roll_up_samples() RETURNS bigint
    LANGUAGE sql
    AS $$
    WITH written AS (
        INSERT INTO penstock.sample_minute
        SELECT m.*
          FROM penstock.queue q
         CROSS JOIN LATERAL (
               SELECT greatest(date_trunc('minute', now()) - interval '1 hour',
                               (SELECT max(d.at) + interval '1 minute' FROM penstock.sample_minute d
                                 WHERE d.queue_id = q.id AND d.at > now() - interval '1 hour')) AS since) span
         CROSS JOIN LATERAL (
               SELECT s.queue_id, date_trunc('minute', s.at), avg(s.initial)::bigint, avg(s.pending)::bigint, avg(s.disabled)::bigint,
                      avg(s.computing)::bigint, max(s.failed), bool_or(s.estimated), round(avg(s.serving))::integer, max(s.head_age),
                      mode() WITHIN GROUP (ORDER BY s.blocked), max(s.accepted), max(s.gone), max(s.dead_tuples),
                      avg(s.in_per_second), avg(s.out_per_second)
                 FROM penstock.sample s
                WHERE s.queue_id = q.id AND s.at >= span.since AND s.at < date_trunc('minute', now())
                GROUP BY 1, 2) m
        ON CONFLICT DO NOTHING
        RETURNING 1
    )
    SELECT count(*) FROM written
$$;

-- Name: run_cron_job_now(text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.run_cron_job_now(job text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    j penstock.cron_job;
BEGIN
    PERFORM penstock.need_read_committed();
    SELECT * INTO j FROM penstock.cron_job_row(job);
    IF j.problem IS NOT NULL THEN
        RAISE EXCEPTION 'cron job "%" cannot run: %', job, j.problem USING ERRCODE = 'PS006', HINT = 'Change it with penstock.alter_cron_job.';
    ELSIF j.fired_at IS NOT NULL AND j.overlap = 'skip' AND EXISTS (
          SELECT FROM penstock.entry e WHERE e.queue_id = j.queue_id AND e.id = j.entry_id) THEN
        RAISE EXCEPTION 'cron job "%" runs already, as entry %', job, j.entry_id
            USING ERRCODE = 'PS006', HINT = 'Wait until it has ended, or alter its overlap to queue or cancel_running.';
    END IF;
    UPDATE penstock.cron_job
       SET run_now_at = clock_timestamp(), look_at = '-infinity',
           due_at = CASE WHEN fired_at IS NULL THEN '-infinity' ELSE due_at END,
           following_at = CASE WHEN fired_at IS NOT NULL AND entry_id IS NOT NULL AND overlap = 'cancel_running' THEN '-infinity' ELSE following_at END
     WHERE id = j.id;
    INSERT INTO penstock.audit (actor, verb, object, reason)
    VALUES (coalesce(actor, current_user), 'run_cron_job_now', 'cron job ' || job, reason);
END $$;

-- Name: runs(penstock.entry); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.runs(e penstock.entry) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    SELECT e.status = 'pending' AND EXISTS (
        SELECT FROM penstock.lock l
         WHERE l.queue_id = e.queue_id AND l.lock_key = coalesce(e.lock_key, '#' || e.id) AND l.last_entry_id >= e.id)
$$;

-- Name: serving(integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.serving(queue integer) RETURNS TABLE(id bigint, name text)
    LANGUAGE sql STABLE
    AS $_$
    SELECT n.id, n.name FROM penstock.node n
     WHERE $1 = ANY (n.queue_ids) AND n.draining_at IS NULL AND n.beat_at + n.lease > clock_timestamp()
$_$;

-- Name: set_flow_weight(text, real, text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.set_flow_weight(flow text, weight real, queue text DEFAULT NULL::text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
DECLARE
    q integer := CASE WHEN queue IS NOT NULL THEN (penstock.queue_row(queue)).id END;
BEGIN
    IF set_flow_weight.weight IS NULL THEN
        DELETE FROM penstock.flow_weight w WHERE w.flow = set_flow_weight.flow AND w.queue_id IS NOT DISTINCT FROM q;
    ELSE
        INSERT INTO penstock.flow_weight AS w (flow, queue_id, weight) VALUES (set_flow_weight.flow, q, set_flow_weight.weight)
        ON CONFLICT (flow, coalesce(queue_id, 0)) DO UPDATE SET weight = excluded.weight;
    END IF;
    PERFORM penstock.pauses_changed(q);
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(set_flow_weight.actor, current_user), 'set_flow_weight', 'flow ' || set_flow_weight.flow, set_flow_weight.reason,
            jsonb_strip_nulls(jsonb_build_object('queue', queue, 'weight', set_flow_weight.weight)));
EXCEPTION WHEN check_violation OR not_null_violation THEN
    RAISE EXCEPTION 'weight of flow "%" is not valid: %', set_flow_weight.flow, set_flow_weight.weight
        USING ERRCODE = 'PS002', HINT = 'Give a number from 0.001 to 1000; 1 is what every other flow has.';
END $$;

-- Name: set_limit(text, jsonb, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.set_limit(limit_name text, options jsonb, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS integer
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

-- Name: set_model_override(text, jsonb, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.set_model_override(name text, override jsonb, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM penstock.need_model(name);
    IF jsonb_typeof(override) <> 'object' THEN
        RAISE EXCEPTION 'override of model "%" must be a JSON object', name USING ERRCODE = 'PS002';
    END IF;
    UPDATE penstock.model m SET override = set_model_override.override, version = m.version + 1, changed_at = now()
     WHERE m.name = set_model_override.name;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(set_model_override.actor, current_user), 'set_model_override', set_model_override.name,
            set_model_override.reason, override);
    PERFORM penstock.fit_model_queue(set_model_override.name);
END $$;

-- Name: set_quota(text, jsonb, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.set_quota(application text, options jsonb, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    quota text := 'application:' || application;
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
    WITH fresh AS (
        INSERT INTO penstock.limit_use (queue_id, limit_id, units, since)
        SELECT x.id, l.id, 1, clock_timestamp() FROM penstock.queue x JOIN penstock."limit" l ON l.name = quota
         WHERE x.application = set_quota.application ORDER BY x.id
        ON CONFLICT DO NOTHING
        RETURNING queue_id
    ), audited AS (
        INSERT INTO penstock.audit (actor, verb, object, reason, detail)
        SELECT set_quota.actor, 'use_limit', x.name, set_quota.reason, jsonb_build_object('limit', quota, 'units', 1)
          FROM fresh f JOIN penstock.queue x ON x.id = f.queue_id
    )
    UPDATE penstock.queue x SET version = version + 1 WHERE x.id IN (SELECT f.queue_id FROM fresh f);
END $$;

-- Name: set_statements(text, jsonb, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.set_statements(queue_name text, statements jsonb, reason text DEFAULT NULL::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
    LANGUAGE plpgsql
    AS $_$
DECLARE
    q       penstock.queue := penstock.queue_row(queue_name);
    allowed text[] := CASE q.kind WHEN 'batch' THEN '{map,reduce}' WHEN 'change_log' THEN '{impact}' WHEN 'task' THEN '{run}' WHEN 'cron' THEN '{run}' ELSE '{}' END;
    s       record;
BEGIN
    FOR s IN SELECT * FROM jsonb_each_text(statements) LOOP
        IF s.key <> ALL (allowed) THEN
            RAISE EXCEPTION 'queue "%" of kind % has no statement "%"', q.name, q.kind, s.key
                USING ERRCODE = 'PS002', HINT = CASE WHEN allowed = '{}' THEN 'Its entries are run by what belongs to the kind.' ELSE 'It may have ' || array_to_string(allowed, ', ') || '.' END;
        END IF;
        BEGIN
            PERFORM penstock.check_statement(penstock.statement_sql(s.key, s.value));
        EXCEPTION WHEN OTHERS THEN
            RAISE EXCEPTION 'statement "%" of queue "%" cannot be run: %', s.key, q.name, SQLERRM
                USING ERRCODE = 'PS002', HINT = 'Write one statement; $1 (and $2, for map) are jsonb.';
        END;
    END LOOP;
    IF q.kind = 'batch' AND statements ? 'reduce' AND NOT statements ? 'map' THEN
        RAISE EXCEPTION 'queue "%" has a reduce and no map', q.name USING ERRCODE = 'PS002';
    END IF;
    UPDATE penstock.queue x SET statements = set_statements.statements, version = version + 1 WHERE x.id = q.id;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(set_statements.actor, current_user), 'set_statements', queue_name, set_statements.reason, statements);
END $_$;

-- Name: settle_cancel_requests(integer, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.settle_cancel_requests(queue integer, most integer) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    c     record;
    e     penstock.entry;
    ended integer := 0;
BEGIN
    FOR c IN SELECT r.entry_id, r.reason FROM penstock.cancel_request r WHERE r.queue_id = queue
              ORDER BY r.entry_id LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        e := penstock.take_entry(queue, c.entry_id);
        IF e.id IS NOT NULL THEN
            PERFORM penstock.end_entry(e, 'cancelled', c.reason);
            ended := ended + 1;
        ELSIF NOT EXISTS (SELECT FROM penstock.entry x WHERE x.queue_id = queue AND x.id = c.entry_id) THEN
            DELETE FROM penstock.cancel_request r WHERE r.queue_id = queue AND r.entry_id = c.entry_id;
        END IF;
    END LOOP;
    RETURN ended;
END $$;

-- Name: slot_share(text, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.slot_share(wanted text, node bigint) RETURNS integer
    LANGUAGE sql STABLE
    AS $$
    SELECT CASE WHEN slots >= nodes THEN ceil(slots::numeric / nodes)::integer
                WHEN (SELECT min(s.leased_at) FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id
                       WHERE i.model = wanted AND s.node_id = node AND s.doubt_at IS NULL) < clock_timestamp() - interval '5 seconds' THEN 0
                ELSE 1 END
      FROM (SELECT coalesce(sum(i.slots), 0) AS slots FROM penstock.instance i WHERE i.model = wanted AND penstock.usable(i)) a,
           (SELECT count(*) AS nodes FROM (
                SELECT h.node_id FROM penstock.hungry_nodes(wanted) h
                 UNION SELECT s.node_id FROM penstock.instance i JOIN penstock.slot s ON s.instance_id = i.id
                        WHERE i.model = wanted AND s.doubt_at IS NULL AND penstock.node_lives(s.node_id)
                 UNION SELECT node) everybody) b
     WHERE EXISTS (SELECT FROM penstock.hungry_nodes(wanted) h WHERE h.node_id <> node)
$$;

-- Name: spend(integer, text, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.spend(queue integer, in_flow text, n bigint) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    l record;
BEGIN
    IF n = 0 THEN
        RETURN; -- whoever claimed nothing may not hold the limits, and must not wait for who does
    END IF;
    FOR l IN SELECT g AS row, g.*, u.units FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id
              WHERE u.queue_id = queue AND g.rate IS NOT NULL AND NOT g.per_key ORDER BY g.id
    LOOP
        INSERT INTO penstock.bucket (limit_id, flow, units, at)
        VALUES (l.id, CASE WHEN l.per_flow THEN in_flow ELSE '' END, l.burst - n * l.units, clock_timestamp())
        ON CONFLICT (limit_id, flow) DO UPDATE
           SET units = penstock.bucket_units(l.row, in_flow) - n * l.units, at = clock_timestamp();
    END LOOP;
END $$;

-- Name: spend_keys(integer, text[], bigint[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.spend_keys(queue integer, keys text[], entries bigint[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO penstock.bucket AS b (limit_id, flow, units, at)
    SELECT g.id, k.key, g.burst - k.n * u.units, clock_timestamp()
      FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id CROSS JOIN unnest(keys, entries) k(key, n)
     WHERE u.queue_id = queue AND g.per_key ORDER BY g.id, k.key COLLATE "C"
    ON CONFLICT (limit_id, flow) DO UPDATE
       SET units = (SELECT penstock.bucket_units(g, b.flow) - g.burst FROM penstock."limit" g WHERE g.id = b.limit_id) + excluded.units, at = clock_timestamp();
END $$;

-- Name: split_batch(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.split_batch(batch bigint) RETURNS void
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

-- Name: start_operation(text, text, jsonb, text, text, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.start_operation(queue text, verb text, filter jsonb, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text, per_second integer DEFAULT 1000) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue);
    n    bigint := penstock.count_matching(queue, verb, filter);
    made bigint;
BEGIN
    IF per_second < 1 OR per_second IS NULL THEN
        RAISE EXCEPTION 'per_second is not at least 1' USING ERRCODE = 'PS002';
    END IF;
    INSERT INTO penstock.operation (queue_id, verb, filter, per_second, actor, reason, matched, until_id)
    VALUES (q.id, start_operation.verb, start_operation.filter, start_operation.per_second, coalesce(start_operation.actor, current_user),
            coalesce(start_operation.reason, ''), n, coalesce(pg_sequence_last_value('penstock.entry_id_seq'), 0))
    RETURNING id INTO made;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (coalesce(start_operation.actor, current_user), 'start_operation', q.name, start_operation.reason,
            jsonb_build_object('operation', made, 'verb', start_operation.verb, 'filter', start_operation.filter, 'matched', n));
    RETURN made;
END $$;

-- Name: statement_sql(text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.statement_sql(name text, statement text) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT CASE name WHEN 'impact' THEN format(E'SELECT to_jsonb(r) FROM (%s\n) r', rtrim(statement, E'; \n')) ELSE statement END
$$;

-- Name: step_batch(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.step_batch(batch bigint) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    b penstock.batch;
    n integer := 0;
BEGIN
    SELECT * INTO b FROM penstock.batch x WHERE x.id = batch AND x.ended_at IS NULL FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    ELSIF b.status = 'splitting' AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = b.queue_id AND e.id = b.split_entry_id) THEN
        -- Splitting commits before its entry ends; the batch was read after that. So it went wrong, or was cancelled.
        UPDATE penstock.batch SET problem = 'split: ' || coalesce(
            (SELECT f.error FROM penstock.failure f WHERE f.queue_id = b.queue_id AND f.entry_id = b.split_entry_id LIMIT 1), 'its entry was cancelled')
         WHERE id = b.id AND status = 'splitting' RETURNING * INTO b;
        IF FOUND THEN
            PERFORM penstock.complete_batch(b);
        END IF;
    ELSIF b.status = 'running' THEN
        n := penstock.reap_batch(b);
        IF b.cancelled_by IS NOT NULL THEN
            UPDATE penstock.batch_part p SET outcome = 'cancelled', ended_at = clock_timestamp(), error = b.cancelled_reason
             WHERE p.batch_id = b.id AND p.ended_at IS NULL AND p.entry_id IS NULL;
        END IF;
        IF NOT EXISTS (SELECT FROM penstock.batch_part p WHERE p.batch_id = b.id AND p.ended_at IS NULL) THEN
            PERFORM penstock.complete_batch(b);
        ELSIF b.cancelled_by IS NULL AND (b.paused_at IS NULL OR b.paused_until <= clock_timestamp()) THEN
            n := n + penstock.feed_batch(b);
        END IF;
    ELSIF b.status = 'ending' AND NOT EXISTS (
          SELECT FROM penstock.entry e WHERE e.queue_id = b.completion_queue_id AND e.id = b.completion_entry_id) THEN
        PERFORM penstock.end_batch(b);
    END IF;
    RETURN n;
END $$;

-- Name: step_operation(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.step_operation(id bigint, OUT changed integer, OUT wait interval, OUT ended boolean) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $_$
DECLARE
    o     penstock.operation;
    q     penstock.queue;
    quota integer;
    seen  record;
    one   bigint;
    did   boolean;
BEGIN
    PERFORM penstock.need_read_committed();
    changed := 0; wait := '0'; ended := false;
    SELECT * INTO o FROM penstock.operation x WHERE x.id = step_operation.id AND x.status = 'running' FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        ended := true; -- or somebody else steps it
        RETURN;
    END IF;
    quota := least(500, floor(o.per_second * extract(epoch FROM clock_timestamp() - coalesce(o.stepped_at, o.created_at - interval '1 second'))));
    IF quota < 1 THEN
        wait := greatest('1 millisecond', coalesce(o.stepped_at, o.created_at) + interval '1 second' / o.per_second - clock_timestamp());
        RETURN;
    END IF;
    SELECT * INTO q FROM penstock.queue x WHERE x.id = o.queue_id;
    EXECUTE format('SELECT coalesce(array_agg(id ORDER BY id) FILTER (WHERE hit), ''{}'') AS ids, max(id) AS last, count(*) AS n
                      FROM (SELECT id, coalesce(%s, false) AS hit FROM %s WHERE id > $1 AND id <= $2 ORDER BY id LIMIT 10000) w',
                   penstock.operation_filter(q, o.verb, o.filter), penstock.operation_source(q, o.verb))
       INTO seen USING o.last_id, o.until_id;
    FOREACH one IN ARRAY (seen.ids)[1:quota] LOOP
        did := penstock.apply_operation(o, one);
        EXIT WHEN did IS NULL;
        o.last_id := one;
        changed := changed + did::integer;
    END LOOP;
    IF did IS NULL AND cardinality(seen.ids) > 0 THEN
        wait := '10 milliseconds'; -- the next step begins with the busy one
    ELSIF cardinality(seen.ids) <= quota THEN
        o.last_id := coalesce(seen.last, o.until_id);
        ended := seen.n < 10000;
    END IF;
    UPDATE penstock.operation x
       SET last_id = o.last_id, changed = x.changed + step_operation.changed, stepped_at = clock_timestamp(),
           status = CASE WHEN ended THEN 'done' ELSE 'running' END, ended_at = CASE WHEN ended THEN clock_timestamp() END
     WHERE x.id = o.id;
END $_$;

-- Name: sweep_output(integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.sweep_output(most integer) RETURNS bigint
    LANGUAGE sql
    AS $$
    WITH gone AS (
        DELETE FROM penstock.output o
         WHERE o.ctid = ANY (ARRAY(
               SELECT x.ctid FROM penstock.output x
                 LEFT JOIN penstock.queue q ON q.id = x.queue_id
                WHERE (q.id IS NULL OR x.at < clock_timestamp() - greatest(q.result_retention, interval '1 minute'))
                  AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = x.queue_id AND e.id = x.entry_id)
                LIMIT most))
        RETURNING 1)
    SELECT count(*) FROM gone
$$;

-- Name: switch_entries(penstock.queue, text, text, text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.switch_entries(q penstock.queue, verb text, scope text, value text, reason text, actor text) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
DECLARE
    operation bigint := penstock.start_operation(q.name, verb, jsonb_build_object(scope, value), reason, actor, 5000);
BEGIN
    UPDATE penstock.queue SET version = version + 1 WHERE id = q.id;
    PERFORM penstock.step_operation(operation);
    RETURN operation;
END $$;

-- Name: switch_entry(bigint, text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.switch_entry(wanted bigint, verb text, reason text, actor text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    queue   integer := penstock.living_entry(wanted);
    changed boolean;
BEGIN
    PERFORM penstock.need_read_committed();
    FOR i IN 1 .. 200 LOOP
        changed := CASE verb WHEN 'disable_entry' THEN penstock.disable_one(queue, wanted) ELSE penstock.enable_one(queue, wanted) END;
        EXIT WHEN changed IS NOT NULL;
        PERFORM pg_sleep(0.01);
    END LOOP;
    IF changed IS NULL THEN
        RAISE EXCEPTION 'entry % is held by another transaction', wanted USING ERRCODE = 'PS006', HINT = 'Try again.';
    ELSIF changed THEN
        INSERT INTO penstock.audit (actor, verb, object, reason)
        VALUES (coalesce(switch_entry.actor, current_user), switch_entry.verb, 'entry ' || wanted, switch_entry.reason);
    ELSE
        PERFORM penstock.living_entry(wanted); -- raises if it ended meanwhile
    END IF;
END $$;

-- Name: take_entry(integer, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.take_entry(queue integer, wanted bigint) RETURNS penstock.entry
    LANGUAGE plpgsql
    AS $$
DECLARE
    e       penstock.entry;
    nothing penstock.entry;
    place   tid;
BEGIN
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted;
    IF NOT FOUND OR penstock.runs(e) THEN
        RETURN nothing; -- before anything is locked, so that a settler of a running entry never waits for us
    END IF;
    IF e.lock_key IS NULL THEN
        SELECT r.ctid INTO place FROM penstock.ready r
         WHERE r.queue_id = queue AND r.priority = coalesce(e.enabled_priority, e.priority) AND r.flow = e.flow
           AND r.pos = coalesce(e.pos, e.id) AND r.entry_id = wanted
           FOR UPDATE SKIP LOCKED;
    ELSIF NOT penstock.hold_key(queue, e.lock_key) THEN
        RETURN nothing;
    END IF;
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = wanted FOR UPDATE SKIP LOCKED;
    -- From here on the row cannot change, so nobody can put it into line anew. If it is in line and we do not have its
    -- ready row, then a claim or a pusher has it. No ready row and no lock in one snapshot: it is out of line.
    IF NOT FOUND OR penstock.runs(e) OR (place IS NULL AND penstock.in_line(e)) THEN
        RETURN nothing;
    END IF;
    DELETE FROM penstock.ready WHERE queue_id = queue AND ctid = place;
    RETURN e;
END $$;

-- Name: take_seat(integer, text, bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.take_seat(queue integer, in_flow text, look_from bigint, OUT node bigint, OUT claim integer, OUT next bigint) RETURNS record
    LANGUAGE plpgsql
    AS $$
DECLARE
    after bigint := coalesce((SELECT last_value FROM penstock.seat_seat_seq WHERE is_called), 0) + 1; -- all that are offered later
    mark  bigint := CASE WHEN look_from > after THEN 0 ELSE look_from END; -- after a crash seats are numbered anew
BEGIN
    look_from := mark;
    LOOP
        DELETE FROM penstock.seat t
         WHERE t.ctid = (
               SELECT s.row
                 FROM penstock.queue q
                CROSS JOIN LATERAL (
                      SELECT x.ctid AS row
                        FROM penstock.seat x
                       WHERE x.queue_id = queue AND x.seat >= look_from
                         AND (SELECT n.id FROM penstock.node n
                               WHERE n.id = x.node_id AND n.application = q.application AND n.draining_at IS NULL
                                 AND n.beat_at + n.lease / 4 > clock_timestamp()
                                 AND NOT EXISTS (SELECT FROM penstock.pause p WHERE p.scope = 'node' AND p.value IN (n.name, n.id::text)
                                                    AND coalesce(p.until > clock_timestamp(), true))) IS NOT NULL
                       ORDER BY x.seat
                       LIMIT 1
                         FOR UPDATE SKIP LOCKED) s
                WHERE q.id = queue AND q.algorithm = 'fair' AND q.model IS NULL AND q.disabled_at IS NULL
                  AND (q.paused_at IS NULL OR coalesce(q.paused_until <= clock_timestamp(), false))
                  AND NOT EXISTS (SELECT FROM penstock.limit_use u WHERE u.queue_id = queue)
                  AND NOT EXISTS (SELECT FROM penstock.push_back b
                                   WHERE b.queue_id = queue AND b.whole AND b.flow = '' AND b.until > clock_timestamp())
                  AND NOT EXISTS (SELECT FROM penstock.push_back b
                                   WHERE b.queue_id = queue AND NOT b.whole AND b.flow = in_flow AND b.until > clock_timestamp())
                  AND NOT EXISTS (SELECT FROM penstock.pause p WHERE p.scope = 'application' AND p.value = q.application
                                     AND coalesce(p.until > clock_timestamp(), true))
                  AND NOT EXISTS (SELECT FROM penstock.pause p WHERE p.scope = 'flow' AND p.value = in_flow AND coalesce(p.queue_id, 0) IN (0, queue)
                                     AND coalesce(p.until > clock_timestamp(), true)))
        RETURNING t.node_id, t.claim_id, t.seat + 1 INTO node, claim, next;
        -- One that was offered or came back late may stand before: once in 200 pushes without a seat it is looked for.
        EXIT WHEN node IS NOT NULL OR look_from = 0 OR random() > 0.005;
        look_from := 0;
    END LOOP;
    -- Seats that this push may not have, or that are just taken, are there for others.
    IF node IS NULL THEN
        next := CASE WHEN EXISTS (SELECT FROM penstock.seat x WHERE x.queue_id = queue AND x.seat >= mark) THEN mark ELSE after END;
    END IF;
END $$;

-- Name: FUNCTION take_seat(queue integer, in_flow text, look_from bigint, OUT node bigint, OUT claim integer, OUT next bigint); Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON FUNCTION penstock.take_seat(queue integer, in_flow text, look_from bigint, OUT node bigint, OUT claim integer, OUT next bigint) IS 'takes the first seat of a queue from a place on, for the push that calls it; next is where to look from the next time';

-- Name: tend_seat(integer, bigint, integer, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.tend_seat(queue integer, node bigint, claim integer, verb text, OUT withdrawn boolean, OUT taken boolean) RETURNS record
    LANGUAGE plpgsql
    AS $$
BEGIN
    withdrawn := false;
    IF verb <> 'keep' THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    IF verb = 'offer' THEN
        INSERT INTO penstock.seat (queue_id, node_id, claim_id) SELECT queue, n.id, claim FROM penstock.node n WHERE n.id = node;
    ELSIF verb = 'withdraw' THEN
        DELETE FROM penstock.seat t
         WHERE t.ctid = (SELECT s.ctid FROM penstock.seat s WHERE s.node_id = node AND s.claim_id = claim FOR UPDATE SKIP LOCKED);
        withdrawn := FOUND;
    END IF;
    taken := NOT withdrawn AND NOT EXISTS (SELECT FROM penstock.seat s WHERE s.node_id = node AND s.claim_id = claim);
END $$;

-- Name: FUNCTION tend_seat(queue integer, node bigint, claim integer, verb text, OUT withdrawn boolean, OUT taken boolean); Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON FUNCTION penstock.tend_seat(queue integer, node bigint, claim integer, verb text, OUT withdrawn boolean, OUT taken boolean) IS 'offers a seat of a node, keeps or withdraws it, unless a push is just taking it, and says whether it is still there';

-- Name: tidy_key(integer, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.tidy_key(queue integer, key text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    mine tid[];
BEGIN
    mine := ARRAY(SELECT ctid FROM penstock.ready WHERE lock_key = key AND queue_id + 0 = queue FOR UPDATE SKIP LOCKED);
    IF cardinality(mine) > 0 AND NOT EXISTS (
        SELECT FROM penstock.entry
         WHERE queue_id = queue AND lock_key = key AND status = 'pending' AND priority >= 0) THEN
        DELETE FROM penstock.ready WHERE queue_id = queue AND ctid = ANY (mine);
    END IF;
END $$;

-- Name: unpark(integer, integer); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.unpark(queue integer, most integer) RETURNS integer
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
DECLARE
    now_us bigint := extract(epoch FROM clock_timestamp()) * 1000000;
    due    tid[];
    keys   text[];
BEGIN
    due := ARRAY(SELECT ctid FROM penstock.ready WHERE queue_id = queue AND priority = -2 AND flow = '' AND pos <= now_us
                  ORDER BY pos LIMIT most FOR UPDATE SKIP LOCKED);
    IF cardinality(due) = 0 THEN
        RETURN 0;
    END IF;
    -- A new statement: it sees the entries of pushers that relied on a row before we had it.
    WITH gone AS (DELETE FROM penstock.ready WHERE ctid = ANY (due) RETURNING lock_key)
    SELECT array_agg(lock_key) INTO keys FROM gone;
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
    SELECT queue, n.priority, n.flow, n.id, k.key
      FROM unnest(keys) k(key)
     CROSS JOIN LATERAL (
           SELECT min(e.id) AS id, max(e.priority) AS priority, (array_agg(e.flow ORDER BY e.id))[1] AS flow
             FROM (SELECT x.id, x.priority, x.flow FROM penstock.entry x
                    WHERE x.queue_id = queue AND x.lock_key = k.key AND x.status = 'pending' AND x.priority >= 0
                    ORDER BY x.id LIMIT 100) e) n
     WHERE n.id IS NOT NULL
    ON CONFLICT DO NOTHING;
    RETURN cardinality(due);
END $$;

-- Name: unwatch(regclass, text, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.unwatch(watched regclass, queue text DEFAULT NULL::text, reason text DEFAULT ''::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    w     record;
    op    text;
    ended integer := 0;
BEGIN
    FOR w IN SELECT x.watched, x.queue_id, c.oid IS NOT NULL AS there
               FROM penstock.watch x LEFT JOIN pg_class c ON c.oid = x.watched
              WHERE c.oid IS NULL OR (x.watched = unwatch.watched AND (queue IS NULL OR x.queue_id = (penstock.queue_row(queue)).id))
    LOOP
        FOREACH op IN ARRAY ARRAY['insert', 'update', 'delete', 'truncate'] LOOP
            IF w.there THEN
                EXECUTE format('DROP TRIGGER IF EXISTS %I ON %s', 'penstock_' || w.queue_id || '_' || op, w.watched);
            END IF;
            EXECUTE format('DROP FUNCTION IF EXISTS penstock.%I()', format('watch_%s_%s_%s', w.watched::oid, w.queue_id, op));
        END LOOP;
        DELETE FROM penstock.watch x WHERE x.watched = w.watched AND x.queue_id = w.queue_id;
        IF w.there THEN
            INSERT INTO penstock.audit (actor, verb, object, reason)
            VALUES (coalesce(unwatch.actor, current_user), 'unwatch', w.watched::text, unwatch.reason);
            ended := ended + 1;
        END IF;
    END LOOP;
    RETURN ended;
END $$;

-- Name: instance; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.instance (
    id integer NOT NULL,
    model text NOT NULL COLLATE pg_catalog."C",
    server text NOT NULL COLLATE pg_catalog."C",
    endpoint text NOT NULL,
    slots integer NOT NULL,
    labels jsonb DEFAULT '{}'::jsonb NOT NULL,
    state text DEFAULT 'unknown'::text NOT NULL,
    reason text,
    active integer,
    capacity integer,
    queued integer,
    kv_usage real,
    checked_at timestamp with time zone,
    next_check_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    draining_at timestamp with time zone,
    drain_by text,
    drain_reason text,
    quarantined_until timestamp with time zone,
    quarantine_reason text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT instance_labels_check CHECK ((jsonb_typeof(labels) = 'object'::text)),
    CONSTRAINT instance_server_check CHECK (((octet_length(server) >= 1) AND (octet_length(server) <= 200))),
    CONSTRAINT instance_slots_check CHECK (((slots >= 1) AND (slots <= 100000))),
    CONSTRAINT instance_state_check CHECK ((state = ANY (ARRAY['unknown'::text, 'starting'::text, 'ready'::text, 'busy'::text, 'unhealthy'::text, 'defunct'::text])))
)
WITH (fillfactor='50');

-- Name: COLUMN instance.state; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.instance.state IS 'what the last probe found; unknown before the first one, which keeps nobody from using it';

-- Name: COLUMN instance.active; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.instance.active IS 'calls that the worker said it was running; null where its protocol does not say';

-- Name: COLUMN instance.next_check_at; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.instance.next_check_at IS 'whoever moves it forward probes the instance';

-- Name: usable(penstock.instance); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.usable(i penstock.instance) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    SELECT i.draining_at IS NULL AND i.state IN ('unknown', 'ready', 'busy')
       AND (i.quarantined_until IS NULL OR i.quarantined_until <= clock_timestamp())
$$;

-- Name: usage_left(double precision, timestamp with time zone, double precision); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.usage_left(amount double precision, at timestamp with time zone, half_life double precision DEFAULT 300) RETURNS double precision
    LANGUAGE sql
    AS $$
    SELECT amount * power(0.5::float8, least(200, greatest(0, extract(epoch FROM clock_timestamp() - at)::float8 / half_life)))
$$;

-- Name: use_limit(text, text, integer, text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.use_limit(queue_name text, limit_name text, units integer DEFAULT 1, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS void
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

-- Name: waits_for_cron(bigint); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.waits_for_cron(entry bigint) RETURNS boolean
    LANGUAGE sql STABLE
    AS $_$
    SELECT EXISTS (SELECT FROM penstock.cron_job j WHERE j.entry_id = $1 AND j.fired_at IS NULL)
$_$;

-- Name: watch(regclass, text, text[], text[], text, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.watch(watched regclass, queue text, columns text[] DEFAULT NULL::text[], keys text[] DEFAULT NULL::text[], reason text DEFAULT ''::text, actor text DEFAULT CURRENT_USER) RETURNS void
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

-- Name: watch_changes_sql(regclass, text, text[], text[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.watch_changes_sql(watched regclass, op text, columns text[], keys text[]) RETURNS text
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

-- Name: watch_value(jsonb); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.watch_value(v jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT CASE WHEN pg_column_size(v) > 8192 THEN jsonb_build_object('omitted', pg_column_size(v)) ELSE v END
$$;

-- Name: withdraw_batch(penstock.batch, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.withdraw_batch(b penstock.batch, why text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    p record;
    e penstock.entry;
BEGIN
    FOR p IN SELECT x.no, x.entry_id FROM penstock.batch_part x WHERE x.batch_id = b.id AND x.ended_at IS NULL AND x.entry_id IS NOT NULL ORDER BY x.no LOOP
        e := penstock.take_entry(b.queue_id, p.entry_id);
        IF e.id IS NOT NULL THEN
            PERFORM penstock.end_entry(e, 'cancelled', why);
            UPDATE penstock.batch_part x SET entry_id = NULL WHERE x.batch_id = b.id AND x.no = p.no AND x.ended_at IS NULL;
        END IF;
    END LOOP;
END $$;

-- Name: withdraw_cron_entry(bigint, text); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.withdraw_cron_entry(job bigint, why text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    j penstock.cron_job;
    e penstock.entry;
BEGIN
    SELECT * INTO j FROM penstock.cron_job WHERE id = job;
    IF j.entry_id IS NULL OR j.fired_at IS NOT NULL THEN
        RETURN;
    END IF;
    e := penstock.take_entry(j.queue_id, j.entry_id);
    IF e.id IS NOT NULL THEN
        PERFORM penstock.end_entry(e, 'cancelled', why);
    ELSIF EXISTS (SELECT FROM penstock.entry x WHERE x.queue_id = j.queue_id AND x.id = j.entry_id) THEN
        RAISE EXCEPTION 'entry % of cron job "%" is held by another transaction', j.entry_id, j.name
            USING ERRCODE = 'PS006', HINT = 'Try again.';
    END IF;
    UPDATE penstock.cron_job SET entry_id = NULL WHERE id = job;
END $$;

-- Name: work_for(integer, bigint[]); Type: FUNCTION; Schema: penstock; Owner: -

CREATE FUNCTION penstock.work_for(queue integer, entries bigint[]) RETURNS integer
    LANGUAGE sql
    AS $_$
    SELECT set_config('penstock.depth', (coalesce(max(e.depth), 0) + 1)::text, true)::integer
           + 0 * length(set_config('penstock.working_for', format('entry %s of queue "%s"', min(e.id), (SELECT name FROM penstock.queue q WHERE q.id = $1)), true))
      FROM penstock.entry e WHERE e.queue_id = $1 AND e.id = ANY ($2)
$_$;

-- Name: api_token; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.api_token (
    id bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    hash bytea NOT NULL,
    scopes text[] NOT NULL,
    applications text[] DEFAULT '{}'::text[] NOT NULL,
    queues text[] DEFAULT '{}'::text[] NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    created_by text NOT NULL,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    used_at timestamp with time zone,
    CONSTRAINT api_token_hash_check CHECK ((length(hash) = 32)),
    CONSTRAINT api_token_name_check CHECK ((name ~ '^[a-zA-Z0-9][a-zA-Z0-9._@-]{0,62}$'::text)),
    CONSTRAINT api_token_scopes_check CHECK (((cardinality(scopes) > 0) AND (scopes <@ ARRAY['push'::text, 'read'::text, 'operate'::text, 'admin'::text])))
);

-- Name: COLUMN api_token.applications; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.api_token.applications IS 'to which the token is limited; empty: to none';

-- Name: COLUMN api_token.queues; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.api_token.queues IS 'to which the token is limited; empty: to none';

-- Name: COLUMN api_token.used_at; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.api_token.used_at IS 'within a minute';

-- Name: api_token_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock.api_token ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.api_token_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: lock; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.lock (
    token bigint NOT NULL,
    node_id bigint NOT NULL,
    pos bigint NOT NULL,
    last_entry_id bigint NOT NULL,
    claimed_at timestamp with time zone NOT NULL,
    queue_id integer NOT NULL,
    claim_id integer NOT NULL,
    entry_count integer NOT NULL,
    cost real NOT NULL,
    priority smallint NOT NULL,
    flow text NOT NULL COLLATE pg_catalog."C",
    lock_key text NOT NULL COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_scale_factor='0.2');

-- Name: COLUMN lock.pos; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.lock.pos IS 'place in line of the ready row it was claimed by, for when the group is handed back';

-- Name: COLUMN lock.last_entry_id; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.lock.last_entry_id IS 'the claim covers the entries of the key up to this id; later ones wait';

-- Name: COLUMN lock.claim_id; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.lock.claim_id IS 'number the node gave the claim, so that a claim whose answer was lost can be found again';

-- Name: node; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.node (
    id bigint NOT NULL,
    name text NOT NULL,
    application text NOT NULL COLLATE pg_catalog."C",
    started_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    beat_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    beat bigint DEFAULT 0 NOT NULL,
    lease interval DEFAULT '00:00:10'::interval NOT NULL,
    threads integer DEFAULT 0 NOT NULL,
    queue_ids integer[] DEFAULT '{}'::integer[] NOT NULL,
    tokens bigint[] DEFAULT '{}'::bigint[] NOT NULL,
    load jsonb DEFAULT '{}'::jsonb NOT NULL,
    draining_at timestamp with time zone,
    drain_by text,
    drain_reason text
)
WITH (fillfactor='50');

-- Name: COLUMN node.beat; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.node.beat IS 'heartbeats so far; recovery compares the token lists of two of them';

-- Name: pause; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.pause (
    id bigint NOT NULL,
    scope text NOT NULL,
    value text NOT NULL COLLATE pg_catalog."C",
    queue_id integer,
    actor text NOT NULL,
    reason text NOT NULL,
    until timestamp with time zone,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT pause_check CHECK (
CASE
    WHEN (scope = ANY (ARRAY['name'::text, 'lock_key'::text])) THEN (queue_id IS NOT NULL)
    WHEN (scope <> 'flow'::text) THEN (queue_id IS NULL)
    ELSE true
END),
    CONSTRAINT pause_scope_check CHECK ((scope = ANY (ARRAY['name'::text, 'lock_key'::text, 'flow'::text, 'model'::text, 'application'::text, 'node'::text])))
);

-- Name: COLUMN pause.value; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.pause.value IS 'a name, lock key or flow (empty: entries without one), a model, an application, or the name or id of a node';

-- Name: COLUMN pause.queue_id; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.pause.queue_id IS 'names and lock keys are those of a queue; a flow may be paused in one queue or, with null, in all';

-- Name: application_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.application_status AS
 SELECT a.application,
    a.queues,
    n.nodes,
    n.threads,
    COALESCE(k.locks, (0)::bigint) AS locks,
    COALESCE(k.cost, (0)::real) AS cost,
    k.oldest,
    l.max_units AS quota_units,
    COALESCE(k.locks, (0)::bigint) AS used_units,
    l.rate AS quota_rate,
    (EXISTS ( SELECT
           FROM penstock.pause p
          WHERE ((p.scope = 'application'::text) AND (p.value = a.application) AND COALESCE((p.until > clock_timestamp()), true)))) AS paused
   FROM (((( SELECT queue.application,
            count(*) AS queues
           FROM penstock.queue
          GROUP BY queue.application) a
     LEFT JOIN LATERAL ( SELECT count(*) AS nodes,
            COALESCE(sum(x.threads), (0)::bigint) AS threads
           FROM penstock.node x
          WHERE ((x.application = a.application) AND ((x.beat_at + x.lease) > clock_timestamp()))) n ON (true))
     LEFT JOIN LATERAL ( SELECT count(*) AS locks,
            sum(o.cost) AS cost,
            (clock_timestamp() - min(o.claimed_at)) AS oldest
           FROM (penstock.lock o
             JOIN penstock.queue q ON ((q.id = o.queue_id)))
          WHERE (q.application = a.application)) k ON (true))
     LEFT JOIN penstock."limit" l ON ((l.name = ('application:'::text || a.application))));

-- Name: audit; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.audit (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    actor text NOT NULL,
    verb text NOT NULL,
    object text NOT NULL,
    reason text,
    detail jsonb
);

-- Name: audit_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock.audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: batch_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock.batch ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.batch_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: batch_part; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.batch_part (
    batch_id bigint NOT NULL,
    no integer NOT NULL,
    outcome penstock.outcome,
    entry_id bigint,
    ended_at timestamp with time zone,
    error text,
    items jsonb NOT NULL,
    result jsonb
)
WITH (fillfactor='80');

-- Name: batch_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.batch_status AS
 SELECT b.id,
    b.name,
    q.name AS queue,
        CASE
            WHEN ((b.ended_at IS NULL) AND (b.cancelled_by IS NOT NULL)) THEN 'cancelling'::text
            WHEN ((b.ended_at IS NULL) AND (b.paused_at IS NOT NULL) AND COALESCE((b.paused_until > clock_timestamp()), true)) THEN 'paused'::text
            ELSE b.status
        END AS state,
    p.parts,
    p.waiting,
    p.queued,
    p.done,
    p.bad,
        CASE
            WHEN (p.parts > 0) THEN round(((100.0 * ((p.done + p.bad))::numeric) / (p.parts)::numeric), 1)
            ELSE NULL::numeric
        END AS percent,
    b.paused_by,
    b.paused_reason,
    b.paused_until,
    b.cancelled_by,
    b.cancelled_reason,
    b.problem,
    b.result,
    b.actor,
    b.created_at,
    b.ended_at,
    b.queue_id
   FROM ((penstock.batch b
     JOIN penstock.queue q ON ((q.id = b.queue_id)))
     CROSS JOIN LATERAL ( SELECT count(*) AS parts,
            count(*) FILTER (WHERE ((x.ended_at IS NULL) AND (x.entry_id IS NULL))) AS waiting,
            count(*) FILTER (WHERE ((x.ended_at IS NULL) AND (x.entry_id IS NOT NULL))) AS queued,
            count(*) FILTER (WHERE (x.outcome = 'done'::penstock.outcome)) AS done,
            count(*) FILTER (WHERE (x.outcome <> 'done'::penstock.outcome)) AS bad
           FROM penstock.batch_part x
          WHERE (x.batch_id = b.id)) p);

-- Name: bucket; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.bucket (
    limit_id integer NOT NULL,
    units double precision NOT NULL,
    at timestamp with time zone NOT NULL,
    flow text NOT NULL COLLATE pg_catalog."C"
)
WITH (fillfactor='50');

-- Name: COLUMN bucket.flow; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.bucket.flow IS 'or lock key, of a limit for each key; empty for a limit over all';

-- Name: cancel_request; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.cancel_request (
    entry_id bigint NOT NULL,
    requested_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    delivered_at timestamp with time zone,
    queue_id integer NOT NULL,
    actor text NOT NULL,
    reason text NOT NULL
);

-- Name: cron_firing; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.cron_firing (
    job_id bigint NOT NULL,
    nominal_at timestamp with time zone NOT NULL,
    fired_at timestamp with time zone NOT NULL,
    entry_id bigint NOT NULL,
    manual boolean NOT NULL
);

-- Name: COLUMN cron_firing.manual; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.cron_firing.manual IS 'somebody asked for it; the nominal time is when he did';

-- Name: cron_job_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock.cron_job ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.cron_job_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: cron_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.cron_status AS
 SELECT j.name AS job,
    q.name AS queue,
        CASE
            WHEN (j.problem IS NOT NULL) THEN 'broken'::text
            WHEN ((j.entry_id IS NOT NULL) AND (j.fired_at IS NOT NULL)) THEN 'running'::text
            WHEN ((j.paused_at IS NOT NULL) AND COALESCE((j.paused_until > clock_timestamp()), true)) THEN 'paused'::text
            WHEN ((j.entry_id IS NULL) AND (j.look_at = 'infinity'::timestamp with time zone)) THEN 'ended'::text
            ELSE 'waiting'::text
        END AS state,
    j.spec,
    j.zone,
    j.nominal_at,
    j.due_at,
    j.entry_id,
    j.overlap,
    j.catch_up,
    j.handled_at,
    j.problem,
    j.paused_by,
    j.paused_reason,
    j.paused_until,
    ( SELECT max(f.fired_at) AS max
           FROM penstock.cron_firing f
          WHERE (f.job_id = j.id)) AS last_fired_at,
    j.queue_id
   FROM (penstock.cron_job j
     JOIN penstock.queue q ON ((q.id = j.queue_id)));

-- Name: depth; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.depth (
    queue_id integer NOT NULL,
    counted bigint NOT NULL,
    accepted bigint NOT NULL,
    removed bigint NOT NULL,
    drain_rate real DEFAULT 0 NOT NULL,
    counted_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

-- Name: COLUMN depth.drain_rate; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.depth.drain_rate IS 'entries a second that left the queue between the last two counts';

-- Name: disabled; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.disabled (
    queue_id integer NOT NULL,
    scope text NOT NULL,
    value text NOT NULL COLLATE pg_catalog."C",
    actor text NOT NULL,
    reason text NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT disabled_scope_check CHECK ((scope = ANY (ARRAY['name'::text, 'lock_key'::text])))
);

-- Name: entry_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

CREATE SEQUENCE penstock.entry_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

-- Name: entry_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.entry_status AS
 SELECT e.id,
    q.name AS queue,
        CASE
            WHEN (e.priority < 0) THEN 'disabled'::text
            WHEN (e.status = 'initial'::penstock.status) THEN 'initial'::text
            WHEN (l.token IS NOT NULL) THEN 'computing'::text
            ELSE 'pending'::text
        END AS state,
    e.lock_key,
    e.flow,
    e.priority,
    e.name,
    e.attempt,
    e.crashes,
    e.created_at,
    e.due_at,
    e.start_by,
    e.finish_by,
    l.token,
    l.node_id,
    l.claimed_at,
    e.queue_id
   FROM ((penstock.entry e
     JOIN penstock.queue q ON ((q.id = e.queue_id)))
     LEFT JOIN penstock.lock l ON (((l.queue_id = e.queue_id) AND (l.lock_key = COALESCE(e.lock_key, ('#'::text || e.id))) AND (l.last_entry_id >= e.id) AND (e.status = 'pending'::penstock.status))));

-- Name: entry_webhook; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.entry_webhook (
    id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    due_at timestamp with time zone,
    start_by timestamp with time zone,
    finish_by timestamp with time zone,
    queue_id integer NOT NULL,
    status penstock.status NOT NULL,
    cost real,
    priority smallint NOT NULL,
    enabled_priority smallint,
    pos bigint,
    attempt smallint DEFAULT 0 NOT NULL,
    crashes smallint DEFAULT 0 NOT NULL,
    flow text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    lock_key text COLLATE pg_catalog."C",
    name text COLLATE pg_catalog."C",
    unique_key text COLLATE pg_catalog."C",
    trace text,
    callback jsonb,
    history jsonb,
    payload jsonb NOT NULL,
    depth smallint DEFAULT
CASE
    WHEN (COALESCE(current_setting('penstock.depth'::text, true), ''::text) = ''::text) THEN (0)::smallint
    ELSE penstock.check_depth()
END NOT NULL,
    CONSTRAINT entry_priority_check CHECK (((priority >= '-1'::integer) AND (priority <= 9)))
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');

-- Name: COLUMN entry_webhook.enabled_priority; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry_webhook.enabled_priority IS 'the priority a disabled entry had, for when it is enabled again';

-- Name: COLUMN entry_webhook.pos; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry_webhook.pos IS 'place in line of a solo entry that came back into line; null means its id';

-- Name: COLUMN entry_webhook.attempt; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry_webhook.attempt IS 'attempts that ended in an error so far';

-- Name: COLUMN entry_webhook.crashes; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry_webhook.crashes IS 'times the node died while it ran this entry; never counted as an attempt';

-- Name: COLUMN entry_webhook.history; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.entry_webhook.history IS 'errors of earlier attempts, oldest first';

-- Name: failure; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.failure (
    entry_id bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    failed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    start_by timestamp with time zone,
    finish_by timestamp with time zone,
    queue_id integer NOT NULL,
    cost real,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    crashes smallint NOT NULL,
    flow text NOT NULL COLLATE pg_catalog."C",
    lock_key text COLLATE pg_catalog."C",
    name text COLLATE pg_catalog."C",
    class text NOT NULL,
    error text NOT NULL,
    fingerprint text NOT NULL,
    trace text,
    callback jsonb,
    history jsonb,
    payload jsonb NOT NULL,
    depth smallint DEFAULT 0 NOT NULL
)
PARTITION BY RANGE (failed_at);

-- Name: COLUMN failure.fingerprint; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.failure.fingerprint IS 'the error with numbers and quoted texts left out: equal for errors of one cause';

-- Name: COLUMN failure.depth; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.failure.depth IS 'of the entry: how many entries lie between it and a push from outside';

-- Name: failure_default; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.failure_default (
    entry_id bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    failed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    start_by timestamp with time zone,
    finish_by timestamp with time zone,
    queue_id integer NOT NULL,
    cost real,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    crashes smallint NOT NULL,
    flow text NOT NULL COLLATE pg_catalog."C",
    lock_key text COLLATE pg_catalog."C",
    name text COLLATE pg_catalog."C",
    class text NOT NULL,
    error text NOT NULL,
    fingerprint text NOT NULL,
    trace text,
    callback jsonb,
    history jsonb,
    payload jsonb NOT NULL,
    depth smallint DEFAULT 0 NOT NULL
);

-- Name: flow_weight; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.flow_weight (
    queue_id integer,
    weight real NOT NULL,
    flow text NOT NULL COLLATE pg_catalog."C",
    CONSTRAINT flow_weight_weight_check CHECK (((weight >= (0.001)::double precision) AND (weight <= (1000)::double precision)))
);

-- Name: idempotency; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.idempotency (
    entry_id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    queue_id integer NOT NULL,
    flow text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    fingerprint bytea NOT NULL
);

-- Name: inference_version; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.inference_version (
    one boolean DEFAULT true NOT NULL,
    version bigint DEFAULT 1 NOT NULL,
    CONSTRAINT inference_version_one_check CHECK (one)
)
WITH (fillfactor='50');

-- Name: instance_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock.instance ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.instance_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: slot; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.slot (
    instance_id integer NOT NULL,
    number integer NOT NULL,
    token bigint NOT NULL,
    node_id bigint NOT NULL,
    leased_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    doubt_at timestamp with time zone,
    doubt text,
    queue_id integer,
    entry_id bigint,
    CONSTRAINT slot_number_check CHECK ((number >= 0))
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');

-- Name: COLUMN slot.doubt; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.slot.doubt IS 'why the call may still run; queue_id and entry_id say whose it was';

-- Name: instance_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.instance_status AS
 SELECT i.id,
    i.model,
    i.server,
    i.endpoint,
    i.state,
    i.slots,
    h.held,
    h.doubtful,
    i.active,
    i.capacity,
    i.queued,
    (i.draining_at IS NOT NULL) AS draining,
    penstock.usable(i.*) AS usable,
    COALESCE(i.drain_reason,
        CASE
            WHEN (i.quarantined_until > clock_timestamp()) THEN i.quarantine_reason
            ELSE NULL::text
        END, i.reason) AS reason,
        CASE
            WHEN (i.quarantined_until > clock_timestamp()) THEN i.quarantined_until
            ELSE NULL::timestamp with time zone
        END AS quarantined_until,
    i.checked_at,
    i.labels
   FROM (penstock.instance i
     CROSS JOIN LATERAL ( SELECT count(*) AS held,
            count(s.doubt_at) AS doubtful
           FROM penstock.slot s
          WHERE (s.instance_id = i.id)) h);

-- Name: VIEW instance_status; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON VIEW penstock.instance_status IS 'instances, their slots and why no calls are sent to them';

-- Name: term_seq; Type: SEQUENCE; Schema: penstock; Owner: -

CREATE SEQUENCE penstock.term_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

-- Name: leader; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.leader (
    name text NOT NULL COLLATE pg_catalog."C",
    term bigint DEFAULT nextval('penstock.term_seq'::regclass) NOT NULL,
    incarnation bigint DEFAULT 0 NOT NULL,
    holder text DEFAULT ''::text NOT NULL,
    lease interval DEFAULT '00:00:04'::interval NOT NULL,
    changes bigint DEFAULT 0 NOT NULL,
    elected_at timestamp with time zone,
    renewed_at timestamp with time zone,
    CONSTRAINT leader_lease_check CHECK ((lease > '00:00:00'::interval))
)
WITH (fillfactor='50');

-- Name: COLUMN leader.changes; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.leader.changes IS 'terms so far';

-- Name: COLUMN leader.renewed_at; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.leader.renewed_at IS 'the term ends one lease later; null: its holder has resigned';

-- Name: limit_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock."limit" ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.limit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: limit_use; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.limit_use (
    queue_id integer NOT NULL,
    limit_id integer NOT NULL,
    units integer DEFAULT 1 NOT NULL,
    since timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT limit_use_units_check CHECK ((units > 0))
);

-- Name: COLUMN limit_use.since; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.limit_use.since IS 'when its units, or what the limit counts by, changed last: what was taken before is not refunded';

-- Name: lock_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.lock_status AS
 SELECT q.name AS queue,
    l.lock_key,
    l.flow,
    l.priority,
    l.entry_count AS entries,
    l.token,
    l.node_id,
    n.name AS node,
    (clock_timestamp() - l.claimed_at) AS age,
    l.claimed_at,
    l.last_entry_id,
    l.cost,
    l.queue_id
   FROM ((penstock.lock l
     JOIN penstock.queue q ON ((q.id = l.queue_id)))
     LEFT JOIN penstock.node n ON ((n.id = l.node_id)));

-- Name: model; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.model (
    name text NOT NULL COLLATE pg_catalog."C",
    config jsonb NOT NULL,
    override jsonb,
    version bigint DEFAULT 1 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    changed_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT model_config_check CHECK ((jsonb_typeof(config) = 'object'::text)),
    CONSTRAINT model_name_check CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 200))),
    CONSTRAINT model_override_check CHECK ((jsonb_typeof(override) = 'object'::text))
);

-- Name: COLUMN model.config; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.model.config IS 'how its workers are spoken to; a field that is absent takes its default';

-- Name: COLUMN model.override; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.model.override IS 'fields laid over config while it is there; deleting it brings config back';

-- Name: node_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.node_status AS
 SELECT n.id,
    n.name,
    n.application,
        CASE
            WHEN ((n.beat_at + n.lease) < clock_timestamp()) THEN 'dead'::text
            WHEN (n.draining_at IS NOT NULL) THEN 'draining'::text
            ELSE 'live'::text
        END AS state,
    (clock_timestamp() - n.beat_at) AS silent_for,
    n.lease,
    n.threads,
    cardinality(n.tokens) AS says_locks,
    ( SELECT count(*) AS count
           FROM penstock.lock l
          WHERE (l.node_id = n.id)) AS locks,
    ARRAY( SELECT q.name
           FROM penstock.queue q
          WHERE (q.id = ANY (n.queue_ids))
          ORDER BY q.name) AS queues,
    n.started_at,
    n.beat_at,
    n.draining_at,
    n.drain_by,
    n.drain_reason,
    n.load
   FROM penstock.node n;

-- Name: retention; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.retention AS
 SELECT 'result'::text AS parent,
    'finished_at'::text AS by_column,
    COALESCE(max(queue.result_retention), '1 day'::interval) AS kept
   FROM penstock.queue
UNION ALL
 SELECT 'failure'::text AS parent,
    'failed_at'::text AS by_column,
    COALESCE(max(queue.failure_retention), '1 day'::interval) AS kept
   FROM penstock.queue
UNION ALL
 SELECT 'sample'::text AS parent,
    'at'::text AS by_column,
    '1 day'::interval AS kept
UNION ALL
 SELECT 'sample_minute'::text AS parent,
    'at'::text AS by_column,
    '30 days'::interval AS kept;

-- Name: old_partitions; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.old_partitions AS
 SELECT c.relname AS partition,
    p.parent,
    ((now() - p.kept) - (((to_date("right"((c.relname)::text, 8), 'YYYYMMDD'::text) + 1))::timestamp without time zone AT TIME ZONE 'UTC'::text)) AS behind
   FROM ((penstock.retention p
     JOIN pg_inherits i ON ((i.inhparent = (to_regclass(('penstock.'::text || p.parent)))::oid)))
     JOIN pg_class c ON ((c.oid = i.inhrelid)))
  WHERE ((c.relname ~ (('^'::text || p.parent) || '_[0-9]{8}$'::text)) AND ((((to_date("right"((c.relname)::text, 8), 'YYYYMMDD'::text) + 1))::timestamp without time zone AT TIME ZONE 'UTC'::text) < (now() - p.kept)));

-- Name: operation_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock.operation ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.operation_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: output; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.output (
    entry_id bigint NOT NULL,
    token bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    queue_id integer NOT NULL,
    attempt integer NOT NULL,
    seq integer NOT NULL,
    data bytea NOT NULL
);

-- Name: TABLE output; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON TABLE penstock.output IS 'output of runs, piece by piece; for a model that streams, whole server-sent events';

-- Name: COLUMN output.seq; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.output.seq IS 'pieces of a run are numbered from 1 without gaps';

-- Name: pause_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock.pause ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.pause_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: progress; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.progress (
    entry_id bigint NOT NULL,
    token bigint NOT NULL,
    updated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    queue_id integer NOT NULL,
    done real,
    message text,
    checkpoint jsonb,
    CONSTRAINT progress_done_check CHECK (((done >= (0)::double precision) AND (done <= (1)::double precision)))
)
WITH (fillfactor='70');

-- Name: push_back; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.push_back (
    until timestamp with time zone NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    queue_id integer NOT NULL,
    whole boolean NOT NULL,
    flow text NOT NULL COLLATE pg_catalog."C",
    reason text NOT NULL,
    CONSTRAINT push_back_check CHECK (((flow = ''::text) OR (NOT whole)))
);

-- Name: queue_id_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock.queue ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.queue_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: queue_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.queue_status AS
 SELECT q.name AS queue,
    q.kind,
    q.application,
    n.initial,
    n.pending,
    n.disabled,
    n.computing,
    ((n.initial + n.pending) - n.computing) AS awaiting_compute,
    n.failed,
    n.estimated,
    ((q.paused_at IS NOT NULL) AND COALESCE((q.paused_until > clock_timestamp()), true)) AS paused,
    q.paused_by,
    q.paused_reason,
    q.paused_until,
    (q.disabled_at IS NOT NULL) AS out_of_service,
    q.capacity,
    q.max_concurrent,
    q.id AS queue_id
   FROM (penstock.count_queues() n(queue_id, initial, pending, disabled, computing, failed, estimated)
     JOIN penstock.queue q ON ((q.id = n.queue_id)));

-- Name: ready; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.ready (
    pos bigint NOT NULL,
    entry_id bigint,
    queue_id integer NOT NULL,
    priority smallint NOT NULL,
    flow text NOT NULL COLLATE pg_catalog."C",
    lock_key text COLLATE pg_catalog."C",
    CONSTRAINT ready_check CHECK (((entry_id IS NULL) <> (lock_key IS NULL)))
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_scale_factor='0.2');

-- Name: remote_run; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.remote_run (
    entry_id bigint NOT NULL,
    token bigint NOT NULL,
    slot_token bigint NOT NULL,
    started_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    ran_ms bigint DEFAULT 0 NOT NULL,
    queue_id integer NOT NULL,
    instance_id integer NOT NULL,
    slot_number integer NOT NULL,
    remote_id text,
    report jsonb
)
WITH (fillfactor='70');

-- Name: COLUMN remote_run.token; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.remote_run.token IS 'under which the worker was asked: the fencing token of the lock then';

-- Name: COLUMN remote_run.remote_id; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.remote_run.remote_id IS 'the worker''s name for the run; null if its answer never came';

-- Name: COLUMN remote_run.report; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.remote_run.report IS 'the last that the worker reported to a callback address while nobody listened there';

-- Name: result; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.result (
    entry_id bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    finished_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    queue_id integer NOT NULL,
    node_id bigint,
    token bigint,
    run_ms bigint,
    attempt smallint NOT NULL,
    outcome penstock.outcome NOT NULL,
    reason text,
    result jsonb,
    meta jsonb,
    CONSTRAINT result_outcome_check CHECK ((outcome <> 'failed'::penstock.outcome))
)
PARTITION BY RANGE (finished_at);

-- Name: COLUMN result.meta; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.result.meta IS 'what the handler measured: instance, slot, times in milliseconds';

-- Name: result_default; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.result_default (
    entry_id bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    finished_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    queue_id integer NOT NULL,
    node_id bigint,
    token bigint,
    run_ms bigint,
    attempt smallint NOT NULL,
    outcome penstock.outcome NOT NULL,
    reason text,
    result jsonb,
    meta jsonb,
    CONSTRAINT result_outcome_check CHECK ((outcome <> 'failed'::penstock.outcome))
);

-- Name: sample_minute; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.sample_minute (
    queue_id integer NOT NULL,
    at timestamp with time zone NOT NULL,
    initial bigint NOT NULL,
    pending bigint NOT NULL,
    disabled bigint NOT NULL,
    computing bigint NOT NULL,
    failed bigint NOT NULL,
    estimated boolean NOT NULL,
    serving integer NOT NULL,
    head_age double precision,
    blocked text,
    accepted bigint NOT NULL,
    gone bigint NOT NULL,
    dead_tuples bigint NOT NULL,
    in_per_second double precision,
    out_per_second double precision
)
PARTITION BY RANGE (at);

-- Name: COLUMN sample_minute.estimated; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample_minute.estimated IS 'some count passed the bound up to which counting is exact';

-- Name: COLUMN sample_minute.head_age; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample_minute.head_age IS 'seconds that the entry has waited which a node would take first; null: there is none';

-- Name: COLUMN sample_minute.blocked; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample_minute.blocked IS 'why no node claims from the queue, as a code of explain_entry; null: nothing is in the way';

-- Name: COLUMN sample_minute.accepted; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample_minute.accepted IS 'rows inserted into the queue''s table since its statistics began; gone: deleted';

-- Name: COLUMN sample_minute.in_per_second; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.sample_minute.in_per_second IS 'entries accepted a second since the sample before; out_per_second: gone, which is the drain rate';

-- Name: seat; Type: TABLE; Schema: penstock; Owner: -

CREATE UNLOGGED TABLE penstock.seat (
    seat bigint NOT NULL,
    node_id bigint NOT NULL,
    queue_id integer NOT NULL,
    claim_id integer NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_scale_factor='0.2');

-- Name: TABLE seat; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON TABLE penstock.seat IS 'processing threads that wait for an entry: a push takes the row and makes the lock record itself';

-- Name: COLUMN seat.seat; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.seat.seat IS 'pushes take the lowest, and look from the last one taken on: rows before it may be dead and not vacuumed yet';

-- Name: seat_seat_seq; Type: SEQUENCE; Schema: penstock; Owner: -

ALTER TABLE penstock.seat ALTER COLUMN seat ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.seat_seat_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

-- Name: server_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.server_status AS
 SELECT ( SELECT (count(*))::integer AS count
           FROM pg_stat_activity
          WHERE (pg_stat_activity.backend_type = 'client backend'::text)) AS connections,
    (current_setting('max_connections'::text))::integer AS max_connections,
    COALESCE(( SELECT (EXTRACT(epoch FROM max((clock_timestamp() - pg_stat_activity.xact_start))))::double precision AS "extract"
           FROM pg_stat_activity
          WHERE ((pg_stat_activity.backend_xmin IS NOT NULL) AND (pg_stat_activity.pid <> pg_backend_pid()) AND (pg_stat_activity.backend_type <> 'walsender'::text))), (0)::double precision) AS horizon_age,
    pg_notification_queue_usage() AS notify_usage,
    COALESCE(( SELECT (sum(pg_stat_user_tables.n_dead_tup))::bigint AS sum
           FROM pg_stat_user_tables
          WHERE ((pg_stat_user_tables.schemaname = 'penstock'::name) AND (pg_stat_user_tables.relname = ANY (ARRAY['ready'::name, 'lock'::name])))), (0)::bigint) AS dead_tuples;

-- Name: slot_contention; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.slot_contention AS
 SELECT m.name AS model,
    k.node_id,
    n.name AS node,
    count(s.node_id) AS held,
    h.since AS wants_more_since,
    penstock.slot_share(m.name, k.node_id) AS share
   FROM ((((penstock.model m
     CROSS JOIN LATERAL ( SELECT s_1.node_id
           FROM (penstock.instance i
             JOIN penstock.slot s_1 ON ((s_1.instance_id = i.id)))
          WHERE (i.model = m.name)
        UNION
         SELECT x.node_id
           FROM penstock.hungry_nodes(m.name) x(node_id, since, held)) k)
     LEFT JOIN penstock.node n ON ((n.id = k.node_id)))
     LEFT JOIN LATERAL penstock.hungry_nodes(m.name) h(node_id, since, held) ON ((h.node_id = k.node_id)))
     LEFT JOIN ( SELECT i.model,
            s_1.node_id
           FROM (penstock.instance i
             JOIN penstock.slot s_1 ON ((s_1.instance_id = i.id)))) s ON (((s.model = m.name) AND (s.node_id = k.node_id))))
  GROUP BY m.name, k.node_id, n.name, h.since;

-- Name: VIEW slot_contention; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON VIEW penstock.slot_contention IS 'who holds slots of a model and who wants more; share is what each may hold while somebody else goes without';

-- Name: slot_demand; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.slot_demand (
    model text NOT NULL COLLATE pg_catalog."C",
    node_id bigint NOT NULL,
    wanted_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    since timestamp with time zone DEFAULT clock_timestamp() NOT NULL
)
WITH (fillfactor='50');

-- Name: COLUMN slot_demand.since; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.slot_demand.since IS 'since when the node goes without; wanted_at is when it last asked, and 3 s later it is taken to have no more use for a slot';

-- Name: stuck; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.stuck AS
 SELECT l.queue,
    l.lock_key,
    l.token,
    l.node_id,
    l.node,
    l.age,
    l.entries,
        CASE
            WHEN (n.id IS NULL) THEN 'node unknown'::text
            ELSE 'node dead'::text
        END AS reason,
    (clock_timestamp() - n.beat_at) AS silent_for,
    l.queue_id
   FROM (penstock.lock_status l
     LEFT JOIN penstock.node n ON ((n.id = l.node_id)))
  WHERE ((n.id IS NULL) OR ((n.beat_at + n.lease) < clock_timestamp()));

-- Name: token_seq; Type: SEQUENCE; Schema: penstock; Owner: -

CREATE SEQUENCE penstock.token_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

-- Name: uniqueness; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.uniqueness (
    entry_id bigint NOT NULL,
    queue_id integer NOT NULL,
    key text NOT NULL COLLATE pg_catalog."C"
);

-- Name: usage; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.usage (
    service double precision NOT NULL,
    lift double precision NOT NULL,
    at timestamp with time zone NOT NULL,
    queue_id integer NOT NULL,
    priority smallint NOT NULL,
    whole boolean NOT NULL,
    flow text NOT NULL COLLATE pg_catalog."C"
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');

-- Name: COLUMN usage.service; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.usage.service IS 'slot-seconds, or cost where entries declare it, with what is forgotten left out';

-- Name: COLUMN usage.lift; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.usage.lift IS 'never given: what brought a flow that was away to the level of those that stayed';

-- Name: usage_status; Type: VIEW; Schema: penstock; Owner: -

CREATE VIEW penstock.usage_status AS
 SELECT u.queue,
    u.application,
    u.flow,
    u.slots,
    (u.slots / NULLIF(sum(u.slots) OVER (PARTITION BY u.application), (0)::double precision)) AS share,
    COALESCE(( SELECT w.weight
           FROM penstock.flow_weight w
          WHERE ((w.flow = u.flow) AND (COALESCE(w.queue_id, 0) = ANY (ARRAY[0, u.id])))
          ORDER BY w.queue_id
         LIMIT 1), (1)::real) AS weight,
    u.priority AS queue_weight,
    u.algorithm,
    u.at
   FROM ( SELECT q.id,
            q.name AS queue,
            q.application,
            q.priority,
            q.algorithm,
            x.flow,
            max(x.at) AS at,
            ((sum(GREATEST((0)::double precision, penstock.usage_left(x.service, x.at))) * ln((2)::double precision)) / (300)::double precision) AS slots
           FROM (penstock.queue q
             JOIN penstock.usage x ON ((x.queue_id = q.id)))
          WHERE (NOT x.whole)
          GROUP BY q.id, q.name, q.application, q.priority, q.algorithm, x.flow) u;

-- Name: watch; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.watch (
    watched regclass NOT NULL,
    queue_id integer NOT NULL,
    columns text[] NOT NULL,
    keys text[] NOT NULL,
    actor text NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

-- Name: webhook_endpoint; Type: TABLE; Schema: penstock; Owner: -

CREATE TABLE penstock.webhook_endpoint (
    url text NOT NULL COLLATE pg_catalog."C",
    secret text,
    old_secret text,
    old_until timestamp with time zone,
    disabled_at timestamp with time zone,
    disabled_reason text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT webhook_endpoint_old_secret_check CHECK ((old_secret ~ '^(sealed:|env:|file:/|whsec_)'::text)),
    CONSTRAINT webhook_endpoint_secret_check CHECK ((secret ~ '^(sealed:|env:|file:/|whsec_)'::text)),
    CONSTRAINT webhook_endpoint_url_check CHECK ((octet_length(url) <= 2048))
);

-- Name: COLUMN webhook_endpoint.secret; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.webhook_endpoint.secret IS 'sealed:... under the key of the installation, or env:NAME or file:/path of whoever delivers';

-- Name: COLUMN webhook_endpoint.old_secret; Type: COMMENT; Schema: penstock; Owner: -

COMMENT ON COLUMN penstock.webhook_endpoint.old_secret IS 'signs beside secret until old_until, so that a receiver can change over';

-- Name: entry_webhook; Type: TABLE ATTACH; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.entry ATTACH PARTITION penstock.entry_webhook FOR VALUES IN (1);

-- Name: failure_default; Type: TABLE ATTACH; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.failure ATTACH PARTITION penstock.failure_default DEFAULT;

-- Name: result_default; Type: TABLE ATTACH; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.result ATTACH PARTITION penstock.result_default DEFAULT;

-- Name: api_token api_token_hash_key; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.api_token
    ADD CONSTRAINT api_token_hash_key UNIQUE (hash);

-- Name: api_token api_token_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.api_token
    ADD CONSTRAINT api_token_pkey PRIMARY KEY (id);

-- Name: audit audit_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.audit
    ADD CONSTRAINT audit_pkey PRIMARY KEY (id);

-- Name: batch_part batch_part_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.batch_part
    ADD CONSTRAINT batch_part_pkey PRIMARY KEY (batch_id, no);

-- Name: batch batch_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.batch
    ADD CONSTRAINT batch_pkey PRIMARY KEY (id);

-- Name: bucket bucket_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.bucket
    ADD CONSTRAINT bucket_pkey PRIMARY KEY (limit_id, flow);

-- Name: cancel_request cancel_request_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.cancel_request
    ADD CONSTRAINT cancel_request_pkey PRIMARY KEY (queue_id, entry_id);

-- Name: cron_firing cron_firing_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.cron_firing
    ADD CONSTRAINT cron_firing_pkey PRIMARY KEY (job_id, nominal_at);

-- Name: cron_job cron_job_name_key; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.cron_job
    ADD CONSTRAINT cron_job_name_key UNIQUE (name);

-- Name: cron_job cron_job_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.cron_job
    ADD CONSTRAINT cron_job_pkey PRIMARY KEY (id);

-- Name: depth depth_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.depth
    ADD CONSTRAINT depth_pkey PRIMARY KEY (queue_id);

-- Name: disabled disabled_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.disabled
    ADD CONSTRAINT disabled_pkey PRIMARY KEY (queue_id, scope, value);

-- Name: entry entry_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.entry
    ADD CONSTRAINT entry_pkey PRIMARY KEY (queue_id, id);

-- Name: entry_webhook entry_webhook_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.entry_webhook
    ADD CONSTRAINT entry_webhook_pkey PRIMARY KEY (queue_id, id);

-- Name: idempotency idempotency_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.idempotency
    ADD CONSTRAINT idempotency_pkey PRIMARY KEY (queue_id, flow, key);

-- Name: inference_version inference_version_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.inference_version
    ADD CONSTRAINT inference_version_pkey PRIMARY KEY (one);

-- Name: instance instance_model_server_key; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.instance
    ADD CONSTRAINT instance_model_server_key UNIQUE (model, server);

-- Name: instance instance_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.instance
    ADD CONSTRAINT instance_pkey PRIMARY KEY (id);

-- Name: leader leader_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.leader
    ADD CONSTRAINT leader_pkey PRIMARY KEY (name);

-- Name: leader leader_term_key; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.leader
    ADD CONSTRAINT leader_term_key UNIQUE (term);

-- Name: limit limit_name_key; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock."limit"
    ADD CONSTRAINT limit_name_key UNIQUE (name);

-- Name: limit limit_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock."limit"
    ADD CONSTRAINT limit_pkey PRIMARY KEY (id);

-- Name: limit_use limit_use_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.limit_use
    ADD CONSTRAINT limit_use_pkey PRIMARY KEY (queue_id, limit_id);

-- Name: lock lock_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.lock
    ADD CONSTRAINT lock_pkey PRIMARY KEY (queue_id, lock_key);

-- Name: model model_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.model
    ADD CONSTRAINT model_pkey PRIMARY KEY (name);

-- Name: node node_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.node
    ADD CONSTRAINT node_pkey PRIMARY KEY (id);

-- Name: operation operation_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.operation
    ADD CONSTRAINT operation_pkey PRIMARY KEY (id);

-- Name: output output_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.output
    ADD CONSTRAINT output_pkey PRIMARY KEY (queue_id, entry_id, token, seq);

-- Name: pause pause_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.pause
    ADD CONSTRAINT pause_pkey PRIMARY KEY (id);

-- Name: progress progress_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.progress
    ADD CONSTRAINT progress_pkey PRIMARY KEY (queue_id, entry_id);

-- Name: push_back push_back_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.push_back
    ADD CONSTRAINT push_back_pkey PRIMARY KEY (queue_id, whole, flow);

-- Name: queue queue_name_key; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.queue
    ADD CONSTRAINT queue_name_key UNIQUE (name);

-- Name: queue queue_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (id);

-- Name: ready ready_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.ready
    ADD CONSTRAINT ready_pkey PRIMARY KEY (queue_id, priority, flow, pos);

-- Name: remote_run remote_run_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.remote_run
    ADD CONSTRAINT remote_run_pkey PRIMARY KEY (queue_id, entry_id);

-- Name: sample_minute sample_minute_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.sample_minute
    ADD CONSTRAINT sample_minute_pkey PRIMARY KEY (queue_id, at);

-- Name: sample sample_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.sample
    ADD CONSTRAINT sample_pkey PRIMARY KEY (queue_id, at);

-- Name: seat seat_claim; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.seat
    ADD CONSTRAINT seat_claim UNIQUE (node_id, claim_id);

-- Name: seat seat_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.seat
    ADD CONSTRAINT seat_pkey PRIMARY KEY (queue_id, seat);

-- Name: slot_demand slot_demand_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.slot_demand
    ADD CONSTRAINT slot_demand_pkey PRIMARY KEY (model, node_id);

-- Name: slot slot_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.slot
    ADD CONSTRAINT slot_pkey PRIMARY KEY (instance_id, number);

-- Name: uniqueness uniqueness_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.uniqueness
    ADD CONSTRAINT uniqueness_pkey PRIMARY KEY (queue_id, key);

-- Name: usage usage_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.usage
    ADD CONSTRAINT usage_pkey PRIMARY KEY (queue_id, priority, whole, flow);

-- Name: watch watch_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.watch
    ADD CONSTRAINT watch_pkey PRIMARY KEY (watched, queue_id);

-- Name: webhook_endpoint webhook_endpoint_pkey; Type: CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.webhook_endpoint
    ADD CONSTRAINT webhook_endpoint_pkey PRIMARY KEY (url);

-- Name: api_token_name; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX api_token_name ON penstock.api_token USING btree (name, id);

-- Name: batch_ended; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX batch_ended ON penstock.batch USING btree (ended_at) WHERE (ended_at IS NOT NULL);

-- Name: batch_open; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX batch_open ON penstock.batch USING btree (id) WHERE (ended_at IS NULL);

-- Name: batch_part_bad; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX batch_part_bad ON penstock.batch_part USING btree (batch_id, no) WHERE (outcome <> 'done'::penstock.outcome);

-- Name: batch_part_queued; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX batch_part_queued ON penstock.batch_part USING btree (batch_id, no) WHERE ((ended_at IS NULL) AND (entry_id IS NOT NULL));

-- Name: batch_part_waiting; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX batch_part_waiting ON penstock.batch_part USING btree (batch_id, no) WHERE ((ended_at IS NULL) AND (entry_id IS NULL));

-- Name: cron_firing_fired_at; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX cron_firing_fired_at ON penstock.cron_firing USING brin (fired_at);

-- Name: cron_job_entry; Type: INDEX; Schema: penstock; Owner: -

CREATE UNIQUE INDEX cron_job_entry ON penstock.cron_job USING btree (entry_id) WHERE (entry_id IS NOT NULL);

-- Name: cron_job_fired; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX cron_job_fired ON penstock.cron_job USING btree (queue_id, id) WHERE ((entry_id IS NOT NULL) AND (fired_at IS NOT NULL));

-- Name: cron_job_following; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX cron_job_following ON penstock.cron_job USING btree (following_at) WHERE (following_at IS NOT NULL);

-- Name: cron_job_look; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX cron_job_look ON penstock.cron_job USING btree (look_at) WHERE (entry_id IS NULL);

-- Name: cron_job_waiting; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX cron_job_waiting ON penstock.cron_job USING btree (due_at) WHERE ((entry_id IS NOT NULL) AND (fired_at IS NULL));

-- Name: entry_webhook_disabled; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX entry_webhook_disabled ON penstock.entry_webhook USING btree (id) WHERE (priority = '-1'::integer);

-- Name: entry_webhook_due_at; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX entry_webhook_due_at ON penstock.entry_webhook USING btree (due_at, id) WHERE (status = 'initial'::penstock.status);

-- Name: entry_webhook_finish_by; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX entry_webhook_finish_by ON penstock.entry_webhook USING btree (finish_by) WHERE (finish_by IS NOT NULL);

-- Name: entry_webhook_lock_key; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX entry_webhook_lock_key ON penstock.entry_webhook USING btree (lock_key, id) WHERE ((lock_key IS NOT NULL) AND (status = 'pending'::penstock.status) AND (priority >= 0));

-- Name: entry_webhook_name; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX entry_webhook_name ON penstock.entry_webhook USING btree (name, id) WHERE (name IS NOT NULL);

-- Name: entry_webhook_start_by; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX entry_webhook_start_by ON penstock.entry_webhook USING btree (start_by) WHERE (start_by IS NOT NULL);

-- Name: failure_entry; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX failure_entry ON ONLY penstock.failure USING btree (queue_id, entry_id);

-- Name: failure_default_queue_id_entry_id_idx; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX failure_default_queue_id_entry_id_idx ON penstock.failure_default USING btree (queue_id, entry_id);

-- Name: failure_fingerprint; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX failure_fingerprint ON ONLY penstock.failure USING btree (queue_id, fingerprint);

-- Name: failure_default_queue_id_fingerprint_idx; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX failure_default_queue_id_fingerprint_idx ON penstock.failure_default USING btree (queue_id, fingerprint);

-- Name: flow_weight_of; Type: INDEX; Schema: penstock; Owner: -

CREATE UNIQUE INDEX flow_weight_of ON penstock.flow_weight USING btree (flow, COALESCE(queue_id, 0));

-- Name: idempotency_created_at; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX idempotency_created_at ON penstock.idempotency USING brin (created_at);

-- Name: limit_use_limit; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX limit_use_limit ON penstock.limit_use USING btree (limit_id);

-- Name: operation_running; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX operation_running ON penstock.operation USING btree (id) WHERE (status = 'running'::text);

-- Name: pause_what; Type: INDEX; Schema: penstock; Owner: -

CREATE UNIQUE INDEX pause_what ON penstock.pause USING btree (scope, value, COALESCE(queue_id, 0));

-- Name: ready_lock_key; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX ready_lock_key ON penstock.ready USING btree (lock_key, queue_id) WHERE (lock_key IS NOT NULL);

-- Name: remote_run_remote; Type: INDEX; Schema: penstock; Owner: -

CREATE UNIQUE INDEX remote_run_remote ON penstock.remote_run USING btree (instance_id, remote_id);

-- Name: result_entry; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX result_entry ON ONLY penstock.result USING btree (queue_id, entry_id);

-- Name: result_default_queue_id_entry_id_idx; Type: INDEX; Schema: penstock; Owner: -

CREATE INDEX result_default_queue_id_entry_id_idx ON penstock.result_default USING btree (queue_id, entry_id);

-- Name: entry_webhook_pkey; Type: INDEX ATTACH; Schema: penstock; Owner: -

ALTER INDEX penstock.entry_pkey ATTACH PARTITION penstock.entry_webhook_pkey;

-- Name: failure_default_queue_id_entry_id_idx; Type: INDEX ATTACH; Schema: penstock; Owner: -

ALTER INDEX penstock.failure_entry ATTACH PARTITION penstock.failure_default_queue_id_entry_id_idx;

-- Name: failure_default_queue_id_fingerprint_idx; Type: INDEX ATTACH; Schema: penstock; Owner: -

ALTER INDEX penstock.failure_fingerprint ATTACH PARTITION penstock.failure_default_queue_id_fingerprint_idx;

-- Name: result_default_queue_id_entry_id_idx; Type: INDEX ATTACH; Schema: penstock; Owner: -

ALTER INDEX penstock.result_entry ATTACH PARTITION penstock.result_default_queue_id_entry_id_idx;

-- Name: audit audit_goes_by_retention; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER audit_goes_by_retention BEFORE DELETE ON penstock.audit FOR EACH ROW WHEN (((old.at > (clock_timestamp() - '30 days'::interval)) OR (current_setting('penstock.pruning'::text, true) IS DISTINCT FROM 'audit'::text))) EXECUTE FUNCTION penstock.keep_audit();

-- Name: audit audit_stays; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER audit_stays BEFORE UPDATE OR TRUNCATE ON penstock.audit FOR EACH STATEMENT EXECUTE FUNCTION penstock.keep_audit();

-- Name: limit_use await_claims; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER await_claims BEFORE INSERT ON penstock.limit_use FOR EACH ROW EXECUTE FUNCTION penstock.await_claims();

-- Name: queue check_queue; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER check_queue BEFORE INSERT OR UPDATE OF priority, entry_priority, algorithm, merge, "grouping", application, max_concurrent, max_concurrent_per_node, capacity, crash_limit, quantum_count, quantum_time, run_timeout, payload_limit, result_retention, failure_retention, retry ON penstock.queue FOR EACH ROW EXECUTE FUNCTION penstock.check_queue();

-- Name: limit count_again; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER count_again BEFORE UPDATE ON penstock."limit" FOR EACH ROW WHEN (((old.max_units IS DISTINCT FROM new.max_units) OR (old.rate IS DISTINCT FROM new.rate) OR (old.burst IS DISTINCT FROM new.burst) OR (old.per_flow IS DISTINCT FROM new.per_flow) OR (old.per_key IS DISTINCT FROM new.per_key))) EXECUTE FUNCTION penstock.count_again();

-- Name: limit_use count_again; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER count_again AFTER INSERT OR UPDATE ON penstock.limit_use FOR EACH ROW EXECUTE FUNCTION penstock.count_again();

-- Name: cron_job drop_firings; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER drop_firings AFTER DELETE ON penstock.cron_job REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION penstock.drop_firings();

-- Name: queue drop_own_limit; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER drop_own_limit AFTER DELETE ON penstock.queue FOR EACH ROW EXECUTE FUNCTION penstock.drop_own_limit();

-- Name: queue follow_quota; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER follow_quota AFTER INSERT OR UPDATE OF application ON penstock.queue FOR EACH ROW EXECUTE FUNCTION penstock.follow_quota();

-- Name: instance instance_change; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER instance_change AFTER UPDATE ON penstock.instance FOR EACH ROW WHEN (((old.endpoint IS DISTINCT FROM new.endpoint) OR (old.slots IS DISTINCT FROM new.slots) OR (old.labels IS DISTINCT FROM new.labels) OR (old.state IS DISTINCT FROM new.state) OR (old.draining_at IS DISTINCT FROM new.draining_at) OR (old.quarantined_until IS DISTINCT FROM new.quarantined_until))) EXECUTE FUNCTION penstock.bump_inference_version();

-- Name: instance instance_version; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER instance_version AFTER INSERT OR DELETE ON penstock.instance FOR EACH ROW EXECUTE FUNCTION penstock.bump_inference_version();

-- Name: queue keep_queue_kind; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER keep_queue_kind BEFORE UPDATE OF kind ON penstock.queue FOR EACH ROW WHEN ((old.kind IS DISTINCT FROM new.kind)) EXECUTE FUNCTION penstock.keep_queue_kind();

-- Name: queue keep_watch_queue; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER keep_watch_queue BEFORE DELETE ON penstock.queue FOR EACH ROW EXECUTE FUNCTION penstock.keep_watch_queue();

-- Name: queue keep_webhook_queue; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER keep_webhook_queue BEFORE UPDATE OF kind, capacity, "grouping", payload_limit ON penstock.queue FOR EACH ROW WHEN (((old.name = 'webhook'::text) AND (old.kind = 'webhook'::penstock.queue_kind))) EXECUTE FUNCTION penstock.keep_webhook_queue();

-- Name: queue keep_webhook_queue_there; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER keep_webhook_queue_there BEFORE DELETE ON penstock.queue FOR EACH ROW WHEN ((old.name = 'webhook'::text)) EXECUTE FUNCTION penstock.keep_webhook_queue();

-- Name: queue limit_own_concurrency; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER limit_own_concurrency AFTER UPDATE OF max_concurrent ON penstock.queue FOR EACH ROW WHEN ((old.max_concurrent IS DISTINCT FROM new.max_concurrent)) EXECUTE FUNCTION penstock.limit_own_concurrency();

-- Name: model model_version; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER model_version AFTER INSERT OR DELETE OR UPDATE ON penstock.model FOR EACH ROW EXECUTE FUNCTION penstock.bump_inference_version();

-- Name: audit pruning_is_recorded; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER pruning_is_recorded AFTER DELETE ON penstock.audit REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION penstock.record_pruning();

-- Name: queue queue_model; Type: TRIGGER; Schema: penstock; Owner: -

CREATE TRIGGER queue_model AFTER UPDATE OF model ON penstock.queue FOR EACH ROW WHEN ((old.model IS DISTINCT FROM new.model)) EXECUTE FUNCTION penstock.bump_inference_version();

-- Name: batch batch_completion_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.batch
    ADD CONSTRAINT batch_completion_queue_id_fkey FOREIGN KEY (completion_queue_id) REFERENCES penstock.queue(id) ON DELETE SET NULL;

-- Name: batch_part batch_part_batch_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.batch_part
    ADD CONSTRAINT batch_part_batch_id_fkey FOREIGN KEY (batch_id) REFERENCES penstock.batch(id) ON DELETE CASCADE;

-- Name: batch batch_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.batch
    ADD CONSTRAINT batch_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: cron_job cron_job_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.cron_job
    ADD CONSTRAINT cron_job_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: depth depth_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.depth
    ADD CONSTRAINT depth_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: disabled disabled_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.disabled
    ADD CONSTRAINT disabled_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: flow_weight flow_weight_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.flow_weight
    ADD CONSTRAINT flow_weight_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: instance instance_model_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.instance
    ADD CONSTRAINT instance_model_fkey FOREIGN KEY (model) REFERENCES penstock.model(name);

-- Name: limit_use limit_use_limit_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.limit_use
    ADD CONSTRAINT limit_use_limit_id_fkey FOREIGN KEY (limit_id) REFERENCES penstock."limit"(id) ON DELETE CASCADE;

-- Name: limit_use limit_use_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.limit_use
    ADD CONSTRAINT limit_use_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: operation operation_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.operation
    ADD CONSTRAINT operation_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: pause pause_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.pause
    ADD CONSTRAINT pause_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: push_back push_back_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.push_back
    ADD CONSTRAINT push_back_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: slot slot_instance_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.slot
    ADD CONSTRAINT slot_instance_id_fkey FOREIGN KEY (instance_id) REFERENCES penstock.instance(id);

-- Name: usage usage_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.usage
    ADD CONSTRAINT usage_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id) ON DELETE CASCADE;

-- Name: watch watch_queue_id_fkey; Type: FK CONSTRAINT; Schema: penstock; Owner: -

ALTER TABLE ONLY penstock.watch
    ADD CONSTRAINT watch_queue_id_fkey FOREIGN KEY (queue_id) REFERENCES penstock.queue(id);
