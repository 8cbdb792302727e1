-- The check of every promise that the tables can show.

-- check_invariants lists violations of the invariants of the tables. It reads everything, in one
-- snapshot: for tests and for diagnosis, not for a busy database. grace leaves out locks without
-- entries younger than that (a claim that came too late for an entry holds one for a moment, until
-- its node releases it).
-- Callers: pkg/doctor; psql.
CREATE OR REPLACE FUNCTION penstock.check_invariants(
    grace interval DEFAULT '0'
) RETURNS TABLE (invariant text, detail text)
LANGUAGE sql STABLE AS $$
    SELECT 'a pending entry has a ready row or a lock, or its key is blocked',
           format('entry %s of queue %s', e.id, e.queue_id)
      FROM penstock.entry e
     WHERE penstock.claimable(e.status, e.priority)
       AND NOT EXISTS (SELECT FROM penstock.lock l
                        WHERE l.queue_id = e.queue_id AND l.lock_key = penstock.record_key(e.lock_key, e.id))
       AND NOT EXISTS (SELECT FROM penstock.blocked_key b WHERE b.queue_id = e.queue_id AND b.lock_key = e.lock_key)
       AND NOT CASE WHEN e.lock_key IS NOT NULL
                    THEN EXISTS (SELECT FROM penstock.ready r WHERE r.queue_id = e.queue_id AND r.lock_key = e.lock_key)
                    ELSE penstock.in_line(e) END
    UNION ALL
    SELECT 'an initial entry has a due time', format('entry %s of queue %s', e.id, e.queue_id)
      FROM penstock.entry e
     WHERE e.status = 'initial' AND e.due_at IS NULL
       AND NOT EXISTS (SELECT FROM penstock.cron_job j -- a paused job: its waiting entry is due when it is resumed
                        WHERE j.queue_id = e.queue_id AND j.entry_id = e.id AND j.fired_at IS NULL
                          AND j.paused_at IS NOT NULL)
    UNION ALL
    SELECT 'a disabled entry keeps its priority', format('entry %s of queue %s', e.id, e.queue_id)
      FROM penstock.entry e WHERE (e.priority < 0) <> (e.enabled_priority IS NOT NULL)
    UNION ALL
    SELECT 'the ready row of a solo entry has an entry',
           format('entry %s of queue %s at %s', r.entry_id, r.queue_id, r.pos)
      FROM penstock.ready r
     WHERE r.entry_id IS NOT NULL
       AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = r.queue_id AND e.id = r.entry_id
                       AND e.status = 'pending')
    UNION ALL
    SELECT 'a solo entry has one ready row', format('entry %s of queue %s has %s', r.entry_id, r.queue_id, count(*))
      FROM penstock.ready r WHERE r.entry_id IS NOT NULL GROUP BY r.queue_id, r.entry_id HAVING count(*) > 1
    UNION ALL
    SELECT 'a lock has entries', format('key %s of queue %s, token %s', l.lock_key, l.queue_id, l.token)
      FROM penstock.lock l
     WHERE l.claimed_at < clock_timestamp() - grace
       AND NOT CASE WHEN penstock.is_solo(l.lock_key)
                    THEN EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = l.queue_id AND e.id = l.last_entry_id)
                    ELSE EXISTS (SELECT FROM penstock.entry e
                                 WHERE e.queue_id = l.queue_id AND e.lock_key = l.lock_key) END
    UNION ALL
    SELECT 'a lock has a node', format('key %s of queue %s, token %s, node %s', l.lock_key, l.queue_id, l.token,
                                       l.node_id)
      FROM penstock.lock l WHERE NOT EXISTS (SELECT FROM penstock.node n WHERE n.id = l.node_id)
    UNION ALL
    SELECT 'a solo entry runs under its weight',
           format('entry %s of queue %s has weight %s, its lock %s', e.id, e.queue_id, coalesce(e.weight, 1), l.weight)
      FROM penstock.lock l JOIN penstock.entry e ON e.queue_id = l.queue_id AND e.id = l.last_entry_id
     WHERE penstock.is_solo(l.lock_key) AND l.weight <> coalesce(e.weight, 1)
    UNION ALL
    SELECT 'a token is handed out once', format('token %s is on %s locks', l.token, count(*))
      FROM penstock.lock l GROUP BY l.token HAVING count(*) > 1
    UNION ALL
    SELECT 'a token was handed out by the sequence', format('token %s of key %s', l.token, l.lock_key)
      FROM penstock.lock l WHERE l.token > (SELECT coalesce(pg_sequence_last_value('penstock.token_seq'), 0))
    UNION ALL
    -- A later run of an entry has the larger token: its result cannot name a token above that of an existing lock. It
    -- names the same one between the transaction in which a handler finishes the entry and its node's next settlement.
    SELECT 'tokens of a key grow', format('entry %s ended under token %s, its lock has %s', r.entry_id, r.token,
                                          l.token)
      FROM penstock.lock l JOIN penstock.result r ON r.queue_id = l.queue_id AND l.lock_key = '#' || r.entry_id
          AND r.token > l.token
    UNION ALL
    SELECT 'an entry is in one place', format('entry %s of queue %s is in %s', w.id, w.queue_id,
                                              string_agg(w.place, ', ' ORDER BY w.place))
      FROM (SELECT queue_id, id, 'entry' AS place FROM penstock.entry
            UNION ALL SELECT queue_id, entry_id, 'result' FROM penstock.result
            UNION ALL SELECT queue_id, entry_id, 'failure' FROM penstock.failure) w
     GROUP BY w.queue_id, w.id HAVING count(*) > 1
    UNION ALL
    -- Each side is counted by itself: the first from the stored columns, the second from the locks.
    SELECT 'initial + pending = computing + awaiting_compute',
           format('queue %s: %s + %s, %s + %s', i.queue_id, i.initial, i.pending, i.computing, i.awaiting)
      FROM (SELECT e.queue_id,
                   count(*) FILTER (WHERE e.status = 'initial') AS initial,
                   count(*) FILTER (WHERE e.status = 'pending') AS pending,
                   count(*) FILTER (WHERE s.state = 'computing') AS computing,
                   count(*) FILTER (WHERE s.state IN ('initial', 'pending')) AS awaiting
              FROM penstock.entry e LEFT JOIN penstock.entry_status s ON s.queue_id = e.queue_id AND s.id = e.id
             WHERE e.priority >= 0 GROUP BY e.queue_id) i
     WHERE i.initial + i.pending <> i.computing + i.awaiting
$$;
