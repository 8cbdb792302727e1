-- +goose Up

-- The query of a batch is somebody's own; it is not for the settings of our sessions, which leave the planner no choice.
ALTER FUNCTION penstock.split_batch(bigint) SET enable_seqscan = on SET enable_hashjoin = on SET enable_mergejoin = on SET plan_cache_mode = auto;
