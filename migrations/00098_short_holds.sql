-- +goose Up

-- Whoever puts a queue under a limit holds up claims and endings until the commit: not for longer than five seconds, and a quota
-- for many queues does so once, not once a queue.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.await_claims() RETURNS trigger LANGUAGE plpgsql AS $$
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
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.set_quota(application text, options jsonb, reason text DEFAULT NULL::text, actor text DEFAULT CURRENT_USER) RETURNS void
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
-- +goose StatementEnd

-- Making a queue takes what changes of limits take in their order, and dropping one waits for it no longer than they may.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.create_queue(queue_name text, options jsonb DEFAULT '{}'::jsonb) RETURNS integer
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
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.drop_queue(queue_name text, force boolean DEFAULT false, reason text DEFAULT NULL::text, actor text DEFAULT (CURRENT_USER)::text) RETURNS void
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
-- +goose StatementEnd
