-- +goose Up

-- What a person reads: views, the check of every promise that the tables can show, and why an entry does not run.

-- entry_status shows each entry in the words of the glossary. Disabled goes before computing: a disabled entry that
-- runs shows as disabled, with the node that runs it beside it.
CREATE VIEW penstock.entry_status AS
SELECT e.id, q.name AS queue,
       CASE WHEN e.priority < 0 THEN 'disabled' WHEN e.status = 'initial' THEN 'initial'
            WHEN l.token IS NOT NULL THEN 'computing' ELSE 'pending' END AS state,
       e.lock_key, e.flow, e.priority, e.name, e.attempt, e.crashes, e.created_at, e.due_at, e.start_by, e.finish_by,
       l.token, l.node_id, l.claimed_at, e.queue_id
  FROM penstock.entry e
  JOIN penstock.queue q ON q.id = e.queue_id
  LEFT JOIN penstock.lock l ON l.queue_id = e.queue_id AND l.lock_key = coalesce(e.lock_key, '#' || e.id)
                           AND l.last_entry_id >= e.id AND e.status = 'pending';

CREATE VIEW penstock.node_status AS
SELECT n.id, n.name, n.application,
       CASE WHEN n.beat_at + n.lease < clock_timestamp() THEN 'dead' WHEN n.draining_at IS NOT NULL THEN 'draining' ELSE 'live' END AS state,
       clock_timestamp() - n.beat_at AS silent_for, n.lease, n.threads, cardinality(n.tokens) AS says_locks,
       (SELECT count(*) FROM penstock.lock l WHERE l.node_id = n.id) AS locks,
       ARRAY(SELECT q.name FROM penstock.queue q WHERE q.id = ANY (n.queue_ids) ORDER BY q.name) AS queues,
       n.started_at, n.beat_at, n.draining_at, n.drain_by, n.drain_reason, n.load
  FROM penstock.node n;

CREATE VIEW penstock.lock_status AS
SELECT q.name AS queue, l.lock_key, l.flow, l.priority, l.entry_count AS entries, l.token, l.node_id, n.name AS node,
       clock_timestamp() - l.claimed_at AS age, l.claimed_at, l.last_entry_id, l.cost, l.queue_id
  FROM penstock.lock l
  JOIN penstock.queue q ON q.id = l.queue_id
  LEFT JOIN penstock.node n ON n.id = l.node_id;

-- stuck shows locks that nobody computes any more: recovery takes them within a lease and two seconds. The third way
-- of being stuck, a token that is missing from a live node's list, shows in two heartbeats only (pkg/recovery).
CREATE VIEW penstock.stuck AS
SELECT l.queue, l.lock_key, l.token, l.node_id, l.node, l.age, l.entries,
       CASE WHEN n.id IS NULL THEN 'node unknown' ELSE 'node dead' END AS reason, clock_timestamp() - n.beat_at AS silent_for, l.queue_id
  FROM penstock.lock_status l
  LEFT JOIN penstock.node n ON n.id = l.node_id
 WHERE n.id IS NULL OR n.beat_at + n.lease < clock_timestamp();

-- live_entries estimates the entries of a queue's table from the counters of the statistics collector, and where those
-- were lost in a crash, from what the last vacuum saw.
-- +goose StatementBegin
CREATE FUNCTION penstock.live_entries(queue_name text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(nullif(pg_stat_get_live_tuples(c.oid), 0), greatest(c.reltuples, 0)::bigint)
      FROM pg_class c WHERE c.oid = to_regclass(format('penstock.%I', 'entry_' || queue_name))
$$;
-- +goose StatementEnd

-- indexed_entries estimates the entries in one of a queue's partial indexes: what the last vacuum or analyze saw.
-- +goose StatementBegin
CREATE FUNCTION penstock.indexed_entries(queue_name text, suffix text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT greatest(c.reltuples, 0)::bigint
      FROM pg_class c WHERE c.oid = to_regclass(format('penstock.%I', 'entry_' || queue_name || '_' || suffix))
$$;
-- +goose StatementEnd

-- count_queues counts. Up to 10,000 entries (100,000 failures) of a kind it counts exactly, through an index that holds
-- only them; what goes beyond is an estimate and marked as one. initial and pending leave out what is disabled.
-- The settings keep the plan at walking an index up to the bound, in whatever session it is asked.
-- +goose StatementBegin
CREATE FUNCTION penstock.count_queues()
RETURNS TABLE (queue_id integer, initial bigint, pending bigint, disabled bigint, computing bigint, failed bigint, estimated boolean)
LANGUAGE sql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
    SELECT q.id, s.initial, greatest(s.total - s.disabled - s.initial, computing.n), s.disabled, computing.n, failed.n,
           total.n > 10000 OR failed.n > 100000
      FROM penstock.queue q
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM (SELECT FROM penstock.entry e WHERE e.queue_id = q.id LIMIT 10001) b) total
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM (
           SELECT FROM penstock.entry e WHERE e.queue_id = q.id AND e.status = 'initial' LIMIT 10001) b) initial
     CROSS JOIN LATERAL (SELECT count(*) AS n, count(*) FILTER (WHERE b.status = 'initial') AS initial FROM (
           SELECT e.status FROM penstock.entry e WHERE e.queue_id = q.id AND e.priority = -1 LIMIT 10001) b) disabled
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM (SELECT FROM penstock.failure f WHERE f.queue_id = q.id LIMIT 100001) b) failed
     CROSS JOIN LATERAL (
           -- The locks are as few as the work in flight: each is looked up.
           SELECT coalesce(sum(c.n), 0)::bigint AS n
             FROM penstock.lock l CROSS JOIN LATERAL (
                  SELECT count(*) AS n FROM penstock.entry e
                   WHERE left(l.lock_key, 1) = '#' AND e.queue_id = q.id AND e.id = l.last_entry_id
                     AND e.status = 'pending' AND e.priority >= 0
                  UNION ALL
                  SELECT count(*) FROM penstock.entry e
                   WHERE left(l.lock_key, 1) <> '#' AND e.queue_id = q.id AND e.lock_key = l.lock_key AND e.id <= l.last_entry_id
                     AND e.status = 'pending' AND e.priority >= 0) c
            WHERE l.queue_id = q.id) computing
     CROSS JOIN LATERAL (
           SELECT CASE WHEN total.n <= 10000 THEN total.n ELSE greatest(total.n, penstock.live_entries(q.name)) END AS total,
                  greatest(0, CASE WHEN initial.n <= 10000 THEN initial.n
                                   ELSE greatest(initial.n, penstock.indexed_entries(q.name, 'due_at')) END - disabled.initial) AS initial,
                  CASE WHEN disabled.n <= 10000 THEN disabled.n
                       ELSE greatest(disabled.n, penstock.indexed_entries(q.name, 'disabled')) END AS disabled) s
$$;
-- +goose StatementEnd

-- queue_status: initial + pending = computing + awaiting_compute.
CREATE VIEW penstock.queue_status AS
SELECT q.name AS queue, q.kind, q.application, n.initial, n.pending, n.disabled, n.computing,
       n.initial + n.pending - n.computing AS awaiting_compute, n.failed, n.estimated,
       q.paused_at IS NOT NULL AND coalesce(q.paused_until > clock_timestamp(), true) AS paused,
       q.paused_by, q.paused_reason, q.paused_until, q.disabled_at IS NOT NULL AS out_of_service, q.capacity, q.max_concurrent,
       q.id AS queue_id
  FROM penstock.count_queues() n
  JOIN penstock.queue q ON q.id = n.queue_id;

-- check_invariants lists what must never be and is. It reads everything, in one snapshot: for tests and for doubt, not
-- for a busy database. grace leaves alone locks without entries younger than that (a claim that came too late for an
-- entry holds one for a moment, until its node gives it back).
-- +goose StatementBegin
CREATE FUNCTION penstock.check_invariants(grace interval DEFAULT '0') RETURNS TABLE (invariant text, detail text)
LANGUAGE sql STABLE AS $$
    SELECT 'a pending entry has a ready row or a lock', format('entry %s of queue %s', e.id, e.queue_id)
      FROM penstock.entry e
     WHERE e.status = 'pending' AND e.priority >= 0
       AND NOT EXISTS (SELECT FROM penstock.lock l
                        WHERE l.queue_id = e.queue_id AND l.lock_key = coalesce(e.lock_key, '#' || e.id))
       AND NOT CASE WHEN e.lock_key IS NOT NULL
                    THEN EXISTS (SELECT FROM penstock.ready r WHERE r.queue_id = e.queue_id AND r.lock_key = e.lock_key)
                    ELSE penstock.in_line(e) END
    UNION ALL
    SELECT 'an initial entry has a due time', format('entry %s of queue %s', e.id, e.queue_id)
      FROM penstock.entry e WHERE e.status = 'initial' AND e.due_at IS NULL
    UNION ALL
    SELECT 'a disabled entry keeps its priority', format('entry %s of queue %s', e.id, e.queue_id)
      FROM penstock.entry e WHERE (e.priority < 0) <> (e.enabled_priority IS NOT NULL)
    UNION ALL
    SELECT 'the ready row of a solo entry has an entry', format('entry %s of queue %s at %s', r.entry_id, r.queue_id, r.pos)
      FROM penstock.ready r
     WHERE r.entry_id IS NOT NULL
       AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = r.queue_id AND e.id = r.entry_id AND e.status = 'pending')
    UNION ALL
    SELECT 'a solo entry has one ready row', format('entry %s of queue %s has %s', r.entry_id, r.queue_id, count(*))
      FROM penstock.ready r WHERE r.entry_id IS NOT NULL GROUP BY r.queue_id, r.entry_id HAVING count(*) > 1
    UNION ALL
    SELECT 'a lock has entries', format('key %s of queue %s, token %s', l.lock_key, l.queue_id, l.token)
      FROM penstock.lock l
     WHERE l.claimed_at < clock_timestamp() - grace
       AND NOT CASE WHEN left(l.lock_key, 1) = '#'
                    THEN EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = l.queue_id AND e.id = l.last_entry_id)
                    ELSE EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = l.queue_id AND e.lock_key = l.lock_key) END
    UNION ALL
    SELECT 'a lock has a node', format('key %s of queue %s, token %s, node %s', l.lock_key, l.queue_id, l.token, l.node_id)
      FROM penstock.lock l WHERE NOT EXISTS (SELECT FROM penstock.node n WHERE n.id = l.node_id)
    UNION ALL
    SELECT 'a token is handed out once', format('token %s is on %s locks', l.token, count(*))
      FROM penstock.lock l GROUP BY l.token HAVING count(*) > 1
    UNION ALL
    SELECT 'a token was handed out by the sequence', format('token %s of key %s', l.token, l.lock_key)
      FROM penstock.lock l WHERE l.token > (SELECT coalesce(pg_sequence_last_value('penstock.token_seq'), 0))
    UNION ALL
    -- A later run of an entry has the larger token: its result cannot name an older one than a lock that stands.
    SELECT 'tokens of a key grow', format('entry %s ended under token %s, its lock has %s', r.entry_id, r.token, l.token)
      FROM penstock.lock l JOIN penstock.result r ON r.queue_id = l.queue_id AND l.lock_key = '#' || r.entry_id AND r.token >= l.token
    UNION ALL
    SELECT 'an entry is in one place', format('entry %s of queue %s is in %s', w.id, w.queue_id, string_agg(w.place, ', ' ORDER BY w.place))
      FROM (SELECT queue_id, id, 'entry' AS place FROM penstock.entry
            UNION ALL SELECT queue_id, entry_id, 'result' FROM penstock.result
            UNION ALL SELECT queue_id, entry_id, 'failure' FROM penstock.failure) w
     GROUP BY w.queue_id, w.id HAVING count(*) > 1
    UNION ALL
    -- Each side counted by itself: the first by what is stored, the second by what the locks say.
    SELECT 'initial + pending = computing + awaiting_compute', format('queue %s: %s + %s, %s + %s', i.queue_id, i.initial, i.pending, i.computing, i.awaiting)
      FROM (SELECT e.queue_id,
                   count(*) FILTER (WHERE e.status = 'initial') AS initial, count(*) FILTER (WHERE e.status = 'pending') AS pending,
                   count(*) FILTER (WHERE s.state = 'computing') AS computing,
                   count(*) FILTER (WHERE s.state IN ('initial', 'pending')) AS awaiting
              FROM penstock.entry e LEFT JOIN penstock.entry_status s ON s.queue_id = e.queue_id AND s.id = e.id
             WHERE e.priority >= 0 GROUP BY e.queue_id) i
     WHERE i.initial + i.pending <> i.computing + i.awaiting
$$;
-- +goose StatementEnd

-- outcome_of tells how an entry ended, after it is gone: exactly one row, or none while it lives.
-- +goose StatementBegin
CREATE FUNCTION penstock.outcome_of(bigint)
RETURNS TABLE (queue text, outcome penstock.outcome, ended_at timestamptz, created_at timestamptz, attempt smallint,
               crashes smallint, node_id bigint, token bigint, run_ms bigint, reason text, class text, result jsonb)
LANGUAGE sql STABLE AS $$
    SELECT q.name, o.*
      FROM penstock.queue q CROSS JOIN LATERAL (
           SELECT r.outcome, r.finished_at, r.created_at, r.attempt, NULL::smallint, r.node_id, r.token, r.run_ms, r.reason, NULL::text, r.result
             FROM penstock.result r WHERE r.queue_id = q.id AND r.entry_id = $1
           UNION ALL
           SELECT 'failed', f.failed_at, f.created_at, f.attempt, f.crashes, NULL, NULL, NULL, f.error, f.class, NULL
             FROM penstock.failure f WHERE f.queue_id = q.id AND f.entry_id = $1) o
$$;
-- +goose StatementEnd

-- Why does it not run? ------------------------------------------------------------------------------------------------

-- ago writes a duration as people say it: 41 s, 4 m 5 s, 3 h 20 m, 2 d 4 h.
-- +goose StatementBegin
CREATE FUNCTION penstock.ago(i interval) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN s < 60 THEN s || ' s' WHEN s < 3600 THEN s / 60 || ' m ' || s % 60 || ' s'
                WHEN s < 86400 THEN s / 3600 || ' h ' || s % 3600 / 60 || ' m' ELSE s / 86400 || ' d ' || s % 86400 / 3600 || ' h' END
      FROM (SELECT greatest(0, floor(extract(epoch FROM i)))::bigint AS s) x
$$;
-- +goose StatementEnd

-- because is one reason: a code for programs, a sentence for people, and the numbers in it.
-- +goose StatementBegin
CREATE FUNCTION penstock.because(code text, sentence text, numbers jsonb DEFAULT '{}') RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_build_object('code', code, 'text', sentence, 'numbers', jsonb_strip_nulls(numbers))
$$;
-- +goose StatementEnd

-- serving lists the nodes that would claim from a queue: they list it, live and do not drain.
-- +goose StatementBegin
CREATE FUNCTION penstock.serving(queue integer) RETURNS TABLE (id bigint, name text)
LANGUAGE sql STABLE AS $$
    SELECT n.id, n.name FROM penstock.node n
     WHERE $1 = ANY (n.queue_ids) AND n.draining_at IS NULL AND n.beat_at + n.lease > clock_timestamp()
$$;
-- +goose StatementEnd

-- place_of finds the ready row by which an entry would be claimed first.
-- +goose StatementBegin
CREATE FUNCTION penstock.place_of(e penstock.entry) RETURNS TABLE (priority smallint, flow text, pos bigint)
LANGUAGE sql STABLE AS $$
    (SELECT r.priority, r.flow, r.pos FROM penstock.ready r
      WHERE e.lock_key IS NULL AND r.queue_id = e.queue_id AND r.priority = e.priority AND r.flow = e.flow
        AND r.pos = coalesce(e.pos, e.id) AND r.entry_id = e.id)
    UNION ALL
    (SELECT r.priority, r.flow, r.pos FROM penstock.ready r
      WHERE r.queue_id = e.queue_id AND r.lock_key = e.lock_key ORDER BY r.priority DESC, r.pos LIMIT 1)
$$;
-- +goose StatementEnd

-- queue_reasons says why nothing of a queue is claimed.
-- +goose StatementBegin
CREATE FUNCTION penstock.queue_reasons(q penstock.queue) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because('paused', format('the queue is paused by %s for %s%s%s', q.paused_by, penstock.ago(clock_timestamp() - q.paused_at),
               coalesce(', for ' || penstock.ago(q.paused_until - clock_timestamp()) || ' more', ''), coalesce(': ' || nullif(q.paused_reason, ''), '')),
               jsonb_build_object('by', q.paused_by, 'reason', q.paused_reason, 'since', q.paused_at, 'until', q.paused_until))
     WHERE q.paused_at IS NOT NULL AND coalesce(q.paused_until > clock_timestamp(), true)
    UNION ALL
    SELECT penstock.because('queue_disabled', format('the queue is disabled by %s for %s%s', q.disabled_by,
               penstock.ago(clock_timestamp() - q.disabled_at), coalesce(': ' || nullif(q.disabled_reason, ''), '')),
               jsonb_build_object('by', q.disabled_by, 'reason', q.disabled_reason, 'since', q.disabled_at))
     WHERE q.disabled_at IS NOT NULL
    UNION ALL
    SELECT penstock.because('limit', format('%s of at most %s locks of the queue are held', l.held, q.max_concurrent),
               jsonb_build_object('held', l.held, 'limit', q.max_concurrent))
      FROM (SELECT count(*) AS held FROM penstock.lock WHERE queue_id = q.id) l
     WHERE l.held >= q.max_concurrent
    UNION ALL
    SELECT penstock.because('node_limit', format('each of the %s nodes that serve the queue holds its %s locks', count(*), q.max_concurrent_per_node),
               jsonb_build_object('nodes', count(*), 'limit', q.max_concurrent_per_node))
      FROM penstock.serving(q.id) s
    HAVING count(*) > 0 AND bool_and((SELECT count(*) FROM penstock.lock l WHERE l.queue_id = q.id AND l.node_id = s.id) >= q.max_concurrent_per_node)
    UNION ALL
    SELECT penstock.because('nobody_serves', format('no live node serves the queue (application %s)%s', q.application,
               coalesce('; ' || d.dead || ' that did fell silent', '') || coalesce('; ' || d.draining || ' drain', '')),
               jsonb_build_object('application', q.application, 'dead', d.dead, 'draining', d.draining))
      FROM (SELECT nullif(count(*) FILTER (WHERE state = 'dead'), 0) AS dead, nullif(count(*) FILTER (WHERE state = 'draining'), 0) AS draining
              FROM penstock.node_status s WHERE q.name = ANY (s.queues)) d
     WHERE NOT EXISTS (SELECT FROM penstock.serving(q.id))
$$;
-- +goose StatementEnd

-- entry_reasons says what about the entry itself keeps it from being claimed.
-- +goose StatementBegin
CREATE FUNCTION penstock.entry_reasons(e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because('disabled', 'the entry is disabled' || coalesce(format(', as is every entry with %s %s, by %s%s', d.scope, d.value,
               d.actor, coalesce(': ' || nullif(d.reason, ''), '')), coalesce(format(' by %s%s', a.actor, coalesce(': ' || nullif(a.reason, ''), '')), '')),
               jsonb_build_object('scope', d.scope, 'value', d.value, 'by', coalesce(d.actor, a.actor), 'reason', coalesce(d.reason, a.reason)))
      FROM (SELECT 1) one
      LEFT JOIN LATERAL (SELECT * FROM penstock.disabled x WHERE x.queue_id = e.queue_id
                            AND ((x.scope = 'name' AND x.value = e.name) OR (x.scope = 'lock_key' AND x.value = e.lock_key)) LIMIT 1) d ON true
      LEFT JOIN LATERAL (SELECT * FROM penstock.audit x WHERE x.verb = 'disable_entry' AND x.object = 'entry ' || e.id ORDER BY x.id DESC LIMIT 1) a ON true
     WHERE e.priority < 0
    UNION ALL
    SELECT penstock.because('not_due', format('it is not due for %s%s', penstock.ago(e.due_at - clock_timestamp()),
               CASE WHEN e.attempt > 0 THEN format(', after %s attempts that ended in an error', e.attempt) ELSE '' END),
               jsonb_build_object('due_at', e.due_at, 'seconds', round(extract(epoch FROM e.due_at - clock_timestamp()), 1), 'attempt', e.attempt))
     WHERE e.status = 'initial' AND e.due_at > clock_timestamp()
    UNION ALL
    SELECT penstock.because('promotion_late', format('it came due %s ago and waits for the leader to put it into line', penstock.ago(clock_timestamp() - e.due_at)),
               jsonb_build_object('due_at', e.due_at, 'seconds', round(extract(epoch FROM clock_timestamp() - e.due_at), 1)))
     WHERE e.status = 'initial' AND e.due_at <= clock_timestamp()
    UNION ALL
    SELECT penstock.because('expired', format('its %s passed %s ago; the leader will end it as expired', t.what, penstock.ago(clock_timestamp() - t.at)),
               jsonb_build_object(t.what, t.at, 'seconds', round(extract(epoch FROM clock_timestamp() - t.at), 1)))
      FROM (VALUES ('start_by', e.start_by), ('finish_by', e.finish_by)) t(what, at)
     WHERE t.at <= clock_timestamp() AND NOT penstock.runs(e)
    UNION ALL
    SELECT penstock.because('cancel_requested', format('%s asked %s ago that it be cancelled%s', c.actor, penstock.ago(clock_timestamp() - c.requested_at),
               coalesce(': ' || nullif(c.reason, ''), '')), jsonb_build_object('by', c.actor, 'reason', c.reason, 'delivered_at', c.delivered_at))
      FROM penstock.cancel_request c WHERE c.queue_id = e.queue_id AND c.entry_id = e.id
$$;
-- +goose StatementEnd

-- place_reasons says who has its key and who stands before it: what the claim finds when it comes to the lane.
-- Counts go up to 10,000.
-- +goose StatementBegin
CREATE FUNCTION penstock.place_reasons(e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because(CASE WHEN l.last_entry_id >= e.id THEN 'running' ELSE 'key_held' END,
               CASE WHEN l.last_entry_id >= e.id THEN format('node %s has run it for %s', coalesce(n.name, l.node_id::text), penstock.ago(clock_timestamp() - l.claimed_at))
                    ELSE format('lock key %s is held by entry %s on node %s for %s', e.lock_key, h.id, coalesce(n.name, l.node_id::text),
                                penstock.ago(clock_timestamp() - l.claimed_at)) END
               || CASE WHEN n.id IS NULL OR n.beat_at + n.lease < clock_timestamp() THEN '; that node is dead' ELSE '' END,
               jsonb_build_object('node_id', l.node_id, 'node', n.name, 'token', l.token, 'entry_id', h.id, 'entries', l.entry_count,
                                  'seconds', round(extract(epoch FROM clock_timestamp() - l.claimed_at), 1)))
      FROM penstock.lock l
      LEFT JOIN penstock.node n ON n.id = l.node_id
      LEFT JOIN LATERAL (SELECT x.id FROM penstock.entry x WHERE x.queue_id = e.queue_id AND x.lock_key = e.lock_key
                            AND x.status = 'pending' AND x.priority >= 0 ORDER BY x.id LIMIT 1) h ON true
     WHERE l.queue_id = e.queue_id AND l.lock_key = coalesce(e.lock_key, '#' || e.id) AND e.status = 'pending'
    UNION ALL
    SELECT penstock.because('ahead_in_key', format('%s%s entries of lock key %s come before it', CASE WHEN k.n = 10000 THEN 'at least ' ELSE '' END, k.n, e.lock_key),
               jsonb_build_object('ahead', k.n))
      FROM (SELECT count(*) AS n FROM (SELECT FROM penstock.entry x WHERE x.queue_id = e.queue_id AND x.lock_key = e.lock_key
                AND x.status = 'pending' AND x.priority >= 0 AND x.id < e.id LIMIT 10000) s) k
     WHERE k.n > 0 AND e.status = 'pending' AND e.priority >= 0 AND NOT penstock.runs(e)
    UNION ALL
    SELECT penstock.because('ahead_in_lane', format('%s%s keys stand before it in its lane (priority %s, flow "%s")', CASE WHEN a.n = 10000 THEN 'at least ' ELSE '' END,
               a.n, p.priority, p.flow), jsonb_build_object('ahead', a.n, 'priority', p.priority, 'flow', p.flow))
      FROM penstock.place_of(e) p
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM (SELECT FROM penstock.ready r WHERE r.queue_id = e.queue_id
                AND r.priority = p.priority AND r.flow = p.flow AND r.pos < p.pos LIMIT 10000) s) a
     WHERE a.n > 0 AND e.status = 'pending' AND e.priority >= 0 AND NOT penstock.runs(e)
$$;
-- +goose StatementEnd

-- explain_entry says in what state an entry is, and why it is not running: the conditions of the claim, one by one.
-- {"id", "queue", "state", "reasons": [{"code", "text", "numbers"}]}. No reason at all: it is next.
-- +goose StatementBegin
CREATE FUNCTION penstock.explain_entry(id bigint) RETURNS jsonb
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
        RETURN (SELECT jsonb_build_object('id', explain_entry.id, 'queue', o.queue, 'state', o.outcome, 'reasons', jsonb_build_array(
                    penstock.because('ended', format('it ended %s ago: %s%s', penstock.ago(clock_timestamp() - o.ended_at), o.outcome, coalesce(', ' || o.reason, '')),
                                     jsonb_build_object('outcome', o.outcome, 'ended_at', o.ended_at, 'attempt', o.attempt))))
                  FROM penstock.outcome_of(explain_entry.id) o);
    END IF;
    SELECT * INTO q FROM penstock.queue x WHERE x.id = found_at.queue_id;
    SELECT * INTO e FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = explain_entry.id;
    state := CASE WHEN e.priority < 0 THEN 'disabled' WHEN e.status = 'initial' THEN 'initial' WHEN penstock.runs(e) THEN 'computing' ELSE 'pending' END;
    SELECT jsonb_agg(r) INTO reasons FROM (
        SELECT r FROM penstock.entry_reasons(e) r
        UNION ALL SELECT r FROM penstock.queue_reasons(q) r WHERE state <> 'computing'
        UNION ALL SELECT r FROM penstock.push_back_reasons(e) r
        UNION ALL SELECT r FROM penstock.place_reasons(e) r) all_reasons;
    RETURN jsonb_build_object('id', e.id, 'queue', q.name, 'state', state, 'reasons', coalesce(reasons, '[]'));
END $$;
-- +goose StatementEnd
