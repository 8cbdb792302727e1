-- Conditions of claims on entries and ready rows. Those on lanes are in throttle.sql and headroom.sql.

-- claimable is the part of the claim condition that concerns the entry itself: it is pending, and
-- not disabled (priority -1). The predicate of the index of entries with a lock key is the same,
-- written out, and plans use that index since this is inlined.
-- Callers: compaction, limits, endings, samples, explain and the invariants; pkg/invalidation,
-- pkg/maintenance, pkg/operator, pkg/doctor.
CREATE OR REPLACE FUNCTION penstock.claimable(status penstock.status, priority smallint) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT $1 = 'pending' AND $2 >= 0
$$;

-- ready_now is the part of the claim condition that concerns the ready row: one that was released with
-- a delay may not be claimed before its time.
-- A delay is a day at most (Release of pkg/invalidation): a time farther ahead was written before the clock was set
-- back, and is over. Where that was by less than a day, the row waits longer by as much.
-- Callers: explain, samples, scale_startable, scale_late; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.ready_now(not_before timestamptz) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT $1 IS NULL OR $1 <= statement_timestamp() OR $1 > statement_timestamp() + interval '25 hours'
$$;

-- throttled_priority is the priority of the ready rows of lock keys that wait for a token bucket. No
-- claim reads a lane of negative priority, so that a claim meets such a key once, not each time. In
-- this lane pos is the time at which the key may go on, in microseconds since 1970: those whose time
-- has come are one range of the primary key.
-- Callers: throttle_key, requeue_throttled; pkg/invalidation, pkg/operator.
CREATE OR REPLACE FUNCTION penstock.throttled_priority() RETURNS smallint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT -2::smallint
$$;
