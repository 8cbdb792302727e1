-- What functions of many files check before anything else, and the list of the SQLSTATEs that functions raise.

-- queue_row returns the row of a queue. SQLSTATEs of Penstock are of class PS, the same in every
-- function:
--   PS001 no such queue           PS002 invalid argument      PS003 payload too large
--   PS004 idempotency conflict    PS005 queue is full         PS006 not allowed in this state
--   PS007 no such entry           PS008 no such node, operation, model or instance
--   PS010 no such cron job        PS011 entries push one another without end
--   PS012 no such batch           PS013 no usable instance     40001 a concurrent change: retry the statement
-- Callers: every function that takes the name of a queue; pkg/invalidation.
-- SQLSTATE: PS001 no such queue.
CREATE OR REPLACE FUNCTION penstock.queue_row(queue_name text) RETURNS penstock.queue
LANGUAGE plpgsql STABLE AS $$
DECLARE
    q penstock.queue;
BEGIN
    SELECT * INTO q FROM penstock.queue WHERE name = queue_name;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'queue "%" does not exist', queue_name
            USING ERRCODE = 'PS001', HINT = 'Create the queue first (create_queue).';
    END IF;
    RETURN q;
END $$;

-- need_read_committed refuses a transaction of another isolation level. Functions with several
-- steps read again in a statement of their own after each lock, and so need a new snapshot for each
-- statement. They wait for no claim, pusher or node: rows that another session has locked are
-- skipped or requested.
-- Locks: none.
-- Callers: pause_batch, cancel_batch, compactable, switch_entry, alter_cron_job, run_cron_job_now,
-- drop_cron_job, cancel_entry, expire_entries, lane_headroom, step_operation; pkg/invalidation.
-- SQLSTATE: PS006 the transaction is not read committed.
CREATE OR REPLACE FUNCTION penstock.need_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'this function needs read committed, and the transaction is %',
            current_setting('transaction_isolation')
            USING ERRCODE = 'PS006', HINT = 'Call it in a transaction of its own.';
    END IF;
END $$;
