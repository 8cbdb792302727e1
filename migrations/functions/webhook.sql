-- Callbacks: entries of the queue webhook, pushed in the transaction of the ending that they report.

-- call_back pushes an entry of the webhook queue for an entry that ends with the given outcome, in
-- the transaction of the ending. A result over 64 KiB is left out, and so is a context that the
-- queue would not take. An ending that cannot push its callback cannot be recorded: the node that
-- ran the entry and the leader that expires it would try again for ever. So the queue of callbacks
-- takes every callback. callback_sent keeps which entry reports which end.
-- Locks: none: the push has neither keys nor a capacity.
-- Callers: end_entry; pkg/invalidation.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.call_back(e penstock.entry, outcome text, detail jsonb) RETURNS void
    LANGUAGE plpgsql AS $$
DECLARE
    host text := lower(substring(e.callback->>'url' FROM '^[A-Za-z]+://([^/?#]+)'));
    data jsonb;
    sent bigint[];
BEGIN
    IF coalesce(e.callback->>'url', '') = '' THEN
        RETURN;
    ELSIF pg_column_size(detail->'result') > 65536 THEN
        detail := detail - 'result' || '{"result_omitted": true}';
    END IF;
    data := jsonb_build_object('id', e.id, 'queue', (SELECT q.name FROM penstock.queue q WHERE q.id = e.queue_id),
                               'outcome', outcome)
            || jsonb_strip_nulls(detail - 'result') || CASE
                WHEN detail ? 'result' THEN jsonb_build_object('result', detail->'result') ELSE '{}' END
            || CASE WHEN octet_length(e.callback::text) > 262144 THEN '{"context_omitted": true}'
                    WHEN e.callback ? 'context' THEN jsonb_build_object('context', e.callback->'context') ELSE '{}' END;
    SELECT p.ids INTO sent FROM penstock.push_many('webhook',
        ARRAY[jsonb_build_object('url', left(e.callback->>'url', 4096), 'type', 'entry.' || outcome, 'at', clock_timestamp(), 'data', data)
              || CASE WHEN e.callback->>'format' = 'job' THEN '{"format": "job"}'::jsonb ELSE '{}' END],
        flows => ARRAY[coalesce(left(host, CASE WHEN octet_length(host) > length(host) THEN 64 ELSE 128 END), '')],
        traces => ARRAY[e.trace], inside => true) p;
    INSERT INTO penstock.callback_sent (entry_id, callback_id) VALUES (e.id, sent[1]);
END $$;

-- keep_webhook_queue refuses changes after which the queue of callbacks would not take every
-- callback.
-- Locks: none.
-- Callers: triggers keep_webhook_queue, keep_webhook_queue_there.
-- SQLSTATE: PS006 the queue cannot be dropped, PS002 the setting cannot be changed.
CREATE OR REPLACE FUNCTION penstock.keep_webhook_queue() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        RAISE EXCEPTION 'queue "webhook" belongs to Penstock: entries with a callback could not end without it'
            USING ERRCODE = 'PS006', HINT = 'Pause it, or cancel its entries.';
    ELSIF NEW.kind <> 'webhook' OR num_nonnulls(NEW.capacity, NEW.capacity_per_flow, NEW.model) > 0
        OR NEW."grouping" IS NOT NULL OR NEW.payload_limit < 1048576 THEN
        RAISE EXCEPTION 'kind, capacity, capacity_per_flow, model, grouping and a payload_limit below 1048576 cannot be set for queue "webhook": entries with a callback could not end'
            USING ERRCODE = 'PS002', HINT = 'Pause it to stop deliveries.';
    END IF;
    RETURN NEW;
END $$;
