-- +goose Up

-- Failed steps of bulk operations, for operators: the elected leader tries again without end.
ALTER TABLE penstock.operation
    ADD COLUMN failed_steps integer NOT NULL DEFAULT 0,
    ADD COLUMN failed_at timestamptz,
    ADD COLUMN error text;
COMMENT ON COLUMN penstock.operation.failed_steps IS 'steps that failed since the last one that did not';
COMMENT ON COLUMN penstock.operation.error IS 'of the last step that failed, at failed_at';
