-- +goose Up

ALTER TABLE penstock.deployment_state ADD COLUMN removing_since jsonb NOT NULL DEFAULT '{}';
COMMENT ON COLUMN penstock.deployment_state.removing_since IS 'since when instances are named for removal, by name: one that is there for long is reported, and counts as room for others no more';
