-- Why an entry does not run.

-- Reasons -------------------------------------------------------------------------------------------------------------

-- ago writes a duration for people: 41 s, 4 m 5 s, 3 h 20 m, 2 d 4 h.
-- Callers: fail_without_instance, model_slots, degraded_models, degraded_queues, queue_reasons, entry_reasons,
-- position_reasons, throttle_reasons, limit_reasons, pause_reasons, hand_back_reasons, explain_entry;
-- pkg/doctor, pkg/operator.
CREATE OR REPLACE FUNCTION penstock.ago(i interval) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN s < 60 THEN s || ' s' WHEN s < 3600 THEN s / 60 || ' m ' || s % 60 || ' s'
                WHEN s < 86400 THEN s / 3600 || ' h ' || s % 3600 / 60 || ' m'
                ELSE s / 86400 || ' d ' || s % 86400 / 3600 || ' h' END
      FROM (SELECT greatest(0, floor(extract(epoch FROM i)))::bigint AS s) x
$$;

-- because makes one reason: a code for programs, a sentence for people, and the numbers in it.
-- Callers: queue_reasons, entry_reasons, position_reasons, throttle_reasons, limit_reasons,
-- pause_reasons, hand_back_reasons, explain_entry.
CREATE OR REPLACE FUNCTION penstock.because(code text, sentence text, numbers jsonb DEFAULT '{}') RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_build_object('code', code, 'text', sentence, 'numbers', jsonb_strip_nulls(numbers))
$$;

-- serving lists the nodes that claim from a queue: those with the queue in their list, live and not
-- draining.
-- Callers: queue_reasons, limit_reasons, pause_reasons, hand_back_reasons, measure; pkg/doctor.
CREATE OR REPLACE FUNCTION penstock.serving(queue integer) RETURNS TABLE (id bigint, name text)
LANGUAGE sql STABLE AS $$
    SELECT n.id, n.name FROM penstock.node n
     WHERE $1 = ANY (n.queue_ids) AND n.draining_at IS NULL AND n.beat_at + n.lease > clock_timestamp()
$$;

-- position_of returns the ready row by which an entry would be claimed first.
-- Callers: position_reasons.
CREATE OR REPLACE FUNCTION penstock.position_of(
    e penstock.entry
) RETURNS TABLE (priority smallint, flow text, pos bigint)
LANGUAGE sql STABLE AS $$
    (SELECT r.priority, r.flow, r.pos FROM penstock.ready r
      WHERE e.lock_key IS NULL AND r.queue_id = e.queue_id AND r.priority = e.priority AND r.flow = e.flow
        AND r.pos = coalesce(e.pos, e.id) AND r.entry_id = e.id)
    UNION ALL
    (SELECT r.priority, r.flow, r.pos FROM penstock.ready r
      WHERE r.queue_id = e.queue_id AND r.lock_key = e.lock_key ORDER BY r.priority DESC, r.pos LIMIT 1)
$$;

-- queue_reasons returns the reasons why nothing of a queue is claimed, but for pauses of its application or model:
-- these are among pause_reasons.
-- Callers: explain_entry, measure.
CREATE OR REPLACE FUNCTION penstock.queue_reasons(q penstock.queue) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because(s.code,
               format('the queue is %s by %s for %s%s%s',
                      CASE s.code WHEN 'paused' THEN 'paused' ELSE 'disabled' END,
                      s.stopped_by, penstock.ago(clock_timestamp() - s.since),
                      coalesce(', for ' || penstock.ago(s.until - clock_timestamp()) || ' more', ''),
                      coalesce(': ' || nullif(s.reason, ''), '')),
               jsonb_build_object('by', s.stopped_by, 'reason', s.reason, 'since', s.since, 'until', s.until))
      FROM penstock.queue_stops(q) s
     WHERE s.code IN ('paused', 'queue_disabled')
    UNION ALL
    SELECT penstock.because('limit',
               format('%s of at most %s %s of the queue are held', l.held, q.max_concurrent,
                      CASE WHEN q.weighed THEN 'units' ELSE 'locks' END),
               jsonb_build_object('held', l.held, 'limit', q.max_concurrent))
      FROM (SELECT CASE WHEN q.weighed
                        THEN (SELECT coalesce(sum(k.weight), 0) FROM penstock.lock k WHERE k.queue_id = q.id)
                        ELSE (SELECT count(*) FROM penstock.lock k WHERE k.queue_id = q.id) END AS held) l
     WHERE l.held >= q.max_concurrent
    UNION ALL
    SELECT penstock.because('node_limit',
               format('each of the %s nodes that serve the queue holds its %s locks',
                      count(*), q.max_concurrent_per_node),
               jsonb_build_object('nodes', count(*), 'limit', q.max_concurrent_per_node))
      FROM penstock.serving(q.id) s
    HAVING count(*) > 0
       AND bool_and((SELECT count(*) FROM penstock.lock l
                      WHERE l.queue_id = q.id AND l.node_id = s.id) >= q.max_concurrent_per_node)
    UNION ALL
    SELECT penstock.because('no_node',
               CASE WHEN d.live IS NULL THEN format('no live node serves the queue (application %s)', q.application)
                    ELSE format(
                         'no live node serves the queue: %s of application %s live and have no handler for it, since a queue of kind %s needs '
                         || 'statements (penstock.set_statements) or a program with a handler',
                         d.live, q.application, q.kind) END
               || coalesce('; ' || d.dead || ' that did fell silent', '')
               || coalesce('; ' || d.draining || ' drain', ''),
               jsonb_build_object('application', q.application, 'kind', q.kind,
                                  'live', d.live, 'dead', d.dead, 'draining', d.draining))
      FROM (SELECT nullif(count(*) FILTER (WHERE state = 'live' AND s.application = q.application), 0) AS live,
                   nullif(count(*) FILTER (WHERE state = 'dead' AND q.name = ANY (s.queues)), 0) AS dead,
                   nullif(count(*) FILTER (WHERE state = 'draining' AND q.name = ANY (s.queues)), 0) AS draining
              FROM penstock.node_status s) d
     WHERE NOT EXISTS (SELECT FROM penstock.serving(q.id))
$$;

-- entry_reasons returns the reasons of the entry itself that keep it from being claimed.
-- Callers: explain_entry.
CREATE OR REPLACE FUNCTION penstock.entry_reasons(e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because('disabled',
               'the entry is disabled'
               || coalesce(format(', as is every entry with %s %s, by %s%s', d.scope, d.value,
                                  d.actor, coalesce(': ' || nullif(d.reason, ''), '')),
                           coalesce(format(' by %s%s', a.actor, coalesce(': ' || nullif(a.reason, ''), '')), '')),
               jsonb_build_object('scope', d.scope, 'value', d.value,
                                  'by', coalesce(d.actor, a.actor), 'reason', coalesce(d.reason, a.reason)))
      FROM (SELECT 1) one
      LEFT JOIN LATERAL (
           SELECT * FROM penstock.disabled x
            WHERE x.queue_id = e.queue_id
              AND ((x.scope = 'name' AND x.value = e.name) OR (x.scope = 'lock_key' AND x.value = e.lock_key))
            LIMIT 1) d ON true
      LEFT JOIN LATERAL (
           SELECT * FROM penstock.audit x
            WHERE d.scope IS NULL AND x.verb = 'disable_entry' AND x.object = 'entry ' || e.id
            ORDER BY x.id DESC LIMIT 1) a ON true
     WHERE e.priority < 0
    UNION ALL
    SELECT penstock.because('key_blocked',
               format('lock key %s is blocked since entry %s failed %s ago: %s',
                      b.lock_key, b.entry_id, penstock.ago(clock_timestamp() - b.blocked_at), b.error),
               jsonb_build_object('lock_key', b.lock_key, 'entry_id', b.entry_id, 'class', b.class,
                                  'error', b.error, 'since', b.blocked_at))
      FROM penstock.blocked_key b
     WHERE b.queue_id = e.queue_id AND b.lock_key = e.lock_key AND NOT penstock.runs(e)
    UNION ALL
    SELECT penstock.because('not_due',
               format('it is not due for %s%s', penstock.ago(e.due_at - clock_timestamp()),
                      CASE WHEN e.attempt > 0
                           THEN format(', after %s attempts that ended in an error', e.attempt) ELSE '' END),
               jsonb_build_object('due_at', e.due_at,
                                  'seconds', round(extract(epoch FROM e.due_at - clock_timestamp()), 1),
                                  'attempt', e.attempt))
     WHERE e.status = 'initial' AND e.due_at > clock_timestamp()
    UNION ALL
    SELECT penstock.because('promotion_late',
               format('it came due %s ago and waits for the leader to put it into line',
                      penstock.ago(clock_timestamp() - e.due_at)),
               jsonb_build_object('due_at', e.due_at,
                                  'seconds', round(extract(epoch FROM clock_timestamp() - e.due_at), 1)))
     WHERE e.status = 'initial' AND e.due_at <= clock_timestamp()
    UNION ALL
    SELECT penstock.because('expired',
               format('its %s passed %s ago; the leader will end it as expired',
                      t.what, penstock.ago(clock_timestamp() - t.at)),
               jsonb_build_object(t.what, t.at, 'seconds', round(extract(epoch FROM clock_timestamp() - t.at), 1)))
      FROM (VALUES ('start_by', e.start_by), ('finish_by', e.finish_by)) t(what, at)
     WHERE t.at <= clock_timestamp() AND NOT penstock.runs(e)
    UNION ALL
    SELECT penstock.because('cancel_requested',
               format('%s asked %s ago that it be cancelled%s', c.actor,
                      penstock.ago(clock_timestamp() - c.requested_at), coalesce(': ' || nullif(c.reason, ''), '')),
               jsonb_build_object('by', c.actor, 'reason', c.reason, 'delivered_at', c.delivered_at))
      FROM penstock.cancel_request c WHERE c.queue_id = e.queue_id AND c.entry_id = e.id
$$;

-- position_reasons returns which lock covers the entry or its key, which transaction keeps the key from being claimed
-- (share_key), until when the entry's ready row is held back, and how many entries come before it: the state that a
-- claim finds in the lane. Counts go up to 10,000.
-- Callers: explain_entry.
CREATE OR REPLACE FUNCTION penstock.position_reasons(e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because(CASE WHEN l.last_entry_id >= e.id THEN 'running' ELSE 'key_held' END,
               CASE WHEN l.last_entry_id >= e.id
                    THEN format('node %s has run it for %s', coalesce(n.name, l.node_id::text),
                                penstock.ago(clock_timestamp() - l.claimed_at))
                    ELSE format('lock key %s is held by entry %s on node %s for %s', e.lock_key, h.id,
                                coalesce(n.name, l.node_id::text), penstock.ago(clock_timestamp() - l.claimed_at)) END
               || CASE WHEN n.id IS NULL OR n.beat_at + n.lease < clock_timestamp()
                       THEN '; that node is dead' ELSE '' END,
               jsonb_build_object('node_id', l.node_id, 'node', n.name, 'token', l.token, 'entry_id', h.id,
                                  'entries', l.entry_count,
                                  'seconds', round(extract(epoch FROM clock_timestamp() - l.claimed_at), 1)))
      FROM penstock.lock l
      LEFT JOIN penstock.node n ON n.id = l.node_id
      LEFT JOIN LATERAL (
           SELECT x.id FROM penstock.entry x
            WHERE x.queue_id = e.queue_id AND x.lock_key = e.lock_key AND penstock.claimable(x.status, x.priority)
            ORDER BY x.id LIMIT 1) h ON true
     WHERE l.queue_id = e.queue_id AND l.lock_key = penstock.record_key(e.lock_key, e.id) AND e.status = 'pending'
    UNION ALL
    SELECT penstock.because('key_pushed',
               format('%s keeps %s from being claimed until it ends, since it pushed a duplicate under a unique key',
                      CASE WHEN p.pid IS NULL THEN 'a prepared transaction'
                           ELSE format('the transaction of session %s%s', p.pid,
                                       coalesce(', open for ' || penstock.ago(clock_timestamp() - p.since) || ',',
                                                '')) END,
                      CASE WHEN p.all_keys THEN 'the lock keys of the queue' ELSE 'lock key ' || e.lock_key END),
               jsonb_build_object('pid', p.pid, 'since', p.since))
      FROM (SELECT l.pid, a.xact_start AS since, l.mode = 'ExclusiveLock' AS all_keys
              FROM pg_locks l
              LEFT JOIN pg_stat_activity a ON a.pid = l.pid
             CROSS JOIN LATERAL (SELECT (l.classid::bigint << 32) | l.objid::bigint AS hash) k
             WHERE l.locktype = 'advisory' AND l.objsubid = 1
               AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
               -- Claims hold a key exclusively; what waits for all keys keeps claims away as well.
               AND (l.mode = 'ShareLock' AND l.granted
                    AND k.hash = hashtextextended('penstock key ' || e.queue_id || ' ' || e.lock_key, 0)
                    OR l.mode = 'ExclusiveLock' AND k.hash = hashtextextended('penstock keys ' || e.queue_id, 0))
             ORDER BY a.xact_start LIMIT 1) p
     WHERE e.lock_key IS NOT NULL AND penstock.claimable(e.status, e.priority) AND NOT penstock.runs(e)
    UNION ALL
    SELECT penstock.because('delayed',
               format('it was handed back and may be claimed in %s s',
                      round(extract(epoch FROM r.not_before - statement_timestamp()), 1)), -- as ready_now has it
               jsonb_build_object('not_before', r.not_before,
                                  'seconds', round(extract(epoch FROM r.not_before - statement_timestamp()), 1)))
      FROM penstock.position_of(e) p
      JOIN penstock.ready r ON r.queue_id = e.queue_id AND r.priority = p.priority AND r.flow = p.flow AND r.pos = p.pos
     WHERE NOT penstock.ready_now(r.not_before) AND penstock.claimable(e.status, e.priority) AND NOT penstock.runs(e)
    UNION ALL
    SELECT penstock.because('ahead_in_key',
               format('%s%s entries of lock key %s come before it',
                      CASE WHEN k.n = 10000 THEN 'at least ' ELSE '' END, k.n, e.lock_key),
               jsonb_build_object('ahead', k.n))
      FROM (SELECT count(*) AS n
              FROM (SELECT FROM penstock.entry x
                     WHERE x.queue_id = e.queue_id AND x.lock_key = e.lock_key
                       AND penstock.claimable(x.status, x.priority) AND x.id < e.id LIMIT 10000) s) k
     WHERE k.n > 0 AND penstock.claimable(e.status, e.priority) AND NOT penstock.runs(e)
    UNION ALL
    SELECT penstock.because('ahead_in_lane',
               format('%s%s keys stand before it in its lane (priority %s, flow "%s")',
                      CASE WHEN a.n = 10000 THEN 'at least ' ELSE '' END, a.n, p.priority, p.flow),
               jsonb_build_object('ahead', a.n, 'priority', p.priority, 'flow', p.flow))
      FROM penstock.position_of(e) p
     CROSS JOIN LATERAL (
           SELECT count(*) AS n
             FROM (SELECT FROM penstock.ready r
                    WHERE r.queue_id = e.queue_id AND r.priority = p.priority AND r.flow = p.flow AND r.pos < p.pos
                    LIMIT 10000) s) a
     WHERE a.n > 0 AND penstock.claimable(e.status, e.priority) AND NOT penstock.runs(e)
$$;

-- throttle_reasons returns the throttles that keep an entry from being claimed.
-- Callers: explain_entry.
CREATE OR REPLACE FUNCTION penstock.throttle_reasons(e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because('throttled',
               format('%s is throttled for %s more%s',
                      CASE WHEN p.queue_wide THEN 'the queue' ELSE format('flow "%s"', p.flow) END,
                      penstock.ago(p.until - clock_timestamp()), coalesce(': ' || nullif(p.reason, ''), '')),
               jsonb_build_object('until', p.until, 'reason', p.reason,
                                  'seconds', round(extract(epoch FROM p.until - clock_timestamp()), 1)))
      FROM penstock.throttles(e.queue_id, e.flow) p
     WHERE NOT penstock.runs(e)
$$;

-- limit_reasons returns the limits and the missing resources (threads, CPU and memory of the nodes as they report them,
-- instances, slots) that keep an entry from being claimed.
-- Callers: block_reasons.
CREATE OR REPLACE FUNCTION penstock.limit_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
    LANGUAGE sql STABLE
    AS $$
    SELECT penstock.because('limit',
               format('%s of %s units of limit "%s" are in use%s%s%s', u.used, g.max_units, g.name,
                      CASE WHEN g.per_flow THEN format(' by flow "%s"', e.flow) ELSE '' END,
                      CASE WHEN w.kept > 0
                           THEN format(', and %s are kept for lanes that wait longer', w.kept) ELSE '' END,
                      CASE WHEN n.units > g.max_units THEN format('; the entry needs %s, more than there are', n.units)
                           WHEN n.units > 1 THEN format('; the entry needs %s', n.units) ELSE '' END),
               jsonb_strip_nulls(jsonb_build_object('limit', g.name, 'held', u.used, 'max_units', g.max_units,
                                                    'units', n.units, 'weight', e.weight, 'kept', nullif(w.kept, 0))))
      FROM penstock.limit_use m
      JOIN penstock."limit" g ON g.id = m.limit_id
     CROSS JOIN LATERAL (SELECT m.units::bigint * coalesce(e.weight, 1) AS units) n
     CROSS JOIN LATERAL (SELECT coalesce(sum(o.units::bigint * k.weight), 0) AS used
                           FROM penstock.limit_use o JOIN penstock.lock k ON k.queue_id = o.queue_id
                          WHERE o.limit_id = g.id AND (NOT g.per_flow OR k.flow = e.flow)) u
     CROSS JOIN LATERAL (
           SELECT k.units AS kept
             FROM penstock.kept_units(g.id, g.per_flow, q.id, e.priority, e.flow, coalesce(e.weight, 1),
                                      penstock.waits_since(q.id, e.priority, e.flow)) k) w
     WHERE m.queue_id = q.id AND (g.name <> 'queue:' || q.name OR q.weighed AND u.used < g.max_units)
       AND u.used + w.kept + n.units > g.max_units
    UNION ALL
    SELECT penstock.because('rate',
               format('limit "%s" lets %s units a second through; %s', g.name, g.rate,
                      CASE WHEN penstock.beyond_burst(g, m.units)
                           THEN format('the entry needs %s, more than its burst of %s: it never starts',
                                       m.units, g.burst)
                           ELSE 'the next in ' || penstock.ago((m.units - b.units) / g.rate * interval '1 second') END),
               jsonb_strip_nulls(jsonb_build_object(
                   'limit', g.name, 'rate', g.rate, 'units', round(b.units::numeric, 2),
                   'seconds', CASE WHEN NOT penstock.beyond_burst(g, m.units)
                                   THEN round(((m.units - b.units) / g.rate)::numeric, 2) END)))
      FROM penstock.limit_use m
      JOIN penstock."limit" g ON g.id = m.limit_id
     CROSS JOIN LATERAL (
           SELECT penstock.bucket_units(g, CASE WHEN g.per_key THEN e.lock_key ELSE e.flow END) AS units) b
     WHERE m.queue_id = q.id AND g.rate IS NOT NULL AND (e.lock_key IS NOT NULL OR NOT g.per_key) AND b.units < m.units
    UNION ALL
    SELECT penstock.because('no_thread',
               format('all %s processing threads of the nodes that serve the queue are taken', sum(n.threads)),
               jsonb_build_object('threads', sum(n.threads), 'nodes', count(*)))
      FROM penstock.serving(q.id) s JOIN penstock.node n ON n.id = s.id
    HAVING count(*) > 0
       AND bool_and(n.threads > 0 AND (SELECT count(*) FROM penstock.lock l WHERE l.node_id = n.id) >= n.threads)
    UNION ALL
    SELECT penstock.because('no_resources',
               format('none of the %s nodes that serve the queue has the CPU and memory for an entry of it now: %s',
                      count(*), left(string_agg(n.name || ': ' || (n.load->'governor'->'refused'->>q.name), '; '
                                                ORDER BY n.name), 500)),
               jsonb_build_object('nodes', count(*)))
      FROM penstock.serving(q.id) s JOIN penstock.node n ON n.id = s.id
    HAVING count(*) > 0 AND bool_and(coalesce(n.load->'governor'->'refused' ? q.name, false))
    UNION ALL
    SELECT CASE WHEN i.usable = 0 THEN
               penstock.because('no_instance',
                   format('none of the %s instances of model %s takes calls%s%s',
                          i.n, q.model, coalesce(': ' || i.why, ''),
                          CASE WHEN q.on_no_instance = 'fail'
                               THEN format('; the entry fails when that has lasted %s',
                                           penstock.ago(q.no_instance_timeout))
                               ELSE '' END),
                   jsonb_build_object('model', q.model, 'instances', i.n,
                                      'since', (SELECT o.since FROM penstock.model_outage o WHERE o.model = q.model),
                                      'on_no_instance', q.on_no_instance))
           ELSE
               penstock.because('no_slot',
                   format('%s of %s slots of model %s are held%s%s', i.held, i.slots, q.model,
                          coalesce(', ' || nullif(i.dead, 0) || ' of them by calls of dead nodes', ''),
                          coalesce(', ' || nullif(d.doubtful, 0) || ' of them by calls that no node follows', '')),
                   jsonb_build_object('model', q.model, 'held', i.held, 'slots', i.slots,
                                      'dead', nullif(i.dead, 0), 'doubtful', nullif(d.doubtful, 0),
                                      'followed', i.held - i.dead - d.doubtful)) END
      FROM penstock.model_slots(q.model) i
     CROSS JOIN LATERAL (SELECT coalesce(sum(x.doubtful), 0)::bigint AS doubtful FROM penstock.instance_status x
                          WHERE x.model = q.model AND x.usable) d
     WHERE q.model IS NOT NULL AND i.held >= i.slots AND i.idle = 0
$$;

-- pause_reasons returns the pauses that keep an entry from being claimed. A paused name or key
-- shows as disabled.
-- Callers: block_reasons.
CREATE OR REPLACE FUNCTION penstock.pause_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because('paused',
               format('%s "%s" is paused by %s for %s%s', p->>'scope', p->>'value', p->>'actor',
                      penstock.ago(clock_timestamp() - (p->>'at')::timestamptz),
                      coalesce(': ' || nullif(p->>'reason', ''), '')),
               jsonb_build_object('scope', p->'scope', 'value', p->'value', 'by', p->'actor', 'reason', p->'reason',
                                  'since', p->'at', 'left', p->'left'))
      FROM jsonb_array_elements(penstock.queue_pauses(q)) p
     WHERE (p->>'scope' <> 'flow' OR p->>'value' = e.flow) AND coalesce((p->>'left')::float8 > 0, true)
    UNION ALL
    SELECT penstock.because('nodes_paused',
               format('all %s nodes that serve the queue are paused', count(*)),
               jsonb_build_object('nodes', count(*)))
      FROM penstock.serving(q.id) s HAVING count(*) > 0 AND bool_and(penstock.node_paused(s.id, s.name))
    UNION ALL
    SELECT penstock.because('cron_paused',
               format('cron job "%s" is paused by %s%s', j.name, j.paused_by,
                      coalesce(': ' || nullif(j.paused_reason, ''), '')),
               jsonb_build_object('job', j.name, 'by', j.paused_by, 'reason', j.paused_reason, 'until', j.paused_until))
      FROM penstock.cron_job j
     WHERE j.entry_id = e.id AND j.fired_at IS NULL
       AND j.paused_at IS NOT NULL AND penstock.paused_until(j.paused_until)
$$;

-- block_reasons returns the reasons outside the entry and its queue: pauses, limits, missing
-- resources.
-- Callers: explain_entry.
CREATE OR REPLACE FUNCTION penstock.block_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.pause_reasons(q, e) UNION ALL SELECT penstock.limit_reasons(q, e)
$$;

-- hand_back_reasons returns why a handler handed an entry of the queue back last, and which, as live nodes report it
-- with their heartbeats: what a worker answered that took no call, that there is no free slot, or a preemption. The API
-- withholds the reason from clients of other entries.
-- Callers: explain_entry.
CREATE OR REPLACE FUNCTION penstock.hand_back_reasons(q penstock.queue) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because('handed_back',
               format('node %s handed %s back %s ago: %s', h.name,
                      coalesce('entry ' || h.entry_id, 'an entry of the queue'), penstock.ago(h.age), h.reason),
               jsonb_build_object('node', h.name, 'entry_id', h.entry_id, 'reason', h.reason,
                                  'seconds', round(extract(epoch FROM h.age), 1)))
      FROM (SELECT n.name, n.load->'handed_back'->q.name->>'reason' AS reason,
                   (n.load->'handed_back'->q.name->>'entry')::bigint AS entry_id,
                   clock_timestamp() - n.beat_at
                   + (n.load->'handed_back'->q.name->>'seconds')::float8 * interval '1 second' AS age
              FROM penstock.serving(q.id) s JOIN penstock.node n ON n.id = s.id
             WHERE n.load->'handed_back' ? q.name
             ORDER BY age LIMIT 1) h
$$;

-- explain_entry returns the state of an entry, and why it is not running: the conditions of the
-- claim, one by one. {"id", "queue", "state", "reasons": [{"code", "text", "numbers"}]}. No
-- reasons: it is next.
-- Callers: head_reasons; pkg/operator; psql.
-- SQLSTATE: PS007 no such entry.
CREATE OR REPLACE FUNCTION penstock.explain_entry(id bigint) RETURNS jsonb
LANGUAGE plpgsql STABLE AS $$
DECLARE
    found_at record;
    e        penstock.entry;
    q        penstock.queue;
    reasons  jsonb;
    state    text;
BEGIN
    SELECT * INTO found_at FROM penstock.find_entry(explain_entry.id);
    IF found_at.queue_id IS NULL THEN
        PERFORM penstock.living_entry(explain_entry.id); -- raises PS007
    ELSIF found_at.ended IS NOT NULL THEN
        RETURN (SELECT jsonb_build_object(
                    'id', explain_entry.id, 'queue', o.queue, 'state', o.outcome,
                    'reasons', jsonb_build_array(penstock.because('ended',
                        format('it ended %s ago: %s%s', penstock.ago(clock_timestamp() - o.ended_at), o.outcome,
                               coalesce(', ' || o.reason, '')),
                        jsonb_build_object('outcome', o.outcome, 'ended_at', o.ended_at, 'attempt', o.attempt))))
                  FROM penstock.outcome_of(explain_entry.id) o);
    END IF;
    SELECT * INTO q FROM penstock.queue x WHERE x.id = found_at.queue_id;
    SELECT * INTO e FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = explain_entry.id;
    state := penstock.entry_state(e.status, e.priority, penstock.runs(e));
    SELECT jsonb_agg(r) INTO reasons FROM (
        SELECT r FROM penstock.entry_reasons(e) r
        UNION ALL SELECT r FROM penstock.queue_reasons(q) r WHERE NOT penstock.runs(e)
        UNION ALL SELECT r FROM penstock.throttle_reasons(e) r
        UNION ALL SELECT r FROM penstock.block_reasons(q, e) r WHERE NOT penstock.runs(e)
        UNION ALL SELECT r FROM penstock.hand_back_reasons(q) r
                   WHERE penstock.claimable(e.status, e.priority) AND NOT penstock.runs(e)
        UNION ALL SELECT r FROM penstock.position_reasons(e) r) all_reasons;
    RETURN jsonb_build_object('id', e.id, 'queue', q.name, 'state', state, 'reasons', coalesce(reasons, '[]'));
END $$;
