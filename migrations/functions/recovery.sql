-- Leases: crashes of nodes that are heard again, the term of the elected leader, and whether a node lives.

-- take_back_crashes uncounts the crashes that were counted when the lease of a node lapsed, if the
-- node is heard again: it was stopped or cut off and did not die. It returns the number of entries;
-- entries that have ended are left out, and those that another transaction has locked are left to the next call: the
-- node waits with its next heartbeat.
-- Locks: the row of the node (FOR NO KEY UPDATE), then the rows of the entries (FOR UPDATE SKIP LOCKED).
-- Callers: pkg/recovery.
CREATE OR REPLACE FUNCTION penstock.take_back_crashes(node bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    n     penstock.node;
    free  bigint[]; -- the entries that no other transaction has locked
    taken bigint;
BEGIN
    SELECT * INTO n FROM penstock.node x
     WHERE x.id = take_back_crashes.node AND x.beat_at + x.lease > clock_timestamp() FOR NO KEY UPDATE;
    IF NOT FOUND OR n.crashed_entries = '{}' THEN
        RETURN 0;
    END IF;
    free := ARRAY(
        SELECT e.id
          FROM (SELECT DISTINCT u.queue_id, u.id FROM unnest(n.crashed_queues, n.crashed_entries) u(queue_id, id)
                ORDER BY u.queue_id, u.id) k
         CROSS JOIN LATERAL (SELECT x.id FROM penstock.entry x WHERE x.queue_id = k.queue_id AND x.id = k.id
                             FOR UPDATE SKIP LOCKED) e);
    UPDATE penstock.entry e
       SET crashes = greatest(e.crashes - k.times, 0),
           history = (SELECT jsonb_agg(h.note ORDER BY h.no)
                        FROM jsonb_array_elements(e.history) WITH ORDINALITY h(note, no)
                       WHERE NOT (h.note->>'class' = 'crash' AND h.note->>'node' = n.id::text))
      FROM (SELECT u.queue_id, u.id, count(*) AS times
              FROM unnest(n.crashed_queues, n.crashed_entries) u(queue_id, id) GROUP BY u.queue_id, u.id) k
     WHERE e.queue_id = k.queue_id AND e.id = k.id AND e.id = ANY (free);
    GET DIAGNOSTICS taken = ROW_COUNT;
    UPDATE penstock.node x
       SET (crashed_queues, crashed_entries) = (
           SELECT coalesce(array_agg(u.queue_id), '{}'), coalesce(array_agg(u.id), '{}')
             FROM unnest(n.crashed_queues, n.crashed_entries) u(queue_id, id)
            WHERE u.id <> ALL (free) AND EXISTS (SELECT FROM penstock.entry e
                                                 WHERE e.queue_id = u.queue_id AND e.id = u.id))
     WHERE x.id = n.id;
    RETURN taken;
END $$;

-- holds_term returns whether the term is the newest of its election and its lease has not lapsed.
-- If so, it stays the newest until this transaction ends: a take-over waits. Statements of elected
-- duties name it: UPDATE ... WHERE (SELECT penstock.holds_term(17)) AND ...
-- Locks: the row of leader (FOR KEY SHARE).
-- Callers: pkg/election.
CREATE OR REPLACE FUNCTION penstock.holds_term(number bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM penstock.leader WHERE term = number AND renewed_at + lease > clock_timestamp() FOR KEY SHARE;
    RETURN FOUND;
END $$;

-- node_lives returns whether a node's lease has not lapsed.
-- Callers: hungry_nodes, equal_share, adopt_slot, orphan_slots, free_slots, free_dead_slots,
-- dead_slots; pkg/inference.
CREATE OR REPLACE FUNCTION penstock.node_lives(bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.node n WHERE n.id = $1 AND n.beat_at + n.lease > clock_timestamp())
$$;
