-- +goose Up

-- hold_reasons says what beside the entry and its queue keeps a claim away: limits, and what would run it (threads,
-- instances, slots).
-- +goose StatementBegin
CREATE FUNCTION penstock.hold_reasons(q penstock.queue, e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because('limit', format('%s of %s units of limit "%s" are in use%s', u.used, g.max_units, g.name,
               CASE WHEN g.per_flow THEN format(' by flow "%s"', e.flow) ELSE '' END),
               jsonb_build_object('limit', g.name, 'held', u.used, 'max_units', g.max_units, 'units', m.units))
      FROM penstock.limit_use m
      JOIN penstock."limit" g ON g.id = m.limit_id
     CROSS JOIN LATERAL (SELECT coalesce(sum(o.units), 0) AS used
                           FROM penstock.limit_use o JOIN penstock.lock k ON k.queue_id = o.queue_id
                          WHERE o.limit_id = g.id AND (NOT g.per_flow OR k.flow = e.flow)) u
     WHERE m.queue_id = q.id AND g.name <> 'queue:' || q.name AND u.used + m.units > g.max_units
    UNION ALL
    SELECT penstock.because('rate', format('limit "%s" lets %s units a second through; the next in %s', g.name, g.rate,
               penstock.ago((m.units - b.units) / g.rate * interval '1 second')),
               jsonb_build_object('limit', g.name, 'rate', g.rate, 'units', round(b.units::numeric, 2), 'seconds', round(((m.units - b.units) / g.rate)::numeric, 2)))
      FROM penstock.limit_use m
      JOIN penstock."limit" g ON g.id = m.limit_id
     CROSS JOIN LATERAL (SELECT penstock.bucket_units(g, e.flow) AS units) b
     WHERE m.queue_id = q.id AND g.rate IS NOT NULL AND b.units < m.units
    UNION ALL
    SELECT penstock.because('no_thread', format('all %s processing threads of the nodes that serve the queue are taken', sum(n.threads)),
               jsonb_build_object('threads', sum(n.threads), 'nodes', count(*)))
      FROM penstock.serving(q.id) s JOIN penstock.node n ON n.id = s.id
    HAVING count(*) > 0 AND bool_and(n.threads > 0 AND (SELECT count(*) FROM penstock.lock l WHERE l.node_id = n.id) >= n.threads)
    UNION ALL
    SELECT CASE WHEN i.usable = 0 THEN
               penstock.because('no_instance', format('none of the %s instances of model %s takes calls%s', i.n, q.model, coalesce(': ' || i.why, '')),
                                jsonb_build_object('model', q.model, 'instances', i.n))
           ELSE penstock.because('no_slot', format('%s of %s slots of model %s are held', i.held, i.slots, q.model),
                                jsonb_build_object('model', q.model, 'held', i.held, 'slots', i.slots)) END
      FROM (SELECT count(*) AS n, count(*) FILTER (WHERE x.usable) AS usable, coalesce(sum(x.slots) FILTER (WHERE x.usable), 0) AS slots,
                   coalesce(sum(x.held) FILTER (WHERE x.usable), 0) AS held,
                   string_agg(DISTINCT x.server || ' ' || CASE WHEN x.draining THEN 'drains' ELSE x.state END || coalesce(' (' || nullif(x.reason, '') || ')', ''), ', ') AS why
              FROM penstock.instance_status x WHERE x.model = q.model) i
     WHERE q.model IS NOT NULL AND i.held >= i.slots
$$;
-- +goose StatementEnd

-- explain_entry says in what state an entry is, and why it is not running: the conditions of the claim, one by one.
-- {"id", "queue", "state", "reasons": [{"code", "text", "numbers"}]}. No reason at all: it is next.
-- +goose StatementBegin
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
        UNION ALL SELECT r FROM penstock.queue_reasons(q) r WHERE NOT penstock.runs(e)
        UNION ALL SELECT r FROM penstock.push_back_reasons(e) r
        UNION ALL SELECT r FROM penstock.hold_reasons(q, e) r WHERE NOT penstock.runs(e)
        UNION ALL SELECT r FROM penstock.place_reasons(e) r) all_reasons;
    RETURN jsonb_build_object('id', e.id, 'queue', q.name, 'state', state, 'reasons', coalesce(reasons, '[]'));
END $$;
-- +goose StatementEnd
