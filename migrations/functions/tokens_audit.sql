-- The audit: it is only added to, and pruned by retention.

-- actor_name is the name in the audit for the actor of a call: unless one was given, the database
-- user of the session, or the role that it has set. Inside a function that runs as its owner
-- current_user would be that owner.
-- Callers: audit_log, and functions that keep an actor in a row of their own.
CREATE OR REPLACE FUNCTION penstock.actor_name(actor text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT coalesce(nullif($1, ''), nullif(current_setting('role'), 'none'), session_user)
$$;

-- without_passwords replaces the passwords of addresses (scheme://user:password@host) in a JSON
-- value by ***.
-- Callers: audit_log.
CREATE OR REPLACE FUNCTION penstock.without_passwords(detail jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT regexp_replace($1::text, '(://[^/@:[:space:]"]*):[^/@[:space:]"]*@', E'\\1:***@', 'g')::jsonb
$$;

-- audit_log adds a row to the audit, and is the only function that does. The row belongs to the
-- transaction of the change. Passwords in addresses are left out: readers of the audit need not
-- know them. A call without a reason is recorded, with a warning: the API and the CLI require one,
-- and in psql the warning is seen.
-- Locks: none but those of an insert.
-- Callers: every function with an actor; pkg/operator, pkg/webhook.
CREATE OR REPLACE FUNCTION penstock.audit_log(actor text, verb text, object text, reason text,
                                              detail jsonb DEFAULT NULL)
    RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(audit_log.reason, '') = '' THEN
        RAISE WARNING '% of % gives no reason', audit_log.verb, audit_log.object
            USING HINT = 'Give one, for those who read the audit: reason => ''...''.';
    END IF;
    INSERT INTO penstock.audit (actor, verb, object, reason, detail)
    VALUES (penstock.actor_name(audit_log.actor), audit_log.verb, audit_log.object, audit_log.reason,
            CASE WHEN audit_log.detail::text LIKE '%://%' THEN penstock.without_passwords(audit_log.detail)
                 ELSE audit_log.detail END);
END $$;

-- keep_audit refuses changes of rows of the audit. The owner of the table can still drop the
-- trigger, which no trigger can prevent.
-- Locks: none.
-- Callers: triggers audit_stays, audit_goes_by_retention.
-- SQLSTATE: 42501 rows of the audit cannot be changed or deleted.
CREATE OR REPLACE FUNCTION penstock.keep_audit() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit is only ever added to' USING ERRCODE = 'insufficient_privilege';
END $$;

-- record_pruning adds a row to the audit for rows that were deleted from it, by any user: how many
-- rows, up to which time, and the session user. A role that may not insert into the audit cannot
-- delete from it either.
-- Locks: none but those of an insert.
-- Callers: trigger pruning_is_recorded.
CREATE OR REPLACE FUNCTION penstock.record_pruning() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM penstock.audit_log(session_user, 'prune_audit', 'audit', 'retention',
                               jsonb_build_object('rows', count(*), 'before', max(at)))
       FROM gone HAVING count(*) > 0;
    RETURN NULL;
END $$;

-- prune_audit deletes up to `most` rows of whole days that are older than keep, which is 30 days at
-- least, and returns how many. Rows are in order of id, which is nearly that of time.
-- Locks: the rows of the audit.
-- Callers: pkg/maintenance.
CREATE OR REPLACE FUNCTION penstock.prune_audit(keep interval, most integer) RETURNS bigint
LANGUAGE plpgsql AS $$
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

-- gpu_spent returns what the calls of flows, and of flows below them (acme/nightly is below acme), have taken in this
-- hour or day of UTC, in milliseconds of GPU, and the seconds until the next one. Nodes and gateways record a call
-- within seconds of its end, as a whole. The end of the day does not depend on the time zone of the session, in which a
-- day may have 23 or 25 hours. What was recorded while the clock was ahead counts in its own hour or day.
-- Callers: pkg/gateway, pkg/operator.
CREATE OR REPLACE FUNCTION penstock.gpu_spent(flows text[], period text, OUT ms bigint, OUT ends_in double precision)
LANGUAGE sql STABLE AS $$
    SELECT (SELECT coalesce(sum(u.gpu_ms), 0)::bigint
              FROM penstock.usage_hour u
             WHERE u.hour >= p.begins AND u.hour < p.ends
               AND (u.flow = ANY ($1) OR position('/' IN u.flow) > 0 AND EXISTS (
                    SELECT FROM unnest($1) f(flow) WHERE starts_with(u.flow, f.flow || '/')))),
           extract(epoch FROM p.ends - p.now)::float8
      FROM (SELECT n.now, b.begins, (b.begins AT TIME ZONE 'UTC' + ('1 ' || $2)::interval) AT TIME ZONE 'UTC' AS ends
              FROM (SELECT clock_timestamp() AS now) n
             CROSS JOIN LATERAL (SELECT date_trunc($2, n.now, 'UTC') AS begins) b) p
$$;
