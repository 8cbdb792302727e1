-- +goose Up

-- feed_batch pushes the next parts of a batch, as many as its window has room for and its queue takes: more than the
-- capacity of the queue at once would be refused for ever.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.feed_batch(b penstock.batch) RETURNS integer
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
-- +goose StatementEnd

-- register_instance makes the endpoint of a model known, or changes it. As before, and an endpoint has to be an address
-- that can be called.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.register_instance(model text, server text, endpoint text, slots integer, labels jsonb DEFAULT '{}', reason text DEFAULT '', actor text DEFAULT current_user) RETURNS integer
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
-- +goose StatementEnd
