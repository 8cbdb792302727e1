-- Tables that are dropped by the day.

-- ensure_partitions gives every table of penstock.retention a partition for each day from today to days_ahead, and
-- returns how many it made. Each is made on its own and then attached. What a default partition already holds of a day
-- keeps that day from getting one; that is only the first day of an installation, or after the leader was away for
-- days_ahead. Samples have no default partition: they wait for theirs.
CREATE OR REPLACE FUNCTION penstock.ensure_partitions(days_ahead integer DEFAULT 7) RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    made   integer := 0;
    kind   record;
    day    date;
    child  text;
BEGIN
    FOR kind IN SELECT parent FROM penstock.retention LOOP
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
                -- the next call tries again.
                WHEN duplicate_table OR unique_violation OR check_violation OR lock_not_available OR deadlock_detected THEN
                    NULL;
            END;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;

-- drop_old_partitions drops the oldest of them, and returns how many it dropped: 1 or 0, so that its locks are held for
-- one drop only. Call it until it returns 0. The lock_timeout bounds how long anybody can wait behind it.
CREATE OR REPLACE FUNCTION penstock.drop_old_partitions() RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '200ms' SET timezone = 'UTC' AS $$
DECLARE
    old text := (SELECT partition FROM penstock.old_partitions ORDER BY behind DESC LIMIT 1);
BEGIN
    IF old IS NULL THEN
        RETURN 0;
    END IF;
    EXECUTE format('DROP TABLE penstock.%I', old);
    RETURN 1;
EXCEPTION
    WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
        RETURN 0;
END $$;
