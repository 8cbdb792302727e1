-- +goose Up

-- The clock of the statement can be looked up in the index. clock_timestamp() cannot: where the newest sample is old, because
-- no leader leads, it was compared with every sample that is kept.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION penstock.last_sample(queue integer, within interval DEFAULT '30 seconds') RETURNS penstock.sample
LANGUAGE sql STABLE AS $$
    SELECT s FROM penstock.sample s WHERE s.queue_id = queue AND s.at > statement_timestamp() - within ORDER BY s.at DESC LIMIT 1
$$;
-- +goose StatementEnd
