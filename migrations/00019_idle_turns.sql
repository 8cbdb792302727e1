-- +goose Up

-- An open batch of which no entry has ended for a while needs a turn less often.
ALTER TABLE penstock.gateway_batch ADD COLUMN idle_turns smallint NOT NULL DEFAULT 0;
COMMENT ON COLUMN penstock.gateway_batch.idle_turns IS 'turns in a row that moved nothing, at most 4; the pause before the next grows with it';
