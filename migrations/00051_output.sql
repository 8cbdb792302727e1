-- +goose Up

-- What runs have put out so far, for people and programs that read along. It is only added to; a run of a newer token
-- begins anew, and what older ones wrote is then of no interest any more. It goes with the entry's result.
CREATE TABLE penstock.output (
    entry_id bigint NOT NULL,
    token    bigint NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue_id integer NOT NULL,
    attempt  integer NOT NULL,
    seq      integer NOT NULL,
    data     bytea NOT NULL,
    PRIMARY KEY (queue_id, entry_id, token, seq)
);
COMMENT ON TABLE penstock.output IS 'output of runs, piece by piece; for a model that streams, whole server-sent events';
COMMENT ON COLUMN penstock.output.seq IS 'pieces of a run are numbered from 1 without gaps';

-- sweep_output removes up to some pieces of entries that are gone, once the queue keeps no result of that age; it says how many.
-- +goose StatementBegin
CREATE FUNCTION penstock.sweep_output(most integer) RETURNS bigint
LANGUAGE sql AS $$
    WITH gone AS (
        DELETE FROM penstock.output o
         WHERE o.ctid = ANY (ARRAY(
               SELECT x.ctid FROM penstock.output x
                 LEFT JOIN penstock.queue q ON q.id = x.queue_id
                WHERE (q.id IS NULL OR x.at < clock_timestamp() - greatest(q.result_retention, interval '1 minute'))
                  AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = x.queue_id AND e.id = x.entry_id)
                LIMIT most))
        RETURNING 1)
    SELECT count(*) FROM gone
$$;
-- +goose StatementEnd
