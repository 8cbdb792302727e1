-- +goose Up

ALTER TABLE penstock.deployment_state ADD COLUMN unhealthy jsonb NOT NULL DEFAULT '{}';
COMMENT ON COLUMN penstock.deployment_state.unhealthy IS 'since when instances are unhealthy, by name: one that stays so is replaced';
