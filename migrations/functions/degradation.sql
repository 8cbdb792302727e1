-- Degradation: states without progress, or with less than there should be, while every process runs. The doctor,
-- the leader's metrics with the alerts on them, and /readyz show the same rows; explain names them for one entry.

-- model_slots counts a model's instances and the slots of the usable ones: held slots, of these dead ones (of dead
-- nodes, as in the view dead_slots), and idle ones (in the blocks of live task nodes that hold no lock for them: those
-- nodes claim for them at once). Slots in doubt are neither. why lists the state of each instance.
-- Callers: degraded_models, limit_reasons.
CREATE OR REPLACE FUNCTION penstock.model_slots(
    model           text,
    OUT n           bigint,
    OUT usable      bigint,
    OUT quarantined bigint,
    OUT slots       bigint,
    OUT held        bigint,
    OUT dead        bigint,
    OUT dead_since  timestamptz,
    OUT idle        bigint,
    OUT why         text
)
LANGUAGE sql STABLE AS $$
    SELECT count(*), count(*) FILTER (WHERE x.usable), count(x.quarantined_until),
           coalesce(sum(x.slots) FILTER (WHERE x.usable), 0)::bigint,
           coalesce(sum(x.held) FILTER (WHERE x.usable), 0)::bigint,
           coalesce(sum(d.dead) FILTER (WHERE x.usable), 0)::bigint, min(d.since) FILTER (WHERE x.usable),
           greatest(0, coalesce(sum(d.leased), 0)
                       - (SELECT count(*) FROM penstock.queue q JOIN penstock.lock l ON l.queue_id = q.id
                           WHERE q.model = model_slots.model))::bigint,
           string_agg(x.server || ' '
                      || CASE WHEN x.draining THEN 'drains'
                              WHEN x.quarantined_until IS NOT NULL
                              THEN 'is quarantined for ' || penstock.ago(x.quarantined_until - clock_timestamp())
                              ELSE 'is ' || x.state END
                      || coalesce(' (' || nullif(x.reason, '') || ')', ''), ', ' ORDER BY x.server)
      FROM penstock.instance_status x
     CROSS JOIN LATERAL (
           SELECT count(*) FILTER (WHERE NOT l.lives) AS dead, min(s.leased_at) FILTER (WHERE NOT l.lives) AS since,
                  count(*) FILTER (WHERE l.lives AND o.kind <> 'gateway') AS leased
             FROM penstock.slot s LEFT JOIN penstock.node o ON o.id = s.node_id
            CROSS JOIN LATERAL (SELECT coalesce(o.beat_at + o.lease > clock_timestamp(), false) AS lives) l
            WHERE s.instance_id = x.id AND s.doubt_at IS NULL) d
     WHERE x.model = model_slots.model
$$;

-- awaited returns whether a model is expected to have no instance that takes calls. Where it has instances: each one is
-- being started, for no longer than after which the autoscaler calls a start stuck, or is drained by the autoscaler, or
-- because an operator removed it. Numbers of seconds are held to 1e9: one that is no interval would end the list of
-- degradations of all models.
-- Where it has none: a deployment starts them when there is work; that none comes is for the alerts on the autoscaler.
-- Callers: degraded_models, head_reasons.
CREATE OR REPLACE FUNCTION penstock.awaited(model text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce(
           bool_and(n.draining_at IS NOT NULL AND n.drain_by IN ('autoscaler', 'removed')
                    OR penstock.starts(n) AND n.created_at > clock_timestamp() - interval '1 second' * greatest(
                        (SELECT 3 * percentile_cont(0.95) WITHIN GROUP (ORDER BY least(x.seconds, 1e9))
                           FROM (SELECT c.seconds FROM penstock.cold_start c
                                  WHERE c.model = n.model ORDER BY c.at DESC LIMIT 50) x),
                        (SELECT CASE WHEN jsonb_typeof(d.policy->'stuck_min_seconds') = 'number'
                                     THEN least(greatest((d.policy->>'stuck_min_seconds')::numeric, 600), 1e9) END
                           FROM penstock.deployment d WHERE d.name = n.deployment)::double precision, 600)),
           EXISTS (SELECT FROM penstock.deployment d
                    WHERE d.model = awaited.model AND d.mode IN ('full', 'up-only', 'manual'))
           AND NOT EXISTS (SELECT FROM penstock.setting v WHERE v.name = 'scale.off' AND v.value = 'true'))
      FROM penstock.instance n WHERE n.model = awaited.model
$$;

-- degraded_models lists the models whose slots are held by calls of dead nodes, critical where that
-- is all of them, and the models none of whose instances takes calls, but for first starts and last drains.
-- Callers: degradations.
CREATE OR REPLACE FUNCTION penstock.degraded_models()
RETURNS TABLE (code text, object text, critical boolean, detail text)
LANGUAGE sql STABLE AS $$
    SELECT d.*
      FROM (SELECT DISTINCT i.model FROM penstock.instance i) m
     CROSS JOIN LATERAL penstock.model_slots(m.model) s
     CROSS JOIN LATERAL (
           SELECT 'dead_slots', 'model ' || m.model, s.dead >= s.slots,
                  format('%s of %s slots of model %s are held by calls of dead nodes, the oldest for %s',
                         s.dead, s.slots, m.model, penstock.ago(clock_timestamp() - s.dead_since))
            WHERE s.dead > 0
           UNION ALL
           SELECT CASE WHEN s.quarantined > 0 THEN 'quarantined' ELSE 'no_instance' END, 'model ' || m.model, true,
                  format('none of the %s instances of model %s takes calls: %s', s.n, m.model, s.why)
            WHERE CASE WHEN s.usable = 0 THEN s.quarantined > 0 OR NOT penstock.awaited(m.model) ELSE false END) d
$$;

-- degraded_hints lists the live nodes that receive no hints and find work by polling, as their
-- heartbeats report.
-- Callers: degradations.
CREATE OR REPLACE FUNCTION penstock.degraded_hints()
RETURNS TABLE (code text, object text, critical boolean, detail text)
LANGUAGE sql STABLE AS $$
    SELECT 'no_hints', 'node ' || n.name, false,
           format('node %s hears no hints and finds work by polling: %s', n.name,
                  CASE n.load->>'hints'
                       WHEN 'pooler'
                       THEN 'a pooler in transaction mode carries none, and database.direct_url is not set'
                       ELSE coalesce(nullif(n.load->>'hints_error', ''), 'it has not connected yet') END)
      FROM penstock.node n
     WHERE n.load->>'hints' IN ('lost', 'pooler') AND n.beat_at + n.lease >= clock_timestamp() AND n.draining_at IS NULL
       AND n.started_at < clock_timestamp() - interval '10 seconds'
$$;

-- The forms by the id of the queue, which no program calls.
DROP FUNCTION IF EXISTS penstock.head_entry(integer);
DROP FUNCTION IF EXISTS penstock.head_reasons(integer);

-- head_reasons returns why a head of a queue (queue_heads) does not run, as explain_entry does: all reasons in one
-- text, and whether one of them is intended (by an operator, a rate or a limit) or passes by itself: live nodes run
-- other work with the threads or slots, or instances are being started. It is the first head without such a reason,
-- from the highest priority on and the oldest first, among those that have waited for 25 seconds: what keeps one flow
-- back on purpose says nothing of the others. Flows that are throttled, or that a limit for each flow keeps back, are
-- passed by before, within the 2,000 lanes that queue_heads goes through; of the rest it tries 20 heads, and none
-- behind one that waits for what all wait for.
-- head_age is the age of that head in seconds, null if there is none. A why of null: explain_entry finds no reason.
-- Callers: degraded_queues.
CREATE OR REPLACE FUNCTION penstock.head_reasons(
    q            penstock.queue,
    OUT why      text,
    OUT meant    boolean,
    OUT head_age double precision
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    head     record;
    all_wait boolean;
BEGIN
    FOR head IN SELECT h.entry_id, h.since FROM penstock.queue_heads(q, true) h
                 WHERE h.since < clock_timestamp() - interval '25 seconds' ORDER BY h.priority DESC, h.since LIMIT 20
    LOOP
        BEGIN
            SELECT string_agg(r.text, '; '), coalesce(bool_or(r.own OR r.shared), false),
                   coalesce(bool_or(r.shared), false), extract(epoch FROM clock_timestamp() - head.since)::float8
              INTO why, meant, all_wait, head_age
              FROM (SELECT x->>'text' AS text,
                           x->>'code' IN ('paused', 'disabled', 'limit', 'rate', 'throttled', 'not_due') AS own,
                           x->>'code' IN ('nodes_paused', 'queue_disabled', 'node_limit', 'no_thread')
                           OR x->>'code' = 'no_slot' AND (x->'numbers'->>'followed')::bigint > 0
                           OR x->>'code' = 'no_instance' AND penstock.awaited(x->'numbers'->>'model') AS shared
                      FROM jsonb_array_elements(penstock.explain_entry(head.entry_id)->'reasons') x
                     WHERE x->>'code' NOT IN ('ahead_in_lane', 'ahead_in_key')) r;
        EXCEPTION WHEN SQLSTATE 'PS007' THEN
            CONTINUE; -- it has ended meanwhile, and nothing is kept of it
        END;
        EXIT WHEN all_wait OR NOT meant;
    END LOOP;
END $$;

-- degraded_queues lists the queues without progress: nodes serve them, entries wait, none has left
-- for 25 seconds (by the leader's samples), and no node has run one for longer than ten. The detail is the reasons of a
-- head, of whatever priority. Queues whose heads all wait for what is intended, or passes by itself (head_reasons), are
-- left out. Samples are further apart the longer one takes (pkg/maintenance). The newest is old, and there is no
-- leader, once three times the distance of the two that are compared has passed.
-- Callers: degradations.
CREATE OR REPLACE FUNCTION penstock.degraded_queues()
RETURNS TABLE (code text, object text, critical boolean, detail text)
LANGUAGE sql STABLE AS $$
    WITH still AS MATERIALIZED ( -- the reasons cost most, and few queues get as far
        SELECT q, s.pending, s.computing, s.at, o.at AS before
          FROM penstock.queue q
         CROSS JOIN LATERAL (SELECT (l).* FROM (SELECT penstock.last_sample(q.id, interval '1 hour') AS l) x) s
         CROSS JOIN LATERAL (
               SELECT b.at, b.gone FROM penstock.sample b
                WHERE b.queue_id = q.id AND b.at <= s.at - interval '25 seconds' AND b.at > s.at - interval '1 hour'
                ORDER BY b.at DESC LIMIT 1) o
         WHERE s.at > statement_timestamp() - 3 * (s.at - o.at) AND s.pending > s.computing AND s.blocked IS NULL
           AND s.serving > 0 AND s.gone = o.gone
           AND NOT EXISTS (SELECT FROM penstock.lock l JOIN penstock.node n ON n.id = l.node_id
                            WHERE l.queue_id = q.id AND n.beat_at + n.lease >= clock_timestamp()
                              AND l.claimed_at < clock_timestamp() - interval '10 seconds')
    )
    SELECT 'standstill', 'queue ' || (t.q).name, w.head_age > 60,
           format('%s entries of queue %s wait, the first for %s, and none has left it for %s: %s',
                  t.pending - t.computing, (t.q).name,
                  penstock.ago(w.head_age * interval '1 second'), penstock.ago(t.at - t.before),
                  coalesce(w.why, 'nothing that explain knows keeps them; see the logs of the nodes'))
      FROM still t
     CROSS JOIN LATERAL penstock.head_reasons(t.q) w
     WHERE NOT w.meant
$$;

-- degraded_keys lists the queues of which lock keys are blocked by a failure: their entries wait for an operator. It
-- counts up to 1,000, and names the one of these that is blocked for longest.
-- Callers: degradations.
CREATE OR REPLACE FUNCTION penstock.degraded_keys()
RETURNS TABLE (code text, object text, critical boolean, detail text)
LANGUAGE sql STABLE AS $$
    SELECT 'blocked_keys', 'queue ' || q.name, false,
           format('%s%s lock keys of queue %s are blocked by failures; %s since entry %s failed %s ago: %s',
                  least(c.n, 1000), CASE WHEN c.n > 1000 THEN '+' ELSE '' END, q.name, b.lock_key, b.entry_id,
                  penstock.ago(clock_timestamp() - b.blocked_at), left(b.error, 200))
      FROM penstock.queue q
     CROSS JOIN LATERAL (
           SELECT count(*) AS n FROM (SELECT FROM penstock.blocked_key x WHERE x.queue_id = q.id LIMIT 1001) y) c
     CROSS JOIN LATERAL (SELECT f.* FROM (SELECT * FROM penstock.blocked_key x WHERE x.queue_id = q.id LIMIT 1001) f
                          ORDER BY f.blocked_at LIMIT 1) b
$$;

-- degradations lists all of these, the critical ones first. It reads samples, slots, instances,
-- nodes and locks, heads of each queue without progress, and the cron jobs without an entry: nothing that grows with
-- the backlog. The leader calls it every few seconds.
-- Callers: pkg/doctor, pkg/maintenance, pkg/operator.
CREATE OR REPLACE FUNCTION penstock.degradations()
RETURNS TABLE (code text, object text, critical boolean, detail text)
LANGUAGE sql STABLE AS $$
    SELECT d.* FROM (SELECT * FROM penstock.degraded_models()
                     UNION ALL SELECT * FROM penstock.degraded_hints()
                     UNION ALL SELECT * FROM penstock.degraded_queues()
                     UNION ALL SELECT * FROM penstock.degraded_pushes()
                     UNION ALL SELECT * FROM penstock.degraded_keys()
                     UNION ALL SELECT * FROM penstock.degraded_cron_jobs()) d
     ORDER BY d.critical DESC, d.code, d.object
$$;
