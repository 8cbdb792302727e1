-- Views of the state, for people and programs. A view whose columns change is dropped and made again.

-- entry_status shows the state of each entry. A disabled entry that runs shows as disabled, with the node that runs it.
-- Callers: check_invariants; pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.entry_status AS
SELECT e.id, q.name AS queue,
       penstock.entry_state(e.status, e.priority, l.token IS NOT NULL) AS state,
       e.lock_key, e.flow, e.priority, e.name, e.attempt, e.crashes, e.created_at, e.due_at, e.start_by, e.finish_by,
       l.token, l.node_id, l.claimed_at, coalesce(e.weight, 1::smallint) AS weight, e.queue_id
  FROM penstock.entry e
  JOIN penstock.queue q ON q.id = e.queue_id
  LEFT JOIN penstock.lock l ON l.queue_id = e.queue_id AND l.lock_key = penstock.record_key(e.lock_key, e.id)
                           AND l.last_entry_id >= e.id AND e.status = 'pending';

-- node_status shows each process with its state (live, draining, dead), locks and queues.
-- says_locks is the number of locks in its last heartbeat, locks the number of lock records.
-- Callers: queue_reasons; pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.node_status AS
SELECT n.id, n.name, n.application,
       CASE WHEN n.beat_at + n.lease < clock_timestamp() THEN 'dead' WHEN n.draining_at IS NOT NULL THEN 'draining'
            ELSE 'live' END AS state,
       clock_timestamp() - n.beat_at AS silent_for, n.lease, n.threads, cardinality(n.tokens) AS says_locks,
       (SELECT count(*) FROM penstock.lock l WHERE l.node_id = n.id) AS locks,
       ARRAY(SELECT q.name FROM penstock.queue q WHERE q.id = ANY (n.queue_ids) ORDER BY q.name) AS queues,
       n.started_at, n.beat_at, n.draining_at, n.drain_by, n.drain_reason, n.load, n.kind
  FROM penstock.node n;

-- lock_status shows the lock records with the names of queue and node.
-- Callers: stuck; pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.lock_status AS
SELECT q.name AS queue, l.lock_key, l.flow, l.priority, l.entry_count AS entries, l.token, l.node_id, n.name AS node,
       clock_timestamp() - l.claimed_at AS age, l.claimed_at, l.last_entry_id, l.cost, l.weight, l.queue_id
  FROM penstock.lock l
  JOIN penstock.queue q ON q.id = l.queue_id
  LEFT JOIN penstock.node n ON n.id = l.node_id;

-- blocked_key_status shows the lock keys that are blocked, with the failure that blocks each and the number of
-- entries of the key that wait, counted up to 1,000.
-- Callers: pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.blocked_key_status AS
SELECT q.name AS queue, b.lock_key, b.entry_id, b.class, b.error, b.blocked_at,
       clock_timestamp() - b.blocked_at AS age,
       (SELECT count(*) FROM (SELECT FROM penstock.entry e
                               WHERE e.queue_id = b.queue_id AND e.lock_key = b.lock_key
                                 AND penstock.claimable(e.status, e.priority)
                               LIMIT 1000) w) AS waiting,
       b.queue_id
  FROM penstock.blocked_key b
  JOIN penstock.queue q ON q.id = b.queue_id;

-- stuck shows locks of dead or unknown nodes: recovery takes them within a lease and two seconds. A
-- lock whose token is missing from the list of a live node needs two heartbeats to be seen, and is
-- found by pkg/recovery only.
-- Callers: pkg/doctor; psql.
CREATE OR REPLACE VIEW penstock.stuck AS
SELECT l.queue, l.lock_key, l.token, l.node_id, l.node, l.age, l.entries,
       CASE WHEN n.id IS NULL THEN 'node unknown'
            ELSE 'node dead' END AS reason, clock_timestamp() - n.beat_at AS silent_for, l.queue_id
  FROM penstock.lock_status l
  LEFT JOIN penstock.node n ON n.id = l.node_id
 WHERE n.id IS NULL OR n.beat_at + n.lease < clock_timestamp();

-- queue_status shows the counts and switches of each queue: initial + pending = computing +
-- awaiting_compute.
-- Callers: cmd/penstock; psql.
CREATE OR REPLACE VIEW penstock.queue_status AS
SELECT q.name AS queue, q.kind, q.application, n.initial, n.pending, n.disabled, n.computing,
       n.initial + n.pending - n.computing AS awaiting_compute, n.failed, n.estimated,
       q.paused_at IS NOT NULL AND penstock.paused_until(q.paused_until) AS paused,
       q.paused_by, q.paused_reason, q.paused_until, q.disabled_at IS NOT NULL AS out_of_service, q.capacity,
       q.max_concurrent,
       q.id AS queue_id
  FROM penstock.count_queues() n
  JOIN penstock.queue q ON q.id = n.queue_id;

-- instance_status shows instances, their slots and why no calls are sent to them.
-- Callers: model_slots; pkg/maintenance, pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.instance_status AS
SELECT i.id, i.model, i.server, i.endpoint, i.state, i.slots, h.held, h.doubtful, i.active, i.capacity, i.queued,
       i.draining_at IS NOT NULL AS draining, penstock.usable(i) AS usable,
       coalesce(i.drain_reason, CASE WHEN i.quarantined_until > clock_timestamp() THEN i.quarantine_reason END,
                i.reason) AS reason,
       CASE WHEN i.quarantined_until > clock_timestamp() THEN i.quarantined_until END AS quarantined_until,
       i.checked_at, i.labels
  FROM penstock.instance i
 CROSS JOIN LATERAL (SELECT count(*) AS held, count(s.doubt_at) AS doubtful FROM penstock.slot s
                     WHERE s.instance_id = i.id) h;
COMMENT ON VIEW penstock.instance_status IS 'instances, their slots and why no calls are sent to them';

-- cron_status shows the state of each job: waiting, running, paused, ended (its schedule has no
-- more times), broken. last_fired_at is of the latest nominal time that has fired: times that are caught up behind a
-- run by hand, whose nominal time is that of its request, do not change it.
-- Callers: pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.cron_status AS
SELECT j.name AS job, q.name AS queue,
       CASE WHEN j.problem IS NOT NULL THEN 'broken' WHEN j.entry_id IS NOT NULL
           AND j.fired_at IS NOT NULL THEN 'running'
            WHEN j.paused_at IS NOT NULL AND penstock.paused_until(j.paused_until) THEN 'paused'
            WHEN j.entry_id IS NULL AND j.check_at = 'infinity' THEN 'ended' ELSE 'waiting' END AS state,
       j.spec, j.zone, j.nominal_at, j.due_at, j.entry_id, j.overlap, j.catch_up, j.handled_at, j.problem,
       j.paused_by, j.paused_reason, j.paused_until,
       (SELECT f.fired_at FROM penstock.cron_firing f WHERE f.job_id = j.id ORDER BY f.nominal_at DESC LIMIT 1)
           AS last_fired_at, j.queue_id
  FROM penstock.cron_job j JOIN penstock.queue q ON q.id = j.queue_id;

-- batch_status counts the parts of each batch: exact, from the parts themselves until all of them have ended, then as
-- complete_batch counted them. A batch that completed under an earlier version is counted by its parts.
-- Callers: pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.batch_status AS
SELECT b.id, b.name, q.name AS queue,
       CASE WHEN b.ended_at IS NULL AND b.cancelled_by IS NOT NULL THEN 'cancelling'
            WHEN b.ended_at IS NULL AND b.paused_at IS NOT NULL AND penstock.paused_until(b.paused_until) THEN 'paused'
            ELSE b.status END AS state,
       p.parts, p.waiting, p.queued, p.done, p.bad,
       CASE WHEN p.parts > 0 THEN round(100.0 * (p.done + p.bad) / p.parts, 1) END AS percent,
       b.paused_by, b.paused_reason, b.paused_until, b.cancelled_by, b.cancelled_reason, b.problem, b.result, b.actor,
       b.created_at, b.ended_at, b.queue_id
  FROM penstock.batch b
  JOIN penstock.queue q ON q.id = b.queue_id
 CROSS JOIN LATERAL (
       SELECT coalesce(b.parts, count(*)) AS parts,
              count(*) FILTER (WHERE x.ended_at IS NULL AND x.entry_id IS NULL) AS waiting,
              count(*) FILTER (WHERE x.ended_at IS NULL AND x.entry_id IS NOT NULL) AS queued,
              coalesce(b.parts - b.bad_parts, count(*) FILTER (WHERE x.outcome = 'done')) AS done,
              coalesce(b.bad_parts, count(*) FILTER (WHERE x.outcome <> 'done')) AS bad
         FROM penstock.batch_part x WHERE b.parts IS NULL AND x.batch_id = b.id) p;

-- application_status shows for each application the nodes and threads, locks held, and the units of
-- its quota. The queue of callbacks is left out: it belongs to no application of users, and all
-- nodes serve it.
-- Callers: pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.application_status AS
SELECT a.application, a.queues, n.nodes, n.threads, coalesce(k.locks, 0) AS locks, coalesce(k.cost, 0) AS cost,
       k.oldest,
       l.max_units AS quota_units, coalesce(k.units, 0) AS used_units, l.rate AS quota_rate,
       EXISTS (SELECT FROM penstock.pause p WHERE p.scope = 'application' AND p.value = a.application
               AND penstock.paused_until(p.until)) AS paused
  FROM (SELECT application, count(*) AS queues FROM penstock.queue WHERE kind <> 'webhook' GROUP BY application) a
  LEFT JOIN LATERAL (SELECT count(*) AS nodes, coalesce(sum(x.threads), 0) AS threads FROM penstock.node x
                      WHERE x.application = a.application AND x.beat_at + x.lease > clock_timestamp()) n ON true
  LEFT JOIN LATERAL (SELECT count(*) AS locks, sum(o.weight) AS units, sum(o.cost)::real AS cost,
                     clock_timestamp() - min(o.claimed_at) AS oldest
                       FROM penstock.lock o JOIN penstock.queue q ON q.id = o.queue_id
                           WHERE q.application = a.application) k ON true
  LEFT JOIN penstock."limit" l ON l.name = 'application:' || a.application;

-- retention lists how long rows of each table are kept whose partitions are dropped.
-- Callers: tidy_outcomes, old_partitions; pkg/invalidation; psql.
CREATE OR REPLACE VIEW penstock.retention AS
SELECT 'result' AS parent, 'finished_at' AS by_column, coalesce(max(result_retention), '1 day') AS kept
    FROM penstock.queue
UNION ALL SELECT 'failure', 'failed_at', coalesce(max(failure_retention), '1 day') FROM penstock.queue
UNION ALL SELECT 'sample', 'at', '1 day'
UNION ALL SELECT 'sample_minute', 'at', '30 days'
UNION ALL SELECT 'scale_decision', 'at', '30 days'
UNION ALL SELECT 'model_minute', 'minute', '30 days'
UNION ALL SELECT 'callback_sent', 'at', '7 days';

-- old_partitions lists partitions all of whose rows have passed their retention, and since when.
-- Callers: drop_old_partitions; pkg/maintenance; psql.
CREATE OR REPLACE VIEW penstock.old_partitions AS
SELECT c.relname AS partition, p.parent,
       now() - p.kept - (to_date(right(c.relname, 8), 'YYYYMMDD') + 1)::timestamp AT TIME ZONE 'UTC' AS behind
  FROM penstock.retention p
  JOIN pg_inherits i ON i.inhparent = to_regclass('penstock.' || p.parent)
  JOIN pg_class c ON c.oid = i.inhrelid
 WHERE c.relname ~ ('^' || p.parent || '_[0-9]{8}$')
   AND (to_date(right(c.relname, 8), 'YYYYMMDD') + 1)::timestamp AT TIME ZONE 'UTC' < now() - p.kept;

-- server_status shows values of the database itself that an operator watches: horizon_age is the
-- age in seconds of the oldest transaction of this database, prepared ones included, that keeps vacuum from cleaning.
-- Slots of replication and standbys with hot_standby_feedback have no age in seconds: doctor lists them. dead_tuples
-- are those of ready and lock; notify_usage is from 0 to 1.
-- Callers: pkg/maintenance, pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.server_status AS
SELECT (SELECT count(*)::integer FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
       current_setting('max_connections')::integer AS max_connections,
       coalesce((SELECT extract(epoch FROM max(clock_timestamp() - x.began))::float8 FROM (
                  SELECT a.xact_start FROM pg_stat_activity a
                   WHERE a.datname = current_database() AND a.backend_xmin IS NOT NULL AND a.pid <> pg_backend_pid()
                     AND a.backend_type <> 'walsender' AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v
                             WHERE v.pid = a.pid)
                   UNION ALL
                  SELECT p.prepared FROM pg_prepared_xacts p WHERE p.database = current_database()) x(began)),
                         0) AS horizon_age,
       pg_notification_queue_usage() AS notify_usage,
       coalesce((SELECT sum(n_dead_tup)::bigint FROM pg_stat_user_tables WHERE schemaname = 'penstock' AND relname IN ('ready', 'lock')), 0) AS dead_tuples;

-- slot_contention shows the nodes that hold slots of a model and those that want more; share is the
-- number that each may hold while another goes without.
-- Callers: psql.
CREATE OR REPLACE VIEW penstock.slot_contention AS
SELECT m.name AS model, k.node_id, n.name AS node, count(s.node_id) AS held, h.since AS wants_more_since,
       penstock.slot_share(m.name, k.node_id) AS share
  FROM penstock.model m
 CROSS JOIN LATERAL (
       SELECT s.node_id FROM penstock.followed_slots(m.name) s
        UNION SELECT x.node_id FROM penstock.hungry_nodes(m.name) x) k
  LEFT JOIN penstock.node n ON n.id = k.node_id
  LEFT JOIN penstock.hungry_nodes(m.name) h ON h.node_id = k.node_id
  LEFT JOIN LATERAL penstock.followed_slots(m.name) s ON s.node_id = k.node_id
 GROUP BY m.name, k.node_id, n.name, h.since;
COMMENT ON VIEW penstock.slot_contention IS 'nodes that hold slots of a model and nodes that want more; share is the number that each may hold while another goes without';

-- dead_slots shows the slots that dead nodes still hold: no node follows their calls, and none can
-- lease them.
-- Callers: pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.dead_slots AS
SELECT i.model, i.server, s.node_id, count(*) AS slots,
       min(greatest(s.leased_at, n.beat_at + n.lease)) AS since
  FROM penstock.slot s
  JOIN penstock.instance i ON i.id = s.instance_id
  LEFT JOIN penstock.node n ON n.id = s.node_id
 WHERE s.doubt_at IS NULL AND NOT penstock.node_lives(s.node_id)
 GROUP BY i.model, i.server, s.node_id;
COMMENT ON VIEW penstock.dead_slots IS 'slots held by nodes whose lease has lapsed; penstock.free_dead_slots frees them';

-- usage_hours shows the use of workers by the calls of each queue, model and flow, by the hour in which they ended. A
-- queue that was dropped since is shown as # and its id, with the application that it had.
-- Callers: pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.usage_hours AS
SELECT u.hour, coalesce(q.name, '#' || u.queue_id) AS queue, coalesce(u.application, q.application) AS application,
       u.model, u.flow, u.calls, u.gpu_ms, u.wasted_ms, u.tokens_in, u.tokens_cached, u.tokens_out
  FROM penstock.usage_hour u LEFT JOIN penstock.queue q ON q.id = u.queue_id;

-- usage_status shows the use of each flow: slots are its slot-seconds a second of late, the last
-- minutes counting most, share is its part of its application's. The weight of each flow is looked
-- up: a list of all weights for each row was slow with many weights.
-- Callers: pkg/operator; psql.
CREATE OR REPLACE VIEW penstock.usage_status AS
SELECT u.queue, u.application, u.flow, u.slots,
       u.slots / nullif(sum(u.slots) OVER (PARTITION BY u.application), 0) AS share,
       coalesce((SELECT w.weight FROM penstock.flow_weight w
                  WHERE w.flow = u.flow AND coalesce(w.queue_id, 0) IN (0, u.id)
                      ORDER BY w.queue_id NULLS LAST LIMIT 1), 1) AS weight,
       u.priority AS queue_weight, u.algorithm, u.at
  FROM (SELECT q.id, q.name AS queue, q.application, q.priority, q.algorithm, x.flow, max(x.at) AS at,
               sum(greatest(0, penstock.usage_left(x.service, x.at))) * ln(2::float8) / 300 AS slots
          FROM penstock.queue q JOIN penstock.usage x ON x.queue_id = q.id
         WHERE NOT x.whole
         GROUP BY q.id, q.name, q.application, q.priority, q.algorithm, x.flow) u;
