-- +goose Up

-- What handlers leave behind besides results: orders to hold off, and the partitions that results and failures go to.

-- A queue (whole) or one flow of it is held back for a while, because whoever does its work said so: a 429 from
-- downstream. Claims look here, so that every node holds off at once.
CREATE TABLE penstock.push_back (
    until    timestamptz NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue_id integer NOT NULL REFERENCES penstock.queue ON DELETE CASCADE,
    whole    boolean NOT NULL,
    flow     text COLLATE "C" NOT NULL CHECK (flow = '' OR NOT whole),
    reason   text NOT NULL,
    PRIMARY KEY (queue_id, whole, flow)
);

-- held_back says for how many seconds more claims of a lane must hold off, null for not at all.
-- +goose StatementBegin
CREATE FUNCTION penstock.held_back(queue integer, in_flow text) RETURNS double precision
LANGUAGE sql VOLATILE AS $$
    SELECT nullif(greatest(0, extract(epoch FROM greatest(
        (SELECT until FROM penstock.push_back WHERE queue_id = queue AND whole = true AND flow = ''),
        (SELECT until FROM penstock.push_back WHERE queue_id = queue AND whole = false AND flow = in_flow)) - clock_timestamp())), 0)::double precision
$$;
-- +goose StatementEnd

-- push_back holds a queue back, or one flow of it. A longer order that stands is left alone. Handlers call it as well,
-- many at once when a service downstream is overloaded: one that would move the end by little does not touch the row.
-- +goose StatementBegin
CREATE FUNCTION penstock.push_back(queue text, wait interval, flow text DEFAULT NULL, reason text DEFAULT '') RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    IF wait IS NULL OR wait <= '0' OR wait > '1 day' THEN
        RAISE EXCEPTION 'wait is not between 0 and 1 day' USING ERRCODE = 'PS002',
            HINT = 'Pause the queue to stop it for longer.';
    END IF;
    INSERT INTO penstock.push_back AS p (queue_id, whole, flow, until, reason)
    VALUES (q.id, push_back.flow IS NULL, coalesce(push_back.flow, ''), clock_timestamp() + wait, push_back.reason)
    ON CONFLICT ON CONSTRAINT push_back_pkey DO UPDATE
       SET until = excluded.until, at = excluded.at, reason = excluded.reason
     WHERE excluded.until - p.until > least(interval '100 ms', wait / 4);
END $$;
-- +goose StatementEnd

-- lift_push_back ends an order to hold off before its time, and says whether there was one.
-- +goose StatementBegin
CREATE FUNCTION penstock.lift_push_back(queue text, flow text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    q penstock.queue := penstock.queue_row(queue);
BEGIN
    DELETE FROM penstock.push_back p
     WHERE p.queue_id = q.id AND p.whole = (lift_push_back.flow IS NULL) AND p.flow = coalesce(lift_push_back.flow, '')
       AND p.until > clock_timestamp();
    RETURN FOUND;
END $$;
-- +goose StatementEnd

-- push_back_reasons says which order keeps an entry from being claimed, as penstock.explain_entry shows it.
-- +goose StatementBegin
CREATE FUNCTION penstock.push_back_reasons(e penstock.entry) RETURNS SETOF jsonb
LANGUAGE sql STABLE AS $$
    SELECT penstock.because('pushed_back', format('%s is held back for %s more%s',
               CASE WHEN p.whole THEN 'the queue' ELSE format('flow "%s"', p.flow) END,
               penstock.ago(p.until - clock_timestamp()), coalesce(': ' || nullif(p.reason, ''), '')),
               jsonb_build_object('until', p.until, 'reason', p.reason, 'seconds', round(extract(epoch FROM p.until - clock_timestamp()), 1)))
      FROM penstock.push_back p
     WHERE p.queue_id = e.queue_id AND (p.whole OR p.flow = e.flow) AND p.until > clock_timestamp() AND NOT penstock.runs(e)
$$;
-- +goose StatementEnd

-- Results and failures by the day -------------------------------------------------------------------------------------

-- ensure_partitions gives results and failures a partition for each day from today to days_ahead, and returns how many
-- it made. Each is made on its own and then attached. What the default partition already holds of a day keeps that day
-- from getting one; that is only the first day of an installation, or after the leader was away for days_ahead.
-- +goose StatementBegin
CREATE FUNCTION penstock.ensure_partitions(days_ahead integer DEFAULT 7) RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    made   integer := 0;
    kind   record;
    day    date;
    child  text;
BEGIN
    FOR kind IN SELECT * FROM (VALUES ('result', 'finished_at'), ('failure', 'failed_at')) t(parent, at) LOOP
        FOR day IN SELECT generate_series(current_date, current_date + days_ahead, interval '1 day')::date LOOP
            child := kind.parent || to_char(day, '_YYYYMMDD');
            CONTINUE WHEN to_regclass('penstock.' || child) IS NOT NULL;
            BEGIN
                EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.%I INCLUDING ALL)', child, kind.parent);
                EXECUTE format('ALTER TABLE penstock.%I ATTACH PARTITION penstock.%I FOR VALUES FROM (%L) TO (%L)',
                               kind.parent, child, day, day + 1);
                made := made + 1;
            EXCEPTION
                -- Somebody else makes it, the default partition has rows of the day, or a long query is in the way:
                -- the day's rows go to the default partition, and the next call tries again.
                WHEN duplicate_table OR unique_violation OR check_violation OR lock_not_available OR deadlock_detected THEN
                    NULL;
            END;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;
-- +goose StatementEnd

-- drop_old_partitions drops the oldest partition whose every row has passed the longest retention of any queue, and
-- returns how many it dropped: 1 or 0, so that its locks are held for one drop only. Call it until it returns 0. The
-- lock_timeout bounds how long anybody can wait behind it.
-- +goose StatementBegin
CREATE FUNCTION penstock.drop_old_partitions() RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    old text;
BEGIN
    SELECT c.relname INTO old
      FROM (SELECT 'result' AS parent, max(result_retention) AS kept FROM penstock.queue
            UNION ALL SELECT 'failure', max(failure_retention) FROM penstock.queue) p
      JOIN pg_inherits i ON i.inhparent = ('penstock.' || p.parent)::regclass
      JOIN pg_class c ON c.oid = i.inhrelid
     WHERE c.relname ~ ('^' || p.parent || '_[0-9]{8}$')
       AND to_date(right(c.relname, 8), 'YYYYMMDD') + 1 < now() - coalesce(p.kept, '1 day')
     ORDER BY right(c.relname, 8) LIMIT 1;
    IF old IS NULL THEN
        RETURN 0;
    END IF;
    EXECUTE format('DROP TABLE penstock.%I', old);
    RETURN 1;
EXCEPTION
    WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
        RETURN 0;
END $$;
-- +goose StatementEnd
