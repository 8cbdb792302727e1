-- Whether a queue takes more entries: the bounds on those of a queue (capacity, capacity_per_slot) and of a flow
-- (capacity_per_flow), how pushes that are open count among them, and models without an instance.

-- queue_capacity returns how many entries that have not ended a queue takes, null for no bound: its capacity, or what
-- the slots of the usable instances of its model allow (capacity_per_slot), whichever is less. A model without slots
-- counts as one slot, so that an entry can wait for its first instance.
-- Callers: admit, feed_batch.
CREATE OR REPLACE FUNCTION penstock.queue_capacity(q penstock.queue) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT least(q.capacity, ceil(q.capacity_per_slot::float8 * CASE WHEN q.capacity_per_slot IS NOT NULL THEN greatest(1, (
           SELECT sum(i.slots) FROM penstock.instance i WHERE i.model = q.model AND penstock.usable(i))) END)::bigint)
$$;

-- admit refuses n entries where the queue's capacity has no headroom for them. The depth is the
-- last count plus the difference of two sequences since, so that producers never meet on a row; a
-- push that rolled back is counted until the next count_depth. A push counts its entries before it
-- compares, so that of several that meet at the capacity none exceeds it. The depth reads too low until the next
-- count_depth by entries that end_entry removed in a transaction that rolled back, and by those that ended before the
-- last count and were told of after it (countRemoved in pkg/invalidation): pushes may exceed the capacity by as many.
-- Locks: those of show_open_pushes, for count_depth.
-- Callers: push_many.
-- SQLSTATE: PS005 the queue is full; DETAIL is JSON with depth, capacity, drain_rate and
-- retry_after_ms.
CREATE OR REPLACE FUNCTION penstock.admit(q penstock.queue, n integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    d        penstock.depth;
    depth    bigint;
    most     bigint := penstock.queue_capacity(q);
    wait     real;
BEGIN
    SELECT * INTO d FROM penstock.depth WHERE queue_id = q.id;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    depth := d.counted + (penstock.counter('accepted', q.id) - d.accepted)
        - (penstock.counter('removed', q.id) - d.removed);
    IF depth + n <= most THEN
        PERFORM penstock.show_open_pushes(ARRAY[penstock.open_pushes_key(q.id)], ARRAY[n]);
        PERFORM penstock.count(q.id, 'accepted', n);
        depth := d.counted + (penstock.counter('accepted', q.id) - d.accepted)
            - (penstock.counter('removed', q.id) - d.removed) - n;
        IF depth + n <= most THEN
            RETURN;
        END IF;
        PERFORM penstock.count(q.id, 'removed', n);
    END IF;
    wait := CASE WHEN d.drain_rate > 0 THEN (depth + n - most) / d.drain_rate END;
    RAISE EXCEPTION 'queue "%" is full: % entries of at most %', q.name, depth, most
        USING ERRCODE = 'PS005',
              DETAIL = jsonb_build_object('depth', depth, 'capacity', most, 'drain_rate', d.drain_rate,
                                          'retry_after_ms', ceil(wait * 1000))::text,
              HINT = 'Push again after retry_after_ms, or raise the capacity of the queue.';
END $$;

-- admit_flows refuses the entries that are kept (keep is not false) of n where their flow has no headroom under
-- capacity_per_flow; a flow has the entries that have not ended, wherever they are. It counts up to the bound by the
-- index of flows. Entries of open pushes are not visible: each push tells of its own by an advisory lock before it
-- reads those of others and then counts, in this order, so that a push that commits meanwhile is counted twice at worst
-- and of several that meet at the bound none exceeds it. The locks are kept by 1,024 hashes of flows, for there may be
-- more flows in a push than places for locks: an open push of another flow of the same hash may be counted.
-- A snapshot that is older than the locks would miss entries that are committed, so that each statement needs its own.
-- Locks: those of show_open_pushes for each hash of a flow.
-- Callers: push_many.
-- SQLSTATE: PS005 a flow of the queue is full; DETAIL is JSON with flow, depth, capacity and retry_after_ms, which
-- assumes that all that leaves the queue is of this flow: there is no room before it. PS006 the transaction is
-- not read committed.
CREATE OR REPLACE FUNCTION penstock.admit_flows(q penstock.queue, flows text[], keep boolean[], n integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    f      record;
    depth  bigint;
    hashes integer[];
    counts integer[]; -- of the entries of this push
    open   bigint[];  -- entries of open pushes of others
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'a push to queue "%", which has capacity_per_flow, needs read committed, and the transaction is %',
                        q.name, current_setting('transaction_isolation')
            USING ERRCODE = 'PS006', HINT = 'Push in a read committed transaction, or take capacity_per_flow from the queue.';
    END IF;
    SELECT array_agg(h.hash ORDER BY h.hash), array_agg(h.n ORDER BY h.hash) INTO hashes, counts
      FROM (SELECT hashtext(coalesce(flows[i], '')) & 1023 AS hash, count(*)::integer AS n
              FROM generate_series(1, n) i WHERE keep[i] IS NOT FALSE GROUP BY 1) h;
    PERFORM penstock.show_open_pushes(ARRAY(SELECT penstock.open_flow_key(q.id, h.hash) FROM unnest(hashes) WITH ORDINALITY h(hash, i) ORDER BY h.i),
                                      counts);
    WITH o AS MATERIALIZED (SELECT * FROM penstock.open_pushes())
    SELECT array_agg(c.entries ORDER BY h.i) INTO open
      FROM unnest(hashes) WITH ORDINALITY h(hash, i)
     CROSS JOIN LATERAL (SELECT coalesce(sum(o.entries), 0) AS entries FROM o
                          WHERE NOT o.mine AND o.key = penstock.open_flow_key(q.id, h.hash)::oid) c;
    FOR f IN SELECT u.flow, open[array_position(hashes, hashtext(u.flow) & 1023)] AS open, count(*) AS n
               FROM (SELECT coalesce(flows[i], '') AS flow FROM generate_series(1, n) i WHERE keep[i] IS NOT FALSE) u
                   GROUP BY 1, 2 ORDER BY 1
    LOOP
        SELECT count(*) INTO depth
          FROM (SELECT FROM penstock.entry e WHERE e.queue_id = q.id AND e.flow = f.flow LIMIT q.capacity_per_flow) e;
        depth := depth + f.open;
        IF depth + f.n > q.capacity_per_flow THEN
            RAISE EXCEPTION 'flow "%" of queue "%" is full: % entries of at most %', f.flow, q.name, depth,
                q.capacity_per_flow
                USING ERRCODE = 'PS005',
                      DETAIL = jsonb_build_object('flow', f.flow, 'depth', depth, 'capacity', q.capacity_per_flow,
                                                  'retry_after_ms',
                                   (SELECT ceil((depth + f.n - q.capacity_per_flow) / nullif((x.l).out_per_second, 0) * 1000)
                                      FROM (SELECT penstock.last_sample(q.id) AS l) x))::text,
                      HINT = 'Push again when entries of the flow have ended, or raise capacity_per_flow of the queue.';
        END IF;
    END LOOP;
END $$;

-- show_open_pushes tells other sessions, until this transaction ends, of entries[i] more entries that it pushed under
-- keys[i]. Advisory locks tell, for others see no rows of this transaction: the first key of a lock is keys[i], and the
-- second has a number of entries and, since a lock that is taken twice shows once, the number of the lock. Such locks
-- are few for the whole server, so that a transaction that pushes one by one takes its next lock for up to a sixteenth
-- of what it has shown, and shows up to a sixteenth too much: 2,500 pushes take 108 locks, one million 207.
-- The setting penstock.open_pushes has the entries that were pushed, those that are shown and the number of locks of
-- each key; a rollback to a savepoint undoes it together with the locks.
-- Locks: advisory locks (shared, try).
-- Callers: admit, admit_flows.
CREATE OR REPLACE FUNCTION penstock.show_open_pushes(keys integer[], entries integer[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    state jsonb := coalesce(nullif(current_setting('penstock.open_pushes', true), ''), '{}');
BEGIN
    WITH known AS (
        SELECT u.key, coalesce((state->u.key::text->>0)::bigint, 0) + u.n AS pushed,
               coalesce((state->u.key::text->>1)::bigint, 0) AS shown,
               coalesce((state->u.key::text->>2)::integer, 0) AS locks
          FROM unnest(keys, entries) u(key, n)
    ), next AS (
        SELECT key, pushed, shown, locks,
               CASE WHEN pushed > shown THEN least(greatest(pushed - shown, shown / 16), 1048575)::integer
                    ELSE 0 END AS more
          FROM known
    ), taken AS MATERIALIZED (
        SELECT key, pushed, shown + more AS shown,
               locks + CASE WHEN more > 0 THEN pg_try_advisory_xact_lock_shared(key, (locks % 2048) << 20 | more)::integer ELSE 0 END AS locks
          FROM next
    )
    SELECT state || jsonb_object_agg(key, jsonb_build_array(pushed, shown, locks)) INTO state FROM taken;
    PERFORM set_config('penstock.open_pushes', state::text, true);
END $$;

-- open_pushes lists what show_open_pushes of any transaction in this database shows: the key, the number of entries,
-- and whether the transaction is that of this session. A prepared transaction is of none.
-- Locks: none.
-- Callers: admit_flows, count_depth.
CREATE OR REPLACE FUNCTION penstock.open_pushes() RETURNS TABLE (key oid, entries bigint, mine boolean)
LANGUAGE plpgsql VOLATILE ROWS 10 AS $$
BEGIN
    RETURN QUERY SELECT l.classid, l.objid::bigint & 1048575, coalesce(l.pid = pg_backend_pid(), false)
                   FROM pg_locks l
                  WHERE l.locktype = 'advisory' AND l.objsubid = 2
                    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
END $$;

-- open_flow_key is the key under which pushes to a queue with capacity_per_flow show their entries, by a hash of the
-- flow.
-- Callers: admit_flows.
CREATE OR REPLACE FUNCTION penstock.open_flow_key(queue_id integer, hash integer) RETURNS integer LANGUAGE sql IMMUTABLE
    AS $$ SELECT hashtext('penstock open flow ' || $1 || ' ' || $2) $$;

-- admit_model refuses a push to a queue whose model has no instance that takes calls, where on_no_instance is fail.
-- Callers: push_many.
-- SQLSTATE: PS013 no instance of the model takes calls; DETAIL is JSON with model.
CREATE OR REPLACE FUNCTION penstock.admit_model(q penstock.queue) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.instance i WHERE i.model = q.model AND penstock.usable(i)) THEN
        RAISE EXCEPTION 'no instance of model "%" takes calls, and queue "%" accepts no entries without one', q.model,
            q.name
            USING ERRCODE = 'PS013', DETAIL = jsonb_build_object('model', q.model)::text,
                  HINT = 'Push again when an instance is there, or set on_no_instance of the queue to wait.';
    END IF;
END $$;

-- open_pushes_key is the key under which pushes to a queue with a capacity show their entries.
-- Callers: admit, count_depth.
CREATE OR REPLACE FUNCTION penstock.open_pushes_key(queue_id integer) RETURNS integer LANGUAGE sql IMMUTABLE
    AS $$ SELECT hashtext('penstock open pushes ' || $1) $$;

-- counter reads a counter of a queue with a capacity. A sequence that was never used is 0.
-- Locks: none.
-- Callers: feed_batch, admit, count_depth.
CREATE OR REPLACE FUNCTION penstock.counter(what text, queue_id integer) RETURNS bigint
LANGUAGE sql AS $$
    SELECT coalesce(pg_sequence_last_value(format('penstock.%I', what || '_' || queue_id)::regclass), 0)
$$;

-- count moves a counter of a queue with a capacity by n. The change is not undone by a rollback.
-- Locks: none: sequences only.
-- Callers: replace_merged, end_entry, return_failure_at, admit; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.count(queue_id integer, what text, n bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM count(nextval(format('penstock.%I', what || '_' || queue_id)::regclass)) FROM generate_series(1, n);
END $$;
