-- Functions that returned nothing in an earlier version. Postgres replaces no function by one of another result type:
-- the old forms are dropped before the files that make the new ones, in the same transaction.
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT p.oid FROM pg_proc p
              WHERE p.prorettype = 'void'::regtype AND p.oid = ANY (ARRAY[
                    to_regprocedure('penstock.pause(text, text, text, text, text, timestamptz)'),
                    to_regprocedure('penstock.pause_batch(bigint, text, text, timestamptz)'),
                    to_regprocedure('penstock.pause_cron_job(text, text, text, timestamptz)'),
                    to_regprocedure('penstock.pause_queue(text, text, text, timestamptz)')]) LOOP
        EXECUTE format('DROP FUNCTION %s', f);
    END LOOP;
END $$;
