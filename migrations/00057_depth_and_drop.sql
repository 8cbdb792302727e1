-- +goose Up

-- A failure keeps the depth of its entry, so that a loop cannot begin anew by retrying what it ended in. Set to a constant:
-- no table is rewritten.
ALTER TABLE penstock.failure ADD COLUMN depth smallint NOT NULL DEFAULT 0;
COMMENT ON COLUMN penstock.failure.depth IS 'of the entry: how many entries lie between it and a push from outside';

-- replace_merged puts one payload in the place of the entries, which compactable has locked. The oldest stays, with the
-- latest deadline of all (none if one has none) and the greatest depth; the others are done, merged into it.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.replace_merged(q penstock.queue, ids bigint[], merged jsonb) RETURNS integer
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
-- +goose StatementEnd

-- return_failure puts a failed entry back: the same id, history and depth, no attempts spent, behind everybody in its lane
-- (in its group, its id still says its place). Deadlines that have passed are dropped, or it would expire at once.
-- False: there is no such failure.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.return_failure(queue integer, wanted bigint) RETURNS boolean
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
-- +goose StatementEnd

-- drop_queue removes a queue and everything that is left of it. It refuses while there are entries, unless forced.
DROP FUNCTION penstock.drop_queue(text, boolean);
-- +goose StatementBegin
CREATE FUNCTION penstock.drop_queue(queue_name text, force boolean DEFAULT false, reason text DEFAULT NULL, actor text DEFAULT current_user::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue_name);
    n bigint;
BEGIN
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
-- +goose StatementEnd
