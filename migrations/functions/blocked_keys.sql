-- Lock keys that are blocked: one of their entries failed for good in a queue with on_failure = block_key.
--
-- The transaction of the failure inserts the row of blocked_key (add_failure) and ends the lock. A claim cannot lock
-- the key before that transaction has committed, and reads the entries of the key after its own commit, in a new
-- statement: that one sees the row, and the claim hands the key back without an entry. Endings requeue no key that is
-- blocked. Nothing else knows of blocked keys: pushes, promotions and recovery give their entries ready rows as ever,
-- and the next claim takes these away. So blocking costs the same however many entries the key has, none of them
-- is changed, and they keep their order beside those that are pushed while the key is unblocked.

-- unblock_one unblocks a lock key, after it has requeued the failed entry at its old position if again is set.
-- True: unblocked; false: it was not blocked; null: busy, try again. The ready row that it writes is not lost to
-- a lock that may exist: the node's ending has committed, or waits and sees the key unblocked. Without a lock no claim
-- of the key begins before this commits.
-- Locks: the lock record of the key (FOR KEY SHARE SKIP LOCKED) or its advisory lock (try), the row of blocked_key,
-- then those of return_failure_at.
-- Callers: unblock_key, unblock_keys.
CREATE OR REPLACE FUNCTION penstock.unblock_one(queue integer, key text, again boolean) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    b penstock.blocked_key;
BEGIN
    IF EXISTS (SELECT FROM penstock.lock l WHERE l.queue_id = queue AND l.lock_key = key) THEN
        PERFORM FROM penstock.lock l WHERE l.queue_id = queue AND l.lock_key = key FOR KEY SHARE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
    ELSIF NOT penstock.exclude_claims(queue, key)
       OR EXISTS (SELECT FROM penstock.lock l WHERE l.queue_id = queue AND l.lock_key = key) THEN -- claimed meanwhile
        RETURN NULL;
    END IF;
    SELECT * INTO b FROM penstock.blocked_key x WHERE x.queue_id = queue AND x.lock_key = key FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF again AND penstock.retry_conflict(queue, b.entry_id) IS NOT NULL THEN
        RETURN NULL;
    END IF;
    DELETE FROM penstock.blocked_key x WHERE x.queue_id = queue AND x.lock_key = key;
    IF again THEN
        PERFORM penstock.return_failure_at(queue, b.entry_id, b.entry_id);
    END IF;
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
    SELECT queue, n.priority, n.flow, n.id, key
      FROM (SELECT min(e.id) AS id, max(e.priority) AS priority, (array_agg(e.flow ORDER BY e.id))[1] AS flow
              FROM (SELECT x.id, x.priority, x.flow FROM penstock.entry x
                     WHERE x.queue_id = queue AND x.lock_key = key AND penstock.claimable(x.status, x.priority)
                     ORDER BY x.id LIMIT 100) e) n
     WHERE n.id IS NOT NULL
    -- Written anew: a sweep that found the row dead skips the new version.
    ON CONFLICT (queue_id, priority, flow, pos) DO UPDATE
        SET entry_id = excluded.entry_id, lock_key = excluded.lock_key;
    RETURN true;
END $$;

-- unblock_key unblocks one lock key: its entries run again, in their order. With retry the failed entry is
-- requeued first, at the position that it had. While another session has the key, it tries again for two seconds.
-- Locks: those of unblock_one.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS006 the key is not blocked, is held by another transaction, or its failure is
-- gone.
CREATE OR REPLACE FUNCTION penstock.unblock_key(queue text, lock_key text, retry boolean DEFAULT false,
                                                reason text DEFAULT '',
                                     actor text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q       penstock.queue := penstock.queue_row(queue);
    b       penstock.blocked_key;
    changed boolean;
BEGIN
    PERFORM penstock.need_read_committed();
    SELECT * INTO b FROM penstock.blocked_key x WHERE x.queue_id = q.id AND x.lock_key = unblock_key.lock_key;
    IF FOUND AND retry AND NOT EXISTS (SELECT FROM penstock.failure f
                                       WHERE f.queue_id = q.id AND f.entry_id = b.entry_id)
       AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = q.id AND e.id = b.entry_id) THEN
        RAISE EXCEPTION 'the failure of entry %, which blocks lock key "%", is gone', b.entry_id, lock_key
            USING ERRCODE = 'PS006', HINT = 'It was discarded, or its retention is over. Unblock the key without retry.';
    END IF;
    FOR i IN 1 .. 200 LOOP
        changed := penstock.unblock_one(q.id, unblock_key.lock_key, retry);
        EXIT WHEN changed IS NOT NULL;
        PERFORM pg_sleep(0.01);
    END LOOP;
    IF changed IS NULL THEN
        RAISE EXCEPTION 'lock key "%" is held by another transaction', lock_key USING ERRCODE = 'PS006',
            HINT = 'Try again.';
    ELSIF NOT changed THEN
        RAISE EXCEPTION 'lock key "%" of queue "%" is not blocked', lock_key, q.name
            USING ERRCODE = 'PS006', HINT = 'The list of blocked keys has those that are (blocked_key_status).';
    END IF;
    PERFORM penstock.audit_log(unblock_key.actor, 'unblock_key', q.name, unblock_key.reason,
                               jsonb_build_object('lock_key', unblock_key.lock_key, 'entry_id', b.entry_id,
                                                  'retry', retry));
END $$;

-- unblock_keys unblocks up to `most` lock keys of a queue, at most 1,000 (advisory locks are few for the whole
-- server), in order of key, and returns how many. With retry each failed entry that is still kept is requeued. A key
-- that another session has is passed over: call it again until penstock.blocked_key has no more.
-- Locks: for each key those of unblock_one.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS006 the transaction is not read committed.
CREATE OR REPLACE FUNCTION penstock.unblock_keys(queue text, retry boolean DEFAULT false, most integer DEFAULT 1000,
                                                 reason text DEFAULT '',
                                      actor text DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue);
    key  text;
    done integer := 0;
BEGIN
    PERFORM penstock.need_read_committed();
    FOR key IN SELECT b.lock_key FROM penstock.blocked_key b WHERE b.queue_id = q.id ORDER BY b.lock_key
               LIMIT least(most, 1000) LOOP
        done := done + coalesce(penstock.unblock_one(q.id, key, retry), false)::integer;
    END LOOP;
    PERFORM penstock.audit_log(unblock_keys.actor, 'unblock_keys', q.name, unblock_keys.reason,
                               jsonb_build_object('keys', done, 'retry', retry));
    RETURN done;
END $$;

-- drop_blocked_ready deletes the ready rows of a lock key if it is blocked, as a claim that meets one does. They are
-- locked first: unblock_one, which writes one, waits for them or has committed, and the next statement sees the key
-- unblocked then.
-- Locks: the ready rows of the key (FOR UPDATE SKIP LOCKED).
-- Callers: fail_without_instance.
CREATE OR REPLACE FUNCTION penstock.drop_blocked_ready(queue integer, key text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    mine tid[];
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.blocked_key b WHERE b.queue_id = queue AND b.lock_key = key) THEN
        RETURN;
    END IF;
    mine := ARRAY(SELECT r.ctid FROM penstock.ready r
                   WHERE r.lock_key = key AND r.queue_id + 0 = queue FOR UPDATE SKIP LOCKED);
    DELETE FROM penstock.ready r
     WHERE r.queue_id = queue AND r.ctid = ANY (mine)
       AND EXISTS (SELECT FROM penstock.blocked_key b WHERE b.queue_id = queue AND b.lock_key = key);
END $$;
