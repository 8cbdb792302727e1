-- What a push refuses because of its arguments: payloads, callbacks, traces, options, deadlines and weights.

-- has_wild_number returns whether a JSON value has a number beyond 1e308, a non-zero one below
-- 1e-308, or one with more than 408 decimals. Such numbers are small in jsonb and up to 147 kB each
-- as text: every program that reads the value would pay for that. It never casts to text.
-- Callers: check_callbacks, check_payloads, create_batch, split_batch.
CREATE OR REPLACE FUNCTION penstock.has_wild_number(value jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT EXISTS (
        SELECT FROM jsonb_path_query(value, 'strict $.** ? (@.type() == "number")') j
         CROSS JOIN LATERAL (SELECT abs(j::numeric) AS v OFFSET 0) n
         WHERE n.v > 1e308 OR scale(n.v) > 408 OR (n.v <> 0 AND n.v < 1e-308))
$$;

-- check_callbacks refuses callbacks that are too long (url 2,048 bytes, context 64 KiB), that have
-- numbers which no program can read, or that are beyond payload_limit together with their payload,
-- and traces that are no W3C traceparent.
-- Callers: push_many.
-- SQLSTATE: PS002 invalid argument, PS003 payload too large.
CREATE OR REPLACE FUNCTION penstock.check_callbacks(
    q         penstock.queue,
    payloads  jsonb[],
    callbacks jsonb[],
    traces    text[]
) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    bad record;
BEGIN
    SELECT i, problem INTO bad FROM (
        SELECT i, CASE
            WHEN octet_length(c->>'url') > 2048 THEN 'callback.url is longer than 2048 bytes'
            WHEN penstock.has_wild_number(c) THEN 'callback has a number that is beyond 1e308, below 1e-308 or longer than 408 decimals'
            WHEN octet_length(t) > 55 OR t !~ '^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$'
                 THEN 'trace is not a W3C traceparent, 00-<32 hexadecimal digits>-<16>-<2>'
            END AS problem
          FROM unnest(callbacks, traces) WITH ORDINALITY u(c, t, i)) x
     WHERE problem IS NOT NULL ORDER BY i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% (entry %)', bad.problem, bad.i USING ERRCODE = 'PS002';
    END IF;
    SELECT i, pg_column_size(c->'context') > 65536 AS context, pg_column_size(p) + pg_column_size(c) AS bytes INTO bad
      FROM unnest(payloads, callbacks) WITH ORDINALITY u(p, c, i)
     WHERE pg_column_size(c->'context') > 65536 OR pg_column_size(p) + pg_column_size(c) > q.payload_limit
     ORDER BY i LIMIT 1;
    IF FOUND AND bad.context THEN
        RAISE EXCEPTION 'callback.context of entry % is larger than 65536 bytes', bad.i
            USING ERRCODE = 'PS003', HINT = 'Store the data elsewhere and give a reference to it.';
    ELSIF FOUND THEN
        RAISE EXCEPTION 'payload and callback of entry % have % bytes; queue "%" takes at most %', bad.i, bad.bytes,
            q.name, q.payload_limit
            USING ERRCODE = 'PS003', HINT = 'Store the data elsewhere and push a reference to it, or raise payload_limit of the queue.';
    END IF;
END $$;

-- check_payloads refuses a payload that is missing, too large or has numbers that no program can
-- read, by the number of the entry (from 1).
-- Callers: push_many, check_batch_entry.
-- SQLSTATE: PS002 invalid argument, PS003 payload too large.
CREATE OR REPLACE FUNCTION penstock.check_payloads(q penstock.queue, payloads jsonb[]) RETURNS void
    LANGUAGE plpgsql STABLE AS $$
DECLARE
    bad record;
BEGIN
    IF cardinality(payloads) = 1 AND pg_column_size(payloads[1]) <= q.payload_limit THEN
        -- A push of one is too common to run the queries below for it. See there for CASE.
        IF (CASE WHEN pg_column_size(payloads[1]) > 500 THEN penstock.has_wild_number(payloads[1])
                 WHEN octet_length(payloads[1]::text) > 300 THEN penstock.has_wild_number(payloads[1]) END) THEN
            RAISE EXCEPTION 'payload of entry 1 has a number that is beyond 1e308, below 1e-308 or longer than 408 decimals'
                USING ERRCODE = 'PS002', HINT = 'Give such a number as a text.';
        END IF;
        RETURN;
    END IF;
    SELECT i, pg_column_size(p) AS bytes, p IS NULL AS missing INTO bad
      FROM unnest(payloads) WITH ORDINALITY u(p, i)
     WHERE p IS NULL OR pg_column_size(p) > q.payload_limit LIMIT 1;
    IF FOUND AND bad.missing THEN
        RAISE EXCEPTION 'payload of entry % is missing', bad.i
            USING ERRCODE = 'PS002', HINT = 'Give a JSON value; null is written as the JSON text null.';
    ELSIF FOUND THEN
        RAISE EXCEPTION 'payload of entry % has % bytes; queue "%" takes at most %', bad.i, bad.bytes, q.name,
            q.payload_limit
            USING ERRCODE = 'PS003', HINT = 'Store the data elsewhere and push a reference to it, or raise payload_limit of the queue.';
    END IF;
    -- has_wild_number takes 5 us, as long as the rest of the push of an entry. Such a number has more than 300 digits
    -- as text, so that a short text has none. The text of up to 500 bytes of jsonb has at most 10 MB, and at most one
    -- of these is written: the first payload that has such a number ends the query.
    SELECT i INTO bad FROM unnest(payloads) WITH ORDINALITY u(p, i)
     WHERE CASE WHEN pg_column_size(p) > 500 THEN penstock.has_wild_number(p)
                WHEN octet_length(p::text) > 300 THEN penstock.has_wild_number(p) END LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'payload of entry % has a number that is beyond 1e308, below 1e-308 or longer than 408 decimals', bad.i
            USING ERRCODE = 'PS002', HINT = 'Give such a number as a text.';
    END IF;
END $$;

-- check_arrays refuses arrays of options that are longer than that of the payloads, and callbacks
-- that cannot be called.
-- Callers: push_many.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_arrays(n integer, lengths integer[], callbacks jsonb[]) RETURNS void
    LANGUAGE plpgsql IMMUTABLE
    AS $$
DECLARE
    bad record;
BEGIN
    SELECT u.name, u.length INTO bad
      FROM unnest('{lock_keys,flows,priorities,dues,start_bys,finish_bys,costs,names,idempotency_keys,unique_keys,unique_policies,traces,callbacks,weights}'::text[],
                  lengths) u(name, length)
     WHERE u.length > n LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% has % elements, and there are % payloads', bad.name, bad.length, n
            USING ERRCODE = 'PS002', HINT = 'Arrays of options are as long as that of the payloads; null means an option left out.';
    END IF;
    SELECT u.i, CASE WHEN jsonb_typeof(u.c) <> 'object'
        THEN 'callback is not an object with url and, if wanted, context and format'
                     WHEN u.c->>'format' <> 'job' THEN 'callback.format is not "job"; leave it out for the body of Standard Webhooks'
                     ELSE 'callback.url is missing or not a text' END AS problem INTO bad
      FROM unnest(callbacks) WITH ORDINALITY u(c, i)
     WHERE jsonb_typeof(u.c) <> 'null'
       AND (jsonb_typeof(u.c) <> 'object' OR jsonb_typeof(u.c->'url') IS DISTINCT FROM 'string' OR u.c->>'url' = ''
            OR u.c->>'format' <> 'job')
     ORDER BY u.i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% (entry %)', bad.problem, bad.i USING ERRCODE = 'PS002';
    END IF;
END $$;

-- check_options refuses options that cannot be accepted, by the name of the field and the number of
-- the entry (from 1).
-- Callers: push_many, check_batch_entry.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_options(
    q penstock.queue, payloads jsonb[], lock_keys text[], flows text[], priorities smallint[], names text[],
    idempotency_keys text[], unique_keys text[], unique_policies text[],
    dues timestamptz[], start_bys timestamptz[], finish_bys timestamptz[], costs real[], weights integer[]
) RETURNS void LANGUAGE plpgsql STABLE AS $$
DECLARE
    bad record;
BEGIN
    SELECT i, problem INTO bad FROM (
        SELECT i, CASE
            WHEN penstock.is_solo(coalesce(lock_key, penstock.lock_key_of(payload, q.grouping)))
                 THEN 'lock_key begins with "#", which is kept for solo entries'
            WHEN coalesce(lock_key, penstock.lock_key_of(payload, q.grouping)) = ''
                THEN 'lock_key is empty; leave it out for a solo entry'
            WHEN octet_length(coalesce(lock_key, penstock.lock_key_of(payload, q.grouping))) > 512
                THEN 'lock_key is longer than 512 bytes'
            WHEN q.max_concurrent_per_name IS NOT NULL AND name IS NOT NULL AND lock_key IS NOT NULL
                 THEN 'lock_key is given beside name, by which the queue bounds its entries (max_concurrent_per_name)'
            WHEN q.max_concurrent_per_name IS NOT NULL AND name IS NOT NULL AND upolicy = 'one_running_one_queued'
                 THEN 'unique_policy one_running_one_queued is given beside name, by which the queue bounds its entries (max_concurrent_per_name)'
            WHEN octet_length(flow) > 256 THEN 'flow is longer than 256 bytes'
            WHEN priority NOT BETWEEN 0 AND 9 THEN 'priority is not between 0 and 9'
            WHEN octet_length(name) > 256 THEN 'name is longer than 256 bytes'
            WHEN ikey = '' OR octet_length(ikey) > 512 THEN 'idempotency_key is empty or longer than 512 bytes'
            WHEN ukey = '' OR octet_length(ukey) > 500 THEN 'unique_key is empty or longer than 500 bytes'
            WHEN ukey IS NOT NULL AND coalesce(upolicy, '') NOT IN ('while_queued', 'while_active', 'one_running_one_queued')
                 THEN 'unique_policy is not one of while_queued, while_active, one_running_one_queued'
            WHEN ukey IS NULL AND upolicy IS NOT NULL THEN 'unique_policy is given without unique_key'
            WHEN upolicy = 'one_running_one_queued'
                 AND coalesce(lock_key, penstock.lock_key_of(payload, q.grouping)) <> 'unique:' || ukey
                 THEN 'unique_policy one_running_one_queued is given beside a lock_key, '
                      'and has its own: use while_queued'
            WHEN NOT isfinite(due) OR NOT isfinite(start_by)
                OR NOT isfinite(finish_by) THEN 'due_at, start_by and finish_by must be finite'
            -- Other ones are no time of RFC 3339.
            WHEN greatest(due, start_by, finish_by) >= '9999-12-31 UTC'
                THEN 'due_at, start_by and finish_by must be before 9999-12-31'
            WHEN greatest(CASE WHEN start_by IS NULL THEN due + q.start_within END,
                          CASE WHEN finish_by IS NULL THEN greatest(due, start_by) + q.finish_within END)
                 >= '9999-12-31 UTC'
                THEN 'due_at and start_by must be so early that start_within and finish_within of the queue end '
                     'before 9999-12-31'
            WHEN least(due, start_by, finish_by) < '0001-01-01 UTC'
                THEN 'due_at, start_by and finish_by must be from year 1 on'
            WHEN finish_by < start_by THEN 'finish_by is before start_by'
            WHEN start_by < due THEN 'start_by is before due_at'
            -- A lock record has the sum of its entries as a real number.
            WHEN NOT cost BETWEEN 0 AND 1e12 THEN 'cost is not between 0 and 1e12'
            WHEN weight < 1 THEN format('weight %s is not at least 1', weight)
            END AS problem
          FROM unnest(payloads, lock_keys, flows, priorities, names, idempotency_keys, unique_keys, unique_policies,
                      dues, start_bys, finish_bys, costs, weights)
               WITH ORDINALITY AS u(payload, lock_key, flow, priority, name, ikey, ukey, upolicy, due, start_by,
                                    finish_by, cost, weight, i)
    ) c WHERE problem IS NOT NULL ORDER BY i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% (entry %)', bad.problem, bad.i USING ERRCODE = 'PS002';
    END IF;
END $$;

-- check_deadlines refuses new entries (keep is not false) whose start_by or finish_by passed more than
-- a minute ago, by the number of the entry (from 1). Clocks of pushers may be off by so much; an entry
-- whose deadline passed since is accepted, and ends as expired. A push that is repeated under its
-- idempotency key gets its answer, however late.
-- Callers: push_many.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_deadlines(
    start_bys  timestamptz[],
    finish_bys timestamptz[],
    keep       boolean[]
) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    bad record;
BEGIN
    SELECT u.i, CASE WHEN u.start_by < now() - interval '1 minute' THEN 'start_by' ELSE 'finish_by' END AS field,
           CASE WHEN u.start_by < now() - interval '1 minute' THEN u.start_by ELSE u.finish_by END AS at INTO bad
      FROM unnest(start_bys, finish_bys, keep) WITH ORDINALITY u(start_by, finish_by, keep, i)
     WHERE least(u.start_by, u.finish_by) < now() - interval '1 minute' AND u.keep IS NOT FALSE
     ORDER BY u.i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% is in the past: % (entry %)', bad.field, bad.at, bad.i
            USING ERRCODE = 'PS002', HINT = 'Give a time to come, or leave it out.';
    END IF;
END $$;

-- check_weights refuses new entries (keep is not false) that are heavier than the queue or a limit of it lets through,
-- by the number of the entry (from 1). A push that is repeated under its idempotency key gets its answer, whatever was
-- lowered since.
-- Callers: push_many.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_weights(q penstock.queue, weights integer[], keep boolean[]) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    bad record;
BEGIN
    SELECT c.i, c.problem INTO bad
      FROM (SELECT u.i, CASE
                   WHEN u.weight > q.max_weight THEN format('weight %s is above max_weight %s of queue "%s"', u.weight,
                                                            q.max_weight, q.name)
                   ELSE (SELECT format('weight %s is more than limit "%s" ever lets through: %s of %s units', u.weight, g.name,
                                       u.weight::bigint * m.units, g.max_units)
                           FROM penstock.limit_use m JOIN penstock."limit" g ON g.id = m.limit_id
                          WHERE m.queue_id = q.id AND u.weight::bigint * m.units > g.max_units
                            AND m.units <= g.max_units
                          ORDER BY g.name LIMIT 1) END AS problem
              FROM unnest(weights, keep) WITH ORDINALITY u(weight, keep, i)
             WHERE u.weight > 1 AND u.keep IS NOT FALSE) c
     WHERE c.problem IS NOT NULL ORDER BY c.i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% (entry %)', bad.problem, bad.i USING ERRCODE = 'PS002';
    END IF;
END $$;

-- check_snapshot refuses a push by a snapshot that is older than the last change of the queue: a name or key may have
-- been disabled or enabled since, which changes the row of the queue. The lock is for this check alone: what is
-- switched after it waits for the transaction, which has an id (step_operation).
-- Locks: the row of the queue (FOR SHARE), until it returns.
-- Callers: push_many.
-- SQLSTATE: 40001 the queue was changed since the snapshot of the transaction.
CREATE OR REPLACE FUNCTION penstock.check_snapshot(q penstock.queue) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM penstock.queue x WHERE x.id = q.id FOR SHARE;
    RAISE SQLSTATE 'PS900'; -- gives the lock back
EXCEPTION WHEN SQLSTATE 'PS900' THEN
    NULL;
END $$;
