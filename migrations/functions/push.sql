-- Acceptance of entries. push_many is the function behind every push except the plain one of Go (plainPushSQL in
-- pkg/invalidation/push_sql.go), which is its plain branch written out: change both together.

-- The form without weights: calls of either would be ambiguous.
DROP FUNCTION IF EXISTS penstock.push_many(
    text, jsonb[], text[], text[], smallint[], timestamptz[], timestamptz[], timestamptz[], real[], text[], text[],
    text[],
    text[], text[], jsonb[], boolean);

-- takes_plain returns whether a queue asks for nothing that the plain push leaves out: its entries get no lock key,
-- flow or deadline by the queue, and no bound is counted.
-- Callers: push_many; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.takes_plain(q penstock.queue) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT q.grouping IS NULL AND q.capacity IS NULL AND q.capacity_per_flow IS NULL AND q.capacity_per_slot IS NULL
       AND q.start_within IS NULL AND q.finish_within IS NULL AND q.on_no_instance = 'wait' AND q.shards = 1
$$;

-- push_many accepts entries: every push from SQL, and every push from Go that plainPushSQL does not take. The
-- arrays run side by side with payloads; an array that is shorter leaves the option unset for the rest, one that is
-- longer is refused. ids[i] is the entry of payloads[i]; verdicts[i] is 'inserted', 'replayed'
-- (idempotency key used before) or 'duplicate' (unique key taken), and null means all inserted. An
-- idempotency key of a push that was a duplicate names the entry that does the work. Disabled names
-- and keys are looked up for each entry only in queues that have some. An entry without a deadline of
-- its own gets those of the queue (start_within, finish_within), counted from the push or the due time,
-- that to finish from start_by if the entry has one. An entry without a flow gets one of the shards of the
-- queue, if it has some.
--
-- inside says that Penstock itself pushes, and not a client: callbacks (call_back, and pkg/gateway/prediction) and the
-- entries of batches (create_batch, feed_batch, complete_batch). Such a push is not refused while the queue refuses
-- pushes (column refusal), and only such a push may go to queues of kind webhook and batch: task nodes sign the entries
-- of the one with the secrets of receivers, and the entries of the other name batches. push and push_json, which
-- clients may call, do not set it.
--
-- Locks: new rows of idempotency in order of flow and key, which wait for an uncommitted push of
-- the same key; rows of uniqueness in order of key, likewise; the ready row or entry of the holder
-- of a unique key; in a transaction that is not read committed, for entries with a name or lock key, that of
-- check_snapshot; ready rows of the pushed keys in order of key (FOR UPDATE SKIP LOCKED), in such a transaction those
-- alone that it has inserted itself. A push without options takes none of these.
-- Callers: push_batch_entry, feed_batch, push_changes, push_cron_entries, push, push_json, call_back;
-- pkg/invalidation.
-- SQLSTATE: PS001 no such queue, PS002 an option is not valid or the queue takes entries from
-- Penstock only, PS003 payload too large, PS004 idempotency key used with another body, PS005 the
-- queue or a flow of it is full, PS006 capacity_per_flow needs read committed, PS011 entries push one another without
-- end, PS013 no usable instance, 40001 the queue, or the holder of a unique key, was changed since the snapshot of the
-- transaction.
CREATE OR REPLACE FUNCTION penstock.push_many(
    queue_name       text,
    payloads         jsonb[],
    lock_keys        text[]        DEFAULT '{}',
    flows            text[]        DEFAULT '{}',
    priorities       smallint[]    DEFAULT '{}',
    dues             timestamptz[] DEFAULT '{}',
    start_bys        timestamptz[] DEFAULT '{}',
    finish_bys       timestamptz[] DEFAULT '{}',
    costs            real[]        DEFAULT '{}',
    names            text[]        DEFAULT '{}',
    idempotency_keys text[]        DEFAULT '{}',
    unique_keys      text[]        DEFAULT '{}',
    unique_policies  text[]        DEFAULT '{}',
    traces           text[]        DEFAULT '{}',
    callbacks        jsonb[]       DEFAULT '{}',
    inside           boolean       DEFAULT false, -- Penstock itself pushes
    weights          integer[]     DEFAULT '{}',
    OUT ids          bigint[],
    OUT verdicts     text[]
) RETURNS record LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    q    penstock.queue;
    n    integer := coalesce(array_length(payloads, 1), 0);
    sizes integer[] := ARRAY[
        cardinality(lock_keys), cardinality(flows), cardinality(priorities), cardinality(dues), cardinality(start_bys),
        cardinality(finish_bys), cardinality(costs), cardinality(names), cardinality(idempotency_keys),
        cardinality(unique_keys), cardinality(unique_policies), cardinality(traces), cardinality(callbacks),
        cardinality(weights)];
    by_snapshot boolean; -- reads by the snapshot of its transaction, and not of each statement
    keep boolean[];
    pushed_at timestamptz; -- the transaction may have begun long before
BEGIN
    SELECT * INTO q FROM penstock.queue WHERE name = queue_name;
    IF NOT FOUND THEN
        q := penstock.queue_row(queue_name); -- raises
    ELSIF n = 0 THEN
        ids := '{}';
        RETURN;
    ELSIF q.kind IN ('webhook', 'batch') AND NOT inside THEN
        RAISE EXCEPTION 'queue "%" of kind % takes entries from Penstock alone', q.name, q.kind
            USING ERRCODE = 'PS002', HINT = CASE q.kind WHEN 'webhook' THEN 'Push to another queue, with a callback.'
                                            ELSE 'Create a batch (create_batch).' END;
    END IF;
    PERFORM penstock.check_payloads(q, payloads);
    IF penstock.takes_plain(q) AND 0 = ALL (sizes) THEN
        -- The plain push, which uses no option: the same as below with everything left out that is about options.
        IF q.refusal IS NOT NULL AND NOT inside THEN
            PERFORM penstock.refuse_push(q); -- raises
        END IF;
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
    IF n < ANY (sizes) OR cardinality(callbacks) > 0 THEN
        PERFORM penstock.check_arrays(n, sizes, callbacks);
    END IF;
    IF cardinality(callbacks) + cardinality(traces) > 0 THEN
        PERFORM penstock.check_callbacks(q, payloads, callbacks, traces);
    END IF;
    PERFORM penstock.check_options(q, payloads, lock_keys, flows, priorities, names, idempotency_keys, unique_keys,
                                   unique_policies, dues, start_bys, finish_bys, costs, weights);
    IF q.refusal IS NOT NULL AND NOT inside THEN
        -- A push with an entry under no key that is used is refused before any key is written: the disk may be full.
        -- The row of a unique key outlives its entry, and under the queued policies the start of it: where it has
        -- started, and not ended, the push is refused below.
        IF EXISTS (SELECT FROM unnest(payloads, flows, idempotency_keys, unique_keys) u(payload, flow, key, unique_key)
                     LEFT JOIN LATERAL (SELECT true AS used FROM penstock.idempotency k
                                         WHERE k.queue_id = q.id AND k.flow = coalesce(u.flow, '')
                                           AND k.key = u.key OFFSET 0) i ON true
                     LEFT JOIN LATERAL (SELECT true AS used FROM penstock.uniqueness k
                                          JOIN penstock.entry e ON e.queue_id = q.id AND e.id = k.entry_id
                                         WHERE k.queue_id = q.id AND k.key = u.unique_key OFFSET 0) x ON true
                    WHERE i.used IS NULL AND x.used IS NULL) THEN
            PERFORM penstock.refuse_push(q); -- raises
        END IF;
    END IF;
    PERFORM pg_current_xact_id(); -- before penstock.disabled is read: step_operation waits for transactions with an id
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
    IF cardinality(start_bys) + cardinality(finish_bys) > 0 THEN
        PERFORM penstock.check_deadlines(start_bys, finish_bys, keep);
    END IF;
    IF cardinality(weights) > 0 THEN
        PERFORM penstock.check_weights(q, weights, keep);
    END IF;
    IF q.refusal IS NOT NULL AND n > 0 AND NOT inside THEN
        PERFORM penstock.refuse_push(q); -- raises
    END IF;
    IF q.on_no_instance = 'fail' AND n > 0 THEN
        PERFORM penstock.admit_model(q);
    END IF;
    IF q.max_concurrent_per_name IS NOT NULL AND cardinality(names) > 0 AND n > 0 THEN
        lock_keys := penstock.name_keys(q, names, lock_keys);
    END IF;
    IF q.shards > 1 AND n > 0 THEN
        -- Idempotency keys are of the flow that the push names: a repeated push finds its entry under another number of
        -- shards.
        flows := penstock.shard_flows(q, ids, payloads, lock_keys, flows, unique_keys, unique_policies);
    END IF;
    IF q.capacity_per_flow IS NOT NULL AND n > 0 THEN
        PERFORM penstock.admit_flows(q, flows, keep, cardinality(payloads));
    END IF;
    IF coalesce(q.capacity, q.capacity_per_slot) IS NOT NULL AND n > 0 THEN
        PERFORM penstock.admit(q, n);
    END IF;
    by_snapshot := current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted');
    IF by_snapshot AND n > 0
       AND (q.grouping IS NOT NULL
            OR cardinality(names) + cardinality(lock_keys) + cardinality(unique_policies) > 0) THEN
        PERFORM penstock.check_snapshot(q);
    END IF;

    pushed_at := clock_timestamp();
    WITH fresh AS (
        INSERT INTO penstock.entry (id, queue_id, status, due_at, start_by, finish_by, cost, weight, priority,
                                    enabled_priority,
                                    flow, lock_key, name, unique_key, trace, callback, payload)
        SELECT u.id, q.id, CASE WHEN u.due_at > now() THEN 'initial' ELSE 'pending' END::penstock.status,
               u.due_at, coalesce(u.start_by, greatest(pushed_at, u.due_at) + q.start_within),
               coalesce(u.finish_by, greatest(pushed_at, u.due_at, u.start_by) + q.finish_within), u.cost,
               nullif(u.weight, 1),
               CASE WHEN off.off THEN -1 ELSE p.priority END, CASE WHEN off.off THEN p.priority END,
               coalesce(u.flow, ''), k.lock_key, u.name, u.unique_key, u.trace, u.callback, u.payload
          FROM unnest(ids, payloads, lock_keys, flows, priorities, dues, start_bys, finish_bys, costs, names,
                      unique_keys, unique_policies, traces, callbacks, weights, keep)
               WITH ORDINALITY
               AS u(id, payload, lock_key, flow, priority, due_at, start_by, finish_by, cost, name,
                    unique_key, unique_policy, trace, callback, weight, keep, i)
               CROSS JOIN LATERAL (SELECT coalesce(u.priority, q.entry_priority) AS priority) p
               CROSS JOIN LATERAL (SELECT penstock.entry_lock_key(q.grouping, u.payload, u.lock_key, u.unique_policy, u.unique_key) AS lock_key) k
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
         WHERE f.lock_key IS NULL AND penstock.claimable(f.status, f.priority)
    )
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
    SELECT q.id, g.priority, g.flow, g.pos, g.lock_key
      FROM (SELECT f.priority, f.flow, f.lock_key, min(f.id) AS pos
              FROM fresh f
             WHERE f.lock_key IS NOT NULL AND penstock.claimable(f.status, f.priority)
             GROUP BY f.priority, f.flow, f.lock_key) g
     WHERE NOT EXISTS (
        -- A ready row of the key that we can lock stays until we commit: a session that deletes it later sees our
        -- entries. One that is locked already gives no such promise, so that the key gets another. Where we read by the
        -- snapshot of our transaction, a claim may have deleted each row of another since, and its lock would fail: we
        -- rely on our own alone. These have no age: ids of subtransactions are above ours, and those of all others that
        -- our snapshot sees are below it.
        SELECT FROM penstock.ready r
         WHERE r.lock_key = g.lock_key AND r.queue_id + 0 = q.id AND r.priority = g.priority AND r.flow = g.flow
           AND (NOT by_snapshot OR age(r.xmin) <= 0)
         LIMIT 1
           FOR UPDATE SKIP LOCKED)
     ORDER BY g.lock_key;
END $$;

-- The form without weights: calls of either would be ambiguous.
DROP FUNCTION IF EXISTS penstock.push(
    text, jsonb, text, text, integer, timestamptz, timestamptz, timestamptz, real, text, text, text, text, text, jsonb);

-- push accepts one entry and returns its id; for a replay or a duplicate, that of the earlier
-- entry.
-- Locks: those of push_many.
-- Callers: cmd/penstock, pkg/api, pkg/invalidation; psql.
-- SQLSTATE: those of push_many.
CREATE OR REPLACE FUNCTION penstock.push(
    queue           text,
    payload         jsonb,
    lock_key        text        DEFAULT NULL,
    flow            text        DEFAULT NULL,
    priority        integer     DEFAULT NULL,
    due_at          timestamptz DEFAULT NULL,
    start_by        timestamptz DEFAULT NULL,
    finish_by       timestamptz DEFAULT NULL,
    cost            real        DEFAULT NULL,
    name            text        DEFAULT NULL,
    idempotency_key text        DEFAULT NULL,
    unique_key      text        DEFAULT NULL,
    unique_policy   text        DEFAULT NULL,
    trace           text        DEFAULT NULL,
    callback        jsonb       DEFAULT NULL,
    weight          integer     DEFAULT NULL
) RETURNS bigint LANGUAGE sql AS $$
    SELECT (penstock.push_many(queue, ARRAY[payload],
        CASE WHEN lock_key IS NULL THEN '{}' ELSE ARRAY[lock_key] END,
        CASE WHEN flow IS NULL THEN '{}' ELSE ARRAY[flow] END,
        CASE WHEN priority IS NULL THEN '{}' ELSE ARRAY[least(greatest(priority, -1), 10)::smallint] END,
        CASE WHEN due_at IS NULL THEN '{}' ELSE ARRAY[due_at] END,
        CASE WHEN start_by IS NULL THEN '{}' ELSE ARRAY[start_by] END,
        CASE WHEN finish_by IS NULL THEN '{}' ELSE ARRAY[finish_by] END,
        CASE WHEN cost IS NULL THEN '{}' ELSE ARRAY[cost] END,
        CASE WHEN name IS NULL THEN '{}' ELSE ARRAY[name] END,
        CASE WHEN idempotency_key IS NULL THEN '{}' ELSE ARRAY[idempotency_key] END,
        CASE WHEN unique_key IS NULL THEN '{}' ELSE ARRAY[unique_key] END,
        CASE WHEN unique_policy IS NULL THEN '{}' ELSE ARRAY[unique_policy] END,
        CASE WHEN trace IS NULL THEN '{}' ELSE ARRAY[trace] END,
        CASE WHEN callback IS NULL THEN '{}' ELSE ARRAY[callback] END,
        weights => CASE WHEN weight IS NULL THEN '{}' ELSE ARRAY[weight] END)).ids[1]
$$;

-- push_json is push_many for clients whose driver has no arrays: a JSON array of objects
-- {"payload": ..., "lock_key": ..., ...}, options named as in penstock.push. It returns [{"id": 1,
-- "verdict": "inserted"}].
-- Locks: those of push_many.
-- Callers: pkg/invalidation; psql.
-- SQLSTATE: PS002 an option does not exist or is not valid, and those of push_many.
CREATE OR REPLACE FUNCTION penstock.push_json(queue_name text, entries jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    unknown text;
    answer  jsonb;
BEGIN
    SELECT k INTO unknown FROM jsonb_array_elements(entries) e CROSS JOIN LATERAL jsonb_object_keys(e) k
     WHERE k NOT IN ('payload', 'lock_key', 'flow', 'priority', 'due_at', 'start_by', 'finish_by', 'cost', 'name',
                     'idempotency_key', 'unique_key', 'unique_policy', 'trace', 'callback', 'weight') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'entry option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are those of the push of one entry.';
    END IF;
    SELECT jsonb_agg(jsonb_build_object('id', i.id, 'verdict', coalesce(p.verdicts[i.n], 'inserted'))
                     ORDER BY i.n) INTO answer
      FROM (SELECT array_agg(e->'payload' ORDER BY n) AS payloads, array_agg(e->>'lock_key' ORDER BY n) AS lock_keys,
                   array_agg(e->>'flow' ORDER BY n) AS flows,
                   array_agg((e->>'priority')::smallint ORDER BY n) AS priorities,
                   array_agg((e->>'due_at')::timestamptz ORDER BY n) AS dues,
                   array_agg((e->>'start_by')::timestamptz ORDER BY n) AS start_bys,
                   array_agg((e->>'finish_by')::timestamptz ORDER BY n) AS finish_bys,
                   array_agg((e->>'cost')::real ORDER BY n) AS costs, array_agg(e->>'name' ORDER BY n) AS names,
                   array_agg(e->>'idempotency_key' ORDER BY n) AS idempotency_keys,
                   array_agg(e->>'unique_key' ORDER BY n) AS unique_keys,
                   array_agg(e->>'unique_policy' ORDER BY n) AS unique_policies,
                   array_agg(e->>'trace' ORDER BY n) AS traces, array_agg(e->'callback' ORDER BY n) AS callbacks,
                   CASE WHEN bool_or(e ? 'weight') THEN array_agg((e->>'weight')::integer ORDER BY n)
                        ELSE '{}' END AS weights
              FROM jsonb_array_elements(entries) WITH ORDINALITY u(e, n)) a
     CROSS JOIN LATERAL penstock.push_many(queue_name, a.payloads, a.lock_keys, a.flows, a.priorities, a.dues,
                                           a.start_bys,
                   a.finish_bys, a.costs, a.names, a.idempotency_keys, a.unique_keys, a.unique_policies, a.traces,
                   a.callbacks,
                   weights => a.weights) p
     CROSS JOIN LATERAL unnest(p.ids) WITH ORDINALITY i(id, n);
    RETURN coalesce(answer, '[]');
EXCEPTION
    WHEN invalid_text_representation OR invalid_datetime_format OR numeric_value_out_of_range
        OR datetime_field_overflow THEN
        RAISE EXCEPTION 'entry option is not valid: %', SQLERRM USING ERRCODE = 'PS002';
    WHEN invalid_parameter_value THEN -- of jsonb_array_elements and jsonb_object_keys
        RAISE EXCEPTION 'entries are not an array of objects: %', SQLERRM USING ERRCODE = 'PS002',
            HINT = 'Give [{"payload": ...}], for one entry too.';
END $$;
