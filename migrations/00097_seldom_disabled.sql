-- +goose Up

-- push_many as before, and it looks for disabled names and keys once a statement where the queue has none, instead of twice for
-- each entry.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.push_many(queue_name text, payloads jsonb[], lock_keys text[] DEFAULT '{}'::text[], flows text[] DEFAULT '{}'::text[], priorities smallint[] DEFAULT '{}'::smallint[], dues timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], start_bys timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], finish_bys timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[], costs real[] DEFAULT '{}'::real[], names text[] DEFAULT '{}'::text[], idempotency_keys text[] DEFAULT '{}'::text[], unique_keys text[] DEFAULT '{}'::text[], unique_policies text[] DEFAULT '{}'::text[], traces text[] DEFAULT '{}'::text[], callbacks jsonb[] DEFAULT '{}'::jsonb[], OUT ids bigint[], OUT verdicts text[]) RETURNS record
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
-- +goose StatementEnd
