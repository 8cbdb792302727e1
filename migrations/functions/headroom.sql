-- How claims check the limits of their queue, and charge and refund its token buckets. limits.sql defines limits.
--
-- Limits that are far from binding are not counted at each claim: the tokens of locks bound their number (ADR 12).
--
-- Every lock takes a token of its own from one sequence. Suppose that a session counts the use of a limit, while no
-- claim under it is in flight, when the last token drawn is t: u units are in use, and a lock takes w units at most.
-- However many claimers there are, until the sequence has reached t + n no more than n locks can have been added. So
-- locks with tokens up to
--
--     uncounted_to = t + (max_units - u) / w
--
-- need not be counted. A lock of an entry with a weight draws as many tokens, and has the last of them: it is as many
-- locks of weight 1, of which each has w units at most (ADR 39).
-- A claim checks that the sequence is before that token, and is undone if it drew one beyond it (charge_lanes).
--
-- No claim is in flight while a session has the limit's advisory lock exclusively: claims that do not count
-- share it until they have committed, one that counts has it exclusively. PL/pgSQL takes a new snapshot for each
-- statement, so that a read behind the lock is no older than the lock. All claims of locks take it, and nothing
-- depends on heartbeats: locks of nodes that died are counted until they are recovered, and a claim whose answer
-- was lost has used its tokens up whether it was committed or not.
--
-- As long as max_units and units are unchanged, the token only grows: a count at t' finds at most u + (t' - t) * w
-- units in use, so that an older one is never wrong. A change sets it to 0 behind the same lock, exclusively.
-- models/limit.pml is a model of it.

-- limit_lock is the key of the advisory lock of a limit: claims that do not count share it until
-- they have committed, one that counts has it exclusively.
-- Callers: lane_headroom, count_again.
CREATE OR REPLACE FUNCTION penstock.limit_lock(id integer) RETURNS bigint
    LANGUAGE sql IMMUTABLE AS $$ SELECT hashtextextended('penstock limit ' || id::text, 0) $$;

-- lane_headroom returns how many locks the limits of a queue leave to a claim of one lane, or of several lanes.
--   in_flow    the flow of the lane. Null: the claim is of several lanes, and the use of single flows is not counted,
--              nor are their buckets read (see flow_headroom)
--   wanted     the locks that the claim asks for
--   weights    of the first ready rows of the lane, in their order, 0 for one whose key is locked; null for a queue
--              that is not weighed: all are 1 then. A limit counts weights, a rate entries
--   known      the ids of the limits of the queue, in order, as the caller knows them
--   rate_kind  their rate kind (see queue_rate_kind), as the caller knows it
-- Returned are
--   ok            false: the claim may not go on, and the rest means nothing. What the caller knows of the limits is
--                 stale, and it reads the queue again; or another claim is in the way; or several lanes can only be
--                 claimed from one by one
--   locks         the headroom in locks: as many as the longest prefix of the weights that fits
--   entries       the headroom of the rates, in entries together
--   wait          seconds until a token bucket has enough, where one has too little; else 0
--   uncounted_to  no lock may have a token above it (charge_lanes); 0 where a queue-wide limit has no headroom
-- What is done depends on the limit:
--   a rate for each lock key  nothing here: it does not bind the lane (see key_headroom)
--   max_units, far away       no token that the claim may draw is above uncounted_to of the limit: it is not counted
--   max_units, near           its use is counted, and what is kept for other lanes is left to them (see kept_units);
--                             uncounted_to moves on where four claims like this one still fit
--   a rate                    the bucket is read; charge_lanes writes it, so that the limit is locked exclusively
-- Locks: the advisory lock of each known limit in order of id (try; shared, or exclusive with a
-- rate); where locks must be counted, the same exclusively (try); the row of the limit (FOR NO KEY
-- UPDATE SKIP LOCKED); those of await_units. It waits for none. The proof is at the top of this file.
-- Callers: pkg/invalidation.
-- SQLSTATE: PS006 the transaction is not read committed.
CREATE OR REPLACE FUNCTION penstock.lane_headroom(queue integer, in_priority smallint, in_flow text, wanted integer,
                                                  weights integer[],
    known integer[], rate_kind integer,
    OUT ok boolean, OUT locks integer, OUT entries integer, OUT wait double precision, OUT uncounted_to bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    unlimited CONSTANT integer := 2147483647;
    id         integer;
    head       bigint := 1; -- the weight of the first row
    draws      bigint := wanted; -- the most tokens that the claim can draw
    l          record; -- a limit of the queue
    ids        integer[]; -- of all of them
    kind       integer := 0; -- their rate kind
    counted    record; -- what is in use of a limit, see units_in_use
    kept       bigint; -- units of it that are left to lanes that wait before this one
    heavy      boolean; -- a lane with a heavy first row waits for the same units
    others     boolean; -- or, with a limit per flow, for those of another flow
    free       bigint; -- units of it that this lane may take; below 0 where more are in use than it permits
    further    bigint; -- locks that fit whatever flow and queue they are of
    fits       integer := unlimited; -- the sum of weights that fits under all limits
    queue_wide boolean := false; -- a limit of all lanes has no headroom
    -- Of the lane, where lanes wait for units of some limit:
    ordered    boolean := false; -- they do
    since      timestamptz; -- when it began to wait; null if it does not
    short      boolean := false; -- its first row does not fit, and is to wait
    short_wide boolean := false; -- for units of a limit of all lanes
    never_fits boolean := false; -- its first row is heavier than a limit
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM penstock.need_read_committed();
    END IF;
    ok := false;
    entries := unlimited;
    wait := 0;
    uncounted_to := 9223372036854775807;
    IF weights IS NOT NULL THEN
        SELECT coalesce((array_agg(w ORDER BY i) FILTER (WHERE w > 0))[1], 1), coalesce(nullif(sum(w), 0), wanted)
          INTO head, draws FROM unnest(weights) WITH ORDINALITY u(w, i);
    END IF;

    FOREACH id IN ARRAY known LOOP
        IF NOT (CASE WHEN rate_kind = 0 THEN pg_try_advisory_xact_lock_shared(penstock.limit_lock(id))
                     ELSE pg_try_advisory_xact_lock(penstock.limit_lock(id)) END) THEN
            RETURN; -- another claim has it exclusively
        END IF;
    END LOOP;

    -- Reads from here on are no older than the locks.
    FOR l IN SELECT g.*, u.units, u.weighed, t.last_value AS drawn, g.uncounted_to >= t.last_value + draws AS plenty,
                    coalesce((SELECT penstock.bucket_level(b.units, b.at, g.rate, g.burst) FROM penstock.bucket b
                               WHERE b.limit_id = g.id AND b.flow = CASE WHEN g.per_flow THEN in_flow ELSE '' END),
                               g.burst) AS held
               FROM penstock.limit_use u
              CROSS JOIN LATERAL (SELECT * FROM penstock."limit" x WHERE x.id = u.limit_id OFFSET 0) g
              CROSS JOIN penstock.token_seq t
              WHERE u.queue_id = queue ORDER BY u.limit_id
    LOOP
        IF l.id <> ALL (known) OR l.weighed AND weights IS NULL THEN
            RETURN; -- what the caller knows is stale
        END IF;
        ids := ids || l.id;
        kind := greatest(kind, CASE WHEN l.per_key THEN 2 WHEN l.rate IS NOT NULL THEN 1 ELSE 0 END);
        CONTINUE WHEN l.per_key;

        IF l.plenty THEN
            uncounted_to := least(uncounted_to, l.uncounted_to);
        ELSIF l.max_units IS NOT NULL THEN
            IF in_flow IS NULL AND l.per_flow THEN
                RETURN; -- each flow is counted by a claim of its own
            ELSIF NOT pg_try_advisory_xact_lock(penstock.limit_lock(l.id)) THEN
                RETURN; -- another claim shares the limit
            END IF;
            counted := penstock.units_in_use(l.id, l.per_flow, in_flow);
            kept := 0;
            heavy := false;
            others := false;
            IF counted.uneven THEN
                IF in_flow IS NULL THEN
                    RETURN; -- lanes wait one by one
                END IF;
                ordered := true;
                since := penstock.waits_since(queue, in_priority, in_flow);
                SELECT w.units, w.heavy, w.others INTO kept, heavy, others
                  FROM penstock.kept_units(l.id, l.per_flow, queue, in_priority, in_flow, head, since) w;
            END IF;
            free := l.max_units - counted.used - kept;
            fits := least(fits, greatest(0, free / l.units));
            queue_wide := queue_wide OR NOT l.per_flow AND free < l.units;
            IF free < head * l.units THEN
                short := short OR head * l.units > counted.fewest OR heavy;
                short_wide := short_wide OR NOT l.per_flow;
                never_fits := never_fits OR head * l.units > l.max_units;
            END IF;
            further := (l.max_units - counted.peak) / counted.largest;
            IF further >= 4 * draws AND NOT others THEN
                -- An operator may have locked the row, and wait for the advisory lock that we have.
                UPDATE penstock."limit" x SET uncounted_to = l.drawn + further
                 WHERE x.ctid = (SELECT y.ctid FROM penstock."limit" y WHERE y.id = l.id FOR NO KEY UPDATE SKIP LOCKED);
            END IF;
        END IF;

        IF l.rate IS NOT NULL AND (in_flow IS NOT NULL OR NOT l.per_flow) THEN
            entries := least(entries, floor(greatest(0, l.held) / l.units));
            IF l.held < l.units THEN
                wait := greatest(wait, penstock.bucket_wait(l.held, l.units, l.rate, l.burst));
                queue_wide := queue_wide OR NOT l.per_flow;
            END IF;
        END IF;
    END LOOP;
    ok := coalesce(ids = known AND kind = rate_kind, false);

    locks := fits;
    IF weights IS NOT NULL THEN
        SELECT count(*) FILTER (WHERE p.upto <= fits) INTO locks
          FROM (SELECT sum(w) OVER (ORDER BY i) AS upto FROM unnest(weights) WITH ORDINALITY u(w, i)) p;
        IF locks = cardinality(weights) AND fits > 0 THEN
            locks := unlimited; -- no row is left out
        END IF;
    END IF;
    locks := least(locks, entries);

    IF ok AND ordered THEN
        short := short AND NOT never_fits AND wait = 0;
        IF short THEN
            short := CASE WHEN weights IS NULL THEN penstock.lane_has_rows(queue, in_priority, in_flow, wanted)
                          ELSE 0 < ANY (weights) END;
        END IF;
        queue_wide := queue_wide OR short AND short_wide; -- what comes free is kept for this lane
        PERFORM penstock.await_units(queue, in_priority, in_flow, head, since, short, never_fits OR locks > 0);
    END IF;
    IF queue_wide THEN
        uncounted_to := 0;
    END IF;
END $$;

-- units_in_use counts the units of a limit that are in use, and says what a lock under it may take.
--   used     units in use: if the limit is per flow, of in_flow
--   peak     the same; if the limit is per flow, of the flow that uses most
--   fewest, largest  the units of a lock of weight 1 of the queue under the limit with the fewest, and the most
--   uneven   locks may take different numbers of units, by the weights of entries or the units of queues
-- Locks: none. The caller has the advisory lock of the limit exclusively, or the count is old at once.
-- Callers: lane_headroom.
CREATE OR REPLACE FUNCTION penstock.units_in_use(of_limit integer, per_flow boolean, in_flow text,
    OUT used bigint, OUT peak bigint, OUT fewest integer, OUT largest integer, OUT uneven boolean)
LANGUAGE plpgsql AS $$
BEGIN
    IF per_flow THEN
        SELECT coalesce(max(f.units) FILTER (WHERE f.flow = in_flow), 0), coalesce(max(f.units), 0),
               min(f.fewest), max(f.largest), bool_or(f.weighed) OR min(f.fewest) < max(f.largest)
          INTO used, peak, fewest, largest, uneven
          FROM (SELECT k.flow, sum(u.units::bigint * k.weight) AS units, bool_or(u.weighed) AS weighed,
                       min(u.units) AS fewest, max(u.units) AS largest
                  FROM penstock.limit_use u
                  LEFT JOIN LATERAL (SELECT x.flow, x.weight FROM penstock.lock x
                                     WHERE x.queue_id = u.queue_id OFFSET 0) k ON true
                 WHERE u.limit_id = of_limit GROUP BY k.flow) f;
    ELSE
        SELECT coalesce(sum(u.units * k.weight), 0),
               min(u.units), max(u.units), bool_or(u.weighed) OR min(u.units) < max(u.units)
          INTO used, fewest, largest, uneven
          FROM penstock.limit_use u
         CROSS JOIN LATERAL (SELECT sum(x.weight) AS weight FROM penstock.lock x
                             WHERE x.queue_id = u.queue_id OFFSET 0) k
         WHERE u.limit_id = of_limit;
        peak := used;
    END IF;
END $$;

-- lane_has_rows returns whether one of the first ready rows of a lane may be claimed: that of a locked key may not.
-- Locks: none.
-- Callers: lane_headroom.
CREATE OR REPLACE FUNCTION penstock.lane_has_rows(
    queue       integer,
    in_priority smallint,
    in_flow     text,
    first       integer
) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT EXISTS (SELECT FROM (SELECT x.entry_id, x.lock_key FROM penstock.ready x
                                 WHERE x.queue_id = $1 AND x.priority = $2 AND x.flow = $3
                                   AND penstock.ready_now(x.not_before)
                                 ORDER BY x.pos LIMIT $4) r
                    WHERE r.entry_id IS NOT NULL
                       OR (SELECT l.token FROM penstock.lock l
                           WHERE l.queue_id = $1 AND l.lock_key = r.lock_key) IS NULL)
$$;

-- Lanes that wait for units of limits (ADR 39).
--
-- Locks under a limit may take different numbers of units, by the weights of their entries or by the units of their
-- queues (units_in_use: uneven). A row is heavy if it takes more units than the lightest lock can. What comes free
-- one by one would go to other rows for ever: so a lane whose first row does not fit waits in limit_wait, and what
-- comes free is kept for it. Lanes that wait come one after another, by the time since which they wait, the same under
-- every limit: the first of them waits for none of the others, which get what those before them leave. By the first
-- row of a lane:
--
--     it fits                            its lane waits no longer
--     it is heavier than the limit       it never fits: its lane does not wait, and the limit is not full for others
--     it does not fit, and it is heavy   its lane waits
--     it does not fit, and is not heavy  its lane waits only beside one with a heavy row, that waits for the same
--                                        units; it takes what comes otherwise
--
-- Nothing is kept for a lane that is empty, that has to wait for a rate, or that no claim has tried for 3 s. Only
-- claims that count a limit of the queue, and so have it exclusively, write the rows of its lanes.

-- waits_since returns since when a lane waits for units of the limits of its queue; null if it does not. A lane that no
-- claim tries keeps its place for a minute, though no units after three seconds (see kept_units).
-- Locks: none.
-- Callers: lane_headroom, limit_reasons.
CREATE OR REPLACE FUNCTION penstock.waits_since(queue integer, priority smallint, flow text) RETURNS timestamptz
LANGUAGE sql VOLATILE AS $$
    SELECT w.since FROM penstock.limit_wait w
     WHERE w.queue_id = $1 AND w.priority = $2 AND w.flow = $3 AND w.until > clock_timestamp() - interval '1 minute'
$$;

-- kept_units returns the units of a limit that are kept for other lanes that wait before this one, whose first row
-- has the weight head and which has waited since then (null: it does not wait). heavy is whether another lane with a
-- heavy first row waits for the same units, others whether one waits for units of any flow. Where none waits for the
-- same units, and the first row of this lane is not heavy, nothing is kept. A row of limit_wait counts for 3 s; one
-- with a time farther ahead was written before the clock was set back.
-- Locks: none.
-- Callers: lane_headroom, limit_reasons.
CREATE OR REPLACE FUNCTION penstock.kept_units(limit_id integer, per_flow boolean, queue integer, priority smallint,
                                               flow text, head bigint,
    since timestamptz, OUT units bigint, OUT heavy boolean, OUT others boolean)
LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN bool_or(w.this_heavy OR w.same AND w.heavy)
                THEN coalesce(sum(w.units) FILTER (WHERE w.same AND w.before), 0) ELSE 0 END::bigint,
           coalesce(bool_or(w.same AND w.heavy), false), coalesce(bool_or(w.heavy), false)
      FROM (SELECT m.this_heavy, u.units::bigint * x.weight > m.fewest AS heavy, u.units::bigint * x.weight AS units,
                   NOT $2 OR x.flow = $5 AS same, -- units that it waits for
                   $7 IS NULL OR (least(x.since, m.now), x.queue_id, x.priority, x.flow)
                                 < (least($7, m.now), $3, $4, $5 COLLATE "C") AS before
              FROM (SELECT clock_timestamp() AS now, min(o.units) AS fewest,
                           $6 * max(o.units) FILTER (WHERE o.queue_id = $3) > min(o.units) AS this_heavy
                      FROM penstock.limit_use o WHERE o.limit_id = $1 OFFSET 0) m
              JOIN penstock.limit_wait x ON x.until > m.now AND x.until <= m.now + interval '3 seconds'
              JOIN penstock.limit_use u ON u.queue_id = x.queue_id AND u.limit_id = $1
             WHERE (x.queue_id, x.priority, x.flow) <> ($3, $4, $5 COLLATE "C")) w
$$;

-- await_units keeps the row of a lane in limit_wait, whose first row has the weight head and which has waited since
-- then (null: it does not wait):
--   short           the lane waits: its row begins, or is renewed, once a second at most, and claims count from then on
--   not short, gone it waits no longer: it gets locks, or its first row never fits
--   neither         the row is left to lapse
-- Locks: the row of limit_wait, which no other transaction has; the rows of the limits (FOR NO KEY UPDATE SKIP LOCKED).
-- lane_headroom has a limit of the queue exclusively.
-- Callers: lane_headroom.
CREATE OR REPLACE FUNCTION penstock.await_units(queue integer, in_priority smallint, in_flow text, head bigint,
                                                since timestamptz,
    short boolean, gone boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    now_at timestamptz := clock_timestamp();
BEGIN
    IF NOT short THEN
        IF since IS NOT NULL AND gone THEN
            DELETE FROM penstock.limit_wait w WHERE w.queue_id = queue AND w.priority = in_priority
                AND w.flow = in_flow;
        END IF;
        RETURN;
    ELSIF since IS NOT NULL THEN
        UPDATE penstock.limit_wait w SET weight = head, since = least(w.since, now_at),
            until = now_at + interval '3 seconds'
         WHERE w.queue_id = queue AND w.priority = in_priority AND w.flow = in_flow
           AND (w.until NOT BETWEEN now_at + interval '2 seconds' AND now_at + interval '3 seconds'
                OR w.weight <> head);
        IF NOT FOUND THEN
            RETURN; -- it was renewed less than a second ago
        END IF;
    ELSE
        DELETE FROM penstock.limit_wait w -- that have lapsed
         WHERE w.queue_id = queue
           AND w.until NOT BETWEEN now_at - interval '1 minute' AND now_at + interval '3 seconds';
        INSERT INTO penstock.limit_wait (queue_id, priority, flow, weight, since, until)
        VALUES (queue, in_priority, in_flow, head, now_at, now_at + interval '3 seconds');
    END IF;
    UPDATE penstock."limit" x SET uncounted_to = 0
     WHERE x.ctid IN (SELECT y.ctid FROM penstock."limit" y
                       WHERE y.id IN (SELECT u.limit_id FROM penstock.limit_use u WHERE u.queue_id = queue)
                         AND y.uncounted_to > 0
                         FOR NO KEY UPDATE SKIP LOCKED);
END $$;

-- queue_rate_kind returns the rate kind of a queue's limits: 0 without rates, 1 with some, 2 with rates
-- for each lock key as well.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.queue_rate_kind(queue integer) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(CASE WHEN g.per_key THEN 2 WHEN g.rate IS NOT NULL THEN 1 ELSE 0 END), 0)
      FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id WHERE u.queue_id = queue
$$;
COMMENT ON FUNCTION penstock.queue_rate_kind IS
    'rate kind of the limits of a queue: 0 without rates, 1 with some, 2 with rates for each lock key as well';

-- bucket_level is the level of a token bucket, of size burst, into which rate units a second flow, and which had these
-- units at a time:
--     least(burst, units + rate * seconds since then)
-- A time to come was written before the clock was set back: how long ago that is is not known, and the bucket is full,
-- as after an infinite time. The function is inlined, so that no argument but a
-- constant may be named twice: what is below 0 seconds is made one number, then null, then infinite.
-- Locks: none.
-- Callers: lane_headroom, bucket_units, flow_headroom, key_headroom, charge_lanes; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.bucket_level(units double precision, at timestamptz, rate double precision,
                                                 burst double precision, moment timestamptz DEFAULT clock_timestamp())
    RETURNS double precision
LANGUAGE sql AS $$
    SELECT least($4, $1 + $3 * coalesce(nullif(greatest(extract(epoch FROM $5 - $2),
                                                        -0.000001), -0.000001), 'Infinity')::double precision)
$$;

-- bucket_wait returns how long (s) a claim waits for a token bucket that holds less than it needs: until it holds that,
-- and for 50 ms, so that a claim is worth its cost, but not until the bucket is more than half full: what flows into a
-- full one is lost. Below 0: it holds more.
-- Locks: none.
-- Callers: lane_headroom, flow_headroom.
CREATE OR REPLACE FUNCTION penstock.bucket_wait(held double precision, needs double precision, rate double precision,
                                                burst double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN $1 < $2 THEN greatest($2 - $1, least(0.05 * $3, 0.5 * $4 - $1)) ELSE $2 - $1 END / $3
$$;

-- bucket_units is the level of the token bucket of a limit now, for a flow or lock key. A missing
-- bucket is a full one.
-- Locks: none.
-- Callers: limit_reasons; pkg/operator.
CREATE OR REPLACE FUNCTION penstock.bucket_units(l penstock."limit", in_flow text) RETURNS double precision
    LANGUAGE sql
    AS $$
    SELECT coalesce((SELECT penstock.bucket_level(b.units, b.at, l.rate, l.burst)
                       FROM penstock.bucket b
                      WHERE b.limit_id = l.id AND b.flow = CASE WHEN l.per_flow OR l.per_key THEN in_flow ELSE '' END),
                      l.burst)
$$;

-- flow_headroom returns the headroom in the token buckets of single flows, in entries, and the wait
-- (s) where there is none, in the order of the flows. NULL: the queue has no such limit. Several
-- lanes of a queue under rates are claimed together: lane_headroom reads the queue-wide buckets, this
-- function those of each flow, behind the same locks, and charge_lanes writes them all.
-- Locks: none: lane_headroom has locked the limits exclusively.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.flow_headroom(queue integer, flows text[], OUT headrooms integer[],
                                                  OUT waits double precision[])
LANGUAGE plpgsql AS $$
BEGIN
    SELECT array_agg(f.headroom ORDER BY f.ord), array_agg(f.wait ORDER BY f.ord) INTO headrooms, waits
      FROM (SELECT k.ord, least(min(floor(greatest(0, b.held) / g.units)), 2147483647)::integer AS headroom,
            max(penstock.bucket_wait(b.held, g.units, g.rate, g.burst)) AS wait
              FROM penstock.limit_use u
             CROSS JOIN LATERAL (SELECT x.id, x.rate::double precision AS rate, x.burst::double precision AS burst,
                                 u.units FROM penstock."limit" x
                                  WHERE x.id = u.limit_id AND x.rate IS NOT NULL AND x.per_flow
                                    AND NOT x.per_key OFFSET 0) g
             CROSS JOIN unnest(flows) WITH ORDINALITY k(flow, ord)
             CROSS JOIN LATERAL (SELECT coalesce((SELECT penstock.bucket_level(x.units, x.at, g.rate, g.burst)
                                                    FROM penstock.bucket x WHERE x.limit_id = g.id
                                                        AND x.flow = k.flow COLLATE "C"), g.burst) AS held) b
             WHERE u.queue_id = queue
             GROUP BY k.ord) f;
END $$;

-- key_headroom returns for lock keys, each at a position, the headroom of their token buckets in
-- entries, and the wait (s) where there is none: all keys of a claim at once.
-- Locks: none: lane_headroom has locked the limits exclusively.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.key_headroom(
    queue     integer,
    keys      text[],
    positions bigint[]
) RETURNS TABLE (pos bigint, lock_key text, headroom integer, wait double precision)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    asked timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    SELECT k.pos, k.key, least(min(floor(greatest(0, b.held) / g.units)), 2147483647)::integer,
           max(greatest(0, (g.units - b.held) / g.rate))::double precision
      FROM (SELECT l.id, l.rate::double precision AS rate, l.burst::double precision AS burst, u.units
              FROM penstock.limit_use u JOIN penstock."limit" l ON l.id = u.limit_id
                  WHERE u.queue_id = queue AND l.per_key OFFSET 0) g
     CROSS JOIN unnest(keys, positions) k(key, pos)
     CROSS JOIN LATERAL (SELECT coalesce((SELECT penstock.bucket_level(x.units, x.at, g.rate, g.burst, asked)
                                            FROM penstock.bucket x WHERE x.limit_id = g.id
                                                AND x.flow = k.key COLLATE "C"), g.burst) AS held) b
     GROUP BY k.pos, k.key;
END $$;

-- charge_lanes ends a claim: it undoes one whose last token is above uncounted_to of lane_headroom, and takes the
-- entries of the others out of the token buckets of the queue. flows and taken are how many entries it locked of each
-- flow, keys and entries how many of each lock key, where a limit has a rate for each.
-- A limit with a rate has one bucket, or one for each flow or each lock key. A bucket without a row is full: its row
-- begins with the burst less the units taken. In a bucket with a row, the units are taken off the level of this moment.
-- Locks: rows of bucket by limit and then by flow or lock key, so that two claims never deadlock.
-- lane_headroom has locked the limits.
-- Callers: pkg/invalidation.
-- SQLSTATE: 40001 a token is above uncounted_to, so that the limit must be counted; retry the
-- claim.
CREATE OR REPLACE FUNCTION penstock.charge_lanes(queue integer, rate_kind integer, flows text[], taken bigint[],
                                                 keys text[], entries bigint[], last_token bigint,
    uncounted_to bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF last_token > uncounted_to THEN
        RAISE EXCEPTION 'token % is above %: the limit must be counted', last_token,
            uncounted_to USING ERRCODE = 'serialization_failure';
    END IF;
    IF rate_kind = 0 OR flows IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO penstock.bucket AS b (limit_id, flow, units, at)
    SELECT g.id, k.scope, g.burst - k.n * u.units, clock_timestamp()
      FROM penstock.limit_use u
     CROSS JOIN LATERAL (SELECT * FROM penstock."limit" x WHERE x.id = u.limit_id AND x.rate IS NOT NULL OFFSET 0) g
     CROSS JOIN LATERAL (
           SELECT '' COLLATE "C" AS scope, (SELECT sum(t.n)::bigint FROM unnest(charge_lanes.taken) t(n)) AS n
               WHERE NOT g.per_key AND NOT g.per_flow
           UNION ALL
           SELECT f.flow, f.n FROM unnest(flows, charge_lanes.taken) f(flow, n) WHERE g.per_flow AND NOT g.per_key
           UNION ALL
           SELECT c.key, c.n FROM unnest(keys, charge_lanes.entries) c(key, n) WHERE g.per_key) k
     WHERE u.queue_id = queue
     ORDER BY g.id, k.scope
    ON CONFLICT (limit_id, flow) DO UPDATE
       SET units = (SELECT penstock.bucket_level(b.units, b.at, g.rate, g.burst) - g.burst FROM penstock."limit" g
                    WHERE g.id = b.limit_id)
                   + excluded.units, at = clock_timestamp();
END $$;

-- refund gives back the units that locks, which the caller has locked, took out of token buckets
-- for as many entries as `cancelled` says, and where rest is true for all that are left of the lock, but no more than
-- its record counts: others may have come into line since.
-- Units that were taken before the limit changed are not given back.
-- Locks: rows of bucket by limit and then by flow or lock key, as charge_lanes.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.refund(
    queue     integer,
    keys      text[],
    tokens    bigint[],
    cancelled integer[],
    rest      boolean[]
) RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT u.limit_id, CASE WHEN g.per_key THEN k.key WHEN g.per_flow THEN l.flow
        ELSE '' END COLLATE "C" AS scope,
                    sum(u.units * (CASE WHEN NOT k.rest THEN k.cancelled
                        WHEN penstock.is_solo(k.key) THEN l.entry_count ELSE
                        least(l.entry_count, (
                            SELECT count(*) FROM penstock.entry e
                             WHERE e.queue_id = queue AND e.lock_key = k.key
                               AND penstock.claimable(e.status, e.priority) AND e.id <= l.last_entry_id)) END)) AS units
               FROM penstock.limit_use u
               JOIN penstock."limit" g ON g.id = u.limit_id
              CROSS JOIN unnest(keys, tokens, cancelled, rest) k(key, token, cancelled, rest)
              CROSS JOIN LATERAL (SELECT x.flow, x.claimed_at, x.last_entry_id, x.entry_count FROM penstock.lock x
                                   WHERE x.queue_id = queue AND x.lock_key = k.key AND x.token = k.token OFFSET 0) l
              WHERE u.queue_id = queue AND g.rate IS NOT NULL AND l.claimed_at >= u.since
              GROUP BY 1, 2 ORDER BY 1, 2
    LOOP
        -- Units beyond the burst are cut off when the bucket is read.
        UPDATE penstock.bucket b SET units = b.units + r.units WHERE b.limit_id = r.limit_id AND b.flow = r.scope;
    END LOOP;
END $$;

-- throttle_key throttles a lock key whose token bucket is empty, for `wait` seconds, a year at most, unless it is
-- throttled already: a ready row of throttled_priority. The ready row that it finds stays until this commits, as that
-- of a pusher does: a session that deletes it later sees the new entries. False: another key has that microsecond, and
-- the next claim throttles this one.
-- Locks: the throttled ready row of the key (FOR UPDATE SKIP LOCKED).
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.throttle_key(queue integer, key text, wait double precision) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM penstock.ready r WHERE r.lock_key = key AND r.queue_id + 0 = queue
        AND r.priority = penstock.throttled_priority() LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
        VALUES (queue, penstock.throttled_priority(), '',
                (extract(epoch FROM clock_timestamp()) + least(wait, 31536000)) * 1000000, key)
        ON CONFLICT DO NOTHING;
    END IF;
    RETURN FOUND; -- false where another key has that microsecond: the next claim throttles this one
END $$;

-- throttled_too_long returns the pos of throttled_priority beyond which a key waits for longer than any bucket of the
-- queue takes to have the units of an entry: it was throttled under a lower rate, or before the clock was set back.
-- Locks: none.
-- Callers: requeue_throttled; pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.throttled_too_long(queue integer) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT ((extract(epoch FROM clock_timestamp()) + 1 + least(31536000, coalesce((
               SELECT max(u.units / g.rate::double precision)
                 FROM penstock.limit_use u JOIN penstock."limit" g ON g.id = u.limit_id
                WHERE u.queue_id = $1 AND g.per_key), 0))) * 1000000)::bigint
$$;

-- requeue_throttled requeues throttled keys whose time has come, or that wait for too long (throttled_too_long), at the
-- position of their oldest entry, and returns how many.
-- Locks: ready rows of throttled_priority in order of pos (FOR UPDATE SKIP LOCKED).
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.requeue_throttled(queue integer, most integer) RETURNS integer
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    now_us bigint := extract(epoch FROM clock_timestamp()) * 1000000;
    too_long bigint := penstock.throttled_too_long(queue);
    due    tid[];
    keys   text[];
BEGIN
    due := ARRAY(SELECT ctid FROM penstock.ready WHERE queue_id = queue AND priority = penstock.throttled_priority()
                 AND flow = ''
                     AND pos <= now_us
                  ORDER BY pos LIMIT most FOR UPDATE SKIP LOCKED);
    IF cardinality(due) < most THEN
        due := due || ARRAY(SELECT ctid FROM penstock.ready
                            WHERE queue_id = queue AND priority = penstock.throttled_priority() AND flow = ''
                                AND pos > too_long
                             ORDER BY pos LIMIT most - cardinality(due) FOR UPDATE SKIP LOCKED);
    END IF;
    IF cardinality(due) = 0 THEN
        RETURN 0;
    END IF;
    -- A new statement: it sees the entries of pushers that relied on a row before we locked it.
    WITH gone AS (DELETE FROM penstock.ready WHERE ctid = ANY (due) RETURNING lock_key)
    SELECT array_agg(lock_key) INTO keys FROM gone;
    INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
    SELECT queue, n.priority, n.flow, n.id, k.key
      FROM unnest(keys) k(key)
     CROSS JOIN LATERAL (
           SELECT min(e.id) AS id, max(e.priority) AS priority, (array_agg(e.flow ORDER BY e.id))[1] AS flow
             FROM (SELECT x.id, x.priority, x.flow FROM penstock.entry x
                    WHERE x.queue_id = queue AND x.lock_key = k.key AND penstock.claimable(x.status, x.priority)
                    ORDER BY x.id LIMIT 100) e) n
     WHERE n.id IS NOT NULL
    ON CONFLICT DO NOTHING;
    RETURN cardinality(due);
END $$;
