-- Acceptance of entries. push_many is the function behind every push except the plain one of Go (plainPushSQL in
-- pkg/invalidation/push.go), which is its plain branch written out: change both together.

-- queue_row returns the row of a queue. SQLSTATEs of Penstock are of class PS, the same in every
-- function:
--   PS001 no such queue           PS002 invalid argument      PS003 payload too large
--   PS004 idempotency conflict    PS005 queue is full         PS006 not allowed in this state
--   PS007 no such entry           PS008 no such node, operation, model or instance
--   PS010 no such cron job        PS011 entries push one another without end
--   PS012 no such batch           PS013 no usable instance     40001 a concurrent change: retry the statement
-- Callers: every function that takes the name of a queue; pkg/invalidation.
-- SQLSTATE: PS001 no such queue.
CREATE OR REPLACE FUNCTION penstock.queue_row(queue_name text) RETURNS penstock.queue
LANGUAGE plpgsql STABLE AS $$
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

-- lock_key_of reads the lock key of a payload by the queue's grouping: a field, a path with dots,
-- or a jsonpath.
-- Callers: entry_lock_key, check_options.
CREATE OR REPLACE FUNCTION penstock.lock_key_of(payload jsonb, path text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN left(path, 1) = '$' THEN jsonb_path_query_first(payload, path::jsonpath) #>> '{}'
                WHEN position('.' IN path) > 0 THEN payload #>> string_to_array(path, '.')
                ELSE payload ->> path END
$$;

-- entry_lock_key returns the lock key of an entry, null for a solo one: the key that it was pushed with, else that of the
-- queue's grouping (path), else that of its unique key where one of these runs at a time.
-- Callers: push_many, shard_flows.
CREATE OR REPLACE FUNCTION penstock.entry_lock_key(path text, payload jsonb, lock_key text, unique_policy text, unique_key text)
RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(lock_key, CASE WHEN path IS NOT NULL THEN penstock.lock_key_of(payload, path) END,
                    CASE WHEN unique_policy = 'one_running_one_queued' THEN 'unique:' || unique_key END)
$$;

-- shard_name returns the flow of the entries of a shard, which are counted from 0.
-- Callers: shard_flow, feed_batch.
CREATE OR REPLACE FUNCTION penstock.shard_name(shard bigint) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 'shard-' || shard::text $$;

-- shard_flow returns the flow of an entry that is pushed without one to a queue with shards: shard-0 to shard-<shards - 1>,
-- by a hash of its lock key, or of its id where it has none. The id itself would not do: all queues draw ids from one
-- sequence, so that those of one queue may all be even. An entry keeps its flow when shards is changed.
-- The order of a key does not depend on it: a claim of a key takes its oldest entries of all lanes.
-- Callers: shard_flows.
CREATE OR REPLACE FUNCTION penstock.shard_flow(shards integer, lock_key text, id bigint) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT penstock.shard_name((coalesce(hashtextextended(lock_key, 0), hashint8extended(id, 0)) & 9223372036854775807) % shards)
$$;

-- shard_flows returns the flow of each entry of a push to a queue with shards: the one that it names, else that of its
-- shard.
-- Callers: push_many.
CREATE OR REPLACE FUNCTION penstock.shard_flows(
    q penstock.queue, ids bigint[], payloads jsonb[], lock_keys text[], flows text[], unique_keys text[], unique_policies text[]
) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT array_agg(coalesce(nullif(u.flow, ''), penstock.shard_flow(q.shards,
                         penstock.entry_lock_key(q.grouping, u.payload, u.lock_key, u.unique_policy, u.unique_key), u.id)) ORDER BY u.i)
      FROM unnest(ids, payloads, lock_keys, flows, unique_keys, unique_policies)
           WITH ORDINALITY u(id, payload, lock_key, flow, unique_key, unique_policy, i)
$$;

-- queue_capacity returns how many entries that have not ended a queue takes, null for no bound: its capacity, or what the
-- slots of the usable instances of its model allow (capacity_per_slot), whichever is less. A model without slots counts
-- as one slot, so that an entry can wait for its first instance.
-- Callers: admit, feed_batch.
CREATE OR REPLACE FUNCTION penstock.queue_capacity(q penstock.queue) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT least(q.capacity, ceil(q.capacity_per_slot::float8 * CASE WHEN q.capacity_per_slot IS NOT NULL THEN greatest(1, (
           SELECT sum(i.slots) FROM penstock.instance i WHERE i.model = q.model AND penstock.usable(i))) END)::bigint)
$$;

-- admit refuses n entries where the queue's capacity has no headroom for them. The depth is the
-- last count plus the difference of two sequences since, so that producers never meet on a row; a
-- push that rolled back is counted until the next count_depth. A push counts its entries before it
-- compares, so that of several that meet at the capacity none exceeds it.
-- Locks: those of show_open_pushes, for count_depth.
-- Callers: push_many.
-- SQLSTATE: PS005 the queue is full; DETAIL is JSON with depth, capacity, drain_rate and
-- retry_after_ms.
CREATE OR REPLACE FUNCTION penstock.admit(q penstock.queue, n integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    d        penstock.depth;
    depth    bigint;
    most     bigint := penstock.queue_capacity(q);
    wait     real;
BEGIN
    SELECT * INTO d FROM penstock.depth WHERE queue_id = q.id;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    depth := d.counted + (penstock.counter('accepted', q.id) - d.accepted) - (penstock.counter('removed', q.id) - d.removed);
    IF depth + n <= most THEN
        PERFORM penstock.show_open_pushes(ARRAY[penstock.open_pushes_key(q.id)], ARRAY[n]);
        PERFORM penstock.count(q.id, 'accepted', n);
        depth := d.counted + (penstock.counter('accepted', q.id) - d.accepted) - (penstock.counter('removed', q.id) - d.removed) - n;
        IF depth + n <= most THEN
            RETURN;
        END IF;
        PERFORM penstock.count(q.id, 'removed', n);
    END IF;
    wait := CASE WHEN d.drain_rate > 0 THEN (depth + n - most) / d.drain_rate END;
    RAISE EXCEPTION 'queue "%" is full: % entries of at most %', q.name, depth, most
        USING ERRCODE = 'PS005',
              DETAIL = jsonb_build_object('depth', depth, 'capacity', most, 'drain_rate', d.drain_rate,
                                          'retry_after_ms', ceil(wait * 1000))::text,
              HINT = 'Push again after retry_after_ms, or raise the capacity of the queue.';
END $$;

-- admit_flows refuses the entries that are kept (keep is not false) of n where their flow has no headroom under
-- capacity_per_flow; a flow has the entries that have not ended, wherever they are. It counts up to the bound by the
-- index of flows. Entries of open pushes are not visible: each push tells of its own by an advisory lock before it
-- reads those of others and then counts, in this order, so that a push that commits meanwhile is counted twice at worst
-- and of several that meet at the bound none exceeds it. The locks are kept by 1,024 hashes of flows, for there may be
-- more flows in a push than places for locks: an open push of another flow of the same hash may be counted.
-- A snapshot that is older than the locks would miss entries that are committed, so that each statement needs its own.
-- Locks: those of show_open_pushes for each hash of a flow.
-- Callers: push_many.
-- SQLSTATE: PS005 a flow of the queue is full; DETAIL is JSON with flow, depth, capacity and retry_after_ms, which assumes
-- that all that leaves the queue is of this flow: there is no room before it. PS006 the transaction is
-- not read committed.
CREATE OR REPLACE FUNCTION penstock.admit_flows(q penstock.queue, flows text[], keep boolean[], n integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    f      record;
    depth  bigint;
    hashes integer[];
    counts integer[]; -- of the entries of this push
    open   bigint[];  -- entries of open pushes of others
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'a push to queue "%", which has capacity_per_flow, needs read committed, and the transaction is %',
                        q.name, current_setting('transaction_isolation')
            USING ERRCODE = 'PS006', HINT = 'Push in a read committed transaction, or take capacity_per_flow from the queue.';
    END IF;
    SELECT array_agg(h.hash ORDER BY h.hash), array_agg(h.n ORDER BY h.hash) INTO hashes, counts
      FROM (SELECT hashtext(coalesce(flows[i], '')) & 1023 AS hash, count(*)::integer AS n
              FROM generate_series(1, n) i WHERE keep[i] IS NOT FALSE GROUP BY 1) h;
    PERFORM penstock.show_open_pushes(ARRAY(SELECT penstock.open_flow_key(q.id, h.hash) FROM unnest(hashes) WITH ORDINALITY h(hash, i) ORDER BY h.i),
                                      counts);
    WITH o AS MATERIALIZED (SELECT * FROM penstock.open_pushes())
    SELECT array_agg(c.entries ORDER BY h.i) INTO open
      FROM unnest(hashes) WITH ORDINALITY h(hash, i)
     CROSS JOIN LATERAL (SELECT coalesce(sum(o.entries), 0) AS entries FROM o
                          WHERE NOT o.mine AND o.key = penstock.open_flow_key(q.id, h.hash)::oid) c;
    FOR f IN SELECT u.flow, open[array_position(hashes, hashtext(u.flow) & 1023)] AS open, count(*) AS n
               FROM (SELECT coalesce(flows[i], '') AS flow FROM generate_series(1, n) i WHERE keep[i] IS NOT FALSE) u GROUP BY 1, 2 ORDER BY 1
    LOOP
        SELECT count(*) INTO depth
          FROM (SELECT FROM penstock.entry e WHERE e.queue_id = q.id AND e.flow = f.flow LIMIT q.capacity_per_flow) e;
        depth := depth + f.open;
        IF depth + f.n > q.capacity_per_flow THEN
            RAISE EXCEPTION 'flow "%" of queue "%" is full: % entries of at most %', f.flow, q.name, depth, q.capacity_per_flow
                USING ERRCODE = 'PS005',
                      DETAIL = jsonb_build_object('flow', f.flow, 'depth', depth, 'capacity', q.capacity_per_flow, 'retry_after_ms',
                                   (SELECT ceil((depth + f.n - q.capacity_per_flow) / nullif((x.l).out_per_second, 0) * 1000)
                                      FROM (SELECT penstock.last_sample(q.id) AS l) x))::text,
                      HINT = 'Push again when entries of the flow have ended, or raise capacity_per_flow of the queue.';
        END IF;
    END LOOP;
END $$;

-- show_open_pushes tells other sessions, until this transaction ends, of entries[i] more entries that it pushed under
-- keys[i]. Advisory locks tell, for others see no rows of this transaction: the first key of a lock is keys[i], and the
-- second has a number of entries and, since a lock that is taken twice shows once, the number of the lock. Such locks
-- are few for the whole server, so that a transaction that pushes one by one takes its next lock for up to a sixteenth
-- of what it has shown, and shows up to a sixteenth too much: 2,500 pushes take 108 locks, one million 207.
-- The setting penstock.open_pushes has the entries that were pushed, those that are shown and the number of locks of
-- each key; a rollback to a savepoint undoes it together with the locks.
-- Locks: advisory locks (shared, try).
-- Callers: admit, admit_flows.
CREATE OR REPLACE FUNCTION penstock.show_open_pushes(keys integer[], entries integer[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    state jsonb := coalesce(nullif(current_setting('penstock.open_pushes', true), ''), '{}');
BEGIN
    WITH known AS (
        SELECT u.key, coalesce((state->u.key::text->>0)::bigint, 0) + u.n AS pushed, coalesce((state->u.key::text->>1)::bigint, 0) AS shown,
               coalesce((state->u.key::text->>2)::integer, 0) AS locks
          FROM unnest(keys, entries) u(key, n)
    ), next AS (
        SELECT key, pushed, shown, locks,
               CASE WHEN pushed > shown THEN least(greatest(pushed - shown, shown / 16), 1048575)::integer ELSE 0 END AS more
          FROM known
    ), taken AS MATERIALIZED (
        SELECT key, pushed, shown + more AS shown,
               locks + CASE WHEN more > 0 THEN pg_try_advisory_xact_lock_shared(key, (locks % 2048) << 20 | more)::integer ELSE 0 END AS locks
          FROM next
    )
    SELECT state || jsonb_object_agg(key, jsonb_build_array(pushed, shown, locks)) INTO state FROM taken;
    PERFORM set_config('penstock.open_pushes', state::text, true);
END $$;

-- Its name in the version before, when entries of queues with a capacity were not among them.
DROP FUNCTION IF EXISTS penstock.open_flows();

-- open_pushes lists what show_open_pushes of any transaction in this database shows: the key, the number of entries, and
-- whether the transaction is that of this session.
-- Locks: none.
-- Callers: admit_flows, count_depth.
CREATE OR REPLACE FUNCTION penstock.open_pushes() RETURNS TABLE (key oid, entries bigint, mine boolean)
LANGUAGE plpgsql VOLATILE ROWS 10 AS $$
BEGIN
    RETURN QUERY SELECT l.classid, l.objid::bigint & 1048575, l.pid = pg_backend_pid()
                   FROM pg_locks l
                  WHERE l.locktype = 'advisory' AND l.objsubid = 2
                    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
END $$;

-- open_flow_key is the key under which pushes to a queue with capacity_per_flow show their entries, by a hash of the flow.
-- Callers: admit_flows.
CREATE OR REPLACE FUNCTION penstock.open_flow_key(queue_id integer, hash integer) RETURNS integer LANGUAGE sql IMMUTABLE
    AS $$ SELECT hashtext('penstock open flow ' || $1 || ' ' || $2) $$;

-- admit_model refuses a push to a queue whose model has no instance that takes calls, where on_no_instance is fail.
-- Callers: push_many.
-- SQLSTATE: PS013 no instance of the model takes calls; DETAIL is JSON with model.
CREATE OR REPLACE FUNCTION penstock.admit_model(q penstock.queue) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.instance i WHERE i.model = q.model AND penstock.usable(i)) THEN
        RAISE EXCEPTION 'no instance of model "%" takes calls, and queue "%" accepts no entries without one', q.model, q.name
            USING ERRCODE = 'PS013', DETAIL = jsonb_build_object('model', q.model)::text,
                  HINT = 'Push again when an instance is there, or set on_no_instance of the queue to wait.';
    END IF;
END $$;

-- open_pushes_key is the key under which pushes to a queue with a capacity show their entries.
-- Callers: admit, count_depth.
CREATE OR REPLACE FUNCTION penstock.open_pushes_key(queue_id integer) RETURNS integer LANGUAGE sql IMMUTABLE
    AS $$ SELECT hashtext('penstock open pushes ' || $1) $$;

-- counter reads a counter of a queue with a capacity. A sequence that was never used is 0.
-- Locks: none.
-- Callers: feed_batch, admit, count_depth.
CREATE OR REPLACE FUNCTION penstock.counter(what text, queue_id integer) RETURNS bigint
LANGUAGE sql AS $$
    SELECT coalesce(pg_sequence_last_value(format('penstock.%I', what || '_' || queue_id)::regclass), 0)
$$;

-- count moves a counter of a queue with a capacity by n. The change is not undone by a rollback.
-- Locks: none: sequences only.
-- Callers: replace_merged, end_entry, return_failure_at, admit; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.count(queue_id integer, what text, n bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM count(nextval(format('penstock.%I', what || '_' || queue_id)::regclass)) FROM generate_series(1, n);
END $$;

-- The form without weights: calls of either would be ambiguous.
DROP FUNCTION IF EXISTS penstock.push_many(text, jsonb[], text[], text[], smallint[], timestamptz[], timestamptz[], timestamptz[], real[], text[], text[], text[], text[],
                                           text[], jsonb[], boolean);

-- push_many accepts entries: every push from SQL, and every push from Go that plainPushSQL does not take. The
-- arrays run side by side with payloads; an array that is shorter leaves the option unset for the rest, one that is longer
-- is refused. ids[i] is the entry of payloads[i]; verdicts[i] is 'inserted', 'replayed'
-- (idempotency key used before) or 'duplicate' (unique key taken), and null means all inserted. An
-- idempotency key of a push that was a duplicate names the entry that does the work. Disabled names
-- and keys are looked up for each entry only in queues that have some. An entry without a deadline of
-- its own gets those of the queue (start_within, finish_within), counted from the push or the due time,
-- that to finish from start_by if the entry has one. An entry without a flow gets one of the shards of the
-- queue, if it has some. Queues of kind webhook and
-- batch hold entries that Penstock itself pushes (call_back, create_batch, feed_batch,
-- complete_batch), with inside set: task nodes sign the entries of the one with the secrets of
-- receivers, and the entries of the other name batches.
-- Locks: new rows of idempotency in order of flow and key, which wait for an uncommitted push of
-- the same key; rows of uniqueness in order of key, likewise; the ready row or entry of the holder
-- of a unique key; ready rows of the pushed keys in order of key (FOR UPDATE SKIP LOCKED). A push
-- without options takes none of these.
-- Callers: push_batch_entry, feed_batch, watch, push_cron_entries, push, push_json, call_back;
-- pkg/invalidation.
-- SQLSTATE: PS001 no such queue, PS002 an option is not valid or the queue takes entries from
-- Penstock only, PS003 payload too large, PS004 idempotency key used with another body, PS005 the
-- queue or a flow of it is full, PS006 capacity_per_flow needs read committed, PS011 entries push one another without
-- end, PS013 no usable instance.
CREATE OR REPLACE FUNCTION penstock.push_many(queue_name text, payloads jsonb[], lock_keys text[] DEFAULT '{}'::text[], flows text[] DEFAULT '{}'::text[], priorities smallint[] DEFAULT '{}'::smallint[], dues timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], start_bys timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], finish_bys timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], costs real[] DEFAULT '{}'::real[], names text[] DEFAULT '{}'::text[], idempotency_keys text[] DEFAULT '{}'::text[], unique_keys text[] DEFAULT '{}'::text[], unique_policies text[] DEFAULT '{}'::text[], traces text[] DEFAULT '{}'::text[], callbacks jsonb[] DEFAULT '{}'::jsonb[], inside boolean DEFAULT false, weights integer[] DEFAULT '{}'::integer[], OUT ids bigint[], OUT verdicts text[]) RETURNS record
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
    ELSIF q.kind IN ('webhook', 'batch') AND NOT inside THEN
        RAISE EXCEPTION 'queue "%" of kind % takes entries from Penstock alone', q.name, q.kind
            USING ERRCODE = 'PS002', HINT = CASE q.kind WHEN 'webhook' THEN 'Push to another queue, with a callback.'
                                            ELSE 'Create a batch: SELECT penstock.create_batch(...).' END;
    END IF;
    PERFORM penstock.check_payloads(q, payloads);
    IF q.grouping IS NULL AND q.capacity IS NULL AND q.start_within IS NULL AND q.finish_within IS NULL AND q.capacity_per_flow IS NULL
       AND q.capacity_per_slot IS NULL AND q.on_no_instance = 'wait' AND q.shards = 1 AND cardinality(lock_keys) + cardinality(flows) + cardinality(priorities)
       + cardinality(dues) + cardinality(start_bys) + cardinality(finish_bys) + cardinality(costs) + cardinality(names)
       + cardinality(idempotency_keys) + cardinality(unique_keys) + cardinality(unique_policies) + cardinality(traces)
       + cardinality(callbacks) + cardinality(weights) = 0 THEN
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
    IF greatest(cardinality(lock_keys), cardinality(flows), cardinality(priorities), cardinality(dues), cardinality(start_bys),
                cardinality(finish_bys), cardinality(costs), cardinality(names), cardinality(idempotency_keys), cardinality(unique_keys),
                cardinality(unique_policies), cardinality(traces), cardinality(callbacks), cardinality(weights)) > n OR cardinality(callbacks) > 0 THEN
        PERFORM penstock.check_arrays(n, ARRAY[cardinality(lock_keys), cardinality(flows), cardinality(priorities), cardinality(dues),
            cardinality(start_bys), cardinality(finish_bys), cardinality(costs), cardinality(names), cardinality(idempotency_keys),
            cardinality(unique_keys), cardinality(unique_policies), cardinality(traces), cardinality(callbacks), cardinality(weights)], callbacks);
    END IF;
    IF cardinality(callbacks) + cardinality(traces) > 0 THEN
        PERFORM penstock.check_callbacks(q, payloads, callbacks, traces);
    END IF;
    PERFORM penstock.check_options(q, payloads, lock_keys, flows, priorities, names, idempotency_keys, unique_keys,
                                   unique_policies, dues, start_bys, finish_bys, costs, weights);
    IF q.refusal IS NOT NULL AND NOT inside THEN
        -- A push with an entry under no key that is used is refused before any key is written: the disk may be full. The row
        -- of a unique key outlives its entry, and under the queued policies the start of it: where it has started, and
        -- not ended, the push is refused below.
        IF EXISTS (SELECT FROM unnest(payloads, flows, idempotency_keys, unique_keys) u(payload, flow, key, unique_key)
                     LEFT JOIN LATERAL (SELECT true AS used FROM penstock.idempotency k
                                         WHERE k.queue_id = q.id AND k.flow = coalesce(u.flow, '') AND k.key = u.key OFFSET 0) i ON true
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
        -- Idempotency keys are of the flow that the push names: a repeated push finds its entry under another number of shards.
        flows := penstock.shard_flows(q, ids, payloads, lock_keys, flows, unique_keys, unique_policies);
    END IF;
    IF q.capacity_per_flow IS NOT NULL AND n > 0 THEN
        PERFORM penstock.admit_flows(q, flows, keep, cardinality(payloads));
    END IF;
    IF coalesce(q.capacity, q.capacity_per_slot) IS NOT NULL AND n > 0 THEN
        PERFORM penstock.admit(q, n);
    END IF;

    WITH fresh AS (
        INSERT INTO penstock.entry (id, queue_id, status, due_at, start_by, finish_by, cost, weight, priority, enabled_priority,
                                    flow, lock_key, name, unique_key, trace, callback, payload)
        SELECT u.id, q.id, CASE WHEN u.due_at > now() THEN 'initial' ELSE 'pending' END::penstock.status,
               u.due_at, coalesce(u.start_by, greatest(now(), u.due_at) + q.start_within),
               coalesce(u.finish_by, greatest(now(), u.due_at, u.start_by) + q.finish_within), u.cost, nullif(u.weight, 1),
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
        -- A ready row of the key that we can lock stays until we commit: a session that deletes it later sees our entries.
        -- One that is locked already gives no such promise, so that the key gets another.
        SELECT FROM penstock.ready r
         WHERE r.lock_key = g.lock_key AND r.queue_id + 0 = q.id AND r.priority = g.priority AND r.flow = g.flow
         LIMIT 1
           FOR UPDATE SKIP LOCKED)
     ORDER BY g.lock_key;
END $$;

-- name_keys returns the lock keys of entries in a queue with max_concurrent_per_name: of those with a name one of so many
-- keys of the name, of others the one that they were given. A lock key has one holder, so that no more entries of a name run
-- at once than it has keys. An entry gets the key with the fewest entries that wait or run, counted up to ten: pushes that
-- do not see one another may give two entries one key while another is free, which costs time and breaks no bound.
-- A higher bound keeps the keys of a lower one and adds some, so that the keys of a backlog count.
-- Locks: none.
-- Callers: push_many.
CREATE OR REPLACE FUNCTION penstock.name_keys(q penstock.queue, names text[], lock_keys text[]) RETURNS text[]
LANGUAGE sql VOLATILE SET enable_hashjoin = on AS $$
    WITH given AS (
        SELECT u.name, u.lock_key, u.i, row_number() OVER (PARTITION BY u.name ORDER BY u.i) AS nth
          FROM unnest(names, lock_keys) WITH ORDINALITY u(name, lock_key, i)
    ), keys AS MATERIALIZED (
        SELECT d.name, array_agg(k.key ORDER BY k.entries, random()) AS keys
          FROM (SELECT DISTINCT g.name FROM given g WHERE g.name IS NOT NULL) d
         CROSS JOIN LATERAL (
               SELECT c.key, (SELECT count(*) FROM (
                      SELECT FROM penstock.entry e
                       WHERE e.queue_id = q.id AND e.lock_key = c.key AND penstock.claimable(e.status, e.priority) LIMIT 10) e) AS entries
                 FROM (SELECT 'name:' || d.name || CASE WHEN s > 1 THEN '#' || s ELSE '' END AS key
                         FROM generate_series(1, q.max_concurrent_per_name) s) c) k
         GROUP BY d.name
    )
    SELECT array_agg(CASE WHEN g.name IS NULL THEN g.lock_key ELSE k.keys[1 + (g.nth - 1) % q.max_concurrent_per_name] END ORDER BY g.i)
      FROM given g LEFT JOIN keys k ON k.name = g.name
$$;

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
CREATE OR REPLACE FUNCTION penstock.check_callbacks(q penstock.queue, payloads jsonb[], callbacks jsonb[], traces text[]) RETURNS void
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
        RAISE EXCEPTION 'payload and callback of entry % have % bytes; queue "%" takes at most %', bad.i, bad.bytes, q.name, q.payload_limit
            USING ERRCODE = 'PS003', HINT = 'Store the data elsewhere and push a reference to it, or raise payload_limit of the queue.';
    END IF;
END $$;

-- check_payloads refuses a payload that is missing, too large or has numbers that no program can
-- read, by the number of the entry (from 1).
-- Callers: push_many.
-- SQLSTATE: PS002 invalid argument, PS003 payload too large.
CREATE OR REPLACE FUNCTION penstock.check_payloads(q penstock.queue, payloads jsonb[]) RETURNS void LANGUAGE plpgsql STABLE AS $$
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
        RAISE EXCEPTION 'payload of entry % has % bytes; queue "%" takes at most %', bad.i, bad.bytes, q.name, q.payload_limit
            USING ERRCODE = 'PS003', HINT = 'Store the data elsewhere and push a reference to it, or raise payload_limit of the queue.';
    END IF;
    -- has_wild_number takes 5 us, as long as the rest of the push of an entry. Such a number has more than 300 digits as text, so
    -- that a short text has none. The text of up to 500 bytes of jsonb has at most 10 MB, and at most one of these is written:
    -- the first payload that has such a number ends the query.
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
    SELECT u.i, CASE WHEN jsonb_typeof(u.c) <> 'object' THEN 'callback is not an object with url and, if wanted, context and format'
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
-- Callers: push_many.
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
            WHEN coalesce(lock_key, penstock.lock_key_of(payload, q.grouping)) LIKE '#%'
                 THEN 'lock_key begins with "#", which is kept for solo entries'
            WHEN coalesce(lock_key, penstock.lock_key_of(payload, q.grouping)) = '' THEN 'lock_key is empty; leave it out for a solo entry'
            WHEN octet_length(coalesce(lock_key, penstock.lock_key_of(payload, q.grouping))) > 512 THEN 'lock_key is longer than 512 bytes'
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
            WHEN NOT isfinite(due) OR NOT isfinite(start_by) OR NOT isfinite(finish_by) THEN 'due_at, start_by and finish_by must be finite'
            -- Later ones are no time of RFC 3339, and leave no space for start_within and finish_within.
            WHEN greatest(due, start_by, finish_by) >= '9999-12-31 UTC' THEN 'due_at, start_by and finish_by must be before 9999-12-31'
            WHEN finish_by < start_by THEN 'finish_by is before start_by'
            WHEN start_by < due THEN 'start_by is before due_at'
            WHEN cost < 0 OR cost = 'NaN' OR cost = 'Infinity' THEN 'cost is not a number of at least 0'
            WHEN weight < 1 THEN format('weight %s is not at least 1', weight)
            END AS problem
          FROM unnest(payloads, lock_keys, flows, priorities, names, idempotency_keys, unique_keys, unique_policies,
                      dues, start_bys, finish_bys, costs, weights)
               WITH ORDINALITY AS u(payload, lock_key, flow, priority, name, ikey, ukey, upolicy, due, start_by, finish_by, cost, weight, i)
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
CREATE OR REPLACE FUNCTION penstock.check_deadlines(start_bys timestamptz[], finish_bys timestamptz[], keep boolean[]) RETURNS void
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

-- check_weights refuses new entries (keep is not false) that are heavier than the queue or a limit of it lets through, by
-- the number of the entry (from 1). A push that is repeated under its idempotency key gets its answer, whatever was lowered since.
-- Callers: push_many.
-- SQLSTATE: PS002 invalid argument.
CREATE OR REPLACE FUNCTION penstock.check_weights(q penstock.queue, weights integer[], keep boolean[]) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    bad record;
BEGIN
    SELECT c.i, c.problem INTO bad
      FROM (SELECT u.i, CASE
                   WHEN u.weight > q.max_weight THEN format('weight %s is above max_weight %s of queue "%s"', u.weight, q.max_weight, q.name)
                   ELSE (SELECT format('weight %s is more than limit "%s" ever lets through: %s of %s units', u.weight, g.name,
                                       u.weight::bigint * m.units, g.max_units)
                           FROM penstock.limit_use m JOIN penstock."limit" g ON g.id = m.limit_id
                          WHERE m.queue_id = q.id AND u.weight::bigint * m.units > g.max_units AND m.units <= g.max_units
                          ORDER BY g.name LIMIT 1) END AS problem
              FROM unnest(weights, keep) WITH ORDINALITY u(weight, keep, i)
             WHERE u.weight > 1 AND u.keep IS NOT FALSE) c
     WHERE c.problem IS NOT NULL ORDER BY c.i LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% (entry %)', bad.problem, bad.i USING ERRCODE = 'PS002';
    END IF;
END $$;

-- resolve_idempotency gives each entry whose key was used before the id of the first entry. The
-- insert waits for an uncommitted push of the same key, so that of a hundred pushes at once one
-- inserts and the others get its id. A key that is there at first is answered as it was then, and not inserted: were it
-- swept while the push waits, its insert would come behind those of later keys. Of the others none can be
-- swept before it is read, since the sweep leaves keys for a day: only of a transaction that was open for so long.
-- Locks: new rows of idempotency in order of flow and key, so that two bulk pushes never deadlock.
-- Callers: push_many.
-- SQLSTATE: PS004 the key was used with another payload, lock key or name.
CREATE OR REPLACE FUNCTION penstock.resolve_idempotency(
    q penstock.queue, INOUT ids bigint[], payloads jsonb[], flows text[], keys text[], lock_keys text[], names text[],
    OUT verdicts text[]
) LANGUAGE plpgsql AS $$
DECLARE
    fingerprints bytea[];
    known_ids    bigint[]; -- of the keys that were there at first
    known_prints bytea[];
    found_ids    bigint[];
    conflict     bigint;
    swept        boolean;
BEGIN
    fingerprints := ARRAY(
        SELECT sha256(convert_to(jsonb_build_array(u.payload, u.lock_key, u.name)::text, 'UTF8'))
          FROM unnest(payloads, lock_keys, names) WITH ORDINALITY u(payload, lock_key, name, i) ORDER BY u.i);
    LOOP
        WITH asked AS MATERIALIZED (
            SELECT u.i, coalesce(u.flow, '') AS flow, u.key, u.id, u.fingerprint, k.entry_id AS known_id, k.fingerprint AS known_print
              FROM unnest(ids, flows, keys, fingerprints) WITH ORDINALITY u(id, flow, key, fingerprint, i)
                   LEFT JOIN LATERAL (SELECT entry_id, fingerprint FROM penstock.idempotency
                                       WHERE queue_id = q.id AND flow = coalesce(u.flow, '') AND key = u.key OFFSET 0) k ON true
        ), fresh AS (
            INSERT INTO penstock.idempotency (queue_id, flow, key, entry_id, fingerprint)
            SELECT q.id, a.flow, a.key, a.id, a.fingerprint
              FROM asked a
             WHERE a.key IS NOT NULL AND a.known_id IS NULL
             ORDER BY a.flow COLLATE "C", a.key COLLATE "C", a.i
            ON CONFLICT DO NOTHING
        )
        SELECT array_agg(a.known_id ORDER BY a.i), array_agg(a.known_print ORDER BY a.i) INTO known_ids, known_prints FROM asked a;
        SELECT array_agg(coalesce(u.known_id, k.entry_id, u.id) ORDER BY u.i),
               array_agg(CASE WHEN coalesce(u.known_id, k.entry_id) <> u.id THEN 'replayed' ELSE 'inserted' END ORDER BY u.i),
               min(u.i) FILTER (WHERE coalesce(u.known_print, k.fingerprint) <> u.fingerprint),
               bool_or(u.key IS NOT NULL AND u.known_id IS NULL AND k.entry_id IS NULL)
          INTO found_ids, verdicts, conflict, swept
          FROM unnest(ids, flows, keys, fingerprints, known_ids, known_prints)
               WITH ORDINALITY u(id, flow, key, fingerprint, known_id, known_print, i)
               LEFT JOIN LATERAL (SELECT entry_id, fingerprint FROM penstock.idempotency
                                   WHERE u.known_id IS NULL AND queue_id = q.id AND flow = coalesce(u.flow, '') AND key = u.key OFFSET 0) k ON true;
        EXIT WHEN NOT swept;
    END LOOP;
    IF conflict IS NOT NULL THEN
        RAISE EXCEPTION 'idempotency_key "%" was used with another body (entry %)', keys[conflict], conflict
            USING ERRCODE = 'PS004', HINT = 'Use a new key for new work; the same key must come with the same payload, lock key and name.';
    END IF;
    ids := found_ids;
END $$;

-- resolve_uniqueness gives each entry whose unique key is taken the id of the entry that has it. A
-- push waits for an uncommitted one of the same key: if that rolls back, this one inserts.
-- Locks: rows of uniqueness in order of key (FOR UPDATE), for each those of holds_unique_key.
-- Callers: push_many.
CREATE OR REPLACE FUNCTION penstock.resolve_uniqueness(
    q penstock.queue, INOUT ids bigint[], INOUT verdicts text[], keys text[], policies text[]
) LANGUAGE plpgsql AS $$
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

-- share_key keeps claims of a lock key away until this transaction ends, or returns false if one is in
-- progress. Pushes share the lock that claims and exclude_claims take alone. Advisory locks are few for the
-- whole server, so that a transaction takes at most 256: for further keys it excludes claims of all
-- lock keys of the queue.
-- Locks: the advisory lock of the key (shared, try), or from the 257th key on that of all lock keys of
-- the queue (it waits for claims in progress).
-- Callers: holds_unique_key.
CREATE OR REPLACE FUNCTION penstock.share_key(queue integer, key text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    shared integer := coalesce(nullif(current_setting('penstock.keys_shared', true), ''), '0')::integer;
BEGIN
    IF shared >= 256 THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('penstock keys ' || queue, 0));
        RETURN true;
    END IF;
    PERFORM set_config('penstock.keys_shared', (shared + 1)::text, true);
    RETURN pg_try_advisory_xact_lock_shared(hashtextextended('penstock key ' || queue || ' ' || key, 0));
END $$;

-- holds_unique_key returns whether an entry still has its unique key: under while_active until it ends,
-- under the queued policies until it starts. There this transaction takes what keeps the entry from
-- starting before the change that the push is about is committed. Where that cannot be had the result
-- is false, and the push inserts an entry of its own.
-- Locks: the entry (FOR NO KEY UPDATE, it waits) while it is initial or disabled; of a solo entry its
-- ready row (FOR UPDATE SKIP LOCKED); of a group the key (share_key), since claims may ignore ready rows.
-- Callers: resolve_uniqueness.
CREATE OR REPLACE FUNCTION penstock.holds_unique_key(queue bigint, held bigint, policy text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e penstock.entry;
BEGIN
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = held;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF policy = 'while_active' THEN
        RETURN true;
    ELSIF NOT penstock.claimable(e.status, e.priority) THEN
        PERFORM FROM penstock.entry
          WHERE queue_id = queue AND id = held AND NOT penstock.claimable(status, priority) FOR NO KEY UPDATE;
        IF FOUND THEN
            SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = held;
            RETURN NOT penstock.runs(e);
        END IF;
        SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = held; -- in another state by now, or gone
    END IF;
    IF e.lock_key IS NOT NULL THEN
        IF NOT penstock.share_key(queue::integer, e.lock_key) THEN
            RETURN false;
        END IF;
    ELSE
        PERFORM FROM penstock.ready r
          WHERE r.queue_id = queue AND r.priority = e.priority AND r.flow = e.flow AND r.pos = coalesce(e.pos, held) AND r.entry_id = held
            FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = held; -- as it is now that it cannot start
    RETURN FOUND AND NOT penstock.runs(e);
END $$;

-- The form without weights: calls of either would be ambiguous.
DROP FUNCTION IF EXISTS penstock.push(text, jsonb, text, text, integer, timestamptz, timestamptz, timestamptz, real, text, text, text, text, text,
                                      jsonb);

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
                   array_agg(e->>'trace' ORDER BY n) AS traces, array_agg(e->'callback' ORDER BY n) AS callbacks,
                   CASE WHEN bool_or(e ? 'weight') THEN array_agg((e->>'weight')::integer ORDER BY n) ELSE '{}' END AS weights
              FROM jsonb_array_elements(entries) WITH ORDINALITY u(e, n)) a
     CROSS JOIN LATERAL penstock.push_many(queue_name, a.payloads, a.lock_keys, a.flows, a.priorities, a.dues, a.start_bys,
                   a.finish_bys, a.costs, a.names, a.idempotency_keys, a.unique_keys, a.unique_policies, a.traces, a.callbacks,
                   weights => a.weights) p
     CROSS JOIN LATERAL unnest(p.ids) WITH ORDINALITY i(id, n);
    RETURN coalesce(answer, '[]');
EXCEPTION
    WHEN invalid_text_representation OR invalid_datetime_format OR numeric_value_out_of_range OR datetime_field_overflow THEN
        RAISE EXCEPTION 'entry option is not valid: %', SQLERRM USING ERRCODE = 'PS002';
END $$;

-- need_read_committed refuses a transaction of another isolation level. Functions with several
-- steps read again in a statement of their own after each lock, and so need a new snapshot for each
-- statement. They wait for no claim, pusher or node: rows that another session has locked are
-- skipped or requested.
-- Locks: none.
-- Callers: pause_batch, cancel_batch, compactable, switch_entry, alter_cron_job, run_cron_job_now,
-- drop_cron_job, cancel_entry, expire_entries, lane_headroom, step_operation; pkg/invalidation.
-- SQLSTATE: PS006 the transaction is not read committed.
CREATE OR REPLACE FUNCTION penstock.need_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'this function needs read committed, and the transaction is %', current_setting('transaction_isolation')
            USING ERRCODE = 'PS006', HINT = 'Call it in a transaction of its own.';
    END IF;
END $$;
