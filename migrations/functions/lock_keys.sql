-- Which lock key and which flow an entry gets that is pushed: by the queue's grouping, by unique key, by name, by
-- shard; and the key of its lock record.

-- lock_key_of reads the lock key of a payload by the queue's grouping: a field, a path with dots,
-- or a jsonpath.
-- Callers: entry_lock_key, check_options.
CREATE OR REPLACE FUNCTION penstock.lock_key_of(payload jsonb, path text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN left(path, 1) = '$' THEN jsonb_path_query_first(payload, path::jsonpath) #>> '{}'
                WHEN position('.' IN path) > 0 THEN payload #>> string_to_array(path, '.')
                ELSE payload ->> path END
$$;

-- entry_lock_key returns the lock key of an entry, null for a solo one: the key that it was pushed with, else that of
-- the queue's grouping (path), else that of its unique key where one of these runs at a time.
-- Callers: push_many, shard_flows.
CREATE OR REPLACE FUNCTION penstock.entry_lock_key(path text, payload jsonb, lock_key text, unique_policy text,
                                                   unique_key text)
RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(lock_key, CASE WHEN path IS NOT NULL THEN penstock.lock_key_of(payload, path) END,
                    CASE WHEN unique_policy = 'one_running_one_queued' THEN 'unique:' || unique_key END)
$$;

-- record_key returns the key of the lock record of an entry: its lock key, or '#' and its id for a solo entry.
-- It is inlined, which needs id::text: || of a text and a number is only stable.
-- Callers: lock_to_switch, runs, cancel_one, settle_cancel_requests, entry_waits, fail_without_instance, queue_heads,
-- position_reasons, finish_batch_part, check_invariants, entry_status; pkg/invalidation, pkg/inference,
-- pkg/gateway/prediction.
CREATE OR REPLACE FUNCTION penstock.record_key(lock_key text, id bigint) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT coalesce(lock_key, '#' || id::text) $$;

-- is_solo tells whether the key of a lock record is that of a solo entry. No lock key is like it: a push refuses those
-- that begin with '#'. It is inlined.
-- Callers: check_options, watch_lock_key, refund, expired_locks, count_queue, check_invariants; pkg/invalidation,
-- pkg/operator.
CREATE OR REPLACE FUNCTION penstock.is_solo(record_key text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT left(record_key, 1) = '#' $$;

-- shard_name returns the flow of the entries of a shard, which are counted from 0.
-- Callers: shard_flow, feed_batch.
CREATE OR REPLACE FUNCTION penstock.shard_name(shard bigint) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 'shard-' || shard::text $$;

-- shard_flow returns the flow of an entry that is pushed without one to a queue with shards: shard-0 to shard-<shards -
-- 1>, by a hash of its lock key, or of its id where it has none. The id itself would not do: all queues draw ids from
-- one sequence, so that those of one queue may all be even. An entry keeps its flow when shards is changed.
-- The order of a key does not depend on it: a claim of a key takes its oldest entries of all lanes.
-- Callers: shard_flows.
CREATE OR REPLACE FUNCTION penstock.shard_flow(shards integer, lock_key text, id bigint) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT penstock.shard_name((coalesce(hashtextextended(lock_key, 0), hashint8extended(id, 0)) & 9223372036854775807) % shards)
$$;

-- shard_flows returns the flow of each entry of a push to a queue with shards: the one that it names, else that of its
-- shard.
-- Callers: push_many.
CREATE OR REPLACE FUNCTION penstock.shard_flows(
    q penstock.queue, ids bigint[], payloads jsonb[], lock_keys text[], flows text[], unique_keys text[],
    unique_policies text[]
) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT array_agg(coalesce(nullif(u.flow, ''), penstock.shard_flow(q.shards,
                         penstock.entry_lock_key(q.grouping, u.payload, u.lock_key, u.unique_policy, u.unique_key),
                         u.id)) ORDER BY u.i)
      FROM unnest(ids, payloads, lock_keys, flows, unique_keys, unique_policies)
           WITH ORDINALITY u(id, payload, lock_key, flow, unique_key, unique_policy, i)
$$;

-- name_keys returns the lock keys of entries in a queue with max_concurrent_per_name: of those with a name one of so
-- many keys of the name, of others the one that they were given. A lock key has one holder, so that no more entries of
-- a name run at once than it has keys. An entry gets the key with the fewest entries that wait or run, counted up to
-- ten: pushes that do not see one another may give two entries one key while another is free, which costs time and
-- breaks no bound. A higher bound keeps the keys of a lower one and adds some, so that the keys of a backlog count.
-- Locks: none.
-- Callers: push_many.
CREATE OR REPLACE FUNCTION penstock.name_keys(q penstock.queue, names text[], lock_keys text[]) RETURNS text[]
LANGUAGE sql VOLATILE SET enable_hashjoin = on AS $$
    WITH given AS (
        SELECT u.name, u.lock_key, u.i, row_number() OVER (PARTITION BY u.name ORDER BY u.i) AS nth
          FROM unnest(names, lock_keys) WITH ORDINALITY u(name, lock_key, i)
    ), keys AS MATERIALIZED (
        SELECT d.name, array_agg(k.key ORDER BY k.entries, random()) AS keys
          FROM (SELECT DISTINCT g.name FROM given g WHERE g.name IS NOT NULL) d
         CROSS JOIN LATERAL (
               SELECT c.key, (SELECT count(*) FROM (
                      SELECT FROM penstock.entry e
                       WHERE e.queue_id = q.id AND e.lock_key = c.key
                         AND penstock.claimable(e.status, e.priority) LIMIT 10) e) AS entries
                 FROM (SELECT 'name:' || d.name || CASE WHEN s > 1 THEN '#' || s ELSE '' END AS key
                         FROM generate_series(1, q.max_concurrent_per_name) s) c) k
         GROUP BY d.name
    )
    SELECT array_agg(CASE WHEN g.name IS NULL THEN g.lock_key
                     ELSE k.keys[1 + (g.nth - 1) % q.max_concurrent_per_name] END ORDER BY g.i)
      FROM given g LEFT JOIN keys k ON k.name = g.name
$$;
