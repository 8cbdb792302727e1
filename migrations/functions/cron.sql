-- Scheduled work. The engine (pkg/cron) runs on the elected leader.

-- waits_for_cron returns whether an initial entry is one that only the cron engine may turn
-- pending. Promotion leaves such entries out.
-- Callers: pkg/invalidation.
CREATE OR REPLACE FUNCTION penstock.waits_for_cron(entry bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM penstock.cron_job j WHERE j.entry_id = $1 AND j.fired_at IS NULL)
$$;

-- The engine. It has locked the rows of the jobs that it names, in the same transaction. ------------------------------

-- create_cron_entries gives jobs their next entries: initial, due at dues. A job whose push is
-- refused (payload too large, queue full) is left without one, with the problem, for a minute, and
-- does not keep the others from theirs; nominal times that its policy dropped stay dropped. It returns the number of
-- entries.
-- Locks: those of push_many for each queue. The engine has the rows of the jobs.
-- Callers: pkg/cron.
-- SQLSTATE: none: the error of a push is kept in cron_job.problem.
CREATE OR REPLACE FUNCTION penstock.create_cron_entries(jobs bigint[], nominals timestamptz[], dues timestamptz[],
                                                        handled timestamptz[])
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    batch record;
    made  integer := 0;
BEGIN
    FOR batch IN
        SELECT q.name AS queue, array_agg(k.i ORDER BY k.i) AS picks
          FROM unnest(jobs) WITH ORDINALITY k(job, i)
          JOIN penstock.cron_job j ON j.id = k.job
          JOIN penstock.queue q ON q.id = j.queue_id
         GROUP BY q.name
    LOOP
        BEGIN
            made := made + penstock.push_cron_entries(batch.queue, batch.picks, jobs, nominals, dues, handled);
        EXCEPTION WHEN OTHERS THEN
            FOR i IN 1 .. cardinality(batch.picks) LOOP
                BEGIN
                    made := made + penstock.push_cron_entries(batch.queue, batch.picks[i:i], jobs, nominals, dues, handled);
                EXCEPTION WHEN OTHERS THEN
                    UPDATE penstock.cron_job
                       SET problem = SQLERRM, check_at = clock_timestamp() + interval '1 minute',
                           handled_at = handled[batch.picks[i]]
                     WHERE id = jobs[batch.picks[i]];
                END;
            END LOOP;
        END;
    END LOOP;
    RETURN made;
END $$;

-- push_cron_entries is create_cron_entries for some jobs of one queue. A due time that has passed
-- is moved behind the beginning of the transaction, so that push_many leaves the entry initial.
-- An entry that waits has no deadlines: those of its queue count from the firing, see fire_cron_jobs. The leader would
-- end it as expired otherwise while no job was fired for a time, or while the job is paused.
-- Locks: those of push_many. The engine has the rows of the jobs.
-- Callers: create_cron_entries.
-- SQLSTATE: PS001 no such queue, PS002 invalid argument, PS003 payload too large, PS004 idempotency
-- key used with another body, PS005 the queue is full, PS011 entries push one another without end.
CREATE OR REPLACE FUNCTION penstock.push_cron_entries(queue text, picks bigint[], jobs bigint[], nominals timestamptz[],
                                           dues timestamptz[], handled timestamptz[]) RETURNS integer
LANGUAGE plpgsql
SET enable_hashjoin = on
AS $$
BEGIN
    WITH wanted AS MATERIALIZED (
        SELECT p.i, j.id, j.payload, j.lock_key, j.flow, j.priority, j.name,
               greatest(dues[p.k], now() + interval '1 microsecond') AS due_at
          FROM unnest(picks) WITH ORDINALITY p(k, i) JOIN penstock.cron_job j ON j.id = jobs[p.k]
    ), pushed AS MATERIALIZED (
        SELECT penstock.push_many(queue, array_agg(w.payload ORDER BY w.i), array_agg(w.lock_key ORDER BY w.i),
                   array_agg(w.flow ORDER BY w.i), array_agg(w.priority ORDER BY w.i), array_agg(w.due_at ORDER BY w.i),
                   names => array_agg(w.name ORDER BY w.i)) AS answer
          FROM wanted w
    )
    UPDATE penstock.cron_job j
       SET entry_id = (p.answer).ids[w.i], fired_at = NULL, following_at = NULL, problem = NULL,
           nominal_at = nominals[picks[w.i]], handled_at = handled[picks[w.i]],
           due_at = CASE WHEN j.run_now_at IS NULL THEN dues[picks[w.i]] ELSE '-infinity' END
      FROM wanted w CROSS JOIN pushed p
     WHERE j.id = w.id;
    IF EXISTS (SELECT FROM penstock.queue q
               WHERE q.name = push_cron_entries.queue
                 AND (q.start_within IS NOT NULL OR q.finish_within IS NOT NULL)) THEN
        UPDATE penstock.entry e SET start_by = NULL, finish_by = NULL
          FROM unnest(picks) p(k) JOIN penstock.cron_job j ON j.id = jobs[p.k]
         WHERE e.queue_id = j.queue_id AND e.id = j.entry_id;
    END IF;
    RETURN cardinality(picks);
END $$;

-- cancel_cron_runs requests the cancel of up to `most` runs whose next nominal time has fallen due, and returns
-- how many jobs it took on. A run that another session keeps from being cancelled is left for a second later, and does
-- not keep the others from theirs: after the first that made it wait, it goes on with the next call.
-- Locks: the rows of cron_job (FOR UPDATE SKIP LOCKED), then for each those of cancel_one, for which it waits at most
-- 100 ms.
-- Callers: pkg/cron.
CREATE OR REPLACE FUNCTION penstock.cancel_cron_runs(at timestamptz, most integer) RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '100ms' AS $$
DECLARE
    j      record;
    busy   boolean;
    waited boolean := false;
    taken  integer := 0;
BEGIN
    FOR j IN SELECT x.id, x.queue_id, x.entry_id FROM penstock.cron_job x
              WHERE x.following_at <= at
                AND (x.paused_at IS NULL OR NOT penstock.paused_until(x.paused_until, at) OR x.run_now_at IS NOT NULL)
              ORDER BY x.following_at LIMIT most
                FOR UPDATE SKIP LOCKED
    LOOP
        BEGIN
            busy := coalesce(penstock.cancel_one(j.queue_id, j.entry_id, 'the next run of its cron job is due', 'cron') = 'busy', false);
        EXCEPTION WHEN lock_not_available THEN
            busy := true;
            waited := true;
        END;
        UPDATE penstock.cron_job SET following_at = CASE WHEN busy THEN at + interval '1 second' END WHERE id = j.id;
        taken := taken + 1;
        EXIT WHEN waited;
    END LOOP;
    RETURN taken;
END $$;

-- fire_cron_jobs turns the waiting entries of jobs pending and returns the number of firings. Their deadlines are those
-- of their queue from now on, whichever nominal time they are for: the catch-up policy has judged how late it is. A
-- nominal time that was fired before is recorded as handled and fires nothing; an entry that was
-- cancelled takes its nominal time with it. Only jobs whose waiting entry no other session has
-- locked are fired; the others wait for the next call.
-- Locks: queue by queue the waiting entries (FOR UPDATE SKIP LOCKED), then new rows of cron_firing
-- and ready. The engine has the rows of the jobs, before these.
-- Callers: pkg/cron.
CREATE OR REPLACE FUNCTION penstock.fire_cron_jobs(jobs bigint[], nominals timestamptz[], handled timestamptz[],
                                        catching timestamptz[], following timestamptz[], at timestamptz) RETURNS integer
LANGUAGE plpgsql
SET enable_hashjoin = on -- thousands meet thousands here; our sessions have it off
AS $$
DECLARE
    q     record;
    free  bigint[]; -- places in the arrays of jobs whose waiting entry is ours
    n     integer;
    fired integer := 0;
BEGIN
    FOR q IN SELECT x.id, 'entry_' || x.name AS entries, x.start_within, x.finish_within FROM penstock.queue x
              WHERE x.id = ANY (ARRAY(SELECT DISTINCT j.queue_id FROM penstock.cron_job j WHERE j.id = ANY (jobs)))
    LOOP
        -- In a statement before the one that writes: it may lock a version of an entry that its snapshot does not see.
        -- OFFSET 0: each job is looked up, even if the statistics of a table that was just filled are wrong.
        EXECUTE format($q$
            SELECT array_agg(f.i)
              FROM unnest($2) WITH ORDINALITY f(job, i)
             CROSS JOIN LATERAL (
                   SELECT x.entry_id FROM penstock.cron_job x WHERE x.id = f.job AND x.queue_id = $1 OFFSET 0) j
             CROSS JOIN LATERAL (
                   SELECT FROM penstock.%1$I x
                    WHERE x.queue_id = $1 AND x.id = j.entry_id FOR UPDATE SKIP LOCKED) e$q$, q.entries)
        INTO free USING q.id, jobs;
        EXECUTE format($q$
            WITH wish AS MATERIALIZED (
                SELECT j.id, j.entry_id, j.manual, e.row, f.nominal, f.handled, f.catching, f.following
                  FROM unnest($2, $3, $4, $5, $6) WITH ORDINALITY f(job, nominal, handled, catching, following, i)
                 CROSS JOIN LATERAL (
                       SELECT x.id, x.entry_id, x.run_now_at IS NOT NULL AS manual FROM penstock.cron_job x
                        WHERE x.id = f.job AND x.queue_id = $1 OFFSET 0) j
                 CROSS JOIN LATERAL (
                       SELECT x.ctid AS row FROM penstock.%1$I x WHERE x.queue_id = $1 AND x.id = j.entry_id OFFSET 0) e
                 WHERE f.i = ANY ($10)
            ), firing AS (
                INSERT INTO penstock.cron_firing (job_id, nominal_at, fired_at, entry_id, manual)
                SELECT w.id, w.nominal, $7, w.entry_id, w.manual FROM wish w
                ON CONFLICT DO NOTHING
                RETURNING job_id, entry_id, nominal_at
            ), turned AS (
                UPDATE penstock.%1$I e
                   SET status = 'pending', due_at = $7, start_by = $7 + $8, finish_by = $7 + $9,
                       pos = nextval('penstock.entry_id_seq'),
                       payload = CASE WHEN jsonb_typeof(e.payload) = 'object'
                                      THEN jsonb_build_object('nominal_at', (SELECT jsonb_object_agg(entry_id, nominal_at) FROM firing) -> e.id::text)
                                           || e.payload
                                      ELSE e.payload END
                 WHERE e.queue_id = $1 AND e.ctid = ANY (ARRAY(SELECT row FROM wish))
                   AND (e.id IN (SELECT entry_id FROM firing)) IS TRUE AND (e.status = 'initial') IS TRUE
                RETURNING e.id, e.priority, e.flow, e.lock_key, e.pos
            ), solo AS (
                INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
                SELECT $1, priority, flow, pos, id FROM turned WHERE lock_key IS NULL AND priority >= 0
            ), grouped AS (
                INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
                SELECT $1, priority, flow, min(pos), lock_key FROM turned WHERE lock_key IS NOT NULL AND priority >= 0
                 GROUP BY priority, flow, lock_key
            )
            UPDATE penstock.cron_job j
               SET fired_at = $7, nominal_at = w.nominal, due_at = $7, handled_at = w.handled, run_now_at = NULL,
                   catching_up_to = w.catching, following_at = w.following
              FROM firing f JOIN wish w ON w.id = f.job_id
             WHERE j.id = f.job_id$q$, q.entries)
        USING q.id, jobs, nominals, handled, catching, following, at, q.start_within, q.finish_within, free;
        GET DIAGNOSTICS n = ROW_COUNT;
        fired := fired + n;
    END LOOP;
    IF fired < cardinality(jobs) THEN
        UPDATE penstock.cron_job j SET handled_at = greatest(j.handled_at, f.nominal_at), run_now_at = NULL, due_at = at
          FROM unnest(jobs, nominals) w(job, nominal)
          JOIN penstock.cron_firing f ON f.job_id = w.job AND f.nominal_at = w.nominal
         WHERE j.id = w.job AND j.fired_at IS NULL;
        PERFORM penstock.drop_missing_cron_entries(jobs);
    END IF;
    RETURN fired;
END $$;

-- drop_missing_cron_entries records that waiting entries of jobs are gone, because they were
-- cancelled, and returns how many. The nominal time goes with its entry; a run that was requested
-- with run_cron_job_now is still owed.
-- Locks: the rows of the jobs, which the engine has.
-- Callers: fire_cron_jobs, move_cron_entries; pkg/cron.
CREATE OR REPLACE FUNCTION penstock.drop_missing_cron_entries(jobs bigint[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    n integer;
BEGIN
    UPDATE penstock.cron_job j
       SET entry_id = NULL, check_at = '-infinity', handled_at = greatest(j.handled_at, j.nominal_at)
     WHERE j.id = ANY (jobs) AND j.entry_id IS NOT NULL AND j.fired_at IS NULL
       AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = j.queue_id AND e.id = j.entry_id);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- move_cron_entries gives waiting entries another nominal time, and returns how many jobs it moved: the time they had
-- was dropped, or its jitter makes it later. Null: the schedule has no more times, and the entry ends. A job whose
-- entry another transaction keeps is left as it is, for the next call. Waiting entries that an earlier version made
-- have deadlines: they lose them.
-- Locks: the waiting entries (FOR UPDATE SKIP LOCKED), then those of withdraw_cron_entry. The engine has the rows of
-- the jobs, before these.
-- Callers: pkg/cron.
CREATE OR REPLACE FUNCTION penstock.move_cron_entries(jobs bigint[], nominals timestamptz[], dues timestamptz[],
                                                      handled timestamptz[])
RETURNS integer LANGUAGE plpgsql
SET enable_hashjoin = on
AS $$
DECLARE
    free  bigint[];
    over  record; -- a job whose schedule has no more times
    moved integer;
BEGIN
    PERFORM penstock.drop_missing_cron_entries(jobs);
    free := ARRAY(SELECT j.id FROM penstock.cron_job j
                   CROSS JOIN LATERAL (SELECT FROM penstock.entry x WHERE x.queue_id = j.queue_id AND x.id = j.entry_id
                                       FOR UPDATE SKIP LOCKED) e
                   WHERE j.id = ANY (jobs) AND j.entry_id IS NOT NULL);
    UPDATE penstock.entry e SET due_at = m.due, start_by = NULL, finish_by = NULL
      FROM unnest(jobs, dues) m(job, due) JOIN penstock.cron_job j ON j.id = m.job
     WHERE e.queue_id = j.queue_id AND e.id = j.entry_id AND e.status = 'initial' AND m.due IS NOT NULL
       AND j.id = ANY (free);
    UPDATE penstock.cron_job j SET nominal_at = m.nominal, due_at = m.due, handled_at = m.handled
      FROM unnest(jobs, nominals, dues, handled) m(job, nominal, due, handled)
     WHERE j.id = m.job AND m.nominal IS NOT NULL AND j.id = ANY (free);
    GET DIAGNOSTICS moved = ROW_COUNT;
    FOR over IN SELECT j.id, x.handled FROM unnest(jobs, nominals, handled) x(job, nominal, handled)
               JOIN penstock.cron_job j ON j.id = x.job
              WHERE x.nominal IS NULL AND (j.entry_id IS NULL OR j.id = ANY (free))
    LOOP
        BEGIN
            PERFORM penstock.withdraw_cron_entry(over.id, 'the schedule has ended');
            UPDATE penstock.cron_job SET handled_at = over.handled, check_at = 'infinity' WHERE id = over.id;
            moved := moved + 1;
        EXCEPTION WHEN SQLSTATE 'PS006' THEN
            CONTINUE; -- another transaction keeps the lock key of the entry
        END;
    END LOOP;
    RETURN moved;
END $$;

-- cron_run returns the entry of a job that was fired and has not ended, null if there is none: a job has one run at a
-- time. It reads the table of the job's queue alone: a plan over all of them locks each.
-- Callers: run_cron_job_now, retry_conflict, resume_cron_run.
CREATE OR REPLACE FUNCTION penstock.cron_run(j penstock.cron_job) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    run bigint;
BEGIN
    IF j.fired_at IS NOT NULL AND j.entry_id IS NOT NULL THEN
        EXECUTE format('SELECT id FROM penstock.%I WHERE queue_id = $1 AND id = $2',
                       'entry_' || (SELECT q.name FROM penstock.queue q WHERE q.id = j.queue_id))
           INTO run USING j.queue_id, j.entry_id;
    END IF;
    RETURN run;
END $$;

-- retry_conflict returns why a failure cannot be retried now: it is a run of a cron job of which another run is in
-- progress, and no lock key keeps the two apart. Null: it can. Entries of a job have its name.
-- Callers: retry_one, unblock_one, resume_cron_run.
CREATE OR REPLACE FUNCTION penstock.retry_conflict(queue integer, wanted bigint) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    f    penstock.failure;
    j    penstock.cron_job;
    run  bigint;
    same boolean; -- lock key
BEGIN
    SELECT * INTO f FROM penstock.failure x WHERE x.queue_id = queue AND x.entry_id = wanted;
    SELECT * INTO j FROM penstock.cron_job x WHERE x.queue_id = queue AND x.name = f.name;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    run := penstock.cron_run(j);
    IF run IS NOT NULL THEN
        EXECUTE format('SELECT lock_key = $3 FROM penstock.%I WHERE queue_id = $1 AND id = $2',
                       'entry_' || (SELECT q.name FROM penstock.queue q WHERE q.id = queue))
           INTO same USING queue, run, f.lock_key;
    END IF;
    IF run IS NOT NULL AND same IS NOT TRUE THEN
        RETURN format('cron job "%s" runs already, as entry %s', j.name, run);
    END IF;
    RETURN NULL;
END $$;

-- retry_one is return_failure for an operation. Null: the failure is a run of a cron job that runs already, or whose
-- row or waiting entry another transaction has locked; try again.
-- Locks: the row of failure, then that of the cron job (FOR UPDATE SKIP LOCKED both), then those of return_failure.
-- Callers: apply_operation.
-- SQLSTATE: PS006 not allowed in this state, of a queue of another kind than cron.
CREATE OR REPLACE FUNCTION penstock.retry_one(queue integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    job bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.queue q WHERE q.id = queue AND q.kind = 'cron') THEN
        RETURN penstock.return_failure(queue, wanted);
    END IF;
    PERFORM FROM penstock.failure f WHERE f.queue_id = queue AND f.entry_id = wanted FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM penstock.failure f WHERE f.queue_id = queue AND f.entry_id = wanted;
        RETURN CASE WHEN NOT FOUND THEN false END;
    END IF;
    SELECT j.id INTO job FROM penstock.cron_job j JOIN penstock.failure f ON f.queue_id = j.queue_id AND f.name = j.name
     WHERE f.queue_id = queue AND f.entry_id = wanted;
    PERFORM FROM penstock.cron_job j WHERE j.id = job FOR UPDATE SKIP LOCKED;
    IF job IS NOT NULL AND NOT FOUND OR penstock.retry_conflict(queue, wanted) IS NOT NULL THEN
        RETURN NULL;
    END IF;
    BEGIN
        RETURN penstock.return_failure(queue, wanted);
    EXCEPTION WHEN SQLSTATE 'PS006' THEN
        RETURN NULL;
    END;
END $$;

-- resume_cron_run makes the entry of a failure, which is about to be retried, the run of its job again, so that the
-- job's overlap policy counts it: the entry that waits for the next nominal time ends, and comes again after the run,
-- as do all times that have fallen due and wait. Under cancel_running the run is cancelled when the next time falls
-- due: the engine, which can read the schedule, writes that time in place of infinity.
-- Locks: the row of the job (FOR UPDATE), then those of withdraw_cron_entry. The caller has the row of failure.
-- Callers: return_failure_at.
-- SQLSTATE: PS006 another run of the job is in progress, or its entry is locked by another transaction; try again.
CREATE OR REPLACE FUNCTION penstock.resume_cron_run(queue integer, job text, failed bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j        penstock.cron_job;
    conflict text;
BEGIN
    SELECT * INTO j FROM penstock.cron_job x WHERE x.queue_id = queue AND x.name = job FOR UPDATE;
    IF NOT FOUND OR j.entry_id = failed THEN -- the engine has not seen the end
        RETURN;
    END IF;
    conflict := penstock.retry_conflict(queue, failed);
    IF conflict IS NOT NULL THEN
        RAISE EXCEPTION '%', conflict USING ERRCODE = 'PS006', HINT = 'Retry the failure when that run has ended.';
    ELSIF penstock.cron_run(j) IS NOT NULL THEN
        RETURN; -- the two have one lock key
    END IF;
    PERFORM penstock.withdraw_cron_entry(j.id, 'a failed run of the cron job is retried');
    UPDATE penstock.cron_job
       SET entry_id = failed, fired_at = clock_timestamp(), nominal_at = NULL, due_at = NULL,
           catching_up_to = clock_timestamp(),
           following_at = CASE WHEN overlap <> 'cancel_running' THEN NULL::timestamptz
                               WHEN run_now_at IS NOT NULL THEN '-infinity'
                               WHEN j.due_at > clock_timestamp() THEN j.due_at ELSE 'infinity' END
     WHERE id = j.id;
END $$;

-- end_cron_runs finds up to `most` jobs whose fired entry is gone, with any outcome, and
-- returns how many: they get their next entries then. Under their locks it looks again: the failure of such an entry
-- may have been retried.
-- Locks: rows of cron_job in order of id (FOR UPDATE SKIP LOCKED).
-- Callers: pkg/cron.
CREATE OR REPLACE FUNCTION penstock.end_cron_runs(at timestamptz, most integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    q     record;
    gone  bigint[];
    ended integer := 0;
BEGIN
    FOR q IN SELECT x.id, 'entry_' || x.name AS entries FROM penstock.queue x
              WHERE x.kind = 'cron' AND EXISTS (SELECT FROM penstock.cron_job j
                                                WHERE j.queue_id = x.id AND j.entry_id IS NOT NULL
                                                  AND j.fired_at IS NOT NULL)
    LOOP
        EXECUTE format($q$
            SELECT ARRAY(
                SELECT j.id FROM penstock.cron_job j
                 WHERE j.queue_id = $1 AND j.entry_id IS NOT NULL AND j.fired_at IS NOT NULL
                   AND NOT EXISTS (SELECT FROM penstock.%I e WHERE e.queue_id = $1 AND e.id = j.entry_id)
                 ORDER BY j.id LIMIT $2 FOR UPDATE OF j SKIP LOCKED)$q$, q.entries)
        INTO gone USING q.id, most - ended;
        CONTINUE WHEN cardinality(gone) = 0;
        EXECUTE format($q$
            UPDATE penstock.cron_job j
               SET entry_id = NULL, following_at = NULL, check_at = '-infinity',
                   ended_at = least($2, coalesce(
                       (SELECT r.finished_at FROM penstock.result r
                         WHERE r.queue_id = $1 AND r.entry_id = j.entry_id LIMIT 1),
                       (SELECT f.failed_at FROM penstock.failure f
                         WHERE f.queue_id = $1 AND f.entry_id = j.entry_id LIMIT 1), $2))
             WHERE j.id = ANY ($3)
               AND NOT EXISTS (SELECT FROM penstock.%I e WHERE e.queue_id = $1 AND e.id = j.entry_id)$q$, q.entries)
        USING q.id, at, gone;
        ended := ended + cardinality(gone);
        EXIT WHEN ended >= most;
    END LOOP;
    RETURN ended;
END $$;

-- withdraw_cron_entry ends the waiting entry of a job, if it has one.
-- Locks: those of take_entry. The caller has the row of the job.
-- Callers: move_cron_entries, alter_cron_job, drop_cron_job, resume_cron_run.
-- SQLSTATE: PS006 the entry is locked by another transaction; try again.
CREATE OR REPLACE FUNCTION penstock.withdraw_cron_entry(job bigint, why text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j penstock.cron_job;
    e penstock.entry;
BEGIN
    SELECT * INTO j FROM penstock.cron_job WHERE id = job;
    IF j.entry_id IS NULL OR j.fired_at IS NOT NULL THEN
        RETURN;
    END IF;
    e := penstock.take_entry(j.queue_id, j.entry_id);
    IF e.id IS NOT NULL THEN
        PERFORM penstock.end_entry(e, 'cancelled', why);
    ELSIF EXISTS (SELECT FROM penstock.entry x WHERE x.queue_id = j.queue_id AND x.id = j.entry_id) THEN
        RAISE EXCEPTION 'entry % of cron job "%" is held by another transaction', j.entry_id, j.name
            USING ERRCODE = 'PS006', HINT = 'Try again.';
    END IF;
    UPDATE penstock.cron_job SET entry_id = NULL WHERE id = job;
END $$;

-- Operators and programs. pkg/cron checks a spec before it calls these; one that comes from SQL is checked by the
-- engine, which reports the error in cron_job.problem. -----------------------------------------------------------

-- cron_job_row locks the job of that name and returns it.
-- Locks: the row of the job (FOR UPDATE); it waits for a transaction of the engine.
-- Callers: alter_cron_job, pause_cron_job, resume_cron_job, run_cron_job_now, drop_cron_job.
-- SQLSTATE: PS010 no such cron job.
CREATE OR REPLACE FUNCTION penstock.cron_job_row(job text) RETURNS penstock.cron_job
LANGUAGE plpgsql AS $$
DECLARE
    j penstock.cron_job;
BEGIN
    SELECT * INTO j FROM penstock.cron_job c WHERE c.name = job FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'cron job "%" does not exist', job USING ERRCODE = 'PS010',
            HINT = 'The list of cron jobs has their names (cron_status).';
    END IF;
    RETURN j;
END $$;

-- create_cron_job makes a scheduled job of a queue; options are the columns of cron_job that
-- alter_cron_job takes.
-- Locks: the row of the job, which is new.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS001 no such queue, PS002 the queue's kind, the spec or an option is not valid, PS006
-- the job exists.
CREATE OR REPLACE FUNCTION penstock.create_cron_job(
    job     text,
    queue   text,
    spec    text,
    payload jsonb DEFAULT '{}',
    options jsonb DEFAULT '{}',
    reason  text  DEFAULT '',
    actor   text  DEFAULT current_user::text
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    q    penstock.queue := penstock.queue_row(queue);
    made bigint;
BEGIN
    IF q.kind <> 'cron' THEN
        RAISE EXCEPTION 'queue "%" is of kind %, not cron', q.name, q.kind
            USING ERRCODE = 'PS002', HINT = 'Create a queue of kind cron (create_queue).';
    END IF;
    INSERT INTO penstock.cron_job (queue_id, name, spec, payload)
    VALUES (q.id, job, create_cron_job.spec, create_cron_job.payload) RETURNING id INTO made;
    PERFORM penstock.alter_cron_job(job, options, reason, actor);
    RETURN made;
EXCEPTION
    WHEN unique_violation THEN
        RAISE EXCEPTION 'cron job "%" exists already', job USING ERRCODE = 'PS006',
            HINT = 'Alter that job (alter_cron_job), or give the new one another name.';
    WHEN check_violation OR not_null_violation THEN
        RAISE EXCEPTION 'cron job "%" is not valid: %', job, penstock.in_words(SQLERRM) USING ERRCODE = 'PS002';
END $$;

-- alter_cron_job changes settings: {"spec": "0 3 * * *", "zone": "Europe/Berlin"}. A running entry
-- goes on; the waiting entry is replaced. A new schedule does not fire for times that have passed. A spec that is set,
-- also to the one that it was, ends the silence of a job that was fired by a clock that was ahead: times to come that
-- count as handled do so no more. Those that have fired do not fire again. A time to come whose entry was cancelled is
-- handled as well, and remains so.
-- Locks: the row of the job (FOR UPDATE), then those of take_entry for its waiting entry.
-- Callers: create_cron_job; pkg/operator; psql.
-- SQLSTATE: PS002 invalid argument, PS006 not allowed in this state, PS010 no such cron job.
CREATE OR REPLACE FUNCTION penstock.alter_cron_job(
    job     text,
    options jsonb,
    reason  text  DEFAULT '',
    actor   text  DEFAULT current_user::text
) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    j       penstock.cron_job;
    was     penstock.cron_job;
    unknown text;
    flaw    text;
BEGIN
    IF jsonb_typeof(options) <> 'object' THEN
        RAISE EXCEPTION 'options must be an object' USING ERRCODE = 'PS002';
    END IF;
    PERFORM penstock.need_read_committed();
    SELECT * INTO was FROM penstock.cron_job_row(job);
    SELECT k INTO unknown FROM jsonb_object_keys(options) k
     WHERE k NOT IN ('spec', 'zone', 'jitter', 'starts_at', 'ends_at', 'catch_up', 'catch_up_max', 'grace', 'gap',
                     'fold', 'overlap',
                     'payload', 'lock_key', 'flow', 'priority');
    IF FOUND THEN
        RAISE EXCEPTION 'cron job option "%" does not exist', unknown
            USING ERRCODE = 'PS002',
                  HINT = 'A cron job shows its settings; in SQL they are columns of penstock.cron_job.';
    END IF;
    j := jsonb_populate_record(was, options);
    flaw := CASE WHEN options ? 'grace' AND j.grace > interval '10 years'
                 THEN 'grace is not above 0 and at most 10 years'
                 WHEN options ? 'starts_at' AND (j.starts_at < '0001-01-01 UTC' OR j.starts_at >= '9999-12-31 UTC')
                   OR options ? 'ends_at' AND (j.ends_at < '0001-01-01 UTC' OR j.ends_at >= '9999-12-31 UTC')
                 THEN 'starts_at and ends_at must be from year 1 on and before 9999-12-31' END;
    IF flaw IS NOT NULL THEN
        RAISE EXCEPTION 'option of cron job "%" is not valid: %', job, flaw USING ERRCODE = 'PS002';
    END IF;
    IF j.lock_key IS NOT NULL AND EXISTS (SELECT FROM penstock.queue q
                                          WHERE q.id = j.queue_id AND q.max_concurrent_per_name IS NOT NULL) THEN
        RAISE EXCEPTION 'lock_key of cron job "%" does not go with max_concurrent_per_name of its queue', job
            USING ERRCODE = 'PS002', HINT = 'Leave lock_key out: the entries of a job have its name, by which the queue bounds them.';
    END IF;
    UPDATE penstock.cron_job SET
        spec = j.spec, zone = j.zone, jitter = j.jitter, starts_at = j.starts_at, ends_at = j.ends_at,
        catch_up = j.catch_up,
        catch_up_max = j.catch_up_max, grace = j.grace, gap = j.gap, fold = j.fold, overlap = j.overlap,
        payload = j.payload,
        lock_key = j.lock_key, flow = j.flow, priority = j.priority, problem = NULL, check_at = '-infinity',
        handled_at = CASE WHEN (j.spec, j.zone, j.starts_at, j.ends_at, j.gap, j.fold)
                               IS DISTINCT FROM (was.spec, was.zone, was.starts_at, was.ends_at, was.gap, was.fold)
                          THEN greatest(handled_at, clock_timestamp()) ELSE handled_at END
     WHERE id = j.id;
    IF options ? 'spec' THEN
        UPDATE penstock.cron_job c
           SET handled_at = least(c.handled_at, t.now), ended_at = nullif(least(c.ended_at, t.now), t.now),
               catching_up_to = nullif(least(c.catching_up_to, t.now), t.now)
          FROM (SELECT clock_timestamp() AS now) t
         WHERE c.id = j.id AND greatest(c.handled_at, c.ended_at, c.catching_up_to) > t.now
           AND (greatest(c.fired_at, c.ended_at, c.catching_up_to) > t.now
                OR EXISTS (SELECT FROM penstock.cron_firing f WHERE f.job_id = c.id AND f.nominal_at = c.handled_at));
    END IF;
    PERFORM penstock.withdraw_cron_entry(j.id, 'the cron job was altered');
    PERFORM penstock.audit_log(alter_cron_job.actor, 'alter_cron_job', 'cron job ' || job,
                               alter_cron_job.reason, options);
EXCEPTION
    WHEN check_violation OR invalid_text_representation OR numeric_value_out_of_range OR invalid_datetime_format
      OR datetime_field_overflow OR interval_field_overflow OR not_null_violation THEN
        RAISE EXCEPTION 'option of cron job "%" is not valid: %', job,
            penstock.in_words(SQLERRM) USING ERRCODE = 'PS002';
END $$;

-- pause_cron_job keeps a job from firing; a running entry goes on. It replaces a pause in force, and returns that
-- (replaced_pause). When the pause ends, the catch-up policy decides about the nominal times in it. The waiting entry
-- has no due time meanwhile.
-- Locks: the row of the job (FOR UPDATE), then its waiting entry.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS002 invalid argument, PS010 no such cron job.
CREATE OR REPLACE FUNCTION penstock.pause_cron_job(job text, reason text DEFAULT '', actor text DEFAULT NULL,
                                        until timestamptz DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    j        penstock.cron_job;
    replaced jsonb;
BEGIN
    PERFORM penstock.check_until(until);
    SELECT * INTO j FROM penstock.cron_job_row(job);
    replaced := penstock.replaced_pause(j.paused_at, j.paused_by, j.paused_reason, j.paused_until);
    UPDATE penstock.cron_job
       SET paused_at = clock_timestamp(), paused_by = penstock.actor_name(actor), paused_reason = coalesce(reason, ''),
           paused_until = until
     WHERE id = j.id;
    UPDATE penstock.entry e SET due_at = NULL WHERE j.fired_at IS NULL AND e.queue_id = j.queue_id AND e.id = j.entry_id
        AND e.status = 'initial';
    PERFORM penstock.audit_pause(actor, 'pause_cron_job', 'cron job ' || job, reason, until, replaced);
    RETURN replaced;
END $$;

-- resume_cron_job ends the pause of a job.
-- Locks: the row of the job (FOR UPDATE), then its waiting entry.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS010 no such cron job.
CREATE OR REPLACE FUNCTION penstock.resume_cron_job(
    job    text,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j penstock.cron_job;
BEGIN
    SELECT * INTO j FROM penstock.cron_job_row(job);
    UPDATE penstock.cron_job SET paused_at = NULL, paused_by = NULL, paused_reason = NULL, paused_until = NULL
        WHERE id = j.id;
    UPDATE penstock.entry e SET due_at = j.due_at
     WHERE j.fired_at IS NULL AND e.queue_id = j.queue_id AND e.id = j.entry_id AND e.status = 'initial'
       AND isfinite(j.due_at);
    PERFORM penstock.audit_log(actor, 'resume_cron_job', 'cron job ' || job, reason);
END $$;

-- run_cron_job_now requests one run beside the schedule, even of a job that is paused. While a run
-- is in progress the overlap policy decides: skip refuses, queue runs it afterwards, cancel_running
-- cancels the run for it. For nominal times that fall due while it goes on, the policy decides as in any
-- run; those that have fallen due before are left to the catch-up policy.
-- Locks: the row of the job (FOR UPDATE).
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS010 no such cron job, PS006 the job cannot run, or runs already, or the transaction
-- is not read committed.
CREATE OR REPLACE FUNCTION penstock.run_cron_job_now(
    job    text,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j penstock.cron_job;
BEGIN
    PERFORM penstock.need_read_committed();
    SELECT * INTO j FROM penstock.cron_job_row(job);
    IF j.problem IS NOT NULL THEN
        RAISE EXCEPTION 'cron job "%" cannot run: %', job, j.problem USING ERRCODE = 'PS006',
            HINT = 'Alter the job (alter_cron_job).';
    ELSIF j.overlap = 'skip' AND penstock.cron_run(j) IS NOT NULL THEN
        RAISE EXCEPTION 'cron job "%" runs already, as entry %', job, j.entry_id
            USING ERRCODE = 'PS006', HINT = 'Wait until it has ended, or alter its overlap to queue or cancel_running.';
    END IF;
    UPDATE penstock.cron_job
       SET run_now_at = clock_timestamp(), check_at = '-infinity',
           due_at = CASE WHEN fired_at IS NULL THEN '-infinity' ELSE due_at END,
           following_at = CASE WHEN fired_at IS NOT NULL AND entry_id IS NOT NULL
               AND overlap = 'cancel_running' THEN '-infinity' ELSE following_at END
     WHERE id = j.id;
    PERFORM penstock.audit_log(actor, 'run_cron_job_now', 'cron job ' || job, reason);
END $$;

-- drop_cron_job removes a job; a running entry goes on.
-- Locks: the row of the job (FOR UPDATE), then those of take_entry for its waiting entry.
-- Callers: pkg/operator; psql.
-- SQLSTATE: PS006 not allowed in this state, PS010 no such cron job.
CREATE OR REPLACE FUNCTION penstock.drop_cron_job(
    job    text,
    reason text DEFAULT '',
    actor  text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    j penstock.cron_job;
BEGIN
    PERFORM penstock.need_read_committed();
    SELECT * INTO j FROM penstock.cron_job_row(job);
    PERFORM penstock.withdraw_cron_entry(j.id, 'the cron job was dropped');
    DELETE FROM penstock.cron_job WHERE id = j.id;
    PERFORM penstock.audit_log(actor, 'drop_cron_job', 'cron job ' || job, reason);
END $$;

-- drop_firings deletes the firings of jobs that are deleted. There is no foreign key for that: a
-- fifth of the time to fire a hundred thousand jobs went into looking up, for each firing, the job
-- whose row the same transaction has locked.
-- Locks: the rows of cron_firing.
-- Callers: trigger drop_firings.
CREATE OR REPLACE FUNCTION penstock.drop_firings() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM penstock.cron_firing WHERE job_id = ANY (ARRAY(SELECT id FROM gone));
    RETURN NULL;
END $$;

-- degraded_cron_jobs lists up to 100 jobs without a next run: their schedule cannot be read, or the push of their entry
-- is refused. Nobody waits for a job that is paused.
-- Callers: degradations.
CREATE OR REPLACE FUNCTION penstock.degraded_cron_jobs()
RETURNS TABLE (code text, object text, critical boolean, detail text)
LANGUAGE sql STABLE AS $$
    SELECT 'cron_broken', 'cron job ' || j.name, false,
           format('cron job %s of queue %s has no next run: %s', j.name, q.name,
                  left(replace(j.problem, chr(10), '; '), 300))
      FROM (SELECT x.name, x.queue_id, x.problem FROM penstock.cron_job x
             WHERE x.entry_id IS NULL AND x.problem IS NOT NULL
               AND (x.paused_at IS NULL OR NOT penstock.paused_until(x.paused_until))
             ORDER BY x.check_at DESC, x.id LIMIT 100) j
      JOIN penstock.queue q ON q.id = j.queue_id
$$;
