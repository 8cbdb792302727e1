-- The brake: the elected leader sets queue.refusal while the disk, the database or a queue without a capacity is nearly
-- full, and clears it when there is room. Pushes read it with the row of their queue, so that it costs them nothing.

-- refuse_push raises the error of a push to a queue whose refusal is set: that the database has nearly no room, or that
-- the queue, which has no capacity of its own, is at the default one. Entries that wait are run meanwhile.
-- Locks: none.
-- Callers: push_many, create_batch.
-- SQLSTATE: PS005 the queue takes no entries; DETAIL is JSON with reason, depth, capacity, drain_rate and
-- retry_after_ms, of which the last is null where nothing drains. For the storage it is a pause of 30 s.
CREATE OR REPLACE FUNCTION penstock.refuse_push(q penstock.queue) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s     record;
    limit_ bigint := (q.refusal->>'capacity')::bigint;
    depth bigint;
    wait  double precision;
BEGIN
    IF limit_ IS NULL THEN
        RAISE EXCEPTION 'queue "%" takes no entries: %; the push is refused whole', q.name, q.refusal->>'text'
            USING ERRCODE = 'PS005',
                  -- Nobody knows when there will be room: it is the pause after which a client may ask again.
                  DETAIL = jsonb_build_object('reason', q.refusal->>'reason', 'retry_after_ms', 30000)::text,
                  HINT = 'Make room, or raise leader.brake: entries that wait are run, and pushes are taken seconds after there is room. '
                         'Repeat entries that were accepted before in a push of their own.';
    END IF;
    SELECT (x.l).* INTO s FROM (SELECT penstock.last_sample(q.id) AS l) x;
    -- The last sample may be older than the refusal and show fewer entries.
    depth := greatest(coalesce(s.initial + s.pending + s.disabled, limit_), (q.refusal->>'release')::bigint);
    wait := CASE WHEN s.out_per_second > coalesce(s.in_per_second, 0)
                 THEN greatest(0, depth - (q.refusal->>'release')::bigint) / (s.out_per_second
                         - coalesce(s.in_per_second, 0)) + 10 END;
    RAISE EXCEPTION 'queue "%" is full: about % entries, and it takes % where it has no capacity of its own', q.name,
        depth, limit_
        USING ERRCODE = 'PS005',
              DETAIL = jsonb_build_object('reason', 'depth', 'depth', depth, 'capacity', limit_,
                                          'drain_rate', coalesce(s.out_per_second, 0),
                                          'retry_after_ms', ceil(wait * 1000))::text,
              HINT = 'Push again after retry_after_ms, or give the queue a capacity: penstock queue alter.';
END $$;

-- degraded_pushes lists why pushes are refused by the brake: once for the storage, and each queue at the default
-- capacity.
-- Callers: degradations.
CREATE OR REPLACE FUNCTION penstock.degraded_pushes()
RETURNS TABLE (code text, object text, critical boolean, detail text)
LANGUAGE sql STABLE AS $$
    SELECT 'storage_full', 'database', true,
           format('%s queues take no entries: %s', count(*), min(q.refusal->>'text'))
      FROM penstock.queue q WHERE q.refusal->>'reason' = 'storage'
    HAVING count(*) > 0
    UNION ALL
    SELECT 'queue_full', 'queue ' || q.name, false,
           format('queue %s takes no entries: it has no capacity of its own and is at the default of %s', q.name,
                  q.refusal->>'capacity')
      FROM penstock.queue q WHERE q.refusal->>'reason' = 'depth'
$$;
