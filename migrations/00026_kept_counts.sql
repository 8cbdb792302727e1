-- +goose Up

-- A count of matches ends after the first rows of a queue.
ALTER TABLE penstock.operation ADD COLUMN partial boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN penstock.operation.partial IS
    'matched is of the first rows of the queue alone, and there were more: a lower bound';

-- Lists of batches counted the parts of each again, and those of an ended batch never change.
ALTER TABLE penstock.batch ADD COLUMN parts bigint, ADD COLUMN bad_parts bigint;
COMMENT ON COLUMN penstock.batch.parts IS 'how many there are; null: some have not ended, or the batch completed under an earlier version';
COMMENT ON COLUMN penstock.batch.bad_parts IS 'of these, those that failed, expired or were cancelled';
