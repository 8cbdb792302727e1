-- Idempotency keys and unique keys: which entry answers a push whose key was used before.

-- await_standby makes the commit of its transaction wait until the synchronous standbys, if the server has some, have
-- all that is committed. A commit whose wait was cancelled, as by a client that gave it up, is visible without them,
-- and a transaction that only reads it waits for nothing.
-- Locks: none.
-- Callers: resolve_idempotency; pkg/invalidation, pkg/slot.
CREATE OR REPLACE FUNCTION penstock.await_standby() RETURNS void
LANGUAGE sql AS $$
    SELECT pg_logical_emit_message(true, 'penstock', '')
     WHERE current_setting('synchronous_standby_names') <> ''
$$;

-- resolve_idempotency gives each entry whose key was used before the id of the first entry. The
-- insert waits for an uncommitted push of the same key, so that of a hundred pushes at once one
-- inserts and the others get its id. A key that is there at first is answered as it was then, and not inserted: were it
-- swept while the push waits, its insert would come behind those of later keys. Of the others none can be
-- swept before it is read, since the sweep leaves keys for a day: only of a transaction that was open for so long.
-- A push that is repeated promises what the first one did, and so waits for a synchronous standby as well.
-- Locks: new rows of idempotency in order of flow and key, so that two bulk pushes never deadlock.
-- Callers: push_many.
-- SQLSTATE: PS004 the key was used with another payload, lock key or name.
CREATE OR REPLACE FUNCTION penstock.resolve_idempotency(
    q penstock.queue, INOUT ids bigint[], payloads jsonb[], flows text[], keys text[], lock_keys text[], names text[],
    OUT verdicts text[]
) LANGUAGE plpgsql AS $$
DECLARE
    fingerprints bytea[];
    known_ids    bigint[]; -- of the keys that were there at first
    known_prints bytea[];
    found_ids    bigint[];
    conflict     bigint;
    swept        boolean;
BEGIN
    fingerprints := ARRAY(
        SELECT sha256(convert_to(jsonb_build_array(u.payload, u.lock_key, u.name)::text, 'UTF8'))
          FROM unnest(payloads, lock_keys, names) WITH ORDINALITY u(payload, lock_key, name, i) ORDER BY u.i);
    LOOP
        WITH asked AS MATERIALIZED (
            SELECT u.i, coalesce(u.flow, '') AS flow, u.key, u.id, u.fingerprint, k.entry_id AS known_id,
                   k.fingerprint AS known_print
              FROM unnest(ids, flows, keys, fingerprints) WITH ORDINALITY u(id, flow, key, fingerprint, i)
                   LEFT JOIN LATERAL (SELECT entry_id, fingerprint FROM penstock.idempotency
                                       WHERE queue_id = q.id AND flow = coalesce(u.flow, '')
                                         AND key = u.key OFFSET 0) k ON true
        ), fresh AS (
            INSERT INTO penstock.idempotency (queue_id, flow, key, entry_id, fingerprint)
            SELECT q.id, a.flow, a.key, a.id, a.fingerprint
              FROM asked a
             WHERE a.key IS NOT NULL AND a.known_id IS NULL
             ORDER BY a.flow COLLATE "C", a.key COLLATE "C", a.i
            ON CONFLICT DO NOTHING
        )
        SELECT array_agg(a.known_id ORDER BY a.i), array_agg(a.known_print ORDER BY a.i) INTO known_ids, known_prints
            FROM asked a;
        SELECT array_agg(coalesce(u.known_id, k.entry_id, u.id) ORDER BY u.i),
               array_agg(CASE WHEN coalesce(u.known_id, k.entry_id) <> u.id THEN 'replayed' ELSE 'inserted' END
                         ORDER BY u.i),
               min(u.i) FILTER (WHERE coalesce(u.known_print, k.fingerprint) <> u.fingerprint),
               bool_or(u.key IS NOT NULL AND u.known_id IS NULL AND k.entry_id IS NULL)
          INTO found_ids, verdicts, conflict, swept
          FROM unnest(ids, flows, keys, fingerprints, known_ids, known_prints)
               WITH ORDINALITY u(id, flow, key, fingerprint, known_id, known_print, i)
               LEFT JOIN LATERAL (SELECT entry_id, fingerprint FROM penstock.idempotency
                                   WHERE u.known_id IS NULL AND queue_id = q.id AND flow = coalesce(u.flow, '')
                                     AND key = u.key OFFSET 0) k ON true;
        EXIT WHEN NOT swept;
    END LOOP;
    IF conflict IS NOT NULL THEN
        RAISE EXCEPTION 'idempotency_key "%" %', keys[conflict],
            CASE WHEN found_ids[conflict] = ANY (ids) THEN 'comes with two bodies in this push'
                 ELSE format('was used with another body, by entry %s', found_ids[conflict]) END
            USING ERRCODE = 'PS004', HINT = 'Use a new key for new work; the same key must come with the same payload, lock key and name.';
    END IF;
    IF 'replayed' = ANY (verdicts) THEN
        PERFORM penstock.await_standby();
    END IF;
    ids := found_ids;
END $$;

-- resolve_uniqueness gives each entry whose unique key is taken the id of the entry that has it. A
-- push waits for an uncommitted one of the same key: if that rolls back, this one inserts. An entry of this push holds
-- its key in any case; one that it replays may have started or ended since, and is asked like any other.
-- Locks: rows of uniqueness in order of key (FOR UPDATE), for each those of holds_unique_key.
-- Callers: push_many.
-- SQLSTATE: 40001 the holder of a key was changed since the snapshot of the transaction.
CREATE OR REPLACE FUNCTION penstock.resolve_uniqueness(
    q penstock.queue, INOUT ids bigint[], INOUT verdicts text[], keys text[], policies text[]
) LANGUAGE plpgsql AS $$
DECLARE
    u     record;
    held  bigint;
    fresh bigint[];
    again boolean; -- an entry of this push is replayed, perhaps one of this push
BEGIN
    verdicts := coalesce(verdicts, array_fill('inserted'::text, ARRAY[cardinality(ids)]));
    fresh := ARRAY(SELECT x.id FROM unnest(ids, verdicts) x(id, verdict) WHERE x.verdict = 'inserted');
    again := 'replayed' = ANY (verdicts);
    FOR u IN SELECT k.key, k.policy, k.i FROM unnest(keys, policies) WITH ORDINALITY k(key, policy, i)
              WHERE k.key IS NOT NULL ORDER BY k.key COLLATE "C", k.i
    LOOP
        CONTINUE WHEN verdicts[u.i] <> 'inserted';
        LOOP
            INSERT INTO penstock.uniqueness (queue_id, key, entry_id) VALUES (q.id, u.key, ids[u.i])
            ON CONFLICT DO NOTHING;
            EXIT WHEN FOUND;
            SELECT entry_id INTO held FROM penstock.uniqueness WHERE queue_id = q.id AND key = u.key FOR UPDATE;
            CONTINUE WHEN NOT FOUND; -- swept between the two statements
            IF held = ANY (fresh) OR penstock.holds_unique_key(q.id, held, u.policy) THEN
                IF again THEN
                    ids := array_replace(ids, ids[u.i], held);
                END IF;
                ids[u.i] := held;
                verdicts[u.i] := 'duplicate';
            ELSE
                UPDATE penstock.uniqueness SET entry_id = ids[u.i] WHERE queue_id = q.id AND key = u.key;
            END IF;
            EXIT;
        END LOOP;
    END LOOP;
END $$;

-- share_key keeps claims of a lock key away until this transaction ends, or returns false if one is in
-- progress. Pushes share the lock that claims and exclude_claims take alone. Advisory locks are few for the
-- whole server, so that a transaction takes at most 256: for further keys it excludes claims of all
-- lock keys of the queue.
-- Locks: the advisory lock of the key (shared, try), or from the 257th key on that of all lock keys of
-- the queue (it waits for claims in progress).
-- Callers: holds_unique_key.
CREATE OR REPLACE FUNCTION penstock.share_key(queue integer, key text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    shared integer := coalesce(nullif(current_setting('penstock.keys_shared', true), ''), '0')::integer;
BEGIN
    IF shared >= 256 THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('penstock keys ' || queue, 0));
        RETURN true;
    END IF;
    PERFORM set_config('penstock.keys_shared', (shared + 1)::text, true);
    RETURN pg_try_advisory_xact_lock_shared(hashtextextended('penstock key ' || queue || ' ' || key, 0));
END $$;

-- holds_unique_key returns whether an entry still has its unique key: under while_active until it ends,
-- under the queued policies until it starts. There this transaction takes what keeps the entry from
-- starting before the change that the push is about is committed. Where that cannot be had the result
-- is false, and the push inserts an entry of its own. In a transaction that is not read committed, what happened since
-- its snapshot is seen by the locks of rows alone, which raise 40001. A claim of a key writes no row that
-- the snapshot has, so that an entry of a group, once it may start, is never relied on there.
-- Locks: under while_active in a transaction that is not read committed, the entry (FOR KEY SHARE SKIP LOCKED), for
-- the check alone; under the queued policies the entry (FOR NO KEY UPDATE, it waits) while it is initial or disabled;
-- of a solo entry its ready row (FOR UPDATE SKIP LOCKED); of a group the key (share_key), since claims may ignore
-- ready rows.
-- Callers: resolve_uniqueness.
-- SQLSTATE: 40001 the entry was changed since the snapshot of the transaction.
CREATE OR REPLACE FUNCTION penstock.holds_unique_key(queue bigint, held bigint, policy text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    e     penstock.entry;
    fixed boolean := current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted');
BEGIN
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = held;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF policy = 'while_active' THEN
        IF fixed THEN
            BEGIN
                PERFORM FROM penstock.entry WHERE queue_id = queue AND id = held FOR KEY SHARE SKIP LOCKED;
                RAISE SQLSTATE 'PS900'; -- gives the lock back: the entry may end before this transaction
            EXCEPTION WHEN SQLSTATE 'PS900' THEN
                NULL;
            END;
        END IF;
        RETURN true;
    ELSIF NOT penstock.claimable(e.status, e.priority) THEN
        PERFORM FROM penstock.entry
          WHERE queue_id = queue AND id = held AND NOT penstock.claimable(status, priority) FOR NO KEY UPDATE;
        IF FOUND THEN
            SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = held;
            RETURN NOT penstock.runs(e);
        END IF;
        SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = held; -- in another state by now, or gone
    END IF;
    IF e.lock_key IS NOT NULL THEN
        IF fixed OR NOT penstock.share_key(queue::integer, e.lock_key) THEN
            RETURN false;
        END IF;
    ELSE
        PERFORM FROM penstock.ready r
          WHERE r.queue_id = queue AND r.priority = e.priority AND r.flow = e.flow AND r.pos = coalesce(e.pos, held)
            AND r.entry_id = held
            FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    SELECT * INTO e FROM penstock.entry WHERE queue_id = queue AND id = held; -- as it is now that it cannot start
    RETURN FOUND AND NOT penstock.runs(e);
END $$;
