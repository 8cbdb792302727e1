-- Concurrency limits, rate limits and quotas: their definition. headroom.sql has how claims check and charge them.

-- lock_all_limits is taken by every change of limits, of the queues under them, or of models and instances that may
-- change a queue, before any row: some go from the limit to its queues, others from the queue to its limits or to
-- inference_version, and would deadlock.
-- Locks: one advisory lock for all limits, until the transaction ends; it waits.
-- Callers: set_limit, use_limit, set_quota, create_queue, alter_queue, drop_queue, register_model, set_model_override,
-- register_instance, announce_instance; pkg/scale.
CREATE OR REPLACE FUNCTION penstock.lock_all_limits() RETURNS void LANGUAGE sql
    AS $$ SELECT pg_advisory_xact_lock(hashtextextended('penstock limits', 0)) $$;

-- beyond_burst returns whether a lock of so many units can never pass the rate of a limit: its bucket holds fewer.
-- Callers: set_limit, use_limit, limit_reasons.
CREATE OR REPLACE FUNCTION penstock.beyond_burst(g penstock."limit", units integer) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT $1.rate IS NOT NULL AND $2 > $1.burst
$$;

-- set_limit makes a limit or changes one: {"max_units": 4} or {"rate": 10, "burst": 20, "per_flow":
-- true}. With per_flow or per_key it has other buckets: units taken before are not given back to
-- these.
-- Locks: those of lock_all_limits; the row of the limit (FOR UPDATE); the advisory lock of the limit
-- exclusively, by the trigger count_again, which waits for claims in flight; the rows of its
-- queues.
-- Callers: set_quota; pkg/operator; psql.
-- SQLSTATE: PS002 an option does not exist or is not valid, or a lock could never pass.
CREATE OR REPLACE FUNCTION penstock.set_limit(
    limit_name text,
    options    jsonb,
    reason     text  DEFAULT NULL,
    actor      text  DEFAULT NULL
) RETURNS integer
    LANGUAGE plpgsql
    AS $$
DECLARE
    l       penstock."limit";
    unknown text;
    most    integer; -- units of a lock of its queues
BEGIN
    PERFORM penstock.lock_all_limits();
    IF jsonb_typeof(options) <> 'object' THEN
        RAISE EXCEPTION 'options must be an object' USING ERRCODE = 'PS002';
    END IF;
    SELECT k INTO unknown FROM jsonb_object_keys(options) k
        WHERE k NOT IN ('per_flow', 'per_key', 'max_units', 'rate', 'burst');
    IF FOUND THEN
        RAISE EXCEPTION 'limit option "%" does not exist', unknown
            USING ERRCODE = 'PS002', HINT = 'The options are per_flow, per_key, max_units, rate and burst.';
    END IF;
    SELECT * INTO l FROM penstock."limit" WHERE name = limit_name FOR UPDATE;
    l := jsonb_populate_record(l, options);
    IF l.rate IS NOT NULL AND l.burst IS NULL THEN
        l.burst := greatest(1, l.rate);
    END IF;
    IF l.rate < 1e-7 THEN
        RAISE EXCEPTION 'rate of limit "%" is below 0.0000001 units a second, one in four months', limit_name
            USING ERRCODE = 'PS002', HINT = 'Give a higher rate, or pause the queue.';
    END IF;
    most := (SELECT coalesce(max(u.units), 1) FROM penstock.limit_use u WHERE u.limit_id = l.id);
    IF options ?| '{rate,burst}' AND penstock.beyond_burst(l, most) THEN
        RAISE EXCEPTION 'burst % of limit "%" is less than the % units that a lock takes', l.burst, limit_name, most
            USING ERRCODE = 'PS002', HINT = 'Give a burst of at least as many units: no entry would ever start.';
    END IF;
    IF l.id IS NOT NULL THEN -- an INSERT that meets the row would draw an id as well
        UPDATE penstock."limit" g SET per_flow = coalesce(l.per_flow, false), per_key = coalesce(l.per_key, false),
                                      max_units = l.max_units, rate = l.rate, burst = l.burst
         WHERE g.id = l.id RETURNING * INTO l;
    ELSE
        INSERT INTO penstock."limit" (name, per_flow, per_key, max_units, rate, burst)
        VALUES (limit_name, coalesce(l.per_flow, false), coalesce(l.per_key, false), l.max_units, l.rate, l.burst)
        RETURNING * INTO l;
    END IF;
    IF options ?| '{per_flow,per_key}' THEN -- other buckets: units taken before are not given back to these
        UPDATE penstock.limit_use SET since = clock_timestamp() WHERE limit_id = l.id;
    END IF;
    PERFORM penstock.limits_changed(l.id);
    PERFORM penstock.audit_log(actor, 'set_limit', limit_name, reason, options);
    RETURN l.id;
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range THEN
        RAISE EXCEPTION 'limit "%" is not valid: %', limit_name, penstock.in_words(SQLERRM)
            USING ERRCODE = 'PS002',
                  HINT = 'Give max_units, or rate and burst (units a second, units), or all three; with per_key rate '
                         'alone, since a key has one holder at a time.';
END $$;

-- use_limit puts a queue under a limit, with so many units for each of its locks; 0 takes it out
-- again. From its commit on no claim ignores the limit: one with a stale set of limits is refused
-- and reads the queue again.
-- Locks: those of lock_all_limits; the row of the limit (FOR UPDATE); SHARE on penstock.lock, by the
-- trigger await_claims, if the use is new; the advisory lock of the limit exclusively, by the
-- trigger count_again; the rows of the queues of the limit.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS008 no such limit, PS002 units below 0 or beyond the burst, PS006 a claim or an
-- ending took longer than 3 seconds.
CREATE OR REPLACE FUNCTION penstock.use_limit(
    queue_name text,
    limit_name text,
    units      integer DEFAULT 1,
    reason     text    DEFAULT NULL,
    actor      text    DEFAULT NULL
) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue_name);
    lim  penstock."limit";
BEGIN
    PERFORM penstock.lock_all_limits();
    IF units IS NULL OR units < 0 THEN
        RAISE EXCEPTION 'units is not at least 0; 0 ends the use' USING ERRCODE = 'PS002';
    END IF;
    SELECT * INTO lim FROM penstock."limit" WHERE name = limit_name FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'limit "%" does not exist', limit_name
            USING ERRCODE = 'PS008', HINT = 'Set the limit first, with max_units or a rate (set_limit).';
    END IF;
    IF penstock.beyond_burst(lim, units) THEN
        RAISE EXCEPTION 'units % is more than limit "%" ever lets through: its burst is %', units, limit_name, lim.burst
            USING ERRCODE = 'PS002',
                  HINT = 'Raise the burst of the limit first (set_limit).';
    END IF;
    IF units > 0 THEN
        INSERT INTO penstock.limit_use (queue_id, limit_id, units, since)
            VALUES (q.id, lim.id, use_limit.units, clock_timestamp())
        ON CONFLICT (queue_id, limit_id) DO UPDATE SET units = excluded.units, since = clock_timestamp();
    END IF;
    PERFORM penstock.limits_changed(lim.id);
    IF units = 0 THEN
        DELETE FROM penstock.limit_use WHERE queue_id = q.id AND limit_id = lim.id;
    END IF;
    PERFORM penstock.audit_log(actor, 'use_limit', queue_name,
                               reason, jsonb_build_object('limit', limit_name, 'units', units));
END $$;

-- limits_changed makes nodes read the queues of a limit again.
-- Locks: the rows of these queues. The caller has the lock of lock_all_limits.
-- Callers: set_limit, use_limit, set_quota.
CREATE OR REPLACE FUNCTION penstock.limits_changed(changed integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE penstock.queue SET version = version + 1
     WHERE id IN (SELECT queue_id FROM penstock.limit_use WHERE limit_id = changed)
$$;

-- limit_own_concurrency keeps a queue's max_concurrent as a limit of its own, with the name
-- queue:NAME.
-- Locks: the row of that limit, then those of await_claims and count_again.
-- Callers: trigger limit_own_concurrency.
CREATE OR REPLACE FUNCTION penstock.limit_own_concurrency() RETURNS trigger
LANGUAGE plpgsql AS $$
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

-- drop_own_limit removes the limit of max_concurrent, with its queue.
-- Locks: the row of that limit.
-- Callers: trigger drop_own_limit.
CREATE OR REPLACE FUNCTION penstock.drop_own_limit() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM penstock."limit" WHERE name = 'queue:' || OLD.name;
    RETURN NULL;
END $$;

-- count_again makes the next claim count a limit that has changed: claims in flight end first, and
-- later ones see the change.
-- Locks: the advisory lock of the limit exclusively; it waits for claims in flight.
-- Callers: trigger count_again.
CREATE OR REPLACE FUNCTION penstock.count_again() RETURNS trigger LANGUAGE plpgsql AS $$
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

-- await_claims waits for claims that do not know that their queue comes under a limit: they must be
-- committed before the limit is counted. Such a claim has written, or will, to penstock.lock, and
-- has that table locked from before its snapshot: none of them is in flight while we have it, and
-- later ones see the limit. A queue that this transaction has made has no claims. The use is weighed where the queue
-- is.
-- Locks: SHARE on penstock.lock, until the transaction ends; it waits 3 s at most. Claims and
-- endings wait meanwhile, so that the transaction is ended after 5 s without a statement.
-- Callers: trigger await_claims.
-- SQLSTATE: PS006 a claim or an ending took longer than 3 seconds; try again when it has ended.
CREATE OR REPLACE FUNCTION penstock.await_claims() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    before text := current_setting('lock_timeout');
BEGIN
    IF EXISTS (SELECT FROM penstock.queue q WHERE q.id = NEW.queue_id AND q.created_at <> transaction_timestamp())
       AND NOT EXISTS (SELECT FROM penstock.limit_use u
                       WHERE u.queue_id = NEW.queue_id AND u.limit_id = NEW.limit_id) THEN
        PERFORM set_config('lock_timeout', '3s', true);
        LOCK TABLE penstock.lock IN SHARE MODE;
        -- claims and endings wait until this commits
        PERFORM set_config('idle_in_transaction_session_timeout', '5s', true);
        PERFORM set_config('lock_timeout', before, true);
    END IF;
    NEW.weighed := (SELECT q.weighed FROM penstock.queue q WHERE q.id = NEW.queue_id);
    RETURN NEW;
EXCEPTION WHEN lock_not_available THEN
    RAISE EXCEPTION 'a claim or an ending has been under way for more than 3 seconds'
        USING ERRCODE = 'PS006',
              HINT = 'Put the queue under the limit again when it has ended: a transaction that writes to '
                     'lock records, in SQL see pg_locks. Commit at once: claims and endings wait for it.';
END $$;

-- set_quota bounds how much an application may use at once, or how fast, over all its queues: a
-- limit with the name application:NAME, whose options it takes. Queues that come to the application
-- later are under it as well. Null options remove it. A quota for many queues waits for claims
-- once, not once a queue (see await_claims).
-- Locks: those of set_limit, then those of use_limit for its queues in order of id.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS002 the application is empty or an option is not valid, PS006 a claim or an ending
-- took longer than 3 seconds.
CREATE OR REPLACE FUNCTION penstock.set_quota(
    application text,
    options     jsonb,
    reason      text  DEFAULT NULL,
    actor       text  DEFAULT NULL
) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    quota text := 'application:' || application;
    added integer[]; -- the queues that come under the quota by this call
BEGIN
    PERFORM penstock.lock_all_limits();
    IF coalesce(application, '') = '' THEN
        RAISE EXCEPTION 'application is empty' USING ERRCODE = 'PS002';
    END IF;
    IF options IS NULL THEN
        PERFORM penstock.limits_changed(l.id) FROM penstock."limit" l WHERE l.name = quota;
        DELETE FROM penstock."limit" l WHERE l.name = quota;
        PERFORM penstock.audit_log(set_quota.actor, 'set_quota', quota, set_quota.reason);
        RETURN;
    END IF;
    PERFORM penstock.set_limit(quota, options, reason, actor);
    WITH fresh AS (
        INSERT INTO penstock.limit_use (queue_id, limit_id, units, since)
        SELECT x.id, l.id, 1, clock_timestamp() FROM penstock.queue x JOIN penstock."limit" l ON l.name = quota
         WHERE x.application = set_quota.application ORDER BY x.id
        ON CONFLICT DO NOTHING
        RETURNING queue_id
    )
    SELECT coalesce(array_agg(f.queue_id), '{}') INTO added FROM fresh f;
    PERFORM penstock.audit_log(set_quota.actor, 'use_limit', x.name, set_quota.reason,
                               jsonb_build_object('limit', quota, 'units', 1))
       FROM penstock.queue x WHERE x.id = ANY (added) ORDER BY x.id;
    UPDATE penstock.queue x SET version = version + 1 WHERE x.id = ANY (added);
END $$;

-- follow_quota moves a queue that changes its application from one quota to the other.
-- Locks: rows of limit_use, then those of await_claims and count_again.
-- Callers: trigger follow_quota.
CREATE OR REPLACE FUNCTION penstock.follow_quota() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM penstock.limit_use u USING penstock."limit" l
     WHERE u.queue_id = NEW.id AND l.id = u.limit_id AND l.name LIKE 'application:%'
       AND l.name <> 'application:' || NEW.application;
    INSERT INTO penstock.limit_use (queue_id, limit_id)
    SELECT NEW.id, l.id FROM penstock."limit" l WHERE l.name = 'application:' || NEW.application
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
