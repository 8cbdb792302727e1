-- Reads of the dashboard that the planner, without fresh statistics, would answer by reading a whole history.

-- last_results returns the newest results of a queue, at most `most`, the largest id first. The settings keep the plan
-- at walking the index backwards up to the bound: a table that has grown since its statistics would be fetched whole,
-- and sorted.
-- Locks: none.
-- Callers: pkg/operator.
CREATE OR REPLACE FUNCTION penstock.last_results(queue_id integer, most integer)
RETURNS TABLE (entry_id bigint, created_at timestamptz, finished_at timestamptz, run_ms bigint,
               outcome penstock.outcome, meta jsonb)
LANGUAGE sql STABLE ROWS 500
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
    SELECT r.entry_id, r.created_at, r.finished_at, r.run_ms, r.outcome, r.meta
      FROM penstock.result r
     WHERE r.queue_id = $1
     ORDER BY r.entry_id DESC
     LIMIT $2
$$;
