-- +goose Up

ALTER TABLE penstock.deployment_state ADD COLUMN removing text[] COLLATE "C" NOT NULL DEFAULT '{}';
COMMENT ON COLUMN penstock.deployment_state.removing IS 'instances that an order named for removal and that are not gone yet: no later round keeps them';
COMMENT ON COLUMN penstock.deployment_state.failures IS 'starts or orders in a row that failed; 3 block the deployment until an instance that began later is ready';
COMMENT ON COLUMN penstock.deployment_state.retry_at IS 'nothing is started before; a blocked deployment starts one instance then';
