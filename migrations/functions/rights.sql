-- Rights of the database roles that programs and people log in as, a duty each.
--
-- Tables are the boundary: a function runs with the rights of its caller, and a duty may call any function whose tables
-- it may use. Verbs that write more than their callers may, and those that make or drop tables, run as the owner of the
-- schema (SECURITY DEFINER, with a search path that holds nothing but the system's catalog): duty_functions lists them
-- all. Nothing is granted to PUBLIC.
--
--   leader    the leader: its API and the duties of the elected one
--   node      task nodes: claims, runs and endings; neither queues, models and tokens, nor the audit
--   gateway   the gateway: tokens to check, slots to lease, entries to push and to wait for
--   operator  people, and the command line without a server: the verbs, each with its line of the audit
--   push      producers: push and push_json, and no table
--   read      dashboards and reports: everything but secrets; no changes

-- hold_rights excludes other changes of rights until the transaction ends: two that change the same
-- row of the catalog would fail ("tuple concurrently updated").
-- Locks: the advisory lock of rights.
-- Callers: grant_duty, copy_rights, make_partition, make_output_partitions; the end of this file.
CREATE OR REPLACE FUNCTION penstock.hold_rights() RETURNS void
LANGUAGE sql AS $$ SELECT pg_advisory_xact_lock(hashtextextended('penstock rights', 0)) $$;

-- duty_rights lists the rights of each duty on tables, views and sequences. Partitions have those
-- of their table, and counters of queues (accepted_1, removed_1) those of entry_id_seq. columns is
-- null for a whole relation. UPDATE of one harmless column is what a row lock needs.
-- Callers: wanted_rights.
CREATE OR REPLACE FUNCTION penstock.duty_rights()
    RETURNS TABLE (duty text, relation text, privilege text, columns text[])
LANGUAGE sql IMMUTABLE AS $$
    SELECT d.duty, r.relation, p.privilege, v.columns
      FROM (VALUES
        -- Everything but secrets is read by every duty except push.
        ('leader node gateway operator read',
         'batch batch_part blocked_key bucket cancel_request cron_firing cron_job database_role depth device_group disabled entry entry_harm
          failure flow_weight idempotency inference_version instance leader limit limit_use limit_wait lock model model_outage node
          operation output pause progress throttle queue ready remote_run result retained sample sample_minute
          deployment deployment_state deployment_template scale_state scale_decision setting model_minute model_online cold_start callback_sent
          schema_object schema_version slot slot_demand uniqueness usage usage_hour watch', 'SELECT', NULL::text[]),
        ('leader node gateway operator read',
         'application_status batch_status blocked_key_status cron_status dead_slots entry_status instance_status lock_status node_status
          scale_input scale_share scale_wanted old_partitions queue_status retention server_status slot_contention stuck usage_hours usage_status',
         'SELECT', NULL),
        ('leader node gateway operator read', 'entry_id_seq token_seq term_seq', 'SELECT', NULL),
        ('leader operator read',
         'api_token_id_seq audit_id_seq batch_id_seq cron_job_id_seq instance_id_seq limit_id_seq operation_id_seq
          pause_id_seq queue_id_seq schema_version_id_seq', 'SELECT', NULL),
        ('leader operator read', 'audit', 'SELECT', NULL),
        ('read', 'api_token', 'SELECT',
         '{id,name,scopes,applications,queues,flows,priority_max,rate,burst,gpu_ms,gpu_period,created_at,created_by,expires_at,revoked_at,used_at}'),
        ('read', 'webhook_endpoint', 'SELECT', '{url,old_until,disabled_at,disabled_reason,created_at}'),

        -- Working tables: entries and what belongs to their runs.
        ('leader node gateway operator', 'entry_id_seq', 'USAGE', NULL),
        ('leader node gateway operator', 'entry ready', 'INSERT', NULL),
        ('leader node', 'token_seq', 'USAGE', NULL),
        ('leader node', 'entry ready lock cancel_request idempotency uniqueness progress bucket throttle',
         'UPDATE DELETE', NULL),
        ('leader node', 'lock progress bucket result failure cancel_request blocked_key', 'INSERT', NULL),
        ('leader node operator', 'callback_sent', 'INSERT', NULL),
        ('leader node', 'usage', 'INSERT UPDATE DELETE', NULL),
        ('leader node', 'node', 'INSERT UPDATE DELETE', NULL),
        ('leader node', 'batch_part', 'UPDATE', NULL),
        ('node', 'batch', 'UPDATE', NULL),
        ('leader node operator', 'batch_part', 'INSERT', NULL),
        ('leader node', 'limit', 'UPDATE', '{uncounted_to}'),
        ('leader node', 'limit_wait', 'INSERT UPDATE DELETE', NULL),
        ('node', 'output slot slot_demand remote_run entry_harm usage_hour gateway_fold', 'INSERT UPDATE DELETE', NULL),
        ('leader', 'remote_run', 'UPDATE', '{report,reported_at}'),
        ('node', 'instance', 'UPDATE',
         '{state,reason,active,capacity,queued,kv_usage,checked_at,next_check_at,draining_at,drain_by,drain_reason}'),
        ('node', 'webhook_endpoint', 'SELECT', NULL),
        ('node', 'webhook_endpoint', 'INSERT', '{url,secret,disabled_at,disabled_reason}'),
        ('node', 'webhook_endpoint', 'UPDATE', '{url,disabled_at,disabled_reason}'),

        -- Gateways: their own row, slots, what calls took, and orders to preempt; a row lock of an instance, and the
        -- requests to cancel that come with a heartbeat.
        ('leader node gateway operator read', 'gateway_policy flow_criticality gateway_fold preemption', 'SELECT',
         NULL),
        ('leader gateway operator read', 'gateway_token', 'SELECT', NULL),
        ('gateway', 'node slot slot_demand usage usage_hour gateway_fold preemption', 'INSERT UPDATE DELETE', NULL),
        ('gateway', 'token_seq', 'USAGE', NULL),
        ('leader gateway', 'instance', 'UPDATE', '{next_check_at}'),
        ('gateway', 'cancel_request', 'UPDATE', '{delivered_at}'),
        ('node', 'preemption', 'UPDATE', NULL),
        ('leader gateway operator read', 'gateway_batch', 'SELECT', NULL),
        ('gateway', 'gateway_file gateway_file_chunk gateway_batch_line prediction', 'SELECT', NULL),
        ('gateway', 'gateway_file gateway_file_chunk gateway_batch gateway_batch_line prediction',
         'INSERT UPDATE DELETE', NULL),
        ('gateway', 'webhook_endpoint', 'SELECT', NULL),

        -- Duties of the elected leader.
        ('leader', 'term_seq', 'USAGE', NULL),
        ('leader', 'leader retained sample sample_minute cron_firing scale_state model_minute model_outage',
         'INSERT UPDATE DELETE', NULL),
        ('leader', 'scale_decision', 'INSERT', NULL),
        ('leader', 'deployment_state', 'INSERT UPDATE', NULL),
        ('leader', 'cold_start deployment operation callback_sent scale_decision api_token', 'DELETE', NULL),
        ('gateway', 'model_online', 'INSERT UPDATE', NULL),
        ('leader', 'result failure batch batch_part', 'UPDATE DELETE', NULL),
        ('leader', 'cron_job depth', 'UPDATE', NULL),

        -- What operators write other than by a verb. limit, model, cron_job, queue and deployment: row locks of
        -- conditional requests.
        ('leader gateway operator', 'api_token', 'SELECT', NULL),
        ('leader operator', 'api_token', 'INSERT UPDATE', NULL),
        ('gateway', 'api_token', 'UPDATE', '{used_at}'),
        ('leader operator', 'webhook_endpoint', 'SELECT INSERT UPDATE DELETE', NULL),
        ('leader operator', 'batch', 'INSERT', NULL),
        ('operator', 'batch', 'UPDATE', '{status,items,split_entry_id}'),
        ('leader operator', 'queue', 'UPDATE', '{statements,version}'),
        ('leader', 'queue', 'UPDATE', '{refusal}'),
        ('operator', 'limit', 'UPDATE', '{uncounted_to}'),
        ('leader operator', 'model', 'UPDATE', '{version}'),
        ('leader operator', 'deployment', 'UPDATE', '{changed_at}'),
        ('operator', 'cron_job', 'UPDATE', '{check_at}')) v(duties, relations, privileges, columns)
     CROSS JOIN LATERAL unnest(regexp_split_to_array(v.duties, '[[:space:]]+')) d(duty)
     CROSS JOIN LATERAL unnest(regexp_split_to_array(v.relations, '[[:space:]]+')) r(relation)
     CROSS JOIN LATERAL unnest(regexp_split_to_array(v.privileges, '[[:space:]]+')) p(privilege)
$$;

-- duty_functions lists the functions that run with the rights of the owner, and the duties that may
-- call each. None of them runs a text of its caller as SQL: create_batch, split_batch and
-- set_statements, which parse or run one, have the rights of their caller.
-- Callers: wanted_rights; the end of this file.
CREATE OR REPLACE FUNCTION penstock.duty_functions() RETURNS TABLE (duties text[], name text)
LANGUAGE sql IMMUTABLE AS $$
    SELECT string_to_array(v.duties, ' '), n.name
      FROM (VALUES
        ('leader node gateway operator push', 'push push_json'),
        ('leader node gateway operator', 'push_many'),
        ('leader gateway operator', 'cancel_entry'),
        ('leader operator',
         'alter_cron_job alter_queue audit_log cancel_batch cancel_operation create_cron_job create_queue
          delete_model_override disable_entries disable_entry disable_queue discard_failure drain_instance drain_node
          drop_cron_job drop_queue enable_entries enable_entry enable_queue free_dead_slots pause pause_batch
          pause_cron_job pause_queue register_instance register_model remove_instance remove_model resume resume_batch
          resume_cron_job resume_queue retry_batch retry_failure run_cron_job_now set_device_group set_flow_weight set_limit
          announce_instance set_deployment set_deployment_template remove_deployment set_scale_override set_scale_setting
          cancel_request_batch set_flow_criticality set_gateway_policy set_gateway_token
          set_model_override set_quota start_operation step_operation unblock_key unblock_keys use_limit'),
        ('gateway', 'cancel_batch_lines'),
        ('leader node operator', 'throttle lift_throttle'),
        ('node', 'quarantine_instance recycle_instance sweep_output'),
        ('owner', 'bump_inference_version note_ready'), -- triggers
        ('leader', 'drop_old_partitions end_pauses end_scale_drain expire_instances make_partition make_wanted_deployments
          prune_audit prune_deployments')) v(duties, names)
     CROSS JOIN LATERAL unnest(regexp_split_to_array(v.names, '[[:space:]]+')) n(name)
$$;

-- wanted_rights lists the rights of a duty on the objects of this database, each as GRANT names it:
-- ('TABLE', 'penstock.entry_mail', 'SELECT', NULL). An object and a privilege have one row, with the columns in order,
-- as held_rights has them.
-- Callers: duty_differences, duty_grants.
CREATE OR REPLACE FUNCTION penstock.wanted_rights(duty text)
    RETURNS TABLE (kind text, object text, privilege text, columns text[])
LANGUAGE sql STABLE AS $$
    SELECT 'SCHEMA', 'penstock', 'USAGE', NULL::text[]
    UNION ALL
    SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, format('penstock.%I', c.relname), r.privilege,
           CASE WHEN bool_and(r.columns IS NOT NULL) THEN array_agg(DISTINCT u.name COLLATE "C"
                   ORDER BY u.name COLLATE "C") END
      FROM pg_class c
      LEFT JOIN pg_class top ON top.oid = pg_partition_root(c.oid)
      JOIN penstock.duty_rights() r ON r.duty = wanted_rights.duty
       AND r.relation = CASE WHEN c.relkind = 'S' AND c.relname ~ '^(accepted|removed)_[0-9]+$' THEN 'entry_id_seq'
                             ELSE coalesce(top.relname, c.relname)::text END
      LEFT JOIN LATERAL unnest(r.columns) u(name) ON true
     WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S')
     GROUP BY c.oid, c.relkind, c.relname, r.privilege
    UNION ALL
    SELECT v.kind, v.object, v.privilege, NULL
      FROM (VALUES ('SCHEMA', 'public', 'USAGE'),
                   ('TABLE', 'public.penstock_migration', 'SELECT')) v(kind, object, privilege)
     WHERE wanted_rights.duty <> 'push'
       AND EXISTS (SELECT FROM pg_class c
                    WHERE c.relnamespace = to_regnamespace('public') AND c.relname = 'penstock_migration')
    UNION ALL
    SELECT 'FUNCTION', p.oid::regprocedure::text, 'EXECUTE', NULL
      FROM pg_proc p
      LEFT JOIN penstock.duty_functions() d ON d.name = p.proname
     WHERE p.pronamespace = 'penstock'::regnamespace AND p.prorettype <> 'trigger'::regtype
       AND CASE WHEN d.name IS NULL THEN wanted_rights.duty <> 'push' AND NOT p.prosecdef
                ELSE wanted_rights.duty = ANY (d.duties) END
       AND p.proname NOT IN ('grant_duty', 'copy_rights', 'hold_rights')
$$;

-- held_rights lists the rights on objects of the schema that were granted to a role itself; those
-- of an owner and those that come with membership in another role are left out. A null role stands
-- for PUBLIC.
-- Callers: duty_differences; pkg/doctor.
CREATE OR REPLACE FUNCTION penstock.held_rights(role regrole)
    RETURNS TABLE (kind text, object text, privilege text, columns text[])
LANGUAGE sql STABLE AS $$
    SELECT 'SCHEMA', 'penstock', a.privilege_type, NULL::text[]
      FROM pg_namespace n CROSS JOIN LATERAL aclexplode(n.nspacl) a
     WHERE n.oid = 'penstock'::regnamespace AND a.grantee = coalesce(role::oid, 0) AND a.grantee <> n.nspowner
    UNION ALL
    SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass::text, a.privilege_type, NULL
      FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
     WHERE (c.relnamespace = 'penstock'::regnamespace
            OR c.relnamespace = to_regnamespace('public') AND c.relname = 'penstock_migration')
       AND c.relkind IN ('r', 'p', 'v', 'S') AND a.grantee = coalesce(role::oid, 0) AND a.grantee <> c.relowner
    UNION ALL
    SELECT 'TABLE', c.oid::regclass::text, a.privilege_type, array_agg(t.attname::text ORDER BY t.attname COLLATE "C")
      FROM pg_class c JOIN pg_attribute t ON t.attrelid = c.oid CROSS JOIN LATERAL aclexplode(t.attacl) a
     WHERE c.relnamespace = 'penstock'::regnamespace AND a.grantee = coalesce(role::oid, 0) AND a.grantee <> c.relowner
     GROUP BY 2, 3
    UNION ALL
    SELECT 'FUNCTION', p.oid::regprocedure::text, a.privilege_type, NULL
      FROM pg_proc p CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
     WHERE p.pronamespace = 'penstock'::regnamespace AND a.grantee = coalesce(role::oid, 0) AND a.grantee <> p.proowner
$$;

-- duty_differences compares the rights of a role with those of a duty. wanted is true for a right
-- that is missing, false for one that it has beyond them. A null role stands for PUBLIC, which has
-- no rights. The use of schema public is missing where PUBLIC does not have it either, and never beyond a duty. Nothing
-- here looks a name up in public: a role that may not use it asks as well.
-- Callers: duty_grants, grant_duty; pkg/doctor.
CREATE OR REPLACE FUNCTION penstock.duty_differences(duty text, role regrole)
    RETURNS TABLE (wanted boolean, kind text, object text, privilege text, columns text[])
LANGUAGE sql STABLE SET search_path = pg_catalog AS $$
    WITH want AS MATERIALIZED (
        SELECT w.kind, w.object, w.privilege, w.columns FROM penstock.wanted_rights(duty) w),
    have AS MATERIALIZED (SELECT h.kind, h.object, h.privilege, h.columns FROM penstock.held_rights(role) h)
    SELECT true, m.kind, m.object, m.privilege, m.columns FROM (TABLE want EXCEPT TABLE have) m
     WHERE m.object <> 'public' OR NOT has_schema_privilege(role::oid, to_regnamespace('public')::oid, 'USAGE')
    UNION ALL
    SELECT false, s.kind, s.object, s.privilege, s.columns FROM (TABLE have EXCEPT TABLE want) s
     ORDER BY 1, 2, 3, 4
$$;

-- duty_grants writes the statements that give a role the rights of a duty, whether it has them or
-- not, and take from it what it has beyond them. Running them twice changes nothing.
-- Callers: migrations; psql.
CREATE OR REPLACE FUNCTION penstock.duty_grants(duty text, role text) RETURNS SETOF text
LANGUAGE sql STABLE SET search_path = pg_catalog AS $$
    SELECT format('REVOKE %s%s ON %s %s FROM %I', d.privilege,
                  coalesce(' (' || array_to_string(d.columns, ', ') || ')', ''), d.kind, d.object, role)
      FROM penstock.duty_differences(duty, to_regrole(format('%I', role))) d
     WHERE to_regrole(format('%I', role)) IS NOT NULL AND NOT d.wanted
    UNION ALL
    (SELECT format('GRANT %s ON %s %s TO %I', g.rights, g.kind,
                   string_agg(g.object, ', ' ORDER BY g.object COLLATE "C"), role)
       FROM (SELECT w.kind, w.object, string_agg(w.privilege || coalesce(' (' || array_to_string(w.columns, ', ') || ')', ''), ', '
                                                 ORDER BY w.privilege, w.columns) AS rights
               FROM penstock.wanted_rights(duty) w GROUP BY w.kind, w.object) g
      GROUP BY g.kind, g.rights ORDER BY g.kind, g.rights)
$$;

-- grant_duty gives a role the rights of a duty and records that it has them. Where exactly is set,
-- it takes from it what it has beyond them, which an upgrade leaves alone.
-- Locks: that of hold_rights, the row of the role, then rows of the catalog.
-- Callers: the end of this file; migrations.
-- SQLSTATE: PS002 no such duty, 42704 no such role.
CREATE OR REPLACE FUNCTION penstock.grant_duty(duty text, role text, exactly boolean DEFAULT true) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog AS $$
DECLARE
    grantee regrole := format('%I', role)::regrole;
    d       record;
    n       integer := 0;
BEGIN
    IF duty NOT IN ('leader', 'node', 'gateway', 'operator', 'push', 'read') THEN
        RAISE EXCEPTION 'there is no duty "%"', duty
            USING ERRCODE = 'PS002', HINT = 'The duties are leader, node, gateway, operator, push and read.';
    END IF;
    PERFORM penstock.hold_rights();
    INSERT INTO penstock.database_role AS r (role, duty) VALUES (grant_duty.role, grant_duty.duty)
        ON CONFLICT ON CONSTRAINT database_role_pkey DO UPDATE
            SET duty = excluded.duty, granted_at = excluded.granted_at
     WHERE r.duty <> excluded.duty;
    FOR d IN SELECT * FROM penstock.duty_differences(grant_duty.duty, grantee) x WHERE x.wanted OR exactly LOOP
        EXECUTE format('%s %s%s ON %s %s %s %I', CASE WHEN d.wanted THEN 'GRANT' ELSE 'REVOKE' END, d.privilege,
                       coalesce(' (' || array_to_string(d.columns, ', ') || ')', ''), d.kind, d.object,
                       CASE WHEN d.wanted THEN 'TO' ELSE 'FROM' END, grant_duty.role);
        n := n + 1;
    END LOOP;
    RETURN n;
END $$;

-- copy_rights gives a new table or sequence the rights that others than its owner have on another.
-- Locks: that of hold_rights, then a row of pg_class.
-- Callers: create_queue, alter_queue, make_partition, make_output_partitions.
CREATE OR REPLACE FUNCTION penstock.copy_rights(made text, model text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    a record;
BEGIN
    PERFORM penstock.hold_rights();
    FOR a IN SELECT c.relkind, x.grantee::regrole AS role, string_agg(x.privilege_type, ', ') AS rights
               FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) x
              WHERE c.oid = format('penstock.%I', model)::regclass AND x.grantee <> c.relowner AND x.grantee <> 0
              GROUP BY 1, 2 LOOP
        EXECUTE format('GRANT %s ON %s penstock.%I TO %s', a.rights, CASE a.relkind WHEN 'S' THEN 'SEQUENCE'
                       ELSE 'TABLE' END, made, a.role);
    END LOOP;
END $$;

-- The functions of duty_functions run as the owner, every function is taken from PUBLIC, and roles that were given a
-- duty get rights on what is new, all before the functions that were replaced are seen. A role that was dropped is
-- forgotten.
DO $$
DECLARE
    f regprocedure;
    r record;
BEGIN
    PERFORM penstock.hold_rights();
    FOR f IN SELECT p.oid FROM pg_proc p JOIN penstock.duty_functions() d ON d.name = p.proname
              WHERE p.pronamespace = 'penstock'::regnamespace AND NOT p.prosecdef LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = pg_catalog, pg_temp', f);
    END LOOP;
    FOR f IN SELECT p.oid FROM pg_proc p
              WHERE p.pronamespace = 'penstock'::regnamespace
                AND EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
                            WHERE a.grantee = 0) LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    DELETE FROM penstock.database_role d WHERE to_regrole(format('%I', d.role)) IS NULL;
    FOR r IN SELECT d.role, d.duty FROM penstock.database_role d LOOP
        PERFORM penstock.grant_duty(r.duty, r.role, false);
    END LOOP;
END $$;
